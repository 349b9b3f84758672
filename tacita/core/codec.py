"""Arrays as bytes and back, and a digest of them: the home of safetensors."""

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
    """Equal arrays with equal metadata give equal bytes."""
    contiguous = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    return safetensors.numpy.save(contiguous, metadata)


def unpack(blob: bytes, where: str) -> Arrays:
    try:
        return safetensors.numpy.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError):
        raise TacitaError(f"{where} is damaged: its arrays cannot be read; restore a copy.") from None


def unpack_array_file(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a file; ValueError for one that was never packed."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            arrays = {}
            for name in file.keys():  # noqa: SIM118
                arrays[name] = file.get_tensor(name)
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    return arrays, metadata


@dataclass(frozen=True)
class ChunkedArray:
    """An array that is only written, piece by piece: too large to be in memory twice."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    iter_chunks: Callable[[], Iterator[AnyArray]]  # from the first row on


WritableArrays = Mapping[str, AnyArray | ChunkedArray]


def iter_packed(arrays: WritableArrays, metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The same bytes as a file of safetensors has, piece by piece."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # so that all of them are aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name in order:
        kind = arrays[name].dtype
        shape = arrays[name].shape
        end = start + kind.itemsize * math.prod(shape)
        header[name] = {
            "dtype": _DTYPE_NAMES[kind.name],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size = len(text).to_bytes(8, "little")
    yield size + text
    for name in order:
        yield from _iter_array_bytes(arrays[name])


_DTYPE_NAMES = {
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
"""What safetensors calls the kinds of numbers."""


def _iter_array_bytes(array: AnyArray | ChunkedArray) -> Iterator[memoryview]:
    pieces = array.iter_chunks() if isinstance(array, ChunkedArray) else (array,)
    for piece in pieces:
        flat = np.asarray(piece, order="C").reshape(-1)
        yield flat.view(np.uint8).data


def digest(arrays: WritableArrays, about: str = "") -> str:
    """SHA-256 over names, kinds, shapes and bytes, and over a text that belongs to them."""
    total = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        array = arrays[name]
        header = f"{name} {array.dtype} {array.shape} "
        total.update(header.encode())
        for piece in _iter_array_bytes(array):
            total.update(piece)
    return total.hexdigest()


def digest_array(array: AnyArray) -> str:
    """The digest of one array, without its name."""
    return digest({"array": array})
