"""tally-order: tally that also learns what follows what, from one more sum over users in the same exchange.

For every place in a user's list, oldest first, h is what came before it, older items weighing less. The server keeps
G' = sum of h h^T and C' = sum of h e^T (e: the item at the place), decayed over blocks as G is, and solves B' = (G' +
ridge')^-1 C'. A device mixes three scores, each standardised over the items: its whole history and its latest items
through B, and what came last through B'. Each block's validation chooses the mixture; no order at all is a choice.

It gives away what tally does, and the order of items besides: nothing here protects users. Under a budget it has
another form (private_order.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Longs, Ragged, ServerState
from tacita.messages import SequenceTerms, SparseRows, Spec, Total
from tacita.models.base import BackboneConfig, has_expected_heads, make_scalar, make_zero_scores, read_scalar, register
from tacita.models.statistic_model import BlockLists, Fields, FieldSums, Forms
from tacita.models.tally.head_checks import matrix_fits
from tacita.models.tally.mixing import MIXTURES, MixedScores, mix_fits
from tacita.models.tally.model import Tally, with_heads
from tacita.models.tally.options import STATE, SURVEY, OrderConfig, is_set
from tacita.models.tally.order_sums import (
    CONTEXTS,
    ITEM_OWNERS,
    NEXT,
    HistoryLines,
    OrderSums,
    compute_age_weights,
    find_reordered_items,
    interleave_signed_lines,
    select_latest_entries,
)
from tacita.models.tally.pair_statistic import list_user_clients
from tacita.models.tally.retraction import compute_low_rank, find_changed_places
from tacita.models.tally.solver import TILE, invert_with_doubling, mirror_lower, pack_triangle, unpack_triangle
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import (
    ColumnTiles,
    add_products,
    compute_recency_weights,
    count_entry_ages,
    pack_weights,
)

FOLD = 8.0  # order_fold = "auto"
PREFIX = "order_"  # of the heads that hold B'
MATRIX = ("weights", "column", "ptr")
REFUSED_SETTINGS = {
    "min_pair": "pairs in order are not counted by people",
    "hold_retractions": "what waits to be taken back would be told again, as what came before",
}

log = logging.getLogger(__name__)


@register
class OrderedTally(Tally):
    """Linear item-item model and linear model of what follows, from sums of users' statistics."""

    name = "tally-order"
    Config: ClassVar[type[BackboneConfig]] = OrderConfig
    reads_order = True
    config: OrderConfig

    def __init__(self, config: OrderConfig) -> None:
        super().__init__(config)
        self.age_weights = choose_age_weights(config, FOLD)
        if config.mix != "learn" and not any(config.mix):
            raise TacitaError("backbone.mix weighs nothing at all; one of its three weights must be above 0.")
        for name, why in REFUSED_SETTINGS.items():
            if getattr(config, name):
                raise TacitaError(f"backbone.{name} does not work with 'tally-order': {why}; set it to 0.")
        if config.solve != "ridge":
            raise TacitaError("'tally-order' solves its sums by ridge; use backbone.solve = 'ridge', or tally.")

    def init_heads(self, draws: Draws) -> Arrays:
        empty = pack_weights(np.zeros((0, 0), np.float32))
        return {
            **super().init_heads(draws),
            **_name_order_matrix(empty),
            "mix": np.array([0.0, 1.0, 0.0], np.float32),
        }

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        if not has_expected_heads(heads, own):
            return False
        if not mix_fits(heads["mix"]):
            return False
        reads_all_items = heads["inputs"].size == 0
        if not reads_all_items or not matrix_fits(heads, n_items):
            return False
        order_heads = {**heads, **select_order_matrix(heads)}
        return matrix_fits(order_heads, n_items)

    def check(self, first_items: int, all_items: int) -> None:
        if is_set(self.config, "order_share"):
            raise TacitaError("backbone.order_share divides a budget; set privacy.epsilon, too, or leave it out.")
        if first_items > self.config.most_inputs:
            raise TacitaError(
                f"order is learned between all {first_items:,} items, and backbone.most_inputs reads "
                f"{self.config.most_inputs:,} of them; raise it, or use backbone 'tally'."
            )
        super().check(first_items, all_items)

    # on the device

    def encode_block(self, train: Ragged, history: Ragged | None, user_ptr: Longs, shape: PairShape) -> Forms:
        forms = super().encode_block(train, history, user_ptr, shape)
        client = list_user_clients(user_ptr)
        lines = self._build_history_lines(train, history)
        plus = np.ones(len(train))
        forms |= self._encode_order(client, lines, plus, shape)
        owned = lines.list_distinct_items()
        owner = client[owned.rows()]
        ones = np.ones(len(owned.ids))
        forms[ITEM_OWNERS] = SparseRows(owner, owned.ids, ones)
        return forms

    def _build_history_lines(self, train: Ragged, history: Ragged | None) -> HistoryLines:
        past = history if self.config.order_back else None
        return HistoryLines.from_blocks(train, past, self.config.order_window)

    def _encode_order(self, client: AnyArray, lines: HistoryLines, sign: Doubles, shape: PairShape) -> Forms:
        n_items = shape.n_items
        contexts = SequenceTerms(client, lines.lists, lines.start, sign, self.age_weights, n_items, "itself")
        following = replace(contexts, meets="next")
        return {CONTEXTS: contexts, NEXT: following}

    def _specify_fields(self, shape: PairShape) -> Fields:
        n_items = shape.n_items
        most = float(self.age_weights.sum())
        contexts = Spec(
            CONTEXTS,
            (n_items, n_items),
            most=n_items * most**2,
            least=0.0,
            exact=True,
            symmetric=True,
            counted=ITEM_OWNERS,
            about="what came before what",
        )
        about = "which item follows which"
        following = replace(contexts, name=NEXT, most=n_items * most, symmetric=False, about=about)
        owners = Spec(ITEM_OWNERS, (n_items,), most=1.0, least=0.0, exact=True)
        return *super()._specify_fields(shape), contexts, following, owners

    def score_history(self, view: CohortView) -> Floats:
        """The mixture of the three scores; without order and one of the others, the plain score."""
        heads = view.heads
        whole, recent, order = heads["mix"].tolist()
        is_mixed = whole > 0 and recent > 0
        if order == 0 and not is_mixed:
            recency = heads["recency"] if recent else make_scalar(0.0)
            plain = replace(view, heads={**heads, "recency": recency})
            return super().score_history(plain)
        mixture = MixedScores(make_zero_scores(view))
        latest = self.select_latest_items(view)
        repeat = read_scalar(heads, "repeat")
        if recent:
            weight = compute_recency_weights(latest, read_scalar(heads, "recency"))
            scores = _score_lists(latest, weight, view, heads)
            mixture.add(recent, scores)
        needs_spread = repeat and not recent  # the bonus is measured by the spread of one of them
        if whole or needs_spread:
            weight = compute_recency_weights(latest, 0.0)
            scores = _score_lists(latest, weight, view, heads)
            mixture.add(whole, scores)
        if order:
            line = self.select_recent(view)
            weight = self.weigh_by_age(line)
            matrix = {**heads, **select_order_matrix(heads)}
            scores = _score_lists(line, weight, view, matrix)
            mixture.add_order(order, scores)
        if repeat and view.history is not None:
            mixture.add_repeat_bonus(repeat, view.history)
        return mixture.scores

    def select_recent(self, view: CohortView) -> Ragged:
        """What each user did last, of all that the view holds, oldest first."""
        return select_recent_line(view, self.config.order_window)

    def weigh_by_age(self, line: Ragged) -> Floats:
        ages = count_entry_ages(line)
        weights = self.age_weights[ages]
        return np.asarray(weights, np.float32)

    # on the server

    def learn_from_sums(self, server: ServerState, total: Total, question: str) -> ServerState:
        learned = super().learn_from_sums(server, total, question)
        if question == SURVEY:
            return learned
        shape = PairShape(len(server.items))
        earlier = OrderSums.from_arrays(server.parts.get(STATE))
        order = earlier.with_block(server.block, total.sums, shape)
        return self.with_solved_order(learned, order)

    @property
    def n_validation_candidates(self) -> int:
        if self.config.mix == "learn":
            return len(MIXTURES)
        return super().n_validation_candidates

    def with_trial(self, server: ServerState, trial: int) -> ServerState:
        if self.config.mix != "learn":
            server = super().with_trial(server, trial)
            fixed_mix = np.array(self.config.mix, np.float32)
            return with_heads(server, {"mix": fixed_mix})
        recency, *mix = MIXTURES[trial]
        if self.config.recency != "learn":
            recency = float(self.config.recency)
        heads = {"recency": make_scalar(recency)}
        heads["mix"] = np.array(mix, np.float32)
        return with_heads(server, heads)

    def with_solved_order(
        self, server: ServerState, order: OrderSums, solved: tuple[Doubles, Doubles] | None = None
    ) -> ServerState:
        """B' that belongs to the sums; `solved`: the inverse and B' in full, where they are known already."""
        shape = PairShape(len(server.items))
        doublings = 0
        if solved is None:
            inverse, doublings = self._invert_contexts(order, shape, server.block)
            followers = self._sum_followers(order, shape)
            solution = inverse @ followers
        else:
            inverse, solution = solved
        sparse = sparsify_solution(solution, self.config.keep)
        packed = pack_weights(sparse)
        state = {
            **server.parts[STATE],
            **order.to_arrays(),
            "order_inverse": pack_triangle(inverse),
            "order_solution": solution,
            "order_doublings": np.array([doublings]),
        }
        return with_heads(server, _name_order_matrix(packed)).with_part(STATE, state)

    def _invert_contexts(self, order: OrderSums, shape: PairShape, block: int) -> tuple[Doubles, int]:
        """The inverse of G' + ridge', and how often the ridge was doubled for there to be one."""
        solved = invert_with_doubling(lambda factor: self._add_order_ridge(order, shape, factor))
        if solved is None:
            raise TacitaError(
                f"the sums by order of block {block} cannot be solved: they are not what people's lists add "
                "up to; look for a wrong sum, or raise backbone.order_ridge."
            )
        doublings = solved[1]
        if doublings:
            log.warning("the ridge of order was doubled %d times in block %d", doublings, block)
        return solved

    @property
    def _min_contributors(self) -> int:
        return max(1, self.config.min_item)

    def _sum_followers(self, order: OrderSums, shape: PairShape) -> Doubles:
        return order.sum_followers(shape, self.config.decay, self._min_contributors)

    def _sum_released_side(self, side: str, order: OrderSums, shape: PairShape, where: Longs | None = None) -> Doubles:
        """What is out of one side, at some places or whole."""
        return order.sum_released(side, shape, self.config.decay, self._min_contributors, where)

    def _add_order_ridge(self, order: OrderSums, shape: PairShape, more: float) -> Doubles:
        """The lower triangle of G' + ridge'."""
        contexts = self._sum_released_side("contexts", order, shape)
        lower = unpack_triangle(contexts)
        diagonal = np.diag_indices(len(lower))
        lower[diagonal] += more * self.config.order_ridge
        return lower

    # retraction

    def encode_list_change(
        self, old_lists: BlockLists, new_lists: BlockLists, user_ptr: Longs, shape: PairShape
    ) -> Forms:
        """The change of each block; an item that goes changes what came before in later blocks, too."""
        change = super().encode_list_change(old_lists, new_lists, user_ptr, shape)
        client = list_user_clients(user_ptr)
        old_past = Ragged.empty(0)
        new_past = Ragged.empty(0)
        for block, (old, new) in enumerate(zip(old_lists, new_lists, strict=True)):
            old_lines = self._build_history_lines(old, old_past)
            new_lines = self._build_history_lines(new, new_past)
            old_past = old_past.join_rows(old)
            new_past = new_past.join_rows(new)
            if len(old_lines.lists.ids) == 0:
                continue
            lines, sign, user = interleave_signed_lines([(old_lines, -1.0), (new_lines, 1.0)])
            owner = client[user]
            forms = self._encode_order(owner, lines, sign, shape)
            forms[ITEM_OWNERS] = _mark_owner_change(client, old_lines, new_lines)
            for name, form in forms.items():
                change[f"{name}.{block}"] = form
        return change

    def apply_retraction(self, server: ServerState, change: FieldSums) -> tuple[ServerState, int]:
        shape = PairShape(len(server.items))
        state = server.parts[STATE]
        order = OrderSums.from_arrays(state)
        after, rank = super().apply_retraction(server, change)
        changed = order.with_change(change, shape)
        updated = None
        if not state["order_doublings"][0]:
            items = find_reordered_items(change, shape.n_items)
            updated = self._try_low_rank_update(state, items, order, changed)
        if updated is None:
            return self.with_solved_order(after, changed), 0
        inverse, solution, order_rank = updated
        solved = self.with_solved_order(after, changed, (inverse, solution))
        if rank == 0:
            return solved, 0
        return solved, rank + order_rank

    def _try_low_rank_update(
        self, state: Arrays, items: Longs, old: OrderSums, new: OrderSums
    ) -> tuple[Doubles, Doubles, int] | None:
        """The inverse and B' of other sums, and the rank of the update; None: a solve is cheaper, or the only way.

        With P' the inverse before, P' (C' + D) is the old B' + P' D; what leaves P' leaves that as well.
        """
        solution = state["order_solution"].copy()
        shape = PairShape(len(solution))
        if not 0 < len(items) <= shape.n_items // 4:
            return None
        lower = unpack_triangle(state["order_inverse"])
        inverse = mirror_lower(lower)
        row, col, value = self._find_side_changes("contexts", items, old, new, shape)
        update = compute_low_rank(inverse, row, col, value)
        if update is None:
            return None
        self._add_followers_change(solution, inverse, items, old, new)
        update.subtract_in_place(solution)
        update.subtract_in_place(inverse)
        return inverse, solution, update.rank

    def _add_followers_change(
        self, solution: Doubles, inverse: Doubles, items: Longs, old: OrderSums, new: OrderSums
    ) -> None:
        """Add P' D to B', in place."""
        shape = PairShape(len(solution))
        after_row, after_col, after_value = self._find_side_changes("after", items, old, new, shape)
        before_col, before_row, before_value = self._find_side_changes("before", items, old, new, shape)
        row = np.concatenate([after_row, before_row])
        col = np.concatenate([after_col, before_col])
        rows, small_row = np.unique(row, return_inverse=True)
        columns, small_col = np.unique(col, return_inverse=True)
        small_shape = (len(rows), len(columns))
        small = np.zeros(small_shape)
        small[small_row, small_col] = np.concatenate([after_value, before_value])
        solution[:, columns] += inverse[:, rows] @ small

    def _find_side_changes(
        self, side: str, items: Longs, old: OrderSums, new: OrderSums, shape: PairShape
    ) -> tuple[Longs, Longs, Doubles]:
        """Where one side differs, and by how much."""
        old_sums = old.sides[side]
        new_sums = new.sides[side]
        where = find_changed_places(items, old_sums, new_sums, shape, self._min_contributors)
        new_values = self._sum_released_side(side, new, shape, where)
        old_values = self._sum_released_side(side, old, shape, where)
        differs = new_values != old_values
        row, col = shape.decode_pairs(where[differs])
        change = new_values - old_values
        return row, col, change[differs]

    def retrain_from_lists(self, server: ServerState, block_lists: BlockLists) -> ServerState:
        """The state that these lists alone would lead to, with the same catalogue."""
        shape = PairShape(len(server.items))
        summed = server.parts[STATE]["index"]
        sums = PairSums.from_arrays(None)
        order = OrderSums.from_arrays(None)
        past = Ragged.empty(0)
        for block, train in enumerate(block_lists):
            if block in summed:
                total = self.sum_statistic(train, past, shape)
                sums = sums.with_block(block, total, shape)
                order = order.with_block(block, total.sums, shape)
            past = past.join_rows(train)
        solved = self.with_solved_sums(server, sums)
        return self.with_solved_order(solved, order)


def choose_age_weights(config: OrderConfig, auto_fold: float) -> Doubles:
    """What items weigh by how many places before they came."""
    fold = auto_fold if config.order_fold == "auto" else config.order_fold
    return compute_age_weights(fold, config.order_window)


def select_recent_line(view: CohortView, window: int) -> Ragged:
    """What each user did last, of all that the view holds, oldest first."""
    known = view.train
    if view.history is not None:
        known = view.history.join_rows(view.train)
    by_time = known.sort_by_time()
    return select_latest_entries(by_time, window)


def select_order_matrix(heads: Arrays) -> Arrays:
    """B' under the names of B."""
    return {name: heads[PREFIX + name] for name in MATRIX}


def _name_order_matrix(matrix: Arrays) -> Arrays:
    """B' under the names that it has among the heads."""
    return {PREFIX + name: matrix[name] for name in MATRIX}


def _score_lists(lists: Ragged, weight: Floats, view: CohortView, matrix: Arrays) -> Floats:
    scores = make_zero_scores(view)
    add_products(lists, weight, matrix, scores)
    return scores


def _mark_owner_change(client: AnyArray, old: HistoryLines, new: HistoryLines) -> SparseRows:
    """-1 for every item that a user had in a list that counts, 1 for every item that the user has."""
    before = old.list_distinct_items()
    after = new.list_distinct_items()
    rows = np.concatenate([before.rows(), after.rows()])
    ids = np.concatenate([before.ids, after.ids])
    minus = -np.ones(len(before.ids))
    plus = np.ones(len(after.ids))
    sign = np.concatenate([minus, plus])
    order = np.argsort(rows, kind="stable")
    owner = client[rows[order]]
    return SparseRows(owner, ids[order], sign[order])


def sparsify_solution(solution: Doubles, keep: int) -> Any:
    """B' as the server sends it: like B, few entries a column."""
    n_items = len(solution)
    columns = ColumnTiles(keep, n_items)
    for lo in range(0, n_items, TILE):
        hi = lo + TILE
        tile = np.ascontiguousarray(solution[:, lo:hi].T)
        columns.append_tile(tile)
    return columns.join_tiles()
