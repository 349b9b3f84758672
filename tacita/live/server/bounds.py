"""Whether a reply can be what so many people said: no field holds more than they could have put into it.

How many people a node has is its own word, which nobody can check; all the rest must fit that word. This keeps wrong
sums from breaking a run. It does not keep a node from bending a model within what its people could have said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray
from tacita.live.per_client_arrays import client_array_names, is_valid_client_field
from tacita.live.wire import Reply, ReplyHead, list_sum_specs
from tacita.messages import Spec

SLACK = 1.001, 1 + 1e-9  # of sums in single and in double precision
TILE = 1024


@dataclass(frozen=True)
class ExpectedSum:
    """The sum that was asked for."""

    fields: tuple[Spec, ...]
    most_weight: float = 1.0  # of one person
    equal_weights: bool = True  # everybody weighs 1
    may_drop: bool = False  # people may take part and then send nothing
    is_sampled: bool = False  # people take part by chance, so more or fewer than expected do
    has_item_counts: bool = False  # fields say how many people have each item, and pairs of items are summed
    inputs: AnyArray | None = None  # the items that the rows of pairs are about; None: all


def check_total(reply: Reply, expected: ExpectedSum) -> None:
    """Refuse a sum that does not fit what was asked, before anything of its size is made, or that is too large."""
    wanted, head, arrays = list_sum_specs(expected.fields), reply.head, reply.arrays
    _check_shapes(reply, wanted, expected.fields)
    if head.weight > head.clients * expected.most_weight or (expected.equal_weights and head.weight != head.clients):
        raise _excess_error("weight", head)
    if not _is_plausible(head, expected):
        raise _excess_error("expected", head)
    for one in wanted:
        name = one.name if one.name in arrays else f"{one.name}/value"
        most = SLACK[one.exact] * head.weight * one.most if np.isfinite(one.most) else np.inf  # noise has no bound
        _check_bounds(name, arrays[name], np.array(most), head, one.least)
    if expected.has_item_counts:
        _check_pairs(reply, expected)


def _is_plausible(head: ReplyHead, asked: ExpectedSum) -> bool:
    """Whether so many can have taken part of those who were to: exactly they, or a number that chance may give."""
    more = 8 * (head.expected**0.5 + 1) if asked.is_sampled else 0.0
    return head.clients <= head.expected + more and (asked.may_drop or head.expected <= head.clients + more)


def _check_shapes(reply: Reply, wanted: list[Spec], fields: tuple[Spec, ...]) -> None:
    """Every field is there once, whole or as places and values, in its kind, and nothing else."""
    arrays = reply.arrays
    fits: set[str] = set()
    for one in fields:
        if one.seen == "each":
            fits |= client_array_names(one)
            if not is_valid_client_field(one, arrays, reply.head.clients):
                raise TacitaError(f"the node's reply does not fit what was asked: see '{one.name[:100]}'.")
    for one in wanted:
        kind = np.dtype(np.float64 if one.exact else np.float32)
        at, value = f"{one.name}/at", f"{one.name}/value"
        if one.name in arrays:
            ok = arrays[one.name].shape == (one.shape or (1,)) and arrays[one.name].dtype == kind
            fits.add(one.name)
        else:
            place, given = arrays.get(at, np.zeros((0, 0))), arrays.get(value, np.zeros(0))
            ok = place.ndim == 1 and place.dtype.kind == "i" and given.shape == place.shape and given.dtype == kind
            size = int(np.prod(one.shape))
            ok = ok and (len(place) == 0 or 0 <= int(place.min()) <= int(place.max()) < size)
            fits |= {at, value}
        if not ok:
            raise TacitaError(f"the node's reply does not fit what was asked: see '{one.name[:100]}'.")
    more = sorted(arrays.keys() - fits)
    if more:
        raise TacitaError(f"the node's reply does not fit what was asked: see '{more[0][:100]}'.")


def _check_pairs(reply: Reply, asked: ExpectedSum) -> None:
    """A pair of items is with at most as many people as either of them."""
    arrays, head, total = reply.arrays, reply.head, reply.read_total(asked.fields)
    for one in asked.fields:
        if len(one.shape) != 2:
            continue
        people = SLACK[1] * one.most * total[one.counted]
        first = people if asked.inputs is None else people[asked.inputs]
        if f"{one.name}/at" in arrays:
            row, col = np.divmod(arrays[f"{one.name}/at"], one.shape[1])
            _check_bounds(f"{one.name}/value", arrays[f"{one.name}/value"], np.minimum(first[row], people[col]), head)
            continue
        for lo in range(0, one.shape[0], TILE):
            most = np.minimum(first[lo : lo + TILE, None], people[None, :])
            _check_bounds(one.name, arrays[one.name][lo : lo + TILE], most, head)


def check_scores(reply: Reply, names: Collection[str]) -> None:
    """Refuse scores that nobody can have."""
    head = reply.head
    if reply.arrays:
        raise TacitaError(f"the node's reply holds '{next(iter(reply.arrays))[:100]}', which was not asked for.")
    for name, (total, n) in head.sums.items():
        if name not in names:
            raise TacitaError(f"the node's reply holds a score '{name[:100]}', which was not asked for.")
        if not 0 <= n <= head.clients or not 0 <= total <= n * (1 + 1e-9):
            raise _excess_error(f"sums/{name}", head)


def _check_bounds(name: str, value: AnyArray, most: AnyArray, head: ReplyHead, least: float = 0.0) -> None:
    """Refuse what is above `most`, below `least`, or in size above `most` where there is no least."""
    size = np.abs(value) if least < 0 else value
    if not ((size >= max(least, 0.0)) & (size <= most)).all():
        raise _excess_error(name, head)


def _excess_error(name: str, head: ReplyHead) -> TacitaError:
    people = "1 person" if head.clients == 1 else f"{head.clients:,} people"
    return TacitaError(
        f"the node's reply holds in '{name}' what {people} cannot have said; the node is wrong, or training diverged."
    )
