"""Train block 0 once and let many methods go on from it: they differ only from block 1 on (spec C, G.2.8)."""

from __future__ import annotations

from dataclasses import replace

from tacita.core.config import RunConfig
from tacita.core.files import flatten_parts
from tacita.federation.devices import LocalDevices
from tacita.federation.rounds import (
    OnRound,
    Progress,
    RoundReport,
    begin_block,
    end_block,
    run_block,
    run_stream,
    start_run,
)
from tacita.methods import RunContext, build_parts, resolve_parts
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.plan import Federation

_OBSERVING_PARTS = ("error-memory",)
"""Parts that keep notes during block 0 without changing it: they are on for everybody."""


def ignore_round(report: RoundReport, progress: Progress) -> None:
    return None


def with_parts(fed: Federation, config: RunConfig) -> Federation:
    """The same data and backbone under another method."""
    specs = resolve_parts(config.method, config.parts)
    parts = build_parts(specs, RunContext(fed.backbone, fed.draws, config.train))
    for part in parts:
        part.check(fed.stream.blocks[0].n_items)
    return replace(fed, parts=parts, config=config)


def train_base(fed: Federation, on_round: OnRound = ignore_round) -> Progress:
    """Block 0 to its best round, not yet ended."""
    watchers = [{"name": name} for name in _OBSERVING_PARTS if fed.learner.name == "rows"]
    noting = with_parts(fed, fed.config.model_copy(update={"method": "fedavg", "parts": watchers}))
    progress = start_run(noting)
    begin_block(noting, progress, 0)
    run_block(noting, progress, on_round)
    return progress


def adopt_base(fed: Federation, base: Progress) -> Progress:
    """A run of `fed`'s method that has just ended block 0; the base is left as it is."""
    wanted = {p.name for p in fed.parts}

    def adopt(clients: DeviceState) -> DeviceState:
        mine = clients.copy()
        kept = {name: arrays for name, arrays in mine.parts.items() if name in wanted}
        adopted = DeviceState(
            DeviceState.from_private(mine.private, kept, mine.took_part).arrays, mine.lists, mine.common
        )
        adopted.grow(flatten_parts({p.name: p.device_arrays(mine.n_users) for p in fed.parts}, PARTS))
        return adopted

    server, best = base.server, base.best_server
    for part in fed.parts:
        server = server.with_part(part.name, part.server_begin_block(fed.visible_state(part.party, server)))
        best = best.with_part(part.name, part.server_begin_block(fed.visible_state(part.party, best)))
    progress = replace(
        base,
        server=server,
        devices=LocalDevices(adopt(base.clients).with_snapshot(adopt(base.best_clients))),
        best_server=best,
        results=[],
        evaluations=[],
    )
    end_block(fed, progress)
    return progress


def continue_run(fed: Federation, base: Progress, on_round: OnRound = ignore_round) -> Progress:
    """A run of `fed`'s method from a trained block 0 to the end."""
    progress = adopt_base(fed, base)
    run_stream(fed, progress, on_round)
    return progress
