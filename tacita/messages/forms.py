"""The layout of a field: its `Spec`, and the forms in which a cohort's clients hold it; each form can be summed.

Shapes are compared before arrays are combined: compiled loops trust them, and numpy would broadcast a narrow one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse

from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Doubles, Ints, Longs, Ragged
from tacita.kernels.pairs import (
    add_context_sums,
    add_next_sums,
    add_pair_sums,
    find_item_places,
    sum_lag_products,
)
from tacita.kernels.steps import add_weighted_rows

_SMALL_FIELD = 64  # numbers of a client that are added without a loop over clients
QUANTUM = 2.0**-24  # of the exact sums of the aggregator `ideal`; sums stay whole numbers of it below 2^53


@dataclass(frozen=True)
class Spec:
    """One named field that leaves a device, as one client has it."""

    name: str
    shape: tuple[int, ...]
    seen: Literal["summed", "each"] = "summed"  # only in a sum, or each client's by itself
    by: str = "server"  # who sees it
    most: float = np.inf  # the most that one client of weight 1 may put into one number, in absolute value
    least: float = -np.inf  # 0: never negative
    exact: bool = False  # travels in double precision, so that it can be withdrawn exactly
    touched: bool = False  # the weight that touched each row is summed as well
    symmetric: bool = False  # half of it is enough
    sparse: bool = False  # its sum is a `SparseSum` of lower triangles, which no node sends: too large to be an array
    about: str = ""  # in plain words, for the people's log
    counted: str = "touched"  # of pairs of items: the field that counts the users of each item

    @property
    def n_bytes(self) -> float:
        """Whole, as a masked upload would be, in single precision."""
        size = float(np.prod(self.shape))
        if self.symmetric:
            return 2 * (size + self.shape[0])
        return 4 * size


@dataclass(frozen=True)
class SparseRows:
    """Some rows of each client's array: `value[r]` for row `item[r]` of `client[r]`, clients ascending."""

    client: Ints
    item: Ints
    value: AnyArray  # (rows, *shape[1:])
    factor: Doubles | None = None  # (clients,) what a client's rows are multiplied by as they are added: saves a copy

    def check(self, field: Spec, n_clients: int) -> None:
        n_rows = len(self.item)
        wanted = (n_rows, *field.shape[1:])
        check_shape(field.name, self.value.shape, wanted)
        check_shape(f"{field.name}, clients", self.client.shape, (n_rows,))
        n_items = field.shape[0]
        _check_numbers(field, "item", self.item, n_items)
        _check_numbers(field, "client", self.client, n_clients)

    def apply_factor(self) -> SparseRows:
        """The same with the factor multiplied in."""
        if self.factor is None:
            return self
        plain = replace(self, factor=None)
        return plain.scale(self.factor)

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        if self.factor is not None:
            plain = replace(self, factor=None)
            plain.add_to(total, touched, weight * self.factor)
        elif total.ndim == 2:
            add_weighted_rows(self.client, self.item, self.value, weight, total, touched)
        else:
            row_weight = weight[self.client]
            weighted = row_weight * self.value
            np.add.at(total, self.item, weighted)
            np.add.at(touched, self.item, row_weight)

    def squared_norms(self, n_clients: int) -> Doubles:
        row_squares = _sum_squares(self.value)
        sums = np.bincount(self.client, weights=row_squares, minlength=n_clients)
        squares = sums.astype(np.float64)
        if self.factor is None:
            return squares
        return squares * self.factor**2

    def scale(self, factor: Doubles) -> SparseRows:
        row_factor = factor[self.client]
        scaled = _scale_rows(self.value, row_factor)
        return replace(self, value=scaled)

    def take_clients(self, clients: Longs) -> SparseRows:
        """The rows of some clients, renumbered, as a copy."""
        if self.factor is not None:
            return self.apply_factor().take_clients(clients)
        last_wanted = int(clients.max(initial=-1))
        last_client = int(self.client.max(initial=-1))
        n_places = 1 + max(last_wanted, last_client)
        n_wanted = len(clients)
        place = np.full(n_places, -1, np.int32)
        place[clients] = np.arange(n_wanted, dtype=np.int32)
        new_client = place[self.client]
        is_wanted = new_client >= 0
        client = new_client[is_wanted]
        item = self.item[is_wanted]
        value = self.value[is_wanted]
        return SparseRows(client, item, value)

    def prepend(self, other: SparseRows, shift: int) -> SparseRows:
        first = other.apply_factor()
        second = self.apply_factor()
        shifted_client = second.client + np.int32(shift)
        return SparseRows(
            client=np.concatenate([first.client, shifted_client]),
            item=np.concatenate([first.item, second.item]),
            value=np.concatenate([first.value, second.value]),
        )

    def count_total_bytes(self, field: Spec) -> float:
        """Four per number and per id; the channel names the client."""
        n_numbers = self.value.size + self.item.size
        return 4.0 * n_numbers


@dataclass(frozen=True)
class DenseArrays:
    """A whole array for every client."""

    value: AnyArray  # (clients, *shape)

    def check(self, field: Spec, n_clients: int) -> None:
        wanted = (n_clients, *field.shape)
        check_shape(field.name, self.value.shape, wanted)

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        if self.value[:1].size <= _SMALL_FIELD:
            self._add_small(total, touched, weight)
            return
        for client in np.flatnonzero(weight):  # one by one: the sum must not depend on how clients are chunked
            value = self.value[client]
            client_weight = weight[client]
            total += client_weight * value.astype(np.float64)
            touched += client_weight

    def _add_small(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        """Add without a loop over clients."""
        clients = np.flatnonzero(weight)
        client_weight = weight[clients]
        values = self.value[clients]
        factor = as_column(client_weight, values.ndim)
        weighted = factor * values.astype(np.float64)
        _add_in_order(total, weighted)
        n_rows = len(touched)
        column = client_weight[:, None]
        touches = np.repeat(column, n_rows, axis=1)
        _add_in_order(touched, touches)

    def squared_norms(self, n_clients: int) -> Doubles:
        return np.asarray(_sum_squares(self.value))

    def scale(self, factor: Doubles) -> DenseArrays:
        scaled = _scale_rows(self.value, factor)
        return DenseArrays(scaled)

    def take_clients(self, clients: Longs) -> DenseArrays:
        return DenseArrays(self.value[clients].copy())

    def prepend(self, other: DenseArrays, shift: int) -> DenseArrays:
        value = np.concatenate([other.value, self.value])
        return DenseArrays(value)

    def count_total_bytes(self, field: Spec) -> float:
        return 4.0 * self.value.size


@dataclass(frozen=True)
class _Statistic:
    """A statistic that identifies a user once it is read: it is only ever summed."""

    client: Ints  # (lists or vectors,) the owner of each, ascending

    def take_clients(self, clients: Longs) -> Any:
        raise TacitaError("a person's statistic is their history: it is summed, never seen by itself.")

    def prepend(self, other: Any, shift: int) -> Any:
        raise TacitaError("a person's statistic is their history: it is summed, never seen by itself.")

    def count_total_bytes(self, field: Spec) -> float:
        n_clients = len(np.unique(self.client))
        return field.n_bytes * n_clients


@dataclass(frozen=True)
class CooccurrenceTerms(_Statistic):
    """The sum of factor x x^T over a client's lists, x the mark of a list; rows are the inputs where some are named."""

    ptr: Longs
    item: Ints
    factor: Doubles  # (lists,)
    n_items: int
    inputs: Ints | None = None

    def check(self, field: Spec, n_clients: int) -> None:
        n_rows = len(self._list_row_items())
        shape = (n_rows, self.n_items)
        check_shape(field.name, shape, field.shape)
        check_shape(f"{field.name}, lists", self.factor.shape, self.client.shape)
        _check_numbers(field, "item", self.item, self.n_items)
        _check_numbers(field, "client", self.client, n_clients)

    def _list_row_items(self) -> Ints:
        """The items that have a row: the inputs, or all."""
        if self.inputs is None:
            return np.arange(self.n_items, dtype=np.int32)
        return self.inputs

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        list_weight = weight[self.client]
        factor = list_weight * self.factor
        rows = self._list_row_items()
        holders = find_item_places(self.ptr, self.item, self.n_items)
        item = self.item.astype(np.uint32)  # never negative, which the loop need not check then
        add_pair_sums(rows, holders.ptr, holders.owner, self.ptr, item, factor, total)

    def sum_lower_triangle(self, weight: Doubles) -> scipy.sparse.csr_array:
        """The lower triangle of the sum, where all items are inputs.

        Its numbers are whole multiples of a quantum, so it is exact in any order and chunk.
        """
        list_weight = weight[self.client]
        factor = round_to_quantum(list_weight * self.factor)
        lengths = np.diff(self.ptr)
        entry_factor = np.repeat(factor, lengths)
        ones = np.ones(len(self.item))
        marks = matrix_of_rows(self.ptr, self.item, ones, self.n_items)
        weighted = matrix_of_rows(self.ptr, self.item, entry_factor, self.n_items)
        sums = weighted.T.tocsr() @ marks
        triangle = scipy.sparse.tril(sums, format="csr")
        triangle.eliminate_zeros()
        return triangle

    def squared_norms(self, n_clients: int) -> Doubles:
        """|f x x^T| is f |x|^2, counted over all items; lists of one client may add up at most."""
        n_entries = np.diff(self.ptr)
        length = np.abs(self.factor) * n_entries
        return _square_summed_lengths(self.client, length, n_clients)

    def scale(self, factor: Doubles) -> CooccurrenceTerms:
        list_factor = factor[self.client]
        return replace(self, factor=self.factor * list_factor)


@dataclass(frozen=True)
class OuterProducts(_Statistic):
    """The sum of sign v v^T over a client's vectors of whole numbers of a quantum: exact in any order and chunk."""

    vector: Doubles  # (vectors, width)
    sign: Doubles  # (vectors,) 1, or -1 for a withdrawn one

    def check(self, field: Spec, n_clients: int) -> None:
        width = self.vector.shape[1]
        shape = (width, width)
        check_shape(field.name, shape, field.shape)
        vector_shape = (*self.sign.shape, width)
        check_shape(f"{field.name}, vectors", vector_shape, self.vector.shape)
        check_shape(f"{field.name}, clients", self.client.shape, self.sign.shape)
        _check_numbers(field, "client", self.client, n_clients)

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        vector_weight = weight[self.client]
        factor = self.sign * vector_weight
        weighted = self.vector
        if not (factor == 1).all():
            weighted = self.vector * factor[:, None]
        total += weighted.T @ self.vector

    def squared_norms(self, n_clients: int) -> Doubles:
        """|v v^T| is |v|^2; vectors of one client may add up at most."""
        squares = (self.vector**2).sum(axis=1)
        length = np.abs(self.sign) * squares
        return _square_summed_lengths(self.client, length, n_clients)

    def scale(self, factor: Doubles) -> OuterProducts:
        vector_factor = factor[self.client]
        return replace(self, sign=self.sign * vector_factor)


@dataclass(frozen=True)
class SequenceTerms(_Statistic):
    """Over a client's lists, for every place from `start` on, h h^T, or h e^T: h sums earlier items, e is the item.

    An item j places before weighs `fall[j - 1]`. Every addend is a whole multiple of the quantum: exact in any order
    and chunk.
    """

    lists: Ragged  # oldest first
    start: Longs  # (lists,) the first place that counts; earlier ones are only looked back at
    factor: Doubles  # (lists,) 1, or -1 for a withdrawn one
    fall: Doubles  # (window,)
    n_items: int
    meets: Literal["itself", "next"]  # what h is multiplied with

    def check(self, field: Spec, n_clients: int) -> None:
        square = (self.n_items, self.n_items)
        check_shape(field.name, square, field.shape)
        _check_numbers(field, "item", self.lists.ids, self.n_items)
        _check_numbers(field, "client", self.client, n_clients)
        if not self._has_consistent_lists():
            raise TacitaError(f"the lists of '{field.name}' of an upload do not fit together; nothing was added.")

    def _has_consistent_lists(self) -> bool:
        """Whether every list has a client, a factor and a start that is not negative."""
        shape = (len(self.lists),)
        for column in (self.client, self.start, self.factor):
            if column.shape != shape:
                return False
        is_negative = self.start < 0
        return not is_negative.any()

    def add_to(self, total: Doubles, touched: Doubles, weight: Doubles) -> None:
        ptr = self.lists.ptr
        ids = self.lists.ids
        list_weight = weight[self.client]
        factor = self.factor * list_weight
        places = find_item_places(ptr, ids, self.n_items)
        item = ids.astype(np.uint32)  # never negative, which the loops need not check then
        if self.meets == "next":
            add_next_sums(places, ptr, item, self.start, factor, self.fall, QUANTUM, total)
        else:
            products = sum_lag_products(self.fall)
            add_context_sums(places, ptr, item, self.start, factor, products, QUANTUM, total)

    def squared_norms(self, n_clients: int) -> Doubles:
        """No h is longer than the sum of its weights; places of one client may add up at most."""
        power = 1 if self.meets == "next" else 2
        first_place = np.maximum(self.start, 1)
        later_places = self.lists.counts() - first_place
        n_places = np.maximum(later_places, 0)
        bound = self.fall.sum() ** power
        factor = np.abs(self.factor)
        length = factor * n_places * bound
        return _square_summed_lengths(self.client, length, n_clients)

    def scale(self, factor: Doubles) -> SequenceTerms:
        list_factor = factor[self.client]
        return replace(self, factor=self.factor * list_factor)


def _add_in_order(total: Doubles, more: Doubles) -> None:
    """Add one after the other: the sum must not depend on how clients are chunked."""
    addends = np.concatenate([total[None], more])
    partial_sums = np.add.accumulate(addends)
    total[...] = partial_sums[-1]


def as_column(values: Doubles, ndim: int) -> Doubles:
    """One number per client or row, shaped to multiply arrays of so many dimensions."""
    other_axes = [1] * (ndim - 1)
    return values.reshape(-1, *other_axes)


def _scale_rows(values: AnyArray, factor: Doubles) -> AnyArray:
    """Each array along the first axis times its factor, of the same kind."""
    scaled = np.empty_like(values)
    column = as_column(factor, values.ndim)
    return np.multiply(column, values, out=scaled, casting="same_kind")  # in double precision, without a copy in it


def round_to_quantum(values: AnyArray) -> AnyArray:
    """The nearest whole multiples of the quantum."""
    multiples = np.rint(values / QUANTUM)
    return np.asarray(multiples * QUANTUM)


def _sum_squares(values: AnyArray) -> Doubles:
    """The squared length of each array along the first axis."""
    other_axes = tuple(range(1, values.ndim))
    squares = np.square(values, dtype=np.float64)
    return np.asarray(squares.sum(axis=other_axes))


def _square_summed_lengths(client: Ints, length: Doubles, n_clients: int) -> Doubles:
    """The squares of each client's summed lengths."""
    sums = np.bincount(client, weights=length, minlength=n_clients)
    return sums.astype(np.float64) ** 2


Form = SparseRows | DenseArrays | CooccurrenceTerms | OuterProducts | SequenceTerms


Shape = tuple[int, ...]


def check_shape(name: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise TacitaError(f"'{name}' of an upload has shape {shape}, where the model has {wanted}; nothing was added.")


def _check_numbers(field: Spec, what: str, numbers: Ints, below: int) -> None:
    if not len(numbers):
        return
    lowest = int(numbers.min())
    highest = int(numbers.max())
    most = below - 1
    if lowest < 0 or highest > most:
        raise TacitaError(f"an upload's '{what}' numbers of '{field.name}' must lie from 0 to {most}.")
