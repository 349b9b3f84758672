"""One row of numbers per item: which genres it has, its decade, what its text is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Floats
from tacita.data.features import ItemFeature
from tacita.models.side.text_terms import compute_tfidf, reduce_rank, select_frequent

MOST_GENRES = 512  # categories of a shop can be thousands; rare ones tell little
TEXT_WIDTH = 64


@dataclass(frozen=True)
class FeatureMatrix:
    """Features of items, those that are 0 or 1 apart from those that are numbers."""

    marks: Floats  # (items, genres + decades)
    numbers: Floats  # (items, up to 64)


def build_feature_matrix(items: Sequence[ItemFeature]) -> FeatureMatrix:
    """The features of the given items, in their order."""
    genres = _mark_genres(items)
    decades = _mark_decades(items)
    marks = np.concatenate([genres, decades], axis=1)
    texts = [item.text for item in items]
    numbers = _encode_texts(texts)
    return FeatureMatrix(marks, numbers)


def _mark_genres(items: Sequence[ItemFeature]) -> Floats:
    """(items, genres) 1 where an item is of a genre; where there are too many genres, of the most frequent."""
    spread: Counter[str] = Counter()
    for item in items:
        spread.update(set(item.genres))
    genres = select_frequent(spread, MOST_GENRES)
    shape = (len(items), len(genres))
    marks = np.zeros(shape, np.float32)
    columns = {genre: column for column, genre in enumerate(genres)}
    for row, item in enumerate(items):
        known = [columns[genre] for genre in item.genres if genre in columns]
        marks[row, known] = 1
    return marks


def _mark_decades(items: Sequence[ItemFeature]) -> Floats:
    """(items, decades) 1 where an item is of a decade."""
    decades = _list_decades(items)
    shape = (len(items), len(decades))
    marks = np.zeros(shape, np.float32)
    columns = {decade: column for column, decade in enumerate(decades)}
    for row, item in enumerate(items):
        if item.year is not None:
            decade = item.year // 10
            marks[row, columns[decade]] = 1
    return marks


def _list_decades(items: Iterable[ItemFeature]) -> list[int]:
    years = {item.year for item in items}
    decades = {year // 10 for year in years if year is not None}
    return sorted(decades)


def _encode_texts(texts: Sequence[str]) -> Floats:
    matrix = compute_tfidf(texts)
    if not matrix.nnz:
        return np.zeros((len(texts), 0), np.float32)
    reduced = reduce_rank(matrix, TEXT_WIDTH)
    return reduced.astype(np.float32)
