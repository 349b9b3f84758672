"""Question: what the loop asks of devices in one exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tacita.core.types import RoundReplay


@dataclass(frozen=True)
class Question:
    """One question of a round, or one that a part asks while it carries out requests."""

    kind: str  # "round", "statistic", ...; of a part's own question, what it is about
    owner: str | None = None  # the part or learner whose own question it is; None: the learner asks it in a round
    replay: RoundReplay | None = None  # an earlier round, played again
    serial: tuple[int, int] | None = None  # number of the request, and of the question that it raised

    @property
    def name(self) -> str:
        """As the owner knows it, without serial and replay."""
        return self.kind if self.owner is None else f"{self.owner}/{self.kind}"

    def as_replay(self, replay: RoundReplay | None) -> Question:
        return self if replay is None else replace(self, replay=replay)

    def with_number(self, request: int, number: int) -> Question:
        """The same under a number of its own: nodes answer each question once."""
        return replace(self, serial=(request, number))

    def __str__(self) -> str:
        """As it stands on the wire and in the stores of nodes and servers."""
        text = self.name
        if self.serial is not None:
            text = f"{text}/{self.serial[0]}.{self.serial[1]}"
        if self.replay is not None:
            text = f"{text}.again-{self.replay.round}-{self.replay.share!r}"
        return text
