"""How a model from which data was withdrawn compares with one that is retrained without the data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.files import flatten_parts
from tacita.core.types import Bools, Ragged
from tacita.federation.evaluation import TrainedState
from tacita.learn.statistic import CONTRIBUTION_LOG, split_log_by_block
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import OWN_ROWS, PARTS
from tacita.round.plan import Federation, Plan
from tacita.round.unlearning_report import PartReports
from tacita.runs.forgetting import traces
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.retraining import find_shared_items, retrain_blocks
from tacita.runs.forgetting.routes import UnlearningRoute


@dataclass(frozen=True)
class AppliedRequest:
    """A request that was carried out, and the run before and after it."""

    federation: Federation  # with everything that people had
    remaining: Federation  # with what they have now
    request: ResolvedRequest
    route: UnlearningRoute
    removed_items: Ragged  # (users) what is nobody's any more
    part_reports: PartReports  # by every part that it concerned
    before: TrainedState
    after: TrainedState
    seconds: float
    seconds_cpu: float  # of the processor, whoever else was using it
    results: list[dict[str, Any]]  # of every block

    @property
    def is_waiting(self) -> bool:
        return bool(find_waiting_parts(self.part_reports))

    @property
    def counts_releases(self) -> bool:
        """Whether the run states an epsilon, so that no comparison of exact data may leave beside it."""
        return bool(self.federation.ledgers)

    @property
    def withdrawn_items(self) -> Ragged:
        """(users) what was taken back, from the model if not from the device."""
        users = self.request.users[self.request.items.rows()]
        return Ragged.from_pairs(users, self.request.items.ids, self.federation.stream.n_users)


def find_waiting_parts(reports: PartReports) -> set[str]:
    """The parts that wait for others to ask before they take anything back."""
    return {name for name, report in reports.items() if report.is_waiting}


@dataclass(frozen=True)
class Verification:
    seconds: float  # of retraining
    max_difference: float | None  # largest, of any score of any item of those compared; None: nobody is
    n_compared: int  # people whose scores were
    same_bits: bool
    audit: dict[str, Any]
    utility: dict[str, Any]


def verify_request(applied: AppliedRequest) -> Verification:
    """Retrain on what remains and compare."""
    began = time.perf_counter()
    reference = retrain_reference(applied)
    seconds = time.perf_counter() - began
    models = {"before": applied.before, "after": applied.after, "retrain": reference}
    requesters = applied.request.users
    utility = {}
    for name, model in models.items():
        utility[name] = traces.measure_utility(applied.federation, applied.remaining, model, requesters)
    max_difference, n_compared = find_largest_difference(applied.remaining, applied.after, reference)
    digest_after = digest_model(applied.remaining, applied.after)
    digest_reference = digest_model(applied.remaining, reference)
    return Verification(
        seconds=seconds,
        max_difference=max_difference,
        n_compared=n_compared,
        same_bits=digest_after == digest_reference,
        audit=compare_models(applied, models),
        utility=utility,
    )


def digest_model(plan: Plan, learned: TrainedState) -> str:
    """Of all that everybody gets to score with: the table, shared parameters, and what parts send beside them."""
    server = learned.server
    broadcast = flatten_parts(plan.broadcast_serving(server).common, PARTS)
    return digest({"items": server.items, **server.heads, **broadcast})


# Reference


def retrain_reference(applied: AppliedRequest) -> TrainedState:
    """What there would be had the withdrawn data never been there."""
    remaining = applied.remaining
    if remaining.learner.unlearning is None:
        return retrain_run(remaining, applied.after)
    model = remaining.backbone
    assert isinstance(model, StatisticModel)
    clients = applied.after.clients
    all_users = np.arange(clients.n_users)
    contributions = clients.read_list(f"{PARTS}{remaining.learner.name}/{CONTRIBUTION_LOG}", all_users)
    server = model.retrain_from_lists(applied.after.server, split_log_by_block(contributions))
    return TrainedState(server, clients)


def retrain_run(federation: Federation, current: TrainedState, seed: int | None = None) -> TrainedState:
    """What the run comes to from its beginning, where people share what they share now; maybe with other draws."""
    progress = retrain_blocks(federation, find_shared_items(federation, current), seed, current)
    return TrainedState(progress.server, progress.clients)


# Comparison


def find_largest_difference(
    federation: Federation, current: TrainedState, reference: TrainedState
) -> tuple[float | None, int]:
    """Of any score between two models, and of how many people; without those who left with everything."""
    current_scorer = traces.build_scorer(federation, current)
    reference_scorer = traces.build_scorer(federation, reference)
    compared = np.flatnonzero(~find_emptied(federation, current)).astype(np.int32)
    if not len(compared):
        return None, 0
    largest = 0.0
    for start in range(0, len(compared), traces.CHUNK):
        users = compared[start : start + traces.CHUNK]
        difference = np.abs(current_scorer(users) - reference_scorer(users))
        largest = max(largest, float(difference.max()))
    return largest, len(compared)


def find_emptied(federation: Federation, current: TrainedState) -> Bools:
    """(users) whose device has no item, no private vector and no row of its own any more: it has nothing to score with.

    One that begins again without items gets a vector that is drawn, so theirs would differ whatever was forgotten. Who
    has no items but still a vector is not among them: that vector would be what was not forgotten.
    """
    clients = current.clients
    stream = federation.stream
    n_users = stream.blocks[current.server.block].n_users
    if clients.private.shape[1] == 0:
        return np.zeros(n_users, bool)
    has_vector = (clients.private[:n_users] != 0).any(axis=1)
    has_items = stream.collect_history(len(stream.blocks)).counts()[:n_users] > 0
    is_emptied = ~has_vector & ~has_items
    if OWN_ROWS in clients.lists:
        has_rows = clients.read_list(OWN_ROWS, np.arange(n_users)).counts() > 0
        is_emptied &= ~has_rows
    return np.asarray(is_emptied)


def compare_models(applied: AppliedRequest, models: dict[str, TrainedState]) -> dict[str, Any]:
    """The figures of D.4 that need no further training."""
    remaining = applied.remaining
    stream = applied.federation.stream
    owned = stream.collect_history(len(stream.blocks))
    pairs = traces.match_pairs(remaining, applied.withdrawn_items, owned)
    scores = {name: traces.score_pairs(remaining, model, pairs) for name, model in models.items()}
    items = traces.sample_items(remaining)
    table_after = traces.build_item_table(remaining, models["after"])
    table_retrained = traces.build_item_table(remaining, models["retrain"])
    return {
        "pairs": len(pairs.members.ids),
        **_attack_pairs(scores, pairs, applied.federation.config.seed),
        "param_distance_ratio": _compute_distance_ratio(remaining, models),
        "gram_distance": traces.measure_gram_distance(table_after, table_retrained, items),
        "rank_percentile": {name: pair_scores.mean_rank for name, pair_scores in scores.items()},
        "jaccard20": traces.compute_list_overlap(scores["after"], scores["retrain"]),
    }


def _attack_pairs(scores: dict[str, traces.PairScores], pairs: traces.MatchedPairs, seed: int) -> dict[str, Any]:
    """How well withdrawn pairs are told from others; None where there are none, or scores that are all tied."""
    aucs: dict[str, Any] = {}
    intervals = {}
    for name, pair_scores in scores.items():
        aucs[name] = traces.compute_pair_auc(pair_scores)
        intervals[name] = traces.compute_pair_interval(pair_scores, pairs.owner, seed)
    aucs["ci"] = intervals
    return {"auc_pairs": aucs, "auc_difference": traces.compute_difference_auc(scores["before"], scores["after"])}


def _compute_distance_ratio(remaining: Federation, models: dict[str, TrainedState]) -> float | None:
    """Distance to the retrained model after the request, where 1 is that before; None: nothing can be compared."""
    distance_before = traces.measure_model_distance(remaining, models["before"], models["retrain"])
    distance_after = traces.measure_model_distance(remaining, models["after"], models["retrain"])
    if distance_after is None or not distance_before:
        return None
    return distance_after / distance_before
