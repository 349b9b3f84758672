"""What somebody meets who is new here: data that can hardly be tested, words nearly right, folders that are no runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import tacita
from tacita.cli import main
from tacita.errors import TacitaError


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert (left.value.code or 0) == code, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def given(name: str, tested: tuple[bool, ...]) -> str:
    """A published split of ten people; test rows only in the blocks marked in `tested`."""
    rows = ["user,item,block,part"]
    for block, has_test in enumerate(tested):
        for user in range(10):
            parts = ["train"] * 4 + ["valid", "test" if has_test else "train"]
            rows += [f"u{user},i{(user * 3 + block * 5 + n) % 20},{block},{part}" for n, part in enumerate(parts)]
    Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return name


FEW = ("--rounds", "2", "--set", "evaluate.k=[5]", "--set", "evaluate.select_by=ndcg@5")


# Blocks in which nobody is tested


def test_a_block_without_tests_is_a_dash_and_counts_nowhere() -> None:
    out, _ = call("train", "--data", given("x.csv", (True, False, True, True)), *FEW, "--out", "run")
    assert "Nobody could be tested in block 1" in out
    assert "mean 1" not in out
    rows = [line for line in out.splitlines() if line.startswith("│ fedavg")]
    assert rows
    assert all(re.split("[│┃]", row)[3].strip() == "–" and row.count("–") == 1 for row in rows)
    result = json.loads(Path("run/result.json").read_text())
    last = result["blocks"][-1]["on_blocks"]
    assert result["continual"]["ra"] == pytest.approx((last[0] + last[2] + last[3]) / 3)
    diagonal = [block["on_blocks"][-1] for block in result["blocks"]]
    assert result["continual"]["la"] == pytest.approx((diagonal[0] + diagonal[2] + diagonal[3]) / 3)
    page = Path("run/report.html").read_text()
    assert "mean of blocks 1–3 without 1" in page
    assert "mean 1–" not in page


def test_where_nobody_is_tested_no_verdict_is_good() -> None:
    out, err = call("train", "--data", given("x.csv", (False, False)), *FEW, "--out", "run")
    assert "Nobody could be tested in block 0, 1" in out
    assert "0.0000" not in out
    page = Path("run/report.html").read_text()
    for said in (err, page):
        assert "No control is better" not in said
        assert "nobody was tested" in said
    assert json.loads(Path("run/result.json").read_text())["continual"] == {"la": None, "ra": None, "hm": None}


# Words nearly right


@pytest.mark.parametrize(
    ("given_as", "remedy"),
    [
        ({"train.rounds": 2}, 'train={"rounds": ...}'),
        ({"train": {"participation.rate": 0.5}}, 'train={"participation": {"rate": ...}}'),
        ({"train.participaton.rate": 0.5}, 'train={"participation": {"rate": ...}}'),
        ({"backbone.lr": 0.1}, 'backbone={"lr": ...}'),
    ],
    ids=str,
)
def test_a_key_with_its_point_is_told_how_tables_are_written(given_as: dict[str, Any], remedy: str) -> None:
    with pytest.raises(TacitaError, match=re.escape(f"in Python write {remedy}, in TOML [")):
        tacita.train(**given_as)
