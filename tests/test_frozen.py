"""Short runs of every kind give the numbers they gave when they were frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import frozen
import pytest

FROZEN: dict[str, Any] = json.loads(frozen.FILE.read_text())


@pytest.mark.parametrize("kind", [*frozen.KINDS, "resumed"])
def test_a_frozen_run(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = frozen.resumed(out) if kind == "resumed" else frozen.run(kind, out)
    want = {name: value for name, value in FROZEN[kind].items() if name != "digest"}
    assert frozen.summary_of(found) == pytest.approx(want, rel=2e-4, abs=1e-6)


def test_every_kind_is_frozen() -> None:
    assert FROZEN.keys() == {*frozen.KINDS, "resumed"}
    assert FROZEN["resumed"] == FROZEN["mf f3crec"]
