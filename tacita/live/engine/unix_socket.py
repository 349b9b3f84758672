"""One question and one answer over a Unix socket: an 8-byte big-endian length, then that many bytes, each way.

Standard library only: the process that talks to the network loads this and nothing of the recommender.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from tacita.core.errors import TacitaError

MOST_BYTES = 2**30
LONGEST_PATH = 100  # bytes in sun_path: 108 on Linux, 104 elsewhere, with room for a terminator
_LENGTH = struct.Struct(">Q")
_PIECE = 2**20

log = logging.getLogger(__name__)


def ask_socket(socket_path: str | Path, body: bytes, timeout: float = 3600.0, most: int = MOST_BYTES) -> bytes:
    """Send a body to the process that serves the socket, and wait for its answer; the timeout is for both."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            with _open_address(Path(socket_path)) as address:
                line.settimeout(min(5.0, timeout))
                line.connect(address)
        except OSError as error:
            reason = error.strerror or error
            raise TacitaError(f"nothing answers at {socket_path} ({reason}); is the node running?") from None
        try:
            _send_framed(line, body, deadline, most)
            answer = _receive_framed(line, deadline, most)
        except TimeoutError:
            raise TacitaError(f"no answer from {socket_path} within {timeout:g} s.") from None
        except ConnectionError:
            answer = None
    if answer is None:
        raise TacitaError(f"{socket_path} closed the connection without an answer; the node's log says why.")
    return answer


class SocketServer:
    """A socket being served by threads until `stop`; also a context manager."""

    def __init__(
        self, path: Path, handle: Callable[[bytes, int], bytes], listener: socket.socket, most: int, timeout: float
    ) -> None:
        self.path = path
        self._handle = handle
        self._listener = listener
        self._most = most
        self._timeout = timeout
        self._inode = os.stat(path).st_ino
        self._stopping = threading.Event()
        self._slots = threading.BoundedSemaphore(16)  # questions at a time; more wait in the listen queue
        self._thread = threading.Thread(target=self._accept_connections, name=f"serve {path.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more questions and remove the socket; a question that is being answered may finish."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:  # not a successor's
                os.unlink(self.path)

    def __enter__(self) -> SocketServer:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.stop()

    def _accept_connections(self) -> None:
        self._listener.settimeout(0.2)
        while not self._stopping.is_set():
            if not self._slots.acquire(timeout=0.2):
                continue
            try:
                line, _ = self._listener.accept()
            except OSError:
                self._slots.release()
                continue
            threading.Thread(target=self._answer_connection, args=(line,), daemon=True).start()

    def _answer_connection(self, line: socket.socket) -> None:
        try:
            with line:
                body = _receive_framed(line, time.monotonic() + self._timeout, self._most)
                if body is not None:
                    answer = self._handle(body, find_peer_user(line))
                    _send_framed(line, answer, time.monotonic() + self._timeout, self._most)
        except (OSError, TacitaError) as error:
            log.warning("a question on %s failed: %s", self.path.name, error)
        except Exception:
            log.exception("a question on %s could not be answered", self.path.name)
        finally:
            self._slots.release()


def serve_socket(
    socket_path: str | Path,
    handle: Callable[[bytes, int], bytes],
    mode: int = 0o600,
    owner: int | None = None,
    most: int = MOST_BYTES,
    timeout: float = 60.0,
) -> SocketServer:
    """Answer questions on a Unix socket, each in a thread of its own.

    `handle` gets the body and the asker's user id (-1 where the system does not tell); if it raises, the asker sees
    a closed connection. `owner` gives the socket to another user. `timeout` bounds reading and writing, not `handle`.
    """
    path = Path(socket_path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        old = os.umask(0o177)  # never open to others, not even before chmod
        try:
            with _open_address(path) as address:
                listener.bind(address)
        finally:
            os.umask(old)
        if owner is not None:
            os.chown(path, owner, -1)
        os.chmod(path, mode)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise TacitaError(f"cannot serve {path}: {error.strerror or error}.") from None
    except TacitaError:
        listener.close()
        raise
    return SocketServer(path, handle, listener, most, timeout)


def find_peer_user(line: socket.socket) -> int:
    """The user id at the other end of a Unix socket, -1 where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1
    size = struct.calcsize("3i")
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket that a killed process left; one that is served, or another kind of file, is an error."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise TacitaError(f"{path} exists and is not a socket; move it away.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            with _open_address(path) as address:
                probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise TacitaError(f"another process is serving {path}; stop it first.")


@contextlib.contextmanager
def _open_address(path: Path) -> Iterator[str]:
    """An address for a path of any length: on Linux a long one is reached through its open folder."""
    address = str(path)
    if len(os.fsencode(address)) <= LONGEST_PATH:
        yield address
        return
    has_short_name = len(os.fsencode(path.name)) <= 64
    can_open_folder = sys.platform == "linux" and os.path.isdir("/proc/self/fd")
    if not (has_short_name and can_open_folder):
        size = len(os.fsencode(address))
        raise TacitaError(
            f"the socket path {path} has {size} bytes but the system allows {LONGEST_PATH}; choose a shorter folder."
        )
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _send_framed(line: socket.socket, body: bytes, deadline: float, most: int) -> None:
    if len(body) > most:
        raise TacitaError(f"a message of {len(body):,} bytes is larger than the {most:,} that are allowed.")
    _send_all(line, memoryview(_LENGTH.pack(len(body))), deadline)
    _send_all(line, memoryview(body), deadline)


def _send_all(line: socket.socket, view: memoryview, deadline: float) -> None:
    done = 0
    while done < len(view):
        line.settimeout(_count_remaining_seconds(deadline))
        done += line.send(view[done : done + _PIECE])


def _receive_framed(line: socket.socket, deadline: float, most: int) -> bytes | None:
    """A framed body; None if the other end closed before sending all of it."""
    head = _read_exactly(line, _LENGTH.size, deadline)
    if head is None:
        return None
    size = _LENGTH.unpack(head)[0]
    if size > most:
        raise TacitaError(f"a message of {size:,} bytes is larger than the {most:,} that are allowed.")
    return _read_exactly(line, size, deadline)


def _read_exactly(line: socket.socket, size: int, deadline: float) -> bytes | None:
    parts: list[bytes] = []  # grows as bytes arrive, so a false length allocates nothing
    missing = size
    while missing:
        line.settimeout(_count_remaining_seconds(deadline))
        part = line.recv(min(missing, _PIECE))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _count_remaining_seconds(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
