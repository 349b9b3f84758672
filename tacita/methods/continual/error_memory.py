"""RLP2: every device remembers its recent errors and corrects its predictions by them (spec C.4, ReLoop2).

Training is plain fine-tuning. This is a replay method: labels of earlier blocks stay on the device, which the
other methods do not need. Where we differ from the original: one memory per client, at most one entry per item,
the key of an entry is the item's current row (so only its id is stored), and the round is picked on uncorrected
validation scores, so that a run shares the trajectory of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.flat_indices import compute_offsets
from tacita.core.types import CohortView, Floats, LocalModels
from tacita.kernels.memory import compute_sample_logits, correct_by_similar_errors, store_large_errors
from tacita.models.scoring import sigmoid
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.serving import Purpose, Serving
from tacita.round.state import StateSpec
from tacita.round.task import TrainingOutcome


class ErrorMemoryConfig(PartConfig):
    size: int = Field(500, ge=1, le=10_000, description="entries per client; the oldest is overwritten")
    threshold: float = Field(0.5, ge=0, lt=1, description="a sample is remembered if its error exceeds this (sigma)")
    neighbours: int = Field(10, ge=1, description="most similar entries that are read (k)")
    weight: float = Field(0.2, ge=0, le=1, description="share of the estimated error that is corrected (lambda)")
    tau: float = Field(0.1, gt=0, description="temperature of the weights among the neighbours")
    gate: float = Field(1.0, ge=0, le=1, description="1: error of this prediction; 0: of the remembered ones (g)")


@register
class ErrorMemory(Part):
    """Remember samples the local model got wrong; at prediction, lean towards the labels of similar items."""

    name = "error-memory"
    reads_logits = True
    serves = frozenset({"correction"})
    Config: ClassVar[type[PartConfig]] = ErrorMemoryConfig
    config: ErrorMemoryConfig

    def state(self, n_users: int) -> Sequence[StateSpec]:
        shape = (n_users, self.config.size)
        return [
            StateSpec("item", np.full(shape, -1, np.int32)),
            StateSpec("label", np.zeros(shape, np.float32)),
            StateSpec("base", np.zeros(shape, np.float32)),
            StateSpec("position", np.zeros(n_users, np.int32)),
        ]

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        """Write the round's own samples, judged by the model that has just learned from them."""
        memory = {}
        for name, array in view.parts[self.name].items():
            memory[name] = array.copy()
        probability = sigmoid(self.score_round_samples(view, local))
        store_large_errors(
            local.user_ptr,
            local.item,
            local.label,
            probability,
            self.config.threshold,
            memory["item"],
            memory["label"],
            memory["base"],
            memory["position"],
        )
        return TrainingOutcome(memory)

    def score_round_samples(self, view: CohortView, local: LocalModels) -> Floats:
        """Logit of every sample of the round under the local model it belongs to."""
        backbone = self.context.scorer
        client_of_user = view.client_of_user
        first_row = local.row_start[client_of_user]
        reading = None
        if not local.heads:
            reading = backbone.reduce_to_affine(local.private, {})
        if reading is not None:
            slope, offset = reading
            a = np.ascontiguousarray(slope, np.float32)
            c = np.ascontiguousarray(offset, np.float32)
            return compute_sample_logits(local.user_ptr, a, c, first_row, local.row_of, local.rows)
        owner = local.owner
        client = client_of_user[owner]
        heads = {}
        for name, head in local.heads.items():
            heads[name] = head[client]
        place = first_row[owner] + local.row_of
        vectors = backbone.split_private(local.private[owner])
        rows = local.rows[place]
        scores = backbone.compute_logits(vectors, heads, rows)
        return np.asarray(scores, np.float32)

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        if purpose == "valid" or view.block == 0 or self.config.weight == 0:
            return Serving()
        return Serving(correction=partial(self.correct_scores, view))

    def correct_scores(self, view: CohortView, scores: Floats) -> Floats:
        """Probabilities in place of logits for those who remember something; a ranking needs no more."""
        memory = view.parts[self.name]
        is_filled = memory["item"] >= 0
        users = np.flatnonzero(is_filled.any(1))
        if len(users) == 0:
            return scores
        items = memory["item"][is_filled]
        remembered, place = np.unique(items, return_inverse=True)
        normal = normalise_rows(view.items)
        remembered_rows = normal[remembered]
        n_entries = is_filled[users].sum(1)
        corrected = scores.copy()
        corrected[users] = correct_by_similar_errors(
            sigmoid(scores[users]),
            normal,
            np.ascontiguousarray(remembered_rows.T),
            compute_offsets(n_entries),
            place.astype(np.int32),
            memory["label"][is_filled],
            memory["base"][is_filled],
            self.config.neighbours,
            self.config.tau,
            self.config.weight,
            self.config.gate,
        )
        return corrected


def normalise_rows(items: Floats) -> Floats:
    """Rows of length one; a row of zeros stays, and is like no other."""
    squares = items.astype(np.float64) ** 2
    length = np.sqrt(squares.sum(1, keepdims=True))
    normalised = items / np.maximum(length, 1e-30)
    return np.asarray(normalised, np.float32)
