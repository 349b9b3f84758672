"""The releases of tally under a budget: terms of length 1, their fields, the noise that falls on them, their price.

Every release is charged to its users before it leaves (learn/statistic.py). Noise falls on the sum over the users of a
process, in whole numbers, before anyone sees the sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Ints, Longs, Ragged, ServerState
from tacita.messages import DenseArrays, OuterProducts, SparseRows, Spec, Total
from tacita.models.statistic_model import BlockLists, Fields, Forms
from tacita.models.tally.model import Tally
from tacita.models.tally.options import STATISTIC, SURVEY, TallyConfig, is_set
from tacita.models.tally.pair_statistic import list_user_clients
from tacita.models.tally.private_math import (
    GRID,
    MOST_PEOPLE,
    PEOPLE_SHARE,
    POPULARITY_GRID,
    POPULARITY_SHARE,
    SQUARE_ROOT_2,
    TallyBudget,
    TermAxes,
    build_unit_vectors,
    compute_unit_likes,
    draw_symmetric_noise,
    draw_whole_noise,
)
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import EARLIER_RUNS, Ledger
from tacita.privacy.noise import MAX_SIGMA, NoiseStream

POPULARITY_RELEASE = "which items people like"
TERMS_RELEASE = "which items go together"
RETRACTION_RELEASE = "what is taken back"
TAIL = 12.0  # deviations of noise that a sum may be off by; chance gives as much less than once in 10^32
LARGEST_S = 200.0  # of noise off the diagonal; people would have to be millions
NO_MEANING = ("ridge", "ridge_popularity", "length_power", "min_pair")
"""Settings of plain tally that a budget has no use for."""
NO_EFFECT = ("min_item", "keep")
"""Settings with a default that cut nothing under a budget: users must not think that theirs do."""
DRAWS = Spec("draws", (1,), most=1.0, least=0.0, exact=True)
"""How many draws of noise are in a sum."""


class ListChange(NamedTuple):
    """Lists of one block in a retraction: old ones leave the sum, new ones enter it."""

    sign: float  # -1: they leave; 1: they enter
    lists: Ragged
    age: int  # blocks for which their terms have faded


class BudgetedRelease(Tally):
    """The releases of tally under a budget."""

    def __init__(self, config: TallyConfig, privacy: PrivacyConfig, codes: Floats | None = None) -> None:
        super().__init__(config)
        assert privacy.epsilon is not None
        self.privacy = privacy
        n_blocks = max(1, privacy.blocks)
        self.budget = TallyBudget(privacy.epsilon, privacy.delta, n_blocks)
        self.codes = codes
        refuse_settings(config)
        refuse_small_budget(self.budget)
        self._refuse_excess_noise()

    def _refuse_excess_noise(self) -> None:
        """Refuse a budget whose noise cannot be drawn in whole numbers, be it on terms or on a retraction."""
        budget = self.budget
        ages = np.arange(budget.blocks)
        fades = self.config.decay**ages
        all_blocks = float(fades.sum())  # the length of what a user added in all blocks
        order_share = getattr(self.config, "order_share", 0.0)
        term_share = 1.0 - float(order_share)
        first_share = term_share * budget.compute_term_share(first=True)
        on_terms = budget.compute_matrix_deviation(first_share)
        retraction_length = SQUARE_ROOT_2 * all_blocks
        on_retraction = budget.compute_matrix_deviation(term_share, retraction_length)
        widest = max(on_terms, on_retraction)
        sigma = SQUARE_ROOT_2 * widest / GRID**2
        if sigma >= MAX_SIGMA:
            raise TacitaError(
                f"privacy.epsilon = {budget.epsilon} over {budget.blocks} blocks needs more noise than can be "
                "drawn when somebody takes back what they told in all of them; raise privacy.epsilon, or lower "
                "privacy.blocks or backbone.decay."
            )

    # what a device encodes

    def encode_statistic(self, view: CohortView, question: str) -> Forms:
        lists = self.select_counted_items(view.train)
        return self.encode_lists(lists, view.user_ptr, view.heads, question)

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> Forms:
        """For the survey x / |x| of each list and that its user takes part; else its term."""
        client = list_user_clients(user_ptr)
        if question == SURVEY:
            return _encode_survey(lists, client, len(user_ptr) - 1)
        vectors = build_term_vectors(lists, heads)
        ones = np.ones(len(lists))
        return {"terms": OuterProducts(client, vectors, ones)}

    def sum_statistics_of_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        raise TacitaError(f"backbone '{self.name}' under privacy.epsilon makes no sum without noise.")

    def encode_retraction(self, view: CohortView, old_lists: BlockLists, new_lists: BlockLists) -> Forms:
        """The change of all blocks together, as far as it has not faded."""
        changes = self.list_changes(view, old_lists, new_lists)
        k = len(view.heads["inputs"])
        vectors = [np.zeros((0, k))]
        signs = [np.zeros(0)]
        for change in changes:
            half_age = change.age / 2
            length = self.config.decay**half_age
            vectors.append(build_term_vectors(change.lists, view.heads, length))
            signs.append(np.full(len(change.lists), change.sign))
        owner, order = order_by_client(view, len(changes))
        vector = np.concatenate(vectors)[order]
        sign = np.concatenate(signs)[order]
        return {"terms": OuterProducts(owner, vector, sign)}

    def list_changes(self, view: CohortView, old_lists: BlockLists, new_lists: BlockLists) -> list[ListChange]:
        """For every block, the old lists that leave the sum and the new ones in their place."""
        nobody = Ragged.empty(len(view.user))
        last = read_last_release(view.heads)
        changes = []
        for block, (old, new) in enumerate(zip(old_lists, new_lists, strict=True)):
            age = max(0, last - block)
            leaving = self.select_counted_items(old).join_rows(nobody)
            entering = self.select_counted_items(new).join_rows(nobody)
            changes.append(ListChange(-1.0, leaving, age))
            changes.append(ListChange(1.0, entering, age))
        return changes

    # which fields travel

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """No question is left once all planned blocks are released."""
        if server.block >= self.budget.blocks:
            return ()
        if read_release_count(server.heads) == 0:
            return SURVEY, STATISTIC
        return (STATISTIC,)

    def list_statistic_fields(self, server: ServerState, question: str) -> Fields:
        if question != SURVEY:
            return *self.list_term_fields(server, question), DRAWS
        shape = (len(server.items),)
        liked_deviation = self.budget.compute_deviation(POPULARITY_SHARE)
        people_deviation = self.budget.compute_deviation(PEOPLE_SHARE)
        most_liked = 1 + TAIL * liked_deviation
        most_people = 1 + TAIL * people_deviation
        about = "which items people like, with noise"
        liked = Spec("liked", shape, most=most_liked, exact=True, about=about)
        people = Spec("people", (1,), most=most_people, exact=True)
        return liked, people, DRAWS

    def list_term_fields(self, server: ServerState, question: str) -> Fields:
        k = len(server.heads["inputs"])
        length = self.bound_term_length(server, question)
        deviation = self.compute_term_deviation(server, question)
        most = length + TAIL * SQUARE_ROOT_2 * deviation
        about = "which items go together, with noise"
        terms = Spec("terms", (k, k), most=most, exact=True, symmetric=True, about=about)
        return (terms,)

    def list_retraction_fields(self, server: ServerState) -> Fields:
        return *self.list_term_fields(server, "retraction"), DRAWS

    # how much noise

    @property
    def share_of_budget_for_terms(self) -> float:
        """What the terms have of a user's length, squared; other fields of the same release have the rest."""
        return 1.0

    def bound_term_length(self, server: ServerState, question: str) -> float:
        """How long one user's part of the terms is at most: of a retraction, two terms of every block there was.

        A device may not trust a server with this, so it holds whatever block the server names as the last. After the
        blocks of the plan there is no release.
        """
        if question == STATISTIC:
            return 1.0
        n_blocks = min(server.block + 1, self.budget.blocks)
        last = read_last_release(server.heads)
        blocks = np.arange(n_blocks)
        ages = np.maximum(0, last - blocks)
        lengths = self.config.decay**ages
        return SQUARE_ROOT_2 * float(lengths.sum())

    def find_release_share(self, heads: Arrays, question: str) -> float:
        """What of a block's mu^2 a release takes."""
        if question == SURVEY:
            return POPULARITY_SHARE + PEOPLE_SHARE
        if question == STATISTIC:
            is_first = read_release_count(heads) == 0
            return self.budget.compute_term_share(first=is_first)
        return 1.0

    def compute_term_deviation(self, server: ServerState, question: str) -> float:
        """Of the noise on terms, off the diagonal."""
        release_share = self.find_release_share(server.heads, question)
        share = self.share_of_budget_for_terms * release_share
        length = self.bound_term_length(server, question)
        return self.budget.compute_matrix_deviation(share, length)

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        """Whole numbers and whole-number noise; `draws` counts how often noise was put into a sum of sums."""
        if total.n_clients > MOST_PEOPLE:
            raise TacitaError(f"sums over more than {MOST_PEOPLE:,} people are not exact; use more nodes.")
        stream = _open_stream(server, total, question, draws)
        if question == SURVEY:
            sums = self._add_survey_noise(total, stream)
        else:
            sums = self.add_term_noise(server, total, question, stream)
        sums["draws"] = total["draws"] + 1.0
        return total.with_sums(sums)

    def _add_survey_noise(self, total: Total, stream: NoiseStream) -> Arrays:
        liked = total["liked"]
        liked_deviation = self.budget.compute_deviation(POPULARITY_SHARE)
        people_deviation = self.budget.compute_deviation(PEOPLE_SHARE)
        liked_noise = draw_whole_noise(stream, liked_deviation, POPULARITY_GRID, len(liked))
        people_noise = draw_whole_noise(stream, people_deviation, 1.0, 1)
        people = total["people"] + people_noise
        return {"liked": liked + liked_noise, "people": people}

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        deviation = self.compute_term_deviation(server, question)
        k = len(server.heads["inputs"])
        noise = draw_symmetric_noise(stream, deviation, k)
        return {"terms": total["terms"] + noise}

    # what it costs

    @property
    def epsilon(self) -> float | None:
        return self.budget.epsilon

    def ledger(self) -> Ledger:
        """Noise is put into a sum over users, by the lab or by a node: against whoever sees the sum after that."""
        survey_share = POPULARITY_SHARE + PEOPLE_SHARE
        survey_sigma = self.budget.compute_deviation(survey_share)
        sigma = self.budget.compute_deviation(1.0)
        survey = Event(POPULARITY_RELEASE, "gaussian", 1.0, survey_sigma, threat="central", once=True)
        terms = Event(TERMS_RELEASE, "gaussian", 1.0, sigma, threat="central")
        retraction = replace(terms, what=RETRACTION_RELEASE, once=True)  # never refused
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, threat="central", once=True)
        events = (survey, terms, retraction, earlier)
        return Ledger(events, self.budget.delta)

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        events = {SURVEY: POPULARITY_RELEASE, STATISTIC: TERMS_RELEASE}
        event = events.get(question, RETRACTION_RELEASE)
        share = self.find_release_share(heads, question)
        mu2 = share * self.budget.mu2
        return event, mu2**0.5


def refuse_settings(config: TallyConfig) -> None:
    """Refuse settings of plain tally that do nothing under a budget."""
    if config.solve != "ridge":
        raise TacitaError(
            f"backbone.solve = '{config.solve}' has no form under privacy.epsilon: noise falls on every pair of "
            "items, so the noised sum is about few of them, and is filtered by its eigenvalues already; leave one "
            "of the two out."
        )
    for name in NO_MEANING:
        if is_set(config, name):
            raise TacitaError(f"backbone.{name} has no meaning under privacy.epsilon; leave one of the two out.")
    for name in NO_EFFECT:
        is_on = getattr(config, name) != 0
        if is_on and is_set(config, name):
            raise TacitaError(
                f"backbone.{name} cuts nothing under privacy.epsilon, where noise decides what is kept; leave one "
                "of the two out."
            )


def refuse_small_budget(budget: TallyBudget) -> None:
    """Refuse a budget under which nothing but noise would be released."""
    has_budget = budget.mu2 > 0
    if not has_budget or budget.compute_matrix_deviation(1.0) > LARGEST_S:
        raise TacitaError(
            f"privacy.epsilon = {budget.epsilon} over {budget.blocks} blocks leaves nothing but noise; raise "
            "privacy.epsilon or lower privacy.blocks."
        )


def _open_stream(server: ServerState, total: Total, question: str, draws: Draws) -> NoiseStream:
    """The noise of one release; its number is the server's word, so a node adds a number of its own."""
    place = [server.block, server.round, read_release_count(server.heads)]
    if total.nonce:
        place.append(total.nonce)
    return NoiseStream(draws, f"tally {question}", *place)


def _encode_survey(lists: Ragged, client: Ints, n_clients: int) -> Forms:
    """x / |x| of each list, and that its user takes part."""
    owner = client[lists.rows()]
    liked = SparseRows(owner, lists.ids, compute_unit_likes(lists))
    takes_part = lists.counts() > 0
    people = np.bincount(client, weights=takes_part, minlength=n_clients)
    return {"liked": liked, "people": DenseArrays(people[:, None])}


def order_by_client(view: CohortView, n_lists: int) -> tuple[Ints, Longs]:
    """For so many lists of every user, one after the other: the clients in ascending order, and that order."""
    client = list_user_clients(view.user_ptr)
    owner = np.tile(client, n_lists)
    order = np.argsort(owner, kind="stable")
    return owner[order], order


def read_last_release(heads: Arrays) -> int:
    """The last block that was released; -1: none."""
    return int(heads["released"][0])


def read_release_count(heads: Arrays) -> int:
    """How many releases there were so far."""
    return int(heads["released"][1])


def read_axes(heads: Arrays) -> TermAxes:
    """What terms are about."""
    inputs = heads["inputs"]
    scale = heads["scale"]
    return TermAxes(inputs, scale, heads["centre"])


def build_term_vectors(lists: Ragged, heads: Arrays, length: float = 1.0) -> Doubles:
    """(lists, k) c of every list."""
    axes = read_axes(heads)
    return build_unit_vectors(lists, axes.inputs, axes.scale, axes.centre, length)
