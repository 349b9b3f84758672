"""Arrays as bytes and back: safetensors, for what a database keeps in one cell."""

from __future__ import annotations

import numpy as np
import safetensors
import safetensors.numpy

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays


def pack(arrays: Arrays) -> bytes:
    """Equal arrays give equal bytes."""
    return safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)})


def unpack(blob: bytes, where: str) -> Arrays:
    try:
        return safetensors.numpy.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError):
        raise TacitaError(f"{where} is damaged: its arrays cannot be read; restore a copy.") from None
