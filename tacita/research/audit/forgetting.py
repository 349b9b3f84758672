"""What withdrawn data still shows of itself: the attacks of sharing spec D.4 on four models.

O is the run, X the run after a withdrawal, R1 a run that was trained again without the data, R2 the same with another
seed. A method forgets well where X looks like R1, not where it looks like nothing: who still likes similar items is
told from their likes. X below R1 is a failure as well, for it marks the data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.types import Floats, Ragged
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState
from tacita.federation.rounds import Progress
from tacita.research.audit import membership
from tacita.research.audit.withdrawal_scenario import WithdrawalScenario, draw_requests, plant_canaries, wrap_run
from tacita.round.plan import Federation
from tacita.runs.artefacts import ScanTargets, find_traces, is_clean
from tacita.runs.assembly import ALL_CORES, Machine
from tacita.runs.forgetting import traces
from tacita.runs.forgetting.request_service import apply_request, reopen_run
from tacita.runs.forgetting.verdict import auc_gap, run_checks, summarise_checks
from tacita.runs.forgetting.verification import AppliedRequest, retrain_reference, retrain_run
from tacita.runs.run_folder import write_models

MODELS = {
    "O": "the run",
    "X": "after the withdrawal",
    "R1": "trained again without the data",
    "R2": "the same, another seed",
}
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

    def item_table(self, name: str) -> Floats:
        """The item rows that devices score with."""
        return traces.item_table(self.remaining, self.models[name])


def audit_forgetting(
    folder: Path,
    share: float = 0.3,
    planted: bool = True,
    machine: Machine = ALL_CORES,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Let some people of a run withdraw what they gave, and attack what is left of it. The folder stays as it is."""
    run = reopen_run(folder, machine)
    scene = plant_canaries(run) if planted else wrap_run(run)
    tell(1, 4)
    asked = draw_requests(scene, share)
    way = scene.run.choose_route(asked)
    done = apply_request(scene.run.federation, scene.run.progress, asked, way)
    tell(2, 4)
    began = time.perf_counter()
    models = {"O": done.before, "X": done.after, "R1": retrain_reference(done)}
    seconds = time.perf_counter() - began
    tell(3, 4)
    seed = run.saved.config.seed
    models["R2"] = retrain_run(done.remaining, done.after, seed + 1)
    found = run_attacks(AuditedWithdrawal(scene, done, models, seed))
    tell(4, 4)
    return {
        "data": run.federation.stream.name,
        "method": run.saved.config.method,
        "backbone": run.federation.backbone.name,
        "by": list(way.by),
        "why": way.reason,
        "people": len(asked.users),
        "withdrawn": len(asked.items.ids),
        "share": share,
        "planted": planted,
        "seed": seed,
        "seconds": done.seconds,
        "seconds_retrain": seconds,
        **found,
        "note": NOTE,
    }


def run_attacks(judged: AuditedWithdrawal) -> dict[str, Any]:
    """Every attack on every model."""
    done, models = judged.done, judged.models
    history = done.federation.stream.history(len(done.federation.stream.blocks))
    real = done.withdrawn_items.filter_entries(~np.isin(done.withdrawn_items.rows(), judged.scenario.canaries))
    pairs = traces.match_pairs(judged.remaining, real, history)
    seen = {name: traces.score_pairs(judged.remaining, one, pairs) for name, one in models.items()}
    items, floor = (
        traces.sample_items(judged.remaining),
        traces.model_distance(judged.remaining, models["R1"], models["R2"]),
    )
    far = traces.model_distance(judged.remaining, models["O"], models["R1"])
    canaries, people, again = measure_exposure(judged), attack_users(judged), measure_relearning(judged, pairs)
    rows: dict[str, dict[str, Any]] = {}
    for name, one in models.items():
        away = traces.model_distance(judged.remaining, one, models["R1"])
        rows[name] = {
            "auc_pairs": traces.pair_auc(seen[name]),
            "auc_pairs_ci": traces.pair_interval(seen[name], pairs.owner, judged.seed),
            "auc_from_r1": traces.paired_interval(seen[name], seen["R1"], pairs.owner, judged.seed),
            "auc_difference": traces.difference_auc(seen["O"], seen[name]),
            "auc_user": people.get(name),
            "distance_ratio": away / far if away is not None and far else None,
            "gram_distance": traces.gram_distance(judged.item_table(name), judged.item_table("R1"), items),
            "rank_percentile": seen[name].mean_rank,
            "jaccard20": traces.jaccard(seen[name], seen["R1"]),
            "relearn_ratio": again.get(name),
            "canary_exposure": canaries.get(name),
        }
    return {
        "pairs": len(pairs.members.ids),
        "rows": rows,
        **summarise_attacks(rows, floor, far, search_artefacts(judged)),
    }


def summarise_attacks(
    rows: dict[str, dict[str, Any]], floor: float | None, far: float | None, traces_found: dict[str, Any]
) -> dict[str, Any]:
    """What the attacks come to: every check, the names of those that failed, and a sentence."""
    gap = auc_gap(rows["X"]["auc_pairs"], rows["R1"]["auc_pairs"])
    noise = floor / far if floor is not None and far else None
    places = {kind: traces_found["X"][kind] for kind in ("pairs", "people", "rows")}
    checks = run_checks(gap, rows["X"]["distance_ratio"], noise, places)
    return {
        "noise_floor": noise,
        "artefacts": traces_found,
        "auc_gap": gap,
        "checks": {one.name: one.passed for one in checks},
        "failed": [one.name for one in checks if one.passed is False],
        "verdict": summarise_checks(checks),
    }


def measure_exposure(judged: AuditedWithdrawal) -> dict[str, float]:
    """Mean exposure of the canaries' pairs: log2 of the catalogue over the rank of the one for who has the other."""
    scene, left = judged.scenario, judged.remaining
    if len(scene.canaries) == 0:
        return {}
    block = left.stream.blocks[-1]
    mine = Ragged.from_pairs(scene.canaries, scene.known, block.n_users)
    others = block.train.filter_entries(~np.isin(block.train.rows(), scene.canaries))
    shown = replace(block, train=Ragged(others.ptr, others.ids).join_rows(mine))
    fed = replace(left, stream=replace(left.stream, blocks=(*left.stream.blocks[:-1], shown)))
    out = {}
    for name, one in judged.models.items():
        scores = traces.build_scorer(fed, one)(scene.canaries).astype(np.float64)
        at = scores[np.arange(len(scores)), scene.partner]
        rank = 1 + (scores > at[:, None]).sum(1) + ((scores == at[:, None]).sum(1) - 1) / 2
        out[name] = float(np.log2(scores.shape[1] / rank).mean())
    return out


def attack_users(judged: AuditedWithdrawal) -> dict[str, float]:
    """AUC of telling those who withdrew from those who were never learned from, by how well they are fitted."""
    held = judged.scenario.held_out
    held = held.take(np.flatnonzero(held.counts() > 1))
    gone = judged.done.withdrawn_items
    users = np.setdiff1d(np.flatnonzero(gone.counts() > 1), judged.scenario.canaries)
    trained = judged.remaining.stream.train_items(len(judged.remaining.stream.blocks) - 1)
    all_of = judged.done.federation.stream.train_items(len(judged.done.federation.stream.blocks) - 1)
    others = np.setdiff1d(np.flatnonzero(trained.counts() > 1), users)[:200]
    if not len(held) or not len(users) or judged.item_table("O").shape[1] == 0:
        return {}
    key, out = judged.remaining.draws.public("user-level"), {}
    for name in judged.models:
        table = judged.item_table(name)
        inside, outside = (
            membership.compute_excess_loss(table, lists, owned, trained.take(others), key)
            for lists, owned in ((gone.take(users), all_of.take(users)), (held, held))
        )
        out[name] = traces.compute_auc(-inside, -outside)
    return out


def measure_relearning(judged: AuditedWithdrawal, pairs: traces.MatchedPairs) -> dict[str, float | None]:
    """Steps until withdrawn pairs are fitted as well as in the run, over those that R1 needs; below 1: sooner.

    Who never gets there has none. Where R1 does not, the most steps tried stand for its own.
    """
    if judged.item_table("O").shape[1] == 0 or not len(pairs.members.ids):
        return {}
    samples = membership.PairSamples(pairs.owner, pairs.members.ids, pairs.others.ids, len(pairs.users))
    goal = membership.fit_vectors(judged.item_table("O"), samples).losses[-1]
    steps = {name: membership.count_steps_to(judged.item_table(name), samples, goal) for name in judged.models}
    most = steps["R1"] if steps["R1"] is not None else membership.MAX_STEPS
    return {name: None if n is None else n / max(1, most) for name, n in steps.items()}


def search_artefacts(judged: AuditedWithdrawal) -> dict[str, Any]:
    """What a search finds of withdrawn data in a folder of the run before and after, every file of it."""
    done, stream = judged.done, judged.done.federation.stream
    rows = done.before.server.items[np.unique(done.withdrawn_items.ids)]
    needles = ScanTargets(
        done.removed_items, done.withdrawn_items, stream.user_keys, stream.user_ids, stream.item_ids, rows=rows
    )
    out: dict[str, Any] = {}
    for name, fed, one in (("O", done.federation, done.before), ("X", done.remaining, done.after)):
        needles = replace(
            needles, persistent=fed.persistent_names if done.route.is_retraining and name == "X" else None
        )
        with tempfile.TemporaryDirectory() as place:
            write_models(fed, Progress(one.server, LocalDevices(one.clients), one.server), Path(place))
            found = find_traces(Path(place), needles)
        out[name] = {"clean": is_clean(found), **{kind: len(where) for kind, where in found.items()}}
    return out
