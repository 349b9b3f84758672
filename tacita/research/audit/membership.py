"""Whether a person's data was learned from: fresh user vectors fitted to it while the item table stands still.

Fresh vectors fit learned data better, and sooner, than data of a similar person (sharing spec D.4, 3 and 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Doubles, Floats, Ints, Longs, Ragged
from tacita.kernels.hashing import hash_owners

STEPS = 100
RATE = 1.0
SHRINK = 1e-3
NEIGHBOURS = 20  # people of similar activity whose mean loss is what one can expect
MAX_STEPS = 500
MAX_ATTEMPTS = 32  # of drawing an item that a person does not have
REST_KEY_OFFSET = np.uint64(1 << 20)


@dataclass(frozen=True)
class FittedVectors:
    """Everybody's user vector, and the mean loss after each step."""

    vectors: Doubles  # (people, width)
    losses: list[float]


@dataclass(frozen=True)
class PairSamples:
    """Items of people, each paired with an item that the person does not have."""

    owner: Longs  # (pairs,)
    item: Ints
    other: Ints
    people: int

    @staticmethod
    def draw_pairs(lists: Ragged, owned: Ragged, n_items: int, key: np.uint64) -> PairSamples:
        """Every item of the lists with one that is drawn; `owned`: what else people have."""
        owner = lists.rows().astype(np.int64)
        n_pairs = len(owner)
        places = np.arange(n_pairs).astype(np.uint64)
        other = np.zeros(n_pairs, np.int64)
        undrawn = np.arange(n_pairs)
        for attempt in range(MAX_ATTEMPTS):
            attempt_key = key + np.uint64(attempt)
            hashes = hash_owners(attempt_key, places[undrawn])
            drawn = hashes % np.uint64(n_items)
            other[undrawn] = drawn.astype(np.int64)
            is_owned = owned.holds(owner[undrawn], other[undrawn])
            undrawn = undrawn[is_owned]
            if len(undrawn) == 0:
                break
        others = other.astype(np.int32)
        return PairSamples(owner, lists.ids, others, len(lists))

    def count_pairs(self) -> Longs:
        """How many pairs each person has, at least 1."""
        counts = np.bincount(self.owner, minlength=self.people)
        return np.maximum(1, counts)

    def compute_differences(self, rows: Doubles) -> Doubles:
        """(pairs, width) the row of each item minus that of the other."""
        item_rows = rows[self.item]
        other_rows = rows[self.other]
        return item_rows - other_rows


def fit_vectors(table: Floats, samples: PairSamples, steps: int = STEPS) -> FittedVectors:
    """User vectors that part people's items from the others, by plain gradient steps from zero."""
    rows = _normalise_rows(table)
    gap = samples.compute_differences(rows)
    count = samples.count_pairs()[:, None]
    width = rows.shape[1]
    vectors = np.zeros((samples.people, width))
    losses = []
    for _ in range(steps):
        products = vectors[samples.owner] * gap
        margin = products.sum(1)
        loss = 0.0
        if len(margin):
            loss = float(np.logaddexp(0, -margin).mean())
        losses.append(loss)
        slope = np.zeros_like(vectors)
        pull = -1 / (1 + np.exp(margin))
        pair_slope = pull[:, None] * gap
        np.add.at(slope, samples.owner, pair_slope)
        gradient = slope / count + SHRINK * vectors
        vectors = vectors - RATE * gradient
    return FittedVectors(vectors, losses)


def compute_mean_losses(table: Floats, vectors: Doubles, samples: PairSamples) -> Doubles:
    """Mean loss of every person."""
    gap = samples.compute_differences(_normalise_rows(table))
    products = vectors[samples.owner] * gap
    margin = products.sum(1)
    losses = np.logaddexp(0, -margin)
    total = np.bincount(samples.owner, weights=losses, minlength=samples.people)
    return total / samples.count_pairs()


def split_halves(lists: Ragged) -> tuple[Ragged, Ragged]:
    """Every other item of each list, and the rest."""
    starts = lists.ptr[:-1]
    entry_starts = np.repeat(starts, lists.counts())
    place = np.arange(len(lists.ids)) - entry_starts
    is_even = place % 2 == 0
    plain = Ragged(lists.ptr, lists.ids)
    even = plain.filter_entries(is_even)
    odd = plain.filter_entries(~is_even)
    return even, odd


def compute_excess_loss(table: Floats, lists: Ragged, owned: Ragged, like: Ragged, key: np.uint64) -> Doubles:
    """How much worse than of people like them the other half of people's items is fitted from one half.

    `owned`: all that these people have, which is never drawn as what they do not have. `like`: items of people to
    compare with; the nearest in activity count.
    """
    peer_losses = _compute_rest_losses(table, like, like, key)
    peer_activity = like.counts()
    excess = _compute_rest_losses(table, lists, owned, key)
    for row, size in enumerate(lists.counts().tolist()):
        distance = np.abs(peer_activity - size)
        order = np.argsort(distance, kind="stable")
        nearest = order[:NEIGHBOURS]
        if len(nearest):
            excess[row] -= peer_losses[nearest].mean()
    return excess


def _compute_rest_losses(table: Floats, lists: Ragged, owned: Ragged, key: np.uint64) -> Doubles:
    """Each person's loss on one half of their items, with a vector fitted to the other half."""
    n_items = len(table)
    known, rest = split_halves(lists)
    known_samples = PairSamples.draw_pairs(known, owned, n_items, key)
    rest_key = key + REST_KEY_OFFSET
    rest_samples = PairSamples.draw_pairs(rest, owned, n_items, rest_key)
    vectors = fit_vectors(table, known_samples).vectors
    return compute_mean_losses(table, vectors, rest_samples)


def count_steps_to_goal(table: Floats, samples: PairSamples, goal: float) -> int | None:
    """Steps until the mean loss is down at the goal; None: in MAX_STEPS it does not get there."""
    losses = fit_vectors(table, samples, MAX_STEPS).losses
    for step, loss in enumerate(losses):
        if loss <= goal:
            return step
    return None


def _normalise_rows(table: Floats) -> Doubles:
    rows = table.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(length, 1e-8))
