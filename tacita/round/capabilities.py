"""What a part can do besides changing a round: promise privacy, take data back, let lab users choose.

A capability is a class of its own that a part inherits beside `Part`; `Part.privacy`, `Part.unlearning` and
`Part.lab_enrolment` are None for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Protocol

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Keys, Ragged, RoundReplay, ServerState, StateUpdate
from tacita.messages import CohortReply, Spec, Total
from tacita.privacy.ledger import Ledger
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

Scope = Literal["given", "local", "people"]
"""What is taken out of a model: shared items, what devices learned from, or all of a user who leaves."""

CoveredRelease = Literal["answers", "weights"]
"""What other parts make devices send: answers to questions of theirs, and weights that follow from users' data."""

DeviceQuery = Callable[[ServerState, str, Keys | None], Total]
"""One exchange between rounds: the total of what some clients (None: all) answer to a part's own question."""


class RoundPlayer(Protocol):
    """Rounds that a request takes."""

    def __call__(self, server: ServerState, chosen: Keys | None, replay: RoundReplay | None = None) -> ServerState:
        """One federated round more, with some clients or with those whom it would choose by itself.

        `replay`: it is an earlier round once more, with that one's draws and perhaps fewer local steps.
        """
        ...

    def require_rounds_left(self, rounds: int) -> None:
        """Refuse what takes more rounds than requests may still have in this block, before anything has changed."""
        ...

    def restart_block(self, server: ServerState, block: int) -> ServerState:
        """A block again, as after the given state; block 0: from nothing. Persistent state stays. Lab only."""
        ...

    def measure_validation(self, server: ServerState) -> float | None:
        """The metric that picks rounds, on the validation items; None: nobody has any."""
        ...


class Privacy:
    """A part that noises or counts what leaves. Its accounts are kept on devices as budget, spent and times."""

    name: ClassVar[str]

    @property
    def covers(self) -> frozenset[CoveredRelease]:
        """What of other parts it noises and counts with its own release."""
        return frozenset()

    def ledger(self) -> Ledger | None:
        """What its releases are counted as; None: nothing is counted."""
        return None

    def declare_budget(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """What devices keep when their own users have said how much they are willing to spend.

        It is called before anything is charged. What is spent stays spent.
        """
        ledger = self.ledger()
        if ledger is None:
            return {}
        return {"budget": ledger.with_budget(view.parts[self.name], epsilon)["budget"]}

    def charge_eligible(self, view: CohortView) -> StateUpdate | None:
        """What a round costs all who could take part, drawn or not; None: only who takes part pays.

        `view` holds no model.
        """
        return None

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        """The sum with its noise, in distribution as if each upload had been noised."""
        return total

    @property
    def needs_secret_noise(self) -> bool:
        """Whether its draws hide people, so that they must follow more than the seed of a run."""
        return self.ledger() is not None

    def compute_expected_weight(self, expected_clients: float) -> float | None:
        """What the weights of so many clients add up to, to divide a noised sum by; None: only settings can say it."""
        return expected_clients

    def promises(self, server: ServerState) -> Mapping[str, float | str]:
        """What it promises, for the result of a block: an epsilon, and what it is about."""
        return {}


class Unlearning:
    """A part that carries out what users ask for: share, unshare, forget, leave."""

    scope: ClassVar[tuple[Scope, ...]] = ("given", "local")
    """What `on_server` takes out of the model; nothing: it keeps records up to date and undoes no learning."""

    replays_rounds: ClassVar[bool] = False
    """`on_server` plays rounds that were played before, with the same draws."""

    name: ClassVar[str]

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        """What the users' own devices keep, before the server hears of the requests."""
        return {}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        """What the server makes of the requests, and what it did for the certificate. None: they do not concern it.

        `ask(server, "...", clients)` asks devices a question of the part's own, `play(server, clients)` is one
        more round.
        """
        return None

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        """What may be in an answer to a question of its own."""
        return ()

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        """What devices answer to a question of its own."""
        raise TacitaError(f"part '{self.name}' has no question '{question[:100]}'.")

    def purge(self, server: ServerState) -> tuple[Arrays, list[str]]:
        """Its server state without what holds earlier models, and what that was.

        It is called before any part carries out a withdrawal: an earlier table would pull unlearning back.
        """
        return server.parts.get(self.name, {}), []

    def known_items(self, view: CohortView) -> Ragged | None:
        """Items that the server knows to be a user's, though they are not shared. Only such items may be named."""
        return None

    def redact(self, view: CohortView, requests: RequestBatch) -> tuple[RequestBatch, StateUpdate] | None:
        """What leaves the devices in place of the requests, and what devices remember of that. None: as it is."""
        return None


class LabEnrolment:
    """A part whose lab users choose something as a block begins; live, users choose by themselves."""

    @property
    def enrolment_round(self) -> int:
        """Rounds of a block before they choose, where that waits for a table that has learned something."""
        return 0

    def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
        """What all with data in a new block choose, and what they ask for because of it."""
        return {}, None
