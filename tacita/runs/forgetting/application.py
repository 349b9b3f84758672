"""Apply a request to the state of a run: by the run's own parts, or by retraining without what is withdrawn.

The request goes the way of every request (federation/requests.py). Then what was withdrawn leaves every list that
devices keep, and the run is tested again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Ragged, ServerState
from tacita.federation.evaluation import TrainedState, evaluate_block
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, end_block
from tacita.round.device_state import PARTS, DeviceState, deep_copy_devices
from tacita.round.part import Part, list_forgetting_scope
from tacita.round.plan import Federation
from tacita.round.request import UNLEARNING_KINDS
from tacita.round.state import Role, build_initial_state
from tacita.round.unlearning_report import PartReports
from tacita.runs.forgetting.reopened_run import restrict_stream
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.retraining import (
    RetrainingCost,
    find_shared_items,
    report_retraining,
    retrain_blocks,
    tell_parts_of_request,
)
from tacita.runs.forgetting.routes import REMEDY, RETRAINING, UnlearningRoute
from tacita.runs.forgetting.verification import AppliedRequest, find_waiting_parts

_TRAINING_KEYS = ("rounds", "best_round", "valid", "valid_served", "bytes_up", "bytes_down")
"""What a block's result says of its training."""


@dataclass(frozen=True)
class Stopwatch:
    """Time since it was made, on the wall and of the processor."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def elapsed(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


def apply_request(
    federation: Federation, progress: Progress, request: ResolvedRequest, route: UnlearningRoute
) -> AppliedRequest:
    """The request on the run's state; what was withdrawn is nowhere on the devices then."""
    before = TrainedState(progress.server, deep_copy_devices(progress.clients))
    if route.is_retraining:
        return _apply_retraining(federation, progress, request, route, before)
    stopwatch = Stopwatch()
    reports = handle_requests(federation, progress, request.requests)
    seconds, seconds_cpu = stopwatch.elapsed()
    _check_handled(federation, request, reports)
    removed_items, remaining = _remove_withdrawn(federation, progress.clients, request)
    _retest_last_block(remaining, progress, before.server)
    purge_devices(
        federation, progress.clients, removed_items, request, _list_lists_to_spare(federation, progress, reports)
    )
    return AppliedRequest(
        federation=federation,
        remaining=remaining,
        request=request,
        route=route,
        removed_items=removed_items,
        part_reports=reports,
        before=before,
        after=TrainedState(progress.server, progress.clients),
        seconds=seconds,
        seconds_cpu=seconds_cpu,
        results=progress.results,
    )


def _apply_retraining(
    federation: Federation,
    progress: Progress,
    request: ResolvedRequest,
    route: UnlearningRoute,
    before: TrainedState,
) -> AppliedRequest:
    """The request noted by whom it concerns, and the run once more without what is withdrawn."""
    stopwatch = Stopwatch()
    purged = tell_parts_of_request(federation, progress, request)
    removed_items, remaining = _remove_withdrawn(federation, progress.clients, request)
    current = TrainedState(progress.server, progress.clients)
    cost = RetrainingCost()
    retrained = retrain_blocks(remaining, find_shared_items(federation, current), None, current, cost)
    seconds, seconds_cpu = stopwatch.elapsed()
    never_held = {name for name in retrained.clients.lists if name not in federation.persistent_names}
    purge_devices(federation, retrained.clients, removed_items, request, never_held)
    report = report_retraining(cost, purged, exact=not route.residue)
    return AppliedRequest(
        federation=federation,
        remaining=remaining,
        request=request,
        route=route,
        removed_items=removed_items,
        part_reports={RETRAINING: report},
        before=before,
        after=TrainedState(retrained.server, retrained.clients),
        seconds=seconds,
        seconds_cpu=seconds_cpu,
        results=retrained.results,
    )


def _check_handled(federation: Federation, request: ResolvedRequest, reports: PartReports) -> None:
    """Refuse what every part let pass; nothing is written yet."""
    able = {part.name for part in federation.parts if list_forgetting_scope(part)}
    able.add(federation.learner.name)
    kind = request.requests.kind
    if kind != "share" and able.isdisjoint(reports):
        names = ", ".join(sorted(able))
        raise TacitaError(f"none of {names} carries out '{kind}' in this run; {REMEDY}.")


# What is withdrawn


def _remove_withdrawn(
    federation: Federation, clients: DeviceState, request: ResolvedRequest
) -> tuple[Ragged, Federation]:
    """Per user what is nobody's any more, and the run without it."""
    removed_items = _find_removed(clients, request, federation)
    history = federation.stream.collect_history(len(federation.stream.blocks))
    is_removed = removed_items.holds(history.rows(), history.ids)
    stream = restrict_stream(federation.stream, history.filter_entries(~is_removed))
    return removed_items, replace(federation, stream=stream)


def _find_removed(clients: DeviceState, request: ResolvedRequest, federation: Federation) -> Ragged:
    """Per user, what is nobody's any more: what is to be forgotten, and what parts dropped for good."""
    rows = [np.zeros(0, np.int32)]
    ids = [np.zeros(0, np.int32)]
    if request.requests.kind in UNLEARNING_KINDS:
        rows = [request.users[request.items.rows()]]
        ids = [request.items.ids]
    for name in federation.list_state_names(Role.WITHDRAWN):
        withdrawn = clients.read_list(name, request.users)
        rows.append(request.users[withdrawn.rows()])
        ids.append(withdrawn.ids)
    return Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), federation.stream.n_users)


def _retest_last_block(remaining: Federation, progress: Progress, server_before: ServerState) -> None:
    """Measure the last block with the model as it is now; what a block's end keeps is made of it, too."""
    results = progress.results
    server = progress.server
    has_changed = server.items is not server_before.items or server.heads is not server_before.heads
    if has_changed:
        progress.results = results[:-1]
        end_block(remaining, progress)
        result = progress.results[-1]
        scores = {name: value for name, value in result.items() if name not in _TRAINING_KEYS}
    else:
        progress.clients.take_snapshot()
        scores, _ = evaluate_block(remaining, server, progress.clients)
    progress.results = [*results[:-1], {**results[-1], **scores}]


# Purging


def _list_lists_to_spare(federation: Federation, progress: Progress, reports: PartReports) -> set[str]:
    """Lists with which something is taken back later: of the learner, and of parts that wait for others."""
    owners = {federation.learner.name} | find_waiting_parts(reports)
    prefixes = tuple(f"{PARTS}{name}/" for name in owners)
    return {name for name in progress.clients.lists if name.startswith(prefixes)}


def purge_devices(
    federation: Federation, clients: DeviceState, removed_items: Ragged, request: ResolvedRequest, spared: set[str]
) -> None:
    """Take what is withdrawn out of every list that the devices of these people keep; who leaves keeps nothing.

    `spared`: lists that are still needed to take something back later, or that never held it.
    """
    users = request.users
    removed = removed_items.take(users)
    for name in clients.lists.keys() - spared:
        entries = clients.read_list(name, users)
        stays = np.zeros(len(entries.ids), bool)
        if not request.whole:
            stays = ~removed.holds(entries.rows(), entries.ids)
        if not stays.all():
            clients.put(users, {name: entries.filter_entries(stays)})
    if request.whole:
        clients.put(users, {"private": np.zeros_like(clients.private[users])})
        for part in federation.parts:
            is_waiting = any(name.startswith(f"{PARTS}{part.name}/") for name in spared)
            if not is_waiting:
                _reset_part(part, clients, request)
    clients.take_snapshot()


def _reset_part(part: Part, clients: DeviceState, request: ResolvedRequest) -> None:
    """A part's arrays on devices as before one's first block, but for what lasts."""
    specs = part.state(len(request.users))
    blank = build_initial_state([spec for spec in specs if not spec.persistent])
    arrays = {}
    for name, array in blank.items():
        if not isinstance(array, Ragged):
            arrays[f"{PARTS}{part.name}/{name}"] = array
    clients.put(request.users, arrays)
