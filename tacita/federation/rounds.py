"""run_block, run_remaining_blocks: the only federated loop in the code, whether the devices are local or remote.

A block ends after its last round or when patience runs out; its best round is restored, tested and carried on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.federation.evaluation import parse_selection_metric
from tacita.federation.one_round import Progress, RoundReport, make_initial_progress, open_block, run_round
from tacita.federation.requests import enrol_users
from tacita.round.plan import Federation

__all__ = [
    "OnBlock",
    "OnRound",
    "Progress",
    "RoundReport",
    "begin_block",
    "end_block",
    "make_initial_progress",
    "run_block",
    "run_remaining_blocks",
    "run_round",
]

OnRound = Callable[[RoundReport, Progress], None]
OnBlock = Callable[[dict[str, Any]], None]


def ignore_block(scores: dict[str, Any]) -> None:
    """Nobody watches the blocks."""


def begin_block(federation: Federation, progress: Progress, index: int) -> None:
    """A new block, and what the lab's users choose as it begins."""
    open_block(federation, progress, index)
    enrol_users(federation, progress)


def run_block(federation: Federation, progress: Progress, on_round: OnRound) -> None:
    """Rounds with validation until patience runs out; leaves the best round in `progress`."""
    rounds = federation.learner.rounds
    every = federation.config.evaluate.every
    patience = federation.config.train.patience_rounds
    if federation.learner.tries:
        every = 1
        patience = rounds
    releases_noise = bool(federation.ledgers)  # with nobody's data, too: silence would tell that nobody has any
    if not releases_noise and not progress.devices.has_training_data(federation, progress.server):
        return
    while progress.server.round - progress.played < rounds and progress.stale < patience:
        if progress.server.round > progress.played:  # as the block began, it did so
            enrol_users(federation, progress)
        progress.server, report = run_round(federation, progress.server, progress.devices)
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        is_last = report.round - progress.played == rounds
        if report.round % every == 0 or is_last:
            report = _validate_and_keep_round(federation, progress, report, every)
        if federation.learner.tries:  # the next trial changes the best one
            progress.server = replace(progress.best_server, round=progress.server.round)
        on_round(report, progress)


def _validate_and_keep_round(
    federation: Federation, progress: Progress, report: RoundReport, every: int
) -> RoundReport:
    """Measure a round, and keep it if it is the best so far."""
    metric, k = parse_selection_metric(federation.config)
    broadcast = federation.broadcast_serving(progress.server)
    sums = progress.devices.sum_validation(federation, progress.server, broadcast)
    total, users = sums.get(f"{metric}@{k}", (0.0, 0))
    if users:
        report = replace(report, valid=total / users, clients=report.clients or users)
    if _is_best_round(report, progress):
        progress.best_score = -1.0 if report.valid is None else report.valid
        progress.best_round = report.round
        progress.best_server = progress.server
        progress.stale = 0
        progress.devices.keep_best_round(report.round)
    elif users:
        progress.stale += every
    return report


def _is_best_round(report: RoundReport, progress: Progress) -> bool:
    """Whether a round is the best so far; where nobody has validated any, the last one is."""
    if report.valid is None:
        return progress.best_score < 0
    return report.valid > progress.best_score


def end_block(federation: Federation, progress: Progress) -> None:
    """Test the best round, let the parts keep what they need of it, and carry it on."""
    server = progress.best_server
    rounds = progress.server.round
    broadcast = federation.broadcast_serving(server)
    scores, evaluation = progress.devices.evaluate_best_round(federation, server, broadcast)
    progress.devices.end_block(federation, server, broadcast)
    server = federation.end_block(server)
    if federation.config.train.resume_from == "last":
        server = replace(progress.server, parts=server.parts)
    progress.server = server
    valid = progress.best_score if progress.best_score >= 0 else None
    result = {
        "block": server.block,
        "rounds": rounds,
        "best_round": progress.best_round,
        "valid": valid,
        "valid_served": valid,
        **scores,
        "bytes_up": progress.bytes_up / max(1, rounds),
        "bytes_down": progress.bytes_down / max(1, rounds),
    }
    promises = federation.promises(server)
    if promises:
        result["promises"] = promises
    progress.results.append(result)
    if evaluation is not None:
        progress.evaluations.append(evaluation)
    progress.in_block = False


def run_remaining_blocks(
    federation: Federation, progress: Progress, on_round: OnRound, on_block: OnBlock = ignore_block
) -> None:
    """All blocks from where `progress` stands."""
    while len(progress.results) < len(federation.stream.blocks):
        if not progress.in_block:
            begin_block(federation, progress, len(progress.results))
        run_block(federation, progress, on_round)
        end_block(federation, progress)
        on_block(progress.results[-1])
