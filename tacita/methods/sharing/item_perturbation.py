"""An item in place of another, under local differential privacy (sharing spec C.3).

Both mechanisms are epsilon-private for one item: any output is at most e^epsilon times as likely for one item as for
any other. A user who releases k items spends k times epsilon.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tacita.core.types import Doubles, Floats, Ints, Keys, Longs
from tacita.kernels.cosine import normalise_rows

Mechanism = Literal["exponential", "krr"]
_ROWS = 256  # items whose chances are worked out together
_UNIT = 2.0**-53


def compute_probabilities(mechanism: Mechanism, epsilon: float, table: Floats, items: Longs) -> Doubles:
    """(items, catalogue): how likely every item of the catalogue is to be released in place of some.

    exponential: by exp(epsilon s / 2), s = (1 + cosine) / 2 of the two rows. Its divisor depends on the item, which
    takes the other half of epsilon. krr: the item itself with a chance of e^epsilon to 1 against any other.
    """
    if mechanism == "krr":
        weights = _weigh_uniformly(epsilon, len(table), items)
    else:
        weights = _weigh_similar(epsilon, table, items)
    total = weights.sum(1, keepdims=True)
    probabilities = weights / total
    return np.asarray(probabilities)


def _weigh_uniformly(epsilon: float, n_items: int, items: Longs) -> Doubles:
    """k-ary randomised response."""
    n_rows = len(items)
    shape = (n_rows, n_items)
    least = np.exp(-epsilon)
    weights = np.full(shape, least)
    rows = np.arange(n_rows)
    weights[rows, items] = 1.0
    return weights


def _weigh_similar(epsilon: float, table: Floats, items: Longs) -> Doubles:
    """The exponential mechanism."""
    similarity = _compute_similarity(table, items)
    exponent = epsilon / 2 * (similarity - 1)
    return np.asarray(np.exp(exponent))


def _compute_similarity(table: Floats, items: Longs) -> Doubles:
    """(items, catalogue): from 0 to 1, by the cosine of rows."""
    unit = np.empty(table.shape, np.float32)
    n_items = len(table)
    length = np.empty(n_items, np.float32)
    rows = np.ascontiguousarray(table, np.float32)
    normalise_rows(rows, unit, length)
    unit_rows = unit[items]
    item_rows = unit_rows.astype(np.float64)
    all_rows = unit.T.astype(np.float64)
    cosine = item_rows @ all_rows
    similarity = (1 + cosine) / 2
    return np.clip(similarity, 0.0, 1.0)


def perturb_items(mechanism: Mechanism, epsilon: float, table: Floats, items: Ints, drawn: Keys) -> Ints:
    """An item in place of each, by a draw of 64 bits each; the other perturbed items do not change it."""
    n_items = len(items)
    released = np.empty(n_items, np.int32)
    order = np.argsort(items, kind="stable")
    sorted_items = items[order]
    distinct, first = np.unique(sorted_items, return_index=True)
    ends = np.append(first, n_items)
    high_bits = drawn >> np.uint64(11)
    share = high_bits * _UNIT
    for start in range(0, len(distinct), _ROWS):
        end = start + _ROWS
        chunk = distinct[start:end]
        cumulative = _accumulate_probabilities(mechanism, epsilon, table, chunk)
        for row in range(len(chunk)):  # over items, not over users
            place = start + row
            first_entry = ends[place]
            last_entry = ends[place + 1]
            entries = order[first_entry:last_entry]
            edges = cumulative[row]
            shares = share[entries]
            item = np.searchsorted(edges, shares, side="right")
            released[entries] = item
    return released


def _accumulate_probabilities(mechanism: Mechanism, epsilon: float, table: Floats, items: Ints) -> Doubles:
    """(items, catalogue): the probabilities of all items up to each one."""
    numbers = items.astype(np.int64)
    probabilities = compute_probabilities(mechanism, epsilon, table, numbers)
    cumulative = np.cumsum(probabilities, axis=1)
    cumulative /= cumulative[:, -1:]
    return cumulative
