"""From an interaction table to blocks with train, validation and test lists. A split is a value, not a process.

Kinds: time blocks as in F3CRec (k-core on row counts, cut by count after a sort by time, user and, where a
user's rows share a time, a hash: item numbers follow popularity in MovieLens, so they must not decide what is last),
leave-one-out, leave-some-out (some test items of everybody who has enough, and a tenth of the rest for validation),
random 8:1:1 of every user or of all rows, and the split a source ships, in one block or in its own. A
user's repeated item inside a block counts once, at its first time, unless `repeats = keep`: then every row is put into
a part by itself and counts once there. The same item in a later block is a new event (Last.fm: the same artist again).
The lists of a block keep the time and the rating of every entry, where the table has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tacita.core.config import SplitConfig, find_later_defaults
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Block, BlockStream, Bools, Doubles, Ints, Keys, Longs, Ragged
from tacita.data.filters import Size, filter_by_activity, filter_by_rating, filter_k_core, list_removals, measure_size
from tacita.data.interaction_table import rating_note
from tacita.data.sources import Interactions
from tacita.kernels.hashing import hash_owners

_DEFAULT_K_CORE = {"lastfm-2k": 5, "ml-100k": 10, "ml-latest-small": 10, "hetrec2011-movielens": 10, "ml-1m": 10}
TRAIN, VALID, TEST = 0, 1, 2

AssignRoles = Callable[[int, Ints, Ints, Longs], AnyArray]
"""The part of each row, from the block's number, the rows' users and items, and their places in the block."""


def resolve_split(table: Interactions, config: SplitConfig) -> SplitConfig:
    """The same settings with what depends on the data decided: the kind, and the filter of named data."""
    kind = _choose_kind(table, config)
    core = config.k_core
    if core is None:
        core = _DEFAULT_K_CORE.get(table.name, 0) if kind == "blocks" else 0
    return config.model_copy(update={"kind": kind, "k_core": core})


def split(table: Interactions, config: SplitConfig, draws: Draws | None = None) -> BlockStream:
    """Filter, order, number and cut a table as the config says."""
    draws = draws or Draws(config.seed)
    config = resolve_split(table, config)
    kind, core = config.kind, config.k_core or 0
    rows, sizes = _filter_rows(table, config, core)
    rows = _sort_by_time(table, rows, config if kind == "blocks" else None, draws)
    if kind == "given" and table.block is not None:
        rows = rows[np.argsort(table.block[rows], kind="stable")]
    user, user_ids = _number_by_appearance(table.user[rows], table.user_ids)
    item, item_ids = _number_by_appearance(table.item[rows], table.item_ids)
    if len(user_ids) < 2 or len(item_ids) < 2:
        raise TacitaError(
            f"{table.name} has {len(user_ids)} user(s) and {len(item_ids)} item(s) after filtering; at least two of "
            "each are needed (split.min_rating, split.min_user and split.k_core set the filter)."
        )
    shuffled = _Shuffle(derive_keys(user_ids), derive_keys(item_ids), draws, config.repeats)
    cuts, roles_of = _plan_split(kind, table, rows, config, shuffled)
    told = {"time": table.timestamp, "rating": table.rating}
    columns = {name: column for name, column in told.items() if column is not None}
    blocks = _make_blocks(_InteractionRows(user, item, rows, columns), cuts, roles_of, config.repeats)
    kept = sum(len(part.ids) for block in blocks for part in (block.train, block.valid, block.test))
    again = f"one row per pair in a {'block' if config.repeats == 'once' else 'part'} (split.repeats)"
    sizes.append((again, (kept, len(user_ids), len(item_ids))))
    said = config.model_dump_json(exclude={"kind": True, "k_core": True} | find_later_defaults(config, "split."))
    print_of = hashlib.sha256(f"{table.fingerprint}\n{kind}\n{core}\n{said}".encode())
    unrated = rating_note(table) if config.min_rating is None else None
    return BlockStream(
        name=table.name,
        blocks=blocks,
        user_ids=user_ids,
        item_ids=item_ids,
        user_keys=shuffled.keys,
        item_keys=shuffled.item_keys,
        titles=table.titles,
        fingerprint=print_of.hexdigest(),
        source=table.fingerprint,
        removed=list_removals(sizes),
        notes=(*([table.format_note] if table.columns else []), *table.notes, *([unrated] if unrated else [])),
        items_from=table.items_from,
        low_rated=None if config.min_rating is None else _collect_low_rated(table, rows, user, item),
    )


def _collect_low_rated(table: Interactions, rows: Longs, user: Ints, item: Ints) -> Ragged:
    """What the least rating took of people and items that are left."""
    number = [np.full(len(names), -1, np.int32) for names in (table.user_ids, table.item_ids)]
    number[0][table.user[rows]], number[1][table.item[rows]] = user, item
    gone = np.ones(len(table.user), bool)
    gone[rows] = False
    who, what = number[0][table.user[gone]], number[1][table.item[gone]]
    known = (who >= 0) & (what >= 0)
    return Ragged.from_pairs(who[known], what[known], int(user.max(initial=-1)) + 1)


def _filter_rows(table: Interactions, config: SplitConfig, core: int) -> tuple[Longs, list[tuple[str, Size]]]:
    """The rows that are left, and the size before and after each filter with its reason."""
    least = config.min_rating
    rows = filter_by_rating(table, least)
    sizes = [("", measure_size(table.user, table.item))]
    if least is not None:
        sizes.append(
            (f"the least rating of {least:g} (split.min_rating)", measure_size(table.user[rows], table.item[rows]))
        )
    if config.min_user > 1:
        rows = filter_by_activity(table, rows, config.min_user)
        fewer = f"users with fewer than {config.min_user} (split.min_user)"
        sizes.append((fewer, measure_size(table.user[rows], table.item[rows])))
    rows = filter_k_core(table, rows, core)
    sizes.append((f"the {core}-core (split.k_core)", measure_size(table.user[rows], table.item[rows])))
    return rows, sizes


def _choose_kind(table: Interactions, config: SplitConfig) -> str:
    if config.kind != "auto":
        if config.kind == "given" and table.split is None:
            raise TacitaError(
                f"{table.name} ships no split; use split.kind = 'random', or say which column holds train, valid or "
                "test with --columns part=NAME."
            )
        return config.kind
    if table.block is not None:
        return "given"
    if table.timestamp is not None and table.time_is_global:
        return "blocks"
    return "given" if table.split is not None else "random"


def _sort_by_time(table: Interactions, rows: Longs, blocks: SplitConfig | None, draws: Draws) -> Longs:
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
    tie = _hash_ties(
        table.user[rows], table.item[rows], derive_keys(table.user_ids), derive_keys(table.item_ids), draws
    )
    return rows[np.lexsort((tie, table.user[rows], time))]


def _hash_ties(user: AnyArray, item: AnyArray, user_keys: Keys, item_keys: Keys, draws: Draws) -> Keys:
    """What decides between rows of a user that share a time: a hash of user and item."""
    spread = hash_owners(draws.public("tied-items"), item_keys)
    return hash_owners(draws.public("time-ties"), user_keys[user] ^ spread[item])


def _number_by_appearance(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber codes in order of first appearance."""
    present, first = np.unique(codes, return_index=True)
    order = np.argsort(first, kind="stable")
    number = np.zeros(len(names), np.int32)
    number[present[order]] = np.arange(len(present), dtype=np.int32)
    return number[codes], tuple(names[c] for c in present[order])


def _find_cuts(n: int, config: SplitConfig) -> list[int]:
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


class _InteractionRows(NamedTuple):
    """Interactions in their order, and where to look up what else is known of each."""

    user: Ints
    item: Ints
    place: Longs  # in the columns
    columns: Arrays  # "time" and "rating" of the source, where it has them

    def take(self, where: AnyArray | slice) -> _InteractionRows:
        return _InteractionRows(self.user[where], self.item[where], self.place[where], self.columns)

    def to_lists(self, n_users: int) -> Ragged:
        found = {name: column[self.place] for name, column in self.columns.items()}
        return Ragged.from_pairs(self.user, self.item, n_users, found)


def _pair_numbers(user: Ints, item: Ints) -> Longs:
    """One number per (user, item)."""
    return np.asarray(user.astype(np.int64) << 32 | item)


def _mark_first(pair: Longs) -> Bools:
    """Marks the first row of every pair."""
    _, first = np.unique(pair, return_index=True)
    keep = np.zeros(len(pair), bool)
    keep[first] = True
    return keep


def _rank_in_user(user: Ints, order: Longs) -> Longs:
    """Position of every row among its user's rows when rows are visited in `order`."""
    by_user = order[np.argsort(user[order], kind="stable")]
    counts = np.bincount(user)
    start = np.cumsum(counts) - counts
    out = np.empty(len(user), np.int64)
    out[by_user] = np.arange(len(user)) - start[user[by_user]]
    return out


class _Shuffle(NamedTuple):
    """A random order in which each user's rows depend on that user and item alone, not on their numbers."""

    keys: Keys
    item_keys: Keys
    draws: Draws
    repeats: str

    def order(self, user: Ints, item: Ints, block: int) -> Longs:
        spread = hash_owners(self.draws.public("split-items"), self.item_keys)
        mixed = self.keys[user] ^ spread[item]
        if self.repeats == "keep":  # each row of a pair goes its own way
            pair = np.unique(_pair_numbers(user, item), return_inverse=True)[1].astype(np.int32)
            again = _rank_in_user(pair, np.arange(len(pair)))
            apart = hash_owners(self.draws.public("split-repeats"), again.astype(np.uint64))
            mixed = np.where(again > 0, mixed ^ apart, mixed)
        return np.argsort(hash_owners(self.draws.public("split", block), mixed), kind="stable")


def _assign_inner_roles(user: Ints, order: Longs) -> AnyArray:
    """F3CRec: per user the last ceil(n/10) are test, ceil of a ninth of the rest validation; below 3 all train."""
    n = np.bincount(user)[user]
    n_test = -(-n // 10)
    n_valid = -(-(n - n_test) // 9)
    rank = _rank_in_user(user, order)
    role = np.where(rank >= n - n_test, TEST, np.where(rank >= n - n_test - n_valid, VALID, TRAIN))
    return np.where(n < 3, TRAIN, role)


def _plan_split(
    kind: str, table: Interactions, rows: Longs, config: SplitConfig, shuffled: _Shuffle
) -> tuple[list[int], AssignRoles]:
    """Where the ordered rows are cut, and what decides the part of each."""
    if kind == "blocks":
        return _find_cuts(len(rows), config), _make_inner_roles(config, shuffled)
    if kind == "given":
        return _use_source_split(table, rows, config, shuffled)
    return [0, len(rows)], _make_single_roles(kind, table, config, shuffled)


def _make_inner_roles(config: SplitConfig, shuffled: _Shuffle) -> AssignRoles:
    """The parts of time blocks: block 0 at random, later ones as the config says."""

    def roles_of(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        by_chance = block == 0 or config.inner == "random"
        return _assign_inner_roles(user, shuffled.order(user, item, block) if by_chance else np.arange(len(user)))

    return roles_of


def _make_blocks(rows: _InteractionRows, cuts: list[int], roles_of: AssignRoles, repeats: str) -> tuple[Block, ...]:
    blocks: list[Block] = []
    n_users = n_items = 0
    for index, (lo, hi) in enumerate(pairwise(cuts)):
        some = rows.take(slice(lo, hi))
        known = n_users
        n_users = max(n_users, int(some.user.max()) + 1)
        n_items = max(n_items, int(some.item.max()) + 1)
        new = np.arange(n_users) >= known
        blocks.append(_make_block(index, some, new, n_items, roles_of, repeats))
    return tuple(blocks)


def _make_block(
    index: int, told: _InteractionRows, new: Bools, n_items: int, roles_of: AssignRoles, repeats: str
) -> Block:
    """One block of ordered rows; a pair is never twice in the same part."""
    pair = _pair_numbers(told.user, told.item)
    rows = np.flatnonzero(_mark_first(pair)) if repeats == "once" else np.arange(len(pair))
    role = roles_of(index, told.user[rows], told.item[rows], rows)
    if repeats == "keep":
        once = np.zeros(len(rows), bool)
        for part in (TRAIN, VALID, TEST):
            once[np.flatnonzero(role == part)[_mark_first(pair[role == part])]] = True
        rows, role = rows[once], role[once]
    train, valid, test = (told.take(rows[role == part]).to_lists(len(new)) for part in (TRAIN, VALID, TEST))
    return Block(index, len(new), n_items, train, valid, test, new, len(pair))


@dataclass(frozen=True)
class CollectedRows:
    """Rows of known users and items; nan where a row has no time or rating."""

    user: AnyArray
    item: AnyArray
    time: Doubles
    rating: Doubles


def split_collected_rows(
    index: int, rows: CollectedRows, new: Bools, keys: Keys, item_keys: Keys, config: SplitConfig
) -> Block:
    """A block that was collected rather than cut, split as a cut block would be.

    It keeps the times and the ratings if all its rows have them.
    """
    draws = Draws(config.seed)
    user, item = rows.user.astype(np.int32), rows.item.astype(np.int32)
    order = np.lexsort((_hash_ties(user, item, keys, item_keys, draws), user, rows.time))
    columns = {"time": rows.time, "rating": rows.rating}
    kept: Arrays = {name: column for name, column in columns.items() if not np.isnan(column).any()}
    if "rating" in kept:
        kept["rating"] = kept["rating"].astype(np.float32)
    roles_of = _make_inner_roles(config, _Shuffle(keys, item_keys, draws, config.repeats))
    told = _InteractionRows(user[order], item[order], order, kept)
    return _make_block(index, told, new, len(item_keys), roles_of, config.repeats)


def _make_single_roles(kind: str, table: Interactions, config: SplitConfig, shuffled: _Shuffle) -> AssignRoles:
    """The parts of leave-one-out and random splits."""
    leaves_out = kind in ("leave-one-out", "leave-some-out")
    if leaves_out and config.held_out == "last" and table.timestamp is None:
        raise TacitaError(f"{table.name} has no timestamps; use split.held_out = 'random'.")

    def roles_of(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        if kind == "global-random":
            place = np.argsort(shuffled.order(user, item, block))
            return np.where(place >= int(0.9 * len(user)), TEST, np.where(place >= int(0.8 * len(user)), VALID, TRAIN))
        in_order = leaves_out and config.held_out == "last"
        rank = _rank_in_user(user, np.arange(len(user)) if in_order else shuffled.order(user, item, block))
        n = np.bincount(user)[user]
        if kind == "leave-some-out":
            kept = n - config.held_items
            asked = np.maximum(1, np.rint(0.1 * kept).astype(np.int64))
            role = np.where(rank >= kept, TEST, np.where(rank >= kept - asked, VALID, TRAIN))
            return np.where((n < config.least_items) | (kept < 2), TRAIN, role)
        share = np.ones_like(n) if kind == "leave-one-out" else np.maximum(1, np.rint(0.1 * n).astype(np.int64))
        role = np.where(rank >= n - share, TEST, np.where(rank >= n - 2 * share, VALID, TRAIN))
        return np.where(n < 3, TRAIN, role)

    return roles_of


def _use_source_split(
    table: Interactions, rows: Longs, config: SplitConfig, shuffled: _Shuffle
) -> tuple[list[int], AssignRoles]:
    """Blocks and parts as the source has them; without any validation part a tenth of the training rows may be lent."""
    assert table.split is not None
    given = table.split[rows].astype(np.int64)
    sizes = np.bincount(table.block[rows]) if table.block is not None else np.array([len(rows)])
    if not sizes.all():
        empty = int(np.flatnonzero(sizes == 0)[0])
        raise TacitaError(
            f"no row of {table.name} is in block {empty}, but some are in block {len(sizes) - 1}; number the blocks "
            "0, 1, 2 and so on without a gap, and see split.min_rating and split.k_core."
        )
    cuts = [0, *np.cumsum(sizes).tolist()]
    lend = config.lend and not (given == VALID).any()

    def roles_of(block: int, user: Ints, item: Ints, rows: Longs) -> AnyArray:
        role = given[cuts[block] + rows]
        return _lend_validation(role, user, shuffled.order(user, item, block)) if lend else role

    return cuts, roles_of


def _lend_validation(role: AnyArray, user: Ints, shuffled: Longs) -> AnyArray:
    """A random tenth of each user's training rows becomes validation."""
    role = role.copy()
    train = np.flatnonzero(role == TRAIN)
    if not len(train):
        return role
    position = np.full(len(user), -1)
    position[train] = np.arange(len(train))
    order = position[shuffled[role[shuffled] == TRAIN]]
    n = np.bincount(user[train])[user[train]]
    rank = _rank_in_user(user[train], order)
    held = (n >= 3) & (rank >= n - np.maximum(1, n // 10))
    role[train[held]] = VALID
    return role
