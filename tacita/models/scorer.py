"""Scorer: a model that trains item rows on devices and scores (user, item) pairs with them.

`represent_users` and `compute_logits` use only operators that numpy arrays and torch tensors share: the first runs
once per user, the second once per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Floats, Longs, Ragged, ServerState
from tacita.models.base import Backbone

Tensors = dict[str, Any]
"""Arrays by name, all of numpy or all of torch."""

Reading = tuple[Floats, Floats]
"""(a, c) of users, such that a . row + c is the logit of every item."""

TableReading = tuple[Floats, Floats, Floats]
"""(a, c, rows): the same with rows of its own."""


@dataclass(frozen=True)
class Context:
    """The items that a model reads of each user, with the rows they have at the moment; numpy or torch."""

    ptr: Longs  # (users + 1,) entries of each user, oldest first
    user: Any  # (entries,)
    count: Any  # (users,) entries, as floats
    rows: Any  # (entries, width)
    values: Tensors  # columns aligned with the entries, such as "rating" and "time"

    @staticmethod
    def from_lists(lists: Ragged, items: Floats) -> Context:
        """Lists with the rows of one table."""
        user = lists.rows()
        count = lists.counts().astype(np.float32)
        rows = items[lists.ids]
        return Context(lists.ptr, user, count, rows, dict(lists.values))

    def sum_per_user(self, entries: Any) -> Any:
        """The sum of each user's entries, added up in their order, so that it does not depend on the cohort."""
        n_users = len(self.ptr) - 1
        shape = (n_users, *entries.shape[1:])
        if isinstance(entries, np.ndarray):
            out = np.zeros(shape, entries.dtype)
            np.add.at(out, self.user, entries)
            return out
        return entries.new_zeros(shape).index_add(0, self.user, entries)

    def repeat_per_entry(self, users: Any) -> Any:
        """The value of every user, once for each of its entries."""
        if isinstance(users, np.ndarray):
            return users[self.user]
        return users.index_select(0, self.user)

    def find_largest_value_per_user(self, entries: Any) -> Any:
        """The largest of each user's entries, as a constant; 0 for a user without entries."""
        n_users = len(self.ptr) - 1
        if isinstance(entries, np.ndarray):
            has_entries = self.count > 0
            lowest = np.where(has_entries, -np.inf, 0)
            out = lowest.astype(entries.dtype)
            np.maximum.at(out, self.user, entries)
            return out
        zeros = entries.new_zeros(n_users)
        owner = self.user.long()
        constant = entries.detach()
        return zeros.scatter_reduce(0, owner, constant, "amax", include_self=False)


class Scorer(Backbone):
    """A model that learns by local steps on item rows. Subclasses override the methods below."""

    learner = "rows"

    phases: ClassVar[tuple[tuple[str, ...], ...]] = (("private", "rows"),)
    """What moves in each pass of a step: every phase has its own forward pass."""

    grouped: ClassVar[bool] = False
    """It scores groups of samples that share their heads (`compute_group_logits`), as heads are too big to repeat."""

    has_own_loss: ClassVar[bool] = False
    """Its users add something to the loss besides their samples (`compute_own_loss`)."""

    heads_in_score: ClassVar[bool] = True
    """`compute_logits` reads shared parameters; else `represent_users` alone does, and none is copied for a sample."""

    on_graph: ClassVar[bool] = False
    """With all users in one place, it scores on the graph of their items (learn/training/central_model.py)."""

    affine_kind: ClassVar[int | None] = None
    """Which fused kernel trains it (kernels.steps); None: autograd only."""

    # how it starts

    @property
    def code_width(self) -> int:
        """Numbers of an item's code from which its row can start."""
        return self.item_width

    def build_rows_from_codes(self, codes: Floats) -> Floats:
        """Item rows (items, item width) that start from codes (items, code width) instead of chance."""
        return codes

    # how it learns

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        """Learning rate per private or shared parameter name, plus 'rows' for the item table."""
        return {}

    def compute_item_rate_scale(self, n_items: int) -> float:
        """The factor of the item rate over the base rate."""
        return 1.0

    def compute_own_loss(self, rep: Tensors) -> Any:
        """What each user adds to its client's loss (torch, from `represent_users`): a mean over the batch's users."""
        return None

    # how it scores

    def list_context_items(self, view: CohortView) -> Ragged | None:
        """Per user, the items whose rows `represent_users` reads; a client trains and sends them like samples' rows."""
        return None

    def represent_users(self, private: Tensors, heads: Tensors, context: Context | None) -> Tensors:
        """What `compute_logits` needs of every user: leading dimension users, heads repeated for each."""
        return private

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        """Logits of aligned (user, head, row) triples: leading dimension samples.

        `inside` is 1 where the sample's item is in the user's context, else 0; None: the model has no context.
        """
        raise TacitaError(f"backbone '{self.name}' scores whole histories, not single pairs.")

    def select_heads_to_score(self, heads: Tensors) -> Tensors:
        """Those of the shared parameters that `compute_logits` reads."""
        return heads if self.heads_in_score else {}

    def compute_group_logits(self, private: Tensors, heads: Tensors, rows: Any) -> Any:
        """Logits (groups, samples) of private (groups, samples or 1, width), heads (groups, ...), rows (groups,
        samples, width); a leading 1 serves all groups."""
        raise TacitaError(f"backbone '{self.name}' scores single samples, not groups of them.")

    def reduce_to_affine(self, private: Floats, heads: Arrays) -> Reading | None:
        """How to score every item at once, where the model is affine in the item row."""
        return None

    def build_affine_scores_outside_context(self, rep: Tensors, heads: Arrays, items: Floats) -> TableReading | None:
        """How to score every item outside a user's context at once, where that is affine in some rows."""
        return None

    # what it knows of users and items

    def compute_interest(self, view: CohortView) -> Floats:
        """What each user of a view likes, as one vector under the received model: the mean of its rows."""
        lists = view.train
        shape = (len(lists), view.items.shape[1])
        total = np.zeros(shape, np.float64)
        rows = view.items[lists.ids]
        np.add.at(total, lists.rows(), rows)
        counts = np.maximum(lists.counts(), 1)
        mean = total / counts[:, None]
        return np.asarray(mean, np.float32)

    def compute_common_interest(self, view: CohortView) -> Floats:
        """What a user would like to whom all items are alike: what interests share, because of the model alone."""
        mean = view.items.mean(axis=0, dtype=np.float64)
        return np.asarray(mean, np.float32)

    @property
    def interest_width(self) -> int:
        return self.item_width

    def measure_similarity_to_item(self, server: ServerState, items: Floats, item: int) -> Floats:
        """The cosine of the items' rows in the table that devices score with."""
        squares = items.astype(np.float64) ** 2
        size = np.sqrt(squares.sum(axis=1))
        product = items @ items[item]
        sizes = np.maximum(size * size[item], 1e-12)
        return np.asarray(product / sizes, np.float32)


def broadcast_heads(heads: Arrays, n_users: int) -> Arrays:
    """Shared parameters, the same for every user."""
    broadcast = {}
    for name, value in heads.items():
        shape = (n_users, *value.shape)
        broadcast[name] = np.broadcast_to(value, shape)
    return broadcast


def require_scorer(backbone: Backbone) -> Scorer:
    """The backbone of a run that trains item rows."""
    if not isinstance(backbone, Scorer):
        raise TacitaError(f"backbone '{backbone.name}' trains no item rows.")
    return backbone
