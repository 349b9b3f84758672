"""What contrastive unlearning minimises: rows near what remains, away from what is forgotten (sharing spec B.4-B.6).

An item has its own row, a view that the remaining graph makes of it, and forgotten views that the graph of withdrawn
edges makes of earlier tables. The printed loss never rests and drives rows past what a retrained model has. So the
default pushes a row away from a forgotten view only as far as it is nearer to it than the remaining view is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tacita.core.types import Bools, Doubles, Floats, Longs
from tacita.kernels.hashing import choose_distinct
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import UnitRows, compute_infonce_with_gradients

Loss = Literal["ref_hinge", "infonce_pos", "printed"]
_SLACK = 1e-6  # at the kink of the hinge, where rounding would push
BACKGROUND_ITEMS = 100  # items whose similarity to a forgotten view stands for that of an item without a remaining view


@dataclass(frozen=True)
class ForgottenViews:
    """The views to get away from; the same in all rounds."""

    items: Longs  # (forgotten items,), ascending
    views: Floats  # (tables, forgotten items, width) of length one

    @staticmethod
    def compute(
        graph: SharedGraph, tables: Floats, people: Floats | None = None, through_graph: bool = True
    ) -> ForgottenViews:
        """What the graph of withdrawn edges, with degrees of its own, makes of each table; or its plain rows."""
        items = graph.shared_items.astype(np.int64)
        width = tables.shape[2]
        n_tables = len(tables)
        n_items = len(items)
        shape = (n_tables, n_items, width)
        views = np.zeros(shape, np.float32)
        for number, table in enumerate(tables):
            rows = table
            if through_graph:
                _, rows = graph.propagate_and_average(table, people)
            forgotten_rows = np.ascontiguousarray(rows[items])
            unit_rows = UnitRows.normalise(forgotten_rows)
            views[number] = unit_rows.rows
        return ForgottenViews(items, views)


@dataclass(frozen=True)
class ContrastiveGradients:
    """Gradients of a loss in rows of length one: of the items' own rows and of their remaining views."""

    loss: float
    row_gradient: Floats
    view_gradient: Floats


@dataclass(frozen=True)
class Similarities:
    """The cosines that a loss is about, and the rows they are of."""

    own: Floats  # (items, width) own rows
    views: Floats  # (items, width) remaining views
    remaining: Doubles  # (items,) p: of the own row with the remaining view
    forgotten: Doubles  # (tables, forgotten) n: of the own row with each forgotten view


@dataclass(frozen=True)
class ContrastiveLoss:
    """The loss of one round, over every item that is shared or forgotten."""

    loss: Loss
    tau: float
    mu: float
    items: Longs  # (items,) all of them, ascending
    forgotten: ForgottenViews
    where: Longs  # places of the forgotten ones among them
    reference: Floats | None  # (tables, forgotten) similarity that is right; nan: that of the remaining view
    cores: ThreadPoolExecutor
    batch: int = 1024  # other items in a step, for infonce_pos

    def compute_gradients(self, own: Floats, remaining_views: Floats, step: np.uint64) -> ContrastiveGradients:
        """`own`: rows of length one of `items`; `step`: key of what a step draws."""
        remaining = np.einsum("ij,ij->i", own, remaining_views)
        forgotten_rows = own[self.where]
        forgotten_views = self.forgotten.views
        forgotten = np.einsum("mij,ij->mi", forgotten_views, forgotten_rows)
        cosines = Similarities(
            own,
            remaining_views,
            remaining.astype(np.float64),
            forgotten.astype(np.float64),
        )
        if self.loss == "infonce_pos":
            return self._compute_softplus_gradients(cosines, step)
        if self.loss == "printed":
            return self._compute_printed_gradients(cosines)
        return self._compute_hinge_gradients(cosines)

    def _compute_hinge_gradients(self, cosines: Similarities) -> ContrastiveGradients:
        expected = self._compute_expected_similarity(cosines.views)
        excess = cosines.forgotten - expected - _SLACK
        n_tables = len(cosines.forgotten)
        n_items = len(cosines.own)
        share = self.mu / max(1, n_tables)
        scale = n_items * self.tau
        pull = (1 - cosines.remaining).sum()
        positive = np.maximum(excess, 0)
        push = share * positive.sum()
        slope = -1 / scale
        by_remaining = np.full(n_items, slope)
        is_excess = excess > 0
        slopes = share / scale * is_excess
        by_forgotten = np.asarray(slopes, np.float64)
        loss = (pull + push) / scale
        return self._combine_gradients(loss, by_remaining, by_forgotten, cosines)

    def _compute_expected_similarity(self, views: Floats) -> Doubles:
        """(tables, forgotten) how similar to forgotten views the remaining data justifies rows to be."""
        forgotten = self.forgotten.views
        forgotten_rows = views[self.where]
        cosines = np.einsum("mij,ij->mi", forgotten, forgotten_rows)
        expected: Doubles = cosines.astype(np.float64)
        if self.reference is None:
            return expected
        is_unknown = np.isnan(self.reference)
        return np.where(is_unknown, expected, self.reference)

    def _compute_printed_gradients(self, cosines: Similarities) -> ContrastiveGradients:
        n_items = len(cosines.own)
        scale = n_items * self.tau
        logits = cosines.forgotten / self.tau
        push, weight = _logsumexp_with_gradient(logits)
        similarity = cosines.remaining.sum()
        pull = -similarity / self.tau
        total_loss = pull + push.sum()
        loss = total_loss / n_items
        slope = -1 / scale
        by_remaining = np.full(n_items, slope)
        by_forgotten = weight / scale
        return self._combine_gradients(loss, by_remaining, by_forgotten, cosines)

    def _compute_softplus_gradients(self, cosines: Similarities, step: np.uint64) -> ContrastiveGradients:
        """log(1 + sum exp((n - p) / tau)) of forgotten items, in-batch InfoNCE of some others."""
        n_items = len(cosines.own)
        n_forgotten = len(self.where)
        others = self._draw_other_items(n_items, step)
        n_used = n_forgotten + len(others)
        scale = n_used * self.tau
        zero = np.zeros((1, n_forgotten))
        remaining = cosines.remaining[self.where]
        difference = cosines.forgotten - remaining
        scaled = difference / self.tau
        logits = np.concatenate([zero, scaled])
        losses, weight = _logsumexp_with_gradient(logits)
        forgotten_weight = weight[1:]
        by_remaining = np.zeros(n_items)
        total_weight = -forgotten_weight.sum(0)
        by_remaining[self.where] = total_weight / scale
        by_forgotten = forgotten_weight / scale
        loss = losses.sum() / n_used
        gradients = self._combine_gradients(loss, by_remaining, by_forgotten, cosines)
        if not len(others):
            return gradients
        share = len(others) / n_used
        rows = cosines.own[others]
        views = cosines.views[others]
        agreement, by_row, by_view = compute_infonce_with_gradients(rows, views, self.tau, share, self.cores)
        gradients.row_gradient[others] += by_row
        gradients.view_gradient[others] += by_view
        n_others = len(others)
        agreement_loss = agreement * n_others / n_used
        loss = gradients.loss + agreement_loss
        return ContrastiveGradients(loss, gradients.row_gradient, gradients.view_gradient)

    def _draw_other_items(self, n_items: int, step: np.uint64) -> Longs:
        """Places of some items that are not forgotten."""
        all_items = np.arange(n_items)
        others = np.setdiff1d(all_items, self.where)
        n_others = len(others)
        n_chosen = min(self.batch, n_others)
        chosen = choose_distinct(step, n_others, n_chosen)
        return np.sort(others[chosen])

    def _combine_gradients(
        self, loss: float, by_remaining: Doubles, by_forgotten: Doubles, cosines: Similarities
    ) -> ContrastiveGradients:
        """Gradients from those in p (items,) and in n (tables, forgotten)."""
        slopes = by_remaining.astype(np.float32)
        factor = slopes[:, None]
        view_factor = by_forgotten.astype(np.float32)
        row_gradient = factor * cosines.views
        views = self.forgotten.views
        push = np.einsum("mi,mij->ij", view_factor, views)
        row_gradient[self.where] += push
        view_gradient = factor * cosines.own
        return ContrastiveGradients(float(loss), row_gradient, view_gradient)


def _logsumexp_with_gradient(logits: Doubles) -> tuple[Doubles, Doubles]:
    """Over the first axis, and its gradients."""
    if not len(logits):
        n_columns = logits.shape[1]
        return np.zeros(n_columns), logits
    largest = logits.max(0)
    weight = np.exp(logits - largest)
    total = weight.sum(0)
    logsumexp = np.log(total) + largest
    return logsumexp, weight / total


def estimate_background(table: Floats, forgotten: ForgottenViews, lonely: Bools, key: np.uint64) -> Floats:
    """(tables, forgotten): of items without a remaining view how near others are to their forgotten ones; else nan."""
    shape = forgotten.views.shape[:2]
    background = np.full(shape, np.nan, np.float32)
    if not lonely.any():
        return background
    n_items, width = table.shape
    all_items = np.arange(n_items)
    others = np.setdiff1d(all_items, forgotten.items)
    n_others = len(others)
    n_chosen = min(BACKGROUND_ITEMS, n_others)
    places = choose_distinct(key, n_others, n_chosen)
    chosen = others[places]
    mean = np.zeros(width)
    if len(chosen):
        rows = np.ascontiguousarray(table[chosen])
        unit_rows = UnitRows.normalise(rows)
        mean = unit_rows.rows.mean(0)
    mean_row = mean.astype(np.float32)
    lonely_views = forgotten.views[:, lonely]
    background[:, lonely] = lonely_views @ mean_row
    return background
