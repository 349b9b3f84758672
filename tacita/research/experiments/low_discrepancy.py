"""Points that fill a cube evenly and are known beforehand: a larger budget goes on from a smaller one."""

from __future__ import annotations


def _solve_root(dimensions: int) -> float:
    """Of x^(n+1) = x + 1: multiples of its powers fill n dimensions."""
    root = 2.0
    exponent = 1 / (dimensions + 1)
    for _ in range(100):
        root = (1 + root) ** exponent
    return root


ROOTS = {1: 1.618033988749895, 2: 1.324717957244746}  # finished trials were made with these


def spread_points(n: int, dimensions: int) -> list[list[float]]:
    """n points in the unit interval, square or cube, as even as those of any smaller n."""
    root = ROOTS.get(dimensions) or _solve_root(dimensions)
    steps = [root**-power for power in range(1, dimensions + 1)]
    points = []
    for number in range(1, n + 1):
        point = [(0.5 + number * step) % 1.0 for step in steps]
        points.append(point)
    return points
