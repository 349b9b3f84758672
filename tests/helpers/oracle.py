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

from tacita.core.config import RunConfig, TrainConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import (
    AnyArray,
    Arrays,
    Block,
    BlockStream,
    Broadcast,
    CohortView,
    Floats,
    Keys,
    LocalModels,
    Ragged,
    ServerState,
)
from tacita.federation.clients import Cohort, Membership, build_cohort_view, build_user_view, group_users_into_clients
from tacita.federation.rounds import Progress, begin_block, make_initial_progress
from tacita.kernels.sampling import draw_folds
from tacita.learn.rows import apply_total
from tacita.learn.training import TrainedCohort, train_cohort
from tacita.learn.training.local_models import build_local_models
from tacita.messages import Total, Upload, add_upload, empty_total
from tacita.methods import Part, RunContext
from tacita.models import Backbone, find_backbone_class, list_backbones
from tacita.models.scoring import score_catalogue
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.round.registry import wrap_run
from tacita.round.task import prepare_cohort

Lists = Sequence[Sequence[int]]

# the backbones that learn by local steps; those that send a statistic have tests of their own
TRAINED = [name for name in list_backbones() if find_backbone_class(name).learner == "rows"]

# small catalogues: rates at which a few steps move everything visibly and nothing explodes
SMALL: dict[str, dict[str, Any]] = {
    "mf": {"dim": 6, "lr": 0.3, "init_std": 0.5},
    "pfedrec": {"dim": 6, "lr": 0.1, "lr_eta": 0.5},
    "ncf": {"dim": 6, "lr": 0.1, "lr_eta": 0.5},
    "ego": {"dim": 6, "lr": 0.5, "item_lr_scale": 3.0},
    "tally": {"ridge": 20.0, "min_item": 0},
    "tally-order": {"ridge": 20.0, "min_item": 0, "order_ridge": 20.0},
    "lightgcn": {"dim": 6, "lr": 0.5, "item_lr_scale": 3.0, "init_std": 0.5},
    "fedpergnn": {"dim": 6, "lr": 0.05, "item_lr_scale": 6.0, "init_std": 0.5, "most": 3},
    "neumf": {"dim": 6, "lr": 0.3, "item_lr_scale": 3.0, "init_std": 0.5, "tower": [8, 7, 5]},
    "neuncf": {"dim": 6, "lr": 0.3, "item_lr_scale": 3.0, "init_std": 0.5, "tower": [12, 8]},
    "interest": {"dim": 6, "lr": 0.3, "item_lr_scale": 3.0, "init_std": 0.5, "tower": [12, 8], "last": 4, "mu": 0.5},
}


# builders


def make_backbone(name: str, **options: Any) -> Backbone:
    cls = find_backbone_class(name)
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
    parts = [Ragged.from_lists(candidate if candidate is not None else nothing) for candidate in (train, valid, test)]
    n_rows = sum(len(part.ids) for part in parts)
    return Block(index, len(train), n_items, *parts, np.arange(len(train)) >= known, n_rows)


def make_stream(*blocks: Block) -> BlockStream:
    users = tuple(f"u{k}" for k in range(blocks[-1].n_users))
    items = tuple(f"i{k}" for k in range(blocks[-1].n_items))
    return BlockStream("tiny", blocks, users, items, derive_keys(users), derive_keys(items), {}, "tiny")


def federate(
    stream: BlockStream, backbone: Backbone, *parts: type[Part], seed: int = 3, chunk: int = 64, **train: Any
) -> Federation:
    config = RunConfig(seed=seed, train=TrainConfig(**train))
    draws = Draws(seed)
    world = RunContext(backbone, draws, config.train)
    results = tuple(cls(cls.Config(), world) for cls in parts)
    return wrap_run(Federation(backbone, results, config, draws, chunk, stream=stream))


def started(fed: Federation) -> Progress:
    """Block 0 is about to run its first round."""
    progress = make_initial_progress(fed)
    begin_block(fed, progress, 0)
    return progress


def members(fed: Federation, block: int = 0) -> Membership:
    homes = None if fed.homes is None else fed.homes.silo
    return group_users_into_clients(
        fed.stream.blocks[block], fed.stream.user_keys, fed.config.train.silos, fed.draws, homes=homes
    )


def cohort(fed: Federation, progress: Progress, order: AnyArray | None = None) -> CohortView:
    """All clients of the current block as one cohort, in ascending order unless told otherwise."""
    all_of = members(fed, progress.server.block)
    chosen = all_of.active if order is None else all_of.active[order]
    users = all_of.users.take(chosen)
    block = fed.stream.blocks[progress.server.block]
    who = Cohort(users, all_of.keys[chosen], fed.stream.user_keys)
    return build_cohort_view(progress.clients, progress.server, block, who, fed.broadcast_serving(progress.server))


def train_once(fed: Federation, progress: Progress, order: AnyArray | None = None) -> TrainedCohort:
    task = prepare_cohort(fed.parts, cohort(fed, progress, order))
    return train_cohort(task, fed.backbone, fed.parts, fed.config.train, fed.draws)


def answer_round(fed: Federation, view: CohortView, kind: str = "round") -> Upload:
    """What some clients answer in a round, before parts encode it."""
    return fed.learner.answer(prepare_cohort(fed.preparing_parts, view), kind).upload


def catalogue(backbone: Backbone, progress: Progress, block: Block) -> Floats:
    """Everybody's scores as their devices would compute them."""
    clients, server = progress.clients, progress.server
    users = np.arange(clients.n_users, dtype=np.int32)
    keys = np.zeros(clients.n_users, np.uint64)
    context = backbone.list_context_items(build_user_view(clients, server, block, users, keys, Broadcast()))
    return score_catalogue(backbone, clients.private, server.heads, server.items, context)


def averaged(fed: Federation, server: ServerState, trained: TrainedCohort) -> ServerState:
    """The server after the cohort's uploads, everybody having taken part."""
    specs = fed.fields(server, Question("round"))
    total = add_upload(empty_total(specs), trained.upload, specs)
    return apply_total(server, total, fed.config.train, float(trained.upload.n_clients))


def heads_of(upload: Upload) -> dict[str, AnyArray]:
    """The changes of shared parameters in an upload."""
    return {k.removeprefix("heads/"): v.value for k, v in upload.values.items() if k.startswith("heads/")}


def no_total(server: ServerState, n_clients: int = 0) -> Total:
    """A total of rows that did not move."""
    return Total({"rows": np.zeros(server.items.shape)}, float(n_clients), n_clients)


# models


Groups = list[tuple[list[nn.Parameter], float]]  # parameters and their learning rate


class Device(nn.Module):
    """One client: a whole copy of the item table, and the private parameters of its users, one row each."""

    widths: dict[str, int]  # private parameters in the order of the flat vector
    likes: list[list[int]]  # training items of each of its users

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

    def rows_read(self, user: list[int], item: list[int]) -> list[int]:
        """The items whose rows take part in these users' logits for these items."""
        return sorted(set(item))

    def compute_own_loss(self, users: list[int]) -> Tensor:
        """What people add to the loss beside their samples, the mean over some of them."""
        return torch.zeros(())

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


class StarDevice(Device):
    """Ego: LightGCN with its whole matrix, for a graph of one user and all items."""

    def cut(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def final(self, user: int) -> tuple[Tensor, Tensor]:
        """The user's vector and every item's after one layer."""
        start = torch.cat([self.own["p"][user][None], self.items])
        edges = torch.zeros(len(start), len(start))
        for item in self.likes[user]:
            edges[0, item + 1] = edges[item + 1, 0] = 1
        degree = edges.sum(1)
        scale = torch.where(degree > 0, degree.clamp(min=1).rsqrt(), torch.zeros(()))
        passed = (scale[:, None] * edges * scale[None, :]) @ start
        if not self.config.item_propagation:
            passed = torch.cat([passed[:1], torch.zeros_like(passed[1:])])
        ends = (start + passed) / 2
        return ends[0], ends[1:]

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        ends = {u: self.final(u) for u in set(user)}
        return torch.stack(
            [torch.cosine_similarity(ends[u][0], ends[u][1][i], dim=0) for u, i in zip(user, item, strict=True)]
        )

    def passes(self) -> list[Groups]:
        return [[([self.own["p"]], self.config.lr), ([self.items], self.table_rate)]]

    def rows_read(self, user: list[int], item: list[int]) -> list[int]:
        return sorted({*item, *(i for u in user for i in self.likes[u])})


class LayersDevice(StarDevice):
    """LightGCN: the same matrix, several times, and inner products."""

    def final(self, user: int) -> tuple[Tensor, Tensor]:
        now = torch.cat([self.own["p"][user][None], self.items])
        edges = torch.zeros(len(now), len(now))
        for item in self.likes[user]:
            edges[0, item + 1] = edges[item + 1, 0] = 1
        degree = edges.sum(1)
        scale = torch.where(degree > 0, degree.clamp(min=1).rsqrt(), torch.zeros(()))
        layers = [now]
        for _ in range(self.config.layers):
            layers.append((scale[:, None] * edges * scale[None, :]) @ layers[-1])
        ends = torch.stack(layers).mean(0)
        return ends[0], ends[1:]

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        ends = {u: self.final(u) for u in set(user)}
        return torch.stack([ends[u][0] @ ends[u][1][i] for u, i in zip(user, item, strict=True)])


class TowerDevice(Device):
    """NeuNCF: layers on [p ; q] joined, as torch has them."""

    def cut(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def climb(self, user: Tensor, item: Tensor) -> Tensor:
        first = torch.cat([self.heads["user_layer"], self.heads["item_layer"]])
        weights = [first, *(self.heads[f"layer_{k}"] for k in range(1, len(self.config.tower)))]
        up = torch.cat([user, item], dim=1)
        for k, weight in enumerate(weights):
            up = nn.functional.relu(nn.functional.linear(up, weight.T, self.heads[f"bias_{k}"]))
        return up

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        up = self.climb(self.own["p"][user], self.items[item])
        return nn.functional.linear(up, self.heads["out"][None], self.heads["out_bias"])[:, 0]

    def passes(self) -> list[Groups]:
        small = [*self.own.values(), *self.heads.values()]
        return [[(small, self.config.lr), ([self.items], self.table_rate)]]


class TwoPathDevice(TowerDevice):
    """NeuMF: products beside the tower, one output layer on both."""

    def cut(self) -> dict[str, int]:
        return {"gmf": self.config.dim, "mlp": self.config.dim}

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        met, climbing = self.items[item].split(self.config.dim, dim=1)
        both = torch.cat([self.own["gmf"][user] * met, self.climb(self.own["mlp"][user], climbing)], dim=1)
        out = torch.cat([self.heads["out_gmf"], self.heads["out"]])
        return nn.functional.linear(both, out[None], self.heads["out_bias"])[:, 0]


class AttentionDevice(Device):
    """FedPerGNN as its formulas are printed, item by item and neighbour by neighbour."""

    near: list[dict[int, list[Floats]]]  # of each of its users: item -> vectors of others who have it

    def cut(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def item_node(self, user: int, item: int) -> Tensor:
        h, row = self.heads, self.items[item] @ self.heads["w1"]
        around = torch.zeros(self.config.dim)
        if near := self.near[user].get(item):
            passed = [torch.tensor(entry) @ h["w2"] for entry in near[: self.config.most]]
            observations = [nn.functional.leaky_relu(h["v"] @ torch.cat([row, entry]), 0.2) for entry in passed]
            around = sum(a * entry for a, entry in zip(torch.stack(observations).softmax(0), passed, strict=True))
        return torch.cat([around, row]) @ h["w3"]

    def user_node(self, user: int) -> Tensor:
        h, own_values = self.heads, self.own["p"][user] @ self.heads["w4"]
        around = torch.zeros(self.config.dim)
        if self.likes[user]:
            nodes = [self.item_node(user, item) for item in self.likes[user]]
            observations = [nn.functional.leaky_relu(h["w"] @ torch.cat([own_values, node]), 0.2) for node in nodes]
            around = sum(b * node for b, node in zip(torch.stack(observations).softmax(0), nodes, strict=True))
        return torch.cat([around, own_values]) @ h["w5"]

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        nodes, rows = {u: self.user_node(u) for u in set(user)}, self.items[item] @ self.heads["w6"]
        if self.config.output == "linear":
            both = torch.cat([torch.stack([nodes[u] for u in user]), rows], dim=1)
            return both @ self.heads["out"] + self.heads["bias"]
        return torch.stack([nodes[u] for u in user]).mul(rows).sum(1) + self.heads["bias"]

    def passes(self) -> list[Groups]:
        small = [*self.own.values(), *self.heads.values()]
        return [[(small, self.config.lr), ([self.items], self.table_rate)]]

    def rows_read(self, user: list[int], item: list[int]) -> list[int]:
        return sorted({*item, *(i for u in user for i in self.likes[u])})


class RecurrentDevice(TowerDevice):
    """Interest: torch's GRU cell over the last likes, event by event, and layers on [p ; q ; h] joined.

    Where histories are cut into folds, an item is scored by the state of the likes in other folds.
    """

    fold_key: np.uint64
    user_keys: Keys  # of its users

    def fold(self, user: int, item: int) -> int:
        if self.config.folds == 1:
            return 0
        cut = draw_folds(self.fold_key, self.user_keys, np.array([user]), np.array([item]), self.config.folds)
        return int(cut[0])

    def state(self, user: int, fold: int = 0) -> Tensor:
        d, h, values = self.config.dim, self.heads, torch.zeros(1, self.config.dim)
        for item in self.likes[user][-self.config.last :]:
            if self.config.folds > 1 and self.fold(user, item) == fold:
                continue
            event = torch.cat([self.items[item], torch.ones(1), h["gaps"][0]])  # no ratings, no times
            x = event @ h["event_layer"] + h["event_bias"]
            weights = h["gru_in"].T, h["gru_state"].T, h["gru_in_bias"], h["gru_state_bias"]
            values = torch.gru_cell(x[None], values, *weights)
        assert values.shape == (1, d)
        if self.config.centred:
            return values[0] - h["state_centre"].detach()
        return values[0]

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        folds = [self.fold(u, i) for u, i in zip(user, item, strict=True)]
        wanted = list(zip(user, folds, strict=True))
        states = {who: self.state(*who) for who in set(wanted)}
        h = self.heads
        first = torch.cat([h["user_layer"], h["item_layer"], h["state_layer"]])
        up = torch.cat([self.own["p"][user], self.items[item], torch.stack([states[who] for who in wanted])], dim=1)
        for k, weight in enumerate([first, *(h[f"layer_{k}"] for k in range(1, len(self.config.tower)))]):
            up = nn.functional.relu(nn.functional.linear(up, weight.T, h[f"bias_{k}"]))
        return nn.functional.linear(up, h["out"][None], h["out_bias"])[:, 0]

    def passes(self) -> list[Groups]:
        learning = [head for name, head in self.heads.items() if name != "state_centre"]
        return [[([*self.own.values(), *learning], self.config.lr), ([self.items], self.table_rate)]]

    def compute_own_loss(self, users: list[int]) -> Tensor:
        states = [(self.own["p"][u], self.state(u, fold)) for u in users for fold in range(self.config.folds)]
        apart = [1 - torch.cosine_similarity(p, state, dim=0) for p, state in states]
        return self.config.mu * torch.stack(apart).mean()

    def rows_read(self, user: list[int], item: list[int]) -> list[int]:
        return sorted({*item, *(i for u in user for i in self.likes[u][-self.config.last :])})


class AnyDevice(Device):
    """A model the oracle has no formula for: its own score, rates and phases."""

    def cut(self) -> dict[str, int]:
        return self.backbone.private_layout

    def logits(self, user: list[int], item: list[int]) -> Tensor:
        private = {name: v[user] for name, v in self.own.items()}
        heads = {name: torch.stack([v] * len(user)) for name, v in self.heads.items()}
        return self.backbone.compute_logits(private, heads, self.items[item])

    def passes(self) -> list[Groups]:
        rates = self.backbone.list_learning_rates(len(self.items))
        private = [([v], rates[name]) for name, v in [*self.own.items(), *self.heads.items()]]
        moving = {"private": private, "rows": [([self.items], rates["rows"])]}
        return [[group for kind in phase for group in moving[kind]] for phase in self.backbone.phases]


DEVICES: dict[str, type[Device]] = {
    "mf": FactorDevice, "pfedrec": ScoreDevice, "ncf": LinearDevice, "ego": StarDevice, "lightgcn": LayersDevice,
    "neuncf": TowerDevice, "neumf": TwoPathDevice, "fedpergnn": AttentionDevice, "interest": RecurrentDevice,
}  # fmt: skip


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
    tables: list[Floats]  # every client's own
    personal: list[tuple[Floats, Floats]]  # pFedMe: every client's personal table and vectors


def batches(local: LocalModels, client: int) -> Iterator[AnyArray]:
    """The sample numbers of every step of one client."""
    for epoch in range(len(local.order)):
        own = local.order[epoch, local.turn_ptr[client] : local.turn_ptr[client + 1]]
        cuts = list(range(local.batch, len(own), local.batch))
        if local.batch_ptr is not None and local.batch_start is not None:
            own_values = local.batch_start[epoch, local.batch_ptr[client] + 1 : local.batch_ptr[client + 1]]
            cuts = (own_values - local.turn_ptr[client]).tolist()
        yield from (entry for entry in np.split(own, cuts) if len(entry))


def near_of(view: CohortView, user: int) -> dict[int, list[Floats]]:
    """The vectors that a client was sent, by item."""
    out: dict[int, list[Floats]] = {}
    sent = view.per_client.get("neighbours", Ragged.empty(len(view.user)))
    for at in range(sent.ptr[user], sent.ptr[user + 1]):
        out.setdefault(int(sent.ids[at]), []).append(sent.values["vector"][at])
    return out


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
    parts: Sequence[Part] = (),
) -> Result:
    """Train the clients one after the other and average their complete tables; `parts` only give samples."""
    tasks = prepare_cohort(parts, view).tasks
    local = build_local_models(view, {}, plan, draws, tasks=tasks)
    tables, heads, private, personal = [], [], view.private.copy(), []
    for client in range(view.n_clients):
        users = list(range(view.user_ptr[client], view.user_ptr[client + 1]))
        device = DEVICES.get(backbone.name, AnyDevice)(backbone, view.items, view.private[users], view.heads)
        device.likes = [view.train.row(u).tolist() for u in users]
        if isinstance(device, RecurrentDevice):
            device.fold_key = draws.private("state-folds", view.block, view.round)
            device.user_keys = view.user_keys[users]
        if isinstance(device, AttentionDevice):
            device.near = [near_of(view, u) for u in users]
        personal.append(train_device(device, users, local, client, plan, more, after_step))
        tables.append(device.items.detach().double().numpy())
        heads.append({name: v.detach().double().numpy() for name, v in device.heads.items()})
        private[users] = device.vectors()
    mean_heads = {name: np.mean([head[name] for head in heads], axis=0) for name in view.heads}
    return Result(np.mean(tables, axis=0), mean_heads, private, tables, personal)


def train_device(
    device: Device,
    users: list[int],
    local: LocalModels,
    client: int,
    plan: TrainConfig,
    more: More,
    after_step: AfterStep,
) -> tuple[Floats, Floats]:
    passes = device.passes()
    movers = [MOVERS[plan.optimiser](device, groups, plan) for groups in passes]
    for step, batch in enumerate(batches(local, client)):
        for phase, mover in enumerate(movers):
            extra = [(k, *entry) for k, user in enumerate(users) for entry in more(user, step, phase)]
            mover.step(Task(device, users, local, batch, plan, extra))
        after_step(device, users, [group for groups in passes for group in groups])
    return movers[0].finish()


@dataclass(frozen=True)
class Task:
    """The loss of one step on one device."""

    device: Device
    users: list[int]
    local: LocalModels
    batch: AnyArray
    plan: TrainConfig
    extra: list[tuple[int, int, float, float]]  # user of the device, item, label, weight

    def samples(self, batch: AnyArray) -> tuple[list[int], list[int]]:
        return [self.users.index(k) for k in self.local.owner[batch]], self.local.item[batch].tolist()

    def positives(self) -> AnyArray:
        """The k-th negative of a user belongs to its positive k, counted round and round."""
        owner = self.local.owner[self.batch]
        first = self.local.user_ptr[owner]
        n = self.local.view.train.counts()[owner]
        return first + (self.batch - first - n) % n

    def loss(self) -> Tensor:
        device, plan = self.device, self.plan
        owners, items = self.samples(self.batch)
        scores = device.logits(owners, items)
        label = torch.tensor(self.local.label[self.batch])
        if plan.objective == "bpr":
            above = device.logits(*self.samples(self.positives()))
            loss = nn.functional.softplus(-plan.bpr_scale * (above - scores)).mean()
        elif plan.objective == "squared":
            loss = ((scores - label) ** 2).mean()
        else:
            loss = nn.functional.binary_cross_entropy_with_logits(scores, label)
        for k, item, label_, weight in self.extra:
            entry = device.logits([k], [item])
            loss = loss + weight * nn.functional.binary_cross_entropy_with_logits(entry, torch.tensor([label_]))
        if plan.l2:
            rows = sorted({*items, *(self.samples(self.positives())[1] if plan.objective == "bpr" else [])})
            vectors = [v[sorted(set(owners))] for v in device.own.values()]
            size = sum((element**2).sum() for element in (device.items[rows], *vectors))
            loss = loss + plan.l2 * size / len(self.batch)
        return loss + device.compute_own_loss(sorted({*owners, *(element[0] for element in self.extra)}))

    def used(self) -> dict[int, list[int]]:
        """Parameter -> its rows that this step reads."""
        owners, items = self.samples(self.batch)
        if self.plan.objective == "bpr":
            items = items + self.samples(self.positives())[1]
        owners, items = owners + [entry[0] for entry in self.extra], items + [entry[1] for entry in self.extra]
        rows = self.device.rows_read(owners, items)
        own = {id(v): sorted(set(owners)) for v in self.device.own.values()}
        return {id(self.device.items): rows, **own}


class Mover:
    """One of torch's optimisers on whole parameters."""

    def __init__(self, device: Device, groups: Groups, plan: TrainConfig) -> None:
        self.device, self.plan, self.groups = device, plan, groups
        kind = torch.optim.Adam if plan.optimiser == "adam" else torch.optim.SGD
        self.optimiser = kind([{"params": p, "lr": rate} for p, rate in groups], lr=0.0)

    def step(self, task: Task) -> None:
        self.device.zero_grad()
        task.loss().backward()
        self.optimiser.step()

    def finish(self) -> tuple[Floats, Floats]:
        return self.device.items.detach().numpy().copy(), self.device.vectors()


class RowMover(Mover):
    """Every row is a parameter of its own with a SparseAdam of its own, which steps only when the row is read.

    Torch counts the steps of a parameter, and so those of the row.
    """

    def __init__(self, device: Device, groups: Groups, plan: TrainConfig) -> None:
        super().__init__(device, groups, plan)
        self.held: dict[tuple[int, int], tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def step(self, task: Task) -> None:
        self.device.zero_grad()
        task.loss().backward()
        used = task.used()
        for whole, rate in [(p, rate) for params, rate in self.groups for p in params]:
            rows = used.get(id(whole))  # None: a head, which is all one row
            slopes = torch.zeros_like(whole) if whole.grad is None else whole.grad  # None: the loss does not read it
            data, grad = (x if rows is not None else x.reshape(1, -1) for x in (whole.detach(), slopes))
            for row in rows if rows is not None else [0]:
                entry, optimiser = self.held.setdefault((id(whole), row), self.start(data[row : row + 1], rate))
                slope = grad[row : row + 1] + self.plan.weight_decay * entry.detach()
                entry.grad = slope.to_sparse(1)
                optimiser.step()
                data[row] = entry.detach()[0]

    def start(self, row: Tensor, rate: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(row.clone())
        return parameter, torch.optim.SparseAdam([parameter], rate)


class PersonalMover(Mover):
    """pFedMe by hand: the device's parameters are the personal model, the local one stands beside them."""

    def __init__(self, device: Device, groups: Groups, plan: TrainConfig) -> None:
        super().__init__(device, groups, plan)
        self.local = [(p, p.detach().clone()) for params, _ in groups for p in params]

    def step(self, task: Task) -> None:
        how = self.plan.pfedme
        for _ in range(how.inner_steps):
            self.device.zero_grad()
            away = sum(((p - w) ** 2).sum() for p, w in self.local)
            (task.loss() + how.lam / 2 * away).backward()
            with torch.no_grad():
                for p, _ in self.local:
                    p -= how.inner_lr * p.grad
        for p, w in self.local:
            w -= how.eta * how.lam * (w - p.detach())

    def finish(self) -> tuple[Floats, Floats]:
        personal = super().finish()
        with torch.no_grad():
            for p, w in self.local:
                p.copy_(w)
        return personal


MOVERS: dict[str, type[Mover]] = {"sgd": Mover, "adam": Mover, "lazy-adam": RowMover, "pfedme": PersonalMover}
