"""Metrics by hand, against ir_measures and against chance; masks; sampled candidates; the controls."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import ir_measures
import numpy as np
import pytest
from ir_measures import RR, P, R, Success, nDCG
from scipy import stats

from tacita import metrics as module
from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, validate_model
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Block, BlockStream, Broadcast, Doubles, Floats, Ints, Keys, Ragged
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.federation.evaluation import (
    TrainedState,
    build_evaluation_rules,
    build_ranking_mask,
    build_test_block,
    evaluate_block,
    evaluate_devices,
    resolve_read_setting,
)
from tacita.federation.rounds import Progress, begin_block, make_initial_progress
from tacita.kernels.ranking import compute_list_ranks, find_best_items
from tacita.metrics import (
    Evaluation,
    EvaluationRules,
    ScoreUsers,
    evaluate_ranking,
    rank_wanted,
    sample_candidates,
    summarise_continual,
)
from tacita.models import find_backbone_class
from tacita.round.device_state import DeviceState
from tacita.round.plan import Federation
from tacita.runs import controls
from tacita.runs.assembly import build_components
from tacita.runs.controls import (
    average_incremental_blocks,
    compute_item_gram,
    make_alone_scorer,
    make_linear_scorer,
    make_popular_scorer,
    make_random_scorer,
    run_controls,
    solve_linear_weights,
)

DRAWS = Draws(1)
ALL = ["ndcg", "recall", "precision", "hr", "mrr"]
Lists = list[list[int]]


def keys(n: int) -> Keys:
    return derive_keys(f"u{i}" for i in range(n))


def nobody(n: int) -> Ragged:
    return Ragged.empty(n)


def fixed(scores: AnyArray) -> ScoreUsers:
    return lambda users: np.array(scores, np.float32)[users]


def constant(n_items: int) -> ScoreUsers:
    return lambda users: np.zeros((len(users), n_items), np.float32)


def scored(
    scores: AnyArray,
    wanted: Lists,
    mask: Lists | None = None,
    k: int = 20,
    metrics: list[str] | None = None,
    sampled: Ragged | None = None,
    count_hidden: bool = False,
) -> dict[str, list[float]]:
    """Values per counted user, without the cut-off in the name."""
    hide = Ragged.from_lists(mask) if mask else nobody(len(wanted))
    want = Ragged.from_lists(wanted)
    request = (metrics or ALL, [k], sampled, count_hidden)
    result = evaluate_ranking(fixed(scores), want, hide, keys(len(wanted)), DRAWS, EvaluationRules(*request))
    return {name.split("@")[0]: values.tolist() for name, values in result.values.items()}


def descending(n: int) -> Floats:
    """One user for whom item i has rank i + 1."""
    return -np.arange(n, dtype=np.float32)[None]


def one_each(n_users: int, n_items: int, seed: int = 0) -> Lists:
    return np.random.default_rng(seed).integers(0, n_items, (n_users, 1)).tolist()


# By hand


def test_two_wanted_items_at_ranks_one_and_three() -> None:
    result = scored(descending(25), [[0, 2]], metrics=[*ALL, "auc"])
    assert result["ndcg"][0] == pytest.approx(1.5 / 1.6309297536, abs=1e-9)
    assert result["ndcg"][0] == pytest.approx(0.919721, abs=5e-7)
    assert result["recall"] == [1.0]
    assert result["precision"] == [0.1]
    assert result["hr"] == [1.0]
    assert result["mrr"] == [1.0]
    assert result["auc"] == [45 / 46]


def test_more_wanted_items_than_places() -> None:
    result = scored(descending(40), [[*range(20), *range(30, 35)]])
    assert result["recall"] == [0.8]
    assert result["ndcg"] == pytest.approx([1.0], abs=1e-12)
    assert result["precision"] == [1.0]


def test_a_first_hit_beyond_the_cut_off_counts_nothing() -> None:
    beyond, within = scored(descending(10), [[3, 7]], k=3), scored(descending(10), [[3, 7]], k=5)
    assert set(np.concatenate(list(beyond.values()))) == {0.0}
    assert within["mrr"] == [0.25]
    assert within["recall"] == [0.5]
    assert within["precision"] == [0.2]
    assert within["ndcg"][0] == pytest.approx((1 / np.log2(5)) / (1 + 1 / np.log2(3)), abs=1e-12)


def test_users_without_wanted_items_are_not_counted() -> None:
    want = Ragged.from_lists([[0], [], [1]])
    result = evaluate_ranking(
        fixed(np.repeat(descending(4), 3, 0)), want, nobody(3), keys(3), DRAWS, EvaluationRules(["mrr"], [4])
    )
    assert result.users.tolist() == [0, 2]
    assert result.values["mrr@4"].tolist() == [1.0, 0.5]
    assert result.compute_means() == {"mrr@4": 0.75}


def test_means_among_marked_users() -> None:
    evaluation = Evaluation(np.array([1, 3, 4], np.int32), {"hr@5": np.array([1.0, 0.0, 0.2])})
    new = np.array([True, True, False, True, False, True])
    assert evaluation.compute_means(new) == {"hr@5": 0.5}
    assert evaluation.compute_means(~new) == {"hr@5": 0.2}
    assert evaluation.compute_means() == {"hr@5": pytest.approx(0.4)}


def test_continual_summary_by_hand() -> None:
    result = summarise_continual([[0.4], [0.2, 0.3], [0.1, 0.2, 0.5]], [9, 9, 9])
    assert result["la"] == pytest.approx((0.4 + 0.3 + 0.5) / 3)
    assert result["ra"] == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert result["hm"] == pytest.approx(2 * 0.4 * (0.8 / 3) / (0.4 + 0.8 / 3))
    assert summarise_continual([[0.0], [0.0, 0.0]], [1, 1])["hm"] == 0.0


def test_a_block_that_tested_nobody_counts_in_no_summary() -> None:
    result = summarise_continual([[0.4], [0.2, 0.0], [0.1, 0.0, 0.5]], [9, 0, 9])
    assert (result["la"], result["ra"]) == (pytest.approx(0.45), pytest.approx(0.3))
    assert all(math.isnan(v) for v in summarise_continual([[0.0], [0.0, 0.0]], [0, 0]).values())


# Against other code


def random_case(seed: int, n_users: int = 100) -> tuple[Floats, Lists, Lists]:
    """Scores without ties, wanted items and masks that may overlap, for users of one catalogue."""
    random = np.random.default_rng(seed)
    n_items = int(random.integers(15, 60))
    scores = np.stack([random.permutation(n_items) for _ in range(n_users)]).astype(np.float32)
    wanted = [random.permutation(n_items)[: random.integers(1, 14)].tolist() for _ in range(n_users)]
    masked = [random.permutation(n_items)[: random.integers(0, 10)].tolist() for _ in range(n_users)]
    return scores, wanted, masked


def reference(scores: Floats, wanted: Lists, candidates: Lists, cutoffs: list[int]) -> dict[str, Doubles]:
    """ir_measures on the same lists; per user in order."""
    names = {nDCG: "ndcg", R: "recall", P: "precision", RR: "mrr", Success: "hr"}
    qrels = {f"{u:03}": {str(i): 1 for i in own_values} for u, own_values in enumerate(wanted)}
    run = {f"{u:03}": {str(i): float(scores[u, i]) for i in candidate} for u, candidate in enumerate(candidates)}
    request = {measure @ k: f"{name}@{k}" for (measure, name), k in product(names.items(), cutoffs)}
    out: dict[str, Doubles] = {name: np.full(len(wanted), np.nan) for name in request.values()}
    for entry in ir_measures.iter_calc(list(request), qrels, run):
        out[request[entry.measure]][int(entry.query_id)] = entry.value
    return out


@pytest.mark.parametrize("seed", range(10))
def test_full_ranking_equals_ir_measures(seed: int) -> None:
    scores, wanted, masked = random_case(seed)
    cutoffs = [1, 3, 10, 20]
    hide = Ragged.from_lists(masked)
    result = evaluate_ranking(
        fixed(scores), Ragged.from_lists(wanted), hide, keys(100), DRAWS, EvaluationRules(ALL, cutoffs)
    )
    visible = [[i for i in own_values if i not in hidden] for own_values, hidden in zip(wanted, masked)]
    candidates = [[i for i in range(scores.shape[1]) if i not in hidden] for hidden in masked]
    expected = reference(scores, visible, candidates, cutoffs)
    assert len(result.values) == len(expected) == 20
    for name, values in result.values.items():
        np.testing.assert_allclose(values, expected[name][result.users], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_sampled_ranking_equals_ir_measures(seed: int) -> None:
    scores, wanted, _ = random_case(seed)
    want = Ragged.from_lists(wanted)
    others = sample_candidates(want, 9, scores.shape[1], keys(100), DRAWS, 0)
    result = evaluate_ranking(fixed(scores), want, nobody(100), keys(100), DRAWS, EvaluationRules(ALL, [5], others))
    candidates = [[*own_values, *others.row(u).tolist()] for u, own_values in enumerate(wanted)]
    expected = reference(scores, wanted, candidates, [5])
    for name, values in result.values.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_auc_equals_brute_force(seed: int) -> None:
    scores, wanted, masked = random_case(seed)
    hide = Ragged.from_lists(masked)
    result = evaluate_ranking(
        fixed(scores), Ragged.from_lists(wanted), hide, keys(100), DRAWS, EvaluationRules(["auc"], [1])
    )
    expected = []
    for u in result.users:
        remainder = [i for i in range(scores.shape[1]) if i not in masked[u]]
        own_values = [i for i in remainder if i in wanted[u]]
        right = [scores[u, i] > scores[u, j] for i in own_values for j in remainder if j not in wanted[u]]
        expected.append(np.mean(right))
    np.testing.assert_allclose(result.values["auc"], expected, rtol=0, atol=1e-12)


def test_auc_of_a_user_who_wants_everything_is_a_half() -> None:
    assert scored(descending(3), [[0, 1, 2]], metrics=["auc"])["auc"] == [0.5]


@pytest.mark.parametrize("levels", [3, 1000])
def test_best_items_are_those_of_a_stable_sort(levels: int) -> None:
    scores = np.random.default_rng(levels).integers(0, levels, (40, 70)).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")
    for k in (1, 7, 70):
        items, values = find_best_items(scores, k)
        np.testing.assert_array_equal(items, order[:, :k])
        np.testing.assert_array_equal(values, np.take_along_axis(scores, order[:, :k], 1))


@pytest.mark.parametrize("levels", [3, 1000])
def test_list_ranks_are_places_in_a_stable_sort(levels: int) -> None:
    random = np.random.default_rng(levels)
    scores = random.integers(0, levels, (40, 30)).astype(np.float32)
    lists = Ragged.from_lists([random.permutation(30)[: random.integers(0, 9)].tolist() for _ in range(40)])
    place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1) + 1
    np.testing.assert_array_equal(compute_list_ranks(scores, lists.ptr, lists.ids), place[lists.rows(), lists.ids])


# Ties and chance


def discounts(k: int) -> float:
    return float((1 / np.log2(np.arange(k) + 2)).sum())


def near(values: Doubles, expected: AnyArray | float, most_error: float) -> bool:
    """The mean is within four standard errors, and these are small enough to tell."""
    error = (values - expected).std() / np.sqrt(len(values))
    return bool(error < most_error and abs((values - expected).mean()) < 4 * error)


def test_a_constant_scorer_is_at_chance_in_a_full_ranking() -> None:
    random = np.random.default_rng(0)
    n, n_items, k = 6000, 40, 5
    orders = np.stack([random.permutation(n_items) for _ in range(n)])
    n_wanted, n_hidden = random.integers(1, 9, n), random.integers(0, 20, n)
    wanted = [order[:m].tolist() for order, m in zip(orders, n_wanted)]
    hidden = [order[n_items - m :].tolist() for order, m in zip(orders, n_hidden)]
    want, hide = Ragged.from_lists(wanted), Ragged.from_lists(hidden)
    result = evaluate_ranking(constant(n_items), want, hide, keys(n), DRAWS, EvaluationRules([*ALL, "auc"], [k]))
    remainder = n_items - n_hidden
    ideal = np.array([discounts(min(k, m)) for m in n_wanted])
    assert near(result.values[f"ndcg@{k}"], n_wanted / remainder * discounts(k) / ideal, 0.005)
    assert near(result.values[f"recall@{k}"], k / remainder, 0.005)
    assert near(result.values[f"hr@{k}"], 1 - stats.hypergeom.pmf(0, remainder, n_wanted, k), 0.01)
    np.testing.assert_allclose(result.values["auc"], 0.5, rtol=0, atol=1e-12)  # a pair of the same score counts half


def test_a_constant_scorer_is_at_chance_among_99_sampled_items() -> None:
    n = 20_000
    want = Ragged.from_lists(one_each(n, 400))
    others = sample_candidates(want, 99, 400, keys(n), DRAWS, 0)
    result = evaluate_ranking(
        constant(400), want, nobody(n), keys(n), DRAWS, EvaluationRules(["hr", "ndcg"], [10], others)
    )
    assert discounts(10) / 100 == pytest.approx(0.045436, abs=5e-7)
    assert near(result.values["hr@10"], 0.1, 0.0025)
    assert near(result.values["ndcg@10"], discounts(10) / 100, 0.0015)


def test_tied_items_take_every_place_once_whether_wanted_or_not() -> None:
    n, n_items = 50, 30
    everything = Ragged.from_lists([list(range(n_items))] * n)
    ranks = rank_wanted(constant(n_items), everything, nobody(n), keys(n), DRAWS)[1].reshape(n, n_items)
    np.testing.assert_array_equal(np.sort(ranks, axis=1), np.tile(np.arange(1, n_items + 1), (n, 1)))
    for item in (0, 13, n_items - 1):
        only = Ragged.from_lists([[item]] * n)
        alone = rank_wanted(constant(n_items), only, nobody(n), keys(n), DRAWS)[1]
        np.testing.assert_array_equal(alone, ranks[:, item])
        others = Ragged.from_lists([[i for i in range(n_items) if i != item]] * n)
        among = rank_wanted(constant(n_items), only, nobody(n), keys(n), DRAWS, others)[1]
        np.testing.assert_array_equal(among, ranks[:, item])


def test_the_order_of_ties_follows_seed_and_user() -> None:
    want = Ragged.from_lists([[0]] * 200)
    ranks = [rank_wanted(constant(50), want, nobody(200), keys(200), Draws(seed))[1] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(ranks[0], ranks[1])
    assert (ranks[0] == ranks[2]).mean() < 0.1
    counts = np.bincount((ranks[0] - 1) // 10, minlength=5)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_ties_matter_only_among_equals() -> None:
    scores = np.array([[3, 2, 2, 2, 1]], np.float32)
    want = Ragged.from_lists([[0, 1, 2, 3, 4]])
    ranks = rank_wanted(fixed(scores), want, nobody(1), keys(1), DRAWS)[1]
    assert ranks[0] == 1
    assert sorted(ranks[1:4].tolist()) == [2, 3, 4]
    assert ranks[4] == 5


# Masks


def test_scores_of_masked_items_change_nothing() -> None:
    scores, wanted, masked = random_case(7)
    loud = scores.copy()
    for u, hidden in enumerate(masked):
        loud[u, hidden] += 1e6
    assert scored(scores, wanted, masked) == scored(loud, wanted, masked)
    assert scored(scores, wanted, masked) != scored(loud, wanted)


def test_a_wanted_item_that_the_mask_hides_is_not_asked_for() -> None:
    result = scored(descending(6), [[0, 3]], [[0, 1]], k=2)
    assert result["recall"] == [1.0]
    assert result["mrr"] == [0.5]
    assert scored(descending(6), [[0, 3]], [[0, 3]])["recall"] == []


IDEAL_3 = 1 + 1 / math.log2(3) + 1 / math.log2(4)  # of three wanted items
IDEAL_2 = 1 + 1 / math.log2(3)


@pytest.mark.parametrize(
    ("sampled", "places"),  # places of items 2 and 4 among the candidates
    [(None, (1, 3)), (Ragged.from_lists([[3, 5]] * 2), (1, 3)), (Ragged.from_lists([[5], [5]]), (1, 2))],
)
def test_hidden_wanted_items_are_dropped_or_count_by_hand(sampled: Ragged | None, places: tuple[int, int]) -> None:
    # Best first 0..5; items 0 and 1 are hidden. User 0 wants 0, 2 and 4; user 1 wants only what is hidden.
    scores, wanted, mask = np.repeat(descending(6), 2, 0), [[0, 2, 4], [1]], [[0, 1], [0, 1]]
    gain = sum(1 / math.log2(place + 1) for place in places)
    drop = scored(scores, wanted, mask, 3, [*ALL, "auc"], sampled)
    count = scored(scores, wanted, mask, 3, [*ALL, "auc"], sampled, count_hidden=True)
    others = 2 if sampled is None else len(sampled.row(0))
    wrong = places[1] - 2  # others above item 4; none is above item 2
    assert drop == {
        "ndcg": [pytest.approx(gain / IDEAL_2)],
        "recall": [1.0],
        "precision": [pytest.approx(2 / 3)],
        "hr": [1.0],
        "mrr": [1.0],
        "auc": [pytest.approx(1 - wrong / (2 * others))],
    }
    assert count == {
        "ndcg": [pytest.approx(gain / IDEAL_3), 0.0],
        "recall": [pytest.approx(2 / 3), 0.0],
        "precision": [pytest.approx(2 / 3), 0.0],
        "hr": [1.0, 0.0],
        "mrr": [1.0, 0.0],
        "auc": [pytest.approx((2 * others - wrong) / (3 * others)), 0.0],
    }


def test_a_mask_may_repeat_an_item_or_name_one_outside_the_catalogue() -> None:
    once = scored(descending(6), [[4]], [[0, 1]], metrics=["auc", "mrr"])
    repeat = scored(descending(6), [[4]], [[0, 1, 1, 0, 9]], metrics=["auc", "mrr"])
    assert once == repeat == {"auc": [1 - 2 / 3], "mrr": [1 / 3]}


def test_the_scorer_is_asked_in_chunks_without_changing_values(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, wanted, masked = random_case(3)
    scores = np.floor(scores / 4)  # with ties
    request: list[int] = []

    def score_users(users: Ints) -> Floats:
        request.append(len(users))
        return scores[users].astype(np.float32)

    def values() -> dict[str, Doubles]:
        want, hide = Ragged.from_lists(wanted), Ragged.from_lists(masked)
        return evaluate_ranking(
            score_users, want, hide, keys(100), DRAWS, EvaluationRules([*ALL, "auc"], [5, 10])
        ).values

    together = values()
    monkeypatch.setattr(module, "CHUNK", 7)
    apart = values()
    assert request == [100, *[7] * 14, 2]
    for name in together:
        np.testing.assert_array_equal(together[name], apart[name])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    scores = descending(5)
    scores[0, 3] = bad
    with pytest.raises(TacitaError, match=r"no longer finite.*lower backbone\.lr"):
        scored(scores, [[0]])


# Sampled candidates


def touched_lists(n: int, n_items: int, most: int) -> Ragged:
    random = np.random.default_rng(5)
    return Ragged.from_lists([random.permutation(n_items)[: random.integers(1, most)].tolist() for _ in range(n)])


def test_candidates_are_distinct_untouched_and_as_many_as_asked() -> None:
    touched = touched_lists(300, 120, 40)
    candidates = sample_candidates(touched, 20, 120, keys(300), DRAWS, 0)
    assert (candidates.counts() == 20).all()
    for u in range(300):
        own_values = candidates.row(u).tolist()
        assert len(set(own_values)) == 20
        assert set(own_values) <= set(range(120)) - set(touched.row(u).tolist())


@pytest.mark.parametrize(("n_items", "n"), [(100, 99), (30, 50)])
def test_a_user_with_little_room_gets_all_of_it(n_items: int, n: int) -> None:
    touched = Ragged.from_lists([[u % n_items] for u in range(50)])
    candidates = sample_candidates(touched, n, n_items, keys(50), DRAWS, 0)
    for u in range(50):
        assert sorted([*candidates.row(u).tolist(), u % n_items]) == list(range(n_items))


def test_a_user_who_touched_everything_gets_no_candidates() -> None:
    candidates = sample_candidates(Ragged.from_lists([[0, 1, 2], [1]]), 2, 3, keys(2), DRAWS, 0)
    assert candidates.row(0).tolist() == []
    assert sorted(candidates.row(1).tolist()) == [0, 2]


def test_candidates_are_the_same_for_everybody_who_asks() -> None:
    touched = touched_lists(60, 80, 20)
    candidates = sample_candidates(touched, 10, 80, keys(60), DRAWS, 2)
    some = np.array([40, 3, 17])
    alone = sample_candidates(touched.take(some), 10, 80, keys(60)[some], DRAWS, 2)
    for at, u in enumerate(some):
        assert alone.row(at).tolist() == candidates.row(u).tolist()
    for other in (
        sample_candidates(touched, 10, 80, keys(60), DRAWS, 3),
        sample_candidates(touched, 10, 80, keys(60), Draws(2), 2),
    ):
        assert other.ids.tolist() != candidates.ids.tolist()


def test_candidates_are_uniform_over_the_untouched_items() -> None:
    touched = Ragged.from_lists([[0, 1]] * 4000)
    counts = np.bincount(sample_candidates(touched, 5, 22, keys(4000), DRAWS, 0).ids, minlength=22)
    assert counts[:2].tolist() == [0, 0]
    assert np.abs(counts[2:] - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


# On a stream: masks by name, old blocks, new and returning users


def block_of(index: int, n_items: int, train: Lists, valid: Lists, test: Lists, known: int = 0) -> Block:
    n = len(train)
    lists = [Ragged.from_lists(candidate) for candidate in (train, valid, test)]
    rows = sum(len(entry.ids) for entry in lists)
    return Block(index, n, n_items, *lists, np.arange(n) >= known, rows)


def stream_of(*blocks: Block) -> BlockStream:
    users = tuple(f"u{i}" for i in range(blocks[-1].n_users))
    items = tuple(f"i{i}" for i in range(blocks[-1].n_items))
    return BlockStream("tiny", blocks, users, items, derive_keys(users), derive_keys(items), {}, "tiny")


def federation(stream: BlockStream, **options: Any) -> Federation:
    config = RunConfig(evaluate=EvaluateConfig(**{"k": [2], "select_by": "ndcg@2", **options}))
    mf = find_backbone_class("mf")
    return Federation(mf(mf.Config(dim=stream.n_items)), (), config, DRAWS, stream=stream)


def with_scores(fed: Federation, scores: AnyArray, block: int) -> Progress:
    """A run about to end a block whose model gives exactly these scores: the item table is the identity."""
    progress = make_initial_progress(fed)
    for index in range(block + 1):
        begin_block(fed, progress, index)
    server = replace(progress.server, items=np.eye(fed.stream.n_items, dtype=np.float32))
    clients = DeviceState.from_private(np.array(scores, np.float32), took_part=np.ones(len(scores), bool))
    progress.server = progress.best_server = server
    progress.local_devices.clients = clients.with_snapshot(clients.copy())
    return progress


TWO_BLOCKS = stream_of(
    block_of(0, 6, [[0], [0, 1]], [[1], [2]], [[2], [3]]),
    block_of(1, 6, [[3], [], [0]], [[4], [], [1]], [[5], [], [2]], known=2),
)
FALLING = np.repeat(descending(6), 3, 0)


def scores_of(fed: Federation, progress: Progress) -> dict[str, Any]:
    return evaluate_block(fed, progress.best_server, progress.best_clients)[0]


def ranks_in(fed: Federation, progress: Progress, block: int, mask: Ragged) -> list[float]:
    on, learned = fed.stream.blocks[block], TrainedState(progress.server, progress.clients)
    result = evaluate_devices(fed, learned, on, "test", mask, build_evaluation_rules(fed, on, ["mrr"], [6]))
    return [round(1 / value, 9) for value in result.values["mrr@6"]]


def test_known_items_by_purpose_and_mask() -> None:
    fed = federation(TWO_BLOCKS)
    block = TWO_BLOCKS.blocks[1]

    def of_user_0(purpose: str, mask: str) -> list[int]:
        return sorted(build_ranking_mask(fed, block, purpose, mask).row(0).tolist())  # type: ignore[arg-type]

    assert of_user_0("valid", "block") == [3]
    assert of_user_0("test", "block") == [3, 4]
    assert of_user_0("valid", "history") == [0, 1, 2, 3]
    assert of_user_0("test", "history") == [0, 1, 2, 3, 4]


def test_items_of_earlier_blocks_compete_unless_history_is_masked() -> None:
    fed = federation(TWO_BLOCKS)
    progress = with_scores(fed, FALLING, 1)
    block = TWO_BLOCKS.blocks[1]
    # User 0 wants item 5 of 0..5: 3 and 4 are hidden, and with history 0, 1 and 2 as well. User 2 is new.
    assert ranks_in(fed, progress, 1, build_ranking_mask(fed, block, "test", "block")) == [4, 1]
    assert ranks_in(fed, progress, 1, build_ranking_mask(fed, block, "test", "history")) == [1, 1]


def test_an_unchanged_model_forgets_nothing_under_the_old_blocks_own_mask() -> None:
    random = np.random.default_rng(0)
    lists = [random.permutation(20).tolist() for _ in range(15)]
    first = [
        [element[:6] for element in lists],
        [element[6:7] for element in lists],
        [element[7:9] for element in lists],
    ]
    second = [
        [element[9:12] for element in lists],
        [element[12:13] for element in lists],
        [element[13:15] for element in lists],
    ]
    stream = stream_of(block_of(0, 20, *first), block_of(1, 20, *second, known=15))
    scores = random.normal(size=(15, 20))
    for u, entry in enumerate(lists):
        scores[u, entry[:9]] += 3  # a model that has learned block 0, its training items best of all
        scores[u, entry[:7]] += 3
    result = {}
    for mask in ("own", "current"):
        fed = federation(stream, old_block_mask=mask)
        before = scores_of(fed, with_scores(fed, scores, 0))["on_blocks"]
        after = scores_of(fed, with_scores(fed, scores, 1))["on_blocks"]
        result[mask] = (before[0], after[0])
    assert result["own"][0] == result["own"][1] > 0.9
    assert result["current"][0] == result["own"][0]
    assert result["current"][1] < 0.1


def test_new_and_returning_users_are_reported_apart() -> None:
    fed = federation(TWO_BLOCKS, metrics=["mrr", "recall"], k=[2])
    result = scores_of(fed, with_scores(fed, FALLING, 1))
    # User 0 (returning) finds item 5 at rank 4, user 2 (new) item 2 at rank 1; user 1 has nothing to find.
    assert result["users"] == 2
    assert result["returning"] == {"users": 1, "mrr@2": 0.0, "recall@2": 0.0}
    assert result["new"] == {"users": 1, "mrr@2": 1.0, "recall@2": 1.0}
    assert result["mrr@2"] == 0.5
    assert result["mask_history"]["mrr@2"] == 1.0


@pytest.mark.parametrize("sampled_negatives", [0, 2])
def test_the_run_and_its_controls_follow_hidden_items(sampled_negatives: int) -> None:
    # Both users' test items are 2 and 3, of which user 0 has 2 in training and user 1 in validation.
    stream = stream_of(block_of(0, 6, [[0, 2], [0]], [[1], [1, 2]], [[2, 3], [2, 3]]))
    result = {}
    for hidden in ("drop", "count"):
        fed = federation(stream, hidden_items=hidden, sampled_negatives=sampled_negatives, metrics=["recall"], k=[6])
        scores = scores_of(fed, with_scores(fed, np.repeat(descending(6), 2, 0), 0))
        controls = [entry["blocks"][0]["recall@6"] for _, entry in run_controls(fed) if "blocks" in entry]
        result[hidden] = [scores["recall@6"], scores["mask_history"]["recall@6"], *controls]
    assert set(result["drop"]) == {1.0}
    assert set(result["count"]) == {0.5}


def test_validation_follows_hidden_items_too() -> None:
    stream = stream_of(block_of(0, 6, [[0, 2], [0]], [[2, 1], [1]], [[3], [3]]))
    for hidden, expected in (("drop", 2.0), ("count", 1.5)):
        fed = federation(stream, hidden_items=hidden, select_by="recall@6")
        progress = with_scores(fed, np.repeat(descending(6), 2, 0), 0)
        progress.local_devices.membership = progress.local_devices.mask = None
        assert progress.local_devices.sum_validation(fed, progress.server, Broadcast())["recall@6"] == (
            expected,
            2,
        )


def test_sampled_negatives_are_untouched_in_any_block() -> None:
    fed = federation(TWO_BLOCKS, sampled_negatives=3)
    scores = FALLING.copy()
    scores[0] = [9, 9, 9, 9, 9, 0]  # user 0 touches every item in one block or the other
    progress = with_scores(fed, scores, 1)
    assert ranks_in(fed, progress, 1, nobody(3))[0] == 1


# Controls


def structured(**options: Any) -> Federation:
    data = load_interactions("synthetic:users=400,items=120,per_user=20,groups=6,seed=3")
    return federation(split(data, SplitConfig(kind="random")), k=[10], select_by="ndcg@10", **options)


def control(fed: Federation, make: Any) -> Evaluation:
    block = fed.stream.blocks[0]
    mask = build_ranking_mask(fed, block, "test", "block")
    return evaluate_ranking(
        make(fed, block), block.test, mask, fed.stream.user_keys, DRAWS, EvaluationRules(["ndcg", "auc"], [10])
    )


def reading(
    stream: BlockStream, read: str, backbone: dict[str, Any], parts: tuple[str, ...] | list[str] = ()
) -> Federation:
    values = {"backbone": backbone, "parts": [{"name": part} for part in parts], "evaluate": {"read": read}}
    config = validate_model(RunConfig, values, "the test")
    model, result, draws = build_components(config)
    return Federation(model, result, config, draws, stream=stream)


READERS = {
    "linear": ({"name": "tally"}, make_linear_scorer),  # reads the run's own lists
    "alone": ({"name": "lightgcn", "dim": 4}, make_alone_scorer),
}


@pytest.mark.parametrize("name", READERS)
def test_controls_read_what_the_run_reads_and_never_what_is_wanted(name: str) -> None:
    backbone, make = READERS[name]
    users = np.arange(2, dtype=np.int32)
    train: Lists = [[0, 1], [1, 2], [0, 1, 2, 3], [2, 3], [0, 3]]

    def scores(read: str, valid: Lists, test: Lists, model: dict[str, Any] = backbone) -> Floats:
        empty: Lists = [[]] * 3
        stream = stream_of(block_of(0, 6, train, valid + empty, test + empty))
        fed = reading(stream, read, model)
        return np.array(make(fed, fed.stream.blocks[0])(users))

    known = scores("known", [[2], [3]], [[3], [0]])
    assert (known != scores("train", [[2], [3]], [[3], [0]])).any(axis=1).all()
    assert np.array_equal(known, scores("known", [[2], [3]], [[5], [4]]))  # whatever is to be found
    both = [scores(read, [[2], [3]], [[3], [0]], {"name": "mf", "dim": 4}) for read in ("train", "known")]
    assert np.array_equal(*both)  # beside a model that reads nobody's items


@pytest.mark.parametrize(
    ("backbone", "parts", "expected"),
    [("mf", [], None), ("tally", [], "known"), ("lightgcn", [], "known"), ("mf", ["sharing"], "known")],
)
def test_a_run_says_what_it_reads_where_it_reads(backbone: str, parts: list[str], expected: str | None) -> None:
    fed = reading(TWO_BLOCKS, "known", {"name": backbone}, parts)
    assert resolve_read_setting(fed) == expected
    assert (build_test_block(fed, TWO_BLOCKS.blocks[1]) is TWO_BLOCKS.blocks[1]) == (expected is None)


def test_popular_beats_random_and_linear_beats_popular_where_there_is_structure() -> None:
    fed = structured()
    results = [control(fed, make) for make in (make_random_scorer, make_popular_scorer, make_linear_scorer)]
    chance, popular, linear = (entry.compute_means() for entry in results)
    assert near(results[0].values["auc"], 0.5, 0.02)
    assert popular["ndcg@10"] > 2 * chance["ndcg@10"]
    assert linear["ndcg@10"] > 1.3 * popular["ndcg@10"]
    assert linear["auc"] > popular["auc"] > chance["auc"]


def test_linear_weights_solve_the_ridge_problem_with_zero_diagonal() -> None:
    random = np.random.default_rng(1)
    lists = Ragged.from_lists([random.permutation(8)[:3].tolist() for _ in range(40)])
    gram = compute_item_gram(lists, 8)
    chosen = np.zeros((40, 8))
    chosen[lists.rows(), lists.ids] = 1
    np.testing.assert_array_equal(gram, chosen.T @ chosen)
    weights = solve_linear_weights(gram.copy(), 5.0).astype(np.float64)
    assert (np.diag(weights) == 0).all()
    slope = (gram + 5 * np.eye(8)) @ weights - gram  # zero but for the multipliers of the diagonal
    np.testing.assert_allclose(slope - np.diag(np.diag(slope)), 0, atol=1e-5)


def test_linear_scores_by_hand() -> None:
    weights = solve_linear_weights(np.array([[2.0, 1.0], [1.0, 2.0]]), 2.0)
    np.testing.assert_allclose(weights, [[0, 0.25], [0.25, 0]], rtol=1e-6)


def test_popularity_counts_users_up_to_the_block_and_nothing_later() -> None:
    fed = federation(TWO_BLOCKS)
    counts = [make_popular_scorer(fed, block)(np.array([1], np.int32))[0].tolist() for block in TWO_BLOCKS.blocks]
    assert counts == [[2, 1, 0, 0, 0, 0], [3, 1, 0, 1, 0, 0]]


def test_popularity_counts_a_user_who_comes_back_to_an_item_once() -> None:
    stream = stream_of(
        block_of(0, 3, [[0], [1]], [[], []], [[2], [2]]),
        block_of(1, 3, [[0], [2]], [[]] * 2, [[1], [0]], known=2),
    )
    counts = make_popular_scorer(federation(stream), stream.blocks[1])(np.array([0], np.int32))
    assert counts[0].tolist() == [1, 1, 1]


def test_the_random_control_follows_user_and_block_only() -> None:
    fed = structured()
    block = fed.stream.blocks[0]
    together = make_random_scorer(fed, block)(np.array([4, 5, 6], np.int32))
    alone = make_random_scorer(fed, block)(np.array([5], np.int32))
    np.testing.assert_array_equal(together[1], alone[0])
    later = make_random_scorer(fed, replace(block, index=1))(np.array([5], np.int32))
    assert (alone != later).mean() > 0.99


def test_controls_are_ranked_among_the_runs_own_candidates() -> None:
    full, sampled = (dict(run_controls(structured(metrics=["hr"], sampled_negatives=n))) for n in (0, 19))
    assert set(full) == {"random", "popular", "alone", "linear"}
    assert 0.05 < full["random"]["mean"]["hr@10"] < 0.3
    assert sampled["random"]["mean"]["hr@10"] > 0.45  # 10 of 20, more with several wanted items
    assert all(sampled[name]["mean"]["hr@10"] > full[name]["mean"]["hr@10"] for name in full)


def test_a_control_that_is_too_costly_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "MOST_LINEAR_ITEMS", 100)
    result = dict(run_controls(structured(metrics=["hr"])))
    assert result["linear"] == {"skipped": "more than 100 items"}
    assert "mean" in result["popular"]


def test_means_over_blocks_leave_out_the_base_block() -> None:
    blocks = [
        {"users": 9, "hr@5": 1.0, "auc": 0.9},
        {"users": 5, "hr@5": 0.2, "auc": 0.5},
        {"users": 0, "hr@5": 0.0, "auc": 0.0},  # nobody was tested: says nothing
        {"users": 1, "hr@5": 0.4, "auc": 0.7},
    ]
    assert average_incremental_blocks(blocks) == {"hr@5": pytest.approx(0.3), "auc": pytest.approx(0.6)}
    assert average_incremental_blocks(blocks[:1]) == {"hr@5": 1.0, "auc": 0.9}
