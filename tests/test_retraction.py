"""Client-carried retraction: what it takes back, when it is exact, how its damping is found, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.oracle import started
from helpers.replay_federation import (
    LISTS,
    N_ITEMS,
    forget_request,
    keys_of,
    leave_request,
    make_federation,
    play_rounds,
)
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Ragged
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, run_round
from tacita.messages import SparseRows
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.accumulators import (
    accumulate_retraction,
    compute_commitments,
    find_gaussian_multiplier,
    merge_carried_rows,
)
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.runs.calibration import measure_retraction_calibration

FIXED: dict[str, Any] = {"aggregation": "fixed", "denominator": 6.0}


def retracting(*more: dict[str, Any], train: dict[str, Any] | None = None, **options: Any) -> Federation:
    entry = {"name": "retraction", "alpha": 0.0, "ratio": 0.1} | options
    return make_federation({"name": "withdrawal"}, *more, entry, **FIXED | (train or {}))


def distance(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, np.float64) - other).max())


# Exactness


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_retraction_after_one_round_equals_the_round_without_leavers(alpha: float) -> None:
    """H.D 3."""
    fed = retracting(alpha=alpha)
    progress, other = play_rounds(fed, 1), started(fed)
    before = progress.server.items
    retraction = handle_requests(fed, progress, leave_request(fed, 3, 1))["retraction"]
    without, _ = run_round(fed, other.server, other.devices, np.delete(fed.stream.user_keys[:6], [1, 3]))
    assert distance(progress.server.items, without.items) < 1e-7
    assert distance(before, without.items) > 1e-3
    assert retraction.calibration is not None
    assert retraction.calibration.path == "retraction"
    assert 0 < retraction.details["length"] <= retraction.psi_bound * 1.001
    assert retraction.rounds == 0
    assert retraction.clients_asked == 2


def test_when_everybody_has_left_the_first_table_is_back() -> None:
    """H.D 3: rho = 1, with rounds that some skip."""
    fed = retracting(train={"participation": {"kind": "fraction", "rate": 0.5}, "server_lr": 0.8})
    progress = play_rounds(fed, 5)
    assert distance(progress.server.items, started(fed).server.items) > 1e-2
    handle_requests(fed, progress, leave_request(fed, *range(6)))
    assert distance(progress.server.items, started(fed).server.items) < 1e-6
    retraction = progress.server.parts["retraction"]
    assert len(retraction["sender"]) == len(retraction["clients"]) == 0


def test_the_order_of_two_leavers_does_not_matter() -> None:
    """H.D 4: rho = 1; nor whether they leave together."""
    ends = []
    for request in ([[1], [4]], [[4], [1]], [[1, 4]]):
        fed = retracting()
        progress = play_rounds(fed, 4)
        for entry in request:
            handle_requests(fed, progress, leave_request(fed, *entry))
        ends.append(progress.server.items)
    assert distance(ends[0], ends[1]) < 1e-6
    assert distance(ends[0], ends[2]) < 1e-6


def quadratic(rounds: int, away: int | None, step: float = 0.1) -> tuple[Doubles, list[Doubles], Any]:
    """Five quadratic clients, a fixed denominator: the table, client 0's pieces and the others' operator."""
    rng = np.random.default_rng(4)
    curves = [np.diag(rng.uniform(0.2, 3.0, 6)) for _ in range(5)]
    wants = rng.normal(size=(5, 6))
    table, pieces = np.zeros(6), []
    for _ in range(rounds):
        moves = [-step * curve @ (table - want) / 5 for curve, want in zip(curves, wants, strict=True)]
        pieces.append(moves[0])
        table = table + sum(move for u, move in enumerate(moves) if u != away)
    others = np.eye(6) - step / 5 * sum(curves[1:])
    return table, pieces, others


@pytest.mark.parametrize("rounds", [1, 6, 30, 200])
def test_quadratic_clients_are_retracted_exactly_with_the_true_operator(rounds: int) -> None:
    """H.D 3: what later rounds absorb of a disturbance is then known."""
    table, pieces, others = quadratic(rounds, None)
    without, _, _ = quadratic(rounds, 0)
    back = table + accumulate_retraction(pieces, [lambda x: others @ x] * rounds)
    assert distance(back, without) < 1e-10


def test_pure_subtraction_overshoots_and_a_calibrated_damping_does_not() -> None:
    """H.D 3: thirty rounds of the toy."""
    table, pieces, _ = quadratic(30, None, step=0.3)
    without, _, _ = quadratic(30, 0, step=0.3)
    before = np.linalg.norm(table - without)

    def ratio(alpha: float) -> float:
        return float(np.linalg.norm(table + accumulate_retraction(pieces, [1 - alpha * 0.8] * 30) - without) / before)

    assert ratio(0.0) > 1
    assert min(ratio(0.01 * k) for k in range(51)) < 0.3


# What a device carries


def test_a_device_carries_the_damped_sum_of_what_it_sent() -> None:
    """Against the plain recursion over another part's log of every upload, with rounds that some skip."""
    fed = retracting(
        {"name": "fru", "keep": 1.0, "negatives": "uniform"},
        train={"participation": {"kind": "fraction", "rate": 0.5}, "denominator": 3.0},
        alpha=0.4,
        checkpoint_every=2,
    )
    progress = play_rounds(fed, 5)
    lists = progress.clients.read_part_lists(np.arange(6))
    damping = np.diff(progress.server.parts["retraction"]["damping"])
    np.testing.assert_allclose(np.exp(damping), 1 - 0.4)
    want, got = np.zeros((6, N_ITEMS, 6)), np.zeros((6, N_ITEMS, 6))
    for number in range(5):
        rows, weight = log.read_round(lists["fru"], (0, number))
        rho = np.where(weight > 0, 1 - 0.4 * (1 - 1 / 3), 1 - 0.4)
        want *= rho[:, None, None]
        want[rows.client, rows.item] -= rows.value / 3
    carried = lists["retraction"]["carried"]
    now = progress.server.parts["retraction"]["damping"][-1]
    factor = np.exp(now - progress.clients.parts["retraction"]["since"])
    np.add.at(got, (carried.rows(), carried.ids), carried.values["row"] * factor[carried.rows(), None])
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert len(np.unique(carried.values["segment"])) > 1


def test_an_item_stands_once_in_a_segment() -> None:
    old = Ragged.from_lists([[3], [3, 5]])
    old = Ragged(old.ptr, old.ids, {"row": np.ones((3, 2), np.float32), "segment": np.zeros(3, np.int32)})
    new = Ragged.from_lists([[3, 4], []])
    new = Ragged(new.ptr, new.ids, {"row": np.full((2, 2), 2.0)})
    result = merge_carried_rows(old, np.array([0.5, 1.0]), new, 0)
    assert [result.row(r).tolist() for r in range(2)] == [[3, 4], [3, 5]]
    assert result.values["row"][:, 0].tolist() == [2.5, 2.0, 1.0, 1.0]
    later = merge_carried_rows(old, np.array([0.5, 1.0]), new, 7)
    assert later.row(0).tolist() == [3, 3, 4]
    assert later.values["segment"].tolist() == [0, 7, 7, 0, 0]


def test_commitments_bind_and_differ() -> None:
    rows = SparseRows(np.array([0, 0, 2], np.int32), np.array([1, 4, 1], np.int32), np.ones((3, 2), np.float32))
    names = np.array([5, 6, 7], np.uint64)
    first = compute_commitments(rows, 3, names, np.uint64(1))
    assert np.array_equal(first, compute_commitments(rows, 3, names, np.uint64(1)))
    assert len(np.unique(first, axis=0)) == 3
    changed = SparseRows(rows.client, rows.item, rows.value + np.float32(1e-7))
    assert (first != compute_commitments(changed, 3, names, np.uint64(1))).any(1).tolist() == [True, False, True]
    assert (first != compute_commitments(rows, 3, names, np.uint64(2))).any(1).all()
    fed = retracting()
    retraction = play_rounds(fed, 2).server.parts["retraction"]
    assert retraction["commitment"].shape == (12, 16)
    assert retraction["commitment"].nbytes == 12 * 32


def test_the_analytic_gaussian_multiplier() -> None:
    assert find_gaussian_multiplier(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-4)


def test_certificate_noise_is_as_large_as_the_bound_says() -> None:
    ends = []
    for options in ({}, {"epsilon": 1.0}):
        fed = retracting(ratio=0.2, **options)
        progress = play_rounds(fed, 2)
        retraction = handle_requests(fed, progress, leave_request(fed, 3))["retraction"]
        ends.append(progress.server.items.astype(np.float64))
    assert retraction.details["sigma"] == pytest.approx(
        0.2 * retraction.psi_bound * find_gaussian_multiplier(1.0, 1e-5)
    )
    assert np.std(ends[1] - ends[0]) == pytest.approx(retraction.details["sigma"], rel=0.3)


# The fallback


def retract_everybody(fed: Federation, progress: Progress, users: list[int]) -> None:
    """As if everybody left, without asking why not."""
    (part,) = (entry for entry in fed.parts if entry.name == "retraction")
    object.__setattr__(part, "config", part.config.model_copy(update={"ratio": 0.1}))
    handle_requests(fed, progress, leave_request(fed, *users))


@pytest.mark.parametrize(("ratio", "message"), [(None, "not calibrated"), (0.7, "left 0.70 of the distance")])
def test_without_a_good_calibration_the_table_goes_back_to_a_checkpoint(ratio: float | None, message: str) -> None:
    fed = retracting(ratio=ratio, checkpoint_every=2)
    progress = play_rounds(fed, 5)
    tables = [name for name in progress.server.parts["retraction"] if name.startswith("table.")]
    assert sorted(tables) == ["table.000000", "table.000002", "table.000004"]
    retraction = handle_requests(fed, progress, leave_request(fed, 3))["retraction"]
    assert retraction.calibration is not None
    assert retraction.calibration.path == "checkpoint"
    assert retraction.calibration is not None
    assert message in str(retraction.calibration.reason)
    assert (retraction.details["from_round"], retraction.rounds) == (0, 5)
    state = progress.server.parts["retraction"]
    assert len(state["rounds"]) == 5
    assert not np.isin(keys_of(fed, 3), state["sender"]).any()
    assert len(state["sender"]) == 5 * 5
    other = started(fed)
    for _ in range(5):
        stay = np.delete(fed.stream.user_keys[:6], 3)
        other.server, _ = run_round(fed, other.server, other.devices, stay)
    assert np.array_equal(progress.server.items, other.server.items)  # as if they had never been there
    assert np.array_equal(np.delete(progress.clients.private, 3, 0), np.delete(other.clients.private, 3, 0))
    retract_everybody(fed, progress, [0, 1, 2, 4, 5])  # what is carried now is what was added since
    assert distance(progress.server.items, started(fed).server.items) < 1e-6


def test_rollback_cost_is_the_rounds_since_a_user_joined() -> None:
    fed = retracting(ratio=None, checkpoint_every=2)
    progress = started(fed)
    early = np.delete(fed.stream.user_keys[:6], 3)
    for _ in range(3):
        progress.server, _ = run_round(fed, progress.server, progress.devices, early)
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    retraction = handle_requests(fed, progress, leave_request(fed, 3))["retraction"]
    assert (retraction.details["from_round"], retraction.rounds) == (2, 3)
    other = started(fed)
    for _ in range(5):
        other.server, _ = run_round(fed, other.server, other.devices, early)
    assert np.array_equal(progress.server.items, other.server.items)
    retract_everybody(fed, progress, [0, 1, 2, 4, 5])
    assert distance(progress.server.items, started(fed).server.items) < 1e-6


def test_retraction_larger_than_the_uploads_is_refused() -> None:
    fed = retracting()
    progress = play_rounds(fed, 3)
    columns = progress.clients.lists["parts/retraction/carried"].columns
    columns["row"] *= 1000
    retraction = handle_requests(fed, progress, leave_request(fed, 3))["retraction"]
    assert retraction.calibration is not None
    assert retraction.calibration.path == "checkpoint"
    assert retraction.calibration is not None
    assert "longer than all that was ever sent" in str(retraction.calibration.reason)


def test_retraction_waits_for_min_users() -> None:
    fed = retracting(min_users=3)
    progress = play_rounds(fed, 2)
    before = progress.server.items
    retraction = handle_requests(fed, progress, leave_request(fed, 3, 1))["retraction"]
    assert retraction.waits_for == 1
    assert progress.server.items is before
    retraction = handle_requests(fed, progress, leave_request(fed, 4))["retraction"]
    assert retraction.clients_asked == retraction.details["leavers"] == 3
    assert not np.array_equal(progress.server.items, before)


def test_unsupported_retractions_are_refused_in_one_sentence() -> None:
    with pytest.raises(TacitaError, match="use 'fixed'"):
        make_federation({"name": "retraction"})
    with pytest.raises(TacitaError, match=r"say it: train\.denominator"):
        make_federation({"name": "retraction"}, aggregation="fixed", participation={"kind": "poisson", "rate": 0.5})
    fed = retracting()
    progress = play_rounds(fed, 1)
    with pytest.raises(TacitaError, match="does not forget single items"):
        handle_requests(fed, progress, forget_request(fed, 0, 1))


# Calibration


def test_calibration_finds_the_damping_that_comes_closest() -> None:
    fed = retracting(train={"local_epochs": 3})
    once = measure_retraction_calibration(fed, leavers=2, rounds=1)
    assert max(once.ratios.values()) < 1e-5
    many = measure_retraction_calibration(fed, leavers=1, groups=3, rounds=25)
    assert many.ratio == min(many.ratios.values()) <= many.plain
    assert many.options() == {"alpha": many.alpha, "ratio": round(many.ratio, 4)}
    with pytest.raises(TacitaError, match="leave nobody"):
        measure_retraction_calibration(fed, leavers=len(LISTS))


def test_calibration_reports_the_route_it_selects() -> None:
    """The ratio found is that of people who leave together in a run of its own."""
    fed = retracting()
    result = measure_retraction_calibration(fed, leavers=2, rounds=8, alphas=(0.3,))
    drawn = measure_retraction_calibration.__globals__["hash_owners"](
        fed.draws.public("leavers"), fed.stream.user_keys[:6]
    )
    users = np.argsort(drawn, kind="stable")[:2].tolist()
    run = retracting(alpha=0.3)
    progress, other = play_rounds(run, 8), started(run)
    before = progress.server.items.astype(np.float64)
    handle_requests(run, progress, leave_request(run, *users))
    for _ in range(8):
        stay = np.delete(run.stream.user_keys[:6], users)
        other.server, _ = run_round(run, other.server, other.devices, stay)
    remainder = np.linalg.norm(progress.server.items - other.server.items) / np.linalg.norm(before - other.server.items)
    assert remainder == pytest.approx(result.ratio, rel=0.05)


def test_every_retraction_draws_fresh_noise() -> None:
    """Two with the same noise, scaled and subtracted, would show what the leavers had added."""
    noisy_values, plain = retracting(ratio=0.2, epsilon=1.0), retracting(ratio=0.2)
    moved: dict[str, list[Doubles]] = {"noised": [], "plain": []}
    for name, fed in (("noised", noisy_values), ("plain", plain)):
        progress = play_rounds(fed, 2)
        for user in (3, 1):
            before = progress.server.items.astype(np.float64)
            handle_requests(fed, progress, leave_request(fed, user))
            moved[name].append(progress.server.items - before)
    first, second = (a - b for a, b in zip(moved["noised"], moved["plain"], strict=True))
    assert first.std() > 0
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.5


def test_immediate_request_does_not_wait() -> None:
    fed = retracting(min_users=3)
    request = RequestBatch.from_request(leave_request(fed, 3))
    assert handle_requests(fed, play_rounds(fed, 2), request)["retraction"].waits_for == 2
    assert not handle_requests(fed, play_rounds(fed, 2), replace(request, is_immediate=True))["retraction"].is_waiting
