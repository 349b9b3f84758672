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
from tacita.core.types import Arrays, Bools, CohortView, Doubles, Floats, Ints, Ragged
from tacita.messages import Upload
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.task import LocalTask, TaskField


class VirtualRatingsConfig(PartConfig):
    predict_from: int = Field(10, ge=0, description="rounds of a block before predictions take the place of the mean")
    local_steps: int = Field(15, ge=0, description="gradient steps of the refined user vector on real ratings")
    implicit: bool = Field(False, description="what a person has counts 1, also where there are ratings")


@register
class VirtualRatings(Part):
    name = "virtual-ratings"
    Config: ClassVar[type[PartConfig]] = VirtualRatingsConfig
    config: VirtualRatingsConfig

    @property
    def fills(self) -> frozenset[TaskField]:
        if self.config.implicit:
            return frozenset({"labels", "ratings"})
        return frozenset({"labels"})

    def check(self, n_items: int) -> None:
        backbone = self.context.scorer
        train = self.context.train
        if train.objective != "squared":
            raise TacitaError("part 'virtual-ratings' makes up ratings; set train.objective = 'squared'.")
        if train.local_epochs > 1:
            raise TacitaError("part 'virtual-ratings' sends one gradient a round; set train.local_epochs = 1.")
        has_vector_alone = backbone.private_layout == {"p": backbone.item_width}
        if backbone.list_head_shapes() or backbone.reads_context or not has_vector_alone:
            raise TacitaError(f"part 'virtual-ratings' predicts p . q, which '{backbone.name}' does not; use 'mf'.")

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(labels=self.label_samples)

    def label_samples(self, view: CohortView, own: Ragged) -> Floats:
        """Ratings as they are, or 1, and virtual ones for sampled negatives."""
        label = own.values["label"].copy()
        is_real = _find_real_samples(view, own)
        if self.config.implicit:
            label[is_real] = 1.0
        user = own.rows()
        if view.round >= self.config.predict_from:
            real_user = user[is_real]
            real_item = own.ids[is_real]
            real_label = label[is_real]
            vectors = self._refine_vectors(view, real_user, real_item, real_label)
            rows = view.items[own.ids]
            products = vectors[user] * rows
            virtual = products.sum(1)
        else:
            means = self._average_labels(view, own, label, is_real)
            virtual = means[user]
        labels = np.where(is_real, label, virtual)
        return labels.astype(np.float32)

    def _average_labels(self, view: CohortView, own: Ragged, label: Floats, is_real: Bools) -> Doubles:
        """Each user's mean rating. Where there are no ratings, sampled negatives count 0 in the mean."""
        n_averaged = view.train.counts()
        user = own.rows()
        real_user = user[is_real]
        real_label = label[is_real]
        sums = np.bincount(real_user, weights=real_label, minlength=len(n_averaged))
        if self.config.implicit or "rating" not in view.train.values:
            n_averaged = own.counts()
        divisor = np.maximum(n_averaged, 1)
        return np.asarray(sums / divisor)

    def _refine_vectors(self, view: CohortView, user: Ints, item: Ints, rating: Floats) -> Doubles:
        """User vectors after some steps on the mean squared error of real ratings; item rows stand still."""
        vectors = view.private.astype(np.float64)
        item_rows = view.items[item]
        rows = item_rows.astype(np.float64)
        n_ratings = np.bincount(user, minlength=len(vectors))
        counts = np.maximum(n_ratings, 1)
        divisor = counts[:, None]
        rates = self.context.scorer.list_learning_rates(view.n_items)
        rate = rates["p"]
        for _ in range(self.config.local_steps):
            products = vectors[user] * rows
            error = rating - products.sum(1)
            slope = np.zeros_like(vectors)
            slopes = error[:, None] * rows
            np.add.at(slope, user, slopes)
            step = rate * 2 * slope
            vectors = vectors + step / divisor
        return vectors

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """The gradient of each item by itself, at the rate of people's vectors.

        A local step divides it by how many samples there are, and multiplies it by `item_lr_scale`.
        """
        n_drawn = 1 + self.context.train.negatives
        of_users = view.train.counts() * n_drawn
        padded = np.append(of_users, 0)
        of_clients = np.add.reduceat(padded, view.user_ptr)[:-1]
        n_samples = of_clients.astype(np.float64)
        scale = self.context.scorer.compute_item_rate_scale(view.n_items)
        factor = n_samples / scale
        rows = upload.values["rows"].scale(factor)
        return upload.with_value("rows", rows), {}


def _find_real_samples(view: CohortView, own: Ragged) -> Bools:
    """Which samples are the user's own items: a user's list begins with them, and negatives follow."""
    n_samples = own.counts()
    list_starts = own.ptr[:-1]
    starts = np.repeat(list_starts, n_samples)
    places = np.arange(len(own.ids))
    place = places - starts
    n_items = view.train.counts()
    n_real = np.repeat(n_items, n_samples)
    return np.asarray(place < n_real)
