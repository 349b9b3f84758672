"""The null-space reader: a history that took part is nearly orthogonal to what nobody's history spans.

Where there are fewer people than items, P = (G + ridge)^-1 has its largest eigenvalues where no history reaches. N
projects there, so N x is nearly 0 for everybody who took part. The smaller the energy x^T N x / sum of N_ii x_i of a
set, the more likely it is a history of the data; a set that has nothing to do with the data has about 1. The reader
needs one release and nothing else; cut entries blur N but leave enough of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs
from tacita.research.audit.reconstruction import RebuiltInverse

QUIET_SHARE = 0.5  # share of the eigenvectors, from below, that histories are taken to span
STEPS = 20  # in which a partly known history grows
MAX_GROWTH = 2.5  # how many times the known part it grows to
EXTRA_STEPS = 5  # rankings at the full size
PARTNERS = 2  # strongest partners of each item that a history from nothing starts with
MAX_HISTORY = 150  # items that a history from nothing grows to
FLIPS = 100  # items put in or left out in the end, at most
TINY = 1e-9


@dataclass(frozen=True)
class NullSpace:
    projector: Doubles  # N, over the items of the release

    @staticmethod
    def from_inverse(rebuilt: RebuiltInverse, quiet: float = QUIET_SHARE) -> NullSpace:
        _, vectors = scipy.linalg.eigh(rebuilt.inverse, check_finite=False)
        n_quiet = int(quiet * len(vectors))
        loud = vectors[:, n_quiet:]
        return NullSpace(loud @ loud.T)

    @property
    def diagonal(self) -> Doubles:
        return np.maximum(np.diag(self.projector), TINY)

    def compute_energy(self, sets: Bools) -> Doubles:
        """x^T N x / sum of N_ii x_i of each set; 1 for an empty one."""
        x = sets.astype(np.float64)
        projected = x @ self.projector
        above = np.einsum("ui,ui->u", projected, x)
        below = x @ self.diagonal
        is_empty = ~(below > 0)
        ratio = above / np.where(is_empty, 1.0, below)
        return np.where(is_empty, 1.0, ratio)

    def rank_items(self, known: Bools) -> Doubles:
        """How well each item goes with a person's known ones: - sum of N_ij / N_jj over them, an item itself apart."""
        pull = self.projector @ known.astype(np.float64)
        relative_pull = -pull / self.diagonal
        return relative_pull + known

    def guess_last_item(self, known: Bools) -> int:
        """The one item that is missing; the root of N_jj brings all items' pulls to one scale."""
        root = np.sqrt(self.diagonal)
        pull = self.projector @ known.astype(np.float64)
        pull = pull / root
        unknown_pull = np.where(known, np.inf, pull)
        return int(unknown_pull.argmin())

    def complete_history(self, known: Bools) -> Bools:
        """The rest of a history: grown by repeated ranking, cut where the energy is lowest, then polished."""
        n_known = int(known.sum())
        guess = known
        for step in range(STEPS + EXTRA_STEPS):
            progress = min(1.0, (step + 1) / STEPS)
            growth = 1 + (MAX_GROWTH - 1) * progress
            grown_size = np.ceil(n_known * growth)
            room = 2 + int(grown_size)
            last_guess = guess
            guess = self._rank_and_cut(guess, known, room)
            is_stable = (last_guess == guess).all()
            if step >= STEPS and is_stable:
                break
        return self.polish_guess(guess, known)

    def _rank_and_cut(self, guess: Bools, known: Bools, room: int) -> Bools:
        """The known items and the best others, at most `room` items, cut where the energy is lowest."""
        score = self.rank_items(guess)
        score[known] = np.inf
        best_first = np.argsort(-score, kind="stable")
        order = best_first[:room]
        inner = self.projector[np.ix_(order, order)]
        off_diagonal = np.tril(inner, -1).sum(axis=1)
        growth = 2 * off_diagonal + np.diag(inner)
        above = np.cumsum(growth)
        below = np.cumsum(self.diagonal[order])
        energy = above / below
        n_known = int(known.sum())
        grown_energy = energy[n_known - 1 :]
        n_grown = int(grown_energy.argmin())
        size = n_known + n_grown
        grown = np.zeros_like(known)
        grown[order[:size]] = True
        return grown

    def polish_guess(self, guess: Bools, known: Bools) -> Bools:
        """Flip the item that lowers the energy most, until none does; what is known stays."""
        guess = guess.copy()
        pull = self.projector @ guess.astype(np.float64)
        own = self.diagonal
        above = pull[guess].sum()
        below = own[guess].sum()
        for _ in range(FLIPS):
            sign = np.where(guess, -1.0, 1.0)
            flipped_above = above + 2 * sign * pull + own
            flipped_below = below + sign * own
            energy = flipped_above / np.maximum(flipped_below, TINY)
            may_not_flip = known | (flipped_below < 1e-6)
            energy[may_not_flip] = np.inf
            best = int(energy.argmin())
            current = above / max(below, TINY)
            if energy[best] >= current - 1e-12:
                break
            above = flipped_above[best]
            below = flipped_below[best]
            pull += sign[best] * self.projector[best]
            guess[best] = not guess[best]
        return guess

    def guess_histories(self) -> Bools:
        """Histories without knowing anybody: grown from the strongest pairs; lowest energy first, no set twice."""
        n_items = len(self.projector)
        if n_items == 0:
            return np.zeros((0, 0), bool)
        nothing = np.zeros(n_items, bool)
        guesses = []
        for pair in self._find_strong_pairs():
            grown = self._grow_pair(pair)
            guesses.append(self.polish_guess(grown, nothing))
        table = np.array(guesses, bool)
        sets = np.unique(table.reshape(-1, n_items), axis=0)
        energy = self.compute_energy(sets)
        order = np.argsort(energy, kind="stable")
        return sets[order]

    def _find_strong_pairs(self) -> Longs:
        n_items = len(self.projector)
        root = np.sqrt(self.diagonal)
        together = self.projector / root[:, None]
        together = together / root[None, :]
        np.fill_diagonal(together, np.inf)
        closest = np.argsort(together, axis=1, kind="stable")
        partner = closest[:, :PARTNERS].ravel()
        item = np.repeat(np.arange(n_items), PARTNERS)
        item = item[: len(partner)]
        lower = np.minimum(item, partner)
        upper = np.maximum(item, partner)
        pairs = np.stack([lower, upper], axis=1)
        return np.unique(pairs, axis=0)

    def _grow_pair(self, pair: Longs) -> Bools:
        """Add the item that makes the energy lowest until it rises; the set of the lowest energy on the way."""
        own = self.diagonal
        order = list(pair)
        is_member = np.zeros(len(own), bool)
        is_member[pair] = True
        pull = self.projector[pair].sum(axis=0)
        above = pull[pair].sum()
        below = own[pair].sum()
        lowest = above / below
        best_size = len(order)
        max_size = min(MAX_HISTORY, len(own))
        for _ in range(max_size - len(order)):
            grown_above = above + 2 * pull + own
            grown_below = below + own
            energy = grown_above / grown_below
            energy[is_member] = np.inf
            best = int(energy.argmin())
            above = grown_above[best]
            below = grown_below[best]
            pull += self.projector[best]
            is_member[best] = True
            order.append(best)
            if energy[best] < lowest:
                lowest = energy[best]
                best_size = len(order)
            elif energy[best] > 1.3 * lowest + 0.02:
                break
        guess = np.zeros(len(own), bool)
        guess[order[:best_size]] = True
        return guess


def compute_auc(inside: Doubles | Floats, outside: Doubles | Floats) -> float | None:
    """How often one who is inside scores higher than one who is not; a tie is half. None: nobody to compare."""
    n_inside = len(inside)
    n_outside = len(outside)
    if not n_inside or not n_outside:
        return None
    order = np.sort(outside)
    lower = np.searchsorted(order, inside, side="left")
    upper = np.searchsorted(order, inside, side="right")
    ranks = lower + upper
    wins = ranks.mean() / 2
    return float(wins / n_outside)


class AucSamples:
    """AUCs of repeated draws, apart for each kind of release."""

    def __init__(self, *kinds: str) -> None:
        self.values: dict[str, list[float]] = {}
        for kind in kinds:
            self.values[kind] = []

    def add_auc(self, kind: str, inside: Doubles | Floats, outside: Doubles | Floats) -> None:
        """Add one AUC, unless there is nobody to compare."""
        value = compute_auc(inside, outside)
        if value is not None:
            self.values[kind].append(value)

    def compute_means(self) -> dict[str, float]:
        means = {}
        for kind, values in self.values.items():
            means[kind] = float(np.mean(values))
        return means
