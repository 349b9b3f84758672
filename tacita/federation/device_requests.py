"""What the users' own devices do about requests, and what of a request leaves them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.files import flatten_parts
from tacita.core.types import Broadcast, CohortView, Longs, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.part import implements
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.round.state import Role


def apply_requests_on_devices(
    clients: DeviceState, federation: Federation, server: ServerState, requests: RequestBatch
) -> RequestBatch:
    """Let the devices of those who ask do their part; returns the requests as they leave the devices."""
    users, requests, unknown = _split_by_local_users(clients, federation, requests)
    if requests.kind == "forget":  # who names nothing asks for nothing
        has_items = np.flatnonzero(requests.items.counts() > 0)
        users = users[has_items]
        requests = requests.take(has_items)
    if not len(users):
        return requests.concat(unknown)
    block = federation.stream.blocks[server.block]

    def view_users() -> CohortView:
        return build_user_view(clients, server, block, users, federation.stream.user_keys, Broadcast())

    known_items = list_items_known_to_server(clients, federation, users, view_users())
    for name, unlearning in federation.unlearners.items():
        if implements(unlearning, "on_device"):
            update = unlearning.on_device(view_users(), requests)
            clients.put(users, flatten_parts({name: update}, PARTS))
    is_redacted = False
    for name, unlearning in federation.unlearners.items():
        if not implements(unlearning, "redact"):
            continue
        redacted = unlearning.redact(view_users(), requests)
        if redacted is not None:
            requests, update = redacted
            clients.put(users, flatten_parts({name: update}, PARTS))
            is_redacted = True
    if requests.kind == "forget" and not is_redacted:
        requests = _drop_unknown_items(requests, known_items)
    return requests.concat(unknown)


def _split_by_local_users(
    clients: DeviceState, federation: Federation, requests: RequestBatch
) -> tuple[Longs, RequestBatch, RequestBatch]:
    """The users who are here, what they ask for, and what others ask for."""
    keys = federation.stream.user_keys[: clients.n_users]
    order = np.argsort(keys)
    last = max(0, len(keys) - 1)
    place = np.minimum(np.searchsorted(keys, requests.senders, sorter=order), last)
    is_known = np.zeros(len(place), bool)
    if len(keys):
        is_known = keys[order[place]] == requests.senders
    users = order[place[is_known]]
    return users, requests.take(np.flatnonzero(is_known)), requests.take(np.flatnonzero(~is_known))


def list_items_known_to_server(clients: DeviceState, federation: Federation, users: Longs, view: CohortView) -> Ragged:
    """Items that the server may know to be these users': what they share, and what parts told it."""
    known_items = Ragged.empty(len(users))
    for name in federation.list_state_names(Role.SHARED):
        shared = clients.read_list(name, users)
        known_items = known_items.join_rows(Ragged(shared.ptr, shared.ids))
    for unlearning in federation.unlearners.values():
        more = unlearning.known_items(view) if implements(unlearning, "known_items") else None
        if more is not None:
            known_items = known_items.join_rows(Ragged(more.ptr, more.ids))
    return known_items


def _drop_unknown_items(requests: RequestBatch, known_items: Ragged) -> RequestBatch:
    """Which items are to be forgotten leaves a device only of those that the server knows already."""
    is_known = known_items.holds(requests.items.rows(), requests.items.ids)
    return replace(requests, items=requests.items.filter_entries(is_known))
