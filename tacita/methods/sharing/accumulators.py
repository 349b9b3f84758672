"""What a device carries of its own influence on the item table, and what binds it to what it sent.

A device keeps one sum: what it added to the table, each round's part damped by what later rounds absorbed of it. The
damping of all rounds together is one number S that the server announces, as a logarithm. So a device that skips rounds
has nothing to do in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from tacita.core.types import AnyArray, Bools, Doubles, Keys, Longs, Ragged
from tacita.messages import SparseRows

COMMITMENT_SIZE = 16  # numbers of two bytes each

Damping = float | Callable[[Doubles], Doubles]


def accumulate_retraction(pieces: Sequence[Doubles], damping: Sequence[Damping]) -> Doubles:
    """The retraction of a user who added these pieces, one a round: what to add to the table when the user leaves."""
    carried = np.zeros_like(pieces[0], dtype=np.float64)
    for piece, factor in zip(pieces, damping, strict=True):
        if callable(factor):
            damped = factor(carried)
        else:
            damped = factor * carried
        carried = damped - piece
    return carried


def merge_rows(old: Ragged, factor: Doubles, new: Ragged, segment: int) -> Ragged:
    """Every user's list after its old rows were damped and new ones joined; an item stands once in a segment."""
    owner = old.rows()
    user_factor = factor.astype(np.float32)
    rows = old.values["row"] * user_factor[owner, None]
    segments = old.values["segment"]
    in_segment = np.flatnonzero(segments == segment)
    place, is_known = _find_pairs(old, new, in_segment)
    rows[place[is_known]] += new.values["row"][is_known]
    damped = Ragged(old.ptr, old.ids, {"row": rows, "segment": segments})
    unknown = new.filter_entries(~is_known)
    n_unknown = len(unknown.ids)
    if not n_unknown:
        return damped
    columns = {
        "row": unknown.values["row"].astype(np.float32),
        "segment": np.full(n_unknown, segment, np.int32),
    }
    return damped.join_rows(Ragged(unknown.ptr, unknown.ids, columns))


def _find_pairs(old: Ragged, new: Ragged, entries: Longs) -> tuple[Longs, Bools]:
    """For every new entry its place among some old ones, and whether it has one."""
    largest_old = old.ids.max(initial=0)
    largest_new = new.ids.max(initial=0)
    width = 1 + int(max(largest_old, largest_new))
    known = _number_pairs(old.rows()[entries], old.ids[entries], width)
    wanted = _number_pairs(new.rows(), new.ids, width)
    if not len(known):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    order = np.argsort(known)
    position = np.searchsorted(known, wanted, sorter=order)
    nearest = order[np.minimum(position, len(known) - 1)]
    return entries[nearest], known[nearest] == wanted


def _number_pairs(rows: AnyArray, ids: AnyArray, width: int) -> Longs:
    return rows.astype(np.int64) * width + ids


def compute_commitments(rows: SparseRows, n_clients: int, keys: Keys, secret: np.uint64) -> Doubles:
    """32 bytes for each client that bind it to what it sends and tell nothing of it: a keyed digest.

    The loop is over whole uploads: a digest of bytes has no other way, and its time is that of the bytes.
    """
    commitments = np.zeros((n_clients, COMMITMENT_SIZE))
    ends = np.searchsorted(rows.client, np.arange(n_clients + 1))
    values = np.ascontiguousarray(rows.value, np.float32)
    for client in range(n_clients):
        entries = slice(ends[client], ends[client + 1])
        items = np.ascontiguousarray(rows.item[entries])
        key = secret.tobytes() + keys[client].tobytes()
        digest = hashlib.blake2b(key=key, digest_size=2 * COMMITMENT_SIZE)
        digest.update(items.tobytes())
        digest.update(values[entries].tobytes())
        commitments[client] = np.frombuffer(digest.digest(), np.uint16)
    return commitments


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least sigma for which normal noise on a change of length 1 is (epsilon, delta) private (Balle, Wang 2018)."""
    low = 1e-6
    high = 1.0
    while _compute_delta(high, epsilon) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _compute_delta(middle, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high


def _compute_delta(sigma: float, epsilon: float) -> float:
    """The delta of normal noise on a change of length 1."""
    half = 1 / (2 * sigma)
    shift = epsilon * sigma
    factor = math.exp(min(epsilon, 700.0))
    far = factor * _normal_cdf(-half - shift)
    return _normal_cdf(half - shift) - far


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
