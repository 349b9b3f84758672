"""Attacks on tally's releases: each reads what is there, and its control reads nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.oracle import federate, make_block, make_stream
from helpers.tally_runs import to_sets
from tacita.cli import main
from tacita.core.config import RunConfig
from tacita.core.types import Bools, Ragged
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.models.tally.model import Tally, TallyConfig
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit import reconstruction, retraction, tally_attacks, tally_settings
from tacita.research.audit.null_space import NullSpace, compute_auc
from tacita.runs.assembly import Machine, assemble_federation

REAL = os.environ.get("TACITA_DATA", "")
UNCUT: dict[str, Any] = {"min_item": 0, "min_pair": 0, "keep": 0}


def tasteful(people: int = 120, items: int = 260, size: int = 24, seed: int = 5) -> list[list[int]]:
    """Histories of people with one of four tastes: two thirds from it, the rest from anywhere."""
    draws = np.random.default_rng(seed)
    result = []
    for person in range(people):
        weight = np.where(np.arange(items) % 4 == person % 4, 8.0, 1.0)
        n = int(draws.integers(size // 2, size + size // 2))
        result.append(sorted(draws.choice(items, n, replace=False, p=weight / weight.sum()).tolist()))
    return result


def scene_of(lists: list[list[int]], n_items: int = 260, **options: Any) -> tally_attacks.AttackTarget:
    backbone = Tally(TallyConfig(**{**UNCUT, "ridge": 50.0, "recency": 0.0, "repeat": 0.0, **options}))
    stream = make_stream(make_block(0, n_items, lists))
    fed = federate(stream, backbone)
    progress = make_initial_progress(fed)
    begin_block(fed, progress, 0)
    return tally_attacks.AttackTarget.from_state(backbone, progress.server, stream.blocks[0].train, seed=1)


@pytest.fixture(scope="module")
def cut() -> tally_attacks.AttackTarget:
    return scene_of(tasteful(), min_item=3, keep=90)


@pytest.fixture(scope="module")
def uncut() -> tally_attacks.AttackTarget:
    return scene_of(tasteful())


# P from B


def sets_of(lists: list[list[int]], n_items: int) -> Bools:
    return to_sets(Ragged.from_lists(lists), n_items)


def test_p_is_rebuilt_up_to_a_factor(uncut: tally_attacks.AttackTarget) -> None:
    result = uncut.rebuild_release(uncut.histories)
    x = uncut.histories[:, result.items].astype(float)
    inverse = np.linalg.inv(x.T @ x + 50.0 * np.eye(x.shape[1]))
    assert result.inverse / result.inverse[0, 0] == pytest.approx(inverse / inverse[0, 0], abs=1e-4)
    assert result.known.all()


def test_entries_cut_on_both_sides_are_unknown_and_zero(cut: tally_attacks.AttackTarget) -> None:
    result = cut.rebuild_release(cut.histories)
    assert 0.2 < result.known.mean() < 0.9
    assert (result.inverse[~result.known] == 0).all()
    assert len(result.items) == result.released.sum() == (cut.histories.sum(axis=0) >= 3).sum()


def test_an_item_without_a_scale_gets_that_of_rare_items() -> None:
    weights = np.array([[0, 0.2, 0.1], [0.4, 0, 0], [0.0, 0.0, 0]], np.float32)  # of item 2 no row was kept
    result = reconstruction.rebuild_inverse(weights)
    assert result.items.tolist() == [0, 1, 2]
    assert np.diag(result.inverse) == pytest.approx(np.array([1, 2, 2]) * result.inverse[0, 0])


def test_empty_release_yields_empty_reconstruction() -> None:
    result = reconstruction.rebuild_inverse(np.zeros((4, 4), np.float32))
    assert len(result.items) == 0
    assert (reconstruction.rebuild_gram(np.zeros((4, 4), np.float32), 2.0, 1.0) == 0).all()


# The null-space reader


def test_an_auc_counts_ties_as_half() -> None:
    assert compute_auc(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == pytest.approx(3.5 / 4)
    assert compute_auc(np.zeros(3), np.zeros(2)) == 0.5
    assert compute_auc(np.zeros(0), np.zeros(2)) is None


def test_residual_energy_is_zero_inside_the_span_and_one_outside(uncut: tally_attacks.AttackTarget) -> None:
    result = uncut.rebuild_release(uncut.histories)
    reader = NullSpace.from_inverse(result)
    own_values = reader.compute_energy(uncut.histories[:, result.items])
    other = reader.compute_energy(sets_of(tasteful(seed=99), 260)[:, result.items])
    assert own_values.max() < 0.01 < other.min()
    assert reader.compute_energy(np.zeros((1, len(result.items)), bool)) == 1


def test_membership_attack_separates_participants_from_others(cut: tally_attacks.AttackTarget) -> None:
    """Cuts that stop the peeling reader do not hide who took part; where nobody did, nobody seems to have."""
    result = tally_attacks.attack_membership(cut)
    assert result["of"] == 60
    assert result["found"] > 0.9
    assert 0.35 < result["control"] < 0.65


def test_half_a_history_completes_only_for_participants(
    cut: tally_attacks.AttackTarget, uncut: tally_attacks.AttackTarget
) -> None:
    for scene in (cut, uncut):
        result = tally_attacks.attack_one_release(scene)
        assert result["half_nearly"]["found"] >= result["half_exactly"]["found"] > 0.5
        assert result["half_nearly"]["control"] == 0
        assert result["half_nearly"]["of_control"] >= 10
        assert result["nothing_exactly"]["control"] == 0
    assert result["nothing_exactly"]["found"] > 0.2


def test_attack_names_the_last_item_of_a_planted_user(cut: tally_attacks.AttackTarget) -> None:
    result = tally_attacks.attack_canaries(cut)
    assert result["of"] == result["of_control"] == 20
    assert result["found"] >= 0.9
    assert result["control"] <= 0.1


def test_a_part_of_a_history_is_drawn_at_random_and_has_its_size() -> None:
    sets = sets_of(tasteful(), 260)
    part = tally_attacks.sample_items(sets, 0.5, 3)
    assert (part <= sets).all()
    assert (part.sum(axis=1) == np.round(0.5 * sets.sum(axis=1))).all()
    assert (part != tally_attacks.sample_items(sets, 0.5, 4)).any()


# The retraction reader


def test_single_withdrawal_is_reconstructed_exactly_from_uncut_releases(uncut: tally_attacks.AttackTarget) -> None:
    result = tally_attacks.attack_retractions(uncut)
    assert result["leaver_exactly"] == {"found": 1.0, "control": 0.0, "of": 10, "of_control": 10}
    assert result["item"] == {"found": 1.0, "control": 0.0, "of": 10, "of_control": 10}


def test_most_single_withdrawals_are_reconstructed_from_cut_releases(cut: tally_attacks.AttackTarget) -> None:
    result = tally_attacks.attack_retractions(cut)
    assert result["leaver_nearly"]["found"] >= 0.8
    assert result["leaver_nearly"]["control"] == 0
    assert result["item"]["found"] >= 0.8


def test_no_withdrawal_is_reconstructed_where_nobody_left(cut: tally_attacks.AttackTarget) -> None:
    weights = unpack_dense_weights(cut.learn_from(cut.histories).heads)
    assert not retraction.guess_leaver_history(weights, weights).any()
    assert retraction.guess_withdrawn_item(weights, weights) == -1


def test_item_missing_from_the_next_release_is_identified() -> None:
    lists = [[0, 1, 2, 3], [0, 1, 2], [0, 1, 3], [1, 2, 4], [0, 2, 4, 1], [3, 0, 2]]
    scene = scene_of(lists, 5, min_item=2)
    server = scene.learn_from(scene.histories)
    report, still = sets_of([[1, 2, 4], [1, 2]], 5)
    later = tally_attacks._replace_history(scene, server, report, still)
    assert retraction.guess_withdrawn_item(unpack_dense_weights(server.heads), later) == 4


# The experiment


def test_members_and_non_members_are_disjoint_and_distinct(cut: tally_attacks.AttackTarget) -> None:
    drawn = np.concatenate([np.concatenate(pair) for pair in cut.draw_groups()])
    assert len(drawn) == len(set(drawn.tolist())) == 120
    inside, absent = next(cut.draw_groups())
    assert len(cut.drop_groups(absent)) == 108
    assert len(cut.drop_groups(inside, absent)) == 96


def test_audit_reports_progress() -> None:
    report: list[tuple[int, int]] = []
    config = RunConfig(data="synthetic:users=40,items=30,per_user=10", backbone={"name": "tally"})
    tally_settings.audit_tally(config, Machine(1), brief=True, on_done=lambda done, total: report.append((done, total)))
    done, totals = zip(*report, strict=True)
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[0] == 0
    assert done[-1] == totals[0]
    assert len(set(done)) > 20


def test_audit_tries_no_cut_each_cut_combinations_and_the_runs_own() -> None:
    own = {"min_item": 5, "min_pair": 0, "keep": 200}
    names = list(tally_settings.build_settings(own, brief=False))
    assert names[0] == "none"
    assert names[-1] == "as set"
    assert "min_item 5, keep 20" in names
    assert "min_item 5, keep 200" not in names
    assert list(tally_settings.build_settings(own, brief=True)) == ["as set"]


def test_every_figure_is_printed_beside_its_control(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["audit", "tally", "--data", "synthetic:users=40,items=30,per_user=10", "--brief"])
    assert not error.value.code
    captured = capsys.readouterr()
    assert "control" in captured.out
    assert "took part, 90 % known (AUC)" in captured.out
    assert "Control: the same attack where the person" in captured.err


@pytest.mark.parametrize(("backbone", "audits"), [("tally", ["tally"]), ("tally-order", ["tally", "order"])])
def test_training_warns_that_the_release_identifies_users_and_names_the_audit(
    backbone: str, audits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = ["--data", "synthetic:users=40,items=30,per_user=10"], str(tmp_path / "run")
    with pytest.raises(SystemExit) as error:
        main(["train", *data, "--backbone", backbone, "--no-controls", "--out", out])
    assert not error.value.code
    report = " ".join("".join(capsys.readouterr()).split())
    assert f"what {backbone} releases gives people away" in report
    assert re.findall("`tacita (audit [a-z]+ --run [^`]+)`", report) == [
        f"audit {entry} --run {out}" for entry in audits
    ]
    for audit in audits:  # what is named can be called
        with pytest.raises(SystemExit) as error:
            main(["audit", audit, "--run", out, *(["--brief"] if audit == "tally" else []), "--quiet"])
        assert not error.value.code


@pytest.mark.skipif(not REAL or not (Path(REAL) / "ml-100k").is_dir(), reason="needs ml-100k in $TACITA_DATA")
def test_default_settings_do_not_hide_membership_in_ml_100k() -> None:
    fed = assemble_federation(RunConfig(data="ml-100k", backbone={"name": "tally"}), Machine(1))
    progress = make_initial_progress(fed)
    begin_block(fed, progress, 0)
    assert isinstance(fed.backbone, Tally)
    result = tally_attacks.attack_membership(
        tally_attacks.AttackTarget.from_state(fed.backbone, progress.server, fed.stream.blocks[0].train, 0)
    )
    assert result["found"] >= 0.95
    assert 0.45 <= result["control"] <= 0.55


@pytest.mark.parametrize("options", [{"min_pair": 200}, {"min_item": 10_000}])
def test_attacks_on_an_empty_release_find_nobody(options: dict[str, int]) -> None:
    scene = scene_of(tasteful(40, 60, 8), 60, **options)
    assert not any(tally_attacks.attack_retractions(scene)["leaver_exactly"].values())
    released = unpack_dense_weights(scene.learn_from(scene.histories).heads)
    assert len(NullSpace.from_inverse(reconstruction.rebuild_inverse(released)).guess_histories()) == 0


def test_audit_of_few_users_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "tally", "--data", "synthetic:users=30,items=40,per_user=6", "--brief", "--quiet"])
    assert not ended.value.code
