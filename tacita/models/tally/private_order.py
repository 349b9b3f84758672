"""tally-order under a budget: terms and what follows what in one release, together no longer than 1.

A person's term c c^T has length 1, and so has T, which says of every item what came before it in the block, among the
items that terms are about. With `order_share` w, (sqrt(1 - w) c c^T, sqrt(w) T) has length 1 at most, and noise falls
on all of it at once: one release, charged once. Said without the roots: the noise on terms grows by 1 / sqrt(1 - w),
that on T is 1 / sqrt(w) times what it would be alone. With w = 0 nothing is told of order and nothing is spent on it.

The share and the mixture are constants, chosen on MovieLens-1M's validation part, as those in noised.py are: what
validation would choose on the data at hand is outside of any budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.messages import QUANTUM, Form, SequenceTerms, Spec, Total
from tacita.models.base import BackboneConfig, register_private
from tacita.models.tally.model import MOST_WEIGHT, STATE, SURVEY
from tacita.models.tally.order import OrderConfig, standardise
from tacita.models.tally.order_sums import NEXT, compute_age_weights, select_latest_entries
from tacita.models.tally.private_math import MIN_DEVIATION_STEPS, draw_whole_noise, shrink_values
from tacita.models.tally.private_tally import (
    TAIL,
    PrivateTally,
    expand_clients,
    multiply_lists,
    multiply_weighted_lists,
)
from tacita.privacy.noise import NoiseStream

FOLD = 2.0  # order_fold = "auto": few places back, of which noise leaves more to see
RECENCY, MIX, MIX_WITH_ORDER = 5.0, (0.0, 1.0, 0.0), (0.2, 0.5, 0.3)  # for "learn", which would read private data
FOLLOWING, FOLLOWING_VARIANCE = "following", "following_variance"  # on the server: the noised sum of T, and its noise


@register_private
class PrivateOrderedTally(PrivateTally):
    """Linear model of what goes together and of what follows, from one noised sum."""

    name = "tally-order"
    Config: ClassVar[type[BackboneConfig]] = OrderConfig
    reads_order = True
    config: OrderConfig

    def __init__(self, config: OrderConfig, privacy: PrivacyConfig, codes: Floats | None = None) -> None:
        super().__init__(config, privacy, codes)
        self.age_weights = compute_age_weights(
            FOLD if config.order_fold == "auto" else config.order_fold, config.order_window
        )
        self.order_share = config.order_share
        if config.order_ridge != OrderConfig.model_fields["order_ridge"].default:
            raise TacitaError("backbone.order_ridge has no meaning under privacy.epsilon; leave one of the two out.")
        if config.mix != "learn" and config.mix[2] and not self.order_share:
            raise TacitaError(
                "backbone.mix weighs order, of which backbone.order_share = 0 tells nothing under privacy.epsilon; set "
                "backbone.order_share, e.g. to 0.25."
            )

    @property
    def mix(self) -> tuple[float, ...]:
        if self.config.mix != "learn":
            return tuple(self.config.mix)
        return MIX_WITH_ORDER if self.order_share else MIX

    @property
    def fixed_settings(self) -> dict[str, float]:
        return {**super().fixed_settings, **({"recency": RECENCY} if self.config.recency == "learn" else {})}

    @property
    def term_share(self) -> float:
        return 1.0 - self.order_share

    def init_heads(self, draws: Draws) -> Arrays:
        own = {"order_weights": np.zeros((0, 0), np.float32), "mix": np.array(self.mix, np.float32)}
        return {**super().init_heads(draws), **own}

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if heads.keys() != own.keys() or any(heads[name].dtype != v.dtype for name, v in own.items()):
            return False
        mix, weights, k = heads["mix"], heads["order_weights"], heads["inputs"].size
        sized = mix.shape == (3,) and weights.shape in ((0, 0), (k, k))
        if not (sized and ((mix >= 0) & (mix <= 1)).all() and (np.abs(weights) <= MOST_WEIGHT).all()):
            return False
        plain = PrivateTally(self.config, self.privacy, self.codes)
        return plain.heads_fit({name: heads[name] for name in plain.init_heads(Draws(0))}, n_items)

    # on the device

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> dict[str, Form]:
        told = super().encode_lists(lists, user_ptr, heads, question)
        if question == SURVEY or not self.order_share:
            return told
        line = map_to_inputs(lists, heads["inputs"])
        factor = compute_unit_factors(line.counts(), self.age_weights)
        return {**told, NEXT: self._encode_order(expand_clients(user_ptr), line, factor, heads)}

    def _encode_order(self, client: AnyArray, line: Ragged, factor: Doubles, heads: Arrays) -> SequenceTerms:
        start = np.zeros(len(line), np.int64)
        return SequenceTerms(client, line, start, factor, self.age_weights, len(heads["inputs"]), "next")

    def encode_retraction(self, view: CohortView, old_lists: list[Ragged], new_lists: list[Ragged]) -> dict[str, Form]:
        out = super().encode_retraction(view, old_lists, new_lists)
        if not self.order_share:
            return out
        client, last = expand_clients(view.user_ptr), int(view.heads["released"][0])
        n = len(client)
        lines, factors, owners = [Ragged.empty(0)], [np.zeros(0)], [client[:0]]
        for block, both in enumerate(zip(old_lists, new_lists, strict=True)):
            length = self.config.decay ** max(0, last - block)
            for sign, lists in zip((-1.0, 1.0), both, strict=True):
                line = map_to_inputs(self.select_counted(lists).join_rows(Ragged.empty(n)), view.heads["inputs"])
                lines.append(line)
                factors.append(sign * compute_unit_factors(line.counts(), self.age_weights, length))
                owners.append(client)
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        ids, counts = np.concatenate([one.ids for one in lines]), np.concatenate([one.counts() for one in lines])
        line = Ragged(np.append(0, np.cumsum(counts)), ids).take(order)
        return {**out, NEXT: self._encode_order(owner[order], line, np.concatenate(factors)[order], view.heads)}

    def score_inputs(self, view: CohortView) -> Floats:
        """The mixture of standardised scores, in the terms of the first of them."""
        whole, recent, order = (float(w) for w in view.heads["mix"])
        recency = float(view.heads["recency"][0])
        if order == 0 and (whole == 0 or recent == 0):
            return multiply_lists(self.select_latest(view), view, recency if recent else 0.0, view.heads["weights"])
        known = view.train if view.history is None else view.history.join_rows(view.train)
        line = select_latest_entries(known.sort_by_time(), self.config.order_window)
        age = np.repeat(line.ptr[1:], line.counts()) - 1 - np.arange(len(line.ids))
        last = multiply_weighted_lists(
            line, self.age_weights[age].astype(np.float32), view, view.heads["order_weights"]
        )
        out, spread = np.zeros((len(view.user), len(view.heads["inputs"])), np.float32), None
        for weight, fold in ((recent, recency), (whole, 0.0)):
            one = multiply_lists(self.select_latest(view), view, fold, view.heads["weights"])
            deviation = standardise(one)
            spread = deviation if spread is None else spread
            out += np.float32(weight) * one
        standardise(last)
        assert spread is not None
        return np.asarray((out + np.float32(order) * last) * spread[:, None], np.float32)

    # in the sum, before anybody sees it

    def order_deviation(self, server: ServerState, question: str) -> float:
        """Of the noise on what follows what."""
        share = self.order_share * self.release_share(server.heads, question)
        return self.budget.deviation(share, self.bound_term_length(server, question))

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        made = super().add_term_noise(server, total, question, stream)
        if not self.order_share:
            return made
        k = len(server.heads["inputs"])
        noise = draw_whole_noise(
            stream, max(self.order_deviation(server, question), MIN_DEVIATION_STEPS * QUANTUM), QUANTUM, k * k
        )
        return {**made, NEXT: total[NEXT] + noise.reshape(k, k)}

    # on the server

    def term_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        fields = super().term_fields(server, question)
        if not self.order_share:
            return fields
        k = len(server.heads["inputs"])
        most = self.bound_term_length(server, question) + TAIL * self.order_deviation(server, question)
        return *fields, Spec(NEXT, (k, k), most=most, exact=True, about="which item follows which, with noise")

    def add_terms(self, server: ServerState, sums: Mapping[str, AnyArray], question: str, fade: float = 1.0) -> Arrays:
        made = super().add_terms(server, sums, question, fade)
        if not self.order_share:
            return made
        held, drawn = server.parts[STATE], max(1.0, float(sums["draws"][0]))
        before = held.get(FOLLOWING, np.zeros_like(sums[NEXT])), held.get(FOLLOWING_VARIANCE, np.zeros(1))
        variance = drawn * self.order_deviation(server, question) ** 2
        return {**made, FOLLOWING: fade * before[0] + sums[NEXT], FOLLOWING_VARIANCE: fade**2 * before[1] + variance}

    def solve_gram(self, server: ServerState, released: AnyArray) -> ServerState:
        made = super().solve_gram(server, released)
        heads = {**made.heads, "mix": np.array(self.mix, np.float32)}
        if self.order_share:
            held = server.parts[STATE]
            heads["order_weights"] = denoise_order(held[FOLLOWING], float(held[FOLLOWING_VARIANCE][0]) ** 0.5)
        return replace(made, heads=heads)

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        if not self.order_share:
            return super().retrain_from(server, block_lists)
        heads, last, held = server.heads, int(server.heads["released"][0]), server.parts[STATE]
        k = len(heads["inputs"])
        following = np.zeros((k, k))
        for block, lists in enumerate(block_lists[: last + 1]):
            line = map_to_inputs(self.select_counted(lists), heads["inputs"])
            factor = compute_unit_factors(line.counts(), self.age_weights, self.config.decay ** (last - block))
            one = self._encode_order(np.zeros(len(line), np.int32), line, factor, heads)
            one.add_to(following, np.zeros(0), np.ones(1))
        stream = NoiseStream(Draws(int(heads["released"][1])), "tally-order trained again")
        following += draw_whole_noise(stream, float(held[FOLLOWING_VARIANCE][0]) ** 0.5, QUANTUM, k * k).reshape(k, k)
        return super().retrain_from(server.with_part(STATE, {**held, FOLLOWING: following}), block_lists)

    def promises(self, server: ServerState) -> dict[str, float]:
        return {**super().promises(server), "order_share": self.order_share}


def map_to_inputs(lists: Ragged, inputs: AnyArray) -> Ragged:
    """Lists of places among the inputs, in their order, none twice: what is told twice would be longer than 1."""
    place = np.searchsorted(inputs, lists.ids)
    known = np.append(inputs, -1)[place] == lists.ids
    found = Ragged(lists.ptr, place.astype(np.int32)).filter_entries(known)
    first = np.unique(found.rows().astype(np.int64) * max(1, len(inputs)) + found.ids, return_index=True)[1]
    once = np.zeros(len(found.ids), bool)
    once[first] = True
    return found.filter_entries(once)


def compute_unit_factors(counts: Longs, fall: Doubles, length: float = 1.0) -> Doubles:
    """What T of a list is multiplied by to have the given length, and never more when its entries are rounded.

    In a list without repeats no two entries of T fall on the same pair, so its length is a matter of how many there
    are, and rounding moves each entry by half a quantum at most.
    """
    before = np.minimum(np.arange(int(counts.max(initial=0)) + 1), len(fall))
    each = np.append(0.0, np.cumsum(fall**2))[before]  # of h, squared, by how many come before
    squares, entries = (np.append(0.0, np.cumsum(one))[counts] for one in (each, before))
    room = length * (1 - 1e-9) - QUANTUM / 2 * np.sqrt(entries)
    return np.asarray(np.where(squares > 0, np.maximum(room, 0.0) / np.sqrt(np.maximum(squares, 1e-300)), 0.0))


def denoise_order(following: Doubles, deviation: float) -> Floats:
    """B': T without what noise puts on its singular values."""
    left, values, right = np.linalg.svd(following)
    kept = shrink_values(values, 2 * deviation * math.sqrt(len(following)))
    return np.asarray((left * kept) @ right, np.float32)
