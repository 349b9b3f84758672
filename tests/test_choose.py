"""The page "Which should I use?": every preset is in it, forgetting has the price of its way, advice is of cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.lab.assembling import Machine, assemble
from tacita.lab.experiments import plan
from tacita.lab.experiments.choose_page import choose_page
from tacita.lab.experiments.choosing import choose_once
from tacita.methods import configured, preset_names

TINY = "synthetic:users=60,items=60,per_user=15,groups=4"


def test_every_preset_is_compared_and_can_be_configured() -> None:
    experiment, settings = plan.load_experiment("choose")
    assert {one.method for one in experiment.variants.values()} == set(preset_names())
    cells = plan.cells_of(experiment, settings, ["ml-100k"], experiment.backbones, 1)
    assert len(cells) == len(experiment.variants)  # each with one model


def test_rates_of_each_paper_hold_for_its_own_methods() -> None:
    _, settings = plan.load_experiment("choose")
    alone = plan.load_settings("f3crec")
    assert settings.of("ml-100k", "mf", "f3crec").lr == alone.lr["ml-100k"]["mf"]
    assert settings.of("ml-100k", "mf", "fedrec").lr is None  # a rate is nobody else's
    assert settings.of("ml-1m", "ego", "fedshare").lr is not None


def told(method: str, backbone: str, **privacy: float) -> dict[str, object]:
    config = configured(
        {
            "data": TINY,
            "method": method,
            "backbone": {"name": backbone},
            "split": SplitConfig(kind="leave-one-out", k_core=0).model_dump(),
            "train": TrainConfig(rounds=2).model_dump(include={"rounds"}),
            "evaluate": EvaluateConfig(controls=False, k=[10], select_by="ndcg@10").model_dump(),
            **({"privacy": privacy} if privacy else {}),
        },
        "here",
    )
    assert isinstance(config, RunConfig)
    return choose_once(assemble(config, Machine(threads=1)))


@pytest.mark.parametrize(
    ("method", "backbone", "forgets", "sees"),
    [
        ("fedavg", "tally", "tally: exact", "gives people away"),
        ("fedavg", "tally-order", "tally-order: exact", "what follows what"),
        ("fedavg", "mf", "trains again: exact", "which rows"),
        ("fedshare", "ego", "contrastive-unlearning: not exact", "what the person shares"),
        ("fedkdrec", "neumf", "trains again: exact", "scores"),
    ],
)
def test_a_run_is_told_with_what_forgetting_costs(method: str, backbone: str, forgets: str, sees: str) -> None:
    line = told(method, backbone)
    words, values = line["words"], line["values"]
    assert isinstance(words, dict)
    assert isinstance(values, dict)
    assert words["forgets"].startswith(forgets)
    assert sees in words["sees"]
    assert values["forgetting, CPU seconds"][0] > 0
    assert "epsilon" not in values


def test_a_budget_is_told() -> None:
    line = told("fedavg", "tally", epsilon=4.0)
    assert line["values"]["epsilon"] == [4.0]  # type: ignore[index]
    assert "with noise" in line["words"]["sees"]  # type: ignore[index]
    assert "not exact" in line["words"]["forgets"]  # type: ignore[index]


def test_the_advice_is_made_of_the_cells(tmp_path: Path) -> None:
    experiment, settings = plan.load_experiment("choose")
    names = ["popular", "tally", "tally_private_8", "fedavg"]
    cells = plan.cells_of(experiment, settings, ["ml-100k"], ["tally", "mf"], 2, names)
    quality = {"popular": 0.05, "tally": 0.09, "tally_private_8": 0.06, "fedavg": 0.04}
    lines = {}
    for cell in cells:
        values = {"ndcg@10": [quality[cell.variant] + 0.001 * cell.seed], "hr@10": [0.1]}
        if cell.variant == "tally_private_8":
            values["epsilon"] = [8.0]
        lines[cell.key] = {"values": values, "words": {"forgets": "tally: exact", "sees": "a sum"}}
    page = choose_page(experiment, cells, lines)
    assert "**Best quality**: tally on tally (NDCG@10 0.0915 ±" in page
    assert "**With an epsilon**: tally, epsilon 8" in page
    assert "**Below most popular** (0.0515 ± 0.0064): fedavg." in page
    table = [row for row in page.splitlines() if row.startswith("| ") and "model" not in row]
    first = [float(row.split("|")[3].split("±")[0]) for row in table]
    assert np.all(np.diff(first) <= 0)  # best first
