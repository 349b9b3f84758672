"""Where an upload meets a total, and a total the table, what does not fit is refused before anything is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tacita.aggregate import add, apply_total, empty_total, merge

from tacita.config import TrainConfig
from tacita.errors import TacitaError
from tacita.types import ServerState, Total, Upload

SERVER = ServerState(np.zeros((4, 3), np.float32), {"w": np.zeros((2, 2), np.float32)})


def upload(**other: Any) -> Upload:
    fits: dict[str, Any] = {
        "client": np.array([0, 0, 1], np.int32),
        "item": np.array([0, 3, 3], np.int32),
        "value": np.ones((3, 3), np.float32),
        "heads": {"w": np.ones((2, 2, 2), np.float32)},
        "weight": np.ones(2),
        "extras": {"part.share": np.ones(2)},
    }
    return Upload(**fits | other)


def bytes_of(total: Total) -> list[bytes]:
    arrays = [total.rows, total.row_weight, *total.heads.values(), *total.extras.values()]
    return [np.asarray(one).tobytes() for one in arrays]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"value": np.ones((3, 1), np.float32)}, "value"),  # was folded into column 0
        ({"value": np.ones((3, 4), np.float32)}, "value"),  # ran over into the next item's row
        ({"value": np.ones((2, 3), np.float32)}, "value"),
        ({"client": np.zeros(2, np.int32)}, "client"),
        ({"item": np.array([0, 3, 4], np.int32)}, "item"),
        ({"item": np.array([0, -1, 3], np.int32)}, "item"),
        ({"client": np.array([0, 0, 2], np.int32)}, "client"),
        ({"weight": np.array([1.0, np.nan])}, "weights"),
        ({"weight": np.array([1.0, np.inf])}, "weights"),
        ({"weight": np.array([1.0, -1.0])}, "weights"),
        ({"weight": np.ones((2, 1))}, "weight"),
        ({"heads": {"w": np.ones((2, 2, 1), np.float32)}}, "heads/w"),
        ({"heads": {"w": np.ones((3, 2, 2), np.float32)}}, "heads/w"),
        ({"heads": {"v": np.ones((2, 2, 2), np.float32)}}, "'v'"),
        ({"extras": {"part.share": np.ones((2, 5))}}, "extras/part.share"),
        ({"extras": {"part.share": np.ones(1)}}, "extras/part.share"),
    ],
)
def test_an_upload_of_another_shape_is_refused_and_nothing_is_added(changed: dict[str, Any], word: str) -> None:
    total = add(empty_total(SERVER), upload())
    before = bytes_of(total)
    with pytest.raises(TacitaError, match=word):
        add(total, upload(**changed))
    assert bytes_of(total) == before


def test_an_upload_that_fits_is_added() -> None:
    total = add(add(empty_total(SERVER), upload()), upload(weight=np.array([2.0, 0.0])))
    assert total.rows[:, 0].tolist() == [3, 0, 0, 4]
    assert total.n_clients == 3
    assert total.weight == 4
    nothing = upload(client=np.zeros(0, np.int32), item=np.zeros(0, np.int32), value=np.zeros((0, 3), np.float32))
    assert add(total, nothing).rows[:, 0].tolist() == [3, 0, 0, 4]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda one: replace(one, rows=one.rows[:, :1]), "rows"),
        (lambda one: replace(one, row_weight=one.row_weight[:1]), "row_weight"),
        (lambda one: replace(one, heads={"w": np.ones(2)}), "heads/w"),
    ],
)
def test_totals_are_never_stretched_to_fit(change: Callable[[Total], Total], word: str) -> None:
    whole = add(empty_total(SERVER), upload())
    with pytest.raises(TacitaError, match=word):
        merge(whole, change(whole))
    with pytest.raises(TacitaError, match=word):
        apply_total(SERVER, change(whole), TrainConfig(), 2.0)
