"""Where an upload meets a total, and a total the table, what does not fit is refused before anything is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.types import ServerState
from tacita.learn.rows import apply_total
from tacita.messages import (
    CooccurrenceTerms,
    DenseArrays,
    SparseRows,
    Spec,
    Total,
    Upload,
    add_upload,
    empty_total,
    merge_totals,
    touched_name,
)

SERVER = ServerState(np.zeros((4, 3), np.float32), {"w": np.zeros((2, 2), np.float32)})
SPECS = (Spec("rows", (4, 3), touched=True), Spec("heads/w", (2, 2)), Spec("part.share", ()))


def upload(
    client: Any = (0, 0, 1), item: Any = (0, 3, 3), value: Any = None, weight: Any = (1.0, 1.0), **other: Any
) -> Upload:
    moved = np.ones((len(item), 3), np.float32) if value is None else value
    values = {
        "rows": SparseRows(np.array(client, np.int32), np.array(item, np.int32), moved),
        "heads/w": DenseArrays(np.ones((2, 2, 2), np.float32)),
        "part.share": DenseArrays(np.ones(2)),
    }
    named = {name.replace("__", "/").replace("_of_", "."): DenseArrays(v) for name, v in other.items()}
    weights = np.asarray(weight, np.float64)
    return Upload({**values, **named}, weights, np.arange(2, dtype=np.uint64))


def test_the_sum_of_weights_does_not_depend_on_how_clients_are_chunked() -> None:
    weight = np.random.default_rng(1).random(1000)
    value = DenseArrays(np.ones((1000, 1)))

    def summed(chunk: int) -> float:
        total = empty_total((Spec("x", (1,)),))
        for lo in range(0, 1000, chunk):
            some = slice(lo, lo + chunk)
            part = Upload({"x": DenseArrays(value.value[some])}, weight[some], np.arange(1000, dtype=np.uint64)[some])
            total = add_upload(total, part, (Spec("x", (1,)),))
        assert total.weight == total["x"][0]
        return total.weight

    assert len({summed(chunk) for chunk in (1, 3, 64, 1000)}) == 1


def bytes_of(total: Total) -> list[bytes]:
    return [entry.tobytes() for entry in total.sums.values()]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"value": np.ones((3, 1), np.float32)}, "rows"),  # was folded into column 0
        ({"value": np.ones((3, 4), np.float32)}, "rows"),  # ran over into the next item's row
        ({"value": np.ones((2, 3), np.float32)}, "rows"),
        ({"client": [0, 0]}, "client"),
        ({"item": [0, 3, 4]}, "item"),
        ({"item": [0, -1, 3]}, "item"),
        ({"client": [0, 0, 2]}, "client"),
        ({"weight": [1.0, np.nan]}, "weights"),
        ({"weight": [1.0, np.inf]}, "weights"),
        ({"weight": [1.0, -1.0]}, "weights"),
        ({"weight": np.ones((2, 1))}, "weight"),
        ({"heads__w": np.ones((2, 2, 1), np.float32)}, "heads/w"),
        ({"heads__w": np.ones((3, 2, 2), np.float32)}, "heads/w"),
        ({"heads__v": np.ones((2, 2, 2), np.float32)}, "heads/v"),
        ({"part_of_share": np.ones((2, 5))}, "part.share"),
        ({"part_of_share": np.ones(1)}, "part.share"),
    ],
)
def test_an_upload_of_another_shape_is_refused_and_nothing_is_added(changed: dict[str, Any], word: str) -> None:
    total = add_upload(empty_total(SPECS), upload(), SPECS)
    before = bytes_of(total)
    with pytest.raises(TacitaError, match=word):
        add_upload(total, upload(**changed), SPECS)
    assert bytes_of(total) == before


def test_an_upload_that_fits_is_added() -> None:
    total = add_upload(add_upload(empty_total(SPECS), upload(), SPECS), upload(weight=[2.0, 0.0]), SPECS)
    assert total["rows"][:, 0].tolist() == [3, 0, 0, 4]
    assert total[touched_name("rows")].tolist() == [3, 0, 0, 4]
    assert (total.n_clients, total.weight) == (3, 4)
    nothing = upload(client=[], item=[], value=np.zeros((0, 3), np.float32))
    assert add_upload(total, nothing, SPECS)["rows"][:, 0].tolist() == [3, 0, 0, 4]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda entry: entry.with_sums({"rows": entry["rows"][:, :1]}), "rows"),
        (lambda element: element.with_sums({"heads/w": np.ones(2)}), "heads/w"),
    ],
)
def test_totals_are_never_stretched_to_fit(change: Callable[[Total], Total], word: str) -> None:
    whole = add_upload(empty_total(SPECS), upload(), SPECS)
    with pytest.raises(TacitaError, match=word):
        merge_totals(whole, change(whole))
    with pytest.raises(TacitaError, match=word):
        apply_total(SERVER, change(whole), TrainConfig(), 2.0)


def test_per_client_fields_are_copied() -> None:
    """The upload's memory is used again for the next cohort; who dropped out is not there."""
    specs = (Spec("scores", (9,), seen="each"),)
    buffer = np.array([0.5, 0.25, 1.0], np.float32)
    rows = SparseRows(np.array([0, 1, 2], np.int32), np.array([3, 8, 1], np.int32), buffer)
    entry = Upload({"scores": rows}, np.array([1.0, 0.0, 1.0]), np.array([70, 71, 72], np.uint64))
    total = add_upload(empty_total(specs), entry, specs)
    buffer[:] = -1
    two = replace(entry, weight=np.array([0.0, 1.0, 0.0]), sender=np.array([80, 81, 82], np.uint64))
    total = add_upload(total, two, specs)
    scores = total.each["scores"]
    assert scores.sender.tolist() == [70, 72, 81]
    assert isinstance(scores.value, SparseRows)
    assert scores.value.client.tolist() == [0, 1, 2]
    assert scores.value.item.tolist() == [3, 1, 8]
    assert scores.value.value.tolist() == [0.5, 1.0, -1.0]
    assert total.sums == {}


def test_histories_cannot_be_per_client_fields() -> None:
    terms = CooccurrenceTerms(np.zeros(1, np.int32), np.array([0, 2]), np.array([0, 1], np.int32), np.ones(1), 3)
    entry = Upload({"pairs": terms}, np.ones(1), np.zeros(1, np.uint64))
    specs = (Spec("pairs", (3, 3), seen="each"),)
    with pytest.raises(TacitaError, match="summed, never seen by itself"):
        add_upload(empty_total(specs), entry, specs)


lists = st.lists(st.integers(0, 6), unique=True, max_size=5)
clients = st.lists(st.tuples(lists, st.floats(-3, 3), st.floats(0, 4)), min_size=1, max_size=6)


def made(told: list[tuple[list[int], float, float]]) -> tuple[Upload, tuple[Spec, ...]]:
    n = len(told)
    ptr = np.concatenate([[0], np.cumsum([len(items) for items, _, _ in told])]).astype(np.int64)
    item = np.array([i for items, _, _ in told for i in items], np.int32)
    client = np.repeat(np.arange(n, dtype=np.int32), np.diff(ptr))
    draws = np.random.default_rng(n)
    values = {
        "rows": SparseRows(client, item, draws.normal(size=(len(item), 2)).astype(np.float32)),
        "few": DenseArrays(draws.normal(size=(n, 3))),
        "pairs": CooccurrenceTerms(np.arange(n, dtype=np.int32), ptr, item, np.array([f for _, f, _ in told]), 7),
    }
    specs = (Spec("rows", (7, 2)), Spec("few", (3,)), Spec("pairs", (7, 7)))
    return Upload(values, np.array([w for _, _, w in told]), np.arange(n, dtype=np.uint64)), specs


def whole_arrays(one: Upload, c: int) -> list[Any]:
    """What client c sends, as whole arrays."""
    rows, few, pairs = one.values["rows"], one.values["few"], one.values["pairs"]
    table, mark = np.zeros((7, 2)), np.zeros(7)
    own = rows.client == c
    table[rows.item[own]] = rows.value[own]
    mark[rows.item[own]] = 1
    return [table, few.value[c], pairs.factor[c] * np.outer(mark, mark)]


@settings(max_examples=40, deadline=None)
@given(clients)
def test_sums_lengths_and_clips_are_those_of_whole_arrays(told: list[tuple[list[int], float, float]]) -> None:
    entry, specs = made(told)
    arrays = [whole_arrays(entry, c) for c in range(entry.n_clients)]
    total = add_upload(empty_total(specs), entry, specs)
    for k, spec in enumerate(specs):
        want = sum(w * array[k] for w, array in zip(entry.weight, arrays, strict=True))
        np.testing.assert_allclose(total[spec.name], want, rtol=1e-6, atol=1e-6)
    length = [np.sqrt(sum((a**2).sum() for a in own_values)) for own_values in arrays]
    np.testing.assert_allclose(entry.norms(), length, rtol=1e-6, atol=1e-6)
    clipped = entry.scale(np.minimum(1, 0.5 / np.maximum(entry.norms(), 1e-12)))
    assert (clipped.norms() <= 0.5 * (1 + 1e-6)).all()


@settings(max_examples=40, deadline=None)
@given(clients)
def test_exact_sums_do_not_depend_on_the_order(told: list[tuple[list[int], float, float]]) -> None:
    entry, specs = made(told)
    split = len(told) // 2
    halves = []
    for part in (slice(0, split), slice(split, None)):
        keep = np.zeros(len(told), bool)
        keep[part] = True
        halves.append(add_upload(empty_total(specs), entry.drop_clients(~keep), specs, exact=True))
    whole = add_upload(empty_total(specs), entry, specs, exact=True)
    plain = add_upload(empty_total(specs), entry, specs)
    for name in whole.sums:
        assert np.array_equal(merge_totals(halves[1], halves[0])[name], whole[name])
        np.testing.assert_allclose(whole[name], plain[name], atol=1e-5)
