"""The naive federated round: one torch module, DataLoader and optimiser for every client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tacita.core.types import Floats, Ints
from tacita.federation.rounds import Progress
from tacita.kernels.threads import threads_in_use
from tacita.models.scorer import Scorer
from tacita.round.plan import Federation

Optimisers = list[Optimizer]


def reset_torch_threads() -> None:
    """Give torch as many threads as the fast path uses."""
    torch.set_num_threads(threads_in_use())


def make_embedding(rows: Tensor) -> nn.Embedding:
    """A table with these rows, of which a step moves only those of its batch."""
    n_rows, width = rows.shape
    return nn.Embedding(n_rows, width, sparse=True, _weight=rows.clone())


def draw_naive_samples(rng: Generator, positives: Ints, n_items: int, ratio: int) -> tuple[Ints, Floats]:
    """Positives with `ratio` negatives each, drawn at once, and their labels."""
    n_wanted = ratio * len(positives)
    pool = rng.integers(0, n_items, 2 * n_wanted + 16)
    is_negative = ~np.isin(pool, positives)
    negatives = pool[is_negative][:n_wanted]
    item = np.concatenate([positives, negatives])
    label = np.zeros(len(item), np.float32)
    label[: len(positives)] = 1
    return item.astype(np.int32), label


def load_batches(item: Ints, label: Floats, batch_size: int) -> DataLoader[Any]:
    """Samples as shuffled batches."""
    items = torch.from_numpy(item).long()
    labels = torch.from_numpy(label)
    samples = TensorDataset(items, labels)
    return DataLoader(samples, batch_size=batch_size, shuffle=True)


class NaiveLoop:
    """The per-client loop as one would first write it, without avoidable waste.

    Per client: a fresh torch module with its own copy of the item table, vectorised negatives, a TensorDataset
    behind a DataLoader, torch SGD with one rate per group; then the mean of all tables.
    """

    def __init__(self, federation: Federation, progress: Progress) -> None:
        block = federation.stream.blocks[0]
        self.federation = federation
        self.items = torch.from_numpy(progress.server.items.copy())
        self.private = progress.clients.private.copy()
        self.rng = np.random.default_rng(federation.config.seed)
        self.train = block.train
        self.users = np.flatnonzero(block.train.counts() > 0)
        self.n_items = block.n_items

    def run_round(self) -> None:
        total = torch.zeros_like(self.items)
        for user in self.users:
            total += self._train_client_table(int(user))
        self.items = total / len(self.users)

    def _train_client_table(self, user: int) -> Tensor:
        """Train a client and return its item table."""
        backbone = self.federation.scorer
        settings = self.federation.config.train
        model = _ClientModule(backbone, self.items, self.private[user])
        positives = self.train.row(user)
        ratio = settings.negatives
        item, label = draw_naive_samples(self.rng, positives, self.n_items, ratio)
        loader = load_batches(item, label, settings.batch_size)
        optimisers = self._make_optimisers(model)
        loss_of = nn.BCEWithLogitsLoss()
        for batch_item, batch_label in loader:
            for optimiser in optimisers:
                optimiser.zero_grad()
                logits = model(batch_item)
                loss_of(logits, batch_label).backward()
                optimiser.step()
        vectors = []
        for name in backbone.private_layout:
            vector = model.groups[name].detach()
            vectors.append(vector.reshape(-1))
        self.private[user] = torch.cat(vectors).numpy()
        table: Tensor = model.table.weight.detach()
        return table

    def _make_optimisers(self, model: _ClientModule) -> Optimisers:
        """One for each phase of the backbone, with the parameters that move in it."""
        backbone = self.federation.scorer
        rates = backbone.list_learning_rates(self.n_items)
        optimisers: Optimisers = []
        for moving in backbone.phases:
            groups = []
            for name, parameter in model.groups.items():
                if _is_trained(name, moving):
                    groups.append({"params": [parameter], "lr": rates[name]})
            optimisers.append(SGD(groups, lr=0.1))
        return optimisers


def _is_trained(name: str, moving: tuple[str, ...]) -> bool:
    kind = "rows" if name == "rows" else "private"
    return kind in moving


class _ClientModule(nn.Module):
    """A client with its private parameters and its own copy of the item table."""

    def __init__(self, backbone: Scorer, items: Tensor, private: Floats) -> None:
        super().__init__()
        self.backbone = backbone
        n_items, width = items.shape
        self.table = nn.Embedding(n_items, width, _weight=items.clone())
        vector = torch.from_numpy(private[None].copy())
        own = {}
        for name, value in backbone.split_private(vector).items():
            own[name] = nn.Parameter(value.clone())
        self.own = nn.ParameterDict(own)
        self.groups: dict[str, Any] = dict(self.own)
        self.groups["rows"] = self.table.weight

    def forward(self, item: Tensor) -> Tensor:
        n = len(item)
        own = {}
        for name, value in self.own.items():
            own[name] = value.expand(n, -1)
        rows = self.table(item)
        scores: Tensor = self.backbone.compute_logits(own, {}, rows)
        return scores
