"""Scores over the catalogue from private vectors, shared parameters and an item table."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.special

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, CohortView, Floats, Ints, Longs, Ragged
from tacita.kernels.steps import add_own_moves, affine_scores
from tacita.kernels.threads import threads_in_use
from tacita.models.scorer import Context, Scorer

CHUNK = 256  # users scored at once, padded to this shape by models that are not affine in the item row
_TILE = 512  # items scored at once by such models
_LANES = 32  # samples of one product in a tower: so small a product stays on one core and costs no waiting


def score_all(backbone: Scorer, private: Floats, heads: Arrays, items: Floats, context: Ragged | None = None) -> Floats:
    """Logits (users, items). Every number depends on its own user and item only, not on the batch."""
    _check_context(backbone, context)
    reading = backbone.reading(private, heads)
    if reading is not None:
        a, c = reading
        return _score_affine(a, c, items)
    out = np.empty((len(private), len(items)), np.float32)
    for lo in range(0, len(private), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(private)))
        lists = None if context is None else context.take(some)
        rep = _represent_chunk(
            backbone, private[some], heads, None if lists is None else Context.from_lists(lists, items)
        )
        out[some] = _score_chunk(backbone, rep, heads, items, lists)[: len(some)]
    return out


def _check_context(backbone: Scorer, context: Ragged | None) -> None:
    if backbone.reads_context and context is None:
        raise TacitaError(f"backbone '{backbone.name}' scores with a user's own items, and none were given.")


def _score_affine(a: Floats, c: Floats, rows: Floats) -> Floats:
    return affine_scores(np.ascontiguousarray(a), np.ascontiguousarray(c, np.float32), np.ascontiguousarray(rows.T))


def _score_chunk(backbone: Scorer, rep: dict[str, Any], heads: Arrays, items: Floats, lists: Ragged | None) -> Floats:
    """Logits of a chunk of represented users; `lists`: which items are in their contexts."""
    outside = None if lists is None else backbone.reading_outside(rep, heads, items)
    if outside is not None and lists is not None:
        scores = _score_affine(*outside)
        user, item = lists.rows(), lists.ids
        scores[user, item] = _score_pairs(backbone, rep, heads, user, (items[item], np.ones(len(item), np.float32)))
        return scores
    inside = None
    if lists is not None:
        inside = np.zeros((CHUNK, len(items)), np.float32)
        inside[lists.rows(), lists.ids] = 1
    return _score_tiles(backbone, rep, heads, items, inside)


def _represent_chunk(backbone: Scorer, private: Floats, heads: Arrays, context: Context | None) -> dict[str, Any]:
    """The users as the model sees them, padded to a chunk: no shape follows the company."""
    padded = np.zeros((CHUNK, private.shape[1]), np.float32)
    padded[: len(private)] = private
    if context is not None:
        idle = CHUNK - len(private)
        ptr = np.append(context.ptr, np.full(idle, context.ptr[-1]))
        context = replace(context, ptr=ptr, count=np.append(context.count, np.zeros(idle, np.float32)))
    repeated = {k: np.broadcast_to(v, (CHUNK, *v.shape)) for k, v in heads.items()}
    return backbone.represent(backbone.named(padded), repeated, context)


def _score_tiles(backbone: Scorer, rep: dict[str, Any], heads: Arrays, items: Floats, inside: Floats | None) -> Floats:
    if backbone.grouped:
        return _score_towers(backbone, rep, heads, items)
    n_items = len(items)
    out = np.empty((CHUNK, n_items), np.float32)
    users = {k: np.repeat(v, _TILE, axis=0) for k, v in rep.items()}
    repeated = {k: np.repeat(v[None], CHUNK * _TILE, axis=0) for k, v in backbone.heads_to_score(heads).items()}
    for at in range(0, n_items, _TILE):
        width = min(_TILE, n_items - at)
        tile = np.zeros((_TILE, items.shape[1]), np.float32)
        tile[:width] = items[at : at + width]
        among = None
        if inside is not None:
            padded = np.zeros((CHUNK, _TILE), np.float32)
            padded[:, :width] = inside[:, at : at + width]
            among = padded.reshape(-1)
        scored = backbone.score(users, repeated, np.tile(tile, (CHUNK, 1)), among)
        out[:, at : at + width] = scored.reshape(CHUNK, _TILE)[:, :width]
    return out


def _score_towers(backbone: Scorer, rep: dict[str, Any], heads: Arrays, items: Floats) -> Floats:
    """A user at a time, users on all cores: neither users nor items are repeated."""
    shared = {k: v[None] for k, v in heads.items()}
    rows = np.pad(items, ((0, -len(items) % _TILE), (0, 0)))
    tiles = rows.reshape(-1, _TILE // _LANES, _LANES, items.shape[1])

    def score_one(user: int) -> Floats:
        mine = {k: v[None, None, user] for k, v in rep.items()}
        scored = [backbone.score_groups(mine, shared, tile).reshape(-1) for tile in tiles]
        return np.concatenate(scored)[: len(items)] if scored else np.zeros(0, np.float32)

    with ThreadPoolExecutor(threads_in_use()) as pool:
        return np.stack(list(pool.map(score_one, range(CHUNK)))).astype(np.float32)


def score_aligned(backbone: Scorer, private: Floats, heads: Arrays, rows: Floats) -> Floats:
    """Logits of a private vector and a row each, by a model without context, all with the same heads."""
    _check_context(backbone, None)
    return _score_pairs(backbone, backbone.named(private), heads, np.arange(len(rows)), (rows, None))


def _score_in_lanes(backbone: Scorer, mine: dict[str, Any], heads: Arrays, rows: Floats) -> Floats:
    """Logits of aligned samples in groups of one size: the last one is filled up, so that no shape follows them."""
    shared = {k: v[None] for k, v in heads.items()}

    def laid(x: Floats) -> Floats:
        return np.pad(x, ((0, -len(x) % _LANES), (0, 0))).reshape(-1, _LANES, x.shape[1])

    def score_some(at: int) -> Floats:
        some = slice(at, at + _TILE)
        scored = backbone.score_groups({k: laid(v[some]) for k, v in mine.items()}, shared, laid(rows[some]))
        return np.asarray(scored, np.float32).reshape(-1)[: len(rows) - at]

    with ThreadPoolExecutor(threads_in_use()) as pool:
        made = list(pool.map(score_some, range(0, len(rows), _TILE)))
    return np.concatenate(made) if made else np.zeros(0, np.float32)


def _score_pairs(
    backbone: Scorer, rep: dict[str, Any], heads: Arrays, user: AnyArray, sample: tuple[Floats, Floats | None]
) -> Floats:
    """Logits of samples (rows, inside), each of one of the users."""
    rows, inside = sample
    mine = {k: v[user] for k, v in rep.items()}
    if backbone.grouped:
        return _score_in_lanes(backbone, mine, heads, rows)
    repeated = {k: np.repeat(v[None], len(user), axis=0) for k, v in backbone.heads_to_score(heads).items()}
    return np.asarray(backbone.score(mine, repeated, rows, inside), np.float32)


def score_samples(backbone: Scorer, view: CohortView, user: AnyArray, item: AnyArray) -> Floats:
    """Logits of some samples of a view's users, under the model that they received."""
    context, out = backbone.context(view), np.empty(len(item), np.float32)
    for lo in range(0, len(view.user), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(view.user)))
        mine = np.flatnonzero((user >= lo) & (user < lo + CHUNK))
        lists = None if context is None else context.take(some)
        read = None if lists is None else Context.from_lists(lists, view.items)
        rep = _represent_chunk(backbone, view.private[some], view.heads, read)
        inside = None if lists is None else lists.holds(user[mine] - lo, item[mine]).astype(np.float32)
        out[mine] = _score_pairs(backbone, rep, view.heads, user[mine] - lo, (view.items[item[mine]], inside))
    return out


def score_lists(backbone: Scorer, private: Floats, heads: Arrays, items: Floats, lists: Ints) -> Floats:
    """Logits (users, listed) of each user for its own list of items, by a model without context."""
    _check_context(backbone, None)
    n, width = lists.shape
    user = np.repeat(np.arange(n), width)
    return _score_pairs(backbone, backbone.named(private), heads, user, (items[lists.reshape(-1)], None)).reshape(
        n, width
    )


def sigmoid(scores: Floats) -> Floats:
    return np.asarray(scipy.special.expit(scores), np.float32)


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
    reading = backbone.reading(private, heads)
    if reading is None:
        scores = score_all(backbone, private, heads, items)
        sample = items[own.ids] + own.values["moved"], None
        scores[own.rows(), own.ids] = _score_pairs(backbone, backbone.named(private), heads, own.rows(), sample)
        return scores
    a, c = (np.ascontiguousarray(x, np.float32) for x in reading)
    scores = _score_affine(a, c, items)
    add_own_moves(a, own.ptr, own.ids, own.values["moved"], scores)
    return scores


def score_personal(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged | None,
    only: Ragged | None = None,
) -> Floats:
    """The same where shared parameters are everybody's own, too: (users, ...); of some items of each alone, flat."""
    if backbone.grouped and heads:
        return _score_personal_towers(backbone, private, heads, items, own, context, only)
    scores = _score_personal_catalogue(backbone, private, heads, items, own, context)
    return scores if only is None else scores[only.rows(), only.ids]


def _score_personal_catalogue(
    backbone: Scorer, private: Floats, heads: Arrays, items: Floats, own: Ragged, context: Ragged | None
) -> Floats:
    if not heads:
        return score_with_own_rows(backbone, private, {}, items, own, context)

    def one(user: int) -> Floats:
        some = np.array([user])
        lists, mine = None if context is None else context.take(some), {k: v[user] for k, v in heads.items()}
        found: Floats = score_with_own_rows(backbone, private[some], mine, items, own.take(some), lists)[0]
        return found

    return np.stack([one(user) for user in range(len(private))]) if len(private) else np.zeros((0, len(items)), "f4")


def _score_personal_towers(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged | None,
    only: Ragged | None,
) -> Floats:
    """A user at a time, users on all cores, each with its own tower and its own version of the rows it has."""
    tile = np.pad(items, ((0, -len(items) % _TILE), (0, 0)))

    def one(user: int) -> Floats:
        some = np.array([user])
        mine = own.take(some)
        table = tile.copy()
        table[mine.ids] += mine.values["moved"]
        shared = {name: v[some] for name, v in heads.items()}
        read = None if context is None else Context.from_lists(context.take(some), table)
        rep = backbone.represent(backbone.named(private[some]), shared, read)
        seen = {name: v[:, None] for name, v in rep.items()}
        if only is not None:
            listed = only.ids[only.ptr[user] : only.ptr[user + 1]]
            table = table[np.pad(listed, (0, -len(listed) % _LANES))]
            found = backbone.score_groups(seen, shared, table.reshape(-1, _LANES, items.shape[1]))
            return np.asarray(found, np.float32).reshape(-1)[: len(listed)]
        groups = table.reshape(-1, _TILE // _LANES, _LANES, items.shape[1])
        scored = [backbone.score_groups(seen, shared, group).reshape(-1) for group in groups]
        return np.concatenate(scored)[: len(items)]

    with ThreadPoolExecutor(threads_in_use()) as pool:
        made = list(pool.map(one, range(len(private))))
    if only is not None:
        return np.concatenate([np.zeros(0, np.float32), *made]).astype(np.float32)
    return np.stack(made).astype(np.float32) if made else np.zeros((0, len(items)), np.float32)


def _score_own_in_context(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged,
) -> Floats:
    """A user reads its own version of its context, and is scored with its own version of every row it has."""
    out = np.empty((len(private), len(items)), np.float32)
    for lo in range(0, len(private), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(private)))
        lists, mine = context.take(some), own.take(some)
        read = Context.from_lists(lists, items)
        place, found = _find_entries(mine, lists, len(items))
        read.rows[found] += mine.values["moved"][place[found]]
        rep = _represent_chunk(backbone, private[some], heads, read)
        scores = _score_chunk(backbone, rep, heads, items, lists)
        user, item = mine.rows(), mine.ids
        sample = items[item] + mine.values["moved"], lists.holds(user, item).astype(np.float32)
        scores[user, item] = _score_pairs(backbone, rep, heads, user, sample)
        out[some] = scores[: len(some)]
    return out


def _find_entries(among: Ragged, wanted: Ragged, n_items: int) -> tuple[Longs, Bools]:
    """Where each wanted entry stands in the same row of other lists, and whether it does."""
    keys = among.rows().astype(np.int64) * n_items + among.ids
    order = np.argsort(keys)
    want = wanted.rows().astype(np.int64) * n_items + wanted.ids
    at = np.minimum(np.searchsorted(keys[order], want), len(keys) - 1)
    place = order[at] if len(keys) else np.zeros(len(want), np.int64)
    return place, keys[place] == want if len(keys) else np.zeros(len(want), bool)
