"""What devices keep: rows and lists against plain dictionaries, and copies that cost what changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.device_lists import AppendedLists, DeviceLists, slice_lists, with_updated_lists
from tacita.core.files import read_arrays, write_arrays
from tacita.core.types import Ragged
from tacita.kernels.pages import NONE, PAGE
from tacita.round.device_state import DeviceState, flatten_devices, stream_devices, take_rows, unflatten_devices
from tacita.round.paged_lists import PagedLists

N = 6
EMPTY = {"item": np.zeros(0, np.int32), "row": np.zeros((0, 2), np.float32)}

changes = st.lists(st.integers(0, N - 1), unique=True, min_size=1, max_size=N).flatmap(
    lambda users: st.tuples(st.just(users), st.lists(st.integers(0, 5), min_size=len(users), max_size=len(users)))
)
adding = st.tuples(changes, st.sampled_from([1, PAGE - 1, PAGE + 3]))  # what is written on, in lists of some length
steps = st.lists(st.one_of(changes, adding, st.just("keep"), st.just("write to the copy")), max_size=25)
sizes = st.lists(st.integers(0, 3 * PAGE), min_size=N, max_size=N)
copying = st.lists(st.one_of(changes, adding, st.just("copy"), st.just("drop")), max_size=30)


def told(state: DeviceState) -> list[Any]:
    ptr, columns = state.lists["log"].take(np.arange(N))
    return [state.arrays["a"].tolist(), ptr.tolist(), {name: v.tolist() for name, v in columns.items()}]


def put(state: DeviceState, users: list[int], sizes: list[int], stamp: int, kind: type[Ragged] = Ragged) -> None:
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    item = np.arange(stamp, stamp + ptr[-1], dtype=np.int32)
    rows = np.stack([item, -item], axis=1).astype(np.float32)
    state.put(np.array(users), {"log": kind(ptr, item, {"row": rows})})
    state.put(np.array(users), {"a": np.full((len(users), 2), stamp)})


@settings(max_examples=150, deadline=None)
@given(steps)
def test_rows_lists_and_copies_are_what_a_full_copy_would_be(script: list[Any]) -> None:
    state = DeviceState({"a": np.zeros((N, 2))}, {"log": PagedLists.empty(N, EMPTY)})
    state.take_snapshot()
    lists: list[list[int]] = [[] for _ in range(N)]
    retained_state = told(state)
    for stamp, step in enumerate(script, 1):
        if step == "keep":
            state.take_snapshot()
            retained_state = told(state)
        elif step == "write to the copy":  # as the end of a block does, to the best round
            now = told(state)
            put(state.snapshot, [0], [3], 1000 * stamp, AppendedLists if stamp % 2 else Ragged)
            assert told(state) == now
            retained_state = told(state.snapshot)
        else:
            more = isinstance(step[1], int)
            users, sizes = (step[0][0], [step[1] * n for n in step[0][1]]) if more else step
            at = 1000 * stamp
            put(state, users, sizes, at, AppendedLists if more else Ragged)
            for u, size in zip(users, sizes, strict=True):
                lists[u] = (lists[u] if more else []) + list(range(at, at + size))
                at += size
        assert told(state.snapshot) == retained_state
        assert [state.read_list("log", np.array([u])).ids.tolist() for u in range(N)] == lists


def test_newcomers_leave_the_others_as_they_are() -> None:
    state = DeviceState({"a": np.ones((2, 3))}, {"log": PagedLists.empty(2, EMPTY)})
    put_ = Ragged.from_lists([[4, 5], [6]])
    state.put(np.arange(2), {"log": replace(put_, values={"row": np.zeros((3, 2), np.float32)})})
    state.grow({"a": np.full((4, 3), 7.0)})
    assert state.arrays["a"].tolist() == [[1] * 3, [1] * 3, [7] * 3, [7] * 3]
    assert [state.read_list("log", np.array([u])).ids.tolist() for u in range(4)] == [[4, 5], [6], [], []]


def test_keeping_touches_only_what_changed() -> None:
    state = DeviceState({"a": np.zeros((1000, 2))})
    state.take_snapshot()
    before = state.snapshot.arrays["a"]
    state.put(np.array([3]), {"a": np.ones((1, 2))})
    state.arrays["a"][500] = 9  # behind its back: a full copy would see it
    state.take_snapshot()
    assert state.snapshot.arrays["a"] is before
    assert before[3].tolist() == [1, 1]
    assert before[500].tolist() == [0, 0]


def test_the_pool_does_not_grow_for_ever() -> None:
    state = DeviceState({}, {"log": PagedLists.empty(N, EMPTY)})
    for stamp in range(500):
        put_ = Ragged.from_lists([[stamp] * 4 for _ in range(N)])
        state.put(np.arange(N), {"log": replace(put_, values={"row": np.zeros((24, 2), np.float32)})})
    assert len(state.lists["log"].columns["item"]) <= 4 * N * 4


def test_some_rows_of_stored_devices_are_those_of_the_devices() -> None:
    state = DeviceState({"private": np.arange(8.0).reshape(4, 2), "took_part": np.zeros(4, bool)})
    state.grow({"parts/p/log": Ragged(np.zeros(5, np.int64), np.zeros(0, np.int32), {"row": np.zeros((0, 2))})})
    lists = Ragged.from_lists([[7], [], [1, 2, 3], [5, 6]])
    state.put(np.arange(4), {"parts/p/log": replace(lists, values={"row": np.arange(12.0).reshape(6, 2)})})
    some = unflatten_devices(take_rows(flatten_devices(state, ""), np.array([3, 0])), "")
    assert some.private.tolist() == [[6, 7], [0, 1]]
    log = some.read_part_lists(np.arange(2))["p"]["log"]
    assert [log.row(0).tolist(), log.row(1).tolist()] == [[5, 6], [7]]
    assert log.values["row"].tolist() == [[8, 9], [10, 11], [0, 1]]


def log_of(counts: list[int], stamp: int = 0) -> tuple[Any, dict[str, Any]]:
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    item = np.arange(stamp, stamp + ptr[-1], dtype=np.int32)
    return ptr, {"item": item, "row": np.stack([item, -item], axis=1).astype(np.float32)}


def pages_owned(*copies: PagedLists) -> int:
    """Pages that at least one of some copies of the same lists has."""
    owned = set()
    for copy in copies:
        for first, count in zip(copy._first.tolist(), copy.count.tolist(), strict=True):
            chain = []
            while first != NONE:
                chain.append(first)
                first = int(copy._pool.next_page[first])
            assert len(chain) >= -(-count // PAGE)  # more where another copy was written on
            owned.update(chain)
    return len(owned)


@settings(max_examples=100, deadline=None)
@given(copying)
def test_a_page_is_free_exactly_when_no_copy_has_it(script: list[Any]) -> None:
    lists, copies, most = PagedLists.empty(N, EMPTY), [], 0
    state: list[tuple[Any, ...]] = []
    for stamp, step in enumerate(script, 1):
        if step == "copy":
            copies.append(lists.copy())
            state.append(tuple(map(str, lists.take(np.arange(N))[1].values())))
        elif step == "drop":
            copies, state = copies[1:], state[1:]
        elif isinstance(step[1], int):
            (users, counts), times = step
            entry = copies[-1] if times == 1 and copies else lists  # a copy, too, may be written on
            entry.extend(np.array(users), *log_of([times * n for n in counts], 1000 * stamp))
            if entry is not lists:
                state[-1] = tuple(map(str, entry.take(np.arange(N))[1].values()))
            del entry
        else:
            users, counts = step
            lists.put(np.array(users), *log_of([7 * n for n in counts], 1000 * stamp))
        most = max(most, pages_owned(lists, *copies))
        pool = lists._pool
        assert len(pool.owners) - pool.n_free == pages_owned(lists, *copies)
        assert len(set(pool.free_pages[: pool.n_free].tolist())) == pool.n_free
        assert [tuple(map(str, element.take(np.arange(N))[1].values())) for element in copies] == state
    assert len(lists._pool.owners) <= most + most // 16


@settings(max_examples=50, deadline=None)
@given(sizes, st.permutations(range(N)))
def test_lists_come_back_in_any_order(counts: list[int], order: list[int]) -> None:
    lists = PagedLists.from_columns(*log_of(counts))
    ptr, columns = lists.take(np.array(order))
    start = np.concatenate([[0], np.cumsum(counts)])
    wanted = [i for u in order for i in range(start[u], start[u] + counts[u])]
    assert columns["item"].tolist() == wanted
    assert columns["row"][:, 1].tolist() == [-i for i in wanted]
    assert np.diff(ptr).tolist() == [counts[u] for u in order]


@settings(max_examples=50, deadline=None)
@given(sizes, st.data())
def test_pieces_of_lists_are_read_as_from_the_whole(counts: list[int], data: st.DataObject) -> None:
    state = DeviceState({"private": np.zeros((N, 1))}, {"parts/p/log": PagedLists.from_columns(*log_of(counts))})
    users = np.array([4, 1, 3])
    retained_state, whole = state.read_part_lists(users)["p"], state.read_list("parts/p/log", users)
    who = np.array(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
    start = np.array([data.draw(st.integers(0, counts[users[w]])) for w in who])
    count = np.array([data.draw(st.integers(0, counts[users[w]] - s)) for w, s in zip(who, start, strict=True)])
    wanted = [whole.row(w)[s : s + n].tolist() for w, s, n in zip(who, start, count, strict=True)]
    result = slice_lists(retained_state, "log", (who, start, count))
    assert [result.row(k).tolist() for k in range(len(who))] == wanted
    assert result.values["row"][:, 1].tolist() == [-i for entry in wanted for i in entry]
    assert retained_state["log"].ids.tolist() == whole.ids.tolist()
    repeat = slice_lists(retained_state, "log", (who, start, count))  # from what was read
    assert repeat.ids.tolist() == result.ids.tolist()
    assert slice_lists({"log": whole}, "log", (who, start, count)).ids.tolist() == result.ids.tolist()


@pytest.mark.parametrize(("user", "start", "count"), [(0, 2, 2), (1, -1, 2), (1, 19, 2), (2, 0, 1), (1, 3, -2)])
def test_a_piece_past_an_end_of_a_list_is_refused(user: int, start: int, count: int) -> None:
    """Another person's entries lie there, or nobody's."""
    lists = PagedLists.from_columns(*log_of([3, 20, 0, 0, 0, 0]))
    piece = np.array([user]), np.array([start]), np.array([count])
    for state in (DeviceLists({"log": lists}), DeviceLists({"log": lists.read()}), {"log": lists.read()}):
        with pytest.raises(IndexError, match="past the end"):
            slice_lists(state, "log", piece)


def as_list(counts: list[int], stamp: int, kind: type[Ragged] = Ragged) -> Ragged:
    ptr, columns = log_of(counts, stamp)
    return kind(ptr, columns["item"], {"row": columns["row"]})


def told_of(one: Ragged) -> list[Any]:
    return [one.ptr.tolist(), one.ids.tolist(), one.values["row"].tolist()]


writing = st.lists(
    st.tuples(changes, st.sampled_from([AppendedLists, Ragged]), st.booleans(), st.booleans()), max_size=12
)


@settings(max_examples=100, deadline=None)
@given(sizes, writing, st.lists(st.integers(0, N - 1), unique=True, min_size=1))
def test_the_lists_of_a_view_stay_as_they_were_when_it_was_made(
    counts: list[int], script: list[Any], users: list[int]
) -> None:
    """Read for the first time after they were written on, replaced and kept, and their pages given to others."""
    state = DeviceState({"private": np.zeros((N, 1))}, {"parts/p/log": PagedLists.from_columns(*log_of(counts))})
    state.take_snapshot()
    log, values = state.lists["parts/p/log"], np.array(users)
    views, then = [state.read_part_lists(values)["p"]], [told_of(state.read_list("parts/p/log", values))]
    for stamp, ((some, more), kind, looks, keeps) in enumerate(script, 1):
        if looks:
            views.append(state.read_part_lists(values)["p"])
            then.append(told_of(state.read_list("parts/p/log", values)))
        if keeps:
            state.take_snapshot()
        state.put(np.array(some), {"parts/p/log": as_list([9 * n for n in more], 1000 * stamp, kind)})
    for view, was in zip(views, then, strict=True):
        n = np.diff(was[0])
        assert told_of(slice_lists(view, "log", (np.arange(len(n)), n // 3, n - n // 3)))[1] == [
            i for k, size in enumerate(n) for i in was[1][was[0][k] + size // 3 : was[0][k + 1]]
        ]
        assert told_of(view["log"]) == was
    state.take_snapshot()
    assert len(log._pool.owners) - log._pool.n_free == pages_owned(log, state.snapshot.lists["parts/p/log"])


def test_unused_lists_are_not_read() -> None:
    class Loud:
        def read(self, pieces: Any = None) -> Ragged:
            raise AssertionError("read")

    device_lists = DeviceLists({"log": Loud(), "other": as_list([1], 0)})
    assert list(device_lists) == ["log", "other"]
    assert "log" in device_lists
    assert "third" not in device_lists
    assert with_updated_lists(device_lists, {"other": as_list([2], 5)})["other"].ids.tolist() == [5, 6]
    assert device_lists.get("third") is None
    with pytest.raises(AssertionError, match="read"):
        device_lists["log"]


def test_pages_are_released_after_reading_and_with_their_view() -> None:
    state = DeviceState({"private": np.zeros((2, 1))}, {"parts/p/log": PagedLists.from_columns(*log_of([PAGE, PAGE]))})
    pool = state.lists["parts/p/log"]._pool
    for reads in (True, False):
        view = state.read_part_lists(np.array([0, 1]))["p"]
        if reads:
            assert len(view["log"].ids) == 2 * PAGE
        state.put(np.arange(2), {"parts/p/log": as_list([PAGE, PAGE], 100)})
        assert len(pool.owners) - pool.n_free == (2 if reads else 4)
    del view
    assert len(pool.owners) - pool.n_free == 2


def test_concurrent_readers_leak_no_page() -> None:
    state = DeviceState({"private": np.zeros((N, 1))}, {"parts/p/log": PagedLists.from_columns(*log_of([5] * N))})
    lists = state.lists["parts/p/log"]

    def look(k: int) -> int:
        return sum(int(state.read_part_lists(np.arange(N))["p"]["log"].ids.sum()) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(look, range(8)))) == 1
    assert lists._pool.owners[lists._first].tolist() == [1] * N


def test_persistent_arrays_are_shared_with_the_copy_and_others_are_not() -> None:
    kinds = {"now": PagedLists.empty(N, EMPTY), "then": PagedLists.empty(N, EMPTY)}
    state = DeviceState({"a": np.zeros(N), "b": np.zeros(N)}, kinds, persistent=frozenset({"a", "now"}))
    state.take_snapshot()
    ptr, columns = log_of([2])
    lists = Ragged(ptr, columns["item"], {"row": columns["row"]})
    state.put(np.array([1]), {"a": np.ones(1), "b": np.ones(1), "now": lists, "then": lists})
    assert [state.snapshot.arrays[name][1] for name in "ab"] == [1, 0]
    assert [len(state.snapshot.read_list(name, np.array([1])).ids) for name in ("now", "then")] == [2, 0]
    pool = state.lists["now"]._pool
    assert pool.owners[pool.owners > 0].tolist() == [1]
    state.take_snapshot()
    assert state.snapshot.arrays["b"][1] == 1


def test_file_without_persistent_arrays_in_the_copy_restores_both(tmp_path: Path) -> None:
    state = DeviceState({"private": np.arange(N)[:, None] * 1.0, "took_part": np.zeros(N, bool)})
    state.lists["parts/p/log"] = PagedLists.from_columns(*log_of([40, 0, 3, 16, 17, 1]))
    state.persistent = frozenset({"private", "parts/p/log"})
    state.take_snapshot()
    state.put(np.array([2]), {"took_part": np.ones(1, bool), "private": np.array([[9.0]])})
    arrays = {**stream_devices(state, "now/"), **stream_devices(state.snapshot, "best/", state.persistent)}
    write_arrays(tmp_path / "x", arrays)
    result, _ = read_arrays(tmp_path / "x")
    assert {name for name in result if name.startswith("best/")} == {"best/took_part"}
    repeat = unflatten_devices(result, "now/").with_snapshot(unflatten_devices(result, "best/"))
    assert repeat.persistent == state.persistent
    assert repeat.snapshot.private.tolist() == repeat.private.tolist() == state.private.tolist()
    assert repeat.snapshot.took_part.sum() == 0
    for own_values in (repeat, repeat.snapshot):
        for name, array in flatten_devices(state, "").items():
            if name != "took_part":
                np.testing.assert_array_equal(flatten_devices(own_values, "")[name], array)


def test_pieces_of_lists_are_the_packed_lists() -> None:
    lists = PagedLists.from_columns(*log_of([70_000, 0, 3, 65_536, 1, 140_000]))
    ptr, columns = lists.stream_columns()
    whole_ptr, whole = lists.take(np.arange(N))
    assert ptr.tolist() == whole_ptr.tolist()
    for name, column in columns.items():
        parts = list(column.iter_chunks())
        assert len(parts) > 1
        np.testing.assert_array_equal(np.concatenate(parts), whole[name])
        assert column.shape == whole[name].shape


@pytest.mark.parametrize("count", [1, PAGE - 2, PAGE, PAGE + 3])
def test_copies_of_a_list_diverge_independently(count: int) -> None:
    """Both are written on from where they parted, the shorter after the longer: the best round, gone back to."""
    lists = PagedLists.from_columns(*log_of([count]))
    best = lists.copy()
    for stamp, more in ((1000, 1), (2000, PAGE + 1)):
        lists.extend(np.array([0]), *log_of([more], stamp))
    best.extend(np.array([0]), *log_of([2], 3000))
    first = list(range(count))
    assert best.read().ids.tolist() == [*first, 3000, 3001]
    assert lists.read().ids.tolist() == [*first, 1000, *range(2000, 2001 + PAGE)]
    del lists
    best.extend(np.array([0]), *log_of([PAGE], 4000))
    assert best.read().ids.tolist() == [*first, 3000, 3001, *range(4000, 4000 + PAGE)]
    assert len(best._pool.owners) - best._pool.n_free == -(-(count + 2 + PAGE) // PAGE)


def test_appending_moves_no_existing_entry() -> None:
    """Also with a copy beside it, which is as long or shorter: else a log would cost what it holds, every round."""
    lists = PagedLists.from_columns(*log_of([3, PAGE, 40]))
    first, copies = lists._first.tolist(), []
    for stamp in range(1, 5):
        copies.append(lists.copy())
        lists.extend(np.arange(3), *log_of([2, 1, PAGE], 1000 * stamp))
        assert lists._first.tolist() == first
    assert [entry.count[0] for entry in copies] == [3, 5, 7, 9]
