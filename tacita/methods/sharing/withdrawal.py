"""withdrawal: what people withdraw is learnt from no more, and who leaves takes part in nothing more.

For runs in which nobody shares anything; part `sharing` does the same beside its own work. It undoes nothing of what
was learnt: a part that forgets has to come with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.types import CohortView, Doubles, Ragged, StateUpdate
from tacita.messages import Upload
from tacita.round.parts import Part
from tacita.round.registry import register
from tacita.round.request import RequestBatch


@register
class Withdrawal(Part):
    name = "withdrawal"
    weighs_presence = True
    lasting = ("gone", "left")

    def device_arrays(self, n_users: int) -> StateUpdate:
        return {"gone": Ragged.empty(n_users), "left": np.zeros(n_users, bool)}

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if requests.kind == "leave":
            return {"left": np.ones(len(view.user), bool)}
        if requests.kind != "forget":
            return {}
        gone, asked = view.lists[self.name]["gone"], requests.items
        return {"gone": gone.join_rows(asked.filter_entries(~gone.holds(asked.rows(), asked.ids)))}

    def local_data(self, view: CohortView) -> CohortView:
        mine, owner = view.train, view.train.rows()
        stays = ~view.parts[self.name]["left"][owner] & ~view.lists[self.name]["gone"].holds(owner, mine.ids)
        train = mine if stays.all() else mine.filter_entries(stays)
        return replace(view, train=train, exclude=train)

    def serving(self, view: CohortView) -> CohortView:
        """A model that reads its person's items reads what is left of them."""
        return self.local_data(view)

    def weight(self, view: CohortView, upload: Upload) -> Doubles:
        """Who has nothing left to learn from does not count."""
        return (np.diff(view.train.ptr[view.user_ptr]) > 0).astype(np.float64)
