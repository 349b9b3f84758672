"""What a ledger counts is what leaves: silos in streams, rounds played again, weights, other parts' questions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.oracle import answer_round, cohort, make_block, make_stream, started
from helpers.private_federation import crowd_stream, dpps_part, federate_parts
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Ragged
from tacita.federation import devices
from tacita.federation.evaluation import TrainedState
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks, run_round
from tacita.messages import QUANTUM, Upload, empty_total
from tacita.messages.aggregation import UploadAccumulator
from tacita.methods.personal.dp_fedavg import DPFedAvg
from tacita.models.tally.order_sums import NEXT
from tacita.models.tally.private_math import GRID
from tacita.privacy.accounting import compute_epsilon
from tacita.privacy.calibration import compute_epsilon_of_mu
from tacita.round.broadcast import Audience
from tacita.round.question import Question
from tacita.round.request import RequestBatch
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.forgetting.retraining import find_shared_items, retrain_blocks

POISSON = {"aggregation": "fixed", "denominator": 10.0, "participation": {"kind": "poisson", "rate": 0.3}}
ALL = {"aggregation": "fixed", "denominator": 30.0}
DP = {"name": "dp-fedavg", "clip": 0.1, "epsilon": 5.0, "releases": 20}
LDP = {"name": "laplace-noise", "mode": "ldp", "clip": 0.1, "epsilon": 1.0}


STREAM = {
    "data": "synthetic:users=60,items=40,per_user=14,groups=4,drift=0.5,new=0.5",
    "split": {"kind": "blocks", "n_blocks": 3, "base_share": 0.4},
    "backbone": {"name": "mf", "dim": 4},
}


def releases_of(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each client sends something that counts, from now on."""
    released: Counter[int] = Counter()
    add_upload = UploadAccumulator.add

    def count_senders(self: UploadAccumulator, upload: Upload, entire: bool) -> None:
        released.update(upload.sender[upload.weight > 0].tolist())
        add_upload(self, upload, entire)

    monkeypatch.setattr(UploadAccumulator, "add", count_senders)
    return released


@pytest.mark.parametrize("part", ["dpps", "laplace-noise"])
def test_silo_is_charged_per_release_whoever_participates(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = releases_of(monkeypatch)
    specs: dict[str, dict[str, Any]] = {
        "dpps": {"name": "dpps", "unit": "silo", "tiers": [1.0], "shares": [1.0], "releases": 3},
        "laplace-noise": {**LDP, "epsilon": 0.1, "budget": 0.3},
    }
    values = {
        "data": "synthetic:users=60,items=40,per_user=14,groups=4,drift=0.5,new=0.5",
        "split": {"kind": "blocks", "n_blocks": 4, "base_share": 0.4},
        "train": {"rounds": 2, "silos": 25, "aggregation": "mean", "patience": 100},
        "backbone": {"name": "mf", "dim": 4},
        "parts": [specs[part]],
    }
    fed = assemble_federation(validate_model(RunConfig, values, "test"), Machine(1))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    assert max(released.values()) == 3  # of 8 rounds, by silos whose people come and go
    assert progress.clients.parts[part]["times"][:, 0].max() == 3


def test_silo_charges_nobody_if_one_member_cannot_pay() -> None:
    fed = federate_parts(
        {"name": "dpps", "unit": "silo", "tiers": [1.0], "shares": [1.0], "releases": 2}, silos=5, aggregation="mean"
    )
    progress = started(fed)
    view = cohort(fed, progress)
    part = dpps_part(fed)
    accounts = part._open_accounts(view, np.zeros(len(view.user), np.int64))
    poor = np.zeros(len(view.user), bool)
    poor[view.user_ptr[0]] = True  # one person of the first silo
    accounts = {**accounts, "budget": np.where(poor, 0, accounts["budget"])}
    view = replace(view, parts={**view.parts, part.name: {**view.parts[part.name], **accounts}})
    upload, state = part.encode(view, answer_round(fed, view))
    first = np.arange(len(view.user)) < view.user_ptr[1]
    assert upload.weight[0] == 0
    assert (upload.weight[1:] > 0).all()
    assert not state["times"][first].any()
    assert (state["times"][~first, 0] == 1).all()


@pytest.mark.parametrize(
    ("part", "other", "train", "why"),
    [
        (DP, {"name": "fru"}, ALL, "remembers what leaves a device|asks people besides rounds|has to stand after"),
        (DP, {"name": "retrain"}, POISSON, "not drawn by chance"),
        (DP, {"name": "interest"}, ALL, "changes releases after|weighs people by what they have"),
        (LDP, {"name": "interest"}, {"aggregation": "mean"}, "changes releases after|weighs people by what they have"),
    ],
    ids=["another question", "the same people again", "weights", "weights, laplace"],
)
@pytest.mark.parametrize("last", [True, False])
def test_uncounted_releases_are_refused(
    part: dict[str, Any], other: dict[str, Any], train: dict[str, Any], why: str, last: bool
) -> None:
    backbone = "interest" if other["name"] == "interest" else "mf"
    with pytest.raises(TacitaError, match=why):
        federate_parts(*((other, part) if last else (part, other)), backbone=backbone, **train)


def test_full_participation_rounds_may_be_replayed() -> None:
    federate_parts({"name": "withdrawal"}, DP, {"name": "retrain"}, **ALL)


def test_retraining_redraws_participants(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "data": "synthetic:users=60,items=40,per_user=14,groups=4",
        "split": {"kind": "random"},
        "train": {**POISSON, "rounds": 3, "patience": 100},
        "backbone": {"name": "mf", "dim": 4},
        "parts": [{**DP, "epsilon": None, "noise": 3.0}],
    }
    fed = assemble_federation(validate_model(RunConfig, values, "test"), Machine(1))
    request: list[list[int]] = []
    chosen = devices.LocalDevices.draw_round_participants

    def noting(self: Any, fed: Any, server: Any) -> Any:
        result = chosen(self, fed, server)
        request.append(result.tolist())
        return result

    monkeypatch.setattr(devices.LocalDevices, "draw_round_participants", noting)
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    first, now = request.copy(), TrainedState(progress.server, progress.clients)
    request.clear()
    repeat = retrain_blocks(fed, find_shared_items(fed, now), None, now)
    assert request
    assert not any(entry in first for entry in request)
    assert (repeat.clients.parts["dp-fedavg"]["times"][:, 0] == 6).all()
    request.clear()
    twice = TrainedState(repeat.server, repeat.clients)
    retrain_blocks(fed, find_shared_items(fed, twice), None, twice)
    assert not any(entry in first for entry in request)


def uneven(n_users: int = 12, n_items: int = 40) -> BlockStream:
    """Everybody has two items but one person, who has twenty."""
    rng = np.random.default_rng(3)
    own_values = [rng.choice(n_items, 22 if u == 0 else 4, replace=False).tolist() for u in range(n_users)]
    return make_stream(
        make_block(
            0, n_items, [m[:-2] for m in own_values], [m[-2:-1] for m in own_values], [m[-1:] for m in own_values]
        )
    )


def test_client_weight_is_at_most_1() -> None:
    fed = federate_parts({**DP, "clip": 1e-3, "full_weight": 2.0}, stream=uneven(), **ALL)
    progress = started(fed)
    part = next(entry for entry in fed.parts if isinstance(entry, DPFedAvg))
    all_users = cohort(fed, progress)
    paid = {**all_users.parts[part.name], **part.charge_eligible(all_users)}
    view = replace(all_users, parts={**all_users.parts, part.name: paid})
    upload, _ = part.encode(view, answer_round(fed, view))
    assert np.diff(view.train.ptr).max() == 20  # ten times what counts fully
    assert upload.norms().max() <= 1e-3 * (1 + 1e-6)
    assert upload.norms().max() > 0.9e-3


def test_devices_weigh_by_the_variance_that_the_server_sends() -> None:
    tiers = {"tiers": [0.5, 50.0], "shares": [1.0, 1.0], "releases": 4, "clip": 0.5}
    fed = federate_parts({"name": "dpps", **tiers}, stream=crowd_stream(200, 40), aggregation="mean")
    progress = started(fed)
    part = dpps_part(fed)
    server, _ = run_round(fed, progress.server, progress.devices)
    sent = 4.0
    view = cohort(fed, progress)
    weighing = replace(view, received={**view.received, part.name: {"between": np.array([sent])}})
    upload = answer_round(fed, view)
    assert part.broadcast(server, Audience("round")).common.keys() == {"between"}
    own_values = part._find_client_tiers(view)
    assert set(own_values.tolist()) == {0, 1}
    assert np.array_equal(part.weigh(weighing, upload), part._compute_tier_weights(sent)[own_values])
    assert not np.allclose(part.weigh(weighing, upload), part._compute_tier_weights(0.0)[own_values])


def test_changing_budgets_need_more_noise_and_fit_the_plan() -> None:
    plain, careful = (
        next(iter(federate_parts({**DP, "epsilon": 1.0, "releases": 10, "adaptive": candidate}, **POISSON).parts))
        for candidate in (False, True)
    )
    assert isinstance(plain, DPFedAvg)
    assert isinstance(careful, DPFedAvg)
    assert careful.compute_noise_multiplier() > plain.compute_noise_multiplier()
    event = careful.ledger().events[0]
    assert 0.98 < compute_epsilon([(event, 10)], 1e-5, "rdp") <= 1.0
    account = careful.ledger().open_accounts(1, 1.0)
    for _ in range(10):
        account, goes = careful.ledger().charge(account, "round")
        assert goes.all()
    assert not careful.ledger().charge(account, "round")[1].any()


@pytest.mark.parametrize("part", ["dpps", "laplace-noise"])
def test_silo_keeps_its_spending_through_retraining(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = releases_of(monkeypatch)
    specs: dict[str, dict[str, Any]] = {
        "dpps": {"name": "dpps", "unit": "silo", "tiers": [1.0], "shares": [1.0], "releases": 9},
        "laplace-noise": {**LDP, "epsilon": 0.1, "budget": 0.9},
    }
    train = {"rounds": 2, "silos": 25, "aggregation": "mean", "patience": 100}
    fed = assemble_federation(
        validate_model(RunConfig, {**STREAM, "train": train, "parts": [specs[part]]}, "test"), Machine(1)
    )
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    now = TrainedState(progress.server, progress.clients)
    for _ in range(2):
        repeat = retrain_blocks(fed, find_shared_items(fed, now), None, now)
        now = TrainedState(repeat.server, repeat.clients)
    assert max(released.values()) == 9  # of 18 rounds


@pytest.mark.parametrize(
    "part", [{"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": 50}, {**LDP, "budget": 50.0}]
)
def test_replayed_rounds_are_charged_once(part: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    released = releases_of(monkeypatch)
    train = {"rounds": 2, "aggregation": "mean", "patience": 100}
    parts = [part, {"name": "withdrawal"}, {"name": "retrain"}]
    fed = assemble_federation(validate_model(RunConfig, {**STREAM, "train": train, "parts": parts}, "test"), Machine(1))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    keys = fed.stream.user_keys[: progress.clients.n_users]
    for leaver in range(2):
        handle_requests(fed, progress, RequestBatch("leave", keys[[leaver]], Ragged.empty(1), is_immediate=True))
    counted = progress.clients.parts[part["name"]]["times"][:, 0]
    assert counted[2:].tolist() == [released[key] for key in keys[2:].tolist()]
    assert counted.max() > 6  # of some, rounds of all three blocks were played again


def test_private_tally_is_released_once_per_block() -> None:
    values = {**STREAM, "backbone": {"name": "tally"}, "privacy": {"epsilon": 2.0}}
    with pytest.raises(TacitaError, match="beyond the budget"):
        assemble_federation(validate_model(RunConfig, {**values, "parts": [{"name": "retrain"}]}, "test"), Machine(1))
    fed = assemble_federation(validate_model(RunConfig, values, "test"), Machine(1))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    now = TrainedState(progress.server, progress.clients)
    with pytest.raises(TacitaError, match="beyond the budget"):
        retrain_blocks(fed, find_shared_items(fed, now), None, now)


def test_counted_laplace_noise_refuses_per_client_fields() -> None:
    values = {**STREAM, "backbone": {"name": "fedpergnn"}, "train": {"aggregation": "mean"}}
    fed = assemble_federation(
        validate_model(RunConfig, {**values, "parts": [{"name": "neighbours"}, LDP]}, "test"), Machine(1)
    )
    progress = make_initial_progress(fed)
    with pytest.raises(TacitaError, match="seen each by itself"):
        run_remaining_blocks(fed, progress, lambda report, now: None)


@pytest.mark.parametrize("backbone", ["tally", "tally-order"])
def test_noise_of_decayed_sums_is_finer_than_whole_numbers(backbone: str) -> None:
    """Control: of a deviation of 0.7 whole numbers the formula says 6.65, and one of them shows at epsilon 6.96."""
    x = np.arange(-50, 51)
    law = np.exp(-(x**2) / (2 * 0.7**2))
    law, value = law / law.sum(), float(compute_epsilon_of_mu(np.array([1 / 0.7]), 1e-5)[0])
    assert np.maximum(law - np.exp(value) * np.roll(law, 1), 0).sum() > 2e-5
    values = {**STREAM, "backbone": {"name": backbone, "decay": 0.5}, "privacy": {"epsilon": 4.0}}
    fed = assemble_federation(validate_model(RunConfig, values, "test"), Machine(1))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    heads = {**progress.server.heads, "released": np.array([10**6, 3], np.int32)}  # a server's word
    server = replace(progress.server, heads=heads)
    question = Question("retraction", owner="statistic")
    total = empty_total(fed.fields(server, question))
    result = fed.learner.noise_sum(server, total, question)
    assert 50 * GRID**2 < result["terms"].std() < 100 * GRID**2
    if backbone == "tally-order":
        assert 50 * QUANTUM < result[NEXT].std() < 80 * QUANTUM
