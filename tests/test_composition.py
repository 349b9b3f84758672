"""Several papers in one run: it runs, kill -9 changes neither numbers nor ledger, and what is shared can come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.examples import load_example
from helpers.killed_runs import KILL_SCRIPT
from helpers.run_requests import certificate_of
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays
from tacita.methods import resolve_config
from tacita.methods.personal.dpps import DPPS
from tacita.privacy.ledger import ACCOUNT_ARRAYS, MICRO
from tacita.runs.assembly import build_plan
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.ledger import read_run_ledger
from tacita.runs.run_folder import open_saved

SMALL = "synthetic:users=60,items=40,per_user=12"
FOUR = load_example("all_four")
QUIET: dict[str, Any] = {
    "evaluate": {"controls": False},
    "split": {"kind": "blocks", "n_blocks": 2},
    "privacy": {"reproducible_noise": True},  # else no two runs have the same numbers
}
BUDGET = {"name": "dpps", "clip": 0.05, "releases": 4}  # of six rounds: some people must stop

KINDS: dict[str, dict[str, Any]] = {
    "all four": {
        "parts": [one if one["name"] != "dpps" else BUDGET for one in FOUR.PARTS],
        "train": {"rounds": 3, "aggregation": "mean"},
    },
    "f3crec-dpps": {"method": "f3crec-dpps", "parts": [BUDGET], "train": {"rounds": 3}},
    "fedshare-dpps": {
        "method": "fedshare-dpps",
        "parts": [BUDGET],
        "train": {"rounds": 3, "local_epochs": 1, "participation": {"kind": "all"}},
    },
}


def config_of(kind: str) -> str:
    message = {"data": SMALL, **QUIET, **KINDS[kind]}
    return resolve_config(message, "the test").model_dump_json(exclude_none=True)


def accounts(folder: Path) -> dict[str, Any]:
    state = read_arrays(folder / "clients.safetensors")[0]
    return {name: state[f"parts/dpps/{name}"] for name in ACCOUNT_ARRAYS}


def keeps_its_budgets(folder: Path) -> None:
    """Nobody has spent more than their budget, and what is written down is what the releases cost."""
    (part,) = (entry for entry in build_plan(open_saved(folder).config).parts if isinstance(entry, DPPS))
    account = accounts(folder)
    spent = part.ledger().compute_spent_epsilon(account)
    assert (spent <= account["budget"] * MICRO + 1e-9).all()
    tier = read_arrays(folder / "clients.safetensors")[0]["parts/dpps/tier"]
    each = np.ceil((1 / part.compute_noise_multipliers()[np.maximum(tier, 0)]) ** 2 / 1e-12)
    assert np.array_equal(account["spent"][:, 0], account["times"][:, 0] * each)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_changes_neither_numbers_nor_ledger(kind: str, tmp_path: Path) -> None:
    """The killer compares result, server and devices, accounts among them, with the unbroken run's, byte by byte."""
    command = [sys.executable, "-c", KILL_SCRIPT, config_of(kind), "7", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["kills"] >= document["cases"] >= 1
    whole = tmp_path / "whole"
    result = json.loads((whole / "result.json").read_text())
    assert result["privacy"]["silent_by_budget"] > 0
    assert accounts(whole)["times"][:, 0].max() == BUDGET["releases"]
    keeps_its_budgets(whole)
    if kind != "f3crec-dpps":
        takes_back(whole)


def takes_back(folder: Path) -> None:
    """Rounds of unlearning are releases: nobody pays beyond their budget, and what was shared goes."""
    user, before = FOUR.somebody_who_shares(folder), accounts(folder)
    granted = submit_request(folder, RawRequest("unshare", {user: None}))
    certificate = certificate_of(granted)
    assert certificate["method"]["name"] == "contrastive-unlearning"
    assert certificate["purged"]["clean"] is True
    run = reopen_run(folder)
    assert run.shared.counts()[run.saved.find_user_numbers([user])[0]] == 0
    after = accounts(folder)
    assert (after["spent"] >= before["spent"]).all()
    assert (after["budget"] == before["budget"]).all()
    keeps_its_budgets(folder)
    own = read_run_ledger(folder, user)
    assert own["spent"] <= own["budget"] + 1e-9


def test_score_uploads_refuse_budgets_and_row_parts() -> None:
    """Of the four papers FedKDRec stays apart, and each refusal says why."""
    for part in FOUR.PARTS:
        message = "sends predictions, which it cannot change"
        settings = resolve_config({"data": SMALL, "method": "fedkdrec", "parts": [part]}, "the test")
        with pytest.raises(TacitaError, match=message):
            build_plan(settings).learner.check()


def test_example_runs_and_states_its_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FOUR.main(tmp_path / "run", SMALL, train={"rounds": 1, "aggregation": "mean"})
    message = capsys.readouterr().out
    assert message.count("protects a person against the server") == 2
    assert "takes back what they shared: " in message
