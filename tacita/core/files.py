"""Files that are either whole or absent: arrays and JSON, written under a hidden name, synced, then renamed."""

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

from tacita.core.codec import WritableArrays, digest, iter_packed, unpack_array_file
from tacita.core.errors import DiskFull, TacitaError
from tacita.core.types import Arrays

V = TypeVar("V")
_TEMPORARY_NAME = re.compile(r"\..+\.\d+")  # of files that `temporary_path` names


def to_folder_path(value: object, what: str = "a run") -> Path:
    """A folder that a caller names by a text or a path."""
    if not isinstance(value, str | os.PathLike):
        raise TacitaError(f"{what} is named by its folder, a text or a path, not by {value!r}.")
    return Path(value)


def temporary_path(path: Path) -> Path:
    """The hidden name next to a path under which this process prepares it."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically; a full disk leaves the old one in place."""
    write_chunks(path, (content,))


def write_chunks(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """The same, for content that should not be in memory as a whole."""
    is_replaceable = path.is_file() or path.is_dir()
    if path.exists() and not is_replaceable:  # to replace a pipe or device would destroy it
        raise TacitaError(f"cannot write {path}: it is a pipe or device, not a file.")
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as out:
            for piece in content:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_error(path, error) from None


def disk_error(path: Path, error: OSError) -> TacitaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(path)
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return TacitaError(f"cannot write {path}: there is no folder {path.parent}.")
    return TacitaError(f"cannot write {path}: {error.strerror or error}.")


def remove_temporary_files(folder: Path) -> None:
    """Remove the unfinished files of a killed process from a folder that no other process writes to."""
    for path in folder.iterdir():
        if path.is_file() and _TEMPORARY_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


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
        text = json.dumps(value) + "\n"
        line = text.encode()
        try:
            n_written = 0
            while n_written < len(line):
                n_written += self._file.write(line[n_written:]) or 0
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
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TacitaError(f"another process is at work in {folder}; wait until it ends.") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode())


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
    note = note or {}
    header = {"note": note, "sha256": _checksum(arrays, note)}
    metadata = {"tacita": json.dumps(header, sort_keys=True)}
    write_chunks(path, iter_packed(arrays, metadata))


def read_arrays(path: Path, remedy: str = "train again") -> tuple[Arrays, dict[str, str]]:
    if not path.is_file():
        raise TacitaError(f"{path} is missing; is {path.parent} a finished run folder?")
    try:
        arrays, metadata = unpack_array_file(path)
        header = json.loads(metadata["tacita"])
        note = {str(name): str(value) for name, value in header["note"].items()}
        is_intact = header["sha256"] == _checksum(arrays, note)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        is_intact = False
    if not is_intact:
        raise TacitaError(f"{path} is damaged: its contents do not match its checksum; {remedy}.")
    return arrays, note


def _checksum(arrays: WritableArrays, note: dict[str, str]) -> str:
    text = json.dumps(note, sort_keys=True)
    return digest(arrays, text)


def nest_parts(values: Mapping[str, V], prefix: str) -> dict[str, dict[str, V]]:
    """`prefix/part/name` entries as part -> name -> value."""
    nested: dict[str, dict[str, V]] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            path = key.removeprefix(prefix)
            part, _, name = path.partition("/")
            nested.setdefault(part, {})[name] = value
    return nested


def flatten_parts(parts: Mapping[str, Mapping[str, V]], prefix: str) -> dict[str, V]:
    """Part -> name -> value as `prefix/part/name` entries."""
    flat = {}
    for part, values in parts.items():
        for name, value in values.items():
            flat[f"{prefix}{part}/{name}"] = value
    return flat
