"""Who took part, read from what tally-order releases under a budget: B, B' and the server's two sums, with controls.

As in budget.py, the first block is released with the whole budget, tenths of the people stay in or are left out, and
every release has noise of its own. The readers know 90 % of a person's history, in its order. One uses the null space
of B. One measures how well B' predicts each item of the history from those before it. One adds both scores, each
standardised over the people in question. The server measures how much of the history's own terms is in its noised sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import Arrays, Bools, Doubles, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.models.tally.model import STATE
from tacita.models.tally.order import OrderedTally
from tacita.models.tally.private_order import FOLLOWING, FOLLOWING_VARIANCE, PrivateOrderedTally, map_to_inputs
from tacita.research.audit.audit_progress import Advance, AuditTable, OnData, OnStep, StepCounter
from tacita.research.audit.budget import NOISE_DRAWS, ReaderScores, count_active_users
from tacita.research.audit.canaries.sums import compute_order_terms
from tacita.research.audit.null_space import AucSamples
from tacita.research.audit.order import OrderedHistories, attack_membership
from tacita.research.audit.tally_attacks import AttackTarget, count_group_draws
from tacita.research.audit.tally_attacks import attack_membership as read_from_b
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, build_components

READERS = {
    "null_space": "null space of B",
    "order": "what follows in B'",
    "both": "both together",
    "server": "the server's own sums",
}
RELEASE_SETTINGS = ("name", "order_share", "order_fold", "order_window")  # settings of a release under a budget
TINY = 1e-12


def score_next_items(heads: Arrays, age_weights: Doubles, known: Ragged) -> Doubles:
    """How well B' knows each history: the mean over its places of how far the item there stands above all others."""
    n_inputs = len(heads["inputs"])
    history = map_to_inputs(known, heads["inputs"])
    entries = np.arange(len(history.ids))
    starts = np.repeat(history.ptr[:-1], history.counts())
    place = entries - starts
    n_before = np.minimum(place, len(age_weights))  # how many earlier items count
    ends = np.cumsum(n_before)
    ptr = np.append(0, ends)
    pair_starts = np.repeat(ptr[:-1], n_before)
    age = np.arange(ptr[-1]) - pair_starts + 1
    later_entry = np.repeat(entries, n_before)
    earlier_items = history.ids[later_entry - age]
    weights = age_weights[age - 1]
    weights = weights.astype(np.float64)
    before = matrix_of_rows(ptr, earlier_items, weights, n_inputs)
    scores = np.asarray(before @ heads["order_weights"])
    own_scores = scores[entries, history.ids]
    lead = own_scores - scores.mean(axis=1)
    spread = np.maximum(scores.std(axis=1), TINY)
    is_predicted = n_before > 0
    standing = np.where(is_predicted, lead / spread, 0.0)
    n_histories = len(history)
    total = np.bincount(history.rows(), weights=standing, minlength=n_histories)
    n_predicted = np.maximum(1, history.counts() - 1)
    return total / n_predicted


def compute_reader_scores(
    model: PrivateOrderedTally, server: ServerState, sets: Bools, histories: Ragged
) -> dict[str, Doubles]:
    """How much each known history looks like one that took part, by every reader."""
    by_reader = ReaderScores.compute(server, sets).by_reader
    state = server.parts[STATE]
    order = score_next_items(server.heads, model.age_weights, histories)
    order_terms = compute_order_terms(model, histories, server.heads)
    order_overlap = order_terms @ state[FOLLOWING].ravel()
    pair_variance = state["variance"][0]
    order_variance = state[FOLLOWING_VARIANCE][0]
    pair_score = by_reader["server"] / (2 * pair_variance)
    order_score = order_overlap / order_variance
    null_space = by_reader["null_space"]
    return {
        "null_space": null_space,
        "order": order,
        "both": _standardise(null_space) + _standardise(order),
        "server": pair_score + order_score,
    }


def _standardise(values: Doubles) -> Doubles:
    spread = max(float(values.std()), TINY)
    centred = values - values.mean()
    return np.asarray(centred / spread)


def measure_membership(
    target: AttackTarget, lists: Ragged, model: PrivateOrderedTally, advance: Advance
) -> dict[str, dict[str, float]]:
    """AUC of every reader: those inside against those absent; control: the same people and a release without both."""
    aucs = {reader: AucSamples("found", "control") for reader in READERS}
    all_users = np.arange(len(lists))
    for draw, (inside, absent) in enumerate(target.draw_groups()):
        n_inside = len(inside)
        both_groups: Longs = np.concatenate([inside, absent])
        sets, known = _sample_known(target, lists, inside, absent)
        left_out = {"found": absent, "control": both_groups}
        for noise in range(NOISE_DRAWS):
            for number, (kind, users) in enumerate(left_out.items()):
                others = np.setdiff1d(all_users, users)
                other_lists = lists.take(others)
                purpose = f"audit order {draw} {noise} {number}"
                draws = Draws(target.seed, purpose)
                server = model.simulate_release(target.server, other_lists, draws)
                scores = compute_reader_scores(model, server, sets, known)
                for reader, score in scores.items():
                    inside_score = score[:n_inside]
                    absent_score = score[n_inside:]
                    aucs[reader].add_auc(kind, inside_score, absent_score)
        advance()
    return {reader: samples.compute_means() for reader, samples in aucs.items()}


def _sample_known(target: AttackTarget, lists: Ragged, inside: Longs, absent: Longs) -> tuple[Bools, Ragged]:
    """What a reader knows of two groups: the sets, and the same items in their order."""
    inside_sets = target.sample_known(inside)
    absent_sets = target.sample_known(absent)
    sets = np.concatenate([inside_sets, absent_sets])
    users = np.concatenate([inside, absent])
    histories = lists.take(users)
    is_known = sets[histories.rows(), histories.ids]
    return sets, histories.filter_entries(is_known)


def audit_order_membership(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """A row for tally-order without a budget, and one for every epsilon."""
    plain_config = config.model_copy(update={"privacy": PrivacyConfig()})
    federation = assemble_federation(plain_config, machine)
    if on_data:
        on_data(federation.stream)
    if not isinstance(federation.backbone, OrderedTally):
        raise TacitaError("what follows what is told by backbone 'tally-order' alone; use a run of it.")
    n_users = count_active_users(federation)
    total = count_group_draws(n_users) * (4 + len(epsilons))
    steps = StepCounter(total, on_done)
    plain_row = _measure_plain_row(federation, federation.backbone, steps.advance)
    rows = [plain_row]
    for epsilon in sorted(epsilons, reverse=True):
        private_config = _with_budget(plain_config, epsilon, config.privacy.delta)
        model = build_components(private_config)[0]
        assert isinstance(model, PrivateOrderedTally)
        private_federation = replace(federation, config=private_config, backbone=model)
        row = _measure_row(private_federation, model, epsilon, steps.advance)
        rows.append(row)
    return {
        "data": federation.stream.name,
        "people": n_users,
        "delta": config.privacy.delta,
        "noise_draws": NOISE_DRAWS,
        "stem": "budget-order",
        "rows": rows,
    }


def _with_budget(config: RunConfig, epsilon: float, delta: float) -> RunConfig:
    """One budget for the first block; cuts have no meaning under it, so their settings go."""
    privacy = PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1)
    backbone = {name: value for name, value in config.backbone.items() if name in RELEASE_SETTINGS}
    return config.model_copy(update={"privacy": privacy, "backbone": backbone})


def _load_first_block(federation: Federation, model: OrderedTally | PrivateOrderedTally) -> tuple[AttackTarget, Ragged]:
    """The people of the first block, and what they have in its order, row by row."""
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    train = federation.stream.blocks[0].train
    active = np.flatnonzero(train.counts() > 0)
    lists = train.take(active)
    seed = federation.config.seed
    target = AttackTarget.from_state(model, progress.server, lists, seed)
    plain_lists = Ragged(lists.ptr, lists.ids)
    return target, plain_lists


def _measure_plain_row(federation: Federation, model: OrderedTally, advance: Advance) -> AuditTable:
    target, lists = _load_first_block(federation, model)
    histories = OrderedHistories(model, target.server, lists, target)
    order = attack_membership(histories, advance)
    null_space = read_from_b(target, advance)
    if null_space["found"] is None:
        raise TacitaError("too few people have five items or more in the first block, so there is nothing to audit.")
    not_measured = {"found": None, "control": None}
    readers = dict.fromkeys(READERS, not_measured)
    readers["null_space"] = null_space
    readers["order"] = order
    return {
        "setting": "no budget",
        "items": int(federation.stream.blocks[0].n_items),
        "valid": None,
        "readers": readers,
    }


def _measure_row(federation: Federation, model: PrivateOrderedTally, epsilon: float, advance: Advance) -> AuditTable:
    target, lists = _load_first_block(federation, model)
    draws = Draws(target.seed)
    server = model.simulate_release(target.server, lists, draws)
    readers = measure_membership(target, lists, model, advance)
    return {
        "setting": f"epsilon {epsilon:g}",
        "items": len(server.heads["inputs"]),
        "valid": None,
        "readers": readers,
    }
