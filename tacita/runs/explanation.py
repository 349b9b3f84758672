"""Why an item is recommended to a person, from what the person's own device scores with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Doubles, Floats, Ints
from tacita.federation.scoring import DeviceScorer
from tacita.models.statistic_model import StatisticModel
from tacita.runs.loaded_run import LoadedRun

MOST_ITEMS = 300
"""Latest items of a person that are left out one by one."""
REMOVED = "left out"
ALIKE = "alike"


@dataclass(frozen=True)
class Explanation:
    """Items of a person that speak for another, the strongest first.

    `basis` is "left out" where an effect is what the score loses without the item, and "alike" where a model cannot be
    taken apart and an effect is only how much two items resemble each other.
    """

    score: float
    basis: str
    items: Ints
    effects: Doubles


def explain_item(loaded: LoadedRun, user: int, item: int) -> Explanation:
    """What of a person's own items speaks for an item."""
    users = np.array([user], np.int32)
    score = float(loaded.scorer(users)[0, item])
    if isinstance(loaded.plan.backbone, StatisticModel):
        items, effects = _leave_items_out(loaded.scorer, users, item, score)
        basis = REMOVED
    else:
        items = loaded.histories.row(user)
        likeness = loaded.plan.backbone.compare_items(loaded.server, loaded.scorer.item_table(), item)
        effects = _read_known(likeness, items)
        basis = ALIKE
    order = np.argsort(-effects, kind="stable")
    return Explanation(score, basis, items[order], effects[order])


def _read_known(likeness: Floats, items: Ints) -> Doubles:
    effects = np.zeros(len(items))
    is_known = items < len(likeness)
    effects[is_known] = likeness[items[is_known]]
    return effects


def _leave_items_out(scorer: DeviceScorer, users: Ints, item: int, score: float) -> tuple[Ints, Doubles]:
    """What the score loses without each of a person's latest items."""
    train = scorer.block.train
    first = train.ptr[users[0]]
    last = train.ptr[users[0] + 1]
    places = np.arange(first, last)[-MOST_ITEMS:]
    effects = np.zeros(len(places))
    for number, place in enumerate(places):
        stays = np.ones(len(train.ids), bool)
        stays[place] = False
        block = replace(scorer.block, train=train.filter_entries(stays))
        without = replace(scorer, block=block)(users)
        effects[number] = score - float(without[0, item])
    return train.ids[places], effects
