"""Clocks of benchmarks: how long work takes, alone or in turns, and the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tacita.kernels.threads import threads_in_use

Work = Callable[[], object]
Times = dict[str, list[float]]
"""Side of a comparison -> the seconds of each repeat."""

WallAndProcessor = tuple[Times, Times]
Sides = Mapping[str, Work]
Figures = dict[str, float]
"""Side -> seconds."""

Report = dict[str, Any]
"""What a benchmark prints."""


def describe_machine() -> Report:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "threads": threads_in_use(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def measure_median_seconds(work: Work, repeats: int) -> tuple[float, list[float]]:
    """Median wall clock of `repeats` calls after one warm-up, and all of them."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times), times


def empty_times(sides: Iterable[str]) -> Times:
    return {name: [] for name in sides}


def time_in_turns(sides: Sides, repeats: int, before_each: Work | None = None) -> WallAndProcessor:
    """Wall clock and processor time of every side, one after another, so that a busy machine slows all of them."""
    wall = empty_times(sides)
    processor = empty_times(sides)
    for _ in range(repeats):
        for name, work in sides.items():
            if before_each:
                before_each()
            wall_began = time.perf_counter()
            processor_began = time.process_time()
            work()
            wall[name].append(time.perf_counter() - wall_began)
            processor[name].append(time.process_time() - processor_began)
    return wall, processor


def find_side_medians(times: Times) -> Figures:
    medians = {}
    for name, seconds in times.items():
        medians[name] = statistics.median(seconds)
    return medians


def divide_sides(figures: Figures, side: str, by: str, digits: int) -> float:
    """How many times as long one side takes as another."""
    ratio = figures[side] / figures[by]
    return round(ratio, digits)


def round_scaled(seconds: Sequence[float], digits: int, scale: float = 1.0) -> list[float]:
    return [round(scale * value, digits) for value in seconds]


def report_figures(figures: Figures, unit: str, digits: int, scale: float = 1.0) -> Report:
    """A figure of every side, named with its unit."""
    report: Report = {}
    for name, seconds in figures.items():
        key = f"{name}_{unit}"
        report[key] = round(scale * seconds, digits)
    return report


def report_repeats(times: Times, unit: str, digits: int, scale: float = 1.0) -> Report:
    """Every repeat of every side, named with its unit."""
    report: Report = {}
    for name, seconds in times.items():
        key = f"{name}_{unit}_all"
        report[key] = round_scaled(seconds, digits, scale)
    return report
