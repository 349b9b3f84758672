"""Settings of tally side by side: what each costs in quality and bytes, and what the attacks find in spite of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Doubles, ServerState
from tacita.federation.rounds import begin_block, end_block, run_block, start_run
from tacita.messages import wire_bytes
from tacita.models.tally.model import STATE, Tally, TallyConfig, require_tally
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.peeling_attack import guess_from_columns, peel_histories
from tacita.research.audit.reconstruction import NEARLY_READ, compute_best_overlap, rebuild_gram
from tacita.research.audit.tally_attacks import AttackTarget, count_steps, run_attacks
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble, build_components
from tacita.runs.controls import average_blocks

OFF: dict[str, Any] = {"min_item": 0, "min_pair": 0, "keep": 0}
SETTINGS: list[dict[str, int]] = [
    {"min_item": 5},
    {"min_pair": 5},
    {"keep": 200},
    {"keep": 50},
    {"min_item": 5, "keep": 200},
    {"min_item": 5, "keep": 50},
    {"min_item": 5, "keep": 20},
]


def build_settings(options: dict[str, Any], brief: bool) -> dict[str, dict[str, Any]]:
    """Nothing cut, each cut alone, some together, and the run's own; brief: the run's own only."""
    own = {k: options[k] for k in OFF}
    tried = [] if brief else [one for one in ({}, *SETTINGS) if {**OFF, **one} != own]
    named = {", ".join(f"{k} {v}" for k, v in one.items()) or "none": {**OFF, **one} for one in tried}
    return {**named, "as set": own}


class ProgressCounter:
    """Counts what is done and tells it."""

    def __init__(self, total: int, on_done: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self.on_done = 0, total, on_done
        self.reach(0)

    def reach(self, done: int) -> None:
        self.done = done
        if self.on_done:
            self.on_done(min(done, self.total), self.total)

    def advance(self) -> None:
        self.reach(self.done + 1)


def audit_tally(
    config: RunConfig,
    machine: Machine,
    brief: bool = False,
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """Who can be read under each setting, beside controls, and what the setting costs."""
    fed = assemble(config, machine)
    if on_data:
        on_data(fed.stream)
    asked = require_tally(fed.backbone)
    own = asked.config
    if own.ridge_popularity or own.length_power or fed.stream.blocks[0].n_items > own.most_inputs:
        raise TacitaError(
            "the audit rebuilds G of plain sums: ridge_popularity and length_power must be 0, and the catalogue no "
            "larger than most_inputs."
        )
    rows = []
    settings = build_settings(own.model_dump(), brief)
    users = [int((b.train.counts() > 0).sum()) for b in fed.stream.blocks]
    each = len(users) + count_steps(users[0])
    steps = ProgressCounter(each * len(settings), on_done)
    for done, (name, options) in enumerate(settings.items()):
        steps.reach(done * each)
        plain = {k: v for k, v in config.backbone.items() if k in TallyConfig.model_fields}  # of tally-order, B alone
        changed = config.model_copy(update={"backbone": {**plain, "name": "tally", **options}})
        backbone = require_tally(build_components(changed)[0])
        rows.append(
            {"setting": name, **audit_setting(replace(fed, config=changed, backbone=backbone), backbone, steps.advance)}
        )
    steps.reach(steps.total)
    counts = np.concatenate([b.train.counts() for b in fed.stream.blocks])
    return {
        "data": fed.stream.name,
        "settings": own.model_dump(mode="json"),
        "users": users,
        "bytes_up_readable": 4.0 * float(counts[counts > 0].mean()),
        "bytes_up_maskable": asked.upload_bytes(fed.stream.n_items),
        "rows": rows,
    }


def audit_setting(fed: Federation, backbone: Tally, tell: Callable[[], None]) -> dict[str, Any]:
    """One stream: its quality, what it sends, whom peeling reads in each block, what attacks find in the first."""
    progress, before = start_run(fed), np.zeros((0, 0))
    found: list[Doubles] = []
    attacks: dict[str, Any] = {}
    for block in fed.stream.blocks:
        begin_block(fed, progress, block.index)
        if block.index == 0:
            attacks = run_attacks(AttackTarget.of(backbone, progress.server, block.train, fed.config.seed), tell)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        now = rebuild_server_gram(backbone, progress.server)
        added = now.copy()
        added[: len(before), : len(before)] -= backbone.config.decay * before
        before = now
        guesses = np.concatenate(
            [peel_histories(added), guess_from_columns(unpack_dense_weights(progress.server.heads))]
        )
        chosen, _ = backbone.build_user_terms(block.train, block.n_items)
        found.append(compute_best_overlap(guesses, chosen.toarray() > 0))
        tell()
    mean = average_blocks(progress.results)
    valid = [one["valid"] for one in progress.results[1:] or progress.results]
    return {
        **{name: mean[name] for name in list(mean)[:1]},
        "valid": None if None in valid else float(np.mean(valid)),
        "attacks": attacks,
        "peeled": [int((one == 1).sum()) for one in found],
        "peeled_nearly": [int((one >= NEARLY_READ).sum()) for one in found],
        "bytes_down": float(sum(wire_bytes(a) for a in progress.server.heads.values())),
    }


def largest_count(backbone: Tally, server: ServerState) -> float:
    """How many have the most popular item, faded like G: what the peeling reader is given."""
    n = len(server.items)
    shape = PairShape.from_inputs(n, server.heads["inputs"])
    own = np.arange(n, dtype=np.int64)
    return float(backbone.compute_gram(PairSums.from_arrays(server.parts[STATE]), shape, own * (own + 3) // 2).max())


def rebuild_server_gram(backbone: Tally, server: ServerState) -> Doubles:
    return rebuild_gram(unpack_dense_weights(server.heads), backbone.config.ridge, largest_count(backbone, server))
