"""What one round's parameter uploads show, without a defence and under budgets: who took part, what they like.

The round is the first, and the whole budget lies on it: the least noise that the budget allows. Who reads has what the
setting leaves to be seen (`Seen`): each upload, sums of cohorts under masks, or the noised sum of everybody. `likes`:
AUC of a person's items against all others, by how far rows go towards the liked side (sign-split); the guesses of
`liked` name sets of items. `sum`: whoever sees the sum of a round and knows exactly what a person would have sent; AUC
of those in it against those who are not, by how much of that is in it. Controls: the same guess against what somebody
else likes; the same people and a sum without any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Doubles, Floats, Keys, Longs
from tacita.federation.rounds import Progress, begin_block, start_run
from tacita.research.audit.null_space import auc
from tacita.research.audit.preference_attacks import (
    GUESSES,
    ObservedUploads,
    guess_liked,
    liked_share,
    mean_f1,
    sign_split,
)
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble, build_components

READERS = {
    "likes": "what a person likes (AUC)",
    **{name: f"{words} (F1)" for name, words in GUESSES.items()},
    "sum": "who took part, from the sum (AUC)",
}
MAX_READ = 100  # people whose upload is read, and people who are in a sum or not
DRAWS = 3  # of those
COHORT = 50  # people of a secure sum
SECURE = f"secure sums of {COHORT} people"


@dataclass(frozen=True)
class Defence:
    """A part and its options, and what is seen: each upload, the sum of each cohort, or the sum of everybody."""

    name: str
    parts: list[dict[str, Any]]
    train: dict[str, Any]
    sees: Literal["each", "cohorts", "everybody"] = "each"

    def apply_to(self, config: RunConfig, all_at_once: bool = False) -> RunConfig:
        """`all_at_once`: more people than masks are played for; exact sums are the same numbers."""
        changed = {**self.train, "aggregator": "ideal"} if all_at_once and self.sees == "cohorts" else self.train
        train = config.train.model_copy(update=changed)
        return config.model_copy(update={"parts": self.parts, "train": train})


def list_defences(epsilons: list[float]) -> list[Defence]:
    one: dict[str, Any] = {"name": "dpps", "shares": [1.0], "releases": 1, "between": 0.0}
    found = [Defence("no defence", [], {}), Defence(SECURE, [], {"aggregator": "secure"}, "cohorts")]
    for epsilon in sorted(epsilons, reverse=True):
        found.append(Defence(f"DPPS, epsilon {epsilon:g}", [{**one, "tiers": [epsilon]}], {}))
        averaged = {"name": "dp-fedavg", "epsilon": epsilon, "releases": 1}
        found.append(Defence(f"DP-FedAvg, epsilon {epsilon:g}", [averaged], {"aggregation": "fixed"}, "everybody"))
    return found


def audit_uploads(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """A row without a defence, and one for each mechanism and epsilon."""
    fed = assemble(config.model_copy(update={"parts": []}), machine)
    if fed.learner.name != "rows" or fed.config.train.silos:
        raise TacitaError("this audit reads rows that people upload; use a backbone such as mf, and train.silos = 0.")
    if on_data:
        on_data(fed.stream)
    settings, rows = list_defences(epsilons), []
    plain, people = _start_first_block(fed), _draw_people(fed)
    if len(people) < 4:
        raise TacitaError("too few people have items in the first block, so there is nothing to audit.")
    own = _compute_single_updates(fed, plain, people[: 2 * _group_size(people)])
    for n, setting in enumerate(settings):
        if on_done:
            on_done(n, len(settings))
        seen, plain_sums = (_apply_config(fed, setting.apply_to(fed.config, sums)) for sums in (False, True))
        likes = _attack_likes(seen, observe_uploads(seen, setting, people))
        rows.append({"setting": setting.name, "readers": {**likes, "sum": _attack_sum(plain_sums, people, own)}})
    if on_done:
        on_done(len(settings), len(settings))
    return {
        "data": fed.stream.name,
        "backbone": fed.backbone.name,
        "people": len(people),
        "seed": config.seed,
        "rows": rows,
    }


def _apply_config(fed: Federation, config: RunConfig) -> Federation:
    backbone, parts, draws = build_components(config)
    return replace(fed, backbone=backbone, parts=parts, draws=draws, config=config)


def observe_uploads(fed: Federation, setting: Defence, people: Longs) -> ObservedUploads:
    """All that whoever reads gets to see of some people's uploads."""
    read = people[:MAX_READ]
    if setting.sees == "each":
        groups, group = [people[[n]] for n in range(len(read))], np.arange(len(read))
    elif setting.sees == "cohorts":
        read = read[: max(COHORT, len(read) // COHORT * COHORT)]
        groups, group = list(read.reshape(-1, min(COHORT, len(read)))), np.arange(len(read)) // COHORT
    else:
        groups, group = [people], np.zeros(len(read), np.int64)
    progress = _start_first_block(fed)
    tables = [_sum_updates(fed, progress, _user_keys(fed, one)).astype(np.float32) for one in groups]
    return ObservedUploads(np.stack(tables), group, read)


def _attack_likes(fed: Federation, uploads: ObservedUploads) -> dict[str, dict[str, float]]:
    train = fed.stream.blocks[0].train
    counts = np.bincount(train.ids, minlength=uploads.tables.shape[1]).astype(np.float64)
    scores = [sign_split(table, counts, liked_share(fed)) for table in uploads.tables]
    aucs: dict[str, list[float]] = {"found": [], "control": []}
    for n, group in enumerate(uploads.group):
        for kind, whose in (("found", uploads.people[n]), ("control", uploads.people[(n + 1) % len(uploads.people)])):
            liked = np.zeros(len(counts), bool)
            liked[train.row(int(whose))] = True
            one = auc(scores[group][liked], scores[group][~liked])
            aucs[kind] += [] if one is None else [one]
    found = {"likes": {kind: float(np.mean(values)) for kind, values in aucs.items()}}
    said = guess_liked(fed, _start_first_block(fed), uploads)
    return found | {name: mean_f1(uploads, said[name], train) for name in GUESSES}


def _attack_sum(fed: Federation, people: Longs, own: Floats) -> dict[str, float]:
    """Of a fifth of the people one half is in a round; everybody else is, always."""
    aucs: dict[str, list[float]] = {"found": [], "control": []}
    others = people[len(own) :]
    for draw in range(DRAWS):
        order = np.random.default_rng([fed.config.seed, draw]).permutation(len(own))
        inside, absent = np.split(order, 2)
        for kind, there in (("found", np.concatenate([people[inside], others])), ("control", others)):
            total = _sum_updates(fed, _start_first_block(fed), _user_keys(fed, there))
            score = own @ total.reshape(-1).astype(np.float32)
            one = auc(score[inside], score[absent])
            aucs[kind] += [] if one is None else [one]
    return {kind: float(np.mean(values)) for kind, values in aucs.items()}


def _group_size(people: Longs) -> int:
    return max(1, min(MAX_READ, len(people) // 10))


def _compute_single_updates(fed: Federation, progress: Progress, people: Longs) -> Floats:
    """(people, numbers) what a round of one person alone gives."""
    each = (_sum_updates(fed, progress, _user_keys(fed, people[[n]])).reshape(-1) for n in range(len(people)))
    return np.stack([one.astype(np.float32) for one in each])


def _sum_updates(fed: Federation, progress: Progress, chosen: Keys) -> Doubles:
    down = fed.broadcast_serving(progress.server)
    return np.asarray(progress.devices.exchange(fed, progress.server, down, "round", chosen).total["rows"])


def _start_first_block(fed: Federation) -> Progress:
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    return progress


def _user_keys(fed: Federation, people: Longs) -> Keys:
    return fed.stream.user_keys[people]


def _draw_people(fed: Federation) -> Longs:
    """People with items in the first block, in a random order."""
    some = np.flatnonzero(fed.stream.blocks[0].train.counts() > 0)
    return np.random.default_rng(fed.config.seed).permutation(some)
