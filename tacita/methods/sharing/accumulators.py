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
from tacita.messages import SparseRows

COMMITMENT_SIZE = 16  # numbers of two bytes each

Damping = float | Callable[[Doubles], Doubles]


def accumulate_retraction(pieces: Sequence[Doubles], damping: Sequence[Damping]) -> Doubles:
    """The retraction of somebody who added these pieces, one a round: what to add to the table when it leaves."""
    carried = np.zeros_like(pieces[0], dtype=np.float64)
    for piece, rho in zip(pieces, damping, strict=True):
        carried = (rho(carried) if callable(rho) else rho * carried) - piece
    return carried


def merge_rows(old: Ragged, factor: Doubles, new: Ragged, segment: int) -> Ragged:
    """Every user's list after its old rows were damped and new ones joined; an item stands once in a segment."""
    owner, width = old.rows(), 1 + int(max(old.ids.max(initial=0), new.ids.max(initial=0)))
    row = old.values["row"] * factor.astype(np.float32)[owner, None]
    here = np.flatnonzero(old.values["segment"] == segment)
    known = owner[here].astype(np.int64) * width + old.ids[here]
    order = np.argsort(known)
    wanted = new.rows().astype(np.int64) * width + new.ids
    at = np.minimum(np.searchsorted(known, wanted, sorter=order), max(0, len(known) - 1))
    found = known[order[at]] == wanted if len(known) else np.zeros(len(wanted), bool)
    row[here[order[at[found]]]] += new.values["row"][found]
    rest = new.filter_entries(~found)
    columns = {"row": rest.values["row"].astype(np.float32), "segment": np.full(len(rest.ids), segment, np.int32)}
    damped = Ragged(old.ptr, old.ids, {"row": row, "segment": old.values["segment"]})
    return damped.join_rows(Ragged(rest.ptr, rest.ids, columns)) if len(rest.ids) else damped


def compute_commitments(rows: SparseRows, n_clients: int, keys: Keys, secret: np.uint64) -> Doubles:
    """32 bytes for each client that bind it to what it sends and tell nothing of it: a keyed digest.

    The loop is over whole uploads: a digest of bytes has no other way, and its time is the bytes'.
    """
    out = np.zeros((n_clients, COMMITMENT_SIZE))
    ends = np.searchsorted(rows.client, np.arange(n_clients + 1))
    value = np.ascontiguousarray(rows.value, np.float32)
    for c in range(n_clients):
        made = hashlib.blake2b(key=secret.tobytes() + keys[c].tobytes(), digest_size=2 * COMMITMENT_SIZE)
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
