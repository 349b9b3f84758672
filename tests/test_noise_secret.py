"""Noise of lab runs under a budget follows a secret that the run folder does not hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays
from tacita.federation.rounds import RoundReport
from tacita.runs import noise_secret, training
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved
from tacita.runs.training import TrainingCallbacks

pytestmark = pytest.mark.secret_noise

DATA = "synthetic:users=40,items=30,per_user=9,groups=3"
HERE = Machine(threads=1)
TALLY: dict[str, Any] = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}}
DPPS: dict[str, Any] = {"method": "dpps"}
DP_FEDAVG: dict[str, Any] = {
    "method": "dp-fedavg",
    "train": {"rounds": 3, "aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.5}},
}
LAPLACE: dict[str, Any] = {"parts": [{"name": "laplace-noise", "mode": "ldp"}]}
PAPER_NOISE: dict[str, Any] = {"parts": [{"name": "laplace-noise", "mode": "paper"}]}
PDC_FRS: dict[str, Any] = {"method": "pdc-frs", "backbone": {"name": "mf"}}
COVER: dict[str, Any] = {"parts": [{"name": "cover", "noise": 0.1, "clip": 1.0}]}
PSEUDO_ITEMS: dict[str, Any] = {"parts": [{"name": "cover", "pseudo_items": 3}]}
RETRACTION: dict[str, Any] = {
    "train": {"rounds": 3, "aggregation": "fixed"},
    "parts": [{"name": "withdrawal"}, {"name": "retraction", "ratio": 0.1, "epsilon": 1.0}],
}
KINDS = {
    "tally": TALLY,
    "dpps": DPPS,
    "dp-fedavg": DP_FEDAVG,
    "laplace-noise": LAPLACE,
    "laplace-noise as printed": PAPER_NOISE,
    "pdc-frs": PDC_FRS,
    "cover": COVER,
    "pseudo items of cover": PSEUDO_ITEMS,
    "retraction with an epsilon": RETRACTION,
}


def config_of(reproducible: bool = False, **settings: Any) -> RunConfig:
    evaluate = {"k": [5], "select_by": "ndcg@5", "controls": False}
    values = {"data": DATA, "split": {"n_blocks": 2}, "evaluate": evaluate, "train": {"rounds": 3}, **settings}
    values["privacy"] = {**values.get("privacy", {}), "reproducible_noise": reproducible}
    return validate_model(RunConfig, values, "a test")


def train_model(config: RunConfig, out: Path) -> Arrays:
    training.train(config, out, HERE)
    return open_saved(out).server_arrays


def equal(some: Arrays, others: Arrays) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(array, others[name]) for name, array in some.items())


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_the_same_seed_have_noise_of_their_own(kind: str, tmp_path: Path) -> None:
    config = config_of(**KINDS[kind])
    assert not equal(train_model(config, tmp_path / "a"), train_model(config, tmp_path / "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_reproducible_noise_follows_the_seed(kind: str, tmp_path: Path) -> None:
    config = config_of(reproducible=True, **KINDS[kind])
    assert equal(train_model(config, tmp_path / "a"), train_model(config, tmp_path / "b"))


def test_a_run_without_a_budget_follows_its_seed(tmp_path: Path, state_folder: Path) -> None:
    config = config_of()
    assert equal(train_model(config, tmp_path / "a"), train_model(config, tmp_path / "b"))
    assert not list(state_folder.rglob("*.json"))


def stop_after(rounds: int) -> TrainingCallbacks:
    played = 0

    def on_round(_: RoundReport) -> None:
        nonlocal played
        played += 1
        if played == rounds:
            raise KeyboardInterrupt

    return TrainingCallbacks(on_round=on_round)


def stop_run(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped in its third round, with a checkpoint after every round."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", float("inf"))
    with pytest.raises(KeyboardInterrupt):
        training.train(config, out, HERE, stop_after(3))


def test_a_stopped_run_goes_on_with_its_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_folder: Path
) -> None:
    out = tmp_path / "run"
    secret = "ab" * noise_secret.SECRET_BYTES
    monkeypatch.setattr("tacita.runs.assembly.draw_secret", lambda: secret)
    config = config_of(**DPPS)
    unbroken = train_model(config, tmp_path / "unbroken")
    stop_run(config, out, monkeypatch)
    monkeypatch.setattr("tacita.runs.assembly.draw_secret", noise_secret.draw_secret)
    assert list(state_folder.rglob("*.json"))
    for path in out.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()
    training.resume(out, HERE)
    assert equal(open_saved(out).server_arrays, unbroken)
    assert not list(state_folder.rglob("*.json"))  # nobody needs it any more


def test_a_copy_of_a_stopped_run_has_no_noise_to_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_run(config_of(**DPPS), tmp_path / "run", monkeypatch)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(TacitaError, match="start a new run"):
        training.resume(tmp_path / "copy", HERE)
    training.resume(tmp_path / "run", HERE)


def test_another_run_in_the_same_place_does_not_get_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    stop_run(config_of(**DPPS), tmp_path / "other", monkeypatch)
    stop_run(config_of(**DPPS, seed=2), out, monkeypatch)
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "other", out)
    with pytest.raises(TacitaError, match="start a new run"):
        training.resume(out, HERE)


def test_secrets_of_runs_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_folder: Path
) -> None:
    stop_run(config_of(**DPPS), tmp_path / "gone", monkeypatch)
    shutil.rmtree(tmp_path / "gone")
    stop_run(config_of(**DPPS), tmp_path / "stays", monkeypatch)
    assert len(list(state_folder.rglob("*.json"))) == 1


def test_a_finished_run_and_its_copy_retract_with_noise_of_their_own(tmp_path: Path) -> None:
    train_model(config_of(**TALLY), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    secrets = {reopen_run(tmp_path / name, HERE).federation.draws.lab_secret for name in ("run", "copy")}
    assert len(secrets) == 2
    assert all(len(secret) == 2 * noise_secret.SECRET_BYTES for secret in secrets)


def test_a_state_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TACITA_STATE", str(tmp_path / "file"))
    with pytest.raises(TacitaError, match="TACITA_STATE"):
        training.train(config_of(**TALLY), tmp_path / "run", HERE)
    assert not (tmp_path / "run").exists()


def test_lab_tiers_are_drawn_under_a_secret_and_a_devices_are_not() -> None:
    federation = assemble_federation(config_of(**DPPS), HERE)
    assert federation.draws.lab_secret
    assert not federation.draws.secret
    assert Draws(1, "", "s").private("budget") == Draws(1, "s").private("budget") != Draws(1).private("budget")


def leave_run(folder: Path) -> Arrays:
    """The model after the first person has left."""
    user = open_saved(folder).ids["users"][0]
    submit_request(folder, RawRequest("forget", {user: None}, alone=True), HERE)
    return open_saved(folder).server_arrays


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_retraction_of_a_copy_has_noise_of_its_own(tmp_path: Path, reproducible: bool) -> None:
    """Two retractions under the same noise, subtracted, would show what was carried."""
    train_model(config_of(reproducible=reproducible, **RETRACTION), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert equal(leave_run(tmp_path / "run"), leave_run(tmp_path / "copy")) == reproducible


def test_parts_without_noise_follow_the_seed(tmp_path: Path, state_folder: Path) -> None:
    parts = [{"name": "withdrawal"}, {"name": "cover", "clip": 1.0}]
    config = config_of(parts=parts)
    assert equal(train_model(config, tmp_path / "a"), train_model(config, tmp_path / "b"))
    assert not list(state_folder.rglob("*.json"))
