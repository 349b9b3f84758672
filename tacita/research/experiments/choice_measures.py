"""What people choose by: quality, bytes of a person, seconds, epsilon, what forgetting one person costs, what is seen.

One person, the same in every run of a seed, leaves with everything, by the way that the run's own door takes. Where
that way is to train again, the training itself is the price and is not paid a second time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tacita.federation.evaluation import TrainedState
from tacita.federation.rounds import Progress, RoundReport, run_stream, start_run
from tacita.methods.distillation.traffic import KILOBYTE
from tacita.research.experiments.single_block import (
    Line,
    find_epsilon,
    first_metric,
    pack_scores,
    require_single_block,
    round_values,
)
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.runs.forgetting.request_service import apply_request
from tacita.runs.forgetting.requests import ResolvedRequest, sample_requesters
from tacita.runs.forgetting.retraining import collect_shares
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


def measure_choice(fed: Federation) -> Line:
    """A run from its first round to its last, and one person's leaving."""
    require_single_block(fed)
    sent = np.zeros(2)

    def on_round(report: RoundReport, now: Progress) -> None:
        sent[:] += report.clients * np.array([report.bytes_up, report.bytes_down])

    progress, began = start_run(fed), time.process_time()
    run_stream(fed, progress, on_round)
    seconds = time.process_time() - began
    result, found = progress.results[-1], progress.evaluations[-1]
    up, down = sent / KILOBYTE / fed.stream.n_users
    values = found.mean() | find_epsilon(result)
    values |= {"KB up, a person": up, "KB down, a person": down, "CPU seconds": seconds}
    kept = {name: result[name] for name in ("rounds", "best_round", "valid")}
    forgets, price = _measure_leaving(fed, progress, seconds)
    words = {"forgets": forgets, "sees": describe_server_view(fed), "promise": describe_promise(result)}
    values["forgetting, CPU seconds"] = price
    return {
        "values": round_values(values),
        **kept,
        "words": words,
        "users": pack_scores(found.values[first_metric(fed)]),
    }


def describe_promise(result: dict[str, Any]) -> str:
    """Whom the largest epsilon of a run is about, and from whom it protects; nothing where there is none."""
    said = [
        (v, made) for made in result.get("promises", {}).values() for k, v in made.items() if k.startswith("epsilon")
    ]
    if not said:
        return ""
    made = max(said, key=lambda one: float(one[0]))[1]
    if "epsilon_per_person_most" in made:
        return "who told most"
    return f"a {made.get('unit', 'person')}, {_PROTECTED_FROM[made.get('threat', '')]}"


def draw_leaver(fed: Federation, progress: Progress) -> tuple[ResolvedRequest, UnlearningRoute]:
    """One drawn person who leaves with everything that was learned from, and the way that this goes.

    Where people share, it is one who shares all of it: for whom the method was made.
    """
    trained, keys = fed.stream.train_items(len(fed.stream.blocks) - 1), fed.stream.user_keys
    shares = collect_shares(fed, TrainedState(progress.server, progress.clients))
    has, all_shared = trained.counts() > 0, shares.shared.counts() >= trained.counts()
    able = has & all_shared if (has & all_shared).any() else has
    user = sample_requesters(np.flatnonzero(able), keys, fed.draws, 0.0)  # at least one is drawn
    items = trained.take(user)
    told = RequestBatch("leave", keys[user], items.filter_entries(np.zeros(len(items.ids), bool)), is_immediate=True)
    asked = ResolvedRequest(told, user.astype(np.int32), items, whole=True)
    return asked, choose_route(fed, asked, shares.take(user))


def _measure_leaving(fed: Federation, progress: Progress, training: float) -> tuple[str, float]:
    """How a person is forgotten, in words, and the seconds it took the processor."""
    asked, way = draw_leaver(fed, progress)
    if way.is_retraining:
        return f"{RETRAINS}: exact", training
    done = apply_request(fed, progress, asked, way)
    return _describe_outcome(done), done.seconds_cpu


def _describe_outcome(done: AppliedRequest) -> str:
    if done.is_waiting:
        return "waits until others leave, too; --again trains again"
    model, said = (
        done.federation.backbone.retracts,
        [bool(one["exact"]) for one in done.part_reports.values() if "exact" in one],
    )
    sums = done.federation.learner.takes_back and model is not None and model.retracts_exactly
    exact = "exact" if (sums or (said and all(said))) and not done.route.residue else "not exact"
    return f"{' and '.join(done.route.by)}: {exact}" + (", of what was shared only" if done.route.residue else "")
