"""tally as a graph filter (GF-CF, CIKM 2021): another solution of a sum over people, which needs no inverse.

A person's term is x x^T / |x|, |x| the number of items, so that the row sums of G count the people of each item. With
F = D^-1/2 G D^-1/2 and V its leading axes a device scores x (F D^lift + alpha D^-1/2 V V^T D^1/2). G is sparse, V has a
few hundred columns, and nothing of items times items is ever made dense past `DENSE` items.

Weights of people are rounded to a quantum, so that sums are the same in any order. What is left after a retraction is
the very sum that training again would make, and so is the filter, bit by bit; it is solved anew, which takes as long
as the first time. "mixture" solves the same sum by ridge regression as well, where the catalogue lets it, and the
device adds both up, standardised: what each weighs is chosen on validation, either alone among the choices.

What it gives away: F holds more than B does, namely which items go together and how often, so all that is said of B
holds (docs/tally.md). There is no form under a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Ragged, ServerState
from tacita.messages import QUANTUM, Spec
from tacita.models.base import register_form
from tacita.models.scoring import CHUNK
from tacita.models.tally.model import (
    MOST_WEIGHT,
    RECENCIES,
    REPEAT_BONUS,
    REPEAT_PENALTY,
    STATE,
    STATISTIC,
    Tally,
    TallyConfig,
)
from tacita.models.tally.retraction import apply_change
from tacita.models.tally.solver import invert_in_place
from tacita.models.tally.spectral import build_item_graph, keep_largest, leading_axes
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import add_products, compute_weights, pack_weights, read_column, recency_weights

MAX_DENSE_ITEMS = 4_000  # items up to which sums are dense arrays, of 128 MB at most
ALPHAS = 0.0, 0.3, 1.0, 0.15  # what alpha = "learn" tries; the last one stays where nobody validates
LIFTS = 0.1, 0.2, 0.0  # the same for lift
BLENDS = 0.0, 1.0, 0.25, 0.75, 0.5  # the same for blend
LEAST_ROOT = 1e-12  # of an item that is out: what devices divide by; sums that have faded lie far above
NO_MEANING = ("length_power", "min_pair")
NO_RIDGE = ("ridge", "ridge_popularity")
RIDGE_PREFIX = "solved_"  # before the names of what ridge regression makes of the sum


@register_form("filter")
@register_form("mixture")
class FilterTally(Tally):
    """Graph filter, alone or mixed with ridge regression, from a sum of users' statistics."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__(config)
        for name in NO_MEANING:
            if getattr(config, name) != TallyConfig.model_fields[name].default:
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = '{config.solve}', where a person with n "
                    f"items weighs 1 / n; leave one of the two out."
                )
        for name in () if self.is_mixture else NO_RIDGE:
            if getattr(config, name) != TallyConfig.model_fields[name].default:
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = 'filter', which inverts nothing; leave one "
                    "of the two out."
                )

    @property
    def is_mixture(self) -> bool:
        return self.config.solve == "mixture"

    def check(self, first_items: int, all_items: int) -> None:
        if self.is_mixture and all_items > self.config.most_inputs:
            raise TacitaError(
                f"backbone.solve = 'mixture' inverts a matrix of all {all_items:,} items, more than "
                f"backbone.most_inputs = {self.config.most_inputs:,}; use 'filter', or raise it."
            )
        if self.is_mixture:
            super().check(first_items, all_items)

    # what travels

    def init_heads(self, draws: Draws) -> Arrays:
        plain = super().init_heads(draws)
        own = {
            "axes": np.zeros((0, 0), np.float32),
            "root": np.zeros(0, np.float32),  # of what an item counts; 0: it is not out
            "alpha": np.zeros(1, np.float32),
            "lift": np.zeros(1, np.float32),
        }
        if self.is_mixture:
            solved = pack_weights(np.zeros((0, 0), np.float32))
            own |= {RIDGE_PREFIX + name: value for name, value in solved.items()} | {"blend": np.zeros(1, np.float32)}
        return {**plain, **own}

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if heads.keys() != own.keys() or any(heads[name].dtype != v.dtype for name, v in own.items()):
            return False
        plain = Tally(self.config)
        matrices = [_select_matrix(heads)] + ([_select_matrix(heads, RIDGE_PREFIX)] if self.is_mixture else [])
        if not all(plain.heads_fit(one, n_items) for one in matrices) or len(heads["inputs"]):
            return False
        axes, root, known = heads["axes"], heads["root"], int(heads["known"][0])
        sized = axes.ndim == 2 and root.shape == (len(axes),) and len(axes) == known and axes.shape[1] <= max(1, known)
        counts = (root == 0) | ((root >= LEAST_ROOT) & (root <= MOST_WEIGHT))
        mild = bool((np.abs(axes) <= 2).all() and counts.all())
        if not (sized and mild):
            return False
        limits = {"alpha": 100.0, "lift": 1.0} | ({"blend": 1.0} if self.is_mixture else {})
        return all(heads[name].shape == (1,) and 0 <= heads[name][0] <= most for name, most in limits.items())

    def weigh_lists(self, lists: Ragged) -> Doubles:
        """1 / n in whole numbers of a quantum."""
        return np.rint(1.0 / np.maximum(lists.counts(), 1) / QUANTUM) * QUANTUM

    def _fields(self, shape: PairShape) -> tuple[Spec, ...]:
        pairs, *others = super()._fields(shape)
        return replace(pairs, sparse=shape.n_items > MAX_DENSE_ITEMS), *others

    def upload_bytes(self, n_items: int) -> float:
        return sum(one.n_bytes for one in self._fields(PairShape(n_items)))

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return (STATISTIC,)

    # on the server

    @property
    def _choices(self) -> list[tuple[float, float, float, float]]:
        """Recency, alpha, lift and blend of each trial; the last stays where nobody validates."""
        recency, alpha, lift, blend = self.config.recency, self.config.alpha, self.config.lift, self.config.blend
        recencies = RECENCIES if recency == "learn" else (recency,)
        alphas = (ALPHAS[-1:] if self.is_mixture else ALPHAS) if alpha == "learn" else (alpha,)
        blends = (BLENDS if blend == "learn" else (blend,)) if self.is_mixture else (0.0,)
        lifts = (LIFTS[-1:] if self.is_mixture else LIFTS) if lift == "learn" else (lift,)
        return list(product(recencies, alphas, lifts, blends))

    @property
    def trials(self) -> int:
        return len(self._choices)

    def apply_trial(self, server: ServerState, trial: int) -> ServerState:
        values = dict(zip(("recency", "alpha", "lift", "blend"), self._choices[trial], strict=True))
        chosen = {name: np.array([value], np.float32) for name, value in values.items() if name in server.heads}
        return replace(server, heads={**server.heads, **chosen})

    def solve_sums(self, server: ServerState, sums: PairSums, inverse: Doubles | None = None) -> ServerState:
        shape = PairShape(len(server.items))
        at, value = self.list_released_pairs(sums, shape)
        graph = build_item_graph(*shape.decode_pairs(at), value, shape.n_items)
        heads = {
            **server.heads,
            **pack_weights(keep_largest(graph.matrix, self.config.keep)),
            "axes": leading_axes(graph.matrix, self.config.axes),
            "root": graph.root.astype(np.float32),
            "repeat": np.array([self._choose_repeat(sums, shape)], np.float32),
        }
        if self.is_mixture:
            heads |= {RIDGE_PREFIX + name: v for name, v in self._solve_ridge(sums, shape, graph.root).items()}
        return replace(server, heads=heads).with_part(STATE, sums.arrays())

    def list_released_pairs(self, sums: PairSums, shape: PairShape) -> tuple[AnyArray, Doubles]:
        """The lower triangle of G as far as it is out: places, ascending, and values."""
        at = sums.places()
        if len(sums.index) > 1:
            value = self.compute_gram(sums, shape, at)
        else:
            row, column = shape.decode_pairs(at)
            out = sums.find_released_items(max(1, self.config.min_item))[0]
            value = np.where(out[row] & out[column], sums.total, 0.0)
        return at[value != 0], value[value != 0]

    def _choose_repeat(self, sums: PairSums, shape: PairShape) -> float:
        repeat = self.config.repeat
        return (
            (0.0, REPEAT_BONUS, REPEAT_PENALTY)[sums.estimate_repeat_habit(shape.n_items)]
            if repeat == "learn"
            else repeat
        )

    def _solve_ridge(self, sums: PairSums, shape: PairShape, root: Doubles) -> Arrays:
        """B of the same sum. The ridge is said for people who weigh 1, so it shrinks as the mean weight does."""
        gram = self.compute_gram(sums, shape, None)
        last = np.arange(shape.n_items, dtype=np.int64)
        diagonal = gram[last * (last + 3) // 2]
        inverse = invert_in_place(
            self.add_ridge(gram, None, shape, float(diagonal.sum() / max((root**2).sum(), 1e-12)) or 1.0)
        )
        if inverse is None:
            raise TacitaError("the sum cannot be solved by ridge regression; raise backbone.ridge, or use 'filter'.")
        return pack_weights(compute_weights(inverse, gram, None, shape, self.config.keep))

    def likeness(self, server: ServerState, items: Floats, item: int) -> Floats:
        """What every item says for this one in the filter."""
        heads, said = server.heads, read_column(_select_matrix(server.heads), item, len(server.items))
        axes, root = heads["axes"], heads["root"]
        if item < len(axes):
            said *= _lift_factors(heads)[item]
            said[: len(axes)] += heads["alpha"][0] * root[item] * _invert_nonzero(root) * (axes @ axes[item])
            said[item] = 0.0
        return said

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        shape = PairShape(len(server.items))
        return self.solve_sums(server, apply_change(PairSums.from_arrays(server.parts[STATE]), change, shape)), 0

    # on the device

    def score_history(self, view: CohortView) -> Floats:
        heads, latest = view.heads, self.select_latest(view)
        weight = recency_weights(latest, float(heads["recency"][0]))
        blend = float(heads["blend"][0]) if self.is_mixture else 0.0
        filtered, solved = (np.zeros((len(view.user), view.n_items), np.float32) for _ in range(2))
        if blend < 1:
            add_products(latest, weight, _select_matrix(heads), filtered)
            if heads["lift"][0]:
                filtered[:, : len(heads["root"])] *= _lift_factors(heads)
            _add_along_axes(latest, weight, heads, filtered)
        if blend > 0:
            add_products(latest, weight, _select_matrix(heads, RIDGE_PREFIX), solved)
        if heads["repeat"][0] and view.history is not None:  # before they are standardised: it is said in their terms
            for scores in (filtered, solved):
                scores[view.history.rows(), view.history.ids] += heads["repeat"][0]
        if blend in (0, 1):
            return solved if blend else filtered
        return blend * _standardise(solved) + (1 - blend) * _standardise(filtered)


def _select_matrix(heads: Arrays, prefix: str = "") -> Arrays:
    """One of the matrices with the names that plain tally has for its own."""
    named = {name: heads[prefix + name] for name in ("weights", "column", "ptr", "known")}
    return named | {name: heads[name] for name in ("inputs", "recency", "repeat")}


def _invert_nonzero(root: Floats) -> Floats:
    return np.divide(1.0, root, out=np.zeros_like(root), where=root > 0)


def _lift_factors(heads: Arrays) -> Floats:
    """(items,) what scores of the first part are multiplied with: 1 unless items with more people count for more."""
    people = heads["root"].astype(np.float64) ** 2
    return np.where(people > 0, np.maximum(people, 1e-12) ** float(heads["lift"][0]), 1.0).astype(np.float32)


def _add_along_axes(lists: Ragged, weight: Floats, heads: Arrays, scores: Floats) -> None:
    """Add alpha x D^-1/2 V V^T D^1/2, in products of one shape: no number depends on the company."""
    axes, root, alpha = heads["axes"], heads["root"], heads["alpha"][0]
    known = lists.ids < len(axes)
    if not alpha or not known.any():
        return
    read = replace(lists, values={"weight": weight}).filter_entries(known)
    along = (
        matrix_of_rows(read.ptr, read.ids, read.values["weight"] * _invert_nonzero(root)[read.ids], len(axes)) @ axes
    )
    for lo in range(0, len(scores), CHUNK):
        some = along[lo : lo + CHUNK]
        padded = np.zeros((CHUNK, axes.shape[1]), np.float32)
        padded[: len(some)] = alpha * some
        scores[lo : lo + CHUNK, : len(axes)] += ((padded @ axes.T) * root)[: len(some)]


def _standardise(scores: Floats) -> Floats:
    """Each person's scores with mean 0 and deviation 1; all 0 where they are alike."""
    mean, deviation = scores.mean(axis=1, keepdims=True), scores.std(axis=1, keepdims=True)
    made: Any = (scores - mean) / np.where(deviation > 0, deviation, 1.0)
    return np.asarray(made, np.float32)
