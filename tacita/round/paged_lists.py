"""PagedLists: a list per user in pages of a pool that copies share: a copy costs a page number for each user."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from tacita.core.codec import ChunkedArray
from tacita.core.device_lists import ListSlices, check_slices
from tacita.core.flat_indices import compute_offsets
from tacita.core.types import AnyArray, Arrays, Ints, Longs, Ragged
from tacita.kernels.pages import (
    NONE,
    PAGE,
    extend_lists,
    link_pages,
    locate_list_entries,
    locate_list_pieces,
    release_lists,
    retain_lists,
)

_SLAB = 2**16  # entries of a list that are written at once, about


class _PagePool:
    """Pages that lists are written to; copies of lists share it, and a page is free when nobody's list has it."""

    def __init__(self, columns: Arrays) -> None:
        self.columns: Arrays = {}
        for name, column in columns.items():
            self.columns[name] = np.zeros((0, *column.shape[1:]), column.dtype)
        self.next_page = np.zeros(0, np.int32)  # (pages,) the next page of the same list
        self.owners = np.zeros(0, np.int32)  # (pages,) copies whose list begins with this page
        self.last_page = np.zeros(0, np.int32)  # (pages,) of the list that begins with this page
        self.length = np.zeros(0, np.int64)  # (pages,) of that list, as its longest copy has it
        self.free_pages = np.zeros(0, np.int32)  # a stack
        self.n_free = 0

    def write(self, ptr: Longs, columns: Arrays) -> Ints:
        """New lists with one owner each; returns their first pages."""
        counts = np.diff(ptr)
        pages = self._take_pages(_count_pages(counts))
        first = np.empty(len(counts), np.int32)
        link_pages(pages, counts, self.next_page, first, self.last_page)
        has_entries = first != NONE
        first_pages = first[has_entries]
        self.owners[first_pages] = 1
        self.length[first_pages] = counts[has_entries]
        self._write_columns(self.locate_entries(first, counts), columns)
        return first

    def extend(self, first: Ints, counts: Longs, ptr: Longs, columns: Arrays) -> None:
        """Write lists on that have entries, and whose longest copy has no more than `counts` of them."""
        more = np.diff(ptr)
        n_new_pages = _count_pages(counts + more) - _count_pages(counts)
        pages = self._take_pages(n_new_pages)
        places = np.empty(int(ptr[-1]), np.int64)
        extend_lists(first, counts, more, pages, self.next_page, self.last_page, places)
        self.length[first] = counts + more
        self._write_columns(places, columns)

    def _take_pages(self, needed: int) -> Ints:
        if needed > self.n_free:
            self._grow(needed - self.n_free)
        end = self.n_free
        self.n_free -= needed
        return self.free_pages[self.n_free : end][::-1].copy()

    def _write_columns(self, places: Longs, columns: Arrays) -> None:
        for name, column in columns.items():
            self.columns[name][places] = column

    def locate_entries(self, first: Ints, counts: Longs) -> Longs:
        places = np.empty(int(counts.sum()), np.int64)
        locate_list_entries(first, counts, self.next_page, places)
        return places

    def add_owners(self, first: Ints) -> None:
        """One owner more for each of these lists."""
        retain_lists(first, self.owners)

    def remove_owners(self, first: Ints) -> None:
        self.n_free = release_lists(first, self.next_page, self.owners, self.free_pages, self.n_free)

    def _grow(self, more: int) -> None:
        """Columns grow where they are: a second copy of them would be as large as all that is held."""
        n_old = len(self.owners)
        n_new = n_old + max(more, n_old // 16)
        for column in self.columns.values():
            column.resize((n_new * PAGE, *column.shape[1:]), refcheck=False)
        for array in (self.next_page, self.owners, self.free_pages, self.last_page, self.length):
            array.resize(n_new, refcheck=False)
        added = np.arange(n_new - 1, n_old - 1, -1, dtype=np.int32)
        end = self.n_free + len(added)
        self.free_pages[self.n_free : end] = added
        self.n_free = end


def _count_pages(counts: Longs) -> int:
    """Pages that lists of these lengths take."""
    pages = -(-counts // PAGE)
    return int(pages.sum())


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
        no_pages = np.full(n_users, NONE, np.int32)
        no_entries = np.zeros(n_users, np.int64)
        return PagedLists(_PagePool(columns), no_pages, no_entries)

    @staticmethod
    def from_columns(ptr: Longs, columns: Arrays) -> PagedLists:
        """All users' lists from one array a column."""
        n_users = len(ptr) - 1
        lists = PagedLists.empty(n_users, columns)
        lists.put(np.arange(n_users), ptr, columns)
        return lists

    def __del__(self) -> None:
        self._pool.remove_owners(self._first)

    @property
    def columns(self) -> Arrays:
        """The pool's columns, free pages included."""
        return self._pool.columns

    def take(self, users: AnyArray) -> tuple[Longs, Arrays]:
        """Row borders and columns of some users' lists."""
        count = self.count[users]
        places = self._pool.locate_entries(self._first[users], count)
        return self._gather_columns(count, places)

    def take_ragged(self, users: AnyArray) -> Ragged:
        """Some users' lists with `item` as ids and the other columns as values."""
        ptr, columns = self.take(users)
        return _to_ragged(ptr, columns)

    def read(self, pieces: ListSlices | None = None) -> Ragged:
        """All users' lists with `item` as ids and the other columns as values, or pieces of them, a list each."""
        if pieces is None:
            all_users = np.arange(len(self.count))
            return self.take_ragged(all_users)
        check_slices(pieces, self.count)
        users, start, count = pieces
        places = np.empty(int(count.sum()), np.int64)
        locate_list_pieces(self._first[users], start, count, self._pool.next_page, places)
        ptr, columns = self._gather_columns(count, places)
        return _to_ragged(ptr, columns)

    def _gather_columns(self, count: Longs, places: Longs) -> tuple[Longs, Arrays]:
        columns: Arrays = {name: column[places] for name, column in self._pool.columns.items()}
        return compute_offsets(count), columns

    def stream_columns(self) -> tuple[Longs, dict[str, ChunkedArray]]:
        """Row borders and columns of all users' lists, which exist only while they are written."""
        ptr = compute_offsets(self.count)
        slab = ptr[:-1] // _SLAB
        cuts = np.flatnonzero(np.diff(slab)) + 1
        ends = [0, *cuts.tolist(), len(self.count)]
        columns = {}
        for name, column in self._pool.columns.items():
            shape = (int(ptr[-1]), *column.shape[1:])
            columns[name] = ChunkedArray(shape, column.dtype, partial(self._read_slabs, name, ends))
        return ptr, columns

    def _read_slabs(self, name: str, ends: list[int]) -> Iterator[AnyArray]:
        """One column of the lists of neighbouring users at a time."""
        for start, end in pairwise(ends):
            places = self._pool.locate_entries(self._first[start:end], self.count[start:end])
            yield self._pool.columns[name][places]

    def put(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Replace the lists of some users, each named once."""
        self._pool.remove_owners(self._first[users])
        self._first[users] = self._pool.write(ptr, columns)
        self.count[users] = np.diff(ptr)

    def extend(self, users: AnyArray, ptr: Longs, columns: Arrays) -> None:
        """Write the lists of some users on, each named once.

        In place if they are as long as any copy of them, since a copy reads no further than it is long; else into
        pages of their own.
        """
        first = self._first[users]
        count = self.count[users]
        is_longer = np.diff(ptr) > 0
        is_longest = self._find_longest_copy_lengths(first) == count
        added = _to_ragged(ptr, columns)
        apart = np.flatnonzero(is_longer & ~is_longest)
        in_place = np.flatnonzero(is_longer & is_longest)
        if len(apart):
            self._rewrite(users[apart], added.take(apart))
        if len(in_place):
            entries = added if len(in_place) == len(is_longer) else added.take(in_place)
            self._pool.extend(first[in_place], count[in_place], entries.ptr, _to_columns(entries))
            self.count[users[in_place]] += entries.counts()

    def _find_longest_copy_lengths(self, first: Ints) -> Longs:
        """The length of the longest copy of each list; -1 for one without pages."""
        longest = np.full(len(first), -1)
        has_pages = first != NONE
        longest[has_pages] = self._pool.length[first[has_pages]]
        return longest

    def _rewrite(self, users: AnyArray, added: Ragged) -> None:
        """Longer lists in pages of their own."""
        lists = self.take_ragged(users)
        if len(lists.ids):
            added = lists.join_rows(added)
        self.put(users, added.ptr, _to_columns(added))

    def grow(self, n_users: int) -> None:
        n_new = n_users - len(self.count)
        self._first = np.append(self._first, np.full(n_new, NONE, np.int32))
        self.count = np.append(self.count, np.zeros(n_new, np.int64))

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
        self._first[users] = other._first[users]
        self.count[users] = other.count[users]
        return self


def _to_ragged(ptr: Longs, columns: Arrays) -> Ragged:
    values = {name: column for name, column in columns.items() if name != "item"}
    return Ragged(ptr, columns["item"], values)


def _to_columns(lists: Ragged) -> Arrays:
    return {"item": lists.ids, **lists.values}
