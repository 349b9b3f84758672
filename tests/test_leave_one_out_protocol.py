"""The protocol of FedKDRec: leave-one-out, 99 sampled items, ties counted against the item that was kept back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.config import RunConfig, SplitConfig, validate_model
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Floats, Ints, Ragged
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.federation.evaluation import draw_ranking_candidates
from tacita.metrics import EvaluationRules, evaluate_ranking, rank_wanted
from tacita.round.plan import Federation
from tacita.runs import training
from tacita.runs.assembly import Machine, assemble_federation

DATA = Path(os.environ.get("TACITA_DATA", ""))
INDUSTRIAL = "amazon-industrial-scientific"
needs_industrial = pytest.mark.skipif(not (DATA / INDUSTRIAL).is_dir(), reason=f"needs TACITA_DATA with {INDUSTRIAL}")
KEYS = derive_keys(["someone"])


def against(scores: list[int], wanted: list[int], hidden: list[int], others: list[int] | None = None) -> list[int]:
    """Ranks of one user's wanted items."""
    table = np.array([scores], np.float32)
    lists = [Ragged.from_lists([candidate]) for candidate in (wanted, hidden)]
    sampled = None if others is None else Ragged.from_lists([others])
    return rank_wanted(lambda users: table[users], *lists, KEYS, Draws(1), sampled, "against")[1].tolist()


# Ties


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.data())
def test_a_rank_is_one_and_the_number_of_candidates_that_score_as_much(scores: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(scores))))
    kept_back, hidden, others = order[0], order[1:3], order[3:]
    as_much = sum(scores[item] >= scores[kept_back] for item in others)
    assert against(scores, [kept_back], hidden) == [1 + as_much]
    some = others[: len(others) // 2]
    among = sum(scores[item] >= scores[kept_back] for item in some)
    assert against(scores, [kept_back], [], some) == [1 + among]


@pytest.mark.parametrize("others", [None, [0, 1, 2, 5]])
def test_wanted_items_that_tie_stand_side_by_side_behind_the_others(others: list[int] | None) -> None:
    scores = [5, 5, 7, 5, 5, 1]
    assert sorted(against(scores, [3, 4], [], others)) == [4, 5]
    assert against(scores, [2], [], others) == [1]


def test_pairs_of_a_wanted_and_another_item_that_tie_are_wrong() -> None:
    """Wanted: 3 and 4, of the others two tie with them, one is above and one below: 2 of 8 pairs are right."""
    table = np.array([[5, 5, 7, 5, 5, 1]], np.float32)
    want, hide = Ragged.from_lists([[3, 4]]), Ragged.empty(1)
    result = evaluate_ranking(
        lambda users: table[users], want, hide, KEYS, Draws(1), EvaluationRules(["auc"], [1], ties="against")
    )
    assert result.values["auc"].tolist() == [2 / 8]


def test_where_nothing_ties_both_give_the_same_ranks() -> None:
    scores = np.random.default_rng(0).permutation(300).reshape(3, 100).astype(np.float32)
    want, hide, keys = Ragged.from_lists([[1, 2], [3], [4, 50]]), Ragged.empty(3), derive_keys("abc")

    def scored(users: Ints) -> Floats:
        return scores[users]

    ranks = [rank_wanted(scored, want, hide, keys, Draws(1), None, ties)[1] for ties in ("hash", "against")]
    np.testing.assert_array_equal(*ranks)


def test_a_run_and_its_controls_follow_the_setting(tmp_path: Path) -> None:
    """Where nobody learns from anything all items tie: by a hash that is chance, counted against it is nothing."""
    report = {}
    for ties in ("hash", "against"):
        message: dict[str, Any] = {
            "data": "synthetic:users=80,items=60,per_user=8",
            "split": {"kind": "leave-one-out"},
            "backbone": {"name": "mf", "lr": 1e-9, "init_std": 0.0},
            "train": {"rounds": 1},
            "evaluate": {"sampled_negatives": 20, "ties": ties, "metrics": ["hr"], "k": [10], "select_by": "hr@10"},
        }
        report[ties] = training.train(validate_model(RunConfig, message, "a test"), tmp_path / ties).result
    assert report["hash"]["mean"]["hr@10"] > 0.2
    assert report["against"]["mean"]["hr@10"] == 0.0
    popular = [report[ties]["controls"]["popular"]["mean"]["hr@10"] for ties in ("hash", "against")]
    assert popular[0] > popular[1]


# Leave-one-out among 99


def assembled(seed: int = 1, **more: Any) -> Federation:
    message = {
        "data": "synthetic:users=60,items=300,per_user=12",
        "split": {"kind": "leave-one-out"},
        "evaluate": {"sampled_negatives": 99, "k": [10], "select_by": "ndcg@10"},
        "seed": seed,
        **more,
    }
    return assemble_federation(validate_model(RunConfig, message, "a test"), Machine(threads=1))


def test_the_last_item_is_tested_and_the_one_before_it_validates() -> None:
    fed = assembled()
    block = fed.stream.blocks[0]
    assert block.test.counts().tolist() == block.valid.counts().tolist() == [1] * fed.stream.n_users
    last = [block.train.values["time"][lo:hi].max() for lo, hi in zip(block.train.ptr, block.train.ptr[1:])]
    assert (np.array(last) <= block.valid.values["time"]).all()
    assert (block.valid.values["time"] <= block.test.values["time"]).all()


def test_the_99_are_never_touched_and_the_same_for_all_methods_but_not_for_all_seeds() -> None:
    fed = assembled()
    block = fed.stream.blocks[0]
    candidates = draw_ranking_candidates(fed, block)
    assert candidates is not None
    for user in range(fed.stream.n_users):
        touched = {*block.train.row(user), *block.valid.row(user), *block.test.row(user)}
        drawn = candidates.row(user).tolist()
        assert len(drawn) == len(set(drawn)) == 99
        assert not touched & set(drawn)
    for more in ({"backbone": {"name": "ncf"}}, {"method": "kd"}, {"train": {"objective": "bpr"}}):
        other = draw_ranking_candidates(repeat := assembled(**more), repeat.stream.blocks[0])
        assert other is not None
        np.testing.assert_array_equal(other.ids, candidates.ids)
    other = draw_ranking_candidates(repeat := assembled(seed=2), repeat.stream.blocks[0])
    assert other is not None
    assert (other.ids != candidates.ids).any()


@needs_industrial
def test_amazon_industrial_is_left_one_out_at_random_without_its_repeats() -> None:
    table = load_interactions(INDUSTRIAL)
    with pytest.raises(TacitaError, match=rf"{INDUSTRIAL} has no timestamps; use split\.held_out = 'random'"):
        split(table, SplitConfig(kind="leave-one-out"))
    stream = split(table, SplitConfig(kind="leave-one-out", held_out="random"))
    block = stream.blocks[0]
    assert (stream.n_users, stream.n_items, block.n_rows) == (11_041, 5_327, 76_896)
    parts = (block.train, block.valid, block.test)
    pairs = [(user, item) for part in parts for user, item in zip(part.rows().tolist(), part.ids.tolist())]
    assert len(pairs) == len(set(pairs)) == 76_896 - 4_967
    n = sum(part.counts() for part in parts)
    np.testing.assert_array_equal(block.test.counts(), n >= 3)
    np.testing.assert_array_equal(block.valid.counts(), n >= 3)
