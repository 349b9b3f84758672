"""tally under a budget: the same exchange with terms of length 1, noise inside the sum, and B from what can be seen.

In the first block the server asks two questions: which items users like, then the terms. Noisy popularity chooses the
items that terms are about, their scales and the direction that is taken out. Later blocks release terms of the same
items. Every release is charged to its users before it leaves (budgeted_release.py); a user whose budget is spent is not
asked any more and goes on being served. What validation or counts of users would decide is fixed: `fixed_settings`.
"""

from __future__ import annotations

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ints, Ragged, ServerState
from tacita.kernels.pairs import add_dense_products
from tacita.messages import Total
from tacita.models.base import has_expected_heads, make_scalar, make_zero_scores, read_scalar, register_private
from tacita.models.statistic_model import BlockLists, FieldSums, RetractionCaveats
from tacita.models.tally.budgeted_release import (
    POPULARITY_RELEASE,
    RETRACTION_RELEASE,
    TERMS_RELEASE,
    BudgetedRelease,
    build_term_vectors,
    read_axes,
    read_last_release,
    read_release_count,
)
from tacita.models.tally.head_checks import private_heads_fit
from tacita.models.tally.model import add_repeat_bonus, pad_to_catalogue, with_heads
from tacita.models.tally.options import STATE, STATISTIC, SURVEY
from tacita.models.tally.pair_statistic import make_single_user_ptr, sum_forms
from tacita.models.tally.private_math import (
    MOST_PEOPLE,
    build_feature_basis,
    choose_axes,
    choose_n_inputs,
    draw_symmetric_noise,
    fit_denoising_matrix,
    scale_outside_popularity,
    solve_input_weights,
)
from tacita.models.tally.weights import compute_recency_weights
from tacita.privacy.noise import NoiseStream

__all__ = ["POPULARITY_RELEASE", "RETRACTION_RELEASE", "TERMS_RELEASE", "PrivateTally", "read_axes"]

RECENCY = 0.0  # in place of "learn", which would read private data
REPEAT = 0.0  # the same


@register_private
class PrivateTally(BudgetedRelease):
    """Linear item-item model from a noisy sum of users' terms."""

    def with_features(self, codes: Floats) -> PrivateTally:
        """The same model with public features of all items."""
        return type(self)(self.config, self.privacy, codes)

    @property
    def wants_features(self) -> bool:
        return self.privacy.features

    @property
    def fixed_settings(self) -> dict[str, float]:
        """What plain tally learns from private data, and this one does not."""
        recency = self.config.recency
        repeat = self.config.repeat
        return {
            "recency": RECENCY if recency == "learn" else float(recency),
            "repeat": REPEAT if repeat == "learn" else float(repeat),
        }

    def init_heads(self, draws: Draws) -> Arrays:
        return {
            **super().init_heads(draws),
            "scale": np.zeros(0),  # what each input is multiplied by
            "centre": np.zeros(0),  # the direction that is taken out
            "liked": np.zeros(0, np.float32),  # popularity of items that are no inputs, from 0 to 1
            "released": np.array([-1, 0], np.int32),  # the last block that was released, and releases so far
        }

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if not has_expected_heads(heads, own):
            return False
        return private_heads_fit(heads, n_items, self.config.most_inputs)

    def check(self, first_items: int, all_items: int) -> None:
        """The work grows with the users, not with the catalogue, and ends at `most_inputs`: any fits."""

    # on the device

    def score_history(self, view: CohortView) -> Floats:
        """x B among the inputs; below all of them the other items, by popularity."""
        heads = view.heads
        scores = make_zero_scores(view)
        if len(heads["weights"]) == 0:
            return scores
        input_scores = self.score_inputs(view)
        known = heads["liked"]
        liked = np.zeros(view.n_items, np.float32)
        liked[: len(known)] = known
        lowest = input_scores.min(axis=1, initial=0.0)
        highest_below = lowest[:, None] - 2.0
        below = highest_below + liked[None, :]
        latest = self.select_latest_items(view)
        has_items = latest.counts() > 0  # without a history nothing is scored
        scores[has_items] = below[has_items]
        scores[:, heads["inputs"]] = input_scores
        add_repeat_bonus(view, scores)
        return scores

    def score_inputs(self, view: CohortView) -> Floats:
        """(users, k) scores of the items that terms are about."""
        recency = read_scalar(view.heads, "recency")
        latest = self.select_latest_items(view)
        return multiply_lists(latest, view, recency, view.heads["weights"])

    # on the server

    def learn_from_sums(self, server: ServerState, total: Total, question: str) -> ServerState:
        n_draws = count_noise_draws(total.sums)
        if question == SURVEY:
            return self._with_chosen_terms(server, total, n_draws)
        fade = self._compute_fade(server)
        terms = self.compute_faded_sums(server, total.sums, STATISTIC, fade)
        drawn = np.array([n_draws])
        state = {**server.parts[STATE], **terms, "drawn": drawn}
        released = count_released_block(server.heads, server.block)
        return self.with_solved_gram(server.with_part(STATE, state), released)

    def _compute_fade(self, server: ServerState) -> float:
        """What earlier terms keep of their weight in this block."""
        last = read_last_release(server.heads)
        if last < 0:
            return 1.0
        age = server.block - last
        return float(self.config.decay**age)

    def compute_faded_sums(self, server: ServerState, sums: FieldSums, question: str, fade: float = 1.0) -> Arrays:
        """The server's sum, faded, with the terms of a release; and the noise in that."""
        state = server.parts[STATE]
        deviation = self.compute_term_deviation(server, question)
        gram = fade * state["gram"] + sums["terms"]
        added_variance = count_noise_draws(sums) * deviation**2
        variance = fade**2 * state["variance"] + added_variance
        return {"gram": gram, "variance": variance}

    def _with_chosen_terms(self, server: ServerState, total: Total, n_draws: float) -> ServerState:
        """The items that terms are about, and in what terms."""
        deviation = self.compute_term_deviation(server, STATISTIC) * n_draws**0.5
        people = read_scalar(total.sums, "people")
        people = min(people, MOST_PEOPLE)  # nodes may say any number
        liked = total["liked"]
        has_features = self.codes is not None
        k = choose_n_inputs(people, deviation, len(liked), has_features)
        k = min(k, self.config.most_inputs)
        axes = choose_axes(liked, k)
        heads: Arrays = {
            "inputs": axes.inputs,
            "scale": axes.scale,
            "centre": axes.centre,
            "liked": scale_outside_popularity(axes, liked),
        }
        state = {
            "liked": liked,
            "people": np.array([people]),
            "gram": np.zeros((k, k)),
            "variance": np.zeros(1),
        }
        return with_heads(server, heads).with_part(STATE, state)

    def with_solved_gram(self, server: ServerState, released: AnyArray) -> ServerState:
        """B that belongs to the noisy sum."""
        state = server.parts[STATE]
        axes = read_axes(server.heads)
        basis = None
        if self.codes is not None:
            basis = build_feature_basis(self.codes, state["liked"], axes)
        variance = read_scalar(state, "variance")
        smooth = fit_denoising_matrix(state["gram"], axes.centre, variance**0.5, basis)
        n_items = len(server.items)
        heads = {
            "weights": solve_input_weights(smooth, axes.scale),
            "known": np.array([n_items], np.int32),
            "released": released,
        }
        for name, value in self.fixed_settings.items():
            heads[name] = make_scalar(value)
        return with_heads(server, heads)

    @property
    def n_validation_candidates(self) -> int:
        return 1  # validation chooses nothing

    def with_next_trial(self, server: ServerState) -> ServerState:
        return server

    def read_popularity(self, server: ServerState) -> Floats:
        state = server.parts.get(STATE, {})
        noisy = state.get("liked", np.zeros(0))
        liked = np.maximum(noisy, 0.0)
        return pad_to_catalogue(liked, server)

    def measure_similarity_to_item(self, server: ServerState, items: Floats, item: int) -> Floats:
        """The weight of every item for this one: its column of B, which is between the inputs; 0 for other items."""
        inputs = server.heads["inputs"]
        weights = server.heads["weights"]
        likeness = np.zeros(len(server.items), np.float32)
        places = np.flatnonzero(inputs == item)
        if len(places) and len(weights):
            column = places[0]
            likeness[inputs] = weights[:, column]
        return likeness

    def promises(self, server: ServerState) -> dict[str, float]:
        """What a user lost who took part in every block; who retracted lost more, which their own ledger says."""
        state = server.parts.get(STATE, {})
        budget = self.budget
        n_blocks = min(server.block + 1, budget.blocks)
        n_draws = state.get("drawn", np.ones(1))
        n_inputs = len(server.heads["inputs"])
        return {
            "epsilon": budget.compute_spent_epsilon(n_blocks),
            "epsilon_planned": budget.epsilon,
            "delta": budget.delta,
            "blocks_planned": float(budget.blocks),
            "items_told_of": float(n_inputs),
            "noise_draws_in_a_sum": float(n_draws[0]),
        }

    # retraction: the difference has noise of its own, so that two releases do not show it

    @property
    def retracts_exactly(self) -> bool:
        return False

    def apply_retraction(self, server: ServerState, change: FieldSums) -> tuple[ServerState, int]:
        terms = self.compute_faded_sums(server, change, "retraction")
        state = {**server.parts[STATE], **terms}
        last = read_last_release(server.heads)
        released = count_released_block(server.heads, last)
        changed = server.with_part(STATE, state)
        return self.with_solved_gram(changed, released), 0

    def describe_retraction(self) -> RetractionCaveats:
        budget = self.budget
        more = budget.compute_spent_epsilon(budget.blocks, 1)
        return RetractionCaveats(
            assumptions=(
                "the sum had noise before and has more now, so no comparison with training again is exact",
                "which items are told of, their scales and their popularity stay as they were chosen, with noise",
                f"a retraction is a release of its own and is charged: who told in all {budget.blocks} planned "
                f"blocks and retracts once has spent epsilon {more:.3g} at delta {budget.delta:g}",
            ),
            residual_risk="What was told before stays protected by the budget it was told under, not erased from "
            "copies of earlier models.",
        )

    def retrain_from_lists(self, server: ServerState, block_lists: BlockLists) -> ServerState:
        """The sum of these lists in the same terms, with noise of its own as large as the noise of the sum now."""
        heads = server.heads
        state = server.parts[STATE]
        last = read_last_release(heads)
        gram = np.zeros_like(state["gram"])
        for block, lists in enumerate(block_lists[: last + 1]):
            counted = self.select_counted_items(lists)
            vectors = build_term_vectors(counted, heads)
            fade = self.config.decay ** (last - block)
            gram += fade * (vectors.T @ vectors)
        draws = Draws(read_release_count(heads))
        stream = NoiseStream(draws, "tally trained again")
        variance = read_scalar(state, "variance")
        noise = draw_symmetric_noise(stream, variance**0.5, len(gram))
        retrained = server.with_part(STATE, {**state, "gram": gram + noise})
        return self.with_solved_gram(retrained, heads["released"])

    def simulate_release(self, server: ServerState, lists: Ragged, draws: Draws) -> ServerState:
        """The server after a first block of these users and no others, with the noise of these draws."""
        n_users = len(lists)
        user_ptr = make_single_user_ptr(n_users)
        for question in (SURVEY, STATISTIC):
            fields = self.list_statistic_fields(server, question)
            forms = self.encode_lists(lists, user_ptr, server.heads, question)
            exact = sum_forms(forms, n_users, fields)
            total = self.add_noise(server, exact, question, draws)
            server = self.learn_from_sums(server, total, question)
        return server


def count_noise_draws(sums: FieldSums) -> float:
    """How many draws of noise are in a sum; at least one."""
    n_draws = read_scalar(sums, "draws")
    return max(1.0, n_draws)


def count_released_block(heads: Arrays, block: int) -> Ints:
    """The block as the last one that was released, and one release more."""
    n_releases = read_release_count(heads) + 1
    return np.array([block, n_releases], np.int32)


def multiply_lists(lists: Ragged, view: CohortView, recency: float, matrix: Floats) -> Floats:
    """(users, k) what lists score through a matrix between the inputs, older items counting less."""
    weight = compute_recency_weights(lists, recency)
    return multiply_weighted_lists(lists, weight, view, matrix)


def multiply_weighted_lists(lists: Ragged, weight: Floats, view: CohortView, matrix: Floats) -> Floats:
    """The same with a weight for every entry."""
    k = len(matrix)
    inputs = view.heads["inputs"]
    row_of = np.full(view.n_items, -1, np.int32)
    row_of[inputs] = np.arange(k)
    shape = (len(view.user), k)
    scores = np.zeros(shape, np.float32)
    add_dense_products(lists.ptr, lists.ids, weight, row_of, matrix, scores)
    return scores
