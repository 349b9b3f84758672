"""The rules that make each row of a block a training, validation or test row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tacita.core.config import SplitConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Ints, Keys, Longs
from tacita.data.interaction_table import Interactions
from tacita.kernels.hashing import hash_owners

TRAIN, VALID, TEST = 0, 1, 2

AssignRoles = Callable[[int, Ints, Ints, Longs], AnyArray]
"""The role of each row, from the block's number, the rows' users and items, and their places in the block."""


def number_pairs(user: Ints, item: Ints) -> Longs:
    """One number per (user, item)."""
    high = user.astype(np.int64) << 32
    return high | item


def rank_in_user(user: Ints, order: Longs) -> Longs:
    """Position of every row among its user's rows when rows are visited in `order`."""
    n_rows = len(user)
    stable_order = np.argsort(user[order], kind="stable")
    by_user = order[stable_order]
    sorted_user = user[by_user]
    counts = np.bincount(user)
    start = np.cumsum(counts) - counts
    rank = np.empty(n_rows, np.int64)
    rank[by_user] = np.arange(n_rows) - start[sorted_user]
    return rank


class Shuffle(NamedTuple):
    """A random order in which each user's rows depend on that user and item alone, not on their numbers."""

    keys: Keys
    item_keys: Keys
    draws: Draws
    repeats: str

    def draw_order(self, user: Ints, item: Ints, block: int) -> Longs:
        items_key = self.draws.public("split-items")
        item_hash = hash_owners(items_key, self.item_keys)
        user_key = self.keys[user]
        mixed = user_key ^ item_hash[item]
        if self.repeats == "keep":
            mixed = self._rekey_repeats(mixed, user, item)
        block_key = self.draws.public("split", block)
        chance = hash_owners(block_key, mixed)
        return np.argsort(chance, kind="stable")

    def _rekey_repeats(self, mixed: Keys, user: Ints, item: Ints) -> Keys:
        """Give each further row of a pair a key of its own."""
        pairs = number_pairs(user, item)
        _, places = np.unique(pairs, return_inverse=True)
        pair = places.astype(np.int32)
        file_order = np.arange(len(pair))
        repeat = rank_in_user(pair, file_order)
        key = self.draws.public("split-repeats")
        repeat_hash = hash_owners(key, repeat.astype(np.uint64))
        separated = mixed ^ repeat_hash
        return np.where(repeat > 0, separated, mixed)


def make_block_role_assigner(config: SplitConfig, shuffle: Shuffle) -> AssignRoles:
    """The roles in time blocks: block 0 at random, later ones as the config says."""

    def assign_roles(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        if block == 0 or config.inner == "random":
            order = shuffle.draw_order(user, item, block)
        else:
            order = np.arange(len(user))
        return _assign_block_roles(user, order)

    return assign_roles


def _assign_block_roles(user: Ints, order: Longs) -> AnyArray:
    """F3CRec: per user the last ceil(n/10) are test, ceil of a ninth of the rest validation; below 3 all train."""
    n = np.bincount(user)[user]
    n_test = -(-n // 10)
    n_other = n - n_test
    n_valid = -(-n_other // 9)
    n_train = n_other - n_valid
    rank = rank_in_user(user, order)
    role = _assign_roles_by_rank(rank, n_train, n_other)
    return np.where(n < 3, TRAIN, role)


def _assign_roles_by_rank(rank: Longs, first_valid: AnyArray | int, first_test: AnyArray | int) -> AnyArray:
    """Training rows come first, then validation rows, then test rows."""
    is_valid = rank >= first_valid
    is_test = rank >= first_test
    train_or_valid = np.where(is_valid, VALID, TRAIN)
    return np.where(is_test, TEST, train_or_valid)


def make_single_split_assigner(kind: str, table: Interactions, config: SplitConfig, shuffle: Shuffle) -> AssignRoles:
    """The roles of leave-one-out and random splits."""
    leaves_out = kind in ("leave-one-out", "leave-some-out")
    takes_last = leaves_out and config.held_out == "last"
    if takes_last and table.timestamp is None:
        raise TacitaError(f"{table.name} has no timestamps; use split.held_out = 'random'.")

    def assign_roles(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        if takes_last:
            order = np.arange(len(user))
        else:
            order = shuffle.draw_order(user, item, block)
        if kind == "global-random":
            return _assign_global_roles(order)
        if kind == "leave-some-out":
            return _assign_some_out_roles(user, order, config)
        return _assign_share_roles(user, order, kind)

    return assign_roles


def _assign_global_roles(order: Longs) -> AnyArray:
    """All rows 8:1:1, whoever they belong to."""
    place = np.argsort(order)
    first_valid = int(0.8 * len(order))
    first_test = int(0.9 * len(order))
    return _assign_roles_by_rank(place, first_valid, first_test)


def _assign_some_out_roles(user: Ints, order: Longs, config: SplitConfig) -> AnyArray:
    """A fixed number of test rows per user and a tenth of the rest for validation; users with few rows only train."""
    rank = rank_in_user(user, order)
    n = np.bincount(user)[user]
    n_other = n - config.held_items
    n_train = n_other - _count_tenth(n_other)
    role = _assign_roles_by_rank(rank, n_train, n_other)
    has_few = n < config.least_items
    has_few |= n_other < 2
    return np.where(has_few, TRAIN, role)


def _assign_share_roles(user: Ints, order: Longs, kind: str) -> AnyArray:
    """One row, or a tenth, of each user for test and as much for validation; users below 3 rows only train."""
    rank = rank_in_user(user, order)
    n = np.bincount(user)[user]
    if kind == "leave-one-out":
        share = np.ones_like(n)
    else:
        share = _count_tenth(n)
    n_train = n - 2 * share
    role = _assign_roles_by_rank(rank, n_train, n - share)
    return np.where(n < 3, TRAIN, role)


def _count_tenth(n: Longs) -> Longs:
    """A tenth, rounded, at least one."""
    tenth = np.rint(0.1 * n)
    whole_tenth = tenth.astype(np.int64)
    return np.asarray(np.maximum(1, whole_tenth))


def make_source_role_assigner(table: Interactions, rows: Longs, config: SplitConfig, shuffle: Shuffle) -> AssignRoles:
    """Roles as the source has them; a tenth of the training rows may be lent for validation."""
    assert table.split is not None
    source_role = table.split[rows]
    source_role = source_role.astype(np.int64)
    cuts = find_source_cuts(table, rows, config)
    has_validation = source_role == VALID
    owners = table.user[rows]
    validates = np.zeros(len(table.user_ids), bool)
    validates[owners[has_validation]] = True
    is_personal = config.borders == "person"  # nobody's rows decide on what others lend
    lends = config.lend and (is_personal or not validates.any())

    def assign_roles(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        places = cuts[block] + rows
        role = source_role[places]
        if lends:
            order = shuffle.draw_order(user, item, block)
            lent_role = _move_tenth_to_validation(role, user, order)
            role = np.where(validates[user], role, lent_role)
        return role

    return assign_roles


def find_source_cuts(table: Interactions, rows: Longs, config: SplitConfig) -> list[int]:
    """The borders of the source's own blocks, or of one block; a block without rows is refused.

    Under a budget there are as many blocks as settings say, with rows or without: single rows would decide otherwise.
    """
    if table.block is None:
        return [0, len(rows)]
    if config.borders == "person":
        sizes = np.bincount(table.block[rows], minlength=config.n_blocks)
        return [0, *np.cumsum(sizes).tolist()]
    sizes = np.bincount(table.block[rows])
    empty_blocks = np.flatnonzero(sizes == 0)
    if len(empty_blocks):
        empty = int(empty_blocks[0])
        last = len(sizes) - 1
        raise TacitaError(
            f"no row of {table.name} is in block {empty}, but some are in block {last}; number the blocks "
            "0, 1, 2 and so on without a gap, and see split.min_rating and split.k_core."
        )
    ends = np.cumsum(sizes)
    return [0, *ends.tolist()]


def _move_tenth_to_validation(role: AnyArray, user: Ints, order: Longs) -> AnyArray:
    """A random tenth of each user's training rows becomes validation."""
    role = role.copy()
    train = np.flatnonzero(role == TRAIN)
    if not len(train):
        return role
    n_train = len(train)
    position = np.full(len(user), -1)
    position[train] = np.arange(n_train)
    is_train = role[order] == TRAIN
    ordered_train = order[is_train]
    train_order = position[ordered_train]
    train_user = user[train]
    n = np.bincount(train_user)[train_user]
    rank = rank_in_user(train_user, train_order)
    first_lent = n - np.maximum(1, n // 10)
    is_lent = (n >= 3) & (rank >= first_lent)
    lent_rows = train[is_lent]
    role[lent_rows] = VALID
    return role
