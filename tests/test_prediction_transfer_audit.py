"""Attacks on uploaded scores: checks G.4.16, G.5.2 and G.5.4 of the spec, closed forms, and controls at chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.score_uploads import round_draws
from tacita.cli import main
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Ragged
from tacita.methods import resolve_config
from tacita.methods.distillation.uploads import (
    Disguise,
    PtfDisguise,
    Swap,
    disguise_predictions,
    disguise_ptf_predictions,
)
from tacita.research.audit import curious_server, score_attacks
from tacita.research.audit.score_attacks import (
    AttackOptions,
    attack_scores,
    compute_auc_per_client,
    guess_by_order,
    guess_by_threshold,
    guess_by_top,
)
from tacita.runs.assembly import Machine

NO_SWAP = Disguise(swap=None)


def upload_of(*people: dict[int, float]) -> Ragged:
    lists = Ragged.from_lists([list(user) for user in people])
    values = [score for user in people for score in user.values()]
    return Ragged(lists.ptr, lists.ids, {"score": np.array(values, np.float32)})


def people(n: int = 60, n_liked: int = 20, skill: float = 1.5, seed: int = 0) -> tuple[Ragged, Ragged, Ragged]:
    """Private sets with four other items for each liked one, what was received, and what is liked.

    Predictions tell liked from other by `skill` standard deviations of their logits.
    """
    draws = np.random.default_rng(seed)
    lists = [draws.permutation(1000)[: 5 * n_liked + 10].tolist() for _ in range(n)]
    own = Ragged.from_lists([entry[: 5 * n_liked] for entry in lists])
    label = np.tile(np.arange(5 * n_liked) < n_liked, n).astype(np.float32)
    predicted = 1 / (1 + np.exp(-draws.normal(skill * label - 1, 1)))
    received = Ragged.from_lists([entry[5 * n_liked :] for entry in lists])
    given_back = {"prediction": draws.random(10 * n).astype(np.float32)}
    return (
        Ragged(own.ptr, own.ids, {"label": label, "prediction": predicted.astype(np.float32)}),
        Ragged(received.ptr, received.ids, given_back),
        Ragged.from_lists([entry[:n_liked] for entry in lists]),
    )


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall)


# Threshold: the weakness of mixing


@pytest.mark.parametrize("alpha", [0.5, 0.6, 1.0])
def test_g4_16_a_threshold_reads_every_label_that_was_not_swapped(alpha: float) -> None:
    own, _, liked = people()
    report = disguise_predictions(own, Ragged.empty(len(own)), Disguise(alpha=alpha, swap=None), round_draws(len(own)))
    guess = guess_by_threshold(report, liked, alpha)
    assert (guess.precision == 1).all()
    assert (guess.recall == 1).all()
    assert (guess.f1 == 1).all()


def test_g4_16_with_swaps_all_but_the_swapped_share_is_read() -> None:
    own, _, liked = people(n_liked=40)
    dice = round_draws(len(own))
    report = disguise_predictions(own, Ragged.empty(len(own)), Disguise((0.5, 0.5), swap=Swap(0.1)), dice)
    n_liked = np.bincount(report.rows()[liked.holds(report.rows(), report.ids)], minlength=len(own))
    q = np.maximum(1, n_liked // 10)
    guess = guess_by_threshold(report, liked, 0.5)
    assert guess.recall == pytest.approx(1 - q / n_liked)
    assert guess.precision == pytest.approx(1 - q / n_liked)
    assert np.mean(guess.f1) == pytest.approx(0.9, abs=0.05)


def test_below_a_half_the_bands_overlap() -> None:
    own, _, liked = people()
    report = disguise_predictions(own, Ragged.empty(len(own)), Disguise(alpha=0.25, swap=None), round_draws(len(own)))
    assert np.mean(guess_by_threshold(report, liked, 0.25).precision) < 0.9


def test_recall_is_over_uploaded_or_all_liked_items() -> None:
    upload = upload_of({1: 0.9, 2: 0.8, 3: 0.1}, {5: 0.7})
    liked = Ragged.from_lists([[1, 7, 8, 9], [6]])
    assert guess_by_threshold(upload, liked, 0.5).recall == pytest.approx([1, np.nan], nan_ok=True)
    assert guess_by_threshold(upload, liked, 0.5, "all").recall == pytest.approx([0.25, 0])
    assert guess_by_threshold(upload, liked, 0.5, "all").f1 == pytest.approx([f1(0.5, 0.25), 0])
    assert guess_by_threshold(upload, liked, 0.5, "all").compute_means()["recall"] == pytest.approx(0.125)


# Top guess


def ten_liked(swap: bool) -> tuple[Ragged, Ragged]:
    """Ten liked items, of which four are told with eight others; perhaps the best of both sides are swapped."""
    score = {i: 0.9 - 0.05 * i for i in range(4)} | {10 + i: 0.5 - 0.05 * i for i in range(8)}
    if swap:
        score[0], score[10] = score[10], score[0]
    return upload_of(score), Ragged.from_lists([list(range(10))])


def test_g5_2_top_guess_before_and_after_a_swap() -> None:
    guess = guess_by_top(*ten_liked(False), round_draws(1))
    assert (guess.precision[0], guess.recall[0], guess.f1[0]) == pytest.approx((1, 0.2, 0.3333), abs=1e-4)
    guess = guess_by_top(*ten_liked(True), round_draws(1))
    assert (guess.precision[0], guess.recall[0], guess.f1[0]) == pytest.approx((0.5, 0.1, 0.1667), abs=1e-4)


def test_g5_4_without_a_defence_a_model_that_separates_gives_everything_away() -> None:
    own, _, liked = people(skill=40)
    none = PtfDisguise(positives=None, swap=None)
    report = disguise_ptf_predictions(own, Ragged.empty(len(own)), none, round_draws(len(own)))
    assert (guess_by_top(report, liked, round_draws(len(own)), share=None).f1 == 1).all()
    assert (compute_auc_per_client(report, liked) == 1).all()


def test_duplicates_count_once_with_their_highest_score() -> None:
    lists = Ragged.from_lists([[3, 3, 3, 3, 3, 4, 5, 6, 7, 8]])
    ragged = Ragged(lists.ptr, lists.ids, {"score": np.array([1, 5, 2, 1, 1, 4, 3, 2, 1, 0], np.float32) / 5})
    assert score_attacks.deduplicate_items(ragged).ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert score_attacks.deduplicate_items(ragged).values["score"][0] == 1
    assert guess_by_top(ragged, Ragged.from_lists([[3, 4]]), round_draws(1)).recall.tolist() == [0.5]  # m = 1, not 2


def test_equal_scores_are_guessed_as_by_chance() -> None:
    n = 2000
    upload = upload_of(*[dict.fromkeys(range(10), 0.5)] * n)
    liked = Ragged.from_lists([[0, 1, 2]] * n)  # a tie broken by id would always find them
    assert np.mean(guess_by_top(upload, liked, round_draws(n)).precision) == pytest.approx(0.3, abs=0.05)


def test_users_without_uploads_are_not_counted() -> None:
    upload = upload_of({1: 0.9, 2: 0.1}, {})
    guess = guess_by_top(upload, Ragged.from_lists([[1], [2]]), round_draws(2))
    assert np.isnan(guess.f1[1])
    assert guess.compute_means() == {"precision": 1, "recall": 1, "f1": 1}
    assert score_attacks.average_known(np.array([np.nan])) is None


# AUC


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=15), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_auc_counts_pairs(rows: list[list[tuple[int, bool]]]) -> None:
    upload = upload_of(*({i: s / 6 for i, (s, _) in enumerate(row)} for row in rows))
    liked = Ragged.from_lists([[i for i, (_, y) in enumerate(row) if y] for row in rows])
    for row, result in zip(rows, compute_auc_per_client(upload, liked), strict=True):
        pairs = [(s > t) + (s == t) / 2 for s, y in row for t, z in row if y and not z]
        assert result == pytest.approx(np.mean(pairs) if pairs else np.nan, nan_ok=True)


# Order


def test_items_that_rise_are_called_liked() -> None:
    before = upload_of({1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6, 9: 0.99})
    now = upload_of({1: 0.5, 2: 0.4, 3: 0.6, 4: 0.7, 8: 0.99})  # 3 rises by one place, 4 by three; 8 and 9 do not count
    dice = round_draws(1)
    assert guess_by_order(before, now, Ragged.from_lists([[3, 4]]), dice).f1.tolist() == [1]
    assert guess_by_order(before, now, Ragged.from_lists([[4]]), dice).f1.tolist() == [1]  # no more guesses than liked
    assert guess_by_order(before, now, Ragged.from_lists([[1, 2]]), dice).f1.tolist() == [0]
    assert np.isnan(guess_by_order(upload_of({7: 1.0}), now, Ragged.from_lists([[3]]), dice).f1).all()


def test_items_that_stay_are_not_called_liked() -> None:
    upload = upload_of({1: 0.9, 2: 0.8, 3: 0.1})
    guess = guess_by_order(upload, upload, Ragged.from_lists([[1, 2, 3]]), round_draws(1))
    assert (guess.precision[0], guess.recall[0], guess.f1[0]) == (0, 0, 0)


def test_ranks_may_be_among_all_that_each_upload_has() -> None:
    before, now = upload_of({1: 0.9, 5: 0.8, 6: 0.7, 2: 0.6}), upload_of({1: 0.9, 2: 0.6})
    liked = Ragged.from_lists([[2]])
    assert guess_by_order(before, now, liked, round_draws(1), among="each").f1.tolist() == [1]  # fourth, then second
    assert guess_by_order(before, now, liked, round_draws(1)).f1.tolist() == [0]


# All of them, beside their controls


def found_in(how: Disguise | None) -> dict[str, tuple[float, float]]:
    """What attacks find in two rounds of uploads, and in shuffled ones."""
    own, received, liked = people(200)
    dice = [round_draws(200, round_no) for round_no in (0, 1)]
    if how is None:
        before, now = (disguise_ptf_predictions(own, received, PtfDisguise(), entry) for entry in dice)
    else:
        before, now = (disguise_predictions(own, received, how, entry) for entry in dice)
    table = attack_scores(now, liked, dice[0], AttackOptions(), before)
    assert all(entry["of"] == entry["of_control"] for entry in table.values())
    assert all(entry["of"] == 200 for name, entry in table.items() if not name.startswith("order"))
    return {name: (entry["found"], entry["control"]) for name, entry in table.items()}


@pytest.mark.parametrize("how", [NO_SWAP, Disguise(), Disguise(alpha=0.0), None])
def test_attacks_find_more_than_their_controls(how: Disguise | None) -> None:
    table = found_in(how)
    assert set(table) == {"auc"} | {
        f"{a}_{m}" for a in ("threshold", "top", "order") for m in ("precision", "recall", "f1")
    }
    for name in ("auc", "threshold_f1", "top_f1"):
        result, control = table[name]
        assert result > control + 0.03


def test_controls_find_what_chance_finds() -> None:
    table = found_in(NO_SWAP)
    assert table["auc"][1] == pytest.approx(0.5, abs=0.03)
    assert table["top_precision"][1] == pytest.approx(20 / 110, abs=0.03)
    assert table["threshold_precision"][1] == pytest.approx(20 / 110, abs=0.03)
    assert table["order_precision"][1] == pytest.approx(20 / 110, abs=0.04)


def test_the_control_of_two_uploads_shuffles_each_its_own_way() -> None:
    own, received, liked = people(200)
    report = disguise_predictions(own, received, NO_SWAP, round_draws(200))
    table = attack_scores(report, liked, round_draws(200), AttackOptions(), report)
    assert table["order_precision"]["found"] == 0
    assert table["order_precision"]["control"] == pytest.approx(20 / 110, abs=0.03)
    assert "order_precision" not in attack_scores(report, liked, round_draws(200), AttackOptions())


def test_sampling_and_swapping_each_take_something_from_the_attack() -> None:
    own, received, liked = people(200)
    dice = round_draws(200)

    def top(how: PtfDisguise, share: float | None = 0.2) -> float:
        return float(
            np.nanmean(guess_by_top(disguise_ptf_predictions(own, received, how, dice), liked, dice, share).f1)
        )

    none, sampled, both = top(PtfDisguise(None, swap=None), None), top(PtfDisguise(swap=None)), top(PtfDisguise())
    assert none > sampled > both


def test_shuffling_stays_within_each_upload_and_follows_the_client() -> None:
    own, received, _ = people(20)
    report = disguise_predictions(own, received, NO_SWAP, round_draws(20))
    dealt = score_attacks.shuffle_scores(report, round_draws(20))

    def scores_of(upload: Ragged, r: int) -> Doubles:
        return upload.values["score"][upload.ptr[r] : upload.ptr[r + 1]]

    order = np.arange(20)[::-1]
    turned = score_attacks.shuffle_scores(report.take(order), round_draws(20).take(order))
    for r in range(20):
        assert sorted(scores_of(dealt, r)) == sorted(scores_of(report, r))
        assert scores_of(dealt, r).tolist() == scores_of(turned, 19 - r).tolist()
    assert (dealt.values["score"] != report.values["score"]).mean() > 0.8


# Listening to a run


SMALL = "synthetic:users=60,items=60,per_user=12,groups=4"


def small(**more: Any) -> RunConfig:
    message: dict[str, Any] = {
        "data": SMALL,
        "method": "fedkdrec",
        "backbone": {"name": "neuncf", "dim": 4, "tower": [8], "lr": 0.01, "init_std": 0.3},
        "train": {"participation": {"kind": "fraction", "rate": 0.5}},
        "split": {"kind": "leave-one-out"},
    }
    return resolve_config(message | more, "the test")


def test_a_table_of_alpha_and_swap_with_a_control_for_every_attack() -> None:
    result = curious_server.audit_scores(small(), Machine(threads=1), 4)
    assert [(row["alpha"], row["swap"]) for row in result["rows"]] == [
        (alpha, swap) for alpha in (0.0, 0.3, 0.5) for swap in (0.0, 0.1)
    ]
    assert all(row["attacks"].keys() == curious_server.ATTACKS.keys() for row in result["rows"])
    assert "No epsilon is claimed" in result["note"]
    by = {(row["alpha"], row["swap"]): row["attacks"] for row in result["rows"]}
    # own items are read without fail; what was received is told as predicted, and that may be more than a half
    assert by[0.5, 0.0]["auc"]["found"] > 0.9
    assert by[0.5, 0.0]["threshold_f1"]["found"] > by[0.5, 0.1]["threshold_f1"]["found"] > 0.5
    assert by[0.0, 0.0]["auc"]["found"] < by[0.3, 0.0]["auc"]["found"] <= 1.0
    for row in by.values():
        assert abs(row["auc"]["control"] - 0.5) < 0.1
        assert row["order_f1"]["of"] > 10  # half take part in each of four rounds: most have told twice


def test_attack_reads_the_last_two_uploads_of_a_client() -> None:
    keys = [np.array(entry, np.uint64) for entry in ([7, 5], [9], [5, 7])]
    report = [upload_of({1: 0.1}, {2: 0.2, 3: 0.3}), upload_of({4: 0.4}), upload_of({5: 0.5}, {})]
    clients, last, before = curious_server.collect_last_uploads(list(zip(keys, report, strict=True)))
    assert clients.tolist() == [5, 7, 9]
    assert [last.row(r).tolist() for r in range(3)] == [[5], [], [4]]
    assert [before.row(r).tolist() for r in range(3)] == [[2, 3], [1], []]
    assert before.values["score"] == pytest.approx([0.2, 0.3, 0.1])
    assert [len(upload) for upload in curious_server.collect_last_uploads([])] == [0, 0, 0]


def test_ptf_fedrec_mixes_nothing_so_only_its_swap_is_varied() -> None:
    result = curious_server.audit_scores(small(method="ptf-fedrec"), Machine(threads=1), 1)
    assert [(row["alpha"], row["swap"], row["threshold"]) for row in result["rows"]] == [(0, 0, 0.5), (0, 0.1, 0.5)]


def test_a_method_that_sends_no_scores_is_refused_in_a_sentence() -> None:
    with pytest.raises(TacitaError, match="method 'fedmf-kd' sends no scores, so there are none to read; "):
        curious_server.audit_scores(small(method="fedmf-kd", backbone={"name": "mf"}), Machine(threads=1), 1)


def test_the_verb_writes_a_table_and_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    with pytest.raises(SystemExit, match="0"):
        main(["audit", "scores", "--data", SMALL, "--rounds", "1", "--threads", "1", "--out", str(out), "--json"])
    message, err = capsys.readouterr()
    document = json.loads(message)
    assert len(document["rows"]) == 6
    [page] = out.glob("*.md")
    assert "| alpha | swap | clients | score against label (AUC) |" in page.read_text()
    assert "No epsilon is claimed" in page.read_text()
    assert len(page.with_suffix(".csv").read_text().splitlines()) == 7
    assert "wrote" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to audit: either a run folder, RUN or --run RUN, or --data NAME."),
        (["--run", "nowhere"], "no run folder nowhere"),
        (["--data", SMALL, "--method", "fedavg"], "method 'fedavg' sends no scores"),
        (["--data", SMALL, "--method", "fedkdrecc"], "did you mean 'fedkdrec'?"),
        (["--run", "x", "--method", "fedkdrec"], "--method goes with --data"),
    ],
)
def test_wrong_calls_get_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["audit", "scores", *options, "--quiet"])
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
