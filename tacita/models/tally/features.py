"""Public features of items as columns along which noisy sums can be read: genres, and a dozen spans of years."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Floats
from tacita.data.features import ItemFeature, ItemFeatures

SPANS = 12  # of years, with about as many items in each


def encode_item_features(features: ItemFeatures, item_ids: Sequence[str]) -> Floats:
    """(items, columns) 1 where an item is of a genre, or of a span of years; 0 for an item without features."""
    items = [features.by_item.get(item) for item in item_ids]
    genres = _mark_genres(items)
    spans = _mark_spans(items)
    marks = np.concatenate([genres, spans], axis=1)
    is_used = marks.any(axis=0)
    if not is_used.any():
        raise TacitaError(
            f"dataset {features.source} tells no genre and no year of its items; set privacy.features=false."
        )
    return marks[:, is_used]


def _mark_genres(items: Sequence[ItemFeature | None]) -> Floats:
    known: set[str] = set()
    for item in items:
        if item is not None:
            known.update(item.genres)
    columns = {genre: column for column, genre in enumerate(sorted(known))}
    marks = np.zeros((len(items), len(columns)), np.float32)
    for row, item in enumerate(items):
        if item is None:
            continue
        for genre in item.genres:
            marks[row, columns[genre]] = 1.0
    return marks


def _mark_spans(items: Sequence[ItemFeature | None]) -> Floats:
    years = [_read_year(item) for item in items]
    year = np.array(years)
    marks = np.zeros((len(items), SPANS), np.float32)
    dated = np.flatnonzero(year)
    if len(dated):
        quantiles = np.linspace(0, 1, SPANS + 1)[1:-1]
        borders = np.quantile(year[dated], quantiles)
        span = np.searchsorted(borders, year[dated], side="right")
        marks[dated, span] = 1.0
    return marks


def _read_year(item: ItemFeature | None) -> int:
    """The year of an item; 0: unknown."""
    if item is None:
        return 0
    return item.year or 0
