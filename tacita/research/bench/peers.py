"""A default run beside implicit's ALS, each in a process of its own: seconds, processor time, memory, NDCG@10.

ALS gets the split, the validation items and the ranking of the run. It is tuned on validation over `SETTINGS`, and
trained again with the best of them on all that a device knows at the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Floats, Ints
from tacita.federation.evaluation import build_test_block, select_validation_items
from tacita.metrics import Evaluation, ScoreUsers
from tacita.research.bench.timing import Report, describe_machine
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.central_training import evaluate_scorer
from tacita.runs.controls import build_choice_matrix
from tacita.runs.run_folder import read_config

ITERATIONS = 15
METRIC = "ndcg@10"


@dataclass(frozen=True)
class AlsSettings:
    """Settings of implicit's AlternatingLeastSquares."""

    factors: int
    alpha: float
    regularization: float = 0.01

    def describe(self) -> str:
        return f"{self.factors} factors, alpha {self.alpha:g}, regularization {self.regularization:g}"


SETTINGS = (
    AlsSettings(32, 10.0),
    AlsSettings(64, 1.0),
    AlsSettings(64, 10.0),
    AlsSettings(64, 40.0),
    AlsSettings(128, 1.0),
    AlsSettings(128, 10.0),
    AlsSettings(128, 40.0),
    AlsSettings(256, 10.0),
)


def bench_peers(data: str, threads: int, data_dir: Path | None) -> Report:
    """Train as `tacita train --data DATA` does, then tune and train ALS on the same split."""
    _require_implicit()
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        options = ["--threads", str(threads)]
        if data_dir is not None:
            options += ["--data-dir", str(data_dir)]
        train = ["-m", "tacita", "train", "--data", data, "--out", str(run_folder), "--quiet", *options]
        ours = _measure_process(train)
        result = json.loads((run_folder / "result.json").read_text())
        peer = _measure_process([__file__, str(run_folder), str(threads), str(data_dir or "")])
        scores = json.loads(peer.output)
        return {
            "data": data,
            "model": _name_model(result["config"]["backbone"]),
            "seconds": ours.seconds,
            "cpu_seconds": ours.cpu_seconds,
            "gigabytes": ours.gigabytes,
            "ndcg@10": result["mean"]["ndcg@10"],
            "als": scores["settings"],
            "als_tuning_seconds": peer.seconds,
            "als_seconds": scores["seconds"],
            "als_cpu_seconds": peer.cpu_seconds,
            "als_gigabytes": peer.gigabytes,
            "als_ndcg@10": scores["ndcg"],
            "als_valid": scores["valid"],
            "machine": describe_machine(),
        }


@dataclass(frozen=True)
class ProcessUsage:
    """What a process took."""

    seconds: float
    cpu_seconds: float
    gigabytes: float
    output: str


def _measure_process(arguments: list[str]) -> ProcessUsage:
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise TacitaError("a process of the comparison failed; its message stands above.")
    seconds = time.perf_counter() - began
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return ProcessUsage(seconds, cpu_seconds, usage.ru_maxrss / 1e6, output)


def _name_model(backbone: dict[str, Any]) -> str:
    """The name of a tally model, and how it solves its sums."""
    return f"{backbone['name']}, {backbone.get('solve', 'trained')}"


def _require_implicit() -> None:
    try:
        import implicit.als  # noqa: F401
    except ImportError:
        raise TacitaError("the comparison needs implicit: pip install 'tacita[peers]'.") from None


# in the process of ALS


def tune_als(federation: Federation) -> dict[str, Any]:
    """Validate every setting, and test the best one."""
    block = federation.stream.blocks[0]
    validators = replace(block, valid=select_validation_items(federation, block))
    best_valid = -1.0
    best = SETTINGS[0]
    for settings in SETTINGS:
        scorer = train_als(settings, block)
        valid = _compute_mean_ndcg(evaluate_scorer(federation, validators, scorer, "valid"))
        print(f"ALS, {settings.describe()}: validation {valid:.4f}", file=sys.stderr)
        if valid > best_valid:
            best_valid = valid
            best = settings
    began = time.perf_counter()
    scorer = train_als(best, build_test_block(federation, block))
    seconds = time.perf_counter() - began
    ndcg = _compute_mean_ndcg(evaluate_scorer(federation, block, scorer))
    return {"settings": best.describe(), "valid": best_valid, "ndcg": ndcg, "seconds": seconds}


def train_als(settings: AlsSettings, block: Block) -> ScoreUsers:
    from implicit.als import AlternatingLeastSquares

    chosen = build_choice_matrix(block.train, block.n_items)
    model = AlternatingLeastSquares(
        factors=settings.factors,
        alpha=settings.alpha,
        regularization=settings.regularization,
        iterations=ITERATIONS,
        random_state=1,
    )
    model.fit(scipy.sparse.csr_matrix(chosen.astype(np.float32)), show_progress=False)

    def score_users(users: Ints) -> Floats:
        scores = model.user_factors[users] @ model.item_factors.T
        return np.asarray(scores, np.float32)

    return score_users


def _compute_mean_ndcg(evaluation: Evaluation) -> float:
    return evaluation.compute_means()[METRIC]


def main() -> None:
    run_folder, threads, data_dir = sys.argv[1:]
    config: RunConfig = read_config(Path(run_folder))
    machine = Machine(int(threads), data_dir=Path(data_dir) if data_dir else None)
    federation = assemble_federation(config, machine)
    print(json.dumps(tune_als(federation)))


if __name__ == "__main__":
    main()
