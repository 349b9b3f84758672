"""From an interaction table to blocks with train, validation and test lists. A split is a value, not a process.

Kinds: time blocks as in F3CRec (k-core on row counts, cut by count after a sort by time, user and, where a
user's rows share a time, a hash: item numbers follow popularity in MovieLens, so they must not decide what is last),
leave-one-out, random 8:1:1, and the split a source ships. A user's repeated item inside a block counts once, at
its first time; the same item in a later block is a new event (Last.fm: the same artist again).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from tacita.config import SplitConfig
from tacita.data.sources import Interactions
from tacita.errors import TacitaError
from tacita.kernels.hashing import hash_owners
from tacita.rng import Draws, keys_of
from tacita.types import AnyArray, Block, Bools, Ints, Keys, Longs, Ragged, Stream

_NAMED_CORE = {"lastfm-2k": 5, "ml-100k": 10, "ml-latest-small": 10, "hetrec2011-movielens": 10, "ml-1m": 10}
TRAIN, VALID, TEST = 0, 1, 2


def effective_split(table: Interactions, config: SplitConfig) -> SplitConfig:
    """The same settings with what depends on the data decided: the kind, and the filter of named data."""
    kind = _kind(table, config)
    core = config.k_core
    if core is None:
        core = _NAMED_CORE.get(table.name, 0) if kind == "blocks" else 0
    return config.model_copy(update={"kind": kind, "k_core": core})


def split(table: Interactions, config: SplitConfig, draws: Draws | None = None) -> Stream:
    """Filter, order, number and cut a table as the config says."""
    draws = draws or Draws(config.seed)
    config = effective_split(table, config)
    kind, core = config.kind, config.k_core or 0
    rows = np.arange(len(table.user))
    if config.min_rating is not None:
        if table.rating is None:
            raise TacitaError(f"{table.name} has no ratings; remove split.min_rating.")
        rows = rows[table.rating >= config.min_rating]
    if len(rows) == 0:
        raise TacitaError(f"nothing of {table.name} is left after split.min_rating; lower it.")
    rows = _k_core(table, rows, core)
    rows = _in_time(table, rows, config if kind == "blocks" else None, draws)
    user, user_ids = _by_appearance(table.user[rows], table.user_ids)
    item, item_ids = _by_appearance(table.item[rows], table.item_ids)
    if len(user_ids) < 2 or len(item_ids) < 2:
        raise TacitaError(
            f"{table.name} has {len(user_ids)} user(s) and {len(item_ids)} item(s) after filtering; at least two of "
            "each are needed (split.k_core and split.min_rating set the filter)."
        )
    keys, item_keys = keys_of(user_ids), keys_of(item_ids)
    if kind == "blocks":
        cuts = _cuts(len(rows), config)
        parts = [
            (user[lo:hi], item[lo:hi], hi - lo, config.inner if b else "random")
            for b, (lo, hi) in enumerate(pairwise(cuts))
        ]
        blocks = _time_blocks(parts, keys, item_keys, draws)
    else:
        role = _roles(kind, user, item, table, rows, keys, item_keys, config, draws)
        blocks = (_whole(user, item, role, len(user_ids), len(item_ids)),)
    print_of = hashlib.sha256(f"{table.fingerprint}\n{config.model_dump_json()}".encode())
    return Stream(
        name=table.name,
        blocks=blocks,
        user_ids=user_ids,
        item_ids=item_ids,
        user_keys=keys,
        item_keys=item_keys,
        titles=table.titles,
        fingerprint=print_of.hexdigest(),
    )


def _kind(table: Interactions, config: SplitConfig) -> str:
    if config.kind != "auto":
        if config.kind == "given" and table.split is None:
            raise TacitaError(f"{table.name} ships no split; use split.kind = 'random'.")
        return config.kind
    if table.timestamp is not None and table.time_is_global:
        return "blocks"
    return "given" if table.split is not None else "random"


def _k_core(table: Interactions, rows: Longs, k: int) -> Longs:
    """Drop users and items with fewer than k rows until none is left to drop."""
    if k <= 1:
        return rows
    start = len(rows)
    while len(rows):
        per_user = np.bincount(table.user[rows], minlength=len(table.user_ids))
        per_item = np.bincount(table.item[rows], minlength=len(table.item_ids))
        keep = (per_user[table.user[rows]] >= k) & (per_item[table.item[rows]] >= k)
        if keep.all():
            return rows
        rows = rows[keep]
    raise TacitaError(
        f"nothing of {table.name} is left: no {k}-core in its {start:,} interactions; lower split.k_core."
    )


def _in_time(table: Interactions, rows: Longs, blocks: SplitConfig | None, draws: Draws) -> Longs:
    """Rows in time order, ties by user, then by a hash of user and item; file order where there is no time."""
    if table.timestamp is None:
        if blocks is not None:
            raise TacitaError(
                f"{table.name} has no timestamps, so it cannot be cut into time blocks; use split.kind = 'random'."
            )
        return rows
    if blocks is not None and not table.time_is_global:
        raise TacitaError(
            f"{table.name} knows only the order inside each user, so it cannot be cut into time blocks; "
            "use split.kind = 'leave-one-out' or 'random'."
        )
    time = table.timestamp[rows]
    if blocks is not None and len(time) and time.min() == time.max():
        raise TacitaError(
            f"all timestamps of {table.name} are the same, so it cannot be cut into time blocks; "
            "use split.kind = 'random'."
        )
    tie = _ties(table.user[rows], table.item[rows], keys_of(table.user_ids), keys_of(table.item_ids), draws)
    return rows[np.lexsort((tie, table.user[rows], time))]


def _ties(user: AnyArray, item: AnyArray, user_keys: Keys, item_keys: Keys, draws: Draws) -> Keys:
    """What decides between rows of a user that share a time: a hash of user and item."""
    spread = hash_owners(draws.public("tied-items"), item_keys)
    return hash_owners(draws.public("time-ties"), user_keys[user] ^ spread[item])


def _by_appearance(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber codes in order of first appearance."""
    present, first = np.unique(codes, return_index=True)
    order = np.argsort(first, kind="stable")
    number = np.zeros(len(names), np.int32)
    number[present[order]] = np.arange(len(present), dtype=np.int32)
    return number[codes], tuple(names[c] for c in present[order])


def _cuts(n: int, config: SplitConfig) -> list[int]:
    """Block borders by count: the base share, then equal blocks, the last one takes the rest."""
    if config.n_blocks == 1:
        return [0, n]
    share = Fraction(str(config.base_share))
    if share == 1:
        raise TacitaError("split.base_share = 1 leaves nothing for later blocks; lower it or set split.n_blocks = 1.")
    base = int(share * n)
    step = int((1 - share) * n / (config.n_blocks - 1))
    if base < 1 or step < 1:
        raise TacitaError(f"{n} interactions are too few for {config.n_blocks} blocks; lower split.n_blocks.")
    return [0, *(base + step * b for b in range(config.n_blocks - 1)), n]


def _first_of_pair(user: Ints, item: Ints) -> Bools:
    """Marks the first row of every (user, item) pair."""
    pair = user.astype(np.int64) << 32 | item
    _, first = np.unique(pair, return_index=True)
    keep = np.zeros(len(user), bool)
    keep[first] = True
    return keep


def _ranks_in_user(user: Ints, order: Longs) -> Longs:
    """Position of every row among its user's rows when rows are visited in `order`."""
    by_user = order[np.argsort(user[order], kind="stable")]
    counts = np.bincount(user)
    start = np.cumsum(counts) - counts
    out = np.empty(len(user), np.int64)
    out[by_user] = np.arange(len(user)) - start[user[by_user]]
    return out


def _random_order(user: Ints, item: Ints, keys: Keys, item_keys: Keys, draws: Draws, block: int) -> Longs:
    """A random order in which each user's rows depend on that user and item alone, not on their numbers."""
    spread = hash_owners(draws.public("split-items"), item_keys)
    return np.argsort(hash_owners(draws.public("split", block), keys[user] ^ spread[item]), kind="stable")


def _inner_roles(user: Ints, order: Longs) -> AnyArray:
    """F3CRec: per user the last ceil(n/10) are test, ceil of a ninth of the rest validation; below 3 all train."""
    n = np.bincount(user)[user]
    n_test = -(-n // 10)
    n_valid = -(-(n - n_test) // 9)
    rank = _ranks_in_user(user, order)
    role = np.where(rank >= n - n_test, TEST, np.where(rank >= n - n_test - n_valid, VALID, TRAIN))
    return np.where(n < 3, TRAIN, role)


def _time_blocks(
    parts: Sequence[tuple[Ints, Ints, int, str]], keys: Keys, item_keys: Keys, draws: Draws
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    n_users = n_items = 0
    for index, (user, item, n_rows, inner) in enumerate(parts):
        known = n_users
        n_users = max(n_users, int(user.max()) + 1)
        n_items = max(n_items, int(item.max()) + 1)
        new = np.arange(n_users) >= known
        blocks.append(_time_block(index, user, item, n_users, n_items, new, n_rows, inner, keys, item_keys, draws))
    return tuple(blocks)


def _time_block(
    index: int,
    user: Ints,
    item: Ints,
    n_users: int,
    n_items: int,
    new: Bools,
    n_rows: int,
    inner: str,
    keys: Keys,
    item_keys: Keys,
    draws: Draws,
) -> Block:
    """One block of rows in time order."""
    once = _first_of_pair(user, item)
    user, item = user[once], item[once]
    in_time = np.arange(len(user))
    order = _random_order(user, item, keys, item_keys, draws, index) if inner == "random" else in_time
    return _block(index, user, item, _inner_roles(user, order), n_users, n_items, new, n_rows)


def collected_block(
    index: int,
    user: AnyArray,
    item: AnyArray,
    time: AnyArray,
    new: Bools,
    keys: Keys,
    item_keys: Keys,
    config: SplitConfig,
) -> Block:
    """A block that was collected rather than cut: rows of known users and items, split as a cut block would be."""
    draws = Draws(config.seed)
    user, item = user.astype(np.int32), item.astype(np.int32)
    order = np.lexsort((_ties(user, item, keys, item_keys, draws), user, time))
    inner = config.inner if index else "random"
    return _time_block(
        index, user[order], item[order], len(keys), len(item_keys), new, len(user), inner, keys, item_keys, draws
    )


def _block(
    index: int, user: Ints, item: Ints, role: AnyArray, n_users: int, n_items: int, new: Bools, n_rows: int
) -> Block:
    train, valid, test = (Ragged.from_pairs(user[role == r], item[role == r], n_users) for r in (TRAIN, VALID, TEST))
    return Block(index, n_users, n_items, train, valid, test, new, n_rows)


def _roles(
    kind: str,
    user: Ints,
    item: Ints,
    table: Interactions,
    rows: Longs,
    keys: Keys,
    item_keys: Keys,
    config: SplitConfig,
    draws: Draws,
) -> AnyArray:
    """Role of every row for the kinds with a single block; -1 drops a repeated pair."""
    once = _first_of_pair(user, item)
    kept_user, kept_item = user[once], item[once]
    n = np.bincount(kept_user, minlength=int(user.max()) + 1)[kept_user]
    shuffled = _random_order(kept_user, kept_item, keys, item_keys, draws, 0)
    if kind == "given":
        assert table.split is not None
        role = _given_roles(table.split[rows][once], kept_user, shuffled)
    elif kind == "leave-one-out":
        if config.held_out == "last" and table.timestamp is None:
            raise TacitaError(f"{table.name} has no timestamps; use split.held_out = 'random'.")
        order = np.arange(len(kept_user)) if config.held_out == "last" else shuffled
        rank = _ranks_in_user(kept_user, order)
        role = np.where(n < 3, TRAIN, np.where(rank == n - 1, TEST, np.where(rank == n - 2, VALID, TRAIN)))
    else:
        rank = _ranks_in_user(kept_user, shuffled)
        tenth = np.maximum(1, np.rint(0.1 * n).astype(np.int64))
        role = np.where(rank >= n - tenth, TEST, np.where(rank >= n - 2 * tenth, VALID, TRAIN))
        role = np.where(n < 3, TRAIN, role)
    out = np.full(len(user), -1)
    out[once] = role
    return out


def _given_roles(given: AnyArray, user: Ints, shuffled: Longs) -> AnyArray:
    """The source's split; where it has no validation part, a random tenth of each user's training rows."""
    role = given.astype(np.int64)
    if (role == VALID).any():
        return role
    train = np.flatnonzero(role == TRAIN)
    position = np.full(len(user), -1)
    position[train] = np.arange(len(train))
    order = position[shuffled[role[shuffled] == TRAIN]]
    n = np.bincount(user[train])[user[train]]
    rank = _ranks_in_user(user[train], order)
    held = (n >= 3) & (rank >= n - np.maximum(1, n // 10))
    role[train[held]] = VALID
    return role


def _whole(user: Ints, item: Ints, role: AnyArray, n_users: int, n_items: int) -> Block:
    return _block(0, user, item, role, n_users, n_items, np.ones(n_users, bool), len(user))
