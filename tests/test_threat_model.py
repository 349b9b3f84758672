"""A lab run that states an epsilon says what no epsilon is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import call
from tacita.core.config import RunConfig, validate_model
from tacita.report.promises import list_privacy_lines
from tacita.report.threat_model import list_uncovered_sentences
from tacita.runs.assembly import Machine
from tacita.runs.ledger import describe_ledger, read_run_ledger
from tacita.runs.training import train

DATA = "synthetic:users=40,items=30,per_user=9,groups=3"
FIXED = {"rounds": 2, "aggregation": "fixed"}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tally": ({"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}}, ["Settings that were tuned"]),
    "dpps": ({"method": "dpps"}, ["The best round is chosen on private validation items"]),
    "dpps central": (
        {"method": "dpps", "parts": [{"name": "dpps", "threat": "central"}], "train": FIXED},
        ["The best round is chosen", "train.denominator = 40"],
    ),
    "dp-fedavg": (
        {"method": "dp-fedavg", "train": {**FIXED, "participation": {"kind": "poisson", "rate": 0.5}}},
        ["The best round is chosen", "train.denominator = 20"],
    ),
    "laplace-noise": ({"parts": [{"name": "laplace-noise", "mode": "ldp"}]}, ["The best round is chosen"]),
}
ALWAYS = (
    "Taken as public: the catalogue of items, how many people are enrolled and all settings.",
    "computed on exact data: scores on validation and test items, every control",
    "never hand out its folder",
)


def config_of(**settings: Any) -> RunConfig:
    evaluate = {"k": [5], "select_by": "ndcg@5", "controls": False}
    values = {"data": DATA, "split": {"n_blocks": 2}, "evaluate": evaluate, "train": {"rounds": 2}, **settings}
    return validate_model(RunConfig, values, "a test")


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_and_its_ledger_say_what_is_outside(kind: str, tmp_path: Path) -> None:
    settings, own = KINDS[kind]
    run = train(config_of(**settings), tmp_path / "run", Machine(threads=1))
    printed = " ".join(list_privacy_lines(run.config, run.result))
    ledger = " ".join(describe_ledger(read_run_ledger(run.folder)))
    for words in (*ALWAYS, *own):
        assert words in printed
        assert words in ledger
        assert words in " ".join(run.result["said_of_privacy"])


def test_the_command_line_prints_it(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    arguments = ["train", "--data", DATA, "--backbone", "tally", "--no-controls", "--out", out]
    said = call(*arguments, "--set", "privacy.epsilon=4", "--set", "split.n_blocks=2", "--reproducible-noise")
    text = " ".join((said.out + said.err).split())
    assert "every control" in text
    assert "follows the seed (reproducible_noise)" in text


def test_items_of_the_data_are_outside_where_they_are_accepted() -> None:
    lines = " ".join(list_uncovered_sentences(config_of(catalogue="from-data"), is_sum=True, has_mean=False))
    assert "tell who has rare items" in lines
    assert "the catalogue of items" not in lines


@pytest.mark.parametrize("split", [{"kind": "blocks", "borders": "quantile"}, {"kind": "random", "k_core": 5}])
def test_a_run_that_couples_people_says_that_its_epsilon_does_not_hold(split: dict[str, Any]) -> None:
    lines = " ".join(list_uncovered_sentences(config_of(split=split), is_sum=True, has_mean=True))
    assert "the epsilon does not hold for that. Train again." in lines
    assert "divides noised sums by who has data" in lines


def test_dates_between_blocks_are_taken_as_public() -> None:
    config = config_of(split={"kind": "blocks", "borders": ["2021-01-01"]})
    assert "the dates between blocks" in " ".join(list_uncovered_sentences(config, is_sum=True, has_mean=False))
