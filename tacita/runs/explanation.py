"""Why an item is recommended to a person, from what the person's own device scores with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.types import Doubles, Floats, Ints, Ragged
from tacita.federation.scoring import DeviceScorer, take_user_lists
from tacita.models.statistic_model import StatisticModel
from tacita.runs.loaded_run import LoadedRun

MOST_ITEMS = 300
"""Latest items of a person that are left out one by one."""
N_REASONS = 3
"""Items that stand beside each recommendation as its reasons."""
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


def add_reasons(loaded: LoadedRun, user: int, entries: Sequence[dict[str, Any]]) -> None:
    """Put beside each recommended item (an entry with its raw id) the person's own items that speak most for it."""
    numbers = loaded.find_known_items([entry["item"] for entry in entries])
    explanations = explain_items(loaded, user, numbers.tolist())
    for entry, explanation in zip(entries, explanations, strict=True):
        entry["why"] = {"basis": explanation.basis, "items": list_reasons(loaded, explanation, N_REASONS)}


def list_reasons(loaded: LoadedRun, explanation: Explanation, k: int) -> list[dict[str, Any]]:
    """The k strongest reasons: raw id, effect, title."""
    item_ids = loaded.saved.ids["items"]
    titles = loaded.titles
    items = explanation.items[:k].tolist()
    effects = explanation.effects[:k].tolist()
    reasons = []
    for item, effect in zip(items, effects, strict=True):
        is_number = math.isfinite(effect)  # JSON has no infinite numbers
        reasons.append({"item": item_ids[item], "effect": effect if is_number else None, "title": titles[item]})
    return reasons


def _compare_items(loaded: LoadedRun, own_items: Ints, item: int) -> Doubles:
    """How much each of a person's items is like another."""
    likeness: Floats = loaded.plan.backbone.measure_similarity_to_item(
        loaded.server, loaded.scorer.build_item_table(), item
    )
    effects = np.zeros(len(own_items))
    is_known = own_items < len(likeness)
    effects[is_known] = likeness[own_items[is_known]]
    return effects


def _score_without_each(scorer: DeviceScorer, users: Ints, items: Ints) -> tuple[Ints, Doubles]:
    """A person's latest items, and the scores (latest items, items) that the person has without each of them."""
    n_users = len(scorer.block.train)
    row = int(users[0])
    current = scorer.block.train.take(users)
    past = Ragged.empty(1) if scorer.past is None else take_user_lists(scorer.past, users)
    history = np.concatenate([past.ids, current.ids])
    newest_first = list(dict.fromkeys(history[::-1].tolist()))
    latest = np.array(newest_first[:MOST_ITEMS][::-1], np.int32)
    scores = np.zeros((len(latest), len(items)))
    for number, item in enumerate(latest):
        other_current = _drop_item(current, item)
        is_all_that_counts = len(current.ids) > 0 and not len(other_current.ids)
        # without its only item of the block a device would read earlier ones, which say nothing of this item
        kept_past = Ragged.empty(1) if is_all_that_counts else _drop_item(past, item)
        block = replace(scorer.block, train=_place_row(other_current, row, n_users))
        other_past = None if scorer.past is None else _place_row(kept_past, row, n_users)
        without = replace(scorer, block=block, past=other_past)(users)
        scores[number] = without[0, items]
    return latest, scores


def _drop_item(own: Ragged, item: int) -> Ragged:
    return own.filter_entries(own.ids != item)


def _place_row(own: Ragged, row: int, n_rows: int) -> Ragged:
    """One person's list among those of all, which are empty: nobody's scores depend on others' lists."""
    ptr = np.zeros(n_rows + 1, np.int64)
    ptr[row + 1 :] = len(own.ids)
    return replace(own, ptr=ptr)
