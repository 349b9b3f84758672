"""What every noised release needs: one clip over all of it, and noise on all coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, CohortView, Doubles, ServerState
from tacita.kernels.norms import sum_row_squares
from tacita.messages import (
    QUANTUM,
    CooccurrenceTerms,
    DenseArrays,
    Form,
    OuterProducts,
    SequenceTerms,
    SparseRows,
    Total,
    Upload,
)
from tacita.privacy.noise import NoiseStream
from tacita.round.part import Part, RunContext

_MAX_EXTRA_NUMBERS = 2**16  # numbers that small fields of other parts hold at most, where rounding is counted
_CLIP_MARGIN = 1 - 1e-6  # where something is shortened, single precision may not lengthen it again


def bound_rounding_error(context: RunContext, n_items: int) -> float:
    """By how much rounding to whole numbers, after the clip, can lengthen what a client sends; 0: nothing rounds."""
    if context.train.aggregator == "plain":
        return 0.0
    backbone = context.backbone
    width = n_items
    if backbone.learner == "rows":
        width = backbone.item_width
    size = n_items * width + _MAX_EXTRA_NUMBERS
    for shape in backbone.list_head_shapes().values():
        size += math.prod(shape)
    return math.sqrt(size) * QUANTUM / 2


def refuse_coarse_rounding(name: str, n_items: int, share: float) -> None:
    """Refuse a clip of which rounding takes more than a tenth; `share`: how much of it rounding takes."""
    if share > 0.1:
        raise TacitaError(
            f"rounding {n_items:,} items to whole numbers would take up more than a tenth of the clip; use a larger "
            f"{name}.clip, or train.aggregator = 'plain'."
        )


def clip_upload(upload: Upload, bound: float | Doubles, norms: Doubles | None = None) -> Upload:
    """Everything a client sends, as one vector, shortened to a length; what holds no number counts as nothing.

    A client whose training diverged sends noise alone. It still sends: to drop out would tell.
    """
    if norms is None:
        norms = compute_norms(upload)
    diverged = ~np.isfinite(norms)
    if diverged.any():
        cleared = {}
        for name, value in upload.values.items():
            cleared[name] = _zero_diverged_clients(value, diverged)
        upload = replace(upload, values=cleared)
        norms = np.where(diverged, 0.0, norms)
    scalar_bound = np.asarray(bound, np.float64)
    bounds = np.broadcast_to(scalar_bound, norms.shape)
    is_longer = norms > bounds
    if not is_longer.any():
        return upload
    lengths = np.maximum(norms, 1e-300)
    shortening = _CLIP_MARGIN * bounds / lengths
    factor = np.where(is_longer, shortening, 1.0)
    scaled = {}
    for name, value in upload.values.items():
        scaled[name] = _scale_form(value, factor)
    return replace(upload, values=scaled)


def _scale_form(value: Form, factor: Doubles) -> Form:
    """Rows are multiplied as they are added: a copy of all of them costs more than the noise does."""
    if not isinstance(value, SparseRows):
        return value.scale(factor)
    if value.factor is not None:
        factor = value.factor * factor
    return replace(value, factor=factor)


def compute_norms(upload: Upload) -> Doubles:
    """The L2 length of everything a client sends, as one vector."""
    squares = np.zeros(upload.n_clients)
    for value in upload.values.values():
        if isinstance(value, SparseRows) and value.value.ndim == 2 and value.factor is None:
            squares += sum_row_squares(value.client, value.value, upload.n_clients)
        else:
            squares += value.squared_norms(upload.n_clients)
    return np.asarray(np.sqrt(squares))


def compute_l1_norms(upload: Upload) -> Doubles:
    """The L1 length of everything a client sends."""
    total = np.zeros(upload.n_clients)
    for value in upload.values.values():
        total += _compute_form_l1_norms(value, upload.n_clients)
    return total


def _compute_form_l1_norms(value: Form, n_clients: int) -> Doubles:
    """The L1 length of one field for each client."""
    if isinstance(value, DenseArrays):
        return _sum_magnitudes(value.value, n_clients)
    if isinstance(value, SequenceTerms):  # bounded by the same number
        return np.sqrt(value.squared_norms(n_clients))
    if isinstance(value, SparseRows):
        value = value.apply_factor()
        n_rows = len(value.item)
        norms = _sum_magnitudes(value.value, n_rows)
    elif isinstance(value, OuterProducts):
        magnitudes = np.abs(value.vector)
        vector_norms = magnitudes.sum(axis=1)
        scale = np.abs(value.sign)
        norms = scale * vector_norms**2
    else:
        lengths = np.diff(value.ptr)
        n_items = lengths.astype(np.float64)
        scale = np.abs(value.factor)
        norms = scale * n_items**2
    sums = np.bincount(value.client, weights=norms, minlength=n_clients)
    return np.asarray(sums, np.float64)


def _sum_magnitudes(values: AnyArray, n_rows: int) -> Doubles:
    """The L1 length of each row."""
    magnitudes = np.abs(values.astype(np.float64))
    rows = magnitudes.reshape(n_rows, -1)
    return np.asarray(rows.sum(axis=1))


def _zero_diverged_clients(value: Form, diverged: Bools) -> Form:
    """A field with zeros where a client's training diverged."""
    if isinstance(value, DenseArrays):
        cleared = value.value.copy()
        cleared[diverged] = 0
        return DenseArrays(cleared)
    is_cleared = diverged[value.client]
    if isinstance(value, SparseRows):
        value = value.apply_factor()
        cleared = value.value.copy()
        cleared[is_cleared] = 0
        return replace(value, value=cleared)
    if isinstance(value, OuterProducts):
        sign = np.where(is_cleared, 0.0, value.sign)
        return replace(value, sign=sign)
    assert isinstance(value, CooccurrenceTerms | SequenceTerms)
    factor = np.where(is_cleared, 0.0, value.factor)
    return replace(value, factor=factor)


def open_noise_stream(part: Part, purpose: str, server: ServerState, total: Total) -> NoiseStream:
    """What a part's noise on a sum follows: its purpose, the round, and the nonces of all releases in the sum."""
    return NoiseStream(part.context.draws, purpose, server.block, server.round, total.nonce)


def add_noise(total: Total, deviation: float, stream: NoiseStream, public: tuple[str, ...] = ()) -> Total:
    """Noise on every coordinate of every sum; a symmetric sum gets symmetric noise.

    `public`: beginnings of the names of fields that get none, as everybody may know them.
    """
    return _add_scaled_noise(total, public, stream.draw_normals, deviation)


def add_integer_noise(
    total: Total, deviation: float, stream: NoiseStream, public: tuple[str, ...], quantum: float
) -> Total:
    """The same where sums are whole numbers of a quantum, and so is the noise: nothing is rounded after it."""
    n_quanta = deviation / quantum

    def draw(*shape: int) -> Doubles:
        noise = stream.draw_discrete_normals(n_quanta, *shape)
        return noise.astype(np.float64)

    return _add_scaled_noise(total, public, draw, quantum)


def _add_scaled_noise(total: Total, public: tuple[str, ...], draw: Callable[..., Doubles], scale: float) -> Total:
    sums: Arrays = {}
    for name in sorted(total.sums):
        if name.startswith(public):
            continue
        value = total.sums[name]
        noise = draw(*value.shape)
        if name in total.symmetric:  # by what it is: noise whose shape followed the data would tell of it
            below = np.triu(noise, 1).T
            noise = np.triu(noise) + below
        noise *= scale
        noise += value
        sums[name] = noise
    return total.with_sums(sums)


def count_coordinates(total: Total, public: tuple[str, ...]) -> int:
    """How many coordinates a sum has without the public ones."""
    n_coordinates = 0
    for name, value in total.sums.items():
        if not name.startswith(public):
            n_coordinates += value.size
    return n_coordinates


def shrink_sum(value: AnyArray, variance: float, strength: float, by_row: bool) -> AnyArray:
    """Positive-part James-Stein: a noised block towards 0, by what its own length says of the noise in it.

    It reads the noised values and the variance of their noise alone, so it costs no privacy.
    """
    if strength == 0 or variance <= 0 or value.size < 3:
        return value
    n_blocks = 1
    if by_row and value.ndim > 1:
        n_blocks = len(value)
    blocks = value.reshape(n_blocks, -1)
    if blocks.shape[1] < 3:
        blocks = value.reshape(1, -1)
    size = blocks.shape[1]
    squares = (blocks**2).sum(axis=1, keepdims=True)
    noise_length = strength * (size - 2) * variance
    factor = 1 - noise_length / np.maximum(squares, 1e-300)
    shrunk = np.maximum(factor, 0.0) * blocks
    return np.asarray(shrunk).reshape(value.shape)


def reduce_by_client(view: CohortView, of_users: AnyArray, ufunc: np.ufunc) -> AnyArray:
    """A value per client of what its users have."""
    if not view.n_clients:
        return of_users[:0]
    first_users = view.user_ptr[:-1]
    return np.asarray(ufunc.reduceat(of_users, first_users))


def repeat_by_user(view: CohortView, of_clients: AnyArray) -> AnyArray:
    """A client's value for each of its users."""
    n_users = np.diff(view.user_ptr)
    return np.repeat(of_clients, n_users)
