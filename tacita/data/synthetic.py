"""Seeded interactions with known structure, so that a test knows what a good recommender must find.

`kind=groups`: item i belongs to group i % groups and is popular by about 1 / (1 + i // groups); user u likes
group u % groups and, with drift, more and more the next one; the last `new` share of the users arrives late.
`kind=checkerboard`: even users like even items, odd users odd ones, each has all but `missing` of its colour.
"""

from __future__ import annotations

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
    options = parse_options(spec)
    if options.kind == "checkerboard":
        return generate_checkerboard(options.users, options.items, missing=options.missing, seed=options.seed)
    return _generate_groups(options)


def parse_options(spec: str) -> SyntheticOptions:
    """The options of a spec; each value is checked on its own, then against the others."""
    kinds = {field.name: type(field.default) for field in fields(SyntheticOptions)}
    values: dict[str, int | float | str] = {}
    for part in spec.strip().removeprefix("synthetic").removeprefix(":").split(","):
        if not part.strip():
            continue
        name, _, text = (piece.strip() for piece in part.partition("="))
        if name not in kinds:
            raise unknown_name_error("synthetic option", name, kinds)
        values[name] = text if kinds[name] is str else _parse_number(name, text, kinds[name])
    return _check_options(SyntheticOptions(**values))  # type: ignore[arg-type]


def _parse_number(name: str, text: str, kind: type) -> int | float:
    """A number within the range of its option."""
    share = name in ("drift", "new")
    least = 0 if share or name in ("seed", "missing") else 1
    wanted = "a number from 0 to 1" if share else f"a {'whole ' if kind is int else ''}number from {least} up"
    try:
        value: int | float = int(text) if kind is int else float(text)
    except ValueError:
        value = -1
    if not least <= value <= (1 if share else 2**31 - 1):
        raise TacitaError(f"synthetic option {name}={text[:40]!r} must be {wanted}.")
    return value


def _check_options(options: SyntheticOptions) -> SyntheticOptions:
    """The same options, unless they contradict each other or ask for too much."""
    if options.kind not in KINDS:
        raise unknown_name_error("synthetic kind", options.kind, KINDS)
    if options.kind == "groups" and options.groups > options.items:
        raise TacitaError(f"synthetic data with groups={options.groups} needs at least as many items.")
    if options.kind == "checkerboard" and (options.users < 2 or options.items < 2):
        raise TacitaError("a synthetic checkerboard needs users=2 and items=2 or more.")
    rows = options.users * (options.items / 2 if options.kind == "checkerboard" else options.per_user)
    if rows > MAX_ROWS:
        raise TacitaError(f"synthetic data of {rows:,.0f} rows is more than {MAX_ROWS:,}; ask for fewer users.")
    if options.items > MAX_ITEMS:
        raise TacitaError(f"synthetic data has at most {MAX_ITEMS:,} items, not {options.items:,}.")
    return options


def generate_checkerboard(users: int, items: int, *, missing: int = 3, seed: int = 0) -> SyntheticRows:
    """Even users like even items, odd users odd; chance says which are missing and when each came."""
    random = np.random.default_rng(seed)
    user = np.repeat(np.arange(users, dtype=np.int32), (items + 1) // 2)
    item = np.tile(np.arange(0, items, 2, dtype=np.int32), users) + (user & 1)
    place = random.random((users, (items + 1) // 2)).argsort(axis=1).argsort(axis=1).ravel()
    kept = (item < items) & (place >= min(missing, items // 2 - 1))
    user, item = user[kept], item[kept]
    time = START + random.integers(0, SPAN, len(user), dtype=np.int64)
    order = np.lexsort((item, user, time))
    return SyntheticRows(user[order], item[order], time[order])


def _generate_groups(options: SyntheticOptions) -> SyntheticRows:
    """Users drawn in chunks, so that memory stays near the size of the result, then rows in time order."""
    step = max(1, int(CHUNK_ROWS / options.per_user))
    firsts = range(0, options.users, step)
    parts = [_draw_users(options, first, min(first + step, options.users)) for first in firsts]
    user, item, second = (np.concatenate(column) for column in zip(*parts))
    del parts
    # Sorting one packed number is several times faster than sorting an index, and ties keep their row order.
    packed = (second.astype(np.uint64) << np.uint64(36)) | np.arange(len(user), dtype=np.uint64)
    packed.sort()
    order = (packed & np.uint64(2**36 - 1)).astype(np.int64)
    time = START + (packed >> np.uint64(36)).astype(np.int64)
    return SyntheticRows(user[order], item[order], time)


def _draw_users(options: SyntheticOptions, first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """User, item and second of every interaction of users first..last-1, without repeated pairs."""
    random = np.random.default_rng((options.seed, first))
    users = np.arange(first, last, dtype=np.int32)
    user = np.repeat(users, _draw_counts(random, options, last - first))
    late = users >= round(options.users * (1 - options.new))
    arrival = np.where(late, 0.5 + 0.4 * random.random(len(users)), 0.1 * random.random(len(users)))
    arrival = arrival.astype(np.float32)[user - first]
    time = arrival + (1 - arrival) * random.random(len(user), dtype=np.float32)
    item = _draw_items(random, options, user, time)
    for attempt in range(REDRAWS):
        again = _find_repeats(user - first, item)
        if not len(again):
            break
        if attempt < REDRAWS - 2:
            item[again] = _draw_items(random, options, user[again], time[again])
        else:
            item[again] = random.integers(0, options.items, len(again), dtype=np.int32)
    kept = np.ones(len(user), np.bool_)
    kept[_find_repeats(user - first, item)] = False
    second = np.minimum(time * np.float32(SPAN), np.float32(SPAN - 8)).astype(np.int32)
    return user[kept], item[kept], second[kept]


def _draw_counts(random: np.random.Generator, options: SyntheticOptions, n: int) -> Longs:
    """Interactions per user: a floor of up to five plus a long tail, at most half of the items."""
    least = min(5, int(options.per_user))
    more = options.per_user - least
    counts = least + (random.negative_binomial(2, 2 / (2 + more), n) if more > 0 else np.zeros(n, np.int64))
    return np.minimum(counts, max(1, options.items // 2)).astype(np.int64)


def _draw_items(random: np.random.Generator, options: SyntheticOptions, user: Ints, time: Floats) -> Ints:
    """An item for each (user, time), repeats included."""
    groups, n = options.groups, len(user)
    moved = random.random(n, dtype=np.float32) < np.float32(options.drift) * time
    group = (user + moved) % groups
    strays = random.random(n, dtype=np.float32) >= LOYALTY
    group[strays] = random.integers(0, groups, int(strays.sum()), dtype=group.dtype)
    # Inverse of the continuous 1 / x law on 1..size+1: no table to search.
    size = -(-options.items // groups)
    rank = np.exp(random.random(n, dtype=np.float32) * np.float32(np.log(size + 1))).astype(np.int32) - 1
    item = rank * groups + group
    over = item >= options.items  # the last groups may have one item less
    item[over] = group[over]
    return np.asarray(item, np.int32)


def _find_repeats(user: Ints, item: Ints) -> Longs:
    """Rows whose (user, item) stands in an earlier row."""
    # User, item and row packed in 64 bits: plain sorting is much faster than an argsort.
    row_bits = max(1, len(user).bit_length())
    pair = user.astype(np.uint64) * np.uint64(int(item.max(initial=0)) + 1) + item.astype(np.uint64)
    packed = (pair << np.uint64(row_bits)) | np.arange(len(user), dtype=np.uint64)
    packed.sort()
    same = (packed[1:] >> np.uint64(row_bits)) == (packed[:-1] >> np.uint64(row_bits))
    return np.asarray(packed[1:][same] & np.uint64(2**row_bits - 1), np.int64)
