"""DPPS, DP-FedAvg and counted Laplace noise: the checks of spec section H.F, composition, and who stops when."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tacita
from helpers import noise_laws
from helpers.noise_laws import SURE
from helpers.oracle import answer_round, cohort, members, started
from helpers.private_federation import ROUND, SMALL_DATA, crowd_stream, dpps_part, federate_parts, serving_broadcast
from tacita.cli.entry import app
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays
from tacita.core.types import CohortView, Doubles, RoundReplay, ServerState
from tacita.federation.rounds import run_round
from tacita.messages import DenseArrays, SparseRows, Total, Upload
from tacita.methods import resolve_config
from tacita.methods.personal import releases
from tacita.methods.personal.clip_shares import estimate_client_variance
from tacita.methods.personal.dp_fedavg import DPFedAvg, keep_largest_numbers
from tacita.privacy.calibration import compute_gaussian_epsilon, compute_gaussian_sigma
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.round import registry
from tacita.round.part import Part
from tacita.runs import training
from tacita.runs.assembly import build_plan
from tacita.runs.ledger import describe_ledger, join_accounts, read_run_ledger, summarise_spending
from tacita.runs.run_folder import read_ids


def some_upload(rng: np.random.Generator, n_clients: int = 5, n_items: int = 7) -> Upload:
    client = np.repeat(np.arange(n_clients, dtype=np.int32), 3)
    item = rng.integers(0, n_items, len(client)).astype(np.int32)
    value = rng.normal(size=(len(client), 4)).astype(np.float32)
    head = DenseArrays(rng.normal(size=(n_clients, 3)).astype(np.float32))
    rows = SparseRows(client, item, value)
    return Upload({"rows": rows, "heads/a": head}, np.ones(n_clients), np.arange(n_clients, dtype=np.uint64))


# clips


def test_everything_a_client_sends_is_one_vector_of_at_most_the_clip() -> None:
    upload = some_upload(np.random.default_rng(0))
    for bound in (0.1, 1.0, 3.0):
        cut = releases.clip_upload(upload, bound)
        assert (cut.norms() <= bound * (1 + 1e-6)).all()
        shorter = upload.norms() <= bound
        for name, value in upload.values.items():
            state = cut.values[name].squared_norms(5)[shorter]
            assert (state == value.squared_norms(5)[shorter]).all()
    assert releases.clip_upload(upload, 1e9) is upload


def test_empty_and_non_finite_uploads_are_clipped_to_zero() -> None:
    upload = some_upload(np.random.default_rng(0))
    rows = upload.values["rows"]
    assert isinstance(rows, SparseRows)
    value = rows.value.copy()
    value[rows.client == 1] = 0
    value[np.flatnonzero(rows.client == 2)[0], 0] = np.nan
    value[np.flatnonzero(rows.client == 3)[0], 1] = np.inf
    head = upload.values["heads/a"]
    assert isinstance(head, DenseArrays)
    result = upload.with_value("rows", replace(rows, value=value)).with_value("heads/a", DenseArrays(0 * head.value))
    cut = releases.clip_upload(result, 1.0)
    assert cut.norms()[[1, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert (cut.weight == 1).all()  # they still send
    assert np.isfinite(cut.norms()).all()
    sizes = releases.compute_l1_norms(upload)
    assert sizes[0] == pytest.approx(np.abs(rows.value[rows.client == 0]).sum() + np.abs(head.value[0]).sum(), rel=1e-6)
    assert (releases.compute_l1_norms(releases.clip_upload(upload, 1.0, sizes)) <= 1 + 1e-6).all()


# noise and weights


def test_noise_lies_on_all_coordinates_with_the_planned_deviation() -> None:
    """Also with shrinkage at 0.9: what a release is noised with does not depend on what is made of it later."""
    fed = federate_parts(
        {"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": 50, "clip": 0.5, "shrink": 0.9, "between": 0.0},
        stream=crowd_stream(4, 3000),
    )
    part, progress = dpps_part(fed), started(fed)
    assert part.compute_noise_deviations()[0] == pytest.approx(
        2 * 0.5 * math.sqrt(50) * compute_gaussian_sigma(1, 1e-5), rel=1e-6
    )
    fields = fed.fields(progress.server, ROUND)
    quiet = replace(fed, parts=())
    plain = started(quiet).devices.exchange(quiet, progress.server, serving_broadcast(fed, progress), ROUND).total
    noisy = progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total
    assert {field.name for field in fields} == {"rows", "dpps.noise"}
    assert noisy["dpps.noise"][0] == pytest.approx(4 * part.compute_noise_deviations()[0] ** 2)
    untouched = np.abs(plain["rows"]).sum(axis=1) == 0
    assert untouched.sum() > 2900
    noise = noisy["rows"][untouched]
    assert noise_laws.normal(noise, 2 * part.compute_noise_deviations()[0]) > SURE
    assert (
        noise_laws.normal(noise, 2 * 0.95 * part.compute_noise_deviations()[0]) < SURE
    )  # five per cent less would be found
    assert noise.std() == pytest.approx(2 * part.compute_noise_deviations()[0], rel=0.02)


def test_weights_follow_inverse_variances_up_to_the_cap() -> None:
    part = dpps_part(federate_parts({"name": "dpps"}))
    sigma, weights = part.compute_noise_deviations(), part._compute_tier_weights(0.0)
    assert weights.max() == 1
    shares = np.full(3, 1 / 3)
    mean = weights @ shares
    assert (weights <= 10 * mean * (1 + 1e-9)).all()
    assert weights / weights[0] == pytest.approx((sigma[0] / sigma) ** 2)  # 62 times, which is below the cap here
    drawn = np.random.default_rng(0).normal(size=(20000, 3)) * sigma
    assert (drawn @ weights / weights.sum()).var() == pytest.approx(1 / (sigma**-2.0).sum(), rel=0.05)
    assert (
        dpps_part(federate_parts({"name": "dpps", "clip": 2.0}))._compute_tier_weights(0.0) == weights
    ).all()  # all doubled: the same
    assert part._compute_tier_weights(1e12) == pytest.approx(np.ones(3), rel=1e-6)
    rare = dpps_part(federate_parts({"name": "dpps", "shares": [0.98, 0.01, 0.01]}))._compute_tier_weights(0.0)
    assert rare[2] <= 10 * float(np.array([0.98, 0.01, 0.01]) @ rare) * (1 + 1e-9)
    assert rare[2] / rare[0] < weights[2] / weights[0]
    equal = dpps_part(
        federate_parts({"name": "dpps", "tiers": [1.0, 1.0], "shares": [1.0, 1.0]})
    )._compute_tier_weights(0.0)
    assert (equal == 1).all()


def test_between_client_variance_is_estimated_through_noise() -> None:
    part = dpps_part(federate_parts({"name": "dpps"}))
    rng = np.random.default_rng(2)
    deltas = rng.normal(0, 0.02, (2000, 40, 6))
    lengths = np.sqrt((deltas**2).sum(axis=(1, 2)))
    sums = {"rows": deltas.sum(axis=0), "dpps.length": np.array([(0.1 * lengths**2 / part.config.clip).sum()])}
    total = Total({**sums, "dpps.noise": np.array([0.0])}, 2000.0, 2000)
    clip = part.config.clip
    assert estimate_client_variance(total, 0.0, clip) == pytest.approx(0.02**2, rel=0.02)
    noisy = sums["rows"] + rng.normal(0, 40.0, sums["rows"].shape)  # as much in the mean as there is between clients
    noisy_total = total.with_sums({"rows": noisy})
    assert estimate_client_variance(noisy_total, 40.0**2, clip) == pytest.approx(0.02**2, rel=0.1)


# after the noise


def test_shrinkage_uses_only_noisy_values() -> None:
    rng = np.random.default_rng(3)
    value = rng.normal(size=(50, 8))
    assert (releases.shrink_sum(value, 0.5, 0.0, True) == value).all()
    for by_row in (True, False):
        result = releases.shrink_sum(value, 0.5, 1.0, by_row)
        factor = result / value
        assert ((factor >= 0) & (factor <= 1)).all()  # no sign is turned, nothing grows
    remainder = np.maximum(
        0, 1 - 0.7 * (8 - 2) * 2.0 / (value**2).sum(axis=1, keepdims=True)
    )  # James and Stein's, by row
    assert np.allclose(releases.shrink_sum(value, 2.0, 0.7, True), remainder * value)
    assert 0 < (remainder > 0).sum() < 50
    signal = rng.normal(0, 0.05, (64, 32))
    for sigma in (0.1, 0.5):
        noisy = signal + rng.normal(0, sigma, signal.shape)
        result = releases.shrink_sum(noisy, sigma**2, 1.0, False)
        assert ((result - signal) ** 2).mean() < 0.5 * ((noisy - signal) ** 2).mean()
    part = dpps_part(federate_parts({"name": "dpps", "between": 0.0, "shrink": 1.0}))
    server = ServerState(np.zeros((40, 6), np.float32), {})
    sums = {"rows": rng.normal(size=(40, 6)), "dpps.noise": np.array([0.3])}
    first, two = (part.decode(server, Total(dict(sums), 30.0, n, nonce=n)) for n in (30, 12))
    assert (first["rows"] == two["rows"]).all()


def test_repeated_round_draws_fresh_noise() -> None:
    """Else the difference of two answers would show two updates without any noise."""
    fed = federate_parts({"name": "dpps", "between": 0.0})
    progress = started(fed)
    down = serving_broadcast(fed, progress)
    first = progress.devices.exchange(fed, progress.server, down, ROUND).total
    repeat = progress.devices.exchange(fed, progress.server, down, replace(ROUND, replay=RoundReplay(0, 1.0))).total
    difference = (repeat["rows"] - first["rows"]) / math.sqrt(2 * float(first["dpps.noise"][0]))
    assert noise_laws.normal(difference) > SURE


class Halving(Part):
    """Weighs every second client by a half, as a method would by something that people have."""

    name = "halving"

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        return np.where(view.client_keys % np.uint64(2) == 0, 0.5, 1.0)


def test_client_weights_are_clipped_and_noised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PARTS, "halving", Halving)
    nearly_none = {"tiers": [900_000.0], "shares": [1.0], "noise": 0.002, "clip": 100.0, "between": 0.0, "shrink": 0.0}
    fed = federate_parts({"name": "halving"}, {"name": "dpps", **nearly_none})
    plain = federate_parts({"name": "halving"})
    progress, other = started(fed), started(plain)
    sent = progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total
    assert sent.weight == 30  # what travels in clear is how many there are
    total = dpps_part(fed).decode(progress.server, sent)
    wanted = other.devices.exchange(plain, other.server, serving_broadcast(plain, other), ROUND).total
    assert total.weight == pytest.approx(wanted.weight, rel=0.1)
    assert wanted.weight < 28
    noise = math.sqrt(float(sent["dpps.noise"][0]))
    assert np.abs(total["rows"] - wanted["rows"]).max() < 6 * noise


def test_clip_covers_all_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of an update and the weight that others give it are numbers of a person like all the rest."""
    monkeypatch.setitem(registry._PARTS, "halving", Halving)
    fed = federate_parts({"name": "halving"}, {"name": "dpps", "clip": 1e-3})
    view = cohort(fed, started(fed))
    upload = answer_round(fed, view)
    factors = [part.weigh(view, upload) for part in (fed.parts[0], dpps_part(fed))]
    weighed = replace(upload, weight=upload.weight * factors[0] * factors[1])
    sent, _ = dpps_part(fed).encode(view, weighed)
    assert set(sent.values) == {"rows", "dpps.noise", "dpps.length", "dpps.mass"}
    private = replace(sent, values={name: v for name, v in sent.values.items() if name != "dpps.noise"})
    assert private.norms() == pytest.approx(np.full(30, 1e-3), rel=1e-4)  # all were longer, and none is any more
    assert (private.norms() <= 1e-3 * (1 + 1e-9)).all()
    for name in ("dpps.length", "dpps.mass"):
        assert (sent.values[name].squared_norms(30) > 0).all()


# budgets


def test_users_stop_when_their_budget_is_spent() -> None:
    fed = federate_parts(
        {"name": "dpps", "tiers": [0.5, 5.0], "shares": [1.0, 1.0], "noise": 8.0, "clip": 0.01}, stream=crowd_stream(40)
    )
    progress = started(fed)
    dpps = progress.clients.parts["dpps"]
    assert set(dpps["tier"].tolist()) == {0, 1}
    ledger, server, sent = dpps_part(fed).ledger(), progress.server, []
    for _ in range(6):
        server, _ = run_round(fed, server, progress.devices)
        account = progress.clients.parts["dpps"]
        spent = ledger.compute_spent_epsilon(account)
        assert (spent <= account["budget"] * 1e-6).all()
        sent.append(account["times"][:, 0].copy())
    low, high = dpps["tier"] == 0, dpps["tier"] == 1
    fits = int((1 / compute_gaussian_sigma(0.5, 1e-5)) ** 2 / (1 / 8.0) ** 2)
    assert 0 < fits < 6
    assert (sent[-1][low] == fits).all()
    assert (sent[-1][high] == 6).all()
    result = summarise_spending(ledger, progress.clients.parts["dpps"])
    assert result["silent_by_budget"] == int(low.sum())
    assert progress.devices.sum_validation(fed, server, serving_broadcast(fed, progress))  # and everybody is served


def test_a_planned_number_of_releases_is_exactly_what_fits() -> None:
    fed = federate_parts({"name": "dpps", "releases": 2, "clip": 0.01})
    progress = started(fed)
    server = progress.server
    for _ in range(4):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["dpps"]
    assert (account["times"][:, 0] == 2).all()
    assert (dpps_part(fed).ledger().compute_spent_epsilon(account) <= account["budget"] * 1e-6).all()
    before = server
    server, _ = run_round(fed, server, progress.devices)
    assert np.array_equal(server.items, before.items)  # nobody speaks any more


def test_noise_as_published_is_counted_at_its_true_cost() -> None:
    fed = federate_parts({"name": "dpps", "calibration": "paper", "clip": 0.01})
    part, progress = dpps_part(fed), started(fed)
    assert part.compute_noise_multipliers() == pytest.approx([2.0, 1.0, 0.2])
    run_round(fed, progress.server, progress.devices)
    account = progress.clients.parts["dpps"]
    spent, tier = part.ledger().compute_spent_epsilon(account), account["tier"]
    for k, noise in enumerate((2.0, 1.0, 0.2)):
        assert spent[tier == k] == pytest.approx(compute_gaussian_epsilon(noise, 1e-5), rel=1e-6)
    message = part.promises(progress.server)
    assert message["epsilon_1_really"] == pytest.approx(54.4, abs=0.1)
    assert message["epsilon_0.5_really"] == pytest.approx(20.7, abs=0.1)
    assert message["delta_at_1_really"] == pytest.approx(0.127, abs=1e-3)


def test_a_budget_by_activity_costs_its_own_count() -> None:
    fed = federate_parts(
        {"name": "dpps", "policy": "activity", "activity_cuts": [3.0, 30.0], "clip": 0.01, "releases": 3}
    )
    progress, ledger = started(fed), dpps_part(fed).ledger()
    account = progress.clients.parts["dpps"]
    assert account["times"].tolist() == [[0, 0, 1]] * 30
    assert ledger.compute_spent_epsilon(account) == pytest.approx(np.full(30, 0.1), abs=1e-9)
    server = progress.server
    for _ in range(4):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["dpps"]
    assert (account["times"][:, 0] == 3).all()
    assert (ledger.compute_spent_epsilon(account) <= account["budget"] * 1e-6).all()


def test_central_model_noises_the_sum_once_with_per_tier_clips() -> None:
    fed = federate_parts({"name": "dpps", "threat": "central", "releases": 4}, aggregation="fixed")
    part, progress = dpps_part(fed), started(fed)
    for k, epsilon in enumerate((0.5, 1.0, 5.0)):
        wanted = part.compute_noise_deviations()[0] / (math.sqrt(4) * compute_gaussian_sigma(epsilon, 1e-5))
        assert part.compute_clips()[k] == pytest.approx(wanted, rel=1e-5)
    total = progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total
    assert total["dpps.noise"][0] == pytest.approx(part.compute_noise_deviations()[0] ** 2)
    assert part.compute_clips().mean() == pytest.approx(part.config.clip)  # a third chooses each tier
    alone = dpps_part(
        federate_parts({"name": "dpps", "threat": "central", "tiers": [0.5], "shares": [1.0]}, aggregation="fixed")
    )
    richer = dpps_part(federate_parts({"name": "dpps", "threat": "central"}, aggregation="fixed"))
    assert (
        richer.compute_noise_deviations()[0] < 0.5 * alone.compute_noise_deviations()[0]
    )  # as much signal, less noise: others allow more
    for settings in ({"aggregation": "mean"}, {}):
        with pytest.raises(TacitaError, match="aggregation = 'fixed'"):
            federate_parts({"name": "dpps", "threat": "central"}, **settings)


def test_silo_unit_is_charged_as_one() -> None:
    with pytest.raises(TacitaError, match="unit = 'silo'"):
        federate_parts({"name": "dpps"}, silos=3)
    fed = federate_parts({"name": "dpps", "unit": "silo", "clip": 0.01, "releases": 2}, silos=3)
    progress = started(fed)
    server = progress.server
    for _ in range(3):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["dpps"]
    assert dpps_part(fed).promises(server)["unit"] == "silo"
    assert (account["times"] <= 2).all()
    assert account["times"].max() == 2


def test_a_silo_chooses_one_tier_for_all_its_people() -> None:
    """The most careful of many people would leave hardly a silo any tier but the lowest."""
    fed = federate_parts(
        {"name": "dpps", "unit": "silo", "clip": 0.01, "releases": 2}, stream=crowd_stream(200), silos=12
    )
    progress = started(fed)
    assert (progress.clients.parts["dpps"]["budget"] == 0).all()
    run_round(fed, progress.server, progress.devices)
    account, result = progress.clients.parts["dpps"], members(fed)
    tiers = [np.unique(account["tier"][result.users.row(k)]).tolist() for k in range(12)]
    assert all(len(tier) == 1 for tier in tiers)
    assert {tier[0] for tier in tiers} == {0, 1, 2}
    wanted = np.array([0.5, 1.0, 5.0])[account["tier"]] * 1e6
    assert np.abs(account["budget"] - wanted).max() <= 1
    assert (account["times"][:, 0] == 1).all()


# what does not go together


def test_fields_without_noise_are_refused() -> None:
    for settings in ({"aggregation": "per-row"}, {"aggregation": "weighted"}):
        with pytest.raises(TacitaError, match="noise on every row"):
            federate_parts({"name": "dpps"}, **settings)
    with pytest.raises(TacitaError, match="list dpps after it"):
        federate_parts({"name": "dpps"}, {"name": "proximal"})
    with pytest.raises(TacitaError, match="remembers what leaves a device"):
        federate_parts({"name": "dpps"}, {"name": "retraction"}, aggregation="fixed")
    with pytest.raises(TacitaError, match=r"'dpps'.*sends predictions, which it cannot change"):
        tacita.train(data=SMALL_DATA, method="fedkdrec", parts=[{"name": "dpps"}], out=Path("never"))
    with pytest.raises(TacitaError, match="each client being drawn by itself"):
        federate_parts({"name": "dp-fedavg"}, aggregation="fixed", participation={"kind": "fraction", "rate": 0.1})
    with pytest.raises(TacitaError, match="must not divide by who took part"):
        federate_parts({"name": "dp-fedavg"}, participation={"kind": "poisson", "rate": 0.1})
    for tiers, shares in (([1.0, 0.5], [1.0, 1.0]), ([1.0], [1.0, 1.0]), ([0.0], [1.0])):
        with pytest.raises(TacitaError):
            federate_parts({"name": "dpps", "tiers": tiers, "shares": shares})


# DP-FedAvg


def test_dp_fedavg_charges_every_eligible_user() -> None:
    poisson = {"kind": "poisson", "rate": 0.3}
    fed = federate_parts(
        {"name": "dp-fedavg", "noise": 2.0, "epsilon": None, "clip": 0.01},
        aggregation="fixed",
        participation=poisson,
    )
    progress = started(fed)
    server, report = run_round(fed, progress.server, progress.devices)
    assert report.clients < 30
    account = progress.clients.parts["dp-fedavg"]
    assert (account["times"][:, 0] == 1).all()
    (part,) = fed.parts
    assert isinstance(part, DPFedAvg)
    assert part.ledger().events[0].rate == 0.3
    moved = server.items - progress.server.items
    assert noise_laws.normal(moved[np.abs(moved) < 1], 2.0 * 0.01 / (0.3 * 30)) > 1e-12  # nearly all of it is noise


def test_dp_fedavg_stops_after_its_plan_and_noises_empty_rounds() -> None:
    fed = federate_parts({"name": "dp-fedavg", "releases": 2, "clip": 0.01}, aggregation="fixed")
    progress = started(fed)
    server = progress.server
    for _ in range(3):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["dp-fedavg"]
    assert (account["times"][:, 0] == 2).all()
    assert not account["pays"].any()
    (part,) = fed.parts
    assert isinstance(part, DPFedAvg)
    empty = part.noise_sum(server, Total({"rows": np.zeros((40, 6))}))
    assert empty.n_clients == 1
    assert noise_laws.normal(empty["rows"], part.compute_noise_multiplier() * 0.01) > SURE


def test_only_the_largest_numbers_of_each_client_are_kept() -> None:
    """Of item rows and shared parameters together: 12 and 3 numbers of each."""
    upload = some_upload(np.random.default_rng(0))

    def numbers(made: Upload, client: int) -> Doubles:
        rows, head = made.values["rows"], made.values["heads/a"]
        assert isinstance(rows, SparseRows)
        assert isinstance(head, DenseArrays)
        return np.concatenate([rows.value[rows.client == client].ravel(), head.value[client]])

    state, heads = keep_largest_numbers(upload, 0.25), 0
    for client in range(5):
        own_values, whole = numbers(state, client), numbers(upload, client)
        assert (own_values != 0).sum() == 4
        assert np.abs(own_values[own_values != 0]).min() >= np.sort(np.abs(whole))[-4]
        assert (own_values[own_values != 0] == whole[own_values != 0]).all()
        heads += int((own_values[12:] == 0).sum())
    assert heads > 0  # they are no exception


def test_inclusion_is_independent_from_person_to_person() -> None:
    from tacita.core.config import ParticipationConfig
    from tacita.core.draws import derive_keys
    from tacita.federation.clients import draw_participants, group_users_into_clients

    stream = crowd_stream(30)
    config, draws = ParticipationConfig(kind="poisson", rate=0.3), Draws(1)
    living = group_users_into_clients(stream.blocks[0], derive_keys(stream.user_ids), 0, draws)
    drawn = np.zeros((4000, 30))
    for n in range(4000):
        drawn[n, draw_participants(living, config, draws, 0, n)] = 1
    assert drawn.mean(axis=0) == pytest.approx(np.full(30, 0.3), abs=5 * math.sqrt(0.21 / 4000))
    pairs = np.corrcoef(drawn.T)[np.triu_indices(30, 1)]
    assert np.abs(pairs).max() < 5.5 / math.sqrt(4000)
    assert drawn.sum(axis=1).var() == pytest.approx(30 * 0.21, rel=0.15)  # a fixed cohort would have none


# Laplace noise that is counted


def test_counted_laplace_noise_is_clipped_in_l1_and_costs_what_it_says() -> None:
    part = {"name": "laplace-noise", "mode": "ldp", "clip": 0.02, "epsilon": 0.5, "budget": 1.0}
    fed = federate_parts(part, stream=crowd_stream(5, 3000))
    (noise,) = fed.parts
    assert noise.noise_scale == 2 * 0.02 / 0.5  # type: ignore[attr-defined]
    progress = started(fed)
    total = progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total
    assert total["rows"].std() == pytest.approx(0.08 * math.sqrt(2 * 5), rel=0.05)
    server = progress.server
    for _ in range(3):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["laplace-noise"]
    assert account["times"].tolist() == [[2, 0]] * 5  # nothing was spent in earlier runs
    assert noise.privacy is not None
    ledger = noise.privacy.ledger()
    assert ledger is not None
    assert ledger.compute_spent_epsilon(account) == pytest.approx(np.ones(5), abs=1e-6)
    paper = federate_parts({"name": "laplace-noise", "from_block": 0}).parts[0]
    assert paper.privacy is not None
    assert paper.privacy.ledger() is None


# with other methods, from the command line's side


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "f3crec-dpps"},
        {"method": "fedshare-dpps", "train": {"rounds": 2, "local_epochs": 1}},
        {"method": "dpps", "backbone": {"name": "tally", "ridge": 50.0}},
        {"method": "dp-fedavg", "parts": [{"name": "dp-fedavg", "noise": 2.0, "epsilon": None}]},
    ],
    ids=lambda s: s["method"],
)
def test_dpps_composes_with_other_methods_and_reports_epsilon(settings: dict[str, Any], tmp_path: Path) -> None:
    quiet = {"evaluate": {"controls": False}, "train": {"rounds": 2}, "split": {"n_blocks": 2}}
    run = tacita.train(data=SMALL_DATA, out=tmp_path / "run", **quiet | settings)
    privacy = run.result["privacy"]
    assert privacy["released_something"] > 0
    assert privacy["epsilon"]["most"] is not None
    part = "dp-fedavg" if settings["method"] == "dp-fedavg" else "dpps"
    assert run.result["blocks"][-1]["promises"][part]["unit"] == "person"
    lines = describe_ledger(read_run_ledger(run.folder))
    assert any("protects a person against" in line for line in lines)
    user = read_ids(run.folder)["users"][0]
    own = read_run_ledger(run.folder, user)
    assert own["spent"] <= privacy["epsilon"]["most"] + 1e-9
    assert own["spent_composed"] <= own["spent"] + 1e-9
    assert any("Spent so far: epsilon" in line for line in describe_ledger(own))


def test_a_run_without_a_ledger_has_no_epsilon(tmp_path: Path) -> None:
    run = tacita.train(data=SMALL_DATA, out=tmp_path / "run", train={"rounds": 1}, evaluate={"controls": False})
    assert "privacy" not in run.result
    assert describe_ledger(read_run_ledger(run.folder))[0].startswith("No epsilon")
    assert join_accounts((), {}) is None


def test_a_killed_run_goes_on_with_the_same_numbers_and_the_same_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)  # after every round
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", float("inf"))
    settings = {"data": SMALL_DATA, "method": "f3crec-dpps", "split": {"n_blocks": 2}, "train": {"rounds": 3}}
    parts = [{"name": "dpps", "releases": 4, "clip": 0.1}]
    config = resolve_config({**settings, "parts": parts, "evaluate": {"controls": False}}, "the test")
    whole = training.train(config, tmp_path / "whole")
    rounds = 0

    def stop(report: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(config, tmp_path / "cut", watcher=training.TrainingCallbacks(on_round=stop))
    cut = training.resume(tmp_path / "cut")
    assert cut.result["blocks"] == whole.result["blocks"]
    assert cut.result["privacy"] == whole.result["privacy"]
    assert cut.result["privacy"]["silent_by_budget"] > 0
    state = [read_arrays(folder / "clients.safetensors")[0] for folder in (cut.folder, whole.folder)]
    for name in ACCOUNT_ARRAYS:
        assert np.array_equal(*(entry[f"parts/dpps/{name}"] for entry in state))

    user = read_ids(whole.folder)["users"][0]
    spoken = CliRunner().invoke(app, ["ledger", str(whole.folder)])
    assert spoken.exit_code == 0
    assert "against the server, which sees each noised release" in spoken.output
    assert user not in spoken.output.split()
    own = CliRunner().invoke(app, ["ledger", str(whole.folder), user, "--json"])
    assert json.loads(own.output)["user"] == user


@pytest.mark.parametrize("threat", ["central", "silo"])
def test_empty_sum_is_noised_once(threat: str) -> None:
    """Else a model that did not move would say for certain that nobody's budget paid."""
    train: dict[str, Any] = {"aggregation": "fixed"}
    train |= {"silos": 3, "in_silos": "apart"} if threat == "silo" else {}
    tiers = {"tiers": [0.1], "shares": [1.0], "releases": 1}
    values = {"data": SMALL_DATA, "backbone": {"name": "mf", "dim": 2}, "method": "dpps", "train": train}
    values["parts"] = [{"name": "dpps", "threat": threat, **tiers}]
    part = build_plan(resolve_config(values, "the test")).parts[0].privacy
    assert part is not None
    server = ServerState(np.zeros((600, 2), np.float32), {})
    spread = []
    for n in (0, 1):
        total = Total({"rows": np.zeros((600, 2)), "dpps.noise": np.zeros(1)}, float(n), n)
        sent = part.noise_sum(server, total)
        assert sent.n_clients == 1
        spread.append(float(sent["rows"].std()))
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0
