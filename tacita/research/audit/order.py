"""What B', the matrix of what follows what, gives away by itself: two readers of the first block, beside controls.

A line is what a person has, oldest first. The reader knows how devices score: h B' foresees what comes next, h what
came before. How far above the other items the next one stands, on average over a line, is how well B' knows the line.

membership: 90 % of a line is known; the AUC of how well B' knows it, people inside the sums against people left out of
them. Control: the same two groups and a release without both.
canary: people with random items in a random order are added; all but the last is known, and the best guess is that
one. Control: the same question to a release without them.

What two releases show of somebody who left is not asked of B' here; it is asked of B (trials.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import BlockStream, Doubles, Floats, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, start_run
from tacita.models.tally.order import OrderedTally, select_order_matrix
from tacita.models.tally.order_sums import select_latest_entries
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.null_space import auc
from tacita.research.audit.tally_attacks import (
    CANARIES,
    CANARY_ITEMS,
    AttackTarget,
    count_draws,
    make_figure,
    make_share_figure,
    sample_items,
)
from tacita.runs.assembly import Machine, assemble


@dataclass(frozen=True)
class OrderedHistories:
    """The people of the first block in their order, and the server just before it learns from them."""

    backbone: OrderedTally
    server: ServerState
    lists: Ragged
    target: AttackTarget  # who is asked about; its sets are those of the lists, row by row

    @staticmethod
    def of(backbone: OrderedTally, server: ServerState, train: Ragged, seed: int) -> OrderedHistories:
        lists = train.take(np.flatnonzero(train.counts() > 0))
        return OrderedHistories(
            backbone, server, Ragged(lists.ptr, lists.ids), AttackTarget.of(backbone, server, lists, seed)
        )

    def release_matrix(self, lists: Ragged) -> Floats:
        """B' after these people and no others told their lines."""
        total = self.backbone.sum_statistic(lists, None, PairShape(len(self.server.items)))
        heads = self.backbone.learn(self.server, total, "statistic").heads
        return unpack_dense_weights({**heads, **select_order_matrix(heads)})

    def drop_groups(self, *groups: Longs) -> Ragged:
        return self.lists.take(np.setdiff1d(np.arange(len(self.lists)), np.concatenate(groups)))

    def score_next_items(self, matrix: Floats, known: Ragged) -> Doubles:
        """How well a matrix knows each line: the mean over its places of how far the next item stands above others."""
        out = np.zeros(len(known))
        for row in range(len(known)):
            line = known.row(row)
            places = [line[:place][-len(self.backbone.age_weights) :] for place in range(1, len(line))]
            if not places:
                continue
            scores = self.scores(matrix, Ragged.from_lists([one.tolist() for one in places]))
            own = scores[np.arange(len(places)), line[1:]]
            spread = np.maximum(scores.std(axis=1), 1e-12)
            out[row] = float(((own - scores.mean(axis=1)) / spread).mean())
        return out

    def scores(self, matrix: Floats, before: Ragged) -> Doubles:
        """h B' of what came before."""
        last = select_latest_entries(before, len(self.backbone.age_weights))
        weight = self.backbone.weigh_by_age(last)
        return np.asarray(matrix_of_rows(last.ptr, last.ids, weight, len(matrix)) @ matrix, np.float64)


def attack_membership(lines: OrderedHistories, tell: Callable[[], None]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"inside": [], "absent": []}
    n, sets = 0, lines.target.histories
    for inside, absent in lines.target.draw_groups():
        known = []
        for group in (inside, absent):
            kept, own = sample_items(sets[group], 0.9, lines.target.seed), lines.lists.take(group)
            known.append(own.filter_entries(kept[own.rows(), own.ids]))
        n += len(inside)
        for name, gone in (("inside", (absent,)), ("absent", (inside, absent))):
            matrix = lines.release_matrix(lines.drop_groups(*gone))
            one = auc(*(lines.score_next_items(matrix, group) for group in known))
            found[name] += [] if one is None else [one]
            tell()
    mean = {name: float(np.mean(values)) if values else None for name, values in found.items()}
    return make_figure(mean["inside"], mean["absent"], n, n)


def attack_canaries(lines: OrderedHistories, tell: Callable[[], None]) -> dict[str, Any]:
    out = np.flatnonzero(lines.target.released_items)
    draws = np.random.default_rng([lines.target.seed, CANARIES])
    size = min(CANARY_ITEMS, len(out) // 4)
    planted = Ragged.from_lists([draws.permutation(out)[:size].tolist() for _ in range(CANARIES)])
    alone = Ragged.from_lists([planted.row(k)[:-1].tolist() for k in range(CANARIES)])
    told = lines.lists
    both = Ragged(np.append(told.ptr, told.ptr[-1] + planted.ptr[1:]), np.append(told.ids, planted.ids))
    found = []
    for lists in (both, told):
        scores = lines.scores(lines.release_matrix(lists), alone)
        scores[alone.rows(), alone.ids] = -np.inf
        found.append(scores.argmax(axis=1) == planted.ids[planted.ptr[1:] - 1] if size > 1 else np.zeros(0, bool))
        tell()
    return make_share_figure(*found)


def audit_order(
    config: RunConfig,
    machine: Machine,
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """What the first release of B' shows of people, under the settings of a run."""
    fed = assemble(config, machine)
    if on_data:
        on_data(fed.stream)
    if not isinstance(fed.backbone, OrderedTally):
        raise TacitaError(
            "this audit reads the matrix of what follows what, released without a budget; use a run of backbone "
            "'tally-order' without privacy.epsilon."
        )
    progress, block = start_run(fed), fed.stream.blocks[0]
    begin_block(fed, progress, 0)
    lines = OrderedHistories.of(fed.backbone, progress.server, block.train, config.seed)
    done, total = 0, 2 * count_draws(len(lines.lists)) + 2

    def tell() -> None:
        nonlocal done
        done += 1
        if on_done:
            on_done(min(done, total), total)

    attacks = {"membership": attack_membership(lines, tell), "canary": attack_canaries(lines, tell)}
    return {"data": fed.stream.name, "people": len(lines.lists), "attacks": attacks}
