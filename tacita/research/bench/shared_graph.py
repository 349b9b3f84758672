"""A round of FedShare against the naive loop, in one run: a torch module and an optimiser for every client."""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Ints
from tacita.federation.rounds import Progress, begin_block, run_round, start_run
from tacita.kernels.threads import threads_in_use
from tacita.research.bench.harness import describe_machine
from tacita.round.plan import Federation

SHARING, GRAPH = "sharing", "shared-graph"


def bench_sharing(fed: Federation, repeats: int = 5) -> dict[str, Any]:
    """Rounds of block 0: whole, what devices do of them, and naive, in turns after a warm-up."""
    plan = fed.config.train
    if fed.backbone.name != "ego" or plan.objective != "bpr" or plan.silos:
        raise TacitaError("the naive loop of sharing has backbone 'ego' with train.objective = 'bpr' and no silos.")
    others = [part.name for part in fed.parts if part.name not in (SHARING, GRAPH)]
    graph = next((part.config for part in fed.parts if part.name == GRAPH), None)
    devices = replace(fed, parts=tuple(part for part in fed.parts if part.name == SHARING))
    naive = NaiveSharing(fed, graph)
    sides = {"fast": _RoundRunner(fed).play, "devices": _RoundRunner(devices).play, "naive": naive.run_round}
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
    spent = {name: statistics.median(times) for name, times in busy.items()}
    return {
        "bench": "rounds of sharing",
        "data": fed.stream.name,
        "method": fed.config.method,
        "clients": naive.n_clients,
        "shared": len(naive.shared_pairs[0]),
        "local_epochs": plan.local_epochs,
        **{f"{name}_s": round(value, 3) for name, value in middle.items()},
        "server_s": round(max(0.0, middle["fast"] - middle["devices"]), 3),
        **{f"{name}_cpu_s": round(value, 3) for name, value in spent.items()},
        "ratio": round(middle["naive"] / middle["fast"], 1),
        "cpu_ratio": round(spent["naive"] / spent["fast"], 1),
        **({"not in the naive loop": others} if others else {}),
        **{f"{name}_s_all": [round(t, 3) for t in times] for name, times in took.items()},
        "machine": describe_machine(),
    }


class _RoundRunner:
    """Plays a round when asked, after one that compiles."""

    def __init__(self, fed: Federation) -> None:
        self.federation, self.progress = fed, start_first_block(fed)
        self.play()

    def play(self) -> None:
        self.progress.server, _ = run_round(self.federation, self.progress.server, self.progress.devices)


def start_first_block(fed: Federation) -> Progress:
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    return progress


class NaiveSharing:
    """The loop as one would first write it, without avoidable waste.

    Per client: a module with its own copy of the item table, negatives drawn at once, all pairs in one batch, and
    SparseAdam, which like ours moves only rows of the batch; then the weighted mean of all tables. The server: a
    sparse matrix for its graph, autograd and Adam.
    """

    def __init__(self, fed: Federation, graph: Any) -> None:
        progress = start_first_block(fed)
        self.plan, self.graph = fed.config.train, graph
        self.rates = fed.scorer.rates(len(progress.server.items))
        self.rng = np.random.default_rng(fed.config.seed)
        self.items = torch.from_numpy(progress.server.items.copy())
        self.vectors = torch.from_numpy(progress.clients.private.copy())
        self.own = fed.stream.blocks[0].train
        given = progress.server.shared
        shared = given.lists_of(fed.stream.user_keys[: len(self.own)])
        stays = ~shared.holds(self.own.rows(), self.own.ids)
        self.local = self.own.filter_entries(stays)
        self.users = np.flatnonzero(self.own.counts() > 0)
        rate = self.plan.participation.rate if self.plan.participation.kind != "all" else 1.0
        self.n_clients = max(1, round(rate * len(self.users)))
        self.shared_pairs = np.unique(given.sender, return_inverse=True)[1], given.item

    def run_round(self) -> None:
        total, weight = torch.zeros_like(self.items), 0
        for user in self.rng.choice(self.users, self.n_clients, replace=False):
            mine = self.local.row(int(user))
            if len(mine):  # who shared everything has nothing to learn from
                model = self._train_client(int(user), mine)
                total += len(mine) * model.rows.weight.detach()
                weight += len(mine)
        self.items = total / max(1, weight)
        if self.graph is not None and len(self.shared_pairs[0]):
            self._refine()

    def _train_client(self, user: int, mine: Ints) -> _ClientModel:
        model = _ClientModel(self.items, self.vectors[user], mine)
        moving = (model.p.weight, self.rates["p"]), (model.rows.weight, self.rates["rows"])
        optimiser: torch.optim.Optimizer = torch.optim.SparseAdam(
            [{"params": [one], "lr": rate} for one, rate in moving]
        )
        above, owned = torch.from_numpy(mine).long().repeat(self.plan.negatives), np.unique(self.own.row(user))
        epochs = self.plan.local_epochs if len(owned) < len(self.items) else 0  # else nothing is left to rank below
        for _ in range(epochs):
            below = torch.from_numpy(self._draw_negatives(np.zeros(len(above), np.int64), owned))
            optimiser.zero_grad()
            loss: Any = model.loss(above, below, self.plan)
            loss.backward()
            optimiser.step()
        self.vectors[user] = model.p.weight.detach()[0]
        return model

    def _draw_negatives(self, person: AnyArray, pairs: AnyArray) -> AnyArray:
        """An item for each of these people that is not theirs; what is theirs is drawn again.

        `pairs`: person times the number of items, plus an item of theirs.
        """
        drawn, wrong = np.empty(len(person), np.int64), np.arange(len(person))
        while len(wrong):
            drawn[wrong] = self.rng.integers(0, len(self.items), len(wrong))
            wrong = wrong[np.isin(person[wrong] * len(self.items) + drawn[wrong], pairs)]
        return drawn

    def _refine(self) -> None:
        """One pass over what is shared; who shared everything has nothing to rank it above."""
        how, (who, what) = self.graph, self.shared_pairs
        table = torch.nn.Parameter(self.items.clone())
        optimiser = torch.optim.Adam([table], lr=how.lr)
        passing, means = _build_adjacency(who, what, len(table))
        pairs, known = who * len(table) + what, np.unique(what)
        order = self.rng.permutation(np.flatnonzero(np.bincount(who)[who] < len(table)))
        for at in range(0, len(order), how.edge_batch):
            some = order[at : at + how.edge_batch]
            person, liked = (torch.from_numpy(column[some]).long() for column in (who, what))
            other = torch.from_numpy(self._draw_negatives(who[some], pairs))
            items = torch.from_numpy(self.rng.permutation(known)[: how.item_batch]).long()
            optimiser.zero_grad()
            layers = [torch.cat([torch.sparse.mm(means, table), table])]
            for _ in range(how.layers):
                layers.append(torch.sparse.mm(passing, layers[-1]))
            whole = torch.stack(layers).mean(0)
            people, rows = whole[: -len(table)], whole[-len(table) :]
            ahead = functional.cosine_similarity(people[person], rows[liked], eps=1e-8)
            behind = functional.cosine_similarity(people[person], rows[other], eps=1e-8)
            loss = -functional.logsigmoid(how.bpr_scale * (ahead - behind)).mean() if how.bpr else torch.zeros(())
            if how.lam1:
                alike = functional.normalize(table[items]) @ functional.normalize(rows[items]).T / how.tau
                loss = loss + how.lam1 * functional.cross_entropy(alike, torch.arange(len(items)))
            used = torch.unique(torch.cat([liked, other]))
            (loss + how.lam * (table[used] ** 2).sum() / len(some)).backward()
            optimiser.step()
        self.items = table.detach()


class _ClientModel(torch.nn.Module):
    """A client: its vector, its own copy of the table, and its items."""

    def __init__(self, items: torch.Tensor, vector: torch.Tensor, mine: Ints) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(len(items), items.shape[1], sparse=True, _weight=items.clone())
        self.p = torch.nn.Embedding(1, len(vector), sparse=True, _weight=vector[None].clone())
        self.own_items = torch.from_numpy(mine).long()

    def loss(self, above: torch.Tensor, below: torch.Tensor, plan: TrainConfig) -> torch.Tensor:
        """Cosine BPR; every positive is one of the client's own items."""
        p, share = self.p(torch.zeros(1, dtype=torch.long)), 0.5 / len(self.own_items) ** 0.5
        high, low = self.rows(above), self.rows(below)
        user = 0.5 * p + share * self.rows(self.own_items).sum(0, keepdim=True)
        ahead = functional.cosine_similarity(user, 0.5 * high + share * p)
        behind = functional.cosine_similarity(user, 0.5 * low)
        pairs: torch.Tensor = -functional.logsigmoid(plan.bpr_scale * (ahead - behind)).mean()
        squares: torch.Tensor = (p**2).sum() + (high**2).sum() + (low**2).sum()
        return pairs + plan.l2 * squares / len(above)


def _build_adjacency(who: AnyArray, what: AnyArray, n_items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised graph of people and items, and the means that people start from."""
    n_people = int(who.max()) + 1
    per_person, per_item = np.bincount(who), np.bincount(what, minlength=n_items)
    weight = 1 / np.sqrt(per_person[who] * per_item[what])
    at = np.stack([np.concatenate([who, n_people + what]), np.concatenate([n_people + what, who])])
    size, both = n_people + n_items, np.concatenate([weight, weight])
    return _build_matrix(at, both, (size, size)), _build_matrix(
        np.stack([who, what]), 1 / per_person[who], (n_people, n_items)
    )


def _build_matrix(at: AnyArray, weight: AnyArray, size: tuple[int, int]) -> torch.Tensor:
    values = torch.from_numpy(weight.astype(np.float32))
    with warnings.catch_warnings():  # that such matrices are new, and that we know what is in them
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_coo_tensor(torch.from_numpy(at), values, size).coalesce().to_sparse_csr()
