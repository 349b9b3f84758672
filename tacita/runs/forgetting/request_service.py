"""The door of a finished run: what people ask for is carried out on its saved state, and the folder is written anew.

The folder is opened as a resume opens it, with the histories that its devices still have. The request goes the way of
every request (federation/requests.py). Then what was withdrawn leaves every list that devices keep, the run is tested
again, and new files replace the old ones together: a kill leaves the folder as it was, or as it is then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.files import lock_folder, remove_temporary_files, write_json
from tacita.core.types import BlockStream, Keys, Ragged
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState, evaluate_block
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, end_block
from tacita.metrics import summarise_continual
from tacita.report.pages import write_report
from tacita.report.promises import PRIVACY_KEY, privacy_lines
from tacita.round.device_state import PARTS, DeviceState, deep_copy_devices, read_devices
from tacita.round.part import forgetting_scope
from tacita.round.plan import Federation
from tacita.round.state import Role, initial_state
from tacita.round.unlearning_report import PartReports
from tacita.runs.artefacts import build_targets, find_traces
from tacita.runs.assembly import ALL_CORES, Machine, assemble
from tacita.runs.calibration import apply_calibration
from tacita.runs.controls import average_blocks
from tacita.runs.forgetting.certificate import CertificateInput, certify
from tacita.runs.forgetting.pseudonyms import (
    certificate_number,
    create_key,
    find_residual_subjects,
    list_certificates,
    pseudonym,
    read_key,
)
from tacita.runs.forgetting.requests import (
    RawRequest,
    RequestContext,
    ResolvedRequest,
    explain_no_change,
    resolve_request,
)
from tacita.runs.forgetting.retraining import (
    RetrainingCost,
    collect_shares,
    describe_retraining,
    find_shared,
    note_request,
    retrain_blocks,
)
from tacita.runs.forgetting.routes import (
    REMEDY,
    RETRAINING,
    SharedItems,
    UnlearningRoute,
    check_kind,
    choose_route,
)
from tacita.runs.forgetting.verification import AppliedRequest, Verification, find_waiting_parts, verify_request
from tacita.runs.ledger import describe_cost, join_accounts, summarise_spending
from tacita.runs.loaded_run import read_server_state
from tacita.runs.run_folder import (
    SavedRun,
    finish_change,
    open_saved,
    read_lists,
    read_result,
    replace_files,
    write_models,
)


@dataclass(frozen=True)
class RunRequestResult:
    """What came of a wish."""

    message: str  # which way it went and why, or why nothing changed
    certificate: dict[str, Any] | None = None  # None: nothing was withdrawn
    path: Path | None = None  # where the certificate is
    n_items: int = 0  # that it was about
    n_people: int = 0  # who asked
    cost_message: str = ""  # what it cost their budgets, in words


@dataclass
class ReopenedRun:
    """A finished run that goes on: its people with what they still have, and where it stands."""

    saved: SavedRun
    federation: Federation
    progress: Progress

    @property
    def waiting(self) -> Keys:
        """Who asked to take something back and waits for others."""
        held = self.progress.server.parts.values()
        found = [part[name] for part in held for name in ("asked", "waiting") if name in part]
        return np.concatenate([np.zeros(0, np.uint64), *found])

    def build_context(self) -> RequestContext:
        stream = self.federation.stream
        own = read_lists(self.saved.client_arrays, "history"), stream.train_items(len(stream.blocks) - 1)
        return RequestContext(self.saved, stream.user_keys, *own, self.shares.shared, self.waiting, self.residue_users)

    @property
    def residue_users(self) -> frozenset[str]:
        """Who had something forgotten of which the certificate says that some stayed in the model."""
        key, named = read_key(self.saved.folder), find_residual_subjects(self.saved.folder)
        if key is None or not named:
            return frozenset()
        return frozenset(user for user in self.saved.ids["users"] if pseudonym(key, user) in named)

    @property
    def shares(self) -> SharedItems:
        """(users) What people share."""
        return collect_shares(self.federation, TrainedState(self.progress.server, self.progress.clients))

    @property
    def shared(self) -> Ragged:
        return self.shares.shared

    def choose_route(self, request: ResolvedRequest, retrain: bool = False) -> UnlearningRoute:
        """Which way a request goes."""
        return choose_route(self.federation, request, self.shares.take(request.users), retrain)


def submit_request(
    folder: Path, request: RawRequest, verify: bool = False, machine: Machine = ALL_CORES
) -> RunRequestResult:
    """Carry out what people ask of a run folder."""
    began = time.perf_counter()
    read_result(folder)  # what is no finished run is refused before anybody is kept out of it
    with lock_folder(folder):
        remove_temporary_files(folder)
        finish_change(folder)
        run = reopen_run(folder, machine)
        check_kind(run.federation, request.kind)
        asked = resolve_request(request, run.build_context())
        if asked.is_empty:
            return RunRequestResult(explain_no_change(request, run.build_context()))
        done = apply_request(run.federation, run.progress, asked, run.choose_route(asked, request.retrain))
        proof = None
        if verify and _admits_verification(done):
            proof = verify_request(done)
        return _write_result(run.saved, done, proof, began)


def _admits_verification(done: AppliedRequest) -> bool:
    """What is shared or waits cannot be compared; under a budget nothing is charged for a comparison of exact data."""
    if done.request.requests.kind == "share" or done.is_waiting:
        return False
    return not done.counts_releases


def reopen_run(folder: Path, machine: Machine = ALL_CORES) -> ReopenedRun:
    """A finished run as it would go on."""
    saved = open_saved(folder)
    fed = assemble(saved.config, machine)
    if saved.ids["fingerprint"] != fed.stream.fingerprint:
        raise TacitaError(
            f"{folder} was trained on other data than '{saved.config.data}' holds now; restore it, or train again."
        )
    fed = replace(
        apply_calibration(fed, folder), stream=restrict_stream(fed.stream, read_lists(saved.client_arrays, "history"))
    )
    server, clients = read_server_state(saved, fed.backbone), read_devices(saved.client_arrays, "")
    clients.persistent = fed.persistent_names
    clients.take_snapshot()
    results = read_result(folder)["blocks"]
    return ReopenedRun(saved, fed, Progress(server, LocalDevices(clients), server, in_block=True, results=results))


def restrict_stream(stream: BlockStream, history: Ragged) -> BlockStream:
    """The stream without what people do not have any more."""

    def kept(lists: Ragged) -> Ragged:
        stays = history.holds(lists.rows(), lists.ids)
        return lists if stays.all() else lists.filter_entries(stays)

    blocks = tuple(
        replace(block, train=kept(block.train), valid=kept(block.valid), test=kept(block.test))
        for block in stream.blocks
    )
    return replace(stream, blocks=blocks)


def apply_request(
    fed: Federation, progress: Progress, request: ResolvedRequest, route: UnlearningRoute
) -> AppliedRequest:
    """The request on the run's state; what was withdrawn is nowhere on the devices then."""
    before, results = progress.server, progress.results
    was = TrainedState(before, deep_copy_devices(progress.clients))
    began, busy = time.perf_counter(), time.process_time()
    if route.is_retraining:
        return _apply_retraining(fed, progress, request, route, was)
    said = handle_requests(fed, progress, request.requests)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    _check_handled(fed, request, said)
    gone, left = _remove_withdrawn(fed, progress.clients, request)
    changed = progress.server.items is not before.items or progress.server.heads is not before.heads
    if changed:
        progress.results = results[:-1]
        end_block(left, progress)  # what parts keep of a block's end is made of the new model, too
        scores = {name: v for name, v in progress.results[-1].items() if name not in _TRAINING_KEYS}
    else:
        progress.clients.take_snapshot()
        scores, _ = evaluate_block(left, progress.server, progress.clients)
    progress.results = [*results[:-1], {**results[-1], **scores}]
    needed = tuple(f"{PARTS}{name}/" for name in {fed.learner.name} | find_waiting_parts(said))
    purge_devices(
        fed, progress.clients, gone, request, {name for name in progress.clients.lists if name.startswith(needed)}
    )
    now = TrainedState(progress.server, progress.clients)
    return AppliedRequest(fed, left, request, route, gone, said, was, now, seconds, busy, progress.results)


def _apply_retraining(
    fed: Federation, progress: Progress, asked: ResolvedRequest, way: UnlearningRoute, was: TrainedState
) -> AppliedRequest:
    """The request noted by whom it concerns, and the run once more without what is withdrawn."""
    began, busy = time.perf_counter(), time.process_time()
    purged = note_request(fed, progress, asked)
    gone, left = _remove_withdrawn(fed, progress.clients, asked)
    now, price = TrainedState(progress.server, progress.clients), RetrainingCost()
    made = retrain_blocks(left, find_shared(fed, now), None, now, price)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    purge_devices(
        fed, made.clients, gone, asked, {name for name in made.clients.lists if name not in fed.persistent_names}
    )
    said = {RETRAINING: describe_retraining(price, purged, exact=not way.residue)}
    after = TrainedState(made.server, made.clients)
    return AppliedRequest(fed, left, asked, way, gone, said, was, after, seconds, busy, made.results)


def _remove_withdrawn(fed: Federation, clients: DeviceState, asked: ResolvedRequest) -> tuple[Ragged, Federation]:
    """Per user what is nobody's any more, and the run without it."""
    gone, history = _find_withdrawn(clients, asked, fed), fed.stream.history(len(fed.stream.blocks))
    stays = history.filter_entries(~gone.holds(history.rows(), history.ids))
    return gone, replace(fed, stream=restrict_stream(fed.stream, stays))


_TRAINING_KEYS = ("rounds", "best_round", "valid", "valid_served", "bytes_up", "bytes_down")
"""What a block's result says of its training."""


def _find_withdrawn(clients: DeviceState, asked: ResolvedRequest, fed: Federation) -> Ragged:
    """Per user, what is nobody's any more: what is to be forgotten, and what parts dropped for good."""
    none = np.zeros(0, np.int32)
    rows, ids = [none], [none]
    if asked.requests.kind in ("forget", "leave"):
        rows, ids = [asked.users[asked.items.rows()]], [asked.items.ids]
    for name in fed.names_of(Role.WITHDRAWN):
        withdrawn = clients.read_list(name, asked.users)
        rows.append(asked.users[withdrawn.rows()])
        ids.append(withdrawn.ids)
    return Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), fed.stream.n_users)


def _check_handled(fed: Federation, asked: ResolvedRequest, said: PartReports) -> None:
    """Refuse what every part let pass; nothing is written yet."""
    able = {part.name for part in fed.parts if forgetting_scope(part)} | {fed.learner.name}
    if asked.requests.kind != "share" and not able & said.keys():
        named = ", ".join(sorted(able))
        raise TacitaError(f"none of {named} carries out '{asked.requests.kind}' in this run; {REMEDY}.")


def purge_devices(
    fed: Federation, clients: DeviceState, gone: Ragged, request: ResolvedRequest, spared: set[str]
) -> None:
    """Take what is withdrawn out of every list that the devices of these people keep; who leaves keeps nothing.

    `spared`: lists that are still needed to take something back later, or that never held it.
    """
    users = request.users
    mine = gone.take(users)
    for name in clients.lists.keys() - spared:
        found = clients.read_list(name, users)
        stays = ~mine.holds(found.rows(), found.ids) if not request.whole else np.zeros(len(found.ids), bool)
        if not stays.all():
            clients.put(users, {name: found.filter_entries(stays)})
    if request.whole:
        clients.put(users, {"private": np.zeros_like(clients.private[users])})
        for part in fed.parts:  # as before one's first block, but for what lasts
            waits = any(name.startswith(f"{PARTS}{part.name}/") for name in spared)
            specs = () if waits else part.state(len(users))
            blank = initial_state([spec for spec in specs if not spec.persistent])
            arrays = {name: array for name, array in blank.items() if not isinstance(array, Ragged)}
            clients.put(users, {f"{PARTS}{part.name}/{name}": array for name, array in arrays.items()})
    clients.take_snapshot()


def _write_result(saved: SavedRun, done: AppliedRequest, proof: Verification | None, began: float) -> RunRequestResult:
    """New files in place of the old ones, all of them or none."""
    folder, asked = saved.folder, done.request
    progress = Progress(done.after.server, LocalDevices(done.after.clients), done.after.server)
    certificate = path = None
    with replace_files(folder) as side:
        write_models(done.remaining, progress, side)
        write_json(side / "result.json", _update_result(folder, done))
        if asked.requests.kind != "share":
            number = 1 + max((certificate_number(one) for one in list_certificates(folder)), default=0)
            name = f"{'unshare' if asked.requests.kind == 'unshare' else 'forget'}-{number}.json"
            leavers = asked.users if asked.whole else asked.users[:0]
            needles = build_targets(saved, done.removed_items, done.withdrawn_items, leavers, done.before)
            needles = replace(
                needles, persistent=done.federation.persistent_names if done.route.is_retraining else None
            )
            traces = find_traces(side, needles, fallback=folder)
            key = read_key(folder) or create_key(side)
            certificate = certify(
                CertificateInput(saved, done, proof, traces, number, time.perf_counter() - began, key)
            )
            path = folder / name
            write_json(side / name, certificate)
    write_report([folder], folder / "report.html")
    before, after = done.before.clients.parts, done.after.clients.parts
    cost = describe_cost((*done.federation.parts, done.federation.learner), before, after, asked.users)
    return RunRequestResult(done.route.reason, certificate, path, len(asked.items.ids), len(asked.users), cost)


def _update_result(folder: Path, done: AppliedRequest) -> dict[str, Any]:
    """The numbers of the run with the last block measured again."""
    result, blocks = read_result(folder), done.results
    kept = summarise_continual([b["on_blocks"] for b in blocks], [b["users"] for b in blocks])
    counted = join_accounts((*done.federation.parts, done.federation.learner), done.after.clients.parts)
    result |= {
        **({} if counted is None else {"privacy": summarise_spending(*counted)}),
        "blocks": blocks,
        "mean": average_blocks(blocks),
        "continual": {name: None if np.isnan(value) else value for name, value in kept.items()},
        "requests": result.get("requests", 0) + 1,
    }
    return {**result, PRIVACY_KEY: privacy_lines(done.federation.config, result)}
