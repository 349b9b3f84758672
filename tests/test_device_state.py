"""What devices keep: rows and lists against plain dictionaries, and copies that cost what changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.types import Ragged
from tacita.round.device_state import DeviceState, Lists, device_arrays, read_devices, rows_taken

N = 6
EMPTY = {"item": np.zeros(0, np.int32), "row": np.zeros((0, 2), np.float32)}

changes = st.lists(st.integers(0, N - 1), unique=True, min_size=1, max_size=N).flatmap(
    lambda users: st.tuples(st.just(users), st.lists(st.integers(0, 5), min_size=len(users), max_size=len(users)))
)
steps = st.lists(st.one_of(changes, st.just("keep"), st.just("write to the copy")), max_size=25)


def told(state: DeviceState) -> list[Any]:
    ptr, columns = state.lists["log"].take(np.arange(N))
    return [state.arrays["a"].tolist(), ptr.tolist(), {name: v.tolist() for name, v in columns.items()}]


def put(state: DeviceState, users: list[int], sizes: list[int], stamp: int) -> None:
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    item = np.arange(stamp, stamp + ptr[-1], dtype=np.int32)
    rows = np.stack([item, -item], axis=1).astype(np.float32)
    state.put(np.array(users), {"log": Ragged(ptr, item, {"row": rows})})
    state.put(np.array(users), {"a": np.full((len(users), 2), stamp)})


@settings(max_examples=150, deadline=None)
@given(steps)
def test_rows_lists_and_copies_are_what_a_full_copy_would_be(script: list[Any]) -> None:
    state = DeviceState({"a": np.zeros((N, 2))}, {"log": Lists.empty(N, EMPTY)})
    state.keep()
    lists: list[list[int]] = [[] for _ in range(N)]
    kept = told(state)
    for stamp, step in enumerate(script, 1):
        if step == "keep":
            state.keep()
            kept = told(state)
        elif step == "write to the copy":  # as the end of a block does, to the best round
            now = told(state)
            put(state.kept, [0], [3], 1000 * stamp)
            assert told(state) == now
            kept = told(state.kept)
        else:
            users, sizes = step
            put(state, users, sizes, 100 * stamp)
            at = 100 * stamp
            for u, size in zip(users, sizes, strict=True):
                lists[u] = list(range(at, at + size))
                at += size
        assert told(state.kept) == kept
        assert [state.list_of("log", np.array([u])).ids.tolist() for u in range(N)] == lists


def test_newcomers_leave_the_others_as_they_are() -> None:
    state = DeviceState({"a": np.ones((2, 3))}, {"log": Lists.empty(2, EMPTY)})
    put_ = Ragged.from_lists([[4, 5], [6]])
    state.put(np.arange(2), {"log": replace(put_, values={"row": np.zeros((3, 2), np.float32)})})
    state.grow({"a": np.full((4, 3), 7.0)})
    assert state.arrays["a"].tolist() == [[1] * 3, [1] * 3, [7] * 3, [7] * 3]
    assert [state.list_of("log", np.array([u])).ids.tolist() for u in range(4)] == [[4, 5], [6], [], []]


def test_keeping_touches_only_what_changed() -> None:
    state = DeviceState({"a": np.zeros((1000, 2))})
    state.keep()
    before = state.kept.arrays["a"]
    state.put(np.array([3]), {"a": np.ones((1, 2))})
    state.arrays["a"][500] = 9  # behind its back: a full copy would see it
    state.keep()
    assert state.kept.arrays["a"] is before
    assert before[3].tolist() == [1, 1]
    assert before[500].tolist() == [0, 0]


def test_the_pool_does_not_grow_for_ever() -> None:
    state = DeviceState({}, {"log": Lists.empty(N, EMPTY)})
    for stamp in range(500):
        put_ = Ragged.from_lists([[stamp] * 4 for _ in range(N)])
        state.put(np.arange(N), {"log": replace(put_, values={"row": np.zeros((24, 2), np.float32)})})
    assert len(state.lists["log"].columns["item"]) <= 4 * N * 4


def test_some_rows_of_stored_devices_are_those_of_the_devices() -> None:
    state = DeviceState({"private": np.arange(8.0).reshape(4, 2), "took_part": np.zeros(4, bool)})
    state.grow({"parts/p/log": Ragged(np.zeros(5, np.int64), np.zeros(0, np.int32), {"row": np.zeros((0, 2))})})
    lists = Ragged.from_lists([[7], [], [1, 2, 3], [5, 6]])
    state.put(np.arange(4), {"parts/p/log": replace(lists, values={"row": np.arange(12.0).reshape(6, 2)})})
    some = read_devices(rows_taken(device_arrays(state, ""), np.array([3, 0])), "")
    assert some.private.tolist() == [[6, 7], [0, 1]]
    found = some.lists_of(np.arange(2))["p"]["log"]
    assert [found.row(0).tolist(), found.row(1).tolist()] == [[5, 6], [7]]
    assert found.values["row"].tolist() == [[8, 9], [10, 11], [0, 1]]
