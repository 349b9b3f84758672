"""What the server could send a client, and rules without an agent that pick from it (spec E.3 step 2, E.4, F.4).

`logits(users)` gives the server's logits (users, items) of some users; it is asked for a chunk of clients at a time.
`last` holds each client's own last upload, a row per client in the order of `users`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tacita.core.types import Bools, Floats, Ints, Longs, Ragged
from tacita.kernels.ranking import best_items
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
    def of(upload: Ragged, n_items: int) -> UploadHistory:
        width = max(n_items, 1 + int(upload.ids.max(initial=0)))
        pairs = np.sort(upload.rows().astype(np.int64) * width + upload.ids)
        new = np.diff(pairs, prepend=-1) > 0  # an item that was told twice in an upload counts once
        told = int((upload.counts() > 0).sum())
        return UploadHistory(np.bincount(pairs[new] % width, minlength=n_items), told)

    def plus(self, other: UploadHistory) -> UploadHistory:
        """Both together: how a history that forgets nothing grows, and PTF-FedRec's counts."""
        return UploadHistory(self.counts + other.counts, self.n_uploads + other.n_uploads)


def iterate_chunks(users: Ints, last: Ragged, logits: Logits) -> Iterator[tuple[Longs, Ragged, Floats]]:
    """Some clients at a time: their rows, their last uploads, their logits."""
    for lo in range(0, len(users), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(users)))
        yield some, last.take(some), np.asarray(logits(users[some]), np.float32)


def find_candidates(history: UploadHistory, last: Ragged, users: Ints, logits: Logits, most: int = 30) -> Ragged:
    """Items of the history that the client did not tell itself, best server score first, ties by id, `most` at most.

    Columns: score, the server's probability; frequency, the share of uploads with the item.
    """
    known = np.flatnonzero(history.counts).astype(np.int32)
    place = np.full(len(history.counts), -1, np.int64)
    place[known] = np.arange(len(known))
    rows, ids, score = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for some, own, all_logits in iterate_chunks(users, last, logits) if len(known) else ():
        table = all_logits[:, known]
        keys = table.copy()
        at = place[own.ids]
        keys[own.rows()[at >= 0], at[at >= 0]] = -np.inf
        top, value = best_items(keys, min(most, len(known)))
        row, rank = np.nonzero(value > -np.inf)
        picked = top[row, rank]
        rows.append(some[row])
        ids.append(known[picked])
        score.append(sigmoid(table[row, picked]))
    item = np.concatenate(ids)
    frequency = (history.counts[item] / max(1, history.n_uploads)).astype(np.float32)
    columns = {"score": np.concatenate(score), "frequency": frequency}
    return Ragged.from_pairs(np.concatenate(rows), item, len(users), columns)


def schedule_candidates(candidates: Ragged, n: float, how: Literal["random", "top"], dice: RoundDraws) -> Ragged:
    """A fixed number of each client's candidates, random or best: a control for the agent.

    A fraction is sent to that share of the clients: an agent's mean is seldom whole.
    """
    whole = int(n)
    wanted = whole + (dice.draw_uniforms("schedule")[:, 0] < n - whole)
    rows = candidates.rows()
    by = (
        rank_in_rows(rows, dice.hash_entries("scheduled", rows, candidates.ids))
        if how == "random"
        else rank_in_rows(rows)
    )
    kept = by < wanted[rows]
    return Ragged.from_pairs(
        rows[kept], candidates.ids[kept], len(candidates), {"score": candidates.values["score"][kept]}
    )


def select_confident(
    counts: Longs, last: Ragged, users: Ints, logits: Logits, most: int = 30, truncate: Longs | None = None
) -> Ragged:
    """PTF-FedRec's rule: half by how often everybody told an item so far, half from the client's own top scores.

    Nothing the client told last; the frequent ones stand first. `truncate` cuts each list to a number per client, as
    the released code does with the number of the client's positives, which a server cannot know.
    """
    half = most // 2
    frequent = np.lexsort((np.arange(len(counts)), -counts))[: int((counts > 0).sum())]
    rows, ids, score = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for some, own, table in iterate_chunks(users, last, logits):
        told = np.zeros(table.shape, bool)
        told[own.rows(), own.ids] = True
        who, at = np.nonzero(mark_first(~told[:, frequent], half))
        told[who, frequent[at]] = True
        top, _ = best_items(table, min(most, table.shape[1]))
        hard = np.nonzero(mark_first(~np.take_along_axis(told, top, axis=1), most - half))
        row = np.concatenate([who, hard[0]])
        item = np.concatenate([frequent[at], top[hard]]).astype(np.int32)
        rows.append(some[row])
        ids.append(item)
        score.append(sigmoid(table[row, item]))
    found = Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), len(users), {"score": np.concatenate(score)})
    if truncate is None:
        return found
    owner = found.rows()
    kept = rank_in_rows(owner) < truncate[owner]
    return Ragged.from_pairs(owner[kept], found.ids[kept], len(found), {"score": found.values["score"][kept]})


def mark_first(marked: Bools, n: int) -> Bools:
    """The first n marks of every row."""
    return np.asarray(marked & (np.cumsum(marked, axis=1) <= n))
