"""run_round, run_block, run_stream: the only federated loop in the code.

A block ends after its last round or when patience runs out; its best round is restored, tested and carried on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.aggregate import add, apply_total, empty_total
from tacita.backbones.base import Backbone
from tacita.clients import Clients, Members, OwnRows, expected_clients, members_of, participants, users_view, view_of
from tacita.config import RunConfig
from tacita.errors import TacitaError
from tacita.evaluate import Evaluation, evaluate, sample_candidates
from tacita.methods.base import Part, Purpose, overrides
from tacita.rng import Draws
from tacita.scoring import device_scorer, rows_of
from tacita.trainer import Workspace, train_cohort
from tacita.types import AnyArray, Arrays, Block, Longs, Ragged, ServerState, Stream


@dataclass(frozen=True)
class Federation:
    """Everything about a run that does not change while it runs."""

    stream: Stream
    backbone: Backbone
    parts: tuple[Part, ...]
    config: RunConfig
    draws: Draws
    chunk: int = 256  # clients trained together; changes speed and memory, never a number
    space: Workspace = field(default_factory=Workspace, compare=False)


@dataclass(frozen=True)
class RoundReport:
    block: int
    round: int
    clients: int
    bytes_up: float  # per participating client
    bytes_down: float
    valid: float | None = None  # the selecting metric on the block's validation items
    notes: dict[str, float] = field(default_factory=dict)  # what the parts say of the round


@dataclass
class Progress:
    """Where a run stands: enough to go on from here with the same numbers."""

    server: ServerState
    clients: Clients
    best_server: ServerState
    best_clients: Clients
    best_score: float = -1.0
    best_round: int = 0
    stale: int = 0  # validations since the best
    in_block: bool = False
    bytes_up: float = 0.0  # summed over the rounds of this block
    bytes_down: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)
    found: list[Evaluation] = field(default_factory=list)  # per user, of the blocks ended since the run was opened


OnRound = Callable[[RoundReport, Progress], None]


def start(fed: Federation) -> Progress:
    """Nobody has trained yet: an empty table and no devices."""
    width = fed.backbone.item_width
    server = ServerState(np.zeros((0, width), np.float32), fed.backbone.init_heads(fed.draws))
    clients = Clients.nobody(fed.backbone)
    if fed.config.evaluate.item_table == "personal":
        clients.own = OwnRows.nobody(width)
    return Progress(server, clients, server, clients)


def broadcast(fed: Federation, server: ServerState) -> tuple[dict[str, Arrays], float]:
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


def run_round(
    fed: Federation, server: ServerState, clients: Clients, block: Block, members: Members
) -> tuple[ServerState, RoundReport]:
    """One federated round. The server state is a value; the devices' arrays are changed in place."""
    plan = fed.config.train
    key = fed.draws.public("participants", block.index, server.round)
    chosen = participants(members.active, plan.participation, key)
    if not fed.backbone.trains:
        return _statistic_round(fed, server, clients, block, members, chosen)
    received, bytes_down = broadcast(fed, server)
    if clients.own is not None:
        clients.own = replace(clients.own, base=server.items)
    total, bytes_up = empty_total(server), 0
    told: dict[str, list[AnyArray]] = {}
    for lo in range(0, len(chosen), fed.chunk):
        cohort = chosen[lo : lo + fed.chunk]
        users = members.users.take(cohort)
        view = view_of(
            clients, server, block, users.ptr, users.ids, fed.stream.user_keys, members.keys[cohort], received
        )
        for part in fed.parts:
            if overrides(part, "begin_round"):
                renewed = part.begin_round(view)
                clients.put_parts(users.ids, {part.name: renewed})
                view = replace(view, parts={**view.parts, part.name: {**view.parts[part.name], **renewed}})
        trained = train_cohort(view, fed.backbone, fed.parts, plan, fed.draws, fed.space)
        upload = trained.upload
        if plan.aggregation == "weighted":
            upload = replace(upload, weight=np.diff(view.train.ptr[view.user_ptr]).astype(np.float64))
        for part in fed.parts:
            upload = part.encode(view, upload)
        for part in fed.parts:
            factor = part.weigh(upload)
            if factor is not None:
                upload = replace(upload, weight=upload.weight * factor)
        total = add(total, upload)
        dense = any(p.sends_whole_table(block.index) for p in fed.parts)
        bytes_up += server.items.nbytes * upload.n_clients if dense else upload.n_bytes()
        if clients.own is not None:
            held = trained.local
            clients.own = clients.own.put(clients.n_users, users.ids, held.row_start, held.row_item, held.rows)
        clients.private[users.ids] = trained.local.private
        clients.took_part[users.ids] = True
        clients.put_parts(users.ids, trained.parts)
        for name, values in trained.local.notes.items():
            told.setdefault(name, []).append(values)
    for part in fed.parts:
        total = part.encode_sum(server, total)
    for part in reversed(fed.parts):
        total = part.decode(server, total)
    after = apply_total(server, total, plan, expected_clients(members.active, plan.participation))
    for part in fed.parts:
        after = part.server_step(server, after, total)
    after = replace(after, round=server.round + 1)
    n = max(1, len(chosen))
    notes = _means(told) | {k: v for p in fed.parts for k, v in p.server_notes(after).items()}
    return after, RoundReport(block.index, after.round, len(chosen), bytes_up / n, bytes_down, None, notes)


def _means(told: dict[str, list[AnyArray]]) -> dict[str, float]:
    """Mean over the clients that had something to say."""
    joined = {name: np.concatenate(values) for name, values in told.items()}
    return {name: float(np.nanmean(v)) for name, v in joined.items() if not np.isnan(v).all()}


def _statistic_round(
    fed: Federation, server: ServerState, clients: Clients, block: Block, members: Members, chosen: Longs
) -> tuple[ServerState, RoundReport]:
    """The sum of what the clients have to tell, and what the server makes of it; later rounds only score otherwise."""
    if server.round > 0:
        after = replace(fed.backbone.try_next(server), round=server.round + 1)
        return after, RoundReport(block.index, after.round, len(chosen), 4.0, 4.0)  # a setting down, a score up
    users = members.users.take(chosen)
    keys = fed.stream.user_keys
    view = view_of(clients, server, block, users.ptr, users.ids, keys, members.keys[chosen], {})
    server = fed.backbone.survey(server, np.bincount(view.train.ids, minlength=block.n_items))
    told = rows_of(fed.stream.trained(block.index - 1), users.ids)
    after = fed.backbone.learn(server, fed.backbone.statistic(replace(view, heads=server.heads, history=told)))
    after = replace(after, round=server.round + 1)
    _, bytes_down = broadcast(fed, after)
    up = fed.backbone.statistic_bytes(block.n_items)
    return after, RoundReport(block.index, after.round, len(chosen), up, bytes_down)


def begin_block(fed: Federation, progress: Progress, index: int) -> None:
    """Grow tables for new items and users; let the parts prepare both sides."""
    block, server, clients = fed.stream.blocks[index], progress.server, progress.clients
    fresh = fed.stream.item_keys[len(server.items) : block.n_items]
    items = np.concatenate([server.items, fed.backbone.init_items(fed.draws, fresh)])
    server = replace(server, items=items, block=index, round=0)
    known = clients.n_users
    clients.grow(fed.backbone, fed.parts, fed.draws, fed.stream.user_keys[: block.n_users])
    if fed.config.train.reset_private_each_block and index > 0:
        back = np.flatnonzero(block.train.counts()[:known] > 0)
        clients.private[back] = fed.backbone.init_private(fed.draws, fed.stream.user_keys[back])
    for part in fed.parts:
        server = server.with_part(part.name, part.server_begin_block(server))
    received, _ = broadcast(fed, server)
    progress.server = server
    _on_devices(fed, server, clients, block, received, "begin_block", np.flatnonzero(block.train.counts() > 0))
    progress.best_server, progress.best_clients = server, clients.copy()
    progress.best_score, progress.best_round, progress.stale, progress.in_block = -1.0, 0, 0, True
    progress.bytes_up = progress.bytes_down = 0.0


def _on_devices(
    fed: Federation,
    server: ServerState,
    clients: Clients,
    block: Block,
    received: dict[str, Arrays],
    hook: str,
    users: Longs,
) -> None:
    """Call a block hook on the devices of these users."""
    asked = [p for p in fed.parts if overrides(p, hook)]
    for lo in range(0, len(users) if asked else 0, fed.chunk):
        some = users[lo : lo + fed.chunk].astype(np.int32)
        view = users_view(clients, server, block, some, fed.stream.user_keys, received)
        for part in asked:
            clients.put_parts(some, {part.name: getattr(part, hook)(view)})


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
    clients: Clients,
    block: Block,
    purpose: Purpose,
    mask: Ragged,
    metrics: list[str] | None = None,
    cutoffs: list[int] | None = None,
    wanted: Ragged | None = None,
) -> Evaluation:
    """Evaluate the devices' own scores on a block's validation or test items."""
    cfg = fed.config.evaluate
    received, _ = broadcast(fed, server)
    past = None if fed.backbone.trains else fed.stream.history(block.index)
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
    )


def selecting_metric(config: RunConfig) -> tuple[str, int]:
    name, _, k = config.evaluate.select_by.partition("@")
    if name not in {"ndcg", "recall", "hr", "precision", "mrr"} or not k.isdigit() or int(k) < 1:
        raise TacitaError(
            f"evaluate.select_by = '{config.evaluate.select_by}' is not a metric at a cut-off such as 'ndcg@20'."
        )
    return name, int(k)


def run_block(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """Rounds with validation until patience runs out; leaves the best round in `progress`."""
    index = progress.server.block
    block, plan = fed.stream.blocks[index], fed.config.train
    members = members_of(block, fed.stream.user_keys, plan.silos, fed.draws)
    mask = known_items(fed, block, "valid", fed.config.evaluate.mask)
    metric, k = selecting_metric(fed.config)
    blind = len(block.valid.ids) == 0  # nobody to validate on: the last round is the best there is
    rounds = plan.rounds if fed.backbone.trains else fed.backbone.trials
    while progress.server.round < rounds and progress.stale < plan.patience and len(members.active):
        progress.server, report = run_round(fed, progress.server, progress.clients, block, members)
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        if report.round % fed.config.evaluate.every == 0 or report.round == rounds:
            score = float(report.round)
            if not blind:
                found = measure(fed, progress.server, progress.clients, block, "valid", mask, [metric], [k])
                score = found.mean()[f"{metric}@{k}"]
                report = replace(report, valid=score)
            if score > progress.best_score:
                progress.best_score, progress.best_round, progress.stale = score, report.round, 0
                progress.best_server, progress.best_clients = progress.server, progress.clients.copy()
            else:
                progress.stale += fed.config.evaluate.every
        on_round(report, progress)


def end_block(fed: Federation, progress: Progress) -> None:
    """Test the best round, let the parts keep what they need of it, and carry it on."""
    server, clients = progress.best_server, progress.best_clients
    block = fed.stream.blocks[server.block]
    result, found = block_result(fed, progress, block)
    received, _ = broadcast(fed, server)
    _on_devices(fed, server, clients, block, received, "end_block", np.flatnonzero(clients.took_part))
    for part in fed.parts:
        server = server.with_part(part.name, part.server_end_block(server))
    if fed.config.train.resume_from == "last":
        server = replace(progress.server, parts=server.parts)
        clients = replace(progress.clients, parts=clients.parts)
    progress.server, progress.clients = server, clients
    progress.results.append(result)
    progress.found.append(found)
    progress.in_block = False


def block_result(fed: Federation, progress: Progress, block: Block) -> tuple[dict[str, Any], Evaluation]:
    """Scores of the best round on this block's test and on every earlier block's."""
    server, clients, cfg = progress.best_server, progress.best_clients, fed.config.evaluate
    rounds = progress.server.round
    new = np.zeros(fed.stream.n_users, bool)
    new[: block.n_users] = block.new_users
    found = measure(fed, server, clients, block, "test", known_items(fed, block, "test", cfg.mask))
    other = "history" if cfg.mask == "block" else "block"
    second = measure(fed, server, clients, block, "test", known_items(fed, block, "test", other))
    result: dict[str, Any] = {
        "block": block.index,
        **found.mean(),
        "rounds": rounds,
        "best_round": progress.best_round,
        "valid": progress.best_score if len(block.valid.ids) else None,
        "valid_served": _served_validation(fed, progress, block),
        "users": len(found.users),
        "new": {"users": int(new[found.users].sum()), **found.mean(new)},
        "returning": {"users": int((~new)[found.users].sum()), **found.mean(~new)},
        f"mask_{other}": second.mean(),
        "bytes_up": progress.bytes_up / max(1, rounds),
        "bytes_down": progress.bytes_down / max(1, rounds),
    }
    metric, k = selecting_metric(fed.config)
    result["on_blocks"] = []
    for earlier in fed.stream.blocks[: block.index + 1]:
        own = cfg.old_block_mask == "own" or earlier.index == block.index
        mask = known_items(fed, earlier if own else block, "test", cfg.mask)
        seen = measure(fed, server, clients, earlier, "test", mask, [metric], [k])
        result["on_blocks"].append(seen.mean()[f"{metric}@{k}"])
    return result, found


def _served_validation(fed: Federation, progress: Progress, block: Block) -> float | None:
    """Validation of the best round with the corrections that only serving applies; what tuning looks at."""
    if len(block.valid.ids) == 0:
        return None
    if not any(overrides(p, "predict") for p in fed.parts):
        return progress.best_score
    metric, k = selecting_metric(fed.config)
    mask = known_items(fed, block, "valid", fed.config.evaluate.mask)
    server, clients = progress.best_server, progress.best_clients
    found = measure(fed, server, clients, block, "test", mask, [metric], [k], block.valid)
    return found.mean()[f"{metric}@{k}"]


def run_stream(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """All blocks from where `progress` stands."""
    while len(progress.results) < len(fed.stream.blocks):
        if not progress.in_block:
            begin_block(fed, progress, len(progress.results))
        run_block(fed, progress, on_round)
        end_block(fed, progress)
