"""From an interaction table to blocks with train, validation and test lists. A split is a value, not a process.

Kinds:

- time blocks as in F3CRec: k-core on row counts, rows sorted by time and user, cut by count, or as block_cuts.py says.
  Where a user's rows share a time, a hash decides: item numbers follow popularity in MovieLens, so they must not
  decide what is last.
- leave-one-out.
- leave-some-out: some test items of every user who has enough, and a tenth of the rest for validation.
- random 8:1:1 of every user, or of all rows.
- the split a source ships, in one block or in its own blocks.

A user's repeated item inside a block counts once, at its first time. With `repeats = keep` every row gets a role by
itself and counts once in it. The same item in a later block is a new event (Last.fm: the same artist again). The lists
of a block hold the time and the rating of every entry, where the table has them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tacita.core.config import SplitConfig, list_newer_settings_at_default
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Block, BlockStream, Bools, Doubles, Ints, Keys, Longs, Ragged
from tacita.data.block_cuts import PER_PERSON_NOTE, assign_blocks, cuts_by_row_quantiles, find_quantile_cuts
from tacita.data.filters import filter_rows, list_filter_effects
from tacita.data.interaction_table import describe_repeats, warn_of_unfiltered_ratings
from tacita.data.sources import Interactions
from tacita.data.split_roles import (
    TEST,
    TRAIN,
    VALID,
    AssignRoles,
    Shuffle,
    find_source_cuts,
    make_block_role_assigner,
    make_single_split_assigner,
    make_source_role_assigner,
    number_pairs,
)
from tacita.kernels.hashing import hash_owners

_DEFAULT_K_CORE = {"lastfm-2k": 5, "ml-100k": 10, "ml-latest-small": 10, "hetrec2011-movielens": 10, "ml-1m": 10}


def resolve_split(table: Interactions, config: SplitConfig) -> SplitConfig:
    """The same settings with what depends on the data decided: the kind, and the filter of named data."""
    kind = _choose_split_kind(table, config)
    core = config.k_core
    if core is None:
        core = 0
        if kind == "blocks":
            core = _DEFAULT_K_CORE.get(table.name, 0)
    changes: dict[str, object] = {"kind": kind, "k_core": core}
    if isinstance(config.borders, list):
        changes["n_blocks"] = len(config.borders) + 1
    return config.model_copy(update=changes)


def split(table: Interactions, config: SplitConfig, draws: Draws | None = None) -> BlockStream:
    """Filter, order, number and cut a table as the config says."""
    draws = draws or Draws(config.seed)
    config = resolve_split(table, config)
    rows, sizes = filter_rows(table, config)
    rows, cuts = order_rows(table, rows, config, draws)
    user_codes = table.user[rows]
    item_codes = table.item[rows]
    user, user_ids = _number_by_appearance(user_codes, table.user_ids)
    if table.catalogue:
        item, item_ids = item_codes, table.item_ids
    else:
        item, item_ids = _number_by_appearance(item_codes, table.item_ids)
    n_users = len(user_ids)
    n_items = len(item_ids)
    if n_users < 2 or n_items < 2:
        raise TacitaError(
            f"{table.name} has {n_users} user(s) and {n_items} item(s) after filtering; at least two of "
            "each are needed (split.min_rating, split.min_user and split.k_core set the filter)."
        )
    user_keys = derive_keys(user_ids)
    item_keys = derive_keys(item_ids)
    shuffle = Shuffle(user_keys, item_keys, draws, config.repeats)
    assign_roles = _choose_role_assigner(table, rows, config, shuffle)
    columns = _list_extra_columns(table)
    interactions = _InteractionRows(user, item, rows, columns)
    n_listed = n_items if table.catalogue else 0
    blocks = _make_blocks(interactions, cuts, assign_roles, config.repeats, n_listed)
    reason = _describe_deduplication(config)
    n_entries = _count_block_entries(blocks)
    n_present = len(np.unique(item))
    sizes.append((reason, (n_entries, n_users, n_present)))
    low_rated = None
    if config.min_rating is not None:
        low_rated = _collect_low_rated(table, rows, user, item)
    return BlockStream(
        name=table.name,
        blocks=blocks,
        user_ids=user_ids,
        item_ids=item_ids,
        user_keys=user_keys,
        item_keys=item_keys,
        titles=table.titles,
        fingerprint=_compute_split_fingerprint(table, config),
        source=table.fingerprint,
        removed=list_filter_effects(sizes),
        notes=_collect_split_notes(table, config),
        items_from=table.items_from,
        low_rated=low_rated,
    )


# What a stream says of itself


def _describe_deduplication(config: SplitConfig) -> str:
    unit = "block" if config.repeats == "once" else "part"
    return f"one row per pair in a {unit} (split.repeats)"


def _count_block_entries(blocks: tuple[Block, ...]) -> int:
    total = 0
    for block in blocks:
        total += len(block.train.ids)
        total += len(block.valid.ids)
        total += len(block.test.ids)
    return total


def _compute_split_fingerprint(table: Interactions, config: SplitConfig) -> str:
    """A hash of the data and of the settings; settings that came later count only where they are not the default."""
    excluded = list_newer_settings_at_default(config, "split.")
    excluded["kind"] = True
    excluded["k_core"] = True
    settings = config.model_dump_json(exclude=excluded)
    core = config.k_core or 0
    lines = [table.fingerprint, str(config.kind), str(core), settings]
    if table.catalogue:
        lines.append(table.catalogue)
    text = "\n".join(lines)
    return hashlib.sha256(text.encode()).hexdigest()


def _collect_split_notes(table: Interactions, config: SplitConfig) -> tuple[str, ...]:
    notes = []
    if table.columns:
        notes.append(table.format_note)
    notes.extend(table.notes)
    if config.kind == "blocks" and config.borders == "person":
        notes.append(PER_PERSON_NOTE)
    if config.min_rating is None:
        unrated = warn_of_unfiltered_ratings(table)
        if unrated:
            notes.append(unrated)
    if config.repeats == "once":
        repeated = describe_repeats(table)
        if repeated:
            notes.append(repeated)
    return tuple(notes)


def _collect_low_rated(table: Interactions, rows: Longs, user: Ints, item: Ints) -> Ragged:
    """The rows below the least rating, of users and items that remain."""
    user_number = _build_number_lookup(table.user[rows], user, len(table.user_ids))
    if table.catalogue:
        item_number = np.arange(len(table.item_ids), dtype=np.int32)
    else:
        item_number = _build_number_lookup(table.item[rows], item, len(table.item_ids))
    is_removed = np.ones(len(table.user), bool)
    is_removed[rows] = False
    removed_user = user_number[table.user[is_removed]]
    removed_item = item_number[table.item[is_removed]]
    is_known = (removed_user >= 0) & (removed_item >= 0)
    known_user = removed_user[is_known]
    known_item = removed_item[is_known]
    last_user = int(user.max(initial=-1))
    return Ragged.from_pairs(known_user, known_item, last_user + 1)


def _build_number_lookup(codes: Ints, numbers: Ints, n_codes: int) -> Ints:
    """The number of each code, -1 where it has none."""
    number = np.full(n_codes, -1, np.int32)
    number[codes] = numbers
    return number


# Order


def _choose_split_kind(table: Interactions, config: SplitConfig) -> str:
    if config.kind == "given" and table.split is None:
        raise TacitaError(
            f"{table.name} ships no split; use split.kind = 'random', or say which column holds train, valid or "
            "test with --columns part=NAME."
        )
    if config.kind != "auto":
        return config.kind
    if table.block is not None:
        return "given"
    if table.timestamp is not None and table.time_is_global:
        return "blocks"
    if table.split is not None:
        return "given"
    return "random"


def order_rows(table: Interactions, rows: Longs, config: SplitConfig, draws: Draws) -> tuple[Longs, list[int]]:
    """Rows in time order, block after block, and where the blocks are cut."""
    time_blocks = config if config.kind == "blocks" else None
    rows = _sort_by_time(table, rows, time_blocks, draws)
    if config.kind == "given":
        if table.block is not None:
            block = table.block[rows]
            rows = rows[np.argsort(block, kind="stable")]
        return rows, find_source_cuts(table, rows, config)
    if config.kind != "blocks":
        return rows, [0, len(rows)]
    if cuts_by_row_quantiles(config):
        return rows, find_quantile_cuts(len(rows), config)
    assigned = assign_blocks(table, rows, config)
    ends = np.cumsum(np.bincount(assigned))
    rows = rows[np.argsort(assigned, kind="stable")]
    return rows, [0, *ends.tolist()]


def _sort_by_time(table: Interactions, rows: Longs, blocks: SplitConfig | None, draws: Draws) -> Longs:
    """Rows in time order, ties by user, then by a hash of user and item; file order where there is no time."""
    if blocks is not None:
        _require_global_time(table, rows)
    if table.timestamp is None:
        return rows
    user = table.user[rows]
    item = table.item[rows]
    user_keys = derive_keys(table.user_ids)
    item_keys = derive_keys(table.item_ids)
    tie = _hash_ties(user, item, user_keys, item_keys, draws)
    time = table.timestamp[rows]
    order = np.lexsort((tie, user, time))
    return rows[order]


def _require_global_time(table: Interactions, rows: Longs) -> None:
    """Refuse time blocks where times are missing, order only each user's rows, or are all the same."""
    if table.timestamp is None:
        raise TacitaError(
            f"{table.name} has no timestamps, so it cannot be cut into time blocks; use split.kind = 'random'."
        )
    if not table.time_is_global:
        raise TacitaError(
            f"{table.name} knows only the order inside each user, so it cannot be cut into time blocks; "
            "use split.kind = 'leave-one-out' or 'random'."
        )
    time = table.timestamp[rows]
    has_one_time = len(time) > 0 and time.min() == time.max()
    if has_one_time:
        raise TacitaError(
            f"all timestamps of {table.name} are the same, so it cannot be cut into time blocks; "
            "use split.kind = 'random'."
        )


def _hash_ties(user: AnyArray, item: AnyArray, user_keys: Keys, item_keys: Keys, draws: Draws) -> Keys:
    """The hash of user and item that orders rows of a user that share a time."""
    items_key = draws.public("tied-items")
    item_hash = hash_owners(items_key, item_keys)
    user_key = user_keys[user]
    pair_key = user_key ^ item_hash[item]
    ties_key = draws.public("time-ties")
    return hash_owners(ties_key, pair_key)


def _number_by_appearance(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber codes in order of first appearance."""
    present, first = np.unique(codes, return_index=True)
    order = np.argsort(first, kind="stable")
    ordered_codes = present[order]
    n_present = len(present)
    number = np.zeros(len(names), np.int32)
    number[ordered_codes] = np.arange(n_present, dtype=np.int32)
    ordered_names = tuple(names[code] for code in ordered_codes)
    return number[codes], ordered_names


# Cut


def _choose_role_assigner(table: Interactions, rows: Longs, config: SplitConfig, shuffle: Shuffle) -> AssignRoles:
    """What decides the role of each of the ordered rows."""
    if config.kind == "blocks":
        return make_block_role_assigner(config, shuffle)
    if config.kind == "given":
        return make_source_role_assigner(table, rows, config, shuffle)
    return make_single_split_assigner(config.kind, table, config, shuffle)


class _InteractionRows(NamedTuple):
    """Interactions in their order, and where to look up the other columns of each."""

    user: Ints
    item: Ints
    place: Longs  # in the columns
    columns: Arrays  # "time" and "rating" of the source, where it has them

    def take(self, where: AnyArray | slice) -> _InteractionRows:
        user = self.user[where]
        item = self.item[where]
        place = self.place[where]
        return _InteractionRows(user, item, place, self.columns)

    def to_lists(self, n_users: int) -> Ragged:
        columns = {}
        for name, column in self.columns.items():
            columns[name] = column[self.place]
        return Ragged.from_pairs(self.user, self.item, n_users, columns)


def _list_extra_columns(table: Interactions) -> Arrays:
    columns: Arrays = {}
    if table.timestamp is not None:
        columns["time"] = table.timestamp
    if table.rating is not None:
        columns["rating"] = table.rating
    return columns


def _mark_first_of_pair(pair: Longs) -> Bools:
    """Marks the first row of every pair."""
    _, first = np.unique(pair, return_index=True)
    is_first = np.zeros(len(pair), bool)
    is_first[first] = True
    return is_first


def _make_blocks(
    interactions: _InteractionRows, cuts: list[int], assign_roles: AssignRoles, repeats: str, n_listed: int
) -> tuple[Block, ...]:
    """The blocks; all have the items of a catalogue (`n_listed`), else those that occurred by then."""
    blocks: list[Block] = []
    n_users = 0
    n_items = n_listed
    for index, (start, end) in enumerate(pairwise(cuts)):
        block_rows = interactions.take(slice(start, end))
        n_known = n_users
        last_user = int(block_rows.user.max(initial=-1))
        last_item = int(block_rows.item.max(initial=-1))
        n_users = max(n_known, last_user + 1)
        n_items = max(n_items, last_item + 1)
        is_new = np.arange(n_users) >= n_known
        block = _make_block(index, block_rows, is_new, n_items, assign_roles, repeats)
        blocks.append(block)
    return tuple(blocks)


def _make_block(
    index: int, interactions: _InteractionRows, is_new: Bools, n_items: int, assign_roles: AssignRoles, repeats: str
) -> Block:
    """One block of ordered rows; a pair is never twice in the same role."""
    pair = number_pairs(interactions.user, interactions.item)
    if repeats == "once":
        rows = np.flatnonzero(_mark_first_of_pair(pair))
    else:
        rows = np.arange(len(pair))
    user = interactions.user[rows]
    item = interactions.item[rows]
    role = assign_roles(index, user, item, rows)
    if repeats == "keep":
        keep = _mark_first_in_role(pair, role)
        rows = rows[keep]
        role = role[keep]
    n_users = len(is_new)

    def list_rows(wanted_role: int) -> Ragged:
        role_rows = rows[role == wanted_role]
        selected = interactions.take(role_rows)
        return selected.to_lists(n_users)

    return Block(
        index=index,
        n_users=n_users,
        n_items=n_items,
        train=list_rows(TRAIN),
        valid=list_rows(VALID),
        test=list_rows(TEST),
        new_users=is_new,
        n_rows=len(pair),
    )


def _mark_first_in_role(pair: Longs, role: AnyArray) -> Bools:
    """Marks the first row of every pair in each role."""
    is_first = np.zeros(len(pair), bool)
    for wanted_role in (TRAIN, VALID, TEST):
        rows = np.flatnonzero(role == wanted_role)
        first_rows = rows[_mark_first_of_pair(pair[rows])]
        is_first[first_rows] = True
    return is_first


# Collected blocks


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
    user = rows.user.astype(np.int32)
    item = rows.item.astype(np.int32)
    tie = _hash_ties(user, item, keys, item_keys, draws)
    order = np.lexsort((tie, user, rows.time))
    columns: Arrays = {}
    if not np.isnan(rows.time).any():
        columns["time"] = rows.time
    if not np.isnan(rows.rating).any():
        columns["rating"] = rows.rating.astype(np.float32)
    shuffle = Shuffle(keys, item_keys, draws, config.repeats)
    assign_roles = make_block_role_assigner(config, shuffle)
    n_items = len(item_keys)
    interactions = _InteractionRows(user[order], item[order], order, columns)
    return _make_block(index, interactions, new, n_items, assign_roles, config.repeats)
