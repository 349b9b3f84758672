"""Speed and memory in one run, as ratios: the fast path against the fair naive loop, and growth with users."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tacita.core.config import ParticipationConfig, RunConfig, TrainConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Ragged
from tacita.federation.evaluation import TrainedState, build_evaluation_rules, build_ranking_mask, evaluate_devices
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.metrics import Evaluation
from tacita.models import find_backbone_class
from tacita.research.bench.round_runner import RoundRunner
from tacita.research.bench.timing import (
    Figures,
    Report,
    Times,
    describe_machine,
    divide_sides,
    measure_median_seconds,
    report_figures,
    report_repeats,
    round_scaled,
)
from tacita.round.plan import Federation


def bench_rounds(federation: Federation, repeats: int = 5) -> Report:
    """One round of block 0, naive and fast, both with sampling and averaging."""
    from tacita.research.bench.naive_loop import NaiveLoop  # torch would count in the memory of other benchmarks

    _refuse_without_naive_loop(federation)
    runner = RoundRunner(federation)
    progress = runner.progress
    fast_median, fast_times = measure_median_seconds(runner.play_round, repeats)
    naive = NaiveLoop(federation, progress)
    naive_median, naive_times = measure_median_seconds(naive.run_round, repeats)
    membership = progress.local_devices.group_active_clients(federation, progress.server)
    return {
        "bench": "rounds",
        "data": federation.stream.name,
        "backbone": federation.backbone.name,
        "clients": len(membership.active),
        "positives": len(federation.stream.blocks[0].train.ids),
        "dim": federation.backbone.item_width,
        "negatives": federation.config.train.negatives,
        "batch_size": federation.config.train.batch_size,
        "fast_ms": round(1000 * fast_median, 3),
        "naive_ms": round(1000 * naive_median, 3),
        "ratio": round(naive_median / fast_median, 1),
        "fast_ms_all": round_scaled(fast_times, 3, 1000),
        "naive_ms_all": round_scaled(naive_times, 3, 1000),
        "machine": describe_machine(),
    }


def _refuse_without_naive_loop(federation: Federation) -> None:
    """Refuse models that the naive loop cannot train."""
    backbone = federation.backbone
    trains_rows_alone = federation.learner.name == "rows" and not backbone.list_head_shapes()
    if not trains_rows_alone or backbone.reads_context:
        raise TacitaError(f"backbone '{backbone.name}' has no naive loop to compare with; use mf, ncf or pfedrec.")


_ROUND_SCRIPT = """
import hashlib, inspect, sys, time
from pathlib import Path
try:
    from tacita.core.config import RunConfig
    from tacita.federation.rounds import begin_block, make_initial_progress, run_round
    from tacita.runs.assembly import Machine, assemble_federation
except ImportError:
    try:  # after version 0.1.0
        from tacita.core.config import RunConfig
        from tacita.federation.rounds import begin_block, run_round, start_run as make_initial_progress
        from tacita.runs.assembly import Machine, assemble as assemble_federation
    except ImportError:
        try:  # up to version 0.1.0
            from tacita.core.config import RunConfig
            from tacita.federation.rounds import begin_block, run_round, start as make_initial_progress
            from tacita.lab.assembling import Machine, assemble as assemble_federation
        except ImportError:  # before there were rooms
            from tacita.config import RunConfig
            from tacita.rounds import begin_block, run_round, start as make_initial_progress
            from tacita.runs import Machine, assemble as assemble_federation
data, backbone, threads, folder = sys.argv[1:]
machine = Machine(int(threads), data_dir=Path(folder) if folder else None)
federation = assemble_federation(RunConfig(data=data, backbone={"name": backbone}), machine)
progress = make_initial_progress(federation)
begin_block(federation, progress, 0)
takes_devices = "devices" in inspect.signature(run_round).parameters
def play():
    if takes_devices:
        progress.server, _ = run_round(federation, progress.server, progress.devices)
    else:
        run_round(federation, progress)
play()
print("ready", flush=True)
for line in sys.stdin:
    began, worked = time.perf_counter(), time.process_time()
    play()
    took = time.perf_counter() - began, time.process_time() - worked
    print("took", *took, hashlib.sha256(progress.server.items.tobytes()).hexdigest(), flush=True)
"""
"""Times single rounds on request. It runs in checkouts of any age, so it uses only what all of them have."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """What `compare_rounds` runs on both sides."""

    data: str = "ml-100k"
    backbone: str = "mf"
    threads: int = 0
    data_dir: Path | None = None


@dataclass(frozen=True)
class RoundTime:
    """One timed round."""

    wall: float  # ms
    processor: float  # ms
    digest: str  # of the item table after it


SideRounds = dict[str, list[RoundTime]]
"""Side of a comparison -> its rounds."""


class _Checkout:
    """A process that times rounds with one checkout's package."""

    def __init__(self, root: Path, spec: BenchmarkSpec) -> None:
        if not (root / "tacita" / "__init__.py").is_file():
            raise TacitaError(f"'{root}' holds no tacita/__init__.py; name a checkout of tacita.")
        self.root = root
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe that nobody reads could fill up)
        data_dir = str(spec.data_dir.resolve()) if spec.data_dir else ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ROUND_SCRIPT, spec.data, spec.backbone, str(spec.threads), data_dir],
            env={**os.environ, "PYTHONPATH": str(root.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        try:
            self._read_reply("ready")
        except TacitaError:
            self.close()
            raise

    def _read_reply(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):  # a dataset may print its terms first
                return line.split()[1:]
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        reason = lines[-1] if lines else "it ended without a word"
        raise TacitaError(f"the rounds of '{self.root}' cannot be timed: {reason}")

    def time_round(self) -> RoundTime:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last words say why
        wall, processor, digest = self._read_reply("took")
        wall_ms = 1000 * float(wall)
        processor_ms = 1000 * float(processor)
        return RoundTime(wall_ms, processor_ms, digest)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def compare_rounds(old: Path, spec: BenchmarkSpec, repeats: int = 5) -> Report:
    """Rounds of another checkout and of this one, in turns; lower quartiles, which other work disturbs least."""
    roots = {"old": old, "new": Path(__file__).parents[3]}
    rounds = _time_checkouts(roots, spec, 10 * repeats)
    wall: Times = {}
    processor: Times = {}
    digests = {}
    for side, times in rounds.items():
        wall[side] = [timed.wall for timed in times]
        processor[side] = [timed.processor for timed in times]
        digests[side] = [timed.digest for timed in times]
    wall_quartiles = _find_lower_quartiles(wall)
    processor_quartiles = _find_lower_quartiles(processor)
    least = {side: min(times) for side, times in wall.items()}
    report: Report = {
        "bench": "rounds against another checkout",
        "data": spec.data,
        "backbone": spec.backbone,
        "rounds": len(rounds["new"]),
    }
    report |= report_figures(wall_quartiles, "ms", 3)
    report["ratio"] = divide_sides(wall_quartiles, "new", "old", 3)
    report |= report_figures(processor_quartiles, "cpu_ms", 3)
    report["cpu_ratio"] = divide_sides(processor_quartiles, "new", "old", 3)
    report |= report_figures(least, "least_ms", 3)
    report["same_numbers"] = digests["old"] == digests["new"]
    report |= report_repeats(wall, "ms", 3)
    report["machine"] = describe_machine()
    return report


def _find_lower_quartiles(times: Times) -> Figures:
    quartiles = {}
    for side, values in times.items():
        quartiles[side] = float(np.quantile(values, 0.25))
    return quartiles


def _time_checkouts(roots: dict[str, Path], spec: BenchmarkSpec, n_rounds: int) -> SideRounds:
    """So many rounds of every checkout, in turns."""
    checkouts: dict[str, _Checkout] = {}
    times: SideRounds = {side: [] for side in roots}
    try:
        for side, root in roots.items():
            checkouts[side] = _Checkout(root, spec)
        for _ in range(n_rounds):
            for side, checkout in checkouts.items():
                times[side].append(checkout.time_round())
    finally:
        for checkout in checkouts.values():
            checkout.close()
    return times


def bench_evaluate(federation: Federation, repeats: int = 5) -> Report:
    """Full ranking of every user's test items under an untrained model: scoring, masking, ranking, metrics."""
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    block = federation.stream.blocks[0]
    state = TrainedState(progress.server, progress.clients)
    metrics = ["ndcg", "recall", "hr"]
    evaluations: list[Evaluation] = []

    def evaluate_all() -> None:
        mask = build_ranking_mask(federation, block, "test", "block")
        rules = build_evaluation_rules(federation, block, metrics, [20])
        evaluation = evaluate_devices(federation, state, block, "test", mask, rules)
        evaluations.append(evaluation)

    median, times = measure_median_seconds(evaluate_all, repeats)
    return {
        "bench": "evaluate",
        "data": federation.stream.name,
        "users": len(evaluations[-1].users),
        "items": block.n_items,
        "metrics": metrics,
        "seconds": round(median, 4),
        "seconds_all": round_scaled(times, 4),
        "machine": describe_machine(),
    }


SCALE_USERS = (10_000, 100_000, 1_000_000)


def bench_scale(
    users: tuple[int, ...] = SCALE_USERS,
    items: int = 100_000,
    per_user: int = 20,
    participants: int = 10_000,
    repeats: int = 5,
    on_each: Callable[[int], None] | None = None,
) -> Report:
    """Training rounds with a fixed number of participants while the number of users grows."""
    rows = []
    for n_users in users:
        federation = make_scale_federation(n_users, items, per_user, participants)
        rows.append(_time_size(federation, min(participants, n_users), repeats))
        if on_each:
            on_each(n_users)
    microseconds = [row["us_per_participant"] for row in rows]
    return {
        "bench": "scale",
        "items": items,
        "interactions_per_user": per_user,
        "rows": rows,
        "spread": round(max(microseconds) / min(microseconds), 3),
        "peak_gb": rows[-1]["peak_gb"],
        "machine": describe_machine(),
    }


def make_scale_federation(
    n_users: int, n_items: int, per_user: int, participants: int, dim: int | None = None
) -> Federation:
    """Synthetic users who train MF, so many of them in a round."""
    stream = _make_stream(n_users, n_items, per_user)
    participation = ParticipationConfig(kind="fraction", rate=min(participants, n_users) / n_users)
    config = RunConfig(train=TrainConfig(participation=participation))
    cls = find_backbone_class("mf")
    options = {} if dim is None else {"dim": dim}
    backbone = cls(cls.Config.model_validate(options))
    return Federation(backbone, (), config, Draws(1), stream=stream)


def _time_size(federation: Federation, participants: int, repeats: int) -> Report:
    """Rounds with so many participants."""
    n_users = federation.stream.blocks[0].n_users
    runner = RoundRunner(federation)
    progress = runner.progress

    def play_round() -> None:
        runner.play_round()
        progress.local_devices.keep_best_round(progress.server.round)

    median, times = measure_median_seconds(play_round, repeats)
    peak_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "users": n_users,
        "participants": participants,
        "round_ms": round(1000 * median, 2),
        "round_ms_all": round_scaled(times, 2, 1000),
        "us_per_participant": round(1e6 * median / participants, 3),
        "peak_gb": round(peak_kilobytes / 2**20, 3),
    }


def _make_stream(n_users: int, n_items: int, per_user: int) -> BlockStream:
    """Users with per_user distinct-ish items of Zipf-like popularity, all of them for training."""
    rng = np.random.default_rng(7)
    n_rows = n_users * per_user
    skewed = rng.random(n_rows, dtype=np.float32) ** 2
    ids = (skewed * n_items).astype(np.int32)
    ptr = np.arange(n_users + 1, dtype=np.int64) * per_user
    no_items = Ragged.empty(n_users)
    block = Block(
        0,
        n_users,
        n_items,
        train=Ragged(ptr, ids),
        valid=no_items,
        test=no_items,
        new_users=np.ones(n_users, bool),
        n_rows=n_rows,
    )
    user_numbers = rng.integers(0, 2**63, n_users)
    user_keys = user_numbers.astype(np.uint64)
    item_keys = derive_keys(str(item) for item in range(n_items))
    return BlockStream("synthetic", (block,), (), (), user_keys, item_keys, {}, "")
