"""CarriedRows: what devices keep for a retraction, read from a cohort's view.

A device carries what it added to the table, damped by what later rounds absorbed of it, and its private vectors as
they were before the first round after each checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tacita.core.types import Arrays, Bools, CohortView, Doubles, Floats, Ragged, StateUpdate
from tacita.messages import SparseRows, Upload
from tacita.methods.sharing.accumulators import merge_carried_rows
from tacita.round.state import StateSpec


class Damping(NamedTuple):
    """What a broadcast says of earlier rounds and of this one."""

    so_far: float  # the logarithm of the damping of all rounds before
    step: float  # the logarithm of this round's
    denominator: float
    segment: int  # rounds before the last checkpoint


def specify_carried_rows(n_users: int, item_width: int, private_width: int) -> Sequence[StateSpec]:
    """Specs of what users carry before they took part: nothing."""
    ptr = np.zeros(n_users + 1, np.int64)
    ids = np.zeros(0, np.int32)
    row_shape = (0, item_width)
    vector_shape = (0, private_width)
    no_rows = np.zeros(row_shape, np.float32)
    no_segments = np.zeros(0, np.int32)
    no_vectors = np.zeros(vector_shape, np.float32)
    columns: Arrays = {"row": no_rows, "segment": no_segments}
    return (
        StateSpec("carried", Ragged(ptr, ids, columns)),
        StateSpec("vectors", Ragged(ptr, ids, {"private": no_vectors})),
        StateSpec("since", np.zeros(n_users)),
    )


@dataclass(frozen=True)
class CarriedRows:
    """What the users of a cohort carry."""

    view: CohortView
    name: str  # of the part that keeps it

    @property
    def rows(self) -> Ragged:
        return self.view.lists[self.name]["carried"]

    @property
    def vectors(self) -> Ragged:
        return self.view.lists[self.name]["vectors"]

    @property
    def since(self) -> Doubles:
        """The damping so far at each user's last upload."""
        since: Doubles = self.view.parts[self.name]["since"]
        return since

    @property
    def damping(self) -> Damping:
        broadcast = self.view.received[self.name]["damping"]
        so_far, step, denominator, segment = broadcast.tolist()
        return Damping(so_far, step, denominator, int(segment))

    def record_vectors(self) -> StateUpdate:
        """Keep private vectors as they were before the first round after a checkpoint, to be able to go back."""
        segment = self.damping.segment
        n_users = len(self.view.user)
        last = np.full(n_users, -1, np.int64)
        last[self.vectors.rows()] = self.vectors.ids  # the last of each
        users = np.flatnonzero(last != segment)
        if not len(users):
            return {}
        n_recorded = len(users)
        segments = np.full(n_recorded, segment, np.int32)
        columns = {"private": self.view.private[users]}
        new = Ragged.from_pairs(users, segments, n_users, columns)
        return {"vectors": self.vectors.join_rows(new)}

    def carry_upload(self, upload: Upload, rows: SparseRows, share: Doubles, alpha: float) -> StateUpdate:
        """What users carry after an upload: earlier rows damped, and the new ones."""
        damping = self.damping
        n_users = len(self.view.user)
        first_user = self.view.user_ptr[:-1]
        sends = upload.weight > 0
        users = first_user[sends]
        own_weight = alpha * share[sends]
        growth = np.exp(damping.step)
        own_damping = np.log(growth + own_weight)  # a user does not absorb itself
        own_damping = np.minimum(own_damping, 0.0)
        absorbed = damping.so_far - self.since[users]
        factor = np.ones(n_users)
        factor[users] = np.exp(absorbed + own_damping)
        since = self.since.copy()
        since[users] = damping.so_far + damping.step
        new = self._list_new_rows(rows, share, sends[rows.client])
        carried = merge_carried_rows(self.rows, factor, new, damping.segment)
        return {"carried": carried, "since": since}

    def _list_new_rows(self, rows: SparseRows, share: Doubles, is_sent: Bools) -> Ragged:
        """What an upload added to the table, negative, by user."""
        client = rows.client[is_sent]
        item = rows.item[is_sent]
        row_share = -share[client, None]
        sent_rows = rows.value[is_sent]
        user = self.view.user_ptr[:-1][client]
        n_users = len(self.view.user)
        return Ragged.from_pairs(user, item, n_users, {"row": row_share * sent_rows})

    def damp_rows(self, rows: Ragged) -> Doubles:
        """Carried rows as they are after the rounds since their users' last upload."""
        exponent = self.damping.so_far - self.since
        factor = np.exp(exponent)
        owner = rows.rows()
        factor_of_row = factor[owner, None]
        return np.asarray(rows.values["row"] * factor_of_row)

    def forget_everything(self, private: Floats) -> StateUpdate:
        """The devices as if their users had never taken part; `private`: vectors of newcomers."""
        carried = _clear_lists(self.rows)
        vectors = _clear_lists(self.vectors)
        no_damping = np.zeros_like(self.since)
        return self._build_state_update(private, carried, no_damping, vectors)

    def return_to_round(self, rounds: int) -> StateUpdate:
        """What was carried after so many rounds, and the private vectors of that time."""
        is_early = self.rows.values["segment"] < rounds
        carried = self.rows.filter_entries(is_early)
        damped = self.damp_rows(carried).astype(np.float32)
        columns = {**carried.values, "row": damped}
        carried = Ragged(carried.ptr, carried.ids, columns)
        is_later = self.vectors.ids >= rounds
        later = self.vectors.filter_entries(is_later)
        earlier = self.vectors.filter_entries(~is_later)
        private = self.view.private.copy()
        users = later.rows()[::-1]
        later_vectors = later.values["private"]
        private[users] = later_vectors[::-1]  # the first vector of each user is written last
        since = np.full_like(self.since, self.damping.so_far)
        return self._build_state_update(private, carried, since, earlier)

    def _build_state_update(self, private: Floats, carried: Ragged, since: Doubles, vectors: Ragged) -> StateUpdate:
        prefix = f"parts/{self.name}"
        return {
            "private": private,
            f"{prefix}/carried": carried,
            f"{prefix}/since": since,
            f"{prefix}/vectors": vectors,
        }


def _clear_lists(lists: Ragged) -> Ragged:
    n_entries = len(lists.ids)
    stays = np.zeros(n_entries, bool)
    return lists.filter_entries(stays)
