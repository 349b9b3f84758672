"""sharing: users share all, some or nothing of their history, item by item (sharing spec A.1, A.2).

A shared item goes to the server by the user's own request, and the device no longer learns from it. The other items
are learned from on the device and nowhere else. A device still reads its whole history to score, and draws no item of
it as a negative. In the lab the choice is drawn, 1 : 2 : 7 for all, some and none, before the first round of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, CohortView, Doubles, Longs, Ragged, ServerState, StateUpdate
from tacita.kernels.hashing import hash_owners
from tacita.messages import Upload
from tacita.methods.sharing.item_lists import (
    average_item_rows,
    deduplicate_items,
    mark_listed_entries,
    merge_lists,
    subtract_lists,
)
from tacita.round.capabilities import DeviceQuery, LabEnrolment, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.serving import Purpose, Serving
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask
from tacita.round.unlearning_report import UnlearningReport

SHARE_UNDECIDED, SHARE_NONE, SHARE_SOME, SHARE_ALL = range(4)
"""What a user chose to share, as devices keep it."""


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
class Sharing(Part, Unlearning, LabEnrolment):
    name = "sharing"
    weighs_presence = True
    fills = frozenset({"data"})
    serves = frozenset({"view"})
    reads_items = True  # of users who learned from nothing
    scope = ()  # it keeps the record only
    Config: ClassVar[type[PartConfig]] = SharingConfig
    config: SharingConfig

    @property
    def learns_from_shared(self) -> bool:
        config = self.config
        is_apart = config.exclude == "local" and config.unshare == "delete"
        return config.still_learn or not is_apart

    @property
    def enrolment_round(self) -> int:
        return self.config.after

    def check(self, n_items: int) -> None:
        if self.context.train.silos:
            raise TacitaError("part 'sharing' is for clients that are one user each; train.silos must be 0.")
        if sum(self.config.groups) == 0:
            raise TacitaError("'groups' of part 'sharing' are all 0; the default is [1, 2, 7].")

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return (
            StateSpec("shared", Ragged.empty(n_users), Role.SHARED, persistent=True),
            StateSpec("gone", Ragged.empty(n_users), Role.WITHDRAWN, persistent=True),
            StateSpec("learned", Ragged.empty(n_users), Role.LEARNED),
            StateSpec("group", np.zeros(n_users, np.int8), persistent=True),
            StateSpec("left", np.zeros(n_users, bool), persistent=True),
        )

    # what a device learns from, and what it scores with

    def prepare(self, view: CohortView) -> LocalTask:
        shared = self._read_shared_items(view)
        withdrawn = self._read_withdrawn(view)
        removed = [withdrawn]
        if not self.config.still_learn:
            removed = [shared, withdrawn]
        train = self._remove_items(view, view.train, *removed)
        exclude = train
        if self.config.exclude == "owned":
            exclude = self._exclude_owned(view, shared, withdrawn)
        history = self._remove_from_history(view, *removed)
        changed = replace(view, train=train, exclude=exclude, history=history)
        return LocalTask(view=changed)

    def _exclude_owned(self, view: CohortView, shared: Ragged, withdrawn: Ragged) -> Ragged:
        """All that users have and share. A withdrawn item may be drawn, as if it had never been theirs."""
        owned = self._remove_items(view, view.exclude, withdrawn)
        is_owned = mark_listed_entries(shared, owned, view.n_items)
        if is_owned.all():
            return owned
        not_owned = shared.filter_entries(~is_owned)
        return owned.join_rows(not_owned)

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        """A user with nothing to learn from sends nothing."""
        has_items = view.train.counts() > 0
        return has_items.astype(np.float64)

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        """All items but withdrawn ones. A user who learned from nothing starts from the mean of the items' rows."""
        withdrawn = self._read_withdrawn(view)
        items = self._remove_items(view, view.train, withdrawn)
        history = self._remove_from_history(view, withdrawn)
        private = view.private
        untaught = self._find_untaught_users(view, items)
        if len(untaught) and private.shape[1] == view.items.shape[1]:
            private = private.copy()
            untaught_items = items.take(untaught)
            mean_vectors = average_item_rows(untaught_items, view.items)
            private[untaught] = mean_vectors
        changed = replace(view, train=items, history=history, private=private)
        return Serving(view=changed)

    def _find_untaught_users(self, view: CohortView, items: Ragged) -> Longs:
        """The users who have items and share all of them, so that their devices learned from nothing."""
        if self.config.still_learn:
            return np.zeros(0, np.int64)
        shared = self._read_shared_items(view)
        local_items = self._remove_items(view, items, shared)
        has_items = items.counts() > 0
        learns_nothing = local_items.counts() == 0
        return np.flatnonzero(learns_nothing & has_items)

    def _read_shared_items(self, view: CohortView) -> Ragged:
        return view.lists[self.name]["shared"]

    def _read_withdrawn(self, view: CohortView) -> Ragged:
        return view.lists[self.name]["gone"]

    def _remove_items(self, view: CohortView, items: Ragged, *removed: Ragged) -> Ragged:
        """Lists without some of their items; of users who left, nothing."""
        state = view.parts[self.name]
        has_left = state["left"]
        is_removed = np.repeat(has_left, items.counts())
        for lists in removed:
            is_removed |= mark_listed_entries(items, lists, view.n_items)
        return items.filter_entries(~is_removed)

    def _remove_from_history(self, view: CohortView, *removed: Ragged) -> Ragged | None:
        if view.history is None:
            return None
        return self._remove_items(view, view.history, *removed)

    # what lab users choose

    def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
        shared = self._read_shared_items(view)
        withdrawn = self._read_withdrawn(view)
        group = self._draw_sharing_groups(view)
        local_items = self._remove_items(view, view.train, shared, withdrawn)
        local_items = deduplicate_items(local_items, view.n_items)
        chosen = self._draw_shared_items(view, local_items, group)
        n_chosen = chosen.counts()
        senders = np.flatnonzero(n_chosen > 0)
        keys = view.client_keys[senders]
        items = chosen.take(senders)
        time = _find_last_time(view, chosen)
        requests = RequestBatch("share", keys, items, time)
        return {"group": group}, requests

    def _draw_sharing_groups(self, view: CohortView) -> AnyArray:
        """What each user shares. Of users without a group, the first of a drawn order share all."""
        state = view.parts[self.name]
        earlier = state["group"]
        group = earlier.copy()
        undecided = np.flatnonzero(group == SHARE_UNDECIDED)
        key = self.context.draws.private("sharing-groups")
        keys = view.user_keys[undecided]
        drawn = hash_owners(key, keys)
        by_draw = np.argsort(drawn, kind="stable")
        order = undecided[by_draw]
        groups = self.config.groups
        n_all = sum(groups)
        shares = np.cumsum(groups) / n_all
        exact = shares * len(order)
        counts = np.rint(exact)
        ends = counts.astype(np.int64)
        group[order] = SHARE_NONE
        sharers = order[: ends[1]]
        group[sharers] = SHARE_SOME
        full_sharers = order[: ends[0]]
        group[full_sharers] = SHARE_ALL
        return group

    def _draw_shared_items(self, view: CohortView, items: Ragged, group: AnyArray) -> Ragged:
        """The items that each user shares: a user who shares some shares neither nothing nor all."""
        wanted = self._count_shared_items(items.counts(), group)
        rows = items.rows()
        draws = self.context.draws
        user_key = draws.private("sharing-items", view.block)
        item_key = draws.private("sharing-order")
        users = hash_owners(user_key, view.user_keys)
        numbers = items.ids.astype(np.uint64)
        pairs = users[rows] + numbers
        drawn = hash_owners(item_key, pairs)
        order = np.lexsort((drawn, rows))
        places = np.arange(len(rows))
        rank = places - items.ptr[rows]
        is_chosen = np.zeros(len(rows), bool)
        limit = wanted[rows]
        is_chosen[order] = rank < limit
        return items.filter_entries(is_chosen)

    def _count_shared_items(self, counts: Longs, group: AnyArray) -> Longs:
        """How many items each user shares, of so many."""
        share = self.config.partial * counts
        rounded_up = np.ceil(share - 1e-9)
        rounded_up = rounded_up.astype(np.int64)
        at_least_one = np.maximum(rounded_up, 1)
        some = np.minimum(at_least_one, counts - 1)
        is_some = group == SHARE_SOME
        shared_by_some = np.where(is_some, some, 0)
        shares_all = group == SHARE_ALL
        return np.where(shares_all, counts, shared_by_some)

    # what users ask for

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if requests.kind == "leave":
            return self._update_for_leave(view)
        items = deduplicate_items(requests.items, view.n_items)
        if requests.kind == "share":
            return self._update_for_share(view, items)
        if requests.kind == "unshare":
            items = self._keep_shared_only(view, items)
        return self._update_for_withdrawal(view, items, requests.kind)

    def _update_for_leave(self, view: CohortView) -> StateUpdate:
        n_users = len(view.user)
        nothing = Ragged.empty(n_users)
        learned = self._update_learned_items(view, nothing)
        has_left = np.ones(n_users, bool)
        return {"shared": nothing, "left": has_left, **learned}

    def _update_for_share(self, view: CohortView, items: Ragged) -> StateUpdate:
        n_items = view.n_items
        shared = self._read_shared_items(view)
        withdrawn = self._read_withdrawn(view)
        new = subtract_lists(items, shared, n_items)
        earlier = self._read_learned_items(view)
        newly_learned = self._select_learned(view, new)
        learned = merge_lists(earlier, newly_learned, n_items)
        return {
            "shared": merge_lists(shared, items, n_items),
            "gone": subtract_lists(withdrawn, items, n_items),
            **self._update_learned_items(view, learned),
        }

    def _keep_shared_only(self, view: CohortView, items: Ragged) -> Ragged:
        """Only a shared item can be taken back."""
        shared = self._read_shared_items(view)
        is_shared = mark_listed_entries(items, shared, view.n_items)
        return items.filter_entries(is_shared)

    def _update_for_withdrawal(self, view: CohortView, items: Ragged, kind: str) -> StateUpdate:
        n_items = view.n_items
        shared = self._read_shared_items(view)
        remaining_shared = subtract_lists(shared, items, n_items)
        old_learned = self._read_learned_items(view)
        remaining_learned = subtract_lists(old_learned, items, n_items)
        learned = self._update_learned_items(view, remaining_learned)
        goes_to_device = kind == "unshare" and self.config.unshare == "to_local"
        if goes_to_device:
            return {"shared": remaining_shared, **learned}
        earlier = self._read_withdrawn(view)
        withdrawn = merge_lists(earlier, items, n_items)
        return {"shared": remaining_shared, "gone": withdrawn, **learned}

    def _select_learned(self, view: CohortView, items: Ragged) -> Ragged:
        """The items that the device may have learned from: all, unless their block has just begun."""
        if view.round > 0 or self.config.still_learn:
            return items
        return subtract_lists(items, view.train, view.n_items)

    def _read_learned_items(self, view: CohortView) -> Ragged:
        no_items = Ragged.empty(len(view.user))
        lists = view.lists[self.name]
        return lists.get("learned", no_items)

    def _update_learned_items(self, view: CohortView, items: Ragged) -> StateUpdate:
        """Runs of earlier versions have no such list."""
        if "learned" not in view.lists[self.name]:
            return {}
        return {"learned": items}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        """The loop has already changed the record of shared items; other parts unlearn what was learned from it."""
        if requests.kind not in ("share", "unshare"):
            return None
        n_users = len(requests.senders)
        n_items = len(requests.items.ids)
        details = {"people": n_users, "items": n_items}
        return server, UnlearningReport(details=details)


def _find_last_time(view: CohortView, chosen: Ragged) -> float:
    """The last time of the shared items; times of other items do not leave the device."""
    times = view.train.values.get("time")
    if times is None:
        return 0.0
    is_chosen = mark_listed_entries(view.train, chosen, view.n_items)
    times = times[is_chosen]
    if np.isnan(times).all():
        return 0.0
    return float(np.nanmax(times))
