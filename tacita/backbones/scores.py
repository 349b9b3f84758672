"""Scores over the catalogue from private vectors, shared parameters and an item table."""

from __future__ import annotations

import numpy as np
import scipy.special

from tacita.backbones.base import Backbone
from tacita.errors import TacitaError
from tacita.kernels.steps import add_own_moves, affine_scores
from tacita.types import Arrays, Floats, Ints, Longs

CHUNK = 256  # users scored at once, padded to this shape by models that are not affine in the item row
_TILE = 512  # items scored at once by such models


def score_all(backbone: Backbone, private: Floats, heads: Arrays, items: Floats) -> Floats:
    """Logits (users, items). Every number depends on its own user and item only, not on the batch."""
    reading = backbone.reading(private, heads)
    if reading is not None:
        a, c = reading
        return affine_scores(
            np.ascontiguousarray(a), np.ascontiguousarray(c, np.float32), np.ascontiguousarray(items.T)
        )
    n, n_items = len(private), len(items)
    padded = np.zeros((CHUNK, private.shape[1]), np.float32)
    out = np.empty((n, n_items), np.float32)
    for lo in range(0, n, CHUNK):
        some = private[lo : lo + CHUNK]
        padded[: len(some)] = some
        for at in range(0, n_items, _TILE):
            tile = np.zeros((_TILE, items.shape[1]), np.float32)
            width = min(_TILE, n_items - at)
            tile[:width] = items[at : at + width]
            pairs = backbone.named(np.repeat(padded, _TILE, axis=0))
            repeated = {k: np.repeat(v[None], CHUNK * _TILE, axis=0) for k, v in heads.items()}
            scored = backbone.score(pairs, repeated, np.tile(tile, (CHUNK, 1))).reshape(CHUNK, _TILE)
            out[lo : lo + len(some), at : at + width] = scored[: len(some), :width]
    return out


def pair_scores(backbone: Backbone, private: Floats, heads: Arrays, items: Floats, lists: Ints) -> Floats:
    """Logits (users, listed) of each user for its own list of items."""
    n, width = lists.shape
    some = backbone.named(np.repeat(private, width, axis=0))
    repeated = {k: np.repeat(v[None], n * width, axis=0) for k, v in heads.items()}
    scores = backbone.score(some, repeated, items[lists.reshape(-1)])
    return np.asarray(scores, np.float32).reshape(n, width)


def sigmoid(scores: Floats) -> Floats:
    return np.asarray(scipy.special.expit(scores), np.float32)


def own_scores(
    backbone: Backbone,
    private: Floats,
    heads: Arrays,
    items: Floats,
    row_start: Longs,
    row_item: Ints,
    moved: Floats,
) -> Floats:
    """Logits where user u holds its own version of some rows: the table's plus `moved`."""
    reading = backbone.reading(private, heads)
    if reading is None:
        raise TacitaError(f"backbone '{backbone.name}' cannot be scored with the users' own item rows.")
    a, c = (np.ascontiguousarray(x, np.float32) for x in reading)
    scores = affine_scores(a, c, np.ascontiguousarray(items.T))
    add_own_moves(a, row_start, row_item, moved, scores)
    return scores
