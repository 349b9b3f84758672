"""What uploads of one round show: everything without a defence, next to nothing under a budget, nothing in controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.audit.uploads import READERS, audit_uploads, defences, sign_split
from tacita.cli import main
from tacita.core.errors import TacitaError
from tacita.lab.assembling import Machine
from tacita.methods import configured
from tacita.report import accuracy, upload_audit

DATA = "synthetic:users=160,items=80,per_user=14,groups=4"
RUN = {"data": DATA, "backbone": {"name": "mf", "dim": 8}, "split": {"kind": "random"}, "seed": 1}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return audit_uploads(configured(RUN, "the test"), Machine(), [8.0, 1.0])


def test_plain_uploads_show_what_people_like_and_budgets_hide_it(found: dict[str, Any]) -> None:
    rows = {row["setting"]: row["readers"] for row in found["rows"]}
    assert list(rows) == [one.name for one in defences([1.0, 8.0])]
    assert rows["no defence"]["likes"]["found"] > 0.85
    assert rows["no defence"]["sum"]["found"] > 0.75
    for name, readers in rows.items():
        assert abs(readers["sum"]["control"] - 0.5) < 0.2
        if name.startswith("DPPS"):
            assert abs(readers["likes"]["found"] - readers["likes"]["control"]) < 0.05
        if name.startswith("DP-FedAvg"):
            assert readers["likes"]["found"] is None  # nobody sees single uploads
    assert rows["DP-FedAvg, epsilon 1"]["sum"]["found"] < rows["no defence"]["sum"]["found"] - 0.1


def test_signs_part_liked_from_drawn() -> None:
    rng = np.random.default_rng(2)
    taste, popularity = rng.normal(size=6), rng.random(30)
    upload = np.zeros((30, 6), np.float32)
    liked = np.argsort(-popularity)[:8]
    upload[liked], upload[20:24] = 0.5 * taste, -0.5 * taste
    upload[liked] = 0.5 * taste
    score = sign_split(upload, popularity)
    assert score[liked].min() > np.delete(score, liked).max()
    assert (sign_split(-upload, popularity)[liked] == score[liked]).all()  # the side is told by what is popular


def test_runs_whose_people_upload_no_rows_are_refused() -> None:
    config = configured({**RUN, "backbone": {"name": "tally"}}, "the test")
    with pytest.raises(TacitaError, match="a backbone such as mf"):
        audit_uploads(config, Machine(), [1.0])


def test_the_table_is_written(found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = upload_audit.write(found, READERS, tmp_path / "new")
    text = stem.with_suffix(".md").read_text()
    assert "| no defence |" in text
    assert "DP-FedAvg, epsilon 8 | - |" in text
    assert json.loads(stem.with_suffix(".json").read_text()) == found
    with pytest.raises(SystemExit) as ended:
        main(["audit", "uploads", "--data", DATA, "--epsilon", "0"])
    assert ended.value.code == 2


# accuracy against epsilon

TABLE = "data,model,epsilon,mean,deviation\na,tally,1,0.2,0.01\na,tally,2,0.25,0.01\na,popular,,0.1,\nb,tally,1,0.1,0\n"


def test_accuracy_against_epsilon_is_drawn_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "figures.csv"
    table.write_text(TABLE)
    points = accuracy.read(table)
    assert [one.epsilon for one in points] == [1.0, 2.0, None, 1.0]
    for name in ("a.svg", "a.png"):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(table), "--out", str(tmp_path / name)])
        assert ended.value.code == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert "popular" in drawn
    assert accuracy.draw(points, "svg").decode() == drawn  # the same bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [("data,model\na,b\n", "columns"), (TABLE.replace("0.25", "much"), "line 3"), ("", "columns")],
)
def test_tables_that_are_none_are_refused(text: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "figures.csv"
    table.write_text(text)
    with pytest.raises(TacitaError, match=said):
        accuracy.write(table, tmp_path / "a.png")
    with pytest.raises(TacitaError, match="ending"):
        accuracy.write(table, tmp_path / "a.pdf")


def test_the_figures_of_the_document_are_those_of_the_picture() -> None:
    root = Path(__file__).parents[1] / "docs"
    text = (root / "privacy.md").read_text()
    for one in accuracy.read(root / "audit" / "accuracy.csv"):
        if one.epsilon is not None:
            assert (f"{one.mean:.4f} ± {one.deviation:.4f}" if one.deviation else f"{one.mean:.4f}") in text
