"""tally as a graph filter: closed form, sparse sums, axes, exact forgetting, choices, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import tacita as tc
from helpers.oracle import Lists
from helpers.run_requests import certificate_of
from helpers.tally_runs import stream_of_lists, train_stream
from tacita.core.config import PrivacyConfig, RunConfig, SplitConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays
from tacita.core.sparse import SparseSum
from tacita.core.types import Broadcast, Doubles, Floats, Ragged, ServerState
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.federation.clients import build_user_view
from tacita.federation.state_arrays import read_server
from tacita.kernels.triangles import list_lower_entries, list_lower_rows
from tacita.messages import CooccurrenceTerms, Spec, Upload, add_upload, empty_total, merge_totals
from tacita.models.base import apply_budget, with_chosen_form
from tacita.models.tally import filter as filtering
from tacita.models.tally import spectral
from tacita.models.tally.filter import ALPHAS, BLENDS, LIFTS, FilterTally
from tacita.models.tally.model import RECENCIES, STATE, Tally, TallyConfig, require_tally
from tacita.models.tally.order import OrderConfig
from tacita.models.tally.weights import unpack_dense_weights
from tacita.runs import loaded_run, training
from tacita.runs.assembly import build_components
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest

SMALL = "synthetic:users=80,items=60,per_user=12,groups=4"


def filtered(**options: Any) -> FilterTally:
    plain: dict[str, Any] = {"min_item": 0, "keep": 0, "recency": 0.0, "repeat": 0.0, "decay": 1.0, "alpha": 0.3}
    plain["lift"] = 0.0
    form = with_chosen_form(Tally(TallyConfig(**{**plain, "solve": "filter", "axes": 4, **options})))
    assert isinstance(form, FilterTally)
    return form


def lists_by_hand(seed: int = 0, people: int = 30, n_items: int = 14) -> Lists:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(n_items, rng.integers(2, 8), replace=False).tolist()) for _ in range(people)]


def marks(lists: Lists, n_items: int) -> Doubles:
    out = np.zeros((len(lists), n_items))
    for u, entry in enumerate(lists):
        out[u, entry] = 1
    return out


def scores_of(backbone: Tally, lists: Lists, n_items: int, people: int | None = None) -> Floats:
    fed, progress = train_stream(stream_of_lists(n_items, lists), backbone)
    users = np.arange(people or len(lists))
    view = build_user_view(
        progress.clients, progress.server, fed.stream.blocks[0], users, fed.stream.user_keys, Broadcast()
    )
    return backbone.score_history(view)


@pytest.mark.parametrize("lift", [0.0, 0.2])
def test_scores_are_those_of_the_formula(lift: float) -> None:
    """Bipartite graph, both sides normalised by degrees, singular vectors of people times items."""
    n, lists = 14, lists_by_hand()
    x = marks(lists, n)
    degree, length = x.sum(axis=0), x.sum(axis=1)
    assert (degree > 0).all()
    normal = x / np.sqrt(length)[:, None] / np.sqrt(degree)[None]
    axes = np.linalg.svd(normal)[2][:4].T
    first, second = (
        normal.T @ normal * degree**lift,
        (axes / np.sqrt(degree)[:, None]) @ (axes * np.sqrt(degree)[:, None]).T,
    )
    wanted = x @ (first + 0.3 * second)
    scores = scores_of(filtered(lift=lift), lists, n)
    unseen = x == 0  # the filter says nothing of what a person has: it is never ranked
    assert np.allclose(scores[unseen], wanted[unseen], atol=1e-5)


@pytest.mark.parametrize("keep", [1, 3])
def test_few_entries_of_each_column_are_kept(keep: int) -> None:
    rng = np.random.default_rng(1)
    dense = rng.random((9, 9)) * (rng.random((9, 9)) < 0.8)
    dense = dense + dense.T
    result = spectral.keep_largest_per_column(scipy.sparse.csr_array(dense.astype(np.float32)), keep).toarray()
    np.fill_diagonal(dense, 0)
    for column in range(9):
        largest = np.sort(dense[:, column])[-keep:]
        assert np.allclose(np.sort(result[:, column])[-keep:], largest)
        assert (result[:, column] > 0).sum() == (largest > 0).sum()


def test_axes_of_a_large_graph_hold_as_much_as_the_best_could(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    taste = rng.dirichlet(np.full(12, 0.2), 600) @ rng.dirichlet(np.full(500, 0.05), 12)
    x = (rng.random((600, 500)) < 12 * taste).astype(float)
    x[np.arange(500), np.arange(500)] = 1
    gram = x.T @ (x / x.sum(axis=1)[:, None])
    at, value = list_lower_entries(gram)
    graph = spectral.build_item_graph(list_lower_rows(at, value, 500, np.ones(500, bool)))
    assert np.allclose(graph.root**2, x.sum(axis=0))
    best = spectral.find_leading_axes(graph.matrix, 20)
    monkeypatch.setattr(spectral, "MAX_DENSE", 1)
    monkeypatch.setattr(spectral, "BLOCK_WIDTH", 8)
    result = spectral.find_leading_axes(graph.matrix, 20)
    assert np.allclose(result.T @ result, np.eye(20), atol=1e-4)

    def held(axes: Floats) -> float:
        return float(np.trace(axes.T @ (graph.matrix @ axes)))

    assert 0.95 * held(best) < held(result) < 1.0001 * held(best)
    assert (np.linalg.norm(result.T @ best[:, :6], axis=0) > 0.99).all()  # the strong ones are there


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9))
def test_sparse_sums_are_dense_ones_in_any_chunk(seed: int, chunk: int) -> None:
    n, lists = 14, lists_by_hand(seed, 12)
    ragged = Ragged.from_lists(lists)
    backbone = filtered()
    dense = (Spec("pairs", (n, n), symmetric=True),)
    sparse = (replace(dense[0], sparse=True),)

    def upload(some: Ragged) -> Upload:
        client = np.arange(len(some), dtype=np.int32)
        terms = CooccurrenceTerms(client, some.ptr, some.ids, backbone.weigh_lists(some), n)
        return Upload({"pairs": terms}, np.ones(len(some)), np.zeros(len(some), np.uint64))

    whole = add_upload(empty_total(dense), upload(ragged), dense)["pairs"]
    parts = [ragged.take(np.arange(lo, min(lo + chunk, 12))) for lo in range(0, 12, chunk)]
    total, other = empty_total(sparse), empty_total(sparse)
    for k, part in enumerate(parts):
        if k % 2:
            other = add_upload(other, upload(part), sparse)
        else:
            total = add_upload(total, upload(part), sparse)
    pairs = merge_totals(total, other)["pairs"]
    assert isinstance(pairs, SparseSum)
    assert np.array_equal(pairs.matrix().toarray(), np.tril(whole))  # to the last bit


@pytest.mark.parametrize("dense", [0, 4000])
@pytest.mark.parametrize("solve", ["filter", "mixture"])
def test_forgetting_equals_retraining_bit_for_bit(solve: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "MAX_DENSE_ITEMS", dense)
    n, lists, more = 14, lists_by_hand(3), lists_by_hand(4)
    mixed: dict[str, Any] = {"ridge": 2.0, "blend": 0.5} if solve == "mixture" else {}
    backbone = filtered(solve=solve, decay=0.7, min_item=2, lift=0.2, **mixed)
    server = train_stream(stream_of_lists(n, lists, more), backbone)[1].server
    assert server.heads["lift"] == np.float32(0.2)
    before = [Ragged.from_lists([lists[5], lists[8]]), Ragged.from_lists([more[5], more[8]])]
    after = [Ragged.from_lists([lists[5][1:], []]), Ragged.from_lists([more[5], []])]
    result, rank = backbone.replace_lists(server, before, after)
    remainder = [[*entry] for entry in lists]
    remainder[5], remainder[8] = lists[5][1:], []
    later = [*more[:8], [], *more[9:]]
    report = [Ragged.from_lists(remainder), Ragged.from_lists(later)]
    repeat = backbone.retrain_from_lists(server, report)
    assert rank == 0
    for name, value in repeat.heads.items():
        assert np.array_equal(result.heads[name], value), name
    for name, value in repeat.parts[STATE].items():
        assert np.array_equal(result.parts[STATE][name], value), name
    assert not np.array_equal(result.heads["weights"], server.heads["weights"])


def test_user_without_uploads_retracts_nothing() -> None:
    backbone = filtered()
    server = train_stream(stream_of_lists(14, [[0, 1], [1, 2]]), backbone)[1].server
    with pytest.raises(TacitaError, match="never told"):
        backbone.replace_lists(server, [Ragged.from_lists([[3, 4]])], [Ragged.from_lists([[]])])


def test_a_run_with_sparse_sums_is_the_run_with_dense_ones_and_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {
        "data": SMALL,
        "split": {"kind": "random"},
        "backbone": {"name": "tally", "solve": "mixture", "axes": 8, "min_item": 0, "recency": 0.0},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"},
    }
    config = validate_model(RunConfig, message, "a test")
    dense = training.train(config, tmp_path / "dense")
    monkeypatch.setattr(filtering, "MAX_DENSE_ITEMS", 0)
    sparse = training.train(config, tmp_path / "sparse")
    assert dense.result["mean"] == sparse.result["mean"]
    assert sparse.result["blocks"][0]["rounds"] == len(BLENDS)
    user = json.loads((sparse.folder / "ids.json").read_text())["users"][0]
    certificate = certificate_of(submit_request(sparse.folder, RawRequest("forget", {user: None}), verify=True))
    assert "solved anew" in json.dumps(certificate)
    assert certificate["guarantee"]["max_score_difference"] == 0.0


def test_validation_chooses_among_open_settings() -> None:
    assert filtered(alpha="learn").n_validation_candidates == len(ALPHAS)
    assert filtered(alpha="learn", recency="learn").n_validation_candidates == len(ALPHAS) + len(RECENCIES)
    assert filtered(lift="learn").n_validation_candidates == len(LIFTS)
    assert filtered(solve="mixture", lift="learn").n_validation_candidates == len(BLENDS)
    mixed = filtered(solve="mixture", alpha="learn")
    assert {0.0, 1.0} <= set(BLENDS)  # either alone is among the choices
    server = train_stream(stream_of_lists(14, lists_by_hand()), mixed)[1].server
    assert [float(mixed.with_trial(server, k).heads["blend"][0]) for k in range(5)] == list(BLENDS)


def test_trials_change_the_best_one_so_far() -> None:
    """Recency is chosen first, and stays while alpha is tried."""
    model = filtered(alpha="learn", recency="learn")
    server = train_stream(stream_of_lists(14, lists_by_hand()), filtered())[1].server
    first = model.with_trial(server, 0)
    assert (first.heads["recency"][0], first.heads["alpha"][0]) == (RECENCIES[0], np.float32(ALPHAS[-1]))
    best = model.with_trial(first, 2)
    later = model.with_trial(best, len(RECENCIES) + 1)
    assert (later.heads["recency"][0], later.heads["alpha"][0]) == (RECENCIES[2], np.float32(ALPHAS[1]))


def test_a_run_tries_alpha_with_its_best_recency() -> None:
    progress = train_stream(stream_of_lists(14, lists_by_hand()), filtered(alpha="learn", recency="learn"))[1]
    heads = progress.server.heads
    assert progress.results[0]["rounds"] == len(ALPHAS) + len(RECENCIES)
    assert heads["recency"][0] in RECENCIES
    assert heads["alpha"][0] in np.float32(ALPHAS)


def test_mixture_of_one_filter_is_that_filter() -> None:
    n, lists = 14, lists_by_hand()
    alone = scores_of(filtered(), lists, n)
    assert np.array_equal(scores_of(filtered(solve="mixture", blend=0.0), lists, n), alone)
    x = marks(lists, n)
    gram = x.T @ (x / x.sum(axis=1)[:, None])
    ridge = 2.0 * np.trace(gram) / x.sum()
    inverse = np.linalg.inv(gram + ridge * np.eye(n))
    weights = -inverse / np.diag(inverse)[None]
    np.fill_diagonal(weights, 0)
    solved = scores_of(filtered(solve="mixture", blend=1.0, ridge=2.0), lists, n)
    assert np.allclose(solved, x @ weights, atol=1e-4)
    both = scores_of(filtered(solve="mixture", blend=0.25, ridge=2.0), lists, n)
    parts = [
        (candidate - candidate.mean(axis=1)[:, None]) / candidate.std(axis=1)[:, None] for candidate in (solved, alone)
    ]
    assert np.allclose(both, 0.25 * parts[0] + 0.75 * parts[1], atol=1e-4)


def test_scores_are_independent_of_the_cohort() -> None:
    lists = lists_by_hand(people=300)
    assert np.array_equal(scores_of(filtered(), lists, 14, 3), scores_of(filtered(), lists, 14)[:3])


def test_an_item_waits_for_contributors() -> None:
    lists: Lists = [[0, 1], [0, 1], [0, 2]]
    server = train_stream(stream_of_lists(3, lists), filtered(min_item=2))[1].server
    assert server.heads["root"][2] == 0
    assert not unpack_dense_weights(server.heads)[2].any()
    assert unpack_dense_weights(server.heads)[0, 1] > 0


def test_what_a_device_receives_is_checked() -> None:
    backbone = filtered(solve="mixture")
    heads = train_stream(stream_of_lists(14, lists_by_hand()), backbone)[1].server.heads
    assert backbone.has_valid_heads(heads, 14)
    wrong: dict[str, Any] = {
        "axes": heads["axes"][:-1],
        "root": -heads["root"],
        "alpha": np.array([np.nan], np.float32),
        "blend": np.array([2.0], np.float32),
        "lift": np.array([-1.0], np.float32),
        "solved_ptr": heads["ptr"],
        "weights": heads["weights"] * np.float32(1e9),
    }
    for name, value in wrong.items():
        assert not backbone.has_valid_heads({**heads, name: value}, 14), name
    tiny = np.full_like(heads["root"], 1e-40)  # of which the inverse is no number
    assert np.isinf(np.float32(1) / tiny).all()
    assert not backbone.has_valid_heads({**heads, "root": tiny}, 14)


def test_similar_items_are_those_that_co_occur() -> None:
    lists: Lists = [[0, 1], [0, 1, 2], [3, 4], [3, 4, 2]]
    backbone = filtered(axes=2)
    server = train_stream(stream_of_lists(5, lists), backbone)[1].server
    result = backbone.measure_similarity_to_item(server, server.items, 0)
    assert result.argmax() == 1
    assert result[0] == 0


@pytest.mark.parametrize("item", [0, 2])
def test_similarities_are_the_terms_of_the_scores(item: int) -> None:
    """Of a person with one item, the score of another is what that item says for it, lifted or not."""
    lists: Lists = [[0, 1], [0, 1, 2], [3, 4], [3, 4, 2], [1], [3]]
    backbone = filtered(axes=2, lift=0.7)
    server = train_stream(stream_of_lists(5, lists), backbone)[1].server
    message = backbone.measure_similarity_to_item(server, server.items, item)
    scores = scores_of(backbone, lists, 5)
    assert np.allclose(message[[1, 3]], scores[[4, 5], item], atol=1e-6)


def test_a_run_that_chose_its_lift_forgets_and_keeps_the_choice(tmp_path: Path) -> None:
    message = {
        "data": SMALL,
        "backbone": {"name": "tally", "solve": "filter", "axes": 8, "min_item": 0, "recency": 0.0, "alpha": 0.3},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"},
    }
    run = training.train(validate_model(RunConfig, message, "a test"), tmp_path / "run")
    assert len(run.result["blocks"]) > 1  # lift may differ from one to the next
    assert {block["rounds"] for block in run.result["blocks"]} == {len(LIFTS)}
    user = json.loads((run.folder / "ids.json").read_text())["users"][0]
    chosen = read_arrays(run.folder / "server.safetensors")[0]["heads/lift"]
    assert chosen > 0
    certificate = certificate_of(submit_request(run.folder, RawRequest("forget", {user: None}), verify=True))
    assert certificate["guarantee"]["max_score_difference"] == 0.0
    assert read_arrays(run.folder / "server.safetensors")[0]["heads/lift"] == chosen


def test_incompatible_settings_are_refused() -> None:
    for name, value in {"length_power": 0.5, "min_pair": 3}.items():
        with pytest.raises(TacitaError, match=f"backbone.{name} has no meaning"):
            filtered(**{name: value})
    for name, value in {"ridge": 100.0, "ridge_popularity": 0.5, "blend": 0.5}.items():
        with pytest.raises(TacitaError, match=f"backbone.{name} has no meaning with backbone.solve = 'filter'"):
            filtered(**{name: value})
        filtered(solve="mixture", **{name: value})
    for name, value in {"axes": 8, "alpha": 0.0, "lift": 0.0, "blend": 0.0}.items():  # ridge looks at none
        for config in (TallyConfig, OrderConfig):
            with pytest.raises(TacitaError, match=f"backbone.{name} has no meaning with backbone.solve = 'ridge'"):
                config.model_validate({name: value})
    with pytest.raises(TacitaError, match="has no form under"):
        apply_budget(filtered(), PrivacyConfig(epsilon=2.0))
    with pytest.raises(TacitaError, match="use 'filter'"):
        filtered(solve="mixture").check(20_000, 20_000)
    filtered().check(10**6, 10**6)  # nothing dense is made of it
    with pytest.raises(TacitaError, match="audit"):
        require_tally(filtered())
    plain, _, _ = build_components(RunConfig(backbone={"name": "tally"}))
    assert type(plain) is Tally


def test_run_folder_without_filter_arrays_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As filters were before they had a lift."""
    solve = {"name": "tally", "solve": "filter"}
    run = tc.train("synthetic:users=40,items=30,per_user=12", backbone=solve, out=tmp_path / "run")
    assert run.recommend("u1", k=1).height == 1

    def read_earlier(*given: Any) -> ServerState:
        server = read_server(*given)
        return replace(server, heads={name: value for name, value in server.heads.items() if name != "lift"})

    monkeypatch.setattr(loaded_run, "read_server", read_earlier)
    for ask in (lambda run: run.recommend("u1"), lambda run: run.similar("i1"), lambda run: reopen_run(run.folder)):
        with pytest.raises(TacitaError, match="an earlier version of tacita, whose 'tally' had no lift; train it"):
            ask(tc.load(run.folder))


def test_given_split_can_keep_all_training_items(tmp_path: Path) -> None:
    rows = ["user,item,split"]
    rows += [f"{u},{i},{'test' if i == u % 7 else 'train'}" for u in range(9) for i in range(7)]
    (tmp_path / "own.csv").write_text("\n".join(rows))
    table = load_interactions(str(tmp_path / "own.csv"), columns={"part": "split"})
    lent, whole = (split(table, SplitConfig(kind="given", lend=lend)).blocks[0] for lend in (True, False))
    assert len(lent.valid.ids) == 9
    assert len(whole.valid.ids) == 0
    assert len(whole.train.ids) == len(lent.train.ids) + 9 == 54
