"""DPPS: everybody has a budget of their own, and what leaves a device is clipped and noised to fit it (spec F).

As printed, the method adds noise of deviation sensitivity / epsilon to what is sent, without a clip, a delta or a
count of rounds: no epsilon follows from that. Here everything a client sends in a release is one vector, shortened to
`clip`, with Gaussian noise on all of its coordinates; the ledger charges the device before the release leaves, and
whoever has nothing left stays silent and goes on being served. `calibration = "paper"` keeps the printed noise, on
clipped releases, and the ledger says what it really costs.

What it promises (threat = local): the server, which sees each noised release, cannot tell well whether a unit's whole
data was replaced by other data. With threat = silo everybody in a silo trains apart, the silo clips what each of them
changed, adds up and noises the sum once: the server cannot tell well whether a person was in the silo at all, and the
silo itself sees everything. With threat = central whoever sees models alone cannot. The default is local, which
trusts nobody; spec F.3 would have central with secure sums for people and silo for silos, and nodes have no secure sums
yet. Not hidden: who takes part, who has stopped, the declared budgets, what is shared by
request. Rounds are chosen by validation on private data, which is not charged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Keys, Longs, ServerState, StateUpdate
from tacita.kernels.hashing import uniforms
from tacita.messages import QUANTUM, DenseArrays, Spec, Total, Upload
from tacita.methods.personal import releases
from tacita.methods.personal.releases import reduce_by_client, repeat_by_user
from tacita.methods.sharing.presets import FEDSHARE
from tacita.privacy.accounting import Event
from tacita.privacy.calibration import gaussian_delta, gaussian_epsilon
from tacita.privacy.ledger import ACCOUNT_ARRAYS, EARLIER_RUNS, Ledger
from tacita.privacy.noise import NoiseStream
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import Privacy
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.state import Role, StateSpec

NO_SCORES = (
    "part 'dpps' has no bounded mechanism for scores, which are seen each by itself and swapped, so no epsilon could "
    "be stated; use a method that sends item rows or a statistic."
)
LENGTH_SHARE = 0.1  # of the clip that the length of an update may take up when it is sent along
WEIGHT_SHARE = 0.5  # of the clip that a weight other parts give may take up
_MIN_WEIGHT_SHARE = 0.1  # of the weight there could be: what a noised sum of weights is taken for at least


class DPPSConfig(PartConfig):
    clip: float = Field(
        1.0, gt=0, description="length of all that a client sends in one release; central and silo: the tiers' average"
    )
    tiers: list[float] = Field([0.5, 1.0, 5.0], min_length=1, description="epsilons that people choose from, ascending")
    shares: list[float] = Field([1.0, 1.0, 1.0], min_length=1, description="how many choose each tier, in the lab")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta of every budget")
    releases: int = Field(50, ge=1, description="releases that a budget is to last for")
    noise: float | None = Field(
        None, gt=0, description="instead: the same noise for all, as a multiple of the sensitivity, until it is spent"
    )
    calibration: Literal["analytic", "paper"] = Field(
        "analytic", description="paper: noise sensitivity / epsilon as printed, which no budget holds; it is counted"
    )
    threat: Literal["local", "silo", "central"] = Field(
        "local",
        description="who is not trusted: the server, which sees everybody's releases; the server, which sees sums that "
        "silos have noised; or who sees its models alone. local trusts nobody and needs the most noise; "
        "central and silo need less, where whoever adds up is trusted",
    )
    unit: Literal["person", "silo"] = Field("person", description="whose whole data an epsilon is about")
    noise_on: Literal["reals", "wholes"] = Field(
        "reals",
        description="wholes: sums of whole numbers (train.aggregator = 'ideal') and whole-number noise on them, so "
        "that nothing of a sum shows in how it was rounded",
    )
    policy: Literal["declared", "activity"] = Field(
        "declared", description="activity: tiers by a noisy count of interactions, which is charged by itself"
    )
    activity_epsilon: float = Field(0.1, gt=0, description="epsilon of the noisy count, per interaction")
    activity_cuts: list[float] = Field([50.0, 150.0], description="counts at which the next tier begins")
    weights: Literal["variance", "equal"] = Field("variance", description="how clients count in a mean of noised rows")
    between: float | None = Field(
        None, ge=0, description="variance between clients that weights count on; default: estimated from noised rounds"
    )
    cap: float = Field(10.0, ge=1, description="how much more than the mean a client may count")
    shrink: float = Field(0.0, ge=0, le=1, description="strength of the shrinkage of a round's noised mean (gamma)")
    shrink_by: Literal["row", "table"] = Field("row", description="what is shrunk by itself")

    @model_validator(mode="after")
    def _check_tiers(self) -> DPPSConfig:
        if len(self.tiers) != len(self.shares) or min(self.tiers) <= 0 or list(self.tiers) != sorted(self.tiers):
            raise ValueError("tiers above 0, ascending, with a share each")
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise ValueError("shares that are not negative, one of them above 0")
        if self.policy == "activity" and len(self.activity_cuts) != len(self.tiers) - 1:
            raise ValueError("one activity cut less than tiers")
        return self


@register
class DPPS(Part, Privacy):
    """Personal budgets: clip, Gaussian noise, inverse-variance weights, shrinkage of the noised mean."""

    name = "dpps"
    Config: ClassVar[type[PartConfig]] = DPPSConfig
    config: DPPSConfig
    works_with = ("rows", "statistic")
    refused_learners: ClassVar[dict[str, str]] = {"scores": NO_SCORES}
    covers_all_releases = True
    _public: ClassVar[tuple[str, ...]] = ("dpps.noise",)

    def check(self, n_items: int) -> None:
        self._check_unit()
        self._check_noise()
        lightest = self._tier_weights(0.0).min()
        rounding_share = self._rounding_error(n_items, lightest) / self.clips().min()
        releases.check_rounding(self.name, n_items, float(rounding_share))
        releases.check_other_parts(self)

    def _check_unit(self) -> None:
        """Refuse settings under which a unit's data could not be clipped and noised as one."""
        train = self.context.train
        config = self.config
        if train.weighs_data or train.aggregation == "per-row":
            raise TacitaError(
                f"dpps sends noise on every row, and aggregation = '{train.aggregation}' with weigh_by = "
                f"'{train.weigh_by}' would tell what a person has without any; use 'mean' or 'fixed' of clients."
            )
        if config.unit == "person" and train.n_joint_silos:
            raise TacitaError(
                "a silo that trains one model of all its people has nothing to clip for each of them; use "
                "train.in_silos = 'apart', or dpps.unit = 'silo', which protects silos and not people."
            )
        if config.unit == "silo" and not train.n_joint_silos:
            raise TacitaError(
                "dpps.unit = 'silo' needs silos that train together: set train.silos, or unit = 'person'."
            )
        if config.threat == "silo" and (not train.silos or train.n_joint_silos):
            raise TacitaError(
                "dpps.threat = 'silo' trusts silos to add up and to noise what each person changed; set "
                "train.silos and train.in_silos = 'apart'."
            )

    def _check_noise(self) -> None:
        """Refuse settings under which the noise would not be what the ledger counts."""
        train = self.context.train
        config = self.config
        if self._has_shared_noise and self._trains_rows and train.aggregation != "fixed":
            raise TacitaError(
                f"dpps with threat = '{config.threat}' must not divide by how many took part; use train.aggregation = "
                "'fixed'."
            )
        if self._has_shared_noise and (config.calibration == "paper" or config.noise is not None):
            raise TacitaError(
                f"dpps with threat = '{config.threat}' fits clips to budgets; leave out noise and calibration."
            )
        if config.noise_on == "wholes" and train.aggregator == "plain":
            raise TacitaError("dpps.noise_on = 'wholes' needs sums of whole numbers: train.aggregator = 'ideal'.")

    def _rounding_error(self, n_items: int, weight: float | Doubles) -> Doubles:
        """By how much rounding to whole numbers, after weights, can lengthen what a client of a weight sends."""
        return np.asarray(releases.rounding_error(self.context, n_items) / np.maximum(weight, 1e-12))

    # what noise there is

    @property
    def _trains_rows(self) -> bool:
        return self.context.backbone.learner == "rows"

    @property
    def _has_shared_noise(self) -> bool:
        """One noise covers many people, so that clips differ where budgets do: of everybody, or of those of a silo."""
        return self.config.threat != "local"

    @property
    def _sensitivity(self) -> float:
        """Of one release, in clips: a person added or removed, or data replaced by other data."""
        return 1.0 if self._has_shared_noise else 2.0

    def ledger(self) -> Ledger:
        config = self.config
        upload = Event("upload", "gaussian", 1.0, 1.0, config.unit, config.threat)
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, config.unit, config.threat, once=True)
        if config.policy == "declared":
            return Ledger((upload, earlier), config.delta)
        count = Event("activity", "laplace", 1.0, 1 / config.activity_epsilon, "interaction", once=True)
        return Ledger((upload, earlier, count), config.delta)

    def noise_multipliers(self) -> Doubles:
        """The noise of each tier, as a multiple of its sensitivity."""
        config = self.config
        if config.noise is not None:
            return np.full(len(config.tiers), config.noise)
        if config.calibration == "paper":
            return 1 / np.array(config.tiers)
        counted = config.activity_epsilon if config.policy == "activity" else 0.0
        return np.array(_fit_noise(tuple(config.tiers), counted, config.delta, config.releases))

    def noise_deviations(self) -> Doubles:
        """The noise of each tier: local, of each release; else one for many, and clips differ instead."""
        each = self.noise_multipliers() * self._sensitivity * self.clips()
        return (
            np.full(len(each), each.max()) if self._has_shared_noise else each
        )  # the same in all tiers, up to rounding

    def clips(self) -> Doubles:
        """Local: the same for all. Else as far apart as budgets are, and `clip` on average: a sum is as long as if all
        had one budget, a noise that of one between the least and the largest."""
        clip, multiples = self.config.clip, self.noise_multipliers()
        if not self._has_shared_noise:
            return np.full(len(multiples), clip)
        shares = np.array(self.config.shares) / sum(self.config.shares)
        return np.asarray(clip / multiples / float(shares @ (1 / multiples)))

    def _tier_weights(self, between: float) -> Doubles:
        """What a client of each tier counts, 1 at most; capped as if tiers were chosen by their shares."""
        if self.config.weights == "equal" or self._has_shared_noise or not self._trains_rows:
            return np.ones(len(self.config.tiers))
        variance = self.noise_deviations() ** 2 + between
        weights, shares = variance.min() / variance, np.array(self.config.shares) / sum(self.config.shares)
        while weights.max() > (most := self.config.cap * float(shares @ weights)) * (1 + 1e-9) and most > 0:
            weights = np.minimum(weights, most)
        return np.asarray(weights / weights.max())

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        account = self.ledger().open_accounts(n_users, 0.0)
        specs = [StateSpec(name, array, Role.ACCOUNT, persistent=True) for name, array in account.items()]
        return [*specs, StateSpec("tier", np.full(n_users, -1, np.int8), persistent=True)]

    def on_block_start(self, view: CohortView) -> Arrays:
        """Who is new chooses a budget, or gets one by how much there is of them; silos choose when they first send."""
        if self._silos_choose:
            return {}
        if self.config.policy == "declared":
            return self._open_accounts(view, self._draw_tiers(view.user_keys))
        new = view.parts[self.name]["tier"] < 0
        counts = view.train.counts().astype(np.float64)
        counts[new] += self._draw_count_noise(view.user_keys[new])
        tier = np.searchsorted(np.array(self.config.activity_cuts), counts, side="right")
        made = self._open_accounts(view, tier)
        account, _ = self.ledger().charge({name: made[name] for name in ACCOUNT_ARRAYS}, "activity", participants=new)
        return {**made, **account}

    @property
    def _silos_choose(self) -> bool:
        """A silo that is the unit chooses as one: the most careful of many people would set the tier of nearly all."""
        return self.config.unit == "silo" and self.config.policy == "declared"

    def _draw_tiers(self, keys: Keys) -> Longs:
        """The tiers that these people, or silos, choose; a device whose person said nothing takes the smallest."""
        edges = np.cumsum(self.config.shares)[:-1] / sum(self.config.shares)
        drawn = uniforms(self.context.draws.private("budget"), keys, 1)[:, 0]
        tier = np.searchsorted(edges, drawn, side="right")
        return np.zeros_like(tier) if self.context.draws.secret else tier

    def _open_accounts(self, view: CohortView, tier: Longs) -> Arrays:
        """What everybody keeps once those who are new have their tier."""
        mine, config = view.parts[self.name], self.config
        new = mine["tier"] < 0
        limits = np.array(config.tiers) if config.calibration == "analytic" else np.full(len(config.tiers), 999_999.0)
        account = self.ledger().with_budget({name: mine[name] for name in ACCOUNT_ARRAYS}, limits[tier], new)
        return {**account, "tier": np.where(new, tier, mine["tier"]).astype(np.int8)}

    def declare_budget(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """Noise as of the largest tier that a budget pays for; where there is none, of the smallest, for less long."""
        tier = np.maximum(0, np.searchsorted(np.array(self.config.tiers), epsilon, side="right") - 1)
        if self.config.policy == "activity":
            tier = view.parts[self.name]["tier"]
        return {**super().declare_budget(view, epsilon), "tier": tier.astype(np.int8)}

    def _draw_count_noise(self, keys: Keys) -> Doubles:
        scale, draws = 1 / self.config.activity_epsilon, self.context.draws
        drawn = [NoiseStream(draws, "activity", int(key)).laplaces(1)[0] for key in keys]
        return scale * np.array(drawn, np.float64)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(
            extra=self._extra_fields(),
            after_encoding=self._widen_bounds,
            whole_table=True,
            common={"between": ArraySpec((1,), np.float64, least=0.0)},
        )

    def _extra_fields(self) -> tuple[Spec, ...]:
        specs = [Spec("noise", (1,), least=0.0, about="how much noise is in the sum")]
        if self._estimates_variance:
            specs.append(Spec("length", (1,)))
        if self._is_weighed:
            specs.append(Spec("mass", (1,)))
        return tuple(specs)

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        if spec.seen == "each":
            raise TacitaError(
                f"'{spec.name}' is seen each by itself, and dpps noises sums of people; leave dpps out, or the part "
                "that sends it."
            )
        if spec.name.startswith(self._public):
            return spec
        return replace(spec, most=np.inf, least=-np.inf)

    @property
    def _is_weighed(self) -> bool:
        """Other parts weigh clients by what they have: a secret like all the rest, to be clipped and noised with it."""
        return any("weigh" in other.hooks for other in self.context.others(self.name))

    @property
    def _estimates_variance(self) -> bool:
        config = self.config
        return (
            config.weights == "variance" and config.between is None and not self._has_shared_noise and self._trains_rows
        )

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        sent = view.received.get(self.name, {}).get("between")
        between = self.config.between if self.config.between is not None else 0.0 if sent is None else float(sent[0])
        return self._tier_weights(between)[self._client_tiers(view)]

    def _client_tiers(self, view: CohortView) -> Longs:
        """The tier of each client: a silo's own, or, where people have theirs, that of its most careful ones."""
        if self._silos_choose:
            return self._draw_tiers(view.client_keys)
        return np.maximum(reduce_by_client(view, view.parts[self.name]["tier"], np.minimum), 0).astype(np.int64)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Charge, then clip; noise follows on the sum. Who cannot pay sends nothing."""
        tier, ledger = self._client_tiers(view), self.ledger()
        mine = self._open_accounts(view, repeat_by_user(view, tier)) if self._silos_choose else view.parts[self.name]
        account = {name: mine[name] for name in ACCOUNT_ARRAYS}
        loss = repeat_by_user(view, 1 / self.noise_multipliers()[tier])
        asked = repeat_by_user(view, upload.weight > 0)
        paid, could = ledger.charge(account, "upload", loss, asked)
        goes = reduce_by_client(view, could, np.logical_and).astype(bool)
        # in a silo nobody pays where somebody cannot; who is alone has paid already
        account = (
            paid if view.has_single_users else ledger.charge(account, "upload", loss, repeat_by_user(view, goes))[0]
        )
        clips = self.clips()[tier]  # what rounding may add is taken off before
        clips = clips - np.minimum(self._rounding_error(view.n_items, self.weigh(view, upload)), clips)
        upload = self._clip_upload(view, upload, clips)
        variance = np.zeros(len(tier)) if self._has_shared_noise else self.noise_deviations()[tier] ** 2
        upload = upload.with_value("dpps.noise", DenseArrays((upload.weight * variance)[:, None])).drop_clients(~goes)
        upload = releases.add_nonces(upload, self.context.draws, "dpps", view, account["times"][:, 0].astype(np.int64))
        return upload, {**account, "tier": mine["tier"]}

    def _clip_upload(self, view: CohortView, upload: Upload, clips: Doubles) -> Upload:
        """Everything as one vector: with what other parts weigh it by, and with its length where that is estimated."""
        room = clips.copy()
        if self._is_weighed:
            own = self.weigh(view, upload)
            given = np.clip(np.nan_to_num(upload.weight / own), 0.0, 1.0)
            mass = np.where(upload.weight > 0, WEIGHT_SHARE * clips * given, 0.0)
            upload = replace(upload.scale(given), weight=np.where(upload.weight > 0, own, 0.0))
            room = np.sqrt(np.maximum(0.0, room**2 - mass**2))
        lengths = releases.upload_norms(upload)
        if self._estimates_variance and "rows" in upload.values:
            inside = np.where(np.isfinite(lengths), np.minimum(lengths, room), 0.0)
            sent = LENGTH_SHARE * inside**2 / clips
            room = np.sqrt(np.maximum(0.0, room**2 - sent**2))
            upload = releases.clip_upload(upload, room, lengths).with_value("dpps.length", DenseArrays(sent[:, None]))
        else:
            upload = releases.clip_upload(upload, room, lengths)
        return upload.with_value("dpps.mass", DenseArrays(mass[:, None])) if self._is_weighed else upload

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        """The noise of all who sent, in one draw: sums of Gaussians are Gaussian."""
        if (
            self._has_shared_noise
        ):  # also where nobody took part, in a silo or anywhere: that nobody did is nobody's business
            draws = self.context.train.silos if self.config.threat == "silo" else 1
            total = total.with_sums({"dpps.noise": np.array([draws * self.noise_deviations()[-1] ** 2])})
            total = replace(total, n_clients=max(1, total.n_clients))
        elif total.n_clients == 0:
            return total
        stream = NoiseStream(self.context.draws, "dpps-noise", server.block, server.round, total.nonce)
        variance, whole = float(total["dpps.noise"][0]), self.config.noise_on == "wholes"
        if whole:  # the sum of variances was rounded, too
            variance += total.n_clients * QUANTUM
            return releases.add_integer_noise(total, math.sqrt(variance), stream, self._public, QUANTUM)
        return releases.add_noise(total, math.sqrt(variance), stream, self._public)

    # on the server

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        state = server.parts.get(self.name, {})
        return PartBroadcast({"between": state["between"]} if "between" in state else {})

    def decode(self, server: ServerState, total: Total) -> Total:
        """Shrink the noised sums, and see how much clients differ; both are functions of what was noised already."""
        if total.n_clients == 0 or not self._trains_rows or "rows" not in total.sums:
            return total
        variance = float(total["dpps.noise"][0])
        changed: Arrays = {}
        if self._is_weighed:
            mass = float(total["dpps.mass"][0]) / (WEIGHT_SHARE * float(self.clips().max()))
            total = replace(total, weight=min(max(mass, _MIN_WEIGHT_SHARE * total.weight), total.weight))
        if self._estimates_variance:
            changed["dpps.length"] = np.array([self._variance_between_clients(total, variance)])
        for name, value in total.sums.items():
            if not name.startswith("dpps."):
                by_row = self.config.shrink_by == "row" and name == "rows"
                changed[name] = releases.shrink_sum(value, variance, self.config.shrink, by_row)
        return total.with_sums(changed)

    def _variance_between_clients(self, total: Total, variance: float) -> float:
        """The variance of a coordinate between clients: mean square minus square of the mean, both without noise."""
        own = ("dpps.",)
        size = releases.count_coordinates(total, own)
        square = self.config.clip / LENGTH_SHARE * float(total["dpps.length"][0]) / total.weight
        sums = sum(float((v**2).sum()) for name, v in total.sums.items() if not name.startswith(own))
        mean = max(0.0, sums - size * variance) / total.weight**2
        return max(0.0, square - mean) / size

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not self._estimates_variance or total.n_clients == 0 or "dpps.length" not in total.sums:
            return server
        return server.with_part(self.name, {"between": np.asarray(total["dpps.length"], np.float64)})

    def promises(self, server: ServerState) -> dict[str, float | str]:
        """The budgets, whom they protect from whom; under the paper's noise, what one release really costs."""
        config = self.config
        said: dict[str, float | str] = {"unit": config.unit, "threat": config.threat, "delta": config.delta}
        if config.calibration == "analytic":
            return {**said, "epsilon_most": config.tiers[-1], "epsilon_least": config.tiers[0]}
        for tier, noise in zip(config.tiers, self.noise_multipliers()):
            spent = gaussian_epsilon(float(noise) / math.sqrt(config.releases), config.delta)
            said[f"epsilon_{tier:g}_really"] = spent
            said[f"delta_at_{tier:g}_really"] = gaussian_delta(float(noise), tier)
        return said


@lru_cache(maxsize=1024)
def _fit_noise(tiers: tuple[float, ...], counted: float, delta: float, releases: int) -> tuple[float, ...]:
    """The noise with which each tier lasts for so many releases; asked for by every cohort of a round."""
    ledger = Ledger((), delta)
    return tuple(ledger.sigma_to_fit(tier - counted, releases) for tier in tiers)


register_preset("dpps", {"name": "dpps"})
register_preset("f3crec-dpps", {"name": "replay"}, {"name": "temporal-mean"}, {"name": "dpps"})
register_preset(
    "fedshare-dpps",
    {"name": "sharing"},
    {"name": "shared-graph"},
    {"name": "contrastive-unlearning"},
    {"name": "dpps"},
    settings={**FEDSHARE, "train": {**FEDSHARE["train"], "aggregation": "mean"}},
)
