"""A request of somebody on a node, as the node's queue holds it."""

from __future__ import annotations

from dataclasses import dataclass

from tacita.live.node.answers import QuestionNumber
from tacita.live.wire import RequestOutcome, UserRequest
from tacita.round.request import UNLEARNING_KINDS


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
    def is_withdrawal(self) -> bool:
        return self.kind in UNLEARNING_KINDS

    @property
    def is_final(self) -> bool:
        return self.outcome is not None and self.outcome.is_final

    @property
    def is_refused(self) -> bool:
        return self.outcome is not None and self.outcome.state == "refused"
