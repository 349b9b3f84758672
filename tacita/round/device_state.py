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

from tacita.core.codec import Pieces as Written
from tacita.core.files import flat, nested
from tacita.core.kept import Added, Kept, Pieces
from tacita.core.types import AnyArray, Arrays, Bools, Floats, Held, Ints, Longs, Ragged
from tacita.kernels.pages import NONE, PAGE, extend_lists, find_entries, find_pieces, leave_lists, link_pages

PARTS = "parts/"
LISTS = "lists/"  # in files, before `name:column` of a list; `name:` holds its borders
_SLAB = 2**16  # entries of a list that are written at once, about
OWN = "own"  # every user's own version of the item rows it last trained: `item`, and `moved` beyond the table


class _Pool:
    """Pages that lists are written to; copies of lists share it, and a page is free when nobody's list has it."""

    def __init__(self, columns: Arrays) -> None:
        self.columns = {name: np.zeros((0, *v.shape[1:]), v.dtype) for name, v in columns.items()}
        self.following = np.zeros(0, np.int32)  # (pages,) the next page of the same list
        self.owners = np.zeros(0, np.int32)  # (pages,) copies whose list begins with this page
        self.last = np.zeros(0, np.int32)  # (pages,) of the list that begins with this page
        self.length = np.zeros(0, np.int64)  # (pages,) of that list, as its longest copy has it
        self.free = np.zeros(0, np.int32)  # a stack
        self.n_free = 0

    def write(self, ptr: Longs, columns: Arrays) -> Ints:
        """New lists with one owner each; returns their first pages."""
        counts = np.diff(ptr)
        pages = self._pages(int((-(-counts // PAGE)).sum()))
        first = np.empty(len(counts), np.int32)
        link_pages(pages, counts, self.following, first, self.last)
        there = first != NONE
        self.owners[first[there]], self.length[first[there]] = 1, counts[there]
        self._fill(self.entries(first, counts), columns)
        return first

    def extend(self, first: Ints, counts: Longs, ptr: Longs, columns: Arrays) -> None:
        """Write lists on that have entries, and whose longest copy has no more than `counts` of them."""
        more = np.diff(ptr)
        pages = self._pages(int((-(-(counts + more) // PAGE) + -counts // PAGE).sum()))
        where = np.empty(int(ptr[-1]), np.int64)
        extend_lists(first, counts, more, pages, self.following, self.last, where)
        self.length[first] = counts + more
        self._fill(where, columns)

    def _pages(self, needed: int) -> Ints:
        if needed > self.n_free:
            self._grow(needed - self.n_free)
        self.n_free -= needed
        return self.free[self.n_free : self.n_free + needed][::-1].copy()

    def _fill(self, where: Longs, columns: Arrays) -> None:
        for name, column in columns.items():
            self.columns[name][where] = column

    def entries(self, first: Ints, counts: Longs) -> Longs:
        where = np.empty(int(counts.sum()), np.int64)
        find_entries(first, counts, self.following, where)
        return where

    def join(self, first: Ints) -> None:
        """One owner more for each of these lists."""
        self.owners[first[first != NONE]] += 1

    def leave(self, first: Ints) -> None:
        self.n_free = leave_lists(first, self.following, self.owners, self.free, self.n_free)

    def _grow(self, more: int) -> None:
        """Columns grow where they are: a second copy of them would be as large as all that is held."""
        old = len(self.owners)
        new = old + max(more, old // 16)
        for column in self.columns.values():
            column.resize((new * PAGE, *column.shape[1:]), refcheck=False)
        for array in (self.following, self.owners, self.free, self.last, self.length):
            array.resize(new, refcheck=False)
        self.free[self.n_free : self.n_free + new - old] = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        self.n_free += new - old


class Lists:
    """A list per user, in pages of a pool: what is held takes little more room than its entries do.

    A new list goes to free pages, and the pages of the old one are free once no copy has it any more. A copy costs a
    page number and a length for each user.
    """

    def __init__(self, pool: _Pool, first: Ints, count: Longs) -> None:
        self._pool = pool
        self._first = first  # (users,) page
        self.count = count  # (users,)

    @staticmethod
    def empty(n_users: int, columns: Arrays) -> Lists:
        """Nobody has anything; `columns` are empty arrays that say kind and width."""
        return Lists(_Pool(columns), np.full(n_users, NONE, np.int32), np.zeros(n_users, np.int64))

    @staticmethod
    def packed(ptr: Longs, columns: Arrays) -> Lists:
        """Everybody's lists from one array a column."""
        made = Lists.empty(len(ptr) - 1, columns)
        made.put(np.arange(len(ptr) - 1), ptr, columns)
        return made

    def __del__(self) -> None:
        self._pool.leave(self._first)

    @property
    def columns(self) -> Arrays:
        """The pool's columns, free pages included."""
        return self._pool.columns

    def take(self, users: AnyArray) -> tuple[Longs, Arrays]:
        """Row borders and columns of some users' lists."""
        count = self.count[users]
        return self._read(count, self._pool.entries(self._first[users], count))

    def take_pieces(self, users: AnyArray, start: Longs, count: Longs) -> tuple[Longs, Arrays]:
        """The same of a piece of a list for each of these users, who may come more than once."""
        if (start + count > self.count[users]).any():
            raise IndexError("a piece reaches past the end of its list")
        where = np.empty(int(count.sum()), np.int64)
        find_pieces(self._first[users], start, count, self._pool.following, where)
        return self._read(count, where)

    def _read(self, count: Longs, where: Longs) -> tuple[Longs, Arrays]:
        ptr = np.concatenate([[0], np.cumsum(count)])
        return ptr, {name: column[where] for name, column in self._pool.columns.items()}

    def streamed(self) -> tuple[Longs, dict[str, Written]]:
        """Row borders and columns of everybody's lists, which exist only while they are written."""
        ptr = np.concatenate([[0], np.cumsum(self.count)])
        cuts = np.flatnonzero(np.diff(ptr[:-1] // _SLAB)) + 1
        ends = [0, *cuts.tolist(), len(self.count)]

        def column(name: str) -> Written:
            def make() -> Iterator[AnyArray]:
                for a, b in pairwise(ends):
                    yield self._pool.columns[name][self._pool.entries(self._first[a:b], self.count[a:b])]

            kind = self._pool.columns[name]
            return Written((int(ptr[-1]), *kind.shape[1:]), kind.dtype, make)

        return ptr, {name: column(name) for name in self._pool.columns}

    def put(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Replace the lists of some users, each given once."""
        self._pool.leave(self._first[users])
        self._first[users] = self._pool.write(ptr, columns)
        self.count[users] = np.diff(ptr)

    def add(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Write the lists of some users on, each given once.

        Where they stand if they are as long as any copy of them, since a copy reads no further than it is long; else
        into pages of their own.
        """
        new, first, count = np.diff(ptr) > 0, self._first[users], self.count[users]
        longest = np.full(len(first), -1)
        longest[first != NONE] = self._pool.length[first[first != NONE]]
        apart, here = np.flatnonzero(new & (longest != count)), np.flatnonzero(new & (longest == count))
        given = Ragged(ptr, columns["item"], {name: v for name, v in columns.items() if name != "item"})
        if len(apart):
            old, mine = self.take(users[apart]), given.take(apart)
            both = Ragged(old[0], old[1].pop("item"), old[1]).joined(mine) if old[0][-1] else mine
            self.put(users[apart], both.ptr, {"item": both.ids, **both.values})
        if len(here):
            mine = given if len(here) == len(new) else given.take(here)
            self._pool.extend(first[here], count[here], mine.ptr, {"item": mine.ids, **mine.values})
            self.count[users[here]] += mine.counts()

    def grow(self, n_users: int) -> None:
        more = n_users - len(self.count)
        self._first = np.append(self._first, np.full(more, NONE, np.int32))
        self.count = np.append(self.count, np.zeros(more, np.int64))

    def copy(self) -> Lists:
        self._pool.join(self._first)
        return Lists(self._pool, self._first.copy(), self.count.copy())

    def follow(self, other: Lists, users: AnyArray) -> Lists:
        """This copy brought up to date where `other` changed for some users."""
        if self._pool is not other._pool:
            return other.copy()
        self._pool.join(other._first[users])
        self._pool.leave(self._first[users])
        self._first[users], self.count[users] = other._first[users], other.count[users]
        return self


@dataclass
class DeviceState:
    """All that devices keep between rounds, by name: `private`, `took_part`, `parts/NAME/...` for what a part keeps."""

    arrays: Arrays = field(default_factory=dict)  # name -> (users, ...)
    lists: dict[str, Lists] = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)  # what everybody received alike and keeps; replaced, never changed
    lasting: frozenset[str] = frozenset()  # arrays and lists that copies share
    _changed: list[AnyArray] = field(default_factory=list, repr=False)
    _kept: DeviceState | None = field(default=None, repr=False)

    @staticmethod
    def of(private: Floats, parts: dict[str, Arrays] | None = None, took_part: Bools | None = None) -> DeviceState:
        """Devices with these private vectors; nobody has trained unless it is said who."""
        trained = np.zeros(len(private), bool) if took_part is None else took_part
        return DeviceState({"private": private, "took_part": trained, **flat(parts or {}, PARTS)})

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
        return nested(self.arrays, PARTS)

    def take(self, users: AnyArray) -> Arrays:
        """The rows of some users."""
        return {name: v[users] for name, v in self.arrays.items()}

    def lists_of(self, users: AnyArray) -> dict[str, Mapping[str, Ragged]]:
        """The lists that parts keep for some users: part -> name -> a list each, read when it is asked for."""
        named = nested({name: name for name in self.lists if name.startswith(PARTS)}, PARTS)

        def reading(names: dict[str, str]) -> Kept:
            return Kept(tuple(names), lambda name, pieces: self.list_of(names[name], users, pieces))

        return {part: reading(names) for part, names in named.items()}

    def put(self, users: AnyArray, rows: Held) -> None:
        """Replace what some users keep; a list goes where there is room for it."""
        for name, values in rows.items():
            if isinstance(values, Ragged):
                write = self.lists[name].add if isinstance(values, Added) else self.lists[name].put
                write(users, values.ptr, {"item": values.ids, **values.values})
            else:
                self.arrays[name][users] = values
        if rows:
            self._changed.append(np.asarray(users))

    def list_of(self, name: str, users: AnyArray, pieces: Pieces | None = None) -> Ragged:
        """Some users' lists of items, or pieces of them, with the other columns as values."""
        one = self.lists[name]
        ptr, columns = one.take(users) if pieces is None else one.take_pieces(users[pieces[0]], *pieces[1:])
        return Ragged(ptr, columns.pop("item"), columns)

    def grow(self, whole: Held) -> None:
        """Room for users who are new, in the state that `whole` has for everybody; others stay bit for bit the same."""
        for name, rows in whole.items():
            if isinstance(rows, Ragged):
                kinds = {"item": rows.ids[:0], **{k: v[:0] for k, v in rows.values.items()}}
                self.lists.setdefault(name, Lists.empty(0, kinds))
                continue
            held = self.arrays.get(name)
            self.arrays[name] = rows if held is None else np.concatenate([held, rows[len(held) :]])
        for one in self.lists.values():
            one.grow(max((len(rows) for rows in whole.values()), default=len(one.count)))
        self._kept = None

    def copy(self) -> DeviceState:
        shared = self.lasting
        arrays = {name: v if name in shared else v.copy() for name, v in self.arrays.items()}
        lists = {name: one if name in shared else one.copy() for name, one in self.lists.items()}
        return DeviceState(arrays, lists, dict(self.common), shared)

    def keep(self) -> None:
        """Remember everything as it is now, at the price of what changed since the last time."""
        if self._kept is None:
            self._kept = self.copy()
        elif changed := self._changed + self._kept._changed:
            users = np.unique(np.concatenate(changed))
            for name in self.arrays.keys() - self.lasting:
                self._kept.arrays[name][users] = self.arrays[name][users]
            for name in self.lists.keys() - self.lasting:
                self._kept.lists[name] = self._kept.lists[name].follow(self.lists[name], users)
        self._kept.common = dict(self.common)
        self._changed, self._kept._changed = [], []

    @property
    def kept(self) -> DeviceState:
        """As it was when it was kept last."""
        assert self._kept is not None, "nothing was kept"
        return self._kept

    def with_kept(self, kept: DeviceState) -> DeviceState:
        """This state beside a copy of an earlier one that came from elsewhere; what lasts it need not have."""
        mine, others = self.arrays.keys() | self.lists.keys(), kept.arrays.keys() | kept.lists.keys()
        self.lasting = kept.lasting = self.lasting | frozenset(mine - others)
        kept.arrays |= {name: v for name, v in self.arrays.items() if name in self.lasting}
        kept.lists |= {name: one for name, one in self.lists.items() if name in self.lasting}
        self._kept, self._changed = kept, [np.arange(self.n_users)]
        return self

    def with_parts_of(self, other: DeviceState) -> DeviceState:
        """The same devices with what the parts keep on others."""
        arrays = {name: v for name, v in self.arrays.items() if not name.startswith(PARTS)}
        arrays |= {name: v for name, v in other.arrays.items() if name.startswith(PARTS)}
        lists = {name: one for name, one in self.lists.items() if not name.startswith(PARTS)}
        lists |= {name: one for name, one in other.lists.items() if name.startswith(PARTS)}
        return DeviceState(arrays, lists, self.common, self.lasting)


# As named arrays, for a file or a database


def device_arrays(clients: DeviceState, prefix: str) -> Arrays:
    """What devices hold, lists packed in the order of users: the same bytes however they came about."""
    arrays: Arrays = {f"{prefix}{name}": v for name, v in _plain(clients).items()}
    packed = {name: one.take(np.arange(clients.n_users)) for name, one in clients.lists.items()}
    return arrays | {f"{prefix}{name}": v for name, v in _as_arrays(packed).items()}


def device_pieces(clients: DeviceState, prefix: str, without: Collection[str] = ()) -> dict[str, AnyArray | Written]:
    """The same for a file, without a second copy of the lists, and without what a copy shares."""
    out: dict[str, AnyArray | Written] = {n: v for n, v in _plain(clients).items() if n not in without}
    for name, one in clients.lists.items():
        if name not in without:
            ptr, columns = one.streamed()
            out |= {f"{LISTS}{name}:": ptr} | {f"{LISTS}{name}:{column}": v for column, v in columns.items()}
    return {f"{prefix}{name}": v for name, v in out.items()}


def _plain(clients: DeviceState) -> Arrays:
    return clients.arrays | {f"common/{name}": v for name, v in clients.common.items()}


def read_devices(arrays: Arrays, prefix: str) -> DeviceState:
    mine = {name.removeprefix(prefix): v for name, v in arrays.items() if name.startswith(prefix)}
    plain = {name: v for name, v in mine.items() if name in ("private", "took_part") or name.startswith(PARTS)}
    common = {name.removeprefix("common/"): v for name, v in mine.items() if name.startswith("common/")}
    lists = {name: Lists.packed(ptr, columns) for name, (ptr, columns) in _as_lists(mine).items()}
    return DeviceState(plain, lists, common)


def apart(clients: DeviceState) -> DeviceState:
    """The same devices in arrays of their own: whatever becomes of the others, what lasts included, stays away."""
    made = read_devices(device_arrays(clients, ""), "")
    made.arrays = {name: v.copy() for name, v in made.arrays.items()}
    return made


def rows_taken(arrays: Arrays, which: AnyArray) -> Arrays:
    """What devices hold, as arrays, for some of the users, in that order."""
    plain = {name: v[which] for name, v in arrays.items() if not name.startswith(LISTS)}
    taken = {}
    for name, (ptr, columns) in _as_lists(arrays).items():
        some = Ragged(ptr, np.zeros(int(ptr[-1]), np.int32), columns).take(which)
        taken[name] = some.ptr, some.values
    return plain | _as_arrays(taken)


def rows_joined(first: Arrays, more: Arrays) -> Arrays:
    """What devices hold, as arrays, for the users of both, those of the first before the others."""
    plain = {name: np.concatenate([v, more[name]]) for name, v in first.items() if not name.startswith(LISTS)}
    joined, others = {}, _as_lists(more)
    for name, (ptr, columns) in _as_lists(first).items():
        ends, also = others[name]
        both = {column: np.concatenate([v, also[column]]) for column, v in columns.items()}
        joined[name] = np.concatenate([ptr, ptr[-1] + ends[1:]]), both
    return plain | _as_arrays(joined)


def _as_arrays(lists: dict[str, tuple[Longs, Arrays]]) -> Arrays:
    out: Arrays = {}
    for name, (ptr, columns) in lists.items():
        out |= {f"{LISTS}{name}:": ptr} | {f"{LISTS}{name}:{column}": v for column, v in columns.items()}
    return out


def _as_lists(arrays: Arrays) -> dict[str, tuple[Longs, Arrays]]:
    found: dict[str, Arrays] = {}
    for key, array in arrays.items():
        if key.startswith(LISTS):
            name, _, column = key.removeprefix(LISTS).rpartition(":")
            found.setdefault(name, {})[column] = array
    return {name: (columns.pop(""), columns) for name, columns in found.items()}
