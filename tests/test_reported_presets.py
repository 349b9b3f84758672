"""A preset is what the tables report: its settings are its row's, and so are its figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import reported_presets
from helpers.command_line import call
from tacita.methods import list_preset_names, resolve_config
from tacita.round import registry
from tacita.round.preset import TunedSettings
from tacita.round.registry import find_preset, register_preset

REPORTED = reported_presets.list_reported_presets()
DATA = os.environ.get("TACITA_DATA", "")
needs_data = pytest.mark.skipif(not (Path(DATA) / "ml-100k").is_dir(), reason="TACITA_DATA holds no ml-100k")
FAST = ["ft (mf)", "spp (mf)"]  # seconds on one core


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset whose settings were tuned for two models."""
    monkeypatch.setattr(registry, "_PRESETS", dict(registry._PRESETS))
    by_backbone: dict[str, dict[str, Any]] = {
        "mf": {"backbone": {"lr": 0.7}, "train": {"rounds": 9}, "parts": {"replay": {"top_n": 50, "eps": 0.1}}},
        "ncf": {"backbone": {"lr": 0.2}},
    }
    tuned = TunedSettings("f3crec/table2:kd", "ml-100k", by_backbone)
    settings = {"train": {"rounds": 40, "patience": 7, "negatives": 2}}
    register_preset("toy", {"name": "replay", "eps": 0.0}, settings=settings, ours=("train.negatives",), tuned=tuned)
    return "toy"


def resolve(method: str, **values: Any) -> Any:
    return resolve_config({"method": method, **values}, "the test")


@pytest.mark.parametrize("preset", REPORTED, ids=lambda preset: preset.name)
def test_a_preset_has_the_settings_of_its_row(preset: reported_presets.ReportedPreset) -> None:
    assert reported_presets.list_differences(preset) == []


def test_every_tuned_preset_has_a_row() -> None:
    tuned = {name for name in list_preset_names() if find_preset(name).tuned}
    assert {preset.method for preset in REPORTED} == tuned
    assert tuned


@needs_data
@pytest.mark.parametrize("name", FAST)
def test_a_preset_has_the_figures_of_its_row(name: str) -> None:
    preset = next(preset for preset in REPORTED if preset.name == name)
    row = reported_presets.read_score(reported_presets.find_row_line(preset))
    ours = reported_presets.read_score(reported_presets.train_preset(preset))
    assert reported_presets.is_near(ours, row)


def test_tuned_settings_come_before_the_papers_and_after_what_is_said(toy: str) -> None:
    config = resolve(toy, train={"rounds": 3})
    assert (config.train.rounds, config.train.patience) == (3, 7)
    assert config.backbone == {"name": "mf", "lr": 0.7}
    config = resolve(toy, backbone={"name": "mf", "lr": 0.1})
    assert (config.backbone["lr"], config.train.rounds) == (0.1, 9)


def test_tuned_options_join_those_that_are_said_but_never_what_the_method_is(toy: str) -> None:
    assert resolve(toy).parts == [{"name": "replay", "eps": 0.0, "top_n": 50}]
    changes = [{"name": "replay", "weight": 2.0}, {"name": "temporal-mean"}]
    want = [{"name": "replay", "eps": 0.0, "top_n": 50, "weight": 2.0}, {"name": "temporal-mean"}]
    assert resolve(toy, parts=changes).parts == want


def test_another_model_takes_nothing_that_was_tuned_for_this_one(toy: str) -> None:
    config = resolve(toy, backbone={"name": "ncf"})
    assert (config.backbone, config.train.rounds, config.parts) == ({"name": "ncf", "lr": 0.2}, 40, None)
    config = resolve(toy, backbone={"name": "pfedrec"})
    assert (config.backbone, config.train.rounds) == ({"name": "pfedrec"}, 40)


def test_the_papers_settings_have_a_name_of_their_own(toy: str) -> None:
    config = resolve("toy-paper")
    assert (config.backbone, config.train.rounds, config.parts) == ({"name": "mf"}, 40, None)
    assert resolve_config({"method": toy}, "the test", with_tuned=False).train == config.train
    assert "toy-paper" not in list_preset_names()


def test_settings_of_a_method_say_where_they_come_from(toy: str) -> None:
    output = call("settings", toy)
    lines = [line.strip() for line in output.out.splitlines()]
    origins = {line.split(" = ")[0]: line for line in lines if " = " in line}
    assert "train.rounds = 9  tuned on ml-100k, validation (f3crec/table2)" in origins["train.rounds"]
    assert "= 7  paper" in origins["train.patience"]
    assert "= 2  ours" in origins["train.negatives"]
    assert "= 0.7  tuned" in origins["backbone.lr"]
    assert "= 0.0  the method itself" in origins["eps"]
    assert "= 0.1  default" in origins["weight"]
    assert "= 40  paper" in call("settings", "toy-paper").out
