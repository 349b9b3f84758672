"""A round of prediction transfer against the naive loop, in one run: one torch module, DataLoader and Adam a client."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tacita.core.errors import TacitaError
from tacita.core.types import Floats, Ints
from tacita.federation.rounds import Progress, begin_block, run_round, start_run
from tacita.kernels.threads import threads_in_use
from tacita.models.scorer import Scorer
from tacita.research.bench.harness import describe_machine
from tacita.round.plan import Federation


def bench_scores(fed: Federation, repeats: int = 5) -> dict[str, Any]:
    """Rounds of block 0: fast, fast without the server's agents, and naive, in turns after a warm-up."""
    for backbone in (fed.backbone, getattr(fed.parts[0], "server_backbone", fed.backbone)):
        if backbone.reads_context:
            raise TacitaError(f"the naive loop has no model '{backbone.name}'; use neumf, neuncf or mf.")
    sides = {"fast": _prepare_rounds(fed)}
    if (plain := _drop_agents(fed)) is not None:
        sides["without_agents"] = _prepare_rounds(plain)
    sides["naive"] = NaiveTransfer(fed).run_round
    took: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            torch.set_num_threads(threads_in_use())
            began, worked = time.perf_counter(), time.process_time()
            work()
            took[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - worked)
    middle = {name: statistics.median(times) for name, times in took.items()}
    train = fed.config.train
    agents = {}
    if plain is not None:
        spent = max(0.0, middle["fast"] - middle["without_agents"])
        agents = {"agents_s": round(spent, 3), "agents_share": round(spent / middle["without_agents"], 3)}
    return {
        "bench": "rounds of prediction transfer",
        "data": fed.stream.name,
        "method": fed.config.method,
        "backbone": fed.backbone.name,
        "clients": NaiveTransfer.count_participants(fed),
        "local_epochs": train.local_epochs,
        **{f"{name}_s": round(value, 3) for name, value in middle.items()},
        **{f"{name}_cpu_s": round(statistics.median(times), 3) for name, times in busy.items()},
        "ratio": round(middle["naive"] / middle["fast"], 1),
        **agents,
        **{f"{name}_s_all": [round(t, 3) for t in times] for name, times in took.items()},
        "machine": describe_machine(),
    }


def _drop_agents(fed: Federation) -> Federation | None:
    """The same run in which all uploads weigh the same and nothing is picked; None: it has no agents."""
    part = fed.parts[0]
    if not getattr(part.config, "weighting", False) and getattr(part.config, "select", "") != "agent":
        return None
    changed = part.config.model_copy(update={"weighting": False, "select": "none"})
    return replace(fed, parts=(type(part)(changed, part.context), *fed.parts[1:]))


def _prepare_rounds(fed: Federation) -> Callable[[], object]:
    """Plays a round when called, from the second on: in the first the server has nothing to send."""
    progress = start_run(fed)
    begin_block(fed, progress, 0)

    def one() -> None:
        progress.server, _ = run_round(fed, progress.server, progress.devices)

    one()
    return one


class NaiveTransfer:
    """The loop as one would first write it, without avoidable waste.

    Per client: a torch module with its own item table, kept from round to round, vectorised negatives, a TensorDataset
    behind a DataLoader, fresh optimisers. Tables move by SparseAdam, which like ours moves only rows of the batch. The
    server trains one module on batches of all uploads; there are no agents, and nothing is sent back.
    """

    def __init__(self, fed: Federation) -> None:
        self.federation, self.rng = fed, np.random.default_rng(fed.config.seed)
        progress: Progress = start_run(fed)
        begin_block(fed, progress, 0)
        block, part = fed.stream.blocks[0], fed.parts[0]
        self.train, self.config = block.train, part.config
        self.backbone: Scorer = fed.scorer
        self.teacher: Scorer = getattr(part, "server_backbone", fed.scorer)
        self.items = progress.server.items
        self.users = np.flatnonzero(block.train.counts() > 0)
        self.clients: dict[int, Any] = {}
        self.start = progress.clients.private
        keys = fed.stream.item_keys[: block.n_items]
        rows = (
            self.items if self.teacher.item_width == self.items.shape[1] else self.teacher.init_items(fed.draws, keys)
        )
        people = self.teacher.init_private(fed.draws, fed.stream.user_keys[: block.n_users])
        self.server = _NaiveModel(self.teacher, self.teacher.init_heads(fed.draws), people, rows)
        self.server_steps = self.server.make_optimisers(len(self.items))

    @staticmethod
    def count_participants(fed: Federation) -> int:
        active, plan = int((fed.stream.blocks[0].train.counts() > 0).sum()), fed.config.train.participation
        return active if plan.kind == "all" else max(1, round(plan.rate * active))

    def run_round(self) -> None:
        chosen = self.rng.choice(self.users, self.count_participants(self.federation), replace=False)
        told = [self._train_client(int(user)) for user in chosen]
        user = np.repeat(chosen, [len(item) for item, _ in told])
        item, label = (np.concatenate(column) for column in zip(*told, strict=True))
        columns = [torch.from_numpy(x) for x in (user, item.astype(np.int64), label)]
        size, loss_of = getattr(self.config, "server_batch", 1024), torch.nn.BCEWithLogitsLoss()
        for _ in range(getattr(self.config, "server_epochs", 4)):
            order = torch.randperm(len(user))
            for at in range(0, len(user), size):
                who, what, wanted = (x[order[at : at + size]] for x in columns)
                _step_optimisers(self.server_steps, loss_of, self.server(who, what), wanted)

    def _train_client(self, user: int) -> tuple[Ints, Floats]:
        """Trains one client and returns what it tells."""
        plan, backbone = self.federation.config.train, self.backbone
        if user not in self.clients:
            heads = backbone.init_heads(self.federation.draws)
            self.clients[user] = _NaiveModel(backbone, heads, self.start[user : user + 1], self.items)
        model = self.clients[user]
        item, label = self._draw_samples(self.train.row(user))
        data = torch.utils.data.TensorDataset(torch.from_numpy(item).long(), torch.from_numpy(label))
        loader = torch.utils.data.DataLoader(data, batch_size=plan.batch_size, shuffle=True)
        optimisers, loss_of = model.make_optimisers(len(self.items)), torch.nn.BCEWithLogitsLoss()
        for _ in range(plan.local_epochs):
            for some, wanted in loader:
                _step_optimisers(optimisers, loss_of, model(torch.zeros(len(some), dtype=torch.long), some), wanted)
        with torch.no_grad():
            guess = torch.sigmoid(model(torch.zeros(len(item), dtype=torch.long), torch.from_numpy(item).long()))
        kept = self.rng.choice(len(item), max(1, int(self.rng.uniform(0.3, 0.7) * len(item))), replace=False)
        return item[kept], (0.5 * label[kept] + 0.5 * guess.numpy()[kept]).astype(np.float32)

    def _draw_samples(self, positives: Ints) -> tuple[Ints, Floats]:
        wanted = self.federation.config.train.negatives * len(positives)
        pool = self.rng.integers(0, len(self.items), 2 * wanted + 16)
        negatives = pool[~np.isin(pool, positives)][:wanted]
        item = np.concatenate([positives, negatives])
        label = np.concatenate([np.ones(len(positives)), np.zeros(len(negatives))])
        return item.astype(np.int32), label.astype(np.float32)


class _NaiveModel(torch.nn.Module):
    """A backbone over some users and all items."""

    def __init__(self, backbone: Scorer, heads: dict[str, Any], users: Floats, items: Floats) -> None:
        super().__init__()
        self.backbone = backbone
        self.users, self.items = (
            torch.nn.Embedding(len(rows), rows.shape[1], sparse=True, _weight=torch.from_numpy(rows.copy()))
            for rows in (users, items)
        )
        self.heads = torch.nn.ParameterDict(
            {k: torch.nn.Parameter(torch.from_numpy(v.copy())[None]) for k, v in heads.items()}
        )

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        named = {k: v[None] for k, v in self.backbone.named(self.users(user)).items()}
        heads = dict(self.heads.items())
        if self.backbone.grouped:
            found: torch.Tensor = self.backbone.score_groups(named, heads, self.items(item)[None])[0]
            return found
        alone = {k: v[0] for k, v in named.items()}
        wide = {k: v.expand(len(user), *v.shape[1:]) for k, v in heads.items()}
        one_by_one: torch.Tensor = self.backbone.score(alone, wide, self.items(item))
        return one_by_one

    def make_optimisers(self, n_items: int) -> list[torch.optim.Optimizer]:
        rates = self.backbone.rates(n_items)
        tables = [
            {"params": [self.users.weight], "lr": rates[next(iter(self.backbone.layout))]},
            {"params": [self.items.weight], "lr": rates["rows"]},
        ]
        made: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(tables)]
        if len(self.heads):
            made.append(torch.optim.Adam(self.heads.values(), lr=rates[next(iter(self.heads))]))
        return made


def _step_optimisers(
    optimisers: list[torch.optim.Optimizer],
    loss_of: torch.nn.BCEWithLogitsLoss,
    logits: torch.Tensor,
    wanted: torch.Tensor,
) -> None:
    for one in optimisers:
        one.zero_grad()
    loss_of(logits, wanted).backward()
    for one in optimisers:
        one.step()
