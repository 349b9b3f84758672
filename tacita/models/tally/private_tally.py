"""tally under a budget: the same exchange with terms of length 1, noise inside the sum, and B from what can be seen.

In the first block two questions are asked: which items people like (noised popularity, which chooses the items that
terms are about, their scales and the direction that is taken out), then the terms. Later blocks tell terms of the same
items. Every release is charged to who takes part before it leaves (learn/statistic.py); who has nothing left is not
asked any more and goes on being served. What validation or counts of people would decide is fixed: see `fixed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.kernels.pairs import dense_products
from tacita.messages import DenseArrays, Form, OuterProducts, SparseRows, Spec, Total, Upload, add_upload, empty_total
from tacita.models.base import register_private
from tacita.models.tally.model import MOST_WEIGHT, STATE, STATISTIC, SURVEY, Tally, TallyConfig
from tacita.models.tally.private_math import (
    GRID,
    MOST_PEOPLE,
    PEOPLE_SHARE,
    POPULARITY_GRID,
    POPULARITY_SHARE,
    SQUARE_ROOT_2,
    TallyBudget,
    TermAxes,
    build_feature_basis,
    choose_axes,
    choose_n_inputs,
    draw_symmetric_noise,
    draw_whole_noise,
    fit_smoother,
    scale_outside_popularity,
    solve_weights,
    unit_likes,
    unit_vectors,
)
from tacita.models.tally.weights import recency_weights
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import EARLIER_RUNS, Ledger
from tacita.privacy.noise import MAX_SIGMA, NoiseStream

POPULARITY_RELEASE, TERMS_RELEASE, RETRACTION_RELEASE = (
    "which items people like",
    "which items go together",
    "what is taken back",
)  # releases
TAIL = 12.0  # deviations of noise that a sum may be off by; chance gives as much less than once in 10^32
LARGEST_S = 200.0  # of noise off the diagonal; people would have to be millions
RECENCY, REPEAT = 0.0, 0.0  # in place of "learn", which would read private data
NO_MEANING = ("ridge", "ridge_popularity", "length_power", "min_pair")
"""Settings of plain tally that a budget has no use for."""
NO_EFFECT = ("min_item", "keep")
"""Settings with a default that cut nothing under a budget: nobody may think that theirs do."""


@register_private
class PrivateTally(Tally):
    """Linear item-item model from a noised sum of users' terms."""

    def __init__(self, config: TallyConfig, privacy: PrivacyConfig, codes: Floats | None = None) -> None:
        super().__init__(config)
        assert privacy.epsilon is not None
        self.privacy = privacy
        self.budget = TallyBudget(privacy.epsilon, privacy.delta, max(1, privacy.blocks))
        self.codes = codes
        if config.solve != "ridge":
            raise TacitaError(
                f"backbone.solve = '{config.solve}' has no form under privacy.epsilon: noise falls on every pair of "
                "items, so the noised sum is about few of them, and is filtered by its eigenvalues already; leave one "
                "of the two out."
            )
        for name in NO_MEANING:
            if getattr(config, name) != TallyConfig.model_fields[name].default:
                raise TacitaError(f"backbone.{name} has no meaning under privacy.epsilon; leave one of the two out.")
        for name in NO_EFFECT:
            if getattr(config, name) not in (0, TallyConfig.model_fields[name].default):
                raise TacitaError(
                    f"backbone.{name} cuts nothing under privacy.epsilon, where noise decides what is kept; leave one "
                    "of the two out."
                )
        if self.budget.mu2 <= 0 or self.budget.matrix_deviation(1.0) > LARGEST_S:
            raise TacitaError(
                f"privacy.epsilon = {privacy.epsilon} over {self.budget.blocks} blocks leaves nothing but noise; raise "
                "privacy.epsilon or lower privacy.blocks."
            )
        fading = float((config.decay ** np.arange(self.budget.blocks)).sum())  # what somebody told in all blocks
        part = 1.0 - float(getattr(config, "order_share", 0.0))
        widest = max(
            self.budget.matrix_deviation(part * self.budget.term_share(True)),
            self.budget.matrix_deviation(part, SQUARE_ROOT_2 * fading),
        )
        if SQUARE_ROOT_2 * widest / GRID**2 >= MAX_SIGMA:
            raise TacitaError(
                f"privacy.epsilon = {privacy.epsilon} over {self.budget.blocks} blocks needs more noise than can be "
                "drawn when somebody takes back what they told in all of them; raise privacy.epsilon, or lower "
                "privacy.blocks or backbone.decay."
            )

    def with_features(self, codes: Floats) -> PrivateTally:
        """The same model with public features of all items."""
        return type(self)(self.config, self.privacy, codes)

    @property
    def wants_features(self) -> bool:
        return self.privacy.features

    @property
    def fixed_settings(self) -> dict[str, float]:
        """What plain tally learns from private data, and this one does not."""
        recency, repeat = self.config.recency, self.config.repeat
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
            "released": np.array([-1, 0], np.int32),  # the last block that was told, and releases so far
        }

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if heads.keys() != own.keys() or any(heads[name].dtype != v.dtype for name, v in own.items()):
            return False
        small = all(heads[name].shape == own[name].shape for name in ("known", "recency", "repeat", "released"))
        inputs, k = heads["inputs"], heads["inputs"].size
        if not small or any(heads[name].size for name in ("column", "ptr")):
            return False
        if any(heads[name].shape != (k,) for name in ("inputs", "scale", "centre")):
            return False
        inside = k <= min(n_items, self.config.most_inputs) and (k == 0 or 0 <= inputs[0] <= inputs[-1] < n_items)
        mild = heads["recency"][0] >= 0 and abs(heads["repeat"][0]) <= 10 and heads["released"][1] >= 0
        sized = heads["weights"].shape in ((0, 0), (k, k)) and heads["liked"].ndim == 1
        if not (inside and mild and sized and heads["liked"].size <= n_items):
            return False
        numbers = (heads[name] for name in ("weights", "scale", "centre", "liked"))
        length = float(np.linalg.norm(heads["centre"]))
        return (
            bool((np.diff(inputs.astype(np.int64)) > 0).all())
            and all(bool((np.abs(v) <= MOST_WEIGHT).all()) for v in numbers)
            and (k == 0 or abs(length - 1) < 1e-6)
        )

    def check(self, first_items: int, all_items: int) -> None:
        """The work grows with the people, not with the catalogue, and ends at `most_inputs`: any fits."""

    # on the device

    def encode_statistic(self, view: CohortView, question: str) -> dict[str, Form]:
        return self.encode_lists(self.select_counted(view.train), view.user_ptr, view.heads, question)

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> dict[str, Form]:
        """Of each list x / |x| and that somebody is there; or its term."""
        client = expand_clients(user_ptr)
        if question == SURVEY:
            there = np.zeros((len(user_ptr) - 1, 1))
            np.add.at(there, client, (lists.counts() > 0)[:, None])
            return {
                "liked": SparseRows(client[lists.rows()], lists.ids, unit_likes(lists)),
                "people": DenseArrays(there),
            }
        return {"terms": OuterProducts(client, _term_vectors(lists, heads), np.ones(len(lists)))}

    def sum_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        raise TacitaError(f"backbone '{self.name}' under privacy.epsilon makes no sum without noise.")

    def encode_retraction(self, view: CohortView, old_lists: list[Ragged], new_lists: list[Ragged]) -> dict[str, Form]:
        """What people take back of all blocks together, as far as it has not faded, and what they say again."""
        client, last = expand_clients(view.user_ptr), int(view.heads["released"][0])
        vectors, signs, owners = [np.zeros((0, len(view.heads["inputs"])))], [np.zeros(0)], [client[:0]]
        for block, both in enumerate(zip(old_lists, new_lists, strict=True)):
            length = self.config.decay ** (max(0, last - block) / 2)
            for sign, lists in zip((-1.0, 1.0), both, strict=True):
                vectors.append(_term_vectors(self.select_counted(lists), view.heads, length))
                signs.append(np.full(len(lists), sign))
                owners.append(client)
        order = np.argsort(np.concatenate(owners), kind="stable")
        return {
            "terms": OuterProducts(
                np.concatenate(owners)[order], np.concatenate(vectors)[order], np.concatenate(signs)[order]
            )
        }

    def score_history(self, view: CohortView) -> Floats:
        """x B among the inputs; below all of them the other items, by popularity."""
        heads = view.heads
        scores = np.zeros((len(view.user), view.n_items), np.float32)
        inputs = heads["inputs"]
        if len(heads["weights"]) == 0:
            return scores
        found, latest = self.score_inputs(view), self.select_latest(view)
        liked = np.zeros(view.n_items, np.float32)
        liked[: len(heads["liked"])] = heads["liked"]
        some = latest.counts() > 0  # of whom nothing is known, nothing is said
        scores[some] = (found.min(axis=1, initial=0.0)[:, None] - 2.0 + liked[None, :])[some]
        scores[:, inputs] = found
        if heads["repeat"][0] and view.history is not None:
            scores[view.history.rows(), view.history.ids] += heads["repeat"][0]
        return scores

    def score_inputs(self, view: CohortView) -> Floats:
        """(people, k) scores of the items that terms are about."""
        return multiply_lists(self.select_latest(view), view, float(view.heads["recency"][0]), view.heads["weights"])

    # in the sum, before anybody sees it

    @property
    def term_share(self) -> float:
        """What the terms have of a person's length, squared; other fields of the same release have the rest."""
        return 1.0

    def bound_term_length(self, server: ServerState, question: str) -> float:
        """How long what one person adds to the terms is at most: of a retraction, two terms of every block there was.

        A device may not trust a server with this, so it holds whatever block the server says was told last. After the
        blocks of the plan nothing is told.
        """
        if question == STATISTIC:
            return 1.0
        told = min(server.block + 1, self.budget.blocks)
        ages = np.maximum(0, int(server.heads["released"][0]) - np.arange(told))
        return SQUARE_ROOT_2 * float((self.config.decay**ages).sum())

    def release_share(self, heads: Arrays, question: str) -> float:
        """What of a block's mu^2 a release takes."""
        if question == SURVEY:
            return POPULARITY_SHARE + PEOPLE_SHARE
        return self.budget.term_share(first=int(heads["released"][1]) == 0) if question == STATISTIC else 1.0

    def term_deviation(self, server: ServerState, question: str) -> float:
        return self.budget.matrix_deviation(
            self.term_share * self.release_share(server.heads, question), self.bound_term_length(server, question)
        )

    @property
    def epsilon(self) -> float | None:
        return self.budget.epsilon

    def ledger(self) -> Ledger:
        """Noise is put into a sum over people, by the lab or by a node: against whoever sees the sum after that."""
        of = self.budget.deviation
        first = Event(
            POPULARITY_RELEASE, "gaussian", 1.0, of(POPULARITY_SHARE + PEOPLE_SHARE), threat="central", once=True
        )
        terms = Event(TERMS_RELEASE, "gaussian", 1.0, of(1.0), threat="central")
        back = Event(
            RETRACTION_RELEASE, "gaussian", 1.0, of(1.0), threat="central", once=True
        )  # never refused: no reason to stop
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, threat="central", once=True)
        return Ledger((first, terms, back, earlier), self.budget.delta)

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        what = {SURVEY: POPULARITY_RELEASE, STATISTIC: TERMS_RELEASE}.get(question, RETRACTION_RELEASE)
        return what, (self.release_share(heads, question) * self.budget.mu2) ** 0.5

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        """Whole numbers and whole-number noise; `draws` counts how often noise was put into a sum of sums."""
        if total.n_clients > MOST_PEOPLE:
            raise TacitaError(f"sums over more than {MOST_PEOPLE:,} people are not exact; use more nodes.")
        heads = server.heads
        told = (int(heads["released"][1]), *([total.nonce] if total.nonce else []))  # the first is the server's word
        stream = NoiseStream(draws, f"tally {question}", server.block, server.round, *told)
        made: Arrays = {"draws": total["draws"] + 1.0}
        if question == SURVEY:
            of, grid = self.budget.deviation, POPULARITY_GRID
            made["liked"] = total["liked"] + draw_whole_noise(stream, of(POPULARITY_SHARE), grid, len(server.items))
            made["people"] = total["people"] + draw_whole_noise(stream, of(PEOPLE_SHARE), 1.0, 1)
        else:
            made |= self.add_term_noise(server, total, question, stream)
        return total.with_sums(made)

    def add_term_noise(self, server: ServerState, total: Total, question: str, stream: NoiseStream) -> Arrays:
        noise = draw_symmetric_noise(stream, self.term_deviation(server, question), len(server.heads["inputs"]))
        return {"terms": total["terms"] + noise}

    # on the server

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """Nothing is asked any more when all planned blocks are told."""
        if server.block >= self.budget.blocks:
            return ()
        return (SURVEY, STATISTIC) if int(server.heads["released"][1]) == 0 else (STATISTIC,)

    def statistic_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        drawn = Spec("draws", (1,), most=1.0, least=0.0, exact=True)
        if question == SURVEY:
            n, of = len(server.items), self.budget.deviation
            liked = Spec(
                "liked",
                (n,),
                most=1 + TAIL * of(POPULARITY_SHARE),
                exact=True,
                about="which items people like, with noise",
            )
            return liked, Spec("people", (1,), most=1 + TAIL * of(PEOPLE_SHARE), exact=True), drawn
        return *self.term_fields(server, question), drawn

    def term_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        k, length = len(server.heads["inputs"]), self.bound_term_length(server, question)
        most = length + TAIL * SQUARE_ROOT_2 * self.term_deviation(server, question)
        about = "which items go together, with noise"
        return (Spec("terms", (k, k), most=most, exact=True, symmetric=True, about=about),)

    def retraction_fields(self, server: ServerState) -> tuple[Spec, ...]:
        return *self.term_fields(server, "retraction"), Spec("draws", (1,), most=1.0, least=0.0, exact=True)

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        drawn = max(1.0, float(total["draws"][0]))
        if question == SURVEY:
            return self._choose_terms(server, total, drawn)
        held, last = server.parts[STATE], int(server.heads["released"][0])
        fade = self.config.decay ** (server.block - last) if last >= 0 else 1.0
        state = {**held, **self.add_terms(server, total.sums, STATISTIC, fade), "drawn": np.array([drawn])}
        released = np.array([server.block, server.heads["released"][1] + 1], np.int32)
        return self.solve_gram(server.with_part(STATE, state), released)

    def add_terms(self, server: ServerState, sums: Mapping[str, AnyArray], question: str, fade: float = 1.0) -> Arrays:
        """What the server holds, faded, and what it was told; and the noise in that."""
        held, drawn = server.parts[STATE], max(1.0, float(sums["draws"][0]))
        return {
            "gram": fade * held["gram"] + sums["terms"],
            "variance": fade**2 * held["variance"] + drawn * self.term_deviation(server, question) ** 2,
        }

    def _choose_terms(self, server: ServerState, total: Total, drawn: float) -> ServerState:
        """The items that terms are about, and in what terms."""
        s = self.term_deviation(server, STATISTIC) * drawn**0.5
        people, liked = min(float(total["people"][0]), MOST_PEOPLE), total["liked"]  # nodes may say any number
        k = min(choose_n_inputs(people, s, len(liked), self.codes is not None), self.config.most_inputs)
        axes = choose_axes(liked, k)
        state = {"liked": liked, "people": np.array([people]), "gram": np.zeros((k, k)), "variance": np.zeros(1)}
        heads = {
            **server.heads,
            "inputs": axes.inputs,
            "scale": axes.scale,
            "centre": axes.centre,
            "liked": scale_outside_popularity(axes, liked),
        }
        return replace(server, heads=heads).with_part(STATE, state)

    def solve_gram(self, server: ServerState, released: AnyArray) -> ServerState:
        """B that belongs to the noised sum."""
        held, axes = server.parts[STATE], read_axes(server.heads)
        basis = None if self.codes is None else build_feature_basis(self.codes, held["liked"], axes)
        smooth = fit_smoother(held["gram"], axes.centre, float(held["variance"][0]) ** 0.5, basis)
        heads = {
            **server.heads,
            "weights": solve_weights(smooth, axes.scale),
            "known": np.array([len(server.items)], np.int32),
            "released": released,
            **{name: np.array([value], np.float32) for name, value in self.fixed_settings.items()},
        }
        return replace(server, heads=heads)

    @property
    def trials(self) -> int:
        return 1  # validation chooses nothing

    def try_next(self, server: ServerState) -> ServerState:
        return server

    def popularity(self, server: ServerState) -> Floats:
        liked = np.maximum(server.parts.get(STATE, {}).get("liked", np.zeros(0)), 0.0)
        return np.pad(liked, (0, len(server.items) - len(liked))).astype(np.float32)

    def likeness(self, server: ServerState, items: Floats, item: int) -> Floats:
        """What every item says for this one: its column of B, which is between the inputs; of other items nothing."""
        heads, said = server.heads, np.zeros(len(server.items), np.float32)
        place = np.flatnonzero(heads["inputs"] == item)
        if len(place) and len(heads["weights"]):
            said[heads["inputs"]] = heads["weights"][:, place[0]]
        return said

    def promises(self, server: ServerState) -> dict[str, float]:
        """What a person lost who told in every block; who retracted lost more, which their own ledger says."""
        held = server.parts.get(STATE, {})
        return {
            "epsilon": self.budget.spent_epsilon(min(server.block + 1, self.budget.blocks)),
            "epsilon_planned": self.budget.epsilon,
            "delta": self.budget.delta,
            "blocks_planned": float(self.budget.blocks),
            "items_told_of": float(len(server.heads["inputs"])),
            "noise_draws_in_a_sum": float(held.get("drawn", np.ones(1))[0]),
        }

    # taking back: the difference is noised by itself, so that two releases do not show it

    @property
    def retracts_exactly(self) -> bool:
        return False

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        state = {**server.parts[STATE], **self.add_terms(server, change, "retraction")}
        last, releases = server.heads["released"].tolist()
        return self.solve_gram(server.with_part(STATE, state), np.array([last, releases + 1], np.int32)), 0

    def describe_retraction(self) -> dict[str, Any]:
        more = self.budget.spent_epsilon(self.budget.blocks, 1)
        return {
            "assumptions": [
                "the sum had noise before and has more now, so no comparison with training again is exact",
                "which items are told of, their scales and their popularity stay as they were chosen, with noise",
                f"a retraction is a release of its own and is charged: who told in all {self.budget.blocks} planned "
                f"blocks and retracts once has spent epsilon {more:.3g} at delta {self.budget.delta:g}",
            ],
            "residual_risk": "What was told before stays protected by the budget it was told under, not erased from "
            "copies of earlier models.",
        }

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        """The sum of these lists in the same terms, with noise of its own as large as what is in the sum now."""
        heads, last = server.heads, int(server.heads["released"][0])
        gram = np.zeros_like(server.parts[STATE]["gram"])
        for block, lists in enumerate(block_lists[: last + 1]):
            vectors = _term_vectors(self.select_counted(lists), heads)
            gram += self.config.decay ** (last - block) * (vectors.T @ vectors)
        s = float(server.parts[STATE]["variance"][0]) ** 0.5
        stream = NoiseStream(Draws(int(heads["released"][1])), "tally trained again")
        state = {**server.parts[STATE], "gram": gram + draw_symmetric_noise(stream, s, len(gram))}
        return self.solve_gram(server.with_part(STATE, state), heads["released"])

    def simulate_release(self, server: ServerState, lists: Ragged, draws: Draws) -> ServerState:
        """The server after these people and nobody else told a first block, with the noise of these draws."""
        ptr = np.arange(len(lists) + 1, dtype=np.int64)
        for question in (SURVEY, STATISTIC):
            fields = self.statistic_fields(server, question)
            told = self.encode_lists(lists, ptr, server.heads, question)
            upload = Upload(told, np.ones(len(lists)), np.zeros(len(lists), np.uint64))
            total = self.add_noise(server, add_upload(empty_total(fields), upload, fields), question, draws)
            server = self.learn(server, total, question)
        return server


def read_axes(heads: Arrays) -> TermAxes:
    return TermAxes(heads["inputs"], heads["scale"], heads["centre"])


def _term_vectors(lists: Ragged, heads: Arrays, length: float = 1.0) -> Doubles:
    axes = read_axes(heads)
    return unit_vectors(lists, axes.inputs, axes.scale, axes.centre, length)


def multiply_lists(lists: Ragged, view: CohortView, recency: float, matrix: Floats) -> Floats:
    """(people, k) what lists say through a matrix between the inputs, older items counting less."""
    return multiply_weighted_lists(lists, recency_weights(lists, recency), view, matrix)


def multiply_weighted_lists(lists: Ragged, weight: Floats, view: CohortView, matrix: Floats) -> Floats:
    row_of = np.full(view.n_items, -1, np.int32)
    row_of[view.heads["inputs"]] = np.arange(len(matrix))
    found = np.zeros((len(view.user), len(matrix)), np.float32)
    dense_products(lists.ptr, lists.ids, weight, row_of, matrix, found)
    return found


def expand_clients(user_ptr: Longs) -> Any:
    return np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
