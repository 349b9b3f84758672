"""Canaries among people who upload items in place of others (PDC-FRS): by the device's own `encode_request`.

Inside, a person asks to share some items; outside, as many others. The tables are the worst there are: for the
exponential mechanism, items that stand alone, opposite to many that are alike. That spends both halves of its epsilon.
The reader checks whether all that a person uploads points inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, TrainConfig
from tacita.core.draws import Draws
from tacita.core.types import BlockStream, CohortView, Floats, Ints, Ragged
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.methods import RunContext, build_parts
from tacita.methods.sharing.contribution import Contribution
from tacita.models import find_backbone_class
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.research.audit.canaries.canary_stream import make_stream, make_training_block
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

ALIKE_ITEMS = 20  # items that are alike, for the exponential mechanism


@dataclass(frozen=True)
class ItemScenario:
    """A mechanism, what it promises of one item, and how many a person shares."""

    mechanism: str
    epsilon: float
    items: int = 1

    def build_claim(self) -> Claim:
        return Claim(self.epsilon * self.items, 0.0, "pure", threshold=1.0)

    def table(self) -> Floats:
        """Rows of a catalogue: first the items of people inside, then the others."""
        if self.mechanism == "krr":
            return np.eye(2 * self.items, dtype=np.float32)
        n_items = self.items + ALIKE_ITEMS
        is_inside = np.arange(n_items) < self.items
        side = np.where(is_inside, 1.0, -1.0)
        table = np.stack([side, 0 * side], axis=1)
        return table.astype(np.float32)

    def points_inside(self, items: Ints) -> Any:
        """(people, items) whether each uploaded item is what a person inside uploads."""
        if self.mechanism == "krr":
            return items == np.arange(self.items)
        return items < self.items


class DoubleEpsilonContribution(Contribution):
    """A planted bug: chances as far apart as those of twice the epsilon."""

    def draw_replacements(self, view: CohortView, items: Ragged) -> Any:
        double_epsilon = 2 * self.config.epsilon
        config = self.config.model_copy(update={"epsilon": double_epsilon})
        contribution = Contribution(config, self.context)
        return contribution.draw_replacements(view, items)


def run_trials(setting: ItemScenario, people: int, seed: int, bug: str | None = None) -> Trials:
    """Everybody shares once; the score is 1 where all that a person uploads is what is uploaded inside."""
    rng = np.random.default_rng([seed, 2])
    inside = rng.random(people) < 0.5
    table = setting.table()
    federation = _make_federation(setting, people, table, seed, bug)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    server = replace(progress.server, items=table)
    first_item = np.where(inside, 0, setting.items)
    offsets = np.arange(setting.items)
    items = first_item[:, None] + offsets[None, :]
    ids = items.astype(np.int32)
    users = np.arange(people + 1, dtype=np.int64)
    ptr = setting.items * users
    lists = Ragged(ptr, ids.reshape(-1))
    batch = RequestBatch("share", federation.stream.user_keys, lists)
    sent = progress.devices.apply_requests(federation, server, batch)
    uploaded = sent.items.ids.reshape(people, setting.items)
    is_inside = setting.points_inside(uploaded)
    score = np.asarray(is_inside.all(axis=1), np.float64)
    return Trials(score, inside)


def _make_federation(setting: ItemScenario, people: int, table: Floats, seed: int, bug: str | None) -> Federation:
    model = find_backbone_class("mf")
    width = table.shape[1]
    options = model.Config.model_validate({"dim": width})
    backbone = model(options)
    draws = Draws(seed)
    spec = {"name": "contribution", "mechanism": setting.mechanism, "epsilon": setting.epsilon}
    context = RunContext(backbone, draws, TrainConfig())
    (part,) = build_parts([spec], context)
    assert isinstance(part, Contribution)
    if bug is not None:
        part = DoubleEpsilonContribution(part.config, part.context)
    config = RunConfig(seed=seed)
    stream = _make_item_stream(people, len(table))
    return Federation(backbone, (part,), config, draws, 1024, stream=stream)


def _make_item_stream(people: int, n_items: int) -> BlockStream:
    """Everybody has one item."""
    ptr = np.arange(people + 1, dtype=np.int64)
    ids = np.arange(people) % n_items
    lists = Ragged(ptr, ids.astype(np.int32))
    return make_stream([make_training_block(lists, n_items)])
