"""Scores of clients' own models over the whole catalogue: own rows where they have some, own heads."""

from __future__ import annotations

import numpy as np

from tacita.core.types import CohortView, Floats, Longs, Ragged
from tacita.learn.scores import HEAD, SCORES
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_with_own_rows

CHUNK_CLIENTS = 16  # whose own tables exist at once


def score_client_models(backbone: Scorer, view: CohortView) -> Floats:
    """Logits (users, items) as each device would compute them by itself."""
    if not backbone.grouped:
        own_rows = view.lists[SCORES]["rows"]
        received_rows = view.items[own_rows.ids]
        moved = own_rows.values["row"] - received_rows
        moved_rows = Ragged(own_rows.ptr, own_rows.ids, {"moved": moved})
        context = backbone.list_context_items(view)
        return score_with_own_rows(backbone, view.private, view.heads, view.items, moved_rows, context)
    n_users = len(view.user)
    shape = (n_users, view.n_items)
    scores = np.empty(shape, np.float32)
    for start in range(0, n_users, CHUNK_CLIENTS):
        end = min(start + CHUNK_CLIENTS, n_users)
        users = np.arange(start, end)
        scores[users] = _score_chunk(backbone, view, users)
    return scores


def _score_chunk(backbone: Scorer, view: CohortView, users: Longs) -> Floats:
    """Logits of a few users. The first fills empty places, so that arrays have one shape whoever is scored."""
    n_missing = CHUNK_CLIENTS - len(users)
    filler = np.full(n_missing, users[0])
    filled = np.append(users, filler)
    all_rows = view.lists[SCORES]["rows"]
    own_rows = all_rows.take(filled)
    table = view.items[None]
    tables = np.repeat(table, CHUNK_CLIENTS, axis=0)
    rows = own_rows.rows()
    tables[rows, own_rows.ids] = own_rows.values["row"]
    private = {}
    private_rows = view.private[filled]
    vectors_by_name = backbone.split_private(private_rows)
    for name, vectors in vectors_by_name.items():
        private[name] = vectors[:, None]
    heads = {}
    for name in view.heads:
        head_name = f"{HEAD}{name}"
        own_head = view.parts[SCORES][head_name]
        heads[name] = own_head[filled]
    logits = backbone.compute_group_logits(private, heads, tables)
    scores = np.asarray(logits)
    return scores[: len(users)]
