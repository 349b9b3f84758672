"""A rank is killed or silent: the run stops with one sentence, and goes on on other ranks to the same numbers.

`python tests/test_killed_ranks.py 10` kills ranks at ten random moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tacita.core.errors import TacitaError
from tacita.federation.ranks import process_group
from tacita.federation.ranks.process_group import RankGroup, open_local_group
from tacita.federation.ranks.rank_place import RankPlace

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


# processes that torchrun starts


def find_free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def is_rank(pid: int, rank: int) -> bool:
    return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def list_sentences(error: str) -> list[str]:
    """What tacita says, without torchrun's own report."""
    return [line for line in error.splitlines() if line.startswith("tacita: ")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are listed by Linux")
def test_torchrun_does_not_silence_who_was_lost(tmp_path: Path) -> None:
    """It sends SIGTERM to rank 0 as soon as it sees that another rank has ended."""
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    launcher += ["--master-port", find_free_port(), "-m", "helpers.lead_ranks"]
    arguments = ["train", *SETTINGS, "--rounds", "100000", "--set", "train.patience=100000", "--out", str(out)]
    with launch([*launcher, *arguments], {}) as torchrun:
        wait_for_rounds(torchrun, out, 2)
        victim = next(pid for pid in list_children(torchrun.pid) if is_rank(pid, 2))
        os.kill(victim, signal.SIGKILL)
        _, error = torchrun.communicate(timeout=LIMIT)
    sentences = [line for line in list_sentences(error) if "rank 2 of 3 has ended" in line]
    assert len(sentences) == 1, error
    assert f"tacita train --out {out} --resume" in sentences[0]
    assert "gloo" not in error


@contextmanager
def launch(command: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)} | variables
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes then
            process.communicate(timeout=LIMIT)


def run_launched(arguments: list[str]) -> list[tuple[int, str]]:
    """Exit code and errors of two ranks, with the variables that torchrun sets."""
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
    command = [sys.executable, "-m", "helpers.lead_ranks", "train", *arguments, "--quiet"]
    with (
        launch(command, places | {"RANK": "0", "LOCAL_RANK": "0"}) as first,
        launch(command, places | {"RANK": "1", "LOCAL_RANK": "1"}) as second,
    ):
        return [(rank.wait(LIMIT), rank.communicate()[1]) for rank in (first, second)]


def test_other_ranks_say_nothing_of_bad_input() -> None:
    leading, serving = run_launched(["--data", "nope.csv"])
    assert leading[0] == 2
    assert "nope.csv" in leading[1]
    assert len(leading[1].strip().splitlines()) == 1
    assert serving == (0, "")


def test_launched_ranks_end_where_nothing_is_shared_out(unbroken: Path) -> None:
    """A finished run that is resumed."""
    assert run_launched(["--out", str(unbroken), "--resume"]) == [(0, ""), (0, "")]


# two ranks alone: limits of waits, and Ctrl-C


def meet(rank: int, folder: Path) -> RankGroup:
    return open_local_group(RankPlace(rank, 2, rank, 2), folder, lambda: None)


def answer_late(rank: int, folder: Path) -> None:
    """Rank 0 is slow, which rank 1 bears; then rank 1 is, for longer than rank 0 waits."""
    process_group.REPLY_SECONDS = 1.0
    group = meet(rank, folder)
    if rank == 1:
        assert group.broadcast_bytes() == b"late"
        (folder / "heard").touch()
        time.sleep(LIMIT)
    time.sleep(2.0)
    group.broadcast_bytes(b"late")
    leave(folder, lambda: group.share_numbers([rank]), group)


def never_answer(rank: int, folder: Path) -> None:
    group = meet(rank, folder)
    if rank == 1:
        time.sleep(LIMIT)
    (folder / "waits").touch()
    leave(folder, lambda: group.share_numbers([rank]), group)


def end_before_connecting(rank: int, folder: Path) -> None:
    if rank == 1:
        FileStore(str(folder / "store"), 2).set("there/1", "yes")
        (folder / "ended").touch()
        return

    def check_others() -> None:
        if (folder / "ended").exists():
            raise TacitaError("rank 1 ended.")

    leave(folder, lambda: open_local_group(RankPlace(0, 2, 0, 2), folder, check_others))


def stay_unconnected(rank: int, folder: Path) -> None:
    process_group.CONNECT_SECONDS = 1.0
    if rank == 1:
        FileStore(str(folder / "store"), 2).set("there/1", "yes")
        time.sleep(LIMIT)
    leave(folder, lambda: meet(rank, folder))


def leave(folder: Path, wait: Callable[[], object], group: RankGroup | None = None) -> None:
    """Note what ended a wait, and end as a command would."""
    try:
        wait()
    except (TacitaError, KeyboardInterrupt) as error:
        (folder / "end").write_text(f"{type(error).__name__}: {error}")
        if group is not None:
            group.abandon()


@contextmanager
def start_pair(scene: Callable[[int, Path], None], folder: Path) -> Iterator[BaseProcess]:
    """Rank 0 of two processes that play a scene."""
    context = multiprocessing.get_context("spawn")
    pair = [context.Process(target=scene, args=(rank, folder)) for rank in range(2)]
    for process in pair:
        process.start()
    try:
        yield pair[0]
    finally:
        for process in pair:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("scene", "end"),
    [
        (answer_late, "RankLost: a rank did not answer"),
        (end_before_connecting, "TacitaError: rank 1 ended."),
        (stay_unconnected, "RankLost: the ranks came but did not connect"),
    ],
)
def test_rank_0_waits_no_longer_than_it_should(tmp_path: Path, scene: Callable[[int, Path], None], end: str) -> None:
    with start_pair(scene, tmp_path) as leader:
        leader.join(LIMIT / 2)
        assert leader.exitcode == 0
    assert (tmp_path / "end").read_text().startswith(end)
    assert scene is not answer_late or (tmp_path / "heard").exists()


def test_rank_0_hears_ctrl_c_while_another_rank_is_slow(tmp_path: Path) -> None:
    with start_pair(never_answer, tmp_path) as leader:
        until = time.monotonic() + LIMIT
        while not (tmp_path / "waits").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        assert leader.pid is not None
        os.kill(leader.pid, signal.SIGINT)
        leader.join(LIMIT / 4)
        assert leader.exitcode == 0
    assert (tmp_path / "end").read_text().startswith("KeyboardInterrupt")


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
