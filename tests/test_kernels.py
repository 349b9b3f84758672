"""Compiled loops against plain numpy, and what must not matter to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from helpers.oracle import federate, make_backbone, make_block, make_stream, started
from tacita.core.types import CohortView, Floats, LocalModels
from tacita.federation.rounds import run_round
from tacita.kernels.norms import sum_row_squares
from tacita.kernels.products import multiply_matrices, transpose_matrix
from tacita.kernels.sampling import number_client_rows
from tacita.kernels.steps import _FAST, NCF, _read_private_vector, add_weighted_rows
from tacita.kernels.threads import find_share_start
from tacita.methods import Part
from tacita.round.task import TrainingOutcome

HUGE = 10**9  # a catalogue with which no table of all items is made


def borders(counts: list[int]) -> Any:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0], [7], [0, 4, 0]])
@pytest.mark.parametrize("shares", [1, 2, 3, 8])
def test_shares_cover_everything_once(counts: list[int], shares: int) -> None:
    ptr = borders(counts)
    at = [int(find_share_start(ptr, share, shares)) for share in range(shares + 1)]
    assert at[0] == 0
    assert at[-1] == len(counts)
    assert at == sorted(at)


@pytest.mark.parametrize("n_items", [30, HUGE], ids=["a place for every item", "hashed"])
@pytest.mark.parametrize("shares", [1, 2, 5])
def test_distinct_items_are_numbered_as_they_appear(n_items: int, shares: int) -> None:
    rng = np.random.default_rng(0)
    ptr, more_ptr = borders([9, 0, 40, 1]), borders([2, 3, 0, 0])
    item, more = (rng.integers(0, 30, int(p[-1])).astype(np.int32) for p in (ptr, more_ptr))
    row_of, row_of_more = np.full(len(item), -1, np.int32), np.full(len(more), -1, np.int32)
    rows = np.full(len(item) + len(more), -1, np.int32)
    counts = number_client_rows(shares, n_items, ptr, item, more_ptr, more, row_of, row_of_more, rows)
    for c in range(4):
        own, further = item[ptr[c] : ptr[c + 1]].tolist(), more[more_ptr[c] : more_ptr[c + 1]].tolist()
        wanted = list(dict.fromkeys(own + further))
        first = ptr[c] + more_ptr[c]
        assert rows[first : first + counts[c]].tolist() == wanted
        assert row_of[ptr[c] : ptr[c + 1]].tolist() == [wanted.index(i) for i in own]
        assert row_of_more[more_ptr[c] : more_ptr[c + 1]].tolist() == [wanted.index(i) for i in further]


@pytest.mark.parametrize("width", [1, 15, 16, 33, 64])
@pytest.mark.parametrize("kind", ["float32", "float64", "every second column"])
def test_uploads_are_folded_row_by_row(width: int, kind: str) -> None:
    rng = np.random.default_rng(width)
    client = np.sort(rng.integers(0, 5, 60)).astype(np.int32)
    item, weight = rng.integers(0, 7, 60).astype(np.int32), np.array([1.0, 0.3, 0.0, 2.5, 1 / 3])
    value = rng.normal(size=(60, 2 * width)).astype(np.float64 if kind == "float64" else np.float32)
    value = value[:, ::2] if kind == "every second column" else value[:, :width].copy()
    total, touched = rng.normal(size=(7, width)), np.zeros(7)
    slow, values = total.copy(), np.zeros(7)
    add_weighted_rows(client, item, value, weight, total, touched)
    for r in range(60):
        slow[item[r]] += weight[client[r]] * value[r].astype(np.float64)
        values[item[r]] += weight[client[r]]
    assert np.array_equal(total, slow)
    assert np.array_equal(touched, values)


@njit(fastmath=_FAST)
def read(kind: int, private: Floats, d: int, a: Floats) -> Any:
    return _read_private_vector(kind, private, d, a)


@pytest.mark.parametrize("d", [8, 32, 64])
def test_results_are_independent_of_memory_alignment(d: int) -> None:
    """Compilers guard loops against arrays that are close to each other by a second version of the loop."""
    vector = np.random.default_rng(d).normal(size=3 * d + 1).astype(np.float32)
    result = set()
    for gap in (0, 1, 8, 32, 5000):
        memory = np.zeros(10_000, np.float32)
        private, a = memory[100 : 101 + 3 * d], memory[101 + 3 * d + gap : 101 + 4 * d + gap]
        private[:] = vector
        result.add(float(read(NCF, private, d, a)))
        assert np.array_equal(a, vector[2 * d : 3 * d])
    assert len(result) == 1


class Watcher(Part):
    """Looks at the trained rows, so that they cannot be trained and compared in one go."""

    name = "watcher"

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        assert np.abs(local.rows - view.items[local.row_item]).max() > 0
        return TrainingOutcome()


@pytest.mark.parametrize("backbone", ["mf", "ncf", "pfedrec"])
@pytest.mark.parametrize("dim", [6, 32])
def test_training_client_by_client_changes_no_bit(backbone: str, dim: int) -> None:
    rng = np.random.default_rng(1)
    lists = [rng.choice(50, n, replace=False).tolist() for n in (1, 30, 7, 12, 3)]
    stream = make_stream(make_block(0, 50, lists))

    def numbers(*parts: type[Part]) -> tuple[Floats, Floats]:
        fed = federate(stream, make_backbone(backbone, dim=dim), *parts, batch_size=40, local_epochs=2)
        progress = started(fed)
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        return progress.server.items, progress.clients.private

    at_once, watched = numbers(), numbers(Watcher)
    assert all(np.array_equal(first, other) for first, other in zip(at_once, watched, strict=True))


@pytest.mark.parametrize("together", [True, False], ids=["rows lie together", "rows lie anyhow"])
@pytest.mark.parametrize("rows", [0, 1, 5, 700])
def test_lengths_are_those_of_all_rows_of_a_client(rows: int, together: bool) -> None:
    rng = np.random.default_rng(rows)
    client = rng.integers(0, 9, rows).astype(np.int32)
    client = np.sort(client) if together else client
    value = rng.normal(size=(rows, 13)).astype(np.float32)
    wanted = np.bincount(client, weights=(value.astype(np.float64) ** 2).sum(axis=1), minlength=9)
    assert sum_row_squares(client, value, 9) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "shape", [(128, 64, 96), (13, 5, 48), (7, 30, 16), (9, 3, 33), (1, 1, 1), (0, 4, 8), (5, 0, 20)]
)
def test_a_product_is_numpys_and_its_rows_are_what_they_are_alone(shape: tuple[int, int, int]) -> None:
    m, depth, n = shape
    rng = np.random.default_rng(0)
    a = rng.normal(size=(m, depth)).astype(np.float32)
    b = rng.normal(size=(depth, n)).astype(np.float32)
    product = np.full((m, n), np.nan, np.float32)
    multiply_matrices(a, b, product)
    np.testing.assert_allclose(product, a.astype(np.float64) @ b, atol=1e-4)
    beside = rng.normal(size=(m, depth + 3)).astype(np.float32)
    beside[:, 3:] = a
    for view in (np.ascontiguousarray(a.T).T, beside[:, 3:]):
        other = np.full((m, n), np.nan, np.float32)
        multiply_matrices(view, b, other)
        assert np.array_equal(other, product)
    for i in range(m):
        row = np.full((1, n), np.nan, np.float32)
        multiply_matrices(a[i : i + 1], b, row)
        assert np.array_equal(row[0], product[i])
    turned = np.full((depth, m), np.nan, np.float32)
    transpose_matrix(a, turned)
    assert np.array_equal(turned, a.T)
