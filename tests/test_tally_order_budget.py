"""tally-order under a budget: one length over all fields, noise by the exact law, one charge, what is taken back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.noise_laws import SURE, normal
from helpers.oracle import federate, make_block, make_stream
from helpers.tally_runs import SPENT_AT, budget_config, leave_user, run_config
from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Broadcast, Doubles, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.messages import QUANTUM, Form, Spec, Total, Upload, add_upload, empty_total
from tacita.models.tally.model import STATE, STATISTIC
from tacita.models.tally.order import OrderConfig
from tacita.models.tally.private_math import choose_axes
from tacita.models.tally.private_order import (
    FOLLOWING,
    FOLLOWING_VARIANCE,
    PrivateOrderedTally,
    compute_unit_factors,
    denoise_order,
    map_to_inputs,
)
from tacita.privacy.calibration import compute_max_mu
from tacita.privacy.ledger import UNIT
from tacita.privacy.noise import NoiseStream
from tacita.round.device_state import DeviceState
from tacita.runs.assembly import build_components

SHARE = 0.4
LISTS = st.lists(st.lists(st.integers(0, 29), max_size=25), min_size=1, max_size=5)  # some come twice


def private(epsilon: float = 4.0, blocks: int = 1, **options: Any) -> PrivateOrderedTally:
    return PrivateOrderedTally(OrderConfig(order_share=SHARE, **options), PrivacyConfig(epsilon=epsilon, blocks=blocks))


def asked(model: PrivateOrderedTally, k: int = 20, block: int = 0, last: int = -1) -> ServerState:
    axes = choose_axes(np.random.default_rng(2).exponential(size=30) * 20, k)
    heads = {**model.init_heads(Draws(0)), "inputs": axes.inputs, "scale": axes.scale, "centre": axes.centre}
    heads["released"] = np.array([last, 0], np.int32)
    return ServerState(np.zeros((30, 0), np.float32), heads, block=block)


def summed(told: dict[str, Form], k: int, client: int | slice, n: int) -> tuple[Doubles, Doubles]:
    """What one of n clients, or some, add to both fields."""
    fields = Spec("terms", (k, k), symmetric=True), Spec("next", (k, k))
    weight = np.zeros(n)
    weight[client] = 1.0
    total = add_upload(empty_total(fields), Upload(told, weight, np.zeros(n, np.uint64)), fields)
    return total["terms"], total["next"]


def length_of(model: PrivateOrderedTally, both: tuple[Doubles, Doubles]) -> float:
    """Of what is released, before noise of one size falls on all of it."""
    terms, following = both
    return math.sqrt(
        (1 - model.order_share) * float((terms**2).sum()) + model.order_share * float((following**2).sum())
    )


# One length over all fields


@settings(max_examples=60, deadline=None)
@given(LISTS, st.integers(2, 30), st.sampled_from([(8.0, 40), (1.0, 3), (50.0, 1)]))
def test_adding_one_user_changes_the_sum_by_length_at_most_1(
    lists: list[list[int]], k: int, fall: tuple[float, int]
) -> None:
    model = private(order_fold=fall[0], order_window=fall[1])
    server, n = asked(model, k), len(lists)
    report = model.encode_lists(Ragged.from_lists(lists), np.arange(n + 1), server.heads, STATISTIC)
    line = map_to_inputs(Ragged.from_lists(lists), server.heads["inputs"])
    for u in range(n):
        both = summed(report, k, u, n)
        assert length_of(model, both) <= 1
        following = np.linalg.norm(both[1])
        assert following == 0 if len(line.row(u)) < 2 else 1 - 1e-4 < following <= 1
        assert np.array_equal(both[1] / QUANTUM, np.rint(both[1] / QUANTUM))


@pytest.mark.parametrize("claimed", [-1, 0, 2, 9])
def test_retraction_noise_ignores_the_servers_block_number(claimed: int) -> None:
    model = private(blocks=3)
    server = asked(model, block=2, last=claimed)
    values = np.array([0], np.int32)

    view = build_user_view(
        DeviceState.from_private(np.zeros((1, 0), np.float32)),
        server,
        make_block(2, 30, [[1]]),
        values,
        np.ones(1, np.uint64),
        Broadcast(),
    )
    reports = [Ragged.from_lists([list(range(3 * b, 3 * b + 9))]) for b in range(3)]
    remainder = [Ragged.from_lists([list(range(3 * b + 8, 3 * b - 1, -1))]) for b in range(3)]  # the other way round
    both = summed(model.encode_retraction(view, reports, remainder), 20, 0, 1)
    assert np.abs(both[0]).max() == 0  # the same items
    assert 0.1 < length_of(model, both) <= model.bound_term_length(server, "retraction")


def test_the_length_of_a_line_is_that_of_its_count() -> None:
    fall = np.array([1.0, 0.5, 0.25])
    unit_factors = compute_unit_factors(np.array([0, 1, 2, 3, 5]), fall)
    squares = [0, 0, 1, 2.25, 1 + 1.25 + 2 * 1.3125]
    assert unit_factors == pytest.approx([1 / math.sqrt(s) if s else 0 for s in squares], rel=1e-6)
    assert (unit_factors <= [1 / math.sqrt(s) if s else 0 for s in squares]).all()


# Noise and what it costs


def test_noise_on_both_fields_is_what_the_budget_asks_for() -> None:
    model, k = private(2.0), 30
    server = asked(model, k)
    zeros = {"terms": np.zeros((k, k)), "next": np.zeros((k, k)), "draws": np.zeros(1)}
    noises = [model.add_noise(server, Total(zeros, 1.0, 1), STATISTIC, Draws(seed)) for seed in range(30)]
    below = np.concatenate([entry["terms"][np.tril_indices(k, -1)] for entry in noises])
    following = np.concatenate([entry["next"].ravel() for entry in noises])
    s, deviation = model.compute_term_deviation(server, STATISTIC), model.compute_order_deviation(server, STATISTIC)
    assert normal(below, s) > SURE
    assert normal(following, deviation) > SURE
    assert normal(0.95 * following, deviation) < SURE
    assert abs(np.corrcoef(following[: len(below)], below)[0, 1]) < 0.03
    mu2 = compute_max_mu(2.0, 1e-5) ** 2
    assert 1 / (2 * s**2) + 1 / deviation**2 == pytest.approx(0.94 * mu2, rel=1e-9)  # 6 % went to popularity
    assert (noises[0]["draws"], noises[0]["next"].shape) == (1.0, (k, k))


def test_both_fields_are_one_charge_and_a_retraction_another() -> None:
    options = {"name": "tally-order", "order_share": SHARE}
    fed, progress = run_config(budget_config(4.0, 2, backbone=options))
    _, other = run_config(budget_config(4.0, 2))
    model, spent = fed.backbone, progress.clients.arrays[SPENT_AT]
    assert isinstance(model, PrivateOrderedTally)
    assert np.array_equal(spent.sum(axis=1), other.clients.arrays[SPENT_AT].sum(axis=1))
    before, state = spent.copy(), progress.server.parts[STATE]
    leave_user(fed, progress, 5)
    after = progress.server.parts[STATE]
    more = (progress.clients.arrays[SPENT_AT] - before).sum(axis=1)
    assert more[5] * UNIT == pytest.approx(model.budget.mu2, rel=1e-9)
    assert not np.delete(more, 5).any()
    deviation = float(after[FOLLOWING_VARIANCE][0] - state[FOLLOWING_VARIANCE][0]) ** 0.5
    difference = after[FOLLOWING] - state[FOLLOWING]
    assert normal(difference.ravel(), deviation) > SURE  # a person's own part is no more than noise
    assert normal(0.9 * difference.ravel(), deviation) < SURE
    assert progress.results[-1]["promises"]["tally-order"]["order_share"] == SHARE
    report = [Ragged.from_lists([[1, 2, 3]] * fed.stream.n_users)] * 2
    repeat = model.retrain_from_lists(progress.server, report)
    assert model.has_valid_heads(repeat.heads, fed.stream.n_items)
    assert not model.has_valid_heads(
        {**repeat.heads, "order_weights": repeat.heads["order_weights"][1:]}, fed.stream.n_items
    )
    assert not model.has_valid_heads({**repeat.heads, "mix": np.ones(2, np.float32)}, fed.stream.n_items)


class HalfTheNoise(PrivateOrderedTally):
    """A planted bug."""

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        term_noise = super().add_term_noise(server, total, question, stream)
        return {**term_noise, "next": (term_noise["next"] + total["next"]) / 2}


def read_canary(model: PrivateOrderedTally, others: Ragged, own: Ragged, seed: int, inside: bool) -> float:
    """How much of the canary is in both fields, by somebody who knows all others; its noise has deviation 1."""
    both = Ragged(np.append(others.ptr, others.ptr[-1] + own.ptr[1:]), np.append(others.ids, own.ids))
    empty = ServerState(np.zeros((8, 0), np.float32), model.init_heads(Draws(0)))
    server = model.simulate_release(empty, both if inside else others, Draws(seed))
    state, k, n = server.parts[STATE], len(server.heads["inputs"]), len(both)
    lists = model.encode_lists(both, np.arange(n + 1), server.heads, STATISTIC)
    known, own_values = summed(lists, k, slice(n - 1), n), summed(lists, k, n - 1, n)
    out = squares = 0.0
    for field, (stored_state, variance) in enumerate(
        (("gram", 2 * state["variance"]), (FOLLOWING, state[FOLLOWING_VARIANCE]))
    ):
        out += float((own_values[field] * (state[stored_state] - known[field])).sum() / variance[0])
        squares += float((own_values[field] ** 2).sum() / variance[0])
    return out / math.sqrt(squares)


def test_canary_distinguishability_matches_the_budget() -> None:
    """The scores of runs with it and without it are mu apart; where noise is too small they are further."""
    rng, own = np.random.default_rng(5), Ragged.from_lists([[5, 0, 2]])
    others, gaps = Ragged.from_lists([rng.permutation(8)[:4].tolist() for _ in range(60)]), []
    for candidate in (PrivateOrderedTally, HalfTheNoise):
        model = candidate(OrderConfig(order_share=SHARE), PrivacyConfig(epsilon=4.0, blocks=1))
        read = [[read_canary(model, others, own, 2 * run + k, bool(k)) for run in range(100)] for k in (0, 1)]
        gaps.append(float((np.mean(read[1]) - np.mean(read[0])) / np.mean(np.std(read, axis=1, ddof=1))))
    assert gaps[0] == pytest.approx(compute_max_mu(4.0, 1e-5) * math.sqrt(0.94), abs=0.4)
    assert gaps[1] > gaps[0] + 0.1


# What it learns


def test_no_budget_is_spent_on_unreleased_order() -> None:
    """Without a share it is tally under the same budget, number for number."""
    fed, progress = run_config(
        budget_config(4.0, 2, backbone={"name": "tally-order", "order_share": 0.0, "recency": 10.0})
    )
    plain, other = run_config(budget_config(4.0, 2, backbone={"name": "tally", "recency": 10.0}))
    assert np.array_equal(progress.server.parts[STATE]["gram"], other.server.parts[STATE]["gram"])
    assert [result["ndcg@20"] for result in progress.results] == [result["ndcg@20"] for result in other.results]
    names = [field.name for field in fed.backbone.list_statistic_fields(progress.server, STATISTIC)]
    assert names == [field.name for field in plain.backbone.list_statistic_fields(other.server, STATISTIC)]


def test_order_is_learned_through_noise_with_many_users() -> None:
    """Everybody goes three steps round a circle; without order, what came before is as near as what follows."""
    n, people = 12, 3000
    lists = [[(u + k) % n for k in range(4)] for u in range(people)]
    stream = make_stream(make_block(0, n, [x[:-1] for x in lists], test=[x[-1:] for x in lists]))
    result = {}
    for share, mix in ((0.0, [0.0, 1.0, 0.0]), (0.5, [0.0, 0.0, 1.0])):
        options = {"name": "tally-order", "order_share": share, "mix": mix, "order_fold": 1.0, "recency": 0.0}
        config = budget_config(8.0, 1, backbone=options)
        fed = federate(
            stream, build_components(config.model_copy(update={"privacy": PrivacyConfig(epsilon=8.0, blocks=1)}))[0]
        )
        progress = make_initial_progress(fed)
        run_remaining_blocks(fed, progress, lambda report, now: None)
        result[share] = progress.results[0]["ndcg@20"]
    assert result[0.5] > 0.95 > result[0.0]


def test_order_made_of_noise_alone_is_ignored() -> None:
    noise = np.random.default_rng(0).normal(size=(80, 80))
    assert np.linalg.matrix_rank(denoise_order(noise, 1.0)) <= 2
    strong = 200 * np.outer(np.eye(80)[3], np.eye(80)[5])
    assert denoise_order(noise + strong, 1.0)[3, 5] == pytest.approx(math.sqrt(200**2 - 4 * 80), rel=0.02)


# Wrong settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order_ridge": 3.0}, "order_ridge has no meaning"),
        ({"order_share": 0.0, "mix": [0.0, 0.5, 0.5]}, "order_share = 0 tells nothing"),
    ],
)
def test_settings_incompatible_with_a_budget_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        build_components(budget_config(4.0, backbone={"name": "tally-order", **options}))


def test_a_share_without_a_budget_is_refused() -> None:
    with pytest.raises(TacitaError, match=r"divides a budget; set privacy\.epsilon"):
        run_config(budget_config(None, backbone={"name": "tally-order", "order_share": 0.2}))


def test_order_sums_decay_by_block_and_noise_variance_squared() -> None:
    model = private(blocks=2)
    server = asked(model, k=3, block=1, last=0)
    state = {
        "gram": np.ones((3, 3)),
        "variance": np.array([8.0]),
        FOLLOWING: np.full((3, 3), 2.0),
        FOLLOWING_VARIANCE: np.array([8.0]),
    }
    report = {"terms": np.eye(3), "next": np.eye(3), "draws": np.array([2.0])}  # two nodes, each with noise of its own
    terms = model.compute_faded_sums(server.with_part(STATE, state), report, STATISTIC, fade=0.5)
    assert (terms[FOLLOWING] == 1.0 + np.eye(3)).all()
    assert terms[FOLLOWING_VARIANCE][0] == pytest.approx(
        0.25 * 8 + 2 * model.compute_order_deviation(server, STATISTIC) ** 2
    )
