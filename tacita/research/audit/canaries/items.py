"""Canaries among people who tell items in place of others (PDC-FRS): by the device's own `encode_request`.

Inside, a person asks to share some items; outside, as many others. The tables are the worst there are: for the
exponential mechanism items that stand alone, opposite to many that are alike, so that both halves of its epsilon are
spent. What is looked at is whether all that was told points inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, TrainConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Block, BlockStream, CohortView, Floats, Ragged
from tacita.federation.rounds import begin_block, start_run
from tacita.methods import RunContext, build_parts
from tacita.methods.sharing.contribution import Contribution
from tacita.models import backbone_class
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

ALIKE_ITEMS = 20  # items that are alike, for the exponential mechanism


@dataclass(frozen=True)
class ItemScenario:
    """A mechanism, what it promises of one item, and how many a person tells."""

    mechanism: str
    epsilon: float
    items: int = 1

    def claim(self) -> Claim:
        return Claim(self.epsilon * self.items, 0.0, "pure", threshold=1.0)

    def table(self) -> Floats:
        """Rows of a catalogue: first the items of people inside, then the others."""
        if self.mechanism == "krr":
            return np.eye(2 * self.items, dtype=np.float32)
        side = np.where(np.arange(self.items + ALIKE_ITEMS) < self.items, 1.0, -1.0)
        return np.stack([side, 0 * side], axis=1).astype(np.float32)


class DoubleEpsilonContribution(Contribution):
    """A planted bug: chances as far apart as those of twice the epsilon."""

    def draw_replacements(self, view: CohortView, items: Ragged) -> Any:
        double = self.config.model_copy(update={"epsilon": 2 * self.config.epsilon})
        return Contribution(double, self.context).draw_replacements(view, items)


def run_trials(setting: ItemScenario, people: int, seed: int, bug: str | None = None) -> Trials:
    """Everybody shares once; the score is 1 where all that was told for somebody is what is told inside."""
    inside = np.random.default_rng([seed, 2]).random(people) < 0.5
    table, k = setting.table(), setting.items
    fed = _make_federation(setting, people, table, seed, bug)
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    server = replace(progress.server, items=table)
    ptr = k * np.arange(people + 1, dtype=np.int64)
    asked = (np.arange(k)[None, :] + np.where(inside, 0, k)[:, None]).astype(np.int32)
    sent = progress.devices.apply_requests(
        fed, server, RequestBatch("share", fed.stream.user_keys, Ragged(ptr, asked.reshape(-1)))
    )
    told = sent.items.ids.reshape(people, k)
    hits = told == np.arange(k) if setting.mechanism == "krr" else told < k
    return Trials(np.asarray(hits.all(axis=1), np.float64), inside)


def _make_federation(setting: ItemScenario, people: int, table: Floats, seed: int, bug: str | None) -> Federation:
    model = backbone_class("mf")
    options = model.Config.model_validate({"dim": table.shape[1]})
    backbone, draws, config = model(options), Draws(seed), RunConfig(seed=seed)
    spec = {"name": "contribution", "mechanism": setting.mechanism, "epsilon": setting.epsilon}
    context = RunContext(backbone, draws, TrainConfig())
    (part,) = build_parts([spec], context)
    assert isinstance(part, Contribution)
    made = part if bug is None else DoubleEpsilonContribution(part.config, part.context)
    return Federation(backbone, (made,), config, draws, 1024, stream=_make_stream(people, len(table)))


def _make_stream(people: int, items: int) -> BlockStream:
    has = Ragged(np.arange(people + 1, dtype=np.int64), (np.arange(people) % items).astype(np.int32))
    users, names = tuple(f"canary {n}" for n in range(people)), tuple(str(n) for n in range(items))
    nothing = Ragged.empty(people)
    block = Block(0, people, items, has, nothing, nothing, np.ones(people, bool), people)
    return BlockStream("canaries", (block,), users, names, derive_keys(users), derive_keys(names), {}, "canaries")
