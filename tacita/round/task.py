"""LocalTask: what a client's round learns from, put together by the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from tacita.core.types import (
    AnyArray,
    CohortView,
    ExtraSamples,
    Floats,
    Ints,
    LocalModels,
    Longs,
    NormPenalty,
    ProximalTerm,
    Ragged,
    StateUpdate,
)
from tacita.messages import Form
from tacita.round.state import with_part_state

TaskField = Literal[
    "data", "negatives", "labels", "ratings", "samples", "likes", "rows_needed", "step_samples", "pull", "penalty"
]
"""What a part may decide of a round.

`data` stands for train, exclude and history together. `ratings`: the labels take the place of users' ratings, too.
"""

SINGLE_OWNER: dict[str, str] = {
    "data": "what is learned from",
    "negatives": "the negatives",
    "labels": "what samples are",
}
"""Fields that at most one part of a run decides, in words for the refusal."""


StepSampler = Callable[[CohortView, LocalModels, int, int], ExtraSamples | None]


@dataclass(frozen=True)
class LocalTask:
    """What one part says of a round before clients train. None: it says nothing of that.

    Callables get the cohort's view as it is trained on, after `data` was decided.
    """

    state: StateUpdate = field(default_factory=dict)  # what devices keep before they train
    view: CohortView | None = None  # `data`: the view with other train, exclude and history
    negatives: Callable[[CohortView, Longs], Ints | None] | None = None  # counts -> items learned as not liked
    labels: Callable[[CohortView, Ragged], Floats | None] | None = None  # drawn samples -> what they are learned as
    samples: Callable[[CohortView, Ragged], Ragged | None] | None = None  # drawn samples -> more, with a "label"
    likes: Callable[[CohortView], Ragged | None] | None = None  # more items learned as liked, with a "weight"
    rows_needed: Ragged | None = None  # items per user whose rows `step_samples` uses
    step_samples: StepSampler | None = None  # samples of one step and phase, with weights of their own
    pull: ProximalTerm | None = None
    penalty: NormPenalty | None = None


@dataclass(frozen=True)
class TrainingOutcome:
    """What a part makes of trained local models."""

    state: StateUpdate = field(default_factory=dict)  # what devices keep
    extras: dict[str, AnyArray | Form] = field(default_factory=dict)  # small values that travel, a row per client


@dataclass(frozen=True)
class CohortTask:
    """The tasks of all parts for one cohort, in the order of the parts."""

    view: CohortView  # as it is trained on
    tasks: dict[str, LocalTask] = field(default_factory=dict)  # part name -> its task


class Preparing(Protocol):
    """What is asked for a task: a part."""

    @property
    def name(self) -> str: ...

    def prepare(self, view: CohortView) -> LocalTask: ...


def prepare_cohort(parts: Sequence[Preparing], view: CohortView) -> CohortTask:
    """What a cohort learns from in a round: every part sees what the parts before it keep."""
    tasks: dict[str, LocalTask] = {}
    for part in parts:
        task = part.prepare(view)
        tasks[part.name] = task
        if task.state:
            view = with_part_state(view, part.name, task.state)
    for task in tasks.values():
        if task.view is not None:
            data = task.view
            view = replace(view, train=data.train, exclude=data.exclude, history=data.history)
    return CohortTask(view, tasks)
