"""Child processes that end when we end, write to a file and may belong to another user; and how we log."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError

MAX_LOG_BYTES = 5_000_000  # bytes; a longer log is put aside when the process starts again

CONNECTION_ACCOUNT = "tacita-node"  # the system's account for a node's connection, if its owner made one
SHARED_ACCOUNT = "nobody"  # whatever runs as it reads what the others keep

log = logging.getLogger(__name__)


def configure_logging() -> None:
    """Log with the time, and without what libraries say of every call."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class ChildProcess:
    """A process in its own session, reaped when it ends, stopped when we end, with its output in a file."""

    def __init__(self, command: list[str], home: Path, log_file: Path, env: dict[str, str], user: str | None) -> None:
        self.log_file = log_file
        with contextlib.suppress(OSError):
            if log_file.stat().st_size > MAX_LOG_BYTES:
                os.replace(log_file, log_file.with_name(log_file.name + ".1"))
        self.log_begin = log_file.stat().st_size if log_file.exists() else 0
        self._command = command
        self._home = home
        self._env = env
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._born = threading.Event()
        self._ended = threading.Event()
        # The system stops a child when the thread that made it ends, so that thread also waits for it.
        threading.Thread(target=self._run_and_wait, name=f"keep {command[0]}", daemon=True).start()
        self._born.wait()
        if self._error is not None:
            reason = self._error.strerror or self._error
            raise TacitaError(f"cannot start {Path(command[0]).name}: {reason}.")

    def _run_and_wait(self) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = os.open(self.log_file, flags, 0o600)
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._home,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=_stop_with_parent,
                    umask=0o077,
                    **_build_user_options(self._user),
                )
            finally:
                os.close(output)
        except OSError as error:
            self._error = error
        self._born.set()
        if self._process is not None:
            self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while it runs."""
        if self._process is None or not self._ended.is_set():
            return None
        return self._process.returncode

    def wait_for_end(self, timeout: float) -> bool:
        """Whether it ended within the time."""
        return self._ended.wait(timeout)

    def read_head(self, most: int = 20_000) -> str:
        """The beginning of what it has written."""
        try:
            with open(self.log_file, "rb") as text:
                text.seek(self.log_begin)
                return text.read(most).decode(errors="replace")
        except OSError:
            return ""

    def read_tail(self, most: int = 20_000) -> str:
        """The end of what it has written."""
        try:
            with open(self.log_file, "rb") as text:
                size = text.seek(0, os.SEEK_END)
                text.seek(max(self.log_begin, size - most))
                return text.read().decode(errors="replace")
        except OSError:
            return ""

    def stop(self, timeout: float = 15.0) -> None:
        """Ask it to end, then insist, and leave none of its descendants."""
        family = _list_descendants_with_start_times(self.pid)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if not self.wait_for_end(timeout):
                log.warning("%s did not stop by itself", Path(self._command[0]).name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.wait_for_end(5.0)
        deadline = time.monotonic() + 3.0  # Flower's helpers see within 0.2 s that their parent is gone
        survivors = _select_living_processes(family)
        while survivors and time.monotonic() < deadline:
            time.sleep(0.05)
            survivors = _select_living_processes(family)
        for pid, _ in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _stop_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no orphan keeps a port or a node id


def _build_user_options(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    entry = pwd.getpwnam(name)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _is_shared_account(uid: int) -> bool:
    try:
        return uid == pwd.getpwnam(SHARED_ACCOUNT).pw_uid
    except KeyError:
        return False


def find_user_problem(name: str, folder: Path | None = None) -> str | None:
    """Why the node's client cannot run as this user, in one sentence, or None if it can.

    With a folder it is also tried whether the user gets there.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return f"there is no user '{name}'; make one, or run the node's client as yourself."
    if _is_shared_account(entry.pw_uid):
        return f"other programs run as '{name}' and could ask as the server; make an account for the node alone."
    if entry.pw_uid == os.geteuid():
        return f"'{name}' is the user that runs the node, so nothing is kept apart; name another."
    if os.geteuid() != 0:
        return f"only root can start a process as '{name}'; start the node as root or as a service."
    script = "import os, sys; [os.stat(f) for f in sys.argv[1:]]; import flwr, tacita.live.engine.flower_client"
    folders = [str(folder)] if folder is not None else []
    try:
        trial = subprocess.run(
            [sys.executable, "-c", script, *folders],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "FLWR_TELEMETRY_ENABLED": "0"},
            **_build_user_options(name),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"'{name}' cannot run {sys.executable} ({error}); install tacita where that user can read it."
    if trial.returncode == 0:
        return None
    errors = trial.stderr.strip().splitlines() or ["it ended without a word"]
    return f"'{name}' cannot run the node's client ({errors[-1]}); install tacita where that user can read it."


def _list_descendants_with_start_times(pid: int) -> list[tuple[int, str]]:
    """All processes below one, each with its start time, so that a number used again is not mistaken for it."""
    children: dict[int, list[int]] = {}
    start_times: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            fields = _read_stat(int(name)) if name.isdigit() else None
            if fields:
                child = int(name)
                children.setdefault(int(fields[1]), []).append(child)
                start_times[child] = fields[19]
    descendants = []
    front = [pid]
    while front:
        parent = front.pop(0)
        for child in children.get(parent, []):
            front.append(child)
            descendants.append((child, start_times[child]))
    return descendants


def _read_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_same_process(pid: int, start_time: str) -> bool:
    fields = _read_stat(pid)
    return fields is not None and fields[19] == start_time and fields[0] != "Z"


def _select_living_processes(family: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(pid, start_time) for pid, start_time in family if _is_same_process(pid, start_time)]


def _list_ending_signals() -> list[signal.Signals]:
    """What ends a process of ours besides Ctrl-C; a closed terminal does not where it is ignored (`nohup`)."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignores_hangup else [signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Stop on SIGTERM, on Ctrl-C and when the terminal is closed, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        stopping.set()

    with _handle_signals([*_list_ending_signals(), signal.SIGINT], stop):
        yield


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end us as Ctrl-C does: what we started is stopped first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with _handle_signals(_list_ending_signals(), end):
        yield


@contextlib.contextmanager
def _handle_signals(signals: list[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """Handle some signals for a while, then as before."""
    handlers_before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in handlers_before.items():
            signal.signal(number, handler_before)
