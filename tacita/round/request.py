"""Requests of users between rounds: to share items, to withdraw them, to have them forgotten, or to leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tacita.core.types import AnyArray, Ints, Keys, Ragged, make_single_list

RequestKind = Literal["share", "unshare", "forget", "leave"]

REQUEST_KINDS: tuple[RequestKind, ...] = ("share", "unshare", "forget", "leave")
WITHDRAWAL_KINDS: tuple[RequestKind, ...] = ("unshare", "forget", "leave")
"""Requests that take something back."""
UNLEARNING_KINDS: tuple[RequestKind, ...] = ("forget", "leave")
"""Requests that take back what devices contributed, and not only what they share."""


@dataclass(frozen=True)
class Request:
    """What one user requests between rounds."""

    kind: RequestKind
    sender: int  # the key of the user's device
    items: Ints  # in the catalogue's numbers; none for a user who leaves
    time: float = 0.0
    number: int = 0  # distinguishes two requests of the same round


@dataclass(frozen=True)
class RequestBatch:
    """The same request of several users, to be carried out together."""

    kind: RequestKind
    senders: Keys  # each of them once
    items: Ragged  # of each
    time: float = 0.0
    number: int = 0
    is_immediate: bool = False  # does not wait for others, where a method would
    withdrawn_items: Ragged | None = None  # what the server held of each and deleted; set when it is carried out

    @staticmethod
    def from_request(request: Request | RequestBatch) -> RequestBatch:
        if isinstance(request, RequestBatch):
            return request
        sender, items = make_single_list(request.sender, request.items)
        return RequestBatch(request.kind, sender, items, request.time, request.number)

    def concat(self, more: RequestBatch) -> RequestBatch:
        """These users' requests, then other users'; both unchanged."""
        if not len(more.senders):
            return self
        n_entries = self.items.ptr[-1]
        ptr = np.concatenate([self.items.ptr, n_entries + more.items.ptr[1:]])
        ids = np.concatenate([self.items.ids, more.items.ids])
        senders = np.concatenate([self.senders, more.senders])
        return replace(self, senders=senders, items=Ragged(ptr, ids))

    def take(self, which: AnyArray) -> RequestBatch:
        """The requests of some of the users, in that order."""
        withdrawn_items = self.withdrawn_items
        if withdrawn_items is not None:
            withdrawn_items = withdrawn_items.take(which)
        senders = self.senders[which]
        items = self.items.take(which)
        return replace(self, senders=senders, items=items, withdrawn_items=withdrawn_items)
