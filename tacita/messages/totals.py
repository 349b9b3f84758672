"""Uploads of a cohort's clients, and the total that they become.

Byte counts, checks on the wire, clips, noise and the ledger all read the `Spec` of a field. An `Upload` holds the
fields of a cohort of clients, a `Total` their weighted sums, and single values where a field is seen each by itself.
Totals add up, so chunks, silos and nodes can merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.sparse import SparseSum
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Keys, Longs, StateUpdate
from tacita.messages.forms import (
    QUANTUM,
    CooccurrenceTerms,
    DenseArrays,
    Form,
    OuterProducts,
    SequenceTerms,
    SparseRows,
    Spec,
    as_column,
    check_shape,
    round_to_quantum,
)


@dataclass(frozen=True)
class Upload:
    """The fields of a cohort's clients as they leave the devices. A client of weight 0 has dropped out."""

    values: dict[str, Form]
    weight: Doubles  # (clients,)
    sender: Keys  # (clients,) the key by which the server knows a client that it sees by itself
    nonce: Keys | None = None
    """(clients,) a number that no other release of the client has. It does not travel. Noise on a sum follows it, so
    noise is never drawn twice, even if the same round is requested twice."""

    @property
    def n_clients(self) -> int:
        return len(self.weight)

    def with_value(self, name: str, value: Form) -> Upload:
        values = {**self.values, name: value}
        return replace(self, values=values)

    def norms(self) -> Doubles:
        """The length of everything a client sends, as one vector."""
        squares = np.zeros(self.n_clients)
        for value in self.values.values():
            squares += value.squared_norms(self.n_clients)
        return np.asarray(np.sqrt(squares))

    def scale(self, factor: Doubles) -> Upload:
        """Every number of a client times its factor."""
        scaled: dict[str, Form] = {}
        for name, value in self.values.items():
            scaled[name] = value.scale(factor)
        return replace(self, values=scaled)

    def drop_clients(self, dropped: AnyArray) -> Upload:
        """Some clients send nothing."""
        weight = np.where(dropped, 0.0, self.weight)
        return replace(self, weight=weight)


@dataclass(frozen=True)
class CohortReply:
    """What a cohort's devices answer to a question; only the upload leaves them."""

    upload: Upload
    state_update: StateUpdate = field(default_factory=dict)  # name in the device state -> new rows or lists per user
    notes: Arrays = field(default_factory=dict)  # name -> (clients,) for the lab's log; nan: nothing
    contributes: Bools | None = None  # (clients,) whose upload holds their own data; None: any may


@dataclass(frozen=True)
class PerClientField:
    """One field of single clients, as the party that may see it has it."""

    sender: Keys
    value: Form


@dataclass(frozen=True)
class Total:
    """Weighted sums of fields over clients, and the fields that are seen each by itself."""

    sums: dict[str, Doubles]  # of a sparse field a `SparseSum`, which adds up as arrays do
    weight: float = 0.0
    n_clients: int = 0
    each: dict[str, PerClientField] = field(default_factory=dict)
    nonce: int = 0  # of all uploads in it, in any order; it does not travel
    symmetric: dict[str, int] = field(default_factory=dict)  # 1: a sum is symmetric by definition, for any data

    def __getitem__(self, name: str) -> Any:
        return self.sums[name]

    def with_sums(self, changed: dict[str, Doubles]) -> Total:
        sums = {**self.sums, **changed}
        return replace(self, sums=sums)


def count_wire_bytes(array: AnyArray) -> int:
    """Dense, or as (index, value) pairs where that is smaller."""
    n_entries = int(np.count_nonzero(array))
    pair_bytes = 4 + array.itemsize
    return min(array.nbytes, pair_bytes * n_entries)


def touched_name(name: str) -> str:
    """The name of the sum of weights that touched each row of a field."""
    return f"{name}.touched"


def empty_total(fields: Sequence[Spec]) -> Total:
    sums: dict[str, Any] = {}
    for spec in fields:
        if spec.seen == "summed" and spec.sparse:
            sums[spec.name] = SparseSum(spec.shape)
        elif spec.seen == "summed":
            sums[spec.name] = np.zeros(spec.shape)
        if spec.touched:
            name = touched_name(spec.name)
            n_rows = spec.shape[:1]
            sums[name] = np.zeros(n_rows)
    return Total(sums, symmetric=map_symmetric_fields(fields))


def map_symmetric_fields(fields: Sequence[Spec]) -> dict[str, int]:
    return {spec.name: 1 for spec in fields if spec.symmetric}


def add_upload(total: Total, upload: Upload, fields: Sequence[Spec], exact: bool = False) -> Total:
    """Add a cohort's uploads; reuses the total's buffers. `exact`: in whole numbers of a quantum, in any order."""
    specs = {spec.name: spec for spec in fields}
    _check_upload(upload, specs)
    senders = np.flatnonzero(upload.weight > 0)
    each = dict(total.each)
    for name, value in upload.values.items():
        spec = specs[name]
        if spec.seen == "each":
            before = each.get(name)
            each[name] = _append_clients(before, upload, value, senders)
        elif exact:
            _add_exactly(total, upload, spec, value)
        else:
            _add_in_double(total, upload, spec, value)
    weights = upload.weight
    if exact:
        weights = _quantise_weights(weights)
    addends = np.append(total.weight, weights)
    partial_sums = np.add.accumulate(addends)  # one by one, as the sums are
    nonce = total.nonce
    if upload.nonce is not None:
        nonces = upload.nonce[senders]
        nonce ^= int(np.bitwise_xor.reduce(nonces))
    return Total(
        sums=total.sums,
        weight=float(partial_sums[-1]),
        n_clients=total.n_clients + len(senders),
        each=each,
        nonce=nonce,
        symmetric=total.symmetric,
    )


def _append_clients(before: PerClientField | None, upload: Upload, value: Form, senders: Longs) -> PerClientField:
    """The field of single clients with those of another upload."""
    keys = upload.sender[senders].copy()
    added = PerClientField(keys, value.take_clients(senders))
    if before is None:
        return added
    return _join_fields(before, added)


def _get_touched_buffer(total: Total, spec: Spec) -> Doubles:
    """The buffer for the weights that touched each row; one that is thrown away where they are not summed."""
    if spec.touched:
        name = touched_name(spec.name)
        return total.sums[name]
    n_rows = 0
    if spec.shape:
        n_rows = spec.shape[0]
    return np.zeros(n_rows)


def _try_add_triangle(total: Total, upload: Upload, spec: Spec, value: Form) -> bool:
    """Add a lower triangle to a sparse sum; False: the field has none."""
    if spec.sparse and isinstance(value, CooccurrenceTerms):
        triangle = value.sum_lower_triangle(upload.weight)
        before = total.sums[spec.name]
        total.sums[spec.name] = before + triangle
        return True
    return False


def _apply_row_factor(spec: Spec, value: Form) -> Form:
    """A row counts as touched by the client's weight alone, without the factor of its rows."""
    if spec.touched and isinstance(value, SparseRows):
        return value.apply_factor()
    return value


def _add_in_double(total: Total, upload: Upload, spec: Spec, value: Form) -> None:
    """Add one field in double precision, client after client."""
    if _try_add_triangle(total, upload, spec, value):
        return
    value = _apply_row_factor(spec, value)
    field_sum = total.sums[spec.name]
    touched = _get_touched_buffer(total, spec)
    value.add_to(field_sum, touched, upload.weight)


def _add_exactly(total: Total, upload: Upload, spec: Spec, value: Form) -> None:
    """Add one field in whole multiples of the quantum: the sum is the same in any order."""
    if _try_add_triangle(total, upload, spec, value):
        return
    value = _apply_row_factor(spec, value)
    touched = _get_touched_buffer(total, spec)
    quantised = _quantise_value(value, upload.weight)
    field_sum = total.sums[spec.name]
    unused = np.zeros_like(touched)
    is_sender = upload.weight > 0
    unit_weight = is_sender.astype(np.float64)
    quantised.add_to(field_sum, unused, unit_weight)
    weights = _quantise_weights(upload.weight)
    if isinstance(value, SparseRows):
        row_weight = weights[value.client]
        np.add.at(touched, value.item, row_weight)
    elif isinstance(value, DenseArrays):
        touched += weights.sum()


def _quantise_weights(weight: Doubles) -> Doubles:
    """Weights in whole multiples of the quantum; a client with any weight counts at least one."""
    multiples = np.rint(weight / QUANTUM)
    multiples = np.maximum(multiples, 1.0)
    is_sender = weight > 0
    quantised = np.where(is_sender, multiples * QUANTUM, 0.0)
    return np.asarray(quantised)


def _quantise_value(value: Form, weight: Doubles) -> Form:
    """The same times the weights, every number rounded to the quantum."""
    if isinstance(value, OuterProducts | SequenceTerms):  # whole multiples already
        return value.scale(weight)
    if isinstance(value, CooccurrenceTerms):
        list_weight = weight[value.client]
        factor = round_to_quantum(value.factor * list_weight)
        return replace(value, factor=factor)
    if isinstance(value, SparseRows):
        value = value.apply_factor()
        weight = weight[value.client]
    numbers = value.value
    weighted = numbers * as_column(weight, numbers.ndim)
    quantised = round_to_quantum(weighted)
    return replace(value, value=quantised)


def _join_fields(first: PerClientField, second: PerClientField) -> PerClientField:
    senders = np.concatenate([first.sender, second.sender])
    n_first = len(first.sender)
    value = second.value.prepend(first.value, n_first)  # type: ignore[arg-type]
    return PerClientField(senders, value)


def merge_totals(a: Total, b: Total) -> Total:
    """The total of two groups of clients."""
    unshared = a.sums.keys() ^ b.sums.keys()
    if unshared:
        name = min(unshared)
        raise TacitaError(f"only one of two sums holds '{name}'; nothing was added.")
    for name, values in a.sums.items():
        other_values = b.sums[name]
        check_shape(name, other_values.shape, values.shape)
    sums = {}
    for name, values in a.sums.items():
        sums[name] = values + b.sums[name]
    each = dict(a.each)
    for name, added in b.each.items():
        if name in each:
            added = _join_fields(each[name], added)
        each[name] = added
    return Total(
        sums,
        weight=a.weight + b.weight,
        n_clients=a.n_clients + b.n_clients,
        each=each,
        nonce=a.nonce ^ b.nonce,
        symmetric=a.symmetric | b.symmetric,
    )


def _check_upload(upload: Upload, fields: dict[str, Spec]) -> None:
    """Refuse an upload that does not fit the fields, before any of it is added."""
    n_clients = upload.n_clients
    shape = (n_clients,)
    check_shape("weight", upload.weight.shape, shape)
    check_shape("sender", upload.sender.shape, shape)
    weight = upload.weight
    is_valid = np.isfinite(weight) & (weight >= 0)
    if not is_valid.all():
        raise TacitaError("an upload's weights must be finite and not negative.")
    for name, value in upload.values.items():
        if name not in fields:
            raise TacitaError(f"an upload holds '{name}', which was not asked for.")
        spec = fields[name]
        value.check(spec, n_clients)
