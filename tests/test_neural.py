"""Models with towers: how they start, what they compute, and that a cohort of them learns what each learns alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.oracle import (
    averaged,
    cohort,
    federate,
    make_backbone,
    make_block,
    make_stream,
    slow_round,
    started,
    train_once,
)
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Arrays, BlockStream, Floats, Ragged
from tacita.learn.training import grouped_stepper, tower_stepper
from tacita.learn.training.optimisers import OPTIMISERS, LazyAdam
from tacita.models import find_backbone_class
from tacita.models import scoring as catalogue_scores
from tacita.models.scoring import score_aligned, score_catalogue, score_lists, score_with_own_rows

TOWERS = ["neumf", "neuncf"]
every_tower = pytest.mark.parametrize("name", TOWERS)
UNEVEN = [[0, 3], [1, 2, 4, 7, 9], [5], [], [0, 1, 2, 3, 4, 5, 6], [11, 2, 6], [8], list(range(2, 12))]


def uneven() -> BlockStream:
    return make_stream(make_block(0, 14, UNEVEN))


def some_model(name: str) -> tuple[Any, Floats, Arrays, Floats]:
    """Nine users, thirteen items, and biases that are not 0."""
    backbone = make_backbone(name)
    rng = np.random.default_rng(4)
    heads = {k: rng.normal(size=shape).astype("f4") for k, shape in backbone.list_head_shapes().items()}
    private = rng.normal(size=(9, backbone.private_width)).astype("f4")
    return backbone, private, heads, rng.normal(size=(13, backbone.item_width)).astype("f4")


def by_torch(name: str, private: Floats, heads: Arrays, rows: Floats, d: int) -> Floats:
    """Aligned users and items through torch's own layers."""
    h = {k: torch.from_numpy(v) for k, v in heads.items()}
    p, q = torch.from_numpy(private), torch.from_numpy(rows)
    up = torch.cat([p[:, -d:], q[:, -d:]], dim=1)
    weights = [torch.cat([h["user_layer"], h["item_layer"]]), *(h[k] for k in sorted(h) if k.startswith("layer_"))]
    for k, weight in enumerate(weights):
        up = nn.functional.relu(up @ weight + h[f"bias_{k}"])
    out = h["out"]
    if name == "neumf":
        up, out = torch.cat([p[:, :d] * q[:, :d], up], dim=1), torch.cat([h["out_gmf"], out])
    return (up @ out + h["out_bias"]).numpy()


# how they start


@every_tower
def test_vectors_start_as_narrow_normals_and_layers_as_xavier_has_them(name: str) -> None:
    backbone = find_backbone_class(name)(find_backbone_class(name).Config())
    keys = derive_keys(f"one{k}" for k in range(400))
    for head in (backbone.init_items(Draws(5), keys), backbone.init_private(Draws(5), keys)):
        assert head.shape[1] == (64 if name == "neumf" else 32)
        assert head.std() == pytest.approx(0.01, rel=0.03)
        assert len(np.unique(head, axis=0)) == len(head)
    heads = backbone.init_heads(Draws(5))
    fans = {"user_layer": 64 + 64, "item_layer": 64 + 64, "layer_1": 64 + 128, "layer_2": 128 + 64}
    fans |= {"out": 97, "out_gmf": 97} if name == "neumf" else {"out": 65}
    for k, head in heads.items():
        if k in fans:
            bound = np.sqrt(6 / fans[k])
            assert 0.9 * bound < np.abs(head).max() <= bound
            assert abs(head.mean()) < 0.25 * bound
        else:
            assert not head.any()
    assert not np.array_equal(heads["user_layer"], heads["item_layer"])
    assert sum(v.size for v in heads.values()) == 64 * 64 + 64 + 64 * 128 + 128 + 128 * 64 + 64 + 65 + 32 * (
        name == "neumf"
    )


@every_tower
def test_layers_start_as_torch_starts_linear_ones(name: str) -> None:
    cls = find_backbone_class(name)
    heads = cls(cls.Config(layer_init="torch")).init_heads(Draws(5))
    layers = {"bias_0": nn.Linear(64, 64), "bias_1": nn.Linear(64, 128), "bias_2": nn.Linear(128, 64)}
    layers |= {"user_layer": layers["bias_0"], "item_layer": layers["bias_0"]}
    layers |= {"layer_1": layers["bias_1"], "layer_2": layers["bias_2"]}
    last = nn.Linear(96 if name == "neumf" else 64, 1)
    layers |= {"out": last, "out_gmf": last, "out_bias": last}
    for k, head in heads.items():
        bound = 1 / np.sqrt(layers[k].in_features)
        assert np.abs(head).max() <= bound
        if head.size > 1:
            largest = layers[k].weight.abs().max().item()
            assert np.abs(head).max() == pytest.approx(largest, rel=0.15)
            assert head.std() == pytest.approx(layers[k].weight.std().item(), rel=0.2)
    assert heads["out_bias"][0] != 0


# what they compute


@every_tower
def test_scores_are_those_of_torchs_layers(name: str) -> None:
    backbone, private, heads, items = some_model(name)
    user, item = np.repeat(np.arange(9), 13), np.tile(np.arange(13), 9)
    want = by_torch(name, private[user], heads, items[item], 6).reshape(9, 13)
    np.testing.assert_allclose(score_catalogue(backbone, private, heads, items), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(score_aligned(backbone, private[user], heads, items[item]).reshape(9, 13), want, 1e-4)
    lists = np.random.default_rng(0).integers(0, 13, (9, 4)).astype(np.int32)
    result = score_lists(backbone, private, heads, items, lists)
    np.testing.assert_allclose(result, np.take_along_axis(want, lists, 1), rtol=1e-4, atol=1e-5)


@every_tower
def test_groups_have_towers_of_their_own(name: str) -> None:
    backbone, private, _, items = some_model(name)
    rng = np.random.default_rng(1)
    heads = {k: rng.normal(size=(3, *shape)).astype("f4") for k, shape in backbone.list_head_shapes().items()}
    own_values = {k: v.reshape(3, 3, -1) for k, v in backbone.split_private(private).items()}
    got = backbone.compute_group_logits(own_values, heads, items[:9].reshape(3, 3, -1))
    tensors = [
        {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in candidate.items()}
        for candidate in (own_values, heads)
    ]
    same = backbone.compute_group_logits(*tensors, torch.from_numpy(items[:9].reshape(3, 3, -1)))
    np.testing.assert_allclose(got, same.numpy(), rtol=1e-5, atol=1e-5)
    for g in range(3):
        own = {k: v[g] for k, v in heads.items()}
        want = by_torch(name, private[3 * g : 3 * g + 3], own, items[3 * g : 3 * g + 3], 6)
        np.testing.assert_allclose(got[g], want, rtol=1e-4, atol=1e-5)


@every_tower
def test_score_is_independent_of_the_cohort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, private, heads, _ = some_model(name)
    items = np.random.default_rng(2).normal(size=(1100, backbone.item_width)).astype("f4")
    whole = score_catalogue(backbone, private, heads, items)
    assert np.array_equal(score_catalogue(backbone, private[4:6], heads, items[:700]), whole[4:6, :700])
    user, item = np.arange(700) % 9, np.arange(700)
    some = score_aligned(backbone, private[user], heads, items[item])
    fewer = score_aligned(backbone, private[user[50:90]], heads, items[item[50:90]])
    np.testing.assert_allclose(fewer, some[50:90], rtol=1e-5, atol=1e-5)  # BLAS rounds by shape on some processors
    monkeypatch.setattr(catalogue_scores, "CHUNK", 4)
    assert np.array_equal(score_catalogue(backbone, private, heads, items), whole)


@every_tower
def test_users_can_be_scored_with_their_own_rows(name: str) -> None:
    backbone, private, heads, items = some_model(name)
    own = Ragged.from_lists([[10, 4], [3], [1], [], [5, 4], [0, 6, 5], [], [12], [2]])
    change = np.random.default_rng(5).normal(size=(len(own.ids), items.shape[1])).astype("f4")
    got = score_with_own_rows(backbone, private, heads, items, replace(own, values={"moved": change}))
    for u in range(9):
        table = items.copy()
        table[own.row(u)] += change[own.ptr[u] : own.ptr[u + 1]]
        want = score_catalogue(backbone, private[u : u + 1], heads, table)
        np.testing.assert_allclose(got[u], want[0], rtol=1e-4, atol=1e-5)


# how a cohort of them learns

PFEDME = {"optimiser": "pfedme", "pfedme": {"lam": 2.0, "inner_steps": 3, "inner_lr": 0.1, "eta": 0.2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimiser": "adam"},
    "lazy-adam": {"optimiser": "lazy-adam"},
    "lazy-adam with decay": {"optimiser": "lazy-adam", "weight_decay": 0.2},
    "lazy-adam by torch": {"optimiser": "lazy-adam", "weight_decay": 0.2, "stepper": "autograd"},
    "pfedme": PFEDME,
    "bpr": {"objective": "bpr", "negatives": 2, "l2": 0.05},  # Adam would blow up the rounding of slopes that cancel
    # decay, for torch's sparse Adam takes a row whose slope is all 0, behind a dead unit, for one that is not used
    "silos": {"silos": 3, "optimiser": "lazy-adam", "weight_decay": 0.2},
    "silos by torch": {"silos": 3, "optimiser": "lazy-adam", "weight_decay": 0.2, "stepper": "autograd"},
    "silos, whole people": {"silos": 3, "optimiser": "lazy-adam", "weight_decay": 0.2, "batches": "people"},
    "silos, pfedme": {**PFEDME, "silos": 3},
    "pfedme by torch": {**PFEDME, "stepper": "autograd"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("crew", [4096, 20], ids=["one crew", "crews"])
@every_tower
def test_a_cohort_learns_what_its_clients_learn_one_by_one(
    name: str, crew: int, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_stepper, "_SHARD_SAMPLES", crew)
    backbone = make_backbone(name, lr=0.01, item_lr_scale=1.0)
    fed = federate(uneven(), backbone, batch_size=18, local_epochs=2, **SETTINGS[setting])
    progress = started(fed)
    view = cohort(fed, progress)
    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws)
    trained = train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    assert trained.local.n_steps.min() < trained.local.n_steps.max()
    np.testing.assert_allclose(after.items, slow.items, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=1e-5, atol=1e-5)
    for k, head in after.heads.items():
        np.testing.assert_allclose(head, slow.heads[k], rtol=1e-5, atol=1e-5)
        assert np.abs(head - view.heads[k]).max() > 1e-5 or (setting, k) == ("bpr", "out_bias")
    if "pfedme" in setting:
        personal = np.concatenate([entry[1] for entry in slow.personal])
        np.testing.assert_allclose(trained.local.personal["private"], personal, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("silos", [0, 3])
@pytest.mark.parametrize("stepper", ["auto", "autograd"])
@every_tower
def test_shard_sizes_change_no_bit(name: str, stepper: str, silos: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"batch_size": 18, "optimiser": "lazy-adam", "stepper": stepper, "silos": silos}
    fed = federate(uneven(), make_backbone(name), **train)
    progress = started(fed)
    observations = []
    for crew, shares in ((4096, 1), (30, 3), (1, 100)):
        monkeypatch.setattr(grouped_stepper, "_SHARD_SAMPLES", crew)
        monkeypatch.setattr(tower_stepper, "_SHARES", shares)
        trained = train_once(fed, progress).local
        observations.append((trained.rows.copy(), trained.private, trained.heads["layer_1"]))
    for other in observations[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(observations[0], other, strict=True))


def test_the_compiled_lazy_adam_is_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federate(
        uneven(), make_backbone("neumf"), batch_size=18, optimiser="lazy-adam", weight_decay=0.1, stepper="autograd"
    )
    fast = train_once(fed, progress := started(fed)).local
    assert OPTIMISERS["lazy-adam"] is LazyAdam
    monkeypatch.setattr(grouped_stepper, "CompiledLazyAdam", LazyAdam)
    slow = train_once(fed, progress).local
    np.testing.assert_allclose(fast.rows, slow.rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.heads["layer_1"], slow.heads["layer_1"], rtol=1e-5, atol=1e-6)
