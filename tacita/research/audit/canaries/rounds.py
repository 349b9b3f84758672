"""Canaries in rounds: crafted updates through the clip, the draw of participants, the noise and the ledger of a run.

Every client is a canary with a row of its own, far longer than the clip. Everything else is the run's own code: the
reply of `LocalDevices.exchange` is what a server, or another reader of the noised sum, would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.types import (
    AnyArray,
    Arrays,
    BlockStream,
    Bools,
    CohortView,
    Doubles,
    Ints,
    Longs,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.federation.rounds import Progress, begin_block, make_initial_progress
from tacita.messages import SparseRows, Total, Upload
from tacita.methods import RunContext, build_parts
from tacita.methods.personal.clip_shares import LENGTH_SHARE, WEIGHT_SHARE
from tacita.models import find_backbone_class
from tacita.privacy.accounting import calibrate_sampled_noise
from tacita.privacy.calibration import compute_max_mu
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.research.audit.canaries.canary_stream import make_stream, make_training_block, name_canaries
from tacita.round.capabilities import Privacy
from tacita.round.part import Part, PartConfig, PartTraits
from tacita.round.plan import Federation
from tacita.round.question import Question

CANARY_LENGTH = 3.0  # times the clip: what a canary sends before it is clipped
DELTA = 1e-5


@dataclass(frozen=True)
class RoundScenario:
    """A part with a ledger under some settings, and what it promises of one person, or silo, of a tier."""

    name: str
    part: dict[str, Any]
    epsilon: float
    threat: str = "central"
    unit: str = "person"
    releases: int = 1
    rate: float = 1.0
    tier: int = 0
    train: dict[str, Any] = field(default_factory=dict)
    reads: str = "rows"  # the field that is read: a canary's own row, or one number that goes along with it
    other_part: str = ""  # another part that weighs clients, as the run would have one

    @property
    def is_pure(self) -> bool:
        return bool(self.part["name"] == "laplace-noise")

    @property
    def clip(self) -> float:
        """Of the tier: where one noise is for all, people with smaller budgets have smaller clips."""
        if self.is_local:
            return 1.0
        tiers = self.part.get("tiers", [self.epsilon])
        largest_epsilon = tiers[-1]
        own_mu = compute_max_mu(self.epsilon, DELTA)
        largest_mu = compute_max_mu(largest_epsilon, DELTA)
        return own_mu / largest_mu

    @property
    def signal(self) -> float:
        """How far a number that goes along tells who is inside, without noise."""
        shares = {"dpps.length": LENGTH_SHARE, "dpps.mass": WEIGHT_SHARE}
        return shares[self.reads] * self.clip

    @property
    def is_local(self) -> bool:
        """Whether each client's own release is read."""
        return self.threat == "local"

    @property
    def has_tiers(self) -> bool:
        return self.part["name"] == "dpps" and len(self.part["tiers"]) > 1

    @property
    def is_sampled(self) -> bool:
        return self.rate < 1

    @property
    def rounds_read(self) -> int:
        """A sampled round is read by itself, as the law of its score is known."""
        return 1 if self.is_sampled else self.releases

    def build_claim(self) -> Claim:
        if self.is_pure:
            return Claim(self.epsilon, 0.0, "pure", threshold=1.0)
        if self.is_sampled:
            noise = calibrate_sampled_noise(self.epsilon, DELTA, self.rate, self.releases)
            return Claim(self.epsilon, DELTA, mu=1 / noise, rate=self.rate, releases=self.releases)
        mu = compute_max_mu(self.epsilon, DELTA)
        return Claim(self.epsilon, DELTA, mu=mu)


class CanaryPart(Part):
    """Everybody is a canary: one who is inside sends a long row, others its opposite, or nothing at all.

    Where the reader reads a number that goes along, others send a row of zeros, or have next to no weight.
    """

    name = "canary"
    inside: Bools
    replaced: bool
    reads: str = "rows"

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        starts = view.user_ptr[:-1]
        users = view.user[starts]
        if self.reads != "rows":
            return self._encode_number(view, upload, users), {}
        outside_sign = -1.0 if self.replaced else 0.0
        is_inside = self.inside[users]
        sign = np.where(is_inside, 1.0, outside_sign)
        weight = np.where(sign != 0, upload.weight, 0.0)
        rows = _make_canary_rows(view, users, sign)
        planted = upload.with_value("rows", rows)
        return replace(planted, weight=weight), {}

    def _encode_number(self, view: CohortView, upload: Upload, users: Ints) -> Upload:
        is_inside = self.inside[users]
        rows = _make_canary_rows(view, users, is_inside)
        planted = upload.with_value("rows", rows)
        weight: Any = 1.0
        if self.reads == "dpps.mass":
            weight = np.where(is_inside, 1.0, 1e-6)
        return replace(planted, weight=upload.weight * weight)


def _make_canary_rows(view: CohortView, users: Ints, sign: AnyArray) -> SparseRows:
    """One row for every client, as long as a canary is, in its own place."""
    n_clients = len(users)
    width = view.items.shape[1]
    value = np.zeros((n_clients, width), np.float32)
    value[:, 0] = CANARY_LENGTH * sign
    clients = np.arange(n_clients, dtype=np.int32)
    return SparseRows(clients, users.astype(np.int32), value)


class HalfNoisePart(Part, Privacy):
    """A planted bug."""

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        encoded = super().noise_sum(server, total)
        sums = {}
        for name, value in encoded.sums.items():
            sums[name] = (value + total[name]) / 2
        return encoded.with_sums(sums)


class UnclippedPart(Part):
    """A planted bug."""

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        encoded, state_update = super().encode(view, upload)
        unclipped = encoded.with_value("rows", upload.values["rows"])
        return unclipped, state_update


class UnnoisedScalarsPart(Part, Privacy):
    """A planted bug: what goes along with rows gets no noise."""

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        encoded = super().noise_sum(server, total)
        sums = {}
        for name, value in total.sums.items():
            if name.startswith("dpps."):
                sums[name] = value
        return encoded.with_sums(sums)


BUGS: dict[str, type[Part]] = {
    "half the noise": HalfNoisePart,
    "no clip": UnclippedPart,
    "no noise on it": UnnoisedScalarsPart,
}


def with_planted_bug(part: Part, bug: str | None) -> Part:
    if bug is None:
        return part
    bases = (BUGS[bug], type(part))
    buggy_class: type[Part] = type(f"{bug} in {part.name}", bases, {})
    return buggy_class(part.config, part.context)


def run_trials(setting: RoundScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    """One run: all planned rounds, and what each canary's row shows after them."""
    people = canaries
    if setting.unit == "silo":
        people = 2 * canaries
    rng = np.random.default_rng([seed, 1])
    inside = rng.random(people) < 0.5
    federation = _make_federation(setting, people, inside, seed, bug)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    judged = _choose_judged_users(setting, federation, progress)
    score = np.zeros(people)
    for _ in range(setting.rounds_read):
        score += _read_canary_scores(setting, federation, progress)
        next_round = progress.server.round + 1
        progress.server = replace(progress.server, round=next_round)
    scaled = _scale_scores(setting, score[judged])
    return Trials(scaled, inside[judged])


def _choose_judged_users(setting: RoundScenario, federation: Federation, progress: Progress) -> Longs:
    """The first user of every client, of the setting's tier where there are several."""
    membership = progress.local_devices.group_active_clients(federation, progress.server)
    users = membership.users.take(membership.active)
    starts = users.ptr[:-1]
    first_users = users.ids[starts]
    if setting.has_tiers:
        tiers = progress.clients.parts["dpps"]["tier"]
        is_of_tier = tiers[first_users] == setting.tier
        first_users = first_users[is_of_tier]
    return np.asarray(first_users)


def _read_canary_scores(setting: RoundScenario, federation: Federation, progress: Progress) -> Doubles:
    """The first number of every row after one exchange; with threat = local, of every client's release by itself."""
    broadcast = federation.broadcast_serving(progress.server)
    devices = progress.devices
    if not setting.is_local:
        reply = devices.exchange(federation, progress.server, broadcast, Question("round"))
        rows = reply.total["rows"]
        return np.array(rows[:, 0])
    membership = progress.local_devices.group_active_clients(federation, progress.server)
    numbers = np.zeros(federation.stream.n_items)
    for client in membership.active:
        key = membership.keys[[client]]
        reply = devices.exchange(federation, progress.server, broadcast, Question("round"), key)
        users = membership.users.row(int(client))
        first_user = users[0]
        field_sum = reply.total[setting.reads]
        if setting.reads == "rows":
            numbers[first_user] = field_sum[first_user, 0]
        else:
            numbers[first_user] = field_sum[0]
    return numbers


def _scale_scores(setting: RoundScenario, score: Doubles) -> Doubles:
    """Deviation 1 if the claim is true, around 0 outside and mu inside; pure: in clips."""
    claim = setting.build_claim()
    if setting.is_pure:
        return score / setting.clip
    if setting.reads != "rows":  # a threshold between the two is all that is read
        return score * claim.mu / setting.signal
    root = math.sqrt(setting.rounds_read)
    mu_each = claim.mu / root
    if not setting.is_local:
        return score * mu_each / setting.clip / root
    distance = 2 * setting.clip
    from_middle = score * mu_each / distance / root
    return from_middle + claim.mu / 2


def _make_federation(setting: RoundScenario, people: int, inside: Bools, seed: int, bug: str | None) -> Federation:
    config = _make_config(setting, people, seed)
    model = find_backbone_class("mf")
    options = model.Config.model_validate({"dim": 2})
    backbone = model(options)
    draws = Draws(seed)
    context = RunContext(backbone, draws, config.train)
    part = _make_part(setting, context)
    part.check(people)
    planted = CanaryPart(PartConfig(), part.context)
    planted.inside = inside
    planted.replaced = setting.is_local
    planted.reads = setting.reads
    parts = (planted, with_planted_bug(part, bug))
    stream = make_canary_stream(people)
    return Federation(backbone, parts, config, draws, 1024, stream=stream)


def _make_config(setting: RoundScenario, people: int, seed: int) -> RunConfig:
    train: dict[str, Any] = {"rounds": 8, "batch_size": 8, **setting.train}
    if not setting.is_local:
        train["aggregation"] = "fixed"
        train["denominator"] = setting.rate * people  # of enrolled people, whoever is inside
    if setting.is_sampled:
        train["participation"] = {"kind": "poisson", "rate": setting.rate}
    if setting.unit == "silo":
        train["silos"] = people // 2
    return validate_model(RunConfig, {"seed": seed, "train": train}, "the audit")


def _make_part(setting: RoundScenario, context: RunContext) -> Part:
    """The part that is audited, which knows of another part that weighs clients, if the setting has one."""
    (part,) = build_parts([setting.part], context)
    if not setting.other_part:
        return part
    other_spec = {"name": setting.other_part}
    (other,) = build_parts([other_spec], context)
    specs = (other_spec, setting.part)
    traits = (PartTraits(other), PartTraits(part))
    wider_context = replace(part.context, part_specs=specs, traits=traits)
    return type(part)(part.config, wider_context)


def make_canary_stream(people: int) -> BlockStream:
    """As many items as people; everybody has one of their own."""
    ptr = np.arange(people + 1, dtype=np.int64)
    ids = np.arange(people, dtype=np.int32)
    block = make_training_block(Ragged(ptr, ids), people)
    return make_stream([block], name_canaries(people))
