"""Short runs of every kind give the numbers they gave when they were frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import frozen

FROZEN: dict[str, Any] = json.loads(frozen.FILE.read_text())
ELSEWHERE: dict[str, Any] = json.loads(frozen.FILE.with_name("frozen_elsewhere.json").read_text())
"""Runs in which a last digit decides what is picked: the numbers of the same code on another kind of processor."""


@pytest.mark.parametrize("kind", [*frozen.KINDS, "resumed"])
def test_run_reproduces_its_frozen_numbers(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    numbers = frozen.resumed(out) if kind == "resumed" else frozen.run(kind, out)
    summary = frozen.summary_of(numbers)
    expected = {name: value for name, value in FROZEN[kind].items() if name != "digest"}
    if kind in ELSEWHERE and summary == pytest.approx(ELSEWHERE[kind], rel=2e-4, abs=1e-6):
        return
    assert summary == pytest.approx(expected, rel=2e-4, abs=1e-6)


def test_every_kind_is_frozen() -> None:
    assert FROZEN.keys() == {*frozen.KINDS, "resumed"}
    assert FROZEN["resumed"] == FROZEN["mf f3crec"]
    assert ELSEWHERE.keys() < FROZEN.keys()
