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
from tacita.federation.measuring import UNMASKED, Learned, as_unmasked, evaluate_devices, known_items
from tacita.federation.rounds import Progress, RoundReport, begin_block, run_block, run_stream, start
from tacita.lab.centralised import scored, train_centrally
from tacita.lab.controls import popular_scorer
from tacita.lab.experiments.shared_base import silent, with_parts
from tacita.learn.scores import SCORES
from tacita.methods.distillation.traffic import KILOBYTE, MEGABYTE, PAIR, paper_units
from tacita.round.plan import Federation

Line = dict[str, Any]
COURSE = ("picked", "server_loss", "loss")  # notes of a round that are kept, round by round


def pack(values: Doubles) -> str:
    """Per-user scores in half precision: enough for a paired test, small enough to keep."""
    return base64.b64encode(values.astype(np.float16).tobytes()).decode()


def unpack(text: str) -> Doubles:
    return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)


def train_once(fed: Federation) -> Line:
    """The run's method from its first round to its last."""
    block = only_block(fed)
    course: dict[str, list[float]] = {}

    def on_round(report: RoundReport, now: Progress) -> None:
        for name in COURSE:
            if name in report.notes:
                told = course.setdefault(name, [0.0] * (report.round - 1))  # before the first upload nothing is picked
                told.append(round(report.notes[name], 4))

    progress = start(fed)
    run_stream(fed, progress, on_round)
    result, found = progress.results[-1], progress.found[-1]
    values = rounded(found.mean()) | rounded(_full(fed, progress, block), "full ")
    values |= rounded(_own_models(fed, progress, block), "client ")
    values |= rounded(_traffic(fed, progress.server, result)) | course
    values |= rounded({name: value for name, value in result.items() if name.startswith(UNMASKED)})
    values |= rounded(promised(result))
    values |= rounded({"divergence": fed.homes.divergence}) if fed.homes else {}
    kept = {name: result[name] for name in ("rounds", "best_round", "valid")}
    return {"values": values, **kept, "notes": list(fed.stream.notes), "users": pack(found.values[first_metric(fed)])}


def train_pooled(fed: Federation) -> Line:
    """The run's model, trained on everybody's data in one place."""
    block = only_block(fed)
    trained = train_centrally(fed, block)
    found = scored(fed, block, trained.scorer())
    full = scored(_ranking_all(fed), block, trained.scorer())
    return {
        "values": rounded(found.mean()) | rounded(full.mean(), "full "),
        "rounds": trained.epochs,
        "best_round": trained.best_epoch,
        "valid": trained.valid,
        "notes": list(fed.stream.notes),
        "users": pack(found.values[first_metric(fed)]),
    }


def rank_popular(fed: Federation) -> Line:
    """What everybody would get who got what most people have, under the run's protocol."""
    block = only_block(fed)
    scorer = popular_scorer(fed, block)
    found = scored(fed, block, scorer)
    values = found.mean() | (
        as_unmasked(scored(fed, block, scorer, mask="none")) if fed.config.evaluate.unmasked else {}
    )
    full = scored(_ranking_all(fed), block, scorer).mean()
    kept: Line = {"rounds": 0, "best_round": 0, "valid": None, "notes": list(fed.stream.notes)}
    return {"values": rounded(values) | rounded(full, "full "), **kept, "users": pack(found.values[first_metric(fed)])}


def try_once(fed: Federation) -> Line:
    """The run's method, looked at on validation only."""
    only_block(fed)
    progress = start(fed)
    begin_block(fed, progress, 0)
    run_block(fed, progress, silent)
    return _validated(progress.best_score, progress.server.round, progress.best_round)


def try_pooled(fed: Federation) -> Line:
    """The run's model on everybody's data, looked at on validation only."""
    trained = train_centrally(fed, only_block(fed))
    return _validated(-1.0 if trained.valid is None else trained.valid, trained.epochs, trained.best_epoch)


def _validated(score: float, rounds: int, best_round: int) -> Line:
    if score < 0:
        raise TacitaError("nobody could be validated, so there is nothing to choose by.")
    return {"valid": round(score, 6), "rounds": rounds, "best_round": best_round}


def only_block(fed: Federation) -> Block:
    if len(fed.stream.blocks) > 1:
        raise TacitaError("a table of kind 'once' wants one block; use split.kind = 'leave-one-out' or 'random'.")
    return fed.stream.blocks[0]


def first_metric(fed: Federation) -> str:
    """The metric that people are compared by."""
    return f"{fed.config.evaluate.metrics[0]}@{fed.config.evaluate.k[0]}"


def rounded(values: dict[str, float], prefix: str = "") -> dict[str, list[float]]:
    return {f"{prefix}{name}": [round(value, 6)] for name, value in values.items()}


def _ranking_all(fed: Federation) -> Federation:
    """The same run that ranks the whole catalogue."""
    evaluate = fed.config.evaluate.model_copy(update={"sampled_negatives": 0})
    return replace(fed, config=fed.config.model_copy(update={"evaluate": evaluate}))


def _full(fed: Federation, progress: Progress, block: Block) -> dict[str, float]:
    mask = known_items(fed, block, "test", fed.config.evaluate.mask)
    return evaluate_devices(_ranking_all(fed), Learned(progress.server, progress.clients), block, "test", mask).mean()


def _own_models(fed: Federation, progress: Progress, block: Block) -> dict[str, float]:
    """The clients' own models under the run's protocol, where the server's answers."""
    if fed.learner.name != SCORES:
        return {}
    parts = [{**one, "answers": "client"} if "answers" in one else one for one in fed.config.parts or []]
    asking = with_parts(fed, fed.config.model_copy(update={"parts": parts}))
    mask = known_items(fed, block, "test", fed.config.evaluate.mask)
    return evaluate_devices(asking, Learned(progress.server, progress.clients), block, "test", mask).mean()


def promised(result: dict[str, Any]) -> dict[str, float]:
    """The largest epsilon that a part of the run states, if any does."""
    said = [v for one in result.get("promises", {}).values() for k, v in one.items() if k.startswith("epsilon")]
    return {"epsilon": max(float(one) for one in said)} if said else {}


def _traffic(fed: Federation, server: ServerState, result: dict[str, Any]) -> dict[str, float]:
    """Per client and round in 1,024 bytes, what travels once before the first, and down in the paper's unit."""
    up, down = result["bytes_up"], result["bytes_down"]
    out = {"KB up": up / KILOBYTE, "KB down": down / KILOBYTE}
    if fed.learner.name != SCORES:
        return {**out, "KB once": 0.0, "down, paper's KB": down / MEGABYTE * 1000}
    once = server.items.nbytes + sum(v.nbytes for v in server.heads.values())
    sent = down / PAIR
    return {**out, "KB once": once / KILOBYTE, "samples down": sent, "down, paper's KB": paper_units(sent)}
