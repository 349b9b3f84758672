"""tally: a linear model whose training statistic is a sum over users, so it learns in one round and forgets exactly.

A user's term is w_u x_u x_u^T with x_u the items of the block. The server keeps the sums of every block
(`sums`), adds them up to G with decay, solves the ridge problem with zero diagonal (EASE: B = I - P / diag(P),
P = (G + ridge)^-1) and sends B back; the device scores its own history with it. A catalogue that is larger than
`most_inputs` in the first block is read through its most popular items (inputs) only, while all items can be
recommended: columns of other items are plain ridge solutions P G. With all items as inputs both are the same.

What it gives away: whoever gets B tells who took part and completes histories; whoever gets B before and after a
lone retraction reads it. Waiting for contributors (`min_item`, `min_pair`) and sending few entries a column (`keep`)
saves bytes and stops weaker readers. These are mitigations, at the defaults and elsewhere; only noise with a budget
protects (`privacy.epsilon`, private_tally.py). `tacita audit tally` runs the attacks beside their controls.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Ints, Longs, Ragged, ServerState
from tacita.messages import Total
from tacita.models.base import (
    Backbone,
    BackboneConfig,
    has_expected_heads,
    make_scalar,
    make_zero_scores,
    read_scalar,
    register,
)
from tacita.models.statistic_model import BlockLists, FieldSums, RetractionCaveats
from tacita.models.tally.head_checks import matrix_fits
from tacita.models.tally.options import STATE, STATISTIC, SURVEY, TallyConfig
from tacita.models.tally.pair_statistic import PairStatistic, make_single_user_ptr, read_server_pair_shape, sum_forms
from tacita.models.tally.retraction import (
    compute_changed_sums,
    find_changed_items,
    find_changed_places,
    update_inverse_in_place,
)
from tacita.models.tally.solver import (
    MOST_DOUBLINGS,
    estimate_available_memory,
    estimate_solve_bytes,
    invert_with_doubling,
    mirror_lower,
    pack_triangle,
    unpack_triangle,
)
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import (
    add_products,
    compute_recency_weights,
    compute_weights,
    pack_weights,
    read_item_column,
)

__all__ = ["RECENCIES", "STATE", "STATISTIC", "SURVEY", "Tally", "TallyConfig", "require_tally"]

REPEAT_BONUS, REPEAT_PENALTY = 0.05, -1.0  # what repeat = "learn" adds to items of earlier blocks
RECENCIES = 0.0, 10.0, 20.0, 80.0, 40.0  # what recency = "learn" tries; the last one stays where nobody validates

log = logging.getLogger(__name__)


@register
class Tally(PairStatistic):
    """Linear item-item model from a sum of users' statistics."""

    name = "tally"
    Config: ClassVar[type[BackboneConfig]] = TallyConfig
    config: TallyConfig

    @property
    def form(self) -> str:
        return self.config.solve  # other than "ridge": filter.py

    def init_heads(self, draws: Draws) -> Arrays:
        empty = pack_weights(np.zeros((0, 0), np.float32))
        return {
            **empty,
            "inputs": np.zeros(0, np.int32),  # empty: all
            "recency": np.zeros(1, np.float32),
            "repeat": np.zeros(1, np.float32),
        }

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        own = Tally.init_heads(self, Draws(0))  # forms of it hold more, and look at that themselves
        if not has_expected_heads(heads, own):
            return False
        return matrix_fits(heads, n_items)

    def check(self, first_items: int, all_items: int) -> None:
        most_inputs = self.config.most_inputs
        n_inputs = all_items if first_items <= most_inputs else most_inputs
        need = estimate_solve_bytes(n_inputs)
        free = estimate_available_memory()
        if need <= free:
            return
        most_that_fit = (free / estimate_solve_bytes(1)) ** 0.5
        hundreds = int(most_that_fit) // 100
        fits = min(hundreds * 100, first_items - 1)  # a first block that fits is read whole, and so is what follows
        raise TacitaError(
            f"a solve over {n_inputs:,} items needs about {need / 1e9:.0f} GB of memory and {free / 1e9:.0f} GB "
            f"are free; read the catalogue through fewer: --set backbone.most_inputs={max(2, fits)}."
        )

    # on the device

    def select_latest_items(self, view: CohortView) -> Ragged:
        """What each user did in this block, or earlier if that is nothing."""
        if view.history is None:
            return view.train
        has_none = view.train.counts() == 0
        absent = np.flatnonzero(has_none)
        earlier = view.history.take(absent)
        users = absent[earlier.rows()]
        spread = Ragged.from_pairs(users, earlier.ids, len(view.train))
        return view.train.join_rows(spread)

    def score_history(self, view: CohortView) -> Floats:
        """x_u B with older items counting less, and a bonus or penalty for items of earlier blocks."""
        latest = self.select_latest_items(view)
        recency = read_scalar(view.heads, "recency")
        weight = compute_recency_weights(latest, recency)
        scores = make_zero_scores(view)
        add_products(latest, weight, view.heads, scores)
        add_repeat_bonus(view, scores)
        return scores

    # on the server

    def learn_from_sums(self, server: ServerState, total: Total, question: str) -> ServerState:
        """Choose the inputs of a large catalogue; or add the block to the sums and solve."""
        if question == SURVEY:
            inputs = choose_inputs(total["counts"], self.config.most_inputs)
            return with_heads(server, {"inputs": inputs})
        earlier = PairSums.from_arrays(server.parts.get(STATE))
        sums = earlier.with_block(server.block, total, read_server_pair_shape(server))
        solved = self.with_solved_sums(server, sums)
        return self.with_trial(solved, 0)

    def read_popularity(self, server: ServerState) -> Floats:
        """Users of each item, counted again in every block in which they have it."""
        sums = PairSums.from_arrays(server.parts.get(STATE))
        touched = sums.touched.sum(axis=0)
        return pad_to_catalogue(touched, server)

    def measure_similarity_to_item(self, server: ServerState, items: Floats, item: int) -> Floats:
        """The weight of every item for this one: its column of B."""
        return read_item_column(server.heads, item, len(server.items))

    @property
    def n_validation_candidates(self) -> int:
        if self.config.recency == "learn":
            return len(RECENCIES)
        return 1

    def with_next_trial(self, server: ServerState) -> ServerState:
        return self.with_trial(server, server.round)

    def with_trial(self, server: ServerState, trial: int) -> ServerState:
        """The server with the way of scoring of a trial."""
        recency = self.config.recency
        if recency == "learn":
            recency = RECENCIES[trial]
        return with_heads(server, {"recency": make_scalar(recency)})

    def with_solved_sums(self, server: ServerState, sums: PairSums, inverse: Doubles | None = None) -> ServerState:
        """The matrix that belongs to the sums, and to the inverse where that is known already."""
        shape = read_server_pair_shape(server)
        where = None if shape.inputs is None else sums.list_places()
        gram = np.zeros(0)
        doublings = 0
        if inverse is None:
            gram = self.compute_released_gram(sums, shape, where)
            inverse, doublings = self._invert_gram(gram, where, shape, server.block)
        weights = compute_weights(inverse, gram, where, shape, self.config.keep)
        repeat = self.choose_repeat_bonus(sums, shape.n_items)
        heads = {**pack_weights(weights), "repeat": make_scalar(repeat)}
        is_updated = shape.inputs is None  # only there the inverse is ever updated
        state = sums.to_arrays()
        state["inverse"] = pack_triangle(inverse) if is_updated else np.zeros(0)
        state["doublings"] = np.array([doublings])
        return with_heads(server, heads).with_part(STATE, state)

    def _invert_gram(self, gram: Doubles, where: Longs | None, shape: PairShape, block: int) -> tuple[Doubles, int]:
        """The inverse of G + ridge, and how often the ridge was doubled for there to be one."""
        solved = invert_with_doubling(lambda factor: self.build_ridge_triangle(gram, where, shape, factor))
        if solved is None:
            raise TacitaError(
                f"the sums of block {block} cannot be solved, though the ridge was doubled {MOST_DOUBLINGS} "
                "times: they are not what people's histories add up to; look for a wrong sum, or raise "
                "backbone.ridge."
            )
        doublings = solved[1]
        if doublings:
            log.warning("the ridge was doubled %d times: without that, block %d has no solution", doublings, block)
        return solved

    def choose_repeat_bonus(self, sums: PairSums, n_items: int) -> float:
        """What is added to the score of items of earlier blocks."""
        if self.config.repeat != "learn":
            return self.config.repeat
        habit = sums.estimate_repeat_habit(n_items)
        return (0.0, REPEAT_BONUS, REPEAT_PENALTY)[habit]

    def compute_released_gram(self, sums: PairSums, shape: PairShape, where: Longs | None) -> Doubles:
        """The entries of G that are out, after everything that waits; where: None means the whole triangle."""
        config = self.config
        return sums.sum_released(shape, config.decay, config.min_item, config.min_pair, where)

    def build_ridge_triangle(self, gram: Doubles, where: Longs | None, shape: PairShape, more: float) -> Doubles:
        """The lower triangle of G + ridge over the inputs.

        G without the pairs that wait need not be positive; where the ridge does not make up for that, it doubles.
        """
        if where is None:
            lower = unpack_triangle(gram)
        else:
            lower = shape.build_input_triangle(where, gram)
        counts = np.diag(lower)
        mean = max(float(counts.mean()), 1e-12)
        popularity = (counts + 1) / (mean + 1)
        growth = popularity**self.config.ridge_popularity
        diagonal = np.diag_indices(len(lower))
        lower[diagonal] += more * self.config.ridge * growth
        return lower

    # retraction

    @property
    def retraction_quorum(self) -> int:
        return self.config.hold_retractions

    @property
    def retracts_exactly(self) -> bool:
        return True

    def describe_retraction(self) -> RetractionCaveats | None:
        return None

    def apply_retraction(self, server: ServerState, change: FieldSums) -> tuple[ServerState, int]:
        """The server after a sum of retractions, and the rank of the update; 0: it was solved from the start."""
        shape = read_server_pair_shape(server)
        state = server.parts[STATE]
        sums = PairSums.from_arrays(state)
        changed = compute_changed_sums(sums, change, shape)
        ridge_depends_on_sums = self.config.ridge_popularity or state["doublings"][0]
        if shape.inputs is not None or ridge_depends_on_sums:
            return self.with_solved_sums(server, changed), 0
        lower = unpack_triangle(state["inverse"])
        inverse = mirror_lower(lower)
        items = find_changed_items(change, shape)
        rank = self.try_update_inverse(inverse, items, sums, changed, shape)
        if rank == 0:
            return self.with_solved_sums(server, changed), 0
        return self.with_solved_sums(server, changed, inverse), rank

    def replace_lists(self, server: ServerState, before: BlockLists, after: BlockLists) -> tuple[ServerState, int]:
        """The server after some users have `after`, a list for every block, instead of `before`."""
        n_users = len(before[0])
        user_ptr = make_single_user_ptr(n_users)
        change = self.encode_list_change(before, after, user_ptr, read_server_pair_shape(server))
        total = sum_forms(change, n_users, self.list_retraction_fields(server))
        return self.apply_retraction(server, total.sums)

    def try_update_inverse(
        self, inverse: Doubles, items: AnyArray, old: PairSums, new: PairSums, shape: PairShape
    ) -> int:
        """Bring an inverse from old to new sums in place, if that is cheaper than a solve; 0: it is not."""
        if len(items) > len(inverse) // 4:
            return 0
        least = max(1, self.config.min_item, self.config.min_pair)
        where = find_changed_places(items, old, new, shape, least)
        new_gram = self.compute_released_gram(new, shape, where)
        old_gram = self.compute_released_gram(old, shape, where)
        change = new_gram - old_gram
        differs = change != 0
        row, col = shape.decode_pairs(where[differs])
        return update_inverse_in_place(inverse, row, col, change[differs])

    def retrain_from_lists(self, server: ServerState, block_lists: BlockLists) -> ServerState:
        """The state that these lists alone would lead to, with the same catalogue and inputs."""
        shape = read_server_pair_shape(server)
        summed = server.parts[STATE]["index"]
        sums = PairSums.from_arrays(None)
        past = Ragged.empty(0)
        for index, train in enumerate(block_lists):
            if index in summed:
                total = self.sum_statistic(train, past, shape)
                sums = sums.with_block(index, total, shape)
            past = past.join_rows(train)
        return self.with_solved_sums(server, sums)


def require_tally(backbone: Backbone) -> Tally:
    """The backbone of a run that releases B."""
    if not isinstance(backbone, Tally) or backbone.form != "ridge":
        released = f"'{backbone.name}' with solve = '{backbone.form}'" if backbone.form else f"'{backbone.name}'"
        raise TacitaError(
            "this audit attacks the matrix of backbone 'tally' with solve = 'ridge', and the run releases that of "
            f"{released}; train one with `--backbone tally`."
        )
    return backbone


def with_heads(server: ServerState, heads: Arrays) -> ServerState:
    """The server with other values of some heads."""
    return replace(server, heads={**server.heads, **heads})


def pad_to_catalogue(values: AnyArray, server: ServerState) -> Floats:
    """A value for every item of the catalogue: 0 for items that came later."""
    n_new = len(server.items) - len(values)
    padded = np.pad(values, (0, n_new))
    return padded.astype(np.float32)


def add_repeat_bonus(view: CohortView, scores: Floats) -> None:
    """Add the bonus or penalty of items of earlier blocks, in place."""
    repeat = view.heads["repeat"][0]
    if not repeat or view.history is None:
        return
    users = view.history.rows()
    scores[users, view.history.ids] += repeat


def choose_inputs(counts: AnyArray, most: int) -> Ints:
    """The items that a large catalogue is read through, ascending."""
    by_count = np.argsort(-counts, kind="stable")
    return np.sort(by_count[:most]).astype(np.int32)
