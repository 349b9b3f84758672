"""The plan of a run: what everybody may know of it, who answers which question, and what travels down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tacita.core.config import RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, BlockStream, Broadcast, Floats, Keys, Ragged, ServerState
from tacita.data.silos import SiloAssignment
from tacita.messages import Spec, Total
from tacita.models.base import Backbone
from tacita.models.scorer import Scorer, require_scorer
from tacita.privacy.ledger import Ledger
from tacita.round.broadcast import Audience, PartBroadcast, PerClientLists, count_list_bytes
from tacita.round.capabilities import Unlearning
from tacita.round.clashes import check_single_owners
from tacita.round.device_state import PARTS
from tacita.round.fields import PartFields
from tacita.round.learner import Learner, build_learner, find_ledger
from tacita.round.part import ALL_HOOKS, Part, RunContext, implements
from tacita.round.question import Question
from tacita.round.release_rules import check_summed, covers_mean
from tacita.round.serving import ServingField
from tacita.round.state import Role, StateSpec

RETRAINING_OVER_BUDGET = (
    "to train again, everybody would tell all of it once more, beyond the budget; take back what was told instead, "
    "without --again and without part 'retrain'."
)


@dataclass(frozen=True)
class Plan:
    """What everybody may know of a run: model, learner, parts, settings, public draws. It holds nobody's history."""

    backbone: Backbone
    parts: tuple[Part, ...]
    config: RunConfig
    draws: Draws
    chunk: int = 256  # clients that answer together; changes speed and memory, never a number
    learner: Learner = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        context = RunContext(self.backbone, self.draws, self.config.train)
        object.__setattr__(self, "learner", build_learner(context, self.parts))
        check_single_owners(self.parts)

    # what the parts can do; asked once, when it is first needed

    @cached_property
    def _parts_by_hook(self) -> dict[str, tuple[Part, ...]]:
        by_hook = {}
        for hook in ALL_HOOKS:
            by_hook[hook] = tuple(part for part in self.parts if implements(part, hook))
        return by_hook

    @cached_property
    def _declared_fields(self) -> dict[tuple[int, int], dict[str, PartFields]]:
        """By the size of the catalogue and the block; filled when they are first needed."""
        return {}

    def implementing(self, hook: str) -> tuple[Part, ...]:
        """The parts that override a hook, in their order."""
        return self._parts_by_hook[hook]

    @cached_property
    def preparing_parts(self) -> tuple[Part, ...]:
        return self.implementing("prepare")

    @cached_property
    def weighing_parts(self) -> tuple[Part, ...]:
        return self.implementing("weigh")

    @cached_property
    def charging_parts(self) -> tuple[Part, ...]:
        """The parts that charge users who could take part, whether they do or not."""
        return self.implementing("charge_eligible")

    @cached_property
    def serving_parts(self) -> tuple[Part, ...]:
        return self.implementing("serve")

    def find_serving_owner(self, decision: ServingField) -> Part | None:
        """The part that decides something of serving; None: the run's own model does."""
        return next((part for part in self.parts if decision in part.serves), None)

    @cached_property
    def changes_uploads(self) -> bool:
        """Whether something happens to uploads between training and the sum."""
        encodes = self.implementing("encode") or self.implementing("noise_sum")
        return bool(self.weighing_parts or encodes)

    @cached_property
    def identifies_clients(self) -> bool:
        """Whether the server has to know who is who: it writes to single clients."""
        return any(part.addresses_clients for part in self.parts)

    @cached_property
    def unlearners(self) -> dict[str, Unlearning]:
        """Who carries out what users ask for: parts in their order, then the learner."""
        capable = {part.name: part.unlearning for part in self.parts}
        capable[self.learner.name] = self.learner.unlearning
        return {name: unlearning for name, unlearning in capable.items() if unlearning is not None}

    @cached_property
    def forgetting_parts(self) -> tuple[Part, ...]:
        """The parts that take something out of the model when users withdraw it."""
        candidates = self.implementing("on_server")
        return tuple(part for part in candidates if part.unlearning is not None and part.unlearning.scope)

    @property
    def scorer(self) -> Scorer:
        """The model of a run that trains item rows."""
        return require_scorer(self.backbone)

    @cached_property
    def part_ledgers(self) -> dict[str, Ledger]:
        """What counts the releases of parts, by part."""
        ledgers = {part.name: find_ledger(part) for part in self.parts}
        return {name: ledger for name, ledger in ledgers.items() if ledger is not None}

    @cached_property
    def public_denominator(self) -> float | None:
        """What noised sums are divided by, where one noise covers a mean; None: no noise does.

        Parts on the server divide by a sum's weight, too: the size of what they make would tell how many there are.
        """
        has_noised_mean = any(covers_mean(part) for part in self.parts)
        return self.config.train.denominator if has_noised_mean else None

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """What counts the releases of this run; none: nothing is counted, and there is no epsilon."""
        ledgers = [*self.part_ledgers.values(), self.learner.ledger()]
        return tuple(ledger for ledger in ledgers if ledger is not None)

    # state

    def list_state_specs(self, n_users: int = 0) -> dict[str, tuple[StateSpec, ...]]:
        """Part or learner -> what it keeps."""
        specs = {part.name: tuple(part.state(n_users)) for part in self.parts}
        specs[self.learner.name] = tuple(self.learner.state(n_users))
        return specs

    @cached_property
    def persistent_names(self) -> frozenset[str]:
        """What of the devices' state no going back to an earlier round undoes, by its full name."""
        return self.learner.persistent_names | frozenset(self.persistent_part_names)

    @cached_property
    def persistent_part_names(self) -> tuple[str, ...]:
        """The same of the parts alone, in their order."""
        names = []
        for part in self.parts:
            for spec in part.state(0):
                if spec.persistent and spec.on_device:
                    names.append(f"{PARTS}{part.name}/{spec.name}")
        return tuple(names)

    def list_state_names(self, role: Role) -> tuple[str, ...]:
        """What devices keep in a role, by its full name."""
        names = []
        for owner, specs in self.list_state_specs().items():
            for spec in specs:
                if spec.role is role:
                    names.append(f"{PARTS}{owner}/{spec.name}")
        return tuple(names)

    # questions and answers

    def find_question_owner(self, question: Question) -> Unlearning | None:
        """Whose own question it is; None: the learner asks it in a round."""
        if question.owner is None:
            return None
        if question.owner not in self.unlearners:
            raise TacitaError(f"no part of this run asks '{question.name[:100]}'.")
        return self.unlearners[question.owner]

    def list_encoders(self, question: Question, hook: str = "encode") -> tuple[Part, ...]:
        """The parts that encode answers, or decode them: of another part's question only who covers all releases."""
        parts = self._parts_by_hook[hook]
        if question.owner is None:
            return parts
        return tuple(part for part in parts if part.name == question.owner or _covers_answers(part))

    def fields(self, server: ServerState, question: Question) -> tuple[Spec, ...]:
        """What may be in the answer to a question: of whose question it is, and what the encoding parts add."""
        declared = self.declared_fields(len(server.items), server.block)
        encoders = self.list_encoders(question, "fields")
        owner = self.find_question_owner(question)
        if owner is None:
            specs = list(self.learner.fields(server, question.kind))
        else:
            specs = list(owner.question_fields(server, question.kind))
        for part in encoders:
            if part.name != question.owner:
                specs += declared[part.name].extra
        for part in encoders:
            if part.name in self.part_ledgers:
                check_summed(part, specs)
            after_encoding = declared[part.name].after_encoding
            if after_encoding is not None:
                specs = [after_encoding(spec) for spec in specs]
        return tuple(specs)

    def declared_fields(self, n_items: int, block: int = 0) -> dict[str, PartFields]:
        """What travels because of each part, by its name; parts are asked once for a catalogue and block."""
        key = (n_items, block)
        if key not in self._declared_fields:
            self._declared_fields[key] = {part.name: _declare_fields(part, n_items, block) for part in self.parts}
        return self._declared_fields[key]

    def sends_whole_table(self, server: ServerState) -> bool:
        """Whether every client sends its whole table, not only the rows it touched."""
        declared = self.declared_fields(len(server.items), server.block)
        return any(fields.whole_table for fields in declared.values())

    def count_upload_bytes(self, specs: Sequence[Spec], n_bytes: float) -> float:
        """What clients sent; a silo whose users train apart sends one sum of all of them."""
        train = self.config.train
        if train.silos and not train.n_joint_silos:
            bytes_per_silo = sum(spec.n_bytes for spec in specs if spec.seen == "summed")
            return train.silos * bytes_per_silo
        return n_bytes

    def noise_sum(self, server: ServerState, total: Total, question: Question) -> Total:
        """The sum with the noise of the parts, then of the learner."""
        for part in self.list_encoders(question, "noise_sum"):
            assert part.privacy is not None
            total = self._change_total(part, server, total, part.privacy.noise_sum)
        return self.learner.noise_sum(server, total, question)

    def decode(self, server: ServerState, total: Total, question: Question) -> Total:
        """What came back, as the parts that encoded it read it."""
        if self.part_ledgers and question.owner is None and total.n_clients:
            total = replace(total, weight=self.public_denominator or total.weight)
        for part in reversed(self.list_encoders(question, "decode")):
            total = self._change_total(part, server, total, part.decode)
        return total

    # the server's side

    def learn_from_total(self, server: ServerState, total: Total, question: Question, expected: float) -> ServerState:
        """What the learner makes of a total."""
        visible = self.restrict_state_to_part(None, server)
        visible_total = self.restrict_total_to_part(None, total)
        learned = self.learner.learn_from_total(visible, visible_total, question.kind, expected)
        return self.merge_state(None, server, learned)

    def server_step(self, before: ServerState, server: ServerState, total: Total | None) -> ServerState:
        """What the parts make of the aggregated state; without a total nobody was asked, and the learner goes on."""
        if total is None:
            learned = self.learner.continue_without_question(self.restrict_state_to_part(None, server))
            return self.merge_state(None, server, learned)
        for part in self._parts_by_hook["server_step"]:
            visible_before = self.restrict_state_to_part(part, before)
            visible = self.restrict_state_to_part(part, server)
            changed = part.server_step(visible_before, visible, self.restrict_total_to_part(part, total))
            server = self.merge_state(part, server, changed)
        return server

    def start_block(self, server: ServerState) -> ServerState:
        for part in self.parts:
            visible = self.restrict_state_to_part(part, server)
            server = server.with_part(part.name, part.server_block_start(visible))
        return server

    def end_block(self, server: ServerState) -> ServerState:
        for part in self.parts:
            visible = self.restrict_state_to_part(part, server)
            server = server.with_part(part.name, part.server_block_end(visible))
        return server

    def metrics(self, server: ServerState) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for part in self._parts_by_hook["metrics"]:
            numbers |= part.metrics(self.restrict_state_to_part(part, server))
        return numbers

    def promises(self, server: ServerState) -> dict[str, Any]:
        """What the parts, and what travels, promise of users' privacy, by part and model."""
        promises: dict[str, Any] = {}
        for part in self.parts:
            if part.privacy is not None:
                visible = self.restrict_state_to_part(part, server)
                promises[part.name] = dict(part.privacy.promises(visible))
            if part.name in self.part_ledgers:
                promises[part.name]["covers_mean"] = covers_mean(part)
        promises[self.backbone.name] = self.learner.promises(server)
        return {name: promise for name, promise in promises.items() if promise}

    # what travels down

    def broadcast_round(self, server: ServerState, chosen: Keys | None) -> tuple[ServerState, Broadcast]:
        """What the clients of a round get. Writing to single clients may change what the server keeps of them."""
        messages: dict[str, PartBroadcast] = {}
        for part in self._parts_by_hook["broadcast"]:
            assert chosen is not None or not part.addresses_clients, "who writes to single clients has to know them"
            visible = self.restrict_state_to_part(part, server)
            message = part.broadcast(visible, Audience("round", chosen))
            messages[part.name] = message
            if message.server is not None:
                server = self.merge_state(part, server, message.server)
        common = self._collect_common(messages)
        n_bytes = self._count_common_bytes(server, messages)
        lists = {}
        for name, message in messages.items():
            if message.per_client is not None:
                lists[name] = message.per_client
        if chosen is None or not lists:
            return server, Broadcast(common, n_bytes=n_bytes)
        total_list_bytes = sum(count_list_bytes(part_lists) for part_lists in lists.values())
        n_bytes += total_list_bytes / max(1, len(chosen))
        select = PerClientLists(chosen, lists).select_lists
        return server, Broadcast(common, select, n_bytes, decode_lists=self.decode_lists)

    def broadcast_serving(self, server: ServerState) -> Broadcast:
        """What devices get to begin a block, to be validated, tested or served."""
        sending = self._parts_by_hook["broadcast"]
        messages = {part.name: self._serve_clients(part, server, None) for part in sending}
        n_bytes = self._count_common_bytes(server, messages)
        common = self._collect_common(messages)
        writing = [part for part in self.parts if part.addresses_clients]

        def write_to(clients: Keys, items: Ragged | None = None) -> dict[str, Ragged]:
            lists = {}
            for part in writing:
                part_lists = self._serve_clients(part, server, clients, items).per_client
                if part_lists is not None:
                    lists[part.name] = part_lists
            return lists

        return Broadcast(common, write_to, n_bytes, write_to, self.decode_lists)

    def _serve_clients(
        self, part: Part, server: ServerState, clients: Keys | None, items: Ragged | None = None
    ) -> PartBroadcast:
        return part.broadcast(self.restrict_state_to_part(part, server), Audience("serving", clients, items))

    def _collect_common(self, messages: Mapping[str, PartBroadcast]) -> dict[str, Arrays]:
        """What goes to all, by part; nothing of parts that send nothing."""
        common: dict[str, Arrays] = {part.name: {} for part in self.parts}
        for name, message in messages.items():
            common[name] = message.common
        return common

    def _count_common_bytes(self, server: ServerState, messages: Mapping[str, PartBroadcast]) -> float:
        """What a client gets of the model and of what goes to all."""
        n_bytes = self.learner.count_model_bytes(server)
        for message in messages.values():
            if not message.once or server.round == 0:
                n_bytes += sum(array.nbytes for array in message.common.values())
        return n_bytes

    def decode_lists(self, lists: dict[str, Ragged], n_items: int) -> dict[str, Ragged]:
        """Lists for single clients as devices read them."""
        decoded = {}
        for name, part_lists in lists.items():
            read_lists = self.declared_fields(n_items)[name].read_lists
            decoded[name] = part_lists if read_lists is None else read_lists(part_lists)
        return decoded

    # what a server-side hook sees: everything, unless a wrapper of the lab says otherwise; None: the learner

    @property
    def apart_fields(self) -> tuple[str, ...]:
        """Beginnings of the names of fields that do not go to the server."""
        return ()

    def restrict_state_to_part(self, part: Part | None, server: ServerState) -> ServerState:
        return server

    def restrict_total_to_part(self, part: Part | None, total: Total) -> Total:
        return total

    def merge_state(self, part: Part | None, server: ServerState, changed: ServerState) -> ServerState:
        """The state after a hook changed what it sees of it."""
        return changed

    def merge_total(self, part: Part, total: Total, changed: Total) -> Total:
        """A total after a hook changed what it sees of it."""
        return changed

    def _change_total(
        self, part: Part, server: ServerState, total: Total, change: Callable[[ServerState, Total], Total]
    ) -> Total:
        visible_state = self.restrict_state_to_part(part, server)
        visible_total = self.restrict_total_to_part(part, total)
        changed = change(visible_state, visible_total)
        return self.merge_total(part, total, changed)


def _declare_fields(part: Part, n_items: int, block: int) -> PartFields:
    """What travels because of a part, its extra fields by their full name."""
    declared = part.fields(n_items, block)
    extra = tuple(replace(spec, name=f"{part.name}.{spec.name}") for spec in declared.extra)
    return replace(declared, extra=extra)


def _covers_answers(part: Part) -> bool:
    return part.privacy is not None and "answers" in part.privacy.covers


@dataclass(frozen=True)
class Federation(Plan):
    """A plan and the users of the lab, or of one node: their histories, cut into blocks."""

    stream: BlockStream = field(kw_only=True)
    rows: Floats | None = field(default=None, kw_only=True, repr=False)  # item rows to start from; None: drawn
    homes: SiloAssignment | None = field(default=None, kw_only=True, repr=False)  # users' silos; None: by a hash

    def init_item_rows(self, start: int, end: int) -> Floats:
        """The rows of items start..end before anybody has trained them."""
        if self.rows is not None:
            return self.rows[start:end].copy()
        keys = self.stream.item_keys[start:end]
        return self.backbone.init_items(self.draws, keys)
