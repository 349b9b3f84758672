"""Learner: what travels in a run. It names the questions of a round, the fields of an answer, how a device makes it
and what the server learns from it; there is exactly one in a run, named by a part or else by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import CohortView, Doubles, ServerState, StateUpdate
from tacita.messages import CohortReply, Spec, Total, count_wire_bytes
from tacita.privacy.ledger import Ledger
from tacita.round.capabilities import Unlearning
from tacita.round.part import Part, RunContext, implements
from tacita.round.question import Question
from tacita.round.state import StateSpec
from tacita.round.task import CohortTask


class Learner(ABC):
    """What decides what is exchanged in a run. It holds no state: that is in the server's and devices' values."""

    name: ClassVar[str]
    model_after: ClassVar[bool] = False
    """Devices get what they score with after a round, made of all answers, and train nothing themselves."""

    tries: ClassVar[bool] = False
    """A block's rounds are ways of scoring, in no order: `every` and `patience` do not count, all are validated."""

    sends: ClassVar[str] = ""
    """What clients send, in words; else its name."""

    def __init__(self, context: RunContext, parts: Sequence[Part]) -> None:
        self.context = context
        self.parts = tuple(parts)
        self.watching_parts = tuple(part for part in parts if implements(part, "after_training"))

    @classmethod
    def find_requiring_part(cls, parts: Sequence[Part]) -> Part | None:
        """The part that brings this learner along; None: a model names it."""
        return None

    @property
    def unlearning(self) -> Unlearning | None:
        """How it takes back by itself what users contributed; None: it does not."""
        return None

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
        """What may be in an answer, beside what parts add to it."""

    def state(self, n_users: int) -> Sequence[StateSpec]:
        """What it keeps on devices, as it is before a user's first block; it stands beside what parts keep."""
        return ()

    @property
    def persistent_names(self) -> frozenset[str]:
        """What of the devices' state goes on from the last round of a block, even if an earlier one was the best.

        It is not copied with the best round, so the best round may not be measured with it.
        """
        return frozenset()

    def count_model_bytes(self, server: ServerState) -> float:
        """What of the model travels down to a client that takes part in the next round."""
        return float(server.items.nbytes + sum(count_wire_bytes(head) for head in server.heads.values()))

    @abstractmethod
    def answer(self, task: CohortTask, question: str) -> CohortReply:
        """On the devices."""

    def noise_sum(self, server: ServerState, total: Total, question: Question) -> Total:
        """The sum with the noise that a budget asks for, before it leaves; live, on each node."""
        return total

    def ledger(self) -> Ledger | None:
        """What its releases are counted as; the accounts are what it keeps on devices as budget, spent and times."""
        return None

    def declare_budget(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """What devices keep when their own users have said how much they are willing to spend."""
        ledger = self.ledger()
        if ledger is None:
            return {}
        return {"budget": ledger.with_budget(view.parts[self.name], epsilon)["budget"]}

    def promises(self, server: ServerState) -> dict[str, float]:
        """What it promises of users' privacy after a block; nothing: no epsilon."""
        return {}

    @abstractmethod
    def learn_from_total(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        """On the server; `expected`: how many clients were to answer, on average."""

    def continue_without_question(self, server: ServerState) -> ServerState:
        """A round in which nobody was asked."""
        return server


def find_ledger(owner: Part | Learner) -> Ledger | None:
    """What the releases of a part or learner are counted as; None: it counts nothing."""
    if isinstance(owner, Learner):
        return owner.ledger()
    return None if owner.privacy is None else owner.privacy.ledger()


_LEARNERS: dict[str, type[Learner]] = {}


def register(cls: type[Learner]) -> type[Learner]:
    _LEARNERS[cls.name] = cls
    return cls


def find_learner_class(name: str) -> type[Learner]:
    if name not in _LEARNERS:
        raise unknown_name_error("learner", name, _LEARNERS)
    return _LEARNERS[name]


def build_learner(context: RunContext, parts: Sequence[Part]) -> Learner:
    """The one learner of a run; parts that cannot work with it are refused."""
    name = context.backbone.learner
    kind = "backbone"
    source = context.backbone.name
    for candidate in reversed(_LEARNERS.values()):
        bringer = candidate.find_requiring_part(parts)
        if bringer is not None:
            name = candidate.name
            kind = "part"
            source = bringer.name
    learner = find_learner_class(name)
    for part in parts:
        if name not in part.works_with:
            raise TacitaError(
                f"part '{part.name}' changes how item rows are trained, sent or summed, and {kind} '{source}' sends "
                f"{learner.sends or f'a {name}'}, which it cannot change; leave it out, or use another {kind}."
            )
    return learner(context, parts)
