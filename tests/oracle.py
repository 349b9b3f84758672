"""The slow obvious federated round, and small builders for tests.

Every client is a fresh torch module with a whole copy of the item table; clients train one after the other
and their complete tables are averaged. Only the drawn samples (`lay_out`) are shared with the package: models,
rates, losses and steps are written here again. A model the oracle does not know is scored by its own `score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacita.aggregate import add, apply_total, empty_total
from tacita.backbones import Backbone, backbone_class, backbone_names
from tacita.clients import Members, members_of, view_of
from tacita.config import RunConfig, TrainConfig
from tacita.devices import Federation, broadcast
from tacita.methods import Part, World
from tacita.rng import Draws, keys_of
from tacita.rounds import Progress, begin_block, start
from tacita.trainer import Trained, train_cohort
from tacita.trainer.draw import lay_out
from tacita.types import AnyArray, Arrays, Block, CohortView, Floats, Local, Ragged, ServerState, Stream

Lists = Sequence[Sequence[int]]

# the backbones that learn by local steps; those that send a statistic have tests of their own
TRAINED = [name for name in backbone_names() if backbone_class(name).trains]

# small catalogues: rates at which a few steps move everything visibly and nothing explodes
SMALL: dict[str, dict[str, Any]] = {
    "mf": {"dim": 6, "lr": 0.3, "init_std": 0.5},
    "pfedrec": {"dim": 6, "lr": 0.1, "lr_eta": 0.5},
    "ncf": {"dim": 6, "lr": 0.1, "lr_eta": 0.5},
}


# builders


def make_backbone(name: str, **options: Any) -> Backbone:
    cls = backbone_class(name)
    return cls(cls.Config(**{**SMALL.get(name, {"dim": 6, "lr": 0.05, "item_lr_scale": 1.0}), **options}))


def make_block(
    index: int,
    n_items: int,
    train: Lists,
    valid: Lists | None = None,
    test: Lists | None = None,
    known: int = 0,
) -> Block:
    """A block whose users 0..known were seen before."""
    nothing: Lists = [[] for _ in train]
    parts = [Ragged.from_lists(one if one is not None else nothing) for one in (train, valid, test)]
    n_rows = sum(len(one.ids) for one in parts)
    return Block(index, len(train), n_items, *parts, np.arange(len(train)) >= known, n_rows)


def make_stream(*blocks: Block) -> Stream:
    users = tuple(f"u{k}" for k in range(blocks[-1].n_users))
    items = tuple(f"i{k}" for k in range(blocks[-1].n_items))
    return Stream("tiny", blocks, users, items, keys_of(users), keys_of(items), {}, "tiny")


def federate(
    stream: Stream, backbone: Backbone, *parts: type[Part], seed: int = 3, chunk: int = 64, **train: Any
) -> Federation:
    config = RunConfig(seed=seed, train=TrainConfig(**train))
    draws = Draws(seed)
    world = World(backbone, draws, config.train)
    return Federation(stream, backbone, tuple(cls(cls.Config(), world) for cls in parts), config, draws, chunk)


def started(fed: Federation) -> Progress:
    """Block 0 is about to run its first round."""
    progress = start(fed)
    begin_block(fed, progress, 0)
    return progress


def members(fed: Federation, block: int = 0) -> Members:
    return members_of(fed.stream.blocks[block], fed.stream.user_keys, fed.config.train.silos, fed.draws)


def cohort(fed: Federation, progress: Progress, order: AnyArray | None = None) -> CohortView:
    """All clients of the current block as one cohort, in ascending order unless told otherwise."""
    all_of = members(fed, progress.server.block)
    chosen = all_of.active if order is None else all_of.active[order]
    users = all_of.users.take(chosen)
    block = fed.stream.blocks[progress.server.block]
    received, _ = broadcast(fed, progress.server)
    return view_of(
        progress.clients, progress.server, block, users.ptr, users.ids, fed.stream.user_keys,
        all_of.keys[chosen], received,
    )  # fmt: skip


def train_once(fed: Federation, progress: Progress, order: AnyArray | None = None) -> Trained:
    return train_cohort(cohort(fed, progress, order), fed.backbone, fed.parts, fed.config.train, fed.draws)


def averaged(fed: Federation, server: ServerState, trained: Trained) -> ServerState:
    """The server after the cohort's uploads, everybody having taken part."""
    total = add(empty_total(server), trained.upload)
    return apply_total(server, total, fed.config.train, float(trained.upload.n_clients))


# models


Groups = list[tuple[list[nn.Parameter], float]]  # parameters and their learning rate


class Device(nn.Module):
    """One client: a whole copy of the item table, and the private parameters of its users, one row each."""

    widths: dict[str, int]  # private parameters in the order of the flat vector

    def __init__(self, backbone: Backbone, items: Floats, private: Floats, heads: Arrays) -> None:
        super().__init__()
        self.backbone = backbone
        self.config: Any = backbone.config
        self.widths = self.cut()
        cuts = torch.tensor(private).split(list(self.widths.values()), dim=1)
        self.items = nn.Parameter(torch.tensor(items))
        self.own = nn.ParameterDict(dict(zip(self.widths, cuts, strict=True)))
        self.heads = nn.ParameterDict({name: torch.tensor(v) for name, v in heads.items()})

    def cut(self) -> dict[str, int]:
        """How a flat private vector falls into parameters."""
        raise NotImplementedError

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        raise NotImplementedError

    def passes(self) -> list[Groups]:
        """For every pass of a step: which parameters move, and how fast."""
        raise NotImplementedError

    @property
    def table_rate(self) -> float:
        scale = self.config.item_lr_scale
        return float(self.config.lr * (len(self.items) if scale == "items" else scale))

    def vectors(self) -> Floats:
        return torch.cat([self.own[name].detach() for name in self.widths], dim=1).numpy()


class FactorDevice(Device):
    """MF: p . q, both moved at once."""

    def cut(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        return torch.einsum("bd,bd->b", self.own["p"][user], self.items[item])

    def passes(self) -> list[Groups]:
        return [[([self.own["p"]], self.config.lr), ([self.items], self.table_rate)]]


class ScoreDevice(Device):
    """PFedRec: a private linear score; first the score function moves, then the table."""

    def cut(self) -> dict[str, int]:
        return {"w": self.config.dim, "b": 1}

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        return torch.einsum("bd,bd->b", self.own["w"][user], self.items[item]) + self.own["b"][user, 0]

    def passes(self) -> list[Groups]:
        score = [self.own["w"], self.own["b"]]
        return [[(score, self.config.lr)], [([self.items], self.table_rate * self.config.lr_eta)]]


class LinearDevice(Device):
    """NCF: one linear layer on [p ; q], private or shared."""

    def cut(self) -> dict[str, int]:
        d = self.config.dim
        return {"p": d} if self.config.share_mlp else {"p": d, "w": 2 * d, "b": 1}

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        joined = torch.cat([self.own["p"][user], self.items[item]], dim=1)
        if self.config.share_mlp:
            return nn.functional.linear(joined, self.heads["w"][None], self.heads["b"])[:, 0]
        return torch.einsum("bd,bd->b", joined, self.own["w"][user]) + self.own["b"][user, 0]

    def passes(self) -> list[Groups]:
        lr, eta = self.config.lr, self.config.lr_eta
        layer = self.heads if self.config.share_mlp else self.own
        moving = [
            ([layer["w"], layer["b"]], lr),
            ([self.own["p"]], lr * eta),
            ([self.items], self.table_rate * eta),
        ]
        return [moving]


class AnyDevice(Device):
    """A model the oracle has no formula for: its own score, rates and phases."""

    def cut(self) -> dict[str, int]:
        return self.backbone.layout

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        private = {name: v[user] for name, v in self.own.items()}
        heads = {name: torch.stack([v] * len(user)) for name, v in self.heads.items()}
        return self.backbone.score(private, heads, self.items[item])

    def passes(self) -> list[Groups]:
        rates = self.backbone.rates(len(self.items))
        private = [([v], rates[name]) for name, v in [*self.own.items(), *self.heads.items()]]
        moving = {"private": private, "rows": [([self.items], rates["rows"])]}
        return [[group for kind in phase for group in moving[kind]] for phase in self.backbone.phases]


DEVICES: dict[str, type[Device]] = {"mf": FactorDevice, "pfedrec": ScoreDevice, "ncf": LinearDevice}


# the round

More = Callable[[int, int, int], list[tuple[int, float, float]]]
"""(user of the cohort, step, phase) -> extra samples (item, label, weight) of that user in that step."""

AfterStep = Callable[[Device, list[int], Groups], None]
"""What else happens after a step: to the device of these users of the cohort, with these rates."""


@dataclass(frozen=True)
class Result:
    items: Floats
    heads: Arrays
    private: Floats  # (users of the cohort, private width)


def batches(local: Local, client: int) -> Iterator[AnyArray]:
    """The sample numbers of every step of one client."""
    for epoch in range(len(local.order)):
        own = local.order[epoch, local.ptr[client] : local.ptr[client + 1]]
        for at in range(0, len(own), local.batch):
            yield own[at : at + local.batch]


def no_more(user: int, step: int, phase: int) -> list[tuple[int, float, float]]:
    return []


def nothing_else(device: Device, users: list[int], rates: Groups) -> None:
    return None


def slow_round(
    view: CohortView,
    backbone: Backbone,
    plan: TrainConfig,
    draws: Draws,
    more: More = no_more,
    after_step: AfterStep = nothing_else,
) -> Result:
    """Train the clients one after the other and average their complete tables."""
    local = lay_out(view, {}, plan, draws)
    tables, heads, private = [], [], view.private.copy()
    for client in range(view.n_clients):
        users = list(range(view.user_ptr[client], view.user_ptr[client + 1]))
        device = DEVICES.get(backbone.name, AnyDevice)(backbone, view.items, view.private[users], view.heads)
        train_device(device, users, local, client, plan, more, after_step)
        tables.append(device.items.detach().double().numpy())
        heads.append({name: v.detach().double().numpy() for name, v in device.heads.items()})
        private[users] = device.vectors()
    mean_heads = {name: np.mean([one[name] for one in heads], axis=0) for name in view.heads}
    return Result(np.mean(tables, axis=0), mean_heads, private)


def train_device(
    device: Device,
    users: list[int],
    local: Local,
    client: int,
    plan: TrainConfig,
    more: More,
    after_step: AfterStep,
) -> None:
    kind = torch.optim.SGD if plan.optimiser == "sgd" else torch.optim.Adam
    passes = device.passes()
    optimisers = [kind([{"params": p, "lr": rate} for p, rate in groups], lr=0.0) for groups in passes]
    bce = nn.BCEWithLogitsLoss()
    for step, batch in enumerate(batches(local, client)):
        for phase, optimiser in enumerate(optimisers):
            owners = [users.index(k) for k in local.owner[batch]]
            loss = bce(device.logits(owners, local.item[batch].tolist()), torch.tensor(local.label[batch]))
            for k, user in enumerate(users):
                for item, label, weight in more(user, step, phase):
                    loss = loss + weight * bce(device.logits([k], [item]), torch.tensor([label]))
            device.zero_grad()
            loss.backward()
            optimiser.step()
        after_step(device, users, [group for groups in passes for group in groups])
