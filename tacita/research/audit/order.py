"""What B', the matrix of what follows what, gives away by itself: two readers of the first block, with controls.

A history is what a person has, oldest first. The reader knows how devices score: h B' predicts what comes next, h is
what came before. How far the next item stands above the others, on average over a history, is how well B' knows it.

membership: 90 % of a history is known; the AUC of how well B' knows it, people inside the sums against people left out
of them. Control: the same two groups and a release without both.
canary: people with random items in a random order are added; all but the last is known, and the best guess is that
one. Control: the same question to a release without them.

What two releases show of a leaver is not asked of B' here; tally_attacks.py asks it of B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import Bools, Doubles, Floats, Ints, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.models.tally.order import OrderedTally, select_order_matrix
from tacita.models.tally.order_sums import select_latest_entries
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.audit_progress import Advance, AuditTable, OnData, OnStep, StepCounter
from tacita.research.audit.null_space import AucSamples
from tacita.research.audit.tally_attacks import (
    CANARIES,
    CANARY_ITEMS,
    AttackFigure,
    AttackTarget,
    count_group_draws,
    make_auc_figure,
    make_share_figure,
)
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation


@dataclass(frozen=True)
class OrderedHistories:
    """The people of the first block in their order, and the server just before it learns from them."""

    backbone: OrderedTally
    server: ServerState
    lists: Ragged
    target: AttackTarget  # people under attack; its sets are those of the lists, row by row

    @staticmethod
    def from_state(backbone: OrderedTally, server: ServerState, train: Ragged, seed: int) -> OrderedHistories:
        active = np.flatnonzero(train.counts() > 0)
        lists = train.take(active)
        target = AttackTarget.from_state(backbone, server, lists, seed)
        plain_lists = Ragged(lists.ptr, lists.ids)
        return OrderedHistories(backbone, server, plain_lists, target)

    @property
    def window(self) -> int:
        """How many earlier items count for the next."""
        return len(self.backbone.age_weights)

    def build_released_matrix(self, lists: Ragged) -> Floats:
        """B' after these people and no others contributed their histories."""
        shape = PairShape(len(self.server.items))
        total = self.backbone.sum_statistic(lists, None, shape)
        heads = self.backbone.learn_from_sums(self.server, total, "statistic").heads
        order_heads = select_order_matrix(heads)
        return unpack_dense_weights({**heads, **order_heads})

    def drop_groups(self, *groups: Longs) -> Ragged:
        users = np.arange(len(self.lists))
        dropped = np.concatenate(groups)
        others = np.setdiff1d(users, dropped)
        return self.lists.take(others)

    def score_next_items(self, matrix: Floats, known: Ragged) -> Doubles:
        """How well a matrix knows each history: the mean over its places of the next item's lead over all items."""
        means = np.zeros(len(known))
        for row in range(len(known)):
            history = known.row(row)
            if len(history) > 1:
                means[row] = self._compute_mean_lead(matrix, history)
        return means

    def _compute_mean_lead(self, matrix: Floats, history: Ints) -> float:
        next_items = history[1:]
        earlier_items = []
        for place in range(1, len(history)):
            earlier = history[:place]
            recent = earlier[-self.window :]
            earlier_items.append(recent.tolist())
        before = Ragged.from_lists(earlier_items)
        scores = self.compute_next_scores(matrix, before)
        places = np.arange(len(next_items))
        own_scores = scores[places, next_items]
        lead = own_scores - scores.mean(axis=1)
        spread = np.maximum(scores.std(axis=1), 1e-12)
        return float((lead / spread).mean())

    def compute_next_scores(self, matrix: Floats, before: Ragged) -> Doubles:
        """h B' of what came before."""
        recent = select_latest_entries(before, self.window)
        weight = self.backbone.weigh_by_age(recent)
        histories = matrix_of_rows(recent.ptr, recent.ids, weight, len(matrix))
        return np.asarray(histories @ matrix, np.float64)


def attack_membership(histories: OrderedHistories, advance: Advance) -> AttackFigure:
    aucs = AucSamples("inside", "absent")
    n_inside = 0
    for inside, absent in histories.target.draw_groups():
        known_inside = _sample_known_entries(histories, inside)
        known_absent = _sample_known_entries(histories, absent)
        n_inside += len(inside)
        contributions = {
            "inside": histories.drop_groups(absent),
            "absent": histories.drop_groups(inside, absent),
        }
        for kind, lists in contributions.items():
            matrix = histories.build_released_matrix(lists)
            inside_scores = histories.score_next_items(matrix, known_inside)
            absent_scores = histories.score_next_items(matrix, known_absent)
            aucs.add_auc(kind, inside_scores, absent_scores)
            advance()
    return make_auc_figure(aucs, n_inside)


def _sample_known_entries(histories: OrderedHistories, group: Longs) -> Ragged:
    """What a reader knows of a group: 90 % of each history, in its order."""
    known_sets = histories.target.sample_known(group)
    lists = histories.lists.take(group)
    is_known = known_sets[lists.rows(), lists.ids]
    return lists.filter_entries(is_known)


def attack_canaries(histories: OrderedHistories, advance: Advance) -> AttackFigure:
    released = np.flatnonzero(histories.target.released_items)
    seed = histories.target.seed
    draws = np.random.default_rng([seed, CANARIES])
    size = min(CANARY_ITEMS, len(released) // 4)
    canary_items = []
    for _ in range(CANARIES):
        shuffled = draws.permutation(released)
        canary_items.append(shuffled[:size].tolist())
    canaries = Ragged.from_lists(canary_items)
    with_canaries = _append_lists(histories.lists, canaries)
    hits = _guess_last_items(histories, with_canaries, canaries)
    advance()
    control_hits = _guess_last_items(histories, histories.lists, canaries)
    advance()
    return make_share_figure(hits, control_hits)


def _append_lists(lists: Ragged, more: Ragged) -> Ragged:
    last_end = lists.ptr[-1]
    more_ends = last_end + more.ptr[1:]
    ptr = np.append(lists.ptr, more_ends)
    ids = np.append(lists.ids, more.ids)
    return Ragged(ptr, ids)


def _guess_last_items(histories: OrderedHistories, lists: Ragged, canaries: Ragged) -> Bools:
    """Whether a release of these lists names each canary's last item; empty where canaries have one item or none."""
    known_items = []
    for number in range(len(canaries)):
        canary = canaries.row(number)
        known_items.append(canary[:-1].tolist())
    known = Ragged.from_lists(known_items)
    matrix = histories.build_released_matrix(lists)
    scores = histories.compute_next_scores(matrix, known)
    scores[known.rows(), known.ids] = -np.inf
    canary_size = len(canaries.row(0))
    if canary_size <= 1:
        return np.zeros(0, bool)
    last_entries = canaries.ptr[1:] - 1
    last_items = canaries.ids[last_entries]
    guesses = scores.argmax(axis=1)
    return np.asarray(guesses == last_items)


def audit_order(
    config: RunConfig,
    machine: Machine,
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """What the first release of B' shows of people, under the settings of a run."""
    federation = assemble_federation(config, machine)
    if on_data:
        on_data(federation.stream)
    backbone = _require_order(federation)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    train = federation.stream.blocks[0].train
    histories = OrderedHistories.from_state(backbone, progress.server, train, config.seed)
    n_users = len(histories.lists)
    total = 2 * count_group_draws(n_users) + 2
    steps = StepCounter(total, on_done)
    attacks = {
        "membership": attack_membership(histories, steps.advance),
        "canary": attack_canaries(histories, steps.advance),
    }
    return {"data": federation.stream.name, "people": n_users, "attacks": attacks}


def _require_order(federation: Federation) -> OrderedTally:
    """The backbone that releases B' without a budget; every other is refused."""
    if not isinstance(federation.backbone, OrderedTally):
        raise TacitaError(
            "this audit reads the matrix of what follows what, released without a budget; use a run of backbone "
            "'tally-order' without privacy.epsilon."
        )
    return federation.backbone
