"""A request of somebody on a node, as the node's queue holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tacita.core.errors import TacitaError
from tacita.live.node.answers import QuestionNumber
from tacita.live.request_certificate import RequestCertificate
from tacita.live.wire import RequestOutcome, UserRequest
from tacita.round.request import REQUEST_KINDS, UNLEARNING_KINDS

RequestPhase = Literal["queued", "sent", "applied", "refused"]


@dataclass(frozen=True)
class QueuedRequest:
    """A request for the server of one run."""

    id: int
    run: str
    kind: str
    items: list[str]  # raw ids
    user: int | None  # None: of the whole node
    created: float
    sent: float | None = None  # when an answer first carried it
    carrier: QuestionNumber | None = None  # that answer
    sent_request: UserRequest | None = None  # as it was sent
    outcome: RequestOutcome | None = None
    n_items_sent: int = 0
    n_bytes: int = 0

    @property
    def phase(self) -> RequestPhase:
        """How far it has come."""
        if self.carrier is None:
            return "queued"
        if self.outcome is None or not self.outcome.is_final:
            return "sent"
        return "refused" if self.outcome.state == "refused" else "applied"

    @property
    def certificate(self) -> RequestCertificate:
        """What its server certifies; without content as long as it does not."""
        facts = {} if self.outcome is None else self.outcome.certificate
        return RequestCertificate.from_facts(facts)

    @property
    def is_withdrawal(self) -> bool:
        return self.kind in UNLEARNING_KINDS

    @property
    def is_final(self) -> bool:
        return self.outcome is not None and self.outcome.is_final


def check_request_kind(kind: str) -> None:
    if kind not in REQUEST_KINDS:
        raise TacitaError(f"'{kind[:100]}' is no request; known: {', '.join(REQUEST_KINDS)}.")
