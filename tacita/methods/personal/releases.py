"""What every noised release needs: one clip over all of it, noise on all coordinates, and noise that never repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, CohortView, Doubles, Keys, Longs
from tacita.kernels.hashing import hash_owners
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


def rounding_error(context: RunContext, n_items: int) -> float:
    """By how much rounding to whole numbers, after the clip, can lengthen what a client sends; 0: nothing rounds."""
    if context.train.aggregator == "plain":
        return 0.0
    backbone = context.backbone
    rows = n_items * (backbone.item_width if backbone.learner == "rows" else n_items)
    heads = sum(math.prod(shape) for shape in backbone.shared().values())
    return math.sqrt(rows + heads + _MAX_EXTRA_NUMBERS) * QUANTUM / 2


def check_rounding(name: str, n_items: int, share: float) -> None:
    """Refuse a clip of which rounding takes more than a tenth; `share`: how much of it rounding takes."""
    if share > 0.1:
        raise TacitaError(
            f"rounding {n_items:,} items to whole numbers would take up more than a tenth of the clip; use a larger "
            f"{name}.clip, or train.aggregator = 'plain'."
        )


def clip_upload(upload: Upload, bound: float | Doubles, lengths: Doubles | None = None) -> Upload:
    """Everything a client sends, as one vector, shortened to a length; what holds no number counts as nothing.

    A client whose training went astray sends noise alone. It still sends: to drop out would tell.
    """
    lengths = upload_norms(upload) if lengths is None else lengths
    astray = ~np.isfinite(lengths)
    if astray.any():
        upload = replace(upload, values={name: _clear_clients(v, astray) for name, v in upload.values.items()})
        lengths = np.where(astray, 0.0, lengths)
    most = np.broadcast_to(np.asarray(bound, np.float64), lengths.shape)
    longer = lengths > most
    if not longer.any():
        return upload
    factor = np.where(longer, _CLIP_MARGIN * most / np.maximum(lengths, 1e-300), 1.0)
    return replace(upload, values={name: _scale_form(value, factor) for name, value in upload.values.items()})


def _scale_form(value: Form, factor: Doubles) -> Form:
    """Rows are multiplied as they are added: a copy of all of them costs more than the noise does."""
    if isinstance(value, SparseRows):
        return replace(value, factor=factor if value.factor is None else value.factor * factor)
    return value.scale(factor)


def upload_norms(upload: Upload) -> Doubles:
    """The length of everything a client sends, as one vector."""
    squares = np.zeros(upload.n_clients)
    for value in upload.values.values():
        if isinstance(value, SparseRows) and value.value.ndim == 2 and value.factor is None:
            squares += sum_row_squares(value.client, value.value, upload.n_clients)
        else:
            squares += value.squared_norms(upload.n_clients)
    return np.asarray(np.sqrt(squares))


def upload_l1_norms(upload: Upload) -> Doubles:
    """The L1 length of everything a client sends."""
    total = np.zeros(upload.n_clients)
    for value in upload.values.values():
        if isinstance(value, DenseArrays):
            total += np.abs(value.value.astype(np.float64)).reshape(upload.n_clients, -1).sum(axis=1)
        elif isinstance(value, SparseRows):
            value = value.apply_factor()
            each = np.abs(value.value.astype(np.float64)).reshape(len(value.item), -1).sum(axis=1)
            total += np.bincount(value.client, weights=each, minlength=upload.n_clients)
        elif isinstance(value, OuterProducts):
            each = np.abs(value.sign) * np.abs(value.vector).sum(axis=1) ** 2
            total += np.bincount(value.client, weights=each, minlength=upload.n_clients)
        elif isinstance(value, SequenceTerms):  # bounded by the same number
            total += np.sqrt(value.squared_norms(upload.n_clients))
        else:
            each = np.abs(value.factor) * np.diff(value.ptr).astype(np.float64) ** 2
            total += np.bincount(value.client, weights=each, minlength=upload.n_clients)
    return total


def _clear_clients(value: Form, astray: Bools) -> Form:
    if isinstance(value, DenseArrays):
        kept = value.value.copy()
        kept[astray] = 0
        return DenseArrays(kept)
    if isinstance(value, SparseRows):
        value = value.apply_factor()
        kept = value.value.copy()
        kept[astray[value.client]] = 0
        return replace(value, value=kept)
    if isinstance(value, OuterProducts):
        return replace(value, sign=np.where(astray[value.client], 0.0, value.sign))
    assert isinstance(value, CooccurrenceTerms | SequenceTerms)
    return replace(value, factor=np.where(astray[value.client], 0.0, value.factor))


def check_other_parts(part: Part) -> None:
    """Nothing may be added to a release after its noise, and nobody may go by what it was before."""
    for other in part.context.others(part.name):
        if {"encode", "answer_question"} <= other.hooks:
            raise TacitaError(
                f"part '{other.name}' remembers what leaves a device to take it back later, and {part.name} changes "
                "what leaves; forget by training again (part 'retrain'), or leave one of them out."
            )
    names = [traits.name for traits in part.context.traits]
    place = names.index(part.name) if part.name in names else len(names)
    for later in part.context.traits[place + 1 :]:
        if later.hooks & {"encode", "noise_sum"}:
            raise TacitaError(
                f"part '{later.name}' changes releases after {part.name} has noised them; list {part.name} after it."
            )


def check_weights(part: Part) -> None:
    """Who counts how much is told as it is: it may not follow from what people have."""
    for other in part.context.others(part.name):
        if "weigh" in other.hooks and not other.weighs_presence:
            raise TacitaError(
                f"part '{other.name}' weighs people by what they have, which {part.name} does not hide; use part "
                "'dpps', which does, or leave one of them out."
            )


def add_nonces(upload: Upload, draws: Draws, purpose: str, view: CohortView, releases: Longs) -> Upload:
    """Uploads with a number each that follows the device and how often it has released something, nothing else."""
    first = np.asarray(view.user_ptr[:-1])
    count = np.add.reduceat(releases, first) if len(releases) else releases
    mixed = hash_owners(draws.private(purpose), view.client_keys) + count.astype(np.uint64)
    made: Keys = hash_owners(draws.private(purpose, 1), mixed)
    return replace(upload, nonce=made if upload.nonce is None else upload.nonce ^ made)


def add_noise(total: Total, deviation: float, stream: NoiseStream, public: tuple[str, ...]) -> Total:
    """Noise on every coordinate of every sum but the public ones; a symmetric sum gets symmetric noise."""
    return _add_drawn_noise(total, public, lambda shape: (stream.normals(*shape), deviation))


def add_integer_noise(
    total: Total, deviation: float, stream: NoiseStream, public: tuple[str, ...], quantum: float
) -> Total:
    """The same where sums are whole numbers of a quantum, and so is the noise: nothing is rounded after it."""
    wide = deviation / quantum
    return _add_drawn_noise(
        total, public, lambda shape: (stream.discrete_normals(wide, *shape).astype(np.float64), quantum)
    )


def _add_drawn_noise(
    total: Total, public: tuple[str, ...], draw: Callable[[tuple[int, ...]], tuple[Doubles, float]]
) -> Total:
    changed: Arrays = {}
    for name in sorted(total.sums):
        if name.startswith(public):
            continue
        value = total.sums[name]
        drawn, by = draw(value.shape)
        if name in total.symmetric:  # by what it is: noise whose shape followed the data would tell of it
            drawn = np.triu(drawn) + np.triu(drawn, 1).T
        drawn *= by
        drawn += value
        changed[name] = drawn
    return total.with_sums(changed)


def count_coordinates(total: Total, public: tuple[str, ...]) -> int:
    """How many coordinates a sum has."""
    return sum(value.size for name, value in total.sums.items() if not name.startswith(public))


def shrink_sum(value: AnyArray, variance: float, strength: float, by_row: bool) -> AnyArray:
    """Positive-part James-Stein: a noised block towards 0, by what its own length says of the noise in it.

    It reads the noised values and the variance of their noise alone, so it costs no privacy.
    """
    if strength == 0 or variance <= 0 or value.size < 3:
        return value
    blocks = value.reshape(len(value), -1) if by_row and value.ndim > 1 else value.reshape(1, -1)
    if blocks.shape[1] < 3:
        blocks = value.reshape(1, -1)
    squares = (blocks**2).sum(axis=1, keepdims=True)
    factor = 1 - strength * (blocks.shape[1] - 2) * variance / np.maximum(squares, 1e-300)
    return np.asarray(np.maximum(factor, 0.0) * blocks).reshape(value.shape)


def reduce_by_client(view: CohortView, of_users: AnyArray, ufunc: np.ufunc) -> AnyArray:
    """A value per client of what its users have."""
    return np.asarray(ufunc.reduceat(of_users, view.user_ptr[:-1])) if view.n_clients else of_users[:0]


def repeat_by_user(view: CohortView, of_clients: AnyArray) -> AnyArray:
    return np.repeat(of_clients, np.diff(view.user_ptr))
