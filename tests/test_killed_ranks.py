"""A rank is killed: the run stops with one sentence, and goes on with another number of ranks to the same numbers.

`python tests/test_killed_ranks.py 10` kills ranks at ten random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

DATA = "synthetic:users=120,items=60,per_user=14,seed=5"
SETTINGS = ["--data", DATA, "--backbone", "mf", "--method", "f3crec", "--rounds", "12", "--no-controls"]
RUN = [*SETTINGS, "--set", "train.aggregator=ideal", "--set", "train.patience=50"]
FILES = ("server.safetensors", "clients.safetensors")
LIMIT = 120.0  # seconds until a run whose rank was killed has stopped


def start(out: Path, arguments: list[str], n_ranks: int) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "helpers.lead_ranks", "train", *arguments, "--out", str(out), "--quiet"]
    if n_ranks > 1:
        command += ["--ranks", str(n_ranks)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def list_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


def count_rounds(out: Path) -> int:
    events = out / "events.jsonl"
    return len(events.read_text(encoding="utf-8").splitlines()) if events.is_file() else 0


def kill_rank(leader: subprocess.Popen[str], rank: int) -> None:
    pid = leader.pid if rank == 0 else list_children(leader.pid)[rank - 1]
    os.kill(pid, signal.SIGKILL)


def wait_for_rounds(leader: subprocess.Popen[str], out: Path, rounds: int) -> None:
    while count_rounds(out) < rounds and leader.poll() is None:
        time.sleep(0.005)


def kill_and_resume(out: Path, rank: int, ranks: tuple[int, int], rounds: int) -> None:
    """Kill a rank of the first number of ranks after some rounds; go on with the second number."""
    leader = start(out, RUN, ranks[0])
    wait_for_rounds(leader, out, rounds)
    children = list_children(leader.pid)
    kill_rank(leader, rank)
    _, error = leader.communicate(timeout=LIMIT)
    if rank > 0:
        assert leader.returncode == 2, error
        assert f"rank {rank} of {ranks[0]} has ended" in error
        assert "--resume" in error
        assert len(error.strip().splitlines()) == 1
    until = time.monotonic() + LIMIT
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until, "a rank goes on alone"
        time.sleep(0.05)
    resumed = start(out, ["--resume", "--no-controls"], ranks[1])
    _, error = resumed.communicate(timeout=LIMIT)
    assert resumed.returncode == 0, error


def read_files(out: Path) -> list[bytes]:
    return [(out / file).read_bytes() for file in FILES]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    leader = start(out, RUN, 1)
    _, error = leader.communicate(timeout=LIMIT)
    assert leader.returncode == 0, error
    return out


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are listed by Linux")
@pytest.mark.parametrize(("rank", "ranks", "rounds"), [(1, (2, 3), 7), (0, (2, 1), 20)])
def test_a_killed_rank_changes_no_number(
    tmp_path: Path, unbroken: Path, rank: int, ranks: tuple[int, int], rounds: int
) -> None:
    kill_and_resume(tmp_path / "run", rank, ranks, rounds)
    assert read_files(tmp_path / "run") == read_files(unbroken)


def main(moments: int) -> None:
    rng = random.Random(31)
    folder = Path(tempfile.mkdtemp())
    whole = start(folder / "whole", RUN, 1)
    assert whole.wait() == 0
    total = count_rounds(folder / "whole")
    for moment in range(moments):
        ranks = (rng.choice([2, 3]), rng.choice([1, 2, 3, 4]))
        rank = rng.randrange(ranks[0])
        rounds = rng.randrange(1, total)
        out = folder / str(moment)
        kill_and_resume(out, rank, ranks, rounds)
        same = read_files(out) == read_files(folder / "whole")
        print(
            f"rank {rank} of {ranks[0]} killed after round {rounds}, resumed on {ranks[1]}: same = {same}", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
