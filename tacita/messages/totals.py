"""What leaves a device: named fields, how each is laid out, who sees it, and how uploads become a total.

A `Spec` is the one description that byte counts, checks on the wire, clips, noise and the ledger read. An `Upload`
holds the fields of a cohort of clients, a `Total` their weighted sums, and the single ones where a field is seen each
by itself. Totals add up, so chunks, silos and nodes can merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.sparse import SparseSum
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Keys, StateUpdate
from tacita.messages.forms import (
    QUANTUM,
    CooccurrenceTerms,
    DenseArrays,
    Form,
    OuterProducts,
    SequenceTerms,
    SparseRows,
    Spec,
    check_shape,
)


@dataclass(frozen=True)
class Upload:
    """The fields of a cohort's clients as they leave the devices. A client of weight 0 has dropped out."""

    values: dict[str, Form]
    weight: Doubles  # (clients,)
    sender: Keys  # (clients,) under which key the server knows the client, where it sees one by itself
    nonce: Keys | None = None
    """(clients,) a number that no other release of the client has. It does not travel: noise on a sum follows it, so
    that noise is never drawn twice, even if the same round is asked for again."""

    @property
    def n_clients(self) -> int:
        return len(self.weight)

    def with_value(self, name: str, value: Form) -> Upload:
        return replace(self, values={**self.values, name: value})

    def norms(self) -> Doubles:
        """The length of everything a client sends, as one vector."""
        squares = np.zeros(self.n_clients)
        for value in self.values.values():
            squares += value.squared_norms(self.n_clients)
        return np.asarray(np.sqrt(squares))

    def scale(self, factor: Doubles) -> Upload:
        """Every number of a client times its factor."""
        return replace(self, values={name: v.scale(factor) for name, v in self.values.items()})

    def drop_clients(self, dropped: AnyArray) -> Upload:
        """Some clients send nothing."""
        return replace(self, weight=np.where(dropped, 0.0, self.weight))

    def n_bytes(self, fields: Sequence[Spec], whole: bool = False) -> float:
        """Bytes on the wire; `whole`: as whole arrays, not only what was touched."""
        if whole:
            return sum(one.n_bytes for one in fields) * self.n_clients
        by_name = {one.name: one for one in fields}
        return sum(value.n_bytes(by_name[name]) for name, value in self.values.items())


@dataclass(frozen=True)
class CohortReply:
    """What a cohort's devices make of a question; only the upload leaves them."""

    upload: Upload
    state_update: StateUpdate = field(
        default_factory=dict
    )  # name in the device state -> new rows or lists, one per user
    notes: Arrays = field(default_factory=dict)  # name -> (clients,) for the lab's log; nan: nothing
    contributes: Bools | None = None  # (clients,) whose upload holds something of theirs; None: everybody's may


@dataclass(frozen=True)
class PerClientField:
    """One field of single clients, as the one who may see it has it."""

    sender: Keys
    value: Form


@dataclass(frozen=True)
class Total:
    """Weighted sums of fields over clients, and the fields that are seen each by itself."""

    sums: dict[str, Doubles]  # of a sparse field a `SparseSum`, which adds up as arrays do
    weight: float = 0.0
    n_clients: int = 0
    each: dict[str, PerClientField] = field(default_factory=dict)
    nonce: int = 0  # of all uploads in it, in any order; stays where they were added
    symmetric: dict[str, int] = field(default_factory=dict)  # 1: a sum is symmetric by what it is, whatever the data

    def __getitem__(self, name: str) -> Any:
        return self.sums[name]

    def with_sums(self, changed: dict[str, Doubles]) -> Total:
        return replace(self, sums={**self.sums, **changed})


def wire_bytes(array: AnyArray) -> int:
    """Dense, or as (index, value) pairs where that is smaller."""
    return min(array.nbytes, (4 + array.itemsize) * int(np.count_nonzero(array)))


def touched_name(name: str) -> str:
    """The sum that says which rows of a field were touched, by what weight."""
    return f"{name}.touched"


def empty_total(fields: Sequence[Spec]) -> Total:
    sums: dict[str, Any] = {}
    for one in fields:
        if one.seen == "summed":
            sums[one.name] = SparseSum(one.shape) if one.sparse else np.zeros(one.shape)
        if one.touched:
            sums[touched_name(one.name)] = np.zeros(one.shape[:1])
    return Total(sums, symmetric=find_symmetric(fields))


def find_symmetric(fields: Sequence[Spec]) -> dict[str, int]:
    return {one.name: 1 for one in fields if one.symmetric}


def add_upload(total: Total, upload: Upload, fields: Sequence[Spec], exact: bool = False) -> Total:
    """Add a cohort's uploads; reuses the total's buffers. `exact`: in whole numbers of a quantum, in any order."""
    by_name = {one.name: one for one in fields}
    _check_upload(upload, by_name)
    keep = np.flatnonzero(upload.weight > 0)
    counts = _quantise_weights(upload.weight) if exact else upload.weight
    each = dict(total.each)
    for name, value in upload.values.items():
        one = by_name[name]
        if one.seen == "each":
            own = PerClientField(upload.sender[keep].copy(), value.take_clients(keep))
            each[name] = own if name not in each else _join_fields(each[name], own)
            continue
        if one.sparse and isinstance(value, CooccurrenceTerms):
            total.sums[name] = total.sums[name] + value.lower_triangle(upload.weight)
            continue
        if one.touched and isinstance(value, SparseRows):
            value = value.apply_factor()  # what touched a row counts by its weight alone
        touched = total.sums[touched_name(name)] if one.touched else np.zeros(one.shape[0] if one.shape else 0)
        if not exact:
            value.add_to(total.sums[name], touched, upload.weight)
            continue
        _quantise_value(value, upload.weight).add_to(
            total.sums[name], np.zeros_like(touched), (upload.weight > 0).astype(np.float64)
        )
        if isinstance(value, SparseRows):
            np.add.at(touched, value.item, counts[value.client])
        elif isinstance(value, DenseArrays):
            touched += counts.sum()
    weight = np.add.accumulate(np.append(total.weight, counts))[-1]  # one by one, as the sums are
    nonce = total.nonce if upload.nonce is None else total.nonce ^ int(np.bitwise_xor.reduce(upload.nonce[keep]))
    return Total(total.sums, float(weight), total.n_clients + len(keep), each, nonce, total.symmetric)


def _quantise_weights(weight: Doubles) -> Doubles:
    """Weights in whole numbers of the quantum; who counts at all counts one of them at least."""
    return np.asarray(np.where(weight > 0, np.maximum(np.rint(weight / QUANTUM), 1.0) * QUANTUM, 0.0))


def _quantise_value(value: Form, weight: Doubles) -> Form:
    """The same times the weights, every number rounded to the quantum."""
    if isinstance(value, OuterProducts | SequenceTerms):  # whole numbers already
        return value.scale(weight)
    by = weight if isinstance(value, DenseArrays) else weight[value.client]
    if isinstance(value, SparseRows):
        value = value.apply_factor()
    if isinstance(value, CooccurrenceTerms):
        return replace(value, factor=np.rint(value.factor * by / QUANTUM) * QUANTUM)
    by = by.reshape(-1, *[1] * (value.value.ndim - 1))
    return replace(value, value=np.rint(value.value * by / QUANTUM) * QUANTUM)


def _join_fields(first: PerClientField, second: PerClientField) -> PerClientField:
    value = second.value.prepend(first.value, len(first.sender))  # type: ignore[arg-type]
    return PerClientField(np.concatenate([first.sender, second.sender]), value)


def merge_totals(a: Total, b: Total) -> Total:
    """The total of two groups of clients."""
    for name in a.sums.keys() | b.sums.keys():
        if name not in a.sums or name not in b.sums:
            raise TacitaError(f"only one of two sums holds '{name}'; nothing was added.")
        check_shape(name, b.sums[name].shape, a.sums[name].shape)
    each = {**a.each, **b.each}
    for name in a.each.keys() & b.each.keys():
        each[name] = _join_fields(a.each[name], b.each[name])
    sums = {name: v + b.sums[name] for name, v in a.sums.items()}
    both = a.symmetric | b.symmetric
    return Total(sums, a.weight + b.weight, a.n_clients + b.n_clients, each, a.nonce ^ b.nonce, both)


def _check_upload(upload: Upload, fields: dict[str, Spec]) -> None:
    """Refuse an upload that is not what was asked for, before any of it is added."""
    check_shape("weight", upload.weight.shape, (upload.n_clients,))
    check_shape("sender", upload.sender.shape, (upload.n_clients,))
    if not (np.isfinite(upload.weight).all() and (upload.weight >= 0).all()):
        raise TacitaError("an upload's weights must be finite and not negative.")
    for name, value in upload.values.items():
        if name not in fields:
            raise TacitaError(f"an upload holds '{name}', which was not asked for.")
        value.check(fields[name], upload.n_clients)
