"""What contrastive unlearning minimises: rows near what remains, away from what is forgotten (sharing spec B.4-B.6).

An item has its own row, a view that the remaining graph makes of it, and forgotten views that the graph of what was
withdrawn makes of earlier tables. The printed loss never rests and drives rows past what a retrained model has, so the
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
from tacita.methods.sharing.graph_training import UnitRows, compute_infonce

Loss = Literal["ref_hinge", "infonce_pos", "printed"]
_SLACK = 1e-6  # at the kink of the hinge, where rounding would push
BACKGROUND_ITEMS = 100  # items whose similarity to a forgotten view stands for that of an item without a remaining view


@dataclass(frozen=True)
class ForgottenViews:
    """The views to get away from; the same in all rounds."""

    items: Longs  # (forgotten items,), ascending
    views: Floats  # (tables, forgotten items, width) of length one

    @staticmethod
    def of(
        graph: SharedGraph, tables: Floats, people: Floats | None = None, through_graph: bool = True
    ) -> ForgottenViews:
        """What the graph of withdrawn edges, with degrees of its own, makes of each table; or the plain rows of it."""
        items = graph.shared_items.astype(np.int64)
        made = [graph.smooth(table, people)[1] if through_graph else table for table in tables]
        views = [UnitRows.of(np.ascontiguousarray(one[items])).rows for one in made]
        return ForgottenViews(
            items, np.stack(views) if views else np.zeros((0, len(items), tables.shape[2]), np.float32)
        )


@dataclass(frozen=True)
class ContrastiveGradients:
    """Slopes of a loss in rows of length one: of the items' own rows and of their remaining views."""

    loss: float
    row_gradient: Floats
    view_gradient: Floats


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
        """`own`, `made`: rows of length one and the remaining views of `items`; `step`: key of what a step draws."""
        views = self.forgotten.views
        near = np.einsum("ij,ij->i", own, remaining_views).astype(np.float64)  # p
        back = np.einsum("mij,ij->mi", views, own[self.where]).astype(np.float64)  # n
        if self.loss == "infonce_pos":
            return self._compute_softplus(own, remaining_views, near, back, step)
        if self.loss == "printed":
            return self._compute_printed(own, remaining_views, near, back)
        return self._compute_hinge(own, remaining_views, near, back)

    def _compute_hinge(self, own: Floats, made: Floats, near: Doubles, back: Doubles) -> ContrastiveGradients:
        right = np.einsum("mij,ij->mi", self.forgotten.views, made[self.where]).astype(np.float64)
        if self.reference is not None:
            right = np.where(np.isnan(self.reference), right, self.reference)
        over = back - right - _SLACK
        share, n = self.mu / max(1, len(back)), len(own) * self.tau
        loss = (1 - near).sum() + share * np.maximum(over, 0).sum()
        return self._combine_gradients(loss / n, np.full(len(own), -1 / n), share / n * (over > 0), own, made)

    def _compute_printed(self, own: Floats, made: Floats, near: Doubles, back: Doubles) -> ContrastiveGradients:
        n = len(own)
        loss, weight = _logsumexp(back / self.tau)
        total = (-near.sum() / self.tau + loss.sum()) / n
        return self._combine_gradients(total, np.full(n, -1 / (n * self.tau)), weight / (n * self.tau), own, made)

    def _compute_softplus(
        self, own: Floats, made: Floats, near: Doubles, back: Doubles, step: np.uint64
    ) -> ContrastiveGradients:
        """log(1 + sum exp((n - p) / tau)) of forgotten items, in-batch InfoNCE of some others."""
        others = np.setdiff1d(np.arange(len(own)), self.where)
        others = np.sort(others[choose_distinct(step, len(others), min(self.batch, len(others)))])
        n = len(self.where) + len(others)
        zero = np.zeros((1, len(self.where)))
        loss, weight = _logsumexp(np.concatenate([zero, (back - near[self.where]) / self.tau]))
        by = np.zeros(len(own))
        by[self.where] = -weight[1:].sum(0) / (n * self.tau)
        pulled = self._combine_gradients(loss.sum() / n, by, weight[1:] / (n * self.tau), own, made)
        if not len(others):
            return pulled
        cl, left, right = compute_infonce(own[others], made[others], self.tau, len(others) / n, self.cores)
        pulled.row_gradient[others] += left
        pulled.view_gradient[others] += right
        return ContrastiveGradients(pulled.loss + cl * len(others) / n, pulled.row_gradient, pulled.view_gradient)

    def _combine_gradients(
        self, loss: float, by_near: Doubles, by_back: Doubles, own: Floats, made: Floats
    ) -> ContrastiveGradients:
        """Slopes from those in p (items,) and in n (tables, forgotten)."""
        by = by_near.astype(np.float32)[:, None]
        slope = by * made
        slope[self.where] += np.einsum("mi,mij->ij", by_back.astype(np.float32), self.forgotten.views)
        return ContrastiveGradients(float(loss), slope, by * own)


def _logsumexp(logits: Doubles) -> tuple[Doubles, Doubles]:
    """Over the first axis, and its slopes."""
    if not len(logits):
        return np.zeros(logits.shape[1]), logits
    most = logits.max(0)
    weight = np.exp(logits - most)
    total = weight.sum(0)
    return np.log(total) + most, weight / total


def estimate_background(table: Floats, forgotten: ForgottenViews, lonely: Bools, key: np.uint64) -> Floats:
    """(tables, forgotten): of items without a remaining view how near others are to their forgotten ones; else nan."""
    out = np.full(forgotten.views.shape[:2], np.nan, np.float32)
    others = np.setdiff1d(np.arange(len(table)), forgotten.items)
    if lonely.any():
        some = others[choose_distinct(key, len(others), min(BACKGROUND_ITEMS, len(others)))]
        mean = UnitRows.of(np.ascontiguousarray(table[some])).rows.mean(0) if len(some) else np.zeros(table.shape[1])
        out[:, lonely] = forgotten.views[:, lonely] @ mean.astype(np.float32)
    return out
