"""run_block, run_stream: the only federated loop in the code, whether the devices are here or elsewhere.

A block ends after its last round or when patience runs out; its best round is restored, tested and carried on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.core.types import ServerState
from tacita.federation.evaluation import selection_metric
from tacita.federation.one_round import (
    Progress,
    RoundReport,
    apply_server_steps,
    decode_total,
    open_block,
    run_round,
    start_run,
)
from tacita.federation.requests import enrol_users
from tacita.round.plan import Federation, prepare_serving

__all__ = [
    "OnRound",
    "Progress",
    "RoundReport",
    "apply_server_steps",
    "begin_block",
    "decode_total",
    "end_block",
    "run_block",
    "run_round",
    "run_stream",
    "start_run",
]

OnRound = Callable[[RoundReport, Progress], None]


def begin_block(fed: Federation, progress: Progress, index: int) -> None:
    """A new block, and what the lab's people choose as it begins."""
    open_block(fed, progress, index)
    enrol_users(fed, progress)


def run_block(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """Rounds with validation until patience runs out; leaves the best round in `progress`."""
    metric, k = selection_metric(fed.config)
    rounds, every, patience = fed.learner.rounds, fed.config.evaluate.every, fed.config.train.patience
    if fed.learner.tries:
        every, patience = 1, rounds
    somebody = progress.devices.has_data(fed, progress.server)
    while progress.server.round - progress.played < rounds and progress.stale < patience and somebody:
        if progress.server.round > progress.played:  # as the block began, it did so
            enrol_users(fed, progress)
        progress.server, report = run_round(fed, progress.server, progress.devices)
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        if report.round % every == 0 or report.round - progress.played == rounds:
            down = prepare_serving(fed, progress.server)
            total, users = progress.devices.validate(fed, progress.server, down).get(f"{metric}@{k}", (0.0, 0))
            if users:
                report = replace(report, valid=total / users, clients=report.clients or users)
            if _is_best(report, progress):
                progress.best_score, progress.best_round = -1.0 if report.valid is None else report.valid, report.round
                progress.best_server, progress.stale = progress.server, 0
                progress.devices.keep_best(report.round)
            elif users:
                progress.stale += every
        on_round(report, progress)


def _is_best(report: RoundReport, progress: Progress) -> bool:
    """Whether a round is the best so far; where nobody has validated any, the last one is."""
    if report.valid is None:
        return progress.best_score < 0
    return report.valid > progress.best_score


def end_block(fed: Federation, progress: Progress) -> None:
    """Test the best round, let the parts keep what they need of it, and carry it on."""
    server, rounds = progress.best_server, progress.server.round
    down = prepare_serving(fed, server)
    scores, found = progress.devices.evaluate_best(fed, server, down)
    progress.devices.end_block(fed, server, down)
    for part in fed.parts:
        server = server.with_part(part.name, part.server_end_block(fed.visible_state(part.party, server)))
    if fed.config.train.resume_from == "last":
        server = replace(progress.server, parts=server.parts)
    progress.server = server
    valid = progress.best_score if progress.best_score >= 0 else None
    progress.results.append(
        {
            "block": server.block,
            "rounds": rounds,
            "best_round": progress.best_round,
            "valid": valid,
            "valid_served": valid,
            **scores,
            "bytes_up": progress.bytes_up / max(1, rounds),
            "bytes_down": progress.bytes_down / max(1, rounds),
            **_collect_promises(fed, server),
        }
    )
    if found is not None:
        progress.evaluations.append(found)
    progress.in_block = False


def _collect_promises(fed: Federation, server: ServerState) -> dict[str, dict[str, Any]]:
    """What the parts, and what travels, promise of people's privacy, if anything."""
    said: dict[str, Any] = {
        part.name: made for part in fed.parts if (made := part.promises(fed.visible_state(part.party, server)))
    }
    if promised := fed.learner.promises(server):
        said[fed.backbone.name] = promised
    return {"promises": said} if said else {}


def run_stream(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """All blocks from where `progress` stands."""
    while len(progress.results) < len(fed.stream.blocks):
        if not progress.in_block:
            begin_block(fed, progress, len(progress.results))
        run_block(fed, progress, on_round)
        end_block(fed, progress)
