"""Each attack on one setting of tally with its control: the same question where the answer is not in the release.

Every attack is on the first block and on people with some items that are out in it. Tenths of the people are drawn at
random: some stay in the sums (inside); the release leaves others out (absent).

membership: 90 % of a history is known; the AUC of its energy, inside against absent, mean of the draws. Control: the
same two groups against a release without both.
half: 50 % is known; whose released items are read, all of them exactly or nearly. Control: absent people.
nothing: nothing is known; how many inside have exactly their released items among the guesses. Control: absent people.
leaver: one person leaves; the releases before and after show their history. Control: the guess against the next leaver.
item: one person takes one item back; how often it is named. Control: the guess against what the next one took back.
canary: people with random items are added; all but one item is known, and the best guess is that one. Control: the
same question to a release without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.types import Bools, Doubles, Floats, Longs, Ragged, ServerState
from tacita.models.tally.model import Tally
from tacita.models.tally.sums import PairShape
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.audit_progress import Advance, ignore_progress
from tacita.research.audit.null_space import AucSamples, NullSpace
from tacita.research.audit.reconstruction import (
    NEARLY_READ,
    RebuiltInverse,
    compute_best_overlap,
    compute_row_overlap,
    rebuild_inverse,
    sets_to_lists,
)
from tacita.research.audit.retraction import guess_leaver_history, guess_withdrawn_item

MIN_ITEMS = 5  # items that are out, of people under attack; twice as many where half of them are known
DRAWS = 5  # draws of two tenths of the people, at most
ENOUGH_INSIDE = 250  # people inside after which no more tenths are drawn
MAX_HALF_KNOWN = 100  # people of a group whose half is completed, at most
LEAVERS = 10
CANARIES = 20  # planted people
CANARY_ITEMS = 30  # items of each

AttackFigure = dict[str, Any]


@dataclass(frozen=True)
class AttackTarget:
    """The first block, and the server just before it learns from it."""

    backbone: Tally
    server: ServerState
    histories: Bools  # (people, items)
    seed: int

    @staticmethod
    def from_state(backbone: Tally, server: ServerState, train: Ragged, seed: int) -> AttackTarget:
        n_items = len(server.items)
        terms, _ = backbone.build_user_terms(train, n_items)
        sets = terms.toarray() > 0
        has_items = sets.any(axis=1)
        return AttackTarget(backbone, server, sets[has_items], seed)

    def learn_from(self, sets: Bools) -> ServerState:
        """The server after it learned from these histories and no others."""
        n_items = len(self.server.items)
        inputs = self.server.heads["inputs"]
        shape = PairShape.from_inputs(n_items, inputs)
        lists = sets_to_lists(sets)
        total = self.backbone.sum_statistic(lists, None, shape)
        return self.backbone.learn_from_sums(self.server, total, "statistic")

    def rebuild_release(self, sets: Bools) -> RebuiltInverse:
        server = self.learn_from(sets)
        return rebuild_inverse(unpack_dense_weights(server.heads))

    @property
    def released_items(self) -> Bools:
        """Items that are out when everybody takes part."""
        config = self.backbone.config
        least = max(1, config.min_item, config.min_pair)
        counts = self.histories.sum(axis=0)
        return np.asarray(counts >= least)

    def select_people(self, fewest: int = MIN_ITEMS) -> Longs:
        """Those with so many items that are out, in a random order."""
        released = self.histories & self.released_items
        n_released = released.sum(axis=1)
        people = np.flatnonzero(n_released >= fewest)
        rng = np.random.default_rng([self.seed, fewest])
        return rng.permutation(people)

    def draw_groups(self) -> Iterator[tuple[Longs, Longs]]:
        """Two tenths of the people at a time, those inside and those absent, nobody twice."""
        order = self.select_people()
        tenth = max(1, len(order) // 10)
        n_draws = count_group_draws(len(self.histories))
        for draw in range(n_draws):
            start = 2 * draw * tenth
            end = start + 2 * tenth
            group = order[start:end]
            if len(group) == 2 * tenth:
                yield group[:tenth], group[tenth:]

    def drop_groups(self, *groups: Longs) -> Bools:
        dropped = np.concatenate(groups)
        return np.delete(self.histories, dropped, axis=0)

    def sample_known(self, group: Longs) -> Bools:
        """What a reader knows who tests whether these people took part: 90 % of each history."""
        return sample_items(self.histories[group], 0.9, self.seed)


def count_group_draws(n_people: int) -> int:
    tenth = max(1, n_people // 10)
    enough = -(-ENOUGH_INSIDE // tenth)  # rounded up
    return min(DRAWS, max(1, enough))


def count_steps(n_people: int) -> int:
    """How often `run_attacks` reports a step."""
    membership_steps = 2 * count_group_draws(n_people)
    retraction_steps = 2 * LEAVERS
    return membership_steps + 3 + retraction_steps + 1


def sample_items(sets: Bools, share: float, seed: int) -> Bools:
    """A random part of each set, at least one item of it."""
    n_sets = len(sets)
    rng = np.random.default_rng([seed, n_sets])
    draws = rng.random(sets.shape)
    draws = np.where(sets, draws, np.inf)
    order = draws.argsort(axis=1, kind="stable")
    place = order.argsort(axis=1, kind="stable")
    set_sizes = sets.sum(axis=1)
    part_sizes = np.round(share * set_sizes)
    at_least_one = np.maximum(1, part_sizes)
    is_chosen = place < at_least_one[:, None]
    return np.asarray(is_chosen) & sets


def build_attack_figure(value: float | None, control: float | None, of: int, of_control: int) -> AttackFigure:
    """What an attack finds, and what it finds where there is nothing: AUCs, or shares of so many."""
    return {"found": value, "control": control, "of": of, "of_control": of_control}


def make_share_figure(hits: Bools | list[bool], control: Bools | list[bool]) -> AttackFigure:
    value = _average_or_none(hits)
    control_value = _average_or_none(control)
    return build_attack_figure(value, control_value, len(hits), len(control))


def make_auc_figure(aucs: AucSamples, n_inside: int) -> AttackFigure:
    """The mean AUC of a release with those inside, and of one without them."""
    value = _average_or_none(aucs.values["inside"])
    control = _average_or_none(aucs.values["absent"])
    return build_attack_figure(value, control, n_inside, n_inside)


def _average_or_none(values: Any) -> float | None:
    if len(values) == 0:
        return None
    return float(np.mean(values))


def run_attacks(target: AttackTarget, advance: Advance) -> dict[str, AttackFigure]:
    """All attacks on one setting."""
    return {
        "membership": attack_membership(target, advance),
        **attack_one_release(target, advance),
        **attack_retractions(target, advance),
        "canary": attack_canaries(target, advance),
    }


def attack_membership(target: AttackTarget, advance: Advance = ignore_progress) -> AttackFigure:
    aucs = AucSamples("inside", "absent")
    n_inside = 0
    for inside, absent in target.draw_groups():
        known_inside = target.sample_known(inside)
        known_absent = target.sample_known(absent)
        n_inside += len(inside)
        histories = {
            "inside": target.drop_groups(absent),
            "absent": target.drop_groups(inside, absent),
        }
        for kind, sets in histories.items():
            release = target.rebuild_release(sets)
            reader = NullSpace.from_inverse(release)
            inside_sets = known_inside[:, release.items]
            absent_sets = known_absent[:, release.items]
            inside_energy = reader.compute_energy(inside_sets)
            absent_energy = reader.compute_energy(absent_sets)
            aucs.add_auc(kind, -inside_energy, -absent_energy)
            advance()
    return make_auc_figure(aucs, n_inside)


def attack_one_release(target: AttackTarget, advance: Advance = ignore_progress) -> dict[str, AttackFigure]:
    """What one release shows of people inside it: with half of a history known, and with nothing."""
    nobody = np.zeros(0, np.int64)
    no_groups = (nobody, nobody)
    inside, absent = next(target.draw_groups(), no_groups)
    release = target.rebuild_release(target.drop_groups(absent))
    reader = NullSpace.from_inverse(release)
    histories = target.histories[:, release.items]
    half_inside = _complete_halves(reader, histories[inside], target.seed)
    advance()
    half_absent = _complete_halves(reader, histories[absent], target.seed)
    advance()
    guesses = reader.guess_histories()
    has_enough = histories.sum(axis=1) >= MIN_ITEMS
    people = np.arange(len(histories))
    is_absent = np.isin(people, absent)
    inside_histories = histories[has_enough & ~is_absent]
    absent_histories = histories[has_enough & is_absent]
    guessed_inside = compute_best_overlap(guesses, inside_histories)
    guessed_absent = compute_best_overlap(guesses, absent_histories)
    advance()
    return {
        "half_nearly": make_share_figure(half_inside >= NEARLY_READ, half_absent >= NEARLY_READ),
        "half_exactly": make_share_figure(half_inside == 1, half_absent == 1),
        "nothing_exactly": make_share_figure(guessed_inside == 1, guessed_absent == 1),
    }


def _complete_halves(reader: NullSpace, histories: Bools, seed: int) -> Doubles:
    """How well each history is read whose half is known."""
    has_enough = histories.sum(axis=1) >= 2 * MIN_ITEMS
    histories = histories[has_enough][:MAX_HALF_KNOWN]
    halves = sample_items(histories, 0.5, seed)
    grown = [reader.complete_history(known) for known in halves]
    guesses = np.array(grown, bool).reshape(histories.shape)
    return compute_row_overlap(guesses, histories)


def attack_retractions(target: AttackTarget, advance: Advance = ignore_progress) -> dict[str, AttackFigure]:
    """What the releases before and after show of one who left, and of one item taken back."""
    server = target.learn_from(target.histories)
    before = unpack_dense_weights(server.heads)
    is_out = (before != 0).any(axis=0)
    released = target.histories & is_out  # nothing else is in the sums to be read
    has_released = released.any(axis=1)
    order = target.select_people()
    people = order[has_released[order]][:LEAVERS]
    histories = released[people]
    draws = np.random.default_rng([target.seed, LEAVERS])
    items = []
    for history in histories:
        owned = np.flatnonzero(history)
        items.append(int(draws.choice(owned)))
    leaver_guesses = []
    item_guesses = []
    whole_histories = target.histories[people]
    for history, item in zip(whole_histories, items, strict=True):
        nothing = np.zeros_like(history)
        after_leaving = _replace_history(target, server, history, nothing)
        leaver_guesses.append(guess_leaver_history(before, after_leaving))
        advance()
        without_item = history.copy()
        without_item[item] = False
        after_item = _replace_history(target, server, history, without_item)
        item_guesses.append(guess_withdrawn_item(before, after_item))
        advance()
    guesses = np.array(leaver_guesses, bool).reshape(histories.shape)
    next_histories = np.roll(histories, -1, axis=0)
    own_overlap = compute_row_overlap(guesses, histories)
    next_overlap = compute_row_overlap(guesses, next_histories)
    next_items = items[1:] + items[:1]
    return {
        "leaver_nearly": make_share_figure(own_overlap >= NEARLY_READ, next_overlap >= NEARLY_READ),
        "leaver_exactly": make_share_figure(own_overlap == 1, next_overlap == 1),
        "item": make_share_figure(_mark_equal(item_guesses, items), _mark_equal(item_guesses, next_items)),
    }


def _mark_equal(guesses: Sequence[int], items: Sequence[int]) -> list[bool]:
    pairs = zip(guesses, items, strict=True)
    return [guess == item for guess, item in pairs]


def _replace_history(target: AttackTarget, server: ServerState, history: Bools, remaining: Bools) -> Floats:
    """B after one person replaced their history."""
    old_lists = [sets_to_lists(history[None])]
    new_lists = [sets_to_lists(remaining[None])]
    later, _ = target.backbone.replace_lists(server, old_lists, new_lists)
    return unpack_dense_weights(later.heads)


def attack_canaries(target: AttackTarget, advance: Advance = ignore_progress) -> AttackFigure:
    released = np.flatnonzero(target.released_items)
    draws = np.random.default_rng([target.seed, CANARIES])
    n_items = target.histories.shape[1]
    size = min(CANARY_ITEMS, len(released) // 4)
    canaries = np.zeros((CANARIES, n_items), bool)
    for canary in canaries:
        canary[draws.permutation(released)[:size]] = True
    with_canaries = np.concatenate([target.histories, canaries])
    hits = _guess_last_items(target, with_canaries, canaries)
    control_hits = _guess_last_items(target, target.histories, canaries)
    advance()
    return make_share_figure(hits, control_hits)


def _guess_last_items(target: AttackTarget, sets: Bools, canaries: Bools) -> list[bool]:
    """Whether a release of these sets names the last item of each canary with two items or more."""
    release = target.rebuild_release(sets)
    reader = NullSpace.from_inverse(release)
    hits = []
    for canary in canaries[:, release.items]:
        if canary.sum() > 1:
            hits.append(_finds_last_item(reader, canary))
    return hits


def _finds_last_item(reader: NullSpace, history: Bools) -> bool:
    """Whether the one item that is not known comes first among those that are not known."""
    last = int(np.flatnonzero(history)[-1])
    known = history.copy()
    known[last] = False
    return reader.guess_last_item(known) == last
