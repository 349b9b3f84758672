"""What uploads of one round show: everything without a defence, next to nothing under a budget, nothing in controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.cli import main
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged
from tacita.methods import resolve_config
from tacita.report import accuracy, upload_audit
from tacita.research.audit import uploads
from tacita.research.audit.preference_attacks import ObservedUploads, average_f1, score_along_main_direction
from tacita.research.audit.uploads import COHORT, READERS, SECURE, audit_uploads, list_defences, observe_uploads
from tacita.runs.assembly import Machine, assemble_federation

DATA = "synthetic:users=160,items=80,per_user=14,groups=4"
RUN = {"data": DATA, "backbone": {"name": "mf", "dim": 8}, "split": {"kind": "random"}, "seed": 1}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return audit_uploads(resolve_config(RUN, "the test"), Machine(), [8.0, 1.0])


def test_plain_uploads_show_what_people_like_and_budgets_hide_it(found: dict[str, Any]) -> None:
    rows = {row["setting"]: row["readers"] for row in found["rows"]}
    assert list(rows) == [defence.name for defence in list_defences([1.0, 8.0])]
    assert rows["no defence"]["likes"]["found"] > 0.95
    assert rows["no defence"]["sum"]["found"] > 0.75
    for name, readers in rows.items():
        assert abs(readers["sum"]["control"] - 0.5) < 0.2
        if name != "no defence":
            assert abs(readers["likes"]["found"] - readers["likes"]["control"]) < 0.05
    assert rows["DP-FedAvg, epsilon 1"]["sum"]["found"] < rows["no defence"]["sum"]["found"] - 0.1


def test_guesses_name_what_people_have_in_plain_uploads_alone(found: dict[str, Any]) -> None:
    """H.G.4: F1 of each attack, beside somebody else's items and as many drawn by chance from what moved."""
    rows = {row["setting"]: row["readers"] for row in found["rows"]}
    plain = rows["no defence"]
    assert plain["sign"]["found"] >= 0.95
    assert plain["top"]["found"] >= 0.75
    assert plain["shadow"]["found"] >= 0.8
    for name in ("sign", "top", "shadow"):
        assert plain[name]["found"] > 2 * max(plain[name]["control"], plain[name]["chance"])
        for setting, readers in rows.items():
            if setting != "no defence":  # what is found is what somebody else would be told to have
                assert abs(readers[name]["found"] - readers[name]["control"]) < 0.05
        noisy_values = rows["DPPS, epsilon 1"][name]
        assert abs(noisy_values["found"] - noisy_values["chance"]) < 0.05


def test_under_secure_sums_a_reader_has_sums_of_cohorts_and_nothing_else() -> None:
    """H.G.4: attacks get one table per cohort, the sum of its people to rounding; single uploads are refused."""
    fed = assemble_federation(resolve_config(RUN, "the test"), Machine())
    plain, secure = list_defences([1.0])[:2]
    people = uploads._draw_people(fed)
    under = uploads._with_config(fed, secure.with_defence(fed.config))
    observations, each = observe_uploads(under, secure, people), observe_uploads(fed, plain, people)
    assert observations.tables.shape == (2, *each.tables.shape[1:])
    assert np.bincount(observations.group).tolist() == [COHORT, COHORT]
    for k in range(2):
        summed = each.tables[k * COHORT : (k + 1) * COHORT].astype(np.float64).sum(axis=0)
        assert np.abs(observations.tables[k] - summed).max() < 1e-5
    with pytest.raises(TacitaError, match="1 were asked"):
        uploads._sum_updates(under, uploads._start_first_block(under), uploads._draw_user_keys(under, people[:1]))


def test_f1_counts_names_that_are_right_and_those_by_chance() -> None:
    train = Ragged.from_lists([[0, 1], [2, 3]])
    tables = np.ones((2, 8, 3), np.float32)
    tables[0, 6:] = 0  # six rows of the first moved
    guess = np.zeros((2, 8), bool)
    guess[0, [0, 1, 2]], guess[1, [2]] = True, True
    result = average_f1(ObservedUploads(tables, np.arange(2), np.arange(2)), guess, train)
    assert result["found"] == pytest.approx((2 * 2 / 5 + 2 * 1 / 3) / 2)
    assert result["control"] == pytest.approx((2 * 1 / 5 + 0) / 2)
    assert result["chance"] == pytest.approx((2 * (3 * 2 / 6) / 5 + 2 * (1 * 2 / 8) / 3) / 2)


def test_the_side_with_few_rows_is_the_liked_one_where_many_are_drawn() -> None:
    rng = np.random.default_rng(5)
    upload = np.outer(np.where(np.arange(30) < 6, 1.0, -1.0), rng.normal(size=5)).astype(np.float32)
    popularity = np.arange(30.0)  # which would tell the wrong side
    assert (score_along_main_direction(upload, popularity)[:6] < 0).all()
    assert (score_along_main_direction(upload, popularity, 0.2)[:6] > 0).all()


def test_gradient_signs_separate_positives_from_negatives() -> None:
    rng = np.random.default_rng(2)
    taste, popularity = rng.normal(size=6), rng.random(30)
    upload = np.zeros((30, 6), np.float32)
    liked = np.argsort(-popularity)[:8]
    upload[liked], upload[20:24] = 0.5 * taste, -0.5 * taste
    upload[liked] = 0.5 * taste
    score = score_along_main_direction(upload, popularity)
    assert score[liked].min() > np.delete(score, liked).max()
    assert (
        score_along_main_direction(-upload, popularity)[liked] == score[liked]
    ).all()  # the side is told by what is popular


def test_runs_whose_people_upload_no_rows_are_refused() -> None:
    config = resolve_config({**RUN, "backbone": {"name": "tally"}}, "the test")
    with pytest.raises(TacitaError, match="a backbone such as mf"):
        audit_uploads(config, Machine(), [1.0])


def test_the_table_is_written(found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = upload_audit.write_audit(found, READERS, tmp_path / "new")
    text = stem.with_suffix(".md").read_text()
    assert "| no defence |" in text
    assert f"| {SECURE} |" in text
    assert json.loads(stem.with_suffix(".json").read_text()) == found
    with pytest.raises(SystemExit) as ended:
        main(["audit", "uploads", "--data", DATA, "--epsilon", "0"])
    assert ended.value.code == 2


# accuracy against epsilon

TABLE = "data,model,epsilon,mean,deviation\na,tally,1,0.2,0.01\na,tally,2,0.25,0.01\na,popular,,0.1,\nb,tally,1,0.1,0\n"


def test_accuracy_against_epsilon_is_drawn_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "figures.csv"
    table.write_text(TABLE)
    points = accuracy.read_points(table)
    assert [point.epsilon for point in points] == [1.0, 2.0, None, 1.0]
    for name in ("a.svg", "a.png"):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(table), "--out", str(tmp_path / name)])
        assert ended.value.code == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert "popular" in drawn
    assert accuracy.draw_points(points, "svg").decode() == drawn  # the same bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [("data,model\na,b\n", "columns"), (TABLE.replace("0.25", "much"), "line 3"), ("", "columns")],
)
def test_malformed_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "figures.csv"
    table.write_text(text)
    with pytest.raises(TacitaError, match=message):
        accuracy.write_picture(table, tmp_path / "a.png")
    with pytest.raises(TacitaError, match="ending"):
        accuracy.write_picture(table, tmp_path / "a.pdf")


def test_the_figures_of_the_document_are_those_of_the_picture() -> None:
    root = Path(__file__).parents[1] / "docs"
    text = (root / "privacy.md").read_text()
    for point in accuracy.read_points(root / "audit" / "accuracy.csv"):
        if point.epsilon is not None:
            assert (f"{point.mean:.4f} ± {point.deviation:.4f}" if point.deviation else f"{point.mean:.4f}") in text
