"""withdrawal: what people withdraw is learnt from no more, and who leaves takes part in nothing more.

For runs in which nobody shares anything; part `sharing` does the same beside its own work. It undoes nothing of what
was learnt: a part that forgets has to come with it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.types import CohortView, Doubles, Held, Ragged, Request
from tacita.fields import Upload
from tacita.round.parts import Part, register


@register
class Withdrawal(Part):
    name = "withdrawal"
    lasting = ("gone", "left")

    def device_arrays(self, n_users: int) -> Held:
        return {"gone": Ragged.empty(n_users), "left": np.zeros(n_users, bool)}

    def handle_here(self, view: CohortView, request: Request) -> Held:
        if request.kind == "leave":
            return {"left": np.ones(len(view.user), bool)}
        gone = view.lists[self.name]["gone"]
        items = np.setdiff1d(request.items, gone.ids) if request.kind == "forget" else np.zeros(0, np.int32)
        one = Ragged(np.array([0, len(items)], np.int64), items.astype(np.int32))
        return {"gone": gone.joined(one)} if len(view.user) else {}

    def local_data(self, view: CohortView) -> CohortView:
        mine, owner = view.train, view.train.rows()
        stays = ~view.parts[self.name]["left"][owner] & ~view.lists[self.name]["gone"].holds(owner, mine.ids)
        if stays.all():
            return view
        columns = {name: column[stays] for name, column in mine.values.items()}
        train = Ragged.from_pairs(owner[stays], mine.ids[stays], len(mine), columns)
        return replace(view, train=train, exclude=train)

    def weight(self, view: CohortView, upload: Upload) -> Doubles:
        """Who has nothing left to learn from does not count."""
        return (np.diff(view.train.ptr[view.user_ptr]) > 0).astype(np.float64)
