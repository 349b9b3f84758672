"""tally-order: sums of what follows what against a slow oracle, the mixture, exact forgetting, what is read when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.oracle import Lists, federate, make_block, make_stream
from helpers.run_requests import certificate_of
from helpers.tally_runs import UNCUT, random_lists, stream_of_lists, train_stream
from tacita.core.config import EvaluateConfig, RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Broadcast, Doubles, Floats, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.federation.evaluation import TrainedState, build_ranking_mask, evaluate_devices
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.messages import SequenceTerms, Spec, Upload, add_upload, empty_total, merge_totals
from tacita.models.tally.mixing import MIXTURES, standardise_in_place
from tacita.models.tally.model import STATE, Tally, TallyConfig
from tacita.models.tally.order import OrderConfig, OrderedTally, select_order_matrix
from tacita.models.tally.order_sums import GRID, HistoryLines, OrderSums, compute_age_weights
from tacita.models.tally.solver import mirror_lower, unpack_triangle
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import unpack_dense_weights
from tacita.runs import serving, training
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists

PLAIN: dict[str, Any] = {**UNCUT, "recency": 0.0, "repeat": 0.0, "ridge": 2.0, "decay": 1.0}
ORDER: dict[str, Any] = {"order_ridge": 3.0, "order_fold": 3.0, "order_window": 4, "mix": [0.2, 0.3, 0.5]}


def ordered(**options: Any) -> OrderedTally:
    return OrderedTally(OrderConfig(**{**PLAIN, **ORDER, **options}))


def learned(backbone: Tally, n_items: int, *blocks: Lists) -> ServerState:
    return train_stream(stream_of_lists(n_items, *blocks), backbone)[1].server


def slow(blocks: tuple[Lists, ...], n: int, fall: Doubles, decay: float = 1.0) -> tuple[Doubles, Doubles]:
    """G' and C', place by place."""
    contexts, following = np.zeros((n, n)), np.zeros((n, n))
    past: list[list[int]] = [[] for _ in blocks[0]]
    for lists in blocks:
        contexts, following = decay * contexts, decay * following
        for u, entry in enumerate(lists):
            line = [*past[u], *entry]
            for place in range(len(past[u]), len(line)):
                h = np.zeros(n)
                for age, item in enumerate(reversed(line[:place][-len(fall) :])):
                    h[item] += fall[age]
                contexts += np.outer(h, h)
                following[:, line[place]] += h
            past[u] = line
    return contexts, following


def sums_of(backbone: OrderedTally, server: ServerState) -> tuple[Doubles, Doubles]:
    order, shape, decay = (
        OrderSums.from_arrays(server.parts[STATE]),
        PairShape(len(server.items)),
        backbone.config.decay,
    )
    contexts = mirror_lower(unpack_triangle(order.sum_released("contexts", shape, decay, 1)))
    return contexts, order.sum_followers(shape, decay, 1)


def b_prime(server: ServerState) -> Floats:
    return unpack_dense_weights({**server.heads, **select_order_matrix(server.heads)})


# The sums and their solution


def test_three_items_by_hand() -> None:
    """One person, 0 then 1 then 2: h is e0, then w0 e1 + w1 e0."""
    backbone = ordered(order_window=2, order_fold=1.0)
    server = learned(backbone, 3, [[0, 1, 2], []])
    w = float(np.rint(np.exp(-1) / GRID) * GRID)
    contexts, following = sums_of(backbone, server)
    assert np.array_equal(contexts, np.array([[1 + w * w, w, 0], [w, 1, 0], [0, 0, 0]]))
    assert np.array_equal(following, np.array([[0, 1, w], [0, 0, 1], [0, 0, 0]]))
    assert b_prime(server) == pytest.approx(np.linalg.solve(contexts + 3.0 * np.eye(3), following), abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), window=st.sampled_from([1, 2, 5, 40]), decay=st.sampled_from([1.0, 0.5]))
def test_sums_equal_the_slow_oracle(seed: int, window: int, decay: float) -> None:
    """Items come back in later blocks; somebody is away in one of them."""
    blocks = tuple(random_lists(seed + b, 6, 7) for b in range(3))
    if not all(any(block) for block in blocks):
        return
    backbone = ordered(order_window=window, decay=decay)
    sums = sums_of(backbone, learned(backbone, 7, *blocks))
    for own_values, other_values in zip(sums, slow(blocks, 7, backbone.age_weights, decay), strict=True):
        assert np.array_equal(own_values, other_values)


def test_sums_of_cohorts_add_up_to_the_bit_in_any_order_and_exactly() -> None:
    backbone, shape = ordered(), PairShape(9)
    train, history = (Ragged.from_lists(random_lists(s, 12, 9)) for s in (1, 2))
    whole = backbone.sum_statistic(train, history, shape)
    halves = [
        backbone.sum_statistic(train.take(some), history.take(some), shape) for some in (np.arange(7, 12), np.arange(7))
    ]
    both = merge_totals(*halves)
    fields = backbone._specify_fields(shape)
    block = backbone.encode_block(train, history, np.arange(13), shape)
    ideal = add_upload(empty_total(fields), Upload(block, np.ones(12), np.zeros(12, np.uint64)), fields, exact=True)
    for name in ("contexts", "next", "held"):
        assert np.array_equal(whole[name], both[name])
        assert np.array_equal(whole[name], ideal[name])
    assert np.array_equal(whole["contexts"], whole["contexts"].T)
    for field in fields:
        assert (whole[field.name] <= 12 * field.most).all()


def test_an_upload_counts_its_bytes_and_is_never_longer_than_it_says() -> None:
    fall, n = compute_age_weights(2.0, 3), 6
    lines = HistoryLines.from_blocks(
        Ragged.from_lists([[0, 1, 2], [3], [], [4, 5]]), Ragged.from_lists([[5], [1, 2, 4, 0]]), 3
    )
    client = np.array([0, 0, 1, 2], np.int32)
    for meets, size in (("itself", 2.0 * (n * n + n)), ("next", 4.0 * n * n)):
        form = SequenceTerms(client, lines.lists, lines.start, np.array([1.0, 1.0, 1.0, -1.0]), fall, n, meets)  # type: ignore[arg-type]
        field = Spec("told", (n, n), symmetric=meets == "itself")
        assert form.count_total_bytes(field) == 3 * size
        for c in range(3):
            total, values = np.zeros((n, n)), np.zeros(3)
            values[c] = 1.0
            form.add_to(total, np.zeros(0), values)
            assert np.linalg.norm(total) <= np.sqrt(form.squared_norms(3)[c]) + 1e-12
        with pytest.raises(TacitaError, match="never seen by itself"):
            form.take_clients(np.arange(1))


def test_order_increments_wait_for_min_contributors() -> None:
    """Item 0 is told in the first block alone; what followed it later waits for people, not for tellers."""
    first, second = [[0], [0], [0]], [[1], [1], [2]]
    backbone = ordered(min_item=2, order_window=3)
    server = learned(backbone, 3, first, second)
    order = OrderSums.from_arrays(server.parts[STATE])
    assert np.array_equal(order.sides["contexts"].touched, [[3, 0, 0], [3, 2, 1]])
    following = order.sum_followers(PairShape(3), 1.0, 2)
    assert following[0, 1] == 2
    assert following[0, 2] == 0


def test_few_entries_a_column_of_both_matrices() -> None:
    server = learned(ordered(keep=3), 12, random_lists(3, 40, 12, most=8))
    assert ((b_prime(server) != 0).sum(axis=0) <= 3).all()
    assert server.heads["order_weights"].ndim == 1


# Scores


def view_of(stream: BlockStream, backbone: Tally, **heads: Any) -> Any:
    fed, progress = train_stream(stream, backbone)
    block, users = fed.stream.blocks[-1], np.arange(fed.stream.n_users)
    view = build_user_view(progress.clients, progress.server, block, users, fed.stream.user_keys, Broadcast())
    past = fed.stream.collect_history(block.index)
    return replace(view, history=past.join_rows(Ragged.empty(len(users))), heads={**view.heads, **heads})


def test_without_order_it_is_plain_tally_bit_for_bit() -> None:
    stream = stream_of_lists(15, random_lists(1, 30, 15), random_lists(2, 30, 15))
    same = {**PLAIN, "recency": 10.0, "repeat": -1.0}
    plain = Tally(TallyConfig(**same))
    mixed = OrderedTally(OrderConfig(**{**same, **ORDER, "mix": [0.0, 1.0, 0.0]}))
    entry, other = plain.score_history(view_of(stream, plain)), mixed.score_history(view_of(stream, mixed))
    assert np.array_equal(entry, other)


def test_mixture_equals_its_definition() -> None:
    """Three scores by hand, standardised; what was done in earlier blocks moves by the same rank as in plain tally."""
    first, second = random_lists(1, 20, 15), random_lists(2, 20, 15)
    backbone = ordered(recency=5.0, repeat=-1.0)
    view = view_of(stream_of_lists(15, first, second), backbone)
    history = backbone.score_history(view)
    b, after = unpack_dense_weights(view.heads), b_prime(ServerState(np.zeros((15, 0), np.float32), view.heads))
    for u in range(20):
        line, latest = [*first[u], *second[u]], second[u] or first[u]
        x, recent, h = np.zeros(15), np.zeros(15), np.zeros(15)
        for age, item in enumerate(reversed(latest)):
            x[item], recent[item] = 1, np.exp(-age / 5)
        for age, item in enumerate(reversed(line[-4:])):
            h[item] += backbone.age_weights[age]
        spread = (recent @ b).std() if len(latest) else 1.0
        scores = sum(w * z(entry) for w, entry in ((0.2, x @ b), (0.3, recent @ b), (0.5, h @ after)))
        scores[first[u]] -= 1.0 / (spread or 1.0)
        assert history[u] == pytest.approx(scores, abs=2e-4)


def z(scores: Doubles) -> Doubles:
    return (scores - scores.mean()) / (scores.std() or 1.0)


def test_row_standardisation_is_independent_of_the_cohort() -> None:
    scores = np.random.default_rng(0).normal(size=(50, 333)).astype(np.float32)
    scores[7] = 0.25
    alone = [scores[k : k + 1].copy() for k in range(50)]
    spread = standardise_in_place(scores)
    assert spread[7] == 1.0
    assert (scores[7] == 0).all()
    for k, entry in enumerate(alone):
        standardise_in_place(entry)
        assert np.array_equal(entry[0], scores[k])


def test_validation_chooses_order_where_there_is_order_and_not_where_there_is_none() -> None:
    """Everybody goes round the same circle from somewhere; or has a colour, in no order."""
    n = 20
    around = [[(u + k) % n for k in range(8)] for u in range(60)]
    rng = np.random.default_rng(0)
    colours = [rng.permutation(np.arange(u % 2, n, 2)).tolist() for u in range(60)]
    last = {}
    for name, lists in (("around", around), ("colours", colours)):
        stream = make_stream(make_block(0, n, [entry[:-2] for entry in lists], valid=[entry[-2:-1] for entry in lists]))
        fed = federate(stream, ordered(mix="learn", recency="learn"))
        progress = make_initial_progress(fed)
        run_remaining_blocks(fed, progress, lambda report, now: None)
        last[name] = progress.server.heads["mix"]
        assert progress.results[0]["rounds"] == len(MIXTURES)
    assert last["around"][2] > 0
    assert MIXTURES[-1].order == 0  # where nobody validates


def test_every_scoring_mode_is_validated_for_any_round_limit() -> None:
    """Rounds of training may be validated now and then, and end when they bring nothing; choices are looked at all."""
    n = 20
    lists = [[(u + k) % n for k in range(8)] for u in range(60)]
    stream = make_stream(make_block(0, n, [entry[:-2] for entry in lists], valid=[entry[-2:-1] for entry in lists]))
    fed = federate(stream, ordered(mix="learn", recency="learn"), patience=1)
    seldom = replace(fed, config=fed.config.model_copy(update={"evaluate": EvaluateConfig(every=5)}))
    observations: list[float | None] = []
    progress = make_initial_progress(seldom)
    run_remaining_blocks(seldom, progress, lambda report, now: observations.append(report.valid))
    assert len(observations) == len(MIXTURES)
    assert progress.results[0]["valid"] == max(entry for entry in observations if entry is not None)
    assert None not in observations


def test_read_known_reads_validation_items_in_tests_alone() -> None:
    n = 20  # people go round a circle, jump, and go on from there
    lists = [[(u + k) % n for k in (0, 1, 2, 3, 4, 5, 12, 13)] for u in range(60)]
    stream = make_stream(
        make_block(0, n, [x[:-2] for x in lists], valid=[x[-2:-1] for x in lists], test=[x[-1:] for x in lists])
    )
    backbone = ordered(mix=[0.0, 0.0, 1.0], order_fold=1.0)
    result = {}
    for read in ("train", "known"):
        fed, progress = train_stream(stream, backbone)
        evaluate = fed.config.evaluate.model_copy(update={"read": read, "k": [1], "metrics": ["hr"]})
        fed = replace(fed, config=fed.config.model_copy(update={"evaluate": evaluate}))
        block, learned = fed.stream.blocks[0], TrainedState(progress.server, progress.clients)
        for purpose in ("valid", "test"):
            mask = build_ranking_mask(fed, block, purpose, "block")  # type: ignore[arg-type]
            result[read, purpose] = evaluate_devices(fed, learned, block, purpose, mask).compute_means()["hr@1"]  # type: ignore[arg-type]
    assert result["known", "test"] == 1.0  # the item after the last one that is read
    assert result["train", "test"] == result["known", "valid"] == result["train", "valid"] == 0.0


# Taking back


OPTIONS = st.fixed_dictionaries(
    {
        "decay": st.sampled_from([1.0, 0.6]),
        "min_item": st.sampled_from([0, 2]),
        "keep": st.sampled_from([0, 5]),
        "order_window": st.sampled_from([1, 3, 40]),
        "order_ridge": st.sampled_from([1.0, 20.0]),
    }
)
HISTORIES = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), min_size=7, max_size=7), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None)
@given(
    blocks=HISTORIES,
    options=OPTIONS,
    gone=st.sets(st.integers(0, 9), min_size=1),
    users=st.sets(st.integers(0, 6), min_size=1),
    n_items=st.sampled_from([10, 60]),  # in the larger catalogue a withdrawal is an update of low rank
)
def test_retraction_equals_retraining(
    blocks: list[list[list[int]]], options: dict[str, Any], gone: set[int], users: set[int], n_items: int
) -> None:
    if not all(any(block) for block in blocks):
        return
    backbone = ordered(**options)
    server = learned(backbone, n_items, *blocks)
    remainder = [[[i for i in entry if not (u in users and i in gone)] for u, entry in enumerate(b)] for b in blocks]
    report, state = ([Ragged.from_lists(b) for b in lists] for lists in (blocks, remainder))
    who = np.array(sorted(users))
    after, _ = backbone.replace_lists(server, [t.take(who) for t in report], [k.take(who) for k in state])
    repeat = backbone.retrain_from_lists(server, state)
    for name in OrderSums.from_arrays(repeat.parts[STATE]).to_arrays():
        assert np.array_equal(after.parts[STATE][name], repeat.parts[STATE][name]), name
    solution = repeat.parts[STATE]["order_solution"]
    assert np.abs(after.parts[STATE]["order_solution"] - solution).max() <= 1e-10
    assert np.abs(b_prime(after) - b_prime(repeat)).max() <= 1e-6


@pytest.mark.parametrize("options", [{}, {"min_item": 3, "keep": 20}, {"decay": 0.5}])
def test_a_low_rank_update_is_a_new_solve(options: dict[str, Any]) -> None:
    blocks = [random_lists(b, 150, 120, most=12) for b in range(2)]
    backbone = ordered(**options)
    server = learned(backbone, 120, *blocks)
    before = [Ragged.from_lists([b[3]]) for b in blocks]
    after = [Ragged.from_lists([entry.row(0)[1:].tolist()]) for entry in before]
    result, rank = backbone.replace_lists(server, before, after)
    assert rank > 0
    fresh = backbone.with_solved_order(result, OrderSums.from_arrays(result.parts[STATE]))
    for name in ("order_inverse", "order_solution"):
        old, new = (candidate.parts[STATE][name] for candidate in (result, fresh))
        assert np.abs(old - new).max() <= 1e-12 * max(1.0, np.abs(new).max())


# A run


SMALL = "synthetic:users=60,items=40,per_user=12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"data": SMALL, "backbone": {"name": "tally-order", **UNCUT}, "evaluate": {"controls": False}}
    out = tmp_path_factory.mktemp("order") / "run"
    training.train(validate_model(RunConfig, values, "the test"), out)
    return out


def test_serving_reads_all_that_a_device_knows_oldest_first(folder: Path) -> None:
    saved = open_saved(folder)
    current, past, observations = (read_lists(saved.client_arrays, name) for name in ("current", "past", "history"))
    everything = past.join_rows(current)
    run = serving.open_run(folder)
    for u in range(len(saved.ids["users"])):
        assert sorted(everything.row(u)) == sorted(observations.row(u))
    ids = saved.ids["items"]
    raw = [ids[i] for i in everything.row(3)]
    assert len(run.fold_in(raw, k=3)) == 3
    assert run.config.evaluate.read == "train"


def test_forgetting_equals_retraining(folder: Path) -> None:
    """Scores of everybody, as the door compares them; and the certificate says that it is exact."""
    result = submit_request(folder, RawRequest("forget", {"u1": None}), True)
    message = certificate_of(result)
    assert message["method"]["name"] == "tally-order"
    assert message["method"]["exact"]
    assert message["guarantee"]["max_score_difference"] <= 1e-6  # of standardised scores in single precision
    assert message["verdict"].startswith("pass")


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [({"min_pair": 2}, "min_pair does not work"), ({"hold_retractions": 3}, "hold_retractions does not work")],
)
def test_settings_incompatible_with_order_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        ordered(**options)


def test_a_catalogue_that_is_read_in_part_is_refused() -> None:
    with pytest.raises(TacitaError, match="most_inputs"):
        ordered(most_inputs=10).check(11, 11)


def test_matrices_that_do_not_fit_are_refused() -> None:
    backbone = ordered(keep=3)
    heads = learned(backbone, 12, random_lists(3, 40, 12, most=8)).heads
    assert backbone.has_valid_heads(heads, 12)
    for name, wrong in (
        ("order_column", heads["order_column"] + 1),
        ("order_ptr", heads["order_ptr"][:-1]),
        ("order_weights", heads["order_weights"] * np.float32(1e9)),
        ("mix", np.array([0.0, 2.0, 0.0], np.float32)),
        ("mix", np.zeros(2, np.float32)),
    ):
        assert not backbone.has_valid_heads({**heads, name: wrong}, 12), name
    assert backbone.has_valid_heads(backbone.init_heads(Draws(0)), 5)
