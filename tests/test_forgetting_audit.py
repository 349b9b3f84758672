"""Attacks on what is left of withdrawn data: closed forms, and models of which the answer is known."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.oracle import federate, make_backbone, make_block, make_stream
from helpers.run_requests import RowReset, SharedItemsUnlearning, unlearning_config
from tacita.cli import main
from tacita.core.types import Ragged
from tacita.report import forgetting_audit
from tacita.research.audit import forgetting, membership
from tacita.research.audit.forgetting import AuditedWithdrawal, audit_forgetting, run_attacks
from tacita.research.audit.withdrawal_scenario import (
    draw_half_of_items,
    draw_requests,
    find_rare_pairs,
    make_scenario_of_run,
    retrain_with_canaries,
)
from tacita.round import registry
from tacita.runs import training
from tacita.runs.forgetting import traces
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.verdict import run_checks, summarise_checks
from tacita.runs.forgetting.verification import retrain_reference

RNG = np.random.default_rng(5)


# The auditor (H.D 5)


def test_scores_that_are_alike_cannot_be_told_apart() -> None:
    owner = np.repeat(np.arange(60), 20)
    members, others = RNG.normal(size=(2, len(owner)))
    low, high = traces.compute_auc_interval(members, others, owner, 1)
    assert low <= 0.5 <= high
    assert high - low < 0.12
    assert abs(traces.compute_auc(members, others) - 0.5) < 0.05


def test_scores_that_stand_apart_are_told_apart() -> None:
    owner = np.repeat(np.arange(10), 3)
    assert traces.compute_auc(np.ones(30), np.zeros(30)) == 1.0
    assert traces.compute_auc(np.zeros(30), np.ones(30)) == 0.0
    assert traces.compute_auc_interval(np.ones(30), np.zeros(30), owner, 1) == [1.0, 1.0]
    assert traces.compute_auc(np.ones(4), np.ones(4)) == 0.5  # ties are halves


def test_an_auc_is_the_share_of_pairs_in_order() -> None:
    members, others = RNG.integers(0, 6, size=(2, 40)).astype(float)
    wins = (members[:, None] > others[None]).mean() + (members[:, None] == others[None]).mean() / 2
    assert traces.compute_auc(members, others) == pytest.approx(wins)
    assert traces.compute_auc(members, others[:7]) == pytest.approx(
        (members[:, None] > others[None, :7]).mean() + (members[:, None] == others[None, :7]).mean() / 2
    )
    owner, times = np.repeat(np.arange(4), 10), np.array([2, 0, 1, 1])
    values = np.concatenate([np.arange(10), np.arange(10), np.arange(20, 40)])
    won = times @ traces.count_wins(members, others, owner) @ times
    assert won / 40**2 == pytest.approx(traces.compute_auc(members[values], others[values]))


def test_a_model_beside_itself_shows_no_difference() -> None:
    members, others = RNG.normal(size=(2, 50))
    pair_scores = traces.PairScores(members, others, members, Ragged.from_lists([[1, 2]]))
    assert traces.compute_difference_auc(pair_scores, pair_scores) == 0.5
    assert traces.compute_list_overlap(pair_scores, pair_scores) == 1.0
    assert traces.compute_difference_interval(pair_scores, pair_scores, np.repeat(np.arange(10), 5), 0) == [0.0, 0.0]


def test_matched_items_are_as_popular_and_never_the_users_own() -> None:
    lists = [sorted(RNG.choice(60, 12, replace=False, p=np.arange(60, 0, -1) / 1830).tolist()) for _ in range(80)]
    fed = federate(make_stream(make_block(0, 60, lists)), make_backbone("mf"))
    gone = Ragged.from_lists([entry[:3] if u < 40 else [] for u, entry in enumerate(lists)])
    owned = Ragged.from_lists(lists)
    pairs = traces.match_pairs(fed, gone, owned)
    assert len(pairs.members.ids) == len(pairs.others.ids) == 120
    assert not owned.holds(pairs.users[pairs.others.rows()], pairs.others.ids).any()
    count = np.bincount(owned.ids, minlength=60)
    gap = np.abs(count[pairs.members.ids] - count[pairs.others.ids])
    assert np.median(gap) <= 4 < count.max() - count.min()
    repeat = traces.match_pairs(fed, gone, owned)
    assert np.array_equal(pairs.others.ids, repeat.others.ids)


def test_cosines_do_not_see_a_rotation() -> None:
    fed = federate(make_stream(make_block(0, 6, [[0, 1]])), make_backbone("mf"))
    from helpers.oracle import started

    progress = started(fed)
    items = RNG.normal(size=(6, fed.backbone.item_width)).astype(np.float32)
    turn = np.linalg.qr(RNG.normal(size=(items.shape[1],) * 2))[0].astype(np.float32)
    trained_state = traces.TrainedState(replace(progress.server, items=items), progress.clients)
    other = traces.TrainedState(replace(progress.server, items=items @ turn), progress.clients)
    result = traces.measure_gram_distance(items, items @ turn, np.arange(6))
    assert result is not None
    assert result < 1e-6
    far = traces.measure_model_distance(fed, trained_state, other)
    assert far is not None
    assert far > 0.1
    assert traces.measure_gram_distance(items, items + 1, [0, 1])


# Fresh user vectors


def test_a_person_whose_items_lie_together_is_fitted() -> None:
    table = np.concatenate([np.tile([1.0, 0], (10, 1)), np.tile([-1.0, 0], (10, 1))]).astype(np.float32)
    samples = membership.PairSamples(
        np.zeros(5, np.int64), np.arange(5, dtype=np.int32), np.arange(10, 15, dtype=np.int32), 1
    )
    fitted = membership.fit_vectors(table, samples)
    assert fitted.losses[0] == pytest.approx(math.log(2))
    assert fitted.losses[-1] < 0.1
    assert fitted.vectors[0, 0] > 1
    assert membership.count_steps_to_goal(table, samples, fitted.losses[7]) == 7
    assert membership.count_steps_to_goal(table, samples, -1.0) is None


def test_members_have_lower_loss() -> None:
    """Members' items point one way; strangers' lie anywhere."""
    table = RNG.normal(size=(200, 8)).astype(np.float32)
    lists = []
    for u in range(20):
        own_values = np.arange(u * 5, u * 5 + 5)
        table[own_values] = RNG.normal(size=8) + 0.1 * RNG.normal(size=(5, 8))
        lists.append(own_values.tolist())
    strangers = Ragged.from_lists([RNG.choice(np.arange(100, 200), 5, replace=False).tolist() for _ in range(40)])
    key = np.uint64(3)
    own_values, others = Ragged.from_lists(lists), strangers.take(np.arange(20))
    inside = membership.compute_excess_loss(table, own_values, own_values, strangers, key)
    outside = membership.compute_excess_loss(table, others, others, strangers.take(np.arange(20, 40)), key)
    assert traces.compute_auc(-inside, -outside) > 0.9


# A run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("audit")
    for part in (RowReset, SharedItemsUnlearning):
        registry._PARTS[part.name] = part
    more = {"backbone": {"name": "mf", "dim": 4, "lr": 2.0}, "train": {"rounds": 6}}
    training.train(unlearning_config("probe-blunt", **more), out / "blunt")
    training.train(unlearning_config("sharing", "probe-shared", **more), out / "shared")
    training.train(unlearning_config(backbone={"name": "tally"}), out / "tally")
    yield out
    for part in (RowReset, SharedItemsUnlearning):
        del registry._PARTS[part.name]


def judged_of(folder: Path, perfect: bool) -> AuditedWithdrawal:
    """A withdrawal from a run; `perfect`: by a method that is training again itself."""
    scene = make_scenario_of_run(reopen_run(folder))
    requests = draw_requests(scene, 0.5)
    done = apply_request(scene.run.federation, scene.run.progress, requests, scene.run.choose_route(requests))
    repeat = retrain_reference(done)
    models = {"O": done.before, "X": repeat if perfect else done.after, "R1": repeat, "R2": repeat}
    return AuditedWithdrawal(scene, replace(done, after=models["X"]), models, 1)


@pytest.mark.parametrize("name", ["blunt", "shared"])
def test_retrained_model_passes_every_attack(made: Path, name: str) -> None:
    attacks = run_attacks(judged_of(made / name, perfect=True))
    own = attacks["rows"]["X"]
    assert attacks["auc_gap"] == 0
    assert own["auc_from_r1"] == [0.0, 0.0]
    assert own["distance_ratio"] == own["gram_distance"] == 0
    assert own["jaccard20"] == 1
    assert own["relearn_ratio"] in (1, None)  # None: R1 does not learn them as well as O had in the steps tried
    assert attacks["verdict"].startswith("pass")
    assert attacks["rows"]["O"]["distance_ratio"] == 1
    assert attacks["rows"]["O"]["auc_difference"] == 0.5  # O beside O


def test_membership_signal_falls_after_retraining(made: Path) -> None:
    rows = run_attacks(judged_of(made / "blunt", perfect=True))["rows"]
    assert rows["O"]["auc_pairs"] > rows["R1"]["auc_pairs"]
    assert rows["O"]["rank_percentile"] > rows["R1"]["rank_percentile"]
    assert rows["R1"]["auc_difference"] > 0.5  # who has both models sees what was withdrawn


def test_a_search_finds_the_pairs_before_and_not_after(made: Path) -> None:
    result = forgetting.search_artefacts(judged_of(made / "blunt", perfect=False))
    assert result["O"]["pairs"] > 0
    assert not result["O"]["clean"]
    assert result["X"]["pairs"] == 0
    assert result["X"]["clean"]


@pytest.mark.parametrize("name", ["blunt", "shared", "tally"])
def test_the_whole_audit(made: Path, name: str) -> None:
    before = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((made / name).iterdir()))).hexdigest()
    result = audit_forgetting(made / name, 0.3)
    assert hashlib.sha256(b"".join(path.read_bytes() for path in sorted((made / name).iterdir()))).hexdigest() == before
    assert result["rows"].keys() == forgetting.MODELS.keys()
    for row in result["rows"].values():
        assert 0 <= row["auc_pairs"] <= 1
        assert (row["auc_user"] is None) == (name == "tally")
    if name == "tally":
        assert result["auc_gap"] == pytest.approx(0, abs=1e-6)
        assert result["rows"]["O"]["canary_exposure"] > result["rows"]["R1"]["canary_exposure"]
        assert result["rows"]["X"]["canary_exposure"] == pytest.approx(result["rows"]["R1"]["canary_exposure"])


def test_canaries_have_pairs_that_nobody_has_and_the_held_out_are_not_learned_from(made: Path) -> None:
    run = reopen_run(made / "tally")
    scene = retrain_with_canaries(run)
    stream = scene.run.federation.stream
    train = stream.blocks[-1].train
    assert stream.n_users == run.federation.stream.n_users + len(scene.canaries)
    for user, a, b in zip(scene.canaries, scene.known, scene.partner, strict=True):
        assert set(train.row(user).tolist()) == {a, b}
    assert len({*scene.known.tolist(), *scene.partner.tolist()}) == 2 * len(scene.canaries)
    assert len(scene.held_out) >= 2
    counts = stream.collect_train_items(len(stream.blocks) - 1).counts()
    assert (counts[: run.federation.stream.n_users] == 0).sum() >= len(scene.held_out)
    known, partner = find_rare_pairs(run.federation.stream, run.federation.stream.item_keys)
    assert len(known) == len(partner) > 0
    trained = run.federation.stream.collect_train_items(len(run.federation.stream.blocks) - 1)
    for a, b in zip(known.tolist(), partner.tolist(), strict=True):
        assert not any({a, b} <= set(trained.row(user).tolist()) for user in range(len(trained)))


def test_half_of_each_history_is_withdrawn() -> None:
    lists = Ragged.from_lists([[1, 2, 3, 4, 5], [6], [], [7, 8]])
    half = draw_half_of_items(lists, np.arange(10, dtype=np.uint64))
    assert half.counts().tolist() == [2, 0, 0, 1]
    assert lists.holds(half.rows(), half.ids).all()


def test_the_verb_writes_a_table(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["audit", "forget", str(made / "blunt"), "--brief", "--quiet", "--json", "--out", str(tmp_path / "new")])
    assert not error.value.code
    document = json.loads(capsys.readouterr().out)
    assert document["planted"] is False
    assert document["rows"]["X"]["canary_exposure"] is None
    text = next((tmp_path / "new").glob("*.md")).read_text()
    assert text.count("\n|") == 2 + len(forgetting_audit.ATTACKS)
    assert all(words in text for words in forgetting_audit.ATTACKS.values())
    lines = next((tmp_path / "new").glob("*.csv")).read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["model", *forgetting.MODELS]


# The verdict


GOOD: dict[str, Any] = {"gap": 0.0, "ratio": 0.2, "floor": 1.5, "trace_counts": {"pairs": 0, "people": 0, "rows": 0}}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"gap": 0.021}, ["pairs"]),
        ({"gap": -0.021}, ["over-forgetting"]),
        ({"gap": float("nan")}, []),
        ({"ratio": 1.0}, ["distance"]),
        ({"ratio": 1.2, "floor": 3.0}, ["distance"]),  # another seed is no excuse for going away
        ({"ratio": None}, []),
        ({"trace_counts": {"pairs": 1, "people": 0, "rows": 0}}, ["search"]),
        ({"trace_counts": {"pairs": 0, "people": 0, "rows": 2}}, ["search"]),
        ({"gap": 0.5, "ratio": 2.0, "trace_counts": {"people": 1}}, ["pairs", "distance", "search"]),
    ],
)
def test_a_verdict_names_what_failed(change: dict[str, Any], failed: list[str]) -> None:
    checks = run_checks(**GOOD | change)
    assert [check.name for check in checks if check.passed is False] == failed
    message = summarise_checks(checks)
    assert message.startswith("fail: " if failed else "pass: ")
    assert all(name in message for name in failed)
    if {"gap", "ratio"} & change.keys() and not failed:
        assert "not judged" in message


@pytest.mark.parametrize(
    ("scores", "failed"),
    [((0.6, 0.6), []), ((0.7, 0.6), ["pairs"]), ((0.5, 0.6), ["over-forgetting"])],
)
def test_an_audit_judges_more_than_one_figure(scores: tuple[float, float], failed: list[str]) -> None:
    rows = {"X": {"auc_pairs": scores[0], "distance_ratio": 1.1}, "R1": {"auc_pairs": scores[1]}}
    clean = {"X": {"pairs": 0, "people": 0, "rows": 0}}
    result = forgetting.summarise_attacks(rows, 3.0, 2.0, clean)
    assert result["failed"] == [*failed, "distance"]
    assert result["noise_floor"] == 1.5
    assert "another seed alone 1.500" in result["verdict"]
    result = forgetting.summarise_attacks(rows, None, 0.0, {"X": {"pairs": 0, "people": 0, "rows": 3}})
    assert result["failed"] == [*failed, "distance", "search"]


def test_dropping_only_the_record_fails_the_audit(made: Path) -> None:
    """O in place of X: nothing was forgotten, and its own distance says so."""
    judged = judged_of(made / "blunt", perfect=True)
    state = replace(judged, models={**judged.models, "X": judged.models["O"]})
    attacks = run_attacks(state)
    assert "distance" in attacks["failed"]
    assert attacks["verdict"].startswith("fail: ")
