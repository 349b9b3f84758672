"""How a model from which data was withdrawn compares with one that is trained again without the data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.files import flat
from tacita.core.types import Bools, Ragged
from tacita.federation.measuring import Learned
from tacita.lab.forgetting import traces
from tacita.lab.forgetting.anew import begun_anew, shared_by
from tacita.lab.forgetting.paths import Way
from tacita.lab.forgetting.wishes import Asked
from tacita.learn.statistic import TOLD, blocks_of
from tacita.round.device_state import OWN, PARTS
from tacita.round.plan import Federation, Plan, to_serve


@dataclass(frozen=True)
class Done:
    """A request that was carried out, and the run before and after it."""

    fed: Federation  # with everything that people had
    left: Federation  # with what they have now
    asked: Asked
    way: Way
    gone: Ragged  # (users) what is nobody's any more
    said: dict[str, Any]  # by every part that it concerned
    was: Learned
    now: Learned
    seconds: float
    seconds_cpu: float  # of the processor, whoever else was using it
    results: list[dict[str, Any]]  # of every block

    @property
    def waits(self) -> bool:
        return bool(waiting_in(self.said))

    @property
    def withdrawn(self) -> Ragged:
        """(users) what was taken back, from the model if not from the device."""
        users = self.asked.users[self.asked.items.rows()]
        return Ragged.from_pairs(users, self.asked.items.ids, self.fed.stream.n_users)


def waiting_in(said: dict[str, Any]) -> set[str]:
    """The parts that wait for others to ask before they take anything back."""
    return {name for name, one in said.items() if one.get("waits") or one.get("waits_for")}


@dataclass(frozen=True)
class Proof:
    seconds: float  # of training again
    difference: float | None  # largest, of any score of any item of those compared; None: nobody is
    compared: int  # people whose scores were
    same_bits: bool
    audit: dict[str, Any]
    utility: dict[str, Any]


def prove(done: Done) -> Proof:
    """Train again on what remains and compare."""
    began = time.perf_counter()
    again = retrained(done)
    seconds = time.perf_counter() - began
    models = {"before": done.was, "after": done.now, "retrain": again}
    useful = {name: traces.utility(done.fed, done.left, one, done.asked.users) for name, one in models.items()}
    worst, people = largest_difference(done.left, done.now, again)
    return Proof(
        seconds,
        worst,
        people,
        model_digest(done.left, done.now) == model_digest(done.left, again),
        compared(done, models),
        useful,
    )


def model_digest(plan: Plan, learned: Learned) -> str:
    """Of all that everybody gets to score with: the table, shared parameters, and what parts send beside them."""
    sent = flat(to_serve(plan, learned.server).common, PARTS)
    return digest({"items": learned.server.items, **learned.server.heads, **sent})


def retrained(done: Done) -> Learned:
    """What there would be had the withdrawn data never been there."""
    left, server = done.left, done.now.server
    if left.learner.takes_back:
        model = left.backbone.retracts
        assert model is not None
        everybody = np.arange(done.now.clients.n_users)
        told = done.now.clients.list_of(f"{PARTS}{left.learner.name}/{TOLD}", everybody)
        return Learned(model.retrained(server, blocks_of(told)), done.now.clients)
    return trained_again(left, done.now)


def trained_again(fed: Federation, now: Learned, seed: int | None = None) -> Learned:
    """What the run comes to from its beginning, where people share what they share now; maybe with other draws."""
    progress = begun_anew(fed, shared_by(fed, now), seed, now)
    return Learned(progress.server, progress.clients)


def largest_difference(fed: Federation, now: Learned, again: Learned) -> tuple[float | None, int]:
    """Of any score between two models, and of how many people; without those who left with everything."""
    one, other, worst = traces.scorer_of(fed, now), traces.scorer_of(fed, again), 0.0
    users = np.flatnonzero(~emptied(fed, now)).astype(np.int32)
    for lo in range(0, len(users), traces.CHUNK):
        some = users[lo : lo + traces.CHUNK]
        worst = max(worst, float(np.abs(one(some) - other(some)).max()))
    return worst if len(users) else None, len(users)


def emptied(fed: Federation, now: Learned) -> Bools:
    """(users) whose device has no item, no private vector and no row of its own any more: it has nothing to score with.

    One that begins again without items gets a vector that is drawn, so theirs would differ whatever was forgotten. Who
    has no items but still a vector is not among them: that vector would be what was not forgotten.
    """
    clients, known = now.clients, fed.stream.blocks[now.server.block].n_users
    if clients.private.shape[1] == 0:
        return np.zeros(known, bool)
    nothing = (clients.private[:known] == 0).all(axis=1)
    nothing &= fed.stream.history(len(fed.stream.blocks)).counts()[:known] == 0
    if OWN in clients.lists:
        nothing &= clients.list_of(OWN, np.arange(known)).counts() == 0
    return np.asarray(nothing)


def _attacked(seen: dict[str, traces.Seen], pairs: traces.Pairs, seed: int) -> dict[str, Any]:
    """How well withdrawn pairs are told from others; None where there are none, or scores that are all tied."""
    return {
        "auc_pairs": {
            **{name: traces.pair_auc(one) for name, one in seen.items()},
            "ci": {name: traces.pair_interval(one, pairs.owner, seed) for name, one in seen.items()},
        },
        "auc_difference": traces.difference_auc(seen["before"], seen["after"]),
    }


def compared(done: Done, models: dict[str, Learned]) -> dict[str, Any]:
    """The figures of D.4 that need no further training."""
    owned = done.fed.stream.history(len(done.fed.stream.blocks))
    pairs = traces.matched_pairs(done.left, done.withdrawn, owned)
    seen = {name: traces.look(done.left, one, pairs) for name, one in models.items()}
    seed, items = done.fed.config.seed, traces.sampled_items(done.left)
    was, now, again = models["before"], models["after"], models["retrain"]
    far, near = traces.distance(done.left, was, again), traces.distance(done.left, now, again)
    mine, other = (traces.table_of(done.left, one) for one in (now, again))
    return {
        "pairs": len(pairs.members.ids),
        **_attacked(seen, pairs, seed),
        "param_distance_ratio": near / far if near is not None and far else None,
        "gram_distance": traces.gram_distance(mine, other, items),
        "rank_percentile": {name: one.mean_rank for name, one in seen.items()},
        "jaccard20": traces.jaccard(seen["after"], seen["retrain"]),
    }
