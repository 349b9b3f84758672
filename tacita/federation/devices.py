"""Devices: where the people are. `Here` holds them in this process: all users of the lab, or those of one node.

The federated loop talks to devices through a handful of questions: who takes part, one exchange, validate, keep the
best round, begin and end a block. A server whose people are elsewhere asks the same questions over a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from tacita.core.device_lists import update_lists
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Bools, Broadcast, CohortView, Keys, Longs, Ragged, ServerState, StateUpdate
from tacita.federation.clients import (
    Cohort,
    Membership,
    build_membership,
    build_user_view,
    build_view,
    draw_participants,
    empty_device_state,
    equalise_silo_accounts,
    expected_clients,
    grow_devices,
    store_part_state,
)
from tacita.federation.evaluation import (
    MetricSums,
    TrainedState,
    build_mask,
    build_rules,
    evaluate_block,
    evaluate_devices,
    selection_metric,
)
from tacita.federation.scoring import take_lists
from tacita.messages import CohortReply, Total, Upload, make_accumulator
from tacita.metrics import Evaluation
from tacita.round.device_state import OWN_ROWS, PARTS, DeviceState
from tacita.round.parts import SERVER, Part, find_deciding_part, overrides
from tacita.round.plan import Federation, Plan, parse_replay
from tacita.round.request import RequestBatch


@dataclass(frozen=True)
class RoundReply:
    """What came back from the devices in one exchange."""

    total: Total
    clients: int  # took part
    expected: float  # how many were to take part on average
    bytes_up: float = 0.0  # summed over clients
    notes: dict[str, float] = field(default_factory=dict)
    contributors: int = 0  # of these, whose upload weighs something and, as far as is known, holds something


class Devices(Protocol):
    """What a federated loop asks of the people's devices; the server's state and `down` are what travels down."""

    @property
    def max_request_rounds(self) -> int | None:
        """How many rounds of a block requests may take, beside its own; None: as many as they like."""
        ...

    def begin_block(self, plan: Any, server: ServerState, down: Broadcast) -> None: ...

    def has_data(self, plan: Any, server: ServerState) -> bool:
        """Whether somebody has data to learn from in this block."""
        ...

    def choose_clients(self, plan: Any, server: ServerState) -> Keys:
        """The keys of the clients that take part in the next round, for a server that has to know them."""
        ...

    def exchange(
        self, plan: Any, server: ServerState, down: Broadcast, question: str, chosen: Keys | None = None
    ) -> RoundReply:
        """Ask some clients, or everybody who takes part in the round by itself."""
        ...

    def apply_requests(self, plan: Any, server: ServerState, requests: RequestBatch) -> RequestBatch:
        """Let people's own devices do their part, where they have not done it already; what they then ask for."""
        ...

    def validate(self, plan: Any, server: ServerState, down: Broadcast) -> MetricSums: ...

    def keep_best(self, round: int) -> None:
        """The round that has just ended is the best of the block so far."""
        ...

    def evaluate_best(
        self, plan: Any, server: ServerState, down: Broadcast
    ) -> tuple[dict[str, Any], Evaluation | None]:
        """Test scores of the best round, and per user where that stays in one process."""
        ...

    def end_block(self, plan: Any, server: ServerState, down: Broadcast) -> None:
        """Keep what the parts need of the best round and go on from it."""
        ...


@dataclass
class LocalDevices:
    """Devices in this process, as a few arrays."""

    clients: DeviceState
    membership: Membership | None = None
    mask: Ragged | None = None  # what validation does not rank
    past: Ragged | None = None  # what everybody told in earlier blocks, where the model reads it
    draw_nonce: Callable[[Total], int] | None = (
        None  # gives each sum a number that its noise follows, too; None: the lab
    )

    @property
    def max_request_rounds(self) -> int | None:
        return None

    @property
    def best(self) -> DeviceState:
        """The devices as they were in the best round of the block."""
        return self.clients.snapshot

    def begin_block(self, fed: Federation, server: ServerState, down: Broadcast) -> None:
        """Room for new users; let the parts prepare."""
        block, clients = fed.stream.blocks[server.block], self.clients
        known = clients.n_users
        grow_devices(clients, fed, fed.stream.user_keys[: block.n_users])
        self.equalise_silos(fed, server)
        if fed.config.train.reset_private_each_block and block.index > 0:
            back = np.flatnonzero(block.train.counts()[:known] > 0)
            clients.put(back, {"private": fed.backbone.init_private(fed.draws, fed.stream.user_keys[back])})
        _run_block_hook(fed, server, clients, down, "begin_block", np.flatnonzero(block.train.counts() > 0))
        self.membership = self.mask = self.past = None
        self.clients.take_snapshot()

    def equalise_silos(self, fed: Federation, server: ServerState) -> None:
        """Where silos are clients, everybody in one holds what it has spent."""
        if fed.config.train.n_joint_silos:
            everybody = self._build_membership(fed, server, np.ones(self.clients.n_users, bool)).users
            equalise_silo_accounts(self.clients, fed, everybody.rows()[np.argsort(everybody.ids)].astype(np.int64))

    def current_membership(self, fed: Federation, server: ServerState) -> Membership:
        if self.membership is None:
            self.membership = self._build_membership(fed, server)
        return self.membership

    def _build_membership(self, fed: Federation, server: ServerState, among: Bools | None = None) -> Membership:
        block, silos = fed.stream.blocks[server.block], fed.config.train.n_joint_silos
        homes = None if fed.homes is None else fed.homes.silo
        return build_membership(block, fed.stream.user_keys, silos, fed.draws, among, homes)

    def has_data(self, fed: Federation, server: ServerState) -> bool:
        return len(self.current_membership(fed, server).active) > 0

    def round_participants(self, fed: Federation, server: ServerState) -> Longs:
        """The clients that take part in the round."""
        living = self.current_membership(fed, server)
        return draw_participants(living, fed.config.train.participation, fed.draws, server.block, server.round)

    def choose_clients(self, fed: Federation, server: ServerState) -> Keys:
        return self.current_membership(fed, server).keys[self.round_participants(fed, server)]

    def select_respondents(
        self, fed: Federation, server: ServerState, question: str, chosen: Keys | None
    ) -> tuple[Membership, Longs]:
        """Whom a question goes to: those of the round, or, where a part asks, everybody who ever had data to tell."""
        if fed.find_asker(question) is None:
            living = self.current_membership(fed, server)
            if chosen is None:
                return living, self.round_participants(fed, server)
            return living, np.intersect1d(living.find_clients(chosen), living.active)
        block = fed.stream.blocks[server.block]
        told = fed.stream.train_items(server.block)
        ever = np.zeros(block.n_users, bool)
        ever[: len(told)] = told.counts() > 0
        if chosen is not None and not fed.config.train.silos:  # who withdrew everything may still be asked for it
            ever |= np.isin(fed.stream.user_keys[: block.n_users], chosen)
        everybody = self._build_membership(fed, server, ever)
        return everybody, everybody.active if chosen is None else everybody.find_clients(chosen)

    def exchange(
        self, fed: Federation, server: ServerState, down: Broadcast, question: str, chosen: Keys | None = None
    ) -> RoundReply:
        """The answers of everybody asked, as one total; what devices keep is changed in place."""
        fields, again = fed.fields(server, question), parse_replay(question)
        then = server if again is None else replace(server, round=again.round)
        members, asked = self.select_respondents(fed, then, question, chosen)
        if fed.find_asker(question) is None:
            self._run_before_round(fed, then, members)
        others = [f"{part.name}." for part in fed.parts if part.party != SERVER]
        adder, counted = make_accumulator(fed.config.train.aggregator, fields, others), 0
        told: dict[str, list[AnyArray]] = {}
        if OWN_ROWS in self.clients.lists:
            self.clients.common[OWN_ROWS] = server.items
        whole = any(p.sends_whole_table(server.block) for p in fed.parts)
        for lo in range(0, len(asked), fed.chunk):
            view = replace(self._build_view(fed, then, down, members, asked[lo : lo + fed.chunk]), replay=again)
            if fed.find_asker(question) is None:
                view = self._prepare_view(fed, view)
            answer = fed.answer(view, question)
            self.clients.put(view.user, self._filter_state_update(answer))
            upload = self._encode_upload(fed, _with_state_update(view, answer.state_update), answer.upload, question)
            adder.add(upload, whole)
            counted += int(((upload.weight > 0) & (True if answer.contributes is None else answer.contributes)).sum())
            for name, values in answer.notes.items():
                told.setdefault(name, []).append(values)
        total, bytes_up = adder.total(), adder.n_bytes
        if fed.config.train.silos and not fed.config.train.n_joint_silos:  # a silo sends one sum of all its people
            bytes_up = fed.config.train.silos * sum(one.n_bytes for one in fields if one.seen == "summed")
        if self.draw_nonce is not None:
            total = replace(total, nonce=total.nonce ^ self.draw_nonce(total))
        for part in fed.encoders(question):
            total = fed.update_party_total(
                part.party, total, partial(part.encode_sum, fed.visible_state(part.party, then))
            )
        total = fed.learner.noised(then, total, question)
        expected = float(len(asked))
        if fed.find_asker(question) is None and np.array_equal(asked, self.round_participants(fed, then)):
            expected = expected_clients(members.active, fed.config.train.participation)
        return RoundReply(total, len(asked), expected, bytes_up, _mean_notes(told), counted)

    def _build_view(
        self, fed: Federation, server: ServerState, down: Broadcast, members: Membership, cohort: Longs
    ) -> CohortView:
        """What some clients see of themselves."""
        block, users = fed.stream.blocks[server.block], members.users.take(cohort)
        view = build_view(self.clients, server, block, Cohort(users, members.keys[cohort], fed.stream.user_keys), down)
        if fed.backbone.reads_history:
            if self.past is None:
                self.past = fed.stream.train_items(block.index - 1)
            view = replace(view, history=take_lists(self.past, users.ids))
        return view

    def _run_before_round(self, fed: Federation, server: ServerState, members: Membership) -> None:
        """What it costs those who could take part, whether they do or not, before anybody answers."""
        block, users = fed.stream.blocks[server.block], members.users.take(members.active).ids
        for part in fed.parts:
            if overrides(part, "before_round"):
                view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
                store_part_state(self.clients, view.user, {part.name: part.before_round(view)})

    def _prepare_view(self, fed: Federation, view: CohortView) -> CohortView:
        """The parts ready for the round, and what it learns from."""
        for part in fed.parts:
            if overrides(part, "begin_round"):
                renewed = part.begin_round(view)
                store_part_state(self.clients, view.user, {part.name: renewed})
                view = _with_part_state(view, part.name, renewed)
        chooser = find_deciding_part(fed.parts, "local_data")
        return chooser.local_data(view) if chooser else view

    def _filter_state_update(self, answer: CohortReply) -> StateUpdate:
        """What an answer wants to be kept; own rows only where users are scored with them."""
        kept = {
            name: v for name, v in answer.state_update.items() if name != OWN_ROWS or OWN_ROWS in self.clients.lists
        }
        for name in kept.keys() - self.clients.arrays.keys() - self.clients.lists.keys():
            raise TacitaError(f"'{name}' is to be kept on devices, and no `device_arrays` makes room for it.")
        return kept

    def _encode_upload(self, fed: Federation, view: CohortView, upload: Upload, question: str) -> Upload:
        """Uploads as they leave: weighed, then changed by each part, which notes what it did on the device first."""
        for part in fed.parts if fed.find_asker(question) is None else ():
            factor = part.weight(view, upload) if overrides(part, "weight") else None
            if factor is not None:
                upload = replace(upload, weight=upload.weight * np.clip(factor, 0.0, part.most_weight))
        for part in fed.encoders(question):
            upload, noted = part.encode(view, upload)
            if noted:
                store_part_state(self.clients, view.user, {part.name: noted})
        return upload

    def apply_requests(self, fed: Federation, server: ServerState, requests: RequestBatch) -> RequestBatch:
        block, keys = fed.stream.blocks[server.block], fed.stream.user_keys[: self.clients.n_users]
        order = np.argsort(keys)
        at = np.minimum(np.searchsorted(keys, requests.senders, sorter=order), max(0, len(keys) - 1))
        known = keys[order[at]] == requests.senders if len(keys) else np.zeros(len(at), bool)
        users, others = order[at[known]], requests.take(np.flatnonzero(~known))
        requests = requests.take(np.flatnonzero(known))
        if requests.kind == "forget":  # who names nothing asks for nothing
            some = np.flatnonzero(requests.items.counts() > 0)
            users, requests = users[some], requests.take(some)
        known = self._shared_items(users)
        for part in fed.parts if len(users) else ():
            if overrides(part, "server_knows"):
                view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
                more = part.server_knows(view)
                known = known if more is None else known.join_rows(Ragged(more.ptr, more.ids))
        for part in fed.parts if len(users) else ():
            if overrides(part, "handle_many_here"):
                view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
                store_part_state(self.clients, view.user, {part.name: part.handle_many_here(view, requests)})
            elif overrides(part, "handle_here"):
                for n, request in enumerate(requests.to_requests()):
                    view = build_user_view(
                        self.clients, server, block, users[n : n + 1], fed.stream.user_keys, Broadcast()
                    )
                    store_part_state(self.clients, view.user, {part.name: part.handle_here(view, request)})
        if fed.learner.takes_back and len(users):
            view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
            store_part_state(self.clients, view.user, {fed.learner.name: fed.learner.handle_many_here(view, requests)})
        for part in fed.parts if len(users) else ():
            if overrides(part, "encode_request"):
                view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
                requests, noted = part.encode_request(view, requests)
                store_part_state(self.clients, view.user, {part.name: noted})
        if requests.kind == "forget" and not any(overrides(part, "encode_request") for part in fed.parts):
            stays = known.holds(requests.items.rows(), requests.items.ids)  # the rest is nobody else's business
            requests = replace(requests, items=requests.items.filter_entries(stays))
        return requests.concat(others)

    def _shared_items(self, users: Longs) -> Ragged:
        """What these people share with the server."""
        found = Ragged.empty(len(users))
        for name in self.clients.lists:
            if name.endswith("/shared"):
                one = self.clients.read_list(name, users)
                found = found.join_rows(Ragged(one.ptr, one.ids))
        return found

    def enrol(self, fed: Federation, server: ServerState, part: Part) -> RequestBatch | None:
        """What those with data in the block choose as it begins; the price of one view of all of them."""
        block = fed.stream.blocks[server.block]
        users = np.flatnonzero(block.train.counts() > 0)
        view = build_user_view(self.clients, server, block, users, fed.stream.user_keys, Broadcast())
        kept, asked = part.enrol(view)
        store_part_state(self.clients, view.user, {part.name: kept})
        return asked

    def restart(self, fed: Federation) -> None:
        """Nobody has learnt anything, and nobody is there yet."""
        self.clients = empty_local_devices(fed).clients
        self.membership = self.mask = self.past = None

    def restore_persistent(self, fed: Federation, before: DeviceState, known: int) -> None:
        """What lasts, as it was before a restart, for those who came after the first `known`."""
        users = np.arange(known, min(self.clients.n_users, before.n_users))
        for name in (f"{PARTS}{part.name}/{one}" for part in fed.parts for one in part.lasting):
            if name in self.clients.lists:
                self.clients.lists[name].put(users, *before.lists[name].take(users))
            elif name in self.clients.arrays:
                self.clients.arrays[name][users] = before.arrays[name][users]

    def validate(self, fed: Federation, server: ServerState, down: Broadcast) -> MetricSums:
        block = fed.stream.blocks[server.block]
        if len(block.valid.ids) == 0:
            return {}
        if self.mask is None:
            self.mask = build_mask(fed, block, "valid", fed.config.evaluate.mask)
        metric, k = selection_metric(fed.config)
        learned, rules = TrainedState(server, self.clients, down), build_rules(fed, block, [metric], [k])
        return evaluate_devices(fed, learned, block, "valid", self.mask, rules).sums()

    def keep_best(self, round: int) -> None:
        self.clients.take_snapshot()

    def evaluate_best(self, fed: Federation, server: ServerState, down: Broadcast) -> tuple[dict[str, Any], Evaluation]:
        """Scores of the best round on this block's test and on every earlier block's."""
        return evaluate_block(fed, server, self.best, down)

    def end_block(self, fed: Federation, server: ServerState, down: Broadcast) -> None:
        _run_block_hook(fed, server, self.best, down, "end_block", np.flatnonzero(self.best.took_part))
        last = fed.config.train.resume_from == "last"
        self.clients = self.clients.with_parts_of(self.best) if last else self.best
        self.clients.take_snapshot()


def empty_local_devices(plan: Plan) -> LocalDevices:
    """No devices yet."""
    clients = empty_device_state(plan.backbone, own_rows=plan.config.evaluate.item_table == "personal")
    clients.take_snapshot()
    return LocalDevices(clients)


def _with_part_state(view: CohortView, name: str, renewed: Mapping[str, AnyArray | Ragged]) -> CohortView:
    """The same view after a part kept something else."""
    arrays = {k: v for k, v in renewed.items() if not isinstance(v, Ragged)}
    lists = {k: v for k, v in renewed.items() if isinstance(v, Ragged)}
    return replace(
        view,
        parts={**view.parts, name: {**view.parts.get(name, {}), **arrays}},
        lists={**view.lists, name: update_lists(view.lists.get(name, {}), lists)},
    )


def _with_state_update(view: CohortView, kept: StateUpdate) -> CohortView:
    """The same view after an answer kept something else."""
    for name, renewed in nest_parts(kept, PARTS).items():
        view = _with_part_state(view, name, renewed)
    return view


def _mean_notes(told: dict[str, list[AnyArray]]) -> dict[str, float]:
    """Mean over the clients that had something to say."""
    joined = {name: np.concatenate(values) for name, values in told.items()}
    return {name: float(np.nanmean(v)) for name, v in joined.items() if not np.isnan(v).all()}


def _run_block_hook(
    fed: Federation, server: ServerState, clients: DeviceState, down: Broadcast, hook: str, users: Longs
) -> None:
    """Call a block hook on the devices of these users."""
    block, asked = fed.stream.blocks[server.block], [p for p in fed.parts if overrides(p, hook)]
    for lo in range(0, len(users) if asked else 0, fed.chunk):
        some = users[lo : lo + fed.chunk].astype(np.int32)
        view = build_user_view(clients, server, block, some, fed.stream.user_keys, down)
        for part in asked:
            store_part_state(clients, some, {part.name: getattr(part, hook)(view)})
