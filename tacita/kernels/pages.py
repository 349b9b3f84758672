"""Lists in pages of a pool: chains of pages that several copies may own, and a stack of free ones."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Ints, Longs

PAGE = 16  # entries of a page
NONE = -1  # the page of an empty list, and what follows the last page


@njit(cache=True, nogil=True)
def link_pages(pages: Ints, counts: Longs, following: Ints, first: Ints, last: Ints) -> None:
    """Chains the given pages into lists of `counts` entries, in turn; `first` becomes the first page of each, and
    `last` of a first page the last of its list."""
    at = 0
    for k in range(len(counts)):
        n = (counts[k] + PAGE - 1) // PAGE
        first[k] = pages[at] if n else NONE
        for j in range(n):
            following[pages[at + j]] = pages[at + j + 1] if j + 1 < n else NONE
        if n:
            last[first[k]] = pages[at + n - 1]
        at += n


@njit(cache=True, nogil=True)
def locate_list_entries(first: Ints, counts: Longs, following: Ints, where: Longs) -> None:
    """The places in the pool of all entries of some lists, list by list."""
    at = 0
    for k in range(len(first)):
        page = first[k]
        remaining = counts[k]
        while remaining > 0:
            n = min(remaining, PAGE)
            for j in range(n):
                where[at + j] = np.int64(page) * PAGE + j
            at += n
            remaining -= n
            page = following[page]


@njit(cache=True, nogil=True)
def locate_list_pieces(first: Ints, starts: Longs, counts: Longs, following: Ints, where: Longs) -> None:
    """The places in the pool of `counts` entries of some lists, from `starts` on."""
    at = 0
    for k in range(len(first)):
        if counts[k] == 0:
            continue
        page = first[k]
        offset = starts[k]
        while offset >= PAGE:
            page = following[page]
            offset -= PAGE
        for _ in range(counts[k]):
            if offset == PAGE:
                page = following[page]
                offset = 0
            where[at] = np.int64(page) * PAGE + offset
            at += 1
            offset += 1


@njit(cache=True, nogil=True)
def extend_lists(
    first: Ints, counts: Longs, more: Longs, pages: Ints, following: Ints, last: Ints, where: Longs
) -> None:
    """Writes some lists on, into what their last pages have left and then into new pages; `where` is of what is new."""
    at = 0
    used = 0
    for k in range(len(first)):
        page = last[first[k]]
        offset = (counts[k] - 1) % PAGE + 1
        for _ in range(more[k]):
            if offset == PAGE:
                following[page] = pages[used]
                page = pages[used]
                offset = 0
                following[page] = NONE
                used += 1
            where[at] = np.int64(page) * PAGE + offset
            at += 1
            offset += 1
        last[first[k]] = page


@njit(cache=True)  # threads that only read own lists for a while: two of them must not count at once
def retain_lists(first: Ints, owners: Ints) -> None:
    """One owner more for each list."""
    for k in range(len(first)):
        if first[k] != NONE:
            owners[first[k]] += 1


@njit(cache=True)
def release_lists(first: Ints, following: Ints, owners: Ints, free: Ints, n_free: int) -> int:
    """One owner less for each list; pages without any go onto the stack, whose new height is returned."""
    for k in range(len(first)):
        page = first[k]
        if page == NONE:
            continue
        owners[page] -= 1
        if owners[page] == 0:
            while page != NONE:
                free[n_free] = page
                n_free += 1
                page = following[page]
    return n_free
