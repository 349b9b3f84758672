"""StateSpec: what a part keeps on devices or on the server, and what that means to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tacita.core.device_lists import with_updated_lists
from tacita.core.types import AnyArray, CohortView, Ragged, StateUpdate


class Role(Enum):
    """What a kept list or array means to who carries out requests, whichever part keeps it."""

    SHARED = "shared"  # items that the user shares with the server
    LEARNED = "learned"  # of these, what the device may have learned from before they were shared
    WITHDRAWN = "withdrawn"  # items that the user took back for good
    REPORTED = "reported"  # what of the user may be in the model or in a record of the server
    ACCOUNT = "account"  # what was spent of a privacy budget
    WAITING = "waiting"  # on the server: keys of users whose requests wait until others ask, too


@dataclass(frozen=True)
class StateSpec:
    """One array or list that a part keeps."""

    name: str
    initial: AnyArray | Ragged | None = None  # per user, before the first block; None: the server keeps it
    role: Role | None = None
    persistent: bool = False  # going back to an earlier round, or retraining, does not undo it

    @property
    def on_device(self) -> bool:
        return self.initial is not None


def build_initial_state(specs: Sequence[StateSpec]) -> dict[str, AnyArray | Ragged]:
    """What devices keep before a user's first block, by name."""
    return {spec.name: spec.initial for spec in specs if spec.initial is not None}


def with_part_state(view: CohortView, name: str, update: StateUpdate) -> CohortView:
    """The same view after a part kept something else."""
    if not update:
        return view
    arrays = {key: value for key, value in update.items() if not isinstance(value, Ragged)}
    lists = {key: value for key, value in update.items() if isinstance(value, Ragged)}
    return replace(
        view,
        parts={**view.parts, name: {**view.parts.get(name, {}), **arrays}},
        lists={**view.lists, name: with_updated_lists(view.lists.get(name, {}), lists)},
    )
