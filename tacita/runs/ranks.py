"""Several processes for one run: started here on this machine, or by torchrun on many."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.federation.ranks.rank_place import RankPlace, read_launcher_place
from tacita.federation.rounds import Progress
from tacita.kernels.threads import limit_library_threads, max_threads
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, use_threads

if TYPE_CHECKING:
    from tacita.federation.ranks.process_group import RankGroup
    from tacita.federation.ranks.rank_messages import Fields

MakeOwn = Callable[[Machine], Federation]

MOST_RANKS = 256  # processes on one machine
_FOLDER = "TACITA_RANK_FOLDER"
_PLACE = "TACITA_RANK"  # of a process that was started here: rank, number of ranks, process of rank 0
_LOST_CODE = 3  # with which a process ends that was started here and lost another rank
_STOP_CODE = 130  # with which a process ends that is stopped by a signal
_END_SECONDS = 10.0  # for which processes that were let go may take to end
_NOTICE_SECONDS = 2.0  # until a process that ended is seen to have ended


class Termination(KeyboardInterrupt):
    """SIGTERM, with which torchrun ends the other ranks of its host when one has ended."""


def is_service_rank() -> bool:
    """Whether this process serves a run that another one leads."""
    if _PLACE in os.environ:
        return True
    place = read_launcher_place()
    return place is not None and place.rank > 0


def serve_run(machine: Machine, interface: str | None, make_own: MakeOwn | None = None) -> None:
    """Do what rank 0 asks until its run has ended; `make_own`: of the machine, where rank 0 does not say of what."""
    from tacita.federation.ranks.process_group import RankLost, limit_torch_threads
    from tacita.federation.ranks.rank_team import serve_rank

    is_started = _PLACE in os.environ
    try:
        if is_started:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears Ctrl-C, and this process of rank 0's end
            place, group = _join_started_group()
        else:
            place, group = _join_launched_group(interface)
    except RankLost:
        if not is_started:
            raise
        raise SystemExit(_LOST_CODE) from None  # rank 0 says what happened, if it lives
    own_machine = _share_threads(machine, place)
    limit_library_threads(own_machine.threads)
    limit_torch_threads(own_machine.threads)

    def make_federation(setup: Fields) -> Federation:
        if make_own is not None:
            return make_own(own_machine)
        config = validate_model(RunConfig, setup["config"], "the settings of rank 0")
        rank_machine = replace(own_machine, chunk=int(setup["chunk"]))
        return assemble_federation(config, rank_machine, noise_secret=setup["secret"] or None)

    try:
        with _hear_termination(Termination):
            serve_rank(group, make_federation)
    except RankLost:
        if is_started:
            raise SystemExit(_LOST_CODE) from None
        raise TacitaError(
            f"rank {place.rank} of {place.size} lost its connection to the others, so it stopped; go on with "
            "`tacita train --out FOLDER --resume`."
        ) from None
    except KeyboardInterrupt:
        raise SystemExit(_STOP_CODE) from None  # rank 0 says so


@contextlib.contextmanager
def open_ranks(n_ranks: int, interface: str | None, machine: Machine, arguments: Sequence[str]) -> Iterator[Machine]:
    """The machine with the ranks of a run; `arguments`: of the command that starts another rank here."""
    launched = read_launcher_place()
    if launched is not None and launched.size > 1:
        if n_ranks > 1:
            raise TacitaError("torchrun has started the ranks already; leave out --ranks.")
        with _lead_launched_ranks(machine, interface) as led:
            yield led
    elif n_ranks == 1:
        yield machine
    else:
        with _lead_started_ranks(n_ranks, machine, arguments) as led:
            yield led


def check_ranks(n_ranks: int) -> None:
    if not 1 <= n_ranks <= MOST_RANKS:
        raise TacitaError(f"--ranks {n_ranks}: one machine runs 1 to {MOST_RANKS}; use torchrun for more hosts.")


def share_out(federation: Federation, progress: Progress, machine: Machine) -> Progress:
    """The same run with its people on the ranks of the machine; unchanged where there are none."""
    if machine.ranks is None:
        return progress
    setup: Fields = {
        "config": federation.config.model_dump(mode="json"),
        "secret": federation.draws.lab_secret,
        "chunk": machine.chunk,
    }
    devices = machine.ranks.share_out(federation, progress.local_devices, setup)
    return replace(progress, devices=devices)


def count_ranks(machine: Machine) -> int:
    """The ranks that a run was shared out over; 1: this process alone."""
    return 1 if machine.ranks is None else machine.ranks.summary.ranks


def rounds_under_secret_noise(federation: Federation) -> bool:
    """Whether another number of ranks would put the same secret noise on sums with other last digits.

    Their difference would hold no noise at all, and later rounds make it larger.
    """
    has_whole_sums = federation.config.train.aggregator != "plain" or federation.config.privacy.epsilon is not None
    return bool(federation.draws.lab_secret) and not has_whole_sums


@contextlib.contextmanager
def explain_lost_rank(machine: Machine, out: Path, on_same_number: bool = False) -> Iterator[None]:
    """Say which rank ended, and how to go on; `on_same_number`: of ranks."""
    if machine.ranks is None:
        yield
        return
    from tacita.federation.ranks.process_group import RankLost

    number = "as many ranks" if on_same_number else "any number of ranks"
    remedy = f"go on with `tacita train --out {out} --resume`, on {number}"
    try:
        yield
    except RankLost as lost:
        _ignore_termination()  # torchrun sends it soon after the loss
        raise machine.ranks.explain_loss(lost, remedy) from None
    except Termination:
        _ignore_termination()
        end = machine.ranks.explain_end(remedy)
        if end is None:
            raise
        raise end from None


@contextlib.contextmanager
def _hear_termination(error: type[KeyboardInterrupt]) -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C, so that what was opened is closed first; a second one changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        _ignore_termination()
        raise error

    handler_before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before)


def _ignore_termination() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _share_threads(machine: Machine, place: RankPlace) -> Machine:
    """The machine with as many threads as are this rank's, unless it was said how many."""
    threads = machine.threads or max(1, max_threads() // place.local_size)
    use_threads(threads)
    return replace(machine, threads=threads)


# ranks that torchrun started


def _join_launched_group(interface: str | None) -> tuple[RankPlace, RankGroup]:
    from tacita.federation.ranks.process_group import open_launched_group

    place = read_launcher_place()
    assert place is not None, "torchrun did not start this process"
    return place, open_launched_group(place, interface)


@contextlib.contextmanager
def _lead_launched_ranks(machine: Machine, interface: str | None) -> Iterator[Machine]:
    from tacita.federation.ranks.rank_team import RankTeam

    place, group = _join_launched_group(interface)
    team = RankTeam(lambda: group)
    team.open()
    with _hear_termination(Termination):
        try:
            yield replace(_share_threads(machine, place), ranks=team)
        finally:
            team.close()  # also after an error: the others wait


# ranks that are started here


def _join_started_group() -> tuple[RankPlace, RankGroup]:
    from tacita.federation.ranks.process_group import open_local_group

    rank, size, leader = (int(number) for number in os.environ[_PLACE].split("/"))

    def check_leader() -> None:
        if os.getppid() != leader:
            raise TacitaError("rank 0 has ended before the run began.")

    place = RankPlace(rank, size, rank, size)
    return place, open_local_group(place, Path(os.environ[_FOLDER]), check_leader)


@contextlib.contextmanager
def _lead_started_ranks(n_ranks: int, machine: Machine, arguments: Sequence[str]) -> Iterator[Machine]:
    from tacita.federation.ranks.process_group import open_local_group
    from tacita.federation.ranks.rank_team import RankTeam

    place = RankPlace(0, n_ranks, 0, n_ranks)
    own_machine = _share_threads(machine, place)
    with (
        _hear_termination(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="tacita-ranks-", ignore_cleanup_errors=True) as folder,
        _run_processes(n_ranks, Path(folder), own_machine.threads, arguments) as processes,
    ):
        team = RankTeam(
            lambda: open_local_group(place, Path(folder), lambda: _check_processes(processes)),
            lambda: _list_ended_ranks(processes),
        )
        yield replace(own_machine, ranks=team)
        team.close()
        if team.has_met:
            _wait_for_end(processes)


@contextlib.contextmanager
def _run_processes(
    n_ranks: int, folder: Path, threads: int, arguments: Sequence[str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks 1 and up, which make nothing visible but their errors; none outlives this process's need for it."""
    command = [sys.executable, "-m", "tacita", *arguments]
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, n_ranks):
            place = {_FOLDER: str(folder), _PLACE: f"{rank}/{n_ranks}/{os.getpid()}"}
            process = subprocess.Popen(command, env={**os.environ, **counts, **place}, stdout=subprocess.DEVNULL)
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _check_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Refuse to wait for a process that has ended before it joined."""
    for number, process in enumerate(processes):
        if process.poll() not in (None, _LOST_CODE):
            raise TacitaError(f"rank {number + 1} ended with code {process.returncode} before the run began.")


def _list_ended_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The ranks that ended without having lost another one; gloo may see such an end before the system tells it."""
    until = time.monotonic() + _NOTICE_SECONDS
    while time.monotonic() < until:
        ended = [rank for rank, process in enumerate(processes, 1) if process.poll() not in (None, _LOST_CODE)]
        if ended:
            return ended
        time.sleep(0.05)
    return []


def _wait_for_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _END_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def describe_ranks(machine: Machine) -> dict[str, int] | None:
    """Who took part in a run, for its result; None: this process alone."""
    if machine.ranks is None:
        return None
    summary = machine.ranks.summary
    return {"ranks": summary.ranks, "hosts": summary.hosts, "threads": summary.threads}
