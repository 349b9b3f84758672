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

from tacita.core.errors import TacitaError
from tacita.core.files import nested
from tacita.core.kept import lists_after
from tacita.core.types import AnyArray, Bools, CohortView, Down, Held, Keys, Longs, Ragged, Requests, ServerState
from tacita.federation.clients import (
    Members,
    Who,
    expected_clients,
    grow,
    hold_alike,
    members_of,
    no_devices,
    participants,
    put_parts,
    users_view,
    view_of,
)
from tacita.federation.measuring import (
    Learned,
    Sums,
    block_scores,
    evaluate_devices,
    known_items,
    rules_of,
    selecting_metric,
)
from tacita.federation.scoring import rows_of
from tacita.fields import Answer, Total, Upload, adding
from tacita.metrics import Evaluation
from tacita.round.device_state import OWN, PARTS, DeviceState
from tacita.round.parts import SERVER, Part, overrides, owner_of
from tacita.round.plan import Federation, Plan, again_of


@dataclass(frozen=True)
class Told:
    """What came back from the devices in one exchange."""

    total: Total
    clients: int  # took part
    expected: float  # how many were to take part on average
    bytes_up: float = 0.0  # summed over clients
    notes: dict[str, float] = field(default_factory=dict)
    counted: int = 0  # of these, whose upload weighs something and, as far as is known, holds something


class Devices(Protocol):
    """What a federated loop asks of the people's devices; the server's state and `down` are what travels down."""

    @property
    def most_played(self) -> int | None:
        """How many rounds of a block requests may take, beside its own; None: as many as they like."""
        ...

    def begin_block(self, plan: Any, server: ServerState, down: Down) -> None: ...

    def anybody(self, plan: Any, server: ServerState) -> bool:
        """Whether somebody has data to learn from in this block."""
        ...

    def choose(self, plan: Any, server: ServerState) -> Keys:
        """The keys of the clients that take part in the next round, for a server that has to know them."""
        ...

    def exchange(self, plan: Any, server: ServerState, down: Down, question: str, chosen: Keys | None = None) -> Told:
        """Ask some clients, or everybody who takes part in the round by itself."""
        ...

    def request(self, plan: Any, server: ServerState, requests: Requests) -> Requests:
        """Let people's own devices do their part, where they have not done it already; what they then ask for."""
        ...

    def validate(self, plan: Any, server: ServerState, down: Down) -> Sums: ...

    def keep_best(self, round: int) -> None:
        """The round that has just ended is the best of the block so far."""
        ...

    def result(self, plan: Any, server: ServerState, down: Down) -> tuple[dict[str, Any], Evaluation | None]:
        """Test scores of the best round, and per user where that stays in one process."""
        ...

    def end_block(self, plan: Any, server: ServerState, down: Down) -> None:
        """Keep what the parts need of the best round and go on from it."""
        ...


@dataclass
class Here:
    """Devices in this process, as a few arrays."""

    clients: DeviceState
    members: Members | None = None
    mask: Ragged | None = None  # what validation does not rank
    past: Ragged | None = None  # what everybody told in earlier blocks, where the model reads it
    seal: Callable[[Total], int] | None = None  # gives each sum a number that its noise follows, too; None: the lab

    @property
    def most_played(self) -> int | None:
        return None

    @property
    def best(self) -> DeviceState:
        """The devices as they were in the best round of the block."""
        return self.clients.kept

    def begin_block(self, fed: Federation, server: ServerState, down: Down) -> None:
        """Room for new users; let the parts prepare."""
        block, clients = fed.stream.blocks[server.block], self.clients
        known = clients.n_users
        grow(clients, fed, fed.stream.user_keys[: block.n_users])
        self.level(fed, server)
        if fed.config.train.reset_private_each_block and block.index > 0:
            back = np.flatnonzero(block.train.counts()[:known] > 0)
            clients.put(back, {"private": fed.backbone.init_private(fed.draws, fed.stream.user_keys[back])})
        _on_devices(fed, server, clients, down, "begin_block", np.flatnonzero(block.train.counts() > 0))
        self.members = self.mask = self.past = None
        self.clients.keep()

    def level(self, fed: Federation, server: ServerState) -> None:
        """Where silos are clients, everybody in one holds what it has spent."""
        if fed.config.train.joint:
            everybody = self._members(fed, server, np.ones(self.clients.n_users, bool)).users
            hold_alike(self.clients, fed, everybody.rows()[np.argsort(everybody.ids)].astype(np.int64))

    def living(self, fed: Federation, server: ServerState) -> Members:
        if self.members is None:
            self.members = self._members(fed, server)
        return self.members

    def _members(self, fed: Federation, server: ServerState, among: Bools | None = None) -> Members:
        block, silos = fed.stream.blocks[server.block], fed.config.train.joint
        homes = None if fed.homes is None else fed.homes.silo
        return members_of(block, fed.stream.user_keys, silos, fed.draws, among, homes)

    def anybody(self, fed: Federation, server: ServerState) -> bool:
        return len(self.living(fed, server).active) > 0

    def taking_part(self, fed: Federation, server: ServerState) -> Longs:
        """The clients that take part in the round."""
        living = self.living(fed, server)
        return participants(living, fed.config.train.participation, fed.draws, server.block, server.round)

    def choose(self, fed: Federation, server: ServerState) -> Keys:
        return self.living(fed, server).keys[self.taking_part(fed, server)]

    def asked(self, fed: Federation, server: ServerState, question: str, chosen: Keys | None) -> tuple[Members, Longs]:
        """Whom a question goes to: those of the round, or, where a part asks, everybody who ever had data to tell."""
        if fed.asker(question) is None:
            living = self.living(fed, server)
            if chosen is None:
                return living, self.taking_part(fed, server)
            return living, np.intersect1d(living.find(chosen), living.active)
        block = fed.stream.blocks[server.block]
        told = fed.stream.trained(server.block)
        ever = np.zeros(block.n_users, bool)
        ever[: len(told)] = told.counts() > 0
        if chosen is not None and not fed.config.train.silos:  # who withdrew everything may still be asked for it
            ever |= np.isin(fed.stream.user_keys[: block.n_users], chosen)
        everybody = self._members(fed, server, ever)
        return everybody, everybody.active if chosen is None else everybody.find(chosen)

    def exchange(
        self, fed: Federation, server: ServerState, down: Down, question: str, chosen: Keys | None = None
    ) -> Told:
        """The answers of everybody asked, as one total; what devices keep is changed in place."""
        fields, again = fed.fields(server, question), again_of(question)
        then = server if again is None else replace(server, round=again.round)
        members, asked = self.asked(fed, then, question, chosen)
        if fed.asker(question) is None:
            self._before(fed, then, members)
        others = [f"{part.name}." for part in fed.parts if part.party != SERVER]
        adder, counted = adding(fed.config.train.aggregator, fields, others), 0
        told: dict[str, list[AnyArray]] = {}
        if OWN in self.clients.lists:
            self.clients.common[OWN] = server.items
        whole = any(p.sends_whole_table(server.block) for p in fed.parts)
        for lo in range(0, len(asked), fed.chunk):
            view = replace(self._view(fed, then, down, members, asked[lo : lo + fed.chunk]), again=again)
            if fed.asker(question) is None:
                view = self._prepared(fed, view)
            answer = fed.answer(view, question)
            self.clients.put(view.user, self._room_for(answer))
            upload = self._encoded(fed, _having(view, answer.kept), answer.upload, question)
            adder.add(upload, whole)
            counted += int(((upload.weight > 0) & (True if answer.says is None else answer.says)).sum())
            for name, values in answer.notes.items():
                told.setdefault(name, []).append(values)
        total, bytes_up = adder.total(), adder.n_bytes
        if fed.config.train.silos and not fed.config.train.joint:  # a silo sends one sum of all its people
            bytes_up = fed.config.train.silos * sum(one.n_bytes for one in fields if one.seen == "summed")
        if self.seal is not None:
            total = replace(total, nonce=total.nonce ^ self.seal(total))
        for part in fed.transforming(question):
            total = fed.changed(part.party, total, partial(part.encode_sum, fed.seen_by(part.party, then)))
        total = fed.learner.noised(then, total, question)
        expected = float(len(asked))
        if fed.asker(question) is None and np.array_equal(asked, self.taking_part(fed, then)):
            expected = expected_clients(members.active, fed.config.train.participation)
        return Told(total, len(asked), expected, bytes_up, _means(told), counted)

    def _view(self, fed: Federation, server: ServerState, down: Down, members: Members, cohort: Longs) -> CohortView:
        """What some clients see of themselves."""
        block, users = fed.stream.blocks[server.block], members.users.take(cohort)
        view = view_of(self.clients, server, block, Who(users, members.keys[cohort], fed.stream.user_keys), down)
        if fed.backbone.reads_history:
            if self.past is None:
                self.past = fed.stream.trained(block.index - 1)
            view = replace(view, history=rows_of(self.past, users.ids))
        return view

    def _before(self, fed: Federation, server: ServerState, members: Members) -> None:
        """What it costs those who could take part, whether they do or not, before anybody answers."""
        block, users = fed.stream.blocks[server.block], members.users.take(members.active).ids
        for part in fed.parts:
            if overrides(part, "before_round"):
                view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
                put_parts(self.clients, view.user, {part.name: part.before_round(view)})

    def _prepared(self, fed: Federation, view: CohortView) -> CohortView:
        """The parts ready for the round, and what it learns from."""
        for part in fed.parts:
            if overrides(part, "begin_round"):
                renewed = part.begin_round(view)
                put_parts(self.clients, view.user, {part.name: renewed})
                view = _with(view, part.name, renewed)
        chooser = owner_of(fed.parts, "local_data")
        return chooser.local_data(view) if chooser else view

    def _room_for(self, answer: Answer) -> Held:
        """What an answer wants to be kept; own rows only where users are scored with them."""
        kept = {name: v for name, v in answer.kept.items() if name != OWN or OWN in self.clients.lists}
        for name in kept.keys() - self.clients.arrays.keys() - self.clients.lists.keys():
            raise TacitaError(f"'{name}' is to be kept on devices, and no `device_arrays` makes room for it.")
        return kept

    def _encoded(self, fed: Federation, view: CohortView, upload: Upload, question: str) -> Upload:
        """Uploads as they leave: weighed, then changed by each part, which notes what it did on the device first."""
        for part in fed.parts if fed.asker(question) is None else ():
            factor = part.weight(view, upload) if overrides(part, "weight") else None
            if factor is not None:
                upload = replace(upload, weight=upload.weight * np.clip(factor, 0.0, part.most_weight))
        for part in fed.transforming(question):
            upload, noted = part.encode(view, upload)
            if noted:
                put_parts(self.clients, view.user, {part.name: noted})
        return upload

    def request(self, fed: Federation, server: ServerState, requests: Requests) -> Requests:
        block, keys = fed.stream.blocks[server.block], fed.stream.user_keys[: self.clients.n_users]
        order = np.argsort(keys)
        at = np.minimum(np.searchsorted(keys, requests.senders, sorter=order), max(0, len(keys) - 1))
        known = keys[order[at]] == requests.senders if len(keys) else np.zeros(len(at), bool)
        users, others = order[at[known]], requests.take(np.flatnonzero(~known))
        requests = requests.take(np.flatnonzero(known))
        if requests.kind == "forget":  # who names nothing asks for nothing
            some = np.flatnonzero(requests.items.counts() > 0)
            users, requests = users[some], requests.take(some)
        known = self._shared(users)
        for part in fed.parts if len(users) else ():
            if overrides(part, "server_knows"):
                view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
                more = part.server_knows(view)
                known = known if more is None else known.joined(Ragged(more.ptr, more.ids))
        for part in fed.parts if len(users) else ():
            if overrides(part, "handle_many_here"):
                view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
                put_parts(self.clients, view.user, {part.name: part.handle_many_here(view, requests)})
            elif overrides(part, "handle_here"):
                for n, request in enumerate(requests.each()):
                    view = users_view(self.clients, server, block, users[n : n + 1], fed.stream.user_keys, Down())
                    put_parts(self.clients, view.user, {part.name: part.handle_here(view, request)})
        if fed.learner.takes_back and len(users):
            view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
            put_parts(self.clients, view.user, {fed.learner.name: fed.learner.handle_many_here(view, requests)})
        for part in fed.parts if len(users) else ():
            if overrides(part, "encode_request"):
                view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
                requests, noted = part.encode_request(view, requests)
                put_parts(self.clients, view.user, {part.name: noted})
        if requests.kind == "forget" and not any(overrides(part, "encode_request") for part in fed.parts):
            stays = known.holds(requests.items.rows(), requests.items.ids)  # the rest is nobody else's business
            requests = replace(requests, items=requests.items.where(stays))
        return requests.joined(others)

    def _shared(self, users: Longs) -> Ragged:
        """What these people share with the server."""
        found = Ragged.empty(len(users))
        for name in self.clients.lists:
            if name.endswith("/shared"):
                one = self.clients.list_of(name, users)
                found = found.joined(Ragged(one.ptr, one.ids))
        return found

    def enrol(self, fed: Federation, server: ServerState, part: Part) -> Requests | None:
        """What those with data in the block choose as it begins; the price of one view of all of them."""
        block = fed.stream.blocks[server.block]
        users = np.flatnonzero(block.train.counts() > 0)
        view = users_view(self.clients, server, block, users, fed.stream.user_keys, Down())
        kept, asked = part.enrol(view)
        put_parts(self.clients, view.user, {part.name: kept})
        return asked

    def restart(self, fed: Federation) -> None:
        """Nobody has learnt anything, and nobody is there yet."""
        self.clients = nobody_here(fed).clients
        self.members = self.mask = self.past = None

    def restore(self, fed: Federation, before: DeviceState, known: int) -> None:
        """What lasts, as it was before a restart, for those who came after the first `known`."""
        users = np.arange(known, min(self.clients.n_users, before.n_users))
        for name in (f"{PARTS}{part.name}/{one}" for part in fed.parts for one in part.lasting):
            if name in self.clients.lists:
                self.clients.lists[name].put(users, *before.lists[name].take(users))
            elif name in self.clients.arrays:
                self.clients.arrays[name][users] = before.arrays[name][users]

    def validate(self, fed: Federation, server: ServerState, down: Down) -> Sums:
        block = fed.stream.blocks[server.block]
        if len(block.valid.ids) == 0:
            return {}
        if self.mask is None:
            self.mask = known_items(fed, block, "valid", fed.config.evaluate.mask)
        metric, k = selecting_metric(fed.config)
        learned, rules = Learned(server, self.clients, down), rules_of(fed, block, [metric], [k])
        return evaluate_devices(fed, learned, block, "valid", self.mask, rules).sums()

    def keep_best(self, round: int) -> None:
        self.clients.keep()

    def result(self, fed: Federation, server: ServerState, down: Down) -> tuple[dict[str, Any], Evaluation]:
        """Scores of the best round on this block's test and on every earlier block's."""
        return block_scores(fed, server, self.best, down)

    def end_block(self, fed: Federation, server: ServerState, down: Down) -> None:
        _on_devices(fed, server, self.best, down, "end_block", np.flatnonzero(self.best.took_part))
        last = fed.config.train.resume_from == "last"
        self.clients = self.clients.with_parts_of(self.best) if last else self.best
        self.clients.keep()


def nobody_here(plan: Plan) -> Here:
    """No devices yet."""
    clients = no_devices(plan.backbone, own_rows=plan.config.evaluate.item_table == "personal")
    clients.keep()
    return Here(clients)


def _with(view: CohortView, name: str, renewed: Mapping[str, AnyArray | Ragged]) -> CohortView:
    """The same view after a part kept something else."""
    arrays = {k: v for k, v in renewed.items() if not isinstance(v, Ragged)}
    lists = {k: v for k, v in renewed.items() if isinstance(v, Ragged)}
    return replace(
        view,
        parts={**view.parts, name: {**view.parts.get(name, {}), **arrays}},
        lists={**view.lists, name: lists_after(view.lists.get(name, {}), lists)},
    )


def _having(view: CohortView, kept: Held) -> CohortView:
    """The same view after an answer kept something else."""
    for name, renewed in nested(kept, PARTS).items():
        view = _with(view, name, renewed)
    return view


def _means(told: dict[str, list[AnyArray]]) -> dict[str, float]:
    """Mean over the clients that had something to say."""
    joined = {name: np.concatenate(values) for name, values in told.items()}
    return {name: float(np.nanmean(v)) for name, v in joined.items() if not np.isnan(v).all()}


def _on_devices(
    fed: Federation, server: ServerState, clients: DeviceState, down: Down, hook: str, users: Longs
) -> None:
    """Call a block hook on the devices of these users."""
    block, asked = fed.stream.blocks[server.block], [p for p in fed.parts if overrides(p, hook)]
    for lo in range(0, len(users) if asked else 0, fed.chunk):
        some = users[lo : lo + fed.chunk].astype(np.int32)
        view = users_view(clients, server, block, some, fed.stream.user_keys, down)
        for part in asked:
            put_parts(clients, some, {part.name: getattr(part, hook)(view)})
