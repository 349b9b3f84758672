"""Why something is recommended, from what the person's own device computes with, and what one item less would change.

A model that is a sum over the person's own items is taken apart exactly: its terms are shown only if they add up to
the score that was ranked. The page says of every other model that it cannot be taken apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Doubles, Floats, Longs, Ragged
from tacita.live.json_object import JsonObject
from tacita.live.node.serving import Snapshot
from tacita.models.tally.model import Tally
from tacita.models.tally.weights import compute_recency_weights

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


Terms = tuple[Longs, Doubles]  # places of items, and what each says


# Why an item


def explain_item(snapshot: Snapshot, user: str, item: str) -> JsonObject:
    """What of a person's own history speaks for an item, the strongest first."""
    row = snapshot.find_user_row(user)
    place = _find_item_number(snapshot, item)
    users = np.array([row], np.int32)
    score = float(snapshot.scorer(users)[0, place])
    view = snapshot.scorer.build_scoring_view(users)
    exact_terms = _compute_exact_terms(snapshot, view, place)
    if exact_terms is not None and _adds_up(exact_terms, score):
        note = EXACT_NOTE + (RECENCY_NOTE if view.heads["recency"][0] else "")
        return {**_describe_terms(snapshot, item, score, exact_terms), "kind": "exact", "said": note}
    similar_items = _compute_similarity_terms(snapshot, row, place)
    if similar_items is None:
        no_terms = (np.zeros(0, np.int64), np.zeros(0))
        return {**_describe_terms(snapshot, item, score, no_terms), "kind": "none", "said": UNEXPLAINED_NOTE}
    return {**_describe_terms(snapshot, item, score, similar_items), "kind": "alike", "said": SIMILARITY_NOTE}


def _adds_up(terms: Terms, score: float) -> bool:
    """Whether terms are the score, up to single precision."""
    _, values = terms
    total = float(values.sum())
    return abs(total - score) <= TOLERANCE * max(1.0, abs(score))


def _compute_exact_terms(snapshot: Snapshot, view: CohortView, place: int) -> Terms | None:
    """The sum that a score of tally is, term by term."""
    backbone = snapshot.scorer.plan.backbone
    server = snapshot.scorer.server
    if not isinstance(backbone, Tally):
        return None
    latest = backbone.select_latest_items(view)
    recency = float(view.heads["recency"][0])
    weights = compute_recency_weights(latest, recency).astype(np.float64)
    likeness = backbone.measure_similarity_to_item(server, server.items, place).astype(np.float64)
    terms = weights * likeness[latest.ids]
    return latest.ids.astype(np.int64), terms


def _compute_similarity_terms(snapshot: Snapshot, row: int, place: int) -> Terms | None:
    """How much a person's own items are like one, where the model has rows to compare."""
    scorer = snapshot.scorer
    server = scorer.server
    if not server.items.shape[1]:
        return None
    own_items = snapshot.own_items.row(row).astype(np.int64)
    likeness = scorer.plan.backbone.measure_similarity_to_item(server, server.items, place)
    values = likeness[own_items].astype(np.float64)
    if not np.isfinite(values).all():
        return None
    return own_items, values


def _describe_terms(snapshot: Snapshot, item: str, score: float, terms: Terms) -> JsonObject:
    places, values = terms
    sizes = np.abs(values)
    order = np.argsort(-sizes, kind="stable")
    largest = float(sizes.max(initial=0.0)) or 1.0
    strongest = order[:MAX_TERMS].tolist()
    shown = [n for n in strongest if values[n]]
    _, title = snapshot.items[_find_item_number(snapshot, item)]
    described_terms = []
    for n in shown:
        term_item, term_title = snapshot.items[places[n]]
        value = values[n]
        share = float(abs(value) / largest)
        term = {"item": term_item, "title": term_title, "term": float(value), "share": share}
        described_terms.append(term)
    n_terms = int((values != 0).sum())
    return {
        "item": item,
        "title": title,
        "score": score,
        "terms": described_terms,
        "others": n_terms - len(shown),
        "rest": float(values.sum() - sum(values[n] for n in shown)),
    }


# One item less


def preview_removal(snapshot: Snapshot, user: str, item: str, without: str, k: int = 10) -> JsonObject:
    """What a person's list would be if one of their items were not in their history."""
    row = snapshot.find_user_row(user)
    _find_item_number(snapshot, item)
    removed = _find_item_number(snapshot, without)
    if removed not in snapshot.own_items.row(row):
        raise TacitaError(f"you have no item '{without[:100]}' on this device.")
    k = min(k, len(snapshot.items))
    before = snapshot.recommend(user, k)
    if not snapshot.scorer.plan.backbone.reads_history:
        return {"can": False, "said": NO_PREVIEW_NOTE, "before": before, "after": []}
    after = snapshot.list_top_items(row, k, _score_without(snapshot, row, removed))
    place_before = _map_item_ranks(before)
    place_after = _map_item_ranks(after)
    return {
        "can": True,
        "said": PREVIEW_NOTE,
        "place before": place_before.get(item),
        "place after": place_after.get(item),
        "comes in": [entry for entry in after if entry["item"] not in place_before],
        "goes out": [entry for entry in before if entry["item"] not in place_after],
        "before": before,
        "after": after,
    }


def _score_without(snapshot: Snapshot, row: int, removed: int) -> Floats:
    """A user's scores if one item were not in their history."""
    scorer = snapshot.scorer
    block = scorer.block
    train = _drop_item(block.train, row, removed)
    block = replace(block, train=train)
    past = None if scorer.past is None else _drop_item(scorer.past, row, removed)
    changed_scorer = replace(scorer, block=block, past=past)
    return changed_scorer(np.array([row], np.int32))


def _map_item_ranks(entries: list[JsonObject]) -> dict[str, int]:
    """The place of each item in a list, from 1."""
    return {entry["item"]: place for place, entry in enumerate(entries, 1)}


def _find_item_number(snapshot: Snapshot, item: str) -> int:
    for place, (raw_id, _) in enumerate(snapshot.items):
        if raw_id == item:
            return place
    raise TacitaError(f"the model does not know item '{item[:100]}'.")


def _drop_item(lists: Ragged, row: int, item: int) -> Ragged:
    """The lists without one item of one user."""
    is_dropped = (lists.rows() == row) & (lists.ids == item)
    return lists.filter_entries(~is_dropped)
