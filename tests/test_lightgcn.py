"""LightGCN on a user's own star: closed forms against the whole matrix (spec G.1.7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.oracle import make_backbone
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Doubles, Ragged
from tacita.models import Backbone, Context
from tacita.models.scoring import score_catalogue, score_with_own_rows


def star_by_matrix(a: Doubles, items: Doubles, likes: list[int], layers: int) -> tuple[Doubles, Doubles]:
    """The user's final vector and every item's, by passing through the normalised adjacency."""
    n = 1 + len(items)
    adjacency = np.zeros((n, n))
    for j in likes:
        adjacency[0, 1 + j] = adjacency[1 + j, 0] = 1
    degree = adjacency.sum(1)
    scale = np.where(degree > 0, np.maximum(degree, 1) ** -0.5, 0)
    matrix = scale[:, None] * adjacency * scale[None]
    passes = [np.concatenate([a[None], items])]
    for _ in range(layers):
        passes.append(matrix @ passes[-1])
    mean = np.mean(passes, axis=0)
    return mean[0], mean[1:]


def represented(backbone: Backbone, a: Doubles, rows: Doubles) -> dict[str, Any]:
    lists = Ragged.from_lists([list(range(len(rows)))])
    return backbone.represent_users({"p": a[None].astype("f4")}, {}, Context.from_lists(lists, rows.astype("f4")))


@pytest.mark.parametrize("likes", [[], [4], [0, 3, 5], list(range(7))], ids=str)
@pytest.mark.parametrize("layers", range(7))
def test_the_closed_form_is_the_whole_matrix(layers: int, likes: list[int]) -> None:
    backbone = make_backbone("lightgcn", layers=layers)
    rng = np.random.default_rng(layers)
    a, items = rng.normal(size=6), rng.normal(size=(7, 6))
    user, others = star_by_matrix(a, items, likes, layers)
    got = score_catalogue(backbone, a[None].astype("f4"), {}, items.astype("f4"), Ragged.from_lists([likes]))
    np.testing.assert_allclose(got[0], others @ user, rtol=1e-4, atol=1e-5)
    result = backbone.represent_users(
        {"p": a[None].astype("f4")}, {}, Context.from_lists(Ragged.from_lists([likes]), items.astype("f4"))
    )
    assert result["u"].dtype == np.float32
    np.testing.assert_allclose(result["u"][0], user, rtol=1e-5, atol=1e-6)


def test_one_item_and_three_layers_make_both_ends_their_mean() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=6), rng.normal(size=6)
    result = represented(make_backbone("lightgcn"), a, b[None])
    np.testing.assert_allclose(result["u"][0], (a + b) / 2, rtol=1e-5)
    np.testing.assert_allclose(b / 4 + result["passed"][0], (a + b) / 2, rtol=1e-5)


def test_a_star_of_four_and_one_layer() -> None:
    rng = np.random.default_rng(1)
    a, rows = rng.normal(size=6), rng.normal(size=(4, 6))
    result = represented(make_backbone("lightgcn", layers=1), a, rows)
    np.testing.assert_allclose(result["u"][0], (a + rows.sum(0) / 2) / 2, rtol=1e-5)
    np.testing.assert_allclose(result["passed"][0], a / 2 / 2, rtol=1e-5)


def test_a_user_without_items_keeps_a_share_of_its_vector() -> None:
    a = np.arange(6, dtype=float)
    result = represented(make_backbone("lightgcn"), a, np.zeros((0, 6)))
    np.testing.assert_allclose(result["u"][0], a / 4)


def test_own_rows_are_read_and_scored() -> None:
    backbone = make_backbone("lightgcn")
    rng = np.random.default_rng(2)
    private, items = rng.normal(size=(2, 6)).astype("f4"), rng.normal(size=(9, 6)).astype("f4")
    likes, own = Ragged.from_lists([[0, 1], [2]]), Ragged.from_lists([[1, 5], [2, 0, 7]])
    change = rng.normal(size=(5, 6)).astype("f4")
    own = Ragged(own.ptr, own.ids, {"moved": change})
    got = score_with_own_rows(backbone, private, {}, items, own, likes)
    for u in range(2):
        table = items.astype(float)
        table[own.row(u)] += change[own.ptr[u] : own.ptr[u + 1]]
        user, others = star_by_matrix(private[u].astype(float), table, likes.row(u).tolist(), 3)
        np.testing.assert_allclose(got[u], others @ user, rtol=1e-4, atol=1e-5)


def test_it_starts_as_normals_of_a_tenth() -> None:
    backbone = make_backbone("lightgcn", dim=32, init_std=0.1)
    keys = derive_keys(f"one{k}" for k in range(400))
    for result in (backbone.init_items(Draws(5), keys), backbone.init_private(Draws(5), keys)):
        assert result.std() == pytest.approx(0.1, rel=0.03)
