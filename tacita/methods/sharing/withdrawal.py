"""withdrawal: devices no longer learn from withdrawn items, and a user who leaves takes part in nothing more.

It is for runs in which nobody shares anything; part `sharing` does the same besides its own work. It undoes no
learning: a part that forgets has to come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.types import CohortView, Doubles, Ragged, StateUpdate
from tacita.messages import Upload
from tacita.round.capabilities import Unlearning
from tacita.round.part import Part
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.serving import Purpose, Serving
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask


@register
class Withdrawal(Part, Unlearning):
    name = "withdrawal"
    weighs_presence = True
    fills = frozenset({"data"})
    serves = frozenset({"view"})

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return (
            StateSpec("gone", Ragged.empty(n_users), Role.WITHDRAWN, persistent=True),
            StateSpec("left", np.zeros(n_users, bool), persistent=True),
        )

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if requests.kind == "leave":
            n_users = len(view.user)
            return {"left": np.ones(n_users, bool)}
        if requests.kind != "forget":
            return {}
        lists = view.lists[self.name]
        withdrawn = lists["gone"]
        items = requests.items
        rows = items.rows()
        is_known = withdrawn.holds(rows, items.ids)
        new = items.filter_entries(~is_known)
        return {"gone": withdrawn.join_rows(new)}

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(view=self._remove_withdrawn(view))

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        """A model that reads its user's items reads the remaining ones."""
        return Serving(view=self._remove_withdrawn(view))

    def _remove_withdrawn(self, view: CohortView) -> CohortView:
        train = view.train
        owner = train.rows()
        state = view.parts[self.name]
        has_left = state["left"]
        lists = view.lists[self.name]
        withdrawn = lists["gone"]
        is_withdrawn = withdrawn.holds(owner, train.ids)
        stays_on = ~has_left[owner]
        stays = stays_on & ~is_withdrawn
        if not stays.all():
            train = train.filter_entries(stays)
        return replace(view, train=train, exclude=train)

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        """A client with no remaining item to learn from does not count."""
        item_ends = view.train.ptr[view.user_ptr]
        has_items = np.diff(item_ends) > 0
        return has_items.astype(np.float64)
