"""Bounds of a reply: no field holds more than so many people could have put into it.

How many people a node has is its own word, which nobody can check; all the rest must fit that word. This keeps wrong
sums from breaking a run. It does not keep a node from bending a model within what its people could have sent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays
from tacita.live.per_client_arrays import is_valid_client_field, list_client_array_names
from tacita.live.wire import Reply, ReplyHead, list_sum_specs
from tacita.messages import Spec

SLACK = 1.001, 1 + 1e-9  # of sums in single and in double precision
TILE = 1024


@dataclass(frozen=True)
class ExpectedSum:
    """The sum that a question asks for."""

    fields: tuple[Spec, ...]
    most_weight: float = 1.0  # of one person
    equal_weights: bool = True  # every person weighs 1
    may_drop: bool = False  # people may take part and then send nothing
    is_sampled: bool = False  # people take part by chance, so more or fewer than expected do
    has_item_counts: bool = False  # fields say how many people have each item, and pairs of items are summed
    most_people: int | None = None  # a node does not say how many people are in its sum: bounds are for this many
    inputs: AnyArray | None = None  # the items that the rows of pairs are about; None: all


def check_total(reply: Reply, expected: ExpectedSum) -> None:
    """Refuse a sum that does not fit the question, before anything of its size is made, or that is too large."""
    specs = list_sum_specs(expected.fields)
    head = reply.head
    _check_shapes(reply, specs, expected.fields)
    _check_weight(head, expected)
    if not _is_plausible_client_count(head, expected):
        raise _excess_error("expected", head)
    arrays = reply.arrays
    weight = head.weight if expected.most_people is None else float(expected.most_people)
    for spec in specs:
        name = spec.name
        if name not in arrays:
            name = f"{name}/value"
        upper = np.array(_compute_upper_bound(spec, weight))
        _check_bounds(name, arrays[name], upper, head, spec.least)
    if expected.has_item_counts:
        _check_pair_counts(reply, expected)


def _check_weight(head: ReplyHead, expected: ExpectedSum) -> None:
    is_too_heavy = head.weight > head.clients * expected.most_weight
    is_unequal = expected.equal_weights and head.weight != head.clients
    if is_too_heavy or is_unequal:
        raise _excess_error("weight", head)


def _compute_upper_bound(spec: Spec, weight: float) -> float:
    """What a sum can hold at most; noise has no bound."""
    if not np.isfinite(spec.most):
        return np.inf
    return SLACK[spec.exact] * weight * spec.most


def _is_plausible_client_count(head: ReplyHead, expected: ExpectedSum) -> bool:
    """Whether so many can have taken part of those who were to: exactly they, or a number that chance may give."""
    deviation = 0.0
    if expected.is_sampled:
        deviation = 8 * (head.expected**0.5 + 1)
    if head.clients > head.expected + deviation:
        return False
    return expected.may_drop or head.expected <= head.clients + deviation


# Shapes


def _check_shapes(reply: Reply, specs: list[Spec], fields: tuple[Spec, ...]) -> None:
    """Every field is there once, whole or as places and values, in its kind, and nothing else."""
    arrays = reply.arrays
    allowed_names: set[str] = set()
    for spec in fields:
        if spec.seen == "each":
            allowed_names |= list_client_array_names(spec)
            if not is_valid_client_field(spec, arrays, reply.head.clients):
                raise _misfit_error(spec.name)
    for spec in specs:
        if spec.name in arrays:
            is_valid = _is_valid_dense(spec, arrays[spec.name])
            allowed_names.add(spec.name)
        else:
            is_valid = _is_valid_sparse(spec, arrays)
            allowed_names |= {f"{spec.name}/at", f"{spec.name}/value"}
        if not is_valid:
            raise _misfit_error(spec.name)
    unexpected_names = sorted(arrays.keys() - allowed_names)
    if unexpected_names:
        raise _misfit_error(unexpected_names[0])


def _is_valid_dense(spec: Spec, array: AnyArray) -> bool:
    shape = spec.shape or (1,)
    return array.shape == shape and array.dtype == _find_value_type(spec)


def _is_valid_sparse(spec: Spec, arrays: Arrays) -> bool:
    """Whether a field travels as places inside its shape, with a value for each."""
    name = spec.name
    place = arrays.get(f"{name}/at", np.zeros((0, 0)))
    value = arrays.get(f"{name}/value", np.zeros(0))
    if place.ndim != 1 or place.dtype.kind != "i":
        return False
    if value.shape != place.shape:
        return False
    if value.dtype != _find_value_type(spec):
        return False
    if len(place) == 0:
        return True
    size = int(np.prod(spec.shape))
    first = int(place.min())
    last = int(place.max())
    return first >= 0 and last < size


def _find_value_type(spec: Spec) -> np.dtype[Any]:
    return np.dtype(np.float64 if spec.exact else np.float32)


def _misfit_error(name: str) -> TacitaError:
    return TacitaError(f"the node's reply does not fit what was asked: see '{name[:100]}'.")


# Bounds


def _check_pair_counts(reply: Reply, expected: ExpectedSum) -> None:
    """A pair of items is with at most as many people as either of them."""
    arrays = reply.arrays
    head = reply.head
    total = reply.read_total(expected.fields)
    for spec in expected.fields:
        if len(spec.shape) != 2:
            continue
        name = spec.name
        n_rows, n_columns = spec.shape
        column_bound = SLACK[1] * spec.most * total[spec.counted]
        row_bound = column_bound
        if expected.inputs is not None:
            row_bound = column_bound[expected.inputs]
        places = arrays.get(f"{name}/at")
        if places is not None:
            row, column = np.divmod(places, n_columns)
            upper = np.minimum(row_bound[row], column_bound[column])
            value_name = f"{name}/value"
            _check_bounds(value_name, arrays[value_name], upper, head)
            continue
        for start in range(0, n_rows, TILE):
            tile = slice(start, start + TILE)
            upper = np.minimum(row_bound[tile, None], column_bound[None, :])
            _check_bounds(name, arrays[name][tile], upper, head)


def check_scores(reply: Reply, names: Collection[str]) -> None:
    """Refuse scores that nobody can have."""
    head = reply.head
    if reply.arrays:
        first_name = next(iter(reply.arrays))
        raise TacitaError(f"the node's reply holds '{first_name[:100]}', which was not asked for.")
    for name, (total, n_users) in head.sums.items():
        if name not in names:
            raise TacitaError(f"the node's reply holds a score '{name[:100]}', which was not asked for.")
        has_users = 0 <= n_users <= head.clients
        upper = n_users * (1 + 1e-9)
        if not has_users or not 0 <= total <= upper:
            raise _excess_error(f"sums/{name}", head)


def _check_bounds(name: str, value: AnyArray, upper: AnyArray, head: ReplyHead, least: float = 0.0) -> None:
    """Refuse what is above `upper`, below `least`, or in size above `upper` where there is no least."""
    size = np.abs(value) if least < 0 else value
    is_above = size >= max(least, 0.0)
    is_below = size <= upper
    if not (is_above & is_below).all():
        raise _excess_error(name, head)


def _excess_error(name: str, head: ReplyHead) -> TacitaError:
    people = "1 person" if head.clients == 1 else f"{head.clients:,} people"
    return TacitaError(
        f"the node's reply holds in '{name}' what {people} cannot have said; the node is wrong, or training diverged."
    )
