"""What a third attack on budgets found, on ranks, shards, presets and what is served; each fails without its mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.forced_sums import compare_worlds, play_request
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import read_json, write_json
from tacita.federation.rounds import RoundReport
from tacita.live.per_client_arrays import OWN_PREFIX, RECIPIENTS, decode_per_client
from tacita.methods import resolve_config
from tacita.models.tally.head_checks import inputs_fit, matrix_fits
from tacita.runs import noise_secret, training
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.callbacks import TrainingCallbacks

SMALL = "synthetic:users=30,items=20,per_user=6,groups=3"
ONE_THREAD = Machine(threads=1)
CLIP = 0.05
CENTRAL = {"name": "dpps", "threat": "central", "tiers": [1.0], "shares": [1.0], "releases": 40, "clip": CLIP}
ROUNDS: dict[str, Any] = {
    "rounds": 2,
    "aggregation": "fixed",
    "weigh_by": "clients",
    "denominator": 30.0,
    "participation": {"kind": "all"},
}
MF = {"name": "mf", "dim": 4}
BLOCKS = {"kind": "blocks", "n_blocks": 2, "borders": "person"}
PEOPLE = {"few items": [3], "eight items": [0, 1, 2, 3, 4, 5, 6, 7], "many items": list(range(0, 60, 2))}


# What one person changes, where the server sees the same noised sums in both worlds

RUNS: dict[str, dict[str, Any]] = {
    "dpps": {"backbone": MF, "parts": [CENTRAL]},
    "dp-fedavg": {
        "method": "dp-fedavg",
        "backbone": MF,
        "parts": [{"name": "dp-fedavg", "clip": CLIP, "epsilon": None, "noise": 1.0}],
        "train": {**ROUNDS, "participation": {"kind": "poisson", "rate": 0.5}},
    },
    "f3crec-dpps": {"method": "f3crec-dpps", "backbone": MF, "parts": [CENTRAL]},
    "lipm-dpps": {"method": "lipm-dpps", "backbone": MF, "parts": [CENTRAL], "train": {**ROUNDS, "silos": 0}},
    "fedshare-dpps": {"method": "fedshare-dpps", "backbone": {"dim": 4}, "parts": [CENTRAL]},
    "fedshare-rollback": {"method": "fedshare-rollback", "backbone": {"dim": 4}, "parts": [CENTRAL]},
}


@pytest.mark.parametrize("person", PEOPLE)
@pytest.mark.parametrize("name", RUNS)
def test_one_person_changes_a_sum_by_a_clip_and_nothing_else(tmp_path: Path, name: str, person: str) -> None:
    settings = {"train": ROUNDS, "split": BLOCKS, **RUNS[name]}
    sums = compare_worlds(tmp_path, PEOPLE[person], **settings)
    assert sums.differences == []
    lengths = sums.measure_lengths()
    assert lengths.max() > 0
    assert lengths.max() <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("backbone", ["tally", "tally-order"])
@pytest.mark.parametrize("person", PEOPLE)
def test_one_person_changes_tallies_by_a_length_of_1(tmp_path: Path, backbone: str, person: str) -> None:
    privacy = {"epsilon": 4.0, "blocks": 2}
    sums = compare_worlds(tmp_path, PEOPLE[person], backbone={"name": backbone}, split=BLOCKS, privacy=privacy)
    assert sums.differences == []
    lengths = [length for change in sums.changes for length in change.values()]  # every field has noise of its own
    assert 0 < max(lengths) <= 1.0


@pytest.mark.parametrize("kind", ["forget", "leave"])
@pytest.mark.parametrize("name", ["retrain", "cufru"])
def test_one_person_changes_rounds_of_unlearning_by_a_clip(tmp_path: Path, name: str, kind: str) -> None:
    """Of CUFRU a fifth was asked, drawn among all who took part: 1.31 clips instead of 1."""
    unlearning = {"name": name}
    if name == "cufru":
        unlearning["asked"] = 1.0  # type: ignore[assignment]
    parts = [{"name": "withdrawal"}, unlearning, CENTRAL]
    play = play_request(kind, ["u3", "u12"])
    sums = compare_worlds(
        tmp_path, PEOPLE["eight items"], play, backbone=MF, parts=parts, train=ROUNDS, split={"kind": "random"}
    )
    assert sums.differences == []
    assert len(sums.changes) > 2
    assert sums.measure_lengths().max() <= CLIP * (1 + 1e-9)


def test_a_share_of_who_took_part_is_not_asked_under_shared_noise() -> None:
    values = {"data": SMALL, "method": "cufru", "backbone": MF, "parts": [CENTRAL], "train": ROUNDS}
    with pytest.raises(TacitaError, match=r"cufru\.asked = 1"):
        assemble_federation(resolve_config(values, "a test"), ONE_THREAD)


@pytest.mark.parametrize("threat", ["central", "silo"])
def test_an_exact_share_of_all_is_not_drawn_under_shared_noise(threat: str) -> None:
    """One person more changed who else was drawn: claimed 1, at least 3.50."""
    train = {**ROUNDS, "participation": {"kind": "fraction", "rate": 0.5}}
    if threat == "silo":
        train |= {"silos": 3, "in_silos": "apart"}
    values = {"data": SMALL, "backbone": MF, "parts": [{**CENTRAL, "threat": threat}], "train": train}
    with pytest.raises(TacitaError, match="'poisson'"):
        assemble_federation(resolve_config(values, "a test"), ONE_THREAD)


def test_an_exact_share_goes_where_everybody_has_noise_of_their_own() -> None:
    train = {"rounds": 1, "participation": {"kind": "fraction", "rate": 0.5}}
    values = {"data": SMALL, "backbone": MF, "parts": [{"name": "dpps"}], "train": train}
    assemble_federation(resolve_config(values, "a test"), ONE_THREAD)


# Resuming on another number of ranks


class Stop(Exception):
    """The run is killed."""


def stop_early(report: RoundReport) -> None:
    raise Stop


def begin_run(out: Path, **train: Any) -> None:
    """A run that is killed after its first round."""
    evaluate = {"k": [5], "select_by": "ndcg@5", "controls": False}
    values = {
        "data": SMALL,
        "backbone": MF,
        "parts": [{**CENTRAL, "releases": 2}],
        "train": {**ROUNDS, **train},
        "evaluate": evaluate,
        "split": {"kind": "random"},
    }
    config = validate_model(RunConfig, values, "a test")
    with pytest.raises(Stop):
        training.train(config, out, ONE_THREAD, TrainingCallbacks(on_round=stop_early))


def pretend_ranks(out: Path, n_ranks: int) -> None:
    """The run began on so many ranks."""
    place = noise_secret._find_secret_path(out)
    stored = read_json(place)
    assert stored["ranks"] == 1
    write_json(place, {**stored, "ranks": n_ranks})


@pytest.mark.secret_noise
def test_rounded_sums_go_on_with_as_many_ranks(tmp_path: Path, state_folder: Path) -> None:
    """Other ranks add in another order: the difference of two sums under one noise would hold no noise."""
    out = tmp_path / "run"
    begin_run(out)
    pretend_ranks(out, 2)
    with pytest.raises(TacitaError, match="began on 2 rank"):
        training.resume(out, ONE_THREAD)
    assert (out / "config.toml").is_file()
    place = noise_secret._find_secret_path(out)
    write_json(place, {**read_json(place), "ranks": 1})
    training.resume(out, ONE_THREAD)
    assert not list(state_folder.rglob("*.json"))


@pytest.mark.secret_noise
def test_whole_sums_go_on_with_any_number_of_ranks(tmp_path: Path, state_folder: Path) -> None:
    out = tmp_path / "run"
    begin_run(out, aggregator="ideal")
    assert "ranks" not in read_json(noise_secret._find_secret_path(out))
    training.resume(out, ONE_THREAD)


# Borders of lists that a hostile server writes


OVERFLOWING = np.array([0, 2**62, -(2**62) - 1, 4], np.int64)  # their differences run over, and are all positive


def test_a_node_reads_no_lists_outside_of_their_array() -> None:
    """Compiled loops trust borders: such a message ended the node's process."""
    arrays = {
        RECIPIENTS: np.arange(3, dtype=np.uint64),
        f"{OWN_PREFIX}sharing/ptr": OVERFLOWING,
        f"{OWN_PREFIX}sharing/ids": np.zeros(4, np.int32),
    }
    with pytest.raises(TacitaError, match="do not fit each other"):
        decode_per_client(arrays, 10)


def test_a_device_reads_no_matrix_outside_of_its_array() -> None:
    one = np.zeros(1)
    heads = {
        "weights": np.ones(4, np.float32),
        "column": np.zeros(4, np.int32),
        "ptr": OVERFLOWING,
        "inputs": np.zeros(0, np.int32),
        "known": np.array([3]),
        "recency": one,
        "repeat": one,
    }
    assert not matrix_fits(heads, 3)
    heads["ptr"] = np.array([0, 1, 2, 4])
    assert matrix_fits(heads, 3)
    assert not inputs_fit(np.array([0, 2**62, -(2**62) - 1, 1]), 4)
