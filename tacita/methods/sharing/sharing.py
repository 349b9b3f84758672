"""sharing: every person keeps all, shares some or shares all of a history, item by item (sharing spec A.1, A.2).

What is shared goes to the server by the person's own request and is no longer learned from on the device; what stays
is learned from there and nowhere else. A device still reads its whole history to score, and draws no item of it as a
negative. In the lab the choice is drawn, 1 : 2 : 7 for all, some and none, before the first round of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Bools, CohortView, Doubles, Floats, Held, Longs, Ragged, Requests, ServerState
from tacita.fields import Upload
from tacita.kernels.hashing import hash_owners
from tacita.kernels.listed import listed
from tacita.round.parts import Ask, Part, PartConfig, Play
from tacita.round.registry import register

UNASKED, NONE, SOME, ALL = range(4)
"""What a person chose to share, as devices keep it."""


class SharingConfig(PartConfig):
    groups: list[Annotated[float, Field(ge=0)]] = Field(
        [1, 2, 7], min_length=3, max_length=3, description="in the lab: people who share all : some : nothing"
    )
    partial: float = Field(0.3, gt=0, lt=1, description="what those share who share some, of their training items")
    unshare: Literal["delete", "to_local"] = Field(
        "delete", description="what is taken back is dropped everywhere, or learned from on the device"
    )
    exclude: Literal["owned", "local"] = Field(
        "owned", description="never drawn as negatives: all that a person has, or only what stays on the device"
    )
    after: int = Field(0, ge=0, description="in the lab: rounds of a block before people share")
    still_learn: bool = Field(False, description="devices go on learning from what they shared")


@register
class Sharing(Part):
    name = "sharing"
    weighs_presence = True
    Config: ClassVar[type[PartConfig]] = SharingConfig
    config: SharingConfig
    reads_items = True  # of those who learned from nothing
    takes_back = ()  # it keeps the record only
    lasting = ("shared", "gone", "group", "left")

    def check(self, n_items: int) -> None:
        if self.world.train.silos:
            raise TacitaError("part 'sharing' is for clients that are one user each; train.silos must be 0.")
        if sum(self.config.groups) == 0:
            raise TacitaError("'groups' of part 'sharing' are all 0; the default is [1, 2, 7].")

    def device_arrays(self, n_users: int) -> Held:
        return {
            "shared": Ragged.empty(n_users),
            "gone": Ragged.empty(n_users),
            "learned": Ragged.empty(n_users),  # of what is shared, what the device may have learned from before
            "group": np.zeros(n_users, np.int8),
            "left": np.zeros(n_users, bool),
        }

    # what a device learns from, and what it scores with

    def local_data(self, view: CohortView) -> CohortView:
        shared, gone = self._lists(view)
        apart = (gone,) if self.config.still_learn else (shared, gone)
        train = self._stays(view, view.train, *apart)
        exclude = train
        if self.config.exclude == "owned":
            exclude = self._stays(view, view.exclude, gone)  # what was taken back is anybody's: as if it had never been
            known = listed(view.n_items, shared.ptr, shared.ids, exclude.ptr, exclude.ids)
            exclude = exclude if known.all() else exclude.joined(shared.where(~known))
        history = view.history and self._stays(view, view.history, *apart)
        return replace(view, train=train, exclude=exclude, history=history)

    def weight(self, view: CohortView, upload: Upload) -> Doubles:
        """Who has nothing to learn from says nothing."""
        return (view.train.counts() > 0).astype(np.float64)

    def serving(self, view: CohortView) -> CohortView:
        """Everything one owns and did not take back; who learned from nothing starts from the mean of its rows."""
        shared, gone = self._lists(view)
        own = self._stays(view, view.train, gone)
        history = view.history and self._stays(view, view.history, gone)
        untaught = (self._stays(view, own, shared).counts() == 0) & (own.counts() > 0) & (not self.config.still_learn)
        private = view.private
        if untaught.any() and private.shape[1] == view.items.shape[1]:
            private = private.copy()
            private[untaught] = mean_rows(own.take(np.flatnonzero(untaught)), view.items)
        return replace(view, train=own, history=history, private=private)

    def _lists(self, view: CohortView) -> tuple[Ragged, Ragged]:
        kept = view.lists[self.name]
        return kept["shared"], kept["gone"]

    def _stays(self, view: CohortView, items: Ragged, *gone: Ragged) -> Ragged:
        """Lists without some of their items; of who left, nothing."""
        away = np.repeat(view.parts[self.name]["left"], items.counts())
        for one in gone:
            away |= listed(view.n_items, items.ptr, items.ids, one.ptr, one.ids)
        return items.where(~away)

    # what people ask for

    def enrols_after(self) -> int:
        return self.config.after

    def enrol(self, view: CohortView) -> tuple[Held, Requests | None]:
        shared, gone = self._lists(view)
        group = self._groups(view)
        own = distinct(self._stays(view, view.train, shared, gone), view.n_items)
        chosen = self._choice(view, own, group)
        asking = np.flatnonzero(chosen.counts() > 0)
        return {"group": group}, Requests("share", view.client_keys[asking], chosen.take(asking), _last(view, chosen))

    def _groups(self, view: CohortView) -> Any:
        """What everybody shares: of those who were not asked before, the first of a drawn order share all."""
        group = view.parts[self.name]["group"].copy()
        asked = np.flatnonzero(group == UNASKED)
        drawn = hash_owners(self.world.draws.private("sharing-groups"), view.user_keys[asked])
        order = asked[np.argsort(drawn, kind="stable")]
        ends = np.rint(np.cumsum(self.config.groups) / sum(self.config.groups) * len(order)).astype(np.int64)
        group[order] = NONE
        group[order[: ends[1]]] = SOME
        group[order[: ends[0]]] = ALL
        return group

    def _choice(self, view: CohortView, own: Ragged, group: Any) -> Ragged:
        """The items that everybody shares: of those who share some, a part that is neither nothing nor all."""
        n = own.counts()
        some = np.minimum(np.maximum(np.ceil(self.config.partial * n - 1e-9).astype(np.int64), 1), n - 1)
        wanted = np.where(group == ALL, n, np.where(group == SOME, some, 0))
        draws, rows = self.world.draws, own.rows()
        person = hash_owners(draws.private("sharing-items", view.block), view.user_keys)
        drawn = hash_owners(draws.private("sharing-order"), person[rows] + own.ids.astype(np.uint64))
        order = np.lexsort((drawn, rows))
        stays = np.zeros(len(rows), bool)
        stays[order] = np.arange(len(rows)) - own.ptr[rows] < wanted[rows]
        return own.where(stays)

    def handle_many_here(self, view: CohortView, requests: Requests) -> Held:
        shared, gone = self._lists(view)
        asked, n_items = distinct(requests.items, view.n_items), view.n_items
        if requests.kind == "leave":
            nothing = Ragged.empty(len(view.user))
            return {"shared": nothing, "left": np.ones(len(view.user), bool), **self._learned(view, nothing)}
        if requests.kind == "share":
            fresh = _less(asked, shared, n_items)
            late = _united(self._learned_of(view), self._taught(view, fresh), n_items)
            return {
                "shared": _united(shared, asked, n_items),
                "gone": _less(gone, asked, n_items),
                **self._learned(view, late),
            }
        if requests.kind == "unshare":  # of what was never shared there is nothing to take back
            asked = asked.where(listed(n_items, asked.ptr, asked.ids, shared.ptr, shared.ids))
        kept = self._learned(view, _less(self._learned_of(view), asked, n_items))
        if requests.kind == "unshare" and self.config.unshare == "to_local":
            return {"shared": _less(shared, asked, n_items), **kept}
        return {"shared": _less(shared, asked, n_items), "gone": _united(gone, asked, n_items), **kept}

    def _taught(self, view: CohortView, asked: Ragged) -> Ragged:
        """What of some items the device may have learned from: all, unless the block of these has just begun."""
        if view.round > 0 or self.config.still_learn:
            return asked
        return asked.where(~listed(view.n_items, asked.ptr, asked.ids, view.train.ptr, view.train.ids))

    def _learned_of(self, view: CohortView) -> Ragged:
        return view.lists[self.name].get("learned", Ragged.empty(len(view.user)))

    def _learned(self, view: CohortView, items: Ragged) -> Held:
        """Runs of before have no such list."""
        return {"learned": items} if "learned" in view.lists[self.name] else {}

    def handle_many(
        self, server: ServerState, requests: Requests, ask: Ask, play: Play
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """The record of what was shared has changed by itself; what was learned from it is other parts' business."""
        if requests.kind not in ("share", "unshare"):
            return None
        return server, {"people": len(requests.senders), "items": len(requests.items.ids)}


def mean_rows(lists: Ragged, table: Floats) -> Floats:
    """The mean of the rows in each list; none of the lists is empty."""
    totals = np.add.reduceat(table[lists.ids], lists.ptr[:-1], axis=0)
    return np.asarray(totals / lists.counts()[:, None], np.float32)


def distinct(lists: Ragged, n_items: int) -> Ragged:
    """Every item of a list once, where it comes first, and nothing else of it; only items of the catalogue."""
    pairs = lists.rows().astype(np.int64) * n_items + lists.ids
    stays: Bools = np.zeros(len(pairs), bool)
    first: Longs = np.unique(pairs, return_index=True)[1]
    stays[first] = True
    return Ragged(lists.ptr, lists.ids).where(stays & (lists.ids >= 0) & (lists.ids < n_items))


def _last(view: CohortView, chosen: Ragged) -> float:
    """The last time of what is shared: what others have, and keep, is nobody's business here."""
    times, train = view.train.values.get("time"), view.train
    if times is None:
        return 0.0
    times = times[listed(view.n_items, train.ptr, train.ids, chosen.ptr, chosen.ids)]
    return float(np.nanmax(times)) if not np.isnan(times).all() else 0.0


def _less(lists: Ragged, gone: Ragged, n_items: int) -> Ragged:
    return lists.where(~listed(n_items, lists.ptr, lists.ids, gone.ptr, gone.ids))


def _united(lists: Ragged, more: Ragged, n_items: int) -> Ragged:
    return lists.joined(_less(more, lists, n_items))
