"""A round of prediction transfer against the naive loop, in one run: one torch module, DataLoader and Adam a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, SparseAdam

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Floats, Ints
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.models.scorer import Scorer
from tacita.research.bench.naive_loop import (
    Optimisers,
    draw_naive_samples,
    load_batches,
    make_embedding,
    reset_torch_threads,
)
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

Tensors = dict[str, Tensor]


def bench_scores(federation: Federation, repeats: int = 5) -> Report:
    """Rounds of block 0: fast, fast without the server's agents, and naive, in turns after a warm-up."""
    for backbone in (federation.scorer, _find_server_backbone(federation)):
        if backbone.reads_context:
            raise TacitaError(f"the naive loop has no model '{backbone.name}'; use neumf, neuncf or mf.")
    sides: dict[str, Work] = {}
    sides["fast"] = RoundRunner(federation, warm_up=1).play_round  # in the first round the server has nothing to send
    without_agents = _drop_agents(federation)
    if without_agents is not None:
        sides["without_agents"] = RoundRunner(without_agents, warm_up=1).play_round
    sides["naive"] = NaiveTransfer(federation).run_round
    wall, processor = time_in_turns(sides, repeats, reset_torch_threads)
    medians = find_side_medians(wall)
    report: Report = {
        "bench": "rounds of prediction transfer",
        "data": federation.stream.name,
        "method": federation.config.method,
        "backbone": federation.scorer.name,
        "clients": NaiveTransfer.count_participants(federation),
        "local_epochs": federation.config.train.local_epochs,
    }
    report |= report_figures(medians, "s", 3)
    report |= report_figures(find_side_medians(processor), "cpu_s", 3)
    report["ratio"] = divide_sides(medians, "naive", "fast", 1)
    if without_agents is not None:
        agents_seconds = max(0.0, medians["fast"] - medians["without_agents"])
        report["agents_s"] = round(agents_seconds, 3)
        report["agents_share"] = round(agents_seconds / medians["without_agents"], 3)
    report |= report_repeats(wall, "s", 3)
    report["machine"] = describe_machine()
    return report


def _find_server_backbone(federation: Federation) -> Scorer:
    backbone: Scorer = getattr(federation.parts[0], "server_backbone", federation.scorer)
    return backbone


def _drop_agents(federation: Federation) -> Federation | None:
    """The same run in which all uploads weigh the same and nothing is picked; None: it has no agents."""
    part = federation.parts[0]
    weighs_uploads = getattr(part.config, "weighting", False)
    picks_items = getattr(part.config, "select", "") == "agent"
    if not weighs_uploads and not picks_items:
        return None
    config = part.config.model_copy(update={"weighting": False, "select": "none"})
    plain_part = type(part)(config, part.context)
    return replace(federation, parts=(plain_part, *federation.parts[1:]))


class NaiveTransfer:
    """The loop as one would first write it, without avoidable waste.

    Per client: a torch module with its own item table that lives from round to round, vectorised negatives, a
    TensorDataset behind a DataLoader, fresh optimisers. Tables move by SparseAdam, which like ours moves only rows of
    the batch. The server trains one module on batches of all uploads; there are no agents, and nothing is sent back.
    """

    def __init__(self, federation: Federation) -> None:
        progress = make_initial_progress(federation)
        begin_block(federation, progress, 0)
        self.federation = federation
        self.rng = np.random.default_rng(federation.config.seed)
        self.train = federation.stream.blocks[0].train
        self.config = federation.parts[0].config
        self.backbone = federation.scorer
        self.items = progress.server.items
        self.users = np.flatnonzero(self.train.counts() > 0)
        self.clients: dict[int, _NaiveModel] = {}
        self.initial_private = progress.clients.private
        self.server = self._build_server(_find_server_backbone(federation))
        self.server_optimisers = self.server.make_optimisers(len(self.items))

    def _build_server(self, teacher: Scorer) -> _NaiveModel:
        """The server's model, with rows of its own where its width differs from the clients'."""
        draws = self.federation.draws
        stream = self.federation.stream
        block = stream.blocks[0]
        rows = self.items
        if teacher.item_width != rows.shape[1]:
            rows = teacher.init_items(draws, stream.item_keys[: block.n_items])
        people = teacher.init_private(draws, stream.user_keys[: block.n_users])
        return _NaiveModel(teacher, teacher.init_heads(draws), people, rows)

    @staticmethod
    def count_participants(federation: Federation) -> int:
        has_data = federation.stream.blocks[0].train.counts() > 0
        n_active = int(has_data.sum())
        participation = federation.config.train.participation
        if participation.kind == "all":
            return n_active
        return max(1, round(participation.rate * n_active))

    def run_round(self) -> None:
        n_participants = self.count_participants(self.federation)
        participants = self.rng.choice(self.users, n_participants, replace=False)
        users = []
        items = []
        labels = []
        for participant in participants:
            sent_items, sent_labels = self._train_client_for_upload(int(participant))
            users.append(np.full(len(sent_items), participant))
            items.append(sent_items)
            labels.append(sent_labels)
        user = torch.from_numpy(np.concatenate(users))
        item = torch.from_numpy(np.concatenate(items))
        label = torch.from_numpy(np.concatenate(labels))
        self._train_server(user, item.long(), label)

    def _train_server(self, user: Tensor, item: Tensor, label: Tensor) -> None:
        """Some epochs on all uploads."""
        batch_size = getattr(self.config, "server_batch", 1024)
        n_epochs = getattr(self.config, "server_epochs", 4)
        for _ in range(n_epochs):
            order = torch.randperm(len(user))
            for start in range(0, len(user), batch_size):
                batch = order[start : start + batch_size]
                logits = self.server(user[batch], item[batch])
                _step_optimisers(self.server_optimisers, logits, label[batch])

    def _train_client_for_upload(self, user: int) -> tuple[Ints, Floats]:
        """Train one client and return its upload: some items with mixed labels."""
        settings = self.federation.config.train
        model = self._find_client(user)
        n_items = len(self.items)
        positives = self.train.row(user)
        item, label = draw_naive_samples(self.rng, positives, n_items, settings.negatives)
        loader = load_batches(item, label, settings.batch_size)
        optimisers = model.make_optimisers(n_items)
        for _ in range(settings.local_epochs):
            for batch_item, batch_label in loader:
                logits = model(_select_only_user(len(batch_item)), batch_item)
                _step_optimisers(optimisers, logits, batch_label)
        with torch.no_grad():
            items = torch.from_numpy(item).long()
            logits = model(_select_only_user(len(items)), items)
            predictions = torch.sigmoid(logits).numpy()
        share = self.rng.uniform(0.3, 0.7)
        n_sent = max(1, int(share * len(item)))
        sent = self.rng.choice(len(item), n_sent, replace=False)
        mixed = 0.5 * label + 0.5 * predictions
        sent_labels = mixed[sent].astype(np.float32)
        return item[sent], sent_labels

    def _find_client(self, user: int) -> _NaiveModel:
        """The module of a client; a new one in its first round."""
        if user not in self.clients:
            heads = self.backbone.init_heads(self.federation.draws)
            private = self.initial_private[user : user + 1]
            model = _NaiveModel(self.backbone, heads, private, self.items)
            self.clients[user] = model
        return self.clients[user]


def _select_only_user(n: int) -> Tensor:
    """The number of a client's only user, for n samples."""
    return torch.zeros(n, dtype=torch.long)


class _NaiveModel(nn.Module):
    """A backbone over some users and all items."""

    def __init__(self, backbone: Scorer, heads: Arrays, users: Floats, items: Floats) -> None:
        super().__init__()
        self.backbone = backbone
        self.users = make_embedding(torch.from_numpy(users))
        self.items = make_embedding(torch.from_numpy(items))
        parameters = {}
        for name, head in heads.items():
            tensor = torch.from_numpy(head.copy())
            parameters[name] = nn.Parameter(tensor[None])
        self.heads = nn.ParameterDict(parameters)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        private = self.backbone.split_private(self.users(user))
        heads = dict(self.heads.items())
        rows = self.items(item)
        if self.backbone.grouped:
            return self._score_group(private, heads, rows)
        n = len(user)
        wide = {}
        for name, head in heads.items():
            shape = head.shape[1:]
            wide[name] = head.expand(n, *shape)
        scores: Tensor = self.backbone.compute_logits(private, wide, rows)
        return scores

    def _score_group(self, private: Tensors, heads: Tensors, rows: Tensor) -> Tensor:
        """Scores of backbones that score groups of samples: all samples are one group."""
        grouped = {}
        for name, value in private.items():
            grouped[name] = value[None]
        scores: Tensor = self.backbone.compute_group_logits(grouped, heads, rows[None])
        return scores[0]

    def make_optimisers(self, n_items: int) -> Optimisers:
        rates = self.backbone.list_learning_rates(n_items)
        first_private = next(iter(self.backbone.private_layout))
        users = {"params": [self.users.weight], "lr": rates[first_private]}
        items = {"params": [self.items.weight], "lr": rates["rows"]}
        optimisers: Optimisers = [SparseAdam([users, items])]
        if len(self.heads):
            first_head = next(iter(self.heads))
            head_optimiser = Adam(self.heads.values(), lr=rates[first_head])
            optimisers.append(head_optimiser)
        return optimisers


def _step_optimisers(optimisers: Optimisers, logits: Tensor, labels: Tensor) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss: Any = functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()
