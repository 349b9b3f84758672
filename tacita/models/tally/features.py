"""What is public of items, as columns that noised sums can be read along: genres, and a dozen spans of years."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Floats
from tacita.data.features import ItemFeatures

SPANS = 12  # of years, with about as many items in each


def encode_item_features(features: ItemFeatures, item_ids: Sequence[str]) -> Floats:
    """(items, columns) 1 where an item is of a genre, or of a span of years; an item of which nothing is said has 0."""
    known = [features.by_item.get(item) for item in item_ids]
    genres = sorted({genre for one in known if one for genre in one.genres})
    column = {genre: n for n, genre in enumerate(genres)}
    year = np.array([one.year or 0 if one else 0 for one in known])
    out = np.zeros((len(known), len(genres) + SPANS), np.float32)
    for row, one in enumerate(known):
        for genre in one.genres if one else ():
            out[row, column[genre]] = 1.0
    dated = np.flatnonzero(year)
    if len(dated):
        borders = np.quantile(year[dated], np.linspace(0, 1, SPANS + 1)[1:-1])
        out[dated, len(genres) + np.searchsorted(borders, year[dated], side="right")] = 1.0
    out = out[:, out.any(axis=0)]
    if not out.shape[1]:
        raise TacitaError(
            f"dataset {features.source} tells no genre and no year of its items; set privacy.features=false."
        )
    return out
