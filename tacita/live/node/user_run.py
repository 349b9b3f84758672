"""A run as one person on a node finds it: what they share in it, contributed to it and withdrew from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.types import AnyArray
from tacita.live.json_object import JsonObject
from tacita.live.node import blocks
from tacita.live.node.node import Node
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.row_index import drop_user_id_column
from tacita.round.device_state import unflatten_devices
from tacita.round.plan import Plan
from tacita.round.state import Role
from tacita.runs.assembly import build_plan


@dataclass(frozen=True)
class UserRun:
    """A run as one person finds it."""

    run: str
    plan: Plan | None  # None: the run has not come here yet
    n_items: int  # of the catalogue, the run knows the first so many
    shared: set[str]  # with what is queued already
    has_contributed: bool  # something of the person may be in the model or in a record of the server
    has_left: bool
    forgotten: set[str]
    learned: set[str] = field(default_factory=set)  # the person's items that belong to a block of the run


def load_plan(node: Node, run: str) -> Plan | None:
    """A run's plan, from its settings alone, without its arrays. None: it has not come here yet."""
    sql = "SELECT note FROM models WHERE run = ?"
    row = node.store.run_query(lambda db: db.execute(sql, (run,)).fetchone())
    if row is None:
        return None
    return _build_plan_of_note(json.loads(row[0]))


def _build_plan_of_note(note: JsonObject) -> Plan:
    config = validate_model(RunConfig, json.loads(note["config"]), "the settings the server sent")
    return build_plan(config)


def load_user_run(node: Node, user: int, run: str) -> UserRun:
    store = node.store
    model = store.load_model(run)
    requests = [request for request in store.list_requests(run) if request.user == user]
    accepted_kinds = {request.kind for request in requests if request.phase != "refused"}
    has_left = "leave" in accepted_kinds
    if model is None:
        shared = _compute_shared_after(set(), requests)
        return UserRun(run, None, 0, shared, False, has_left, set())
    note, arrays = model
    _, item_table = arrays["items"]
    shared, has_contributed = _read_shared_and_contributed(node, user, run, note["tag"])
    unsent = [request for request in requests if request.sent is None]
    shared = _compute_shared_after(shared, unsent)
    return UserRun(
        run=run,
        plan=_build_plan_of_note(note),
        n_items=len(item_table),
        shared=shared,
        has_contributed=has_contributed or bool(shared),
        has_left=has_left,
        forgotten=_collect_forgotten_items(requests),
        learned=store.run_query(lambda db: blocks.list_assigned_items(db, run, user)),
    )


def _collect_forgotten_items(requests: Sequence[QueuedRequest]) -> set[str]:
    """Items that a person asked to forget."""
    forgotten = set[str]()
    for request in requests:
        if request.kind == "forget" and request.phase != "refused":
            forgotten |= set(request.items)
    return forgotten


def _compute_shared_after(shared: set[str], requests: Sequence[QueuedRequest]) -> set[str]:
    """What is shared when those requests have left."""
    for request in requests:
        if request.kind == "share":
            shared = shared | set(request.items)
        elif request.kind == "leave":
            shared = set()
        else:
            shared = shared - set(request.items)
    return shared


def _read_shared_and_contributed(node: Node, user: int, run: str, tag: str) -> tuple[set[str], bool]:
    """What a person's device shares, and whether it contributed anything that could be taken back."""
    lists = _read_device_lists(node, user, run, tag)
    plan = load_plan(node, run)
    if lists is None or plan is None:
        return set(), False
    catalogue = [item for item, _ in node.store.read_catalogue()]
    shared = set[str]()
    log_lengths = []
    for name, ids in lists.items():
        if name in plan.list_state_names(Role.SHARED):
            shared |= {catalogue[item] for item in ids.tolist()}
        if name in plan.list_state_names(Role.REPORTED):
            log_lengths.append(len(ids))
    has_contributed = any(log_lengths) if log_lengths else True  # without a log nobody knows
    return shared, has_contributed


def _read_device_lists(node: Node, user: int, run: str, tag: str) -> dict[str, AnyArray] | None:
    """The lists on a person's device, by name; None: the run has nothing of the person."""
    stored = node.store.load_devices(run, tag)
    if stored is None:
        return None
    _, arrays = stored
    row = np.flatnonzero(arrays["users"] == user)
    if len(row) == 0:
        return None
    devices = unflatten_devices(drop_user_id_column(arrays), "")
    return {name: devices.read_list(name, row).ids for name in devices.lists}
