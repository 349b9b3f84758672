"""What a run learns with where nobody names a model, and what it says of its result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tacita as tc
from tacita.core.config import RunConfig
from tacita.models.tally.solver import estimate_solve_bytes
from tacita.report.advice import find_capped_blocks, list_advice
from tacita.runs.assembly import Machine
from tacita.runs.default_model import (
    FILTER,
    MOST_INPUTS,
    MOST_ORDER_ITEMS,
    DataFacts,
    choose_model,
    complete_settings,
    list_candidates,
    names_model,
)

SMALL = "synthetic:users=120,items=60,per_user=12,groups=4,seed=5"
PLENTY = 1e12


def facts(n_items: int, has_times: bool = True, per_user: int = 50, free_memory: float = PLENTY) -> DataFacts:
    return DataFacts(1000 * per_user, 1000, n_items, has_times, free_memory)


def labels(of: DataFacts, is_private: bool = False) -> list[str]:
    return [candidate.label for candidate in list_candidates(of, is_private)]


def test_the_rule_goes_by_items_times_and_length_of_histories() -> None:
    assert labels(facts(3000)) == ["tally-order"]
    assert labels(facts(3000, per_user=8)) == ["tally-order", FILTER]
    assert labels(facts(3000, has_times=False)) == ["tally", FILTER]
    large = labels(facts(MOST_ORDER_ITEMS + 1))
    assert large == [f"tally through {MOST_INPUTS:,} items", FILTER]


def test_the_rule_leaves_out_what_does_not_fit_into_memory() -> None:
    room_for_tally = 1.5 * estimate_solve_bytes(3000)
    assert labels(facts(3000, free_memory=room_for_tally)) == ["tally", FILTER]
    assert labels(facts(3000, free_memory=1e6)) == [FILTER]


def test_a_budget_takes_a_model_that_has_one() -> None:
    assert labels(facts(3000), is_private=True) == ["tally"]


@pytest.mark.parametrize("key", ["backbone", "method", "parts", "train"])
def test_settings_that_name_a_model_are_left_alone(key: str) -> None:
    assert names_model({key: {"name": "mf"}})
    assert not names_model({"data": "x.csv", "seed": 3, "split": {"min_rating": 4.0}})


def test_settings_of_blocks_keep_their_split() -> None:
    candidate = list_candidates(facts(3000))[0]
    stream = complete_settings({"split": {"n_blocks": 6}}, candidate, facts(3000))
    assert stream["split"] == {"n_blocks": 6}
    filtered = complete_settings({"split": {"min_rating": 4.0}}, candidate, facts(3000))
    assert filtered["split"] == {"kind": "leave-one-out", "held_out": "last", "min_rating": 4.0}


def test_validation_decides_and_the_winner_is_not_trained_twice(tmp_path: Path) -> None:
    notes: list[str] = []
    model = choose_model({"data": SMALL}, "the settings", Machine(threads=1), None, notes.append)
    assert len(notes) == 1
    scores = {"chosen": model.start.score}
    run = tc.train(SMALL, out=tmp_path / "default", quiet=True)
    block = run.result["blocks"][0]
    assert block["valid"] == scores["chosen"]
    events = [json.loads(line) for line in (tmp_path / "default" / "events.jsonl").read_text().splitlines()]
    assert len(events) == block["rounds"] == len(model.start.rounds)
    named = tc.train(
        SMALL,
        backbone=model.config.backbone,
        split={"kind": "leave-one-out"},
        evaluate={"k": [10], "select_by": "ndcg@10", "read": "known", "valid_users": 3000},
        out=tmp_path / "named",
        quiet=True,
    )
    assert named.result["mean"] == run.result["mean"]


def test_a_default_run_goes_on_after_a_kill(tmp_path: Path) -> None:
    run = tc.train(SMALL, out=tmp_path / "whole", quiet=True)
    repeat = tc.train(out=tmp_path / "whole", resume=True, quiet=True)
    assert repeat.result == run.result


def test_few_validators_are_drawn_by_their_key() -> None:
    from tacita.core.types import Ragged
    from tacita.federation.evaluation import sample_user_lists

    lists = Ragged.from_pairs(np.repeat(np.arange(50), 2), np.arange(100), 50)
    keys = np.arange(50, dtype=np.uint64) * np.uint64(7919)
    drawn = sample_user_lists(lists, keys, np.uint64(3), 10)
    assert (drawn.counts() > 0).sum() == 10
    assert len(drawn) == 50
    other = sample_user_lists(lists, keys, np.uint64(4), 10)
    assert not np.array_equal(drawn.counts(), other.counts())
    all_users = sample_user_lists(lists, keys, np.uint64(3), 50)
    assert all_users is lists


def result_of(best_round: int, rounds: int, linear: float) -> dict[str, object]:
    block = {"block": 0, "rounds": rounds, "best_round": best_round, "valid": 0.3}
    return {"blocks": [block], "mean": {"ndcg@20": 0.2}, "controls": {"linear": {"mean": {"ndcg@20": linear}}}}


def test_a_run_that_stopped_at_its_cap_says_how_to_go_on() -> None:
    config = RunConfig(data="clicks.csv")
    assert find_capped_blocks(config, result_of(97, 100, 0.1)) == [0]
    assert find_capped_blocks(config, result_of(60, 100, 0.1)) == []
    assert find_capped_blocks(config, result_of(60, 90, 0.1)) == []
    [sentence] = list_advice(config, result_of(97, 100, 0.1))
    assert "`tacita train --data clicks.csv --backbone mf --method fedavg --rounds 200`" in sentence


def test_a_run_below_a_control_names_the_next_command() -> None:
    config = RunConfig(data="my clicks.csv")
    [sentence] = list_advice(config, result_of(60, 100, 0.3))
    assert "`tacita train --data 'my clicks.csv'`" in sentence
    assert list_advice(config, result_of(60, 100, 0.1)) == []
