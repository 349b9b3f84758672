"""Learner: what travels in a run. It names the questions of a round, the fields of an answer, how a device makes it
and what the server learns from it; there is exactly one in a run, named by a part or else by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import CohortView, Doubles, ServerState, StateUpdate
from tacita.messages import CohortReply, Spec, Total, wire_bytes
from tacita.privacy.ledger import Ledger
from tacita.round.parts import DeviceQuery, Part, RoundPlayer, RunContext
from tacita.round.request import RequestBatch


class Learner(ABC):
    """The part of a run that decides what is exchanged. Holds no state: that is in the server's and devices' values."""

    name: ClassVar[str]
    model_after: ClassVar[bool] = False
    """Devices get what they score with after a round, made of everybody's answers, and train nothing themselves."""

    tries: ClassVar[bool] = False
    """A block's rounds are ways of scoring, in no order: `every` and `patience` do not count, all are validated."""

    sends: ClassVar[str] = ""
    """What clients send, in words; else its name."""

    def __init__(self, context: RunContext, parts: Sequence[Part]) -> None:
        self.context = context
        self.parts = tuple(parts)

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that this way of learning cannot follow."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """The most rounds of a block."""

    @abstractmethod
    def questions(self, server: ServerState) -> tuple[str, ...]:
        """What is asked in the next round, in this order; nothing: the server goes on by itself."""

    @abstractmethod
    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        """What may be in an answer."""

    def device_arrays(self, n_users: int) -> StateUpdate:
        """What it keeps on devices, as it is before a user's first block; it stands beside what parts keep."""
        return {}

    @property
    def lasting(self) -> frozenset[str]:
        """What of the devices' state goes on from the last round of a block, even if an earlier one was the best.

        It is not copied with the best round, so the best round may not be measured with it.
        """
        return frozenset()

    def model_bytes(self, server: ServerState) -> float:
        """What of the model travels down to a client that takes part in the next round."""
        return float(server.items.nbytes + sum(wire_bytes(v) for v in server.heads.values()))

    @abstractmethod
    def answer(self, view: CohortView, question: str) -> CohortReply:
        """On the devices."""

    def noised(self, server: ServerState, total: Total, question: str) -> Total:
        """The sum over the people here with the noise that a budget asks for, before it leaves; live, on each node."""
        return total

    def ledger(self) -> Ledger | None:
        """What its releases are counted as; the accounts are what it keeps on devices as budget, spent and times."""
        return None

    def declare(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """What devices keep when their own people have said how much they are willing to spend; see Part.declare."""
        ledger = self.ledger()
        return {} if ledger is None else {"budget": ledger.with_budget(view.parts[self.name], epsilon)["budget"]}

    def promises(self, server: ServerState) -> dict[str, float]:
        """What it promises of people's privacy after a block; nothing: no epsilon."""
        return {}

    @abstractmethod
    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        """On the server; `expected`: how many clients were to answer, on average."""

    def go_on(self, server: ServerState) -> ServerState:
        """A round in which nobody was asked."""
        return server

    # what people ask for between rounds; like the hooks of a part, after all of them

    @property
    def takes_back(self) -> bool:
        """Whether it takes back by itself what people told, and so asks questions `NAME/...` of its own."""
        return False

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        """What devices keep when their own people ask for something, before the server hears of it."""
        return {}

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """What the server makes of what some people ask for, and what the certificate says of that."""
        return None


def collect_extra_fields(parts: Sequence[Part], n_items: int) -> tuple[Spec, ...]:
    """What parts send beside a learner's own fields, each to the party that plays the part."""
    return tuple(
        replace(one, name=f"{part.name}.{one.name}", by=part.party)
        for part in parts
        for one in part.extra_fields(n_items)
    )


_LEARNERS: dict[str, type[Learner]] = {}


def register(cls: type[Learner]) -> type[Learner]:
    _LEARNERS[cls.name] = cls
    return cls


def learner_class(name: str) -> type[Learner]:
    if name not in _LEARNERS:
        raise unknown_name_error("learner", name, _LEARNERS)
    return _LEARNERS[name]


def build_learner(context: RunContext, parts: Sequence[Part]) -> Learner:
    """The one learner of a run; parts that cannot work with it are refused."""
    bringing = [part for part in parts if part.learner]
    if len({part.learner for part in bringing}) > 1:
        raise TacitaError(
            f"parts '{bringing[0].name}' and '{bringing[1].name}' each decide what travels; use one of them."
        )
    name = bringing[0].learner if bringing else context.backbone.learner
    assert name is not None
    learner = learner_class(name)
    for part in parts:
        if name in part.refuses:
            raise TacitaError(part.refuses[name])
        if name not in part.works_with:
            kind, who = ("part", bringing[0].name) if bringing else ("backbone", context.backbone.name)
            raise TacitaError(
                f"part '{part.name}' changes how item rows are trained, sent or summed, and {kind} '{who}' sends "
                f"{learner.sends or f'a {name}'}, which it cannot change; leave it out, or use another {kind}."
            )
    return learner(context, parts)
