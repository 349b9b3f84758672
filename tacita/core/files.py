"""Files that are either whole or not there: arrays and JSON, written to the side, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tacita.core.codec import WritableArrays, digest, iter_packed, unpack_file
from tacita.core.errors import DiskFull, TacitaError
from tacita.core.types import Arrays

V = TypeVar("V")
_TEMPORARY_NAME = re.compile(r"\..+\.\d+")  # what a write to the side is called


def parse_folder(value: object, what: str = "a run") -> Path:
    """Where something is, as people say it: a text or a path."""
    if not isinstance(value, str | os.PathLike):
        raise TacitaError(f"{what} is named by its folder, a text or a path, not by {value!r}.")
    return Path(value)


def temporary_path(path: Path) -> Path:
    """The hidden name beside a path under which this process prepares it."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically; a full disk leaves the old one in place."""
    write_chunks(path, (content,))


def write_chunks(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """The same, for what should not be in memory as a whole."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # to replace a pipe or device would destroy it
        raise TacitaError(f"cannot write {path}: it is a pipe or device, not a file.")
    side = temporary_path(path)
    try:
        with open(side, "wb") as out:
            for piece in content:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        os.replace(side, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            side.unlink()
        raise disk_error(path, error) from None


def disk_error(path: Path, error: OSError) -> TacitaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(path)
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return TacitaError(f"cannot write {path}: there is no folder {path.parent}.")
    return TacitaError(f"cannot write {path}: {error.strerror or error}.")


def remove_temporary_files(folder: Path) -> None:
    """Remove what a killed process was preparing in a folder that nobody else is writing to."""
    for one in folder.iterdir():
        if one.is_file() and _TEMPORARY_NAME.fullmatch(one.name):
            one.unlink(missing_ok=True)


class JsonLinesWriter:
    """A file that grows by whole lines; closing it can no longer fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise disk_error(path, error) from None

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, value: Any) -> None:
        line = (json.dumps(value) + "\n").encode()
        try:
            done = 0
            while done < len(line):
                done += self._file.write(line[done:]) or 0
        except OSError as error:
            raise disk_error(self.path, error) from None

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(self.path, error) from None


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the lock goes with the process, however it ends."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TacitaError(f"another process is at work in {folder}; wait until it ends.") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(held)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TacitaError(f"{path} is missing; is {path.parent} a finished run folder?") from None
    except OSError as error:
        raise TacitaError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise TacitaError(f"{path} is damaged: not valid JSON.") from None


def write_arrays(path: Path, arrays: WritableArrays, note: dict[str, str] | None = None) -> None:
    """Arrays and a note with a checksum over both; equal contents give equal bytes."""
    kept = {"note": note or {}, "sha256": _checksum(arrays, note or {})}
    write_chunks(path, iter_packed(arrays, {"tacita": json.dumps(kept, sort_keys=True)}))


def read_arrays(path: Path, remedy: str = "train again") -> tuple[Arrays, dict[str, str]]:
    if not path.is_file():
        raise TacitaError(f"{path} is missing; is {path.parent} a finished run folder?")
    try:
        arrays, said = unpack_file(path)
        kept = json.loads(said["tacita"])
        note = {str(k): str(v) for k, v in kept["note"].items()}
        whole = kept["sha256"] == _checksum(arrays, note)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise TacitaError(f"{path} is damaged: its contents do not match its checksum; {remedy}.")
    return arrays, note


def _checksum(arrays: WritableArrays, note: dict[str, str]) -> str:
    return digest(arrays, json.dumps(note, sort_keys=True))


def nest_parts(values: Mapping[str, V], prefix: str) -> dict[str, dict[str, V]]:
    """`prefix/part/name` entries as part -> name -> value."""
    out: dict[str, dict[str, V]] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            part, _, name = key[len(prefix) :].partition("/")
            out.setdefault(part, {})[name] = value
    return out


def flatten_parts(parts: Mapping[str, Mapping[str, V]], prefix: str) -> dict[str, V]:
    return {f"{prefix}{part}/{name}": v for part, held in parts.items() for name, v in held.items()}
