"""A noised sum is divided by a public number: how many people have data must not scale the noise of the mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.runs.assembly import Machine, assemble_federation

POISSON = {"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.5}}
NOISED: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"method": "dp-fedavg", "train": POISSON},
    "dpps central": {
        "method": "dpps",
        "parts": [{"name": "dpps", "threat": "central"}],
        "train": {"aggregation": "fixed"},
    },
    "dpps silo": {
        "method": "dpps",
        "parts": [{"name": "dpps", "threat": "silo"}],
        "train": {"aggregation": "fixed", "silos": 4, "in_silos": "apart"},
    },
}


def config_of(name: str, data: str, **train: Any) -> RunConfig:
    settings = NOISED[name]
    values = {
        **settings,
        "data": data,
        "catalogue": "from-data",
        "split": {"kind": "random"},
        "train": {"rounds": 1, **settings["train"], **train},
        "evaluate": {"k": [5], "select_by": "ndcg@5", "controls": False},
    }
    return validate_model(RunConfig, values, "a test")


def write_people(path: Path, n_people: int) -> str:
    rows = [f"u{user},i{item}" for user in range(n_people) for item in range(user % 3, 30, 3)]
    path.write_text("\n".join(["user,item", *rows]) + "\n")
    return str(path)


def spread_of_move(data: str) -> float:
    """How far one round of mostly noise moves the numbers of the item table."""
    config = config_of("dp-fedavg", data, denominator=40.0)
    config = config.model_copy(update={"parts": [{"name": "dp-fedavg", "noise": 50.0}]})
    federation = assemble_federation(config, Machine(threads=1))
    progress = make_initial_progress(federation)
    run_remaining_blocks(federation, progress, lambda report, progress: None)
    first = federation.backbone.init_items(federation.draws, federation.stream.item_keys)
    return float(np.std(progress.server.items - first))


def test_the_noise_of_the_mean_is_the_same_whoever_has_data(tmp_path: Path) -> None:
    many = spread_of_move(write_people(tmp_path / "many.csv", 36))
    few = spread_of_move(write_people(tmp_path / "few.csv", 12))
    assert many == pytest.approx(50 / 40, rel=0.15)
    assert few == pytest.approx(50 / 40, rel=0.15)


@pytest.mark.parametrize("name", NOISED)
def test_a_file_has_to_say_how_many_people_are_enrolled(name: str, tmp_path: Path) -> None:
    data = write_people(tmp_path / "rows.csv", 24)
    with pytest.raises(TacitaError, match=r"set train\.denominator"):
        assemble_federation(config_of(name, data), Machine(threads=1))
    federation = assemble_federation(config_of(name, data, denominator=40.0), Machine(threads=1))
    assert federation.config.train.denominator == 40.0


@pytest.mark.parametrize(("name", "expected"), [("dp-fedavg", 20.0), ("dpps central", 40.0), ("dpps silo", 40.0)])
def test_named_data_enrols_its_people_whoever_has_rows(name: str, expected: float) -> None:
    data = "synthetic:users=40,items=30,per_user=9"
    config = config_of(name, data)
    federation = assemble_federation(config, Machine(threads=1))
    assert federation.config.train.denominator == expected


def test_a_denominator_of_ones_own_stays() -> None:
    config = config_of("dp-fedavg", "synthetic:users=40,items=30,per_user=9", denominator=7.0)
    assert assemble_federation(config, Machine(threads=1)).config.train.denominator == 7.0


def test_local_noise_needs_no_denominator(tmp_path: Path) -> None:
    data = write_people(tmp_path / "rows.csv", 24)
    values = {"method": "dpps", "data": data, "catalogue": "from-data", "split": {"kind": "random"}}
    config = validate_model(RunConfig, values, "a test")
    assert assemble_federation(config, Machine(threads=1)).config.train.denominator is None
