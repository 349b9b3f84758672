"""Canaries in rounds: crafted updates through the clip, the draw of participants, the noise and the ledger of a run.

Every client is a canary with a row of its own, far longer than the clip. Everything else is the run's own code: what
`Here.exchange` returns is what a server, or whoever sees the noised sum, would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.audit.canaries.bounds import Claim, Trials
from tacita.core.config import RunConfig, validated
from tacita.core.draws import Draws, keys_of
from tacita.core.types import Arrays, Block, Bools, CohortView, Doubles, Held, Ints, Ragged, ServerState, Stream
from tacita.federation.rounds import Progress, begin_block, start
from tacita.fields import Rows, Total, Upload
from tacita.methods import World, build_parts
from tacita.methods.personal.dpps import MASS, SHARE
from tacita.models import backbone_class
from tacita.privacy.accounting import sampled_noise
from tacita.privacy.calibration import mu_of
from tacita.round.parts import Part, PartConfig
from tacita.round.plan import Federation, to_serve

LONG = 3.0  # times the clip: what a canary would send if nobody shortened it
DELTA = 1e-5


@dataclass(frozen=True)
class Played:
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
    beside: str = ""  # another part that weighs clients, as the run would have one

    @property
    def pure(self) -> bool:
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
        return {"dpps.length": SHARE, "dpps.mass": MASS}[self.reads] * self.clip

    def claim(self) -> Claim:
        if self.pure:
            return Claim(self.epsilon, 0.0, "pure", threshold=1.0)
        if self.rate < 1:
            mu = 1 / sampled_noise(self.epsilon, DELTA, self.rate, self.releases)
            return Claim(self.epsilon, DELTA, mu=mu, rate=self.rate, releases=self.releases)
        return Claim(self.epsilon, DELTA, mu=mu_of(self.epsilon, DELTA))


class Planted(Part):
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
            return self._with_number(view, upload, own), {}
        sign = np.where(self.inside[own], 1.0, -1.0 if self.replaced else 0.0)
        value = np.zeros((len(own), view.items.shape[1]), np.float32)
        value[:, 0] = LONG * sign
        rows = Rows(np.arange(len(own), dtype=np.int32), own.astype(np.int32), value)
        return replace(upload.with_value("rows", rows), weight=np.where(sign != 0, upload.weight, 0.0)), {}

    def _with_number(self, view: CohortView, upload: Upload, own: Ints) -> Upload:
        there = self.inside[own]
        value = np.zeros((len(own), view.items.shape[1]), np.float32)
        value[:, 0] = LONG * there
        weight = np.where(there, 1.0, 1e-6) if self.reads == "dpps.mass" else 1.0
        rows = Rows(np.arange(len(own), dtype=np.int32), own.astype(np.int32), value)
        return replace(upload.with_value("rows", rows), weight=upload.weight * weight)


class HalfTheNoise(Part):
    """A planted bug."""

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        made = super().encode_sum(server, total)
        return made.with_sums({name: (value + total[name]) / 2 for name, value in made.sums.items()})


class NoClip(Part):
    """A planted bug."""

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Held]:
        made, kept = super().encode(view, upload)
        return made.with_value("rows", upload.values["rows"]), kept


class InTheClear(Part):
    """A planted bug: what goes along with rows gets no noise."""

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        made = super().encode_sum(server, total)
        return made.with_sums({name: value for name, value in total.sums.items() if name.startswith("dpps.")})


BUGS: dict[str, type[Part]] = {"half the noise": HalfTheNoise, "no clip": NoClip, "no noise on it": InTheClear}


def with_bug(part: Part, bug: str | None) -> Part:
    if bug is None:
        return part
    made: type[Part] = type(f"{bug} in {part.name}", (BUGS[bug], type(part)), {})
    return made(part.config, part.world)


def play(setting: Played, canaries: int, seed: int, bug: str | None = None) -> Trials:
    """One run: all planned rounds, and what each canary's row shows after them."""
    people = canaries * (2 if setting.unit == "silo" else 1)
    inside = np.random.default_rng([seed, 1]).random(people) < 0.5
    fed = _federation(setting, people, inside, seed, bug)
    progress = start(fed)
    begin_block(fed, progress, 0)
    living = progress.here.living(fed, progress.server)
    own = living.users.take(living.active)
    first = own.ids[own.ptr[:-1]]
    if setting.part["name"] == "dpps" and len(setting.part["tiers"]) > 1:
        first = first[progress.clients.parts["dpps"]["tier"][first] == setting.tier]
    score = np.zeros(people)
    for _ in range(setting.releases if setting.rate == 1 else 1):
        score += _heard(setting, fed, progress)
        progress.server = replace(progress.server, round=progress.server.round + 1)
    return Trials(_scaled(setting, score[first]), inside[first])


def _heard(setting: Played, fed: Federation, progress: Progress) -> Doubles:
    """The first number of every row after one exchange; with threat = local, of every client's release by itself."""
    down, devices = to_serve(fed, progress.server), progress.devices
    if setting.threat != "local":
        return np.array(devices.exchange(fed, progress.server, down, "round").total["rows"][:, 0])
    living = progress.here.living(fed, progress.server)
    out = np.zeros(fed.stream.n_items)
    for client in living.active:
        total = devices.exchange(fed, progress.server, down, "round", living.keys[[client]]).total
        own = living.users.row(int(client))[0]
        out[own] = total["rows"][own, 0] if setting.reads == "rows" else total[setting.reads][0]
    return out


def _scaled(setting: Played, score: Doubles) -> Doubles:
    """Deviation 1 if the claim is true, around 0 outside and mu inside; pure: in clips."""
    claim = setting.claim()
    if setting.pure:
        return score / setting.clip
    if setting.reads != "rows":  # a threshold between the two is all that is read
        return score * claim.mu / setting.signal
    apart = 2 * setting.clip if setting.threat == "local" else setting.clip
    released = claim.mu / math.sqrt(setting.releases) if setting.rate == 1 else claim.mu
    score = score * released / apart / math.sqrt(setting.releases if setting.rate == 1 else 1)
    return score + claim.mu / 2 if setting.threat == "local" else score


def _federation(setting: Played, people: int, inside: Bools, seed: int, bug: str | None) -> Federation:
    train: dict[str, Any] = {"rounds": 8, "batch_size": 8, **setting.train}
    if setting.threat != "local":
        train["aggregation"] = "fixed"
    if setting.rate < 1:
        train["participation"] = {"kind": "poisson", "rate": setting.rate}
    if setting.unit == "silo":
        train["silos"] = people // 2
    config = validated(RunConfig, {"seed": seed, "train": train}, "the audit")
    model = backbone_class("mf")
    backbone, draws = model(model.Config.model_validate({"dim": 2})), Draws(seed)
    world = World(backbone, draws, config.train)
    (counted,) = build_parts([setting.part], world)
    if setting.beside:
        counted = type(counted)(counted.config, replace(counted.world, listed=({"name": setting.beside}, setting.part)))
    planted = Planted(PartConfig(), counted.world)
    planted.inside, planted.replaced, planted.reads = inside, setting.threat == "local", setting.reads
    counted.check(people)
    return Federation(backbone, (planted, with_bug(counted, bug)), config, draws, 1024, stream=everybody(people))


def everybody(people: int) -> Stream:
    """As many items as people; everybody has one of their own."""
    each = Ragged(np.arange(people + 1, dtype=np.int64), np.arange(people, dtype=np.int32))
    names = tuple(f"canary {n}" for n in range(people))
    nothing = Ragged.empty(people)
    block = Block(0, people, people, each, nothing, nothing, np.ones(people, bool), people)
    return Stream("canaries", (block,), names, names, keys_of(names), keys_of(names), {}, "canaries")
