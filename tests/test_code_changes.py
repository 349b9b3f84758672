"""A cell's key knows the code that made it: changes touch the cells they say, and code that changes is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import code_digests
import stable_names
from tacita.core.config import RunConfig
from tacita.methods import list_part_names, resolve_config
from tacita.models import list_backbones
from tacita.research.experiments import code_changes
from tacita.research.experiments.code_changes import CodeChange, load_code_changes
from tacita.research.experiments.experiment_cell import ExperimentCell

PLAIN = '''
"""A module."""
from math import sqrt

def measure(values: list[float]) -> float:
    """The length of a vector."""
    total = 0.0
    for value in values:
        total += value * value
    if total < 0:
        raise ValueError("no length")
    return sqrt(total)
'''


def config_of(method: str = "fedshare", **values: Any) -> RunConfig:
    return resolve_config({"data": "ml-100k", "method": method, **values}, "the test")


def cell_of(method: str = "fedshare", **values: Any) -> ExperimentCell:
    config = config_of(method, **values)
    config = config.model_copy(update={"parts": config.parts or _preset_parts(method)})
    return ExperimentCell("ml-100k", config.backbone["name"], "a variant", 1, config, "once")


def _preset_parts(method: str) -> list[dict[str, Any]]:
    from tacita.methods import list_preset_parts

    return list_preset_parts(method)


def with_changes(monkeypatch: pytest.MonkeyPatch, *changes: CodeChange) -> None:
    monkeypatch.setattr(code_changes, "load_code_changes", lambda: changes)


def change_of(name: str = "a-change", **selectors: Any) -> CodeChange:
    return CodeChange(name=name, modules=["kernels.steps"], why="It counts otherwise.", **selectors)


@pytest.mark.parametrize(
    ("selectors", "is_touched"),
    [
        ({}, True),
        ({"parts": ["shared-graph"]}, True),
        ({"parts": ["prediction-transfer"]}, False),
        ({"backbones": ["ego"]}, True),
        ({"parts": ["prediction-transfer"], "backbones": ["ego"]}, True),
        ({"kinds": ["choose"]}, False),
        ({"where": {"train.objective": "bpr"}}, True),
        ({"where": {"train.objective": "bce"}}, False),
        ({"where": {"shared-graph.bpr": True}}, True),  # the option's default
        ({"where": {"shared-graph.bpr": False}}, False),
        ({"where": {"prediction-transfer.server_loss": "sum"}}, False),  # no such part
    ],
)
def test_a_change_touches_the_cells_that_it_names(selectors: dict[str, Any], is_touched: bool) -> None:
    cell = cell_of()
    assert change_of(**selectors).touches(cell.config, cell.kind) is is_touched


def test_a_cell_that_no_change_touches_keeps_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of()
    with_changes(monkeypatch, change_of(backbones=["mf"]))
    assert cell.key == cell.settings_key
    assert cell.earlier_keys == {}


def test_a_changed_cell_has_a_new_key_and_knows_its_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of()
    first = change_of("first", backbones=["ego"])
    with_changes(monkeypatch, first)
    key_after_first = cell.key
    with_changes(monkeypatch, first, change_of("other", backbones=["mf"]), change_of("second"))
    assert len({cell.key, key_after_first, cell.settings_key}) == 3
    assert cell.earlier_keys == {key_after_first: ["second"], cell.settings_key: ["first", "second"]}
    assert replace(cell, kind="choose").key != cell.key


def test_committed_changes_name_parts_and_backbones_that_there_are() -> None:
    changes = load_code_changes()
    assert len({change.name for change in changes}) == len(changes)
    for change in changes:
        assert {*change.parts} <= {*list_part_names()}
        assert {*change.backbones} <= {*list_backbones()}


def test_names_of_changes_are_as_they_were() -> None:
    """A renamed change loses the cells that ran since, a dropped one brings back those from before."""
    names = [change.name for change in load_code_changes()]
    noted = json.loads(stable_names.CODE_CHANGES.read_text())
    assert names[: len(noted)] == noted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A module.", "Another word."),
        ("list[float]", "tuple[float, ...]"),
        ("total", "square"),
        ("values", "numbers"),
        ("no length", "less than nothing"),
        ("    total = 0.0", "    # begins at nothing\n    total = 0.0"),
    ],
)
def test_words_do_not_change_a_digest(old: str, new: str) -> None:
    assert code_digests.digest_source(PLAIN.replace(old, new)) == code_digests.digest_source(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.0", "0.5"), ("value * value", "value * total"), ("+=", "-="), ("sqrt", "cbrt"), ("total < 0", "total <= 0")],
)
def test_what_counts_changes_a_digest(old: str, new: str) -> None:
    assert code_digests.digest_source(PLAIN.replace(old, new)) != code_digests.digest_source(PLAIN)


def test_every_part_and_backbone_is_in_a_digested_module() -> None:
    from tacita.methods import find_part_class
    from tacita.models import find_backbone_class

    modules = code_digests.list_counted_modules()
    classes = [find_part_class(name) for name in list_part_names()]
    classes += [find_backbone_class(name) for name in list_backbones()]
    for cls in classes:
        if cls.__module__.startswith("tacita."):
            assert cls.__module__.removeprefix("tacita.") in modules
