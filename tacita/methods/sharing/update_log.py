"""What is recorded so that rounds can be replayed: on devices what each sent, on the server who took part.

A device's log is two lists. One holds its rounds, with the number of rows that it kept of each and the weight of its
upload. The other holds these rows, one round after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from tacita.core.codec import pack
from tacita.core.config import TrainConfig
from tacita.core.device_lists import AppendedLists, slice_lists
from tacita.core.errors import TacitaError
from tacita.core.flat_indices import expand_spans
from tacita.core.types import Arrays, Bools, CohortView, Doubles, Floats, Keys, Longs, Ragged, StateUpdate
from tacita.messages import DenseArrays, Form, SparseRows, Upload
from tacita.round.part import PartTraits, RunContext
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

BlockRound = tuple[int, int]  # a block and a round of it
Place = Literal["before", "after"]
Lists = Mapping[str, Ragged]


def check_replay_settings(name: str, train: TrainConfig) -> None:
    """Refuse settings under which nobody could tell which rounds led to the model, or what divided them."""
    if train.resume_from == "last":
        raise TacitaError(
            f"part '{name}' goes over the rounds that led to the best one once more; use train.resume_from = 'best'."
        )
    if train.aggregation == "fixed" and train.denominator is None:
        raise TacitaError(
            f"part '{name}' divides earlier rounds by what they were divided by; say it: train.denominator, about "
            "how many clients a round has."
        )


def check_part_order(name: str, context: RunContext, *places: tuple[str, Place]) -> None:
    """Refuse a list of parts in which a part that records rounds does not see them as they are.

    `places`: a hook, and where to stand from the parts that change something in it.
    """
    names = [traits.name for traits in context.traits]
    if name not in names:  # built by itself
        return
    position = names.index(name)
    for hook, place in places:
        misplaced = context.traits[:position]
        if place == "after":
            misplaced = context.traits[position + 1 :]
        for other in misplaced:
            _check_position(name, place, other, hook)


def _check_position(name: str, place: Place, other: PartTraits, hook: str) -> None:
    changes = hook in other.hooks
    changes_rounds = changes and not other.observes_only
    if changes_rounds:
        raise TacitaError(
            f"part '{name}' has to stand {place} '{other.name}' in 'parts'; where a method has another order, use "
            "method 'fedavg' and list all parts in order."
        )


def bound_client_weight(context: RunContext, n_items: int) -> float:
    """The most that one client's upload may count, so that no node can give its users more weight."""
    if context.train.weighs_data:
        return float(n_items)
    return 1.0


def asks_to_forget(requests: RequestBatch) -> bool:
    """Whether requests ask for something to be forgotten at all."""
    if requests.kind in ("forget", "leave"):  # the server does not know which unshared items that is about
        return len(requests.senders) > 0
    return requests.kind == "unshare" and len(requests.items.ids) > 0


# On devices


def make_empty_log(n_users: int, width: int) -> dict[str, Ragged]:
    n_ends = n_users + 1
    ptr = np.zeros(n_ends, np.int64)
    ids = np.zeros(0, np.int32)
    shape = (0, width)
    no_rows = np.zeros(shape, np.float32)
    no_weights = np.zeros(0)
    columns: Arrays = {"block": ids, "count": ids, "weight": no_weights}
    rows = Ragged(ptr, ids, {"row": no_rows})
    rounds = Ragged(ptr, ids, columns)
    return {"rows": rows, "rounds": rounds}


def to_sparse_rows(value: Form) -> SparseRows:
    """Uploads as rows, whatever a part made of them."""
    if isinstance(value, SparseRows):
        return value
    if not isinstance(value, DenseArrays):
        raise TacitaError("a person's statistic has no rows to be kept.")
    shape = value.value.shape
    n_clients, n_items = shape[:2]
    clients = np.arange(n_clients, dtype=np.int32)
    items = np.arange(n_items, dtype=np.int32)
    n_rows = n_clients * n_items
    rows = value.value.reshape(n_rows, -1)
    client = np.repeat(clients, n_items)
    item = np.tile(items, n_clients)
    return SparseRows(client, item, rows)


def select_largest_rows(rows: SparseRows, n_clients: int, share: float) -> Longs:
    """The places of the rows that moved furthest: of every client a share of them, rounded up."""
    values = rows.value.astype(np.float64)
    squares = values**2
    length = squares.sum(1)
    descending = -length
    keys = (rows.item, descending, rows.client)
    order = np.lexsort(keys)
    counts = np.bincount(rows.client, minlength=n_clients)
    starts = np.cumsum(counts) - counts
    exact = share * counts
    limits = np.ceil(exact - 1e-9)
    n_largest = limits.astype(np.int64)
    largest = expand_spans(starts, n_largest)
    places = np.sort(order[largest])
    return np.asarray(places)


def record_upload(view: CohortView, upload: Upload, share: float) -> StateUpdate:
    """What an upload adds to the log; a client of weight 0 records nothing. A silo's first user keeps its log."""
    rows = to_sparse_rows(upload.values["rows"])
    sends = upload.weight > 0
    places = select_largest_rows(rows, upload.n_clients, share)
    is_sent = sends[rows.client[places]]
    places = places[is_sent]
    client = rows.client[places]
    moved = rows.value[places]
    n_users = len(view.user)
    first_user = view.user_ptr[:-1]
    owner = first_user[client]
    items = rows.item[places]
    row_lists = Ragged.from_pairs(owner, items, n_users, {"row": moved})
    row_counts = np.bincount(client, minlength=upload.n_clients)
    senders = np.flatnonzero(sends)
    columns: Arrays = {
        "block": np.full(len(senders), view.block, np.int32),
        "count": row_counts[senders].astype(np.int32),
        "weight": upload.weight[senders],
    }
    n_senders = len(senders)
    round_ids = np.full(n_senders, view.round, np.int32)
    users = first_user[senders]
    round_lists = Ragged.from_pairs(users, round_ids, n_users, columns)
    return {"rows": _to_appended(row_lists), "rounds": _to_appended(round_lists)}


def _to_appended(lists: Ragged) -> AppendedLists:
    return AppendedLists(lists.ptr, lists.ids, lists.values)


def read_round(lists: Lists, moment: BlockRound) -> tuple[SparseRows, Doubles]:
    """What every device kept of a round, and the weight of its upload; 0: it did not take part."""
    block, number = moment
    rounds = lists["rounds"]
    columns = rounds.values
    counts = columns["count"].astype(np.int64)
    starts = np.cumsum(counts) - counts  # rows lie in the order of their rounds, user by user
    is_of_block = rounds.values["block"] == block
    is_of_round = rounds.ids == number
    entries = np.flatnonzero(is_of_block & is_of_round)
    owner = rounds.rows()[entries]
    first_entry = rounds.ptr[owner]
    first_start = starts[first_entry]
    list_starts = starts[entries] - first_start
    entry_counts = counts[entries]
    spans = (owner, list_starts, entry_counts)
    rows = slice_lists(lists, "rows", spans)
    client = np.repeat(owner, entry_counts)
    weight = np.zeros(len(rounds))
    weights = rounds.values["weight"]
    weight[owner] = weights[entries]
    values = rows.values["row"]
    moved = SparseRows(client, rows.ids, values)
    return moved, weight


def without_rows(lists: Lists, dropped: Bools) -> StateUpdate:
    """The log without some rows; its rounds stay."""
    rounds = lists["rounds"]
    rows = lists["rows"]
    stays = ~dropped
    earlier_counts = rounds.values["count"]
    counts = earlier_counts.astype(np.int64)
    n_rounds = len(counts)
    round_ids = np.arange(n_rounds)
    round_of_row = np.repeat(round_ids, counts)
    round_of_remaining = round_of_row[stays]
    remaining_counts = np.bincount(round_of_remaining, minlength=n_rounds)
    new_counts = remaining_counts.astype(np.int32)
    columns = {**rounds.values, "count": new_counts}
    values = rows.values["row"][stays]
    owner = rows.rows()[stays]
    items = rows.ids[stays]
    n_users = len(rows)
    remaining_rows = Ragged.from_pairs(owner, items, n_users, {"row": values})
    remaining_rounds = Ragged(rounds.ptr, rounds.ids, columns)
    return {"rows": remaining_rows, "rounds": remaining_rounds}


def count_log_bytes(lists: Lists) -> Longs:
    """The size of each user's log: numbers and ids, nothing else is written."""
    n_users = len(lists["rows"])
    sizes = np.zeros(n_users, np.int64)
    for entries in lists.values():
        entry_size = entries.ids.itemsize
        for column in entries.values.values():
            row_shape = column.shape[1:]
            numbers = int(np.prod(row_shape))
            entry_size += column.itemsize * numbers
        sizes += entries.counts() * entry_size
    return sizes


# On the server


def make_empty_round_log() -> Arrays:
    return {
        "rounds": np.zeros((0, 2), np.int32),
        "ptr": np.zeros(1, np.int64),
        "clients": np.zeros(0, np.uint64),
    }


def record_participants(state: Arrays, moment: BlockRound, clients: Keys) -> Arrays:
    """One round more, and who takes part in it."""
    new_round = np.array([moment], np.int32)
    start = state["ptr"][-1]
    end = start + len(clients)
    return {
        **state,
        "rounds": np.concatenate([state["rounds"], new_round]),
        "ptr": np.append(state["ptr"], end),
        "clients": np.concatenate([state["clients"], clients]),
    }


def iterate_rounds(state: Arrays) -> Iterator[tuple[BlockRound, Keys]]:
    """Every round that led to the model, in order, and who took part in it."""
    ends = state["ptr"]
    moments = state["rounds"].tolist()
    for index, (block, number) in enumerate(moments):
        start = ends[index]
        end = ends[index + 1]
        participants = slice(start, end)
        clients = state["clients"][participants]
        yield (block, number), clients


def drop_clients(state: Arrays, dropped: Keys) -> Arrays:
    clients = state["clients"]
    stays = ~np.isin(clients, dropped)
    counts = np.cumsum(stays)
    ends = np.concatenate([[0], counts])
    ptr = ends[state["ptr"]]
    return {**state, "clients": clients[stays], "ptr": ptr}


def extend_first_table(start: Floats | None, items: Floats) -> Floats:
    """The first table, and the rows of new items."""
    if start is None:
        return items.copy()
    new_rows = items[len(start) :]
    return np.concatenate([start, new_rows])


def count_packed_bytes(arrays: Arrays) -> int:
    """The serialised size."""
    if not arrays:
        return 0
    return len(pack(arrays))


def build_unlearning_report(name: str, state: Arrays, **fields: Any) -> UnlearningReport:
    """What every method reports: its name, whether it is exact and what the server keeps for it."""
    size = count_packed_bytes(state)
    values = {"method": name, "exact": False, "storage_server": size} | fields
    return UnlearningReport(**values)
