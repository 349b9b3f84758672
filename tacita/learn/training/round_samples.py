"""What the clients of a cohort learn from in a round, as flat arrays: the samples, and the order of their turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.flat_indices import expand_spans
from tacita.core.types import Floats, Ints, Longs

Spans = tuple[Longs, Longs]
"""The start and the length of a span for each user."""


@dataclass(frozen=True)
class RoundSamples:
    """Every user's samples, flat: its positives, then the negatives of each draw, then the samples of parts."""

    ptr: Longs  # (users + 1,)
    item: Ints
    label: Floats
    positives: Longs  # (users,)
    negatives: Longs  # (users,) in one draw
    part_samples: Longs  # (users,)
    draws: int  # one a round, or one an epoch
    weight: Floats | None = None  # of the positives, user by user; None: 1

    def list_epoch_indices(self, draw: int) -> Longs:
        """The samples of one draw and those of parts, user by user."""
        return _interleave_spans(self._positive_spans, self._find_negative_spans(draw), self._part_spans)

    def list_draw_indices(self, draw: int) -> Longs:
        """The positives and the negatives of one draw, user by user."""
        return _interleave_spans(self._positive_spans, self._find_negative_spans(draw))

    def list_negative_indices(self, draw: int) -> Longs:
        """The negatives of one draw, user by user."""
        starts, counts = self._find_negative_spans(draw)
        return expand_spans(starts, counts)

    @property
    def _positive_spans(self) -> Spans:
        return self.ptr[:-1], self.positives

    @property
    def _part_spans(self) -> Spans:
        return self.ptr[1:] - self.part_samples, self.part_samples

    def _find_negative_spans(self, draw: int) -> Spans:
        starts = self.ptr[:-1] + self.positives + draw * self.negatives
        return starts, self.negatives

    def match_positives(self) -> Longs:
        """The positive of every negative: each has the same number of them, in turn; a positive is its own."""
        counts = np.diff(self.ptr)
        first = np.repeat(self.ptr[:-1], counts)
        number = np.arange(self.ptr[-1]) - first
        n_positives = np.repeat(np.maximum(self.positives, 1), counts)
        return np.asarray(first + number % n_positives, np.int64)


def _interleave_spans(*kinds: Spans) -> Longs:
    """Spans of several kinds, user by user."""
    starts = np.stack([kind_starts for kind_starts, _ in kinds], axis=1)
    counts = np.stack([kind_counts for _, kind_counts in kinds], axis=1)
    return expand_spans(starts.reshape(-1), counts.reshape(-1))


@dataclass(frozen=True)
class SampleOrder:
    """Where each client's turns of an epoch begin, the sample of every turn, and how whole people are batched."""

    ptr: Longs
    order: Longs
    batch_ptr: Longs | None = None
    batch_start: Longs | None = None
    batches_per_group: Longs | None = None


def choose_epoch_turns(samples: RoundSamples, turns: Longs, epoch: int, pairs: bool) -> Longs:
    """The samples of an epoch's turns, where an epoch does not have all of them."""
    if not pairs and samples.draws == 1:
        return turns
    draw = epoch if samples.draws > 1 else 0
    indices = samples.list_negative_indices(draw) if pairs else samples.list_epoch_indices(draw)
    return np.asarray(indices[turns])
