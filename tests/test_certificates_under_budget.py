"""Certificates of runs that state an epsilon hold nothing that no release is charged for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import call
from helpers.run_requests import certificate_of
from tacita.core.config import RunConfig, validate_model
from tacita.runs import training
from tacita.runs.assembly import Machine
from tacita.runs.forgetting.certificate import WITHHELD
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists

DATA = "synthetic:users=40,items=30,per_user=9,groups=3"
KINDS: dict[str, dict[str, Any]] = {
    "tally": {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}},
    "tally-order": {"backbone": {"name": "tally-order"}, "privacy": {"epsilon": 8.0}},
    "dpps": {"method": "dpps", "parts": [{"name": "dpps", "releases": 40}]},
}


def trained_run(kind: str, out: Path, **settings: Any) -> Path:
    evaluate = {"k": [5], "select_by": "ndcg@5", "controls": False}
    values = {"data": DATA, "split": {"n_blocks": 2}, "evaluate": evaluate, "train": {"rounds": 2}, **settings}
    config = validate_model(RunConfig, {**values, **KINDS.get(kind, {})}, "a test")
    training.train(config, out, Machine(threads=1))
    return out


def forget_two_items(folder: Path) -> dict[str, Any]:
    saved = open_saved(folder)
    user = saved.ids["users"][3]
    own = read_lists(saved.client_arrays, "history").take(saved.find_user_numbers([user])).ids
    items = [saved.ids["items"][item] for item in own[:2].tolist()]
    request = RawRequest("forget", {user: items}, alone=True)
    return certificate_of(submit_request(folder, request, verify=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_under_a_budget_withholds_exact_figures(kind: str, tmp_path: Path) -> None:
    certificate = forget_two_items(trained_run(kind, tmp_path / "run"))
    assert certificate["request"]["n_items"] == WITHHELD
    assert certificate["request"]["n_edges"] == WITHHELD
    assert certificate["model"]["sha256_data_remaining"] == WITHHELD
    assert certificate["cost"]["bytes_on_devices_mean"] == WITHHELD
    assert certificate["utility"] == "not run"
    assert certificate["guarantee"]["max_score_difference"] == "not run"
    assert set(certificate["audit"].values()) == {"none", "not run"}
    assert certificate["verdict"].startswith("not verified: the run states an epsilon")


def test_a_certificate_without_a_budget_compares(tmp_path: Path) -> None:
    certificate = forget_two_items(trained_run("plain tally", tmp_path / "run", backbone={"name": "tally"}))
    assert certificate["request"]["n_items"] == 2
    assert len(certificate["model"]["sha256_data_remaining"]) == 64
    assert "after" in certificate["utility"]
    assert certificate["verdict"].startswith("pass")


def test_forgetting_under_a_budget_is_shown_in_words(tmp_path: Path) -> None:
    folder = trained_run("tally", tmp_path / "run")
    output = call("forget", "--run", str(folder), "--user", "u3", "--all", "--verify", "--now")
    assert "not verified: the run states an epsilon" in " ".join((output.out + output.err).split())
