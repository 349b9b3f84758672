"""Prediction transfer against a slow oracle: every client a plain torch model, every step and every upload by hand.

Only what is drawn (samples, orders, dice) is shared with the package; models, Adam, joins and losses are written again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from helpers.oracle import answer_round, batches, federate, make_backbone, make_block, make_stream, members, started
from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays, write_arrays
from tacita.core.types import AnyArray, Arrays, BlockStream, CohortView, Ragged
from tacita.federation.clients import Cohort, build_cohort_view
from tacita.federation.rounds import (
    Progress,
    end_block,
    make_initial_progress,
    run_block,
    run_remaining_blocks,
    run_round,
)
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import flatten_progress_with_note, read_progress
from tacita.kernels.sampling import shuffle_client_samples
from tacita.learn.scores import HEAD, SCORES
from tacita.learn.training import Workspace, grouped_stepper
from tacita.learn.training.local_models import build_local_models
from tacita.messages import SparseRows
from tacita.methods.distillation.networks import select_network as net_of
from tacita.methods.distillation.round_draws import RoundDraws
from tacita.methods.distillation.server_model import Teacher
from tacita.methods.distillation.uploads import Disguise, Swap, disguise_predictions
from tacita.models import Backbone
from tacita.research.bench.score_rounds import bench_scores
from tacita.round.device_state import flatten_devices
from tacita.round.part import RunContext
from tacita.round.plan import Federation
from tacita.round.registry import build_parts
from tacita.round.task import prepare_cohort

TRANSFER = "prediction-transfer"
N_ITEMS = 14
TRAIN = [[0, 1, 2, 3, 4, 5], [4, 5, 6], [7, 8, 9, 10, 1]]
ADAM = {"optimiser": "lazy-adam", "weight_decay": 0.01, "local_epochs": 2, "batch_size": 8}
SMALL: dict[str, dict[str, Any]] = {
    "neumf": {"dim": 3, "tower": [5, 4], "lr": 0.05, "init_std": 0.5, "item_lr_scale": 1.0},
    "mf": {"dim": 4, "lr": 0.05, "init_std": 0.5, "item_lr_scale": 1.0},
}
two_models = pytest.mark.parametrize("name", sorted(SMALL))


def small_stream() -> BlockStream:
    valid = [[6], [7], [0]]
    return make_stream(make_block(0, N_ITEMS, TRAIN, valid, [[11], [12], [13]]))


def transferring(
    backbone: Backbone, stream: BlockStream | None = None, train: dict[str, Any] | None = None, **options: Any
) -> Federation:
    """A run of prediction transfer; lists of at most five items are sent."""
    fed = federate(stream or small_stream(), backbone, **{**ADAM, "rounds": 4, **(train or {})})
    specs = [{"name": TRANSFER, "most": 5, **options}]
    result = replace(fed, parts=build_parts(specs, RunContext(fed.backbone, fed.draws, fed.config.train)))
    result.learner.check()
    return result


def held_rows(progress: Progress, user: int) -> dict[int, AnyArray]:
    rows = progress.clients.read_part_lists(np.array([user]))[SCORES]["rows"]
    return dict(zip(rows.ids.tolist(), rows.values["row"], strict=True))


def model_of(progress: Progress, user: int) -> Arrays:
    """All numbers of a client's model."""
    rows = held_rows(progress, user)
    heads = {k: v[user].copy() for k, v in progress.clients.parts.get(SCORES, {}).items()}
    return {"private": progress.clients.private[user].copy(), **{f"row {i}": v for i, v in rows.items()}, **heads}


# the oracle


class Lazy:
    """Adam with a count of steps for every tensor, which only moves where it is told to."""

    def __init__(self, decay: float) -> None:
        self.decay, self.seen = decay, {}

    def move(self, key: Any, value: Tensor, slope: Tensor, rate: float) -> Tensor:
        slope = slope + self.decay * value
        mean, square, steps = self.seen.get(key, (torch.zeros_like(value), torch.zeros_like(value), 0))
        mean, square, steps = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2, steps + 1
        self.seen[key] = mean, square, steps
        scale = (1 - 0.999**steps) ** 0.5 / (1 - 0.9**steps)
        return value - rate * scale * mean / (square.sqrt() + 1e-8)


def logits_by_hand(backbone: Backbone, users: Tensor, heads: dict[str, Tensor], rows: Tensor) -> Tensor:
    """MF: a product. NeuMF: a product of one half, and a tower on the other halves joined."""
    if backbone.name == "mf":
        return (users * rows).sum(1)
    dim, n_layers = backbone.config.dim, len(backbone.config.tower)  # type: ignore[attr-defined]
    up = torch.cat([users[:, dim:], rows[:, dim:]], dim=1)
    matrices = [torch.cat([heads["user_layer"], heads["item_layer"]])]
    matrices += [heads[f"layer_{k}"] for k in range(1, n_layers)]
    for k, matrix in enumerate(matrices):
        up = torch.relu(up @ matrix + heads[f"bias_{k}"])
    met = users[:, :dim] * rows[:, :dim]
    return up @ heads["out"] + met @ heads["out_gmf"] + heads["out_bias"]


class ByHand:
    """A model of some users and all items, a tensor each, and one step of it at a time."""

    def __init__(self, backbone: Backbone, users: AnyArray, items: AnyArray, heads: Arrays, decay: float) -> None:
        self.backbone, self.adam, self.rates = backbone, Lazy(decay), backbone.list_learning_rates(len(items))
        self.users, self.items = ([torch.tensor(row) for row in table] for table in (users, items))
        self.heads = {k: torch.tensor(v) for k, v in heads.items()}

    def logits(self, user: AnyArray, item: AnyArray) -> Tensor:
        users, rows = torch.stack([self.users[u] for u in user]), torch.stack([self.items[i] for i in item])
        return logits_by_hand(self.backbone, users, self.heads, rows)

    def step(self, user: AnyArray, item: AnyArray, label: AnyArray, weight: AnyArray) -> None:
        named = {("user", u): self.users[u] for u in user} | {("item", i): self.items[i] for i in item}
        named |= {("head", k): v for k, v in self.heads.items()}
        for value in named.values():
            value.requires_grad_()
        each = bce(self.logits(user, item), torch.tensor(label), reduction="none")
        slopes = torch.autograd.grad((torch.tensor(weight) * each).sum(), list(named.values()))
        for ((kind, k), value), slope in zip(named.items(), slopes, strict=True):
            rate = {"user": self.rates[next(iter(self.backbone.private_layout))], "item": self.rates["rows"]}.get(kind)
            moved = self.adam.move((kind, k), value.detach(), slope, self.rates[k] if rate is None else rate)
            getattr(self, {"user": "users", "item": "items", "head": "heads"}[kind])[k] = moved

    def numbers(self) -> tuple[list[AnyArray], list[AnyArray], Arrays]:
        users, items = ([row.detach().numpy() for row in rows] for rows in (self.users, self.items))
        return users, items, {k: v.detach().numpy() for k, v in self.heads.items()}


def view_now(fed: Federation, progress: Progress) -> tuple[Any, CohortView]:
    """What the round's clients are going to see, and the server after it wrote to them."""
    all_users = members(fed)
    chosen = progress.local_devices.draw_round_participants(fed, progress.server)
    server, down = fed.broadcast_round(progress.server, all_users.keys[chosen])
    who = Cohort(all_users.users.take(chosen), all_users.keys[chosen], fed.stream.user_keys)
    return server, build_cohort_view(progress.clients, server, fed.stream.blocks[0], who, down)


def train_by_hand(
    fed: Federation, view: CohortView, c: int, rows: dict[int, AnyArray], adam: Lazy | None = None
) -> tuple[ByHand, Ragged]:
    """One client of a cohort alone: its model after the round, and what it tells; `adam` goes on from earlier ones."""
    plan: TrainConfig = fed.config.train
    tasks = prepare_cohort(fed.preparing_parts, view).tasks
    local = build_local_models(view, {}, plan, fed.draws, Workspace(), tasks)
    items = view.items.copy()
    for i, row in rows.items():
        items[i] = row
    heads = {k: view.parts[SCORES][f"{HEAD}{k}"][c] for k in view.heads}
    model = ByHand(fed.backbone, view.private[c : c + 1], items, heads, plan.weight_decay)
    model.adam = adam or model.adam
    for batch in batches(local, c):
        n = len(batch)
        model.step(np.zeros(n, int), local.item[batch], local.label[batch], np.full(n, 1 / n, np.float32))
    sent = view.per_client[TRANSFER].row(c) if TRANSFER in view.per_client else np.zeros(0, int)
    own_values = local.item[local.ptr[c] : local.ptr[c + 1]]
    label = local.label[local.ptr[c] : local.ptr[c + 1]]
    n_own = 5 * len(view.train.row(c))
    joined = [i for i in sent.tolist() if i not in set(own_values[:n_own].tolist())]
    assert own_values[n_own:].tolist() == joined  # what was received and is not its own
    guess = torch.sigmoid(model.logits(np.zeros(len(own_values), int), own_values)).detach().numpy()

    def one(some: slice) -> Ragged:
        ids = own_values[some]
        return Ragged(np.array([0, len(ids)]), ids, {"label": label[some], "prediction": guess[some]})

    how = Disguise((0.3, 0.7), 0.3, Swap(0.1))
    dice = RoundDraws(fed.draws, view.client_keys[c : c + 1], view.block, view.round)
    return model, disguise_predictions(one(slice(0, n_own)), one(slice(n_own, None)), how, dice)


def assert_close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


# the round


@two_models
@pytest.mark.parametrize("moments", ["fresh", "kept"])
@pytest.mark.parametrize("stepper", ["auto", "autograd"])
def test_clients_train_and_upload_as_if_alone(
    name: str, moments: str, stepper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds: own rows, heads and vector go on; what was received joins; moments are fresh, or go on, too."""
    monkeypatch.setattr(grouped_stepper, "_SHARD_SAMPLES", 20)  # several crews
    how = {"moments": moments, "stepper": stepper}
    fed = transferring(make_backbone(name, **SMALL[name]), train=how, scheduled=3.0, select="top")
    progress = started(fed)
    adams = [Lazy(fed.config.train.weight_decay) if moments == "kept" else None for _ in TRAIN]
    received = 0
    for _ in range(3):
        server, view = view_now(fed, progress)
        received += len(view.per_client[TRANSFER].ids) if TRANSFER in view.per_client else 0
        by_hands = [train_by_hand(fed, view, c, held_rows(progress, c), adams[c]) for c in range(len(TRAIN))]
        upload = answer_round(fed, view, SCORES).values[SCORES]
        assert isinstance(upload, SparseRows)
        for c, (_, report) in enumerate(by_hands):
            own_values = upload.client == c
            assert upload.item[own_values].tolist() == report.ids.tolist()
            assert_close(upload.value[own_values], report.values["score"])
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        for c, (model, _) in enumerate(by_hands):
            users, items, heads = model.numbers()
            assert_close(progress.clients.private[c], users[0])
            rows = held_rows(progress, c)
            for i in range(N_ITEMS):
                assert_close(rows.get(i, server.items[i]), items[i])
            for k, head in heads.items():
                assert_close(progress.clients.parts[SCORES][f"{HEAD}{k}"][c], head)
    assert received > 0


@two_models
@pytest.mark.parametrize("weighting", [True, False])
def test_the_server_distils_as_a_plain_loop_would(name: str, weighting: bool) -> None:
    fed = transferring(make_backbone(name, **SMALL[name]), weighting=weighting, select="none", server_batch=16)
    progress, adam = started(fed), Lazy(1e-6)
    for _ in range(2):
        before, view = view_now(fed, progress)
        fresh = Teacher.from_arrays(progress.server.parts[TRANSFER])
        model = fresh.with_clients(fed.backbone, fed.draws, view.client_keys)
        upload = answer_round(fed, view, SCORES).values[SCORES]
        assert isinstance(upload, SparseRows)
        order = np.lexsort((np.arange(len(upload.item)), view.client_keys[upload.client]))
        client, item, label = upload.client[order], upload.item[order], upload.value[order]
        place = {int(key): k for k, key in enumerate(model.names.tolist())}
        user = np.array([place[int(view.client_keys[c])] for c in client])
        hand = ByHand(fed.backbone, model.model.values["users"], model.model.values["items"], model.model.heads, 1e-6)
        hand.adam = adam  # its moments stay from round to round
        weight = _weights(hand, fresh.agents, client, (user, item, label)) if weighting else np.ones(len(item), "f4")
        for epoch in range(4):
            turn = np.empty(len(item), np.int64)
            key = fed.draws.public("server-order", 0, before.round, epoch)
            shuffle_client_samples(key, np.zeros(1, np.uint64), np.array([0, len(item)]), 16, turn)
            for at in range(0, len(item), 16):
                some = turn[at : at + 16]
                hand.step(user[some], item[some], label[some], weight[some] / np.float32(len(some)))
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        after = Teacher.from_arrays(progress.server.parts[TRANSFER])
        assert after.names.tolist() == model.names.tolist()
        users, items, heads = hand.numbers()
        assert_close(after.model.values["users"], np.stack(users))
        assert_close(after.model.values["items"], np.stack(items))
        for k, head in heads.items():
            assert_close(after.model.heads[k], head)


def _weights(hand: ByHand, agents: Arrays, client: AnyArray, told: tuple[AnyArray, ...]) -> AnyArray:
    """n times the softmax of what the agent says of size, mean, variance and loss of each upload."""
    user, item, label = told
    loss = bce(hand.logits(user, item), torch.tensor(label), reduction="none").detach().numpy()
    clients = sorted(set(client.tolist()), key=lambda c: int(np.flatnonzero(client == c)[0]))
    raw = []
    for c in clients:
        own_values = client == c
        raw.append(
            [np.log(1 + own_values.sum()), label[own_values].mean(), label[own_values].var(), loss[own_values].mean()]
        )
    state = np.array(raw)
    state = (state - state.mean(0)) / (state.std(0) + 1e-8)
    net = net_of(agents, "weights")
    logit = np.maximum(state @ net["w0"] + net["b0"], 0) @ net["w1"] + net["b1"]
    omega = np.exp(logit[:, 0] - logit.max())
    omega /= omega.sum()
    return np.array([len(clients) * omega[clients.index(c)] for c in client], np.float32)


def few_at_a_time() -> dict[str, Any]:
    return {"participation": {"kind": "fraction", "rate": 0.34}, "rounds": 8}


@two_models
def test_absent_client_keeps_its_model(name: str) -> None:
    fed = transferring(make_backbone(name, **SMALL[name]), train=few_at_a_time())
    progress, times = started(fed), np.zeros(len(TRAIN), int)
    for _ in range(8):
        local = progress.local_devices.draw_round_participants(fed, progress.server).tolist()
        before = [model_of(progress, c) for c in range(len(TRAIN))]
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        for c in range(len(TRAIN)):
            after = model_of(progress, c)
            if c in local:
                assert before[c].keys() <= after.keys()  # rows stay once they are touched
                assert not np.array_equal(before[c]["private"], after["private"])
                times[c] += 1
            else:
                assert before[c].keys() == after.keys()
                assert all(np.array_equal(before[c][k], after[k]) for k in after)
    assert times.sum() == 8
    assert times.max() > 1


@two_models
def test_client_answers_are_the_scores_of_each_clients_own_table(name: str) -> None:
    fed = transferring(make_backbone(name, **SMALL[name]), answers="client")
    progress = started(fed)
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    users = np.arange(len(TRAIN), dtype=np.int32)
    down = fed.broadcast_serving(progress.server)
    block, keys = fed.stream.blocks[0], fed.stream.user_keys
    result = DeviceScorer(fed, progress.server, progress.clients, block, keys, down, "test")(users)
    for c in range(len(TRAIN)):
        items = progress.server.items.copy()
        for i, row in held_rows(progress, c).items():
            items[i] = row
        heads = {k: progress.clients.parts[SCORES][f"{HEAD}{k}"][c] for k in progress.server.heads}
        model = ByHand(fed.backbone, progress.clients.private[c : c + 1], items, heads, 0.0)
        assert_close(result[c], model.logits(np.zeros(N_ITEMS, int), np.arange(N_ITEMS)).detach().numpy())


@pytest.mark.parametrize("server", ["neumf", "lightgcn", "mf"])
def test_scores_of_some_items_are_those_of_the_catalogue(server: str) -> None:
    options = {"name": server, "dim": 3, **({"tower": [5, 4]} if server == "neumf" else {})}
    fed = transferring(make_backbone("mf", **SMALL["mf"]), server=options)
    progress = started(fed)
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    down, users = fed.broadcast_serving(progress.server), np.array([2, 0], np.int32)
    block, keys = fed.stream.blocks[0], fed.stream.user_keys
    scorer = DeviceScorer(fed, progress.server, progress.clients, block, keys, down, "valid")
    only = Ragged.from_lists([[3, 9, 0], [5]])
    items = scorer.score_listed_items(users, only)
    assert items is not None
    np.testing.assert_allclose(items, scorer(users)[only.rows(), only.ids], rtol=1e-5, atol=1e-6)


# the whole block


def checkerboard(device: Backbone, server: dict[str, Any], answers: str) -> float:
    """Share of (item of the user's colour that it never told, item of the other colour) pairs in the right order.

    One negative for a positive: with more, nearly all that was held out would be told as not liked.
    """
    n_users, n_items = 40, 40
    likes = [np.roll(np.arange(u % 2, n_items, 2), u // 2) for u in range(n_users)]
    stream = make_stream(make_block(0, n_items, [like[10:].tolist() for like in likes]))
    train = {"rounds": 30, "negatives": 1}
    fed = transferring(device, stream, train, server=server, answers=answers, select="confident", most=20)
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    down = fed.broadcast_serving(progress.server)
    block, keys = fed.stream.blocks[0], fed.stream.user_keys
    scorer = DeviceScorer(fed, progress.server, progress.clients, block, keys, down, "test")
    scores = scorer(np.arange(n_users, dtype=np.int32))
    right = [scores[u, likes[u][:10]][:, None] > scores[u, (u + 1) % 2 :: 2][None] for u in range(n_users)]
    return float(np.mean(right))


@pytest.mark.parametrize(("answers", "least"), [("server", 0.75), ("client", 0.65)])
def test_a_large_model_on_the_server_and_small_ones_on_devices_learn_from_each_other(
    answers: str, least: float
) -> None:
    """A client alone cannot tell colours apart: half of the pairs would be right."""
    small = make_backbone("mf", dim=4, lr=0.05, init_std=0.1, item_lr_scale=1.0)
    large = {"name": "neumf", "dim": 8, "tower": [16, 8], "lr": 0.01, "init_std": 0.1}
    assert checkerboard(small, large, answers) > least


def numbers(progress: Progress) -> Arrays:
    server = {f"server/{k}": v for k, v in progress.server.parts[TRANSFER].items()}
    return {
        **server,
        **flatten_devices(progress.clients, "device/"),
        **flatten_devices(progress.local_devices.best_devices, "best/"),
    }


@pytest.mark.parametrize("answers", ["server", "client"])
@pytest.mark.parametrize("moments", ["fresh", "kept"])
def test_a_run_that_is_resumed_in_a_block_ends_with_the_same_bits(tmp_path: Path, answers: str, moments: str) -> None:
    train = {**few_at_a_time(), "moments": moments}
    fed = transferring(make_backbone("neumf", **SMALL["neumf"]), two_blocks(), train, answers=answers)
    whole = make_initial_progress(fed)
    saved: list[int] = []

    def on_round(report: Any, now: Progress) -> None:
        if report.block == 1 and report.round == 3:
            write_arrays(tmp_path / "saved", *flatten_progress_with_note(now))
            saved.append(1)

    run_remaining_blocks(fed, whole, on_round)
    assert saved
    progress = read_progress(*read_arrays(tmp_path / "saved"))
    run_remaining_blocks(fed, progress, lambda report, now: None)
    first, other = numbers(whole), numbers(progress)
    assert first.keys() == other.keys()
    for name in first:
        assert np.array_equal(first[name], other[name]), name
    assert whole.results == progress.results


def two_blocks() -> BlockStream:
    """Six users and 20 items, then two more users and four more items."""
    rng = np.random.default_rng(5)

    def block(index: int, n_users: int, n_items: int, known: int) -> Any:
        own_values = [rng.choice(n_items, 8, replace=False).tolist() for _ in range(n_users)]
        return make_block(
            index,
            n_items,
            [m[:5] for m in own_values],
            [m[5:6] for m in own_values],
            [m[6:] for m in own_values],
            known,
        )

    return make_stream(block(0, 6, 20, 0), block(1, 8, 24, 6))


@two_models
def test_a_stream_brings_new_users_and_items_to_both_sides(name: str) -> None:
    fed = transferring(make_backbone(name, **SMALL[name]), two_blocks())
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    teacher = Teacher.from_arrays(progress.server.parts[TRANSFER])
    assert sorted(teacher.names.tolist()) == sorted(fed.stream.user_keys.tolist())
    assert len(teacher.model.values["items"]) == 24
    assert progress.clients.n_users == 8
    rows = progress.clients.read_part_lists(np.arange(8))[SCORES]["rows"]
    assert (rows.counts() >= 5).all()
    assert rows.ids.max() >= 20


def test_clients_go_on_from_the_last_round_and_the_server_from_its_best() -> None:
    """With two candidates out of which one is known every round scores alike, so the first is the best."""
    stream = make_stream(make_block(0, 3, [[0, 1], [0, 2]], valid=[[2], [1]]))
    fed = transferring(make_backbone("mf", **SMALL["mf"]), stream, {"rounds": 3}, most=2)
    progress = started(fed)
    observations: list[tuple[AnyArray, AnyArray]] = []

    def on_round(report: Any, now: Progress) -> None:
        model = now.server.parts[TRANSFER]["model/values/items"]
        observations.append((model.copy(), now.clients.private.copy()))

    run_block(fed, progress, on_round)
    assert progress.best_round == 1
    end_block(fed, progress)
    assert np.array_equal(progress.server.parts[TRANSFER]["model/values/items"], observations[0][0])
    assert np.array_equal(progress.clients.private, observations[2][1])
    assert not np.array_equal(observations[0][1], observations[2][1])


def test_a_cap_holds_in_every_round_and_the_log_says_so() -> None:
    concentration: dict[float | None, list[float]] = {}
    for cap in (None, 1.2):
        fed = transferring(make_backbone("mf", **SMALL["mf"]), weighting_cap=cap, weighting_lr=0.5)
        progress = started(fed)
        for _ in range(6):
            progress.server, report = run_round(fed, progress.server, progress.devices)
            concentration.setdefault(cap, []).append(report.notes["weight_concentration"])
    assert max(concentration[None]) > 1.5
    assert max(concentration[1.2]) == pytest.approx(1.2)


def test_options_of_ptf_fedrecs_code_reach_the_devices() -> None:
    """Of five received items a client with three positives learns from three; without the option from all."""
    backbone = make_backbone("mf", **SMALL["mf"])
    for truncate, n_received in ((False, 5), (True, 3)):
        fed = transferring(backbone, scheme="ptf", truncate=truncate, repeat_negatives=True)
        progress = started(fed)
        _, view = view_now(fed, progress)
        sent = Ragged.from_lists([[7, 8, 9, 10, 11]] * len(TRAIN))
        sent = Ragged(sent.ptr, sent.ids, {"score": np.full(len(sent.ids), 0.5, np.float32)})
        part = fed.parts[0]
        received = part.collect_received(replace(view, per_client={TRANSFER: sent}))  # type: ignore[attr-defined]
        assert received.row(1).tolist() == [7, 8, 9, 10, 11][:n_received]
        own = Ragged.from_lists([[0, 1, 2, 3, 4, 12]] * len(TRAIN))
        label = np.tile(np.array([1, 1, 1, 1, 1, 0], np.float32), len(TRAIN))
        own = Ragged(own.ptr, own.ids, {"label": label, "prediction": label})
        nothing = Ragged(np.zeros(len(TRAIN) + 1, np.int64), np.zeros(0, np.int32), {})
        told = part.choose_predictions(view, own, nothing)  # type: ignore[attr-defined]
        assert any(np.count_nonzero(told.row(c) == 12) > 1 for c in range(len(TRAIN)))


def test_patience_in_passes_counts_everybody_once() -> None:
    share = {"kind": "fraction", "rate": 0.1}
    assert TrainConfig(patience=4).patience_rounds == 4
    assert TrainConfig(patience=4, participation=share).patience_rounds == 4  # type: ignore[arg-type]
    assert TrainConfig(patience=4, patience_in="passes").patience_rounds == 4
    in_passes = TrainConfig(patience=4, patience_in="passes", participation=share)  # type: ignore[arg-type]
    assert in_passes.patience_rounds == 40
    stream = make_stream(make_block(0, 3, [[0, 1], [0, 2]], valid=[[2], [1]]))
    half = {"participation": {"kind": "fraction", "rate": 0.5}, "rounds": 50, "patience": 3}
    for unit, rounds in (("rounds", 4), ("passes", 7)):
        fed = transferring(make_backbone("mf", **SMALL["mf"]), stream, {**half, "patience_in": unit}, most=2)
        progress = started(fed)
        run_block(fed, progress, lambda report, now: None)
        assert (progress.best_round, progress.server.round) == (1, rounds)


def test_moments_are_kept_only_where_a_model_and_lazy_adam_are() -> None:
    backbone = make_backbone("mf", **SMALL["mf"])
    with pytest.raises(TacitaError, match=r"train\.moments = 'kept' is for train\.optimiser = 'lazy-adam', not 'adam'"):
        transferring(backbone, train={"moments": "kept", "optimiser": "adam", "weight_decay": 0.0})
    rows = federate(small_stream(), backbone, **ADAM, moments="kept")
    with pytest.raises(TacitaError, match=r"is for clients that keep models of their own.*leave it at 'fresh'"):
        rows.learner.check()


@pytest.mark.parametrize("options", [{}, {"weighting": False, "select": "confident"}], ids=["agents", "none"])
@two_models
def test_the_bench_times_both_loops_and_the_agents_where_there_are_any(name: str, options: dict[str, Any]) -> None:
    result = bench_scores(transferring(make_backbone(name, **SMALL[name]), **options), repeats=1)
    assert result["clients"] == len(TRAIN)
    assert min(result["fast_s"], result["naive_s"]) > 0
    assert ("agents_s" in result) == (options == {})


def test_the_bench_refuses_a_model_that_its_naive_loop_does_not_have() -> None:
    fed = transferring(make_backbone("mf", **SMALL["mf"]), server={"name": "lightgcn", "dim": 4})
    with pytest.raises(TacitaError, match="naive loop has no model 'lightgcn'"):
        bench_scores(fed, repeats=1)
