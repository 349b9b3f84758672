"""Splits: nothing lost, nothing twice, the rules of the papers, and their published block statistics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.oracle import averaged, cohort, federate, make_backbone, started, train_once
from tacita.core.config import RunConfig, SplitConfig, validate_model
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Ragged
from tacita.data.sources import Interactions, load_interactions
from tacita.data.splits import CollectedRows, split, split_collected_rows
from tacita.learn.training.local_models import build_local_models
from tacita.runs.assembly import Machine, assemble_federation

Row = tuple[int, int, int]  # user, item, time
Lists = dict[str, list[str]]


def table(
    rows: Sequence[Row],
    name: str = "toy",
    timed: bool = True,
    rating: Sequence[float] | None = None,
    given: Sequence[int] | None = None,
    block: Sequence[int] | None = None,
) -> Interactions:
    """Rows as a source would hand them over: codes by first appearance, raw ids u7 and i3."""
    users = tuple(dict.fromkeys(f"u{u}" for u, _, _ in rows))
    items = tuple(dict.fromkeys(f"i{i}" for _, i, _ in rows))
    return Interactions(
        name=name,
        user=np.array([users.index(f"u{u}") for u, _, _ in rows], np.int32),
        item=np.array([items.index(f"i{i}") for _, i, _ in rows], np.int32),
        rating=None if rating is None else np.array(rating, np.float32),
        timestamp=np.array([t for _, _, t in rows], np.int64) if timed else None,
        split=None if given is None else np.array(given, np.int8),
        user_ids=users,
        item_ids=items,
        titles={},
        fingerprint="toy",
        format_note="",
        block=None if block is None else np.array(block, np.int32),
    )


def cut(rows: Sequence[Row], n_blocks: int = 4, **options: object) -> BlockStream:
    return split(table(rows), SplitConfig(kind="blocks", n_blocks=n_blocks, **options))  # type: ignore[arg-type]


def whole(data: Interactions, kind: str, **options: object) -> Block:
    stream = split(data, SplitConfig(kind=kind, **options))  # type: ignore[arg-type]
    assert len(stream.blocks) == 1
    return stream.blocks[0]


def raw(stream: BlockStream, lists: Ragged) -> Lists:
    """Lists by raw ids, without those that are empty."""
    named = {stream.user_ids[r]: [stream.item_ids[i] for i in lists.row(r)] for r in range(len(lists))}
    return {user: items for user, items in named.items() if items}


def parts(block: Block) -> tuple[Ragged, Ragged, Ragged]:
    return block.train, block.valid, block.test


def sizes(block: Block, user: int = 0) -> tuple[int, int, int]:
    train, valid, test = (len(part.row(user)) for part in parts(block))
    return train, valid, test


def pairs(stream: BlockStream, block: Block) -> list[tuple[str, str]]:
    """Every (user, item) of a block, all parts together."""
    return [(user, item) for part in parts(block) for user, items in raw(stream, part).items() for item in items]


def one_user(n: int) -> list[Row]:
    """User 0 with n items, and a second user so that there is a dataset."""
    return [(0, i, i) for i in range(n)] + [(1, 0, n), (1, 1, n + 1)]


def enough(rows: Sequence[Row]) -> bool:
    columns = [len({row[column] for row in rows}) for column in range(3)]
    return min(columns) > 1


users, items = st.integers(0, 5), st.integers(0, 11)
tied_rows = st.lists(st.tuples(users, items, st.integers(0, 12)), min_size=12, max_size=80).filter(enough)


@st.composite
def timed_rows(draw: st.DrawFn) -> list[Row]:
    """Rows with distinct times, in any file order; the same pair may come again."""
    some = draw(st.lists(st.tuples(users, items), min_size=12, max_size=80))
    times = draw(st.permutations(range(len(some))))
    return [(u, i, t) for (u, i), t in zip(some, times)]


def expected_sizes(n: int) -> tuple[int, int, int]:
    """Train, validation and test of a user's n items in a block."""
    if n < 3:
        return n, 0, 0
    test = ceil(Fraction(n, 10))
    valid = ceil(Fraction(n - test, 9))
    return n - test - valid, valid, test


def expected_blocks(rows: Sequence[Row], n_blocks: int, share: str = "0.6") -> list[list[tuple[str, str]]]:
    """The slow obvious cut: by time, floors of exact fractions, the last block takes the rest."""
    n, base = len(rows), Fraction(share)
    if n_blocks == 1:
        borders = [0, n]
    else:
        step = floor((1 - base) * n / (n_blocks - 1))
        borders = [0, *(floor(base * n) + step * b for b in range(n_blocks - 1)), n]
    named = [(f"u{u}", f"i{i}") for u, i, _ in sorted(rows, key=lambda row: row[2])]
    return [named[lo:hi] for lo, hi in pairwise(borders)]


# Time blocks: properties


@settings(max_examples=60, deadline=None)
@given(tied_rows, st.integers(1, 4))
def test_every_pair_of_a_block_is_in_exactly_one_part(rows: list[Row], n_blocks: int) -> None:
    stream = cut(rows, n_blocks)
    for block in stream.blocks:
        result = pairs(stream, block)
        assert len(result) == len(set(result))
    assert sum(block.n_rows for block in stream.blocks) == len(rows)
    assert {p for block in stream.blocks for p in pairs(stream, block)} == {(f"u{u}", f"i{i}") for u, i, _ in rows}


@settings(max_examples=60, deadline=None)
@given(timed_rows().filter(enough), st.integers(1, 4))
def test_blocks_hold_what_an_obvious_cut_by_time_gives(rows: list[Row], n_blocks: int) -> None:
    stream = cut(rows, n_blocks)
    expected = expected_blocks(rows, n_blocks)
    assert [block.n_rows for block in stream.blocks] == [len(entry) for entry in expected]
    assert [set(pairs(stream, block)) for block in stream.blocks] == [set(entry) for entry in expected]


@settings(max_examples=60, deadline=None)
@given(timed_rows().filter(enough))
def test_later_blocks_hold_back_each_users_last_items_by_the_ceiling_rule(rows: list[Row]) -> None:
    stream = cut(rows)
    for block, expected in zip(stream.blocks[1:], expected_blocks(rows, 4)[1:]):
        train, valid, test = (raw(stream, part) for part in parts(block))
        for user in {u for u, _ in expected}:
            own_values = list(dict.fromkeys(item for owner, item in expected if owner == user))
            a, b, _ = expected_sizes(len(own_values))
            assert train.get(user, []) == own_values[:a]
            assert valid.get(user, []) == own_values[a : a + b]
            assert test.get(user, []) == own_values[a + b :]


@settings(max_examples=60, deadline=None)
@given(tied_rows)
def test_sizes_follow_the_ceiling_rule_in_every_block(rows: list[Row]) -> None:
    for block in cut(rows).blocks:
        for user in range(block.n_users):
            result = sizes(block, user)
            assert result == expected_sizes(sum(result))


@settings(max_examples=60, deadline=None)
@given(timed_rows().filter(enough))
def test_numbers_follow_first_appearance_so_each_block_knows_a_prefix(rows: list[Row]) -> None:
    stream = cut(rows)
    in_time = sorted(rows, key=lambda row: row[2])
    assert stream.user_ids == tuple(dict.fromkeys(f"u{u}" for u, _, _ in in_time))
    assert stream.item_ids == tuple(dict.fromkeys(f"i{i}" for _, i, _ in in_time))
    seen_users: set[str] = set()
    seen_items: set[str] = set()
    for block, expected in zip(stream.blocks, expected_blocks(rows, 4)):
        new = {u for u, _ in expected} - seen_users
        seen_users |= new
        seen_items |= {i for _, i in expected}
        assert set(stream.user_ids[: block.n_users]) == seen_users
        assert set(stream.item_ids[: block.n_items]) == seen_items
        assert {stream.user_ids[u] for u in np.flatnonzero(block.new_users)} == new
        assert all(len(part) == block.n_users for part in parts(block))
    assert (stream.n_users, stream.n_items) == (len(seen_users), len(seen_items))


@settings(max_examples=40, deadline=None)
@given(timed_rows().filter(enough), st.sampled_from(["blocks", "leave-one-out", "random"]), st.randoms())
def test_row_order_of_the_file_does_not_matter_where_times_differ(rows: list[Row], kind: str, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(rows)
    random.shuffle(shuffled)
    config = SplitConfig(kind=kind)  # type: ignore[arg-type]
    entry, two = split(table(rows), config), split(table(shuffled), config)
    assert (entry.user_ids, entry.item_ids) == (two.user_ids, two.item_ids)
    for a, b in zip(entry.blocks, two.blocks, strict=True):
        assert all(raw(entry, x) == raw(two, y) for x, y in zip(parts(a), parts(b)))


def test_keys_follow_the_raw_ids() -> None:
    stream = cut(one_user(20))
    np.testing.assert_array_equal(stream.user_keys, derive_keys(stream.user_ids))
    np.testing.assert_array_equal(stream.item_keys, derive_keys(stream.item_ids))


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, (1, 0, 0)), (2, (2, 0, 0)), (3, (1, 1, 1)), (10, (8, 1, 1)), (11, (8, 1, 2)), (30, (24, 3, 3))],
)
def test_inner_sizes_by_hand(n: int, expected: tuple[int, int, int]) -> None:
    assert sizes(cut(one_user(n), n_blocks=1).blocks[0]) == expected


def test_a_repeat_in_a_block_counts_once_at_its_first_time_and_later_blocks_count_it_again() -> None:
    base = [(u, i, 10 * u + i) for u in (0, 1) for i in range(9)]  # 18 rows: block 0 of 30
    later = [(0, i, 100 + t) for t, i in enumerate([5, 6, 5, 7, 20, 5])]
    rest = [(1, i, 200 + i) for i in range(6)]
    stream = cut(base + later + rest, n_blocks=3)
    block = stream.blocks[1]
    assert block.n_rows == 6
    assert raw(stream, block.train) == {"u0": ["i5", "i6"]}  # i5 stands where it came first
    assert raw(stream, block.valid) == {"u0": ["i7"]}
    assert raw(stream, block.test) == {"u0": ["i20"]}


def test_the_base_block_is_split_at_random_and_later_ones_only_if_asked() -> None:
    rows = [(u, i, i) for u in range(30) for i in range(40)]  # blocks of 24, 8 and 8 items
    in_time, at_random = cut(rows, 3), cut(rows, 3, inner="random")
    assert len(np.unique(in_time.blocks[0].test.ids)) > 18
    assert set(in_time.blocks[1].test.ids.tolist()) == {31}
    assert len(np.unique(at_random.blocks[1].test.ids)) > 5
    assert raw(in_time, in_time.blocks[0].test) == raw(at_random, at_random.blocks[0].test)


def test_numbers_of_items_tied_in_time_do_not_say_which_is_last() -> None:
    rows = [(u, i, u) for u in range(20) for i in range(10)]  # blocks of 12, 4 and 4 users
    streams = [cut(rows, 3, seed=seed) for seed in range(12)]
    last = [items[0] for s in streams for items in raw(s, s.blocks[1].test).values()]
    assert len(last) == 12 * 4
    assert len(set(last)) >= 5


@pytest.mark.parametrize(
    ("share", "n", "n_blocks", "expected"),
    [
        ("0.6", 100, 4, [60, 13, 13, 14]),
        ("0.5", 31, 2, [15, 16]),
        ("0.8", 30, 4, [24, 2, 2, 2]),
        ("0.9", 30, 4, [27, 1, 1, 1]),
        ("0.29", 100, 2, [29, 71]),
    ],
)
def test_block_counts_follow_the_floor_rule(share: str, n: int, n_blocks: int, expected: list[int]) -> None:
    rows = [(t % 7, t % 11, t) for t in range(n)]
    assert [len(entry) for entry in expected_blocks(rows, n_blocks, share)] == expected
    assert [block.n_rows for block in cut(rows, n_blocks, base_share=float(share)).blocks] == expected


# What a random split depends on

MANY = [(u, i, 100 * i + u) for u in range(12) for i in range(20) if (u + i) % 3]


@pytest.mark.parametrize("kind", ["blocks", "random", "leave-one-out"])
def test_a_random_split_follows_its_own_seed(kind: str) -> None:
    def tested(seed: int) -> Lists:
        stream = split(table(MANY), SplitConfig(kind=kind, held_out="random", seed=seed))  # type: ignore[arg-type]
        return raw(stream, stream.blocks[0].test)

    assert tested(0) == tested(0)
    assert tested(0) != tested(1)


def test_the_seed_of_the_run_does_not_touch_the_split() -> None:
    data = "synthetic:users=30,items=25,per_user=8"
    streams = [assemble_federation(RunConfig(data=data, seed=seed), Machine(threads=1)).stream for seed in (1, 2)]
    assert streams[0].fingerprint == streams[1].fingerprint
    for a, b in zip(streams[0].blocks, streams[1].blocks, strict=True):
        for x, y in zip(parts(a), parts(b)):
            np.testing.assert_array_equal(x.ptr, y.ptr)
            np.testing.assert_array_equal(x.ids, y.ids)


def test_a_users_random_split_does_not_depend_on_other_users() -> None:
    some = [row for row in MANY if row[0] % 2]
    all_users, few = (split(table(rows), SplitConfig(kind="random")) for rows in (MANY, some))
    for x, y in zip(parts(all_users.blocks[0]), parts(few.blocks[0])):
        own_values, other_values = raw(few, y), raw(all_users, x)
        assert {user: sorted(own_values[user]) for user in own_values} == {
            user: sorted(other_values[user]) for user in own_values
        }


def test_the_fingerprint_follows_data_and_split() -> None:
    data = table(MANY)
    marks = {
        split(data, SplitConfig()).fingerprint,
        split(data, SplitConfig(seed=1)).fingerprint,
        split(data, SplitConfig(kind="random")).fingerprint,
        split(replace(data, fingerprint="other"), SplitConfig()).fingerprint,
    }
    assert len(marks) == 4
    assert split(data, SplitConfig()).fingerprint in marks


# Kinds with one block


def test_leave_one_out_keeps_the_last_for_test_and_the_one_before_for_validation() -> None:
    rows = [(0, 4, 9), (0, 1, 7), (0, 2, 3), (0, 3, 8), (1, 1, 1), (1, 2, 2)]
    stream = split(table(rows), SplitConfig(kind="leave-one-out"))
    block = stream.blocks[0]
    assert raw(stream, block.test) == {"u0": ["i4"]}
    assert raw(stream, block.valid) == {"u0": ["i3"]}
    assert raw(stream, block.train) == {"u0": ["i2", "i1"], "u1": ["i1", "i2"]}  # two items are only learned


def test_leave_one_out_at_random_keeps_back_any_item_with_or_without_times() -> None:
    rows = [(u, i, i) for u in range(60) for i in range(6)]
    for timed in (True, False):
        block = whole(table(rows, timed=timed), "leave-one-out", held_out="random")
        assert {sizes(block, u) for u in range(60)} == {(4, 1, 1)}
        assert set(block.test.ids.tolist()) == set(range(6))
        assert set(block.valid.ids.tolist()) == set(range(6))


@pytest.mark.parametrize(
    ("n", "expected"),
    [(2, (2, 0, 0)), (3, (1, 1, 1)), (5, (3, 1, 1)), (10, (8, 1, 1)), (14, (12, 1, 1)), (26, (20, 3, 3))],
)
def test_random_split_is_eight_to_one_to_one_but_at_least_one(n: int, expected: tuple[int, int, int]) -> None:
    assert sizes(whole(table(one_user(n), timed=False), "random")) == expected


@settings(max_examples=40, deadline=None)
@given(tied_rows, st.sampled_from(["random", "leave-one-out"]))
def test_single_block_kinds_lose_only_repeats(rows: list[Row], kind: str) -> None:
    stream = split(table(rows), SplitConfig(kind=kind))  # type: ignore[arg-type]
    result = pairs(stream, stream.blocks[0])
    assert len(result) == len(set(result))
    assert set(result) == {(f"u{u}", f"i{i}") for u, i, _ in rows}
    assert stream.blocks[0].n_rows == len(rows)


GIVEN = [(0, i, 0) for i in range(20)] + [(1, i, 0) for i in range(4)] + [(2, 0, 0), (2, 1, 0), (2, 2, 0)]


def test_a_given_split_with_validation_is_taken_as_it_is() -> None:
    roles = [0] * 15 + [1] * 2 + [2] * 3 + [0, 2, 1, 0] + [2, 0, 0]
    data = table(GIVEN, timed=False, given=roles)
    stream = split(data, SplitConfig(kind="given"))
    for role, part in enumerate(parts(stream.blocks[0])):
        expected: Lists = {}
        for (u, i, _), code in zip(GIVEN, roles):
            if code == role:
                expected.setdefault(f"u{u}", []).append(f"i{i}")
        assert raw(stream, part) == expected


def test_a_given_split_without_validation_lends_a_tenth_of_the_training_items() -> None:
    roles = [0] * 20 + [0, 0, 0, 2] + [0, 0, 2]
    block = whole(table(GIVEN, timed=False, given=roles), "given")
    assert [sizes(block, u) for u in range(3)] == [(18, 2, 0), (2, 1, 1), (2, 0, 1)]
    assert raw(split(table(GIVEN, timed=False, given=roles), SplitConfig()), block.test) == {
        "u1": ["i3"],
        "u2": ["i2"],
    }


def test_a_pair_given_twice_counts_where_it_came_first() -> None:
    rows = [(0, 0, 0), (0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0)]
    stream = split(table(rows, timed=False, given=[0, 1, 2, 0, 2]), SplitConfig(kind="given"))
    assert raw(stream, stream.blocks[0].train) == {"u0": ["i0"], "u1": ["i0"]}
    assert raw(stream, stream.blocks[0].test) == {"u1": ["i1"]}


def test_given_blocks_and_parts_are_used_exactly_as_given() -> None:
    rows = [(0, 0, 9), (1, 1, 8), (0, 2, 7), (2, 0, 1), (0, 3, 2), (0, 1, 3), (1, 4, 4)]
    data = table(rows, given=[0, 0, 2, 0, 2, 1, 0], block=[0, 0, 0, 1, 1, 1, 1])
    for kind in ("given", "auto"):  # though there are timestamps, against the order of the blocks
        stream = split(data, SplitConfig(kind=kind))  # type: ignore[arg-type]
        first, two = stream.blocks
        assert [raw(stream, part) for part in parts(first)] == [{"u1": ["i1"], "u0": ["i0"]}, {}, {"u0": ["i2"]}]
        assert [raw(stream, part) for part in parts(two)] == [
            {"u2": ["i0"], "u1": ["i4"]},
            {"u0": ["i1"]},
            {"u0": ["i3"]},
        ]
        assert (first.n_users, first.n_items, two.n_users, two.n_items) == (2, 3, 3, 5)
        assert [stream.user_ids[u] for u in np.flatnonzero(two.new_users)] == ["u2"]
        assert stream.removed == ()


def test_a_gap_in_given_blocks_is_refused() -> None:
    data = table(TWO, given=[0, 0, 0, 0], block=[0, 0, 2, 2])
    with pytest.raises(TacitaError, match=r"no row of toy is in block 1, .*without a gap"):
        split(data, SplitConfig())


# Repeats

REPEATED = [(0, 0, t) for t in range(20)] + [(1, i, 30) for i in (0, 1)]


def test_kept_repeats_are_put_into_parts_row_by_row_and_count_once_there() -> None:
    once, state = (split(table(REPEATED), SplitConfig(kind="blocks", n_blocks=1, repeats=r)) for r in ("once", "keep"))  # type: ignore[arg-type]
    assert sizes(once.blocks[0]) == (1, 0, 0)
    assert sizes(state.blocks[0]) == (1, 1, 1)  # 20 rows: 16 to train on, 2 and 2 held back, all of one item
    assert state.blocks[0].n_rows == once.blocks[0].n_rows == 22
    assert state.fingerprint != once.fingerprint


def test_kept_repeats_hold_back_each_users_last_rows_in_later_blocks() -> None:
    rows = [(u, i, 0) for u in (0, 1) for i in range(5)]
    later = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]  # the last one is tested, the one before validates
    rows += [(0, i, 10 + t) for t, i in enumerate(later)]
    stream = split(table(rows), SplitConfig(kind="blocks", n_blocks=2, base_share=0.5, repeats="keep"))
    block = stream.blocks[1]
    assert raw(stream, block.test) == {"u0": ["i1"]}
    assert raw(stream, block.valid) == {"u0": ["i0"]}
    assert raw(stream, block.train) == {"u0": [f"i{i}" for i in range(8)]}


def test_rows_of_a_repeated_pair_are_drawn_apart() -> None:
    rows = [(u, i, 0) for u in range(40) for i in range(10) for _ in range(2)]
    block = split(table(rows), SplitConfig(kind="random", repeats="keep")).blocks[0]
    apart = [len(set(block.test.row(u)) - set(block.train.row(u)) - set(block.valid.row(u))) for u in range(40)]
    assert sum(apart) < 20  # side by side both rows of a pair would be tested, 40 times in all


# Times and ratings stay with their rows


def rating_of(user: str, item: str) -> float:
    return int(user[1:]) + int(item[1:]) / 16


def entries(stream: BlockStream, lists: Ragged) -> list[tuple[str, str]]:
    return [(stream.user_ids[u], stream.item_ids[i]) for u, i in zip(lists.rows(), lists.ids)]


def check_columns(stream: BlockStream, lists: Ragged, times: dict[tuple[str, str], set[int]]) -> None:
    """Every entry has its pair's rating, and a time at which the pair occurred, oldest first in a list."""
    assert lists.values.keys() == {"time", "rating"}
    result = entries(stream, lists)
    assert lists.values["rating"].dtype == np.float32
    assert lists.values["rating"].tolist() == [rating_of(*pair) for pair in result]
    assert all(t in times[pair] for t, pair in zip(lists.values["time"].tolist(), result))
    assert all((np.diff(lists.values["time"][a:b]) >= 0).all() for a, b in pairwise(lists.ptr))


@settings(max_examples=60, deadline=None)
@given(tied_rows, st.sampled_from(["blocks", "leave-one-out", "random", "given"]), st.sampled_from(["once", "keep"]))
def test_every_entry_keeps_its_time_and_rating(rows: list[Row], kind: str, repeats: str) -> None:
    shipped = [n % 3 for n in range(len(rows))] if kind == "given" else None
    data = table(rows, rating=[rating_of(f"u{u}", f"i{i}") for u, i, _ in rows], given=shipped)
    stream = split(data, SplitConfig(kind=kind, repeats=repeats))  # type: ignore[arg-type]
    times: dict[tuple[str, str], set[int]] = {}
    for u, i, t in rows:
        times.setdefault((f"u{u}", f"i{i}"), set()).add(t)
    for block in stream.blocks:
        for part in parts(block):
            check_columns(stream, part, times)
    past = stream.collect_history(len(stream.blocks))
    assert past.values["rating"].tolist() == [rating_of(*pair) for pair in entries(stream, past)]


def test_a_repeat_keeps_the_time_and_rating_of_its_first_row() -> None:
    rows = [(0, 0, 1), (0, 0, 5), (0, 0, 3), (0, 0, 9), (1, 0, 1), (1, 1, 2)]
    stream = split(table(rows, rating=[0, 1, 2, 3, 4, 5]), SplitConfig(kind="random", min_rating=1))
    train = stream.blocks[0].train
    first = train.take([stream.user_ids.index("u0")])
    assert {name: column.tolist() for name, column in first.values.items()} == {"time": [3], "rating": [2.0]}


def test_lists_have_only_the_columns_that_the_data_has() -> None:
    untimed = table(MANY, timed=False, rating=[1.0] * len(MANY))
    for data, columns in ((table(MANY), {"time"}), (untimed, {"rating"}), (table(MANY, timed=False), set())):
        assert all(set(part.values) == columns for part in parts(whole(data, "random")))


def collected(times: Sequence[float], ratings: Sequence[float]) -> Block:
    keys, new = derive_keys(["a", "b", "c", "d"]), np.ones(2, bool)
    user, item = np.array([0, 0, 0, 1]), np.array([2, 0, 1, 3])
    rows = CollectedRows(user, item, np.array(times, np.float64), np.array(ratings, np.float64))
    return split_collected_rows(1, rows, new, keys[:2], keys, SplitConfig())


def test_a_collected_block_keeps_the_columns_that_all_its_rows_have() -> None:
    block = collected([7.5, 6.0, 8.0, 1.0], [4, 3, 5, 2])
    assert [part.ids.tolist() for part in parts(block)] == [[0, 3], [2], [1]]
    assert [part.values["time"].tolist() for part in parts(block)] == [[6.0, 1.0], [7.5], [8.0]]
    assert [part.values["rating"].tolist() for part in parts(block)] == [[3, 2], [4], [5]]
    assert block.test.values["rating"].dtype == np.float32
    partly = collected([7.5, 6.0, 8.0, 1.0], [4, np.nan, 5, 2])
    assert all(part.values.keys() == {"time"} for part in parts(partly))


@pytest.mark.parametrize(("objective", "reads"), [("bce", False), ("squared", True), ("bpr", False)])
def test_only_squared_error_learns_from_the_ratings_of_a_table(objective: str, reads: bool) -> None:
    rows = [(u, (u + 3 * k) % 20, k) for u in range(10) for k in range(9)]
    liked = [1.0 + (u * i) % 5 for u, i, _ in rows]

    def learned(rating: Sequence[float] | None) -> bytes:
        stream = split(table(rows, rating=rating), SplitConfig(kind="leave-one-out"))
        fed = federate(stream, make_backbone("mf"), objective=objective)
        return averaged(fed, (progress := started(fed)).server, train_once(fed, progress)).items.tobytes()

    assert (learned(liked) != learned(None)) == reads
    assert (learned([1.0] * len(rows)) == learned(None)) is True  # a rating of one is what no rating counts as


def test_squared_error_is_taken_of_the_ratings_of_a_file(tmp_path: Path) -> None:
    rows = [(u, i, 1 + (u + i) % 5, 30 * u + i) for u in range(4) for i in range(25)]
    path = tmp_path / "rated.csv"
    path.write_text("user,item,rating,timestamp\n" + "".join(f"u{u},i{i},{r},{t}\n" for u, i, r, t in rows))
    message = {"data": str(path), "split": {"kind": "leave-one-out"}, "train": {"objective": "squared"}}
    fed = assemble_federation(validate_model(RunConfig, message, "a test"), Machine(threads=1))
    view = cohort(fed, started(fed))
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    expected = {(f"u{u}", f"i{i}"): float(r) for u, i, r, _ in rows}
    for user, (lo, n) in enumerate(zip(local.user_ptr, view.train.counts())):
        pairs_ = [(fed.stream.user_ids[view.user[user]], fed.stream.item_ids[i]) for i in local.item[lo : lo + n]]
        assert local.label[lo : lo + n].tolist() == [expected[pair] for pair in pairs_]


# What filtering took


def test_what_filtering_took_is_told_step_by_step() -> None:
    rows = [(u, i, 0) for u in (0, 1, 2) for i in (0, 1, 2)] + [(3, 0, 0), (0, 0, 1), (4, 1, 0)]
    data = table(rows, rating=[5] * 11 + [1])
    stream = split(data, SplitConfig(kind="random", min_rating=2, k_core=2))
    assert [(r.rows, r.users, r.items) for r in stream.removed] == [
        ((12, 11), (5, 4), (3, 3)),
        ((11, 10), (4, 3), (3, 3)),
        ((10, 9), (3, 3), (3, 3)),
    ]
    for entry, word in zip(stream.removed, ("split.min_rating", "split.k_core", "split.repeats")):
        assert word in entry.reason
    assert split(table(TWO), SplitConfig(kind="random")).removed == ()


def test_ratings_that_are_not_asked_for_are_pointed_out() -> None:
    def said(rating: list[float] | None, **options: object) -> str:
        return " ".join(split(table(TWO, rating=rating), SplitConfig(kind="random", **options)).notes)  # type: ignore[arg-type]

    assert "every row counts as liked, whatever its rating (1 to 5); tacita train --set split.min_rating=4" in said(
        [1, 5, 3, 4]
    )
    assert "split.min_rating=1 " in said([0, 1, 1, 1])
    for quiet in (said(None), said([1, 5, 3, 4], min_rating=1), said([3, 3, 3, 3])):
        assert "liked" not in quiet


def test_later_settings_leave_the_fingerprint_of_a_split_as_it_was() -> None:
    fingerprint = "f815b13218d358c4e9b06f7b7d65ec4ecf704d407f18b0375537f2d99bb3d96b"
    assert split(table(TWO), SplitConfig(kind="random")).fingerprint == fingerprint
    assert split(table(TWO), SplitConfig(kind="random", repeats="keep")).fingerprint != fingerprint


def test_auto_takes_blocks_where_there_is_time_else_the_given_split_else_random() -> None:
    roles = [0] * len(GIVEN)
    timed = [(u, i, t) for t, (u, i, _) in enumerate(GIVEN)]
    assert len(split(table(timed, given=roles), SplitConfig()).blocks) == 4
    assert len(split(table(GIVEN, timed=False, given=roles), SplitConfig()).blocks[0].test.ids) == 0
    assert len(split(table(GIVEN, timed=False), SplitConfig()).blocks[0].test.ids) == 2 + 1 + 1


# Filters


def test_the_core_is_taken_again_until_nothing_falls() -> None:
    square = [(u, i, 0) for u in (0, 1, 2) for i in (0, 1, 2)]
    chain = [(3, 0, 0), (3, 1, 0), (3, 9, 0), (4, 9, 0), (4, 8, 0), (5, 8, 0)]
    # In a 2-core user 5 falls, then item 8, then user 4, then item 9; user 3 keeps two items.
    stream = split(table(square + chain), SplitConfig(kind="random", k_core=2))
    assert set(stream.user_ids) == {"u0", "u1", "u2", "u3"}
    assert set(stream.item_ids) == {"i0", "i1", "i2"}
    assert stream.blocks[0].n_rows == 11


def test_the_core_counts_rows_not_pairs() -> None:
    rows = [(0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 4), (1, 0, 5), (1, 1, 6)]
    assert split(table(rows), SplitConfig(kind="random", k_core=2)).blocks[0].n_rows == 6


def test_users_with_few_rows_go_and_nothing_else_does() -> None:
    """FedShare's filter: items that few people have stay, and nobody is asked twice."""
    rows = [(0, i, i) for i in range(5)] + [(1, i, i) for i in range(4)] + [(2, 5 + i, i) for i in range(6)]
    stream = split(table(rows), SplitConfig(kind="random", min_user=5))
    assert (stream.n_users, stream.n_items) == (2, 11)
    assert [(entry.rows, entry.users, entry.items) for entry in stream.removed] == [((15, 11), (3, 2), (11, 11))]
    assert "split.min_user" in stream.removed[0].reason
    with pytest.raises(TacitaError, match=r"nobody in toy has 7 interactions; lower split\.min_user"):
        split(table(rows), SplitConfig(kind="random", min_user=7))
    plain = split(table(rows), SplitConfig(kind="random"))
    assert split(table(rows), SplitConfig(kind="random", min_user=1)).removed == plain.removed == ()


def test_min_rating_keeps_what_is_rated_at_least_that() -> None:
    rows = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (1, 2, 4)]
    data = table(rows, rating=[4, 3.5, 5, 4, 1])
    stream = split(data, SplitConfig(kind="random", min_rating=4))
    assert set(pairs(stream, stream.blocks[0])) == {("u0", "i0"), ("u1", "i0"), ("u1", "i1")}


# Error sentences

TWO = [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)]


@pytest.mark.parametrize(
    ("data", "config", "sentence"),
    [
        (table(TWO, timed=False), {"kind": "blocks"}, "toy has no timestamps, .* use split.kind = 'random'"),
        (
            table([(u, i, 5) for u, i, _ in TWO]),
            {"kind": "blocks"},
            "all timestamps of toy are the same, .* use split.kind = 'random'",
        ),
        (table([(0, 0, 1), (0, 1, 2)]), {"kind": "random"}, r"1 user\(s\) and 2 item\(s\) .* at least two"),
        (table([(0, 0, 1), (1, 0, 2)]), {"kind": "random"}, r"2 user\(s\) and 1 item\(s\) .* at least two"),
        (table(TWO), {"k_core": 3}, "nothing of toy is left: no 3-core in its 4 inter.* lower split.k_core"),
        (table(TWO), {"min_rating": 3}, "toy has no ratings; remove split.min_rating"),
        (
            table(TWO, rating=[1, 1, 1, 1]),
            {"min_rating": 3},
            "nothing of toy is left after split.min_rating; lower it",
        ),
        (table(TWO), {"n_blocks": 4}, "4 interactions are too few for 4 blocks; lower split.n_blocks"),
        (table(TWO), {"kind": "given"}, "toy ships no split; use split.kind = 'random'"),
        (
            table(TWO, timed=False),
            {"kind": "leave-one-out"},
            "toy has no timestamps; use split.held_out = 'random'",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(
    data: Interactions, config: dict[str, object], sentence: str
) -> None:
    with pytest.raises(TacitaError, match=sentence):
        split(data, SplitConfig(**config))  # type: ignore[arg-type]


# Published block statistics

TABLE_1 = {  # cumulative users, cumulative items, interactions of the block
    "ml-100k": [(587, 1136, 58771), (697, 1146, 13060), (827, 1148, 13060), (943, 1152, 13062)],
    "ml-latest-small": [(374, 1982, 48665), (466, 2189, 10814), (543, 2250, 10814), (609, 2269, 10816)],
    "lastfm-2k": [(834, 4112, 41415), (971, 4188, 9203), (1107, 4239, 9203), (1165, 4259, 9204)],
}
SHIPPED_ML100K = [  # users with training data, of which new, returning, training rows, test users, test rows
    (587, 587, 0, 46552, 586, 6141),
    (217, 110, 107, 10298, 199, 1391),
    (238, 130, 108, 10274, 222, 1404),
    (207, 116, 91, 10284, 190, 1394),
]


def real(name: str) -> Interactions:
    root = os.environ.get("TACITA_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"no {name} under TACITA_DATA")
    return load_interactions(name)


def counts(block: Block) -> tuple[int, int, int]:
    return block.n_users, block.n_items, block.n_rows


@pytest.mark.parametrize("name", ["ml-100k", "ml-latest-small"])
def test_block_statistics_are_the_published_ones(name: str) -> None:
    stream = split(real(name), SplitConfig())
    assert [counts(block) for block in stream.blocks] == TABLE_1[name]


def test_lastfm_block_sizes_are_exact_and_borders_close_because_months_tie() -> None:
    stream = split(real("lastfm-2k"), SplitConfig())
    result, published = (np.array(x) for x in ([counts(b) for b in stream.blocks], TABLE_1["lastfm-2k"]))
    np.testing.assert_array_equal(result[:, 2], published[:, 2])
    np.testing.assert_array_equal(result[-1], published[-1])
    np.testing.assert_allclose(result[:, :2], published[:, :2], rtol=0.01)


def test_ml100k_tells_why_it_has_fewer_items_than_it_came_with() -> None:
    (core,) = split(real("ml-100k"), SplitConfig()).removed
    assert core.reason == "the 10-core (split.k_core)"
    assert (core.rows, core.users, core.items) == ((100_000, 97_953), (943, 943), (1682, 1152))


def test_ml100k_parts_have_the_sizes_of_the_shipped_splits() -> None:
    result = []
    for block in split(real("ml-100k"), SplitConfig()).blocks:
        trains = block.train.counts() > 0
        new, back = (trains & block.new_users).sum(), (trains & ~block.new_users).sum()
        tested = (block.test.counts() > 0).sum()
        result.append((trains.sum(), new, back, len(block.train.ids), tested, len(block.test.ids)))
    assert result == SHIPPED_ML100K


def test_ml100k_tests_on_the_future_in_later_blocks_only() -> None:
    data = real("ml-100k")
    stream = split(data, SplitConfig())
    assert data.timestamp is not None
    time = {
        (data.user_ids[u], data.item_ids[i]): t
        for u, i, t in zip(data.user.tolist(), data.item.tolist(), data.timestamp.tolist())
    }
    early = []
    for block in stream.blocks:
        train, test = raw(stream, block.train), raw(stream, block.test)
        backwards = [
            user for user in test if min(time[user, i] for i in test[user]) < max(time[user, i] for i in train[user])
        ]
        early.append(len(backwards))
        assert len(set(pairs(stream, block))) == block.n_rows == len(pairs(stream, block))
    assert early[1:] == [0, 0, 0]
    assert early[0] > 570  # 579 of 586 in the shipped split
