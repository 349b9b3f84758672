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
    make_initial_progress,
    run_block,
    run_remaining_blocks,
)
from tacita.methods import RunContext, build_parts, resolve_parts
from tacita.round.clashes import check_parts
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.plan import Federation
from tacita.round.state import build_initial_state

_OBSERVING_PARTS = ("error-memory",)
"""Parts that observe block 0 without changing it: they are on for every method."""


def ignore_round(report: RoundReport, progress: Progress) -> None:
    return None


def with_parts(federation: Federation, config: RunConfig) -> Federation:
    """The same data and backbone under another method."""
    specs = resolve_parts(config.method, config.parts)
    context = RunContext(federation.backbone, federation.draws, config.train)
    parts = build_parts(specs, context)
    check_parts(parts, config.train, federation.stream.blocks[0].n_items)
    return replace(federation, parts=parts, config=config)


def train_base(federation: Federation, on_round: OnRound = ignore_round) -> Progress:
    """Block 0 to its best round, not yet ended."""
    observers = []
    if federation.learner.name == "rows":
        observers = [{"name": name} for name in _OBSERVING_PARTS]
    config = federation.config.model_copy(update={"method": "fedavg", "parts": observers})
    observed = with_parts(federation, config)
    progress = make_initial_progress(observed)
    begin_block(observed, progress, 0)
    run_block(observed, progress, on_round)
    return progress


def adopt_base(federation: Federation, base: Progress) -> Progress:
    """A run of the federation's method that has just ended block 0; the base is left as it is."""
    server = federation.start_block(base.server)
    best = federation.start_block(base.best_server)
    clients = _adopt_devices(federation, base.clients)
    best_clients = _adopt_devices(federation, base.best_clients)
    progress = replace(
        base,
        server=server,
        devices=LocalDevices(clients.with_snapshot(best_clients)),
        best_server=best,
        results=[],
        evaluations=[],
    )
    end_block(federation, progress)
    return progress


def _adopt_devices(federation: Federation, clients: DeviceState) -> DeviceState:
    """A copy of devices with the arrays of the federation's parts and of no others."""
    copied = clients.copy()
    earlier = {}
    initial = {}
    for part in federation.parts:
        initial[part.name] = build_initial_state(part.state(copied.n_users))
        if part.name in copied.parts:
            earlier[part.name] = copied.parts[part.name]
    arrays = DeviceState.from_private(copied.private, earlier, copied.took_part).arrays
    adopted = DeviceState(arrays, copied.lists, copied.common)
    adopted.grow(flatten_parts(initial, PARTS))
    return adopted


def continue_run(federation: Federation, base: Progress, on_round: OnRound = ignore_round) -> Progress:
    """A run of the federation's method from a trained block 0 to the end."""
    progress = adopt_base(federation, base)
    run_remaining_blocks(federation, progress, on_round)
    return progress
