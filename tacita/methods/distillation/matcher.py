"""MatchedFederation: a lab run in which a third party, the matcher, plays the server side of some parts.

The matcher holds what those parts keep and is sent what they send. It sees the model and nothing else of the server's;
the server's own hooks see nothing of it. The loop knows nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tacita.core.types import ServerState, SharedRecord
from tacita.messages import Total
from tacita.round.part import Part
from tacita.round.plan import Federation
from tacita.round.registry import register_wrapper

MATCHER_PARTS: set[str] = set()
"""Names of parts whose server side the matcher plays."""


@dataclass(frozen=True)
class MatchedFederation(Federation):
    """A federation with a matcher beside the server."""

    @property
    def matched(self) -> frozenset[str]:
        return frozenset(part.name for part in self.parts if part.name in MATCHER_PARTS)

    @property
    def apart_fields(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in sorted(self.matched))

    def visible_state(self, part: Part | None, server: ServerState) -> ServerState:
        matched = self.matched
        is_matcher = part is not None and part.name in matched
        parts = {name: arrays for name, arrays in server.parts.items() if (name in matched) == is_matcher}
        if is_matcher:
            return replace(server, parts=parts, shared=SharedRecord())
        return replace(server, parts=parts)

    def visible_total(self, part: Part | None, total: Total) -> Total:
        is_matcher = part is not None and part.name in self.matched
        sums = {name: value for name, value in total.sums.items() if self._is_apart(name) == is_matcher}
        each = {name: value for name, value in total.each.items() if self._is_apart(name) == is_matcher}
        return replace(total, sums=sums, each=each)

    def _is_apart(self, field: str) -> bool:
        return field.startswith(self.apart_fields)

    def merge_state(self, part: Part | None, server: ServerState, changed: ServerState) -> ServerState:
        if part is not None and part.name in self.matched:
            return server.with_part(part.name, changed.parts.get(part.name, {}))
        return replace(changed, parts={**server.parts, **changed.parts})

    def merge_total(self, part: Part, total: Total, changed: Total) -> Total:
        visible = self.visible_total(part, total)
        sums = {name: value for name, value in total.sums.items() if name not in visible.sums}
        each = {name: value for name, value in total.each.items() if name not in visible.each}
        return replace(changed, sums={**sums, **changed.sums}, each={**each, **changed.each})


def wrap_federation(federation: Federation) -> Federation:
    """The same run with a matcher, where one of its parts needs it."""
    if not any(part.name in MATCHER_PARTS for part in federation.parts):
        return federation
    names = [field.name for field in fields(Federation) if field.init]
    return MatchedFederation(**{name: getattr(federation, name) for name in names})


register_wrapper(MATCHER_PARTS, wrap_federation)
