"""What a promise costs in time: the same work with noise, clip and ledger, and without, in turns in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tacita.core.errors import TacitaError
from tacita.federation.rounds import begin_block, run_round, start_run
from tacita.research.bench.harness import describe_machine
from tacita.round.learner import ledger_of
from tacita.round.plan import Federation
from tacita.round.question import Question

Times = dict[str, list[float]]


def time_in_turns(sides: dict[str, Callable[[], None]], repeats: int) -> tuple[Times, Times]:
    """Wall clock and processor time of every side, one after another, so that a busy machine slows all of them."""
    wall: Times = {name: [] for name in sides}
    busy: Times = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            began, worked = time.perf_counter(), time.process_time()
            work()
            wall[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - worked)
    return wall, busy


def summarise_times(wall: Times, busy: Times) -> dict[str, Any]:
    """Medians in milliseconds, and the ratios of the private side to the plain one."""
    middle = {name: statistics.median(times) for name, times in wall.items()}
    spent = {name: statistics.median(times) for name, times in busy.items()}
    return {
        **{f"{name}_ms": round(1000 * value, 2) for name, value in middle.items()},
        **{f"{name}_cpu_ms": round(1000 * value, 2) for name, value in spent.items()},
        "ratio": round(middle["private"] / middle["plain"], 3),
        "cpu_ratio": round(spent["private"] / spent["plain"], 3),
        **{f"{name}_ms_all": [round(1000 * t, 2) for t in times] for name, times in wall.items()},
    }


def bench_noise(plain: Federation, private: Federation, repeats: int = 15) -> dict[str, Any]:
    """Rounds of block 0 without and with noise, after two that compile and fill buffers."""
    if not any(ledger_of(part) for part in private.parts):
        raise TacitaError("rounds of this method have no noise that is accounted for; use --method dpps or dp-fedavg.")
    sides = {"plain": _prepare_rounds(plain), "private": _prepare_rounds(private)}
    return {
        "bench": "noise",
        **_describe_runs(plain, private),
        **summarise_times(*time_in_turns(sides, repeats)),
        "machine": describe_machine(),
    }


def _prepare_rounds(fed: Federation) -> Callable[[], None]:
    progress = start_run(fed)
    begin_block(fed, progress, 0)

    def play() -> None:
        progress.server, _ = run_round(fed, progress.server, progress.devices)

    play()
    play()
    return play


def bench_exchange(plain: Federation, private: Federation, repeats: int = 5) -> dict[str, Any]:
    """What people tell in a first block, all questions of it, without and with noise; solving is apart."""
    for fed in (plain, private):
        if fed.learner.name != "statistic":
            raise TacitaError("an exchange is what a model learns from sums by; use backbone 'tally'.")
    wall: Times = {"plain": [], "private": []}
    busy: Times = {"plain": [], "private": []}
    for turn in range(repeats + 1):
        for name, fed in (("plain", plain), ("private", private)):
            took, worked = _time_exchange(fed)
            if turn:  # the first compiles
                wall[name].append(took)
                busy[name].append(worked)
    return {
        "bench": "exchange",
        **_describe_runs(plain, private),
        **summarise_times(wall, busy),
        "machine": describe_machine(),
    }


def _time_exchange(fed: Federation) -> tuple[float, float]:
    """Wall clock and processor time that the questions of a first block take, from the question to the sum."""
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    server, took, worked = progress.server, 0.0, 0.0
    for question in fed.learner.questions(server):
        down = fed.broadcast_serving(server)
        began, before = time.perf_counter(), time.process_time()
        answer = progress.devices.exchange(fed, server, down, Question(question))
        took, worked = took + time.perf_counter() - began, worked + time.process_time() - before
        server = fed.learner.learn(server, answer.total, question, answer.expected)
    return took, worked


def bench_epoch(fed: Federation, repeats: int = 3) -> dict[str, Any]:
    """A round with one local epoch of everybody, after one that compiles: seconds, not a ratio."""
    wall, busy = time_in_turns({"round": _prepare_rounds(fed)}, repeats)
    return {
        "bench": "epoch",
        "data": fed.stream.name,
        "backbone": fed.backbone.name,
        "people": fed.stream.n_users,
        "silos": fed.config.train.silos,
        "positives": len(fed.stream.blocks[0].train.ids),
        "round_s": round(statistics.median(wall["round"]), 3),
        "round_cpu_s": round(statistics.median(busy["round"]), 3),
        "round_s_all": [round(t, 3) for t in wall["round"]],
        "machine": describe_machine(),
    }


def _describe_runs(plain: Federation, private: Federation) -> dict[str, Any]:
    return {
        "data": plain.stream.name,
        "backbone": plain.backbone.name,
        "methods": [plain.config.method, private.config.method],
        "people": plain.stream.n_users,
        "items": plain.stream.n_items,
    }
