"""Worlds that differ by one person, chosen against each mechanism.

A world is a list of rows (person, item, time). Both worlds of a pair hold the same others; one of them holds the rows
of `PERSON`, too. The first of the others has every common item, so that items have the same numbers in both worlds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERSON = "the person"
N_OTHERS = 30
N_ITEMS = 8
RARE_ITEMS = tuple(f"rare {number}" for number in range(N_ITEMS))
COMMON_ITEMS = tuple(f"item {number}" for number in range(N_ITEMS))
CATALOGUE = (*COMMON_ITEMS, *RARE_ITEMS)

Row = tuple[str, str, int]


@dataclass(frozen=True)
class World:
    """The rows of a run's people, in time order."""

    rows: tuple[Row, ...]

    def to_columns(self) -> dict[str, list[str] | list[int]]:
        users = [user for user, _, _ in self.rows]
        items = [item for _, item, _ in self.rows]
        times = [time for _, _, time in self.rows]
        return {"user": users, "item": items, "timestamp": times}


@dataclass(frozen=True)
class NeighbourPair:
    """Two worlds: without the person, and with them."""

    name: str
    without: World
    with_person: World


def make_pair(name: str, others: Iterable[Row], own: Iterable[Row]) -> NeighbourPair:
    base = sort_rows(others)
    both = sort_rows([*base, *own])
    return NeighbourPair(name, World(base), World(both))


def sort_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=_get_time))


def _get_time(row: Row) -> int:
    return row[2]


# One block


def draw_others(seed: int = 0, people: int = N_OTHERS) -> list[Row]:
    """About half of the common items for everybody; the first has all of them."""
    rng = np.random.default_rng([seed, 6])
    rows: list[Row] = [("other 0", item, number) for number, item in enumerate(COMMON_ITEMS)]
    time = len(COMMON_ITEMS)
    for number in range(1, people):
        is_chosen = rng.random(N_ITEMS) < 0.5
        chosen = [item for item, is_in in zip(COMMON_ITEMS, is_chosen, strict=True) if is_in]
        for item in chosen or [COMMON_ITEMS[0]]:
            rows.append((f"other {number}", item, time))
            time += 1
    return rows


def list_worst_cases() -> dict[str, Sequence[str]]:
    """What one person may have, of all that there is, in their order."""
    reverse = tuple(reversed(COMMON_ITEMS))
    return {
        "one common item": COMMON_ITEMS[:1],
        "one rare item": RARE_ITEMS[:1],
        "all common items, backwards": reverse,
        "all rare items": RARE_ITEMS,
        "all items": (*reverse, *RARE_ITEMS),
        "two items": (COMMON_ITEMS[-1], COMMON_ITEMS[0]),
        "a common and a rare item": (RARE_ITEMS[0], COMMON_ITEMS[-1]),
    }


def make_block_pair(name: str, items: Sequence[str], people: int = N_OTHERS) -> NeighbourPair:
    """One block; the person's rows come last."""
    others = draw_others(people=people)
    return make_pair(name, others, make_own_rows(items, 10_000))


def make_own_rows(items: Sequence[str], start: int) -> list[Row]:
    return [(PERSON, item, start + number) for number, item in enumerate(items)]


# Blocks of time


def make_border_pair(people: int, repeats: int) -> NeighbourPair:
    """A person whose many early rows move a border that follows the number of all rows.

    Everybody else has rows in either half of the time, close to where the border of two blocks lies.
    """
    rng = np.random.default_rng(7)
    rows: list[Row] = [("other 0", item, number) for number, item in enumerate(COMMON_ITEMS)]
    for number in range(1, people):
        items = rng.permutation(N_ITEMS)
        early, late = items[: N_ITEMS // 2], items[N_ITEMS // 2 :]
        rows += [(f"other {number}", COMMON_ITEMS[item], 1000 + int(rng.integers(900))) for item in early]
        rows += [(f"other {number}", COMMON_ITEMS[item], 2000 + int(rng.integers(900))) for item in late]
    own = [(PERSON, item, 900 + turn) for turn in range(repeats) for item in COMMON_ITEMS]
    return make_pair("a border mover", rows, own)


def name_items(n: int) -> tuple[str, ...]:
    return tuple(f"item {number}" for number in range(n))


def make_round_pair(people: int, items: int) -> NeighbourPair:
    """Many rows of a large table: the first person has all items, the others and the person one each."""
    names = name_items(items)
    rows: list[Row] = [("other 0", name, number) for number, name in enumerate(names)]
    rows += [(f"other {number}", names[number % items], 1000 + number) for number in range(1, people)]
    return make_pair("one more person", rows, [(PERSON, names[0], 5000)])


def make_validation_pair() -> NeighbourPair:
    """Everybody else has one row, so that only the person has items for validation."""
    rows = [(f"other {number}", COMMON_ITEMS[number % N_ITEMS], number) for number in range(N_OTHERS)]
    return make_pair("alone with items for validation", rows, make_own_rows(COMMON_ITEMS, 1000))


def make_replaced_pair() -> NeighbourPair:
    """The person is there in both worlds, with other items."""
    others = draw_others()
    first_world = sort_rows([*others, *make_own_rows(COMMON_ITEMS[:4], 10_000)])
    second_world = sort_rows([*others, *make_own_rows(COMMON_ITEMS[4:], 10_000)])
    return NeighbourPair("other items", World(first_world), World(second_world))


# On a node


def make_threshold_pair(min_users: int) -> NeighbourPair:
    """With the person as many people as a node needs have data; enrolled are as many in both worlds."""
    others = draw_others(people=min_users - 1)
    return make_pair("the k-th person", others, make_own_rows(COMMON_ITEMS, 10_000))


@dataclass(frozen=True)
class WaitingPair:
    """People of an earlier run, and newcomers of whom one fewer than a node needs, or as many, have fresh rows."""

    earlier: Sequence[Row]
    without: Sequence[Row]
    with_person: Sequence[Row]


def make_waiting_pair(min_users: int) -> WaitingPair:
    """All newcomers have the same items, so that their rows add up."""
    items = RARE_ITEMS[:2]
    newcomers = [(f"newcomer {number}", item, 20_000) for number in range(min_users - 1) for item in items]
    person = make_own_rows(items, 20_000)
    return WaitingPair(draw_others(people=min_users + 5), newcomers, [*newcomers, *person])


@dataclass(frozen=True)
class LeavingWorld:
    """Two blocks of rows, and who leaves between them."""

    first: Sequence[Row]
    second: Sequence[Row]
    leavers: Sequence[str]


def make_leaving_world(min_users: int, person_has_item: bool) -> LeavingWorld:
    """Those who leave have some of the first three items; the person has the fourth, and either the fifth or sixth."""
    others = draw_others()
    leavers = [f"leaver {number}" for number in range(min_users - 1)]
    rows = list(others)
    for number, user in enumerate(leavers):
        rows += [(user, COMMON_ITEMS[(number + step) % 3], 15_000) for step in range(2)]
    last_item = COMMON_ITEMS[4] if person_has_item else COMMON_ITEMS[5]
    rows += make_own_rows([COMMON_ITEMS[3], last_item], 16_000)
    second = [(f"other {number}", RARE_ITEMS[0], 20_000) for number in range(N_OTHERS)]
    return LeavingWorld(rows, second, [*leavers, PERSON])
