"""Devices: where the people are. `Here` holds them in this process: all users of the lab, or those of one node.

The federated loop talks to devices through a handful of questions: train, tell a statistic, validate, keep the best
round, begin and end a block. A server whose people are elsewhere asks the same questions over a network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tacita.backbones.base import Backbone
from tacita.clients import (
    OWN,
    Members,
    expected_clients,
    grow,
    members_of,
    no_devices,
    participants,
    put_parts,
    users_view,
    view_of,
)
from tacita.config import RunConfig
from tacita.device_state import DeviceState
from tacita.errors import TacitaError
from tacita.evaluate import Evaluation, evaluate, sample_candidates
from tacita.fields import Spec, Total, Upload, add, empty_total
from tacita.learners import Learner, learner_of
from tacita.methods.base import Part, Purpose, World, overrides
from tacita.rng import Draws
from tacita.scoring import device_scorer, rows_of
from tacita.types import AnyArray, Arrays, Block, CohortView, Longs, Ragged, ServerState, Stream

Received = dict[str, Arrays]
"""What the parts' broadcasts carried, by part."""

Sums = dict[str, tuple[float, int]]
"""Metric -> sum over users, number of users: what several groups of devices can add up."""


@dataclass(frozen=True)
class Plan:
    """What everybody may know of a run: model, learner, parts, settings, public draws. It holds nobody's history."""

    backbone: Backbone
    parts: tuple[Part, ...]
    config: RunConfig
    draws: Draws
    chunk: int = 256  # clients that answer together; changes speed and memory, never a number
    learner: Learner = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        world = World(self.backbone, self.draws, self.config.train)
        object.__setattr__(self, "learner", learner_of(world, self.parts))

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return self.learner.fields(server, question)

    @property
    def most_weight(self) -> float:
        """What one client may count at most in a weighted sum, where a client of weight 1 counts 1."""
        return float(np.prod([part.most_weight for part in self.parts if overrides(part, "weight")]))


@dataclass(frozen=True)
class Federation(Plan):
    """A plan and the people of the lab, or of one node: their histories, cut into blocks."""

    stream: Stream = field(kw_only=True)


@dataclass(frozen=True)
class Told:
    """What came back from the devices in one exchange."""

    total: Total
    clients: int  # took part
    expected: float  # how many were to take part on average
    bytes_up: float = 0.0  # summed over clients
    notes: dict[str, float] = field(default_factory=dict)


class Devices(Protocol):
    """What a federated loop asks of the people's devices; `server` and `received` are what travels down."""

    def begin_block(self, fed: Any, server: ServerState, received: Received) -> None: ...

    def anybody(self, fed: Any, server: ServerState) -> bool:
        """Whether somebody has data to learn from in this block."""
        ...

    def exchange(self, fed: Any, server: ServerState, received: Received, question: str) -> Told:
        """Ask everybody who takes part in the round."""
        ...

    def validate(self, fed: Any, server: ServerState, received: Received) -> Sums: ...

    def keep_best(self) -> None:
        """The round just validated is the best of the block so far."""
        ...

    def result(self, fed: Any, server: ServerState, received: Received) -> tuple[dict[str, Any], Evaluation | None]:
        """Test scores of the best round, and per user where that stays in one process."""
        ...

    def end_block(self, fed: Any, server: ServerState, received: Received) -> None:
        """Keep what the parts need of the best round and go on from it."""
        ...


@dataclass
class Here:
    """Devices in this process, as a few arrays."""

    clients: DeviceState
    members: Members | None = None
    mask: Ragged | None = None  # what validation does not rank
    past: Ragged | None = None  # what everybody told in earlier blocks, where the model reads it

    @property
    def best(self) -> DeviceState:
        """The devices as they were in the best round of the block."""
        return self.clients.kept

    def begin_block(self, fed: Federation, server: ServerState, received: Received) -> None:
        """Room for new users; let the parts prepare."""
        block, clients = fed.stream.blocks[server.block], self.clients
        known = clients.n_users
        grow(clients, fed.backbone, fed.parts, fed.draws, fed.stream.user_keys[: block.n_users])
        if fed.config.train.reset_private_each_block and block.index > 0:
            back = np.flatnonzero(block.train.counts()[:known] > 0)
            clients.put(back, {"private": fed.backbone.init_private(fed.draws, fed.stream.user_keys[back])})
        has_data = np.flatnonzero(block.train.counts() > 0)
        _on_devices(fed, server, clients, block, received, "begin_block", has_data)
        self.members = self.mask = self.past = None
        self.keep_best()

    def living(self, fed: Federation, server: ServerState) -> Members:
        if self.members is None:
            block = fed.stream.blocks[server.block]
            self.members = members_of(block, fed.stream.user_keys, fed.config.train.silos, fed.draws)
        return self.members

    def anybody(self, fed: Federation, server: ServerState) -> bool:
        return len(self.living(fed, server).active) > 0

    def chosen(self, fed: Federation, server: ServerState) -> Longs:
        """The clients that take part in the round."""
        key = fed.draws.public("participants", server.block, server.round)
        return participants(self.living(fed, server).active, fed.config.train.participation, key)

    def expected(self, fed: Federation, server: ServerState) -> float:
        return expected_clients(self.living(fed, server).active, fed.config.train.participation)

    def exchange(self, fed: Federation, server: ServerState, received: Received, question: str) -> Told:
        """The answers of everybody chosen, as one total; what devices keep is changed in place."""
        fields, chosen = fed.fields(server, question), self.chosen(fed, server)
        total, bytes_up = empty_total(fields), 0.0
        told: dict[str, list[AnyArray]] = {}
        if OWN in self.clients.lists:
            self.clients.common[OWN] = server.items
        whole = any(p.sends_whole_table(server.block) for p in fed.parts)
        exact = fed.config.train.aggregator == "ideal"
        for lo in range(0, len(chosen), fed.chunk):
            view = self._view(fed, server, received, chosen[lo : lo + fed.chunk])
            answer = fed.learner.answer(view, question)
            upload = self._encoded(fed, view, answer.upload)
            total = add(total, upload, fields, exact)
            bytes_up += upload.n_bytes(fields, whole)
            self.clients.put(view.user, answer.kept)
            for name, (ptr, columns) in answer.lists.items():
                if name in self.clients.lists:
                    self.clients.put_lists(name, view.user, ptr, columns)
            for name, values in answer.notes.items():
                told.setdefault(name, []).append(values)
        for part in fed.parts:
            total = part.encode_sum(server, total)
        return Told(total, len(chosen), self.expected(fed, server), bytes_up, _means(told))

    def _view(self, fed: Federation, server: ServerState, received: Received, cohort: Longs) -> CohortView:
        """What some clients see of themselves, with the parts ready for the round."""
        block, members, keys = fed.stream.blocks[server.block], self.living(fed, server), fed.stream.user_keys
        users = members.users.take(cohort)
        view = view_of(self.clients, server, block, users.ptr, users.ids, keys, members.keys[cohort], received)
        if fed.backbone.reads_history:
            if self.past is None:
                self.past = fed.stream.trained(block.index - 1)
            view = replace(view, history=rows_of(self.past, users.ids))
        for part in fed.parts:
            if overrides(part, "begin_round"):
                renewed = part.begin_round(view)
                put_parts(self.clients, users.ids, {part.name: renewed})
                view = replace(view, parts={**view.parts, part.name: {**view.parts.get(part.name, {}), **renewed}})
        return view

    def _encoded(self, fed: Federation, view: CohortView, upload: Upload) -> Upload:
        """Uploads as they leave: weighed, then changed by each part, which notes what it did on the device first."""
        for part in fed.parts:
            factor = part.weight(view, upload) if overrides(part, "weight") else None
            if factor is not None:
                upload = replace(upload, weight=upload.weight * np.clip(factor, 0.0, part.most_weight))
        for part in fed.parts:
            upload, noted = part.encode(view, upload)
            if noted:
                put_parts(self.clients, view.user, {part.name: noted})
        return upload

    def validate(self, fed: Federation, server: ServerState, received: Received) -> Sums:
        block = fed.stream.blocks[server.block]
        if len(block.valid.ids) == 0:
            return {}
        if self.mask is None:
            self.mask = known_items(fed, block, "valid", fed.config.evaluate.mask)
        metric, k = selecting_metric(fed.config)
        return measure(fed, server, self.clients, block, "valid", self.mask, [metric], [k], received=received).sums()

    def keep_best(self) -> None:
        self.clients.keep()

    def result(self, fed: Federation, server: ServerState, received: Received) -> tuple[dict[str, Any], Evaluation]:
        """Scores of the best round on this block's test and on every earlier block's."""
        return block_scores(fed, server, self.best, received)

    def end_block(self, fed: Federation, server: ServerState, received: Received) -> None:
        block = fed.stream.blocks[server.block]
        _on_devices(fed, server, self.best, block, received, "end_block", np.flatnonzero(self.best.took_part))
        last = fed.config.train.resume_from == "last"
        self.clients = self.clients.with_parts_of(self.best) if last else self.best
        self.clients.keep()


def nobody_here(backbone: Backbone, config: RunConfig) -> Here:
    """No devices yet."""
    clients = no_devices(backbone, own_rows=config.evaluate.item_table == "personal")
    clients.keep()
    return Here(clients)


def _means(told: dict[str, list[AnyArray]]) -> dict[str, float]:
    """Mean over the clients that had something to say."""
    joined = {name: np.concatenate(values) for name, values in told.items()}
    return {name: float(np.nanmean(v)) for name, v in joined.items() if not np.isnan(v).all()}


def _on_devices(
    fed: Federation,
    server: ServerState,
    clients: DeviceState,
    block: Block,
    received: Received,
    hook: str,
    users: Longs,
) -> None:
    """Call a block hook on the devices of these users."""
    asked = [p for p in fed.parts if overrides(p, hook)]
    for lo in range(0, len(users) if asked else 0, fed.chunk):
        some = users[lo : lo + fed.chunk].astype(np.int32)
        view = users_view(clients, server, block, some, fed.stream.user_keys, received)
        for part in asked:
            put_parts(clients, some, {part.name: getattr(part, hook)(view)})


# What travels down


def broadcast(fed: Plan, server: ServerState) -> tuple[Received, float]:
    """What travels down with the item table, and all bytes of it per client."""
    received = {p.name: p.broadcast(server) for p in fed.parts}
    size = server.items.nbytes + sum(wire_bytes(v) for v in server.heads.values())
    for part in fed.parts:
        if not part.broadcast_once or server.round == 0:
            size += sum(v.nbytes for v in received[part.name].values())
    return received, float(size)


def wire_bytes(array: AnyArray) -> int:
    """Dense, or as (index, value) pairs where that is smaller."""
    return min(array.nbytes, (4 + array.itemsize) * int(np.count_nonzero(array)))


# What devices measure


def known_items(fed: Federation, block: Block, purpose: Purpose, mask: str) -> Ragged:
    """What is not ranked for a block's users: its train part, at test its validation part, maybe all history."""
    known = block.train if purpose == "valid" else block.train.joined(block.valid)
    return known.joined(fed.stream.history(block.index)) if mask == "history" else known


def candidates_of(fed: Federation, block: Block) -> Ragged | None:
    """What a block's wanted items are ranked against; None: the whole catalogue."""
    n = fed.config.evaluate.sampled_negatives
    if n == 0:
        return None
    touched = fed.stream.history(len(fed.stream.blocks))
    return sample_candidates(touched, n, block.n_items, fed.stream.user_keys, fed.draws, block.index)


def measure(
    fed: Federation,
    server: ServerState,
    clients: DeviceState,
    block: Block,
    purpose: Purpose,
    mask: Ragged,
    metrics: list[str] | None = None,
    cutoffs: list[int] | None = None,
    wanted: Ragged | None = None,
    received: Received | None = None,
) -> Evaluation:
    """Evaluate the devices' own scores on a block's validation or test items."""
    cfg = fed.config.evaluate
    if received is None:
        received, _ = broadcast(fed, server)
    past = fed.stream.history(block.index) if fed.backbone.reads_history else None
    scorer = device_scorer(
        fed.backbone, fed.parts, server, clients, block, fed.stream.user_keys, received, purpose, past
    )
    sampled = candidates_of(fed, block)
    if wanted is None:
        wanted = block.valid if purpose == "valid" else block.test
    return evaluate(
        scorer,
        wanted,
        mask,
        fed.stream.user_keys,
        fed.draws,
        metrics or list(cfg.metrics),
        cutoffs or cfg.k,
        sampled,
        cfg.hidden_items == "count",
        cfg.ties,
    )


def selecting_metric(config: RunConfig) -> tuple[str, int]:
    name, _, k = config.evaluate.select_by.partition("@")
    if name not in {"ndcg", "recall", "hr", "precision", "mrr"} or not k.isdigit() or int(k) < 1:
        raise TacitaError(
            f"evaluate.select_by = '{config.evaluate.select_by}' is not a metric at a cut-off such as 'ndcg@20'."
        )
    return name, int(k)


def block_sums(fed: Federation, server: ServerState, clients: DeviceState, received: Received) -> Sums:
    """Test scores on the current block, as sums that several groups of devices can add up."""
    block = fed.stream.blocks[server.block]
    mask = known_items(fed, block, "test", fed.config.evaluate.mask)
    return measure(fed, server, clients, block, "test", mask, received=received).sums()


def block_scores(
    fed: Federation, server: ServerState, clients: DeviceState, received: Received | None = None
) -> tuple[dict[str, Any], Evaluation]:
    """Test scores on this block and on every earlier block, for new and returning users, under both masks."""
    block, cfg = fed.stream.blocks[server.block], fed.config.evaluate
    new = np.zeros(fed.stream.n_users, bool)
    new[: block.n_users] = block.new_users

    def test(on: Block, mask: Ragged, only_chosen: bool = False, wanted: Ragged | None = None) -> Evaluation:
        metrics, cutoffs = ([metric], [k]) if only_chosen else (None, None)
        return measure(fed, server, clients, on, "test", mask, metrics, cutoffs, wanted, received)

    metric, k = selecting_metric(fed.config)
    chosen = f"{metric}@{k}"
    found = test(block, known_items(fed, block, "test", cfg.mask))
    other = "history" if cfg.mask == "block" else "block"
    masks_differ = block.index > 0  # before the first block there is no history
    result: dict[str, Any] = {
        **found.mean(),
        "users": len(found.users),
        "new": {"users": int(new[found.users].sum()), **found.mean(new)},
        "returning": {"users": int((~new)[found.users].sum()), **found.mean(~new)},
        f"mask_{other}": (test(block, known_items(fed, block, "test", other)) if masks_differ else found).mean(),
        "on_blocks": [],
    }
    for earlier in fed.stream.blocks[: block.index + 1]:
        if earlier.index == block.index and chosen in found.values:
            result["on_blocks"].append(found.mean()[chosen])
            continue
        own = cfg.old_block_mask == "own" or earlier.index == block.index
        seen = test(earlier, known_items(fed, earlier if own else block, "test", cfg.mask), only_chosen=True)
        result["on_blocks"].append(seen.mean()[chosen])
    if len(block.valid.ids) and any(overrides(p, "predict") for p in fed.parts):
        # with the corrections that only serving applies; what tuning looks at
        mask = known_items(fed, block, "valid", cfg.mask)
        result["valid_served"] = test(block, mask, only_chosen=True, wanted=block.valid).mean()[chosen]
    return result, found
