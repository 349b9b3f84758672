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
    first_piece = pieces[0]
    carried = np.zeros_like(first_piece, dtype=np.float64)
    for piece, factor in zip(pieces, damping, strict=True):
        if callable(factor):
            damped = factor(carried)
        else:
            damped = factor * carried
        carried = damped - piece
    return carried


def merge_carried_rows(old: Ragged, factor: Doubles, new: Ragged, segment: int) -> Ragged:
    """Every user's list after its old rows were damped and new ones joined; an item stands once in a segment."""
    user_factor = factor.astype(np.float32)
    owner = old.rows()
    row_factor = user_factor[owner, None]
    rows = old.values["row"] * row_factor
    segments = old.values["segment"]
    in_segment = np.flatnonzero(segments == segment)
    place, is_known = _find_old_places(old, new, in_segment)
    new_rows = new.values["row"]
    known_places = place[is_known]
    rows[known_places] += new_rows[is_known]
    columns = {"row": rows, "segment": segments}
    damped = Ragged(old.ptr, old.ids, columns)
    unknown = new.filter_entries(~is_known)
    if not len(unknown.ids):
        return damped
    unknown = _with_segment_column(unknown, segment)
    return damped.join_rows(unknown)


def _with_segment_column(lists: Ragged, segment: int) -> Ragged:
    """New rows as they are carried."""
    rows = lists.values["row"]
    n_rows = len(rows)
    segments = np.full(n_rows, segment, np.int32)
    stored_rows = rows.astype(np.float32)
    columns = {"row": stored_rows, "segment": segments}
    return Ragged(lists.ptr, lists.ids, columns)


def _find_old_places(old: Ragged, new: Ragged, entries: Longs) -> tuple[Longs, Bools]:
    """For every new entry its place among some old ones, and whether it has one."""
    largest_old = old.ids.max(initial=0)
    largest_new = new.ids.max(initial=0)
    largest = max(largest_old, largest_new)
    width = 1 + int(largest)
    old_rows = old.rows()
    entry_rows = old_rows[entries]
    entry_ids = old.ids[entries]
    known = _number_pairs(entry_rows, entry_ids, width)
    new_rows = new.rows()
    wanted = _number_pairs(new_rows, new.ids, width)
    n_known = len(known)
    if not n_known:
        n_pairs = len(wanted)
        nowhere = np.zeros(n_pairs, np.int64)
        return nowhere, nowhere > 0
    order = np.argsort(known)
    position = np.searchsorted(known, wanted, sorter=order)
    position = np.minimum(position, n_known - 1)
    nearest = order[position]
    is_known = known[nearest] == wanted
    return entries[nearest], is_known


def _number_pairs(rows: AnyArray, ids: AnyArray, width: int) -> Longs:
    numbers: Longs = rows.astype(np.int64)
    return numbers * width + ids


def compute_commitments(rows: SparseRows, n_clients: int, keys: Keys, secret: np.uint64) -> Doubles:
    """32 bytes for each client that bind it to what it sends and tell nothing of it: a keyed digest.

    The loop is over whole uploads: a digest of bytes has no other way, and its time is that of the bytes.
    """
    commitments = np.zeros((n_clients, COMMITMENT_SIZE))
    clients = np.arange(n_clients + 1)
    ends = np.searchsorted(rows.client, clients)
    all_values = np.ascontiguousarray(rows.value, np.float32)
    secret_bytes = secret.tobytes()
    size = 2 * COMMITMENT_SIZE
    for client in range(n_clients):
        start = ends[client]
        end = ends[client + 1]
        entries = slice(start, end)
        items = np.ascontiguousarray(rows.item[entries])
        values = all_values[entries]
        key = keys[client].tobytes()
        full_key = secret_bytes + key
        digest = hashlib.blake2b(key=full_key, digest_size=size)
        digest.update(items.tobytes())
        digest.update(values.tobytes())
        digest_bytes = digest.digest()
        numbers = np.frombuffer(digest_bytes, np.uint16)
        commitments[client] = numbers
    return commitments


def find_gaussian_multiplier(epsilon: float, delta: float) -> float:
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
    bounded_epsilon = min(epsilon, 700.0)
    factor = math.exp(bounded_epsilon)
    near = _compute_normal_cdf(half - shift)
    far = _compute_normal_cdf(-half - shift)
    return near - factor * far


def _compute_normal_cdf(x: float) -> float:
    scaled = -x / math.sqrt(2)
    return 0.5 * math.erfc(scaled)
