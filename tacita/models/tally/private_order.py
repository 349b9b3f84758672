"""tally-order under a budget: terms and what follows what in one release, together no longer than 1.

A user's term c c^T has length 1, and so has T, which says of every item what came before it in the block, among the
items that terms are about. With `order_share` w, (sqrt(1 - w) c c^T, sqrt(w) T) has length 1 at most, and noise falls
on all of it at once: one release, charged once. Said without the roots: the noise on terms grows by 1 / sqrt(1 - w),
that on T is 1 / sqrt(w) times what it would be alone. With w = 0 order is not released and costs nothing.

The share and the mixture are constants, chosen on MovieLens-1M's validation part, as those in private_math.py are: what
validation would choose on the data at hand is outside of any budget.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.messages import QUANTUM, SequenceTerms, Spec, Total
from tacita.models.base import BackboneConfig, has_expected_heads, read_scalar, register_private
from tacita.models.statistic_model import BlockLists, Fields, FieldSums, Forms
from tacita.models.tally.budgeted_release import TAIL, order_by_client, read_last_release, read_release_count
from tacita.models.tally.head_checks import MOST_WEIGHT, is_bounded, private_heads_fit, square_fits
from tacita.models.tally.mixing import MixedScores, mix_fits
from tacita.models.tally.model import with_heads
from tacita.models.tally.options import STATE, SURVEY, OrderConfig, is_set
from tacita.models.tally.order import choose_age_weights, select_recent_line
from tacita.models.tally.order_sums import NEXT
from tacita.models.tally.pair_statistic import list_user_clients
from tacita.models.tally.private_math import (
    MIN_DEVIATION_STEPS,
    draw_whole_noise,
    find_noise_edge,
    locate_inputs,
    shrink_values,
)
from tacita.models.tally.private_tally import PrivateTally, count_noise_draws, multiply_lists, multiply_weighted_lists
from tacita.models.tally.weights import count_entry_ages
from tacita.privacy.noise import NoiseStream

FOLD = 2.0  # order_fold = "auto": few places back, of which noise leaves more to see
RECENCY = 5.0  # for "learn", which would read private data
MIX = (0.0, 1.0, 0.0)  # the same
MIX_WITH_ORDER = (0.2, 0.5, 0.3)
FOLLOWING, FOLLOWING_VARIANCE = "following", "following_variance"  # on the server: the noisy sum of T, and its noise


@register_private
class PrivateOrderedTally(PrivateTally):
    """Linear model of what goes together and of what follows, from one noisy sum."""

    name = "tally-order"
    Config: ClassVar[type[BackboneConfig]] = OrderConfig
    reads_order = True
    config: OrderConfig

    def __init__(self, config: OrderConfig, privacy: PrivacyConfig, codes: Floats | None = None) -> None:
        super().__init__(config, privacy, codes)
        self.age_weights = choose_age_weights(config, FOLD)
        self.order_share = config.order_share
        if is_set(config, "order_ridge"):
            raise TacitaError("backbone.order_ridge has no meaning under privacy.epsilon; leave one of the two out.")
        weighs_order = config.mix != "learn" and config.mix[2] > 0
        if weighs_order and not self.order_share:
            raise TacitaError(
                "backbone.mix weighs order, of which backbone.order_share = 0 tells nothing under privacy.epsilon; set "
                "backbone.order_share, e.g. to 0.25."
            )

    @property
    def fixed_mix(self) -> tuple[float, ...]:
        if self.config.mix != "learn":
            return tuple(self.config.mix)
        return MIX_WITH_ORDER if self.order_share else MIX

    @property
    def fixed_settings(self) -> dict[str, float]:
        settings = super().fixed_settings
        if self.config.recency == "learn":
            settings["recency"] = RECENCY
        return settings

    @property
    def share_of_budget_for_terms(self) -> float:
        return 1.0 - self.order_share

    def init_heads(self, draws: Draws) -> Arrays:
        return {
            **super().init_heads(draws),
            "order_weights": np.zeros((0, 0), np.float32),
            "mix": np.array(self.fixed_mix, np.float32),
        }

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if not has_expected_heads(heads, own):
            return False
        if not mix_fits(heads["mix"]):
            return False
        weights = heads["order_weights"]
        if not square_fits(weights, heads["inputs"].size):
            return False
        if not is_bounded(weights, MOST_WEIGHT):
            return False
        return private_heads_fit(heads, n_items, self.config.most_inputs)

    # on the device

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> Forms:
        forms = super().encode_lists(lists, user_ptr, heads, question)
        if question == SURVEY or not self.order_share:
            return forms
        line = map_to_inputs(lists, heads["inputs"])
        factor = compute_unit_factors(line.counts(), self.age_weights)
        client = list_user_clients(user_ptr)
        forms[NEXT] = self._encode_order(client, line, factor, heads)
        return forms

    def _encode_order(self, client: AnyArray, line: Ragged, factor: Doubles, heads: Arrays) -> SequenceTerms:
        start = np.zeros(len(line), np.int64)
        k = len(heads["inputs"])
        return SequenceTerms(client, line, start, factor, self.age_weights, k, "next")

    def encode_retraction(self, view: CohortView, old_lists: BlockLists, new_lists: BlockLists) -> Forms:
        forms = super().encode_retraction(view, old_lists, new_lists)
        if not self.order_share:
            return forms
        changes = self.list_changes(view, old_lists, new_lists)
        lines = [Ragged.empty(0)]
        factors = [np.zeros(0)]
        for change in changes:
            length = self.config.decay**change.age
            line = map_to_inputs(change.lists, view.heads["inputs"])
            factor = compute_unit_factors(line.counts(), self.age_weights, length)
            lines.append(line)
            factors.append(change.sign * factor)
        owner, order = order_by_client(view, len(changes))
        sorted_lines = _concatenate_lists(lines).take(order)
        sorted_factors = np.concatenate(factors)[order]
        forms[NEXT] = self._encode_order(owner, sorted_lines, sorted_factors, view.heads)
        return forms

    def score_inputs(self, view: CohortView) -> Floats:
        """The mixture of standardised scores, in the terms of the first of them."""
        heads = view.heads
        weights = heads["weights"]
        recency = read_scalar(heads, "recency")
        whole, recent, order = heads["mix"].tolist()
        latest = self.select_latest_items(view)
        is_mixed = whole > 0 and recent > 0
        if order == 0 and not is_mixed:
            used_recency = recency if recent else 0.0
            return multiply_lists(latest, view, used_recency, weights)
        recent_scores = multiply_lists(latest, view, recency, weights)
        whole_scores = multiply_lists(latest, view, 0.0, weights)
        mixture = MixedScores(np.zeros_like(recent_scores))
        mixture.add(recent, recent_scores)
        mixture.add(whole, whole_scores)
        mixture.add_order(order, self._score_order(view))
        assert mixture.spread is not None
        scores = mixture.scores * mixture.spread[:, None]
        return np.asarray(scores, np.float32)

    def _score_order(self, view: CohortView) -> Floats:
        """(users, k) scores by what came last."""
        line = select_recent_line(view, self.config.order_window)
        ages = count_entry_ages(line)
        weight = self.age_weights[ages].astype(np.float32)
        matrix = view.heads["order_weights"]
        return multiply_weighted_lists(line, weight, view, matrix)

    # how much noise

    def compute_order_deviation(self, server: ServerState, question: str) -> float:
        """Of the noise on what follows what."""
        release_share = self.find_release_share(server.heads, question)
        share = self.order_share * release_share
        length = self.bound_term_length(server, question)
        return self.budget.compute_deviation(share, length)

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        sums = super().add_term_noise(server, total, question, stream)
        if not self.order_share:
            return sums
        k = len(server.heads["inputs"])
        least = MIN_DEVIATION_STEPS * QUANTUM
        deviation = self.compute_order_deviation(server, question)
        noise = _draw_square_noise(stream, max(deviation, least), k)
        following = total[NEXT] + noise
        return {**sums, NEXT: following}

    # on the server

    def list_term_fields(self, server: ServerState, question: str) -> Fields:
        fields = super().list_term_fields(server, question)
        if not self.order_share:
            return fields
        k = len(server.heads["inputs"])
        length = self.bound_term_length(server, question)
        deviation = self.compute_order_deviation(server, question)
        most = length + TAIL * deviation
        about = "which item follows which, with noise"
        following = Spec(NEXT, (k, k), most=most, exact=True, about=about)
        return *fields, following

    def compute_faded_sums(self, server: ServerState, sums: FieldSums, question: str, fade: float = 1.0) -> Arrays:
        terms = super().compute_faded_sums(server, sums, question, fade)
        if not self.order_share:
            return terms
        state = server.parts[STATE]
        added = sums[NEXT]
        following = state.get(FOLLOWING, np.zeros_like(added))
        variance = state.get(FOLLOWING_VARIANCE, np.zeros(1))
        deviation = self.compute_order_deviation(server, question)
        added_variance = count_noise_draws(sums) * deviation**2
        terms[FOLLOWING] = fade * following + added
        terms[FOLLOWING_VARIANCE] = fade**2 * variance + added_variance
        return terms

    def with_solved_gram(self, server: ServerState, released: AnyArray) -> ServerState:
        solved = super().with_solved_gram(server, released)
        heads = {"mix": np.array(self.fixed_mix, np.float32)}
        if self.order_share:
            state = server.parts[STATE]
            variance = read_scalar(state, FOLLOWING_VARIANCE)
            heads["order_weights"] = denoise_order(state[FOLLOWING], variance**0.5)
        return with_heads(solved, heads)

    def retrain_from_lists(self, server: ServerState, block_lists: BlockLists) -> ServerState:
        if not self.order_share:
            return super().retrain_from_lists(server, block_lists)
        heads = server.heads
        state = server.parts[STATE]
        k = len(heads["inputs"])
        last = read_last_release(heads)
        following = np.zeros((k, k))
        no_counts = np.zeros(0)
        one_client = np.ones(1)
        for block, lists in enumerate(block_lists[: last + 1]):
            counted = self.select_counted_items(lists)
            line = map_to_inputs(counted, heads["inputs"])
            length = self.config.decay ** (last - block)
            factor = compute_unit_factors(line.counts(), self.age_weights, length)
            client = np.zeros(len(line), np.int32)
            terms = self._encode_order(client, line, factor, heads)
            terms.add_to(following, no_counts, one_client)
        draws = Draws(read_release_count(heads))
        stream = NoiseStream(draws, "tally-order trained again")
        variance = read_scalar(state, FOLLOWING_VARIANCE)
        following += _draw_square_noise(stream, variance**0.5, k)
        changed = server.with_part(STATE, {**state, FOLLOWING: following})
        return super().retrain_from_lists(changed, block_lists)

    def promises(self, server: ServerState) -> dict[str, float]:
        promises = super().promises(server)
        return {**promises, "order_share": self.order_share}


def _concatenate_lists(lines: list[Ragged]) -> Ragged:
    """All lists, one after the other."""
    ids = np.concatenate([line.ids for line in lines])
    counts = np.concatenate([line.counts() for line in lines])
    ptr = np.append(0, np.cumsum(counts))
    return Ragged(ptr, ids)


def _draw_square_noise(stream: NoiseStream, deviation: float, k: int) -> Doubles:
    noise = draw_whole_noise(stream, deviation, QUANTUM, k * k)
    return noise.reshape(k, k)


def map_to_inputs(lists: Ragged, inputs: AnyArray) -> Ragged:
    """Lists of places among the inputs, in their order, none twice: a repeated item would make T longer than 1."""
    place, is_input = locate_inputs(lists, inputs)
    places = Ragged(lists.ptr, place.astype(np.int32))
    known = places.filter_entries(is_input)
    width = max(1, len(inputs))
    keys = known.number_entries(width)
    _, first = np.unique(keys, return_index=True)
    is_first = np.zeros(len(known.ids), bool)
    is_first[first] = True
    return known.filter_entries(is_first)


def compute_unit_factors(counts: Longs, age_weights: Doubles, length: float = 1.0) -> Doubles:
    """What T of a list is multiplied by to have the given length, and never more when its entries are rounded.

    In a list without repeats no two entries of T fall on the same pair, so its length is a matter of how many there
    are, and rounding moves each entry by half a quantum at most.
    """
    longest = int(counts.max(initial=0))
    places = np.arange(longest + 1)
    n_before = np.minimum(places, len(age_weights))
    square_sums = _accumulate_sums(age_weights**2)
    context_squares = square_sums[n_before]  # of h, squared, by how many come before
    squares = _accumulate_sums(context_squares)[counts]
    entries = _accumulate_sums(n_before)[counts]
    rounding = QUANTUM / 2 * np.sqrt(entries)
    room = length * (1 - 1e-9) - rounding
    size = np.sqrt(np.maximum(squares, 1e-300))
    factors = np.maximum(room, 0.0) / size
    has_entries = squares > 0
    return np.where(has_entries, factors, 0.0)


def _accumulate_sums(values: AnyArray) -> Doubles:
    """The sum of the first 0, 1, 2, ... values."""
    sums = np.cumsum(values)
    return np.append(0.0, sums)


def denoise_order(following: Doubles, deviation: float) -> Floats:
    """B': T without what noise puts on its singular values."""
    row_vectors, values, column_vectors = np.linalg.svd(following)
    edge = find_noise_edge(deviation, len(following))
    signal = shrink_values(values, edge)
    denoised = (row_vectors * signal) @ column_vectors
    return np.asarray(denoised, np.float32)
