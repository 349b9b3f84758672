"""How a field is laid out: its `Spec`, and the forms in which a cohort's clients hold it, each of which adds up.

Where two of them meet their shapes are compared: compiled loops trust them, and numpy would stretch what is too narrow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse

from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Doubles, Ints, Longs, Ragged
from tacita.kernels.pairs import context_sums, lag_products, next_sums, pair_sums
from tacita.kernels.steps import fold_rows

_SMALL_FIELD = 64  # numbers of a client that are added without a loop over clients
QUANTUM = 2.0**-24  # of the exact sums of the aggregator `ideal`; sums stay whole numbers of it below 2^53


@dataclass(frozen=True)
class Spec:
    """One named thing that leaves a device, as one client has it."""

    name: str
    shape: tuple[int, ...]
    seen: Literal["summed", "each"] = "summed"  # only in a sum, or each client's by itself
    by: str = "server"  # who sees it
    most: float = np.inf  # the most that one client of weight 1 may put into one number, in absolute value
    least: float = -np.inf  # 0: never negative
    exact: bool = False  # travels in double precision, so that it can be taken back exactly
    touched: bool = False  # the weight that touched each row is summed beside it
    symmetric: bool = False  # half of it is enough
    sparse: bool = False  # its sum is a `SparseSum` of lower triangles, which no node sends: too large to be an array
    about: str = ""  # in plain words, for the people's log
    counted: str = "touched"  # of pairs of items: the field that says how many people have each item

    @property
    def n_bytes(self) -> float:
        """Whole, as a masked upload would be, in single precision."""
        size = float(np.prod(self.shape))
        return 2 * (size + self.shape[0]) if self.symmetric else 4 * size


@dataclass(frozen=True)
class SparseRows:
    """Some rows of each client's array: `value[r]` for row `item[r]` of `client[r]`, clients ascending."""

    client: Ints
    item: Ints
    value: AnyArray  # (rows, *shape[1:])
    factor: Doubles | None = None  # (clients,) what a client's rows are multiplied by as they are added: saves a copy

    def check(self, field: Spec, n_clients: int) -> None:
        rows = len(self.item)
        check_shape(field.name, self.value.shape, (rows, *field.shape[1:]))
        check_shape(f"{field.name}, clients", self.client.shape, (rows,))
        for what, ids, below in (("item", self.item, field.shape[0]), ("client", self.client, n_clients)):
            if rows and not 0 <= int(ids.min()) <= int(ids.max()) < below:
                raise TacitaError(f"an upload's '{what}' numbers of '{field.name}' must lie from 0 to {below - 1}.")

    def apply_factor(self) -> SparseRows:
        """The same with the factor multiplied in."""
        return self if self.factor is None else replace(self, factor=None).scale(self.factor)

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        if self.factor is not None:
            replace(self, factor=None).add_to(total, touched, weight * self.factor)
        elif total.ndim == 2:
            fold_rows(self.client, self.item, self.value, weight, total, touched)
        else:
            np.add.at(total, self.item, weight[self.client] * self.value)
            np.add.at(touched, self.item, weight[self.client])

    def squared_norms(self, n_clients: int) -> Doubles:
        each = (self.value.astype(np.float64) ** 2).sum(axis=tuple(range(1, self.value.ndim)))
        found = np.bincount(self.client, weights=each, minlength=n_clients).astype(np.float64)
        return found if self.factor is None else found * self.factor**2

    def scale(self, factor: Doubles) -> SparseRows:
        by = factor[self.client].reshape(-1, *[1] * (self.value.ndim - 1))
        return replace(self, value=(by * self.value).astype(self.value.dtype))

    def take_clients(self, clients: Longs) -> SparseRows:
        """The rows of some clients, renumbered, as a copy."""
        if self.factor is not None:
            return self.apply_factor().take_clients(clients)
        place = np.full(int(clients.max(initial=-1)) + 1, -1, np.int32)
        place[clients] = np.arange(len(clients), dtype=np.int32)
        known = self.client < len(place)
        kept = known & (place[np.where(known, self.client, 0)] >= 0) if len(place) else np.zeros(len(self.client), bool)
        return SparseRows(place[self.client[kept]], self.item[kept].copy(), self.value[kept].copy())

    def prepend(self, other: SparseRows, shift: int) -> SparseRows:
        other, mine = other.apply_factor(), self.apply_factor()
        both = zip((other.client, other.item, other.value), (mine.client + np.int32(shift), mine.item, mine.value))
        return SparseRows(*(np.concatenate(pair) for pair in both))

    def n_bytes(self, field: Spec) -> float:
        """Four per number and per id; the channel names the client."""
        return 4.0 * (self.value.size + self.item.size)


@dataclass(frozen=True)
class DenseArrays:
    """A whole array for every client."""

    value: AnyArray  # (clients, *shape)

    def check(self, field: Spec, n_clients: int) -> None:
        check_shape(field.name, self.value.shape, (n_clients, *field.shape))

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        if self.value[:1].size <= _SMALL_FIELD:
            some = np.flatnonzero(weight)
            by = weight[some].reshape(-1, *[1] * (self.value.ndim - 1))
            _add_in_order(total, by * self.value[some].astype(np.float64))
            _add_in_order(touched, np.repeat(weight[some][:, None], len(touched), axis=1))
            return
        for c in np.flatnonzero(weight):  # one by one: the sum must not depend on how clients are chunked
            total += weight[c] * self.value[c].astype(np.float64)
            touched += weight[c]

    def squared_norms(self, n_clients: int) -> Doubles:
        return np.asarray((self.value.astype(np.float64) ** 2).sum(axis=tuple(range(1, self.value.ndim))))

    def scale(self, factor: Doubles) -> DenseArrays:
        by = factor.reshape(-1, *[1] * (self.value.ndim - 1))
        return DenseArrays((by * self.value).astype(self.value.dtype))

    def take_clients(self, clients: Longs) -> DenseArrays:
        return DenseArrays(self.value[clients].copy())

    def prepend(self, other: DenseArrays, shift: int) -> DenseArrays:
        return DenseArrays(np.concatenate([other.value, self.value]))

    def n_bytes(self, field: Spec) -> float:
        return 4.0 * self.value.size


@dataclass(frozen=True)
class _Statistic:
    """What a person is known by once it is read: it is only ever summed."""

    client: Ints  # (lists or vectors,) whose each is, ascending

    def take_clients(self, clients: Longs) -> Any:
        raise TacitaError("a person's statistic is their history: it is summed, never seen by itself.")

    def prepend(self, other: Any, shift: int) -> Any:
        raise TacitaError("a person's statistic is their history: it is summed, never seen by itself.")

    def n_bytes(self, field: Spec) -> float:
        return field.n_bytes * len(np.unique(self.client))


@dataclass(frozen=True)
class CooccurrenceTerms(_Statistic):
    """The sum of factor x x^T over a client's lists, x the mark of a list; rows are the inputs where some are named."""

    ptr: Longs
    item: Ints
    factor: Doubles  # (lists,)
    n_items: int
    inputs: Ints | None = None

    def check(self, field: Spec, n_clients: int) -> None:
        rows = self.n_items if self.inputs is None else len(self.inputs)
        check_shape(field.name, (rows, self.n_items), field.shape)
        check_shape(f"{field.name}, lists", self.factor.shape, self.client.shape)
        for what, ids, below in (("item", self.item, self.n_items), ("client", self.client, n_clients)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < below:
                raise TacitaError(f"an upload's '{what}' numbers of '{field.name}' must lie from 0 to {below - 1}.")

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        owner = np.repeat(np.arange(len(self.factor), dtype=np.int32), np.diff(self.ptr))
        order = np.argsort(self.item, kind="stable")
        ptr = np.zeros(self.n_items + 1, np.int64)
        np.cumsum(np.bincount(self.item, minlength=self.n_items), out=ptr[1:])
        rows = np.arange(self.n_items, dtype=np.int32) if self.inputs is None else self.inputs
        pair_sums(rows, ptr, owner[order], self.ptr, self.item, weight[self.client] * self.factor, total)

    def lower_triangle(self, weight: Doubles) -> scipy.sparse.csr_array:
        """The lower triangle of the sum, where all items are inputs: of whole numbers of a quantum, so that it is
        exact in any order and chunk."""
        by = np.rint(weight[self.client] * self.factor / QUANTUM) * QUANTUM
        size = np.diff(self.ptr)
        marks = matrix_of_rows(self.ptr, self.item, np.ones(len(self.item)), self.n_items)
        weighed = matrix_of_rows(self.ptr, self.item, np.repeat(by, size), self.n_items)
        found = scipy.sparse.tril(weighed.T.tocsr() @ marks, format="csr")
        found.eliminate_zeros()
        return found

    def squared_norms(self, n_clients: int) -> Doubles:
        """|f x x^T| is f |x|^2, counted over all items; lists of one client may add up at most."""
        length = np.abs(self.factor) * np.diff(self.ptr)
        return np.bincount(self.client, weights=length, minlength=n_clients).astype(np.float64) ** 2

    def scale(self, factor: Doubles) -> CooccurrenceTerms:
        return replace(self, factor=self.factor * factor[self.client])


@dataclass(frozen=True)
class OuterProducts(_Statistic):
    """The sum of sign v v^T over a client's vectors of whole numbers of a quantum: exact in any order and chunk."""

    vector: Doubles  # (vectors, width)
    sign: Doubles  # (vectors,) 1, or -1 for what is taken back

    def check(self, field: Spec, n_clients: int) -> None:
        width = self.vector.shape[1]
        check_shape(field.name, (width, width), field.shape)
        check_shape(f"{field.name}, vectors", (*self.sign.shape, width), self.vector.shape)
        check_shape(f"{field.name}, clients", self.client.shape, self.sign.shape)
        if len(self.client) and not 0 <= int(self.client.min()) <= int(self.client.max()) < n_clients:
            raise TacitaError(f"an upload's 'client' numbers of '{field.name}' must lie from 0 to {n_clients - 1}.")

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        by = self.sign * weight[self.client]
        weighed = self.vector if (by == 1).all() else self.vector * by[:, None]
        total += weighed.T @ self.vector

    def squared_norms(self, n_clients: int) -> Doubles:
        """|v v^T| is |v|^2; vectors of one client may add up at most."""
        length = np.abs(self.sign) * (self.vector**2).sum(axis=1)
        return np.bincount(self.client, weights=length, minlength=n_clients).astype(np.float64) ** 2

    def scale(self, factor: Doubles) -> OuterProducts:
        return replace(self, sign=self.sign * factor[self.client])


@dataclass(frozen=True)
class SequenceTerms(_Statistic):
    """Over a client's lists, for every place from `start` on, h h^T, or h e^T: h what came before, e the item there.

    What came j places before weighs `fall[j - 1]`. All that is added is a whole number of the quantum: exact in any
    order and chunk.
    """

    lists: Ragged  # oldest first
    start: Longs  # (lists,) the first place that counts; earlier ones are only looked back at
    factor: Doubles  # (lists,) 1, or -1 for what is taken back
    fall: Doubles  # (window,)
    n_items: int
    meets: Literal["itself", "next"]  # what h is multiplied with

    def check(self, field: Spec, n_clients: int) -> None:
        check_shape(field.name, (self.n_items, self.n_items), field.shape)
        for what, ids, below in (("item", self.lists.ids, self.n_items), ("client", self.client, n_clients)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < below:
                raise TacitaError(f"an upload's '{what}' numbers of '{field.name}' must lie from 0 to {below - 1}.")
        one = self.client.shape
        if not one == self.start.shape == self.factor.shape == (len(self.lists),) or (self.start < 0).any():
            raise TacitaError(f"the lists of '{field.name}' of an upload do not fit together; nothing was added.")

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        told, by = self.lists, self.factor * weight[self.client]
        if self.meets == "next":
            next_sums(told.ptr, told.ids, self.start, by, self.fall, QUANTUM, total)
        else:
            context_sums(told.ptr, told.ids, self.start, by, lag_products(self.fall), QUANTUM, total)

    def squared_norms(self, n_clients: int) -> Doubles:
        """No h is longer than the sum of its weights; places of one client may add up at most."""
        power = 1 if self.meets == "next" else 2
        places = np.maximum(self.lists.counts() - np.maximum(self.start, 1), 0)
        length = np.abs(self.factor) * places * self.fall.sum() ** power
        return np.bincount(self.client, weights=length, minlength=n_clients).astype(np.float64) ** 2

    def scale(self, factor: Doubles) -> SequenceTerms:
        return replace(self, factor=self.factor * factor[self.client])


def _add_in_order(total: Doubles, more: Doubles) -> None:
    """Add one after the other: the sum must not depend on how clients are chunked."""
    total[...] = np.add.accumulate(np.concatenate([total[None], more]))[-1]


Form = SparseRows | DenseArrays | CooccurrenceTerms | OuterProducts | SequenceTerms


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise TacitaError(f"'{name}' of an upload has shape {shape}, where the model has {wanted}; nothing was added.")
