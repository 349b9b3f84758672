"""Inverses of large positive definite matrices, and the zero-diagonal solution (EASE) that is read from them.

Symmetric matrices are C-ordered with their lower triangle, which LAPACK reads as an upper one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import scipy.linalg

from tacita.core.types import Doubles, Floats

MOST_DOUBLINGS = 30  # of a ridge; what a billion times the ridge does not make up for is no sum of histories
TILE = 1024  # columns worked on at once, so that nothing as large as the result is made twice
MAX_WHOLE = 8192
"""Larger matrices are inverted by halves: the threaded Cholesky of common BLAS builds crashes from 17,500."""


def invert_in_place(lower: Doubles) -> Doubles | None:
    """The whole inverse of a positive definite matrix, in place of its lower triangle; None: it is not."""
    if len(lower) <= MAX_WHOLE:
        return _invert_at_once(lower)
    mirror_lower(lower)
    if not _invert_by_halves(lower):
        return None
    return mirror_lower(lower)  # products leave the last bits uneven


def invert_with_doubling(add_ridge: Callable[[float], Doubles]) -> tuple[Doubles, int] | None:
    """The inverse of a lower triangle with a ridge, which doubles until there is one, and how often it doubled."""
    for doublings in range(MOST_DOUBLINGS + 1):
        factor = 2.0**doublings
        lower = add_ridge(factor)
        inverse = invert_in_place(lower)
        if inverse is not None:
            return inverse, doublings
    return None


def _invert_at_once(lower: Doubles) -> Doubles | None:
    factor, info = scipy.linalg.lapack.dpotrf(lower.T, lower=0, clean=0, overwrite_a=1)
    if info != 0:
        return None
    inverse, _ = scipy.linalg.lapack.dpotri(factor, lower=0, overwrite_c=1)
    return mirror_lower(inverse.T)


def _invert_by_halves(whole: Doubles) -> bool:
    """Invert a symmetric matrix in place: the first half, what the second is beyond it, then both together.

    Nearly all of it is products of matrices, which every BLAS does well and in any size. False: not positive definite.
    """
    n = len(whole)
    if n <= MAX_WHOLE:
        inverse = _invert_at_once(whole.copy())
        if inverse is None:
            return False
        whole[:] = inverse
        return True
    half = n // 2
    first = whole[:half, :half]
    side = whole[half:, :half]
    second = whole[half:, half:]
    if not _invert_by_halves(first):
        return False
    slope = side @ first
    second -= slope @ side.T
    if not _invert_by_halves(second):
        return False
    np.matmul(second, slope, out=side)
    first += slope.T @ side
    np.negative(side, out=side)
    whole[:half, half:] = side.T
    return True


def estimate_solve_bytes(n_inputs: int) -> float:
    """Memory that a solve over this many items takes at its peak: sums, their inverse, the halves' products."""
    return 24.0 * n_inputs**2


def estimate_available_memory() -> float:
    """Bytes that can be had now; endless where the system does not say."""
    try:
        return _read_available_memory()
    except (OSError, ValueError, IndexError):
        pass
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
        page_size = os.sysconf("SC_PAGE_SIZE")
        return float(pages * page_size)
    except (OSError, ValueError):
        return float("inf")


def _read_available_memory() -> float:
    """Linux's own word for it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                kilobytes = line.split()[1]
                return float(kilobytes) * 1024
    raise ValueError("no MemAvailable")


def mirror_lower(lower: Doubles) -> Doubles:
    """Copy the lower triangle to the upper one, in place, in tiles that fit into a cache."""
    n = len(lower)
    step = 128
    for lo in range(0, n, step):
        own = slice(lo, lo + step)
        corner = np.tril(lower[own, own])
        below = np.tril(corner, -1)
        lower[own, own] = corner + below.T
        for at in range(lo + step, n, step):
            other = slice(at, at + step)
            lower[own, other] = lower[other, own].T
    return lower


def pack_triangle(square: Doubles) -> Doubles:
    """The lower triangle of a symmetric matrix, row by row."""
    triangle, _ = scipy.linalg.lapack.dtrttp(square.T, uplo="U")
    return np.asarray(triangle)


def unpack_triangle(packed: Doubles) -> Doubles:
    """A matrix with the given lower triangle; what is above it means nothing."""
    n = int(np.sqrt(2.0 * len(packed)))
    square, _ = scipy.linalg.lapack.dtpttr(n, packed, uplo="U")
    return np.asarray(square.T)


def solve_diagonal_columns(inverse: Doubles, lo: int, hi: int) -> Doubles:
    """Columns of B = I - P / diag(P) as rows: P is symmetric, and its rows lie together."""
    diagonal = np.diag(inverse)[lo:hi, None]
    columns = inverse[lo:hi] / -diagonal
    places = np.arange(hi - lo)
    columns[places, places + lo] = 0.0
    return columns


def solve_zero_diagonal(inverse: Doubles) -> Floats:
    """B = I - P / diag(P), in single precision."""
    n = len(inverse)
    weights = np.empty((n, n), np.float32)
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        weights[:, lo:hi] = solve_diagonal_columns(inverse, lo, hi).T
    return weights
