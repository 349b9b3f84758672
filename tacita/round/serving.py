"""Serving: what a device scores with when it is validated, tested or asked for recommendations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tacita.core.types import CohortView, Floats, Ragged

Purpose = Literal["valid", "test", "serve"]

ServingField = Literal["view", "scores", "personal_scores", "correction"]
"""What a part may decide of serving."""

SINGLE_SERVER: dict[str, str] = {
    "scores": "which model answers",
    "personal_scores": "what a person's own model is",
}
"""Fields that at most one part of a run decides, in words for the refusal."""

ScoreItems = Callable[[Ragged | None], Floats | None]
"""Scores of the whole catalogue, (users, items), or of some items of each user, flat; None: another one answers."""


@dataclass(frozen=True)
class Serving:
    """What one part says of serving. None: it says nothing of that."""

    view: CohortView | None = None  # the items that are read, the private vectors and the table may differ
    scores: ScoreItems | None = None  # another model than the run's own answers
    personal_scores: ScoreItems | None = None  # a model that the device makes for its user when it is asked
    correction: Callable[[Floats], Floats] | None = None  # of the scores that are about to be ranked
