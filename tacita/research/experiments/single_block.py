"""What is told of a run on one block (tables of FedKDRec and FedShare): quality, traffic, how it went, and controls.

The columns of the paper are those of the run's own protocol; a full ranking and, where predictions travel, the clients'
own models stand beside them. They are measured at the end only: neither chooses a round.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Block, Doubles, ServerState
from tacita.federation.evaluation import UNMASKED, TrainedState, build_mask, evaluate_devices, unmasked_means
from tacita.federation.rounds import Progress, RoundReport, begin_block, run_block, run_stream, start_run
from tacita.learn.scores import SCORES
from tacita.methods.distillation.traffic import KILOBYTE, MEGABYTE, PAIR_BYTES, paper_units
from tacita.research.experiments.shared_base import ignore_round, with_parts
from tacita.round.plan import Federation
from tacita.runs.central_training import evaluate_scorer, train_centrally
from tacita.runs.controls import popular_scorer

Line = dict[str, Any]
ROUND_NOTES = ("picked", "server_loss", "loss")  # notes of a round that are kept, round by round


def pack_scores(values: Doubles) -> str:
    """Per-user scores in half precision: enough for a paired test, small enough to keep."""
    return base64.b64encode(values.astype(np.float16).tobytes()).decode()


def unpack_scores(text: str) -> Doubles:
    return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)


def train_once(fed: Federation) -> Line:
    """The run's method from its first round to its last."""
    block = require_single_block(fed)
    course: dict[str, list[float]] = {}

    def on_round(report: RoundReport, now: Progress) -> None:
        for name in ROUND_NOTES:
            if name in report.notes:
                told = course.setdefault(name, [0.0] * (report.round - 1))  # before the first upload nothing is picked
                told.append(round(report.notes[name], 4))

    progress = start_run(fed)
    run_stream(fed, progress, on_round)
    result, found = progress.results[-1], progress.evaluations[-1]
    values = round_values(found.mean()) | round_values(_evaluate_full(fed, progress, block), "full ")
    values |= round_values(_evaluate_clients(fed, progress, block), "client ")
    values |= round_values(_measure_traffic(fed, progress.server, result)) | course
    values |= round_values({name: value for name, value in result.items() if name.startswith(UNMASKED)})
    values |= round_values(find_epsilon(result))
    values |= round_values({"divergence": fed.homes.divergence}) if fed.homes else {}
    kept = {name: result[name] for name in ("rounds", "best_round", "valid")}
    return {
        "values": values,
        **kept,
        "notes": list(fed.stream.notes),
        "users": pack_scores(found.values[first_metric(fed)]),
    }


def train_pooled(fed: Federation) -> Line:
    """The run's model, trained on everybody's data in one place."""
    block = require_single_block(fed)
    trained = train_centrally(fed, block)
    found = evaluate_scorer(fed, block, trained.scorer())
    full = evaluate_scorer(_rank_catalogue(fed), block, trained.scorer())
    return {
        "values": round_values(found.mean()) | round_values(full.mean(), "full "),
        "rounds": trained.epochs,
        "best_round": trained.best_epoch,
        "valid": trained.valid,
        "notes": list(fed.stream.notes),
        "users": pack_scores(found.values[first_metric(fed)]),
    }


def rank_popular(fed: Federation) -> Line:
    """What everybody would get who got what most people have, under the run's protocol."""
    block = require_single_block(fed)
    scorer = popular_scorer(fed, block)
    found = evaluate_scorer(fed, block, scorer)
    values = found.mean() | (
        unmasked_means(evaluate_scorer(fed, block, scorer, mask="none")) if fed.config.evaluate.unmasked else {}
    )
    full = evaluate_scorer(_rank_catalogue(fed), block, scorer).mean()
    kept: Line = {"rounds": 0, "best_round": 0, "valid": None, "notes": list(fed.stream.notes)}
    return {
        "values": round_values(values) | round_values(full, "full "),
        **kept,
        "users": pack_scores(found.values[first_metric(fed)]),
    }


def try_once(fed: Federation) -> Line:
    """The run's method, looked at on validation only."""
    require_single_block(fed)
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    run_block(fed, progress, ignore_round)
    return _validation_line(progress.best_score, progress.server.round, progress.best_round)


def try_pooled(fed: Federation) -> Line:
    """The run's model on everybody's data, looked at on validation only."""
    trained = train_centrally(fed, require_single_block(fed))
    return _validation_line(-1.0 if trained.valid is None else trained.valid, trained.epochs, trained.best_epoch)


def _validation_line(score: float, rounds: int, best_round: int) -> Line:
    if score < 0:
        raise TacitaError("nobody could be validated, so there is nothing to choose by.")
    return {"valid": round(score, 6), "rounds": rounds, "best_round": best_round}


def require_single_block(fed: Federation) -> Block:
    if len(fed.stream.blocks) > 1:
        raise TacitaError("a table of kind 'once' wants one block; use split.kind = 'leave-one-out' or 'random'.")
    return fed.stream.blocks[0]


def first_metric(fed: Federation) -> str:
    """The metric that people are compared by."""
    return f"{fed.config.evaluate.metrics[0]}@{fed.config.evaluate.k[0]}"


def round_values(values: dict[str, float], prefix: str = "") -> dict[str, list[float]]:
    return {f"{prefix}{name}": [round(value, 6)] for name, value in values.items()}


def _rank_catalogue(fed: Federation) -> Federation:
    """The same run that ranks the whole catalogue."""
    evaluate = fed.config.evaluate.model_copy(update={"sampled_negatives": 0})
    return replace(fed, config=fed.config.model_copy(update={"evaluate": evaluate}))


def _evaluate_full(fed: Federation, progress: Progress, block: Block) -> dict[str, float]:
    mask = build_mask(fed, block, "test", fed.config.evaluate.mask)
    return evaluate_devices(
        _rank_catalogue(fed), TrainedState(progress.server, progress.clients), block, "test", mask
    ).mean()


def _evaluate_clients(fed: Federation, progress: Progress, block: Block) -> dict[str, float]:
    """The clients' own models under the run's protocol, where the server's answers."""
    if fed.learner.name != SCORES:
        return {}
    parts = [{**one, "answers": "client"} if "answers" in one else one for one in fed.config.parts or []]
    asking = with_parts(fed, fed.config.model_copy(update={"parts": parts}))
    mask = build_mask(fed, block, "test", fed.config.evaluate.mask)
    return evaluate_devices(asking, TrainedState(progress.server, progress.clients), block, "test", mask).mean()


def find_epsilon(result: dict[str, Any]) -> dict[str, float]:
    """The largest epsilon that a part of the run states, if any does."""
    said = [v for one in result.get("promises", {}).values() for k, v in one.items() if k.startswith("epsilon")]
    return {"epsilon": max(float(one) for one in said)} if said else {}


def _measure_traffic(fed: Federation, server: ServerState, result: dict[str, Any]) -> dict[str, float]:
    """Per client and round in 1,024 bytes, what travels once before the first, and down in the paper's unit."""
    up, down = result["bytes_up"], result["bytes_down"]
    out = {"KB up": up / KILOBYTE, "KB down": down / KILOBYTE}
    if fed.learner.name != SCORES:
        return {**out, "KB once": 0.0, "down, paper's KB": down / MEGABYTE * 1000}
    once = server.items.nbytes + sum(v.nbytes for v in server.heads.values())
    sent = down / PAIR_BYTES
    return {**out, "KB once": once / KILOBYTE, "samples down": sent, "down, paper's KB": paper_units(sent)}
