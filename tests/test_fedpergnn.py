"""FedPerGNN: its formulas, what a matcher is told and tells, who sees that, and what covers an upload (spec A.7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import contracts
from helpers.oracle import (
    AttentionDevice,
    averaged,
    catalogue,
    cohort,
    federate,
    heads_of,
    make_backbone,
    make_block,
    make_stream,
    near_of,
    slow_round,
    started,
    train_once,
)
from helpers.wiretap import tap_server
from tacita.core.config import RunConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, CohortView, Floats, Ragged, ServerState
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, run_round
from tacita.federation.scoring import DeviceScorer
from tacita.live.settings import check_live_settings
from tacita.messages import SparseRows, Upload
from tacita.methods import RunContext, build_parts, find_part_class, resolve_config
from tacita.methods.distillation.neighbours import MatcherState
from tacita.models.scoring import score_catalogue
from tacita.round import registry
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.round.registry import wrap_run

TRAIN = [[0, 1, 2], [1, 2, 3], [2, 4], [], [1, 2, 5, 0], [9], [2, 1]]
MATCHER = "neighbours"


def stream() -> BlockStream:
    return make_stream(make_block(0, 12, TRAIN))


def federation(
    specs: list[dict[str, Any]] | None = None, data: BlockStream | None = None, **options: Any
) -> Federation:
    train = options.pop("train", {})
    plain = federate(data or stream(), make_backbone("fedpergnn", **options), **{"batch_size": 8, **train})
    world = RunContext(plain.backbone, plain.draws, plain.config.train)
    parts = build_parts([{"name": MATCHER}] if specs is None else specs, world)
    return wrap_run(replace(plain, parts=parts))


def after_rounds(fed: Federation, rounds: int) -> Progress:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress


def scored(fed: Federation, progress: Progress) -> Floats:
    down, keys = fed.broadcast_serving(progress.server), fed.stream.user_keys
    scorer = DeviceScorer(fed, progress.server, progress.clients, fed.stream.blocks[0], keys, down, "test")
    return scorer(np.arange(len(TRAIN), dtype=np.int32))


# the model


@pytest.mark.parametrize("output", ["product", "linear"])
def test_scores_are_those_of_the_printed_formulas_user_by_user(output: str) -> None:
    fed = federation(output=output)
    progress = after_rounds(fed, 2)
    got, view, everything = scored(fed, progress), cohort(fed, progress), list(range(12))
    assert sum(len(near_of(view, u)) for u in range(len(view.user))) > 8
    for u, user in enumerate(view.user):
        device = AttentionDevice(fed.backbone, progress.server.items, view.private[u : u + 1], progress.server.heads)
        device.likes, device.near = [TRAIN[user]], [near_of(view, u)]
        with torch.no_grad():
            want = device.logits([0] * 12, everything).numpy()
        np.testing.assert_allclose(got[user], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stepper", ["auto", "autograd"])
@pytest.mark.parametrize("optimiser", [{}, {"optimiser": "lazy-adam", "weight_decay": 0.2}], ids=["sgd", "lazy-adam"])
def test_a_round_with_neighbours_is_what_training_clients_one_by_one_gives(
    optimiser: dict[str, Any], stepper: str
) -> None:
    fed = federation(train={"local_epochs": 2, "stepper": stepper, **optimiser}, lr=0.02)
    progress = after_rounds(fed, 2)
    view = cohort(fed, progress)
    slow, trained = slow_round(view, fed.backbone, fed.config.train, fed.draws), train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    np.testing.assert_allclose(after.items, slow.items, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=1e-5, atol=1e-5)
    for name, head in after.heads.items():
        np.testing.assert_allclose(head, slow.heads[name], rtol=1e-5, atol=1e-5)
        assert np.abs(head - progress.server.heads[name]).max() > 1e-6, f"nothing reaches {name}"


def test_the_linear_output_ranks_alike_for_everybody_and_the_product_does_not() -> None:
    for output, alike in (("linear", True), ("product", False)):
        fed = federation(output=output)
        result = scored(fed, after_rounds(fed, 3))
        shifted = result - result.mean(1, keepdims=True)
        assert (np.ptp(shifted, axis=0).max() < 1e-4) == alike
        assert (len(np.unique(np.argsort(result.round(4), axis=1, kind="stable"), axis=0)) == 1) == alike


def test_no_more_neighbours_are_read_than_the_model_says() -> None:
    """Six others have item 0, in one order; the model reads the first `most` of them."""
    backbone = make_backbone("fedpergnn", most=2)
    view = cohort(fed := federate(make_stream(make_block(0, 3, [[0, 1]])), backbone), started(fed))
    vectors = np.random.default_rng(0).normal(size=(6, 6)).astype("f4")
    sent = Ragged(np.array([0, 6]), np.zeros(6, np.int32), {"vector": vectors})
    lists = backbone.list_context_items(replace(view, per_client={MATCHER: sent}))
    at = lists.ids.tolist().index(0)
    assert np.array_equal(lists.values["neighbours"][at], vectors[:2])
    assert lists.values["count"].tolist() == [2.0 if item == 0 else 0.0 for item in lists.ids]


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_attention_stays_finite_whatever_it_sees(size: float) -> None:
    backbone = make_backbone("fedpergnn")
    rng = np.random.default_rng(4)
    heads = {k: (size * rng.normal(size=shape)).astype("f4") for k, shape in backbone.list_head_shapes().items()}
    private, items = (rng.normal(size=(n, 6)).astype("f4") for n in (2, 5))
    near = {"neighbours": rng.normal(size=(3, 3, 6)).astype("f4"), "count": np.array([3, 0, 1], np.float32)}
    lists = replace(Ragged.from_lists([[0, 1, 4], []]), values=near)
    assert np.isfinite(score_catalogue(backbone, private, heads, items, lists)).all()


# the matcher


def holders(matches: MatcherState, number: int) -> set[int]:
    return {int(matches.names[k]) for k in matches.holder[matches.number == number]}


def sent_rows(lists: list[list[int]]) -> SparseRows:
    result = Ragged.from_lists(lists)
    return SparseRows(result.rows(), result.ids, np.zeros((len(result.ids), 0), np.float32))


def crowd(n: int = 40, every_item: int = 6) -> tuple[MatcherState, list[list[int]]]:
    """People whose vector says who they are."""
    rng = np.random.default_rng(1)
    lists = [sorted(rng.choice(every_item, rng.integers(1, every_item), replace=False).tolist()) for _ in range(n)]
    names = derive_keys(f"p{k}" for k in range(n))
    vectors = np.repeat(np.arange(n, dtype=np.float32)[:, None], 2, axis=1)
    return MatcherState.empty(2).record_uploads(names, vectors, sent_rows(lists), Draws(1).public("test")), lists


@pytest.mark.parametrize("most", [1, 5, 100])
def test_neighbours_are_others_who_have_the_item_each_once_and_never_oneself(most: int) -> None:
    matches, lists = crowd()
    order = np.random.default_rng(2).permutation(40)
    neighbours = matches.find_neighbours(derive_keys(f"p{k}" for k in order), most)
    for row, me in enumerate(order):
        ids, who = (
            neighbours.row(row),
            neighbours.values["vector"][neighbours.ptr[row] : neighbours.ptr[row + 1], 0].astype(int),
        )
        assert set(ids.tolist()) <= set(lists[me])
        for item in lists[me]:
            near, having = who[ids == item].tolist(), {k for k in range(40) if item in lists[k]} - {me}
            assert me not in near
            assert len(set(near)) == len(near) == min(most, len(having))
            assert set(near) <= having


def test_everybody_is_chosen_about_as_often_and_by_a_new_draw_each_time() -> None:
    """Ten people with one item, two neighbours each: each of 9 others has the share 2 / 9, sd 0.02 in 400 draws."""
    names = derive_keys(f"p{k}" for k in range(10))
    vectors = np.arange(10, dtype=np.float32)[:, None]
    observations = np.zeros(10)
    for k in range(400):
        result = MatcherState.empty(1).record_uploads(names, vectors, sent_rows([[3]] * 10), Draws(1).public("test", k))
        observations[result.find_neighbours(names[:1], 2).values["vector"][:, 0].astype(int)] += 1
    assert observations[0] == 0
    assert np.abs(observations[1:] / 400 - 2 / 9).max() < 0.08


def test_matcher_uses_the_latest_upload_of_a_client() -> None:
    matches, lists = crowd()
    key, names = Draws(1).public("again"), derive_keys(["p3", "new"])
    later = matches.record_uploads(names, np.full((2, 2), 77, np.float32), sent_rows([[5], [0, 5]]), key)
    assert len(later.names) == 41
    assert np.array_equal(np.sort(later.names), later.names)
    assert int(names[0]) not in holders(later, 0)
    assert {int(entry) for entry in names} <= holders(later, 5)
    for item in range(1, 5):
        assert holders(later, item) == {
            int(element) for element in derive_keys(f"p{k}" for k in range(40) if item in lists[k])
        } - {int(names[0])}
    for name, vector in zip(later.names, later.vectors, strict=True):
        if name not in names:
            assert vector[0] == matches.vectors[matches.names == name][0, 0]


def test_no_neighbours_before_the_first_upload() -> None:
    fed = federation(train={"participation": {"kind": "fraction", "rate": 0.3}})
    progress = started(fed)
    assert len(fed.broadcast_serving(progress.server).per_client(fed.stream.user_keys)[MATCHER].ids) == 0
    model = fed.learner.count_model_bytes(progress.server)
    progress.server, report = run_round(fed, progress.server, progress.devices)
    assert report.bytes_down == model
    known = set(progress.server.parts[MATCHER]["names"].tolist())
    assert len(known) == report.clients == 2
    own = fed.broadcast_serving(progress.server).per_client(fed.stream.user_keys)[MATCHER]
    assert {int(fed.stream.user_keys[u]) for u in range(len(TRAIN)) if own.ptr[u + 1] > own.ptr[u]} <= known
    assert np.isfinite(scored(fed, progress)).all()


def test_a_client_without_neighbours_trains_and_is_scored_as_if_there_were_no_matcher() -> None:
    """User 5 alone has item 9."""
    fed = federation()
    alone = federation([])
    progress = after_rounds(fed, 2)
    bare = replace(progress, server=replace(progress.server, parts={}))
    assert len(near_of(cohort(fed, progress), 4)) == 0
    entry, other = train_once(fed, progress, np.array([4])), train_once(alone, bare, np.array([4]))
    assert np.array_equal(entry.local.private, other.local.private)
    assert np.array_equal(entry.upload.values["rows"].value, other.upload.values["rows"].value)
    assert np.array_equal(scored(fed, progress)[5], catalogue(fed.backbone, progress, fed.stream.blocks[0])[5])
    assert not np.array_equal(scored(fed, progress)[0], catalogue(fed.backbone, progress, fed.stream.blocks[0])[0])


def test_vectors_that_arrive_are_those_that_others_had_after_they_trained_last() -> None:
    fed = federation(train={"rounds": 3})
    progress = after_rounds(fed, 1)
    sent = progress.clients.private.copy()
    view = cohort(fed, progress)
    for u, user in enumerate(view.user):
        for item, vectors in near_of(view, u).items():
            others = [k for k, likes in enumerate(TRAIN) if item in likes and k != user]
            assert {vector.tobytes() for vector in vectors} <= {sent[k].tobytes() for k in others}
            assert len(vectors) == min(3, len(others))


@pytest.mark.parametrize("every", [1, 3])
def test_clients_upload_to_the_matcher_at_intervals(every: int) -> None:
    fed = federation([{"name": MATCHER, "every": every}])
    progress, report = started(fed), []
    for _ in range(6):
        before = progress.server.parts[MATCHER]["vectors"]
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        report.append(not np.array_equal(before, progress.server.parts[MATCHER]["vectors"]))
    assert report == [k % every == 0 for k in range(6)]


def test_a_new_block_begins_without_neighbours() -> None:
    fed = federation(data=contracts.two_blocks(), train={"rounds": 2})
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    assert len(progress.server.parts[MATCHER]["names"]) == 10
    end_block(fed, progress)
    begin_block(fed, progress, 1)
    assert len(progress.server.parts[MATCHER]["names"]) == 0


# who sees what


def test_the_matcher_gets_numbers_that_only_clients_can_read() -> None:
    fed = federation(data=make_stream(make_block(0, 50, [[0, 1, 2, 3], [1, 2, 3, 4], [40, 3, 2]])))
    progress = after_rounds(fed, 1)
    matcher_state = MatcherState(**progress.server.parts[MATCHER])
    lists = {
        int(name): set(matcher_state.number[matcher_state.holder == k].tolist())
        for k, name in enumerate(matcher_state.names)
    }
    for user, likes in enumerate([[0, 1, 2, 3], [1, 2, 3, 4], [40, 3, 2]]):
        numbers = lists[int(fed.stream.user_keys[user])]
        assert len(numbers) == len(likes)
        assert numbers != set(likes)
    raw = fed.broadcast_serving(progress.server).per_client(fed.stream.user_keys)[MATCHER]
    opened = fed.decode_lists({MATCHER: raw}, 50)[MATCHER]
    assert set(opened.row(0).tolist()) == {1, 2, 3}
    assert set(raw.row(0).tolist()) != {1, 2, 3}
    part, secret = fed.parts[0], replace(fed.parts[0].context, draws=Draws(3, "of the devices"))
    assert not np.array_equal(part._draw_pseudonyms(50), type(part)(part.config, secret)._draw_pseudonyms(50))  # type: ignore[attr-defined]


def test_fields_name_their_audience() -> None:
    fed = federation()
    by = {field.name: (field.seen, field.by) for field in fed.fields(started(fed).server, Question("round"))}
    assert by["neighbours.vector"] == by["neighbours.items"] == ("each", "matcher")
    assert {who for name, who in by.items() if not name.startswith(MATCHER)} == {("summed", "server")}


def test_matcher_data_reaches_no_server_part(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [{"name": MATCHER}, {"name": "cover"}]
    tap = tap_server(monkeypatch, specs, "fedpergnn")
    assert tap.leaks() == []
    assert not [path for path, _ in tap.arrays if MATCHER in path]
    monkeypatch.setattr(registry, "_WRAPPERS", [])  # one party: everything is heard
    assert any("holds a private vector" in leak for leak in tap_server(monkeypatch, specs, "fedpergnn").leaks())


def test_matcher_sees_only_its_fields_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    observations: list[tuple[set[str], set[str], set[str]]] = []
    cls = find_part_class(MATCHER)
    plain = cls.server_step

    def step(self: Any, before: ServerState, server: ServerState, total: Any) -> ServerState:
        observations.append((set(server.parts), set(total.sums), set(total.each)))
        return plain(self, before, server, total).with_items(0 * server.items)

    monkeypatch.setattr(cls, "server_step", step)
    fed = federation([{"name": "proximal"}, {"name": MATCHER}])
    progress = after_rounds(fed, 2)
    assert observations == [({MATCHER}, set(), {"neighbours.vector", "neighbours.items"})] * 2
    assert np.abs(progress.server.items).max() > 0
    assert progress.server.parts.keys() == {"proximal", MATCHER}


def test_it_is_refused_live_and_without_its_model_in_a_sentence() -> None:
    with pytest.raises(
        TacitaError, match="part 'neighbours' is for the lab: it tells a matcher what no server may see"
    ):
        check_live_settings(resolve_config({"method": "fedpergnn"}, "x"))
    check_live_settings(RunConfig(backbone={"name": "fedpergnn"}))
    with pytest.raises(TacitaError, match="backbone 'mf' does not read; use backbone 'fedpergnn'"):
        contracts.federate_parts([{"name": MATCHER}], "mf")


def test_the_preset_brings_the_settings_of_the_paper() -> None:
    config = resolve_config({"method": "fedpergnn"}, "x")
    assert config.backbone["name"] == "fedpergnn"
    assert config.train.optimiser == "lazy-adam"
    assert (config.train.local_epochs, config.train.participation.rate) == (2, 0.1)


# what covers an upload


def covered(**options: float) -> tuple[CohortView, Upload, Upload]:
    """An upload before and after its cover."""
    fed = federate(make_stream(make_block(0, 400, [[0, 1, 2], [5, 6], [7, 8, 9, 10]])), make_backbone("fedpergnn"))
    (part,) = build_parts([{"name": "cover", **options}], RunContext(fed.backbone, fed.draws, fed.config.train))
    progress = started(fed)
    view, plain = cohort(fed, progress), train_once(fed, progress).upload
    return view, plain, part.encode(view, plain)[0]


def test_without_options_an_upload_leaves_as_it_is() -> None:
    _, plain, sent = covered()
    assert sent is plain


def test_pseudo_items_are_others_and_look_like_the_clients_own() -> None:
    """Some 200 rows a client: means of columns lie within 4 standard errors of its own, spreads within 30 %."""
    _, plain, sent = covered(pseudo_items=300)
    before, after = plain.values["rows"], sent.values["rows"]
    assert isinstance(before, SparseRows)
    assert isinstance(after, SparseRows)
    keys = after.client.astype(np.int64) * 400 + after.item
    assert (np.diff(keys) > 0).all()
    own_values = np.isin(keys, before.client.astype(np.int64) * 400 + before.item)
    order = np.lexsort((before.item, before.client))
    assert np.array_equal(after.value[own_values], before.value[order])
    for client in range(3):
        real, result = before.value[before.client == client], after.value[~own_values & (after.client == client)]
        assert 150 < len(result) <= 300
        np.testing.assert_array_less(np.abs(result.mean(0) - real.mean(0)), 4 * real.std(0) / 150**0.5)
        np.testing.assert_allclose(result.std(0), real.std(0), rtol=0.3)
    assert {k: v for k, v in sent.values.items() if k != "rows"} == {
        k: v for k, v in plain.values.items() if k != "rows"
    }


def test_a_long_move_is_cut_and_a_short_one_is_not() -> None:
    _, plain, sent = covered(clip=0.05)
    norms = plain.norms()
    assert norms.min() < 0.05 < norms.max()
    np.testing.assert_allclose(sent.norms(), np.minimum(norms, 0.05), rtol=1e-5)
    factor = np.minimum(1, 0.05 / norms)
    np.testing.assert_allclose(heads_of(sent)["w6"], factor[:, None, None] * heads_of(plain)["w6"], rtol=1e-5)


def test_noise_is_laplace_on_every_number_and_no_two_alike() -> None:
    """Of scale b: mean 0, mean size b, standard deviation b sqrt 2."""
    _, plain, sent = covered(noise=0.5)
    drawn = [sent.values[name].value - plain.values[name].value for name in plain.values]
    flat = np.concatenate([entry.ravel() for entry in drawn])
    assert len(np.unique(flat)) > 0.95 * len(flat)
    assert abs(flat.mean()) < 0.1
    assert np.abs(flat).mean() == pytest.approx(0.5, rel=0.1)
    assert flat.std() == pytest.approx(0.5 * 2**0.5, rel=0.1)


def test_matcher_uploads_are_not_noised() -> None:
    specs = [{"name": MATCHER}, {"name": "cover", "noise": 0.5, "clip": 1e-3, "pseudo_items": 5}]
    progress = after_rounds(federation(specs), 1)
    matcher_state = MatcherState(**progress.server.parts[MATCHER])
    assert {vector.tobytes() for vector in matcher_state.vectors} <= {
        entry.tobytes() for entry in progress.clients.private
    }


def test_noise_widens_what_may_be_in_a_field() -> None:
    def most(**options: float) -> dict[str, float]:
        fed = federation([{"name": "cover", **options}])
        return {field.name: field.most for field in fed.fields(started(fed).server, Question("round"))}

    assert most(noise=2.0) == {name: value + 120 for name, value in most().items()}
