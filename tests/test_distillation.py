"""Prediction transfer: every check of spec G.4 (FedKDRec) and G.5 (PTF-FedRec) that is not an attack, and oracles.

Checks G.4.16, G.5.2 and G.5.4 are about attacks: test_prediction_transfer_audit.py.
"""

from __future__ import annotations

import tacita.kernels  # noqa: F401  (before torch, whose threads would otherwise wait by spinning)
from helpers.score_uploads import N_ITEMS, candidate_lists, round_draws, tied_logits

# isort: split
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.core.draws import Draws
from tacita.core.types import Floats, Ints, Ragged
from tacita.methods.distillation import candidates as cand
from tacita.methods.distillation import traffic
from tacita.methods.distillation.measures import compute_cross_entropy, standardize_values
from tacita.methods.distillation.round_draws import floor_share, rank_in_rows
from tacita.methods.distillation.uploads import (
    Disguise,
    PtfDisguise,
    Swap,
    disguise_predictions,
    disguise_ptf_predictions,
    drop_own_items,
    keep_first_items,
    mix_labels,
    pool_items,
    sample_pool,
    sample_ptf_pool,
)
from tacita.metrics import EvaluationRules, evaluate_ranking

Sizes = list[tuple[int, int, int]]  # positives, negatives and received items of each client
sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=8)


def devices(some: Sizes, seed: int = 0) -> tuple[Ragged, Ragged]:
    """Own items with labels and predictions, and received ones; all of a client's items differ."""
    draws = np.random.default_rng(seed)
    lists = [draws.permutation(N_ITEMS)[: sum(entry)] for entry in some]
    own = Ragged.from_lists([ids[: p + g].tolist() for ids, (p, g, _) in zip(lists, some)])
    received = Ragged.from_lists([ids[p + g :].tolist() for ids, (p, g, _) in zip(lists, some)])
    label = [y for p, g, _ in some for y in [1.0] * p + [0.0] * g]
    predicted = [draws.random(len(candidate.ids)).astype(np.float32) for candidate in (own, received)]
    return (
        Ragged(own.ptr, own.ids, {"label": np.array(label, np.float32), "prediction": predicted[0]}),
        Ragged(received.ptr, received.ids, {"prediction": predicted[1]}),
    )


def entries(lists: Ragged, r: int) -> dict[int, float]:
    """Item -> score of one row."""
    span = slice(lists.ptr[r], lists.ptr[r + 1])
    return dict(zip(lists.ids[span].tolist(), lists.values["score"][span].tolist(), strict=True))


def liked(own: Ragged, r: int, value: float = 1.0) -> set[int]:
    span = slice(own.ptr[r], own.ptr[r + 1])
    return set(own.ids[span][own.values["label"][span] == value].tolist())


# Sample, mix, swap


def test_g4_1_mixing_labels_mixes_losses() -> None:
    entry = np.ones(1, np.float32)
    assert mix_labels(entry, 0.6 * entry, 0.5) == pytest.approx([0.8])
    draws = np.random.default_rng(0)
    logits, label, report = draws.normal(0, 3, 500), draws.integers(0, 2, 500), draws.random(500)
    both = 0.3 * compute_cross_entropy(logits, label) + 0.7 * compute_cross_entropy(logits, report)
    soft = mix_labels(label.astype(np.float32), report.astype(np.float32), 0.3)
    assert compute_cross_entropy(logits, soft) == pytest.approx(both, abs=1e-6)


def test_received_items_are_uploaded_as_predicted_for_any_alpha() -> None:
    own, received = devices([(4, 4, 5)])
    report = entries(disguise_predictions(own, received, Disguise(None, 1.0, None), round_draws(1)), 0)
    assert [report[i] for i in received.ids.tolist()] == received.values["prediction"].tolist()
    assert {report[i] for i in liked(own, 0)} == {1.0}
    assert {report[i] for i in liked(own, 0, 0.0)} == {0.0}


@given(sizes, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_g4_2_share_of_the_pool_is_uploaded_without_duplicates(some: Sizes, seed: int) -> None:
    own, received = devices(some, seed)
    report = disguise_predictions(own, received, Disguise(), round_draws(len(some), seed=seed))
    for r, n in enumerate(sum(entry) for entry in some):
        ids = report.row(r).tolist()
        assert min(n, max(1, int(0.3 * n))) <= len(ids) <= max(min(n, 1), int(0.7 * n))
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(own.row(r).tolist()) | set(received.row(r).tolist())


def test_g4_2_at_least_one_item_is_uploaded_if_any() -> None:
    own, received = devices([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 0, 0)])
    report = disguise_predictions(own, received, Disguise((0.3, 0.4)), round_draws(5))
    assert report.counts().tolist() == [1, 1, 1, 1, 0]


def test_g4_2_the_size_is_the_floor_of_the_drawn_share_and_uniform_over_items() -> None:
    n, m = 4000, 11
    own, received = devices([(3, 4, 4)] * n)
    dice = round_draws(n)
    pool = pool_items(own, received)
    beta = dice.draw_between("beta", (0.3, 0.7))
    assert beta.min() >= 0.3
    assert beta.max() < 0.7
    assert beta.std() == pytest.approx(0.4 / np.sqrt(12), rel=0.05)
    report = sample_pool(pool, (0.3, 0.7), dice)
    assert report.counts().tolist() == np.floor(beta * m).astype(int).tolist()
    share = {y: np.sum(report.values["label"] == y) / (n * k) for y, k in ((1, 3), (0, 4))}
    assert share[1] == pytest.approx(report.counts().mean() / m, rel=0.04)
    assert share[0] == pytest.approx(report.counts().mean() / m, rel=0.04)


@given(sizes, st.integers(0, 1000), st.sampled_from(["random", "top"]), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_g4_3_swap_keeps_the_values_and_changes_exactly_q_pairs(
    some: Sizes, seed: int, select: Any, lam: float
) -> None:
    own, received = devices(some, seed)
    dice = round_draws(len(some), seed=seed)
    plain = disguise_predictions(own, received, Disguise(swap=None), dice)
    report = disguise_predictions(own, received, Disguise(swap=Swap(lam, select=select)), dice)
    assert report.ids.tolist() == plain.ids.tolist()
    for r in range(len(some)):
        before, after = entries(plain, r), entries(report, r)
        assert sorted(before.values()) == sorted(after.values())
        high, low = liked(own, r) & before.keys(), liked(own, r, 0.0) & before.keys()
        q = min(max(1, int(lam * len(high) + 1e-9)), len(low)) if high and low else 0
        changed = {i for i in before if before[i] != after[i]}
        assert len(changed & high) == len(changed & low) == q
        assert len(changed) == 2 * q
        if select == "top":
            best = [sorted(side, key=lambda i, b=before: -b[i])[:q] for side in (high, low)]  # type: ignore[misc]
            assert [after[i] for i in best[0]] == [before[i] for i in best[1]]


def test_g4_3_lambda_zero_swaps_one_pair_by_default() -> None:
    own, received = devices([(10, 10, 0)])
    plain = disguise_predictions(own, received, Disguise(None, swap=None), round_draws(1))
    for least, moved in ((1, 2), (0, 0)):
        report = disguise_predictions(own, received, Disguise(None, swap=Swap(0.0, least)), round_draws(1))
        assert (report.values["score"] != plain.values["score"]).sum() == moved


def test_random_swaps_choose_every_pair_equally_often() -> None:
    n = 9000
    own, received = devices([(3, 3, 0)])
    own, received = (lists.take(np.zeros(n, np.int64)) for lists in (own, received))
    dice = round_draws(n)
    plain = disguise_predictions(own, received, Disguise(None, swap=None), dice).values["score"].reshape(n, 6)
    score = disguise_predictions(own, received, Disguise(None), dice).values["score"].reshape(n, 6)
    pairs = (plain != score) @ (2 ** np.arange(6))
    result, counts = np.unique(pairs, return_counts=True)
    assert len(result) == 9
    assert np.abs(counts - n / 9).max() < 5 * np.sqrt(n / 9)


@given(sizes, st.integers(0, 1000), st.booleans())
@settings(max_examples=30, deadline=None)
def test_upload_is_independent_of_cohort_and_order(some: Sizes, seed: int, ptf: bool) -> None:
    own, received = devices(some, seed)
    dice = round_draws(len(some), seed=seed)

    def tell(rows: Any) -> Ragged:
        lists = own.take(rows), received.take(rows)
        if ptf:
            return disguise_ptf_predictions(*lists, PtfDisguise(replace=seed % 2 == 0), dice.take(rows))
        return disguise_predictions(*lists, Disguise(), dice.take(rows))

    together = tell(np.arange(len(some)))
    turned = tell(np.arange(len(some))[::-1])
    for r in range(len(some)):
        alone = tell(np.array([r]))
        for lists, at in ((alone, 0), (turned, len(some) - 1 - r)):
            span = slice(lists.ptr[at], lists.ptr[at + 1])
            own_values = slice(together.ptr[r], together.ptr[r + 1])
            assert lists.ids[span].tolist() == together.ids[own_values].tolist()
            assert lists.values["score"][span].tolist() == together.values["score"][own_values].tolist()


def test_upload_is_independent_of_item_order() -> None:
    own, received = devices([(9, 30, 7)])
    mixed_up = np.random.default_rng(3).permutation(len(own.ids))
    turned = Ragged(own.ptr, own.ids[mixed_up], {name: v[mixed_up] for name, v in own.values.items()})
    first, second = (
        disguise_predictions(candidate, received, Disguise(), round_draws(1)) for candidate in (own, turned)
    )
    assert entries(first, 0) == entries(second, 0)
    assert (np.diff(first.ids) > 0).all()  # by id: positives do not come first


def test_upload_depends_on_round_and_secret() -> None:
    own, received = devices([(20, 80, 10)])
    dice = round_draws(1)
    others = [round_draws(1, round_no=4), replace(dice, draws=Draws(1, "secret")), replace(dice, public=True)]
    reports = [disguise_predictions(own, received, Disguise(), candidate).ids.tolist() for candidate in (dice, *others)]
    assert len({tuple(entry) for entry in reports}) == 4


def test_an_item_counts_once_and_as_the_devices_own() -> None:
    own = Ragged.from_lists([[5, 2, 2], []])
    own = Ragged(own.ptr, own.ids, {"label": np.array([1, 0, 0], "f4"), "prediction": np.array([0.9, 0.2, 0.2], "f4")})
    received = Ragged.from_lists([[2, 7], [7]])
    received = Ragged(received.ptr, received.ids, {"prediction": np.array([0.4, 0.5, 0.6], "f4")})
    pool = pool_items(own, received)
    assert pool.ids.tolist() == [2, 5, 7, 7]
    np.testing.assert_array_equal(pool.values["label"], np.array([0, 1, np.nan, np.nan], "f4"))
    np.testing.assert_array_equal(pool.values["prediction"], np.array([0.2, 0.9, 0.5, 0.6], "f4"))
    assert drop_own_items(received, own).ids.tolist() == [7, 7]
    assert disguise_predictions(Ragged.empty(2), Ragged.empty(2), Disguise(), round_draws(2)).counts().tolist() == [
        0,
        0,
    ]


def test_g4_15_uploads_hold_items_and_scores_only() -> None:
    own, received = devices([(5, 20, 3)])
    report = disguise_predictions(own, received, Disguise(), round_draws(1))
    by_ptf = disguise_ptf_predictions(own, received, PtfDisguise(), round_draws(1))
    sent = cand.select_fixed_number(candidate_lists(), 2, "random", round_draws(3))
    for message in (report, by_ptf, sent):
        assert list(message.values) == ["score"]
        assert message.values["score"].ndim == 1
        assert ((message.values["score"] >= 0) & (message.values["score"] <= 1)).all()


# PTF-FedRec's own sampling


def test_g5_1_counts_of_positives_negatives_and_swaps() -> None:
    own, received = devices([(10, 40, 0)])
    how = PtfDisguise((0.4, 0.4), (2.0, 2.0))
    report = disguise_ptf_predictions(own, received, how, round_draws(1))
    plain = disguise_ptf_predictions(own, received, replace(how, swap=None), round_draws(1))
    assert len(report.ids) == 12
    assert len(liked(own, 0) & set(report.ids.tolist())) == 4
    assert (report.values["score"] != plain.values["score"]).sum() == 2
    assert max(1, floor_share(0.2, np.array([12]))[0]) == 2  # the guesses that Top-Guess has


@given(sizes, st.integers(0, 1000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ptf_counts_follow_the_draws(some: Sizes, seed: int, again: bool) -> None:
    own, received = devices(some, seed)
    how, dice = PtfDisguise(replace=again), round_draws(len(some), seed=seed)
    ptf = sample_ptf_pool(pool_items(own, received), how, dice)
    b, g = dice.draw_between("positives", (0.1, 1)), dice.draw_between("negatives", (1, 4))
    for r, (p, n, s) in enumerate(some):
        high = [i for i in ptf.row(r).tolist() if i in liked(own, r)]
        rest = [i for i in ptf.row(r).tolist() if i not in liked(own, r)]
        assert len(high) == len(set(high)) == min(p, max(1, int(b[r] * p)))
        wanted = max(1, int(g[r] * len(high)))
        assert len(rest) == (wanted * (n + s > 0) if again else min(wanted, n + s))
        assert again or len(set(rest)) == len(rest)


@pytest.mark.parametrize("repeat", [False, True])
def test_ptf_without_one_of_the_kinds_and_by_id(repeat: bool) -> None:
    own, received = devices([(6, 0, 0), (0, 6, 0), (0, 0, 6), (20, 60, 20), (0, 0, 0)])
    report = disguise_ptf_predictions(
        own, received, PtfDisguise((1.0, 1.0), (3.0, 3.0), replace=repeat), round_draws(5)
    )
    assert report.counts().tolist() == [6, 1, 1, 80, 0]
    assert (np.diff(report.row(3)) >= 0).all()  # positives do not come first


def test_ptf_without_a_defence_uploads_every_prediction() -> None:
    own, received = devices([(5, 20, 3), (0, 0, 0)])
    report = disguise_ptf_predictions(own, received, PtfDisguise(None, swap=None), round_draws(2))
    assert report.counts().tolist() == [28, 0]
    expected = dict(zip(own.ids.tolist(), own.values["prediction"].tolist()))
    assert {i: s for i, s in entries(report, 0).items() if i in expected} == expected


# What the server could send


@given(st.lists(st.lists(st.integers(0, 59), max_size=40), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_g4_11_candidates_are_others_items_best_first(lists: list[list[int]], seed: int) -> None:
    upload, users = Ragged.from_lists(lists), np.arange(len(lists), dtype=np.int32)
    logits = tied_logits(len(lists), seed, 60)
    candidates = cand.find_unsent_candidates(
        cand.UploadHistory.from_upload(upload, 60), upload, users, lambda some: logits[some]
    )
    report = set(upload.ids.tolist())
    for r, own in enumerate(lists):
        best = sorted(report - set(own), key=lambda i, r=r: (-logits[r, i], i))[:30]  # type: ignore[misc]
        assert candidates.row(r).tolist() == best
        span = slice(candidates.ptr[r], candidates.ptr[r + 1])
        assert candidates.values["score"][span] == pytest.approx([1 / (1 + np.exp(-logits[r, i])) for i in best])
        share = [sum(i in entry for entry in lists) / max(1, sum(map(bool, lists))) for i in best]
        assert candidates.values["frequency"][span] == pytest.approx(share)


def test_g4_11_nothing_is_sent_before_there_is_an_upload() -> None:
    history = cand.UploadHistory.from_upload(Ragged.empty(0), N_ITEMS)
    candidates = cand.find_unsent_candidates(
        history, Ragged.empty(3), np.arange(3, dtype=np.int32), lambda users: tied_logits(3)[users]
    )
    assert candidates.counts().tolist() == [0, 0, 0]
    assert set(candidates.values) == {"score", "frequency"}


def test_candidates_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(2)
    upload = Ragged.from_lists([draws.integers(0, N_ITEMS, 20).tolist() for _ in range(23)])
    logits, users = tied_logits(23), np.arange(23, dtype=np.int32)
    history = cand.UploadHistory.from_upload(upload, N_ITEMS)
    request: list[int] = []

    def answer(some: Ints) -> Floats:
        request.append(len(some))
        return logits[some]

    whole = cand.find_unsent_candidates(history, upload, users, answer)
    hard = cand.select_ptf_items(history.counts, upload, users, answer)
    assert max(request) == 23
    request.clear()
    monkeypatch.setattr(cand, "CHUNK", 5)
    cut = cand.find_unsent_candidates(history, upload, users, answer)
    hard_cut = cand.select_ptf_items(history.counts, upload, users, answer)
    assert max(request) == 5
    for first, other in ((whole, cut), (hard, hard_cut)):
        np.testing.assert_array_equal(first.ptr, other.ptr)
        np.testing.assert_array_equal(first.ids, other.ids)
        np.testing.assert_array_equal(first.values["score"], other.values["score"])


def test_a_history_can_grow() -> None:
    history = cand.UploadHistory.from_upload(Ragged.from_lists([[0, 1], [2, 3]]), 5)
    grown = history.add_history(cand.UploadHistory.from_upload(Ragged.from_lists([[4, 4, 0]]), 5))
    assert grown.counts.tolist() == [2, 1, 1, 1, 1]
    assert grown.n_uploads == 3


def test_fixed_schedules_send_the_same_number_random_or_best() -> None:
    result = candidate_lists(400)
    best = cand.select_fixed_number(result, 2, "top", round_draws(400))
    assert best.counts().tolist() == np.minimum(2, result.counts()).tolist()
    assert all(best.row(r).tolist() == result.row(r)[:2].tolist() for r in range(400))
    some = cand.select_fixed_number(result, 4.5, "random", round_draws(400))
    assert set(some.counts().tolist()) == {4, 5}
    assert some.counts().mean() == pytest.approx(4.5, abs=0.1)
    assert result.holds(some.rows(), some.ids).all()
    place = np.concatenate([np.flatnonzero(np.isin(result.row(r), some.row(r))) for r in range(400)])
    counts = np.bincount(place, minlength=30)
    assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())


@given(st.lists(st.lists(st.integers(0, 59), max_size=40, unique=True), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_g5_3_hard_selection(lists: list[list[int]], seed: int) -> None:
    upload, users = Ragged.from_lists(lists), np.arange(len(lists), dtype=np.int32)
    logits = tied_logits(len(lists), seed, 60)
    counts = cand.UploadHistory.from_upload(upload, 60).counts
    confident = cand.select_ptf_items(counts, upload, users, lambda some: logits[some])
    limit = np.arange(len(lists)) * 7
    cut = keep_first_items(confident, limit)
    for r, own in enumerate(lists):
        frequent = [i for i in sorted(range(60), key=lambda i: (-counts[i], i)) if counts[i] and i not in own][:15]
        top = sorted(range(60), key=lambda i, r=r: (-logits[r, i], i))[:30]  # type: ignore[misc]
        hard = [i for i in top if i not in own and i not in frequent][:15]
        assert confident.row(r).tolist() == frequent + hard
        assert len(confident.row(r)) <= 30
        assert not set(confident.row(r).tolist()) & set(own)
        assert cut.row(r).tolist() == (frequent + hard)[: limit[r]]
    assert np.isin(cut.values["score"], confident.values["score"]).all()


# Bytes, evaluation, small things


def test_g4_14_bytes() -> None:
    assert 30 * traffic.PAIR_BYTES == 240
    assert traffic.convert_to_paper_units(30) == pytest.approx(4.578, abs=5e-4)
    assert traffic.convert_to_paper_units(0.46) == pytest.approx(0.070, abs=5e-4)


@pytest.mark.parametrize("constant", [False, True])
def test_g4_13_random_and_constant_scores_over_one_in_a_hundred(constant: bool) -> None:
    n = 20_000
    scores = np.random.default_rng(0).random((n, 100)).astype(np.float32) * (not constant)
    wanted = Ragged(np.arange(n + 1), np.full(n, 7, np.int32))
    others = np.tile(np.delete(np.arange(100, dtype=np.int32), 7), n)
    result = evaluate_ranking(
        lambda users: scores[users].copy(), wanted, Ragged.empty(n), np.arange(n, dtype=np.uint64), Draws(1),
        EvaluationRules(["hr", "ndcg"], [10], Ragged(np.arange(n + 1) * 99, others)),
    ).compute_means()  # fmt: skip
    expected = (1 / np.log2(np.arange(1, 11) + 1)).sum() / 100
    assert expected == pytest.approx(0.045436, abs=5e-7)
    assert result["hr@10"] == pytest.approx(0.1, abs=5 * 0.3 / np.sqrt(n))
    assert result["ndcg@10"] == pytest.approx(expected, abs=5 * 0.15 / np.sqrt(n))


def test_ranks_in_rows_and_floored_shares_by_hand() -> None:
    rows = np.array([1, 0, 1, 1, 0])
    assert rank_in_rows(rows, np.array([5, 2, 3, 3, 1]), np.array([0, 0, 9, 8, 0])).tolist() == [2, 1, 1, 0, 0]
    assert rank_in_rows(rows[:0]).tolist() == []
    assert floor_share(0.29, np.array([100])).tolist() == [29]  # 28.999999999999996 in doubles
    assert floor_share(np.array([0.5, 0.1]), np.array([3, 9])).tolist() == [1, 0]


def test_scaling() -> None:
    assert standardize_values(np.array([1.0, 2, 3])) == pytest.approx([-1.224745, 0, 1.224745], abs=1e-6)
    assert standardize_values(np.array([0.1, 0.1, 0.1])).tolist() == [0, 0, 0]
    assert standardize_values(np.array([0.0] * 99 + [1.0]), cap=3.0).max() == 3
    assert standardize_values(np.zeros((0, 4))).shape == (0, 4)
    columns = standardize_values(np.array([[1.0, 4], [3, 4]]))
    assert columns == pytest.approx(np.array([[-1, 0], [1, 0]]), abs=1e-6)
