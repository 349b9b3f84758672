"""What each model computes: steps worked by hand, starting values, scores, growth, and what leaves a client."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from helpers.oracle import (
    TRAINED,
    averaged,
    catalogue,
    cohort,
    federate,
    heads_of,
    make_backbone,
    make_block,
    make_stream,
    started,
    train_once,
)
from tacita.core.config import TrainConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import AnyArray, BlockStream, Floats, Ragged, ServerState
from tacita.federation.rounds import begin_block, run_block, run_round
from tacita.learn.rows import apply_total
from tacita.messages import SparseRows, Spec, Upload, add_upload, empty_total, make_accumulator
from tacita.models import Backbone, Context
from tacita.models.scoring import score_catalogue
from tacita.round.plan import Federation
from tacita.round.question import Question

DRAWS = Draws(5)
STEPPERS = ["fused", "autograd"]
every_backbone = pytest.mark.parametrize("name", TRAINED)


def one_step(backbone: Backbone, private: list[float], q: float, n_items: int, stepper: str) -> tuple[AnyArray, float]:
    """One client with one positive, item 0, in one batch: its private vector and row after the step."""
    fed = federate(make_stream(make_block(0, n_items, [[0]])), backbone, negatives=0, stepper=stepper)
    progress = started(fed)
    progress.server.items[0] = q
    progress.clients.private[0] = private
    trained = train_once(fed, progress)
    return trained.local.private[0], q + float(trained.upload.values["rows"].value[0, 0])


# steps by hand


@pytest.mark.parametrize("stepper", STEPPERS)
def test_an_mf_step_moves_both_sides_from_their_old_values(stepper: str) -> None:
    """sigma(0.5) - 1 = -0.377541; p' = 1 + 0.1 * 0.377541 * 0.5; q' = 0.5 + 0.1 * 10 * 0.377541 * 1."""
    (p,), q = one_step(make_backbone("mf", dim=1, lr=0.1), [1.0], 0.5, 10, stepper)
    assert p == pytest.approx(1.018877, abs=1e-6)
    assert q == pytest.approx(0.877541, abs=1e-6)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_a_pfedrec_step_moves_the_row_after_a_second_look(stepper: str) -> None:
    """w' = 1.018877, b' = 0.037754; then s = 1.018877 * 0.5 + 0.037754 = 0.547192, sigma = 0.633484 and
    q' = 0.5 + 0.1 * 10 * (1 - 0.633484) * 1.018877. From the old values it would be 0.877541."""
    (w, b), q = one_step(make_backbone("pfedrec", dim=1, lr=0.1, lr_eta=1.0), [1.0, 0.0], 0.5, 10, stepper)
    assert w == pytest.approx(1.018877, abs=1e-6)
    assert b == pytest.approx(0.037754, abs=1e-6)
    assert q == pytest.approx(0.873435, abs=1e-6)
    assert abs(q - 0.877541) > 0.004


@pytest.mark.parametrize("stepper", STEPPERS)
def test_an_ncf_step_moves_everything_from_the_old_values(stepper: str) -> None:
    """s = 2 * 0.25 + 1 * 0.5 - 0.5 = 0.5, residual -0.377541; lr 0.1, lr_eta 2, ten items. Rates: layer 0.1, p 0.2,
    row 2. p' = 0.25 + 0.2 * 0.377541 * 2; w_p' = 2 + 0.1 * 0.377541 * 0.25; w_q' = 1 + 0.1 * 0.377541 * 0.5;
    b' = -0.5 + 0.1 * 0.377541; q' = 0.5 + 2 * 0.377541 * 1."""
    backbone = make_backbone("ncf", dim=1, lr=0.1, lr_eta=2.0)
    private, q = one_step(backbone, [0.25, 2.0, 1.0, -0.5], 0.5, 10, stepper)
    np.testing.assert_allclose(private, [0.401016, 2.009439, 1.018877, -0.462246], atol=1e-6)
    assert q == pytest.approx(1.255081, abs=1e-6)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_golden_round_of_two_clients_and_three_items(stepper: str) -> None:
    """MF with d = 1, lr 0.1, so the table's rate is 0.3; q = (0.5, 0, -0.5); one negative per positive.

    sigma(0.5) = 0.622459, sigma(1) = 0.731059, sigma(-x) = 1 - sigma(x).
    A: p = 1, likes 0 and 1, so item 2 is its negative, twice.
      logits 0.5, 0, -0.5, -0.5; residuals / 4: -0.0943852, -0.125, +0.0943852, +0.0943852
      p' = 1 - 0.1 * (-0.0943852 * 0.5 + 2 * 0.0943852 * -0.5) = 1.0141578
      rows move by -0.3 * 1 * residuals: 0: +0.0283156, 1: +0.0375, 2: -0.0566311
    B: p = 2, likes 1 and 2, so item 0 is its negative, twice.
      logits 0, -1, 1, 1; residuals / 4: -0.125, -0.1827646, +0.1827646, +0.1827646
      p' = 2 - 0.1 * (-0.1827646 * -0.5 + 2 * 0.1827646 * 0.5) = 1.9725853
      rows move by -0.3 * 2 * residuals: 0: -0.2193176, 1: +0.075, 2: +0.1096588
    The table moves by half the sum: 0: -0.0955010, 1: +0.05625, 2: +0.0265138.
    Up: three rows of one number and one id, 24 bytes each. Down: three rows, 12 bytes.
    """
    stream = make_stream(make_block(0, 3, [[0, 1], [1, 2]]))
    fed = federate(stream, make_backbone("mf", dim=1, lr=0.1), negatives=1, stepper=stepper)
    progress = started(fed)
    progress.server.items[:, 0] = [0.5, 0.0, -0.5]
    progress.clients.private[:, 0] = [1.0, 2.0]
    progress.server, report = run_round(fed, progress.server, progress.devices)
    after = progress.server
    np.testing.assert_allclose(progress.clients.private[:, 0], [1.0141578, 1.9725853], atol=1e-6)
    np.testing.assert_allclose(after.items[:, 0], [0.4044990, 0.05625, -0.4734862], atol=1e-6)
    assert (after.round, report.clients, report.bytes_up, report.bytes_down) == (1, 2, 24.0, 12.0)


# the federated mean


def test_a_row_moved_by_one_of_four_clients_moves_by_a_quarter() -> None:
    server = ServerState(np.zeros((3, 2), np.float32), {})
    row = SparseRows(np.array([0], np.int32), np.array([1], np.int32), np.ones((1, 2), np.float32))
    only_the_first = Upload({"rows": row}, np.ones(4), np.arange(4, dtype=np.uint64))
    specs = (Spec("rows", (3, 2)),)
    total = add_upload(empty_total(specs), only_the_first, specs)
    assert apply_total(server, total, TrainConfig(), 4.0).items.tolist() == [[0, 0], [0.25, 0.25], [0, 0]]


@pytest.mark.parametrize("stepper", STEPPERS)
@every_backbone
def test_twice_the_items_doubles_the_step_of_a_row_and_no_other(name: str, stepper: str) -> None:
    backbone = make_backbone(name, dim=3, item_lr_scale="items")
    if stepper == "fused" and backbone.affine_kind is None:
        pytest.skip("no fused step")
    moved = []
    for n_items in (10, 20):
        fed = federate(make_stream(make_block(0, n_items, [[0, 1]])), backbone, negatives=0, stepper=stepper)
        trained = train_once(fed, progress := started(fed))
        moved.append((trained.upload.values["rows"].value, trained.local.private - progress.clients.private))
    np.testing.assert_allclose(moved[1][0], 2 * moved[0][0], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(moved[1][1], moved[0][1])
    assert np.abs(moved[0][0]).max() > 1e-3


@every_backbone
def test_numbering_the_users_differently_gives_the_same_table(name: str) -> None:
    lists = [[0, 3, 5], [1], [2, 4, 6, 7], [0, 1], [5, 6]]
    order = np.array([3, 1, 4, 0, 2])
    stream = make_stream(make_block(0, 9, lists))
    other = make_stream(make_block(0, 9, [lists[k] for k in order]))
    other = replace(other, user_keys=stream.user_keys[order], user_ids=tuple(stream.user_ids[k] for k in order))
    observations = []
    for candidate in (stream, other):
        fed = federate(candidate, make_backbone(name), batch_size=6)
        progress = started(fed)
        for _ in range(2):
            progress.server, _ = run_round(fed, progress.server, progress.devices)
        observations.append((progress.server.items, progress.clients.private))
    np.testing.assert_allclose(observations[1][0], observations[0][0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(observations[1][1], observations[0][1][order], rtol=1e-5, atol=1e-6)


@every_backbone
def test_a_round_draws_four_negatives_per_positive_and_may_draw_a_validation_item(name: str) -> None:
    """Two positives of six items, items 4 and 5 held out: the rows a client sends never lack its positives."""
    stream = make_stream(make_block(0, 6, [[0, 1]], valid=[[4]], test=[[5]]))
    fed = federate(stream, make_backbone(name))
    progress, observations = started(fed), set()
    for round in range(12):
        trained = train_once(fed, replace(progress, server=replace(progress.server, round=round)))
        assert trained.local.label.tolist() == [1.0] * 2 + [0.0] * 8
        assert {0, 1} <= set(trained.upload.values["rows"].item.tolist())
        drawn = set(trained.local.item[2:].tolist())
        assert not drawn & {0, 1}
        observations |= drawn
    assert observations == {2, 3, 4, 5}


# how models start


def big_start(name: str, **options: Any) -> tuple[Floats, Floats]:
    """Rows of 400 items and vectors of 300 users, 32 wide."""
    backbone = make_backbone(name, dim=32, **options)
    keys = derive_keys(f"one{k}" for k in range(400))
    return backbone.init_items(DRAWS, keys), backbone.init_private(DRAWS, keys[:300])


def test_mf_starts_as_narrow_normals_everybody_different() -> None:
    """12,800 normals: the standard error of the mean is 0.009 sd, of the standard deviation 0.6 %."""
    items, private = big_start("mf", init_std=0.01)
    for candidate in (items, private):
        assert candidate.dtype == np.float32
        assert abs(candidate.mean()) < 4e-4
        assert candidate.std() == pytest.approx(0.01, rel=0.03)
        assert len(np.unique(candidate, axis=0)) == len(candidate)
        assert abs(np.corrcoef(candidate[:, 0], candidate[:, 1])[0, 1]) < 0.2


@pytest.mark.parametrize("name", ["pfedrec", "ncf"])
def test_rows_of_pfedrec_and_ncf_start_as_standard_normals(name: str) -> None:
    items, _ = big_start(name)
    assert abs(items.mean()) < 0.04
    assert items.std() == pytest.approx(1.0, rel=0.03)
    assert np.mean(np.abs(items) < 1.959964) == pytest.approx(0.95, abs=0.01)
    assert len(np.unique(items, axis=0)) == len(items)


def test_all_pfedrec_clients_start_from_one_uniform_score_function() -> None:
    _, private = big_start("pfedrec")
    assert (private == private[0]).all()
    assert np.abs(private).max() <= 1 / np.sqrt(32)
    assert np.abs(private[0]).max() > 0.8 / np.sqrt(32)
    assert private[0].min() < 0 < private[0].max()


def test_all_ncf_clients_start_from_one_vector_and_one_uniform_layer() -> None:
    _, private = big_start("ncf")
    assert (private == private[0]).all()
    p, layer = private[0, :32], private[0, 32:]
    assert len(layer) == 65
    assert np.abs(layer).max() <= 1 / np.sqrt(64)
    assert 0.6 < p.std() < 1.4


def test_a_shared_ncf_layer_starts_as_the_private_one_would() -> None:
    apart, shared = make_backbone("ncf"), make_backbone("ncf", share_mlp=True)
    keys = derive_keys(["a"])
    heads = shared.init_heads(DRAWS)
    vector = np.concatenate([shared.init_private(DRAWS, keys)[0], heads["w"], heads["b"]])
    assert np.array_equal(vector, apart.init_private(DRAWS, keys)[0])


@every_backbone
def test_a_start_follows_the_key_and_the_seed_not_the_number(name: str) -> None:
    backbone = make_backbone(name)
    keys = derive_keys(f"one{k}" for k in range(30))
    order = np.random.default_rng(0).permutation(30)
    for make in (backbone.init_items, backbone.init_private):
        result = make(DRAWS, keys)
        assert np.array_equal(make(DRAWS, keys[order]), result[order])
        assert np.array_equal(make(DRAWS, keys[:7]), result[:7])
        assert not np.array_equal(make(Draws(6), keys), result)


# how models score


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in TRAINED), ("ncf", {"share_mlp": True})], ids=str
)
def test_scoring_the_catalogue_is_scoring_every_pair(name: str, options: dict[str, Any]) -> None:
    backbone = make_backbone(name, **options)
    rng = np.random.default_rng(1)
    private = rng.normal(size=(7, backbone.private_width)).astype(np.float32)
    items = rng.normal(size=(11, backbone.item_width)).astype(np.float32)
    heads = {k: rng.normal(size=shape).astype(np.float32) for k, shape in backbone.list_head_shapes().items()}
    lists = Ragged.from_lists([[0, 10], [3], [], [0, 1, 2], [4], [5, 6, 7, 8], [9]]) if backbone.reads_context else None
    got = score_catalogue(backbone, private, heads, items, lists)
    repeated = {k: np.stack([v] * 11) for k, v in heads.items()}
    for u in range(7):
        own_values = None if lists is None else lists.take(np.full(11, u))
        inside = None if own_values is None else own_values.holds(np.arange(11), np.arange(11)).astype(np.float32)
        context = None if own_values is None else Context.from_lists(own_values, items)
        rep = backbone.represent_users(backbone.split_private(np.stack([private[u]] * 11)), repeated, context)
        np.testing.assert_allclose(got[u], backbone.compute_logits(rep, repeated, items, inside), rtol=1e-5, atol=1e-5)
    alone = score_catalogue(
        backbone, private[3:4], heads, items[:8], None if lists is None else lists.take(np.array([3]))
    )
    assert np.array_equal(alone[0], got[3, :8])


@pytest.mark.parametrize("share_mlp", [False, True])
def test_the_user_vector_of_one_layer_ncf_cannot_change_a_ranking(share_mlp: bool) -> None:
    """s = (w_p . p + b) + w_q . q: another p shifts all of a user's scores by one constant."""
    backbone = make_backbone("ncf", share_mlp=share_mlp)
    keys = derive_keys(f"one{k}" for k in range(40))
    items, heads = backbone.init_items(DRAWS, keys), backbone.init_heads(DRAWS)
    private = backbone.init_private(DRAWS, keys[:1])
    other = private.copy()
    backbone.split_private(other)["p"][:] = np.random.default_rng(2).normal(size=backbone.config.dim)
    before, after = (
        score_catalogue(backbone, private, heads, items)[0],
        score_catalogue(backbone, other, heads, items)[0],
    )
    assert np.ptp(after - before) < 1e-5
    assert abs((after - before).mean()) > 0.1
    assert np.array_equal(np.argsort(before), np.argsort(after))


# growth


def growing() -> BlockStream:
    """Two more users and three more items arrive in block 1; user 1 stays away from it."""
    first = make_block(0, 5, [[0, 1], [2, 3], [4]], valid=[[2], [0], [1]], test=[[3], [4], [0]])
    likes = [[5, 6], [], [1], [7, 2], [6]]
    second = make_block(1, 8, likes, valid=[[7], [], [5], [0], [1]], test=[[2], [], [6], [1], [0]], known=3)
    return make_stream(first, second)


@every_backbone
def test_new_items_and_users_leave_the_old_ones_bit_for_bit(name: str) -> None:
    fed = federate(growing(), make_backbone(name), rounds=2)
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    items, private = progress.server.items.copy(), progress.clients.private.copy()
    scores = catalogue(fed.backbone, progress, fed.stream.blocks[0])
    begin_block(fed, progress, 1)
    assert progress.server.items.shape == (8, fed.backbone.item_width)
    assert progress.clients.private.shape == (5, fed.backbone.private_width)
    assert np.array_equal(progress.server.items[:5], items)
    assert np.array_equal(progress.clients.private[:3], private)
    first = fed.stream.blocks[0]
    grown = catalogue(fed.backbone, progress, replace(first, train=first.train.join_rows(Ragged.empty(5))))
    assert np.array_equal(grown[:3, :5], scores)
    fresh = fed.backbone.init_items(fed.draws, fed.stream.item_keys)
    assert np.array_equal(progress.server.items[5:], fresh[5:])


@every_backbone
def test_the_table_rate_follows_the_number_of_items_of_the_block(name: str) -> None:
    backbone = make_backbone(name, item_lr_scale="items")
    rates = [backbone.list_learning_rates(n) for n in (100, 250)]
    assert rates[1]["rows"] == pytest.approx(2.5 * rates[0]["rows"])
    assert {k: v for k, v in rates[0].items() if k != "rows"} == {k: v for k, v in rates[1].items() if k != "rows"}
    fixed = make_backbone(name, item_lr_scale=3.0)
    assert fixed.list_learning_rates(100) == fixed.list_learning_rates(250)


@every_backbone
def test_private_parameters_can_be_reset_at_every_block_for_those_who_return(name: str) -> None:
    fed = federate(growing(), make_backbone(name), rounds=1, reset_private_each_block=True)
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    trained = progress.clients.private.copy()
    begin_block(fed, progress, 1)
    start = fed.backbone.init_private(fed.draws, fed.stream.user_keys)
    assert np.array_equal(progress.clients.private[[0, 2, 3, 4]], start[[0, 2, 3, 4]])
    assert np.array_equal(progress.clients.private[1], trained[1])  # has no data in block 1
    assert not np.array_equal(trained[0], start[0])


# what leaves a client


def upload_of(name: str, **options: Any) -> tuple[Federation, Upload]:
    fed = federate(growing(), make_backbone(name, **options))
    return fed, train_once(fed, started(fed)).upload


@every_backbone
def test_an_upload_carries_row_changes_and_nothing_private(name: str) -> None:
    fed, upload = upload_of(name)
    assert {f.name for f in fields(upload)} == {"values", "weight", "sender", "nonce"}
    assert upload.values.keys() == {"rows", *(f"heads/{name}" for name in fed.backbone.list_head_shapes())}
    rows, heads = upload.values["rows"], heads_of(upload)
    assert {k: v.shape[1:] for k, v in heads.items()} == fed.backbone.list_head_shapes()
    assert rows.value.shape == (len(rows.item), fed.backbone.item_width)
    assert upload.weight.tolist() == [1.0, 1.0, 1.0]
    size = 4 * len(rows.item) * (fed.backbone.item_width + 1) + 4 * sum(v.size for v in heads.values())
    sums = make_accumulator("plain", fed.fields(started(fed).server, Question("round")))
    sums.add(upload, entire=False)
    assert sums.n_bytes == size


@every_backbone
def test_no_number_of_an_upload_is_a_private_number(name: str) -> None:
    fed = federate(growing(), make_backbone(name))
    progress = started(fed)
    before = progress.clients.private.copy()
    trained = train_once(fed, progress)
    sent = np.concatenate([v.value.ravel() for v in trained.upload.values.values()])
    for own in (*before, *trained.local.private):
        assert np.isin(own, sent).mean() < 0.5


def test_a_shared_layer_leaves_as_a_change_and_the_user_vector_stays() -> None:
    fed, upload = upload_of("ncf", share_mlp=True)
    assert {k: v.shape for k, v in heads_of(upload).items()} == {"w": (3, 12), "b": (3, 1)}
    assert fed.backbone.private_layout == {"p": 6}
    progress = started(fed)
    trained = train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    for k, change in heads_of(trained.upload).items():
        np.testing.assert_allclose(after.heads[k], progress.server.heads[k] + change.mean(0), rtol=1e-6)


@every_backbone
def test_an_upload_is_exactly_the_local_row_minus_the_received_one(name: str) -> None:
    """Nobody sends a row it did not touch, and one client's rows do not leak into another's."""
    fed = federate(growing(), make_backbone(name))
    progress = started(fed)
    together = train_once(fed, progress).upload.values["rows"]
    view = cohort(fed, progress)
    for client in range(view.n_clients):
        alone = train_once(fed, progress, np.array([client])).upload.values["rows"]
        own = together.client == client
        assert np.array_equal(together.item[own], alone.item)
        np.testing.assert_allclose(together.value[own], alone.value, rtol=1e-5, atol=1e-6)
        assert len(set(alone.item.tolist())) == len(alone.item)
