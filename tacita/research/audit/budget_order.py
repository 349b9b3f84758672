"""Who took part, read from what tally-order releases under a budget: B, B' and the server's two sums, with controls.

As in budget.py: the first block is told with the whole budget, tenths of the people stay in or are left out, and every
release has noise of its own; 90 % of a person's line is known, in its order. The readers: the null space of B; how
well B' foresees each item of the line from those before it; both scores together, each standardised over the people
asked about; and the server's, which looks how much of the line's own term and of its own T is in the noised sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import Arrays, BlockStream, Doubles, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, start_run
from tacita.models.tally.model import STATE
from tacita.models.tally.order import OrderedTally
from tacita.models.tally.private_order import FOLLOWING, FOLLOWING_VARIANCE, PrivateOrderedTally, map_to_inputs
from tacita.research.audit.budget import NOISE_DRAWS, ReaderScores
from tacita.research.audit.canaries.sums import compute_order_terms
from tacita.research.audit.null_space import auc
from tacita.research.audit.order import OrderedHistories, attack_membership
from tacita.research.audit.tally_attacks import AttackTarget, count_draws, sample_items
from tacita.research.audit.tally_attacks import attack_membership as read_from_b
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble, build_components

READERS = {
    "null_space": "null space of B",
    "order": "what follows in B'",
    "both": "both together",
    "server": "the server's own sums",
}
RELEASE_SETTINGS = ("name", "order_share", "order_fold", "order_window")  # settings of a release under a budget


def score_next_items(heads: Arrays, fall: Doubles, known: Ragged) -> Doubles:
    """How well B' knows each line: the mean over its places of how far the item there stands above all others."""
    line = map_to_inputs(known, heads["inputs"])
    place = np.arange(len(line.ids)) - np.repeat(line.ptr[:-1], line.counts())
    before = np.minimum(place, len(fall))  # how many items are looked back at
    ptr = np.append(0, np.cumsum(before))
    back = np.arange(ptr[-1]) - np.repeat(ptr[:-1], before) + 1
    items = line.ids[np.repeat(np.arange(len(place)), before) - back]
    weights = fall[back - 1].astype(np.float64)
    scores = np.asarray(matrix_of_rows(ptr, items, weights, len(heads["inputs"])) @ heads["order_weights"])
    own = scores[np.arange(len(place)), line.ids] - scores.mean(axis=1)
    standing = np.where(before > 0, own / np.maximum(scores.std(axis=1), 1e-12), 0.0)
    total = np.bincount(line.rows(), weights=standing, minlength=len(line))
    return np.asarray(total / np.maximum(1, line.counts() - 1))


def compute_reader_scores(
    model: PrivateOrderedTally, server: ServerState, sets: Any, lines: Ragged
) -> dict[str, Doubles]:
    """How much each known line looks like one that took part, by every reader."""
    found, held = ReaderScores.compute(server, sets).by_reader, server.parts[STATE]
    order = score_next_items(server.heads, model.age_weights, lines)
    ordered = compute_order_terms(model, lines, server.heads) @ held[FOLLOWING].ravel()
    return {
        "null_space": found["null_space"],
        "order": order,
        "both": _standardise(found["null_space"]) + _standardise(order),
        "server": found["server"] / (2 * held["variance"][0]) + ordered / held[FOLLOWING_VARIANCE][0],
    }


def _standardise(values: Doubles) -> Doubles:
    return np.asarray((values - values.mean()) / max(float(values.std()), 1e-12))


def measure_membership(
    people: AttackTarget, lists: Ragged, model: PrivateOrderedTally, tell: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """AUC of every reader: those inside against those absent; control: the same people and a release without both."""
    found: dict[str, dict[str, list[float]]] = {name: {"found": [], "control": []} for name in READERS}
    for draw, (inside, absent) in enumerate(people.draw_groups()):
        asked: Longs = np.concatenate([inside, absent])
        sets = np.concatenate([sample_items(people.histories[one], 0.9, people.seed) for one in (inside, absent)])
        own = lists.take(asked)
        known = own.filter_entries(sets[own.rows(), own.ids])
        for noise in range(NOISE_DRAWS):
            for n, (kind, gone) in enumerate((("found", absent), ("control", asked))):
                others = lists.take(np.setdiff1d(np.arange(len(lists)), gone))
                draws = Draws(people.seed, f"audit order {draw} {noise} {n}")
                server = model.simulate_release(people.server, others, draws)
                for name, score in compute_reader_scores(model, server, sets, known).items():
                    one = auc(score[: len(inside)], score[len(inside) :])
                    found[name][kind] += [] if one is None else [one]
        tell()
    return {name: {kind: float(np.mean(values)) for kind, values in both.items()} for name, both in found.items()}


def audit_order_budget(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """A row for tally-order without a budget, and one for every epsilon."""
    plain = config.model_copy(update={"privacy": PrivacyConfig()})
    fed = assemble(plain, machine)
    if on_data:
        on_data(fed.stream)
    if not isinstance(fed.backbone, OrderedTally):
        raise TacitaError("what follows what is told by backbone 'tally-order' alone; use a run of it.")
    people = int((fed.stream.blocks[0].train.counts() > 0).sum())
    steps, total = 0, count_draws(people) * (4 + len(epsilons))

    def tell() -> None:
        nonlocal steps
        steps += 1
        if on_done:
            on_done(min(steps, total), total)

    rows = [_make_plain_row(fed, fed.backbone, tell)]
    for epsilon in sorted(epsilons, reverse=True):
        privacy = PrivacyConfig(epsilon=epsilon, delta=config.privacy.delta, blocks=1)
        own = {
            name: value for name, value in plain.backbone.items() if name in RELEASE_SETTINGS
        }  # cuts have no meaning there
        changed = plain.model_copy(update={"privacy": privacy, "backbone": own})
        model = build_components(changed)[0]
        assert isinstance(model, PrivateOrderedTally)
        rows.append(_make_row(replace(fed, config=changed, backbone=model), model, epsilon, tell))
    about = {"data": fed.stream.name, "people": people, "delta": config.privacy.delta, "noise_draws": NOISE_DRAWS}
    return {**about, "stem": "budget-order", "rows": rows}


def _load_first_block(fed: Federation, model: OrderedTally | PrivateOrderedTally) -> tuple[AttackTarget, Ragged]:
    """The people of the first block, and what they have in its order, row by row."""
    progress, train = start_run(fed), fed.stream.blocks[0].train
    begin_block(fed, progress, 0)
    lists = train.take(np.flatnonzero(train.counts() > 0))
    return AttackTarget.of(model, progress.server, lists, fed.config.seed), Ragged(lists.ptr, lists.ids)


def _make_plain_row(fed: Federation, model: OrderedTally, tell: Callable[[], None]) -> dict[str, Any]:
    people, lists = _load_first_block(fed, model)
    order = attack_membership(OrderedHistories(model, people.server, lists, people), tell)
    found = {"null_space": read_from_b(people, tell), "order": order}
    if found["null_space"]["found"] is None:
        raise TacitaError("too few people have five items or more in the first block, so there is nothing to audit.")
    none = {"found": None, "control": None}
    readers = {name: found.get(name, none) for name in READERS}
    return {"setting": "no budget", "items": int(fed.stream.blocks[0].n_items), "valid": None, "readers": readers}


def _make_row(fed: Federation, model: PrivateOrderedTally, epsilon: float, tell: Callable[[], None]) -> dict[str, Any]:
    people, lists = _load_first_block(fed, model)
    told = model.simulate_release(people.server, lists, Draws(people.seed))
    readers = measure_membership(people, lists, model, tell)
    return {"setting": f"epsilon {epsilon:g}", "items": len(told.heads["inputs"]), "valid": None, "readers": readers}
