"""tally: a linear model whose training statistic is a sum over users, so it learns in one round and forgets exactly.

A user's term is w_u x_u x_u^T with x_u the items of the block. The server keeps the sums of every block
(`tally_sums`), adds them up to G with decay, solves the ridge problem with zero diagonal (EASE: B = I - P / diag(P),
P = (G + ridge)^-1) and sends B back; the device scores its own history with it. A catalogue that is larger than
`most_inputs` in the first block is read through its most popular items (inputs) only, while all items can be
recommended: columns of other items are plain ridge solutions P G. With all items as inputs both are the same.

What it gives away: whoever gets B tells who took part and completes histories; whoever gets B before and after a
lone retraction reads it. Waiting for contributors (`min_item`, `min_pair`) and sending few entries a column (`keep`)
saves bytes and stops weaker readers. These are mitigations, at the defaults and elsewhere; only noise with a budget
protects (`privacy.epsilon`, private.py). `tacita audit tally` runs the attacks beside their controls.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import scipy.sparse
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_lists
from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Ints, Longs, Ragged, ServerState
from tacita.messages import (
    CooccurrenceTerms,
    DenseArrays,
    Form,
    SparseRows,
    Spec,
    Total,
    Upload,
    add_upload,
    empty_total,
)
from tacita.models.base import Backbone, BackboneConfig, register
from tacita.models.statistic_model import StatisticModel
from tacita.models.tally.options import FilterOptions
from tacita.models.tally.retraction import (
    apply_change,
    compute_replacements,
    find_changed_items,
    find_changed_places,
    update_inverse,
)
from tacita.models.tally.solver import (
    available_memory,
    bytes_to_solve,
    invert_in_place,
    mirror_lower,
    pack_triangle,
    unpack_triangle,
)
from tacita.models.tally.sums import PairShape, PairSums, count_repeats
from tacita.models.tally.weights import add_products, compute_weights, pack_weights, read_column, recency_weights

STATE = "tally"  # the name of its server-side arrays
REPEAT_BONUS, REPEAT_PENALTY = 0.05, -1.0  # what repeat = "learn" adds to items of earlier blocks
RECENCIES = 0.0, 10.0, 20.0, 80.0, 40.0  # what recency = "learn" tries; the last one stays where nobody validates
SURVEY, STATISTIC = "survey", "statistic"  # its questions
MOST_WEIGHT = 1e6  # of an entry of B that a device computes with: what a solve gives lies far below
MOST_DOUBLINGS = 30  # of the ridge; what a billion times the ridge does not make up for is no sum of histories

log = logging.getLogger(__name__)


class TallyConfig(FilterOptions):
    ridge: float = Field(500.0, gt=0, description="ridge of the linear problem")
    ridge_popularity: float = Field(0.0, ge=0, le=2, description="an item's ridge grows with its count to this power")
    decay: float = Field(0.7, gt=0, le=1, description="what earlier blocks keep of their weight in each new block")
    length_power: float = Field(0.0, ge=0, le=2, description="a user with n items weighs n to minus this power")
    most_items: int = Field(0, ge=0, description="only a user's latest items of the block count; 0: all")
    recency: Annotated[float, Field(ge=0)] | Literal["learn"] = Field(
        "learn",
        description="e-fold, in items, of the weight of older items in scoring; 0: alike; learn: each block's "
        "validation chooses",
    )
    repeat: float | Literal["learn"] = Field(
        "learn",
        description="added to the score of items of the user's earlier blocks; negative: avoid; learn: whether people "
        "come back to items more often than chance decides",
    )
    min_item: int = Field(
        5, ge=0, description="an item's increments wait for this many contributors; 0: no wait; a mitigation"
    )
    min_pair: int = Field(0, ge=0, description="a pair's increments wait for this many contributors; 0: no wait")
    keep: int = Field(
        200,
        ge=0,
        description="entries of B kept per column on the way down; 0: all; saves bytes, a mitigation",
    )
    hold_retractions: int = Field(0, ge=0, description="a retraction waits until this many users asked; 0: no wait")
    most_inputs: int = Field(10_000, ge=2, description="larger catalogues are read through this many popular items")


@register
class Tally(StatisticModel):
    """Linear item-item model from a sum of users' statistics."""

    name = "tally"
    Config: ClassVar[type[BackboneConfig]] = TallyConfig
    config: TallyConfig

    @property
    def form(self) -> str:
        return self.config.solve  # other than "ridge": filter.py

    def init_heads(self, draws: Draws) -> Arrays:
        return {
            **pack_weights(np.zeros((0, 0), np.float32)),
            "inputs": np.zeros(0, np.int32),  # empty: all
            "recency": np.zeros(1, np.float32),
            "repeat": np.zeros(1, np.float32),
        }

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        """B is read without further checks, so its places must lie inside it."""
        own = Tally.init_heads(self, Draws(0))  # forms of it hold more, and look at that themselves
        if heads.keys() != own.keys() or any(heads[name].dtype != v.dtype for name, v in own.items()):
            return False
        weights, column, ptr, inputs = (heads[name] for name in ("weights", "column", "ptr", "inputs"))
        if any(heads[name].shape != (1,) for name in ("known", "recency", "repeat")) or inputs.ndim != 1:
            return False
        known, n_inputs = int(heads["known"][0]), len(inputs)
        ascending = n_inputs <= n_items and bool((np.diff(inputs.astype(np.int64)) > 0).all())
        inside = 0 <= known <= n_items and ascending and (n_inputs == 0 or 0 <= inputs[0] <= inputs[-1] < n_items)
        rows = n_inputs or known
        mild = (
            heads["recency"][0] >= 0 and bool((np.abs(weights) <= MOST_WEIGHT).all()) and abs(heads["repeat"][0]) <= 10
        )
        if not (inside and mild):
            return False
        if weights.ndim == 2:
            learned = weights.shape == (rows, known) or (weights.shape == (0, 0) and known == 0)
            return learned and column.size == ptr.size == 0
        whole = weights.ndim == column.ndim == ptr.ndim == 1 and len(weights) == len(column)
        if not (whole and len(ptr) == rows + 1 and ptr[0] == 0 and ptr[-1] == len(column)):
            return False
        steps = np.diff(ptr.astype(np.int64))  # in 32 bits a difference may wrap and look right
        return bool((steps >= 0).all() and (len(column) == 0 or 0 <= column.min() <= column.max() < known))

    def check(self, first_items: int, all_items: int) -> None:
        n_inputs = all_items if first_items <= self.config.most_inputs else self.config.most_inputs
        need, free = bytes_to_solve(n_inputs), available_memory()
        if need > free:
            fits = int((free / bytes_to_solve(1)) ** 0.5) // 100 * 100
            fits = min(fits, first_items - 1)  # a first block that fits is read whole, and so is what comes after it
            raise TacitaError(
                f"a solve over {n_inputs:,} items needs about {need / 1e9:.0f} GB of memory and {free / 1e9:.0f} GB "
                f"are free; read the catalogue through fewer: --set backbone.most_inputs={max(2, fits)}."
            )

    @property
    def retraction_quorum(self) -> int:
        return self.config.hold_retractions

    @property
    def retracts_exactly(self) -> bool:
        return True

    def describe_retraction(self) -> dict[str, Any]:
        return {}

    # on the device

    @property
    def has_weighted_terms(self) -> bool:
        """Whether a term differs from the mere fact that somebody contributed."""
        return self.config.length_power > 0

    def build_user_terms(self, train: Ragged, n_items: int) -> tuple[scipy.sparse.csr_array, Doubles]:
        """What users put into the sum: binary rows of their counted items, and a weight each."""
        lists = self.select_counted(train)
        return matrix_of_lists(lists, n_items), self.weigh_lists(lists)

    def weigh_lists(self, lists: Ragged) -> Doubles:
        """What each list weighs."""
        return np.maximum(lists.counts(), 1.0) ** -self.config.length_power

    def select_counted(self, train: Ragged) -> Ragged:
        """The items that count: of each list the latest, where only some do."""
        if not self.config.most_items:
            return train
        counts = train.counts()
        place = np.arange(len(train.ids)) - np.repeat(train.ptr[:-1], counts)
        kept = place >= np.repeat(counts, counts) - self.config.most_items
        return Ragged.from_pairs(train.rows()[kept], train.ids[kept], len(train))

    def encode_statistic(self, view: CohortView, question: str) -> dict[str, Form]:
        """A person's term x x^T, in which nobody's own is there to be read once it is summed, and small counts."""
        if question == SURVEY:
            return {"counts": _mark_items(view.train, view.user_ptr)}
        return self.encode_block(
            view.train, view.history, view.user_ptr, PairShape.from_inputs(view.n_items, view.heads["inputs"])
        )

    def encode_block(self, train: Ragged, history: Ragged | None, user_ptr: Longs, shape: PairShape) -> dict[str, Form]:
        lists = self.select_counted(train)
        weight = self.weigh_lists(lists)
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        again = np.zeros((len(user_ptr) - 1, 2))
        np.add.at(again, client, count_repeats(train, history, shape.n_items))
        terms = CooccurrenceTerms(client, lists.ptr, lists.ids, weight, shape.n_items, shape.inputs)
        told: dict[str, Form] = {"pairs": terms, "touched": _mark_items(lists, user_ptr), "repeats": DenseArrays(again)}
        if self.has_weighted_terms:
            told["count"] = replace(terms, factor=np.ones(len(lists)))
        return told

    def upload_bytes(self, n_items: int) -> float:
        """What one client sends, whole, as it could be masked."""
        most = self.config.most_inputs
        shape = PairShape(n_items, np.arange(most, dtype=np.int32) if n_items > most else None)
        return sum(one.n_bytes for one in self._fields(shape))

    def sum_statistic(self, train: Ragged, history: Ragged | None, shape: PairShape) -> Total:
        """The sum over some users."""
        ptr, n = np.arange(len(train) + 1, dtype=np.int64), len(train)
        upload = Upload(self.encode_block(train, history, ptr, shape), np.ones(n), np.zeros(n, np.uint64))
        fields = self._fields(shape)
        return add_upload(empty_total(fields), upload, fields)

    def sum_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        return self.sum_statistic(train, history, PairShape.from_inputs(len(server.items), server.heads["inputs"]))

    def select_latest(self, view: CohortView) -> Ragged:
        """What each user did in this block, or earlier if that is nothing."""
        if view.history is None:
            return view.train
        absent = np.flatnonzero(view.train.counts() == 0)
        earlier = view.history.take(absent)
        return view.train.join_rows(Ragged.from_pairs(absent[earlier.rows()], earlier.ids, len(view.train)))

    def score_history(self, view: CohortView) -> Floats:
        """x_u B with older items counting less, and a word on items of earlier blocks."""
        latest = self.select_latest(view)
        scores = np.zeros((len(view.user), view.n_items), np.float32)
        add_products(latest, recency_weights(latest, float(view.heads["recency"][0])), view.heads, scores)
        repeat = view.heads["repeat"][0]
        if repeat and view.history is not None:
            scores[view.history.rows(), view.history.ids] += repeat
        return scores

    # on the server

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """Whoever reads a large catalogue through its most popular items has to know them first, once."""
        unknown = len(server.items) > self.config.most_inputs and STATE not in server.parts
        return (SURVEY, STATISTIC) if unknown else (STATISTIC,)

    def statistic_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        n = len(server.items)
        if question == SURVEY:
            return (Spec("counts", (n,), most=1.0, least=0.0, exact=True, about="how many people have each item"),)
        return self._fields(PairShape.from_inputs(n, server.heads["inputs"]))

    def _fields(self, shape: PairShape) -> tuple[Spec, ...]:
        size, n, whole = (shape.n_inputs, shape.n_items), shape.n_items, shape.inputs is None
        one = Spec("touched", (n,), most=1.0, least=0.0, exact=True)
        pairs = replace(one, name="pairs", shape=size, symmetric=whole, about="which items go together")
        fields = [pairs, one, replace(one, name="repeats", shape=(2,), most=float(n) ** 2)]
        if self.has_weighted_terms:
            fields.append(replace(pairs, name="count", about=""))
        return tuple(fields)

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        """Choose the inputs of a large catalogue; or add the block to the sums and solve."""
        if question == SURVEY:
            inputs = choose_inputs(total["counts"], self.config.most_inputs)
            return replace(server, heads={**server.heads, "inputs": inputs})
        shape = PairShape.from_inputs(len(server.items), server.heads["inputs"])
        sums = PairSums.from_arrays(server.parts.get(STATE)).with_block(server.block, total, shape)
        return self.apply_trial(self.solve_sums(server, sums), 0)

    def popularity(self, server: ServerState) -> Floats:
        """People of each item, counted again in every block in which they told it."""
        touched = PairSums.from_arrays(server.parts.get(STATE)).touched.sum(axis=0)
        return np.pad(touched, (0, len(server.items) - len(touched))).astype(np.float32)

    def likeness(self, server: ServerState, items: Floats, item: int) -> Floats:
        """What every item says for this one: its column of B."""
        return read_column(server.heads, item, len(server.items))

    @property
    def trials(self) -> int:
        return len(RECENCIES) if self.config.recency == "learn" else 1

    def try_next(self, server: ServerState) -> ServerState:
        return self.apply_trial(server, server.round)

    def apply_trial(self, server: ServerState, trial: int) -> ServerState:
        recency = RECENCIES[trial] if self.config.recency == "learn" else self.config.recency
        return replace(server, heads={**server.heads, "recency": np.array([recency], np.float32)})

    def solve_sums(self, server: ServerState, sums: PairSums, inverse: Doubles | None = None) -> ServerState:
        """The matrix that belongs to the sums, and to the inverse where that is known already."""
        shape = PairShape.from_inputs(len(server.items), server.heads["inputs"])
        where = None if shape.inputs is None else sums.places()
        gram = self.compute_gram(sums, shape, where) if inverse is None else np.zeros(0)
        doublings = 0
        while inverse is None:
            inverse = invert_in_place(self.add_ridge(gram, where, shape, 2.0**doublings))
            doublings += inverse is None
            if doublings > MOST_DOUBLINGS:
                raise TacitaError(
                    f"the sums of block {server.block} cannot be solved, though the ridge was doubled {MOST_DOUBLINGS} "
                    "times: they are not what people's histories add up to; look for a wrong sum, or raise "
                    "backbone.ridge."
                )
        if doublings:
            log.warning(
                "the ridge was doubled %d times: without that, block %d has no solution", doublings, server.block
            )
        repeat = self.config.repeat
        if repeat == "learn":
            repeat = (0.0, REPEAT_BONUS, REPEAT_PENALTY)[sums.estimate_repeat_habit(shape.n_items)]
        weights = pack_weights(compute_weights(inverse, gram, where, shape, self.config.keep))
        heads = {**server.heads, **weights, "repeat": np.array([repeat], np.float32)}
        kept = pack_triangle(inverse) if shape.inputs is None else np.zeros(0)  # only there it is ever updated
        state = {**sums.arrays(), "inverse": kept, "doublings": np.array([doublings])}
        return replace(server, heads=heads).with_part(STATE, state)

    def compute_gram(self, sums: PairSums, shape: PairShape, where: Longs | None) -> Doubles:
        """The entries of G that are out, after everything that waits; where: None means the whole triangle."""
        return sums.sum_released(shape, self.config.decay, self.config.min_item, self.config.min_pair, where)

    def add_ridge(self, gram: Doubles, where: Longs | None, shape: PairShape, more: float) -> Doubles:
        """The lower triangle of G + ridge over the inputs.

        G without the pairs that wait need not be positive; where the ridge does not make up for that, it doubles.
        """
        lower = unpack_triangle(gram) if where is None else shape.build_input_triangle(where, gram)
        counts = np.diag(lower)
        mean = max(float(counts.mean()), 1e-12)
        ridge = more * self.config.ridge * ((counts + 1) / (mean + 1)) ** self.config.ridge_popularity
        lower[np.diag_indices(len(lower))] += ridge
        return lower

    # taking back

    def summed_blocks(self, server: ServerState) -> list[int]:
        """The blocks of which there are sums; who does not see the sums takes it that every block was told."""
        if STATE in server.parts:
            return [int(b) for b in server.parts[STATE]["index"]]
        return list(range(server.block + (server.round > 0)))

    def retraction_fields(self, server: ServerState) -> tuple[Spec, ...]:
        """A change of everything that a block's statistic holds, for every block."""
        fields = self._fields(PairShape.from_inputs(len(server.items), server.heads["inputs"]))
        return tuple(
            replace(one, name=f"{one.name}.{block}", least=-one.most)
            for block in self.summed_blocks(server)
            for one in fields
        )

    def encode_retraction(self, view: CohortView, old_lists: list[Ragged], new_lists: list[Ragged]) -> dict[str, Form]:
        return self.encode_change(
            old_lists, new_lists, view.user_ptr, PairShape.from_inputs(view.n_items, view.heads["inputs"])
        )

    def encode_change(
        self, old_lists: list[Ragged], new_lists: list[Ragged], user_ptr: Longs, shape: PairShape
    ) -> dict[str, Form]:
        """What people take back of each block, and what they say again."""
        client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(user_ptr))
        twice = np.repeat(client, 2)
        out: dict[str, Form] = {}
        for block, one in enumerate(compute_replacements(old_lists, new_lists, self.select_counted, shape.n_items)):
            if len(one.lists.ids) == 0:
                continue
            marks, row = one.lists, one.lists.rows()
            terms = CooccurrenceTerms(
                twice, marks.ptr, marks.ids, one.sign * self.weigh_lists(marks), shape.n_items, shape.inputs
            )
            again = np.zeros((len(user_ptr) - 1, 2))
            np.add.at(again, client, one.repeat_change)
            out[f"pairs.{block}"] = terms
            out[f"touched.{block}"] = SparseRows(twice[row], marks.ids, one.sign[row])
            out[f"repeats.{block}"] = DenseArrays(again)
            if self.has_weighted_terms:
                out[f"count.{block}"] = replace(terms, factor=one.sign)
        return out

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        """What the server makes of a sum of what people take back and say again, and the rank of the update.

        Rank 0: it was solved anew.
        """
        shape = PairShape.from_inputs(len(server.items), server.heads["inputs"])
        sums = PairSums.from_arrays(server.parts[STATE])
        changed = apply_change(sums, change, shape)
        if shape.inputs is not None or self.config.ridge_popularity or server.parts[STATE]["doublings"][0]:
            return self.solve_sums(server, changed), 0
        inverse = mirror_lower(unpack_triangle(server.parts[STATE]["inverse"]))
        rank = self.try_update_inverse(inverse, find_changed_items(change, shape), sums, changed, shape)
        return self.solve_sums(server, changed, inverse if rank else None), rank

    def replace_lists(self, server: ServerState, before: list[Ragged], after: list[Ragged]) -> tuple[ServerState, int]:
        """The server after some people told `after`, a list for every block, instead of `before`."""
        shape, n = PairShape.from_inputs(len(server.items), server.heads["inputs"]), len(before[0])
        change = self.encode_change(before, after, np.arange(n + 1, dtype=np.int64), shape)
        fields = self.retraction_fields(server)
        total = add_upload(empty_total(fields), Upload(change, np.ones(n), np.zeros(n, np.uint64)), fields)
        return self.apply_retraction(server, total.sums)

    def try_update_inverse(
        self, inverse: Doubles, items: AnyArray, old: PairSums, new: PairSums, shape: PairShape
    ) -> int:
        """Bring an inverse from old to new sums in place, if that is cheaper than a solve; 0: it is not."""
        if len(items) > len(inverse) // 4:
            return 0
        where = find_changed_places(items, old, new, shape, max(1, self.config.min_item, self.config.min_pair))
        change = self.compute_gram(new, shape, where) - self.compute_gram(old, shape, where)
        return update_inverse(inverse, *shape.decode_pairs(where[change != 0]), change[change != 0])

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        """What the server would hold had it been told these lists alone, with the same catalogue and inputs."""
        shape = PairShape.from_inputs(len(server.items), server.heads["inputs"])
        sums, past = PairSums.from_arrays(None), Ragged.empty(0)
        for index, train in enumerate(block_lists):
            if index in server.parts[STATE]["index"]:
                sums = sums.with_block(index, self.sum_statistic(train, past, shape), shape)
            past = past.join_rows(train)
        return self.solve_sums(server, sums)


def require_tally(backbone: Backbone) -> Tally:
    """The backbone of a run that releases B."""
    if not isinstance(backbone, Tally) or backbone.form != "ridge":
        raise TacitaError(f"backbone '{backbone.name}' releases no B; this audit is for 'tally'.")
    return backbone


def _mark_items(lists: Ragged, user_ptr: Longs) -> SparseRows:
    """1 for every item of a client's lists."""
    client = np.repeat(np.arange(len(user_ptr) - 1, dtype=np.int32), np.diff(lists.ptr[user_ptr]))
    return SparseRows(client, lists.ids, np.ones(len(lists.ids)))


def choose_inputs(counts: AnyArray, most: int) -> Ints:
    """The items that a large catalogue is read through, ascending."""
    return np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int32)
