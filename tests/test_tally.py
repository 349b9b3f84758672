"""tally: closed forms, sums that stream and come back, exact forgetting, what B gives away, wrong requests."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController

from helpers.oracle import Lists, make_block, make_stream
from helpers.run_requests import certificate_of
from helpers.tally_runs import UNCUT, random_lists, stream_of_lists, to_sets, train_stream
from tacita.cli import main
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays
from tacita.core.types import Broadcast, Doubles, Floats, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.federation.state_arrays import read_server
from tacita.kernels.threads import max_threads
from tacita.learn.statistic import split_log_by_block
from tacita.messages import Total, add_upload, empty_total, merge_totals
from tacita.models.tally.model import RECENCIES, STATE, Tally, TallyConfig
from tacita.models.tally.solver import invert_in_place, mirror_lower, pack_triangle, unpack_triangle
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import unpack_dense_weights
from tacita.report import tally_audit as report_audit
from tacita.research.audit import peeling_attack, reconstruction, tally_settings
from tacita.research.experiments import tally_tuning
from tacita.research.experiments.shared_base import continue_run, train_base
from tacita.round.device_state import unflatten_devices
from tacita.round.question import Question
from tacita.round.task import CohortTask
from tacita.runs import assembly, serving, training
from tacita.runs.forgetting import verification
from tacita.runs.forgetting.certificate import SENT_ALONE
from tacita.runs.forgetting.request_service import RunRequestResult, submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists

SMALL = "synthetic:users=60,items=40,per_user=12"


def tally(**options: Any) -> Tally:
    plain = {**UNCUT, "recency": 0.0, "repeat": 0.0, "ridge": 2.0, "decay": 1.0}
    return Tally(TallyConfig(**{**plain, **options}))


def learned(backbone: Tally, n_items: int, *blocks: Lists) -> ServerState:
    return train_stream(stream_of_lists(n_items, *blocks), backbone)[1].server


def dense_gram(lists: Lists, n_items: int, power: float = 0.0) -> Doubles:
    out = np.zeros((n_items, n_items))
    for entry in lists:
        x = np.zeros(n_items)
        x[list(entry)] = 1
        out += np.outer(x, x) * max(len(entry), 1) ** -power
    return out


def gram_of(backbone: Tally, server: ServerState) -> Doubles:
    """The G that is out, whole."""
    shape = PairShape.from_inputs(len(server.items), server.heads["inputs"])
    return mirror_lower(
        unpack_triangle(backbone.compute_released_gram(PairSums.from_arrays(server.parts[STATE]), shape, None))
    )


def weights(server: ServerState) -> Floats:
    return unpack_dense_weights(server.heads)


# The solution


def test_two_items_by_hand() -> None:
    """G = [[2, 1], [1, 1]], ridge 1: P = [[2, -1], [-1, 3]] / 5."""
    result = learned(tally(ridge=1.0), 2, [[0, 1], [0]])
    assert weights(result) == pytest.approx(np.array([[0, 1 / 3], [1 / 2, 0]]), abs=1e-7)


def test_it_is_the_constrained_least_squares_solution_column_by_column() -> None:
    lists = random_lists(1, 30, 9)
    result = weights(learned(tally(ridge=3.0), 9, lists))
    x = np.zeros((30, 9))
    for u, entry in enumerate(lists):
        x[u, entry] = 1
    for j in range(9):
        rest = np.delete(np.arange(9), j)
        others = x[:, rest]
        w = np.linalg.solve(others.T @ others + 3.0 * np.eye(8), others.T @ x[:, j])
        assert result[rest, j] == pytest.approx(w, abs=1e-6)
        assert result[j, j] == 0


def test_it_learns_a_checkerboard() -> None:
    """Everybody knows all items of one colour but one; that one comes first."""
    lists = [[i for i in range(12) if i % 2 == u % 2 and i != u % 12] for u in range(24)]
    fed, progress = train_stream(stream_of_lists(12, lists), tally())
    users = np.arange(24, dtype=np.int32)
    view = build_user_view(
        progress.clients, progress.server, fed.stream.blocks[0], users, fed.stream.user_keys, Broadcast()
    )
    scores = fed.backbone.score_history(view)
    assert scores is not None
    for u, entry in enumerate(lists):
        scores[u, entry] = -np.inf
        assert scores[u].argmax() == u % 12


def test_packing_and_inverting() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 128, 129, 300):
        half = rng.normal(size=(n, n))
        whole = half @ half.T + n * np.eye(n)
        assert np.array_equal(mirror_lower(np.tril(whole)), np.tril(whole) + np.tril(whole, -1).T)
        assert np.array_equal(mirror_lower(unpack_triangle(pack_triangle(whole))), mirror_lower(np.tril(whole)))
        inverse = invert_in_place(np.tril(whole))
        assert inverse is not None
        assert inverse @ whole == pytest.approx(np.eye(n), abs=1e-9)
    assert invert_in_place(np.array([[1.0, 0.0], [3.0, 1.0]])) is None


def test_packed_index_maps_back_to_its_pair() -> None:
    for shape in (PairShape(50), PairShape(50, np.array([3, 7, 20], np.int32))):
        matrix = np.random.default_rng(2).random((shape.n_inputs, 50)) + 1
        matrix = matrix if shape.inputs is not None else matrix + matrix.T
        at, value = shape.extract_entries(matrix)
        row, col = shape.decode_pairs(at)
        assert np.array_equal(matrix[row, col], value)
        assert (np.diff(at) > 0).all()
    far = np.array([0, 1, 2, 2**40, 2**44 + 12345])
    row, col = PairShape(2**23).decode_pairs(far)
    assert np.array_equal(row * (row + 1) // 2 + col, far)
    assert ((col >= 0) & (col <= row)).all()


# Sums: streams, merges, waiting


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_blocks_add_up_with_decay(decay: float, power: float) -> None:
    blocks = [random_lists(b, 20, 8) for b in range(3)]
    backbone = tally(decay=decay, length_power=power)
    gram = gram_of(backbone, learned(backbone, 8, *blocks))
    want = sum(decay ** (2 - b) * dense_gram(lists, 8, power) for b, lists in enumerate(blocks))
    assert gram == pytest.approx(want, abs=1e-12)


def test_totals_of_two_cohorts_are_the_whole() -> None:
    lists = random_lists(3, 40, 9)
    fed, progress = train_stream(stream_of_lists(9, lists), tally(length_power=0.5))
    block, keys = fed.stream.blocks[0], fed.stream.user_keys

    def total(users: Sequence[int]) -> Any:
        view = build_user_view(progress.clients, progress.server, block, np.array(users), keys, Broadcast())
        specs = fed.fields(replace(progress.server, round=0), Question("statistic"))
        return add_upload(empty_total(specs), fed.learner.answer(CohortTask(view), "statistic").upload, specs)

    whole, both = total(range(40)), merge_totals(total(range(15)), total(range(15, 40)))
    assert both["pairs"] == pytest.approx(whole["pairs"], abs=1e-12)
    assert np.array_equal(both["touched"], whole["touched"])
    assert np.array_equal(both["count"], whole["count"])
    assert (both.n_clients, both.weight) == (whole.n_clients, whole.weight)


def test_new_items_get_rows_and_old_places_stay() -> None:
    stream = make_stream(make_block(0, 2, [[0, 1], [0]]), make_block(1, 4, [[2, 3], [0, 3]], known=2))
    backbone = tally()
    _, progress = train_stream(stream, backbone)
    want = dense_gram([[0, 1], [0], [2, 3], [0, 3]], 4)
    assert np.array_equal(gram_of(backbone, progress.server), want)


def test_only_the_latest_items_count() -> None:
    result = learned(tally(most_items=2), 5, [[0, 1, 2], [4]])
    assert np.array_equal(gram_of(tally(), result), dense_gram([[1, 2], [4]], 5))


def test_increments_wait_for_contributors() -> None:
    """Item 2 has one contributor a block, items 0 and 1 have two: with min_item 2 it is out after the second block."""
    backbone = tally(min_item=2)
    entry = [[0, 1, 2], [0, 1]]
    first = gram_of(backbone, learned(backbone, 3, entry))
    assert np.array_equal(first, [[2, 2, 0], [2, 2, 0], [0, 0, 0]])
    second = gram_of(backbone, learned(backbone, 3, entry, entry))
    assert np.array_equal(second, [[4, 4, 2], [4, 4, 2], [2, 2, 2]])
    third = gram_of(backbone, learned(backbone, 3, entry, entry, entry))
    assert np.array_equal(third, [[6, 6, 2], [6, 6, 2], [2, 2, 2]])


def test_waiting_increments_age_like_the_rest() -> None:
    backbone = tally(min_item=2, decay=0.5)
    entry = [[0, 1, 2], [0, 1]]
    gram = gram_of(backbone, learned(backbone, 3, entry, entry))
    assert gram == pytest.approx(1.5 * dense_gram(entry, 3))


def test_pairs_wait_for_contributors() -> None:
    backbone = tally(min_pair=2)
    gram = gram_of(backbone, learned(backbone, 3, [[0, 1], [0, 1, 2], [2]]))
    assert np.array_equal(gram, [[2, 2, 0], [2, 2, 0], [0, 0, 2]])
    later = gram_of(backbone, learned(backbone, 3, [[0, 1], [0, 1, 2], [2]], [[0, 2], [0], [2]]))
    assert np.array_equal(later, [[4, 2, 2], [2, 2, 0], [2, 0, 4]])  # (0, 2) is out, (1, 2) waits


def test_item_below_min_contributors_waits_in_each_block() -> None:
    backbone = tally(min_item=2)
    gram = gram_of(backbone, learned(backbone, 2, [[0, 1], [0, 1]], [[0, 1], [0]]))
    assert np.array_equal(gram, [[4, 2], [2, 2]])


def test_impossible_sums_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair count of 1e300 took 989 factorisations and left a ridge of nearly that size."""
    backbone, tried = tally(), []
    server = learned(backbone, 3, [[0, 1], [0, 2]])
    sums, real = PairSums.from_arrays(server.parts[STATE]), backbone.build_ridge_triangle
    wrong = replace(sums, total=np.where(sums.at == 1, 1e300, sums.total))  # items 0 and 1
    monkeypatch.setattr(backbone, "build_ridge_triangle", lambda *inputs: tried.append(inputs) or real(*inputs))
    with pytest.raises(TacitaError, match=r"the sums of block 0 cannot be solved, .* doubled 30 times"):
        backbone.with_solved_sums(server, wrong)
    assert len(tried) == 31


def test_the_ridge_doubles_where_waiting_pairs_leave_no_solution(caplog: pytest.LogCaptureFixture) -> None:
    lists = [[0, 1, 2]] * 9 + [[0, 1], [0, 2]]  # (1, 2) waits: G is not positive
    backbone = tally(min_pair=10, ridge=0.01)
    result = learned(backbone, 3, lists)
    doublings = result.parts[STATE]["doublings"][0]
    assert doublings > 0
    assert f"the ridge was doubled {doublings} times: without that, block 0 has no solution" in caplog.text
    assert np.isfinite(weights(result)).all()
    assert learned(tally(ridge=0.01), 3, lists).parts[STATE]["doublings"][0] == 0


def test_few_entries_a_column() -> None:
    lists = random_lists(5, 60, 12, most=8)
    whole, cut = weights(learned(tally(), 12, lists)), weights(learned(tally(keep=3), 12, lists))
    assert (np.count_nonzero(cut, axis=0) == 3).all()
    for j in range(12):
        indices = np.flatnonzero(cut[:, j])
        assert set(indices) == set(np.argsort(-np.abs(whole[:, j]))[:3])
        assert np.array_equal(cut[indices, j], whole[indices, j])


# Large catalogues


def test_reading_all_items_as_inputs_is_the_exact_form() -> None:
    blocks = [random_lists(b, 50, 20, most=9) for b in range(2)]
    exact = weights(learned(tally(), 20, *blocks))
    backbone = tally()
    _, progress = train_stream(stream_of_lists(20, *blocks), backbone)
    server = progress.server
    trains = [block.train for block in stream_of_lists(20, *blocks).blocks]
    read = backbone.retrain_from_lists(
        replace(server, heads={**server.heads, "inputs": np.arange(20, dtype=np.int32)}), trains
    )
    assert weights(read) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("cut", [{}, {"min_item": 3}])
def test_a_large_catalogue_is_read_through_its_popular_items(cut: dict[str, int]) -> None:
    """Against the definition: ridge on the inputs, zero diagonal between them, all items as targets."""
    rng = np.random.default_rng(4)
    popularity = 1 / np.arange(1, 41)
    lists = [rng.choice(40, 8, replace=False, p=popularity / popularity.sum()).tolist() for _ in range(300)]
    result = learned(tally(most_inputs=10, **cut), 40, lists)
    gram = dense_gram(lists, 40)
    inputs = result.heads["inputs"]
    assert set(inputs) == set(np.argsort(-np.diag(gram), kind="stable")[:10])
    few = np.diag(gram) < cut.get("min_item", 0)
    gram[few] = gram[:, few] = 0
    p = np.linalg.inv(gram[np.ix_(inputs, inputs)] + 2.0 * np.eye(10))
    want = p @ gram[inputs]
    want[:, inputs] = -p / np.diag(p)[None, :]
    want[np.arange(10), inputs] = 0
    assert weights(result) == pytest.approx(want, abs=1e-6)


def test_reading_most_items_is_close_to_reading_all() -> None:
    rng = np.random.default_rng(4)
    popularity = 1 / np.arange(1, 41)
    lists = [rng.choice(40, 8, replace=False, p=popularity / popularity.sum()).tolist() for _ in range(300)]
    exact, read = tally(ridge=50.0), tally(ridge=50.0, most_inputs=30)
    scores = []
    for backbone in (exact, read):
        fed, progress = train_stream(stream_of_lists(40, lists), backbone)
        users = np.arange(300, dtype=np.int32)
        view = build_user_view(
            progress.clients, progress.server, fed.stream.blocks[0], users, fed.stream.user_keys, Broadcast()
        )
        history = backbone.score_history(view)
        rows = Ragged.from_lists(lists)
        history[rows.rows(), rows.ids] = 0  # what is known is not ranked
        scores.append(history)
    assert np.corrcoef(scores[0].ravel(), scores[1].ravel())[0, 1] > 0.98


def test_a_catalogue_that_grows_past_the_limit_stays_exact() -> None:
    stream = make_stream(make_block(0, 4, [[0, 1], [2, 3]]), make_block(1, 8, [[4, 5], [6, 7]], known=2))
    _, progress = train_stream(stream, tally(most_inputs=4))
    assert len(progress.server.heads["inputs"]) == 0
    assert weights(progress.server).shape == (8, 8)


# Scoring


def test_older_items_count_less_and_earlier_blocks_are_avoided_or_preferred() -> None:
    backbone = tally(recency=2.0, repeat=-0.25)
    fed, progress = train_stream(stream_of_lists(4, [[3], [1, 0]], [[0, 1], [2]]), backbone)
    users = np.array([0, 1], np.int32)
    view = build_user_view(
        progress.clients, progress.server, fed.stream.blocks[1], users, fed.stream.user_keys, Broadcast()
    )
    scores = backbone.score_history(replace(view, history=Ragged.from_lists([[3], [1, 0]])))
    b = weights(progress.server)
    want = np.stack([b[1] + np.exp(-0.5) * b[0], b[2]])
    want[0, 3] -= 0.25
    want[1, [0, 1]] -= 0.25
    assert scores == pytest.approx(want, abs=1e-6)


def test_inactive_users_are_scored_by_older_items() -> None:
    backbone = tally()
    fed, progress = train_stream(stream_of_lists(4, [[3, 1], [1, 0]], [[], [2]]), backbone)
    users = np.array([0], np.int32)
    view = build_user_view(
        progress.clients, progress.server, fed.stream.blocks[1], users, fed.stream.user_keys, Broadcast()
    )
    scores = backbone.score_history(replace(view, history=Ragged.from_lists([[3, 1]])))
    b = weights(progress.server)
    assert scores[0] == pytest.approx(b[3] + b[1], abs=1e-6)


def test_repeat_weight_is_learned() -> None:
    second_result = [[0, 1], [2, 3], [4, 5], [6, 7]]
    never = [[2, 3], [4, 5], [6, 7], [0, 1]]
    backbone = tally(repeat="learn")
    assert learned(backbone, 8, second_result, second_result).heads["repeat"][0] == np.float32(0.05)
    assert learned(backbone, 8, second_result, never).heads["repeat"][0] == -1
    assert learned(backbone, 8, second_result).heads["repeat"][0] == 0


def test_validation_chooses_the_recency() -> None:
    """Thirty old items point to five decoys, the latest one to the wanted item."""
    asking = [[*range(30), 50 + u % 3] for u in range(6)]
    crowd = [[i, d] for i in range(30) for d in range(45, 50)] * 2 + [[50 + k, 55 + k] for k in range(3)] * 4
    lists: Lists = [*asking, *crowd]
    valid: Lists = [[55 + u % 3] if u < 6 else [] for u in range(len(lists))]
    backbone = tally(recency="learn", ridge=20.0)
    _, progress = train_stream(make_stream(make_block(0, 60, lists, valid=valid)), backbone)
    assert progress.server.heads["recency"][0] == 10
    assert progress.results[0]["rounds"] == len(RECENCIES)
    _, blind = train_stream(make_stream(make_block(0, 60, lists)), backbone)
    assert blind.server.heads["recency"][0] == RECENCIES[-1]


# Taking back


OPTIONS = st.fixed_dictionaries(
    {
        "decay": st.sampled_from([1.0, 0.6]),
        "length_power": st.sampled_from([0.0, 0.5]),
        "most_items": st.sampled_from([0, 3]),
        "min_item": st.sampled_from([0, 2]),
        "min_pair": st.sampled_from([0, 2]),
        "keep": st.sampled_from([0, 5]),
        "ridge_popularity": st.sampled_from([0.0, 0.5]),
        "repeat": st.sampled_from(["learn", 0.0]),
        "ridge": st.sampled_from([1.0, 20.0]),
        "most_inputs": st.sampled_from([10_000, 4]),
    }
)
HISTORIES = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), min_size=7, max_size=7), min_size=1, max_size=3
)


@settings(max_examples=80, deadline=None)
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
    backbone = tally(**options)
    if not all(any(block) for block in blocks):
        return
    server = learned(backbone, n_items, *blocks)
    remainder = [[[i for i in entry if not (u in users and i in gone)] for u, entry in enumerate(b)] for b in blocks]
    report, state = ([Ragged.from_lists(b) for b in lists] for lists in (blocks, remainder))
    who = np.array(sorted(users))
    after, _ = backbone.replace_lists(server, [t.take(who) for t in report], [k.take(who) for k in state])
    repeat = backbone.retrain_from_lists(server, state)
    for name in ("at", "ptr", "touched", "repeats", "doublings"):
        assert np.array_equal(after.parts[STATE][name], repeat.parts[STATE][name])
    assert after.parts[STATE]["total"] == pytest.approx(repeat.parts[STATE]["total"], abs=1e-12)
    assert after.heads["repeat"][0] == repeat.heads["repeat"][0]
    assert np.abs(weights(after) - weights(repeat)).max() <= 1e-6


def test_retraining_on_everything_changes_no_bit() -> None:
    blocks = [random_lists(b, 20, 8) for b in range(3)]
    backbone = tally(decay=0.7, min_item=2)
    server = learned(backbone, 8, *blocks)
    repeat = backbone.retrain_from_lists(server, [Ragged.from_lists(b) for b in blocks])
    assert np.array_equal(weights(repeat), weights(server))


@pytest.mark.parametrize("options", [{}, {"min_item": 3, "keep": 20}, {"length_power": 0.5, "decay": 0.5}])
def test_a_low_rank_update_is_a_new_solve(options: dict[str, Any]) -> None:
    blocks = [random_lists(b, 150, 60, most=12) for b in range(2)]
    backbone = tally(ridge=5.0, **options)
    server = learned(backbone, 60, *blocks)
    reports = [Ragged.from_lists(b) for b in blocks]
    before = [entry.take(np.array([7])) for entry in reports]
    after = [Ragged.from_lists([entry.row(0)[1:].tolist()]) for entry in before]
    result, rank = backbone.replace_lists(server, before, after)
    assert rank > 0
    fresh = backbone.with_solved_sums(result, PairSums.from_arrays(result.parts[STATE]))
    old, new = (candidate.parts[STATE]["inverse"] for candidate in (result, fresh))
    assert np.abs(old - new).max() <= 1e-8 * np.abs(new).max()
    assert np.array_equal(weights(result) == 0, weights(fresh) == 0)


# A run folder


def config_of(**options: Any) -> RunConfig:
    values = {"data": SMALL, "backbone": {"name": "tally", **UNCUT, **options}, "evaluate": {"controls": False}}
    return validate_model(RunConfig, values, "the test")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tally")
    training.train(config_of(), out / "open")
    training.train(config_of(min_item=2, keep=10, decay=0.7, hold_retractions=3), out / "held")
    training.train(
        validate_model(RunConfig, {"data": SMALL, "train": {"rounds": 1}, "evaluate": {"controls": False}}, ""),
        out / "mf",
    )
    return out


@pytest.fixture
def opened(folders: Path, tmp_path: Path) -> Path:
    return copy(folders / "open", tmp_path)


@pytest.fixture
def held(folders: Path, tmp_path: Path) -> Path:
    return copy(folders / "held", tmp_path)


def copy(folder: Path, into: Path) -> Path:
    out = into / folder.name
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def granted(
    folder: Path, user: str, items: list[str] | None = None, now: bool = False, verify: bool = False
) -> RunRequestResult:
    return submit_request(folder, RawRequest("forget", {user: items}, alone=now), verify)


def forget(folder: Path, *asked: Any, **more: Any) -> dict[str, Any]:
    result = granted(folder, *asked, **more)
    return certificate_of(result)


def told_in(folder: Path) -> list[Ragged]:
    """What the server was told in every block."""
    clients = unflatten_devices(open_saved(folder).client_arrays, "")
    return split_log_by_block(clients.read_list("parts/statistic/told", np.arange(clients.n_users)))


def model_of(folder: Path) -> dict[str, bytes]:
    """The server's arrays without the note of who waits."""
    served = open_saved(folder).server_arrays
    return {name: array.tobytes() for name, array in served.items() if not name.startswith("parts/statistic/")}


def items_of(folder: Path, user: str) -> list[str]:
    saved = open_saved(folder)
    return [
        saved.ids["items"][i]
        for i in read_lists(saved.client_arrays, "history").row(saved.find_user_numbers([user])[0])
    ]


def scores_of(folder: Path) -> Floats:
    saved = open_saved(folder)
    return serving.score_users(saved, np.arange(len(saved.ids["users"]), dtype=np.int32))


@pytest.mark.parametrize("which", ["open", "held"])
def test_forgetting_equals_retraining(folders: Path, tmp_path: Path, which: str) -> None:
    """Against an independent sum over the lists that remain."""
    folder = copy(folders / which, tmp_path)
    before = (folder / "result.json").read_bytes()
    gone = items_of(folder, "u1")[::2]
    result = forget(folder, "u1", gone, now=True, verify=True)
    assert result["guarantee"]["max_score_difference"] <= 1e-6
    assert result["verdict"].startswith("pass")
    forget(folder, "u2", None, now=True, verify=True)
    saved = open_saved(folder)
    backbone, _, _ = assembly.build_components(saved.config)
    assert isinstance(backbone, Tally)
    n = len(saved.ids["items"])
    blocks = []
    for lists in told_in(folder):
        blocks.append([lists.row(u).tolist() for u in range(len(lists))])
    fresh = learned(backbone, n, *blocks)
    server = read_server(saved.server_arrays, saved.server_note)
    assert np.abs(weights(fresh) - weights(server)).max() <= 1e-6
    known = items_of(folder, "u1")
    assert not set(gone) & set(known)
    assert items_of(folder, "u2") == []
    after = json.loads((folder / "result.json").read_text())
    assert after["blocks"][:-1] == json.loads(before)["blocks"][:-1]
    assert after["blocks"][-1]["ndcg@20"] != json.loads(before)["blocks"][-1]["ndcg@20"]  # measured again
    assert {entry["item"] for entry in serving.recommend(folder, ["u1"], 40)["u1"]}.isdisjoint(known)


def test_forgetting_item_by_item_is_forgetting_all_at_once(opened: Path, tmp_path: Path) -> None:
    other = copy(opened, tmp_path / "..")
    try:
        for item in items_of(opened, "u3"):
            forget(opened, "u3", [item])
        forget(other, "u3")
        assert np.abs(scores_of(opened) - scores_of(other)).max() <= 1e-6
        for side in ("server", "clients"):
            assert (opened / f"{side}.safetensors").stat().st_size == (other / f"{side}.safetensors").stat().st_size
    finally:
        for path in other.iterdir():
            path.unlink()
        other.rmdir()


def test_a_difference_above_rounding_is_not_called_rounding(opened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "find_largest_difference", lambda *models: (1e-3, 40))
    monkeypatch.setattr(verification, "digest_model", lambda plan, learned: str(id(learned)))
    result = forget(opened, "u1", items_of(opened, "u1")[:2], verify=True)
    assert (result["method"]["exact"], result["guarantee"]["type"]) == (False, "empirical")
    assert result["verdict"].startswith("fail")


def test_membership_of_leavers_is_not_measurable_without_a_history(
    opened: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a history every item scores the same: an AUC of a half would say that nobody can tell."""
    with pytest.raises(SystemExit):
        main(["forget", "--run", str(opened), "--user", "u2", "--all", "--verify"])
    assert "AUC: not measurable" in " ".join(capsys.readouterr().out.split())
    audit = json.loads((opened / "forget-1.json").read_text())["audit"]
    nothing = dict.fromkeys(("before", "after", "retrain"))
    assert audit["auc_pairs"] == {**nothing, "ci": nothing}
    assert (audit["auc_difference"], audit["rank_percentile"]) == (None, nothing)
    part = forget(opened, "u1", items_of(opened, "u1")[::2], verify=True)["audit"]
    assert all(0 < part["auc_pairs"][name] < 1 for name in nothing)
    assert all(part["rank_percentile"][name] > 0 for name in nothing)


def test_certificate_lists_completed_and_open_steps(opened: Path) -> None:
    items = items_of(opened, "u1")
    result = forget(opened, "u1", items[:2])
    written = json.loads((opened / "forget-1.json").read_text())
    assert written == result
    assert set(result) == {
        "request", "method", "model", "participation", "cost", "guarantee", "audit", "utility", "purged",
        "residual_risk", "verdict",
    }  # fmt: skip
    assert result["request"]["n_items"] == 2
    assert result["method"]["exact"] is False  # of bits nothing is known before somebody looks
    assert result["guarantee"]["type"] == "up to rounding"
    assert result["verdict"] == "not verified"
    assert result["audit"]["auc_pairs"] == "not run"
    assert result["model"]["sha256_before"] != result["model"]["sha256_after"]
    assert not any(f'"{item}"' in (opened / "forget-1.json").read_text() for item in [*items, "u1"])
    repeat = forget(opened, "u1", items[2:3], verify=True)
    assert repeat["request"]["id"] == 2
    assert repeat["request"]["subject_pseudonym"] == result["request"]["subject_pseudonym"]
    assert repeat["model"]["sha256_before"] == result["model"]["sha256_after"]
    assert repeat["guarantee"]["type"] == ("exact" if repeat["method"]["exact"] else "up to rounding")
    assert repeat["audit"]["reference"] == "retrain"


def test_items_never_uploaded_are_deleted_from_the_device_only(opened: Path) -> None:
    saved = open_saved(opened)
    number = saved.find_user_numbers(["u1"])[0]
    counts = {int(i) for lists in told_in(opened) for i in lists.row(number)}
    state = [i for i in read_lists(saved.client_arrays, "history").row(number) if int(i) not in counts]
    before = (opened / "server.safetensors").read_bytes()
    result = forget(opened, "u1", [saved.ids["items"][state[0]]])
    assert result["method"]["mode"].startswith("none")
    assert (opened / "server.safetensors").read_bytes() == before
    assert saved.ids["items"][state[0]] not in items_of(opened, "u1")


def test_retraction_waits_for_min_users(held: Path) -> None:
    before = model_of(held)
    first = forget(held, "u1")
    second = forget(held, "u2", items_of(held, "u2")[:3])
    assert first["verdict"] == second["verdict"] == "waiting"
    assert model_of(held) == before
    assert items_of(held, "u1") == []  # the device itself forgets at once
    third = forget(held, "u3", verify=True)
    assert third["verdict"].startswith("pass")
    assert set(third["request"]["sent_with"]) == {
        candidate["request"]["subject_pseudonym"] for candidate in (first, second)
    }
    assert model_of(held) != before
    assert len(open_saved(held).server_arrays["parts/statistic/asked"]) == 0


def test_a_waiting_retraction_can_be_sent_now(held: Path) -> None:
    had = items_of(held, "u1")
    forget(held, "u1")
    before = {path.name: path.read_bytes() for path in held.iterdir()}
    with pytest.raises(TacitaError, match="item 'never' is not in"):
        forget(held, "u1", [had[0], "never"], now=True)
    assert {path.name: path.read_bytes() for path in held.iterdir()} == before
    assert "already waits for others; --now" in granted(held, "u1").message
    result = forget(held, "u1", now=True, verify=True)
    assert result["verdict"].startswith("pass")
    assert SENT_ALONE in result["residual_risk"]
    (held / "forget-1.json").unlink()
    assert forget(held, "u2", now=True)["request"]["id"] == 3  # no certificate is ever replaced
    assert "already forgotten" in granted(held, "u1", now=True).message


@pytest.mark.parametrize("stage", range(9))
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(
    opened: Path, tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five files are written to the side, a rename decides, and three take the place of the old ones."""
    whole = tmp_path / "whole"
    whole.mkdir()
    whole = copy(opened, whole)
    forget(whole, "u1")
    before = {side: (opened / f"{side}.safetensors").read_bytes() for side in ("server", "clients")}
    count, replaced = 0, os.replace

    def killed(*given: Any) -> None:
        nonlocal count
        if count == stage:
            raise KeyboardInterrupt
        count += 1
        replaced(*given)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        forget(opened, "u1")
    monkeypatch.setattr(os, "replace", replaced)
    done = stage >= 4  # server, clients, result, certificate were written
    for side in ("server", "clients"):
        open_saved(opened)  # whoever opens the folder finishes what was decided
        now = (opened / f"{side}.safetensors").read_bytes()
        assert now == ((whole / f"{side}.safetensors").read_bytes() if done else before[side])
    if not done:
        forget(opened, "u1")
    assert granted(opened, "u1").certificate is None  # it is forgotten, once
    forget(opened, "u2")
    forget(whole, "u2")
    for side in ("server", "clients"):
        assert (opened / f"{side}.safetensors").read_bytes() == (whole / f"{side}.safetensors").read_bytes()


WRONG = [
    (["--user", "nobody", "--all"], "user 'nobody' is not in"),
    (["--user", "u1", "--items", "never"], "item 'never' is not in"),
    (["--user", "u1", "--items", ""], "no item is named"),
    (["--user", "u1", "--items", " , "], "no item is named"),
    (["--user", "u1"], "either --items a,b or --all"),
    (["--user", "u1", "--all", "--items", "i1"], "either --items a,b or --all"),
]


@pytest.mark.parametrize(("question", "sentence"), WRONG)
def test_wrong_requests_change_nothing(
    opened: Path, question: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(opened)
    with pytest.raises(SystemExit) as error:
        main(["forget", "--run", str(opened), *question])
    message = capsys.readouterr().err
    assert error.value.code == 2
    assert sentence in message
    assert message.count("\n") == 1
    assert digest(opened) == before


def test_repeated_request_and_other_backbones_are_refused(
    opened: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = items_of(opened, "u1")[0]
    forget(opened, "u1", [item])
    forget(opened, "u2")
    states = digest(opened), digest(folders / "mf")
    for folder, request, sentence in (
        (opened, ["--user", "u1", "--items", item], f"has no item '{item}'"),
        (folders / "none", ["--user", "u1", "--all"], "no run folder"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["forget", "--run", str(folder), *request])
        assert error.value.code == 2
        assert sentence in capsys.readouterr().err
    assert (digest(opened), digest(folders / "mf")) == states


def test_forget_prints_what_it_did(opened: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["forget", "--run", str(opened), "--user", "u1", "--all", "--verify", "--now"])
    captured = capsys.readouterr()
    assert not error.value.code
    assert "items of 1 user are taken back" in captured.out
    assert "function of a sum over people" in captured.out
    assert "largest difference of a score" in captured.out
    assert SENT_ALONE in captured.err
    assert "forget-1.json" in captured.err


def test_threads_and_chunks_change_no_number(folders: Path, tmp_path: Path) -> None:
    config = config_of()
    other = training.train(config, tmp_path / "other", assembly.Machine(threads=1, chunk=7))
    assembly.use_threads(max_threads())
    for name in ("result.json", "server.safetensors", "clients.safetensors"):
        assert (other.folder / name).read_bytes() == (folders / "open" / name).read_bytes()


def test_products_on_two_threads_give_the_same_weights(folders: Path, tmp_path: Path) -> None:
    """As people run it: the tests' own products stay on one thread."""
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        assert {entry["num_threads"] for entry in ThreadpoolController().info() if entry["user_api"] == "blas"} == {2}
        other = training.train(config_of(), tmp_path / "other")
    first, two = (read_arrays(folder / "server.safetensors")[0] for folder in (folders / "open", other.folder))
    assert first.keys() == two.keys()
    for name in first:
        np.testing.assert_allclose(two[name], first[name], rtol=1e-4, atol=1e-6)


def test_partial_participation_is_refused(tmp_path: Path) -> None:
    values = {
        "data": SMALL,
        "backbone": {"name": "tally"},
        "train": {"participation": {"kind": "fraction", "rate": 0.5}},
    }
    with pytest.raises(TacitaError, match="asks everybody once a block"):
        training.train(validate_model(RunConfig, values, ""), tmp_path / "run")


# What it gives away


def planted() -> Lists:
    """Users 0 and 1 have an item of their own (20, 21); the rest share items 0..9 in many ways."""
    rng = np.random.default_rng(8)
    crowd = [rng.choice(10, 5, replace=False).tolist() for _ in range(60)]
    return [[0, 3, 7, 20], [1, 2, 5, 9, 21], *crowd]


def read_from(backbone: Tally, lists: Lists) -> Doubles:
    """How well each history is read from the released B."""
    server = learned(backbone, 22, lists)
    guesses = (
        peeling_attack.peel_histories(tally_settings.rebuild_server_gram(backbone, server)),
        peeling_attack.guess_from_columns(weights(server)),
    )
    return reconstruction.compute_best_overlap(np.concatenate(guesses), to_sets(Ragged.from_lists(lists), 22))


def test_the_reader_rebuilds_g_from_b() -> None:
    lists = planted()
    result = tally_settings.rebuild_server_gram(tally(), learned(tally(), 22, lists))
    assert result == pytest.approx(dense_gram(lists, 22), abs=1e-3)


def test_an_entry_that_was_cut_on_one_side_is_known_from_the_other() -> None:
    server = learned(tally(), 22, planted())
    cut = weights(server).copy()
    row, col = next((i, j) for i, j in np.argwhere(cut) if i < j)
    cut[row, col] = 0.0
    result = reconstruction.rebuild_gram(cut, 2.0, tally_settings.find_largest_count(tally(), server))
    assert result == pytest.approx(dense_gram(planted(), 22), abs=1e-3)


def test_peeling_finds_lone_consumers_and_stops_where_items_wait() -> None:
    assert (read_from(tally(), planted())[:2] == 1).all()
    assert read_from(tally(min_item=5), planted()).max() < reconstruction.NEARLY_READ


def test_a_pair_of_one_person_is_seen_beside_late_releases() -> None:
    """What waited comes with less than one count a person; the smallest count is then not one person's."""
    added = dense_gram([[0, 1, 5, 6], [0, 2, 3], [5, 7, 8], [1, 2, 7], [6, 3, 8]], 12)
    added[9:, 9:] += 0.6
    guesses = peeling_attack.guess_histories(added)
    assert [0, 1, 5, 6] in [np.flatnonzero(g).tolist() for g in guesses]


def test_a_lone_pair_shows_a_history() -> None:
    """Each item has two consumers, but the pair (0, 5) only one: what goes with both is its history."""
    added = dense_gram([[0, 1, 5, 6], [0, 2, 3], [5, 7, 8], [1, 2, 7], [6, 3, 8]], 9)
    guesses = peeling_attack.guess_histories(added)
    assert [0, 1, 5, 6] in [np.flatnonzero(g).tolist() for g in guesses]


def test_peeling_reads_more_and_never_takes_out_a_wrong_guess() -> None:
    lists = random_lists(2, 30, 40, most=12)
    added, sets = dense_gram(lists, 40), to_sets(Ragged.from_lists(lists), 40)
    once, repeat = (
        reconstruction.compute_best_overlap(result, sets)
        for result in (peeling_attack.guess_histories(added), peeling_attack.peel_histories(added))
    )
    assert (repeat >= once).all()
    assert (repeat == 1).sum() >= (once == 1).sum() + 5
    noise = np.random.default_rng(0).normal(0, 2, added.shape)
    assert (reconstruction.compute_best_overlap(peeling_attack.peel_histories(added + noise + noise.T), sets) < 1).all()


def test_a_column_shows_a_lone_consumer_although_few_entries_are_left() -> None:
    lists = [[0, 1, 2, 3, 21], *[[4 + u % 9, 4 + (u + 3) % 9, 4 + (u * u) % 9] for u in range(60)]]
    guesses = peeling_attack.guess_from_columns(weights(learned(tally(keep=6, ridge=50.0), 22, lists)))
    assert [0, 1, 2, 3, 21] in [np.flatnonzero(g).tolist() for g in guesses]
    assert len(peeling_attack.guess_from_columns(np.zeros((4, 4), np.float32))) == 0


def test_overlaps_tell_exact_from_near_histories() -> None:
    histories = to_sets(Ragged.from_lists([list(range(10)), [1], [], [3, 4]]), 12)
    guesses = to_sets(Ragged.from_lists([list(range(9)), [3, 4], [5, 6]]), 12)
    assert reconstruction.compute_best_overlap(guesses, histories) == pytest.approx([0.9, 1 / 9, 1.0])
    assert (reconstruction.compute_best_overlap(guesses[:0], histories) == 0).all()


def test_the_audit_of_a_run(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["audit", "tally", "--run", str(folders / "held"), "--brief", "--json", "--out", str(tmp_path / "new")])
    assert not error.value.code
    written = sorted((tmp_path / "new").iterdir())
    assert [entry.suffix for entry in written] == [".csv", ".png"]
    header, line = csv.reader(written[0].read_text().splitlines())
    assert header[:5] == ["setting", "ndcg@20", "valid", "membership", "membership_control"]
    assert line[0].startswith("as set: min_item")
    assert written[1].read_bytes().startswith(b"\x89PNG")
    document = json.loads(capsys.readouterr().out)
    [own] = document["rows"]
    assert own["attacks"].keys() == report_audit.ATTACKS.keys()
    assert all({"found", "control", "of", "of_control"} == attack.keys() for attack in own["attacks"].values())
    assert len(own["peeled"]) == len(document["users"]) == 4
    assert document["bytes_up_maskable"] == 4 * (40 * 41 / 2 + 40 + 2)  # pairs, who has an item, repeats
    with pytest.raises(SystemExit) as error:
        main(["audit", "tally"])
    assert error.value.code == 2
    with pytest.raises(TacitaError, match="this audit attacks the matrix"):
        tally_settings.audit_tally(serving.open_run(folders / "mf").config, assembly.Machine())


# Settings


def test_the_grid_is_the_same_for_all_and_the_best_validation_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_tuning, "GRID", {"ridge": [1.0, 100.0], "decay": [1.0]})
    result = tally_tuning.run_grid_trials(config_of(), assembly.Machine())
    assert [entry.options for entry in result] == [{"ridge": 1.0, "decay": 1.0}, {"ridge": 100.0, "decay": 1.0}]
    assert tally_tuning.choose_trial(result).valid == max(entry.valid for entry in result)
    assert tally_tuning.choose_common_options({"a": result, "b": result}) == tally_tuning.choose_trial(result).options


def test_tuning_names_the_setting_that_serves_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tally_tuning, "GRID", {"ridge": [1.0, 100.0], "decay": [1.0]})
    others = ["--data", SMALL, "--data", SMALL.replace("60", "50")]
    with pytest.raises(SystemExit) as error:
        main(["tune", "--backbone", "tally", "--quiet", *others])
    assert not error.value.code
    assert 'together: options {"ridge":' in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        main(["tune", "--backbone", "mf", *others])
    assert error.value.code == 2
    assert "one dataset at a time" in capsys.readouterr().err


def test_a_cell_of_a_table_is_a_run_of_its_own() -> None:
    config = config_of(min_item=2)
    fed = assembly.assemble_federation(config, assembly.Machine())
    shared, alone = continue_run(fed, train_base(fed)), make_initial_progress(fed)
    run_remaining_blocks(fed, alone, lambda report, now: None)
    assert shared.results == alone.results


def test_contributors_are_those_of_the_pairs_that_were_summed() -> None:
    """Who counts people on a pair without a sum must not shift the counts of the pairs after it."""
    shape = PairShape(4)
    pairs, count = np.zeros((4, 4)), np.zeros((4, 4))
    for row, col, value, people in ((1, 0, 0.5, 2.0), (3, 2, 0.7, 3.0)):
        pairs[row, col] = pairs[col, row] = value
        count[row, col] = count[col, row] = people
    count[2, 0] = count[0, 2] = 9.0  # of a pair that nobody summed
    sums = {"pairs": pairs, "count": count, "touched": np.ones(4), "repeats": np.zeros(2)}
    result = PairSums.from_arrays(None).with_block(0, Total(sums, 3.0, 3), shape)
    assert result.total.tolist() == [0.5, 0.7]
    assert result.count.tolist() == [2.0, 3.0]


def test_every_setting_that_is_tried_is_validated() -> None:
    """Rounds of tally are trials of how much latest items count; to look at every fifth would choose the last."""
    result = []
    for every in (1, 5):
        values = {"data": "synthetic:users=200,items=60,per_user=14,groups=4,drift=0", "split": {"kind": "random"}}
        values |= {"backbone": {"name": "tally"}, "evaluate": {"every": every, "controls": False}, "seed": 2}
        fed = assembly.assemble_federation(validate_model(RunConfig, values, "the test"), assembly.Machine(threads=1))
        progress = make_initial_progress(fed)
        run_remaining_blocks(fed, progress, lambda report, now: None)
        result.append((progress.results[0]["best_round"], progress.results[0]["ndcg@20"]))
    assert result[0] == result[1]
    assert result[0][0] < len(RECENCIES)
