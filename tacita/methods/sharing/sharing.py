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
from tacita.core.types import Bools, CohortView, Doubles, Floats, Longs, Ragged, ServerState, StateUpdate
from tacita.kernels.hashing import hash_owners
from tacita.kernels.membership import mark_listed
from tacita.messages import Upload
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register
from tacita.round.request import RequestBatch

SHARE_UNDECIDED, SHARE_NONE, SHARE_SOME, SHARE_ALL = range(4)
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
        if self.context.train.silos:
            raise TacitaError("part 'sharing' is for clients that are one user each; train.silos must be 0.")
        if sum(self.config.groups) == 0:
            raise TacitaError("'groups' of part 'sharing' are all 0; the default is [1, 2, 7].")

    def device_arrays(self, n_users: int) -> StateUpdate:
        return {
            "shared": Ragged.empty(n_users),
            "gone": Ragged.empty(n_users),
            "learned": Ragged.empty(n_users),  # of what is shared, what the device may have learned from before
            "group": np.zeros(n_users, np.int8),
            "left": np.zeros(n_users, bool),
        }

    # what a device learns from, and what it scores with

    def local_data(self, view: CohortView) -> CohortView:
        shared, gone = self._read_lists(view)
        apart = (gone,) if self.config.still_learn else (shared, gone)
        train = self._remove_items(view, view.train, *apart)
        exclude = train
        if self.config.exclude == "owned":
            exclude = self._remove_items(
                view, view.exclude, gone
            )  # what was taken back is anybody's: as if it had never been
            known = mark_listed(view.n_items, shared.ptr, shared.ids, exclude.ptr, exclude.ids)
            exclude = exclude if known.all() else exclude.join_rows(shared.filter_entries(~known))
        history = view.history and self._remove_items(view, view.history, *apart)
        return replace(view, train=train, exclude=exclude, history=history)

    def weight(self, view: CohortView, upload: Upload) -> Doubles:
        """Who has nothing to learn from says nothing."""
        return (view.train.counts() > 0).astype(np.float64)

    def serving(self, view: CohortView) -> CohortView:
        """Everything one owns and did not take back; who learned from nothing starts from the mean of its rows."""
        shared, gone = self._read_lists(view)
        own = self._remove_items(view, view.train, gone)
        history = view.history and self._remove_items(view, view.history, gone)
        untaught = (
            (self._remove_items(view, own, shared).counts() == 0) & (own.counts() > 0) & (not self.config.still_learn)
        )
        private = view.private
        if untaught.any() and private.shape[1] == view.items.shape[1]:
            private = private.copy()
            private[untaught] = mean_rows(own.take(np.flatnonzero(untaught)), view.items)
        return replace(view, train=own, history=history, private=private)

    def _read_lists(self, view: CohortView) -> tuple[Ragged, Ragged]:
        kept = view.lists[self.name]
        return kept["shared"], kept["gone"]

    def _remove_items(self, view: CohortView, items: Ragged, *gone: Ragged) -> Ragged:
        """Lists without some of their items; of who left, nothing."""
        away = np.repeat(view.parts[self.name]["left"], items.counts())
        for one in gone:
            away |= mark_listed(view.n_items, items.ptr, items.ids, one.ptr, one.ids)
        return items.filter_entries(~away)

    # what people ask for

    def enrols_after(self) -> int:
        return self.config.after

    def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
        shared, gone = self._read_lists(view)
        group = self._draw_groups(view)
        own = deduplicate_items(self._remove_items(view, view.train, shared, gone), view.n_items)
        chosen = self._draw_shared_items(view, own, group)
        asking = np.flatnonzero(chosen.counts() > 0)
        return {"group": group}, RequestBatch(
            "share", view.client_keys[asking], chosen.take(asking), _find_last_time(view, chosen)
        )

    def _draw_groups(self, view: CohortView) -> Any:
        """What everybody shares: of those who were not asked before, the first of a drawn order share all."""
        group = view.parts[self.name]["group"].copy()
        asked = np.flatnonzero(group == SHARE_UNDECIDED)
        drawn = hash_owners(self.context.draws.private("sharing-groups"), view.user_keys[asked])
        order = asked[np.argsort(drawn, kind="stable")]
        ends = np.rint(np.cumsum(self.config.groups) / sum(self.config.groups) * len(order)).astype(np.int64)
        group[order] = SHARE_NONE
        group[order[: ends[1]]] = SHARE_SOME
        group[order[: ends[0]]] = SHARE_ALL
        return group

    def _draw_shared_items(self, view: CohortView, own: Ragged, group: Any) -> Ragged:
        """The items that everybody shares: of those who share some, a part that is neither nothing nor all."""
        n = own.counts()
        some = np.minimum(np.maximum(np.ceil(self.config.partial * n - 1e-9).astype(np.int64), 1), n - 1)
        wanted = np.where(group == SHARE_ALL, n, np.where(group == SHARE_SOME, some, 0))
        draws, rows = self.context.draws, own.rows()
        person = hash_owners(draws.private("sharing-items", view.block), view.user_keys)
        drawn = hash_owners(draws.private("sharing-order"), person[rows] + own.ids.astype(np.uint64))
        order = np.lexsort((drawn, rows))
        stays = np.zeros(len(rows), bool)
        stays[order] = np.arange(len(rows)) - own.ptr[rows] < wanted[rows]
        return own.filter_entries(stays)

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        shared, gone = self._read_lists(view)
        asked, n_items = deduplicate_items(requests.items, view.n_items), view.n_items
        if requests.kind == "leave":
            nothing = Ragged.empty(len(view.user))
            return {"shared": nothing, "left": np.ones(len(view.user), bool), **self._store_learned(view, nothing)}
        if requests.kind == "share":
            fresh = _subtract_lists(asked, shared, n_items)
            late = _merge_lists(self._read_learned(view), self._select_learned(view, fresh), n_items)
            return {
                "shared": _merge_lists(shared, asked, n_items),
                "gone": _subtract_lists(gone, asked, n_items),
                **self._store_learned(view, late),
            }
        if requests.kind == "unshare":  # of what was never shared there is nothing to take back
            asked = asked.filter_entries(mark_listed(n_items, asked.ptr, asked.ids, shared.ptr, shared.ids))
        kept = self._store_learned(view, _subtract_lists(self._read_learned(view), asked, n_items))
        if requests.kind == "unshare" and self.config.unshare == "to_local":
            return {"shared": _subtract_lists(shared, asked, n_items), **kept}
        return {"shared": _subtract_lists(shared, asked, n_items), "gone": _merge_lists(gone, asked, n_items), **kept}

    def _select_learned(self, view: CohortView, asked: Ragged) -> Ragged:
        """What of some items the device may have learned from: all, unless the block of these has just begun."""
        if view.round > 0 or self.config.still_learn:
            return asked
        return asked.filter_entries(~mark_listed(view.n_items, asked.ptr, asked.ids, view.train.ptr, view.train.ids))

    def _read_learned(self, view: CohortView) -> Ragged:
        return view.lists[self.name].get("learned", Ragged.empty(len(view.user)))

    def _store_learned(self, view: CohortView, items: Ragged) -> StateUpdate:
        """Runs of before have no such list."""
        return {"learned": items} if "learned" in view.lists[self.name] else {}

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """The record of what was shared has changed by itself; what was learned from it is other parts' business."""
        if requests.kind not in ("share", "unshare"):
            return None
        return server, {"people": len(requests.senders), "items": len(requests.items.ids)}


def mean_rows(lists: Ragged, table: Floats) -> Floats:
    """The mean of the rows in each list; none of the lists is empty."""
    totals = np.add.reduceat(table[lists.ids], lists.ptr[:-1], axis=0)
    return np.asarray(totals / lists.counts()[:, None], np.float32)


def deduplicate_items(lists: Ragged, n_items: int) -> Ragged:
    """Every item of a list once, where it comes first, and nothing else of it; only items of the catalogue."""
    pairs = lists.rows().astype(np.int64) * n_items + lists.ids
    stays: Bools = np.zeros(len(pairs), bool)
    first: Longs = np.unique(pairs, return_index=True)[1]
    stays[first] = True
    return Ragged(lists.ptr, lists.ids).filter_entries(stays & (lists.ids >= 0) & (lists.ids < n_items))


def _find_last_time(view: CohortView, chosen: Ragged) -> float:
    """The last time of what is shared: what others have, and keep, is nobody's business here."""
    times, train = view.train.values.get("time"), view.train
    if times is None:
        return 0.0
    times = times[mark_listed(view.n_items, train.ptr, train.ids, chosen.ptr, chosen.ids)]
    return float(np.nanmax(times)) if not np.isnan(times).all() else 0.0


def _subtract_lists(lists: Ragged, gone: Ragged, n_items: int) -> Ragged:
    return lists.filter_entries(~mark_listed(n_items, lists.ptr, lists.ids, gone.ptr, gone.ids))


def _merge_lists(lists: Ragged, more: Ragged, n_items: int) -> Ragged:
    return lists.join_rows(_subtract_lists(more, lists, n_items))
