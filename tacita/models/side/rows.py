"""From item features to initial item rows.

FedKDRec starts from an autoencoder on side information fused with sentence vectors and gives no dimensions. Ours: a
code of genres, decade and TF-IDF; where a sentence encoder is installed, the mean of the code and the principal
components of the sentence vectors, both with columns of mean 0 and deviation 1. The rows are a tenth of that, so that
they are as large as a random start. An item of which nothing is known gets the mean row, which is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import Doubles, Floats
from tacita.data.features import ItemFeatures, missing_features_error
from tacita.models.side.matrix import build_feature_matrix
from tacita.models.side.sentences import ENCODER, encode_sentences, has_encoder
from tacita.models.side.text_terms import reduce_rank

SCALE = 0.1


def build_side_rows(
    features: ItemFeatures, item_ids: Sequence[str], dim: int, draws: Draws, sentences: bool | None = None
) -> Floats:
    """Initial rows (items, dim); `sentences` says whether to use the encoder, by default where it is installed.

    Rows do not depend on the order of the items.
    """
    from tacita.models.side.autoencoder import encode_matrix  # late: torch takes two seconds to load

    known = sorted(item for item in set(item_ids) if item in features.by_item)
    if not known:
        raise missing_features_error(features.source)
    told = [features.by_item[item] for item in known]
    code = _standardise_columns(encode_matrix(build_feature_matrix(told), dim, draws).astype(np.float64))
    if has_encoder() if sentences is None else sentences:
        code = _standardise_columns(code + _standardise_columns(_compute_components([one.text for one in told], dim)))
    place = {item: n for n, item in enumerate(known)}
    rows = np.zeros((len(item_ids), dim), np.float32)
    for row, item in enumerate(item_ids):
        if item in place:
            rows[row] = SCALE * code[place[item]]
    return rows


def list_sources(features: ItemFeatures, sentences: bool | None = None) -> tuple[str, ...]:
    """What `side_rows` makes rows from, in words for a result."""
    told = features.by_item.values()
    found = {
        "genres": any(one.genres for one in told),
        "decade": any(one.year is not None for one in told),
        "TF-IDF": any(one.text for one in told),
        ENCODER: any(one.text for one in told) and (has_encoder() if sentences is None else sentences),
    }
    return tuple(name for name, used in found.items() if used)


def _compute_components(texts: Sequence[str], dim: int) -> Doubles:
    """Principal components of the sentence vectors, zero without a text and beyond as many as there are."""
    told = np.array([bool(text) for text in texts])
    out = np.zeros((len(texts), dim))
    if told.any():
        vectors = encode_sentences([text for text in texts if text]).astype(np.float64)
        found = reduce_rank(vectors - vectors.mean(axis=0), dim)
        out[told, : found.shape[1]] = found
    return out


def _standardise_columns(columns: Doubles) -> Doubles:
    """Columns with mean 0 and deviation 1; one that does not vary becomes zero."""
    centred = columns - columns.mean(axis=0)
    deviation = centred.std(axis=0)
    return np.where(deviation > 1e-6, centred / np.maximum(deviation, 1e-6), 0.0)
