"""Arrays as bytes and back, and one digest of what they are: the home of safetensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays


def pack(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    """Equal arrays, with what is said of them, give equal bytes."""
    return safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}, metadata)


def unpack(blob: bytes, where: str) -> Arrays:
    try:
        return safetensors.numpy.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError):
        raise TacitaError(f"{where} is damaged: its arrays cannot be read; restore a copy.") from None


def unpack_file(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a file and what is said of them; ValueError for one that was never packed."""
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class ChunkedArray:
    """An array that is only ever written, piece by piece: too large to be in memory twice."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    iter_chunks: Callable[[], Iterator[AnyArray]]  # from the first row on


WritableArrays = Mapping[str, AnyArray | ChunkedArray]


def iter_packed(arrays: WritableArrays, metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The same bytes as a file of safetensors has, piece by piece."""
    whole = {name: a if isinstance(a, ChunkedArray) else np.asarray(a, order="C") for name, a in arrays.items()}
    order = sorted(whole, key=lambda name: (-whole[name].dtype.itemsize, name))  # so that all of them are aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        kind, shape = whole[name].dtype, whole[name].shape
        end = at + kind.itemsize * math.prod(shape)
        header[name] = {"dtype": _DTYPE_NAMES[kind.name], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield from _iter_bytes(whole[name])


_DTYPE_NAMES = {"bool": "BOOL"} | {
    f"{name}{8 * size}": f"{letter}{8 * size}"
    for name, letter, sizes in (("float", "F", (2, 4, 8)), ("int", "I", (1, 2, 4, 8)), ("uint", "U", (1, 2, 4, 8)))
    for size in sizes
}
"""What safetensors calls the kinds of numbers."""


def _iter_bytes(array: AnyArray | ChunkedArray) -> Iterator[memoryview]:
    for piece in array.iter_chunks() if isinstance(array, ChunkedArray) else (array,):
        yield np.asarray(piece, order="C").reshape(-1).view(np.uint8).data


def digest(arrays: WritableArrays, about: str = "") -> str:
    """SHA-256 over names, kinds, shapes and bytes, and over a text that belongs to them."""
    total = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        for piece in _iter_bytes(arrays[name]):
            total.update(piece)
    return total.hexdigest()


def digest_array(array: AnyArray) -> str:
    """The digest of one array, whatever it is called where it is."""
    return digest({"array": array})
