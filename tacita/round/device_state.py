"""What devices keep, one row per user: arrays of fixed width, lists of any length, and copies of earlier rounds.

The lab holds all devices in one `DeviceState`, a node its own people's. `take_snapshot` copies what changed since it
was last called, so the price of remembering the best round grows with those who took part, not with those who exist.
Persistent state is not copied at all: it is the same in the copy, and goes on from the last round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from tacita.core.codec import ChunkedArray
from tacita.core.device_lists import AppendedLists, DeviceLists
from tacita.core.files import flatten_parts, nest_parts
from tacita.core.types import AnyArray, Arrays, Bools, Floats, Longs, Ragged, StateUpdate
from tacita.round.paged_lists import PagedLists

PARTS = "parts/"
LISTS = "lists/"  # in files, before `name:column` of a list; `name:` holds its borders
COMMON = "common/"  # in files, before what all devices received alike
OWN_ROWS = "own"  # every user's own version of the item rows it last trained: `item`, and `moved` beyond the table

Columns = tuple[Longs, Arrays]
"""The row borders and the columns of all users' lists."""


@dataclass
class DeviceState:
    """All that devices keep between rounds, by name: `private`, `took_part`, `parts/NAME/...` for what a part keeps."""

    arrays: Arrays = field(default_factory=dict)  # name -> (users, ...)
    lists: dict[str, PagedLists] = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)  # what all received alike and keep; replaced, never changed
    persistent: frozenset[str] = frozenset()  # arrays and lists that copies share
    _changed_users: list[AnyArray] = field(default_factory=list, repr=False)
    _snapshot: DeviceState | None = field(default=None, repr=False)

    @staticmethod
    def from_private(
        private: Floats, parts: dict[str, Arrays] | None = None, took_part: Bools | None = None
    ) -> DeviceState:
        """Devices with these private vectors; nobody has trained unless it is said who."""
        if took_part is None:
            took_part = np.zeros(len(private), bool)
        part_arrays = flatten_parts(parts or {}, PARTS)
        return DeviceState({"private": private, "took_part": took_part, **part_arrays})

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
        return {name: array[users] for name, array in self.arrays.items()}

    def read_part_lists(self, users: AnyArray) -> dict[str, Mapping[str, Ragged]]:
        """The lists that parts keep for some users: part -> name -> a list each, as it is now, read when asked for."""
        selected = {name: lists.select(users) for name, lists in self.lists.items() if name.startswith(PARTS)}
        by_part = nest_parts(selected, PARTS)
        return {part: DeviceLists(lists) for part, lists in by_part.items()}

    def put(self, users: AnyArray, rows: StateUpdate) -> None:
        """Replace what some users keep; a list goes where there is room for it."""
        for name, values in rows.items():
            if isinstance(values, Ragged):
                self._put_lists(name, users, values)
            else:
                self.arrays[name][users] = values
        if rows:
            self._changed_users.append(np.asarray(users))

    def _put_lists(self, name: str, users: AnyArray, values: Ragged) -> None:
        lists = self.lists[name]
        columns = {"item": values.ids, **values.values}
        if isinstance(values, AppendedLists):
            lists.extend(users, values.ptr, columns)
        else:
            lists.put(users, values.ptr, columns)

    def read_list(self, name: str, users: AnyArray) -> Ragged:
        """Some users' lists of items, with the other columns as values."""
        return self.lists[name].take_ragged(users)

    def grow(self, whole: StateUpdate) -> None:
        """Room for users who are new, in the state that `whole` has for all; others stay bit for bit the same."""
        for name, rows in whole.items():
            if isinstance(rows, Ragged):
                self._make_room(name, rows)
            elif name in self.arrays:
                known = self.arrays[name]
                new_rows = rows[len(known) :]
                self.arrays[name] = np.concatenate([known, new_rows])
            else:
                self.arrays[name] = rows
        for lists in self.lists.values():
            n_users = max((len(rows) for rows in whole.values()), default=len(lists.count))
            lists.grow(n_users)
        self._snapshot = None

    def _make_room(self, name: str, lists: Ragged) -> None:
        """Empty lists of that name, with the columns of these."""
        if name in self.lists:
            return
        columns = {"item": lists.ids[:0]}
        for column_name, column in lists.values.items():
            columns[column_name] = column[:0]
        self.lists[name] = PagedLists.empty(0, columns)

    def copy(self) -> DeviceState:
        shared = self.persistent
        arrays = {name: array if name in shared else array.copy() for name, array in self.arrays.items()}
        lists = {name: paged if name in shared else paged.copy() for name, paged in self.lists.items()}
        return DeviceState(arrays, lists, dict(self.common), shared)

    def take_snapshot(self) -> None:
        """Remember everything as it is now, at the price of what changed since the last time."""
        if self._snapshot is None:
            self._snapshot = self.copy()
        else:
            self._update_snapshot(self._snapshot)
        self._snapshot.common = dict(self.common)
        self._snapshot._changed_users = []
        self._changed_users = []

    def _update_snapshot(self, snapshot: DeviceState) -> None:
        """Copy the rows of users who changed on either side."""
        changed = self._changed_users + snapshot._changed_users
        if not changed:
            return
        users = np.unique(np.concatenate(changed))
        for name in self.arrays.keys() - self.persistent:
            snapshot.arrays[name][users] = self.arrays[name][users]
        for name in self.lists.keys() - self.persistent:
            earlier = snapshot.lists[name]
            snapshot.lists[name] = earlier.update_from(self.lists[name], users)

    @property
    def snapshot(self) -> DeviceState:
        """As it was when the last snapshot was taken."""
        assert self._snapshot is not None, "no snapshot was taken"
        return self._snapshot

    def with_snapshot(self, snapshot: DeviceState) -> DeviceState:
        """This state beside a copy of an earlier one that came from elsewhere; it need not have persistent state."""
        own_names = self.arrays.keys() | self.lists.keys()
        snapshot_names = snapshot.arrays.keys() | snapshot.lists.keys()
        self.persistent = self.persistent | frozenset(own_names - snapshot_names)
        snapshot.persistent = self.persistent
        snapshot.arrays |= {name: array for name, array in self.arrays.items() if name in self.persistent}
        snapshot.lists |= {name: paged for name, paged in self.lists.items() if name in self.persistent}
        self._snapshot = snapshot
        self._changed_users = [np.arange(self.n_users)]
        return self

    def with_parts_of(self, other: DeviceState) -> DeviceState:
        """The same devices with what the parts keep on others."""
        arrays = {name: array for name, array in self.arrays.items() if not name.startswith(PARTS)}
        arrays |= {name: array for name, array in other.arrays.items() if name.startswith(PARTS)}
        lists = {name: paged for name, paged in self.lists.items() if not name.startswith(PARTS)}
        lists |= {name: paged for name, paged in other.lists.items() if name.startswith(PARTS)}
        return DeviceState(arrays, lists, self.common, self.persistent)


# As named arrays, for a file or a database


def flatten_devices(clients: DeviceState, prefix: str) -> Arrays:
    """What devices hold, lists packed in the order of users: the same bytes however they came about."""
    arrays = _collect_plain_arrays(clients)
    all_users = np.arange(clients.n_users)
    columns = {name: lists.take(all_users) for name, lists in clients.lists.items()}
    arrays |= _pack_lists(columns)
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def stream_devices(
    clients: DeviceState, prefix: str, without: Collection[str] = ()
) -> dict[str, AnyArray | ChunkedArray]:
    """The same for a file, without a second copy of the lists, and without what a copy shares."""
    streamed: dict[str, AnyArray | ChunkedArray] = {}
    for name, array in _collect_plain_arrays(clients).items():
        if name not in without:
            streamed[f"{prefix}{name}"] = array
    for name, lists in clients.lists.items():
        if name in without:
            continue
        ptr, columns = lists.stream_columns()
        streamed[f"{prefix}{_column_key(name)}"] = ptr
        for column_name, column in columns.items():
            streamed[f"{prefix}{_column_key(name, column_name)}"] = column
    return streamed


def _collect_plain_arrays(clients: DeviceState) -> Arrays:
    common = {f"{COMMON}{name}": array for name, array in clients.common.items()}
    return clients.arrays | common


def unflatten_devices(arrays: Arrays, prefix: str) -> DeviceState:
    state = DeviceState()
    selected = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    for name, array in selected.items():
        if name.startswith(COMMON):
            state.common[name.removeprefix(COMMON)] = array
        elif name in ("private", "took_part") or name.startswith(PARTS):
            state.arrays[name] = array
    for name, (ptr, columns) in _unpack_lists(selected).items():
        state.lists[name] = PagedLists.from_columns(ptr, columns)
    return state


def deep_copy_devices(clients: DeviceState) -> DeviceState:
    """The same devices in arrays of their own, persistent state included: changes of one never reach the other."""
    copy = unflatten_devices(flatten_devices(clients, ""), "")
    copy.arrays = {name: array.copy() for name, array in copy.arrays.items()}
    return copy


def take_rows(arrays: Arrays, which: AnyArray) -> Arrays:
    """What devices hold, as arrays, for some of the users, in that order."""
    rows = {name: array[which] for name, array in arrays.items() if not name.startswith(LISTS)}
    lists: dict[str, Columns] = {}
    for name, (ptr, columns) in _unpack_lists(arrays).items():
        no_items = np.zeros(int(ptr[-1]), np.int32)
        selected = Ragged(ptr, no_items, columns).take(which)
        lists[name] = selected.ptr, selected.values
    return rows | _pack_lists(lists)


def join_rows(first: Arrays, second: Arrays) -> Arrays:
    """What devices hold, as arrays, for the users of both, those of the first before the others."""
    joined: Arrays = {}
    for name, array in first.items():
        if not name.startswith(LISTS):
            joined[name] = np.concatenate([array, second[name]])
    lists: dict[str, Columns] = {}
    second_lists = _unpack_lists(second)
    for name, (ptr, columns) in _unpack_lists(first).items():
        second_ptr, second_columns = second_lists[name]
        shifted = ptr[-1] + second_ptr[1:]
        both: Arrays = {}
        for column_name, column in columns.items():
            both[column_name] = np.concatenate([column, second_columns[column_name]])
        lists[name] = np.concatenate([ptr, shifted]), both
    return joined | _pack_lists(lists)


def _column_key(name: str, column: str = "") -> str:
    """The name of a list's column in a file; without a column, of its borders."""
    return f"{LISTS}{name}:{column}"


def _pack_lists(lists: dict[str, Columns]) -> Arrays:
    packed: Arrays = {}
    for name, (ptr, columns) in lists.items():
        packed[_column_key(name)] = ptr
        for column_name, column in columns.items():
            packed[_column_key(name, column_name)] = column
    return packed


def _unpack_lists(arrays: Arrays) -> dict[str, Columns]:
    columns_by_list: dict[str, Arrays] = {}
    for key, array in arrays.items():
        if key.startswith(LISTS):
            name, _, column = key.removeprefix(LISTS).rpartition(":")
            columns_by_list.setdefault(name, {})[column] = array
    return {name: (columns.pop(""), columns) for name, columns in columns_by_list.items()}
