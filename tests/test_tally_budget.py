"""tally under a budget: closed forms, noise of the right size, charges, blocks, retractions, nodes, wrong settings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from helpers.loopback_site import Loopback, Site, make_site, rows_of_blocks
from helpers.noise_laws import SURE, normal
from helpers.oracle import make_block
from helpers.run_requests import certificate_of
from helpers.tally_runs import BUDGET_DATA, SPENT_AT, budget_config, leave_user, run_config
from tacita.cli import main
from tacita.core.config import PrivacyConfig, RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Broadcast, Ragged, ServerState
from tacita.data.features import ItemFeature, ItemFeatures
from tacita.federation.clients import build_user_view
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.live.node import noise_replay
from tacita.live.node.node import Node, NodeConfig
from tacita.live.per_client_arrays import derive_run_secret
from tacita.live.server.coordinator import refuse_settings_not_live
from tacita.live.settings import check_live_settings
from tacita.messages import OuterProducts, Spec, Upload, add_upload, empty_total
from tacita.models.tally import private_math
from tacita.models.tally.features import encode_item_features
from tacita.models.tally.model import STATE, TallyConfig
from tacita.models.tally.private_math import (
    GRID,
    PEOPLE_SHARE,
    POPULARITY_SHARE,
    TallyBudget,
    build_unit_vectors,
    choose_axes,
    draw_symmetric_noise,
    fit_denoising_matrix,
    shrink_values,
)
from tacita.models.tally.private_tally import POPULARITY_RELEASE, TERMS_RELEASE, PrivateTally
from tacita.privacy.calibration import compute_gaussian_epsilon, compute_max_mu
from tacita.privacy.ledger import ACCOUNT_ARRAYS, UNIT
from tacita.privacy.noise import NoiseStream
from tacita.report.promises import NO_EPSILON
from tacita.research.audit.budget import READERS, audit_budget
from tacita.round.device_state import PARTS, DeviceState
from tacita.runs.assembly import Machine, assemble_federation, build_components
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists
from tacita.runs.training import train


def call(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def private(epsilon: float = 4.0, **more: Any) -> PrivateTally:
    return PrivateTally(TallyConfig(), PrivacyConfig(epsilon=epsilon, **{"blocks": 1, **more}))


def nothing_yet(model: PrivateTally) -> ServerState:
    return ServerState(np.zeros((0, 0), np.float32), model.init_heads(Draws(0)))


# What a person tells


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 39), max_size=30), min_size=1, max_size=6), st.integers(2, 40), st.integers(0, 99)
)
def test_a_term_has_length_1_whatever_the_history(sets: list[set[int]], k: int, seed: int) -> None:
    """Never longer, which is what the noise is sized for, and shorter by rounding alone; nothing tells nothing."""
    liked = np.random.default_rng(seed).exponential(size=40) * 20
    axes = choose_axes(liked, k)
    lists = Ragged.from_lists([sorted(element) for element in sets])
    vectors = build_unit_vectors(lists, axes.inputs, axes.scale, axes.centre)
    lengths = np.linalg.norm(vectors, axis=1)
    assert (lengths <= 1).all()
    whole = vectors / GRID
    assert (whole == np.rint(whole)).all()
    for row, entry in enumerate(sets):
        report = not entry.isdisjoint(axes.inputs.tolist())
        assert lengths[row] == 0 or (report and lengths[row] > 1 - GRID * math.sqrt(k) - 1e-6)
        if not report:
            assert lengths[row] == 0
    assert np.abs(vectors @ axes.centre).max() <= GRID * k  # the centre is taken out


def test_unit_likes_have_length_at_most_1() -> None:
    lists = Ragged.from_lists([list(range(n)) for n in (0, 1, 2, 3, 7, 40)])
    each = private_math.compute_unit_likes(lists)
    squares = np.bincount(lists.rows(), weights=each**2, minlength=6)
    assert squares[0] == 0
    assert (squares <= 1).all()
    assert (squares[1:] > 1 - 1e-5).all()


def test_sums_are_exact_in_any_order_and_chunk() -> None:
    draws = np.random.default_rng(1)
    vectors = np.trunc(draws.normal(size=(60, 9)) / GRID) * GRID
    fields = (Spec("terms", (9, 9)),)

    def told(order: np.ndarray, size: int, exact: bool) -> np.ndarray:
        total = empty_total(fields)
        for lo in range(0, 60, size):
            some = order[lo : lo + size]
            form = OuterProducts(np.arange(len(some), dtype=np.int32), vectors[some], np.ones(len(some)))
            total = add_upload(
                total, Upload({"terms": form}, np.ones(len(some)), np.zeros(len(some), np.uint64)), fields, exact
            )
        return total["terms"]

    first = told(np.arange(60), 60, False)
    for size in (1, 7, 60):
        for exact in (False, True):
            assert np.array_equal(told(draws.permutation(60), size, exact), first)
    assert (first / GRID**2 == np.rint(first / GRID**2)).all()


# Noise


def test_noise_is_symmetric_and_has_the_size_that_the_budget_asks_for() -> None:
    """By the exact law; the same test fails for noise that is 5 % too small."""
    s, k = private(2.0).compute_term_deviation(nothing_yet(private()), "statistic"), 200
    assert s == pytest.approx(1 / (compute_max_mu(2.0, 1e-5) * math.sqrt(0.94) * math.sqrt(2)))
    noise = draw_symmetric_noise(NoiseStream(Draws(1, "secret"), "test"), s, k)
    assert np.array_equal(noise, noise.T)
    off, on = noise[np.tril_indices(k, -1)], np.diag(noise)
    assert normal(off, s) > SURE
    assert normal(on, s * math.sqrt(2)) > SURE
    assert normal(0.95 * off, s) < SURE
    assert normal(on, s) < SURE
    assert (noise / GRID**2 == np.rint(noise / GRID**2)).all()


def test_a_release_costs_a_person_what_is_charged() -> None:
    """|T|^2 / 2 s^2 of a term of length 1, and the other fields', come to mu^2 in all."""
    model = private(2.0)
    server = nothing_yet(model)
    heads = server.heads
    terms = 1 / (2 * model.compute_term_deviation(server, "statistic") ** 2)
    likes, people = (
        1 / model.budget.compute_deviation(share) ** 2
        for share in (private_math.POPULARITY_SHARE, private_math.PEOPLE_SHARE)
    )
    assert terms + likes + people == pytest.approx(compute_max_mu(2.0, 1e-5) ** 2, rel=1e-10)
    account = model.ledger().open_accounts(1, model.epsilon)
    for question in ("survey", "statistic"):
        what, mu = model.price_release(heads, question)
        account, goes = model.ledger().charge(account, what, mu)
        assert goes.all()
    assert terms + likes + people <= account["spent"].sum() * UNIT
    assert model.ledger().compute_spent_epsilon(account)[0] == pytest.approx(2.0, abs=1e-6)
    assert not model.ledger().charge(account, TERMS_RELEASE, 1e-4)[1].any()  # nothing is left


def test_blocks_compose() -> None:
    """Four blocks of mu / 2 each are one release of mu; a stream of them spends what was planned, and no more."""
    four = TallyBudget(2.0, 1e-5, 4)
    assert four.mu2 * 4 == pytest.approx(compute_max_mu(2.0, 1e-5) ** 2)
    assert four.compute_spent_epsilon(4) == pytest.approx(2.0, abs=1e-6)
    assert four.compute_spent_epsilon(1) == pytest.approx(
        compute_gaussian_epsilon(2 / compute_max_mu(2.0, 1e-5), 1e-5), rel=1e-6
    )
    fed, progress = run_config(budget_config(4.0, 3))
    assert fed.config.privacy.blocks == 3
    ledger = fed.learner.ledger()
    assert ledger is not None
    account = {name: progress.clients.arrays[f"{PARTS}statistic/{name}"] for name in ACCOUNT_ARRAYS}
    epsilon = ledger.compute_spent_epsilon(account)
    budget = TallyBudget(4.0, 1e-5, 3)
    for user in range(fed.stream.n_users):
        took = [b.index for b in fed.stream.blocks if user < b.n_users and b.train.counts()[user] > 0]
        later = [b for b in took if b > 0]
        assert account["times"][user].tolist() == [int(0 in took), len(took), 0, 0]  # absent: not charged
        assert account["spent"][user].sum() * UNIT == pytest.approx((len(later) + (0 in took)) * budget.mu2, rel=1e-9)
    assert epsilon.max() <= 4.0
    assert progress.results[-1]["promises"]["tally"]["epsilon"] == pytest.approx(4.0, abs=1e-6)
    assert progress.results[0]["promises"]["tally"]["epsilon"] < 2.5


def test_users_without_budget_upload_nothing_and_are_still_served() -> None:
    """The second block, as it would be had those people not come; what they lost stays what it was."""
    config = budget_config(4.0, 2)
    fed = assemble_federation(config, Machine())
    plain, poor = make_initial_progress(fed), make_initial_progress(fed)
    run_remaining_blocks(fed, plain, lambda report, now: None)
    broke = np.arange(0, fed.stream.n_users, 3)

    def on_round(report: Any, now: Progress) -> None:
        if report.block == 0:
            now.clients.arrays[f"{PARTS}statistic/budget"][broke[broke < now.clients.n_users]] = 0

    run_remaining_blocks(fed, poor, on_round)
    spent = (
        candidate.clients.arrays[SPENT_AT][broke[broke < fed.stream.blocks[0].n_users], 1]
        for candidate in (poor, plain)
    )
    assert next(spent).sum() < next(spent).sum()
    gone = fed.stream.blocks[1].train
    lists = gone.filter_entries(np.isin(gone.rows(), broke[broke < fed.stream.blocks[0].n_users]))
    heads = poor.server.heads
    lost = build_unit_vectors(lists, heads["inputs"], heads["scale"], heads["centre"])
    difference = plain.server.parts[STATE]["gram"] - poor.server.parts[STATE]["gram"]
    assert np.abs(difference - lost.T @ lost).max() < 1e-9  # the same noise in both: the lab's seed
    assert len(lists.ids) > 0
    assert poor.results[-1]["users"] == plain.results[-1]["users"]


def test_users_who_can_still_pay_are_not_counted_as_exhausted() -> None:
    model = private(blocks=4)
    ledger, account = model.ledger(), model.ledger().open_accounts(1, 4.0)
    account, _ = ledger.charge(
        account, POPULARITY_RELEASE, (model.budget.mu2 * (POPULARITY_SHARE + PEOPLE_SHARE)) ** 0.5
    )
    for block in range(4):
        assert not ledger.is_exhausted(account)[0]
        account, goes = ledger.charge(
            account, TERMS_RELEASE, (model.budget.mu2 * model.budget.compute_term_share(block == 0)) ** 0.5
        )
        assert goes[0]
    assert ledger.is_exhausted(account)[0]


def test_items_are_alike_by_their_own_column() -> None:
    """B is between the items that terms are about, which are numbered otherwise than the catalogue."""
    _fed, progress = run_config(budget_config(8.0, 1, data="synthetic:users=300,items=400,per_user=12,groups=4"))
    model, server = private(8.0), progress.server
    inputs, weights = server.heads["inputs"], server.heads["weights"]
    assert 10 < len(inputs) < len(server.items)
    assert weights.any()
    for place, item in enumerate(inputs.tolist()):
        message = model.measure_similarity_to_item(server, server.items, item)
        assert (message[inputs] == weights[:, place]).all()
        assert np.count_nonzero(message) == np.count_nonzero(weights[:, place])
    other = np.setdiff1d(np.arange(len(server.items)), inputs)[0]
    assert not model.measure_similarity_to_item(server, server.items, int(other)).any()


def test_no_upload_after_the_planned_blocks() -> None:
    _fed, progress = run_config(budget_config(4.0, 3, privacy={"epsilon": 4.0, "blocks": 2}))
    assert progress.server.heads["released"].tolist() == [1, 2]
    assert progress.clients.arrays[f"{PARTS}statistic/times"].max() == 2
    assert progress.results[2]["users"] > 0


# What the server makes of it


def test_shrinkage_is_the_closed_form() -> None:
    assert shrink_values(np.array([-9.0, 1.0, 2.0, 2.5, 4.0]), 2.0) == pytest.approx([0, 0, 0, 1.5, math.sqrt(12)])
    centre = np.array([0.0, 0.0, 1.0])
    smooth = fit_denoising_matrix(np.diag([10.0, 0.1, 50.0]), centre, 0.5)
    edge = 2 * 0.5 * math.sqrt(3)
    eta = math.sqrt(100 - edge**2)
    assert smooth == pytest.approx(np.diag([eta / (eta + 2 * edge), 0.0, 0.5]))


def test_weights_are_in_item_units_and_noise_variance_decays_squared() -> None:
    smooth, scale = np.array([[0.2, 0.1, 0.3], [0.1, 0.5, 0.0], [0.3, 0.0, 0.4]]), np.array([1.0, 2.0, 4.0])
    weights = private_math.solve_input_weights(smooth, scale)
    assert weights[0, 1] == pytest.approx(0.1 / (1 - 0.5) * 1 / 2)  # K_ij / (1 - K_jj) d_i / d_j
    assert weights[2, 0] == pytest.approx(0.3 / (1 - 0.2) * 4 / 1)
    assert (np.diag(weights) == 0).all()
    model = private(blocks=2)
    heads = {
        **model.init_heads(Draws(0)),
        "inputs": np.arange(3, dtype=np.int32),
        "released": np.array([0, 1], np.int32),
    }
    server = ServerState(np.zeros((3, 0), np.float32), heads).with_part(
        STATE, {"gram": np.ones((3, 3)), "variance": np.array([8.0])}
    )
    report = {"terms": np.eye(3), "draws": np.array([2.0])}  # two nodes, each with noise of its own
    terms = model.compute_faded_sums(server, report, "statistic", fade=0.5)
    assert (terms["gram"] == 0.5 + np.eye(3)).all()
    assert terms["variance"][0] == pytest.approx(0.25 * 8 + 2 * model.compute_term_deviation(server, "statistic") ** 2)


def test_features_help_what_lies_along_them() -> None:
    """A direction too weak for the whole matrix's edge is seen where features span it."""
    k, s = 100, 1.0
    basis = np.zeros((k, 1))
    basis[:4] = 0.5
    centre = np.zeros(k)
    centre[-1] = 1.0
    gram = 10.0 * basis @ basis.T  # the edge of all is 20, of one feature 2
    assert np.abs(fit_denoising_matrix(gram, centre, s) - 0.5 * np.outer(centre, centre)).max() == 0
    result = basis.T @ fit_denoising_matrix(gram, centre, s, basis) @ basis
    eta = math.sqrt(100 - 4)
    assert result == pytest.approx(eta / (eta + 30.0))


def test_codes_of_features_are_genres_and_spans() -> None:
    item_features = ItemFeatures(
        "x", {str(n): ItemFeature(("a",) if n % 2 else ("a", "b"), 1980 + n) for n in range(24)}, ""
    )
    codes = encode_item_features(item_features, [str(n) for n in range(24)] + ["unknown"])
    assert codes.shape == (25, 14)
    assert codes[-1].sum() == 0
    assert (codes[:24, 2:].sum(axis=1) == 1).all()
    assert codes[:, 2:].sum(axis=0).tolist() == [2.0] * 12
    nothing = ItemFeatures("x", {"0": ItemFeature(text="only words")}, "")
    with pytest.raises(TacitaError, match=r"no genre and no year.*privacy\.features=false"):
        encode_item_features(nothing, ["0"])


def test_k_and_the_order_of_items() -> None:
    assert private_math.choose_n_inputs(6040, 1.4541, 3706, False) == 322
    assert private_math.choose_n_inputs(6040, 1.4541, 3706, True) == 419
    assert private_math.choose_n_inputs(-3.0, 2.0, 3706, False) == 4
    assert private_math.choose_n_inputs(10**6, 0.1, 50, False) == 50
    fed, progress = run_config(budget_config(50.0, 1))
    heads, n = progress.server.heads, fed.stream.n_items
    model = private(50.0)
    assert model.has_valid_heads(heads, n)
    k = len(heads["inputs"])
    assert 2 <= k <= n
    assert heads["weights"].shape == (k, k)
    assert not np.diag(heads["weights"]).any()
    for name, bad in (
        ("inputs", heads["inputs"] + n),
        ("centre", 2 * heads["centre"]),
        ("weights", heads["weights"][1:]),
    ):
        assert not model.has_valid_heads({**heads, name: bad}, n)


def test_items_without_released_sums_rank_last() -> None:
    fed, progress = run_config(budget_config(1.0, 1))
    heads, block = progress.server.heads, fed.stream.blocks[0]
    assert len(heads["inputs"]) < block.n_items
    view = build_user_view(
        progress.clients, progress.server, block, np.arange(40, dtype=np.int32), fed.stream.user_keys, Broadcast()
    )
    scores = fed.backbone.score_history(view)
    assert scores is not None
    inside = np.isin(np.arange(block.n_items), heads["inputs"])
    assert (scores[:, inside].min(axis=1) > scores[:, ~inside].max(axis=1)).all()
    liked = progress.server.parts[STATE]["liked"]
    released = np.maximum(liked[~inside], 0)  # noise may leave nothing of an item's popularity
    order = np.argsort(released, kind="stable")
    assert (np.diff(scores[0, ~inside][order]) >= 0).all()


def test_private_tally_learns_with_many_users() -> None:
    config = budget_config(8.0, 1, data="synthetic:users=1500,items=60,per_user=14,groups=4,drift=0")
    _, progress = run_config(config)
    _, noise = run_config(config.model_copy(update={"privacy": PrivacyConfig(epsilon=0.05)}))
    assert progress.results[0]["ndcg@20"] > 1.15 * noise.results[0]["ndcg@20"]


# Taking back


def test_retraction_draws_fresh_noise_and_is_charged() -> None:
    """The difference of two sums is the term and noise as large as the bound on two terms; others pay nothing."""
    fed, progress = run_config(budget_config(4.0, 1))
    model = fed.backbone
    assert isinstance(model, PrivateTally)
    before, spent = progress.server, progress.clients.arrays[SPENT_AT].copy()
    statistic = leave_user(fed, progress, 5)["statistic"]
    heads = before.heads
    own = build_unit_vectors(
        fed.stream.blocks[0].train.take(np.array([5])), heads["inputs"], heads["scale"], heads["centre"]
    )
    difference = progress.server.parts[STATE]["gram"] - before.parts[STATE]["gram"]
    noise = difference + own.T @ own
    k, s = len(noise), model.compute_term_deviation(before, "statistic/retraction/0.1")
    assert s == pytest.approx(math.sqrt(2) / (math.sqrt(2) * math.sqrt(model.budget.mu2)))
    assert normal(noise[np.tril_indices(k, -1)], s) > SURE
    assert normal(0.8 * noise[np.tril_indices(k, -1)], s) < SURE
    messages = float(own[0] @ difference @ own[0]) + 1.0
    assert abs(messages) < 6 * math.sqrt(2) * s  # the term itself, 1, is no more than noise
    more = (progress.clients.arrays[SPENT_AT] - spent).sum(axis=1)
    assert more[5] * UNIT == pytest.approx(model.budget.mu2, rel=1e-9)
    assert not np.delete(more, 5).any()
    assert progress.server.parts[STATE]["variance"][0] == pytest.approx(before.parts[STATE]["variance"][0] + s**2)
    assert any("charged" in line for line in statistic.assumptions)
    repeat = progress.server
    leave_user(fed, progress, 6)
    second = progress.server.parts[STATE]["gram"] - repeat.parts[STATE]["gram"]
    assert np.abs(second - difference).max() > s  # never the same noise twice


@pytest.mark.parametrize("claimed", [-1, 0, 1, 2, 9])
def test_retraction_noise_ignores_the_servers_block_number(claimed: int) -> None:
    """What one person takes back and says again of three blocks is never longer than the noise was made for."""
    model = private(4.0, blocks=3)
    axes = choose_axes(np.random.default_rng(2).exponential(size=30), 20)
    released = np.array([claimed, 3], np.int32)
    heads = {**model.init_heads(Draws(0)), "inputs": axes.inputs, "scale": axes.scale, "centre": axes.centre}
    server = replace(nothing_yet(model), heads={**heads, "released": released}, block=2)
    blocks = [Ragged.from_lists([list(range(3 * b, 3 * b + 9))]) for b in range(3)]
    remainder = [Ragged.from_lists([[20 + b, 25]]) for b in range(3)]
    view = build_user_view(
        DeviceState.from_private(np.zeros((1, 0), np.float32)),
        server,
        make_block(2, 30, [[1]]),
        np.array([0], np.int32),
        np.ones(1, np.uint64),
        Broadcast(),
    )
    change = model.encode_retraction(view, blocks, remainder)["terms"]
    assert isinstance(change, OuterProducts)
    term = (change.vector * change.sign[:, None]).T @ change.vector
    assert 0.1 < np.linalg.norm(term) <= model.bound_term_length(server, "retraction")


def test_forget_states_the_guarantee_under_a_budget(tmp_path: Path) -> None:
    run = train(budget_config(4.0, 2, evaluate={"controls": False}), tmp_path / "run")
    saved = open_saved(run.folder)
    own_values = read_lists(saved.client_arrays, "history").take(saved.find_user_numbers(["u7"])).ids
    some = [saved.ids["items"][item] for item in own_values[:3].tolist()]
    granted = submit_request(run.folder, RawRequest("forget", {"u7": some}), verify=True)
    result = certificate_of(granted)
    assert "noise of its own" in granted.message
    assert result["guarantee"]["type"] != "exact"
    assert result["verdict"].startswith("not verified: the run states an epsilon")
    assert "sent alone shows" not in result["residual_risk"]
    assert any("spent epsilon" in line for line in result["guarantee"]["assumptions"])


# In a run folder, and on nodes


def test_run_states_its_epsilon_or_that_it_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    common = ["--data", BUDGET_DATA, "--backbone", "tally", "--no-controls", "--set", "split.n_blocks=2", "--quiet"]
    call(["train", *common, "--out", out, "--set", "privacy.epsilon=2"])
    message = " ".join(capsys.readouterr().out.split())
    assert "epsilon 2 at delta 1e-05" in message
    assert "Outside of the epsilon" in message
    assert "every control" in message
    assert "rehearsal" in message
    assert json.loads((tmp_path / "run" / "result.json").read_text())["config"]["privacy"]["blocks"] == 2
    call(["recommend", "--run", out, "--user", "u3"])
    assert "epsilon 2, delta 1e-05" in " ".join(capsys.readouterr().out.split())
    call(["train", *common, "--out", out + "2"])
    assert NO_EPSILON in " ".join(capsys.readouterr().out.split())
    call(["recommend", "--run", out + "2", "--user", "u3"])
    assert "no epsilon" in capsys.readouterr().out


def _site(folder: Path, config: RunConfig, secrets: dict[int, str]) -> Site:
    site = make_site(folder, config)
    for number, secret in secrets.items():
        where = folder / f"secret{number}"
        site.transport.members[number].close()
        values = {"name": f"n{number}", "server": "localhost:1", "min_users": 5, "min_contributors": 1}
        Node.create(where, validate_model(NodeConfig, values, "test"), secret=secret)
        site.transport.members[number] = Node.open(where)
    return site


def test_nodes_add_noise_to_the_sums_of_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the secrets of all nodes, and without chance, the server's sum is the lab's and their noise, to the bit."""
    monkeypatch.setattr(noise_replay, "draw_noise_seed", lambda *_: 0)
    config = budget_config(4.0, 2, privacy={"epsilon": 4.0, "blocks": 2}, split={"kind": "blocks", "n_blocks": 2})
    secrets = {1: "one", 2: "two", 3: "three"}
    site = _site(tmp_path, config, secrets)
    fed = assemble_federation(config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(config)[0])
    site.next_block()
    arrays, model = site.arrays(), fed.backbone
    assert isinstance(model, PrivateTally)
    heads = {name.removeprefix("now/heads/"): v for name, v in arrays.items() if name.startswith("now/heads/")}
    train_lists = fed.stream.blocks[0].train
    vectors = build_unit_vectors(train_lists, heads["inputs"], heads["scale"], heads["centre"])
    exact = vectors.T @ vectors
    first = nothing_yet(model)
    for secret in secrets.values():
        stream = NoiseStream(Draws(config.seed, derive_run_secret(secret, "r")), "tally statistic", 0, 0, 0)
        exact = exact + draw_symmetric_noise(stream, model.compute_term_deviation(first, "statistic"), len(exact))
    assert np.array_equal(arrays["now/parts/tally/gram"], exact)
    assert arrays["now/parts/tally/drawn"].tolist() == [3.0]
    assert arrays["now/parts/tally/variance"][0] == pytest.approx(
        3 * model.compute_term_deviation(first, "statistic") ** 2
    )
    for node in site.transport.members.values():  # charged with what left, in one commit
        state = node.store.load_devices("r", "now")
        assert state is not None
        assert (state[1][SPENT_AT] > 0).any()
        node.close()


def test_single_node_equals_the_lab(tmp_path: Path) -> None:
    config = budget_config(4.0, 2, privacy={"epsilon": 4.0, "blocks": 2}, split={"kind": "blocks", "n_blocks": 2})
    site = make_site(tmp_path, config)
    whole = Loopback({1: site.transport.members[1]})
    with site.store as store:
        for name in ("n2", "n3"):
            store.revoke_node(name)
    fed, progress = run_config(config)
    for block, rows in zip(fed.stream.blocks, rows_of_blocks(config), strict=True):
        site.publish(list(fed.stream.item_ids[: block.n_items]))
        site.transport.members[1].store.add_interactions([(u, i, t, None) for u, i, t in rows])
        site.transport = whole
        site.next_block()
    arrays = site.arrays()
    for name, value in progress.server.parts[STATE].items():
        assert np.array_equal(arrays[f"now/parts/tally/{name}"], value), name
    for name, value in progress.server.heads.items():
        assert np.allclose(arrays[f"now/heads/{name}"], value, atol=1e-6), name


def test_reply_outside_noise_and_term_bounds_is_refused(tmp_path: Path) -> None:
    from tacita.live.server.bounds import ExpectedSum, check_total
    from tacita.live.wire import Reply, ReplyHead

    fed, progress = run_config(budget_config(4.0, 1))
    fields = fed.backbone.list_statistic_fields(progress.server, "statistic")
    k = len(progress.server.heads["inputs"])
    head = ReplyHead(kind="statistic", run="r", block=0, round=0, verdict="ok", clients=9, expected=9.0, weight=9.0)
    good = {"terms": np.zeros((k, k)), "draws": np.ones(1)}
    check_total(Reply(head, good), ExpectedSum(fields))
    with pytest.raises(TacitaError, match="cannot have said"):
        check_total(Reply(head, {**good, "terms": np.full((k, k), 1e4)}), ExpectedSum(fields))


# Wrong settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"privacy": {"epsilon": 0.0}}, "privacy.epsilon.*more than 0"),
        ({"privacy": {"epsilon": 2.0, "delta": 1.0}}, "privacy.delta.*less than 1"),
        ({"privacy": {"epsilon": 1e-4}}, "nothing but noise.*raise privacy.epsilon"),
        ({"privacy": {"features": True}}, "set privacy.epsilon, too"),
        ({"privacy": {"blocks": 2}}, "set privacy.epsilon, too"),
        ({"privacy": {"delta": 1e-6}}, "set privacy.epsilon, too"),
        ({"privacy": {"epsilon": 2.0}, "method": "dpps"}, "`tiers` of part dpps; leave privacy.epsilon out"),
        ({"privacy": {"epsilon": 2.0}, "method": "dpps", "backbone": {"name": "mf"}}, "`tiers` of part dpps"),
        (
            {"privacy": {"epsilon": 2.0}, "method": "dp-fedavg", "backbone": {"name": "mf"}},
            "`epsilon` of part dp-fedavg",
        ),
        ({"privacy": {"epsilon": 2.0, "features": True}}, "says nothing of its items"),
        ({"privacy": {"epsilon": 2.0}, "backbone": {"name": "mf"}}, "use backbone 'tally'"),
        ({"privacy": {"epsilon": 2.0}, "backbone": {"name": "tally", "ridge": 3.0}}, "backbone.ridge has no meaning"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TacitaError, match=message):
        assemble_federation(
            validate_model(RunConfig, {"data": BUDGET_DATA, "backbone": {"name": "tally"}, **values}, "the test"),
            Machine(),
        )


def test_live_run_states_how_many_blocks_share_the_budget() -> None:
    with pytest.raises(TacitaError, match=r"privacy\.blocks"):
        check_live_settings(budget_config(2.0))
    with pytest.raises(TacitaError, match=r"privacy\.features is for the lab"):
        check_live_settings(budget_config(2.0, privacy={"epsilon": 2.0, "blocks": 1, "features": True}))
    refuse_settings_not_live(budget_config(2.0, privacy={"epsilon": 2.0, "blocks": 3}), 50)


def test_part_that_changes_the_statistic_is_refused() -> None:
    from tacita.core.types import Arrays, CohortView
    from tacita.round.learner import build_learner
    from tacita.round.part import Part, PartConfig, RunContext

    class Louder(Part):
        name = "louder"
        works_with = ("rows", "statistic")

        def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
            return upload.scale(np.full(upload.n_clients, 2.0)), {}

    world = RunContext(private(), Draws(0), RunConfig().train)
    with pytest.raises(TacitaError, match=r"'louder' changes what is told.*leave one"):
        build_learner(world, (Louder(PartConfig(), world),)).check()


# The audit


def test_budget_audit_identifies_users_only_without_noise() -> None:
    config = budget_config(None, 1, data="synthetic:users=150,items=80,per_user=14,groups=4,drift=0")
    result = audit_budget(config, Machine(), [2.0])
    rows = {row["setting"]: row["readers"] for row in result["rows"]}
    assert rows["no budget"]["null_space"]["found"] > 0.85
    most = norm.cdf(
        compute_max_mu(2.0, 1e-5) / math.sqrt(2)
    )  # what the best reader of all could find, who knows all others
    assert all(0.4 < rows["epsilon 2"][name]["found"] < most + 0.03 for name in READERS)
    bare = rows["as many items, practically no noise"]
    assert bare["energy"]["found"] > 0.6
    assert abs(bare["energy"]["control"] - 0.5) < 0.12


def test_settings_without_a_budget_keep_their_hash() -> None:
    """A hash of a config from before there were budgets is still its hash."""
    from tacita.core.config import list_newer_settings_at_default

    assert list_newer_settings_at_default(RunConfig())["privacy"] is True
    assert "epsilon" not in str(list_newer_settings_at_default(budget_config(2.0)))
    assert isinstance(build_components(budget_config(2.0))[0], PrivateTally)
    assert not isinstance(build_components(budget_config(None))[0], PrivateTally)


def test_plan_without_noise_for_retractions_is_refused_at_build() -> None:
    with pytest.raises(TacitaError, match="takes back"):
        PrivateTally(TallyConfig(), PrivacyConfig(epsilon=0.1, blocks=10))
    for epsilon, blocks in ((0.1, 4), (0.5, 10), (1.0, 20)):
        model = PrivateTally(TallyConfig(), PrivacyConfig(epsilon=epsilon, blocks=blocks))
        heads = {**model.init_heads(Draws(0)), "released": np.array([blocks - 1, blocks], np.int32)}
        for block in (blocks - 1, blocks + 9):  # later ones tell nothing
            server = ServerState(np.zeros((5, 0), np.float32), heads, block, 0)
            draw_symmetric_noise(NoiseStream(Draws(1), "x"), model.compute_term_deviation(server, "retraction"), 3)


def test_server_work_is_bounded_whatever_user_count_nodes_claim() -> None:
    """10^9 people, which a reply may say, would be the whole catalogue squared."""
    model = PrivateTally(TallyConfig(most_inputs=300), PrivacyConfig(epsilon=8.0, blocks=1))
    n = 2000
    server = ServerState(np.zeros((n, 0), np.float32), model.init_heads(Draws(0)), 0, 0)
    fields = model.list_statistic_fields(server, "survey")
    lied = {"liked": np.arange(n, dtype=np.float64), "people": np.array([1e9]), "draws": np.ones(1)}
    after = model.learn_from_sums(server, empty_total(fields).with_sums(lied), "survey")
    assert len(after.heads["inputs"]) == 300
    wide = {**after.heads, "inputs": np.arange(301, dtype=np.int32)}
    wide |= {name: np.pad(after.heads[name], (0, 1)) for name in ("scale", "centre")}
    assert model.has_valid_heads(after.heads, n)
    assert not model.has_valid_heads(wide, n)
