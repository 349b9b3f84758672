"""The statistic of tally: which items each user has together, as a term of a sum; and how it is taken back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse

from tacita.core.sparse import matrix_of_lists
from tacita.core.types import CohortView, Doubles, Ints, Longs, Ragged, ServerState
from tacita.messages import (
    CooccurrenceTerms,
    DenseArrays,
    SparseRows,
    Spec,
    Total,
    Upload,
    add_upload,
    empty_total,
)
from tacita.models.statistic_model import BlockLists, Fields, Forms, StatisticModel
from tacita.models.tally.options import STATE, STATISTIC, SURVEY, TallyConfig
from tacita.models.tally.retraction import Replacement, compute_replacements
from tacita.models.tally.sums import PairShape, count_repeats
from tacita.models.tally.weights import count_entry_ages


class PairStatistic(StatisticModel):
    """What tally's users put into the sums: w_u x_u x_u^T, who has which item, and who comes back to items."""

    config: TallyConfig

    # terms

    @property
    def has_weighted_terms(self) -> bool:
        """Whether a term differs from the mere fact that a user contributed."""
        return self.config.length_power > 0

    def build_user_terms(self, train: Ragged, n_items: int) -> tuple[scipy.sparse.csr_array, Doubles]:
        """What users put into the sum: binary rows of their counted items, and a weight each."""
        lists = self.select_counted_items(train)
        rows = matrix_of_lists(lists, n_items)
        return rows, self.weigh_lists(lists)

    def weigh_lists(self, lists: Ragged) -> Doubles:
        """What each list weighs."""
        counts = np.maximum(lists.counts(), 1.0)
        return counts**-self.config.length_power

    def select_counted_items(self, train: Ragged) -> Ragged:
        """The items that count: of each list the latest, where only some do."""
        most = self.config.most_items
        if not most:
            return train
        is_latest = count_entry_ages(train) < most
        rows = train.rows()[is_latest]
        ids = train.ids[is_latest]
        return Ragged.from_pairs(rows, ids, len(train))

    # the exchange

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """A large catalogue is read through its most popular items; the server has to ask for these first, once."""
        is_large = len(server.items) > self.config.most_inputs
        if is_large and STATE not in server.parts:
            return SURVEY, STATISTIC
        return (STATISTIC,)

    def list_statistic_fields(self, server: ServerState, question: str) -> Fields:
        if question != SURVEY:
            return self._specify_fields(read_server_pair_shape(server))
        shape = (len(server.items),)
        about = "how many people have each item"
        counts = Spec("counts", shape, most=1.0, least=0.0, exact=True, about=about)
        return (counts,)

    def _specify_fields(self, shape: PairShape) -> Fields:
        n_items = shape.n_items
        is_whole = shape.inputs is None
        touched = Spec("touched", (n_items,), most=1.0, least=0.0, exact=True)
        size = (shape.n_inputs, n_items)
        about = "which items go together"
        pairs = replace(touched, name="pairs", shape=size, symmetric=is_whole, about=about)
        most_repeats = float(n_items) ** 2
        repeats = replace(touched, name="repeats", shape=(2,), most=most_repeats)
        if not self.has_weighted_terms:
            return pairs, touched, repeats
        count = replace(pairs, name="count", about="")
        return pairs, touched, repeats, count

    def encode_statistic(self, view: CohortView, question: str) -> Forms:
        """A user's term x x^T, which nobody can read once it is summed, and small counts."""
        if question == SURVEY:
            counts = mark_client_items(view.train, view.user_ptr)
            return {"counts": counts}
        shape = read_view_pair_shape(view)
        return self.encode_block(view.train, view.history, view.user_ptr, shape)

    def encode_block(self, train: Ragged, history: Ragged | None, user_ptr: Longs, shape: PairShape) -> Forms:
        """The statistic of a block's lists, with what users had before."""
        lists = self.select_counted_items(train)
        client = list_user_clients(user_ptr)
        user_repeats = count_repeats(train, history, shape.n_items)
        weight = self.weigh_lists(lists)
        terms = CooccurrenceTerms(client, lists.ptr, lists.ids, weight, shape.n_items, shape.inputs)
        forms: Forms = {"pairs": terms}
        forms["touched"] = mark_client_items(lists, user_ptr)
        forms["repeats"] = sum_repeats(user_repeats, user_ptr)
        if self.has_weighted_terms:
            ones = np.ones(len(lists))
            forms["count"] = replace(terms, factor=ones)
        return forms

    def count_upload_bytes(self, n_items: int) -> float:
        """What one client sends, whole, as it could be masked."""
        most = self.config.most_inputs
        inputs = None
        if n_items > most:
            inputs = np.arange(most, dtype=np.int32)
        fields = self._specify_fields(PairShape(n_items, inputs))
        return sum(field.n_bytes for field in fields)

    def sums_lists(self, n_items: int) -> bool:
        return self.ledger() is None

    def sum_statistic(self, train: Ragged, history: Ragged | None, shape: PairShape) -> Total:
        """The sum over some users."""
        user_ptr = make_single_user_ptr(len(train))
        forms = self.encode_block(train, history, user_ptr, shape)
        fields = self._specify_fields(shape)
        return sum_forms(forms, len(train), fields)

    def sum_statistics_of_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        return self.sum_statistic(train, history, read_server_pair_shape(server))

    # retraction

    def list_summed_blocks(self, server: ServerState) -> list[int]:
        """The blocks of which there are sums; a device that does not see the sums assumes that of every block."""
        if STATE not in server.parts:
            n_blocks = server.block + (server.round > 0)
            return list(range(n_blocks))
        index = server.parts[STATE]["index"]
        return [int(block) for block in index]

    def list_retraction_fields(self, server: ServerState) -> Fields:
        """A change of everything that a block's statistic holds, for every block."""
        fields = self._specify_fields(read_server_pair_shape(server))
        changes = []
        for block in self.list_summed_blocks(server):
            for field in fields:
                name = f"{field.name}.{block}"
                change = replace(field, name=name, least=-field.most)
                changes.append(change)
        return tuple(changes)

    def encode_retraction(self, view: CohortView, old_lists: BlockLists, new_lists: BlockLists) -> Forms:
        shape = read_view_pair_shape(view)
        return self.encode_list_change(old_lists, new_lists, view.user_ptr, shape)

    def encode_list_change(
        self, old_lists: BlockLists, new_lists: BlockLists, user_ptr: Longs, shape: PairShape
    ) -> Forms:
        """The change of each block's statistic from the old to the new lists."""
        replacements = compute_replacements(old_lists, new_lists, self.select_counted_items, shape.n_items)
        change: Forms = {}
        for block, replacement in enumerate(replacements):
            if len(replacement.lists.ids) == 0:
                continue
            forms = self._encode_replacement(replacement, user_ptr, shape)
            for name, form in forms.items():
                change[f"{name}.{block}"] = form
        return change

    def _encode_replacement(self, replacement: Replacement, user_ptr: Longs, shape: PairShape) -> Forms:
        """The change of one block's statistic."""
        client_of_list = np.repeat(list_user_clients(user_ptr), 2)
        lists = replacement.lists
        row = lists.rows()
        sign = replacement.sign
        factor = sign * self.weigh_lists(lists)
        terms = CooccurrenceTerms(client_of_list, lists.ptr, lists.ids, factor, shape.n_items, shape.inputs)
        forms: Forms = {"pairs": terms}
        owner = client_of_list[row]
        forms["touched"] = SparseRows(owner, lists.ids, sign[row])
        forms["repeats"] = sum_repeats(replacement.repeat_change, user_ptr)
        if self.has_weighted_terms:
            forms["count"] = replace(terms, factor=sign)
        return forms


def read_server_pair_shape(server: ServerState) -> PairShape:
    """The pairs that the server's sums are about."""
    inputs = server.heads["inputs"]
    return PairShape.from_inputs(len(server.items), inputs)


def read_view_pair_shape(view: CohortView) -> PairShape:
    """The pairs that the sums are about, as devices know them."""
    inputs = view.heads["inputs"]
    return PairShape.from_inputs(view.n_items, inputs)


def make_single_user_ptr(n_users: int) -> Longs:
    """The `user_ptr` of clients of one user each."""
    return np.arange(n_users + 1, dtype=np.int64)


def list_user_clients(user_ptr: Longs) -> Ints:
    """The client of every user."""
    n_users = np.diff(user_ptr)
    clients = np.arange(len(n_users), dtype=np.int32)
    return np.repeat(clients, n_users)


def sum_repeats(repeats: Doubles, user_ptr: Longs) -> DenseArrays:
    """(clients, 2) the sum of what each client's users repeat."""
    n_clients = len(user_ptr) - 1
    client = list_user_clients(user_ptr)
    sums = np.zeros((n_clients, 2))
    np.add.at(sums, client, repeats)
    return DenseArrays(sums)


def mark_client_items(lists: Ragged, user_ptr: Longs) -> SparseRows:
    """1 for every item of a client's lists."""
    client = list_user_clients(lists.ptr[user_ptr])
    ones = np.ones(len(lists.ids))
    return SparseRows(client, lists.ids, ones)


def sum_forms(forms: Forms, n_users: int, fields: Fields) -> Total:
    """The sum of what so many users would send, each of weight 1."""
    ones = np.ones(n_users)
    keys = np.zeros(n_users, np.uint64)
    upload = Upload(forms, ones, keys)
    return add_upload(empty_total(fields), upload, fields)
