"""Canaries in rounds: crafted updates through the clip, the draw of participants, the noise and the ledger of a run.

Every client is a canary with a row of its own, far longer than the clip. Everything else is the run's own code: what
`Here.exchange` returns is what a server, or whoever sees the noised sum, would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import (
    Arrays,
    Block,
    BlockStream,
    Bools,
    CohortView,
    Doubles,
    Ints,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.federation.rounds import Progress, begin_block, start_run
from tacita.messages import SparseRows, Total, Upload
from tacita.methods import RunContext, build_parts
from tacita.methods.personal.dpps import LENGTH_SHARE, WEIGHT_SHARE
from tacita.models import backbone_class
from tacita.privacy.accounting import calibrate_sampled_noise
from tacita.privacy.calibration import mu_of
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.round.part import Part, PartConfig
from tacita.round.plan import Federation

CANARY_LENGTH = 3.0  # times the clip: what a canary would send if nobody shortened it
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
    reads: str = "rows"  # the field that tells: a canary's own row, or one number that goes along with it
    other_part: str = ""  # another part that weighs clients, as the run would have one

    @property
    def is_pure(self) -> bool:
        return bool(self.part["name"] == "laplace-noise")

    @property
    def clip(self) -> float:
        """Of the tier: where one noise is for all, people with smaller budgets are shortened more."""
        tiers = self.part.get("tiers", [self.epsilon])
        if self.threat == "local":
            return 1.0
        return mu_of(self.epsilon, DELTA) / mu_of(tiers[-1], DELTA)

    @property
    def signal(self) -> float:
        """How far a number that goes along tells who is inside, without noise."""
        return {"dpps.length": LENGTH_SHARE, "dpps.mass": WEIGHT_SHARE}[self.reads] * self.clip

    def claim(self) -> Claim:
        if self.is_pure:
            return Claim(self.epsilon, 0.0, "pure", threshold=1.0)
        if self.rate < 1:
            mu = 1 / calibrate_sampled_noise(self.epsilon, DELTA, self.rate, self.releases)
            return Claim(self.epsilon, DELTA, mu=mu, rate=self.rate, releases=self.releases)
        return Claim(self.epsilon, DELTA, mu=mu_of(self.epsilon, DELTA))


class CanaryPart(Part):
    """Everybody is a canary: one who is inside sends a long row, others its opposite, or nothing at all.

    Where a number goes along, others send a row of zeros, or count next to nothing, so that the number tells.
    """

    name = "canary"
    inside: Bools
    replaced: bool
    reads: str = "rows"

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        own = view.user[view.user_ptr[:-1]]
        if self.reads != "rows":
            return self._encode_number(view, upload, own), {}
        sign = np.where(self.inside[own], 1.0, -1.0 if self.replaced else 0.0)
        value = np.zeros((len(own), view.items.shape[1]), np.float32)
        value[:, 0] = CANARY_LENGTH * sign
        rows = SparseRows(np.arange(len(own), dtype=np.int32), own.astype(np.int32), value)
        return replace(upload.with_value("rows", rows), weight=np.where(sign != 0, upload.weight, 0.0)), {}

    def _encode_number(self, view: CohortView, upload: Upload, own: Ints) -> Upload:
        there = self.inside[own]
        value = np.zeros((len(own), view.items.shape[1]), np.float32)
        value[:, 0] = CANARY_LENGTH * there
        weight = np.where(there, 1.0, 1e-6) if self.reads == "dpps.mass" else 1.0
        rows = SparseRows(np.arange(len(own), dtype=np.int32), own.astype(np.int32), value)
        return replace(upload.with_value("rows", rows), weight=upload.weight * weight)


class HalfNoisePart(Part):
    """A planted bug."""

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        made = super().encode_sum(server, total)
        return made.with_sums({name: (value + total[name]) / 2 for name, value in made.sums.items()})


class UnclippedPart(Part):
    """A planted bug."""

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        made, kept = super().encode(view, upload)
        return made.with_value("rows", upload.values["rows"]), kept


class UnnoisedScalarsPart(Part):
    """A planted bug: what goes along with rows gets no noise."""

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        made = super().encode_sum(server, total)
        return made.with_sums({name: value for name, value in total.sums.items() if name.startswith("dpps.")})


BUGS: dict[str, type[Part]] = {
    "half the noise": HalfNoisePart,
    "no clip": UnclippedPart,
    "no noise on it": UnnoisedScalarsPart,
}


def plant_bug(part: Part, bug: str | None) -> Part:
    if bug is None:
        return part
    made: type[Part] = type(f"{bug} in {part.name}", (BUGS[bug], type(part)), {})
    return made(part.config, part.context)


def run_trials(setting: RoundScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    """One run: all planned rounds, and what each canary's row shows after them."""
    people = canaries * (2 if setting.unit == "silo" else 1)
    inside = np.random.default_rng([seed, 1]).random(people) < 0.5
    fed = _make_federation(setting, people, inside, seed, bug)
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    living = progress.local_devices.current_membership(fed, progress.server)
    own = living.users.take(living.active)
    first = own.ids[own.ptr[:-1]]
    if setting.part["name"] == "dpps" and len(setting.part["tiers"]) > 1:
        first = first[progress.clients.parts["dpps"]["tier"][first] == setting.tier]
    score = np.zeros(people)
    for _ in range(setting.releases if setting.rate == 1 else 1):
        score += _read_rows(setting, fed, progress)
        progress.server = replace(progress.server, round=progress.server.round + 1)
    return Trials(_scale_scores(setting, score[first]), inside[first])


def _read_rows(setting: RoundScenario, fed: Federation, progress: Progress) -> Doubles:
    """The first number of every row after one exchange; with threat = local, of every client's release by itself."""
    down, devices = fed.broadcast_serving(progress.server), progress.devices
    if setting.threat != "local":
        return np.array(devices.exchange(fed, progress.server, down, "round").total["rows"][:, 0])
    living = progress.local_devices.current_membership(fed, progress.server)
    out = np.zeros(fed.stream.n_items)
    for client in living.active:
        total = devices.exchange(fed, progress.server, down, "round", living.keys[[client]]).total
        own = living.users.row(int(client))[0]
        out[own] = total["rows"][own, 0] if setting.reads == "rows" else total[setting.reads][0]
    return out


def _scale_scores(setting: RoundScenario, score: Doubles) -> Doubles:
    """Deviation 1 if the claim is true, around 0 outside and mu inside; pure: in clips."""
    claim = setting.claim()
    if setting.is_pure:
        return score / setting.clip
    if setting.reads != "rows":  # a threshold between the two is all that is read
        return score * claim.mu / setting.signal
    apart = 2 * setting.clip if setting.threat == "local" else setting.clip
    released = claim.mu / math.sqrt(setting.releases) if setting.rate == 1 else claim.mu
    score = score * released / apart / math.sqrt(setting.releases if setting.rate == 1 else 1)
    return score + claim.mu / 2 if setting.threat == "local" else score


def _make_federation(setting: RoundScenario, people: int, inside: Bools, seed: int, bug: str | None) -> Federation:
    train: dict[str, Any] = {"rounds": 8, "batch_size": 8, **setting.train}
    if setting.threat != "local":
        train["aggregation"] = "fixed"
    if setting.rate < 1:
        train["participation"] = {"kind": "poisson", "rate": setting.rate}
    if setting.unit == "silo":
        train["silos"] = people // 2
    config = validate_model(RunConfig, {"seed": seed, "train": train}, "the audit")
    model = backbone_class("mf")
    backbone, draws = model(model.Config.model_validate({"dim": 2})), Draws(seed)
    world = RunContext(backbone, draws, config.train)
    (counted,) = build_parts([setting.part], world)
    if setting.other_part:
        counted = type(counted)(
            counted.config, replace(counted.context, part_specs=({"name": setting.other_part}, setting.part))
        )
    planted = CanaryPart(PartConfig(), counted.context)
    planted.inside, planted.replaced, planted.reads = inside, setting.threat == "local", setting.reads
    counted.check(people)
    return Federation(
        backbone, (planted, plant_bug(counted, bug)), config, draws, 1024, stream=make_canary_stream(people)
    )


def make_canary_stream(people: int) -> BlockStream:
    """As many items as people; everybody has one of their own."""
    each = Ragged(np.arange(people + 1, dtype=np.int64), np.arange(people, dtype=np.int32))
    names = tuple(f"canary {n}" for n in range(people))
    nothing = Ragged.empty(people)
    block = Block(0, people, people, each, nothing, nothing, np.ones(people, bool), people)
    return BlockStream("canaries", (block,), names, names, derive_keys(names), derive_keys(names), {}, "canaries")
