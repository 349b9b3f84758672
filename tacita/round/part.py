"""Part: what a method adds to the federated round. A run is a backbone and a list of parts; FedAvg is none.

A part overrides only the hooks it needs. Device hooks see a `CohortView` (what those clients may see) and return
what to keep; server hooks see `ServerState`, `Upload` and `Total` only. State is never kept on the part object: it
lives in `view.parts[name]` and `view.lists[name]` (one row or list per user) and in `server.parts[name]`, so it is
snapshotted, restored with the best round and saved for resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isfunction
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.types import Arrays, CohortView, Doubles, LocalModels, Ragged, ServerState, StateUpdate
from tacita.messages import Total, Upload
from tacita.models.base import Backbone
from tacita.models.scorer import Scorer, require_scorer
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import LabEnrolment, Privacy, Unlearning
from tacita.round.fields import PartFields
from tacita.round.serving import Purpose, Serving, ServingField
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask, TaskField, TrainingOutcome


@dataclass(frozen=True)
class PartTraits:
    """What parts may know of another part of the run: what it does, never its class. Asked when needed."""

    _part: Part = field(repr=False)

    @property
    def name(self) -> str:
        return self._part.name

    @property
    def observes_only(self) -> bool:
        return self._part.observes_only

    @property
    def replays_rounds(self) -> bool:
        unlearning = self._part.unlearning
        return unlearning is not None and unlearning.replays_rounds

    @property
    def learns_from_shared(self) -> bool:
        return self._part.learns_from_shared

    @cached_property
    def hooks(self) -> frozenset[str]:
        """Of `Part` and of its capabilities, those that it overrides."""
        return frozenset(name for name in ALL_HOOKS if implements(self._part, name))

    @cached_property
    def _state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(self._part.state(0))

    def list_state_names(self, role: Role) -> tuple[str, ...]:
        """What it keeps in a role."""
        return tuple(spec.name for spec in self._state_specs if spec.role is role)

    @property
    def changes_uploads(self) -> bool:
        return not self.hooks.isdisjoint({"encode", "noise_sum", "weigh"})


@dataclass(frozen=True)
class RunContext:
    """What every part may know of the run."""

    backbone: Backbone
    draws: Draws
    train: TrainConfig
    part_specs: tuple[dict[str, Any], ...] = ()  # the run's parts, with the options that were set
    traits: tuple[PartTraits, ...] = ()  # of all parts, in their order

    @cached_property
    def scorer(self) -> Scorer:
        """The model of a run that trains item rows."""
        return require_scorer(self.backbone)

    def find_part_options(self, name: str) -> dict[str, Any] | None:
        """The options that were set for a part of the run; None: it has no such part."""
        for spec in self.part_specs:
            if spec.get("name") == name:
                return {key: value for key, value in spec.items() if key != "name"}
        return None

    def list_other_parts(self, name: str) -> tuple[PartTraits, ...]:
        """The run's parts without the one of that name."""
        return tuple(traits for traits in self.traits if traits.name != name)

    def select_lists(self, view: CohortView, *roles: Role) -> tuple[Ragged, ...]:
        """What devices keep in some roles for the users of a view, whichever part keeps it."""
        selected = []
        for role in roles:
            for traits in self.traits:
                part_lists = view.lists.get(traits.name, {})
                for name in traits.list_state_names(role):
                    if name in part_lists:  # runs of earlier versions may not have all of them
                        selected.append(part_lists[name])
        return tuple(selected)


class PartConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Part:
    """One composable piece of a method. The defaults do nothing."""

    name: ClassVar[str]
    Config: ClassVar[type[PartConfig]] = PartConfig

    works_with: ClassVar[tuple[str, ...]] = ("rows",)
    """The learners whose rounds it can change."""

    serves: ClassVar[frozenset[ServingField]] = frozenset()
    """What of serving `serve` may decide."""

    addresses_clients: ClassVar[bool] = False
    """`broadcast` writes to single clients, so the server has to know who takes part."""

    observes_only: ClassVar[bool] = False
    """`encode` and `server_step` write rounds down and move no item row."""

    weighs_presence: ClassVar[bool] = False
    """`weigh` gives 1, or 0 to who has nothing to learn from: it tells how many take part, and no more."""

    reads_logits: ClassVar[bool] = False
    """It scores users by itself, from private vectors and item rows alone, and reads the scores as logits."""

    reads_items: ClassVar[bool] = False
    """Its serving reads what users have (`train`) to score with, whatever the backbone does."""

    @property
    def asks_exact_share(self) -> bool:
        """Whether it asks so many of those who took part that one person more changes who else is asked."""
        return False

    @property
    def learns_from_shared(self) -> bool:
        """Rounds on devices depend on items that their users share with the server, or have taken back."""
        return any(spec.role is Role.SHARED for spec in self.state(0))

    @property
    def fills(self) -> frozenset[TaskField]:
        """What of a round's task `prepare` may decide."""
        return frozenset()

    def __init__(self, config: PartConfig, context: RunContext) -> None:
        self.config = config
        self.context = context

    # capabilities

    @property
    def privacy(self) -> Privacy | None:
        """What it noises and counts; None: nothing."""
        return self if isinstance(self, Privacy) else None

    @property
    def unlearning(self) -> Unlearning | None:
        """How it carries out what users ask for; None: requests do not concern it."""
        return self if isinstance(self, Unlearning) else None

    @property
    def lab_enrolment(self) -> LabEnrolment | None:
        """What lab users choose as a block begins; None: nothing."""
        return self if isinstance(self, LabEnrolment) else None

    # before anything is trained

    def check(self, n_items: int) -> None:
        """Refuse settings that cannot work on this catalogue."""

    def state(self, n_users: int) -> Sequence[StateSpec]:
        """What it keeps on devices, per user, as it is before the user's first block; a list is empty then."""
        return ()

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        """What travels because of it, both ways: extra fields, how others leave, what a broadcast may hold."""
        return PartFields()

    # on the device; what a hook returns to keep is an array (`view.parts`) or a list (`view.lists`) per user

    def on_block_start(self, view: CohortView) -> StateUpdate:
        """For all with data in the new block, with what the first broadcast carried."""
        return {}

    def prepare(self, view: CohortView) -> LocalTask:
        """What a round learns from; `view` holds the model as it was broadcast."""
        return LocalTask()

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        """What to keep of the trained models, and small values that travel with the upload."""
        return TrainingOutcome()

    def weigh(self, view: CohortView, upload: Upload) -> Doubles | None:
        """A factor per client on its upload, 0 to 1, which travels with it: the device sends [s, s * value]."""
        return None

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """What happens to an upload before it leaves the device, and what the device remembers of that.

        Called in the order of the parts, for every learner; a client of weight 0 sends nothing.
        """
        return upload, {}

    def on_block_end(self, view: CohortView) -> StateUpdate:
        """For all who trained in the block, with the best round's table and parameters."""
        return {}

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        """What a device scores with."""
        return Serving()

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        """Its server state for a new block; items and users grow from block to block."""
        return server.parts.get(self.name, {})

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        """What travels down besides the item table and the shared parameters: to all, and to single clients."""
        return PartBroadcast()

    def decode(self, server: ServerState, total: Total) -> Total:
        """The total as it reads after `encode`; called in reverse order of the parts."""
        return total

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Change the aggregated state; `before` is what the round started from."""
        return server

    def server_block_end(self, server: ServerState) -> Arrays:
        """Its server state after a block, with the best round's table."""
        return server.parts.get(self.name, {})

    def metrics(self, server: ServerState) -> dict[str, float]:
        """Numbers for the log after a round."""
        return {}


def _public_methods(cls: type) -> tuple[str, ...]:
    return tuple(name for name, value in vars(cls).items() if isfunction(value) and not name.startswith("_"))


CAPABILITIES: tuple[type, ...] = (Privacy, Unlearning, LabEnrolment)
CORE_HOOKS = _public_methods(Part)
ALL_HOOKS = (*CORE_HOOKS, *(name for capability in CAPABILITIES for name in _public_methods(capability)))


def implements(owner: Part | Unlearning | type[Part], hook: str) -> bool:
    """Whether a part, or a learner that unlearns, overrides a hook of its own or of a capability."""
    cls = owner if isinstance(owner, type) else type(owner)
    for base in (Part, *CAPABILITIES):
        default = vars(base).get(hook)
        if default is not None:
            return getattr(cls, hook, default) is not default
    raise AttributeError(hook)


def list_forgetting_scope(part: Part) -> tuple[str, ...]:
    """What a part takes out of the model when users withdraw it; nothing: it does not."""
    return () if part.unlearning is None else part.unlearning.scope
