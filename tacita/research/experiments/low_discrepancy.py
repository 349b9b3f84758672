"""Points that fill a cube evenly and are known beforehand: a larger budget goes on from a smaller one."""

from __future__ import annotations


def _solve_root(dimensions: int) -> float:
    """Of x^(n+1) = x + 1: multiples of its powers fill n dimensions."""
    found = 2.0
    for _ in range(100):
        found = (1 + found) ** (1 / (dimensions + 1))
    return found


ROOTS = {1: 1.618033988749895, 2: 1.324717957244746}  # as trials that are kept were made with them


def spread_points(n: int, dimensions: int) -> list[list[float]]:
    """n points in the unit interval, square or cube, as even as those of any smaller n."""
    root = ROOTS.get(dimensions) or _solve_root(dimensions)
    steps = [root ** -(d + 1) for d in range(dimensions)]
    return [[(0.5 + k * step) % 1.0 for step in steps] for k in range(1, n + 1)]
