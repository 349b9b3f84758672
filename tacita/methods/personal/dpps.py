"""DPPS: everybody has a budget of their own, and what leaves a device is clipped and noised to fit it (spec F).

As printed, the method adds noise of deviation sensitivity / epsilon to what is sent, without a clip, a delta or a
count of rounds: no epsilon follows from that. Here everything a client sends in a release is one vector, shortened to
`clip`, with Gaussian noise on all of its coordinates. The ledger charges the device before the release leaves. A device
whose budget is spent sends nothing more and is still served. `calibration = "paper"` keeps the printed noise, on
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
from typing import ClassVar

import numpy as np

from tacita.core.types import Arrays, Bools, CohortView, Doubles, Keys, Longs, ServerState, StateUpdate
from tacita.kernels.hashing import draw_uniforms
from tacita.messages import QUANTUM, Spec, Total, Upload
from tacita.methods.personal import budget_tiers, clip_shares, releases
from tacita.methods.personal.accounts import find_payers, select_account, specify_accounts
from tacita.methods.personal.clip_shares import to_scalar_field
from tacita.methods.personal.dpps_config import DPPSConfig, check_noise, check_unit
from tacita.methods.personal.releases import reduce_by_client, repeat_by_user
from tacita.methods.sharing.presets import FEDSHARE
from tacita.privacy.accounting import Event
from tacita.privacy.calibration import compute_gaussian_delta, compute_gaussian_epsilon
from tacita.privacy.ledger import EARLIER_RUNS, Ledger
from tacita.privacy.noise import NoiseStream
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import Privacy
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.state import StateSpec


@register
class DPPS(Part, Privacy):
    """Personal budgets: clip, Gaussian noise, inverse-variance weights, shrinkage of the noised mean."""

    name = "dpps"
    Config: ClassVar[type[PartConfig]] = DPPSConfig
    config: DPPSConfig
    works_with = ("rows", "statistic")
    covers = frozenset({"answers", "weights"})
    _public_fields: ClassVar[tuple[str, ...]] = ("dpps.noise",)

    def check(self, n_items: int) -> None:
        train = self.context.train
        check_unit(self.config, train)
        check_noise(self.config, train, self._trains_rows)
        lightest = self._compute_tier_weights(0.0).min()
        error = self._bound_rounding_error(n_items, lightest)
        rounding_share = error / self.compute_clips().min()
        releases.refuse_coarse_rounding(self.name, n_items, float(rounding_share))

    def _bound_rounding_error(self, n_items: int, weight: float | Doubles) -> Doubles:
        """By how much rounding to whole numbers, after weights, can lengthen what a client of a weight sends."""
        error = releases.bound_rounding_error(self.context, n_items)
        divisor = np.maximum(weight, 1e-12)
        return np.asarray(error / divisor)

    # what noise there is

    @property
    def _trains_rows(self) -> bool:
        return self.context.backbone.learner == "rows"

    @property
    def _sensitivity(self) -> float:
        """Of one release, in clips: a person added or removed, or data replaced by other data."""
        if self.config.has_shared_noise:
            return 1.0
        return 2.0

    def ledger(self) -> Ledger:
        config = self.config
        upload = Event("upload", "gaussian", 1.0, 1.0, config.unit, config.threat)
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, config.unit, config.threat, once=True)
        if config.policy == "declared":
            return Ledger((upload, earlier), config.delta)
        scale = 1 / config.activity_epsilon
        count = Event("activity", "laplace", 1.0, scale, "interaction", once=True)
        return Ledger((upload, earlier, count), config.delta)

    def compute_noise_multipliers(self) -> Doubles:
        """The noise of each tier, as a multiple of its sensitivity."""
        return budget_tiers.compute_noise_multipliers(self.config)

    def compute_noise_deviations(self) -> Doubles:
        """The noise of each tier: local, of each release; else one for many, and clips differ instead."""
        deviations = self.compute_noise_multipliers() * self._sensitivity * self.compute_clips()
        if not self.config.has_shared_noise:
            return deviations
        return np.full(len(deviations), deviations.max())  # the same in all tiers, up to rounding

    def compute_clips(self) -> Doubles:
        """The clip of each tier."""
        return budget_tiers.compute_tier_clips(self.config)

    def _compute_tier_weights(self, between: float) -> Doubles:
        """What a client of each tier counts, 1 at most; `between`: the variance between clients."""
        config = self.config
        has_equal_noise = config.has_shared_noise or not self._trains_rows
        if config.weights == "equal" or has_equal_noise:
            return np.ones(len(config.tiers))
        variance = self.compute_noise_deviations() ** 2 + between
        weights = variance.min() / variance
        shares = budget_tiers.normalise_tier_shares(config)
        weights = budget_tiers.cap_weights(weights, shares, config.cap)
        return np.asarray(weights / weights.max())

    # accounts on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        accounts = specify_accounts(self.ledger(), n_users, 0.0)
        no_tier = np.full(n_users, -1, np.int8)
        return [*accounts, StateSpec("tier", no_tier, persistent=True)]

    def on_block_start(self, view: CohortView) -> Arrays:
        """New users choose a budget, or get one by how much data they have; silos choose when they first send."""
        if self.config.silos_choose:
            return {}
        if self.config.policy == "declared":
            tiers = self._draw_tiers(view.user_keys)
            return self._open_accounts(view, tiers)
        return self._open_accounts_by_activity(view)

    def _open_accounts_by_activity(self, view: CohortView) -> Arrays:
        """Accounts whose tiers follow from a noisy count of interactions, which new users pay for."""
        old_tiers = view.parts[self.name]["tier"]
        is_new = old_tiers < 0
        n_items = view.train.counts()
        counts = n_items.astype(np.float64)
        noise = self._draw_count_noise(view.user_keys[is_new])
        counts[is_new] += noise
        tiers = budget_tiers.find_tiers_by_count(self.config, counts)
        state = self._open_accounts(view, tiers)
        account = select_account(state)
        account, _ = self.ledger().charge(account, "activity", participants=is_new)
        return {**state, **account}

    def _draw_tiers(self, keys: Keys) -> Longs:
        """The tiers that these users, or silos, choose; on a device whose user said nothing, the smallest."""
        key = self.context.draws.private("budget")
        draws = draw_uniforms(key, keys, 1)
        uniform = draws[:, 0]
        tiers = budget_tiers.choose_tiers_by_share(self.config, uniform)
        if self.context.draws.secret:
            return np.zeros_like(tiers)
        return tiers

    def _open_accounts(self, view: CohortView, tiers: Longs) -> Arrays:
        """All accounts, with the budget of a tier for users who are new."""
        state = view.parts[self.name]
        is_new = state["tier"] < 0
        budgets = budget_tiers.list_tier_limits(self.config)[tiers]
        old_account = select_account(state)
        account = self.ledger().with_budget(old_account, budgets, is_new)
        old_tiers = state["tier"]
        tier = np.where(is_new, tiers, old_tiers)
        return {**account, "tier": tier.astype(np.int8)}

    def declare_budget(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """Noise as of the largest tier that a budget pays for; where there is none, of the smallest, for less long."""
        tier = budget_tiers.find_tiers_by_budget(self.config, epsilon)
        if self.config.policy == "activity":
            tier = view.parts[self.name]["tier"]
        update = super().declare_budget(view, epsilon)
        return {**update, "tier": tier.astype(np.int8)}

    def _draw_count_noise(self, keys: Keys) -> Doubles:
        """Laplace noise on users' counts of interactions."""
        scale = 1 / self.config.activity_epsilon
        noise = []
        for key in keys:
            draws = self.context.draws
            stream = NoiseStream(draws, "activity", int(key))
            noise.append(stream.draw_laplaces(1)[0])
        return scale * np.array(noise, np.float64)

    # what leaves the device

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(
            extra=self._specify_extra_fields(),
            after_encoding=self._widen_bounds,
            whole_table=True,
            common={"between": ArraySpec((1,), np.float64, least=0.0)},
        )

    def _specify_extra_fields(self) -> tuple[Spec, ...]:
        specs = [Spec("noise", (1,), least=0.0, about="how much noise is in the sum")]
        if self._estimates_variance:
            specs.append(Spec("length", (1,)))
        if self._is_weighed:
            specs.append(Spec("mass", (1,)))
        return tuple(specs)

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        if spec.name.startswith(self._public_fields):
            return spec
        return replace(spec, most=np.inf, least=-np.inf)

    @property
    def _is_weighed(self) -> bool:
        """Other parts weigh clients by their data: a secret like all the rest, to be clipped and noised with it."""
        others = self.context.list_other_parts(self.name)
        return any("weigh" in other.hooks for other in others)

    @property
    def _estimates_variance(self) -> bool:
        """Clients send the length of their update, from which the server learns how much they differ."""
        config = self.config
        if config.weights != "variance" or config.between is not None:
            return False
        return self._trains_rows and not config.has_shared_noise

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        tiers = self._find_client_tiers(view)
        between = self._read_client_variance(view)
        return self._compute_tier_weights(between)[tiers]

    def _read_client_variance(self, view: CohortView) -> float:
        """The variance between clients: as it was set, or as the server estimated it; 0 before it did."""
        if self.config.between is not None:
            return self.config.between
        broadcast = view.received.get(self.name, {})
        if "between" not in broadcast:
            return 0.0
        return float(broadcast["between"][0])

    def _find_client_tiers(self, view: CohortView) -> Longs:
        """The tier of each client: a silo's own, or, where people have theirs, that of its most careful ones."""
        if self.config.silos_choose:
            return self._draw_tiers(view.client_keys)
        tiers = view.parts[self.name]["tier"]
        least = reduce_by_client(view, tiers, np.minimum)
        return np.maximum(least, 0).astype(np.int64)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Charge, then clip; noise follows on the sum. A client that cannot pay sends nothing."""
        tiers = self._find_client_tiers(view)
        state = view.parts[self.name]
        if self.config.silos_choose:
            user_tiers = repeat_by_user(view, tiers)
            state = self._open_accounts(view, user_tiers)
        account = select_account(state)
        account, pays = self._charge_clients(view, upload, account, tiers)
        tier_clips = self.compute_clips()[tiers]
        clips = self._shrink_clips_for_rounding(view, upload, tier_clips)
        upload = self._clip_upload(view, upload, clips)
        upload = self._with_noise_variance(upload, tiers)
        upload = upload.drop_clients(~pays)
        return upload, {**account, "tier": state["tier"]}

    def _charge_clients(self, view: CohortView, upload: Upload, account: Arrays, tiers: Longs) -> tuple[Arrays, Bools]:
        """The accounts after a release, and the clients that pay for it. In a silo all users pay, or none does."""
        ledger = self.ledger()
        losses = 1 / self.compute_noise_multipliers()[tiers]
        loss = repeat_by_user(view, losses)
        takes_part = repeat_by_user(view, upload.weight > 0)
        charged, can_pay = ledger.charge(account, "upload", loss, takes_part)
        pays = find_payers(view, can_pay)
        if not view.has_single_users:
            participants = repeat_by_user(view, pays)
            charged, _ = ledger.charge(account, "upload", loss, participants)
        return charged, pays

    def _shrink_clips_for_rounding(self, view: CohortView, upload: Upload, clips: Doubles) -> Doubles:
        """Clips less what rounding to whole numbers may add."""
        weight = self.weigh(view, upload)
        error = self._bound_rounding_error(view.n_items, weight)
        return clips - np.minimum(error, clips)

    def _clip_upload(self, view: CohortView, upload: Upload, clips: Doubles) -> Upload:
        """Everything as one vector: with what other parts weigh it by, and with its length where that is estimated."""
        room = clips.copy()
        mass = None
        if self._is_weighed:
            upload, mass = self._separate_weight(view, upload, clips)
            room = clip_shares.compute_remaining_length(room, mass)
        norms = releases.compute_norms(upload)
        length = None
        if self._estimates_variance and "rows" in upload.values:
            length = clip_shares.encode_update_length(norms, room, clips)
            room = clip_shares.compute_remaining_length(room, length)
        upload = releases.clip_upload(upload, room, norms)
        if length is not None:
            upload = upload.with_value("dpps.length", to_scalar_field(length))
        if mass is not None:
            upload = upload.with_value("dpps.mass", to_scalar_field(mass))
        return upload

    def _separate_weight(self, view: CohortView, upload: Upload, clips: Doubles) -> tuple[Upload, Doubles]:
        """The upload with its tier's weight alone, scaled by the weights of other parts, and that factor as a field."""
        tier_weight = self.weigh(view, upload)
        other_weight = np.nan_to_num(upload.weight / tier_weight)
        other_weight = np.clip(other_weight, 0.0, 1.0)
        is_sent = upload.weight > 0
        mass = clip_shares.encode_weight(other_weight, clips, is_sent)
        weight = np.where(is_sent, tier_weight, 0.0)
        scaled = upload.scale(other_weight)
        return replace(scaled, weight=weight), mass

    def _with_noise_variance(self, upload: Upload, tiers: Longs) -> Upload:
        """How much noise an upload is owed; its sum says how much noise the total gets."""
        variance = np.zeros(len(tiers))
        if not self.config.has_shared_noise:
            variance = self.compute_noise_deviations()[tiers] ** 2
        noise = upload.weight * variance
        return upload.with_value("dpps.noise", to_scalar_field(noise))

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        """The noise of all who sent, in one draw: sums of Gaussians are Gaussian."""
        if self.config.has_shared_noise:
            total = self._with_shared_noise(total)
        elif total.n_clients == 0:
            return total
        stream = releases.open_noise_stream(self, "dpps-noise", server, total)
        variance = float(total["dpps.noise"][0])
        if self.config.noise_on == "reals":
            deviation = math.sqrt(variance)
            return releases.add_noise(total, deviation, stream, self._public_fields)
        variance += total.n_clients * QUANTUM  # the sum of variances was rounded, too
        deviation = math.sqrt(variance)
        return releases.add_integer_noise(total, deviation, stream, self._public_fields, QUANTUM)

    def _with_shared_noise(self, total: Total) -> Total:
        """A total that gets the noise of every silo, or one for all, also where nobody took part: that is hidden."""
        n_draws = 1
        if self.config.threat == "silo":
            n_draws = self.context.train.silos
        deviation = self.compute_noise_deviations()[-1]
        variance = n_draws * deviation**2
        noise = np.array([variance])
        total = total.with_sums({"dpps.noise": noise})
        return replace(total, n_clients=max(1, total.n_clients))

    # on the server

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        state = server.parts.get(self.name, {})
        if "between" not in state:
            return PartBroadcast()
        return PartBroadcast({"between": state["between"]})

    def decode(self, server: ServerState, total: Total) -> Total:
        """Shrink the noised sums, and see how much clients differ; both are functions of what was noised already."""
        if total.n_clients == 0 or not self._trains_rows or "rows" not in total.sums:
            return total
        variance = float(total["dpps.noise"][0])
        sums: Arrays = {}
        if self._is_weighed:
            largest_clip = float(self.compute_clips().max())
            weight = clip_shares.decode_weight(total, largest_clip)
            total = replace(total, weight=weight)
        if self._estimates_variance:
            clip = self.config.clip
            between = clip_shares.estimate_client_variance(total, variance, clip)
            sums["dpps.length"] = np.array([between])
        for name, value in total.sums.items():
            if not name.startswith(clip_shares.OWN_FIELDS):
                by_row = self.config.shrink_by == "row" and name == "rows"
                strength = self.config.shrink
                sums[name] = releases.shrink_sum(value, variance, strength, by_row)
        return total.with_sums(sums)

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not self._estimates_variance or total.n_clients == 0 or "dpps.length" not in total.sums:
            return server
        length = total["dpps.length"]
        between = np.asarray(length, np.float64)
        return server.with_part(self.name, {"between": between})

    def promises(self, server: ServerState) -> dict[str, float | str]:
        """The budgets, whom they protect from whom; under the paper's noise, what one release really costs."""
        config = self.config
        promise: dict[str, float | str] = {"unit": config.unit, "threat": config.threat, "delta": config.delta}
        if config.calibration == "analytic":
            largest = config.tiers[-1]
            smallest = config.tiers[0]
            return {**promise, "epsilon_most": largest, "epsilon_least": smallest}
        multipliers = self.compute_noise_multipliers()
        for tier, multiplier in zip(config.tiers, multipliers):
            noise = float(multiplier)
            noise_of_all = noise / math.sqrt(config.releases)
            epsilon = compute_gaussian_epsilon(noise_of_all, config.delta)
            promise[f"epsilon_{tier:g}_really"] = epsilon
            delta = compute_gaussian_delta(noise, tier)
            promise[f"delta_at_{tier:g}_really"] = delta
        return promise


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
