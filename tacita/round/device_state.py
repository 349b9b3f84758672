"""What devices keep, one row per user: arrays of fixed width, lists of any length, and copies of earlier rounds.

The lab holds all devices in one `DeviceState`, a node its own people's. `keep` copies what changed since it was last
called, so the price of remembering the best round grows with those who took part, not with those who exist. What a
learner names as lasting is not copied at all: it is the same in the copy, and goes on from the last round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tacita.core.codec import ChunkedArray as WritableArrays
from tacita.core.device_lists import AppendedLists, DeviceLists, ListSlices, check_slices
from tacita.core.files import flatten_parts, nest_parts
from tacita.core.types import AnyArray, Arrays, Bools, Floats, Ints, Longs, Ragged, StateUpdate
from tacita.kernels.pages import (
    NONE,
    PAGE,
    extend_lists,
    find_entries,
    find_pieces,
    link_pages,
    release_lists,
    retain_lists,
)

PARTS = "parts/"
LISTS = "lists/"  # in files, before `name:column` of a list; `name:` holds its borders
_SLAB = 2**16  # entries of a list that are written at once, about
OWN_ROWS = "own"  # every user's own version of the item rows it last trained: `item`, and `moved` beyond the table


class _PagePool:
    """Pages that lists are written to; copies of lists share it, and a page is free when nobody's list has it."""

    def __init__(self, columns: Arrays) -> None:
        self.columns = {name: np.zeros((0, *v.shape[1:]), v.dtype) for name, v in columns.items()}
        self.next_page = np.zeros(0, np.int32)  # (pages,) the next page of the same list
        self.owners = np.zeros(0, np.int32)  # (pages,) copies whose list begins with this page
        self.last_page = np.zeros(0, np.int32)  # (pages,) of the list that begins with this page
        self.length = np.zeros(0, np.int64)  # (pages,) of that list, as its longest copy has it
        self.free_pages = np.zeros(0, np.int32)  # a stack
        self.n_free = 0

    def write(self, ptr: Longs, columns: Arrays) -> Ints:
        """New lists with one owner each; returns their first pages."""
        counts = np.diff(ptr)
        pages = self._take_pages(int((-(-counts // PAGE)).sum()))
        first = np.empty(len(counts), np.int32)
        link_pages(pages, counts, self.next_page, first, self.last_page)
        there = first != NONE
        self.owners[first[there]], self.length[first[there]] = 1, counts[there]
        self._write_columns(self.locate_entries(first, counts), columns)
        return first

    def extend(self, first: Ints, counts: Longs, ptr: Longs, columns: Arrays) -> None:
        """Write lists on that have entries, and whose longest copy has no more than `counts` of them."""
        more = np.diff(ptr)
        pages = self._take_pages(int((-(-(counts + more) // PAGE) + -counts // PAGE).sum()))
        where = np.empty(int(ptr[-1]), np.int64)
        extend_lists(first, counts, more, pages, self.next_page, self.last_page, where)
        self.length[first] = counts + more
        self._write_columns(where, columns)

    def _take_pages(self, needed: int) -> Ints:
        if needed > self.n_free:
            self._grow(needed - self.n_free)
        self.n_free -= needed
        return self.free_pages[self.n_free : self.n_free + needed][::-1].copy()

    def _write_columns(self, where: Longs, columns: Arrays) -> None:
        for name, column in columns.items():
            self.columns[name][where] = column

    def locate_entries(self, first: Ints, counts: Longs) -> Longs:
        where = np.empty(int(counts.sum()), np.int64)
        find_entries(first, counts, self.next_page, where)
        return where

    def add_owners(self, first: Ints) -> None:
        """One owner more for each of these lists."""
        retain_lists(first, self.owners)

    def remove_owners(self, first: Ints) -> None:
        self.n_free = release_lists(first, self.next_page, self.owners, self.free_pages, self.n_free)

    def _grow(self, more: int) -> None:
        """Columns grow where they are: a second copy of them would be as large as all that is held."""
        old = len(self.owners)
        new = old + max(more, old // 16)
        for column in self.columns.values():
            column.resize((new * PAGE, *column.shape[1:]), refcheck=False)
        for array in (self.next_page, self.owners, self.free_pages, self.last_page, self.length):
            array.resize(new, refcheck=False)
        self.free_pages[self.n_free : self.n_free + new - old] = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        self.n_free += new - old


class PagedLists:
    """A list per user, in pages of a pool: what is held takes little more room than its entries do.

    A new list goes to free pages, and the pages of the old one are free once no copy has it any more. A copy costs a
    page number and a length for each user.
    """

    def __init__(self, pool: _PagePool, first: Ints, count: Longs) -> None:
        self._pool = pool
        self._first = first  # (users,) page
        self.count = count  # (users,)

    @staticmethod
    def empty(n_users: int, columns: Arrays) -> PagedLists:
        """Nobody has anything; `columns` are empty arrays that say kind and width."""
        return PagedLists(_PagePool(columns), np.full(n_users, NONE, np.int32), np.zeros(n_users, np.int64))

    @staticmethod
    def from_columns(ptr: Longs, columns: Arrays) -> PagedLists:
        """Everybody's lists from one array a column."""
        made = PagedLists.empty(len(ptr) - 1, columns)
        made.put(np.arange(len(ptr) - 1), ptr, columns)
        return made

    def __del__(self) -> None:
        self._pool.remove_owners(self._first)

    @property
    def columns(self) -> Arrays:
        """The pool's columns, free pages included."""
        return self._pool.columns

    def take(self, users: AnyArray) -> tuple[Longs, Arrays]:
        """Row borders and columns of some users' lists."""
        count = self.count[users]
        return self._gather_columns(count, self._pool.locate_entries(self._first[users], count))

    def read(self, pieces: ListSlices | None = None) -> Ragged:
        """Everybody's lists with `item` as ids and the other columns as values, or pieces of them, a list each."""
        if pieces is None:
            return _to_ragged(*self.take(np.arange(len(self.count))))
        check_slices(pieces, self.count)
        users, start, count = pieces
        where = np.empty(int(count.sum()), np.int64)
        find_pieces(self._first[users], start, count, self._pool.next_page, where)
        return _to_ragged(*self._gather_columns(count, where))

    def _gather_columns(self, count: Longs, where: Longs) -> tuple[Longs, Arrays]:
        ptr = np.concatenate([[0], np.cumsum(count)])
        return ptr, {name: column[where] for name, column in self._pool.columns.items()}

    def stream_columns(self) -> tuple[Longs, dict[str, WritableArrays]]:
        """Row borders and columns of everybody's lists, which exist only while they are written."""
        ptr = np.concatenate([[0], np.cumsum(self.count)])
        cuts = np.flatnonzero(np.diff(ptr[:-1] // _SLAB)) + 1
        ends = [0, *cuts.tolist(), len(self.count)]

        def column(name: str) -> WritableArrays:
            def make() -> Iterator[AnyArray]:
                for a, b in pairwise(ends):
                    yield self._pool.columns[name][self._pool.locate_entries(self._first[a:b], self.count[a:b])]

            kind = self._pool.columns[name]
            return WritableArrays((int(ptr[-1]), *kind.shape[1:]), kind.dtype, make)

        return ptr, {name: column(name) for name in self._pool.columns}

    def put(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Replace the lists of some users, each given once."""
        self._pool.remove_owners(self._first[users])
        self._first[users] = self._pool.write(ptr, columns)
        self.count[users] = np.diff(ptr)

    def extend(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Write the lists of some users on, each given once.

        Where they stand if they are as long as any copy of them, since a copy reads no further than it is long; else
        into pages of their own.
        """
        new, first, count = np.diff(ptr) > 0, self._first[users], self.count[users]
        longest = np.full(len(first), -1)
        longest[first != NONE] = self._pool.length[first[first != NONE]]
        apart, here = np.flatnonzero(new & (longest != count)), np.flatnonzero(new & (longest == count))
        given = _to_ragged(ptr, columns)
        if len(apart):
            old, mine = self.take(users[apart]), given.take(apart)
            both = _to_ragged(*old).join_rows(mine) if old[0][-1] else mine
            self.put(users[apart], both.ptr, {"item": both.ids, **both.values})
        if len(here):
            mine = given if len(here) == len(new) else given.take(here)
            self._pool.extend(first[here], count[here], mine.ptr, {"item": mine.ids, **mine.values})
            self.count[users[here]] += mine.counts()

    def grow(self, n_users: int) -> None:
        more = n_users - len(self.count)
        self._first = np.append(self._first, np.full(more, NONE, np.int32))
        self.count = np.append(self.count, np.zeros(more, np.int64))

    def copy(self) -> PagedLists:
        return self.select(np.arange(len(self.count)))

    def select(self, users: AnyArray) -> PagedLists:
        """A copy of the lists of some users, in that order."""
        first = self._first[users]
        self._pool.add_owners(first)
        return PagedLists(self._pool, first, self.count[users])

    def update_from(self, other: PagedLists, users: AnyArray) -> PagedLists:
        """This copy brought up to date where `other` changed for some users."""
        if self._pool is not other._pool:
            return other.copy()
        self._pool.add_owners(other._first[users])
        self._pool.remove_owners(self._first[users])
        self._first[users], self.count[users] = other._first[users], other.count[users]
        return self


def _to_ragged(ptr: Longs, columns: Arrays) -> Ragged:
    return Ragged(ptr, columns["item"], {name: v for name, v in columns.items() if name != "item"})


@dataclass
class DeviceState:
    """All that devices keep between rounds, by name: `private`, `took_part`, `parts/NAME/...` for what a part keeps."""

    arrays: Arrays = field(default_factory=dict)  # name -> (users, ...)
    lists: dict[str, PagedLists] = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)  # what everybody received alike and keeps; replaced, never changed
    persistent: frozenset[str] = frozenset()  # arrays and lists that copies share
    _changed_users: list[AnyArray] = field(default_factory=list, repr=False)
    _snapshot: DeviceState | None = field(default=None, repr=False)

    @staticmethod
    def from_private(
        private: Floats, parts: dict[str, Arrays] | None = None, took_part: Bools | None = None
    ) -> DeviceState:
        """Devices with these private vectors; nobody has trained unless it is said who."""
        trained = np.zeros(len(private), bool) if took_part is None else took_part
        return DeviceState({"private": private, "took_part": trained, **flatten_parts(parts or {}, PARTS)})

    @property
    def n_users(self) -> int:
        return len(self.private)

    @property
    def private(self) -> Floats:
        return self.arrays["private"]

    @property
    def took_part(self) -> Bools:
        """Who trained in the current block."""
        return self.arrays["took_part"]

    @property
    def parts(self) -> dict[str, Arrays]:
        """What each part keeps, as views of the arrays."""
        return nest_parts(self.arrays, PARTS)

    def take(self, users: AnyArray) -> Arrays:
        """The rows of some users."""
        return {name: v[users] for name, v in self.arrays.items()}

    def part_lists(self, users: AnyArray) -> dict[str, Mapping[str, Ragged]]:
        """The lists that parts keep for some users: part -> name -> a list each, as it is now, read when asked for."""
        named = nest_parts(
            {name: one.select(users) for name, one in self.lists.items() if name.startswith(PARTS)}, PARTS
        )
        return {part: DeviceLists(lists) for part, lists in named.items()}

    def put(self, users: AnyArray, rows: StateUpdate) -> None:
        """Replace what some users keep; a list goes where there is room for it."""
        for name, values in rows.items():
            if isinstance(values, Ragged):
                write = self.lists[name].extend if isinstance(values, AppendedLists) else self.lists[name].put
                write(users, values.ptr, {"item": values.ids, **values.values})
            else:
                self.arrays[name][users] = values
        if rows:
            self._changed_users.append(np.asarray(users))

    def read_list(self, name: str, users: AnyArray) -> Ragged:
        """Some users' lists of items, with the other columns as values."""
        return _to_ragged(*self.lists[name].take(users))

    def grow(self, whole: StateUpdate) -> None:
        """Room for users who are new, in the state that `whole` has for everybody; others stay bit for bit the same."""
        for name, rows in whole.items():
            if isinstance(rows, Ragged):
                kinds = {"item": rows.ids[:0], **{k: v[:0] for k, v in rows.values.items()}}
                self.lists.setdefault(name, PagedLists.empty(0, kinds))
                continue
            held = self.arrays.get(name)
            self.arrays[name] = rows if held is None else np.concatenate([held, rows[len(held) :]])
        for one in self.lists.values():
            one.grow(max((len(rows) for rows in whole.values()), default=len(one.count)))
        self._snapshot = None

    def copy(self) -> DeviceState:
        shared = self.persistent
        arrays = {name: v if name in shared else v.copy() for name, v in self.arrays.items()}
        lists = {name: one if name in shared else one.copy() for name, one in self.lists.items()}
        return DeviceState(arrays, lists, dict(self.common), shared)

    def take_snapshot(self) -> None:
        """Remember everything as it is now, at the price of what changed since the last time."""
        if self._snapshot is None:
            self._snapshot = self.copy()
        elif changed := self._changed_users + self._snapshot._changed_users:
            users = np.unique(np.concatenate(changed))
            for name in self.arrays.keys() - self.persistent:
                self._snapshot.arrays[name][users] = self.arrays[name][users]
            for name in self.lists.keys() - self.persistent:
                self._snapshot.lists[name] = self._snapshot.lists[name].update_from(self.lists[name], users)
        self._snapshot.common = dict(self.common)
        self._changed_users, self._snapshot._changed_users = [], []

    @property
    def snapshot(self) -> DeviceState:
        """As it was when it was kept last."""
        assert self._snapshot is not None, "nothing was kept"
        return self._snapshot

    def with_snapshot(self, snapshot: DeviceState) -> DeviceState:
        """This state beside a copy of an earlier one that came from elsewhere; what lasts it need not have."""
        mine, others = self.arrays.keys() | self.lists.keys(), snapshot.arrays.keys() | snapshot.lists.keys()
        self.persistent = snapshot.persistent = self.persistent | frozenset(mine - others)
        snapshot.arrays |= {name: v for name, v in self.arrays.items() if name in self.persistent}
        snapshot.lists |= {name: one for name, one in self.lists.items() if name in self.persistent}
        self._snapshot, self._changed_users = snapshot, [np.arange(self.n_users)]
        return self

    def with_parts_of(self, other: DeviceState) -> DeviceState:
        """The same devices with what the parts keep on others."""
        arrays = {name: v for name, v in self.arrays.items() if not name.startswith(PARTS)}
        arrays |= {name: v for name, v in other.arrays.items() if name.startswith(PARTS)}
        lists = {name: one for name, one in self.lists.items() if not name.startswith(PARTS)}
        lists |= {name: one for name, one in other.lists.items() if name.startswith(PARTS)}
        return DeviceState(arrays, lists, self.common, self.persistent)


# As named arrays, for a file or a database


def flatten_devices(clients: DeviceState, prefix: str) -> Arrays:
    """What devices hold, lists packed in the order of users: the same bytes however they came about."""
    arrays: Arrays = {f"{prefix}{name}": v for name, v in _plain_arrays(clients).items()}
    packed = {name: one.take(np.arange(clients.n_users)) for name, one in clients.lists.items()}
    return arrays | {f"{prefix}{name}": v for name, v in _pack_lists(packed).items()}


def stream_devices(
    clients: DeviceState, prefix: str, without: Collection[str] = ()
) -> dict[str, AnyArray | WritableArrays]:
    """The same for a file, without a second copy of the lists, and without what a copy shares."""
    out: dict[str, AnyArray | WritableArrays] = {n: v for n, v in _plain_arrays(clients).items() if n not in without}
    for name, one in clients.lists.items():
        if name not in without:
            ptr, columns = one.stream_columns()
            out |= {f"{LISTS}{name}:": ptr} | {f"{LISTS}{name}:{column}": v for column, v in columns.items()}
    return {f"{prefix}{name}": v for name, v in out.items()}


def _plain_arrays(clients: DeviceState) -> Arrays:
    return clients.arrays | {f"common/{name}": v for name, v in clients.common.items()}


def read_devices(arrays: Arrays, prefix: str) -> DeviceState:
    mine = {name.removeprefix(prefix): v for name, v in arrays.items() if name.startswith(prefix)}
    plain = {name: v for name, v in mine.items() if name in ("private", "took_part") or name.startswith(PARTS)}
    common = {name.removeprefix("common/"): v for name, v in mine.items() if name.startswith("common/")}
    lists = {name: PagedLists.from_columns(ptr, columns) for name, (ptr, columns) in _unpack_lists(mine).items()}
    return DeviceState(plain, lists, common)


def deep_copy_devices(clients: DeviceState) -> DeviceState:
    """The same devices in arrays of their own: whatever becomes of the others, what lasts included, stays away."""
    made = read_devices(flatten_devices(clients, ""), "")
    made.arrays = {name: v.copy() for name, v in made.arrays.items()}
    return made


def take_rows(arrays: Arrays, which: AnyArray) -> Arrays:
    """What devices hold, as arrays, for some of the users, in that order."""
    plain = {name: v[which] for name, v in arrays.items() if not name.startswith(LISTS)}
    taken = {}
    for name, (ptr, columns) in _unpack_lists(arrays).items():
        some = Ragged(ptr, np.zeros(int(ptr[-1]), np.int32), columns).take(which)
        taken[name] = some.ptr, some.values
    return plain | _pack_lists(taken)


def join_rows(first: Arrays, more: Arrays) -> Arrays:
    """What devices hold, as arrays, for the users of both, those of the first before the others."""
    plain = {name: np.concatenate([v, more[name]]) for name, v in first.items() if not name.startswith(LISTS)}
    joined, others = {}, _unpack_lists(more)
    for name, (ptr, columns) in _unpack_lists(first).items():
        ends, also = others[name]
        both = {column: np.concatenate([v, also[column]]) for column, v in columns.items()}
        joined[name] = np.concatenate([ptr, ptr[-1] + ends[1:]]), both
    return plain | _pack_lists(joined)


def _pack_lists(lists: dict[str, tuple[Longs, Arrays]]) -> Arrays:
    out: Arrays = {}
    for name, (ptr, columns) in lists.items():
        out |= {f"{LISTS}{name}:": ptr} | {f"{LISTS}{name}:{column}": v for column, v in columns.items()}
    return out


def _unpack_lists(arrays: Arrays) -> dict[str, tuple[Longs, Arrays]]:
    found: dict[str, Arrays] = {}
    for key, array in arrays.items():
        if key.startswith(LISTS):
            name, _, column = key.removeprefix(LISTS).rpartition(":")
            found.setdefault(name, {})[column] = array
    return {name: (columns.pop(""), columns) for name, columns in found.items()}
