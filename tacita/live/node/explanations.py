"""Why something is recommended, from what the person's own device computes with, and what one item less would change.

A model that is a sum over the person's own items is taken apart exactly: its terms are shown only if they add up to
the score that was ranked. Of every other model it is said that it cannot be taken apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Doubles, Longs, Ragged
from tacita.live.node.serving import Snapshot
from tacita.models.tally.model import Tally
from tacita.models.tally.weights import recency_weights

TOLERANCE = 1e-4  # relative: scores are sums in single precision
MAX_TERMS = 8

EXACT_NOTE = (
    "These are the exact terms: each of your items adds or takes away this much, and together they are the score. "
    "Nobody was asked for this."
)
RECENCY_NOTE = " Newer items count more."
SIMILARITY_NOTE = (
    "This model learned numbers from your whole history, on this device, and cannot be taken apart item by item. "
    "What is listed only resembles the recommendation in the model's own terms; it need not be the reason."
)
UNEXPLAINED_NOTE = "This model cannot be taken apart, and nothing honest can be said about single items of yours."
NO_PREVIEW_NOTE = (
    "This model learned from your whole history at once; what one item less would change shows after the next round."
)
PREVIEW_NOTE = (
    "Worked out here with the model as it is. Taking an item back changes what the server's model knows; your own "
    "list is made on this device and goes on reading what stays on it."
)


def explain_item(snapshot: Snapshot, user: str, item: str) -> dict[str, Any]:
    """What of a person's own history speaks for an item, the strongest first."""
    row, place = snapshot.find_row(user), _find_item(snapshot, item)
    users = np.array([row], np.int32)
    score = float(snapshot.scorer(users)[0, place])
    view = snapshot.scorer.build_view(users)
    exact = _exact_terms(snapshot, view, place)
    total = None if exact is None else float(exact[1].sum())
    if exact is not None and total is not None and abs(total - score) <= TOLERANCE * max(1.0, abs(score)):
        said = EXACT_NOTE + (RECENCY_NOTE if view.heads["recency"][0] else "")
        return {**_describe_terms(snapshot, item, score, exact), "kind": "exact", "said": said}
    alike = _similar_items(snapshot, row, place)
    if alike is None:
        return {
            **_describe_terms(snapshot, item, score, (np.zeros(0, np.int64), np.zeros(0))),
            "kind": "none",
            "said": UNEXPLAINED_NOTE,
        }
    return {**_describe_terms(snapshot, item, score, alike), "kind": "alike", "said": SIMILARITY_NOTE}


def preview_removal(snapshot: Snapshot, user: str, item: str, without: str, k: int = 10) -> dict[str, Any]:
    """What a person's list would be if one of their items were not in their history."""
    scorer, row = snapshot.scorer, snapshot.find_row(user)
    _find_item(snapshot, item)
    gone = _find_item(snapshot, without)
    if gone not in snapshot.seen.row(row):
        raise TacitaError(f"you have no item '{without[:100]}' on this device.")
    k = min(k, len(snapshot.items))
    before = snapshot.recommend(user, k)
    if not scorer.plan.backbone.reads_history:
        return {"can": False, "said": NO_PREVIEW_NOTE, "before": before, "after": []}
    block = replace(scorer.block, train=_drop_item(scorer.block.train, row, gone))
    past = None if scorer.past is None else _drop_item(scorer.past, row, gone)
    scores = replace(scorer, block=block, past=past)(np.array([row], np.int32))
    after = snapshot.top_items(row, k, scores)
    places = [{one["item"]: n for n, one in enumerate(both, 1)} for both in (before, after)]
    return {
        "can": True,
        "said": PREVIEW_NOTE,
        "place before": places[0].get(item),
        "place after": places[1].get(item),
        "comes in": [one for one in after if one["item"] not in places[0]],
        "goes out": [one for one in before if one["item"] not in places[1]],
        "before": before,
        "after": after,
    }


Terms = tuple[Longs, Doubles]  # places of items, and what each says


def _exact_terms(snapshot: Snapshot, view: CohortView, place: int) -> Terms | None:
    """The sum that a score of tally is, term by term."""
    backbone, server = snapshot.scorer.plan.backbone, snapshot.scorer.server
    if not isinstance(backbone, Tally):
        return None
    latest = backbone.select_latest(view)
    weight = recency_weights(latest, float(view.heads["recency"][0])).astype(np.float64)
    says = backbone.likeness(server, server.items, place).astype(np.float64)
    return latest.ids.astype(np.int64), weight * says[latest.ids]


def _similar_items(snapshot: Snapshot, row: int, place: int) -> Terms | None:
    """How much a person's own items are like one, where the model has rows to compare."""
    scorer = snapshot.scorer
    if not scorer.server.items.shape[1]:
        return None
    own = snapshot.seen.row(row).astype(np.int64)
    found = scorer.plan.backbone.likeness(scorer.server, scorer.server.items, place)[own].astype(np.float64)
    return (own, found) if np.isfinite(found).all() else None


def _describe_terms(snapshot: Snapshot, item: str, score: float, terms: Terms) -> dict[str, Any]:
    ids, values = terms
    order = np.argsort(-np.abs(values), kind="stable")
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    shown = [n for n in order[:MAX_TERMS].tolist() if values[n]]
    rest = float(values.sum() - sum(values[n] for n in shown))
    return {
        "item": item,
        "title": snapshot.items[_find_item(snapshot, item)][1],
        "score": score,
        "terms": [
            {
                "item": snapshot.items[ids[n]][0],
                "title": snapshot.items[ids[n]][1],
                "term": float(values[n]),
                "share": float(abs(values[n]) / largest),
            }
            for n in shown
        ],
        "others": int((values != 0).sum()) - len(shown),
        "rest": rest,
    }


def _find_item(snapshot: Snapshot, item: str) -> int:
    for n, (raw, _) in enumerate(snapshot.items):
        if raw == item:
            return n
    raise TacitaError(f"the model does not know item '{item[:100]}'.")


def _drop_item(lists: Ragged, row: int, item: int) -> Ragged:
    """The lists without one item of one user."""
    return lists.filter_entries(~((lists.rows() == row) & (lists.ids == item)))
