"""What a device carries of its own influence on the item table, and what the server writes down of everybody's.

A device keeps one sum: what it added to the table, each round's part damped by what later rounds absorbed of it. The
damping of all rounds together is one number S that the server announces, as a logarithm, so that who skips rounds has
nothing to do in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from tacita.core.types import Doubles, Keys, Ragged
from tacita.fields import Rows

COMMITMENT = 16  # numbers of two bytes each

Damping = float | Callable[[Doubles], Doubles]


def carry(pieces: Sequence[Doubles], damping: Sequence[Damping]) -> Doubles:
    """The retraction of somebody who added these pieces, one a round: what to add to the table when it leaves."""
    carried = np.zeros_like(pieces[0], dtype=np.float64)
    for piece, rho in zip(pieces, damping, strict=True):
        carried = (rho(carried) if callable(rho) else rho * carried) - piece
    return carried


def added(old: Ragged, factor: Doubles, owner: Ragged, segment: int) -> Ragged:
    """Every user's list after its old rows were damped and new ones joined; an item stands once in a segment."""
    n_users = len(old)
    row = np.concatenate([old.rows(), owner.rows()]).astype(np.int64)
    part = np.concatenate([old.values["segment"], np.full(len(owner.ids), segment, np.int32)])
    item = np.concatenate([old.ids, owner.ids])
    damped = old.values["row"] * factor[old.rows()][:, None]
    value = np.concatenate([damped, owner.values["row"].astype(np.float64)])
    order = np.lexsort((item, part, row))
    row, part, item = row[order], part[order], item[order]
    fresh = np.append(True, (np.diff(row) != 0) | (np.diff(part) != 0) | (np.diff(item) != 0))[: len(row)]
    at = np.flatnonzero(fresh)
    sums = np.add.reduceat(value[order], at, axis=0) if len(at) else value
    columns = {"row": sums.astype(np.float32), "segment": part[at]}
    return Ragged.from_pairs(row[at], item[at], n_users, columns)


def commitments(rows: Rows, n_clients: int, keys: Keys, secret: np.uint64) -> Doubles:
    """32 bytes for each client that bind it to what it sends and tell nothing of it: a keyed digest.

    The loop is over whole uploads: a digest of bytes has no other way, and its time is the bytes'.
    """
    out = np.zeros((n_clients, COMMITMENT))
    ends = np.searchsorted(rows.client, np.arange(n_clients + 1))
    value = np.ascontiguousarray(rows.value, np.float32)
    for c in range(n_clients):
        made = hashlib.blake2b(key=secret.tobytes() + keys[c].tobytes(), digest_size=2 * COMMITMENT)
        made.update(np.ascontiguousarray(rows.item[ends[c] : ends[c + 1]]).tobytes())
        made.update(value[ends[c] : ends[c + 1]].tobytes())
        out[c] = np.frombuffer(made.digest(), np.uint16)
    return out


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least sigma for which normal noise on a change of length 1 is (epsilon, delta) private (Balle, Wang 2018)."""

    def spent(sigma: float) -> float:
        def below(x: float) -> float:
            return 0.5 * math.erfc(-x / math.sqrt(2))

        far = math.exp(min(epsilon, 700.0)) * below(-1 / (2 * sigma) - epsilon * sigma)
        return below(1 / (2 * sigma) - epsilon * sigma) - far

    low, high = 1e-6, 1.0
    while spent(high) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high
