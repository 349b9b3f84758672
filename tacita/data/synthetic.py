"""Seeded interactions with known structure, so that a test knows what a good recommender must find.

`kind=groups`: item i belongs to group i % groups and is popular by about 1 / (1 + i // groups); user u likes
group u % groups and, with drift, more and more the next one; the last `new` share of the users arrives late.
`kind=checkerboard`: even users like even items, odd users odd ones, each has all but `missing` of its colour.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import Floats, Ints, Longs

KINDS = ("groups", "checkerboard")
LOYALTY = 0.8  # share of interactions inside the preferred group
SPAN = 94_608_000  # three years of seconds
START = 1_600_000_000
MAX_ROWS = 400_000_000
MAX_ITEMS = 4_000_000  # a (user, item, row) of one chunk fits in 64 bits
CHUNK_ROWS = 1_000_000
REDRAWS = 6


class SyntheticRows(NamedTuple):
    """One row per interaction, in time order; users and items by number."""

    user: Ints
    item: Ints
    timestamp: Longs


@dataclass(frozen=True)
class SyntheticOptions:
    """What may stand after `synthetic:`."""

    kind: str = "groups"
    users: int = 1000
    items: int = 500
    per_user: float = 20.0  # mean interactions of a user
    groups: int = 8
    drift: float = 0.0  # 0..1, share of the taste that has moved to the next group at the end of time
    new: float = 0.0  # 0..1, share of the users that arrive in the second half
    missing: int = 3  # checkerboard: items of its colour that a user lacks
    seed: int = 0


def generate_synthetic(spec: str) -> SyntheticRows:
    """The interactions described by `users=2000,items=500,...`; a leading `synthetic:` is allowed."""
    options = parse_synthetic_options(spec)
    if options.kind == "checkerboard":
        return generate_checkerboard(
            options.users,
            options.items,
            missing=options.missing,
            seed=options.seed,
        )
    return _generate_grouped_users(options)


def parse_synthetic_options(spec: str) -> SyntheticOptions:
    """The options of a spec; each value is checked on its own, then against the others."""
    kinds = {}
    for field in fields(SyntheticOptions):
        kinds[field.name] = type(field.default)
    values: dict[str, int | float | str] = {}
    text = spec.strip().removeprefix("synthetic")
    text = text.removeprefix(":")
    for part in text.split(","):
        if not part.strip():
            continue
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in kinds:
            raise unknown_name_error("synthetic option", name, kinds)
        kind = kinds[name]
        if kind is str:
            values[name] = value
        else:
            values[name] = _parse_number(name, value, kind)
    options = SyntheticOptions(**values)  # type: ignore[arg-type]
    _check_options(options)
    return options


def _parse_number(name: str, text: str, kind: type) -> int | float:
    """A number within the range of its option."""
    least = 1
    most = 2**31 - 1
    if name in ("drift", "new"):
        least = 0
        most = 1
        wanted = "a number from 0 to 1"
    else:
        if name in ("seed", "missing"):
            least = 0
        whole = "whole " if kind is int else ""
        wanted = f"a {whole}number from {least} up"
    value: int | float = -1
    with suppress(ValueError):
        value = kind(text)
    if not least <= value <= most:
        shown = text[:40]
        raise TacitaError(f"synthetic option {name}={shown!r} must be {wanted}.")
    return value


def _check_options(options: SyntheticOptions) -> None:
    """Refuse options that contradict each other or ask for too much."""
    if options.kind not in KINDS:
        raise unknown_name_error("synthetic kind", options.kind, KINDS)
    per_user = options.per_user
    if options.kind == "groups":
        if options.groups > options.items:
            raise TacitaError(f"synthetic data with groups={options.groups} needs at least as many items.")
    else:
        if options.users < 2 or options.items < 2:
            raise TacitaError("a synthetic checkerboard needs users=2 and items=2 or more.")
        per_user = options.items / 2
    rows = options.users * per_user
    if rows > MAX_ROWS:
        raise TacitaError(f"synthetic data of {rows:,.0f} rows is more than {MAX_ROWS:,}; ask for fewer users.")
    if options.items > MAX_ITEMS:
        raise TacitaError(f"synthetic data has at most {MAX_ITEMS:,} items, not {options.items:,}.")


def generate_checkerboard(users: int, items: int, *, missing: int = 3, seed: int = 0) -> SyntheticRows:
    """Even users like even items, odd users odd; chance says which are missing and when each came."""
    random = np.random.default_rng(seed)
    n_colour = (items + 1) // 2
    user_numbers = np.arange(users, dtype=np.int32)
    user = np.repeat(user_numbers, n_colour)
    even_items = np.arange(0, items, 2, dtype=np.int32)
    is_odd = user & 1
    item = np.tile(even_items, users) + is_odd
    order = random.random((users, n_colour)).argsort(axis=1)
    place = order.argsort(axis=1).ravel()
    n_missing = min(missing, items // 2 - 1)
    keep = item < items
    keep &= place >= n_missing
    user = user[keep]
    item = item[keep]
    n_rows = len(user)
    second = random.integers(0, SPAN, n_rows, dtype=np.int64)
    time = START + second
    by_time = np.lexsort((item, user, time))
    return SyntheticRows(user[by_time], item[by_time], time[by_time])


def _generate_grouped_users(options: SyntheticOptions) -> SyntheticRows:
    """Users drawn in chunks, so that memory stays near the size of the result, then rows in time order."""
    users_per_chunk = int(CHUNK_ROWS / options.per_user)
    step = max(1, users_per_chunk)
    chunks = []
    for first in range(0, options.users, step):
        last = min(first + step, options.users)
        chunks.append(_draw_interactions_of_users(options, first, last))
    users, items, seconds = zip(*chunks)
    user = np.concatenate(users)
    item = np.concatenate(items)
    second = np.concatenate(seconds)
    del chunks, users, items, seconds
    # Sorting one packed number is several times faster than sorting an index, and ties keep their row order.
    n_rows = len(user)
    row = np.arange(n_rows, dtype=np.uint64)
    row_bits = np.uint64(36)
    high = second.astype(np.uint64) << row_bits
    packed = high | row
    packed.sort()
    row_mask = np.uint64(2**36 - 1)
    order = packed & row_mask
    order = order.astype(np.int64)
    second = packed >> row_bits
    time = START + second.astype(np.int64)
    return SyntheticRows(user[order], item[order], time)


def _draw_interactions_of_users(options: SyntheticOptions, first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """User, item and second of every interaction of users first..last-1, without repeated pairs."""
    random = np.random.default_rng((options.seed, first))
    users = np.arange(first, last, dtype=np.int32)
    counts = _draw_interaction_counts(random, options, last - first)
    user = np.repeat(users, counts)
    number = user - first
    n_rows = len(user)
    arrivals = _draw_arrivals(random, options, users)
    arrival = arrivals[number]
    share = random.random(n_rows, dtype=np.float32)
    time = arrival + (1 - arrival) * share
    item = _draw_items(random, options, user, time)
    _redraw_repeats(random, options, user, item, time)
    keep = np.ones(n_rows, np.bool_)
    repeats = _find_repeats(number, item)
    keep[repeats] = False
    span = np.float32(SPAN)
    last_second = np.float32(SPAN - 8)
    second = np.minimum(time * span, last_second)
    second = second.astype(np.int32)
    return user[keep], item[keep], second[keep]


def _draw_arrivals(random: np.random.Generator, options: SyntheticOptions, users: Ints) -> Floats:
    """When each user arrives, as a share of the time: the last ones in the second half, others at once."""
    n_users = len(users)
    old_share = 1 - options.new
    first_late = round(options.users * old_share)
    is_late = users >= first_late
    late = 0.5 + 0.4 * random.random(n_users)
    early = 0.1 * random.random(n_users)
    arrival = np.where(is_late, late, early)
    return arrival.astype(np.float32)


def _redraw_repeats(
    random: np.random.Generator, options: SyntheticOptions, user: Ints, item: Ints, time: Floats
) -> None:
    """Draw the items of repeated pairs afresh, in place; the last attempts ignore taste."""
    number = user - user.min(initial=0)
    for attempt in range(REDRAWS):
        repeats = _find_repeats(number, item)
        if not len(repeats):
            break
        if attempt < REDRAWS - 2:
            redrawn = _draw_items(random, options, user[repeats], time[repeats])
        else:
            redrawn = random.integers(0, options.items, len(repeats), dtype=np.int32)
        item[repeats] = redrawn


def _draw_interaction_counts(random: np.random.Generator, options: SyntheticOptions, n: int) -> Longs:
    """Interactions per user: a floor of up to five plus a long tail, at most half of the items."""
    least = min(5, int(options.per_user))
    more = options.per_user - least
    if more > 0:
        success = 2 / (2 + more)
        tail = random.negative_binomial(2, success, n)
    else:
        tail = np.zeros(n, np.int64)
    most = max(1, options.items // 2)
    counts = np.minimum(least + tail, most)
    return counts.astype(np.int64)


def _draw_items(random: np.random.Generator, options: SyntheticOptions, user: Ints, time: Floats) -> Ints:
    """An item for each (user, time), repeats included."""
    groups = options.groups
    n = len(user)
    drift = np.float32(options.drift) * time
    has_moved = random.random(n, dtype=np.float32) < drift
    group = (user + has_moved) % groups
    loyalty = random.random(n, dtype=np.float32)
    is_stray = loyalty >= LOYALTY
    n_strays = int(is_stray.sum())
    stray_group = random.integers(0, groups, n_strays, dtype=group.dtype)
    group[is_stray] = stray_group
    # Inverse of the continuous 1 / x law on 1..size+1: no table to search.
    size = -(-options.items // groups)
    log_size = np.float32(np.log(size + 1))
    quantile = random.random(n, dtype=np.float32)
    position = np.exp(quantile * log_size)
    rank = position.astype(np.int32) - 1
    item = rank * groups + group
    is_over = item >= options.items  # the last groups may have one item less
    item[is_over] = group[is_over]
    return np.asarray(item, np.int32)


def _find_repeats(user: Ints, item: Ints) -> Longs:
    """Rows whose (user, item) stands in an earlier row."""
    # User, item and row packed in 64 bits: plain sorting is much faster than an argsort.
    last_item = int(item.max(initial=0))
    n_items = np.uint64(last_item + 1)
    pair = user.astype(np.uint64) * n_items
    pair = pair + item.astype(np.uint64)
    n_rows = len(user)
    n_bits = max(1, n_rows.bit_length())
    row_bits = np.uint64(n_bits)
    row = np.arange(n_rows, dtype=np.uint64)
    packed = (pair << row_bits) | row
    packed.sort()
    sorted_pair = packed >> row_bits
    is_repeat = sorted_pair[1:] == sorted_pair[:-1]
    repeats = packed[1:][is_repeat]
    row_mask = np.uint64(2**n_bits - 1)
    return np.asarray(repeats & row_mask, np.int64)
