"""A finished run, opened so that it can go on: its people with what they still have, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Keys, Ragged
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState
from tacita.federation.requests import find_waiting_users
from tacita.federation.rounds import Progress
from tacita.round.device_state import unflatten_devices
from tacita.round.plan import Federation
from tacita.runs.assembly import ALL_CORES, Machine, assemble_federation
from tacita.runs.calibration import with_calibrated_ratio
from tacita.runs.forgetting.pseudonyms import find_residual_subjects, make_pseudonym, read_key
from tacita.runs.forgetting.requests import RequestContext, ResolvedRequest
from tacita.runs.forgetting.retraining import find_shared_and_learned_items
from tacita.runs.forgetting.routes import SharedItems, UnlearningRoute, choose_route
from tacita.runs.loaded_run import read_server_state
from tacita.runs.run_folder import SavedRun, open_saved, read_lists, read_result


@dataclass
class ReopenedRun:
    """A finished run that goes on."""

    saved: SavedRun
    federation: Federation
    progress: Progress

    @property
    def waiting(self) -> Keys:
        """Who asked to take something back and waits for others."""
        return find_waiting_users(self.federation, self.progress.server)

    @property
    def residue_users(self) -> frozenset[str]:
        """Who had something forgotten of which the certificate says that some stayed in the model."""
        folder = self.saved.folder
        key = read_key(folder)
        subjects = find_residual_subjects(folder)
        if key is None or not subjects:
            return frozenset()
        return frozenset(user for user in self.saved.ids["users"] if make_pseudonym(key, user) in subjects)

    @property
    def shares(self) -> SharedItems:
        """(users) What people share."""
        current = TrainedState(self.progress.server, self.progress.clients)
        return find_shared_and_learned_items(self.federation, current)

    @property
    def shared(self) -> Ragged:
        return self.shares.shared

    def build_context(self) -> RequestContext:
        stream = self.federation.stream
        return RequestContext(
            saved=self.saved,
            keys=stream.user_keys,
            history=read_lists(self.saved.client_arrays, "history"),
            trained=stream.collect_train_items(len(stream.blocks) - 1),
            shared=self.shared,
            waiting=self.waiting,
            residue_users=self.residue_users,
        )

    def choose_route(self, request: ResolvedRequest, retrain: bool = False) -> UnlearningRoute:
        return choose_route(self.federation, request, self.shares.take(request.users), retrain)


def reopen_run(folder: Path, machine: Machine = ALL_CORES) -> ReopenedRun:
    """A finished run as it would go on."""
    saved = open_saved(folder)
    federation = assemble_federation(saved.config, machine)
    if saved.ids["fingerprint"] != federation.stream.fingerprint:
        raise TacitaError(
            f"{folder} was trained on other data than '{saved.config.data}' holds now; restore it, or train again."
        )
    history = read_lists(saved.client_arrays, "history")
    stream = restrict_stream(federation.stream, history)
    federation = replace(with_calibrated_ratio(federation, folder), stream=stream)
    server = read_server_state(saved, federation.backbone)
    clients = unflatten_devices(saved.client_arrays, "")
    clients.persistent = federation.persistent_names
    clients.take_snapshot()
    results = read_result(folder)["blocks"]
    progress = Progress(server, LocalDevices(clients), server, in_block=True, results=results)
    return ReopenedRun(saved, federation, progress)


def restrict_stream(stream: BlockStream, history: Ragged) -> BlockStream:
    """The stream without what people do not have any more."""
    blocks = []
    for block in stream.blocks:
        train = _restrict_lists(block.train, history)
        valid = _restrict_lists(block.valid, history)
        test = _restrict_lists(block.test, history)
        blocks.append(replace(block, train=train, valid=valid, test=test))
    return replace(stream, blocks=tuple(blocks))


def _restrict_lists(lists: Ragged, history: Ragged) -> Ragged:
    stays = history.holds(lists.rows(), lists.ids)
    return lists if stays.all() else lists.filter_entries(stays)
