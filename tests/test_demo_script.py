"""What the demo tells: both runs on the same blocks, their bytes and promises, one page, one picture."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tacita.core.errors import TacitaError
from tacita.runs import demo_script
from tacita.runs.assembly import Machine
from tacita.runs.training import TrainingCallbacks

TINY = "synthetic:users=60,items=40,per_user=15,groups=4,drift=0.3"


def test_demo_compares_the_best_model_with_a_published_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short: dict[str, Any] = {"train": {"rounds": 2}}
    best_spec, published_spec = demo_script.DEMO_RUNS
    few_items: dict[str, Any] = {"parts": [{"name": "replay", "top_n": 20}]}
    specs = (
        replace(best_spec, options={**best_spec.options, **short}),
        replace(published_spec, options={**published_spec.options, **short, **few_items}),
    )
    monkeypatch.setattr(demo_script, "DEMO_RUNS", specs)
    best, published = demo_script.train_demo(
        TINY, tmp_path / "both", Machine(threads=1), lambda folder: nullcontext(TrainingCallbacks())
    )
    assert (tmp_path / "both" / demo_script.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert "tally-order" in (tmp_path / "both" / demo_script.PAGE).read_text()
    assert best.run.config.backbone["name"] == "tally-order"
    assert published.run.config.method == "f3crec"
    blocks = len(best.run.result["blocks"])
    assert (best.exchanges, published.exchanges) == (blocks, 2 * blocks)  # one exchange a block, or one a round
    for candidate in (best, published):
        lines = [json.loads(line) for line in (candidate.run.folder / "events.jsonl").read_text().splitlines()]
        assert candidate.up == pytest.approx(sum(line["clients"] * line["bytes_up"] for line in lines) / 60, rel=0.05)
        assert candidate.table_row()["privacy"] == "no epsilon"
    assert best.table_row()[""] != published.table_row()[""]


def test_demo_refuses_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match="exists; choose another --out"):
        demo_script.choose_folder(tmp_path)
    assert demo_script.choose_folder(tmp_path / "new") == tmp_path / "new"
