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

from tacita.audit import membership
from tacita.audit.scene import Scene, as_it_is, draw_requests, plant
from tacita.core.types import Floats, Ragged
from tacita.federation.devices import Here
from tacita.federation.measuring import Learned
from tacita.federation.rounds import Progress
from tacita.lab.artefacts import Needles, clean, find_traces
from tacita.lab.assembling import ALL_CORES, Machine
from tacita.lab.forgetting import traces
from tacita.lab.forgetting.door import carried_out, opened
from tacita.lab.forgetting.proof import Done, retrained, trained_again
from tacita.lab.forgetting.verdict import checks_of, gap_of, verdict_of
from tacita.lab.run_folder import write_models
from tacita.round.plan import Federation

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
class Judged:
    """A withdrawal and the models that it is judged by."""

    scene: Scene
    done: Done
    models: dict[str, Learned]
    seed: int

    @property
    def left(self) -> Federation:
        return self.done.left

    def table(self, name: str) -> Floats:
        """The item rows that devices score with."""
        return traces.table_of(self.left, self.models[name])


def audit_forgetting(
    folder: Path,
    share: float = 0.3,
    planted: bool = True,
    machine: Machine = ALL_CORES,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Let some people of a run withdraw what they gave, and attack what is left of it. The folder stays as it is."""
    run = opened(folder, machine)
    scene = plant(run) if planted else as_it_is(run)
    tell(1, 4)
    asked = draw_requests(scene, share)
    way = scene.run.way_of(asked)
    done = carried_out(scene.run.fed, scene.run.progress, asked, way)
    tell(2, 4)
    began = time.perf_counter()
    models = {"O": done.was, "X": done.now, "R1": retrained(done)}
    seconds = time.perf_counter() - began
    tell(3, 4)
    seed = run.saved.config.seed
    models["R2"] = trained_again(done.left, done.now, seed + 1)
    found = attack(Judged(scene, done, models, seed))
    tell(4, 4)
    return {
        "data": run.fed.stream.name,
        "method": run.saved.config.method,
        "backbone": run.fed.backbone.name,
        "by": list(way.by),
        "why": way.why,
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


def attack(judged: Judged) -> dict[str, Any]:
    """Every attack on every model."""
    done, models = judged.done, judged.models
    history = done.fed.stream.history(len(done.fed.stream.blocks))
    real = done.withdrawn.where(~np.isin(done.withdrawn.rows(), judged.scene.canaries))
    pairs = traces.matched_pairs(judged.left, real, history)
    seen = {name: traces.look(judged.left, one, pairs) for name, one in models.items()}
    items, floor = traces.sampled_items(judged.left), traces.distance(judged.left, models["R1"], models["R2"])
    far = traces.distance(judged.left, models["O"], models["R1"])
    canaries, people, again = exposures(judged), user_level(judged), relearning(judged, pairs)
    rows: dict[str, dict[str, Any]] = {}
    for name, one in models.items():
        away = traces.distance(judged.left, one, models["R1"])
        rows[name] = {
            "auc_pairs": traces.pair_auc(seen[name]),
            "auc_pairs_ci": traces.pair_interval(seen[name], pairs.owner, judged.seed),
            "auc_from_r1": traces.paired_interval(seen[name], seen["R1"], pairs.owner, judged.seed),
            "auc_difference": traces.difference_auc(seen["O"], seen[name]),
            "auc_user": people.get(name),
            "distance_ratio": away / far if away is not None and far else None,
            "gram_distance": traces.gram_distance(judged.table(name), judged.table("R1"), items),
            "rank_percentile": seen[name].mean_rank,
            "jaccard20": traces.jaccard(seen[name], seen["R1"]),
            "relearn_ratio": again.get(name),
            "canary_exposure": canaries.get(name),
        }
    return {"pairs": len(pairs.members.ids), "rows": rows, **judgement(rows, floor, far, artefacts(judged))}


def judgement(
    rows: dict[str, dict[str, Any]], floor: float | None, far: float | None, found: dict[str, Any]
) -> dict[str, Any]:
    """What the attacks come to: every check, the names of those that failed, and a sentence."""
    gap = gap_of(rows["X"]["auc_pairs"], rows["R1"]["auc_pairs"])
    noise = floor / far if floor is not None and far else None
    places = {kind: found["X"][kind] for kind in ("pairs", "people", "rows")}
    checks = checks_of(gap, rows["X"]["distance_ratio"], noise, places)
    return {
        "noise_floor": noise,
        "artefacts": found,
        "auc_gap": gap,
        "checks": {one.name: one.passed for one in checks},
        "failed": [one.name for one in checks if one.passed is False],
        "verdict": verdict_of(checks),
    }


def exposures(judged: Judged) -> dict[str, float]:
    """Mean exposure of the canaries' pairs: log2 of the catalogue over the rank of the one for who has the other."""
    scene, left = judged.scene, judged.left
    if len(scene.canaries) == 0:
        return {}
    block = left.stream.blocks[-1]
    mine = Ragged.from_pairs(scene.canaries, scene.known, block.n_users)
    others = block.train.where(~np.isin(block.train.rows(), scene.canaries))
    shown = replace(block, train=Ragged(others.ptr, others.ids).joined(mine))
    fed = replace(left, stream=replace(left.stream, blocks=(*left.stream.blocks[:-1], shown)))
    out = {}
    for name, one in judged.models.items():
        scores = traces.scorer_of(fed, one)(scene.canaries).astype(np.float64)
        at = scores[np.arange(len(scores)), scene.partner]
        rank = 1 + (scores > at[:, None]).sum(1) + ((scores == at[:, None]).sum(1) - 1) / 2
        out[name] = float(np.log2(scores.shape[1] / rank).mean())
    return out


def user_level(judged: Judged) -> dict[str, float]:
    """AUC of telling those who withdrew from those who were never learned from, by how well they are fitted."""
    held = judged.scene.held_out
    held = held.take(np.flatnonzero(held.counts() > 1))
    gone = judged.done.withdrawn
    users = np.setdiff1d(np.flatnonzero(gone.counts() > 1), judged.scene.canaries)
    trained = judged.left.stream.trained(len(judged.left.stream.blocks) - 1)
    all_of = judged.done.fed.stream.trained(len(judged.done.fed.stream.blocks) - 1)
    others = np.setdiff1d(np.flatnonzero(trained.counts() > 1), users)[:200]
    if not len(held) or not len(users) or judged.table("O").shape[1] == 0:
        return {}
    key, out = judged.left.draws.public("user-level"), {}
    for name in judged.models:
        table = judged.table(name)
        inside, outside = (
            membership.surprise(table, lists, owned, trained.take(others), key)
            for lists, owned in ((gone.take(users), all_of.take(users)), (held, held))
        )
        out[name] = traces.auc_of(-inside, -outside)
    return out


def relearning(judged: Judged, pairs: traces.Pairs) -> dict[str, float | None]:
    """Steps until withdrawn pairs are fitted as well as in the run, over those that R1 needs; below 1: sooner.

    Who never gets there has none. Where R1 does not, the most steps tried stand for its own.
    """
    if judged.table("O").shape[1] == 0 or not len(pairs.members.ids):
        return {}
    samples = membership.Samples(pairs.owner, pairs.members.ids, pairs.others.ids, len(pairs.users))
    goal = membership.fit(judged.table("O"), samples).losses[-1]
    steps = {name: membership.steps_to(judged.table(name), samples, goal) for name in judged.models}
    most = steps["R1"] if steps["R1"] is not None else membership.MOST_STEPS
    return {name: None if n is None else n / max(1, most) for name, n in steps.items()}


def artefacts(judged: Judged) -> dict[str, Any]:
    """What a search finds of withdrawn data in a folder of the run before and after, every file of it."""
    done, stream = judged.done, judged.done.fed.stream
    rows = done.was.server.items[np.unique(done.withdrawn.ids)]
    needles = Needles(done.gone, done.withdrawn, stream.user_keys, stream.user_ids, stream.item_ids, rows=rows)
    out: dict[str, Any] = {}
    for name, fed, one in (("O", done.fed, done.was), ("X", done.left, done.now)):
        needles = replace(needles, lasting=fed.lasting if done.way.anew and name == "X" else None)
        with tempfile.TemporaryDirectory() as place:
            write_models(fed, Progress(one.server, Here(one.clients), one.server), Path(place))
            found = find_traces(Path(place), needles)
        out[name] = {"clean": clean(found), **{kind: len(where) for kind, where in found.items()}}
    return out
