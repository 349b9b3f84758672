"""Pages are what their cells give; cells that earlier code made are known, marked and never mixed with others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reproduction_pages
from tacita.core.errors import TacitaError
from tacita.kernels.processor import name_processor
from tacita.methods import resolve_config
from tacita.research.experiments import cell_checks, code_changes, reproduction
from tacita.research.experiments.cell_status import list_cell_statuses, with_earlier_lines
from tacita.research.experiments.code_changes import CodeChange
from tacita.research.experiments.experiment_cell import Cells, ExperimentCell
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.single_block import CellLines

TINY = "synthetic:users=60,items=40,per_user=12"


def test_pages_are_what_their_cells_give() -> None:
    lagging = [
        str(path) for pages in reproduction_pages.list_pages() for path in reproduction_pages.list_lagging(pages)
    ]
    assert not lagging, "run `python tests/reproduction_pages.py --write`"


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("fedshare/table3-ml-100k", "fedshare/table3", ["ml-100k"]),
        ("lipm-dpps/table3-ml-1m-interest-popular", "lipm-dpps/table3", ["ml-1m", "interest", "popular"]),
        ("fedkdrec/figure2-part", "fedkdrec/figure2", []),
    ],
)
def test_the_name_of_a_page_says_what_it_shows(name: str, table: str, words: list[str]) -> None:
    assert reproduction_pages.read_name(name) == (table, words)


def test_a_page_of_no_table_is_refused() -> None:
    with pytest.raises(TacitaError, match="no table"):
        reproduction_pages.read_name("fedshare/table99")
    with pytest.raises(TacitaError, match="is called mars"):
        reproduction_pages.read_name("fedshare/table3-mars")


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """Four cells, of which a change of code touches those with `f3crec`."""
    change = CodeChange(name="replay-rounding", modules=["x"], why="It rounds.", parts=["temporal-mean"])
    monkeypatch.setattr(code_changes, "load_code_changes", lambda: (change,))
    cells = []
    for method in ("ft", "f3crec"):
        for seed in (1, 2):
            config = resolve_config({"data": TINY, "method": method, "seed": seed}, "the test")
            cells.append(ExperimentCell(TINY, "mf", method, seed, config))
    return cells


def line_of(cell: ExperimentCell, score: float) -> dict[str, Any]:
    return {
        "key": cell.key,
        "dataset": cell.dataset,
        "backbone": cell.backbone,
        "variant": cell.variant,
        "seed": cell.seed,
        "values": {"ndcg@20": [score, score]},
    }


def test_a_cell_is_finished_stale_or_missing(changed: Cells) -> None:
    plain, _, first, second = changed
    lines = {plain.key: line_of(plain, 0.1), first.settings_key: line_of(first, 0.2)}
    statuses = {(entry.cell.variant, entry.cell.seed): entry for entry in list_cell_statuses(changed, lines)}
    assert statuses[("ft", 1)].status == "finished"
    assert statuses[("ft", 2)].status == "missing"
    assert (statuses[("f3crec", 1)].status, statuses[("f3crec", 1)].changes) == ("stale", ("replay-rounding",))
    assert statuses[("f3crec", 2)].status == "missing"
    assert second.key != second.settings_key


def test_earlier_lines_are_marked_and_never_join_newer_ones(changed: Cells) -> None:
    _, _, first, second = changed
    lines: CellLines = {cell.settings_key: line_of(cell, 0.2) for cell in (first, second)}
    complete = with_earlier_lines(changed, lines)
    assert complete[first.key]["earlier"] == ["replay-rounding"]
    assert second.key in complete
    lines[second.key] = line_of(second, 0.3)
    complete = with_earlier_lines(changed, lines)
    assert first.key not in complete
    assert "earlier" not in complete[second.key]


def test_pages_mark_what_earlier_code_made(changed: Cells) -> None:
    values = {
        "title": "A table",
        "datasets": [TINY],
        "backbones": ["mf"],
        "seeds": 2,
        "metrics": ["ndcg@20"],
        "published_columns": ["D1"],
        "variants": {"ft": {"label": "FT", "method": "ft"}, "f3crec": {"label": "F3CRec", "method": "f3crec"}},
        "quick": {"datasets": [TINY], "backbones": ["mf"], "seeds": 1},
    }
    experiment = Experiment.model_validate(values)
    plan = reproduction.TablePlan(experiment, changed, "paper", "table")
    lines: CellLines = {cell.settings_key: line_of(cell, 0.25) for cell in changed}
    pages = reproduction.render_pages(plan, with_earlier_lines(changed, lines))
    assert "0.2500 ± 0.0000 †" in pages[".md"]
    assert pages[".md"].count("†") == 3  # two values of F3CRec, and the sentence
    assert "it changed since (replay-rounding): F3CRec." in pages[".md"]
    assert "changed since (replay-rounding)" in pages[".html"]
    assert pages[".csv"].splitlines()[0].endswith(",earlier_code")
    current = {cell.key: line_of(cell, 0.25) for cell in changed}
    assert "†" not in reproduction.render_pages(plan, current)[".md"]


def test_a_check_sees_another_value_and_no_other_time() -> None:
    stored = {"seconds": 3.0, "values": {"ndcg@20": [0.1], "CPU seconds": [1.0]}, "users": "abc", "words": {"a": "b"}}
    rerun = {"seconds": 9.0, "values": {"ndcg@20": [0.1], "CPU seconds": [7.0]}, "users": "abc", "words": {}}
    assert cell_checks.list_differences(stored, rerun) == []
    assert cell_checks.list_differences(stored, {**rerun, "users": "abd"}) == ["users"]
    assert cell_checks.list_differences(stored, {**rerun, "values": {"ndcg@20": [0.2]}}) == ["ndcg@20"]


def test_cells_are_drawn_from_every_paper(changed: Cells) -> None:
    stored = [cell_checks.StoredCell(paper, cell, {}) for paper in ("one", "two") for cell in changed]
    drawn = cell_checks.draw_cells(stored, 4, seed=1)
    assert sorted(entry.paper for entry in drawn) == ["one", "one", "two", "two"]
    assert drawn == cell_checks.draw_cells(stored, 4, seed=1)
    assert len(cell_checks.draw_cells(stored, 99, seed=1)) == 8
    with pytest.raises(TacitaError, match="no finished cell"):
        cell_checks.draw_cells([], 1, seed=1)


def test_a_finished_cell_comes_out_of_this_code_once_more(changed: Cells) -> None:
    cell = replace(changed[0], config=changed[0].config.model_copy(update={"train": _few_rounds(changed[0])}))
    first = cell_checks.check_cell(cell_checks.StoredCell("paper", cell, {}), None)
    assert not first.is_identical
    (line,) = cell_checks.run_job(cell_checks.CellJob((cell,), None))
    stored = json.loads(json.dumps(line))
    assert cell_checks.check_cell(cell_checks.StoredCell("paper", cell, stored), None).is_identical


def test_a_verdict_names_another_processor(changed: Cells) -> None:
    def describe(line: dict[str, Any]) -> str:
        return cell_checks.CellCheck(cell_checks.StoredCell("paper", changed[0], line), ["ndcg@20"]).verdict

    assert describe({"processor": name_processor()}) == "other: ndcg@20"
    assert "run on elsewhere; this processor is" in describe({"processor": "elsewhere"})
    assert "its processor is not known" in describe({})


def _few_rounds(cell: ExperimentCell) -> Any:
    return cell.config.train.model_copy(update={"rounds": 2})


def test_data_that_is_not_there_is_said(changed: Cells, tmp_path: Path) -> None:
    config = changed[0].config.model_copy(update={"data": "gowalla"})
    cell = replace(changed[0], config=config)
    check = cell_checks.check_cell(cell_checks.StoredCell("paper", cell, {}), tmp_path)
    assert "could not run" in check.verdict
    assert not check.is_identical
