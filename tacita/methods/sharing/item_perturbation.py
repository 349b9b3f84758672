"""An item in place of another, under local differential privacy (sharing spec C.3).

Both mechanisms are epsilon-private for one item: whatever comes out is at most e^epsilon times as likely for one item
as for any other. Who tells k items spends k times epsilon.
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
    """(items, catalogue): how likely every item of the catalogue is to be told in place of some.

    exponential: by exp(epsilon s / 2), s = (1 + cosine) / 2 of the two rows; what it is divided by depends on the item,
    which takes the other half of epsilon. krr: the item itself with a chance of e^epsilon to 1 against any other.
    """
    n = len(table)
    if mechanism == "krr":
        out = np.full((len(items), n), np.exp(-epsilon))
        out[np.arange(len(items)), items] = 1.0
    else:
        unit, length = np.empty((n, table.shape[1]), np.float32), np.empty(n, np.float32)
        normalise_rows(np.ascontiguousarray(table, np.float32), unit, length)
        alike = np.clip((1 + unit[items].astype(np.float64) @ unit.T.astype(np.float64)) / 2, 0.0, 1.0)
        out = np.exp(epsilon / 2 * (alike - 1))
    return np.asarray(out / out.sum(1, keepdims=True))


def perturb_items(mechanism: Mechanism, epsilon: float, table: Floats, items: Ints, drawn: Keys) -> Ints:
    """An item in place of each, by a draw of 64 bits each; the same whatever else is perturbed beside it."""
    told = np.empty(len(items), np.int32)
    order = np.argsort(items, kind="stable")
    distinct, first = np.unique(items[order], return_index=True)
    ends = np.append(first, len(items))
    share = (drawn >> np.uint64(11)) * _UNIT
    for at in range(0, len(distinct), _ROWS):
        some = distinct[at : at + _ROWS].astype(np.int64)
        reached = np.cumsum(compute_probabilities(mechanism, epsilon, table, some), axis=1)
        reached /= reached[:, -1:]
        for row in range(len(some)):  # over items, not over people
            here = order[ends[at + row] : ends[at + row + 1]]
            told[here] = np.searchsorted(reached[row], share[here], side="right")
    return told
