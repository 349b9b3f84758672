"""The releases of tally under a budget: terms of length 1, their fields, the noise that falls on them, their price.

Every release is charged to its users before it leaves (learn/statistic.py). Noise falls on the sum over the users of a
process, in whole numbers, before anyone sees the sum.
"""

from __future__ import annotations

import numpy as np

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.messages import DenseArrays, Form, OuterProducts, SparseRows, Spec, Total
from tacita.models.tally.model import Tally
from tacita.models.tally.options import STATISTIC, SURVEY, TallyConfig, is_set
from tacita.models.tally.pair_statistic import expand_clients
from tacita.models.tally.private_math import (
    GRID,
    MOST_PEOPLE,
    PEOPLE_SHARE,
    POPULARITY_GRID,
    POPULARITY_SHARE,
    SQUARE_ROOT_2,
    TallyBudget,
    TermAxes,
    draw_symmetric_noise,
    draw_whole_noise,
    unit_likes,
    unit_vectors,
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


class BudgetedRelease(Tally):
    """The releases of tally under a budget."""

    def __init__(self, config: TallyConfig, privacy: PrivacyConfig, codes: Floats | None = None) -> None:
        super().__init__(config)
        assert privacy.epsilon is not None
        self.privacy = privacy
        self.budget = TallyBudget(privacy.epsilon, privacy.delta, max(1, privacy.blocks))
        self.codes = codes
        refuse_settings(config)
        refuse_small_budget(self.budget)
        self._refuse_excess_noise()

    def _refuse_excess_noise(self) -> None:
        """Refuse a budget whose noise cannot be drawn in whole numbers, be it on terms or on a retraction."""
        budget = self.budget
        fades = self.config.decay ** np.arange(budget.blocks)
        all_blocks = float(fades.sum())  # the length of what a user added in all blocks
        term_share = 1.0 - float(getattr(self.config, "order_share", 0.0))
        first_share = term_share * budget.term_share(first=True)
        on_terms = budget.matrix_deviation(first_share)
        on_retraction = budget.matrix_deviation(term_share, SQUARE_ROOT_2 * all_blocks)
        widest = max(on_terms, on_retraction)
        if SQUARE_ROOT_2 * widest / GRID**2 >= MAX_SIGMA:
            raise TacitaError(
                f"privacy.epsilon = {budget.epsilon} over {budget.blocks} blocks needs more noise than can be "
                "drawn when somebody takes back what they told in all of them; raise privacy.epsilon, or lower "
                "privacy.blocks or backbone.decay."
            )

    # what a device encodes

    def encode_statistic(self, view: CohortView, question: str) -> dict[str, Form]:
        lists = self.select_counted(view.train)
        return self.encode_lists(lists, view.user_ptr, view.heads, question)

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> dict[str, Form]:
        """For the survey x / |x| of each list and that its user takes part; else its term."""
        client = expand_clients(user_ptr)
        if question != SURVEY:
            vectors = term_vectors(lists, heads)
            return {"terms": OuterProducts(client, vectors, np.ones(len(lists)))}
        takes_part = lists.counts() > 0
        people = np.zeros((len(user_ptr) - 1, 1))
        np.add.at(people, client, takes_part[:, None])
        owner = client[lists.rows()]
        liked = SparseRows(owner, lists.ids, unit_likes(lists))
        return {"liked": liked, "people": DenseArrays(people)}

    def sum_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        raise TacitaError(f"backbone '{self.name}' under privacy.epsilon makes no sum without noise.")

    def encode_retraction(self, view: CohortView, old_lists: list[Ragged], new_lists: list[Ragged]) -> dict[str, Form]:
        """The change of all blocks together, as far as it has not faded."""
        client = expand_clients(view.user_ptr)
        last = int(view.heads["released"][0])
        k = len(view.heads["inputs"])
        vectors = [np.zeros((0, k))]
        signs = [np.zeros(0)]
        owners = [client[:0]]
        for block, (old, new) in enumerate(zip(old_lists, new_lists, strict=True)):
            age = max(0, last - block)
            length = self.config.decay ** (age / 2)
            for sign, lists in ((-1.0, old), (1.0, new)):
                vectors.append(term_vectors(self.select_counted(lists), view.heads, length))
                signs.append(np.full(len(lists), sign))
                owners.append(client)
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        vector = np.concatenate(vectors)[order]
        sign_of_vector = np.concatenate(signs)[order]
        return {"terms": OuterProducts(owner[order], vector, sign_of_vector)}

    # which fields travel

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """No question is left once all planned blocks are released."""
        if server.block >= self.budget.blocks:
            return ()
        is_first = int(server.heads["released"][1]) == 0
        if is_first:
            return SURVEY, STATISTIC
        return (STATISTIC,)

    def statistic_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        draws = _draws_field()
        if question != SURVEY:
            return *self.term_fields(server, question), draws
        most_liked = 1 + TAIL * self.budget.deviation(POPULARITY_SHARE)
        most_people = 1 + TAIL * self.budget.deviation(PEOPLE_SHARE)
        about = "which items people like, with noise"
        liked = Spec("liked", (len(server.items),), most=most_liked, exact=True, about=about)
        people = Spec("people", (1,), most=most_people, exact=True)
        return liked, people, draws

    def term_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        k = len(server.heads["inputs"])
        length = self.bound_term_length(server, question)
        most = length + TAIL * SQUARE_ROOT_2 * self.term_deviation(server, question)
        about = "which items go together, with noise"
        return (Spec("terms", (k, k), most=most, exact=True, symmetric=True, about=about),)

    def retraction_fields(self, server: ServerState) -> tuple[Spec, ...]:
        return *self.term_fields(server, "retraction"), _draws_field()

    # how much noise

    @property
    def term_share(self) -> float:
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
        last = int(server.heads["released"][0])
        ages = np.maximum(0, last - np.arange(n_blocks))
        lengths = self.config.decay**ages
        return SQUARE_ROOT_2 * float(lengths.sum())

    def release_share(self, heads: Arrays, question: str) -> float:
        """What of a block's mu^2 a release takes."""
        if question == SURVEY:
            return POPULARITY_SHARE + PEOPLE_SHARE
        if question == STATISTIC:
            is_first = int(heads["released"][1]) == 0
            return self.budget.term_share(first=is_first)
        return 1.0

    def term_deviation(self, server: ServerState, question: str) -> float:
        """Of the noise on terms, off the diagonal."""
        share = self.term_share * self.release_share(server.heads, question)
        length = self.bound_term_length(server, question)
        return self.budget.matrix_deviation(share, length)

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
        liked_deviation = self.budget.deviation(POPULARITY_SHARE)
        people_deviation = self.budget.deviation(PEOPLE_SHARE)
        liked_noise = draw_whole_noise(stream, liked_deviation, POPULARITY_GRID, len(liked))
        people_noise = draw_whole_noise(stream, people_deviation, 1.0, 1)
        return {"liked": liked + liked_noise, "people": total["people"] + people_noise}

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        deviation = self.term_deviation(server, question)
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
        survey_sigma = self.budget.deviation(survey_share)
        sigma = self.budget.deviation(1.0)
        survey = Event(POPULARITY_RELEASE, "gaussian", 1.0, survey_sigma, threat="central", once=True)
        terms = Event(TERMS_RELEASE, "gaussian", 1.0, sigma, threat="central")
        retraction = Event(RETRACTION_RELEASE, "gaussian", 1.0, sigma, threat="central", once=True)  # never refused
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, threat="central", once=True)
        return Ledger((survey, terms, retraction, earlier), self.budget.delta)

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        events = {SURVEY: POPULARITY_RELEASE, STATISTIC: TERMS_RELEASE}
        event = events.get(question, RETRACTION_RELEASE)
        mu2 = self.release_share(heads, question) * self.budget.mu2
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
        if getattr(config, name) != 0 and is_set(config, name):
            raise TacitaError(
                f"backbone.{name} cuts nothing under privacy.epsilon, where noise decides what is kept; leave one "
                "of the two out."
            )


def refuse_small_budget(budget: TallyBudget) -> None:
    """Refuse a budget under which nothing but noise would be released."""
    if budget.mu2 <= 0 or budget.matrix_deviation(1.0) > LARGEST_S:
        raise TacitaError(
            f"privacy.epsilon = {budget.epsilon} over {budget.blocks} blocks leaves nothing but noise; raise "
            "privacy.epsilon or lower privacy.blocks."
        )


def _draws_field() -> Spec:
    """How many draws of noise are in a sum."""
    return Spec("draws", (1,), most=1.0, least=0.0, exact=True)


def _open_stream(server: ServerState, total: Total, question: str, draws: Draws) -> NoiseStream:
    """The noise of one release; its number is the server's word, so a node adds a number of its own."""
    n_releases = int(server.heads["released"][1])
    nonce = (total.nonce,) if total.nonce else ()
    return NoiseStream(draws, f"tally {question}", server.block, server.round, n_releases, *nonce)


def read_axes(heads: Arrays) -> TermAxes:
    return TermAxes(heads["inputs"], heads["scale"], heads["centre"])


def term_vectors(lists: Ragged, heads: Arrays, length: float = 1.0) -> Doubles:
    """(lists, k) c of every list."""
    axes = read_axes(heads)
    return unit_vectors(lists, axes.inputs, axes.scale, axes.centre, length)
