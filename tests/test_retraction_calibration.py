"""Retractions of a run folder: calibrated by a verb, taken where little is left, and refused above a half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.run_requests import exit_code_of, forget_items, history_of, unlearning_config
from tacita.core.errors import TacitaError
from tacita.methods import resolve_config
from tacita.runs import training
from tacita.runs.calibration import FILE, CalibrationRecord
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.run_calibration import calibrate_run


def retracting(out: Path, rounds: int = 2, **options: Any) -> Path:
    values = {
        "data": "synthetic:users=40,items=30,per_user=9,groups=3",
        "method": "retraction",
        "backbone": {"name": "mf", "dim": 4, "lr": 0.5},
        "train": {"rounds": rounds, "aggregation": "fixed", "denominator": 40.0},
        "parts": [{"name": "retraction", **options}],
        "split": {"kind": "random"},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"},
    }
    return training.train(resolve_config(values, "the test"), out).folder


def test_calibrate_measures_damping_and_leave_then_retracts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = retracting(tmp_path / "run", alpha=0.0)
    before = forgotten_without(folder, tmp_path)
    assert (before["path"], before["ratio"], before["reason"]) == ("checkpoint", None, "alpha was not calibrated")
    assert exit_code_of("forget", "--run", str(folder), "--calibrate", "3", "--json") == 0
    calibration_record = CalibrationRecord(**json.loads(capsys.readouterr().out))
    assert (calibration_record.alpha, calibration_record.leavers) == (0.0, 3)
    assert calibration_record.best_ratio <= calibration_record.ratio <= 0.5
    assert json.loads((folder / FILE).read_text()) == calibration_record.model_dump()
    method = forget_items(folder, {"u1": None})["method"]
    assert method["calibration"] == {"path": "retraction", "alpha": 0.0, "ratio": calibration_record.ratio}
    assert history_of(folder, "u1") == []
    reopen_run(folder)  # the folder is still that of its config


def forgotten_without(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """What a certificate says of the same run where nobody calibrated."""
    import shutil

    other = Path(shutil.copytree(folder, tmp_path / "other"))
    calibration: dict[str, Any] = forget_items(other, {"u1": None})["method"]["calibration"]
    return calibration


@pytest.mark.parametrize(("ratio", "path"), [(0.5, "retraction"), (0.51, "checkpoint")])
def test_calibration_error_above_half_falls_back_to_a_checkpoint(tmp_path: Path, ratio: float, path: str) -> None:
    folder = retracting(tmp_path / "run")
    calibration_record = CalibrationRecord(
        alpha=0.1, ratio=ratio, best_alpha=0.2, best_ratio=0.3, plain=2.0, leavers=3, rounds=2
    )
    (folder / FILE).write_text(json.dumps(calibration_record.model_dump()))
    calibration = forget_items(folder, {"u1": None})["method"]["calibration"]
    assert (calibration["path"], calibration["ratio"]) == (path, ratio)
    assert (path == "checkpoint") == ("above 0.5" in calibration.get("reason", ""))


def test_calibration_of_another_damping_is_ignored(tmp_path: Path) -> None:
    folder = retracting(tmp_path / "run")
    calibration_record = CalibrationRecord(
        alpha=0.2, ratio=0.1, best_alpha=0.2, best_ratio=0.1, plain=2.0, leavers=3, rounds=2
    )
    (folder / FILE).write_text(json.dumps(calibration_record.model_dump()))
    assert forget_items(folder, {"u1": None})["method"]["calibration"]["path"] == "checkpoint"


def test_calibrate_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = training.train(unlearning_config(), tmp_path / "plain").folder
    with pytest.raises(TacitaError, match="no part 'retraction' to calibrate; train with --method retraction"):
        calibrate_run(folder, 3)
    assert exit_code_of("forget", "--run", str(folder), "--calibrate", "3", "--user", "u1") == 2
    assert "leave out --user" in capsys.readouterr().err
    run = retracting(tmp_path / "run")
    assert exit_code_of("forget", "--run", str(run), "--calibrate", "99") == 2
    assert "take fewer" in capsys.readouterr().err
    (run / FILE).write_text('{"alpha": 3}')
    assert exit_code_of("forget", "--run", str(run), "--user", "u1", "--all") == 2
    assert FILE in capsys.readouterr().err


def test_single_items_are_forgotten_by_retraining(tmp_path: Path) -> None:
    folder = retracting(tmp_path / "run")
    method = forget_items(folder, {"u1": history_of(folder, "u1")[:1]})["method"]
    assert (method["name"], method["exact"]) == ("retrain", True)
    assert "'retraction' takes back whole people only" in method["why"]
