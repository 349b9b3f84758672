"""What a federated loop asks of devices, wherever they are: in this process, in several, or on nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from tacita.core.types import Broadcast, Keys, ServerState
from tacita.federation.evaluation import MetricSums
from tacita.messages import Total
from tacita.metrics import Evaluation
from tacita.round.part import Part
from tacita.round.plan import Federation
from tacita.round.question import Question
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
    """What a federated loop asks of the users' devices; the server's state and the broadcast are what travels down."""

    @property
    def lab(self) -> LabDevices | None:
        """The same devices, where all people are the lab's own; None: they are on nodes."""
        ...

    @property
    def max_request_rounds(self) -> int | None:
        """How many rounds of a block requests may take, beside its own; None: as many as they like."""
        ...

    def begin_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None: ...

    def has_training_data(self, federation: Federation, server: ServerState) -> bool:
        """Whether somebody has data to learn from in this block."""
        ...

    def choose_clients(self, federation: Federation, server: ServerState) -> Keys:
        """The keys of the clients that take part in the next round, for a server that has to know them."""
        ...

    def exchange(
        self,
        federation: Federation,
        server: ServerState,
        broadcast: Broadcast,
        question: Question,
        chosen: Keys | None = None,
    ) -> RoundReply:
        """Ask some clients, or everybody who takes part in the round by itself."""
        ...

    def apply_requests(self, federation: Federation, server: ServerState, requests: RequestBatch) -> RequestBatch:
        """Let people's own devices do their part, where they have not done it already; what they then ask for."""
        ...

    def sum_validation(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> MetricSums: ...

    def keep_best_round(self, round: int) -> None:
        """The round that has just ended is the best of the block so far."""
        ...

    def evaluate_best_round(
        self, federation: Federation, server: ServerState, broadcast: Broadcast
    ) -> tuple[dict[str, Any], Evaluation | None]:
        """Test scores of the best round, and per user where that stays in one process."""
        ...

    def end_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None:
        """Keep what the parts need of the best round and go on from it."""
        ...


class LabDevices(Devices, Protocol):
    """What only a lab asks of its devices, in this process or in several."""

    def gather_devices(self) -> LabDevices:
        """All devices in this process: the devices themselves, or, where they are in other processes, a copy."""
        ...

    def enrol(self, federation: Federation, server: ServerState, part: Part) -> RequestBatch | None:
        """What those with data in the block choose as it begins."""
        ...

    def remember_devices(self) -> None:
        """Persistent state is going to be restored from the devices as they are now."""
        ...

    def restart_devices(self, federation: Federation) -> None:
        """Nobody has learned anything, and nobody is there yet."""
        ...

    def restore_persistent_state(self, federation: Federation) -> None:
        """Persistent state as it was remembered, for those who came with the block that has just begun."""
        ...
