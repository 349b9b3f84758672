"""Measures of a run on one block (tables of FedKDRec and FedShare): quality, traffic, its course, and controls.

The columns of the paper are those of the run's own protocol. A full ranking and, where predictions travel, the clients'
own models stand beside them. They are measured at the end only: neither chooses a round.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Block, Doubles, ServerState
from tacita.federation.evaluation import (
    UNMASKED,
    TrainedState,
    build_ranking_mask,
    evaluate_devices,
    rename_unmasked_means,
)
from tacita.federation.rounds import (
    Progress,
    RoundReport,
    begin_block,
    make_initial_progress,
    run_block,
    run_remaining_blocks,
)
from tacita.learn.scores import SCORES
from tacita.methods.distillation.traffic import KILOBYTE, MEGABYTE, PAIR_BYTES, convert_to_paper_units
from tacita.metrics import Evaluation
from tacita.research.experiments.shared_base import ignore_round, with_parts
from tacita.round.plan import Federation
from tacita.runs.central_training import evaluate_scorer, train_centrally
from tacita.runs.controls import make_popular_scorer

Line = dict[str, Any]
"""A finished cell as it is stored."""

CellLines = dict[str, Line]
"""Finished cells, by key."""

Values = dict[str, float]
"""Metrics by name."""

ROUND_NOTES = ("picked", "server_loss", "loss", "weight_concentration")  # notes that are stored round by round


def pack_scores(values: Doubles) -> str:
    """Per-user scores in half precision: enough for a paired test, small enough to keep."""
    packed = values.astype(np.float16).tobytes()
    return base64.b64encode(packed).decode()


def unpack_scores(text: str) -> Doubles:
    packed = base64.b64decode(text)
    return np.frombuffer(packed, np.float16).astype(np.float64)


def measure_trained_run(federation: Federation) -> Line:
    """The run's method from its first round to its last."""
    block = require_single_block(federation)
    course: dict[str, list[float]] = {}

    def on_round(report: RoundReport, progress: Progress) -> None:
        for name in ROUND_NOTES:
            if name in report.notes:
                earlier = [0.0] * (report.round - 1)  # nothing is picked before the first upload
                values = course.setdefault(name, earlier)
                values.append(round(report.notes[name], 4))

    progress = make_initial_progress(federation)
    run_remaining_blocks(federation, progress, on_round)
    result = progress.results[-1]
    evaluation = progress.evaluations[-1]
    values = round_metric_values(evaluation.compute_means())
    values |= round_metric_values(_evaluate_full_catalogue(federation, progress, block), "full ")
    values |= round_metric_values(_evaluate_client_models(federation, progress, block), "client ")
    values |= round_metric_values(_measure_traffic(federation, progress.server, result))
    values |= course
    if "weight_concentration" in course:
        largest = max(course["weight_concentration"])
        values |= round_metric_values({"weight concentration": largest})
    for name, value in result.items():
        if name.startswith(UNMASKED):
            values |= round_metric_values({name: value})
    values |= round_metric_values(find_epsilon(result))
    if federation.homes:
        values |= round_metric_values({"divergence": federation.homes.divergence})
    return {
        "values": values,
        "rounds": result["rounds"],
        "best_round": result["best_round"],
        "valid": result["valid"],
        "notes": list(federation.stream.notes),
        "users": _pack_users(federation, evaluation),
    }


def measure_pooled_training(federation: Federation) -> Line:
    """The run's model, trained on everybody's data in one place."""
    block = require_single_block(federation)
    trained = train_centrally(federation, block)
    scorer = trained.scorer()
    evaluation = evaluate_scorer(federation, block, scorer)
    full = evaluate_scorer(_with_full_catalogue(federation), block, scorer)
    values = round_metric_values(evaluation.compute_means())
    values |= round_metric_values(full.compute_means(), "full ")
    return {
        "values": values,
        "rounds": trained.epochs,
        "best_round": trained.best_epoch,
        "valid": trained.valid,
        "notes": list(federation.stream.notes),
        "users": _pack_users(federation, evaluation),
    }


def measure_popular_ranking(federation: Federation) -> Line:
    """The most popular items for everybody, under the run's protocol."""
    block = require_single_block(federation)
    scorer = make_popular_scorer(federation, block)
    evaluation = evaluate_scorer(federation, block, scorer)
    scores = evaluation.compute_means()
    if federation.config.evaluate.unmasked:
        unmasked = evaluate_scorer(federation, block, scorer, mask="none")
        scores = scores | rename_unmasked_means(unmasked)
    full = evaluate_scorer(_with_full_catalogue(federation), block, scorer)
    values = round_metric_values(scores)
    values |= round_metric_values(full.compute_means(), "full ")
    return {
        "values": values,
        "rounds": 0,
        "best_round": 0,
        "valid": None,
        "notes": list(federation.stream.notes),
        "users": _pack_users(federation, evaluation),
    }


def _pack_users(federation: Federation, evaluation: Evaluation) -> str:
    scores = evaluation.values[get_first_metric(federation)]
    return pack_scores(scores)


def measure_validation_of_run(federation: Federation) -> Line:
    """The run's method, looked at on validation only."""
    require_single_block(federation)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    run_block(federation, progress, ignore_round)
    return _format_validation(progress.best_score, progress.server.round, progress.best_round)


def measure_validation_of_pooled(federation: Federation) -> Line:
    """The run's model on everybody's data, looked at on validation only."""
    block = require_single_block(federation)
    trained = train_centrally(federation, block)
    score = -1.0 if trained.valid is None else trained.valid
    return _format_validation(score, trained.epochs, trained.best_epoch)


def _format_validation(score: float, rounds: int, best_round: int) -> Line:
    if score < 0:
        raise TacitaError("nobody could be validated, so there is nothing to choose by.")
    return {"valid": round(score, 6), "rounds": rounds, "best_round": best_round}


def require_single_block(federation: Federation) -> Block:
    if len(federation.stream.blocks) > 1:
        raise TacitaError("a table of kind 'once' wants one block; use split.kind = 'leave-one-out' or 'random'.")
    return federation.stream.blocks[0]


def get_first_metric(federation: Federation) -> str:
    """The metric that people are compared by."""
    evaluate = federation.config.evaluate
    return f"{evaluate.metrics[0]}@{evaluate.k[0]}"


def round_metric_values(values: Values, prefix: str = "") -> dict[str, list[float]]:
    rounded = {}
    for name, value in values.items():
        rounded[f"{prefix}{name}"] = [round(value, 6)]
    return rounded


def _with_full_catalogue(federation: Federation) -> Federation:
    """The same run that ranks the whole catalogue."""
    evaluate = federation.config.evaluate.model_copy(update={"sampled_negatives": 0})
    config = federation.config.model_copy(update={"evaluate": evaluate})
    return replace(federation, config=config)


def _evaluate_full_catalogue(federation: Federation, progress: Progress, block: Block) -> Values:
    trained = TrainedState(progress.server, progress.clients)
    mask = build_ranking_mask(federation, block, "test", federation.config.evaluate.mask)
    evaluation = evaluate_devices(_with_full_catalogue(federation), trained, block, "test", mask)
    return evaluation.compute_means()


def _evaluate_client_models(federation: Federation, progress: Progress, block: Block) -> Values:
    """The clients' own models under the run's protocol, where the server's model answers."""
    if federation.learner.name != SCORES:
        return {}
    parts = []
    for spec in federation.config.parts or []:
        if "answers" in spec:
            spec = {**spec, "answers": "client"}
        parts.append(spec)
    config = federation.config.model_copy(update={"parts": parts})
    answering = with_parts(federation, config)
    trained = TrainedState(progress.server, progress.clients)
    mask = build_ranking_mask(federation, block, "test", federation.config.evaluate.mask)
    evaluation = evaluate_devices(answering, trained, block, "test", mask)
    return evaluation.compute_means()


def find_epsilon(result: dict[str, Any]) -> Values:
    """The largest epsilon that a part of the run states, if any does."""
    budgets = []
    for promise in result.get("promises", {}).values():
        for name, value in promise.items():
            if name.startswith("epsilon"):
                budgets.append(float(value))
    return {"epsilon": max(budgets)} if budgets else {}


def _measure_traffic(federation: Federation, server: ServerState, result: dict[str, Any]) -> Values:
    """Per client and round in 1,024 bytes, what travels once before the first, and down in the paper's unit."""
    down = result["bytes_down"]
    traffic: Values = {}
    traffic["KB up"] = result["bytes_up"] / KILOBYTE
    traffic["KB down"] = down / KILOBYTE
    if federation.learner.name != SCORES:
        traffic["KB once"] = 0.0
        traffic["down, paper's KB"] = down / MEGABYTE * 1000
        return traffic
    head_bytes = sum(head.nbytes for head in server.heads.values())
    model_bytes = server.items.nbytes + head_bytes
    n_samples = down / PAIR_BYTES
    traffic["KB once"] = model_bytes / KILOBYTE
    traffic["samples down"] = n_samples
    traffic["down, paper's KB"] = convert_to_paper_units(n_samples)
    return traffic
