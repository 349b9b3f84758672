"""From item features to initial item rows.

FedKDRec starts from an autoencoder on side information fused with sentence vectors and gives no dimensions. Ours: a
code of genres, decade and TF-IDF; where a sentence encoder is installed, the mean of the code and the principal
components of the sentence vectors, both with columns of mean 0 and deviation 1. The rows are a tenth of that, so that
they are as large as a random start. An item without features gets the mean row, which is zero.
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

    known = sorted(features.by_item.keys() & set(item_ids))
    if not known:
        raise missing_features_error(features.source)
    described = [features.by_item[item] for item in known]
    matrix = build_feature_matrix(described)
    code = encode_matrix(matrix, dim, draws)
    code_columns = _standardise_columns(code.astype(np.float64))
    if _uses_encoder(sentences):
        texts = [item.text for item in described]
        components = _compute_components(texts, dim)
        sentence_columns = _standardise_columns(components)
        code_columns = _standardise_columns(code_columns + sentence_columns)
    place = {item: n for n, item in enumerate(known)}
    shape = (len(item_ids), dim)
    rows = np.zeros(shape, np.float32)
    for row, item in enumerate(item_ids):
        if item in place:
            code_row = code_columns[place[item]]
            rows[row] = SCALE * code_row
    return rows


def list_feature_sources(features: ItemFeatures, sentences: bool | None = None) -> tuple[str, ...]:
    """What `build_side_rows` makes rows from, in words for a result."""
    described = features.by_item.values()
    has_texts = any(item.text for item in described)
    is_used = {
        "genres": any(item.genres for item in described),
        "decade": any(item.year is not None for item in described),
        "TF-IDF": has_texts,
        ENCODER: has_texts and _uses_encoder(sentences),
    }
    return tuple(name for name, used in is_used.items() if used)


def _uses_encoder(sentences: bool | None) -> bool:
    if sentences is None:
        return has_encoder()
    return sentences


def _compute_components(texts: Sequence[str], dim: int) -> Doubles:
    """Principal components of the sentence vectors, zero without a text and beyond as many as there are."""
    components = np.zeros((len(texts), dim))
    has_text = np.array([bool(text) for text in texts])
    if not has_text.any():
        return components
    sentences = [text for text in texts if text]
    vectors = encode_sentences(sentences).astype(np.float64)
    centred = vectors - vectors.mean(axis=0)
    reduced = reduce_rank(centred, dim)
    components[has_text, : reduced.shape[1]] = reduced
    return components


def _standardise_columns(columns: Doubles) -> Doubles:
    """Columns with mean 0 and deviation 1; one that does not vary becomes zero."""
    centred = columns - columns.mean(axis=0)
    deviation = centred.std(axis=0)
    scaled = centred / np.maximum(deviation, 1e-6)
    return np.where(deviation > 1e-6, scaled, 0.0)
