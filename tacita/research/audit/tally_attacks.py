"""Each attack on one setting of tally, beside its control: the same question where the answer is not in the release.

Everything is asked of the first block, of people with some items that are out in it. Tenths of the people are drawn
at random: some stay in the sums (inside), some are left out and the release is made without them (absent).

membership: 90 % of a history is known; the AUC of its energy, inside against absent, mean of the draws. Control: the
same two groups against a release without both.
half: 50 % is known; whose released items are read, all of them exactly or nearly. Control: absent people.
nothing: nothing is known; how many inside have exactly their released items among the guesses. Control: absent people.
leaver: one person leaves; who is read from the releases before and after. Control: the guess against the next leaver.
item: one person takes one item back; how often it is named. Control: the guess against what the next one took back.
canary: people with random items are added; all but one item is known, and the best guess is that one. Control: the
same question to a release without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.types import Bools, Floats, Longs, Ragged, ServerState
from tacita.models.tally.model import Tally
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.null_space import NullSpace, auc
from tacita.research.audit.reconstruction import (
    NEARLY_READ,
    RebuiltInverse,
    as_lists,
    compute_best_overlap,
    compute_row_overlap,
    rebuild_inverse,
)
from tacita.research.audit.retraction import read_item, read_leaver

MIN_ITEMS = 5  # items that are out, of people who are asked about; twice as many where half of them are known
DRAWS, ENOUGH_INSIDE = 5, 250  # draws of two tenths of the people: at most, and until so many were inside
MAX_HALF_KNOWN = 100  # people of a group whose half is completed, at most
LEAVERS = 10
CANARIES, CANARY_ITEMS = 20, 30  # planted people, and their items


@dataclass(frozen=True)
class AttackTarget:
    """The first block, and the server just before it learns from it."""

    backbone: Tally
    server: ServerState
    histories: Bools  # (people, items)
    seed: int

    @staticmethod
    def of(backbone: Tally, server: ServerState, train: Ragged, seed: int) -> AttackTarget:
        chosen, _ = backbone.build_user_terms(train, len(server.items))
        sets = chosen.toarray() > 0
        return AttackTarget(backbone, server, sets[sets.any(axis=1)], seed)

    def learn_from(self, sets: Bools) -> ServerState:
        """The server after it was told these histories and no others."""
        lists, shape = as_lists(sets), PairShape.from_inputs(len(self.server.items), self.server.heads["inputs"])
        return self.backbone.learn(self.server, self.backbone.sum_statistic(lists, None, shape), "statistic")

    def rebuild_release(self, sets: Bools) -> RebuiltInverse:
        return rebuild_inverse(unpack_dense_weights(self.learn_from(sets).heads))

    @property
    def released_items(self) -> Bools:
        """Items that are out when everybody takes part."""
        least = max(1, self.backbone.config.min_item, self.backbone.config.min_pair)
        return np.asarray(self.histories.sum(axis=0) >= least)

    def select_people(self, fewest: int = MIN_ITEMS) -> Longs:
        """Those with so many items that are out, in a random order."""
        found = np.flatnonzero((self.histories & self.released_items).sum(axis=1) >= fewest)
        return np.random.default_rng([self.seed, fewest]).permutation(found)

    def draw_groups(self) -> Iterator[tuple[Longs, Longs]]:
        """Two tenths of the people at a time, those inside and those absent, nobody twice."""
        order = self.select_people()
        tenth = max(1, len(order) // 10)
        for k in range(count_draws(len(self.histories))):
            pair = order[2 * k * tenth : 2 * (k + 1) * tenth]
            if len(pair) == 2 * tenth:
                yield pair[:tenth], pair[tenth:]

    def drop_groups(self, *groups: Longs) -> Bools:
        return np.delete(self.histories, np.concatenate(groups), axis=0)


def count_draws(n_people: int) -> int:
    return min(DRAWS, max(1, -(-ENOUGH_INSIDE // max(1, n_people // 10))))


def count_steps(n_people: int) -> int:
    """How often `attack` tells that it got on."""
    return 2 * count_draws(n_people) + 3 + 2 * LEAVERS + 1


def sample_items(sets: Bools, share: float, seed: int) -> Bools:
    """A random part of each set, at least one item of it."""
    draws = np.where(sets, np.random.default_rng([seed, len(sets)]).random(sets.shape), np.inf)
    place = draws.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray(place < np.maximum(1, np.round(share * sets.sum(axis=1)))[:, None]) & sets


def make_figure(value: float | None, control: float | None, of: int, of_control: int) -> dict[str, Any]:
    """What an attack found and what it finds where there is nothing: AUCs, or shares of so many."""
    return {"found": value, "control": control, "of": of, "of_control": of_control}


def make_share_figure(hits: Bools | list[bool], control: Bools | list[bool]) -> dict[str, Any]:
    return make_figure(_mean(hits), _mean(control), len(hits), len(control))


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def run_attacks(scene: AttackTarget, tell: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """All attacks on one setting."""
    return {
        "membership": attack_membership(scene, tell),
        **attack_one_release(scene, tell),
        **attack_retractions(scene, tell),
        "canary": attack_canaries(scene, tell),
    }


def attack_membership(scene: AttackTarget, tell: Callable[[], None] = lambda: None) -> dict[str, Any]:
    found: dict[str, list[float]] = {"inside": [], "absent": []}
    n = 0
    for inside, absent in scene.draw_groups():
        known = [sample_items(scene.histories[one], 0.9, scene.seed) for one in (inside, absent)]
        n += len(inside)
        for name, gone in (("inside", (absent,)), ("absent", (inside, absent))):
            release = scene.rebuild_release(scene.drop_groups(*gone))
            reader = NullSpace.of(release)
            one = auc(*(-reader.energy(sets[:, release.items]) for sets in known))
            found[name] += [] if one is None else [one]
            tell()
    return make_figure(_mean(found["inside"]), _mean(found["absent"]), n, n)


def attack_one_release(scene: AttackTarget, tell: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """What one release shows of people inside it: with half of a history known, and with nothing."""
    inside, absent = next(scene.draw_groups(), (np.zeros(0, np.int64), np.zeros(0, np.int64)))
    release = scene.rebuild_release(scene.drop_groups(absent))
    reader, histories = NullSpace.of(release), scene.histories[:, release.items]
    read = []
    for group in (inside, absent):
        own = histories[group]
        own = own[own.sum(axis=1) >= 2 * MIN_ITEMS][:MAX_HALF_KNOWN]
        grown = [reader.complete_history(known) for known in sample_items(own, 0.5, scene.seed)]
        read.append(compute_row_overlap(np.array(grown, bool).reshape(own.shape), own))
        tell()
    guesses = reader.guess_histories()
    enough = histories.sum(axis=1) >= MIN_ITEMS
    took_part = ~np.isin(np.arange(len(histories)), absent)
    alone = [compute_best_overlap(guesses, histories[enough & one]) for one in (took_part, ~took_part)]
    tell()
    return {
        "half_nearly": make_share_figure(*(one >= NEARLY_READ for one in read)),
        "half_exactly": make_share_figure(*(one == 1 for one in read)),
        "nothing_exactly": make_share_figure(*(one == 1 for one in alone)),
    }


def attack_retractions(scene: AttackTarget, tell: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """What the releases before and after show of one who left, and of one item taken back."""
    server = scene.learn_from(scene.histories)
    before = unpack_dense_weights(server.heads)
    # of the histories what is out: nothing else is in the sums to be read
    out = scene.histories & (before != 0).any(axis=0)
    people = [one for one in scene.select_people() if out[one].any()][:LEAVERS]
    histories = out[people]
    draws = np.random.default_rng([scene.seed, LEAVERS])
    items = [int(draws.choice(np.flatnonzero(one))) for one in histories]
    left, named = [], []
    for own, item in zip(scene.histories[people], items, strict=True):
        rest = own.copy()
        rest[item] = False
        left.append(read_leaver(before, _replace_history(scene, server, own, rest & False)))
        tell()
        named.append(read_item(before, _replace_history(scene, server, own, rest)))
        tell()
    guesses = np.array(left, bool).reshape(histories.shape)
    read, other = compute_row_overlap(guesses, histories), compute_row_overlap(guesses, np.roll(histories, -1, axis=0))
    others = items[1:] + items[:1]
    return {
        "leaver_nearly": make_share_figure(read >= NEARLY_READ, other >= NEARLY_READ),
        "leaver_exactly": make_share_figure(read == 1, other == 1),
        "item": make_share_figure(*([a == b for a, b in zip(named, truth, strict=True)] for truth in (items, others))),
    }


def _replace_history(scene: AttackTarget, server: ServerState, history: Bools, remaining: Bools) -> Floats:
    """B after one person replaced what they told."""
    lists = [[as_lists(one[None])] for one in (history, remaining)]
    return unpack_dense_weights(scene.backbone.replace_lists(server, *lists)[0].heads)


def attack_canaries(scene: AttackTarget, tell: Callable[[], None] = lambda: None) -> dict[str, Any]:
    out = np.flatnonzero(scene.released_items)
    draws = np.random.default_rng([scene.seed, CANARIES])
    planted = np.zeros((CANARIES, scene.histories.shape[1]), bool)
    for one in planted:
        one[draws.permutation(out)[: min(CANARY_ITEMS, len(out) // 4)]] = True
    found = []
    for sets in (np.concatenate([scene.histories, planted]), scene.histories):
        release = scene.rebuild_release(sets)
        reader = NullSpace.of(release)
        found.append([_finds_last_item(reader, one) for one in planted[:, release.items] if one.sum() > 1])
    tell()
    return make_share_figure(*found)


def _finds_last_item(reader: NullSpace, history: Bools) -> bool:
    """Whether the one item that is not known comes first among those that are not known."""
    last = int(np.flatnonzero(history)[-1])
    known = history.copy()
    known[last] = False
    return reader.guess_last_item(known) == last
