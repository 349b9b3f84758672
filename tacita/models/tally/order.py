"""tally-order: tally that also learns what follows what, from one more sum over people in the same exchange.

For every place in a person's list, oldest first, h is what came before it, older items weighing less. The server keeps
G' = sum of h h^T and C' = sum of h e^T (e: the item at the place), decayed over blocks as G is, and solves B' = (G' +
ridge')^-1 C'. A device mixes three scores, each standardised over the items: its whole history and its latest items
through B, and what came last through B'. Each block's validation chooses the mixture; no order at all is a choice.

What it gives away is what tally does, and the order of things beside it: nothing here protects people. Under a budget
it has another form (private_order.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import scipy.sparse
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.messages import Form, SequenceTerms, SparseRows, Spec, Total
from tacita.models.base import BackboneConfig, register
from tacita.models.tally.model import MOST_DOUBLINGS, RECENCIES, STATE, SURVEY, Tally, TallyConfig
from tacita.models.tally.order_sums import (
    CONTEXTS,
    ITEM_OWNERS,
    NEXT,
    HistoryLines,
    OrderSums,
    compute_age_weights,
    find_reordered_items,
    interleave_signed,
    select_latest_entries,
)
from tacita.models.tally.retraction import compute_low_rank, find_changed_places
from tacita.models.tally.solver import TILE, invert_in_place, mirror_lower, pack_triangle, unpack_triangle
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import add_products, pack_weights, recency_weights, sparsify_columns

FOLD = 8.0  # order_fold = "auto"
PREFIX = "order_"  # of the heads that hold B'
MATRIX = ("weights", "column", "ptr")

log = logging.getLogger(__name__)


class Mixture(NamedTuple):
    """How a device scores: the e-fold of its latest items, and what each of the three scores weighs."""

    recency: float
    whole: float
    recent: float
    order: float


_MIX_WEIGHTS = ((0.0, 0.5, 0.5), (0.2, 0.3, 0.5), (0.5, 0.2, 0.3), (0.3, 0.4, 0.3), (0.0, 0.3, 0.7))
MIXTURES: tuple[Mixture, ...] = (
    *(Mixture(recency, *weights) for recency in (40.0, 10.0) for weights in _MIX_WEIGHTS),
    Mixture(40.0, 0.0, 0.0, 1.0),
    *(Mixture(recency, 0.0, 1.0, 0.0) for recency in RECENCIES[:-1]),
    Mixture(RECENCIES[-1], 0.0, 1.0, 0.0),
)
"""What mix = "learn" tries; the last one, which knows no order, stays where nobody validates."""


class OrderConfig(TallyConfig):
    order_ridge: float = Field(200.0, gt=0, description="ridge of the problem that learns order")
    order_fold: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="e-fold, in items, of the weight of what came earlier; auto: 8, under privacy.epsilon 2"
    )
    order_window: int = Field(40, ge=1, le=1000, description="how many items before a place count")
    order_back: bool = Field(
        True,
        description="what is told of order looks back into earlier blocks; false, and always under privacy.epsilon: at "
        "the block's own items alone",
    )
    order_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="under privacy.epsilon: what of a person's length, squared, goes to what follows what; 0: nothing "
        "is told of order, and nothing is spent on it",
    )
    mix: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=3, max_length=3)] | Literal["learn"] = (
        Field(
            "learn",
            description="weights of the whole history, the latest items and order, e.g. [0.2, 0.3, 0.5]; learn: each "
            "block's validation chooses them, with the recency",
        )
    )


@register
class OrderedTally(Tally):
    """Linear item-item model and linear model of what follows, from sums of users' statistics."""

    name = "tally-order"
    Config: ClassVar[type[BackboneConfig]] = OrderConfig
    reads_order = True
    config: OrderConfig

    def __init__(self, config: OrderConfig) -> None:
        super().__init__(config)
        self.age_weights = compute_age_weights(
            FOLD if config.order_fold == "auto" else config.order_fold, config.order_window
        )
        if config.mix != "learn" and not any(config.mix):
            raise TacitaError("backbone.mix weighs nothing at all; one of its three weights must be above 0.")
        for name, why in (
            ("min_pair", "pairs in order are not counted by people"),
            ("hold_retractions", "what waits to be taken back would be told again, as what came before"),
        ):
            if getattr(config, name):
                raise TacitaError(f"backbone.{name} does not work with 'tally-order': {why}; set it to 0.")
        if config.solve != "ridge":
            raise TacitaError("'tally-order' solves its sums by ridge; use backbone.solve = 'ridge', or tally.")

    def init_heads(self, draws: Draws) -> Arrays:
        none = pack_weights(np.zeros((0, 0), np.float32))
        return {
            **super().init_heads(draws),
            **{PREFIX + name: none[name] for name in MATRIX},
            "mix": np.array([0.0, 1.0, 0.0], np.float32),
        }

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if heads.keys() != own.keys() or any(heads[name].dtype != v.dtype for name, v in own.items()):
            return False
        mix = heads["mix"]
        if mix.shape != (3,) or not ((mix >= 0) & (mix <= 1)).all() or len(heads["inputs"]):
            return False
        plain = {name: heads[name] for name in super().init_heads(Draws(0))}
        return super().heads_fit(plain, n_items) and super().heads_fit({**plain, **select_order_matrix(heads)}, n_items)

    def check(self, first_items: int, all_items: int) -> None:
        if self.config.order_share != OrderConfig.model_fields["order_share"].default:
            raise TacitaError("backbone.order_share divides a budget; set privacy.epsilon, too, or leave it out.")
        if first_items > self.config.most_inputs:
            raise TacitaError(
                f"order is learned between all {first_items:,} items, and backbone.most_inputs reads "
                f"{self.config.most_inputs:,} of them; raise it, or use backbone 'tally'."
            )
        super().check(first_items, all_items)

    # on the device

    def encode_block(self, train: Ragged, history: Ragged | None, user_ptr: Longs, shape: PairShape) -> dict[str, Form]:
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        lines = self._build_lines(train, history)
        ordered = self._encode_order(client, lines, np.ones(len(train)), shape)
        held = lines.distinct_items()
        marks = SparseRows(client[held.rows()], held.ids, np.ones(len(held.ids)))
        return {**super().encode_block(train, history, user_ptr, shape), **ordered, ITEM_OWNERS: marks}

    def _build_lines(self, train: Ragged, history: Ragged | None) -> HistoryLines:
        return HistoryLines.from_blocks(train, history if self.config.order_back else None, self.config.order_window)

    def _encode_order(self, client: AnyArray, lines: HistoryLines, sign: Doubles, shape: PairShape) -> dict[str, Form]:
        itself = SequenceTerms(client, lines.lists, lines.start, sign, self.age_weights, shape.n_items, "itself")
        return {CONTEXTS: itself, NEXT: replace(itself, meets="next")}

    def _fields(self, shape: PairShape) -> tuple[Spec, ...]:
        n, most = shape.n_items, float(self.age_weights.sum())
        whole = Spec(
            CONTEXTS, (n, n), least=0.0, exact=True, symmetric=True, counted=ITEM_OWNERS, about="what came before what"
        )
        return (
            *super()._fields(shape),
            replace(whole, most=n * most**2),
            replace(whole, name=NEXT, most=n * most, symmetric=False, about="which item follows which"),
            Spec(ITEM_OWNERS, (n,), most=1.0, least=0.0, exact=True),
        )

    def score_history(self, view: CohortView) -> Floats:
        """The mixture of the three scores; without order and one of the others, the plain score."""
        whole, recent, order = (float(w) for w in view.heads["mix"])
        if order == 0 and (whole == 0 or recent == 0):
            own = view.heads["recency"] if recent else np.zeros(1, np.float32)
            return super().score_history(replace(view, heads={**view.heads, "recency": own}))
        repeat, recency = float(view.heads["repeat"][0]), float(view.heads["recency"][0])
        scores = np.zeros((len(view.user), view.n_items), np.float32)
        spread = None
        for weight, lists, fold in (
            (recent, self.select_latest(view), recency),
            (whole, self.whole_history(view), 0.0),
        ):
            if weight or (spread is None and repeat and fold == 0):
                one = np.zeros_like(scores)
                add_products(lists, recency_weights(lists, fold), view.heads, one)
                deviation = standardise(one)
                spread = deviation if spread is None else spread
                scores += np.float32(weight) * one
        if order:
            one, line = np.zeros_like(scores), self.select_recent(view)
            add_products(line, self.weigh_by_age(line), {**view.heads, **select_order_matrix(view.heads)}, one)
            standardise(one)
            scores += np.float32(order) * one
        if repeat and spread is not None and view.history is not None:
            rows = view.history.rows()
            scores[rows, view.history.ids] += np.float32(repeat) / spread[rows]
        return scores

    def whole_history(self, view: CohortView) -> Ragged:
        """The history that counts alike whenever it was."""
        return self.select_latest(view)

    def select_recent(self, view: CohortView) -> Ragged:
        """What each person did last, of all that the view holds, oldest first."""
        known = view.train if view.history is None else view.history.join_rows(view.train)
        return select_latest_entries(known.sort_by_time(), self.config.order_window)

    def weigh_by_age(self, line: Ragged) -> Floats:
        age = np.repeat(line.ptr[1:], line.counts()) - 1 - np.arange(len(line.ids))
        return np.asarray(self.age_weights[age], np.float32)

    # on the server

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        found = super().learn(server, total, question)
        if question == SURVEY:
            return found
        shape = PairShape(len(server.items))
        order = OrderSums.from_arrays(server.parts.get(STATE)).with_block(server.block, total.sums, shape)
        return self.solve_order(found, order)

    @property
    def trials(self) -> int:
        if self.config.mix == "learn":
            return len(MIXTURES)
        return super().trials

    def apply_trial(self, server: ServerState, trial: int) -> ServerState:
        if self.config.mix != "learn":
            server = super().apply_trial(server, trial)
            return replace(server, heads={**server.heads, "mix": np.array(self.config.mix, np.float32)})
        recency, *mix = MIXTURES[trial]
        if self.config.recency != "learn":
            recency = float(self.config.recency)
        heads = {"recency": np.array([recency], np.float32), "mix": np.array(mix, np.float32)}
        return replace(server, heads={**server.heads, **heads})

    def solve_order(
        self, server: ServerState, order: OrderSums, solved: tuple[Doubles, Doubles] | None = None
    ) -> ServerState:
        """B' that belongs to the sums; `solved`: the inverse and B' in full, where they are known already."""
        shape, doublings = PairShape(len(server.items)), 0
        while solved is None:
            inverse = invert_in_place(self._add_order_ridge(order, shape, 2.0**doublings))
            if inverse is not None:
                solved = inverse, inverse @ self._sum_followers(order, shape)
                break
            doublings += 1
            if doublings > MOST_DOUBLINGS:
                raise TacitaError(
                    f"the sums by order of block {server.block} cannot be solved: they are not what people's lists add "
                    "up to; look for a wrong sum, or raise backbone.order_ridge."
                )
        if doublings:
            log.warning("the ridge of order was doubled %d times in block %d", doublings, server.block)
        inverse, solution = solved
        sent = pack_weights(sparsify_solution(solution, self.config.keep))
        state = {
            **server.parts[STATE],
            **order.arrays(),
            "order_inverse": pack_triangle(inverse),
            "order_solution": solution,
            "order_doublings": np.array([doublings]),
        }
        heads = {**server.heads, **{PREFIX + name: sent[name] for name in MATRIX}}
        return replace(server, heads=heads).with_part(STATE, state)

    @property
    def _min_contributors(self) -> int:
        return max(1, self.config.min_item)

    def _sum_followers(self, order: OrderSums, shape: PairShape) -> Doubles:
        return order.sum_followers(shape, self.config.decay, self._min_contributors)

    def _add_order_ridge(self, order: OrderSums, shape: PairShape, more: float) -> Doubles:
        """The lower triangle of G' + ridge'."""
        lower = unpack_triangle(order.sum_released("contexts", shape, self.config.decay, self._min_contributors))
        lower[np.diag_indices(len(lower))] += more * self.config.order_ridge
        return lower

    # taking back

    def encode_change(
        self, old_lists: list[Ragged], new_lists: list[Ragged], user_ptr: Longs, shape: PairShape
    ) -> dict[str, Form]:
        """What people take back of each block; an item that goes changes what came before in later blocks, too."""
        out = super().encode_change(old_lists, new_lists, user_ptr, shape)
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        past = Ragged.empty(0), Ragged.empty(0)
        for block, lists in enumerate(zip(old_lists, new_lists, strict=True)):
            was, now = (self._build_lines(one, before) for one, before in zip(lists, past, strict=True))
            past = past[0].join_rows(lists[0]), past[1].join_rows(lists[1])
            if len(was.lists.ids) == 0:
                continue
            lines, sign, person = interleave_signed([(was, -1.0), (now, 1.0)])
            for name, form in self._encode_order(client[person], lines, sign, shape).items():
                out[f"{name}.{block}"] = form
            gone, stay = was.distinct_items(), now.distinct_items()
            rows = np.concatenate([gone.rows(), stay.rows()])
            order = np.argsort(rows, kind="stable")
            ids, value = np.concatenate([gone.ids, stay.ids]), np.repeat([-1.0, 1.0], [len(gone.ids), len(stay.ids)])
            out[f"{ITEM_OWNERS}.{block}"] = SparseRows(client[rows[order]], ids[order], value[order])
        return out

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        shape = PairShape(len(server.items))
        held, order = server.parts[STATE], OrderSums.from_arrays(server.parts[STATE])
        after, rank = super().apply_retraction(server, change)
        changed = order.apply_change(change, shape)
        updated = None
        if not held["order_doublings"][0]:
            updated = self._try_update(held, find_reordered_items(change, shape.n_items), order, changed)
        if updated is None:
            return self.solve_order(after, changed), 0
        inverse, solution, more = updated
        return self.solve_order(after, changed, (inverse, solution)), rank + more if rank else 0

    def _try_update(
        self, held: Arrays, items: Longs, old: OrderSums, new: OrderSums
    ) -> tuple[Doubles, Doubles, int] | None:
        """The inverse and B' of other sums, and the rank of the update; None: a solve is cheaper, or the only way.

        With P' the inverse before, P' (C' + D) is the old B' + P' D; what leaves P' leaves that as well.
        """
        solution = held["order_solution"].copy()
        shape = PairShape(len(solution))
        if not 0 < len(items) <= shape.n_items // 4:
            return None
        inverse = mirror_lower(unpack_triangle(held["order_inverse"]))
        changes = {side: self._find_changes(side, items, old, new, shape) for side in new.sides}
        found = compute_low_rank(inverse, *changes["contexts"])
        if found is None:
            return None
        row, col, value = (
            np.concatenate(both)
            for both in zip(changes["after"], (changes["before"][k] for k in (1, 0, 2)), strict=True)
        )
        rows, columns = np.unique(row), np.unique(col)
        small = np.zeros((len(rows), len(columns)))
        small[np.searchsorted(rows, row), np.searchsorted(columns, col)] = value
        solution[:, columns] += inverse[:, rows] @ small
        found.subtract_from(solution)
        found.subtract_from(inverse)
        return inverse, solution, found.rank

    def _find_changes(
        self, side: str, items: Longs, old: OrderSums, new: OrderSums, shape: PairShape
    ) -> tuple[Longs, Longs, Doubles]:
        """Where one side differs, and by how much."""
        where = find_changed_places(items, old.sides[side], new.sides[side], shape, self._min_contributors)
        now, was = (
            one.sum_released(side, shape, self.config.decay, self._min_contributors, where) for one in (new, old)
        )
        differs = now != was
        return *shape.decode_pairs(where[differs]), (now - was)[differs]

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        """What the server would hold had it been told these lists alone, with the same catalogue."""
        shape, index = PairShape(len(server.items)), server.parts[STATE]["index"]
        sums, order, past = PairSums.from_arrays(None), OrderSums.from_arrays(None), Ragged.empty(0)
        for block, train in enumerate(block_lists):
            if block in index:
                total = self.sum_statistic(train, past, shape)
                sums, order = sums.with_block(block, total, shape), order.with_block(block, total.sums, shape)
            past = past.join_rows(train)
        return self.solve_order(self.solve_sums(server, sums), order)


def select_order_matrix(heads: Arrays) -> Arrays:
    """B' in the words of B."""
    return {name: heads[PREFIX + name] for name in MATRIX}


def sparsify_solution(solution: Doubles, keep: int) -> Any:
    """B' as it is sent: like B, few entries a column."""
    n, tiles = len(solution), []
    sparse = 0 < keep < n / 2
    for lo in range(0, n, TILE):
        tile = sparsify_columns(np.ascontiguousarray(solution[:, lo : lo + TILE].T), keep).astype(np.float32)
        tiles.append(scipy.sparse.csr_array(tile) if sparse else tile)
    return scipy.sparse.vstack(tiles, format="csr").T.tocsr() if sparse else np.ascontiguousarray(np.vstack(tiles).T)


def standardise(scores: Floats) -> Floats:
    """Take every row's mean out and divide it by its deviation, in place; the deviations, 1 where there is none."""
    wide = scores.astype(np.float64)  # a row adds up alike in any company
    mean, deviation = wide.mean(axis=1), wide.std(axis=1)
    deviation[deviation < 1e-12] = 1.0
    scores -= mean.astype(np.float32)[:, None]
    scores /= deviation.astype(np.float32)[:, None]
    return np.asarray(deviation, np.float32)
