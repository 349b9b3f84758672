"""Devices: where the users are. `LocalDevices` holds them in this process: all users of the lab, or of one node.

The federated loop talks to devices through a handful of questions: who takes part, one exchange, validate, keep the
best round, begin and end a block. A server whose users are elsewhere asks the same questions over a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import (
    AnyArray,
    Bools,
    Broadcast,
    CohortView,
    Keys,
    Longs,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.federation.client_weights import weigh_upload
from tacita.federation.clients import (
    Cohort,
    Membership,
    Respondents,
    build_cohort_view,
    build_user_view,
    compute_expected_clients,
    copy_user_state,
    draw_participants,
    empty_device_state,
    equalise_silo_accounts,
    group_users_into_clients,
    grow_devices_for_block,
    iterate_views_by_part,
    store_part_state,
)
from tacita.federation.device_protocol import RoundReply
from tacita.federation.device_requests import apply_requests_on_devices
from tacita.federation.evaluation import (
    MetricSums,
    TrainedState,
    build_ranking_mask,
    evaluate_block,
    plan_validation,
    run_evaluation,
    select_validation_items,
)
from tacita.federation.scoring import take_user_lists
from tacita.messages import CohortReply, Spec, Total, Upload, UploadAccumulator, make_accumulator
from tacita.metrics import Evaluation
from tacita.privacy.ledger import Ledger
from tacita.round.device_state import OWN_ROWS, PARTS, DeviceState
from tacita.round.nonces import number_releases
from tacita.round.part import Part
from tacita.round.plan import Federation, Plan
from tacita.round.question import Question
from tacita.round.request import RequestBatch
from tacita.round.state import with_part_state
from tacita.round.task import prepare_cohort


@dataclass(frozen=True)
class ExchangeQuery:
    """A question, whom it goes to, and the fields of its answers where they were worked out before."""

    question: Question
    chosen: Keys | None = None  # None: those who take part by themselves
    specs: Sequence[Spec] | None = None


@dataclass(frozen=True)
class DeviceAnswers:
    """What some devices answered in one exchange, before noise and before anything is averaged."""

    sums: UploadAccumulator  # their uploads, without noise
    respondents: Respondents
    notes: dict[str, AnyArray]  # name -> (clients,) in the order of clients; nan: nothing
    contributors: int
    senders: Longs  # (senders,) numbers of the clients whose fields are seen each by itself, ascending


@dataclass
class LocalDevices:
    """Devices in this process, as a few arrays."""

    clients: DeviceState
    membership: Membership | None = None
    mask: Ragged | None = None  # what validation does not rank
    validated: Ragged | None = None  # the validation items of those who validate
    past: Ragged | None = None  # training items of earlier blocks, where the model reads them
    draw_nonce: Callable[[Total], int] | None = None  # a number that the noise of a sum follows, too; None: the lab
    n_known: int = 0  # users of earlier blocks
    remembered: DeviceState | None = None  # the devices before a request began a block again

    @property
    def lab(self) -> LocalDevices:
        return self

    def gather_devices(self) -> LocalDevices:
        return self

    @property
    def max_request_rounds(self) -> int | None:
        return None

    @property
    def best_devices(self) -> DeviceState:
        """The devices as they were in the best round of the block."""
        return self.clients.snapshot

    # a block

    def begin_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None:
        """Room for new users; let the parts prepare."""
        block = federation.stream.blocks[server.block]
        keys = federation.stream.user_keys
        self.n_known = n_known = self.clients.n_users
        grow_devices_for_block(self.clients, federation, keys[: block.n_users])
        self.equalise_silos(federation, server)
        if federation.config.train.reset_private_each_block and block.index > 0:
            returning = np.flatnonzero(block.train.counts()[:n_known] > 0)
            fresh = federation.backbone.init_private(federation.draws, keys[returning])
            self.clients.put(returning, {"private": fresh})
        users = np.flatnonzero(block.train.counts() > 0)
        starting = federation.implementing("on_block_start")
        for part, view in iterate_views_by_part(federation, server, self.clients, broadcast, starting, users):
            store_part_state(self.clients, view.user, {part.name: part.on_block_start(view)})
        self.membership = None
        self.mask = None
        self.validated = None
        self.past = None
        self.clients.take_snapshot()

    def end_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None:
        users = np.flatnonzero(self.best_devices.took_part)
        ending = federation.implementing("on_block_end")
        for part, view in iterate_views_by_part(federation, server, self.best_devices, broadcast, ending, users):
            store_part_state(self.best_devices, view.user, {part.name: part.on_block_end(view)})
        goes_on = federation.config.train.resume_from == "last"
        self.clients = self.clients.with_parts_of(self.best_devices) if goes_on else self.best_devices
        self.clients.take_snapshot()

    def equalise_silos(self, federation: Federation, server: ServerState) -> None:
        """Where silos are clients, all users of one hold what it has spent."""
        if not federation.config.train.n_joint_silos:
            return
        everybody_here = np.ones(self.clients.n_users, bool)
        users = self._group_users(federation, server, everybody_here).users
        home = users.rows()[np.argsort(users.ids)].astype(np.int64)
        equalise_silo_accounts(self.clients, federation, home)

    # who takes part

    def group_active_clients(self, federation: Federation, server: ServerState) -> Membership:
        if self.membership is None:
            self.membership = self._group_users(federation, server)
        return self.membership

    def _group_users(self, federation: Federation, server: ServerState, among: Bools | None = None) -> Membership:
        block = federation.stream.blocks[server.block]
        silos = federation.config.train.n_joint_silos
        homes = None if federation.homes is None else federation.homes.silo
        return group_users_into_clients(block, federation.stream.user_keys, silos, federation.draws, among, homes)

    def has_training_data(self, federation: Federation, server: ServerState) -> bool:
        return len(self.group_active_clients(federation, server).active) > 0

    def draw_round_participants(self, federation: Federation, server: ServerState) -> Longs:
        """The clients that take part in the round."""
        members = self.group_active_clients(federation, server)
        participation = federation.config.train.participation
        return draw_participants(members, participation, federation.draws, server.block, server.round)

    def choose_clients(self, federation: Federation, server: ServerState) -> Keys:
        return self.group_active_clients(federation, server).keys[self.draw_round_participants(federation, server)]

    def select_respondents(
        self, federation: Federation, server: ServerState, question: Question, chosen: Keys | None
    ) -> Respondents:
        """Whom a question goes to: those of the round, or, where a part asks, all who ever had data."""
        if question.owner is not None:
            return self._select_from_all_with_data(federation, server, chosen)
        members = self.group_active_clients(federation, server)
        participants = self.draw_round_participants(federation, server)
        expected = compute_expected_clients(len(members.active), federation.config.train.participation)
        if chosen is None:
            return Respondents(members, participants, expected)
        clients = np.intersect1d(members.select_clients_by_key(chosen), members.active)
        if not np.array_equal(clients, participants):
            expected = float(len(clients))
        return Respondents(members, clients, expected)

    def _select_from_all_with_data(
        self, federation: Federation, server: ServerState, chosen: Keys | None
    ) -> Respondents:
        """All who ever had data, or some of them."""
        block = federation.stream.blocks[server.block]
        trained = federation.stream.collect_train_items(server.block)
        had_data = np.zeros(block.n_users, bool)
        had_data[: len(trained)] = trained.counts() > 0
        if chosen is not None and not federation.config.train.silos:  # who withdrew all may still be asked for it
            had_data |= np.isin(federation.stream.user_keys[: block.n_users], chosen)
        members = self._group_users(federation, server, had_data)
        clients = members.active if chosen is None else members.select_clients_by_key(chosen)
        return Respondents(members, clients, float(len(clients)))

    # one exchange

    def exchange(
        self,
        federation: Federation,
        server: ServerState,
        broadcast: Broadcast,
        question: Question,
        chosen: Keys | None = None,
    ) -> RoundReply:
        """The answers of all who are asked, as one total; what devices keep is changed in place."""
        played = replay_server(server, question)
        query = ExchangeQuery(question, chosen)
        answers = self.collect_answers(federation, server, broadcast, query)
        mean_notes = average_notes(answers.notes)
        total = answers.sums.compute_total()
        if self.draw_nonce is not None:
            total = replace(total, nonce=total.nonce ^ self.draw_nonce(total))
        bytes_up = federation.count_upload_bytes(answers.sums.fields, answers.sums.n_bytes)
        total = federation.noise_sum(played, total, question)
        respondents = answers.respondents
        n_clients = len(respondents.clients)
        return RoundReply(total, n_clients, respondents.expected, bytes_up, mean_notes, answers.contributors)

    def collect_answers(
        self, federation: Federation, server: ServerState, broadcast: Broadcast, query: ExchangeQuery
    ) -> DeviceAnswers:
        """The answers of all who are asked, summed without noise; what devices keep is changed in place."""
        question = query.question
        encoders = federation.list_encoders(question)
        whole_table = federation.sends_whole_table(server)
        apart_fields = federation.apart_fields
        specs = federation.fields(server, question) if query.specs is None else query.specs
        sums = make_accumulator(federation.config.train.aggregator, specs, apart_fields)
        server = replay_server(server, question)
        respondents = self.select_respondents(federation, server, question, query.chosen)
        if question.owner is None:
            self._charge_eligible(federation, server, respondents.members)
        if OWN_ROWS in self.clients.lists:
            self.clients.common[OWN_ROWS] = server.items
        contributors = 0
        notes: dict[str, list[AnyArray]] = {}
        senders = [np.zeros(0, np.int64)]
        n_clients = len(respondents.clients)
        for start in range(0, n_clients, federation.chunk):
            cohort = respondents.clients[start : start + federation.chunk]
            view = self._build_view(federation, server, broadcast, respondents.members, cohort)
            view = replace(view, replay=question.replay)
            reply, upload = self._answer_cohort(federation, view, question, encoders)
            sums.add(upload, whole_table)
            contributors += _count_contributors(upload, reply)
            senders.append(cohort[upload.weight > 0])
            for name, values in reply.notes.items():
                notes.setdefault(name, []).append(values)
        joined_notes = {name: np.concatenate(chunks) for name, chunks in notes.items()}
        places = np.concatenate(senders)
        return DeviceAnswers(sums, respondents, joined_notes, contributors, places)

    def _answer_cohort(
        self, federation: Federation, view: CohortView, question: Question, encoders: Sequence[Part]
    ) -> tuple[CohortReply, Upload]:
        """What one cohort answers, and its uploads as they leave; what its devices keep is stored before they do."""
        owner = federation.find_question_owner(question) if question.owner is not None else None
        if owner is not None:
            reply = owner.answer_question(view, question.kind)
        else:
            task = prepare_cohort(federation.preparing_parts, view)
            for name, part_task in task.tasks.items():
                if part_task.state:
                    store_part_state(self.clients, view.user, {name: part_task.state})
            reply = federation.learner.answer(task, question.kind)
            view = task.view
        update = self._filter_state_update(reply)
        view = _with_state_update(view, reply.state_update)
        upload = reply.upload
        if owner is None and federation.weighing_parts:
            hides_weights = bool(federation.part_ledgers)
            upload = weigh_upload(federation.weighing_parts, view, upload, hides_weights)
        upload, part_updates = _encode_upload(encoders, federation.part_ledgers, view, upload)
        self.clients.put(view.user, update)
        for name, part_update in part_updates.items():
            store_part_state(self.clients, view.user, {name: part_update})
        return reply, upload

    def _build_view(
        self, federation: Federation, server: ServerState, broadcast: Broadcast, members: Membership, cohort: Longs
    ) -> CohortView:
        """What some clients see of themselves."""
        block = federation.stream.blocks[server.block]
        users = members.users.take(cohort)
        clients = Cohort(users, members.keys[cohort], federation.stream.user_keys)
        view = build_cohort_view(self.clients, server, block, clients, broadcast)
        if federation.backbone.reads_history:
            if self.past is None:
                self.past = federation.stream.collect_train_items(block.index - 1)
            view = replace(view, history=take_user_lists(self.past, users.ids))
        return view

    def _charge_eligible(self, federation: Federation, server: ServerState, members: Membership) -> None:
        """What it costs those who could take part, whether they do or not, before anybody answers."""
        if not federation.charging_parts:
            return
        block = federation.stream.blocks[server.block]
        users = members.users.take(members.active).ids
        for part in federation.charging_parts:
            assert part.privacy is not None
            view = build_user_view(self.clients, server, block, users, federation.stream.user_keys, Broadcast())
            charged = part.privacy.charge_eligible(view)
            if charged is not None:
                store_part_state(self.clients, view.user, {part.name: charged})

    def _filter_state_update(self, reply: CohortReply) -> StateUpdate:
        """What a reply wants to be kept; own rows only where users are scored with them."""
        keeps_own_rows = OWN_ROWS in self.clients.lists
        update = {name: v for name, v in reply.state_update.items() if name != OWN_ROWS or keeps_own_rows}
        for name in update.keys() - self.clients.arrays.keys() - self.clients.lists.keys():
            raise TacitaError(f"'{name}' is to be kept on devices, and no `state` makes room for it.")
        return update

    # requests and what lab users choose

    def apply_requests(self, federation: Federation, server: ServerState, requests: RequestBatch) -> RequestBatch:
        return apply_requests_on_devices(self.clients, federation, server, requests)

    def enrol(self, federation: Federation, server: ServerState, part: Part) -> RequestBatch | None:
        """What those with data in the block choose as it begins; the price of one view of all of them."""
        assert part.lab_enrolment is not None
        block = federation.stream.blocks[server.block]
        users = np.flatnonzero(block.train.counts() > 0)
        view = build_user_view(self.clients, server, block, users, federation.stream.user_keys, Broadcast())
        update, requests = part.lab_enrolment.enrol(view)
        store_part_state(self.clients, view.user, {part.name: update})
        return requests

    def remember_devices(self) -> None:
        """Persistent state is going to be restored from the devices as they are now."""
        self.remembered = self.clients

    def restart_devices(self, federation: Federation) -> None:
        """Nobody has learned anything, and nobody is there yet."""
        self.clients = empty_local_devices(federation).clients
        self.membership = None
        self.mask = None
        self.validated = None
        self.past = None

    def restore_persistent_state(self, federation: Federation) -> None:
        """Persistent state as it was remembered, for those who came with the block that has just begun."""
        before = self.remembered
        assert before is not None, "nothing was remembered"
        users = np.arange(self.n_known, min(self.clients.n_users, before.n_users))
        copy_user_state(self.clients, before, federation.persistent_part_names, users)

    # measuring

    def sum_validation(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> MetricSums:
        block = federation.stream.blocks[server.block]
        if len(block.valid.ids) == 0:
            return {}
        if self.mask is None:
            self.mask = build_ranking_mask(federation, block, "valid", federation.config.evaluate.mask)
        trained = TrainedState(server, self.clients, broadcast)
        task = plan_validation(federation, block)
        if self.validated is None:
            self.validated = select_validation_items(federation, block)
        return run_evaluation(federation, trained, task, self.mask, self.validated).compute_sums()

    def keep_best_round(self, round: int) -> None:
        self.clients.take_snapshot()

    def evaluate_best_round(
        self, federation: Federation, server: ServerState, broadcast: Broadcast
    ) -> tuple[dict[str, Any], Evaluation]:
        """Scores of the best round on this block's test and on every earlier block's."""
        return evaluate_block(federation, server, self.best_devices, broadcast)


def empty_local_devices(plan: Plan) -> LocalDevices:
    """No devices yet."""
    clients = empty_device_state(plan.backbone, own_rows=plan.config.evaluate.item_table == "personal")
    clients.take_snapshot()
    return LocalDevices(clients)


def _encode_upload(
    parts: Sequence[Part], ledgers: Mapping[str, Ledger], view: CohortView, upload: Upload
) -> tuple[Upload, dict[str, StateUpdate]]:
    """Uploads as they leave, changed by each part, and what devices keep of that, by part."""
    updates: dict[str, StateUpdate] = {}
    for part in parts:
        upload, update = part.encode(view, upload)
        if part.name in ledgers:
            upload = number_releases(part, ledgers[part.name], view, upload, update)
        if update:
            updates[part.name] = update
    return upload, updates


def _count_contributors(upload: Upload, reply: CohortReply) -> int:
    """Clients whose upload weighs something and, as far as is known, holds something."""
    is_sent = upload.weight > 0
    if reply.contributes is not None:
        is_sent &= reply.contributes
    return int(is_sent.sum())


def _with_state_update(view: CohortView, update: StateUpdate) -> CohortView:
    """The same view after a reply kept something else."""
    for name, part_update in nest_parts(update, PARTS).items():
        view = with_part_state(view, name, part_update)
    return view


def replay_server(server: ServerState, question: Question) -> ServerState:
    """The server's state as a question's draws follow it: an earlier round where that is played again."""
    return server if question.replay is None else replace(server, round=question.replay.round)


def average_notes(notes: Mapping[str, AnyArray]) -> dict[str, float]:
    """Mean over the clients that had something to say."""
    means = {}
    for name, values in notes.items():
        if not np.isnan(values).all():
            means[name] = float(np.nanmean(values))
    return means
