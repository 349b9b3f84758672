"""The guide's part that unlearns, and what is refused of parts like it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.examples import load_example
from helpers.oracle import federate, make_backbone, make_block, make_stream, started
from helpers.run_requests import forget_items, unlearning_config
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, ServerState
from tacita.federation.requests import find_waiting_users
from tacita.federation.rounds import run_round
from tacita.messages import Upload
from tacita.round import registry
from tacita.round.part import Part
from tacita.round.state import Role, StateSpec
from tacita.runs import training
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.run_folder import open_saved

LISTS = [[0, 1, 2], [2, 3], [4], [0, 4, 5, 6], [1, 6]]


@pytest.fixture(autouse=True)
def amnesia(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("_PARTS", "_PRESETS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    return load_example("toy_unlearning").Amnesia


def forget_somebody(folder: Path, split: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The certificate of somebody who leaves a run, and the run's best round."""
    config = unlearning_config("withdrawal", "amnesia", split=split, train={"rounds": 4})
    run = training.train(config, folder)
    best_round = int(run.result["blocks"][-1]["best_round"])
    user = open_saved(folder).ids["users"][0]
    return forget_items(folder, {user: None}, verify=True), best_round


def test_who_leaves_the_first_block_is_forgotten_as_by_training_without_them(tmp_path: Path) -> None:
    certificate, best_round = forget_somebody(tmp_path / "run", {"kind": "random"})
    assert certificate["method"]["name"] == "amnesia"
    assert "takes whole people out of the model" in certificate["method"]["why"]
    assert certificate["participation"]["rounds"] == best_round
    assert certificate["audit"]["param_distance_ratio"] == 0.0
    assert "stays" not in certificate["residual_risk"]


def test_the_certificate_says_what_earlier_blocks_leave(tmp_path: Path) -> None:
    certificate, _ = forget_somebody(tmp_path / "run", {"kind": "blocks", "n_blocks": 2})
    assert "began again from a model that had learned from them" in certificate["residual_risk"]
    assert certificate["audit"]["param_distance_ratio"] > 0


def test_a_part_that_forgets_needs_one_that_keeps_withdrawn_items_out() -> None:
    with pytest.raises(TacitaError, match="list part 'withdrawal' before it"):
        assemble_federation(unlearning_config("amnesia"), Machine(threads=1))
    assemble_federation(unlearning_config("withdrawal", "amnesia"), Machine(threads=1))


class Queue(Part):
    """Keeps something of its own under a name that another part gives to users who wait."""

    name = "probe-queue"

    def server_block_start(self, server: ServerState) -> Arrays:
        return {"waiting": np.array([0.5])}


class Patient(Part):
    """Lets users wait for others."""

    name = "probe-patient"

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("late", role=Role.WAITING)]

    def server_block_start(self, server: ServerState) -> Arrays:
        return {"late": np.array([7], np.uint64)}


def test_who_waits_is_read_from_state_with_that_role() -> None:
    federation = federate(make_stream(make_block(0, 7, LISTS)), make_backbone("mf"), Queue, Patient)
    assert find_waiting_users(federation, started(federation).server).tolist() == [7]


class PerUser(Part):
    """Weighs users, where clients are silos of several."""

    name = "probe-per-user"

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        return np.ones(len(view.user))


class TooHeavy(Part):
    name = "probe-too-heavy"

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        return np.full(view.n_clients, 2.0)


def test_weights_of_users_are_refused_where_silos_are_clients() -> None:
    federation = federate(make_stream(make_block(0, 7, LISTS)), make_backbone("mf"), PerUser, silos=2)
    progress = started(federation)
    with pytest.raises(TacitaError, match=r"'probe-per-user' weighs in shape \(5,\).*return a factor for each client"):
        run_round(federation, progress.server, progress.devices)


def test_factors_above_one_are_refused() -> None:
    federation = federate(make_stream(make_block(0, 7, LISTS)), make_backbone("mf"), TooHeavy)
    progress = started(federation)
    with pytest.raises(TacitaError, match="weighs a client by 2; return factors from 0 to 1"):
        run_round(federation, progress.server, progress.devices)
