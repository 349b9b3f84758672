"""Accuracy bands on MovieLens-100K, low and high: `make test-slow`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tacita.core.config import EvaluateConfig, RunConfig, TrainConfig
from tacita.federation.rounds import Progress, begin_block, make_initial_progress, run_remaining_blocks, run_round
from tacita.research.experiments.shared_base import adopt_base, train_base, with_parts
from tacita.runs.assembly import Machine, assemble_federation

DATA = os.environ.get("TACITA_DATA", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (Path(DATA) / "ml-100k").is_dir(), reason="TACITA_DATA holds no ml-100k"),
]


@pytest.fixture(scope="module")
def streams() -> list[Progress]:
    """Fine-tuning over the four blocks with the published settings (spec B.6), three seeds."""
    out = []
    for seed in (1, 2, 3):
        fed = assemble_federation(RunConfig(seed=seed, evaluate=EvaluateConfig(controls=False)), Machine())
        progress = make_initial_progress(fed)
        run_remaining_blocks(fed, progress, lambda report, now: None)
        out.append(progress)
    return out


def test_block_0_reaches_the_published_quality(streams: list[Progress]) -> None:
    result = np.mean([p.results[0]["ndcg@20"] for p in streams])
    assert 0.27 <= result <= 0.29


def test_replay_costs_at_most_a_second_round() -> None:
    """Block 1, MF: a round of F3CRec against a round of fine-tuning, alternating, medians."""
    config = RunConfig(train=TrainConfig(rounds=3), evaluate=EvaluateConfig(controls=False))
    fed = assemble_federation(config, Machine(threads=1))
    base = train_base(fed)
    runs = {}
    for method in ("ft", "f3crec"):
        own_values = with_parts(fed, config.model_copy(update={"method": method}))
        progress = adopt_base(own_values, base)
        begin_block(own_values, progress, 1)
        runs[method] = (own_values, progress)
    spent: dict[str, list[float]] = {"ft": [], "f3crec": []}
    for _ in range(15):
        for method, (own_values, progress) in runs.items():
            began = time.process_time()
            progress.server, _ = run_round(own_values, progress.server, progress.devices)
            spent[method].append(time.process_time() - began)
    assert np.median(spent["f3crec"][3:]) <= 2 * np.median(spent["ft"][3:])


HETREC_SHAPE = """
import resource, sys
from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.federation.rounds import run_remaining_blocks, make_initial_progress
from tacita.runs.assembly import Machine, assemble_federation
data = "synthetic:users=2113,items=6829,per_user=398,groups=20,new=0.4,drift=0.3"
config = RunConfig(data=data, method=sys.argv[1], split=SplitConfig(k_core=10), train=TrainConfig(rounds=2),
                   evaluate=EvaluateConfig(controls=False))
fed = assemble_federation(config, Machine())
run_remaining_blocks(fed, make_initial_progress(fed), lambda report, now: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("method", ["rlp2", "spp", "f3crec"])
def test_data_of_hetrecs_shape_fits_in_2_gb(method: str) -> None:
    done = subprocess.run([sys.executable, "-c", HETREC_SHAPE, method], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * 2**20  # kB


def test_fine_tuning_lies_in_the_reference_band(streams: list[Progress]) -> None:
    result = np.mean([[r["ndcg@20"] for r in p.results[1:]] for p in streams])
    assert 0.088 <= result <= 0.099
