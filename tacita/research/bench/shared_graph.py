"""A round of FedShare against the naive loop, in one run: a torch module and an optimiser for every client."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer, SparseAdam

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Ints
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.research.bench.naive_loop import make_embedding, reset_torch_threads
from tacita.research.bench.round_runner import RoundRunner
from tacita.research.bench.timing import (
    Report,
    Work,
    describe_machine,
    divide_sides,
    find_side_medians,
    report_figures,
    report_repeats,
    time_in_turns,
)
from tacita.round.plan import Federation

SHARING, GRAPH = "sharing", "shared-graph"


def bench_sharing(federation: Federation, repeats: int = 5) -> Report:
    """Rounds of block 0: whole, the devices' share of them, and naive, in turns after a warm-up."""
    _refuse_without_naive_loop(federation)
    device_parts = []
    other_parts = []
    graph = None
    for part in federation.parts:
        if part.name == SHARING:
            device_parts.append(part)
        elif part.name == GRAPH:
            graph = part.config
        else:
            other_parts.append(part.name)
    devices = replace(federation, parts=tuple(device_parts))
    naive = NaiveSharing(federation, graph)
    sides: dict[str, Work] = {
        "fast": RoundRunner(federation, warm_up=1).play_round,
        "devices": RoundRunner(devices, warm_up=1).play_round,
        "naive": naive.run_round,
    }
    wall, processor = time_in_turns(sides, repeats, reset_torch_threads)
    report: Report = {
        "bench": "rounds of sharing",
        "data": federation.stream.name,
        "method": federation.config.method,
        "clients": naive.n_clients,
        "shared": len(naive.shared_user),
        "local_epochs": federation.config.train.local_epochs,
    }
    medians = find_side_medians(wall)
    processor_medians = find_side_medians(processor)
    server_seconds = max(0.0, medians["fast"] - medians["devices"])
    report |= report_figures(medians, "s", 3)
    report["server_s"] = round(server_seconds, 3)
    report |= report_figures(processor_medians, "cpu_s", 3)
    report["ratio"] = divide_sides(medians, "naive", "fast", 1)
    report["cpu_ratio"] = divide_sides(processor_medians, "naive", "fast", 1)
    if other_parts:
        report["not in the naive loop"] = other_parts
    report |= report_repeats(wall, "s", 3)
    report["machine"] = describe_machine()
    return report


def _refuse_without_naive_loop(federation: Federation) -> None:
    """Refuse models and objectives that the naive loop does not have."""
    settings = federation.config.train
    is_known_model = federation.backbone.name == "ego" and settings.objective == "bpr"
    if not is_known_model or settings.silos:
        raise TacitaError("the naive loop of sharing has backbone 'ego' with train.objective = 'bpr' and no silos.")


class NaiveSharing:
    """The loop as one would first write it, without avoidable waste.

    Per client: a module with its own copy of the item table, negatives drawn at once, all pairs in one batch, and
    SparseAdam, which like ours moves only rows of the batch; then the weighted mean of all tables. The server: a
    sparse matrix for its graph, autograd and Adam.
    """

    def __init__(self, federation: Federation, graph: Any) -> None:
        progress = make_initial_progress(federation)
        begin_block(federation, progress, 0)
        server = progress.server
        self.settings = federation.config.train
        self.graph = graph
        self.rates = federation.scorer.list_learning_rates(len(server.items))
        self.rng = np.random.default_rng(federation.config.seed)
        self.items = torch.from_numpy(server.items.copy())
        self.vectors = torch.from_numpy(progress.clients.private.copy())
        self.own = federation.stream.blocks[0].train
        user_keys = federation.stream.user_keys[: len(self.own)]
        shared = server.shared.take_sender_lists(user_keys)
        is_shared = shared.holds(self.own.rows(), self.own.ids)
        self.local = self.own.filter_entries(~is_shared)
        self.users = np.flatnonzero(self.own.counts() > 0)
        participation = self.settings.participation
        rate = 1.0 if participation.kind == "all" else participation.rate
        n_drawn = round(rate * len(self.users))
        self.n_clients = max(1, n_drawn)
        _, self.shared_user = np.unique(server.shared.sender, return_inverse=True)
        self.shared_item = server.shared.item

    def run_round(self) -> None:
        total = torch.zeros_like(self.items)
        weight = 0
        for user in self.rng.choice(self.users, self.n_clients, replace=False):
            local_items = self.local.row(int(user))
            n_local = len(local_items)
            if not n_local:  # a user who shared everything has nothing to learn from
                continue
            model = self._train_client_model(int(user), local_items)
            total += n_local * model.rows.weight.detach()
            weight += n_local
        self.items = total / max(1, weight)
        if self.graph is not None and len(self.shared_user):
            self._refine_shared_table()

    def _train_client_model(self, user: int, local_items: Ints) -> _ClientModel:
        model = _ClientModel(self.items, self.vectors[user], local_items)
        vector_group = {"params": [model.p.weight], "lr": self.rates["p"]}
        rows_group = {"params": [model.rows.weight], "lr": self.rates["rows"]}
        optimiser: Optimizer = SparseAdam([vector_group, rows_group])
        positives = to_indices(local_items).repeat(self.settings.negatives)
        owned = np.unique(self.own.row(user))
        has_negatives = len(owned) < len(self.items)
        n_epochs = self.settings.local_epochs if has_negatives else 0
        only_user = np.zeros(len(positives), np.int64)
        for _ in range(n_epochs):
            negatives = to_indices(self._draw_negatives(only_user, owned))
            optimiser.zero_grad()
            loss: Any = model.compute_loss(positives, negatives, self.settings)
            loss.backward()
            optimiser.step()
        self.vectors[user] = model.p.weight.detach()[0]
        return model

    def _draw_negatives(self, user: AnyArray, pairs: AnyArray) -> AnyArray:
        """An item for each of these users that is not theirs; their own items are drawn once more.

        `pairs`: a user times the number of items, plus an item of theirs.
        """
        n_items = len(self.items)
        items = np.empty(len(user), np.int64)
        pending = np.arange(len(user))
        while len(pending):
            items[pending] = self.rng.integers(0, n_items, len(pending))
            drawn_pairs = user[pending] * n_items + items[pending]
            pending = pending[np.isin(drawn_pairs, pairs)]
        return items

    def _refine_shared_table(self) -> None:
        """One pass over the shared pairs; a user who shared everything has nothing to rank it above."""
        config = self.graph
        user = self.shared_user
        item = self.shared_item
        table = nn.Parameter(self.items.clone())
        n_items = len(table)
        optimiser = Adam([table], lr=config.lr)
        graph = _SharedGraph(user, item, n_items)
        pairs = user * n_items + item
        shared_items = np.unique(item)
        n_shared = np.bincount(user)
        has_negatives = n_shared[user] < n_items
        order = self.rng.permutation(np.flatnonzero(has_negatives))
        for start in range(0, len(order), config.edge_batch):
            edges = order[start : start + config.edge_batch]
            negatives = self._draw_negatives(user[edges], pairs)
            sampled = self.rng.permutation(shared_items)[: config.item_batch]
            batch = _EdgeBatch(
                user=to_indices(user[edges]),
                positive=to_indices(item[edges]),
                negative=to_indices(negatives),
                items=to_indices(sampled),
            )
            optimiser.zero_grad()
            loss: Any = _compute_refinement_loss(config, graph, table, batch)
            loss.backward()
            optimiser.step()
        self.items = table.detach()


@dataclass(frozen=True)
class _EdgeBatch:
    """Shared pairs with a negative for each, and items of the contrastive term."""

    user: Tensor
    positive: Tensor
    negative: Tensor
    items: Tensor


def _compute_refinement_loss(config: Any, graph: _SharedGraph, table: Tensor, batch: _EdgeBatch) -> Tensor:
    """BPR over shared pairs, the contrastive term of items, and the penalty of the used rows."""
    people, rows = graph.propagate(table, config.layers)
    users = people[batch.user]
    positive_scores = functional.cosine_similarity(users, rows[batch.positive], eps=1e-8)
    negative_scores = functional.cosine_similarity(users, rows[batch.negative], eps=1e-8)
    loss = torch.zeros(())
    if config.bpr:
        margins = config.bpr_scale * (positive_scores - negative_scores)
        loss = -functional.logsigmoid(margins).mean()
    if config.lam1:
        before = functional.normalize(table[batch.items])
        after = functional.normalize(rows[batch.items])
        similarity = before @ after.T / config.tau
        same = torch.arange(len(batch.items))
        contrast = functional.cross_entropy(similarity, same)
        loss = loss + config.lam1 * contrast
    batch_items = torch.cat([batch.positive, batch.negative])
    used = torch.unique(batch_items)
    squares = _sum_squares(table[used])
    penalty: Tensor = config.lam * squares / len(batch.user)
    return loss + penalty


class _ClientModel(nn.Module):
    """A client: its vector, its own copy of the table, and its items."""

    def __init__(self, items: Tensor, vector: Tensor, own_items: Ints) -> None:
        super().__init__()
        self.rows = make_embedding(items)
        self.p = make_embedding(vector[None])
        self.own_items = to_indices(own_items)

    def compute_loss(self, positives: Tensor, negatives: Tensor, settings: TrainConfig) -> Tensor:
        """Cosine BPR; every positive is one of the client's own items."""
        only_user = torch.zeros(1, dtype=torch.long)
        p = self.p(only_user)
        share = 0.5 / len(self.own_items) ** 0.5
        positive_rows = self.rows(positives)
        negative_rows = self.rows(negatives)
        own_sum = self.rows(self.own_items).sum(0, keepdim=True)
        user = 0.5 * p + share * own_sum
        positive_vectors = 0.5 * positive_rows + share * p
        positive_scores = functional.cosine_similarity(user, positive_vectors)
        negative_scores = functional.cosine_similarity(user, 0.5 * negative_rows)
        margins = settings.bpr_scale * (positive_scores - negative_scores)
        ranking_loss: Tensor = -functional.logsigmoid(margins).mean()
        squares = _sum_squares(p) + _sum_squares(positive_rows) + _sum_squares(negative_rows)
        penalty = settings.l2 * squares / len(positives)
        return ranking_loss + penalty


def _sum_squares(values: Tensor) -> Tensor:
    return (values**2).sum()


class _SharedGraph:
    """The normalised graph of people and items, and the means that people start from."""

    def __init__(self, user: AnyArray, item: AnyArray, n_items: int) -> None:
        n_people = int(user.max()) + 1
        n_nodes = n_people + n_items
        user_degree = np.bincount(user)
        item_degree = np.bincount(item, minlength=n_items)
        degrees = user_degree[user] * item_degree[item]
        weight = 1 / np.sqrt(degrees)
        item_node = n_people + item
        sources = np.concatenate([user, item_node])
        targets = np.concatenate([item_node, user])
        both_weights = np.concatenate([weight, weight])
        self.n_people = n_people
        edges = np.stack([sources, targets])
        self.adjacency = _build_matrix(edges, both_weights, (n_nodes, n_nodes))
        shares = 1 / user_degree[user]
        pairs = np.stack([user, item])
        self.means = _build_matrix(pairs, shares, (n_people, n_items))

    def propagate(self, table: Tensor, n_layers: int) -> tuple[Tensor, Tensor]:
        """Vectors of people and rows of items: the mean over all layers."""
        people = torch.sparse.mm(self.means, table)
        layers = [torch.cat([people, table])]
        for _ in range(n_layers):
            layer = torch.sparse.mm(self.adjacency, layers[-1])
            layers.append(layer)
        mean = torch.stack(layers).mean(0)
        return mean[: self.n_people], mean[self.n_people :]


def to_indices(numbers: AnyArray) -> Tensor:
    return torch.from_numpy(numbers).long()


def _build_matrix(places: AnyArray, weight: AnyArray, size: tuple[int, int]) -> Tensor:
    values = torch.from_numpy(weight.astype(np.float32))
    indices = torch.from_numpy(places)
    with warnings.catch_warnings():  # that such matrices are new, and that we know what is in them
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_coo_tensor(indices, values, size)
        return matrix.coalesce().to_sparse_csr()
