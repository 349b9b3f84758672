"""What a promise costs in time: the same work with noise, clip and ledger, and without, in turns in one run."""

from __future__ import annotations

import statistics
import time

from tacita.core.errors import TacitaError
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.research.bench.round_runner import RoundRunner
from tacita.research.bench.timing import (
    Report,
    Times,
    describe_machine,
    divide_sides,
    empty_times,
    find_side_medians,
    report_figures,
    report_repeats,
    round_scaled,
    time_in_turns,
)
from tacita.round.learner import find_ledger
from tacita.round.plan import Federation
from tacita.round.question import Question


def summarise_times(wall: Times, processor: Times) -> Report:
    """Medians in milliseconds, and the ratios of the private side to the plain one."""
    wall_medians = find_side_medians(wall)
    processor_medians = find_side_medians(processor)
    report = report_figures(wall_medians, "ms", 2, 1000)
    report |= report_figures(processor_medians, "cpu_ms", 2, 1000)
    report["ratio"] = divide_sides(wall_medians, "private", "plain", 3)
    report["cpu_ratio"] = divide_sides(processor_medians, "private", "plain", 3)
    report |= report_repeats(wall, "ms", 2, 1000)
    return report


def bench_noise(plain: Federation, private: Federation, repeats: int = 15) -> Report:
    """Rounds of block 0 without and with noise, after two that compile and fill buffers."""
    if not any(find_ledger(part) for part in private.parts):
        raise TacitaError("rounds of this method have no noise that is accounted for; use --method dpps or dp-fedavg.")
    plain_runner = RoundRunner(plain, warm_up=2)
    private_runner = RoundRunner(private, warm_up=2)
    sides = {"plain": plain_runner.play_round, "private": private_runner.play_round}
    wall, processor = time_in_turns(sides, repeats)
    return {
        "bench": "noise",
        **_describe_runs(plain, private),
        **summarise_times(wall, processor),
        "machine": describe_machine(),
    }


def bench_exchange(plain: Federation, private: Federation, repeats: int = 5) -> Report:
    """All questions of a first block and the answers of people, without and with noise; solving is left out."""
    sides = {"plain": plain, "private": private}
    for federation in sides.values():
        if federation.learner.name != "statistic":
            raise TacitaError("an exchange is what a model learns from sums by; use backbone 'tally'.")
    wall = empty_times(sides)
    processor = empty_times(sides)
    for turn in range(repeats + 1):
        for name, federation in sides.items():
            wall_seconds, processor_seconds = _time_exchange(federation)
            if turn:  # the first compiles
                wall[name].append(wall_seconds)
                processor[name].append(processor_seconds)
    return {
        "bench": "exchange",
        **_describe_runs(plain, private),
        **summarise_times(wall, processor),
        "machine": describe_machine(),
    }


def _time_exchange(federation: Federation) -> tuple[float, float]:
    """Wall clock and processor time that the questions of a first block take, from the question to the sum."""
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    server = progress.server
    wall = 0.0
    processor = 0.0
    for question in federation.learner.questions(server):
        broadcast = federation.broadcast_serving(server)
        wall_began = time.perf_counter()
        processor_began = time.process_time()
        reply = progress.devices.exchange(federation, server, broadcast, Question(question))
        wall += time.perf_counter() - wall_began
        processor += time.process_time() - processor_began
        server = federation.learner.learn_from_total(server, reply.total, question, reply.expected)
    return wall, processor


def bench_epoch(federation: Federation, repeats: int = 3) -> Report:
    """A round with one local epoch of everybody, after one that compiles: seconds, not a ratio."""
    runner = RoundRunner(federation, warm_up=2)
    wall, processor = time_in_turns({"round": runner.play_round}, repeats)
    return {
        "bench": "epoch",
        "data": federation.stream.name,
        "backbone": federation.backbone.name,
        "people": federation.stream.n_users,
        "silos": federation.config.train.silos,
        "positives": len(federation.stream.blocks[0].train.ids),
        "round_s": round(statistics.median(wall["round"]), 3),
        "round_cpu_s": round(statistics.median(processor["round"]), 3),
        "round_s_all": round_scaled(wall["round"], 3),
        "machine": describe_machine(),
    }


def _describe_runs(plain: Federation, private: Federation) -> Report:
    return {
        "data": plain.stream.name,
        "backbone": plain.backbone.name,
        "methods": [plain.config.method, private.config.method],
        "people": plain.stream.n_users,
        "items": plain.stream.n_items,
    }
