"""What devices keep, one row per user: arrays of fixed width, lists of any length, and copies of earlier rounds.

The lab holds all devices in one `DeviceState`, a node its own people's. `keep` copies what changed since it was last
called, so the price of remembering the best round grows with those who took part, not with those who exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tacita.core.files import flat, nested
from tacita.core.types import AnyArray, Arrays, Bools, Floats, Held, Longs, Ragged

PARTS = "parts/"
LISTS = "lists/"  # in files, before `name:column` of a list; `name:` holds its borders
OWN = "own"  # every user's own version of the item rows it last trained: `item`, and `moved` beyond the table


@dataclass
class Lists:
    """A list per user in one pool that only grows: a new list is appended, and the old one is left behind.

    Entry e of user u is row `start[u] + e` of every column of the pool. Columns are replaced, never changed, when the
    pool is packed, so that a copy of `start` and `count` stays right with the columns it was made with.
    """

    columns: Arrays  # name -> (pool, ...); rows past `used` are room
    start: Longs  # (users,)
    count: Longs  # (users,)
    used: int = 0
    shared: bool = False  # another copy goes on writing to these columns

    @staticmethod
    def empty(n_users: int, columns: Arrays) -> Lists:
        """Nobody has anything; `columns` are empty arrays that say kind and width."""
        return Lists(dict(columns), np.zeros(n_users, np.int64), np.zeros(n_users, np.int64))

    def take(self, users: AnyArray) -> tuple[Longs, Arrays]:
        """Row borders and columns of some users' lists."""
        start, count = self.start[users], self.count[users]
        ptr = np.zeros(len(count) + 1, np.int64)
        np.cumsum(count, out=ptr[1:])
        where = np.repeat(start - ptr[:-1], count) + np.arange(ptr[-1])
        return ptr, {name: column[where] for name, column in self.columns.items()}

    def put(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Replace the lists of some users."""
        more = int(ptr[-1])
        if self.shared or self.used + more > self._room():
            self._make_room(users, more)
        for name, column in columns.items():
            self.columns[name][self.used : self.used + more] = column
        self.start[users] = self.used + ptr[:-1]
        self.count[users] = np.diff(ptr)
        self.used += more

    def _room(self) -> int:
        return min((len(column) for column in self.columns.values()), default=0)

    def _make_room(self, leaving: AnyArray, more: int) -> None:
        """New columns with the lists that stay, packed, and as much room again."""
        self.count[leaving] = 0
        ptr, kept = self.take(np.arange(len(self.count)))
        self.used = int(ptr[-1])
        size = 2 * (self.used + more)
        self.columns = {name: np.empty((size, *v.shape[1:]), v.dtype) for name, v in kept.items()}
        for name, column in kept.items():
            self.columns[name][: self.used] = column
        self.start, self.count, self.shared = ptr[:-1].copy(), np.diff(ptr), False

    def grow(self, n_users: int) -> None:
        more = np.zeros(n_users - len(self.start), np.int64)
        self.start, self.count = np.append(self.start, more), np.append(self.count, more)

    def copy(self) -> Lists:
        return Lists(dict(self.columns), self.start.copy(), self.count.copy(), self.used, shared=True)

    def follow(self, other: Lists, users: AnyArray) -> Lists:
        """This copy brought up to date where `other` changed for some users."""
        if any(self.columns[name] is not column for name, column in other.columns.items()):
            return other.copy()
        self.start[users], self.count[users], self.used = other.start[users], other.count[users], other.used
        return self


@dataclass
class DeviceState:
    """All that devices keep between rounds, by name: `private`, `took_part`, `parts/NAME/...` for what a part keeps."""

    arrays: Arrays = field(default_factory=dict)  # name -> (users, ...)
    lists: dict[str, Lists] = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)  # what everybody received alike and keeps; replaced, never changed
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

    def lists_of(self, users: AnyArray) -> dict[str, dict[str, Ragged]]:
        """The lists that parts keep for some users: part -> name -> a list each."""
        made = {name: self.list_of(name, users) for name in self.lists if name.startswith(PARTS)}
        return nested(made, PARTS)

    def put(self, users: AnyArray, rows: Held) -> None:
        """Replace what some users keep; a list goes where there is room for it."""
        for name, values in rows.items():
            if isinstance(values, Ragged):
                self.lists[name].put(users, values.ptr, {"item": values.ids, **values.values})
            else:
                self.arrays[name][users] = values
        if rows:
            self._changed.append(np.asarray(users))

    def list_of(self, name: str, users: AnyArray) -> Ragged:
        """Some users' lists of items, with the other columns as values."""
        ptr, columns = self.lists[name].take(users)
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
            one.grow(max(len(rows) for rows in whole.values()))
        self._kept = None

    def copy(self) -> DeviceState:
        arrays = {name: v.copy() for name, v in self.arrays.items()}
        lists = {name: one.copy() for name, one in self.lists.items()}
        return DeviceState(arrays, lists, dict(self.common))

    def keep(self) -> None:
        """Remember everything as it is now, at the price of what changed since the last time."""
        if self._kept is None:
            self._kept = self.copy()
        elif changed := self._changed + self._kept._changed:
            users = np.unique(np.concatenate(changed))
            for name, v in self.arrays.items():
                self._kept.arrays[name][users] = v[users]
            self._kept.lists = {n: self._kept.lists[n].follow(one, users) for n, one in self.lists.items()}
        self._kept.common = dict(self.common)
        self._changed, self._kept._changed = [], []

    @property
    def kept(self) -> DeviceState:
        """As it was when it was kept last."""
        assert self._kept is not None, "nothing was kept"
        return self._kept

    def with_kept(self, kept: DeviceState) -> DeviceState:
        """This state beside a copy of an earlier one that came from elsewhere."""
        self._kept, self._changed = kept, [np.arange(self.n_users)]
        return self

    def lasting(self, other: DeviceState, names: Sequence[str]) -> DeviceState:
        """The same devices with some of what others keep, where these are an earlier state of those."""
        everybody = np.arange(self.n_users)
        self.put(everybody, {name: other.arrays[name][: self.n_users] for name in names if name in other.arrays})
        self.put(everybody, {name: other.list_of(name, everybody) for name in names if name in other.lists})
        return self

    def with_parts_of(self, other: DeviceState) -> DeviceState:
        """The same devices with what the parts keep on others."""
        arrays = {name: v for name, v in self.arrays.items() if not name.startswith(PARTS)}
        arrays |= {name: v for name, v in other.arrays.items() if name.startswith(PARTS)}
        lists = {name: one for name, one in self.lists.items() if not name.startswith(PARTS)}
        lists |= {name: one for name, one in other.lists.items() if name.startswith(PARTS)}
        return DeviceState(arrays, lists, self.common)


# As named arrays, for a file or a database


def device_arrays(clients: DeviceState, prefix: str) -> Arrays:
    """What devices hold, lists packed in the order of users: the same bytes however they came about."""
    arrays: Arrays = {f"{prefix}{name}": v for name, v in clients.arrays.items()}
    arrays |= {f"{prefix}common/{name}": v for name, v in clients.common.items()}
    packed = {name: one.take(np.arange(clients.n_users)) for name, one in clients.lists.items()}
    return arrays | {f"{prefix}{name}": v for name, v in _as_arrays(packed).items()}


def read_devices(arrays: Arrays, prefix: str) -> DeviceState:
    mine = {name.removeprefix(prefix): v for name, v in arrays.items() if name.startswith(prefix)}
    plain = {name: v for name, v in mine.items() if name in ("private", "took_part") or name.startswith(PARTS)}
    common = {name.removeprefix("common/"): v for name, v in mine.items() if name.startswith("common/")}
    lists = {
        name: Lists(columns, ptr[:-1].copy(), np.diff(ptr), int(ptr[-1]))
        for name, (ptr, columns) in _as_lists(mine).items()
    }
    return DeviceState(plain, lists, common)


def rows_taken(arrays: Arrays, which: AnyArray) -> Arrays:
    """What devices hold, as arrays, for some of the users, in that order."""
    plain = {name: v[which] for name, v in arrays.items() if not name.startswith(LISTS)}
    taken = {}
    for name, (ptr, columns) in _as_lists(arrays).items():
        some = Ragged(ptr, np.zeros(int(ptr[-1]), np.int32), columns).take(which)
        taken[name] = some.ptr, some.values
    return plain | _as_arrays(taken)


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
