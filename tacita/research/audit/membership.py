"""Whether a person's data was learned from: fresh user vectors fitted to it while the item table stands still.

Who was learned from is fitted better, and sooner, than somebody like them who was not (sharing spec D.4, 3 and 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Doubles, Floats, Ints, Longs, Ragged
from tacita.kernels.hashing import hash_owners

STEPS, RATE, SHRINK = 100, 1.0, 1e-3
NEIGHBOURS = 20  # people of similar activity whose mean loss is what one can expect
MAX_STEPS = 500


@dataclass(frozen=True)
class FittedVectors:
    """Everybody's user vector, and the mean loss after each step."""

    vectors: Doubles  # (people, width)
    losses: list[float]


@dataclass(frozen=True)
class PairSamples:
    """Items of people, each beside an item that the person does not have."""

    owner: Longs  # (pairs,)
    item: Ints
    other: Ints
    people: int

    @staticmethod
    def of(lists: Ragged, owned: Ragged, n_items: int, key: np.uint64) -> PairSamples:
        """Every item of the lists beside one that is drawn; `owned`: what else people have."""
        owner = lists.rows().astype(np.int64)
        places = np.arange(len(owner)).astype(np.uint64)
        other = np.zeros(len(owner), np.int64)
        left = np.arange(len(owner))
        for attempt in range(32):
            drawn = hash_owners(key + np.uint64(attempt), places[left])
            other[left] = (drawn % np.uint64(n_items)).astype(np.int64)
            left = left[owned.holds(owner[left], other[left])]
            if len(left) == 0:
                break
        return PairSamples(owner, lists.ids, other.astype(np.int32), len(lists))


def fit_vectors(table: Floats, samples: PairSamples, steps: int = STEPS) -> FittedVectors:
    """User vectors that part people's items from the others, by plain gradient steps from zero."""
    rows = _normalise_rows(table)
    gap = rows[samples.item] - rows[samples.other]  # (pairs, width)
    count = np.maximum(1, np.bincount(samples.owner, minlength=samples.people))[:, None]
    vectors, losses = np.zeros((samples.people, rows.shape[1])), []
    for _ in range(steps):
        margin = (vectors[samples.owner] * gap).sum(1)
        losses.append(float(np.logaddexp(0, -margin).mean()) if len(margin) else 0.0)
        slope = np.zeros_like(vectors)
        np.add.at(slope, samples.owner, (-1 / (1 + np.exp(margin)))[:, None] * gap)
        vectors = vectors - RATE * (slope / count + SHRINK * vectors)
    return FittedVectors(vectors, losses)


def compute_mean_losses(table: Floats, vectors: Doubles, samples: PairSamples) -> Doubles:
    """Mean loss of every person."""
    rows = _normalise_rows(table)
    margin = (vectors[samples.owner] * (rows[samples.item] - rows[samples.other])).sum(1)
    total = np.bincount(samples.owner, weights=np.logaddexp(0, -margin), minlength=samples.people)
    return np.asarray(total / np.maximum(1, np.bincount(samples.owner, minlength=samples.people)))


def split_halves(lists: Ragged) -> tuple[Ragged, Ragged]:
    """Every other item of each list, and the rest."""
    even = (np.arange(len(lists.ids)) - np.repeat(lists.ptr[:-1], lists.counts())) % 2 == 0
    plain = Ragged(lists.ptr, lists.ids)
    return plain.filter_entries(even), plain.filter_entries(~even)


def compute_excess_loss(table: Floats, lists: Ragged, owned: Ragged, like: Ragged, key: np.uint64) -> Doubles:
    """How much worse than of people like them the other half of people's items is fitted from one half.

    `owned`: all that these people have, which is never drawn as what they do not have; `like`: items of people who are
    compared with; the nearest in activity count.
    """
    n_items = len(table)

    def loss(people: Ragged, theirs: Ragged) -> Doubles:
        known, rest = split_halves(people)
        vectors = fit_vectors(table, PairSamples.of(known, theirs, n_items, key)).vectors
        return compute_mean_losses(table, vectors, PairSamples.of(rest, theirs, n_items, key + np.uint64(1 << 20)))

    theirs, activity = loss(like, like), like.counts()
    out = loss(lists, owned)
    for row, size in enumerate(lists.counts().tolist()):
        near = np.argsort(np.abs(activity - size), kind="stable")[:NEIGHBOURS]
        out[row] -= theirs[near].mean() if len(near) else 0.0
    return out


def count_steps_to(table: Floats, samples: PairSamples, goal: float) -> int | None:
    """Steps until the mean loss is down at the goal; None: in MOST_STEPS it does not get there."""
    found = np.flatnonzero(np.array(fit_vectors(table, samples, MAX_STEPS).losses) <= goal)
    return int(found[0]) if len(found) else None


def _normalise_rows(table: Floats) -> Doubles:
    rows = table.astype(np.float64)
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8))
