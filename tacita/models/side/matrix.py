"""One row of numbers per item: which genres it has, its decade, what its text is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Floats
from tacita.data.features import ItemFeature
from tacita.models.side.text_terms import compute_tfidf, reduce_rank

MOST_GENRES = 512  # categories of a shop can be thousands; rare ones tell little
TEXT_WIDTH = 64


@dataclass(frozen=True)
class FeatureMatrix:
    """Features of items, those that are 0 or 1 apart from those that are numbers."""

    marks: Floats  # (items, genres + decades)
    numbers: Floats  # (items, up to 64)


def build_feature_matrix(items: Sequence[ItemFeature]) -> FeatureMatrix:
    """The features of the given items, in their order."""
    spread = Counter(genre for one in items for genre in set(one.genres))
    genres = sorted(sorted(spread, key=lambda genre: (-spread[genre], genre))[:MOST_GENRES])
    decades = sorted({one.year // 10 for one in items if one.year is not None})
    marks = np.zeros((len(items), len(genres) + len(decades)), np.float32)
    place = {genre: n for n, genre in enumerate(genres)}
    at_decade = {decade: n for n, decade in enumerate(decades, len(genres))}
    for row, one in enumerate(items):
        marks[row, [place[genre] for genre in one.genres if genre in place]] = 1
        if one.year is not None:
            marks[row, at_decade[one.year // 10]] = 1
    return FeatureMatrix(marks, _encode_texts([one.text for one in items]))


def _encode_texts(texts: Sequence[str]) -> Floats:
    matrix = compute_tfidf(texts)
    if not matrix.nnz:
        return np.zeros((len(texts), 0), np.float32)
    return reduce_rank(matrix, TEXT_WIDTH).astype(np.float32)
