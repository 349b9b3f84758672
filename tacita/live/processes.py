"""Child processes that end when we end, write to a file and may belong to another user; how processes of ours log."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError

MAX_LOG_BYTES = 5_000_000  # bytes; a longer log is put aside when the process starts again

log = logging.getLogger(__name__)


def configure_logging() -> None:
    """What a process of ours says, with the time and without what libraries say of every call."""
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
        self._command, self._home, self._env, self._user = command, home, env, user
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._born, self._ended = threading.Event(), threading.Event()
        # The system stops a child when the thread that made it ends, so that thread also waits for it.
        threading.Thread(target=self._run_and_wait, name=f"keep {command[0]}", daemon=True).start()
        self._born.wait()
        if self._error is not None:
            raise TacitaError(f"cannot start {Path(command[0]).name}: {self._error.strerror or self._error}.")

    def _run_and_wait(self) -> None:
        try:
            held = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=held,
                    stderr=held,
                    cwd=self._home,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=_stop_with_parent,
                    umask=0o077,
                    **_user_options(self._user),
                )
            finally:
                os.close(held)
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
        return self._process.returncode if self._process is not None and self._ended.is_set() else None

    def wait(self, timeout: float) -> bool:
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
        family = _list_descendants(self.pid)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if not self.wait(timeout):
                log.warning("%s did not stop by itself", Path(self._command[0]).name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.wait(5.0)
        end = time.monotonic() + 3.0  # Flower's helpers see within 0.2 s that their parent is gone
        while (left := [one for one in family if _is_same_process(*one)]) and time.monotonic() < end:
            time.sleep(0.05)
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _stop_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no orphan keeps a port or a node id


def _user_options(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    entry = pwd.getpwnam(name)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def find_user_problem(name: str, folder: Path | None = None) -> str | None:
    """Why the node's client cannot run as this user, in one sentence, or None if it can.

    With a folder it is also tried whether the user gets there.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return f"there is no user '{name}'; make one, or run the node's client as yourself."
    if entry.pw_uid == os.geteuid():
        return f"'{name}' is the user that runs the node, so nothing is kept apart; name another."
    if os.geteuid() != 0:
        return f"only root can start a process as '{name}'; start the node as root or as a service."
    script = "import os, sys; [os.stat(f) for f in sys.argv[1:]]; import flwr, tacita.live.engine.flower_client"
    where = [str(folder)] if folder is not None else []
    try:
        tried = subprocess.run(
            [sys.executable, "-c", script, *where],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "FLWR_TELEMETRY_ENABLED": "0"},
            **_user_options(name),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"'{name}' cannot run {sys.executable} ({error}); install tacita where that user can read it."
    if tried.returncode == 0:
        return None
    last = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return f"'{name}' cannot run the node's client ({last}); install tacita where that user can read it."


def _list_descendants(pid: int) -> list[tuple[int, str]]:
    """All processes below one, each with its start time, so that a number used again is not mistaken for it."""
    parents: dict[int, list[int]] = {}
    begun: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            fields = _read_stat(int(name)) if name.isdigit() else None
            if fields:
                parents.setdefault(int(fields[1]), []).append(int(name))
                begun[int(name)] = fields[19]
    found, front = [], [pid]
    while front:
        front = [child for one in front for child in parents.get(one, [])]
        found += [(child, begun[child]) for child in front]
    return found


def _read_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_same_process(pid: int, begun: str) -> bool:
    fields = _read_stat(pid)
    return fields is not None and fields[19] == begun and fields[0] != "Z"


def _ending_signals() -> list[signal.Signals]:
    """What ends a process of ours beside Ctrl-C; a closed terminal does not where it is ignored (`nohup`)."""
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGHUP] if hears else [signal.SIGTERM]


@contextlib.contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Stop on SIGTERM, on Ctrl-C and when the terminal is closed, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, lambda *_: stopping.set()) for one in (*_ending_signals(), signal.SIGINT)}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end us as Ctrl-C does: what we started is stopped first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, end) for one in _ending_signals()}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)
