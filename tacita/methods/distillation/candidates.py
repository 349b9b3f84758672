"""What the server could send a client, and rules without an agent that pick from it (spec E.3 step 2, E.4, F.4).

`logits(users)` gives the server's logits (users, items) of some users; it is asked for a chunk of clients at a time.
`last` holds each client's own last upload, a row per client in the order of `users`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.types import AnyArray, Bools, Floats, Ints, Longs, Ragged
from tacita.kernels.ranking import find_best_items
from tacita.methods.distillation.round_draws import RoundDraws, rank_in_rows
from tacita.models.scoring import sigmoid

Logits = Callable[[Ints], Floats]
CHUNK = 256  # clients whose logits exist at once


@dataclass(frozen=True)
class UploadHistory:
    """In how many uploads each item was, of the last round or of all."""

    counts: Longs  # (items,)
    n_uploads: int

    @staticmethod
    def from_upload(upload: Ragged, n_items: int) -> UploadHistory:
        """Count a round's uploads; an item that occurs twice in an upload counts once."""
        largest = int(upload.ids.max(initial=0))
        width = max(n_items, 1 + largest)
        client = upload.rows().astype(np.int64)
        codes = client * width + upload.ids
        pairs = np.sort(codes)
        steps = np.diff(pairs, prepend=-1)
        is_first = steps > 0
        items = pairs[is_first] % width
        counts = np.bincount(items, minlength=n_items)
        n_uploads = int(np.count_nonzero(upload.counts()))
        return UploadHistory(counts, n_uploads)

    def add_history(self, other: UploadHistory) -> UploadHistory:
        """Both together: how a history that forgets nothing grows, and PTF-FedRec's counts."""
        counts = self.counts + other.counts
        n_uploads = self.n_uploads + other.n_uploads
        return UploadHistory(counts, n_uploads)


@dataclass
class _PickedItems:
    """Items that were picked for clients, chunk by chunk, with the server's probability of each."""

    rows: list[AnyArray] = field(default_factory=lambda: [np.zeros(0, np.int64)])
    ids: list[AnyArray] = field(default_factory=lambda: [np.zeros(0, np.int32)])
    scores: list[AnyArray] = field(default_factory=lambda: [np.zeros(0, np.float32)])

    def add(self, rows: AnyArray, ids: AnyArray, logits: Floats) -> None:
        self.rows.append(rows)
        self.ids.append(ids)
        self.scores.append(sigmoid(logits))


def iterate_client_logits(users: Ints, last: Ragged, logits: Logits) -> Iterator[tuple[Longs, Ragged, Floats]]:
    """Some clients at a time: their rows, their last uploads, their logits."""
    for start in range(0, len(users), CHUNK):
        n_users = len(users)
        end = min(start + CHUNK, n_users)
        chunk = np.arange(start, end)
        chunk_users = users[chunk]
        chunk_logits = np.asarray(logits(chunk_users), np.float32)
        yield chunk, last.take(chunk), chunk_logits


def find_unsent_candidates(history: UploadHistory, last: Ragged, users: Ints, logits: Logits, most: int = 30) -> Ragged:
    """Items of the history that the client did not upload itself, best server score first, ties by id, `most` at most.

    Columns: score, the server's probability; frequency, the share of uploads with the item.
    """
    known_items = np.flatnonzero(history.counts)
    known = known_items.astype(np.int32)
    n_items = len(history.counts)
    place = np.full(n_items, -1, np.int64)
    n_known = len(known)
    place[known] = np.arange(n_known)
    picked = _PickedItems()
    if len(known):
        for chunk, own, chunk_logits in iterate_client_logits(users, last, logits):
            table = chunk_logits[:, known]
            row, column = _rank_unsent(table, own, place, most)
            item = known[column]
            item_logits = table[row, column]
            clients = chunk[row]
            picked.add(clients, item, item_logits)
    item = np.concatenate(picked.ids)
    n_uploads = max(1, history.n_uploads)
    frequency = history.counts[item] / n_uploads
    score = np.concatenate(picked.scores)
    rounded = frequency.astype(np.float32)
    columns = {"score": score, "frequency": rounded}
    rows = np.concatenate(picked.rows)
    n_users = len(users)
    return Ragged.from_pairs(rows, item, n_users, columns)


def _rank_unsent(table: Floats, own: Ragged, place: Longs, most: int) -> tuple[AnyArray, AnyArray]:
    """Rows and columns of each client's best logits, without items of its own upload; `place`: an item's column."""
    keys = table.copy()
    column = place[own.ids]
    is_known = column >= 0
    client = own.rows()
    known_client = client[is_known]
    known_column = column[is_known]
    keys[known_client, known_column] = -np.inf
    n_best = min(most, table.shape[1])
    best, value = find_best_items(keys, n_best)
    is_allowed = value > -np.inf
    row, rank = np.nonzero(is_allowed)
    return row, best[row, rank]


def select_fixed_number(candidates: Ragged, n: float, how: Literal["random", "top"], draws: RoundDraws) -> Ragged:
    """A fixed number of each client's candidates, random or best: a control for the agent.

    A fraction is sent to that share of the clients: an agent's mean is seldom whole.
    """
    whole = int(n)
    uniform = draws.draw_uniforms("schedule")[:, 0]
    gets_another = uniform < n - whole
    limit = whole + gets_another
    rows = candidates.rows()
    if how == "random":
        order = draws.hash_entries("scheduled", rows, candidates.ids)
        rank = rank_in_rows(rows, order)
    else:
        rank = rank_in_rows(rows)
    is_sent = rank < limit[rows]
    return _select_scored_entries(candidates, is_sent)


def _select_scored_entries(lists: Ragged, is_selected: Bools) -> Ragged:
    """Some entries of lists, with their scores alone."""
    score = lists.values["score"][is_selected]
    rows = lists.rows()[is_selected]
    ids = lists.ids[is_selected]
    n_clients = len(lists)
    return Ragged.from_pairs(rows, ids, n_clients, {"score": score})


def select_ptf_items(counts: Longs, last: Ragged, users: Ints, logits: Logits, most: int = 30) -> Ragged:
    """PTF-FedRec's rule: half by how often items were uploaded so far, half from the client's own top scores.

    Nothing of the client's last upload; the frequent ones stand first.
    """
    item_ids = np.arange(len(counts))
    by_frequency = np.lexsort((item_ids, -counts))
    n_known = np.count_nonzero(counts > 0)
    frequent = by_frequency[:n_known]
    picked = _PickedItems()
    for chunk, own, table in iterate_client_logits(users, last, logits):
        row, item = _pick_frequent_and_best(table, own, frequent, most)
        item_logits = table[row, item]
        clients = chunk[row]
        picked.add(clients, item, item_logits)
    columns = {"score": np.concatenate(picked.scores)}
    rows = np.concatenate(picked.rows)
    ids = np.concatenate(picked.ids)
    n_users = len(users)
    return Ragged.from_pairs(rows, ids, n_users, columns)


def _pick_frequent_and_best(table: Floats, own: Ragged, frequent: Longs, most: int) -> tuple[AnyArray, AnyArray]:
    """Rows and items: first each client's frequent items, then those with the best logits."""
    n_frequent = most // 2
    is_excluded = np.zeros(table.shape, bool)
    own_rows = own.rows()
    is_excluded[own_rows, own.ids] = True
    is_free = ~is_excluded[:, frequent]
    is_picked = mark_first_in_rows(is_free, n_frequent)
    frequent_row, place = np.nonzero(is_picked)
    frequent_item = frequent[place]
    is_excluded[frequent_row, frequent_item] = True
    n_best = min(most, table.shape[1])
    best, _ = find_best_items(table, n_best)
    is_taken = np.take_along_axis(is_excluded, best, axis=1)
    is_new = ~is_taken
    is_picked_best = mark_first_in_rows(is_new, most - n_frequent)
    best_row, rank = np.nonzero(is_picked_best)
    row = np.concatenate([frequent_row, best_row])
    best_item = best[best_row, rank]
    item = np.concatenate([frequent_item, best_item])
    return row, item.astype(np.int32)


def mark_first_in_rows(marked: Bools, n: int) -> Bools:
    """The first n marks of every row."""
    n_so_far = np.cumsum(marked, axis=1)
    return np.asarray(marked & (n_so_far <= n))
