"""tally as a graph filter (GF-CF, CIKM 2021): another solution of a sum over users, which needs no inverse.

A user's term is x x^T / |x|, |x| the number of items, so that the row sums of G count the users of each item. With
F = D^-1/2 G D^-1/2 and V its leading axes a device scores x (F D^lift + alpha D^-1/2 V V^T D^1/2). G is sparse, V has a
few hundred columns, and nothing of items times items is ever made dense past `MAX_DENSE_ITEMS` items.

Weights of users are rounded to a quantum, so that sums are the same in any order. A retraction leaves the very sum that
retraining would make, and so the same filter, bit by bit; it is solved from the start, which takes as long as the first
time. "mixture" solves the same sum by ridge regression as well, where the catalogue lets it, and the device adds both
up, standardised: what each weighs is chosen on validation, either alone among the choices.

What it gives away: F holds more than B does, namely which items go together and how often, so all that is said of B
holds (docs/tally.md). There is no form under a budget.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Ragged, ServerState
from tacita.kernels.triangles import LowerRows, list_lower_rows
from tacita.messages import QUANTUM
from tacita.models.base import has_expected_heads, make_scalar, make_zero_scores, read_scalar, register_form
from tacita.models.scoring import CHUNK
from tacita.models.statistic_model import Fields, FieldSums
from tacita.models.tally.head_checks import MOST_WEIGHT, are_scalars, is_bounded, matrix_fits
from tacita.models.tally.model import RECENCIES, Tally, add_repeat_bonus, with_heads
from tacita.models.tally.options import STATE, STATISTIC, TallyConfig, is_set
from tacita.models.tally.retraction import compute_changed_sums
from tacita.models.tally.solver import invert_in_place
from tacita.models.tally.spectral import build_item_graph, find_leading_axes, keep_largest_per_column
from tacita.models.tally.sums import PairShape, PairSums, number_triangle_places
from tacita.models.tally.weights import (
    add_products,
    compute_recency_weights,
    compute_weights,
    pack_weights,
    read_item_column,
)

MAX_DENSE_ITEMS = 4_000  # items up to which sums are dense arrays, of 128 MB at most
ALPHAS = 0.0, 0.3, 1.0, 0.15  # what alpha = "learn" tries; the last one stays where nobody validates
LIFTS = 0.1, 0.2, 0.0  # the same for lift
BLENDS = 0.0, 1.0, 0.25, 0.75, 0.5  # the same for blend
LEAST_ROOT = 1e-12  # of an item that is out: what devices divide by; sums that have faded lie far above
NO_MEANING = ("length_power", "min_pair")
NO_RIDGE = ("ridge", "ridge_popularity")
RIDGE_PREFIX = "solved_"  # before the names of what ridge regression makes of the sum

Values = tuple[float, ...]
Choice = dict[str, float]
"""Name of what validation chooses -> value."""


@register_form("filter")
@register_form("mixture")
class FilterTally(Tally):
    """Graph filter, alone or mixed with ridge regression, from a sum of users' statistics."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__(config)
        for name in NO_MEANING:
            if is_set(config, name):
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = '{config.solve}', where a person with n "
                    f"items weighs 1 / n; leave one of the two out."
                )
        for name in () if self.is_mixture else NO_RIDGE:
            if is_set(config, name):
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = 'filter', which inverts nothing; leave one "
                    "of the two out."
                )

    @property
    def is_mixture(self) -> bool:
        return self.config.solve == "mixture"

    def check(self, first_items: int, all_items: int) -> None:
        if not self.is_mixture:
            return
        if all_items > self.config.most_inputs:
            raise TacitaError(
                f"backbone.solve = 'mixture' inverts a matrix of all {all_items:,} items, more than "
                f"backbone.most_inputs = {self.config.most_inputs:,}; use 'filter', or raise it."
            )
        super().check(first_items, all_items)

    # what travels

    def init_heads(self, draws: Draws) -> Arrays:
        heads = {
            **super().init_heads(draws),
            "axes": np.zeros((0, 0), np.float32),
            "root": np.zeros(0, np.float32),  # of what an item counts; 0: it is not out
            "alpha": np.zeros(1, np.float32),
            "lift": np.zeros(1, np.float32),
        }
        if self.is_mixture:
            empty = pack_weights(np.zeros((0, 0), np.float32))
            heads |= _prefix_names(empty)
            heads["blend"] = np.zeros(1, np.float32)
        return heads

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if not has_expected_heads(heads, own):
            return False
        prefixes = ("", RIDGE_PREFIX) if self.is_mixture else ("",)
        for prefix in prefixes:
            matrix = _select_matrix(heads, prefix)
            if not matrix_fits(matrix, n_items):
                return False
        if len(heads["inputs"]):  # it reads all items
            return False
        return _axes_fit(heads) and self._has_bounded_choice(heads)

    def _has_bounded_choice(self, heads: Arrays) -> bool:
        """Whether alpha, lift and blend are within their bounds."""
        most = {"alpha": 100.0, "lift": 1.0}
        if self.is_mixture:
            most["blend"] = 1.0
        if not are_scalars(heads, *most):
            return False
        for name, bound in most.items():
            value = read_scalar(heads, name)
            if not 0 <= value <= bound:
                return False
        return True

    def weigh_lists(self, lists: Ragged) -> Doubles:
        """1 / n in whole numbers of a quantum."""
        counts = np.maximum(lists.counts(), 1)
        weights = 1.0 / counts
        return np.rint(weights / QUANTUM) * QUANTUM

    def _specify_fields(self, shape: PairShape) -> Fields:
        pairs, *others = super()._specify_fields(shape)
        is_sparse = shape.n_items > MAX_DENSE_ITEMS
        return replace(pairs, sparse=is_sparse), *others

    def sums_lists(self, n_items: int) -> bool:
        return n_items <= MAX_DENSE_ITEMS

    def count_upload_bytes(self, n_items: int) -> float:
        fields = self._specify_fields(PairShape(n_items))
        return sum(field.n_bytes for field in fields)

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return (STATISTIC,)

    # on the server

    @property
    def _trials(self) -> list[Choice]:
        """What each trial changes of the best one so far: recency first, then alpha, lift and blend together."""
        recencies = [{"recency": value} for value in self._options["recency"]]
        mixtures = [
            {"alpha": alpha, "lift": lift, "blend": blend}
            for alpha, lift, blend in product(self._options["alpha"], self._options["lift"], self._options["blend"])
        ]
        if len(recencies) == 1:
            return mixtures
        if len(mixtures) == 1:
            return recencies
        return recencies + mixtures

    @property
    def _options(self) -> dict[str, Values]:
        """The values of each choice that trials try; the last stays where nobody validates."""
        config = self.config
        options = {"recency": RECENCIES, "alpha": ALPHAS, "lift": LIFTS, "blend": (0.0,)}
        settings = {"recency": config.recency, "alpha": config.alpha, "lift": config.lift}
        if self.is_mixture:
            options |= {"alpha": ALPHAS[-1:], "lift": LIFTS[-1:], "blend": BLENDS}
            settings["blend"] = config.blend
        set_values = {name: (value,) for name, value in settings.items() if not isinstance(value, str)}
        return options | set_values

    @property
    def n_validation_candidates(self) -> int:
        return len(self._trials)

    def with_trial(self, server: ServerState, trial: int) -> ServerState:
        choice = self._trials[trial]
        if trial == 0:
            last_values = {name: values[-1] for name, values in self._options.items()}
            choice = last_values | choice
        heads = {name: make_scalar(value) for name, value in choice.items() if name in server.heads}
        return with_heads(server, heads)

    def with_solved_sums(self, server: ServerState, sums: PairSums, inverse: Doubles | None = None) -> ServerState:
        shape = PairShape(len(server.items))
        released = self.list_released_rows(sums, shape)
        graph = build_item_graph(released)
        matrix = keep_largest_per_column(graph.matrix, self.config.keep)
        repeat = self.choose_repeat_bonus(sums, shape.n_items)
        heads = {
            **pack_weights(matrix),
            "axes": find_leading_axes(graph.matrix, self.config.axes),
            "root": graph.root.astype(np.float32),
            "repeat": make_scalar(repeat),
        }
        if self.is_mixture:
            ridge = self._solve_ridge(sums, shape, graph.root)
            heads |= _prefix_names(ridge)
        return with_heads(server, heads).with_part(STATE, sums.to_arrays())

    def list_released_rows(self, sums: PairSums, shape: PairShape) -> LowerRows:
        """The lower triangle of G as far as it is out."""
        at: AnyArray = sums.at
        value = sums.total
        least = max(1, self.config.min_item)
        is_out = sums.find_released_items(least)[0]
        if len(sums.index) > 1:
            at = sums.list_places()
            value = self.compute_released_gram(sums, shape, at)
            is_out = np.ones(shape.n_items, bool)
        return list_lower_rows(at, value, shape.n_items, is_out)

    def _solve_ridge(self, sums: PairSums, shape: PairShape, root: Doubles) -> Arrays:
        """B of the same sum. The ridge is meant for users who weigh 1, so it shrinks as the mean weight does."""
        gram = self.compute_released_gram(sums, shape, None)
        items = np.arange(shape.n_items, dtype=np.int64)
        diagonal = gram[number_triangle_places(items, items)]
        n_likes = (root**2).sum()
        mean_weight = diagonal.sum() / max(n_likes, 1e-12)
        mean_weight = float(mean_weight) or 1.0
        lower = self.build_ridge_triangle(gram, None, shape, mean_weight)
        inverse = invert_in_place(lower)
        if inverse is None:
            raise TacitaError("the sum cannot be solved by ridge regression; raise backbone.ridge, or use 'filter'.")
        weights = compute_weights(inverse, gram, None, shape, self.config.keep)
        return pack_weights(weights)

    def measure_similarity_to_item(self, server: ServerState, items: Floats, item: int) -> Floats:
        """The weight of every item for this one in the filter."""
        heads = server.heads
        matrix = _select_matrix(heads)
        weights = read_item_column(matrix, item, len(server.items))
        axes = heads["axes"]
        root = heads["root"]
        known = len(axes)
        if item >= known:
            return weights
        lift_factors = _compute_lift(heads)
        weights *= lift_factors[item]
        alpha = heads["alpha"][0]
        scale = alpha * root[item] * _invert_nonzero(root)
        along_axes = axes @ axes[item]
        weights[:known] += scale * along_axes
        weights[item] = 0.0
        return weights

    def apply_retraction(self, server: ServerState, change: FieldSums) -> tuple[ServerState, int]:
        shape = PairShape(len(server.items))
        sums = PairSums.from_arrays(server.parts[STATE])
        changed = compute_changed_sums(sums, change, shape)
        return self.with_solved_sums(server, changed), 0

    # on the device

    def score_history(self, view: CohortView) -> Floats:
        blend = read_scalar(view.heads, "blend") if self.is_mixture else 0.0
        if blend == 0:
            return self._score_filter(view)
        if blend == 1:
            return self._score_ridge(view)
        filtered = _standardise_scores(self._score_filter(view))
        solved = _standardise_scores(self._score_ridge(view))
        return blend * solved + (1 - blend) * filtered

    def _score_filter(self, view: CohortView) -> Floats:
        heads = view.heads
        latest = self.select_latest_items(view)
        weight = compute_recency_weights(latest, read_scalar(heads, "recency"))
        scores = make_zero_scores(view)
        add_products(latest, weight, _select_matrix(heads), scores)
        if heads["lift"][0]:
            known = len(heads["root"])
            scores[:, :known] *= _compute_lift(heads)
        _add_along_axes(latest, weight, heads, scores)
        add_repeat_bonus(view, scores)
        return scores

    def _score_ridge(self, view: CohortView) -> Floats:
        matrix = _select_matrix(view.heads, RIDGE_PREFIX)
        ridge_view = replace(view, heads=matrix)
        return super().score_history(ridge_view)


def _prefix_names(matrix: Arrays) -> Arrays:
    """The matrix of ridge regression under the names that it has among the heads."""
    return {RIDGE_PREFIX + name: value for name, value in matrix.items()}


def _select_matrix(heads: Arrays, prefix: str = "") -> Arrays:
    """One of the matrices with the names that plain tally has for its own."""
    matrix = {name: heads[prefix + name] for name in ("weights", "column", "ptr", "known")}
    settings = {name: heads[name] for name in ("inputs", "recency", "repeat")}
    return matrix | settings


def _axes_fit(heads: Arrays) -> bool:
    """Whether the axes and what items count are of one size and bounded."""
    axes = heads["axes"]
    root = heads["root"]
    known = int(heads["known"][0])
    if axes.ndim != 2:
        return False
    n_items, n_axes = axes.shape
    if root.shape != (n_items,):
        return False
    if n_items != known or n_axes > max(1, known):
        return False
    is_safe = (root >= LEAST_ROOT) & (root <= MOST_WEIGHT)
    is_absent = root == 0
    roots_fit = is_absent | is_safe
    return is_bounded(axes, 2) and bool(roots_fit.all())


def _invert_nonzero(root: Floats) -> Floats:
    zeros = np.zeros_like(root)
    return np.divide(1.0, root, out=zeros, where=root > 0)


def _compute_lift(heads: Arrays) -> Floats:
    """(items,) what scores of the first part are multiplied with: 1 unless items with more users count for more."""
    lift = read_scalar(heads, "lift")
    root = heads["root"].astype(np.float64)
    users = root**2
    lifted = np.maximum(users, 1e-12) ** lift
    is_out = users > 0
    factors = np.where(is_out, lifted, 1.0)
    return factors.astype(np.float32)


def _add_along_axes(lists: Ragged, weight: Floats, heads: Arrays, scores: Floats) -> None:
    """Add alpha x D^-1/2 V V^T D^1/2, in products of one shape: no number depends on the cohort."""
    axes = heads["axes"]
    root = heads["root"]
    alpha = heads["alpha"][0]
    n_known, n_axes = axes.shape
    is_known = lists.ids < n_known
    if not alpha or not is_known.any():
        return
    weighted = replace(lists, values={"weight": weight})
    known = weighted.filter_entries(is_known)
    inverse_root = _invert_nonzero(root)[known.ids]
    scaled = known.values["weight"] * inverse_root
    histories = matrix_of_rows(known.ptr, known.ids, scaled, n_known)
    along = histories @ axes
    for first in range(0, len(scores), CHUNK):
        users = slice(first, first + CHUNK)
        chunk = along[users]
        n_users = len(chunk)
        padded = np.zeros((CHUNK, n_axes), np.float32)
        padded[:n_users] = alpha * chunk
        added = (padded @ axes.T) * root
        scores[users, :n_known] += added[:n_users]


def _standardise_scores(scores: Floats) -> Floats:
    """Each user's scores with mean 0 and deviation 1; all 0 where they are alike."""
    mean = scores.mean(axis=1, keepdims=True)
    deviation = scores.std(axis=1, keepdims=True)
    divisor = np.where(deviation > 0, deviation, 1.0)
    standardised = (scores - mean) / divisor
    return np.asarray(standardised, np.float32)
