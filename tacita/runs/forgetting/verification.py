"""How a model from which data was withdrawn compares with one that is trained again without the data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.files import flatten_parts
from tacita.core.types import Bools, Ragged
from tacita.federation.evaluation import TrainedState
from tacita.learn.statistic import CONTRIBUTION_LOG, split_by_block
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import OWN_ROWS, PARTS
from tacita.round.plan import Federation, Plan
from tacita.round.unlearning_report import PartReports
from tacita.runs.forgetting import traces
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.retraining import find_shared, retrain_blocks
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
    seconds: float  # of training again
    max_difference: float | None  # largest, of any score of any item of those compared; None: nobody is
    n_compared: int  # people whose scores were
    same_bits: bool
    audit: dict[str, Any]
    utility: dict[str, Any]


def verify_request(done: AppliedRequest) -> Verification:
    """Train again on what remains and compare."""
    began = time.perf_counter()
    again = retrain_reference(done)
    seconds = time.perf_counter() - began
    models = {"before": done.before, "after": done.after, "retrain": again}
    useful = {
        name: traces.measure_utility(done.federation, done.remaining, one, done.request.users)
        for name, one in models.items()
    }
    worst, people = largest_difference(done.remaining, done.after, again)
    return Verification(
        seconds,
        worst,
        people,
        model_digest(done.remaining, done.after) == model_digest(done.remaining, again),
        compare_models(done, models),
        useful,
    )


def model_digest(plan: Plan, learned: TrainedState) -> str:
    """Of all that everybody gets to score with: the table, shared parameters, and what parts send beside them."""
    sent = flatten_parts(plan.broadcast_serving(learned.server).common, PARTS)
    return digest({"items": learned.server.items, **learned.server.heads, **sent})


def retrain_reference(done: AppliedRequest) -> TrainedState:
    """What there would be had the withdrawn data never been there."""
    left, server = done.remaining, done.after.server
    if left.learner.unlearning is not None:
        model = left.backbone
        assert isinstance(model, StatisticModel)
        everybody = np.arange(done.after.clients.n_users)
        told = done.after.clients.read_list(f"{PARTS}{left.learner.name}/{CONTRIBUTION_LOG}", everybody)
        return TrainedState(model.retrain_from(server, split_by_block(told)), done.after.clients)
    return retrain_run(left, done.after)


def retrain_run(fed: Federation, now: TrainedState, seed: int | None = None) -> TrainedState:
    """What the run comes to from its beginning, where people share what they share now; maybe with other draws."""
    progress = retrain_blocks(fed, find_shared(fed, now), seed, now)
    return TrainedState(progress.server, progress.clients)


def largest_difference(fed: Federation, now: TrainedState, retrained: TrainedState) -> tuple[float | None, int]:
    """Of any score between two models, and of how many people; without those who left with everything."""
    one, other, worst = traces.build_scorer(fed, now), traces.build_scorer(fed, retrained), 0.0
    users = np.flatnonzero(~find_emptied(fed, now)).astype(np.int32)
    for lo in range(0, len(users), traces.CHUNK):
        some = users[lo : lo + traces.CHUNK]
        worst = max(worst, float(np.abs(one(some) - other(some)).max()))
    return worst if len(users) else None, len(users)


def find_emptied(fed: Federation, now: TrainedState) -> Bools:
    """(users) whose device has no item, no private vector and no row of its own any more: it has nothing to score with.

    One that begins again without items gets a vector that is drawn, so theirs would differ whatever was forgotten. Who
    has no items but still a vector is not among them: that vector would be what was not forgotten.
    """
    clients, known = now.clients, fed.stream.blocks[now.server.block].n_users
    if clients.private.shape[1] == 0:
        return np.zeros(known, bool)
    nothing = (clients.private[:known] == 0).all(axis=1)
    nothing &= fed.stream.history(len(fed.stream.blocks)).counts()[:known] == 0
    if OWN_ROWS in clients.lists:
        nothing &= clients.read_list(OWN_ROWS, np.arange(known)).counts() == 0
    return np.asarray(nothing)


def _attack_pairs(seen: dict[str, traces.PairScores], pairs: traces.MatchedPairs, seed: int) -> dict[str, Any]:
    """How well withdrawn pairs are told from others; None where there are none, or scores that are all tied."""
    return {
        "auc_pairs": {
            **{name: traces.pair_auc(one) for name, one in seen.items()},
            "ci": {name: traces.pair_interval(one, pairs.owner, seed) for name, one in seen.items()},
        },
        "auc_difference": traces.difference_auc(seen["before"], seen["after"]),
    }


def compare_models(done: AppliedRequest, models: dict[str, TrainedState]) -> dict[str, Any]:
    """The figures of D.4 that need no further training."""
    owned = done.federation.stream.history(len(done.federation.stream.blocks))
    pairs = traces.match_pairs(done.remaining, done.withdrawn_items, owned)
    seen = {name: traces.score_pairs(done.remaining, one, pairs) for name, one in models.items()}
    seed, items = done.federation.config.seed, traces.sample_items(done.remaining)
    was, now, again = models["before"], models["after"], models["retrain"]
    far, near = traces.model_distance(done.remaining, was, again), traces.model_distance(done.remaining, now, again)
    mine, other = (traces.item_table(done.remaining, one) for one in (now, again))
    return {
        "pairs": len(pairs.members.ids),
        **_attack_pairs(seen, pairs, seed),
        "param_distance_ratio": near / far if near is not None and far else None,
        "gram_distance": traces.gram_distance(mine, other, items),
        "rank_percentile": {name: one.mean_rank for name, one in seen.items()},
        "jaccard20": traces.jaccard(seen["after"], seen["retrain"]),
    }
