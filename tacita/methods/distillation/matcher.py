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
from tacita.round.registry import register_run_wrapper

MATCHER_PARTS: set[str] = set()
"""Names of parts whose server side the matcher plays."""


@dataclass(frozen=True)
class MatchedFederation(Federation):
    """A federation with a matcher beside the server."""

    @property
    def matcher_part_names(self) -> frozenset[str]:
        """Names of this run's parts whose server side the matcher plays."""
        names = {part.name for part in self.parts}
        return frozenset(names & MATCHER_PARTS)

    @property
    def apart_fields(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in sorted(self.matcher_part_names))

    def restrict_state_to_part(self, part: Part | None, server: ServerState) -> ServerState:
        if self._is_matched(part):
            parts = {}
            for name, arrays in server.parts.items():
                if name in self.matcher_part_names:
                    parts[name] = arrays
            return replace(server, parts=parts, shared=SharedRecord())
        parts = {}
        for name, arrays in server.parts.items():
            if name not in self.matcher_part_names:
                parts[name] = arrays
        return replace(server, parts=parts)

    def restrict_total_to_part(self, part: Part | None, total: Total) -> Total:
        is_matched = self._is_matched(part)
        sums = {}
        for name, value in total.sums.items():
            if self._is_apart(name) == is_matched:
                sums[name] = value
        each = {}
        for name, field in total.each.items():
            if self._is_apart(name) == is_matched:
                each[name] = field
        return replace(total, sums=sums, each=each)

    def _is_matched(self, part: Part | None) -> bool:
        """Whether the matcher plays a part's server side; None: the learner."""
        return part is not None and part.name in self.matcher_part_names

    def _is_apart(self, field: str) -> bool:
        """Whether a field goes to the matcher and not to the server."""
        return field.startswith(self.apart_fields)

    def merge_state(self, part: Part | None, server: ServerState, changed: ServerState) -> ServerState:
        if part is not None and self._is_matched(part):
            state = changed.parts.get(part.name, {})
            return server.with_part(part.name, state)
        return replace(changed, parts={**server.parts, **changed.parts})

    def merge_total(self, part: Part, total: Total, changed: Total) -> Total:
        visible = self.restrict_total_to_part(part, total)
        sums = {}
        for name, value in total.sums.items():
            if name not in visible.sums:
                sums[name] = value
        each = {}
        for name, field in total.each.items():
            if name not in visible.each:
                each[name] = field
        all_sums = {**sums, **changed.sums}
        all_each = {**each, **changed.each}
        return replace(changed, sums=all_sums, each=all_each)


def wrap_with_matcher(federation: Federation) -> Federation:
    """The same run with a matcher, where one of its parts needs it."""
    names = {part.name for part in federation.parts}
    if names.isdisjoint(MATCHER_PARTS):
        return federation
    values = {}
    for field in fields(Federation):
        if field.init:
            value = getattr(federation, field.name)
            values[field.name] = value
    return MatchedFederation(**values)


register_run_wrapper(MATCHER_PARTS, wrap_with_matcher)
