"""A question to nodes: what it asks, how it travels, how many must answer, and which answers counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tacita.core.types import Broadcast, Keys, ServerState
from tacita.round.plan import Plan

UsersByNode = dict[int, Keys]


class Transport(Protocol):
    """Carries bodies to nodes and answers back."""

    def list_online_nodes(self) -> list[int]:
        """The nodes that are online."""
        ...

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        """Answers that came in time."""
        ...


@dataclass(frozen=True)
class QuorumPolicy:
    """How many nodes a round needs and how long it waits for them."""

    quorum: int | Literal["all"] = "all"  # of the nodes that may take part
    timeout: float = 300.0  # seconds for one exchange
    give_up: float = 3600.0  # seconds without a quorum after which the run stops
    pause: float = 2.0  # between attempts


@dataclass(frozen=True)
class NodeQuery:
    """What nodes are asked, and about whom."""

    kind: str
    plan: Plan
    server: ServerState
    broadcast: Broadcast
    users_by_node: UsersByNode | None = None  # where the server knows users; None: all users of all nodes
    expects_answers: bool = True  # False: nodes only get what is for each user alone


@dataclass(frozen=True)
class AcceptedAnswer:
    """An answer that counted."""

    block: int
    round: int
    kind: str
    node: int
    sha: str
    clients: int
