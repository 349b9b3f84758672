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
        weights = np.full((len(items), len(table)), np.exp(-epsilon))
        weights[np.arange(len(items)), items] = 1.0
    else:
        similarity = _compute_similarity(table, items)
        weights = np.exp(epsilon / 2 * (similarity - 1))
    total = weights.sum(1, keepdims=True)
    return np.asarray(weights / total)


def _compute_similarity(table: Floats, items: Longs) -> Doubles:
    """(items, catalogue): from 0 to 1, by the cosine of rows."""
    unit = np.empty(table.shape, np.float32)
    length = np.empty(len(table), np.float32)
    rows = np.ascontiguousarray(table, np.float32)
    normalise_rows(rows, unit, length)
    item_rows = unit[items].astype(np.float64)
    cosine = item_rows @ unit.T.astype(np.float64)
    return np.clip((1 + cosine) / 2, 0.0, 1.0)


def perturb_items(mechanism: Mechanism, epsilon: float, table: Floats, items: Ints, drawn: Keys) -> Ints:
    """An item in place of each, by a draw of 64 bits each; the other perturbed items do not change it."""
    released = np.empty(len(items), np.int32)
    order = np.argsort(items, kind="stable")
    distinct, first = np.unique(items[order], return_index=True)
    ends = np.append(first, len(items))
    share = (drawn >> np.uint64(11)) * _UNIT
    for start in range(0, len(distinct), _ROWS):
        chunk = distinct[start : start + _ROWS].astype(np.int64)
        probabilities = compute_probabilities(mechanism, epsilon, table, chunk)
        cumulative = np.cumsum(probabilities, axis=1)
        cumulative /= cumulative[:, -1:]
        for row in range(len(chunk)):  # over items, not over users
            place = start + row
            entries = order[ends[place] : ends[place + 1]]
            released[entries] = np.searchsorted(cumulative[row], share[entries], side="right")
    return released
