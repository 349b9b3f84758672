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
from tacita.fields import Following, Form, Rows, Spec, Total
from tacita.models.base import BackboneConfig, register
from tacita.models.tally.following import (
    CONTEXTS,
    HELD,
    NEXT,
    Lines,
    Order,
    falling,
    items_of_change,
    latest,
    with_sign,
)
from tacita.models.tally.model import MOST_DOUBLINGS, RECENCIES, STATE, SURVEY, Tally, TallyConfig
from tacita.models.tally.retraction import low_rank, may_differ
from tacita.models.tally.solver import TILE, inverted, lower_triangle, mirrored, packed
from tacita.models.tally.sums import Shape, Sums
from tacita.models.tally.weights import add_products, as_heads, recency_weights, sparsified

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


_MIXED = ((0.0, 0.5, 0.5), (0.2, 0.3, 0.5), (0.5, 0.2, 0.3), (0.3, 0.4, 0.3), (0.0, 0.3, 0.7))
MIXTURES: tuple[Mixture, ...] = (
    *(Mixture(recency, *weights) for recency in (40.0, 10.0) for weights in _MIXED),
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
        self.fall = falling(FOLD if config.order_fold == "auto" else config.order_fold, config.order_window)
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
        none = as_heads(np.zeros((0, 0), np.float32))
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
        return super().heads_fit(plain, n_items) and super().heads_fit({**plain, **matrix_in(heads)}, n_items)

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

    def told(self, train: Ragged, history: Ragged | None, user_ptr: Longs, shape: Shape) -> dict[str, Form]:
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        lines = self._lines(train, history)
        ordered = self._ordered(client, lines, np.ones(len(train)), shape)
        held = lines.held()
        marks = Rows(client[held.rows()], held.ids, np.ones(len(held.ids)))
        return {**super().told(train, history, user_ptr, shape), **ordered, HELD: marks}

    def statistic_of(self, train: Ragged, history: Ragged, n_items: int) -> Total:
        return self.total_of(train, history, Shape(n_items))

    def _lines(self, train: Ragged, history: Ragged | None) -> Lines:
        return Lines.of(train, history if self.config.order_back else None, self.config.order_window)

    def _ordered(self, client: AnyArray, lines: Lines, sign: Doubles, shape: Shape) -> dict[str, Form]:
        itself = Following(client, lines.lists, lines.start, sign, self.fall, shape.n_items, "itself")
        return {CONTEXTS: itself, NEXT: replace(itself, meets="next")}

    def _fields(self, shape: Shape) -> tuple[Spec, ...]:
        n, most = shape.n_items, float(self.fall.sum())
        whole = Spec(
            CONTEXTS, (n, n), least=0.0, exact=True, symmetric=True, counted=HELD, about="what came before what"
        )
        return (
            *super()._fields(shape),
            replace(whole, most=n * most**2),
            replace(whole, name=NEXT, most=n * most, symmetric=False, about="which item follows which"),
            Spec(HELD, (n,), most=1.0, least=0.0, exact=True),
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
        for weight, lists, fold in ((recent, self.latest(view), recency), (whole, self.whole(view), 0.0)):
            if weight or (spread is None and repeat and fold == 0):
                one = np.zeros_like(scores)
                add_products(lists, recency_weights(lists, fold), view.heads, one)
                deviation = standardise(one)
                spread = deviation if spread is None else spread
                scores += np.float32(weight) * one
        if order:
            one, line = np.zeros_like(scores), self.line(view)
            add_products(line, self.fallen(line), {**view.heads, **matrix_in(view.heads)}, one)
            standardise(one)
            scores += np.float32(order) * one
        if repeat and spread is not None and view.history is not None:
            rows = view.history.rows()
            scores[rows, view.history.ids] += np.float32(repeat) / spread[rows]
        return scores

    def whole(self, view: CohortView) -> Ragged:
        """The history that counts alike whenever it was."""
        return self.latest(view)

    def line(self, view: CohortView) -> Ragged:
        """What each person did last, of all that the view holds, oldest first."""
        known = view.train if view.history is None else view.history.joined(view.train)
        return latest(known.by_time(), self.config.order_window)

    def fallen(self, line: Ragged) -> Floats:
        age = np.repeat(line.ptr[1:], line.counts()) - 1 - np.arange(len(line.ids))
        return np.asarray(self.fall[age], np.float32)

    # on the server

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        found = super().learn(server, total, question)
        if question == SURVEY:
            return found
        shape = Shape(len(server.items))
        order = Order.read(server.parts.get(STATE)).with_block(server.block, total.sums, shape)
        return self.with_order(found, order)

    @property
    def trials(self) -> int:
        if self.config.mix == "learn":
            return len(MIXTURES)
        return super().trials

    def with_recency(self, server: ServerState, trial: int) -> ServerState:
        if self.config.mix != "learn":
            server = super().with_recency(server, trial)
            return replace(server, heads={**server.heads, "mix": np.array(self.config.mix, np.float32)})
        recency, *mix = MIXTURES[trial]
        if self.config.recency != "learn":
            recency = float(self.config.recency)
        heads = {"recency": np.array([recency], np.float32), "mix": np.array(mix, np.float32)}
        return replace(server, heads={**server.heads, **heads})

    def with_order(
        self, server: ServerState, order: Order, solved: tuple[Doubles, Doubles] | None = None
    ) -> ServerState:
        """B' that belongs to the sums; `solved`: the inverse and B' in full, where they are known already."""
        shape, doublings = Shape(len(server.items)), 0
        while solved is None:
            inverse = inverted(self._regular(order, shape, 2.0**doublings))
            if inverse is not None:
                solved = inverse, inverse @ self._followers(order, shape)
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
        sent = as_heads(cut(solution, self.config.keep))
        state = {
            **server.parts[STATE],
            **order.arrays(),
            "order_inverse": packed(inverse),
            "order_solution": solution,
            "order_doublings": np.array([doublings]),
        }
        heads = {**server.heads, **{PREFIX + name: sent[name] for name in MATRIX}}
        return replace(server, heads=heads).with_part(STATE, state)

    @property
    def _least(self) -> int:
        return max(1, self.config.min_item)

    def _followers(self, order: Order, shape: Shape) -> Doubles:
        return order.followers(shape, self.config.decay, self._least)

    def _regular(self, order: Order, shape: Shape, more: float) -> Doubles:
        """The lower triangle of G' + ridge'."""
        lower = lower_triangle(order.released("contexts", shape, self.config.decay, self._least))
        lower[np.diag_indices(len(lower))] += more * self.config.order_ridge
        return lower

    # taking back

    def told_instead(self, told: list[Ragged], left: list[Ragged], user_ptr: Longs, shape: Shape) -> dict[str, Form]:
        """What people take back of each block; an item that goes changes what came before in later blocks, too."""
        out = super().told_instead(told, left, user_ptr, shape)
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        past = Ragged.empty(0), Ragged.empty(0)
        for block, lists in enumerate(zip(told, left, strict=True)):
            was, now = (self._lines(one, before) for one, before in zip(lists, past, strict=True))
            past = past[0].joined(lists[0]), past[1].joined(lists[1])
            if len(was.lists.ids) == 0:
                continue
            lines, sign, person = with_sign([(was, -1.0), (now, 1.0)])
            for name, form in self._ordered(client[person], lines, sign, shape).items():
                out[f"{name}.{block}"] = form
            gone, stay = was.held(), now.held()
            rows = np.concatenate([gone.rows(), stay.rows()])
            order = np.argsort(rows, kind="stable")
            ids, value = np.concatenate([gone.ids, stay.ids]), np.repeat([-1.0, 1.0], [len(gone.ids), len(stay.ids)])
            out[f"{HELD}.{block}"] = Rows(client[rows[order]], ids[order], value[order])
        return out

    def retracted(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        shape = Shape(len(server.items))
        held, order = server.parts[STATE], Order.read(server.parts[STATE])
        after, rank = super().retracted(server, change)
        changed = order.without(change, shape)
        updated = None
        if not held["order_doublings"][0]:
            updated = self._updated(held, items_of_change(change, shape.n_items), order, changed)
        if updated is None:
            return self.with_order(after, changed), 0
        inverse, solution, more = updated
        return self.with_order(after, changed, (inverse, solution)), rank + more if rank else 0

    def _updated(self, held: Arrays, items: Longs, old: Order, new: Order) -> tuple[Doubles, Doubles, int] | None:
        """The inverse and B' of other sums, and the rank of the update; None: a solve is cheaper, or the only way.

        With P' the inverse before, P' (C' + D) is the old B' + P' D; what leaves P' leaves that as well.
        """
        solution = held["order_solution"].copy()
        shape = Shape(len(solution))
        if not 0 < len(items) <= shape.n_items // 4:
            return None
        inverse = mirrored(lower_triangle(held["order_inverse"]))
        changes = {side: self._changed(side, items, old, new, shape) for side in new.sides}
        found = low_rank(inverse, *changes["contexts"])
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
        found.take_from(solution)
        found.take_from(inverse)
        return inverse, solution, found.rank

    def _changed(self, side: str, items: Longs, old: Order, new: Order, shape: Shape) -> tuple[Longs, Longs, Doubles]:
        """Where one side differs, and by how much."""
        where = may_differ(items, old.sides[side], new.sides[side], shape, self._least)
        now, was = (one.released(side, shape, self.config.decay, self._least, where) for one in (new, old))
        differs = now != was
        return *shape.pairs(where[differs]), (now - was)[differs]

    def retrained(self, server: ServerState, told: list[Ragged]) -> ServerState:
        """What the server would hold had it been told these lists alone, with the same catalogue."""
        shape, index = Shape(len(server.items)), server.parts[STATE]["index"]
        sums, order, past = Sums.read(None), Order.read(None), Ragged.empty(0)
        for block, train in enumerate(told):
            if block in index:
                total = self.total_of(train, past, shape)
                sums, order = sums.with_block(block, total, shape), order.with_block(block, total.sums, shape)
            past = past.joined(train)
        return self.with_order(self.solved(server, sums), order)


def matrix_in(heads: Arrays) -> Arrays:
    """B' in the words of B."""
    return {name: heads[PREFIX + name] for name in MATRIX}


def cut(solution: Doubles, keep: int) -> Any:
    """B' as it is sent: like B, few entries a column."""
    n, tiles = len(solution), []
    sparse = 0 < keep < n / 2
    for lo in range(0, n, TILE):
        tile = sparsified(np.ascontiguousarray(solution[:, lo : lo + TILE].T), keep).astype(np.float32)
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
