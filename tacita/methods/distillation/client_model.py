"""Scores of clients' own models over the whole catalogue: own rows where they have some, own heads."""

from __future__ import annotations

import numpy as np

from tacita.core.types import CohortView, Floats, Ragged
from tacita.learn.scores import HEAD, SCORES
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_with_own_rows

CHUNK_CLIENTS = 16  # whose own tables exist at once


def score_client_models(backbone: Scorer, view: CohortView) -> Floats:
    """Logits (users, items) as each device would compute them by itself."""
    mine = view.lists[SCORES]["rows"]
    if not backbone.grouped:
        moved = mine.values["row"] - view.items[mine.ids]
        own = Ragged(mine.ptr, mine.ids, {"moved": moved})
        return score_with_own_rows(backbone, view.private, view.heads, view.items, own, backbone.context(view))
    out = np.empty((len(view.user), view.n_items), np.float32)
    for lo in range(0, len(view.user), CHUNK_CLIENTS):
        some = np.arange(lo, min(lo + CHUNK_CLIENTS, len(view.user)))
        filled = np.append(some, np.full(CHUNK_CLIENTS - len(some), some[0]))  # one shape, whoever is asked about
        held = mine.take(filled)
        rows = np.repeat(view.items[None], CHUNK_CLIENTS, axis=0)
        rows[held.rows(), held.ids] = held.values["row"]
        private = {k: v[:, None] for k, v in backbone.named(view.private[filled]).items()}
        heads = {k: view.parts[SCORES][f"{HEAD}{k}"][filled] for k in view.heads}
        out[some] = np.asarray(backbone.score_groups(private, heads, rows))[: len(some)]
    return out
