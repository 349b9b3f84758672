"""What one round's parameter uploads show, without a defence and under budgets: who took part, what they like.

The round is the first, and the whole budget lies on it: the least noise that the budget allows. The defence decides
what a reader observes (`Defence.sees`): each upload, sums of cohorts under masks, or the noised sum of everybody.
`likes`: AUC of a person's items against all others, by how far rows go towards the liked side (sign-split); the guesses
of `guess_liked` name sets of items. `sum`: a reader sees the sum of a round and knows exactly what a person would have
sent; AUC of those in it against those who are not, by how much of that is in it. Controls: the same guess against what
another person likes; the same people and a sum without any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Floats, Keys, Longs
from tacita.federation.rounds import Progress, begin_block, make_initial_progress
from tacita.research.audit.audit_progress import AuditTable, OnData, OnStep
from tacita.research.audit.null_space import AucSamples
from tacita.research.audit.preference_attacks import (
    GUESSES,
    ObservedUploads,
    average_f1,
    compute_liked_share,
    guess_liked,
    score_along_main_direction,
)
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.runs.assembly import Machine, assemble_federation, build_components

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

    def with_defence(self, config: RunConfig, all_at_once: bool = False) -> RunConfig:
        """`all_at_once`: more people than masks are played for; exact sums are the same numbers."""
        changes = self.train
        if all_at_once and self.sees == "cohorts":
            changes = {**self.train, "aggregator": "ideal"}
        train = config.train.model_copy(update=changes)
        return config.model_copy(update={"parts": self.parts, "train": train})


def list_defences(epsilons: list[float]) -> list[Defence]:
    no_defence = Defence("no defence", [], {})
    secure_sums = Defence(SECURE, [], {"aggregator": "secure"}, "cohorts")
    defences = [no_defence, secure_sums]
    for epsilon in sorted(epsilons, reverse=True):
        dpps = {"name": "dpps", "shares": [1.0], "releases": 1, "between": 0.0, "tiers": [epsilon]}
        local = Defence(f"DPPS, epsilon {epsilon:g}", [dpps], {})
        fedavg = {"name": "dp-fedavg", "epsilon": epsilon, "releases": 1}
        fixed = {"aggregation": "fixed"}
        central = Defence(f"DP-FedAvg, epsilon {epsilon:g}", [fedavg], fixed, "everybody")
        defences += [local, central]
    return defences


def audit_uploads(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """A row without a defence, and one for each mechanism and epsilon."""
    plain_config = config.model_copy(update={"parts": []})
    federation = assemble_federation(plain_config, machine)
    refuse_other_uploads(federation)
    if on_data:
        on_data(federation.stream)
    people = _draw_people(federation)
    if len(people) < 4:
        raise TacitaError("too few people have items in the first block, so there is nothing to audit.")
    progress = _start_first_block(federation)
    attacked = people[: 2 * _choose_group_size(people)]
    single_updates = _compute_single_updates(federation, progress, attacked)
    defences = list_defences(epsilons)
    rows = []
    for done, defence in enumerate(defences):
        if on_done:
            on_done(done, len(defences))
        readers = _attack_defence(federation, defence, people, single_updates)
        rows.append({"setting": defence.name, "readers": readers})
    if on_done:
        on_done(len(defences), len(defences))
    return {
        "data": federation.stream.name,
        "backbone": federation.backbone.name,
        "people": len(people),
        "seed": config.seed,
        "rows": rows,
    }


def refuse_other_uploads(federation: Federation) -> None:
    """The attacks read rows of single people."""
    uploads_rows = federation.learner.name == "rows"
    has_silos = bool(federation.config.train.silos)
    if not uploads_rows or has_silos:
        raise TacitaError("this audit reads rows that people upload; use a backbone such as mf, and train.silos = 0.")


def _attack_defence(
    federation: Federation, defence: Defence, people: Longs, single_updates: Floats
) -> dict[str, dict[str, float]]:
    """Every attack on what a defence leaves to be seen."""
    defended = _with_config(federation, defence.with_defence(federation.config))
    uploads = observe_uploads(defended, defence, people)
    findings = _attack_likes(defended, uploads)
    exact_config = defence.with_defence(federation.config, all_at_once=True)
    summed = _with_config(federation, exact_config)
    findings["sum"] = _attack_sum(summed, people, single_updates)
    return findings


def _with_config(federation: Federation, config: RunConfig) -> Federation:
    backbone, parts, draws = build_components(config)
    return replace(federation, backbone=backbone, parts=parts, draws=draws, config=config)


def observe_uploads(federation: Federation, defence: Defence, people: Longs) -> ObservedUploads:
    """All that a reader gets to see of some people's uploads."""
    observed = people[:MAX_READ]
    if defence.sees == "each":
        groups = [people[[place]] for place in range(len(observed))]
        group = np.arange(len(observed))
    elif defence.sees == "cohorts":
        whole_cohorts = len(observed) // COHORT * COHORT
        observed = observed[: max(COHORT, whole_cohorts)]
        cohort_size = min(COHORT, len(observed))
        groups = list(observed.reshape(-1, cohort_size))
        group = np.arange(len(observed)) // COHORT
    else:
        groups = [people]
        group = np.zeros(len(observed), np.int64)
    progress = _start_first_block(federation)
    tables = []
    for members in groups:
        keys = _draw_user_keys(federation, members)
        total = _sum_updates(federation, progress, keys)
        tables.append(total.astype(np.float32))
    return ObservedUploads(np.stack(tables), group, observed)


def _attack_likes(federation: Federation, uploads: ObservedUploads) -> dict[str, dict[str, float]]:
    train = federation.stream.blocks[0].train
    n_items = uploads.tables.shape[1]
    counts = np.bincount(train.ids, minlength=n_items)
    popularity = counts.astype(np.float64)
    share = compute_liked_share(federation)
    scores = [score_along_main_direction(table, popularity, share) for table in uploads.tables]
    aucs = AucSamples("found", "control")
    for place, group in enumerate(uploads.group):
        for kind, person in uploads.pick_person_and_control(place).items():
            liked = np.zeros(n_items, bool)
            liked[train.row(person)] = True
            score = scores[group]
            aucs.add_auc(kind, score[liked], score[~liked])
    progress = _start_first_block(federation)
    guesses = guess_liked(federation, progress, uploads)
    findings = {"likes": aucs.compute_means()}
    for name in GUESSES:
        findings[name] = average_f1(uploads, guesses[name], train)
    return findings


def _attack_sum(federation: Federation, people: Longs, single_updates: Floats) -> dict[str, float]:
    """Of a fifth of the people one half is in a round; everybody else is, always."""
    n_attacked = len(single_updates)
    others = people[n_attacked:]
    aucs = AucSamples("found", "control")
    for draw in range(DRAWS):
        rng = np.random.default_rng([federation.config.seed, draw])
        order = rng.permutation(n_attacked)
        inside, absent = np.split(order, 2)
        with_inside = np.concatenate([people[inside], others])
        participants = {"found": with_inside, "control": others}
        for kind, users in participants.items():
            progress = _start_first_block(federation)
            keys = _draw_user_keys(federation, users)
            total = _sum_updates(federation, progress, keys)
            numbers = total.reshape(-1).astype(np.float32)
            score = single_updates @ numbers
            aucs.add_auc(kind, score[inside], score[absent])
    return aucs.compute_means()


def _choose_group_size(people: Longs) -> int:
    tenth = len(people) // 10
    return max(1, min(MAX_READ, tenth))


def _compute_single_updates(federation: Federation, progress: Progress, people: Longs) -> Floats:
    """(people, numbers) what a round of one person alone gives."""
    updates = []
    for key in _draw_user_keys(federation, people):
        total = _sum_updates(federation, progress, np.array([key]))
        numbers = total.reshape(-1)
        updates.append(numbers.astype(np.float32))
    return np.stack(updates)


def _sum_updates(federation: Federation, progress: Progress, chosen: Keys) -> Doubles:
    broadcast = federation.broadcast_serving(progress.server)
    devices = progress.devices
    reply = devices.exchange(federation, progress.server, broadcast, Question("round"), chosen)
    return np.asarray(reply.total["rows"])


def _start_first_block(federation: Federation) -> Progress:
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    return progress


def _draw_user_keys(federation: Federation, people: Longs) -> Keys:
    return federation.stream.user_keys[people]


def _draw_people(federation: Federation) -> Longs:
    """People with items in the first block, in a random order."""
    counts = federation.stream.blocks[0].train.counts()
    active = np.flatnonzero(counts > 0)
    rng = np.random.default_rng(federation.config.seed)
    return rng.permutation(active)
