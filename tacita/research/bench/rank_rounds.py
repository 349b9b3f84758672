"""Rounds of one run on several ranks beside one process with as many threads, and with one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.federation.ranks.sharded_devices import ShardedDevices
from tacita.federation.rounds import Progress, begin_block, make_initial_progress, run_round
from tacita.kernels.threads import limit_library_threads, set_threads
from tacita.research.bench.harness import make_scale_federation
from tacita.research.bench.timing import Report, Times, describe_machine, find_side_medians, round_scaled
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.ranks import share_out

SINGLE_RANK = "one_rank_one_thread"
THREADS = "one_rank_all_threads"
RANKS = "ranks"
EXCHANGED_SIZES = (
    (3_000, 1_000),
    (30_000, 1_000),
    (20_000, 5_000),
    (100_000, 5_000),
    (200_000, 1_000),
    (150_000, 5_000),
)
"""Items and participants of the rounds whose exchange a cost model is made of."""


@dataclass(frozen=True)
class RankBenchSpec:
    """What every rank makes the same federation of."""

    data: str
    backbone: str
    users: int  # of synthetic people; 0: the dataset
    participants: int = 10_000
    items: int = 100_000  # of synthetic people


def make_bench_federation(spec: RankBenchSpec, machine: Machine) -> Federation:
    """Whole numbers are summed, so that all sides have the same bits."""
    if spec.users:
        federation = make_scale_federation(spec.users, spec.items, 20, spec.participants)
        train = federation.config.train.model_copy(update={"aggregator": "ideal"})
        config = federation.config.model_copy(update={"train": train})
        return replace(federation, config=config)
    config = RunConfig(
        data=spec.data,
        backbone={"name": spec.backbone},
        split=SplitConfig(kind="random"),
        train=TrainConfig(aggregator="ideal"),
        evaluate=EvaluateConfig(controls=False),
    )
    return assemble_federation(config, machine)


@dataclass
class _Side:
    """One way to play the rounds of a run."""

    federation: Federation
    progress: Progress
    threads: int

    def play_round(self) -> None:
        set_threads(self.threads)
        with limit_library_threads(self.threads):
            self.progress.server, _ = run_round(self.federation, self.progress.server, self.progress.devices)


def bench_ranks(spec: RankBenchSpec, machine: Machine, threads: int, repeats: int) -> Report:
    """Rounds in turns; `machine`: with ranks of one thread each; `threads`: of the one process that has several."""
    federation = make_bench_federation(spec, machine)
    sides = {
        SINGLE_RANK: _open_side(federation, make_initial_progress(federation), 1),
        THREADS: _open_side(federation, make_initial_progress(federation), threads),
        RANKS: _open_side(federation, share_out(federation, make_initial_progress(federation), machine), 1),
    }
    for side in sides.values():
        side.play_round()
    times: Times = {name: [] for name in sides}
    processor: Times = {name: [] for name in sides}
    overheads = []
    for _ in range(repeats):
        for name, side in sides.items():
            wall_seconds, processor_seconds = _time_work(side.play_round)
            times[name].append(wall_seconds)
            processor[name].append(processor_seconds)
        devices = sides[RANKS].progress.devices
        assert isinstance(devices, ShardedDevices)
        overheads.append(devices.exchange_overhead)
    assert machine.ranks is not None
    machine.ranks.close()
    medians = find_side_medians(times)
    tables = [side.progress.server.items.tobytes() for side in sides.values()]
    report: Report = {
        "bench": "ranks",
        "data": federation.stream.name,
        "users": federation.stream.blocks[0].n_users,
        "items": federation.stream.blocks[0].n_items,
        "backbone": federation.backbone.name,
        "ranks": machine.ranks.summary.ranks,
        "threads_of_one_process": threads,
    }
    for name, seconds in medians.items():
        report[f"{name}_ms"] = round(1000 * seconds, 2)
    processor_medians = find_side_medians(processor)
    for name, seconds in processor_medians.items():  # of rank 0 alone, where there are several
        report[f"{name}_cpu_ms"] = round(1000 * seconds, 2)
    report["cpu_of_one_thread_over_rank_0"] = round(processor_medians[SINGLE_RANK] / processor_medians[RANKS], 2)
    report["times_as_fast_as_one_thread"] = round(medians[SINGLE_RANK] / medians[RANKS], 2)
    report["times_as_fast_as_all_threads"] = round(medians[THREADS] / medians[RANKS], 2)
    report["exchange_overhead_ms"] = round(1000 * sorted(overheads)[len(overheads) // 2], 2)
    report["same_numbers"] = tables[0] == tables[1] == tables[2]
    for name, values in times.items():
        report[f"{name}_ms_all"] = round_scaled(values, 2, 1000)
    report["machine"] = describe_machine()
    return report


def measure_exchange(spec: RankBenchSpec, machine: Machine, repeats: int) -> float:
    """Seconds of a round in which no rank computes, the middle one of several."""
    federation = make_bench_federation(spec, machine)
    side = _open_side(federation, share_out(federation, make_initial_progress(federation), machine), 1)
    side.play_round()
    overheads = []
    for _ in range(repeats):
        side.play_round()
        devices = side.progress.devices
        assert isinstance(devices, ShardedDevices)
        overheads.append(devices.exchange_overhead)
    return sorted(overheads)[len(overheads) // 2]


def _open_side(federation: Federation, progress: Progress, threads: int) -> _Side:
    begin_block(federation, progress, 0)
    return _Side(federation, progress, threads)


def _time_work(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall, and of this process's processors, which other work on the machine changes little."""
    began = time.perf_counter()
    processor_began = time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - processor_began
