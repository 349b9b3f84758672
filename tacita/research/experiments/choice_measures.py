"""Measures to choose a method by: quality, a person's traffic, seconds, epsilon, the cost of forgetting a person.

One person, the same in every run of a seed, leaves with everything, by the route of the run's own request service.
Where that route is retraining, the training itself is the price and is not paid a second time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tacita.federation.evaluation import TrainedState
from tacita.federation.rounds import Progress, RoundReport, make_initial_progress, run_remaining_blocks
from tacita.methods.distillation.traffic import KILOBYTE
from tacita.models.statistic_model import StatisticModel
from tacita.research.experiments.single_block import (
    Line,
    find_epsilon,
    get_first_metric,
    pack_scores,
    require_single_block,
    round_metric_values,
)
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import are_exact
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.requests import ResolvedRequest, sample_requesters
from tacita.runs.forgetting.retraining import find_shared_and_learned_items
from tacita.runs.forgetting.routes import UnlearningRoute, choose_route
from tacita.runs.forgetting.verification import AppliedRequest
from tacita.runs.server_view import describe_server_view

RETRAINS = "trains again"
_PROTECTED_FROM = {
    "local": "from the server",
    "silo": "from the server",
    "central": "from who gets the model",
    "": "from who sees the sum",
}


def measure_choice(federation: Federation) -> Line:
    """A run from its first round to its last, and one person's leaving."""
    require_single_block(federation)
    traffic = np.zeros(2)  # bytes up and down

    def on_round(report: RoundReport, progress: Progress) -> None:
        per_client = np.array([report.bytes_up, report.bytes_down])
        traffic[:] += report.clients * per_client

    progress = make_initial_progress(federation)
    began = time.process_time()
    run_remaining_blocks(federation, progress, on_round)
    seconds = time.process_time() - began
    result = progress.results[-1]
    evaluation = progress.evaluations[-1]
    up, down = traffic / KILOBYTE / federation.stream.n_users
    values = evaluation.compute_means() | find_epsilon(result)
    values["KB up, a person"] = up
    values["KB down, a person"] = down
    values["CPU seconds"] = seconds
    outcome, price = _measure_leaving(federation, progress, seconds)
    values["forgetting, CPU seconds"] = price
    user_scores = evaluation.values[get_first_metric(federation)]
    return {
        "values": round_metric_values(values),
        "rounds": result["rounds"],
        "best_round": result["best_round"],
        "valid": result["valid"],
        "words": {
            "forgets": outcome,
            "sees": describe_server_view(federation),
            "promise": describe_promise(result),
        },
        "users": pack_scores(user_scores),
    }


def describe_promise(result: dict[str, Any]) -> str:
    """Whom the largest epsilon of a run is about, and from whom it protects; nothing where there is none."""
    largest = float("-inf")
    strongest: dict[str, Any] | None = None
    for promise in result.get("promises", {}).values():
        for name, value in promise.items():
            if name.startswith("epsilon") and float(value) > largest:
                largest = float(value)
                strongest = promise
    if strongest is None:
        return ""
    if "epsilon_per_person_most" in strongest:
        return "who told most"
    unit = strongest.get("unit", "person")
    threat = strongest.get("threat", "")
    return f"a {unit}, {_PROTECTED_FROM[threat]}"


def draw_leaver(federation: Federation, progress: Progress) -> tuple[ResolvedRequest, UnlearningRoute]:
    """One drawn person who leaves with all training data, and the route that this takes.

    Where people share, it is one who shares all of it: for whom the method was made.
    """
    last_block = len(federation.stream.blocks) - 1
    trained = federation.stream.collect_train_items(last_block)
    keys = federation.stream.user_keys
    state = TrainedState(progress.server, progress.clients)
    shares = find_shared_and_learned_items(federation, state)
    has_data = trained.counts() > 0
    shares_all = has_data & (shares.shared.counts() >= trained.counts())
    candidates = shares_all if shares_all.any() else has_data
    users = sample_requesters(np.flatnonzero(candidates), keys, federation.draws, 0.0)  # at least one is drawn
    items = trained.take(users)
    named_items = items.filter_entries(np.zeros(len(items.ids), bool))
    batch = RequestBatch("leave", keys[users], named_items, is_immediate=True)
    request = ResolvedRequest(batch, users.astype(np.int32), items, whole=True)
    route = choose_route(federation, request, shares.take(users))
    return request, route


def _measure_leaving(federation: Federation, progress: Progress, training_seconds: float) -> tuple[str, float]:
    """How a person is forgotten, in words, and the processor's seconds for it."""
    request, route = draw_leaver(federation, progress)
    if route.is_retraining:
        return f"{RETRAINS}: exact", training_seconds
    applied = apply_request(federation, progress, request, route)
    return _describe_outcome(applied), applied.seconds_cpu


def _describe_outcome(applied: AppliedRequest) -> str:
    if applied.is_waiting:
        return "waits until others leave, too; --again trains again"
    parts = " and ".join(applied.route.by)
    if applied.route.residue:
        return f"{parts}: not exact, of what was shared only"
    is_exact = _takes_back_sums(applied.federation) or are_exact(applied.part_reports.values())
    return f"{parts}: exact" if is_exact else f"{parts}: not exact"


def _takes_back_sums(federation: Federation) -> bool:
    """Whether the model is a sum that a person can be subtracted from exactly."""
    model = federation.backbone
    return isinstance(model, StatisticModel) and model.retracts_exactly
