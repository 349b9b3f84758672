"""FedRec: explicit ratings, and made-up ones of items that a person has not rated, so that the server cannot tell which
are which (Lin et al. 2020; spec F.9).

Items that are drawn as negatives get a virtual rating: the person's mean at first, and after some rounds what a user
vector predicts that was refined here, on the real ratings alone. Where there are no ratings, what a person has counts 1
and the mean is that over what they have, 1, and what was drawn, 0. The gradient of an item is sent as it is, not
divided by how many items a person has. Virtual ratings hide items among others; they come with no epsilon.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Ints, Ragged
from tacita.messages import Upload
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.task import LocalTask


class VirtualRatingsConfig(PartConfig):
    predict_from: int = Field(10, ge=0, description="rounds of a block before predictions take the place of the mean")
    local_steps: int = Field(15, ge=0, description="gradient steps of the refined user vector on real ratings")
    implicit: bool = Field(False, description="what a person has counts 1, also where there are ratings")


@register
class VirtualRatings(Part):
    name = "virtual-ratings"
    fills = frozenset({"labels"})
    Config: ClassVar[type[PartConfig]] = VirtualRatingsConfig
    config: VirtualRatingsConfig

    def check(self, n_items: int) -> None:
        backbone = self.context.scorer
        if self.context.train.objective != "squared":
            raise TacitaError("part 'virtual-ratings' makes up ratings; set train.objective = 'squared'.")
        if self.context.train.local_epochs > 1:
            raise TacitaError("part 'virtual-ratings' sends one gradient a round; set train.local_epochs = 1.")
        if backbone.shared() or backbone.layout != {"p": backbone.item_width} or backbone.reads_context:
            raise TacitaError(f"part 'virtual-ratings' predicts p . q, which '{backbone.name}' does not; use 'mf'.")

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(labels=self.label_samples)

    def label_samples(self, view: CohortView, own: Ragged) -> Floats:
        """Ratings as they are, or 1, and virtual ones for what was drawn."""
        label = own.values["label"].copy()
        n = view.train.counts()
        place = np.arange(len(label)) - np.repeat(own.ptr[:-1], own.counts())
        real = place < np.repeat(n, own.counts())
        if self.config.implicit:
            label[real] = 1.0
        plain = self.config.implicit or "rating" not in view.train.values
        among = own.counts() if plain else n  # what was drawn counts 0 in the mean where nobody rates
        sums = np.bincount(own.rows()[real], weights=label[real], minlength=len(n))
        virtual = (sums / np.maximum(among, 1))[own.rows()]
        if view.round >= self.config.predict_from:
            refined = self._refine_vectors(view, own.rows()[real], own.ids[real], label[real])
            virtual = (refined[own.rows()] * view.items[own.ids]).sum(1)
        return np.where(real, label, virtual).astype(np.float32)

    def _refine_vectors(self, view: CohortView, user: Ints, item: Ints, rating: Floats) -> Doubles:
        """User vectors after some steps on the mean squared error of real ratings; item rows stand still."""
        p, rows = view.private.astype(np.float64), view.items[item].astype(np.float64)
        n = np.maximum(np.bincount(user, minlength=len(p)), 1)[:, None]
        rate = self.context.scorer.rates(view.n_items)["p"]
        for _ in range(self.config.local_steps):
            error = rating - (p[user] * rows).sum(1)
            slope = np.zeros_like(p)
            np.add.at(slope, user, error[:, None] * rows)
            p = p + rate * 2 * slope / n
        return p

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """The gradient of each item by itself, at the rate of people's vectors.

        A local step divides it by how many samples there are, and multiplies it by `item_lr_scale`.
        """
        each = view.train.counts() * (1 + self.context.train.negatives)
        samples = np.add.reduceat(np.append(each, 0), view.user_ptr)[:-1].astype(np.float64)
        factor = samples / self.context.scorer.item_scale(view.n_items)
        return upload.with_value("rows", upload.values["rows"].scale(factor)), {}
