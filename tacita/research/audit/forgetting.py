"""What withdrawn data still shows of itself: the attacks of sharing spec D.4 on four models.

O is the run, X the run after a withdrawal, R1 a run that was trained again without the data, R2 the same with another
seed. A method forgets well where X looks like R1, not where it looks like nothing: the likes of similar people still
show in R1. X below R1 is a failure as well, for it marks the data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.types import Floats, Longs, Ragged
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState
from tacita.federation.rounds import Progress
from tacita.research.audit import membership
from tacita.research.audit.audit_progress import AuditTable
from tacita.research.audit.withdrawal_scenario import (
    WithdrawalScenario,
    draw_requests,
    make_scenario_of_run,
    retrain_with_canaries,
)
from tacita.round.plan import Federation
from tacita.runs.artefacts import ScanTargets, find_traces, is_clean
from tacita.runs.assembly import ALL_CORES, Machine
from tacita.runs.forgetting import traces
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.verdict import compute_auc_gap, run_checks, summarise_checks
from tacita.runs.forgetting.verification import AppliedRequest, retrain_reference, retrain_run
from tacita.runs.run_folder import write_models

MODELS = {
    "O": "the run",
    "X": "after the withdrawal",
    "R1": "trained again without the data",
    "R2": "the same, another seed",
}
MAX_PEERS = 200  # people that excess losses are compared with
NOTE = (
    "No attack here proves that nothing is left; each says what it finds, and training again is what to compare with."
)


@dataclass(frozen=True)
class AuditedWithdrawal:
    """A withdrawal and the models that it is judged by."""

    scenario: WithdrawalScenario
    done: AppliedRequest
    models: dict[str, TrainedState]
    seed: int

    @property
    def remaining(self) -> Federation:
        return self.done.remaining

    @property
    def has_item_table(self) -> bool:
        """Whether devices score with item rows at all."""
        table = self.build_item_table("O")
        return bool(table.shape[1])

    def build_item_table(self, name: str) -> Floats:
        """The item rows that devices score with."""
        return traces.build_item_table(self.remaining, self.models[name])

    def measure_distance(self, first: str, second: str) -> float | None:
        first_model = self.models[first]
        second_model = self.models[second]
        return traces.measure_model_distance(self.remaining, first_model, second_model)


def audit_forgetting(
    folder: Path,
    share: float = 0.3,
    planted: bool = True,
    machine: Machine = ALL_CORES,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> AuditTable:
    """Let some people of a run withdraw their data, and attack what remains of it. The folder stays as it is."""
    run = reopen_run(folder, machine)
    scenario = retrain_with_canaries(run) if planted else make_scenario_of_run(run)
    tell(1, 4)
    request = draw_requests(scenario, share)
    route = scenario.run.choose_route(request)
    federation = scenario.run.federation
    applied = apply_request(federation, scenario.run.progress, request, route)
    tell(2, 4)
    start = time.perf_counter()
    retrained = retrain_reference(applied)
    seconds_retrain = time.perf_counter() - start
    tell(3, 4)
    seed = run.saved.config.seed
    models = {
        "O": applied.before,
        "X": applied.after,
        "R1": retrained,
        "R2": retrain_run(applied.remaining, applied.after, seed + 1),
    }
    findings = run_attacks(AuditedWithdrawal(scenario, applied, models, seed))
    tell(4, 4)
    return {
        "data": run.federation.stream.name,
        "method": run.saved.config.method,
        "backbone": run.federation.backbone.name,
        "by": list(route.by),
        "why": route.reason,
        "people": len(request.users),
        "withdrawn": len(request.items.ids),
        "share": share,
        "planted": planted,
        "seed": seed,
        "seconds": applied.seconds,
        "seconds_retrain": seconds_retrain,
        **findings,
        "note": NOTE,
    }


def run_attacks(withdrawal: AuditedWithdrawal) -> AuditTable:
    """Every attack on every model."""
    pairs = _match_withdrawn_pairs(withdrawal)
    scores = {}
    for name, model in withdrawal.models.items():
        scores[name] = traces.score_pairs(withdrawal.remaining, model, pairs)
    items = traces.sample_items(withdrawal.remaining)
    floor = withdrawal.measure_distance("R1", "R2")
    far = withdrawal.measure_distance("O", "R1")
    exposure = measure_exposure(withdrawal)
    user_aucs = attack_users(withdrawal)
    relearning = measure_relearning(withdrawal, pairs)
    reference_scores = scores["R1"]
    reference_table = withdrawal.build_item_table("R1")
    rows: dict[str, dict[str, Any]] = {}
    for name in withdrawal.models:
        own_scores = scores[name]
        distance = withdrawal.measure_distance(name, "R1")
        rows[name] = {
            "auc_pairs": traces.compute_pair_auc(own_scores),
            "auc_pairs_ci": traces.compute_pair_interval(own_scores, pairs.owner, withdrawal.seed),
            "auc_from_r1": traces.compute_difference_interval(
                own_scores, reference_scores, pairs.owner, withdrawal.seed
            ),
            "auc_difference": traces.compute_difference_auc(scores["O"], own_scores),
            "auc_user": user_aucs.get(name),
            "distance_ratio": _compute_ratio(distance, far),
            "gram_distance": traces.measure_gram_distance(withdrawal.build_item_table(name), reference_table, items),
            "rank_percentile": own_scores.mean_rank,
            "jaccard20": traces.compute_list_overlap(own_scores, reference_scores),
            "relearn_ratio": relearning.get(name),
            "canary_exposure": exposure.get(name),
        }
    artefacts = search_artefacts(withdrawal)
    summary = summarise_attacks(rows, floor, far, artefacts)
    return {"pairs": len(pairs.members.ids), "rows": rows, **summary}


def _match_withdrawn_pairs(withdrawal: AuditedWithdrawal) -> traces.MatchedPairs:
    """What real people withdrew, each item with one that is as popular and was never theirs."""
    stream = withdrawal.done.federation.stream
    history = stream.collect_history(len(stream.blocks))
    withdrawn = withdrawal.done.withdrawn_items
    is_planted = np.isin(withdrawn.rows(), withdrawal.scenario.canaries)
    real = withdrawn.filter_entries(~is_planted)
    return traces.match_pairs(withdrawal.remaining, real, history)


def _compute_ratio(distance: float | None, far: float | None) -> float | None:
    if distance is None or not far:
        return None
    return distance / far


def summarise_attacks(
    rows: dict[str, dict[str, Any]], floor: float | None, far: float | None, artefacts: dict[str, Any]
) -> AuditTable:
    """What the attacks come to: every check, the names of those that failed, and a sentence."""
    unlearned = rows["X"]
    retrained = rows["R1"]
    gap = compute_auc_gap(unlearned["auc_pairs"], retrained["auc_pairs"])
    noise_floor = _compute_ratio(floor, far)
    after = artefacts["X"]
    trace_counts = {kind: after[kind] for kind in ("pairs", "people", "rows")}
    checks = run_checks(gap, unlearned["distance_ratio"], noise_floor, trace_counts)
    return {
        "noise_floor": noise_floor,
        "artefacts": artefacts,
        "auc_gap": gap,
        "checks": {check.name: check.passed for check in checks},
        "failed": [check.name for check in checks if check.passed is False],
        "verdict": summarise_checks(checks),
    }


def measure_exposure(withdrawal: AuditedWithdrawal) -> dict[str, float]:
    """Mean exposure of the canaries: log2 of the catalogue over the rank of one item for an owner of the other."""
    scenario = withdrawal.scenario
    if len(scenario.canaries) == 0:
        return {}
    federation = _with_known_items_only(withdrawal)
    canary_rows = np.arange(len(scenario.canaries))
    exposure = {}
    for name, model in withdrawal.models.items():
        score_users = traces.build_scorer(federation, model)
        scores = score_users(scenario.canaries).astype(np.float64)
        partner_score = scores[canary_rows, scenario.partner]
        partner_column = partner_score[:, None]
        n_above = (scores > partner_column).sum(1)
        n_equal = (scores == partner_column).sum(1)
        rank = 1 + n_above + (n_equal - 1) / 2
        n_items = scores.shape[1]
        bits = np.log2(n_items / rank)
        exposure[name] = float(bits.mean())
    return exposure


def _with_known_items_only(withdrawal: AuditedWithdrawal) -> Federation:
    """The remaining federation, in which every canary has its known item and no other."""
    scenario = withdrawal.scenario
    federation = withdrawal.remaining
    stream = federation.stream
    block = stream.blocks[-1]
    is_canary = np.isin(block.train.rows(), scenario.canaries)
    others = block.train.filter_entries(~is_canary)
    known = Ragged.from_pairs(scenario.canaries, scenario.known, block.n_users)
    train = Ragged(others.ptr, others.ids).join_rows(known)
    shown_block = replace(block, train=train)
    blocks = (*stream.blocks[:-1], shown_block)
    shown_stream = replace(stream, blocks=blocks)
    return replace(federation, stream=shown_stream)


def attack_users(withdrawal: AuditedWithdrawal) -> dict[str, float]:
    """AUC of telling those who withdrew from those who were never learned from, by how well they are fitted."""
    held_out = withdrawal.scenario.held_out
    strangers = held_out.take(_find_users_with_several(held_out))
    withdrawn = withdrawal.done.withdrawn_items
    users = np.setdiff1d(_find_users_with_several(withdrawn), withdrawal.scenario.canaries)
    has_people = len(strangers) > 0 and len(users) > 0
    if not has_people or not withdrawal.has_item_table:
        return {}
    withdrawn_lists = withdrawn.take(users)
    owned = _list_trained_items(withdrawal.done.federation).take(users)
    remaining = _list_trained_items(withdrawal.remaining)
    others = np.setdiff1d(_find_users_with_several(remaining), users)
    peers = remaining.take(others[:MAX_PEERS])
    key = withdrawal.remaining.draws.public("user-level")
    aucs = {}
    for name in withdrawal.models:
        table = withdrawal.build_item_table(name)
        inside = membership.compute_excess_loss(table, withdrawn_lists, owned, peers, key)
        outside = membership.compute_excess_loss(table, strangers, strangers, peers, key)
        aucs[name] = traces.compute_auc(-inside, -outside)
    return aucs


def _find_users_with_several(lists: Ragged) -> Longs:
    """Who has two items or more."""
    return np.flatnonzero(lists.counts() > 1)


def _list_trained_items(federation: Federation) -> Ragged:
    n_blocks = len(federation.stream.blocks)
    return federation.stream.collect_train_items(n_blocks - 1)


def measure_relearning(withdrawal: AuditedWithdrawal, pairs: traces.MatchedPairs) -> dict[str, float | None]:
    """Steps until withdrawn pairs are fitted as well as in the run, over those that R1 needs; below 1: sooner.

    A model that never gets there has none. Where R1 does not, the most steps tried stand for its own.
    """
    members = pairs.members.ids
    if not withdrawal.has_item_table or len(members) == 0:
        return {}
    n_users = len(pairs.users)
    samples = membership.PairSamples(pairs.owner, members, pairs.others.ids, n_users)
    fitted = membership.fit_vectors(withdrawal.build_item_table("O"), samples)
    goal = fitted.losses[-1]
    steps = {}
    for name in withdrawal.models:
        table = withdrawal.build_item_table(name)
        steps[name] = membership.count_steps_to_goal(table, samples, goal)
    reference_steps = steps["R1"]
    if reference_steps is None:
        reference_steps = membership.MAX_STEPS
    ratios: dict[str, float | None] = {}
    for name, n_steps in steps.items():
        ratio = None
        if n_steps is not None:
            ratio = n_steps / max(1, reference_steps)
        ratios[name] = ratio
    return ratios


def search_artefacts(withdrawal: AuditedWithdrawal) -> AuditTable:
    """What a search finds of withdrawn data in a folder of the run before and after, every file of it."""
    applied = withdrawal.done
    targets = _list_scan_targets(applied)
    targets_after = targets
    if applied.route.is_retraining:
        targets_after = replace(targets, persistent=applied.remaining.persistent_names)
    return {
        "O": _search_run(applied.federation, applied.before, targets),
        "X": _search_run(applied.remaining, applied.after, targets_after),
    }


def _list_scan_targets(applied: AppliedRequest) -> ScanTargets:
    stream = applied.federation.stream
    withdrawn_ids = np.unique(applied.withdrawn_items.ids)
    return ScanTargets(
        applied.removed_items,
        applied.withdrawn_items,
        stream.user_keys,
        tuple(stream.user_ids),
        stream.item_ids,
        rows=applied.before.server.items[withdrawn_ids],
        persistent=None,
    )


def _search_run(federation: Federation, state: TrainedState, targets: ScanTargets) -> AuditTable:
    """Write a model's files to an empty folder and count what a search finds in them."""
    devices = LocalDevices(state.clients)
    progress = Progress(state.server, devices, state.server)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(federation, progress, folder)
        places = find_traces(folder, targets)
    counts: AuditTable = {"clean": is_clean(places)}
    for kind, files in places.items():
        counts[kind] = len(files)
    return counts
