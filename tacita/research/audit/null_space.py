"""The null-space reader: a history that took part is nearly orthogonal to what nobody's history spans.

Where there are fewer people than items, P = (G + ridge)^-1 has its largest eigenvalues where no history reaches. N
projects there, so N x is nearly 0 for everybody who took part, and a set of items is the more likely a history of the
data the smaller its energy x^T N x / sum of N_ii x_i is (about 1 for a set that has nothing to do with the data). One
release and nothing else is needed; cut entries blur N but leave enough of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs
from tacita.research.audit.reconstruction import RebuiltInverse

QUIET_SHARE = 0.5  # share of the eigenvectors, from below, that histories are taken to span
STEPS, MAX_GROWTH = 20, 2.5  # growth of a history of which a part is known: to so many times the part, in so many steps
EXTRA_STEPS = 5  # rankings at the full size
PARTNERS = 2  # strongest partners of each item that a history from nothing starts with
MAX_HISTORY = 150  # items that a history from nothing grows to
FLIPS = 100  # items put in or left out in the end, at most


@dataclass(frozen=True)
class NullSpace:
    projector: Doubles  # N, over the items of the release

    @staticmethod
    def of(rebuilt: RebuiltInverse, quiet: float = QUIET_SHARE) -> NullSpace:
        _, vectors = scipy.linalg.eigh(rebuilt.inverse, check_finite=False)
        loud = vectors[:, int(quiet * len(vectors)) :]
        return NullSpace(loud @ loud.T)

    @property
    def diagonal(self) -> Doubles:
        return np.maximum(np.diag(self.projector), 1e-9)

    def energy(self, sets: Bools) -> Doubles:
        """x^T N x / sum of N_ii x_i of each set; 1 for an empty one."""
        x = sets.astype(np.float64)
        above, below = np.einsum("ui,ui->u", x @ self.projector, x), x @ self.diagonal
        return np.asarray(np.where(below > 0, above / np.where(below > 0, below, 1.0), 1.0))

    def rank_items(self, known: Bools) -> Doubles:
        """How well each item goes with a person's known ones: - sum of N_ij / N_jj over them, an item itself apart."""
        return np.asarray(-(self.projector @ known.astype(np.float64)) / self.diagonal + known)

    def guess_last_item(self, known: Bools) -> int:
        """The one item that is missing; the root of N_jj makes all items' pulls of a size."""
        pull = self.projector @ known.astype(np.float64) / np.sqrt(self.diagonal)
        return int(np.where(known, np.inf, pull).argmin())

    def complete_history(self, known: Bools) -> Bools:
        """The rest of a history: grown by ranking again and again, cut where the energy is lowest, then polished."""
        guess, n_known = known, int(known.sum())
        for step in range(STEPS + EXTRA_STEPS):
            room = 2 + int(np.ceil(n_known * (1 + (MAX_GROWTH - 1) * min(1.0, (step + 1) / STEPS))))
            score = self.rank_items(guess)
            score[known] = np.inf
            order = np.argsort(-score, kind="stable")[:room]
            inner = self.projector[np.ix_(order, order)]
            above = np.cumsum(2 * np.tril(inner, -1).sum(axis=1) + np.diag(inner))
            size = n_known + int((above / np.cumsum(self.diagonal[order]))[n_known - 1 :].argmin())
            last, guess = guess, np.zeros_like(known)
            guess[order[:size]] = True
            if step >= STEPS and (last == guess).all():
                break
        return self.polish_guess(guess, known)

    def polish_guess(self, guess: Bools, known: Bools) -> Bools:
        """Flip the item that lowers the energy most, again and again; what is known stays."""
        guess = guess.copy()
        pull, own = self.projector @ guess.astype(np.float64), self.diagonal
        above, below = pull[guess].sum(), own[guess].sum()
        for _ in range(FLIPS):
            sign = np.where(guess, -1.0, 1.0)
            energy = (above + 2 * sign * pull + own) / np.maximum(below + sign * own, 1e-9)
            energy[known | (below + sign * own < 1e-6)] = np.inf
            best = int(energy.argmin())
            if energy[best] >= above / max(below, 1e-9) - 1e-12:
                break
            above, below = above + 2 * sign[best] * pull[best] + own[best], below + sign[best] * own[best]
            pull += sign[best] * self.projector[best]
            guess[best] = not guess[best]
        return guess

    def guess_histories(self) -> Bools:
        """Histories without knowing anybody: grown from the strongest pairs; lowest energy first, no set twice."""
        nobody = np.zeros(len(self.projector), bool)
        if len(nobody) == 0:  # nothing is out
            return np.zeros((0, 0), bool)
        found = [self.polish_guess(self._grow_pair(pair), nobody) for pair in self._find_strong_pairs()]
        sets = np.unique(np.array(found, bool).reshape(-1, len(nobody)), axis=0)
        return np.asarray(sets[np.argsort(self.energy(sets), kind="stable")])

    def _find_strong_pairs(self) -> Longs:
        root = np.sqrt(self.diagonal)
        together = self.projector / root[:, None] / root[None, :]
        np.fill_diagonal(together, np.inf)
        partner = np.argsort(together, axis=1, kind="stable")[:, :PARTNERS].ravel()
        item = np.repeat(np.arange(len(root)), PARTNERS)[: len(partner)]
        return np.unique(np.stack([np.minimum(item, partner), np.maximum(item, partner)], axis=1), axis=0)

    def _grow_pair(self, pair: Longs) -> Bools:
        """Add the item that makes the energy lowest until it rises; the set of the lowest energy on the way."""
        own, order = self.diagonal, list(pair)
        taken = np.zeros(len(own), bool)
        taken[pair] = True
        pull = self.projector[pair].sum(axis=0)
        above, below = pull[pair].sum(), own[pair].sum()
        lowest, size = above / below, len(order)
        for _ in range(min(MAX_HISTORY, len(own)) - len(order)):
            energy = (above + 2 * pull + own) / (below + own)
            energy[taken] = np.inf
            best = int(energy.argmin())
            above, below = above + 2 * pull[best] + own[best], below + own[best]
            pull += self.projector[best]
            taken[best] = True
            order.append(best)
            if energy[best] < lowest:
                lowest, size = energy[best], len(order)
            elif energy[best] > 1.3 * lowest + 0.02:
                break
        guess = np.zeros(len(own), bool)
        guess[order[:size]] = True
        return guess


def auc(inside: Doubles | Floats, outside: Doubles | Floats) -> float | None:
    """How often one who is inside scores higher than one who is not; a tie is half. None: nobody to compare."""
    if len(inside) == 0 or len(outside) == 0:
        return None
    order = np.sort(outside)
    lower, upper = (np.searchsorted(order, inside, side=side) for side in ("left", "right"))
    return float((lower + upper).mean() / 2 / len(outside))
