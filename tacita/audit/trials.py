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

from tacita.audit.null_space import NullSpace, auc
from tacita.audit.rebuilding import NEARLY, Rebuilt, as_lists, overlap, overlaps, rebuild
from tacita.audit.retraction import read_item, read_leaver
from tacita.core.types import Bools, Floats, Longs, Ragged, ServerState
from tacita.models.tally.model import Tally
from tacita.models.tally.sums import Shape
from tacita.models.tally.weights import dense_weights

FEWEST = 5  # items that are out, of people who are asked about; twice as many where half of them are known
DRAWS, ENOUGH = 5, 250  # draws of two tenths of the people: at most, and until so many were inside
MOST_HALF = 100  # people of a group whose half is completed, at most
LEAVERS = 10
CANARIES, PLANTED = 20, 30  # planted people, and their items


@dataclass(frozen=True)
class Scene:
    """The first block, and the server just before it learns from it."""

    backbone: Tally
    server: ServerState
    histories: Bools  # (people, items)
    seed: int

    @staticmethod
    def of(backbone: Tally, server: ServerState, train: Ragged, seed: int) -> Scene:
        chosen, _ = backbone.user_terms(train, len(server.items))
        sets = chosen.toarray() > 0
        return Scene(backbone, server, sets[sets.any(axis=1)], seed)

    def learned(self, sets: Bools) -> ServerState:
        """The server after it was told these histories and no others."""
        lists, shape = as_lists(sets), Shape.of(len(self.server.items), self.server.heads["inputs"])
        return self.backbone.learn(self.server, self.backbone.total_of(lists, None, shape), "statistic")

    def released(self, sets: Bools) -> Rebuilt:
        return rebuild(dense_weights(self.learned(sets).heads))

    @property
    def out(self) -> Bools:
        """Items that are out when everybody takes part."""
        least = max(1, self.backbone.config.min_item, self.backbone.config.min_pair)
        return np.asarray(self.histories.sum(axis=0) >= least)

    def people(self, fewest: int = FEWEST) -> Longs:
        """Those with so many items that are out, in a random order."""
        found = np.flatnonzero((self.histories & self.out).sum(axis=1) >= fewest)
        return np.random.default_rng([self.seed, fewest]).permutation(found)

    def draws(self) -> Iterator[tuple[Longs, Longs]]:
        """Two tenths of the people at a time, those inside and those absent, nobody twice."""
        order = self.people()
        tenth = max(1, len(order) // 10)
        for k in range(n_draws(len(self.histories))):
            pair = order[2 * k * tenth : 2 * (k + 1) * tenth]
            if len(pair) == 2 * tenth:
                yield pair[:tenth], pair[tenth:]

    def without(self, *groups: Longs) -> Bools:
        return np.delete(self.histories, np.concatenate(groups), axis=0)


def n_draws(n_people: int) -> int:
    return min(DRAWS, max(1, -(-ENOUGH // max(1, n_people // 10))))


def n_steps(n_people: int) -> int:
    """How often `attack` tells that it got on."""
    return 2 * n_draws(n_people) + 3 + 2 * LEAVERS + 1


def some_of(sets: Bools, share: float, seed: int) -> Bools:
    """A random part of each set, at least one item of it."""
    draws = np.where(sets, np.random.default_rng([seed, len(sets)]).random(sets.shape), np.inf)
    place = draws.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray(place < np.maximum(1, np.round(share * sets.sum(axis=1)))[:, None]) & sets


def figure(found: float | None, control: float | None, of: int, of_control: int) -> dict[str, Any]:
    """What an attack found and what it finds where there is nothing: AUCs, or shares of so many."""
    return {"found": found, "control": control, "of": of, "of_control": of_control}


def shares(hits: Bools | list[bool], control: Bools | list[bool]) -> dict[str, Any]:
    return figure(_mean(hits), _mean(control), len(hits), len(control))


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def attack(scene: Scene, tell: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """All attacks on one setting."""
    return {
        "membership": membership(scene, tell),
        **from_one_release(scene, tell),
        **after_retractions(scene, tell),
        "canary": canaries(scene, tell),
    }


def membership(scene: Scene, tell: Callable[[], None] = lambda: None) -> dict[str, Any]:
    found: dict[str, list[float]] = {"inside": [], "absent": []}
    n = 0
    for inside, absent in scene.draws():
        known = [some_of(scene.histories[one], 0.9, scene.seed) for one in (inside, absent)]
        n += len(inside)
        for name, gone in (("inside", (absent,)), ("absent", (inside, absent))):
            release = scene.released(scene.without(*gone))
            reader = NullSpace.of(release)
            one = auc(*(-reader.energy(sets[:, release.items]) for sets in known))
            found[name] += [] if one is None else [one]
            tell()
    return figure(_mean(found["inside"]), _mean(found["absent"]), n, n)


def from_one_release(scene: Scene, tell: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """What one release shows of people inside it: with half of a history known, and with nothing."""
    inside, absent = next(scene.draws(), (np.zeros(0, np.int64), np.zeros(0, np.int64)))
    release = scene.released(scene.without(absent))
    reader, histories = NullSpace.of(release), scene.histories[:, release.items]
    read = []
    for group in (inside, absent):
        own = histories[group]
        own = own[own.sum(axis=1) >= 2 * FEWEST][:MOST_HALF]
        grown = [reader.complete(known) for known in some_of(own, 0.5, scene.seed)]
        read.append(overlap(np.array(grown, bool).reshape(own.shape), own))
        tell()
    guesses = reader.from_nothing()
    enough = histories.sum(axis=1) >= FEWEST
    took_part = ~np.isin(np.arange(len(histories)), absent)
    alone = [overlaps(guesses, histories[enough & one]) for one in (took_part, ~took_part)]
    tell()
    return {
        "half_nearly": shares(*(one >= NEARLY for one in read)),
        "half_exactly": shares(*(one == 1 for one in read)),
        "nothing_exactly": shares(*(one == 1 for one in alone)),
    }


def after_retractions(scene: Scene, tell: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """What the releases before and after show of one who left, and of one item taken back."""
    server = scene.learned(scene.histories)
    before = dense_weights(server.heads)
    # of the histories what is out: nothing else is in the sums to be read
    out = scene.histories & (before != 0).any(axis=0)
    people = [one for one in scene.people() if out[one].any()][:LEAVERS]
    histories = out[people]
    draws = np.random.default_rng([scene.seed, LEAVERS])
    items = [int(draws.choice(np.flatnonzero(one))) for one in histories]
    left, named = [], []
    for own, item in zip(scene.histories[people], items, strict=True):
        rest = own.copy()
        rest[item] = False
        left.append(read_leaver(before, _after(scene, server, own, rest & False)))
        tell()
        named.append(read_item(before, _after(scene, server, own, rest)))
        tell()
    guesses = np.array(left, bool).reshape(histories.shape)
    read, other = overlap(guesses, histories), overlap(guesses, np.roll(histories, -1, axis=0))
    others = items[1:] + items[:1]
    return {
        "leaver_nearly": shares(read >= NEARLY, other >= NEARLY),
        "leaver_exactly": shares(read == 1, other == 1),
        "item": shares(*([a == b for a, b in zip(named, truth, strict=True)] for truth in (items, others))),
    }


def _after(scene: Scene, server: ServerState, told: Bools, still: Bools) -> Floats:
    """B after one person replaced what they told."""
    lists = [[as_lists(one[None])] for one in (told, still)]
    return dense_weights(scene.backbone.replaced(server, *lists)[0].heads)


def canaries(scene: Scene, tell: Callable[[], None] = lambda: None) -> dict[str, Any]:
    out = np.flatnonzero(scene.out)
    draws = np.random.default_rng([scene.seed, CANARIES])
    planted = np.zeros((CANARIES, scene.histories.shape[1]), bool)
    for one in planted:
        one[draws.permutation(out)[: min(PLANTED, len(out) // 4)]] = True
    found = []
    for sets in (np.concatenate([scene.histories, planted]), scene.histories):
        release = scene.released(sets)
        reader = NullSpace.of(release)
        found.append([_last_item(reader, one) for one in planted[:, release.items] if one.sum() > 1])
    tell()
    return shares(*found)


def _last_item(reader: NullSpace, history: Bools) -> bool:
    """Whether the one item that is not known comes first among those that are not known."""
    last = int(np.flatnonzero(history)[-1])
    known = history.copy()
    known[last] = False
    return reader.last_item(known) == last
