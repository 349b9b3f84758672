"""Readers of B': they tell who took part and read planted lines, and find nothing where there is nothing to find."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tacita.cli import main
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.research.audit import budget_order
from tacita.research.audit.budget_order import READERS, audit_order_membership, score_next_items
from tacita.research.audit.order import OrderedHistories, audit_order
from tacita.runs.assembly import Machine, assemble_federation

DATA = "synthetic:users=150,items=120,per_user=20,groups=4"


def config_of(**more: Any) -> RunConfig:
    options = {"name": "tally-order", "min_item": 0, "keep": 0, "order_ridge": 1.0}
    values = {"data": DATA, "split": {"kind": "random"}, "backbone": options, "seed": 3, **more}
    return validate_model(RunConfig, values, "the test")


def test_membership_and_planted_sequences_are_read_beside_controls() -> None:
    report = []
    result = audit_order(config_of(), Machine(threads=1), lambda done, total: report.append((done, total)))
    membership, canary = result["attacks"]["membership"], result["attacks"]["canary"]
    assert membership["found"] > 0.8 > 0.7 > membership["control"] > 0.3
    assert canary["found"] > 0.25 > 0.15 > canary["control"]
    assert report[-1] == (report[-1][1],) * 2


def test_sequence_is_identified_by_its_transitions() -> None:
    fed = assemble_federation(config_of(), Machine(threads=1))
    progress = make_initial_progress(fed)
    begin_block(fed, progress, 0)
    lines = OrderedHistories.from_state(fed.backbone, progress.server, fed.stream.blocks[0].train, 1)  # type: ignore[arg-type]
    matrix = np.zeros((6, 6), np.float32)
    matrix[0, 1] = matrix[1, 2] = 1.0
    forth, back, alone = lines.score_next_items(matrix, Ragged.from_lists([[0, 1, 2], [2, 1, 0], [4]]))
    assert forth > 1 > 0 >= back
    assert alone == 0


def test_sequence_is_identified_by_its_transitions_under_a_budget() -> None:
    matrix = np.zeros((3, 3), np.float32)
    matrix[0, 1] = matrix[1, 2] = 1.0
    heads = {"inputs": np.array([2, 5, 7]), "order_weights": matrix}
    lines = Ragged.from_lists([[2, 5, 7], [7, 5, 2], [9], [], [2, 9, 5]])
    forth, back, other, nothing, across = score_next_items(heads, np.array([1.0, 0.5]), lines)
    assert forth > 1 > 0 >= back
    assert (other, nothing) == (0, 0)
    assert across == pytest.approx(2**0.5)  # what B' is not about is not there: 5 comes right after 2


def test_under_a_budget_users_are_identified_only_without_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_order, "NOISE_DRAWS", 1)
    report: list[tuple[int, int]] = []
    small = config_of(data="synthetic:users=400,items=60,per_user=14,groups=4")
    result = audit_order_membership(small, Machine(threads=1), [1.0, 1000.0], lambda *step: report.append(step))
    rows = {row["setting"]: row["readers"] for row in result["rows"]}
    plain = rows["no budget"]["null_space"]
    assert plain["found"] > plain["control"] + 0.1
    assert report[-1] == (report[-1][1],) * 2
    bare, noisy_values = rows["epsilon 1000"], rows["epsilon 1"]
    assert bare["server"]["found"] > bare["server"]["control"] + 0.03
    assert bare["order"]["found"] > bare["order"]["control"] + 0.03
    for name in READERS:
        assert abs(noisy_values[name]["found"] - 0.5) < 0.13  # the best of all readers, who knows all others, has 0.58
    with pytest.raises(TacitaError, match="'tally-order' alone"):
        audit_order_membership(config_of(backbone={"name": "tally"}), Machine(threads=1), [1.0])


def test_models_without_order_weights_are_refused() -> None:
    for more in ({"backbone": {"name": "tally"}}, {"backbone": {"name": "tally-order"}, "privacy": {"epsilon": 4.0}}):
        with pytest.raises(TacitaError, match=r"'tally-order' without privacy\.epsilon"):
            audit_order(config_of(**more), Machine(threads=1))


def test_the_verb_prints_found_beside_control(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "order", "--data", DATA, "--set", "backbone.min_item=0", "--set", "split.kind=random", "--quiet"]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 0
        message = capsys.readouterr().out
        if more:
            assert json.loads(message)["attacks"]["canary"]["of"] == 20
        else:
            assert "took part" in message
            assert "of 20" in message
