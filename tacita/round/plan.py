"""The plan of a run: what everybody may know of it, who answers which question, and what travels down."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import (
    Arrays,
    BlockStream,
    Broadcast,
    CohortView,
    Floats,
    Keys,
    Ragged,
    RoundReplay,
    ServerState,
    SharedRecord,
)
from tacita.data.silos import SiloAssignment
from tacita.messages import CohortReply, Spec, Total
from tacita.models.base import Backbone
from tacita.models.scorer import Scorer, require_scorer
from tacita.privacy.ledger import Ledger
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner, build_learner, collect_extra_fields
from tacita.round.parts import SERVER, Part, RunContext, find_deciding_part, overrides

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
        world = RunContext(self.backbone, self.draws, self.config.train)
        object.__setattr__(self, "learner", build_learner(world, self.parts))
        for hook in ("local_data", "answers", "predict_anew"):
            find_deciding_part(self.parts, hook)

    @property
    def scorer(self) -> Scorer:
        """The model of a run that trains item rows."""
        return require_scorer(self.backbone)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """What counts the releases of this run; none: nothing is counted, and there is no epsilon."""
        found = (*(part.ledger() for part in self.parts), self.learner.ledger())
        return tuple(one for one in found if one is not None)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        """What may be in the answer to a question."""
        asker = self.find_asker(question)
        found = asker.fields(server, question) if asker else self.learner.fields(server, strip_replay(question))
        if asker:  # who minds every release may send something with it
            minding = [part for part in self.encoders(question) if part.every_release and part is not asker]
            found = (*found, *collect_extra_fields(minding, len(server.items)))
        for part in self.encoders(question):
            found = tuple(part.field_sent(one) for one in found)
        return found

    def answer(self, view: CohortView, question: str) -> CohortReply:
        """What devices make of a question."""
        asker = self.find_asker(question)
        return asker.answer(view, question) if asker else self.learner.answer(view, strip_replay(question))

    def find_asker(self, question: str) -> Part | Learner | None:
        """Whose own question it is, a part's or the learner's to those who take something back; None: of a round."""
        name, slash, _ = question.partition("/")
        if not slash:
            return None
        if name == self.learner.name and self.learner.takes_back:
            return self.learner
        for part in self.parts:
            if part.name == name:
                return part
        raise TacitaError(f"no part of this run asks '{question[:100]}'.")

    def encoders(self, question: str) -> tuple[Part, ...]:
        """The parts that encode and decode answers: of another part's question only who minds every release."""
        asker = self.find_asker(question)
        return tuple(part for part in self.parts if asker is None or part is asker or part.every_release)

    # What a party sees, where some part's server side is not played by the server

    def visible_state(self, party: str, server: ServerState) -> ServerState:
        """The state without what other parties hold; of the server's, others see the model alone."""
        if party != SERVER:
            mine = {part.name for part in self.parts if part.party == party}
            return replace(server, parts={k: v for k, v in server.parts.items() if k in mine}, shared=SharedRecord())
        theirs = {part.name for part in self.parts if part.party != SERVER}
        return replace(server, parts={k: v for k, v in server.parts.items() if k not in theirs}) if theirs else server

    def visible_total(self, party: str, total: Total) -> Total:
        """What came back for a party."""
        mine = tuple(f"{part.name}." for part in self.parts if part.party == party)
        theirs = tuple(f"{part.name}." for part in self.parts if part.party != party)
        if party == SERVER and not theirs:
            return total

        def for_it(name: str) -> bool:
            return not name.startswith(theirs) if party == SERVER else name.startswith(mine)

        sums = {name: v for name, v in total.sums.items() if for_it(name)}
        return replace(total, sums=sums, each={name: v for name, v in total.each.items() if for_it(name)})

    def update_party_total(self, party: str, total: Total, change: Callable[[Total], Total]) -> Total:
        """A total after a party changed what of it came back for that party."""
        heard = self.visible_total(party, total)
        made = change(heard)
        if heard is total:
            return made
        sums = {name: v for name, v in total.sums.items() if name not in heard.sums}
        each = {name: v for name, v in total.each.items() if name not in heard.each}
        return replace(made, sums={**sums, **made.sums}, each={**each, **made.each})

    def merge_state(self, whole: ServerState, changed: ServerState, part: Part | None = None) -> ServerState:
        """The state after a hook of a party that saw its share of it: others than the server change only their own."""
        if part is not None and part.party != SERVER:
            return whole.with_part(part.name, changed.parts.get(part.name, {}))
        return replace(changed, parts={**whole.parts, **changed.parts})

    def decode_lists(self, lists: dict[str, Ragged], n_items: int) -> dict[str, Ragged]:
        """Lists of their own as devices read them."""
        by_name = {part.name: part for part in self.parts}
        return {name: by_name[name].opened(one, n_items) for name, one in lists.items()}

    @property
    def persistent_names(self) -> frozenset[str]:
        """What of the devices' state no going back to an earlier round undoes."""
        spent = (f"{PARTS}{part.name}/{name}" for part in self.parts for name in part.lasting)
        return self.learner.lasting | frozenset(spent)

    @property
    def identifies_clients(self) -> bool:
        """Whether the server has to know who is who: it writes to single clients."""
        return any(overrides(part, "own") or overrides(part, "own_to_serve") for part in self.parts)

    @property
    def max_weight(self) -> float:
        """What one client may count at most in a weighted sum, where a client of weight 1 counts 1."""
        return float(np.prod([part.most_weight for part in self.parts if overrides(part, "weight")]))


# Rounds that are played once more

_REPLAY_PATTERN = re.compile(r"(.+)\.again-([0-9]{1,9})-([0-9.e-]{1,30})")


def mark_replay(question: str, replay: RoundReplay | None) -> str:
    """A learner's question as it is asked in a round that is played once more."""
    return question if replay is None else f"{question}.again-{replay.round}-{replay.share!r}"


def parse_replay(question: str) -> RoundReplay | None:
    """Which round a question is asked of once more; None: it is asked for the first time."""
    found = _REPLAY_PATTERN.fullmatch(question)
    if found is None:
        return None
    try:
        share = float(found[3])
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise TacitaError(f"'{question[:100]}' asks for a share of a round that is not above 0 and at most 1.")
    return RoundReplay(int(found[2]), share)


def strip_replay(question: str) -> str:
    """The question itself, whether it is asked once more or not."""
    found = _REPLAY_PATTERN.fullmatch(question)
    return question if found is None else found[1]


@dataclass(frozen=True)
class Federation(Plan):
    """A plan and the people of the lab, or of one node: their histories, cut into blocks."""

    stream: BlockStream = field(kw_only=True)
    rows: Floats | None = field(default=None, kw_only=True, repr=False)  # item rows to start from; None: drawn
    homes: SiloAssignment | None = field(
        default=None, kw_only=True, repr=False
    )  # who lives in which silo; None: by a hash

    def initial_rows(self, start: int, end: int) -> Floats:
        """The rows of items start..end before anybody has trained them."""
        if self.rows is not None:
            return self.rows[start:end].copy()
        return self.backbone.init_items(self.draws, self.stream.item_keys[start:end])


# What travels down


def prepare_broadcast(plan: Plan, server: ServerState, chosen: Keys | None) -> tuple[ServerState, Broadcast]:
    """What the clients of a round get. Writing to single clients may change what the server keeps of them."""
    letters: dict[str, Ragged] = {}
    for part in plan.parts:
        if overrides(part, "own"):
            assert chosen is not None, "who writes to single clients has to know them"
            made, letters[part.name] = part.own(plan.visible_state(part.party, server), chosen)
            server = plan.merge_state(server, made, part)
    common, size = _build_common(plan, server)
    if chosen is None or not letters:
        return server, Broadcast(common, n_bytes=size)
    size += sum(list_bytes(one) for one in letters.values()) / max(1, len(chosen))
    return server, Broadcast(common, PerClientLists(chosen, letters).select_lists, size, decode_lists=plan.decode_lists)


def prepare_serving(plan: Plan, server: ServerState) -> Broadcast:
    """What devices get to begin a block, to be validated, tested or served."""
    common, size = _build_common(plan, server)
    writing = [part for part in plan.parts if overrides(part, "own_to_serve")]

    def own(clients: Keys) -> dict[str, Ragged]:
        made = {part.name: part.own_to_serve(plan.visible_state(part.party, server), clients) for part in writing}
        return {name: one for name, one in made.items() if one is not None}

    def some(clients: Keys, only: Ragged) -> dict[str, Ragged]:
        sparing = [part for part in writing if overrides(part, "answers_some")]
        made = {part.name: part.own_to_serve(plan.visible_state(part.party, server), clients, only) for part in sparing}
        return {name: one for name, one in made.items() if one is not None}

    return Broadcast(common, own, size, some, plan.decode_lists)


def _build_common(plan: Plan, server: ServerState) -> tuple[dict[str, Arrays], float]:
    """What everybody gets besides the model, and the bytes of both."""
    common = {part.name: part.broadcast(plan.visible_state(part.party, server)) for part in plan.parts}
    size = plan.learner.model_bytes(server)
    for part in plan.parts:
        if not part.broadcast_once or server.round == 0:
            size += sum(v.nbytes for v in common[part.name].values())
    return common, size


def list_bytes(lists: Ragged) -> float:
    """Four bytes an id and what the columns hold; the channel names the client."""
    return float(4 * len(lists.ids) + sum(column.nbytes for column in lists.values.values()))


@dataclass(frozen=True)
class PerClientLists:
    """Lists that were written to some clients, to be looked up by their keys; whoever got none has an empty one."""

    clients: Keys
    lists: dict[str, Ragged]

    def select_lists(self, wanted: Keys) -> dict[str, Ragged]:
        order = np.argsort(self.clients)
        at = np.minimum(np.searchsorted(self.clients, wanted, sorter=order), max(0, len(order) - 1))
        found = self.clients[order[at]] == wanted if len(order) else np.zeros(len(wanted), bool)
        out = {}
        for name, lists in self.lists.items():
            mine = lists.take(order[at[found]])
            ptr = np.zeros(len(wanted) + 1, np.int64)
            counts = np.zeros(len(wanted), np.int64)
            counts[found] = mine.counts()
            np.cumsum(counts, out=ptr[1:])
            out[name] = Ragged(ptr, mine.ids, mine.values)
        return out
