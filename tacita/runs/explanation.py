"""Why an item is recommended to a person, from what the person's own device scores with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Doubles, Floats, Ints, Ragged
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
    return explain_items(loaded, user, [item])[0]


def explain_items(loaded: LoadedRun, user: int, items: Sequence[int]) -> list[Explanation]:
    """What of a person's own items speaks for each of some items; a history is taken apart once for all of them."""
    users = np.array([user], np.int32)
    wanted = np.array(items, np.int32)
    scores = loaded.scorer(users)[0, wanted].astype(np.float64)
    if isinstance(loaded.plan.backbone, StatisticModel):
        own_items, without = _score_without_each(loaded.scorer, users, wanted)
        effects = scores - without
        basis = REMOVED
    else:
        own_items = loaded.histories.row(user)
        columns = [_compare_items(loaded, own_items, item) for item in items]
        effects = np.stack(columns, axis=1) if columns else np.zeros((len(own_items), 0))
        basis = ALIKE
    explanations = []
    for place, score in enumerate(scores.tolist()):
        order = np.argsort(-effects[:, place], kind="stable")
        explanations.append(Explanation(score, basis, own_items[order], effects[order, place]))
    return explanations


def _compare_items(loaded: LoadedRun, own_items: Ints, item: int) -> Doubles:
    """How much each of a person's items is like another."""
    likeness: Floats = loaded.plan.backbone.compare_items(loaded.server, loaded.scorer.item_table(), item)
    effects = np.zeros(len(own_items))
    is_known = own_items < len(likeness)
    effects[is_known] = likeness[own_items[is_known]]
    return effects


def _score_without_each(scorer: DeviceScorer, users: Ints, items: Ints) -> tuple[Ints, Doubles]:
    """A person's latest items, and the scores (latest items, items) that the person has without each of them."""
    train = scorer.block.train
    own = train.take(users)
    latest = np.arange(len(own.ids))[-MOST_ITEMS:]
    scores = np.zeros((len(latest), len(items)))
    for number, place in enumerate(latest):
        stays = np.ones(len(own.ids), bool)
        stays[place] = False
        lists = _place_row(own.filter_entries(stays), int(users[0]), len(train))
        block = replace(scorer.block, train=lists)
        without = replace(scorer, block=block)(users)
        scores[number] = without[0, items]
    return own.ids[latest], scores


def _place_row(own: Ragged, row: int, n_rows: int) -> Ragged:
    """One person's list among those of all, which are empty: nobody's scores depend on others' lists."""
    ptr = np.zeros(n_rows + 1, np.int64)
    ptr[row + 1 :] = len(own.ids)
    return replace(own, ptr=ptr)
