"""Speed and memory in one run, as ratios: the fast path against the fair naive loop, and growth with users."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import ParticipationConfig, RunConfig, TrainConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Floats, Ints, Ragged
from tacita.federation.evaluation import TrainedState, build_mask, build_rules, evaluate_devices
from tacita.federation.rounds import Progress, begin_block, run_round, start_run
from tacita.kernels.threads import threads_in_use
from tacita.metrics import Evaluation
from tacita.models import backbone_class
from tacita.models.scorer import Scorer
from tacita.round.plan import Federation


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "threads": threads_in_use(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def _median_seconds(work: Callable[[], object], repeats: int) -> tuple[float, list[float]]:
    """Median wall clock of `repeats` calls after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times), times


def bench_rounds(fed: Federation, repeats: int = 5) -> dict[str, Any]:
    """One round of block 0, naive and fast, both with sampling and averaging."""
    if fed.learner.name != "rows" or fed.backbone.reads_context or fed.backbone.shared():
        raise TacitaError(f"backbone '{fed.backbone.name}' has no naive loop to compare with; use mf, ncf or pfedrec.")
    progress = start_run(fed)
    begin_block(fed, progress, 0)

    def fast() -> None:
        progress.server, _ = run_round(fed, progress.server, progress.devices)

    fast_median, fast_times = _median_seconds(fast, repeats)
    naive = NaiveLoop(fed, progress)
    naive_median, naive_times = _median_seconds(naive.run_round, repeats)
    return {
        "bench": "rounds",
        "data": fed.stream.name,
        "backbone": fed.backbone.name,
        "clients": len(progress.local_devices.current_membership(fed, progress.server).active),
        "positives": len(fed.stream.blocks[0].train.ids),
        "dim": fed.backbone.item_width,
        "negatives": fed.config.train.negatives,
        "batch_size": fed.config.train.batch_size,
        "fast_ms": round(1000 * fast_median, 3),
        "naive_ms": round(1000 * naive_median, 3),
        "ratio": round(naive_median / fast_median, 1),
        "fast_ms_all": [round(1000 * t, 3) for t in fast_times],
        "naive_ms_all": [round(1000 * t, 3) for t in naive_times],
        "machine": describe_machine(),
    }


_ROUND_SCRIPT = """
import hashlib, inspect, sys, time
from pathlib import Path
try:
    from tacita.core.config import RunConfig
    from tacita.federation.rounds import begin_block, run_round
    try:
        from tacita.federation.rounds import start_run
        from tacita.runs.assembly import Machine, assemble
    except ImportError:  # before both were renamed
        from tacita.federation.rounds import start as start_run
        from tacita.lab.assembling import Machine, assemble
except ImportError:  # before there were rooms
    from tacita.config import RunConfig
    from tacita.rounds import begin_block, run_round, start as start_run
    from tacita.runs import Machine, assemble
data, backbone, threads, folder = sys.argv[1:]
machine = Machine(int(threads), data_dir=Path(folder) if folder else None)
fed = assemble(RunConfig(data=data, backbone={"name": backbone}), machine)
progress = start_run(fed)
begin_block(fed, progress, 0)
of_values = "devices" in inspect.signature(run_round).parameters
def play():
    if of_values:
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    else:
        run_round(fed, progress)
play()
print("ready", flush=True)
for line in sys.stdin:
    began, worked = time.perf_counter(), time.process_time()
    play()
    took = time.perf_counter() - began, time.process_time() - worked
    print("took", *took, hashlib.sha256(progress.server.items.tobytes()).hexdigest(), flush=True)
"""
"""Times single rounds when told to. Runs in checkouts of any age, so it uses only what all of them have."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """What `compare_rounds` runs on both sides."""

    data: str = "ml-100k"
    backbone: str = "mf"
    threads: int = 0
    data_dir: Path | None = None


class _Checkout:
    """A process that times rounds with one checkout's package."""

    def __init__(self, root: Path, what: BenchmarkSpec) -> None:
        if not (root / "tacita" / "__init__.py").is_file():
            raise TacitaError(f"'{root}' holds no tacita/__init__.py; name a checkout of tacita.")
        self.root = root
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe that nobody reads could fill up)
        words = [what.data, what.backbone, str(what.threads), str(what.data_dir.resolve()) if what.data_dir else ""]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ROUND_SCRIPT, *words],
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
        why = (self.errors.read().strip().splitlines() or ["it ended without a word"])[-1]
        raise TacitaError(f"the rounds of '{self.root}' cannot be timed: {why}")

    def time_round(self) -> tuple[float, float, str]:
        """Wall clock and processor time of one round in ms, and a digest of the item table after it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last words say why
        wall, cpu, table = self._read_reply("took")
        return 1000 * float(wall), 1000 * float(cpu), table

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def compare_rounds(old: Path, what: BenchmarkSpec, repeats: int = 5) -> dict[str, Any]:
    """Rounds of another checkout and of this one, in turns; lower quartiles, which other work disturbs least."""
    sides: dict[str, _Checkout] = {}
    took: dict[str, list[tuple[float, float, str]]] = {"old": [], "new": []}
    try:
        for side, root in (("old", old), ("new", Path(__file__).parents[3])):
            sides[side] = _Checkout(root, what)
        for _ in range(10 * repeats):
            for side, checkout in sides.items():
                took[side].append(checkout.time_round())
    finally:
        for checkout in sides.values():
            checkout.close()
    wall = {side: [one[0] for one in times] for side, times in took.items()}
    cpu = {side: [one[1] for one in times] for side, times in took.items()}
    quarter = {side: float(np.quantile(times, 0.25)) for side, times in wall.items()}
    quarter_cpu = {side: float(np.quantile(times, 0.25)) for side, times in cpu.items()}
    return {
        "bench": "rounds against another checkout",
        "data": what.data,
        "backbone": what.backbone,
        "rounds": len(wall["new"]),
        **{f"{side}_ms": round(quarter[side], 3) for side in sides},
        "ratio": round(quarter["new"] / quarter["old"], 3),
        **{f"{side}_cpu_ms": round(quarter_cpu[side], 3) for side in sides},
        "cpu_ratio": round(quarter_cpu["new"] / quarter_cpu["old"], 3),
        **{f"{side}_least_ms": round(min(wall[side]), 3) for side in sides},
        "same_numbers": [one[2] for one in took["old"]] == [one[2] for one in took["new"]],
        **{f"{side}_ms_all": [round(t, 3) for t in wall[side]] for side in sides},
        "machine": describe_machine(),
    }


class NaiveLoop:
    """The per-client loop as one would first write it, without avoidable waste.

    Per client: a fresh torch module with its own copy of the item table, vectorised negatives, a TensorDataset
    behind a DataLoader, torch SGD with one rate per group; then the mean of all tables.
    """

    def __init__(self, fed: Federation, progress: Progress) -> None:
        import torch

        self.federation = fed
        self.torch = torch
        self.items = torch.from_numpy(progress.server.items.copy())
        self.private = progress.clients.private.copy()
        self.rng = np.random.default_rng(fed.config.seed)
        block = fed.stream.blocks[0]
        self.users = [(u, block.train.row(int(u))) for u in np.flatnonzero(block.train.counts() > 0)]
        self.n_items = block.n_items

    def _draw_samples(self, positives: Ints) -> tuple[Ints, Floats]:
        wanted = self.federation.config.train.negatives * len(positives)
        pool = self.rng.integers(0, self.n_items, 2 * wanted + 16)
        negatives = pool[~np.isin(pool, positives)][:wanted]
        item = np.concatenate([positives, negatives])
        label = np.concatenate([np.ones(len(positives)), np.zeros(len(negatives))])
        return item.astype(np.int32), label.astype(np.float32)

    def run_round(self) -> None:
        torch, backbone, plan = self.torch, self.federation.scorer, self.federation.config.train
        summed = torch.zeros_like(self.items)
        rates = backbone.rates(self.n_items)
        for user, positives in self.users:
            model = _build_client_module(torch, backbone, self.items, self.private[user])
            item, label = self._draw_samples(positives)
            data = torch.utils.data.TensorDataset(torch.from_numpy(item).long(), torch.from_numpy(label))
            loader = torch.utils.data.DataLoader(data, batch_size=plan.batch_size, shuffle=True)
            optimisers = [
                torch.optim.SGD(
                    [
                        {"params": [p], "lr": rates[name]}
                        for name, p in model.groups.items()
                        if _is_trained(name, moving)
                    ],
                    lr=0.1,
                )
                for moving in backbone.phases
            ]
            loss_of = torch.nn.BCEWithLogitsLoss()
            for batch_item, batch_label in loader:
                for optimiser in optimisers:
                    optimiser.zero_grad()
                    loss_of(model(batch_item), batch_label).backward()
                    optimiser.step()
            summed += model.table.weight.detach()
            flat = [model.groups[name].detach().reshape(-1) for name in backbone.layout]
            self.private[user] = torch.cat(flat).numpy()
        self.items = summed / len(self.users)


def _is_trained(name: str, moving: tuple[str, ...]) -> bool:
    return ("rows" if name == "rows" else "private") in moving


def _build_client_module(torch: Any, backbone: Scorer, items: Any, private: Floats) -> Any:
    class Client(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding.from_pretrained(items.clone(), freeze=False)
            named = backbone.named(torch.from_numpy(private[None].copy()))
            self.own = torch.nn.ParameterDict({name: torch.nn.Parameter(v.clone()) for name, v in named.items()})
            self.groups = {**self.own, "rows": self.table.weight}

        def forward(self, item: Any) -> Any:
            n = len(item)
            own = {name: v.expand(n, -1) for name, v in self.own.items()}
            return backbone.score(own, {}, self.table(item))

    return Client()


def bench_evaluate(fed: Federation, repeats: int = 5) -> dict[str, Any]:
    """Full ranking of every user's test items under an untrained model: scoring, masking, ranking, metrics."""
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    block = fed.stream.blocks[0]
    learned, metrics = TrainedState(progress.server, progress.clients), ["ndcg", "recall", "hr"]
    found: list[Evaluation] = []

    def one() -> None:
        mask = build_mask(fed, block, "test", "block")
        rules = build_rules(fed, block, metrics, [20])
        found[:] = [evaluate_devices(fed, learned, block, "test", mask, rules)]

    median, times = _median_seconds(one, repeats)
    return {
        "bench": "evaluate",
        "data": fed.stream.name,
        "users": len(found[0].users),
        "items": block.n_items,
        "metrics": metrics,
        "seconds": round(median, 4),
        "seconds_all": [round(t, 4) for t in times],
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
) -> dict[str, Any]:
    """Training rounds with a fixed number of participants while the number of users grows."""
    rows: list[dict[str, Any]] = []
    for n_users in users:
        stream = _make_stream(n_users, items, per_user)
        rate = min(1.0, participants / n_users)
        plan = TrainConfig(participation=ParticipationConfig(kind="fraction", rate=rate))
        cls = backbone_class("mf")
        fed = Federation(cls(cls.Config()), (), RunConfig(train=plan), Draws(1), stream=stream)
        progress = start_run(fed)
        begin_block(fed, progress, 0)

        def one(fed: Federation = fed, progress: Progress = progress) -> None:
            progress.server, _ = run_round(fed, progress.server, progress.devices)
            progress.local_devices.keep_best(progress.server.round)

        median, times = _median_seconds(one, repeats)
        taking_part = min(participants, n_users)
        rows.append(
            {
                "users": n_users,
                "participants": taking_part,
                "round_ms": round(1000 * median, 2),
                "round_ms_all": [round(1000 * t, 2) for t in times],
                "us_per_participant": round(1e6 * median / taking_part, 3),
                "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
            }
        )
        if on_each:
            on_each(n_users)
    per = [row["us_per_participant"] for row in rows]
    return {
        "bench": "scale",
        "items": items,
        "interactions_per_user": per_user,
        "rows": rows,
        "spread": round(max(per) / min(per), 3),
        "peak_gb": rows[-1]["peak_gb"],
        "machine": describe_machine(),
    }


def _make_stream(n_users: int, n_items: int, per_user: int) -> BlockStream:
    """Users with per_user distinct-ish items of Zipf-like popularity, all of them for training."""
    rng = np.random.default_rng(7)
    skewed = rng.random(n_users * per_user, dtype=np.float32) ** 2
    ids = (skewed * n_items).astype(np.int32)
    ptr = np.arange(n_users + 1, dtype=np.int64) * per_user
    none = Ragged.empty(n_users)
    block = Block(0, n_users, n_items, Ragged(ptr, ids), none, none, np.ones(n_users, bool), n_users * per_user)
    user_keys = rng.integers(0, 2**63, n_users).astype(np.uint64)
    item_keys = derive_keys(str(i) for i in range(n_items))
    return BlockStream("synthetic", (block,), (), (), user_keys, item_keys, {}, "")
