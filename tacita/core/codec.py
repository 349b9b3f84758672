"""Arrays as bytes and back, and one digest of what they are: the home of safetensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays


def pack(arrays: Arrays, said: dict[str, str] | None = None) -> bytes:
    """Equal arrays, with what is said of them, give equal bytes."""
    return safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}, said)


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


def digest(arrays: Arrays, about: str = "") -> str:
    """SHA-256 over names, kinds, shapes and bytes, and over a text that belongs to them."""
    total = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        total.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def digest_of(array: AnyArray) -> str:
    """The digest of one array, whatever it is called where it is."""
    return digest({"array": array})
