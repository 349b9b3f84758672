"""Inverses that hold in any size, sums over pairs, and products with B, each against a plain oracle."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_lists
from tacita.core.types import Doubles, Longs, Ragged
from tacita.messages import CooccurrenceTerms
from tacita.models.tally import model as linear
from tacita.models.tally import solver as solving
from tacita.models.tally.model import Tally, TallyConfig
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import add_products, pack_weights


def positive(n: int, seed: int = 0) -> Doubles:
    half = np.random.default_rng(seed).normal(size=(n, n))
    return half @ half.T + n * np.eye(n)


@pytest.mark.parametrize("n", [9, 16, 17, 64, 101])
def test_halves_invert_like_the_whole(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = positive(n)
    want = solving.invert_in_place(np.tril(whole))
    monkeypatch.setattr(solving, "MAX_WHOLE", 8)
    result = solving.invert_in_place(np.tril(whole))
    assert result is not None
    assert want is not None
    assert np.array_equal(result, result.T)
    np.testing.assert_allclose(result, want, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("at", [0, 7, 8, 30, 63])
def test_halves_see_a_matrix_that_is_not_positive_definite(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "MAX_WHOLE", 8)
    whole = positive(64)
    whole[at, at] = -1.0
    assert solving.invert_in_place(np.tril(whole)) is None


LARGE = """
import numpy as np
from tacita.models.tally.solver import invert_in_place
n, rank = 18_000, 40
x = np.random.default_rng(0).normal(size=(n, rank))
gram = x @ x.T
gram[np.diag_indices(n)] += 500.0
inverse = invert_in_place(gram)
assert inverse is not None
core = np.linalg.inv(np.eye(rank) + x.T @ x / 500.0)  # Woodbury: the same inverse, from a small one
want = np.eye(n)[:50] / 500.0 - x[:50] @ core @ x.T / 500.0**2
assert np.abs(inverse[:50] - want).max() < 1e-12, np.abs(inverse[:50] - want).max()
print("whole")
"""


@pytest.mark.slow
def test_a_matrix_on_which_threaded_cholesky_crashes_is_inverted() -> None:
    """In a process of its own: a crash there is no exception. About two minutes and 7 GB."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr[-500:]


def test_a_catalogue_beyond_memory_is_refused_with_the_setting_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "estimate_available_memory", lambda: 24e9)
    Tally(TallyConfig(most_inputs=20_000)).check(20_000, 20_000)
    Tally(TallyConfig()).check(10**6, 10**6)  # read through most_inputs
    with pytest.raises(TacitaError, match=r"backbone.most_inputs=4999"):  # a first block that fits would be read whole
        Tally(TallyConfig(most_inputs=40_000)).check(5_000, 40_000)
    Tally(TallyConfig(most_inputs=4_999)).check(5_000, 40_000)
    with pytest.raises(TacitaError, match=r"60 GB.*24 GB are free.*backbone.most_inputs=31600"):
        Tally(TallyConfig(most_inputs=50_000)).check(50_000, 50_000)


lists_of_items = st.lists(st.lists(st.integers(0, 11), unique=True, max_size=8), min_size=1, max_size=9)


def list_places(matrix: Doubles, shape: PairShape) -> tuple[Longs, Doubles]:
    """Places and values of what is not zero, in ascending places; without inputs of the lower triangle alone."""
    row, column = np.nonzero(np.tril(matrix) if shape.inputs is None else matrix)
    place = row * (row + 1) // 2 + column if shape.inputs is None else column * len(matrix) + row
    order = np.argsort(place)
    return place[order], matrix[row, column][order]


@settings(max_examples=40, deadline=None)
@given(lists_of_items, st.booleans(), st.booleans())
def test_compiled_sums_are_the_sparse_products(lists: list[list[int]], weighted: bool, through_inputs: bool) -> None:
    report = Ragged.from_lists(lists)
    shape = PairShape(12, np.array([1, 4, 11], np.int32) if through_inputs else None)
    factor = np.arange(1.0, len(lists) + 1) ** -0.5 if weighted else np.ones(len(lists))
    chosen = matrix_of_lists(report, 12)
    remainder = (chosen if shape.inputs is None else chosen[:, shape.inputs]).T.tocsr()
    want = remainder @ (scipy.sparse.diags_array(factor) @ chosen).tocsr()
    total, n = np.zeros((shape.n_inputs, 12)), len(lists)
    terms = CooccurrenceTerms(np.arange(n, dtype=np.int32), report.ptr, report.ids, factor, 12, shape.inputs)
    terms.add_to(total, np.zeros(0), np.ones(n))
    assert np.array_equal(total, want.toarray())
    for entry, other in zip(shape.extract_entries(total), list_places(want.toarray(), shape), strict=True):
        assert np.array_equal(entry, other)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("inputs", [[], [0, 2, 5]])
def test_products_with_b(sparse: bool, inputs: list[int]) -> None:
    """B knows six items of eight; what it does not know adds nothing."""
    rng = np.random.default_rng(1)
    known = 6
    b = rng.normal(size=(len(inputs) or known, known)).astype(np.float32)
    b[rng.random(b.shape) < 0.5] = 0
    heads = {**pack_weights(scipy.sparse.csr_array(b) if sparse else b), "inputs": np.array(inputs, np.int32)}
    report = Ragged.from_lists([[0, 7, 3], [], [5, 2, 6, 1]])
    weight = rng.random(len(report.ids)).astype(np.float32)
    scores = np.ones((3, 8), np.float32)
    add_products(report, weight, heads, scores)
    x = np.zeros((3, 8), np.float32)
    x[report.rows(), report.ids] = weight
    want = np.ones((3, 8), np.float32)
    want[:, :known] += (x[:, inputs] if inputs else x[:, :known]) @ b
    np.testing.assert_allclose(scores, want, rtol=1e-6, atol=1e-7)
