"""One model of many users: against plain torch, its graph, and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.oracle import make_backbone
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays, write_arrays
from tacita.core.types import Doubles
from tacita.kernels.sampling import shuffle_client_samples
from tacita.kernels.threads import set_threads, threads_in_use
from tacita.learn.training import central_model as central_module
from tacita.learn.training.central_model import CentralModel
from tacita.learn.training.central_state import CentralState, InteractionGraph, TrainingSamples

DRAWS = Draws(5)
N_USERS, N_ITEMS = 9, 13
MODELS = ["neumf", "neuncf", "lightgcn", "mf"]
every_model = pytest.mark.parametrize("name", MODELS)
ORDERS = [DRAWS.public("order", k) for k in range(3)]


def samples(n: int = 70, seed: int = 0) -> TrainingSamples:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, N_USERS - 1, n), rng.integers(0, N_ITEMS - 2, n)  # the last ones never come up
    return TrainingSamples(user, item, rng.random(n).astype("f4"), (0.5 + rng.random(n)).astype("f4"))


def edges(seed: int = 0, n: int = 30) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, N_USERS - 2, n), rng.integers(0, N_ITEMS - 3, n), rng.random(n)


def model(name: str, **options: Any) -> tuple[CentralModel, CentralState]:
    small = {"lr": 0.01, "item_lr_scale": 1.0} | options
    graph = InteractionGraph.from_edges(*edges(), N_USERS, N_ITEMS) if name == "lightgcn" else None
    central = CentralModel(make_backbone(name, **small), graph, weight_decay=0.01)
    users, items = (derive_keys(f"{kind}{k}" for k in range(n)) for kind, n in (("u", N_USERS), ("i", N_ITEMS)))
    return central, central.init_state(DRAWS, users, items)


def adjacency(user: Any, item: Any, weight: Any) -> Doubles:
    """The whole normalised matrix."""
    a = np.zeros((N_USERS + N_ITEMS, N_USERS + N_ITEMS))
    for u, i, w in zip(user, item, weight, strict=True):
        a[u, N_USERS + i] += w
        a[N_USERS + i, u] += w
    degree = a.sum(1)
    scale = np.where(degree > 0, np.where(degree > 0, degree, 1) ** -0.5, 0)
    return scale[:, None] * a * scale[None]


class Plain(nn.Module):
    """The same model with embeddings and layers of torch, in double precision."""

    def __init__(self, name: str, state: CentralState, matrix: Doubles | None = None) -> None:
        super().__init__()
        self.name, self.matrix = name, None if matrix is None else torch.from_numpy(matrix)
        self.users = nn.Embedding.from_pretrained(torch.tensor(state.values["users"]).double(), freeze=False)
        self.items = nn.Embedding.from_pretrained(torch.tensor(state.values["items"]).double(), freeze=False)
        self.heads = nn.ParameterDict({k: torch.tensor(v).double() for k, v in state.heads.items()})

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.matrix is None:
            return self.users.weight, self.items.weight
        passes = [torch.cat([self.users.weight, self.items.weight])]
        for _ in range(3):
            passes.append(self.matrix @ passes[-1])
        mean = torch.stack(passes).mean(0)
        return mean[:N_USERS], mean[N_USERS:]

    def forward(self, user: Any, item: Any) -> torch.Tensor:
        users, items = self.ends()
        p, q, h = users[user], items[item], self.heads
        if self.name in ("lightgcn", "mf"):
            return (p * q).sum(1)
        up = torch.cat([p[:, -6:], q[:, -6:]], dim=1)
        weights = [torch.cat([h["user_layer"], h["item_layer"]]), *(h[k] for k in sorted(h) if k.startswith("layer_"))]
        for k, weight in enumerate(weights):
            up = torch.relu(up @ weight + h[f"bias_{k}"])
        met = (p[:, :6] * q[:, :6]) @ h["out_gmf"] if self.name == "neumf" else 0
        return up @ h["out"] + met + h["out_bias"]


class RowAdam:
    """torch.optim.SparseAdam for every row by itself, which steps only when the row is used."""

    def __init__(self, table: nn.Parameter, lr: float) -> None:
        self.table, self.lr, self.held = table, lr, {}

    def step(self, rows: Any) -> None:
        whole, slope = (x.reshape(len(x), -1) for x in (self.table.data, self.table.grad))
        for row in sorted(set(rows)):
            if row not in self.held:
                parameter = nn.Parameter(whole[row : row + 1].clone())
                self.held[row] = parameter, torch.optim.SparseAdam([parameter], self.lr)
            parameter, optimiser = self.held[row]
            parameter.grad = (slope[row : row + 1] + 0.01 * parameter.detach()).to_sparse(1)
            optimiser.step()
            whole[row] = parameter.detach()[0]


def train_plain(plain: Plain, given: TrainingSamples, batch: int, lr: float) -> None:
    movers = [RowAdam(plain.users.weight, lr), RowAdam(plain.items.weight, lr)]
    heads = [RowAdam(entry, lr) for entry in plain.heads.values()]
    for key in ORDERS:
        order = np.empty(len(given.user), np.int64)
        shuffle_client_samples(key, np.zeros(1, np.uint64), np.array([0, len(order)]), batch, order)
        for at in range(0, len(order), batch):
            some = given.take(order[at : at + batch])
            plain.zero_grad()
            each = nn.functional.binary_cross_entropy_with_logits(
                plain(some.user, some.item), torch.from_numpy(some.label).double(), reduction="none"
            )
            (torch.from_numpy(some.weight) * each).mean().backward()
            everything = plain.matrix is not None
            for mover, rows in zip(movers, (some.user, some.item), strict=True):
                mover.step(range(len(mover.table)) if everything else rows.tolist())
            for head in heads:
                head.step(range(len(head.table)))


@pytest.mark.parametrize("piece", [512, 10])
@every_model
def test_training_is_that_of_plain_torch(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(central_module, "_SAMPLES_PER_TASK", piece)
    central, state = model(name)
    plain = Plain(name, state, adjacency(*edges()) if name == "lightgcn" else None)
    inputs = samples()
    after = central.train_epochs(state, inputs, 16, ORDERS)
    train_plain(plain, inputs, 16, 0.01)
    for table, want in (("users", plain.users.weight), ("items", plain.items.weight)):
        np.testing.assert_allclose(after.values[table], want.detach().numpy(), rtol=1e-4, atol=1e-5)
        assert np.abs(after.values[table] - state.values[table]).max() > 0.05
    for k, head in after.heads.items():
        np.testing.assert_allclose(head, plain.heads[k].detach().numpy(), rtol=1e-4, atol=1e-5)
        assert np.abs(head - state.heads[k]).max() > 0.01


@every_model
def test_a_model_leaves_its_state_as_it_was_and_rows_that_no_batch_has(name: str) -> None:
    central, state = model(name)
    before = {k: v.copy() for k, v in state.to_arrays().items()}
    after = central.train_epochs(state, samples(), 16, ORDERS)
    assert all(np.array_equal(v, before[k]) for k, v in state.to_arrays().items())
    assert after.values.keys() == state.values.keys()
    if name != "lightgcn":
        assert np.array_equal(after.values["users"][-1], state.values["users"][-1])
        assert np.array_equal(after.values["items"][-2:], state.values["items"][-2:])
        assert after.moments["items.steps"][-2:].tolist() == [0, 0]
    assert (after.values["users"][:-1] != state.values["users"][:-1]).any(1).all()
    assert central.train_epochs(state, samples(0), 16, ORDERS) is state


@every_model
def test_saved_state_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    central, state = model(name)
    whole = central.train_epochs(state, samples(), 16, ORDERS)
    half = central.train_epochs(state, samples(), 16, ORDERS[:1])
    write_arrays(tmp_path / "half.safetensors", half.to_arrays())
    back, _ = read_arrays(tmp_path / "half.safetensors")
    run = central.train_epochs(CentralState.from_arrays(back), samples(), 16, ORDERS[1:])
    assert run.to_arrays().keys() == whole.to_arrays().keys()
    for k, v in whole.to_arrays().items():
        assert np.array_equal(run.to_arrays()[k], v), k
    assert not np.array_equal(half.values["items"], whole.values["items"])


@every_model
def test_threads_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(central_module, "_SAMPLES_PER_TASK", 64)
    central, state = model(name)
    inputs, before, observations = samples(900), threads_in_use(), []
    for n in {1, before}:
        set_threads(n)
        after = central.train_epochs(state, inputs, 256, ORDERS)
        observations.append((after.values["users"], central.score_catalogue(after, np.arange(N_USERS))))
    set_threads(before)
    assert all(np.array_equal(a, b) for a, b in zip(observations[0], observations[-1], strict=True))


@every_model
def test_pairs_and_catalogue_are_the_plain_models(name: str) -> None:
    central, state = model(name)
    plain = Plain(name, state, adjacency(*edges()) if name == "lightgcn" else None)
    user, item = np.repeat(np.arange(N_USERS), N_ITEMS), np.tile(np.arange(N_ITEMS), N_USERS)
    want = plain(user, item).detach().numpy().reshape(N_USERS, N_ITEMS)
    np.testing.assert_allclose(central.score_catalogue(state, np.array([4, 2])), want[[4, 2]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(central.score_pairs(state, user, item).reshape(want.shape), want, rtol=1e-4, atol=1e-5)


@every_model
def test_a_heavy_sample_counts_as_often_as_it_weighs(name: str) -> None:
    """In one batch of 4, weights 1, 1, 2 and 0 are the mean over 1, 1, 1, 1 with one sample twice."""
    central, state = model(name)
    some = samples(4)
    weighed = replace(some, weight=np.array([1, 1, 2, 0], "f4"))
    twice = replace(some.take(np.array([0, 1, 2, 2])), weight=np.ones(4, "f4"))
    first, other = (central.train_epochs(state, x, 4, ORDERS[:1]) for x in (weighed, twice))
    untouched = np.setdiff1d(np.arange(N_USERS), some.user)
    np.testing.assert_allclose(
        first.values["users"][twice.user], other.values["users"][twice.user], rtol=1e-5, atol=1e-6
    )
    assert name == "lightgcn" or np.array_equal(first.values["users"][untouched], state.values["users"][untouched])


def test_user_and_item_vectors_match_those_of_the_agents() -> None:
    central, state = model("neumf")
    users, items = central.compute_vectors(state)
    assert np.array_equal(users, state.values["users"][:, :6])
    assert np.array_equal(items, state.values["items"][:, :6])
    central, state = model("lightgcn")
    users, items = central.compute_vectors(state)
    want = Plain("lightgcn", state, adjacency(*edges())).ends()
    np.testing.assert_allclose(users, want[0].detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(items, want[1].detach().numpy(), rtol=1e-5, atol=1e-6)


# the graph


def test_repeated_edges_add_up_and_isolated_nodes_propagate_nothing() -> None:
    user, item, weight = np.array([0, 0, 1, 0, 2]), np.array([1, 1, 1, 2, 3]), np.array([0.5, 0.25, 1.0, 0.5, 0.0])
    graph = InteractionGraph.from_edges(user, item, weight, N_USERS, N_ITEMS)
    dense = np.zeros((N_USERS + N_ITEMS,) * 2)
    for node in range(len(dense)):
        dense[node, graph.to[graph.ptr[node] : graph.ptr[node + 1]]] = graph.weight[
            graph.ptr[node] : graph.ptr[node + 1]
        ]
    np.testing.assert_allclose(dense, adjacency(user, item, weight), atol=1e-6)
    assert dense[0, N_USERS + 1] == pytest.approx(0.75 / np.sqrt(1.25 * 1.75))
    assert not dense[2].any()


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 4])
def test_smoothing_is_the_mean_of_the_powers_of_the_matrix(layers: int) -> None:
    start = np.random.default_rng(1).normal(size=(N_USERS + N_ITEMS, 5)).astype("f4")
    before = start.copy()
    matrix = adjacency(*edges())
    want = np.mean([np.linalg.matrix_power(matrix, k) @ start for k in range(layers + 1)], axis=0)
    np.testing.assert_allclose(
        InteractionGraph.from_edges(*edges(), N_USERS, N_ITEMS).propagate_and_average(start, layers),
        want,
        rtol=1e-4,
        atol=1e-6,
    )
    assert np.array_equal(start, before)


def test_the_slope_reaches_rows_that_no_sample_has() -> None:
    """User 0 and item 0 are a sample; item 1 is the user's other edge, user 1 the other end of that item's."""
    backbone = make_backbone("lightgcn", lr=0.01, item_lr_scale=1.0)
    graph = InteractionGraph.from_edges(np.array([0, 0, 1]), np.array([0, 1, 1]), np.ones(3), N_USERS, N_ITEMS)
    central = CentralModel(backbone, graph)
    state = model("lightgcn")[1]
    training_samples = TrainingSamples(np.array([0]), np.array([0]), np.ones(1, "f4"), np.ones(1, "f4"))
    after = central.train_epochs(state, training_samples, 4, ORDERS[:1])
    moved = [np.flatnonzero((after.values[k] != state.values[k]).any(1)).tolist() for k in ("users", "items")]
    assert moved == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("name", "options"),
    [("neumf", {"lr": 0.02}), ("neuncf", {"lr": 0.02}), ("lightgcn", {"lr": 0.02}), ("mf", {"lr": 0.02})],
)
def test_it_learns_the_checkerboard(name: str, options: dict[str, Any]) -> None:
    """Even users like even items; each user's samples leave out two items of either colour."""
    n_users, n_items = 12, 16
    user, item = (x.reshape(-1) for x in np.meshgrid(np.arange(n_users), np.arange(n_items), indexing="ij"))
    stored_state = (item // 2 + user) % 4 == 0
    label = (user % 2 == item % 2).astype("f4")
    training_samples = TrainingSamples(
        user[~stored_state], item[~stored_state], label[~stored_state], np.ones((~stored_state).sum(), "f4")
    )
    liked = ~stored_state & (label == 1)
    graph = (
        InteractionGraph.from_edges(user[liked], item[liked], np.ones(liked.sum()), n_users, n_items)
        if name == "lightgcn"
        else None
    )
    central = CentralModel(make_backbone(name, **{"item_lr_scale": 1.0, "init_std": 0.1} | options), graph)
    state = central.init_state(DRAWS, derive_keys(map(str, range(n_users))), derive_keys(map(str, range(n_items))))
    after = central.train_epochs(state, training_samples, 32, [DRAWS.public("order", k) for k in range(80)])
    scores = central.score_catalogue(after, np.arange(n_users))
    good, bad = stored_state & (label == 1), stored_state & (label == 0)
    right = [scores[u, i] > scores[u, item[bad & (user == u)]] for u, i in zip(user[good], item[good], strict=True)]
    assert np.mean(right) > 0.97


def test_a_graph_model_without_a_graph_is_refused_and_so_is_one_that_has_no_central_form() -> None:
    with pytest.raises(TacitaError, match="graph"):
        CentralModel(make_backbone("lightgcn"))
    with pytest.raises(TacitaError, match="ego"):
        CentralModel(make_backbone("ego"))
