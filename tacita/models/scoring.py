"""Scores over the catalogue from private vectors, shared parameters and an item table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy.special

from tacita.core.errors import TacitaError
from tacita.core.flat_indices import find_in_unsorted
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ints, Longs, Ragged
from tacita.kernels.steps import add_own_row_logits, compute_affine_scores
from tacita.models.lanes import (
    TILE,
    as_one_group,
    group_lanes,
    join_arrays,
    lay_tiles,
    map_threads,
    pad_rows,
    score_tiles,
    select_users,
)
from tacita.models.scorer import Context, Scorer, Tensors, broadcast_heads

CHUNK = 256  # users scored at once, padded to this shape by models that are not affine in the item row


# Many users, whole catalogue


def score_catalogue(
    backbone: Scorer, private: Floats, heads: Arrays, items: Floats, context: Ragged | None = None
) -> Floats:
    """Logits (users, items). Every number depends on its own user and item only, not on the batch."""
    _check_context(backbone, context)
    reading = backbone.reduce_to_affine(private, heads)
    if reading is not None:
        return _score_affine(*reading, items)
    logits = _make_empty_logits(private, items)
    for chunk in _iterate_user_chunks(len(private)):
        lists = None
        rows = None
        if context is not None:
            lists = context.take(chunk)
            rows = Context.from_lists(lists, items)
        users = _represent_chunk(backbone, private[chunk], heads, rows)
        padded = users.score_catalogue(items, lists)
        logits[chunk] = padded[: len(chunk)]
    return logits


def score_samples(backbone: Scorer, view: CohortView, user: AnyArray, item: AnyArray) -> Floats:
    """Logits of some samples of a view's users, under the model that they received."""
    context = backbone.list_context_items(view)
    logits = np.empty(len(item), np.float32)
    for chunk in _iterate_user_chunks(len(view.user)):
        first = int(chunk[0])
        is_in_chunk = user // CHUNK == first // CHUNK
        samples = np.flatnonzero(is_in_chunk)
        owner = user[samples] - first
        listed = item[samples]
        rows = None
        inside = None
        if context is not None:
            lists = context.take(chunk)
            rows = Context.from_lists(lists, view.items)
            inside = _mark_inside(lists, owner, listed)
        users = _represent_chunk(backbone, view.private[chunk], view.heads, rows)
        item_rows = view.items[listed]
        logits[samples] = users.score_pairs(owner, item_rows, inside)
    return logits


def score_aligned(backbone: Scorer, private: Floats, heads: Arrays, rows: Floats) -> Floats:
    """Logits of a private vector and a row each, by a model without context, all with the same heads."""
    _check_context(backbone, None)
    users = _represent_plainly(backbone, private, heads)
    owner = np.arange(len(rows))
    return users.score_pairs(owner, rows, None)


def score_lists(backbone: Scorer, private: Floats, heads: Arrays, items: Floats, lists: Ints) -> Floats:
    """Logits (users, listed) of each user for its own list of items, by a model without context."""
    _check_context(backbone, None)
    n_users, width = lists.shape
    owner = np.repeat(np.arange(n_users), width)
    rows = items[lists.reshape(-1)]
    users = _represent_plainly(backbone, private, heads)
    logits = users.score_pairs(owner, rows, None)
    return logits.reshape(n_users, width)


def sigmoid(scores: Floats) -> Floats:
    chances = scipy.special.expit(scores)
    return np.asarray(chances, np.float32)


def _make_empty_logits(private: Floats, items: Floats) -> Floats:
    shape = (len(private), len(items))
    return np.empty(shape, np.float32)


def _iterate_user_chunks(n_users: int) -> Iterator[Longs]:
    """The users in chunks that are scored at once."""
    for first in range(0, n_users, CHUNK):
        end = min(first + CHUNK, n_users)
        yield np.arange(first, end)


def _check_context(backbone: Scorer, context: Ragged | None) -> None:
    if backbone.reads_context and context is None:
        raise TacitaError(f"backbone '{backbone.name}' scores with a user's own items, and none were given.")


def _score_affine(a: Floats, c: Floats, rows: Floats) -> Floats:
    vectors = np.ascontiguousarray(a)
    offsets = np.ascontiguousarray(c, np.float32)
    columns = np.ascontiguousarray(rows.T)
    return compute_affine_scores(vectors, offsets, columns)


def _mark_inside(lists: Ragged, owner: AnyArray, item: AnyArray) -> Floats:
    """1 where a sample's item is in its user's context, else 0."""
    is_inside = lists.holds(owner, item)
    return is_inside.astype(np.float32)


def _represent_chunk(backbone: Scorer, private: Floats, heads: Arrays, context: Context | None) -> RepresentedUsers:
    """The users as the model represents them, padded to a chunk: no shape follows the cohort."""
    n_users, width = private.shape
    padded = np.zeros((CHUNK, width), np.float32)
    padded[:n_users] = private
    if context is not None:
        context = _pad_context(context, CHUNK - n_users)
    repeated = broadcast_heads(heads, CHUNK)
    named = backbone.split_private(padded)
    rep = backbone.represent_users(named, repeated, context)
    return RepresentedUsers(backbone, rep, heads)


def _represent_plainly(backbone: Scorer, private: Floats, heads: Arrays) -> RepresentedUsers:
    """Users of a model without context, whose private vectors represent them."""
    return RepresentedUsers(backbone, backbone.split_private(private), heads)


def _pad_context(context: Context, idle: int) -> Context:
    """A context with so many more users, who have no items."""
    ptr = np.pad(context.ptr, (0, idle), mode="edge")
    count = np.pad(context.count, (0, idle))
    return replace(context, ptr=ptr, count=count)


@dataclass(frozen=True)
class RepresentedUsers:
    """Users as a model represents them, with the shared parameters that score them."""

    backbone: Scorer
    rep: Tensors
    heads: Arrays

    def score_catalogue(self, items: Floats, lists: Ragged | None) -> Floats:
        """Logits of a chunk of users; `lists`: which items are in their contexts."""
        if lists is None:
            return self._score_tiles(items, None)
        outside = self.backbone.build_affine_scores_outside_context(self.rep, self.heads, items)
        user = lists.rows()
        item = lists.ids
        if outside is None:
            shape = (CHUNK, len(items))
            inside = np.zeros(shape, np.float32)
            inside[user, item] = 1
            return self._score_tiles(items, inside)
        scores = _score_affine(*outside)
        rows = items[item]
        ones = np.ones(len(item), np.float32)
        scores[user, item] = self.score_pairs(user, rows, ones)
        return scores

    def score_pairs(self, user: AnyArray, rows: Floats, inside: Floats | None) -> Floats:
        """Logits of samples, each of one of the users."""
        own = select_users(self.rep, user)
        if self.backbone.grouped:
            return self._score_in_lanes(own, rows)
        heads = self._repeat_heads(len(user))
        logits = self.backbone.compute_logits(own, heads, rows, inside)
        return np.asarray(logits, np.float32)

    def _repeat_heads(self, n_samples: int) -> Tensors:
        """The shared parameters that `compute_logits` reads, once for every sample."""
        heads = self.backbone.select_heads_to_score(self.heads)
        repeated = {}
        for name, value in heads.items():
            repeated[name] = np.repeat(value[None], n_samples, axis=0)
        return repeated

    def _score_tiles(self, items: Floats, inside: Floats | None) -> Floats:
        """Logits of the catalogue, a tile of items at a time."""
        if self.backbone.grouped:
            return self._score_towers(items)
        n_items, width = items.shape
        logits = np.empty((CHUNK, n_items), np.float32)
        users = {}
        for name, value in self.rep.items():
            users[name] = np.repeat(value, TILE, axis=0)
        heads = self._repeat_heads(CHUNK * TILE)
        for first in range(0, n_items, TILE):
            span = slice(first, first + TILE)
            n_left = n_items - first
            tile = np.zeros((TILE, width), np.float32)
            tile[:n_left] = items[span]
            rows = np.tile(tile, (CHUNK, 1))
            marks = None
            if inside is not None:
                marks = _pad_tile(inside[:, span])
            scored = self.backbone.compute_logits(users, heads, rows, marks)
            table = scored.reshape(CHUNK, TILE)
            logits[:, span] = table[:, :n_left]
        return logits

    def _score_towers(self, items: Floats) -> Floats:
        """A user at a time, users on all cores: neither users nor items are repeated."""
        heads = as_one_group(self.heads)
        n_items = len(items)
        tiles = lay_tiles(pad_rows(items, TILE))

        def score_user(user: int) -> Floats:
            group = as_one_group(select_users(self.rep, user))
            group = as_one_group(group)
            logits = score_tiles(self.backbone, group, heads, tiles)
            return logits[:n_items]

        logits = map_threads(score_user, range(CHUNK))
        return np.stack(logits).astype(np.float32)

    def _score_in_lanes(self, own: Tensors, rows: Floats) -> Floats:
        """Logits of aligned samples in groups of one size: the last is filled up, so that no shape follows them."""
        heads = as_one_group(self.heads)
        n_samples = len(rows)

        def compute_tile_logits(first: int) -> Floats:
            span = slice(first, first + TILE)
            users = {}
            for name, value in own.items():
                users[name] = group_lanes(value[span])
            lanes = group_lanes(rows[span])
            logits = self.backbone.compute_group_logits(users, heads, lanes)
            flat = np.asarray(logits, np.float32).reshape(-1)
            n_left = n_samples - first
            return flat[:n_left]

        starts = range(0, n_samples, TILE)
        return join_arrays(map_threads(compute_tile_logits, starts))


def _pad_tile(inside: Floats) -> Floats:
    """Marks (users, up to a tile) filled up with zeros to a whole tile, flat."""
    n_users, width = inside.shape
    padded = np.zeros((n_users, TILE), np.float32)
    padded[:, :width] = inside
    return padded.reshape(-1)


# Users who hold their own version of some rows: the table's plus the column "moved"


def score_with_own_rows(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged | None = None,
) -> Floats:
    """Logits where users hold their own version of the rows of some items: the table's plus the column "moved"."""
    _check_context(backbone, context)
    if context is not None:
        return _score_own_in_context(backbone, private, heads, items, own, context)
    moved = own.values["moved"]
    reading = backbone.reduce_to_affine(private, heads)
    if reading is None:
        scores = score_catalogue(backbone, private, heads, items)
        users = _represent_plainly(backbone, private, heads)
        owner = own.rows()
        own_rows = items[own.ids] + moved
        scores[owner, own.ids] = users.score_pairs(owner, own_rows, None)
        return scores
    vectors = np.ascontiguousarray(reading[0], np.float32)
    offsets = np.ascontiguousarray(reading[1], np.float32)
    scores = _score_affine(vectors, offsets, items)
    add_own_row_logits(vectors, own.ptr, own.ids, moved, scores)
    return scores


def _score_own_in_context(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged,
) -> Floats:
    """A user reads its own version of its context, and is scored with its own version of every row it has."""
    logits = _make_empty_logits(private, items)
    n_items = len(items)
    for chunk in _iterate_user_chunks(len(private)):
        lists = context.take(chunk)
        own_rows = own.take(chunk)
        moved = own_rows.values["moved"]
        rows = Context.from_lists(lists, items)
        own_keys = own_rows.number_entries(n_items)
        list_keys = lists.number_entries(n_items)
        place, is_own = find_in_unsorted(own_keys, list_keys)
        own_place = place[is_own]
        rows.rows[is_own] += moved[own_place]
        users = _represent_chunk(backbone, private[chunk], heads, rows)
        scores = users.score_catalogue(items, lists)
        owner = own_rows.rows()
        item = own_rows.ids
        inside = _mark_inside(lists, owner, item)
        item_rows = items[item] + moved
        scores[owner, item] = users.score_pairs(owner, item_rows, inside)
        logits[chunk] = scores[: len(chunk)]
    return logits
