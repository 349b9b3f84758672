"""What one round's parameter uploads show, without a defence and under budgets: who took part, what they like.

The round is the first, and the whole budget lies on it: the least noise that the budget allows. Two readers.
`likes`: the server, who sees each upload. All rows of an upload lie along one direction, what is liked on one side of
it and drawn samples on the other; the side with more popular items is called liked (sign-split). AUC of a person's
items against all others. `sum`: whoever sees the sum of a round and knows exactly what a person would have sent; AUC
of those in it against those who are not, by how much of that is in it. Controls: the same guess against what somebody
else likes; the same people and a sum without any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.audit.null_space import auc
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Floats, Keys, Longs, Stream
from tacita.federation.rounds import Progress, begin_block, start
from tacita.lab.assembling import Machine, assemble, build
from tacita.round.plan import Federation, to_serve

READERS = {"likes": "what a person likes, from each upload", "sum": "who took part, from the sum"}
READ = 100  # people whose upload is read, and people who are in a sum or not
DRAWS = 3  # of those


@dataclass(frozen=True)
class Defence:
    """A part and its options; `each`: the server sees single uploads, as it does where nobody sums them."""

    name: str
    parts: list[dict[str, Any]]
    train: dict[str, Any]
    each: bool = True

    def over(self, config: RunConfig) -> RunConfig:
        train = config.train.model_copy(update=self.train)
        return config.model_copy(update={"parts": self.parts, "train": train})


def defences(epsilons: list[float]) -> list[Defence]:
    one: dict[str, Any] = {"name": "dpps", "shares": [1.0], "releases": 1, "between": 0.0}
    found = [Defence("no defence", [], {})]
    for epsilon in sorted(epsilons, reverse=True):
        found.append(Defence(f"DPPS, epsilon {epsilon:g}", [{**one, "tiers": [epsilon]}], {}))
        averaged = {"name": "dp-fedavg", "epsilon": epsilon, "releases": 1}
        found.append(Defence(f"DP-FedAvg, epsilon {epsilon:g}", [averaged], {"aggregation": "fixed"}, each=False))
    return found


def audit_uploads(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[Stream], None] | None = None,
) -> dict[str, Any]:
    """A row without a defence, and one for each mechanism and epsilon."""
    fed = assemble(config.model_copy(update={"parts": []}), machine)
    if fed.learner.name != "rows" or fed.config.train.silos:
        raise TacitaError("this audit reads rows that people upload; use a backbone such as mf, and train.silos = 0.")
    if on_data:
        on_data(fed.stream)
    settings, rows = defences(epsilons), []
    plain, people = _progress(fed), _drawn(fed)
    if len(people) < 4:
        raise TacitaError("too few people have items in the first block, so there is nothing to audit.")
    own = _alone(fed, plain, people[: 2 * _tenth(people)])
    for n, setting in enumerate(settings):
        if on_done:
            on_done(n, len(settings))
        backbone, parts, draws = build(setting.over(fed.config))
        under = replace(fed, backbone=backbone, parts=parts, draws=draws, config=setting.over(fed.config))
        rows.append({"setting": setting.name, "readers": _read(under, setting, people, own)})
    if on_done:
        on_done(len(settings), len(settings))
    return {
        "data": fed.stream.name,
        "backbone": fed.backbone.name,
        "people": len(people),
        "seed": config.seed,
        "rows": rows,
    }


def _read(fed: Federation, setting: Defence, people: Longs, own: Floats) -> dict[str, dict[str, float | None]]:
    nothing: dict[str, float | None] = {"found": None, "control": None}
    found = {"likes": _likes(fed, people[:READ]) if setting.each else nothing}
    return {**found, "sum": _in_sum(fed, people, own)}


def _likes(fed: Federation, people: Longs) -> dict[str, float | None]:
    train = fed.stream.blocks[0].train
    counts = np.bincount(train.ids, minlength=fed.stream.blocks[0].n_items).astype(np.float64)
    uploads = _alone(fed, _progress(fed), people)
    aucs: dict[str, list[float]] = {"found": [], "control": []}
    for n, upload in enumerate(uploads):
        score = sign_split(upload.reshape(len(counts), -1), counts)
        for kind, whose in (("found", people[n]), ("control", people[(n + 1) % len(people)])):
            liked = np.zeros(len(counts), bool)
            liked[train.row(int(whose))] = True
            one = auc(score[liked], score[~liked])
            aucs[kind] += [] if one is None else [one]
    return {kind: float(np.mean(values)) for kind, values in aucs.items()}


def sign_split(upload: Floats, popularity: Doubles) -> Doubles:
    """How far every row goes along the direction that most rows go, towards the side of what is popular."""
    _, _, directions = np.linalg.svd(upload, full_matrices=False)
    along = upload @ directions[0]
    return np.asarray(along if along @ (popularity - popularity.mean()) >= 0 else -along)


def _in_sum(fed: Federation, people: Longs, own: Floats) -> dict[str, float | None]:
    """Of a fifth of the people one half is in a round; everybody else is, always."""
    aucs: dict[str, list[float]] = {"found": [], "control": []}
    others = people[len(own) :]
    for draw in range(DRAWS):
        order = np.random.default_rng([fed.config.seed, draw]).permutation(len(own))
        inside, absent = np.split(order, 2)
        for kind, there in (("found", np.concatenate([people[inside], others])), ("control", others)):
            total = _exchanged(fed, _progress(fed), _keys(fed, there))
            score = own @ total.reshape(-1).astype(np.float32)
            one = auc(score[inside], score[absent])
            aucs[kind] += [] if one is None else [one]
    return {kind: float(np.mean(values)) for kind, values in aucs.items()}


def _tenth(people: Longs) -> int:
    return max(1, min(READ, len(people) // 10))


def _alone(fed: Federation, progress: Progress, people: Longs) -> Floats:
    """(people, numbers) what a round of one person alone gives."""
    each = (_exchanged(fed, progress, _keys(fed, people[[n]])).reshape(-1) for n in range(len(people)))
    return np.stack([one.astype(np.float32) for one in each])


def _exchanged(fed: Federation, progress: Progress, chosen: Keys) -> Doubles:
    down = to_serve(fed, progress.server)
    return np.asarray(progress.devices.exchange(fed, progress.server, down, "round", chosen).total["rows"])


def _progress(fed: Federation) -> Progress:
    progress = start(fed)
    begin_block(fed, progress, 0)
    return progress


def _keys(fed: Federation, people: Longs) -> Keys:
    return fed.stream.user_keys[people]


def _drawn(fed: Federation) -> Longs:
    """People with items in the first block, in a random order."""
    some = np.flatnonzero(fed.stream.blocks[0].train.counts() > 0)
    return np.random.default_rng(fed.config.seed).permutation(some)
