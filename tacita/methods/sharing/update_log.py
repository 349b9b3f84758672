"""What is written down so that rounds can be gone over again: on devices what each sent, on the server who took part.

A device's log is two lists: its rounds, with how many rows it kept of each and the weight it counted with, and these
rows one round after the other.
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
from tacita.round.parts import Part, RunContext
from tacita.round.registry import part_class
from tacita.round.request import RequestBatch

BlockRound = tuple[int, int]  # a block and a round of it
Lists = Mapping[str, Ragged]


def check_replay_settings(name: str, plan: TrainConfig) -> None:
    """Refuse settings under which nobody could tell which rounds led to the model, or what divided them."""
    if plan.resume_from == "last":
        raise TacitaError(
            f"part '{name}' goes over the rounds that led to the best one once more; use train.resume_from = 'best'."
        )
    if plan.aggregation == "fixed" and plan.denominator is None:
        raise TacitaError(
            f"part '{name}' divides earlier rounds by what they were divided by; say it: train.denominator, about "
            "how many clients a round has."
        )


def check_part_order(name: str, world: RunContext, *places: tuple[str, Literal["before", "after"]]) -> None:
    """Refuse a list of parts in which one that writes rounds down does not see them as they are.

    `places`: a hook, and where to stand from the parts that change something in it.
    """
    listed = [str(one.get("name")) for one in world.part_specs]
    if name not in listed:  # built by itself
        return
    mine = listed.index(name)
    for hook, place in places:
        wrong = listed[mine + 1 :] if place == "after" else listed[:mine]
        for other in wrong:
            cls = part_class(other)
            if getattr(cls, hook) is not getattr(Part, hook) and not cls.only_notes:
                raise TacitaError(
                    f"part '{name}' has to stand {place} '{other}' in 'parts'; where a method has another order, use "
                    "method 'fedavg' and list all parts in order."
                )


def compute_max_weight(world: RunContext, n_items: int) -> float:
    """The most that one client's upload may count, so that no node can say that its people count for more."""
    parts = [part_class(str(one.get("name"))) for one in world.part_specs]
    factors = [one.most_weight for one in parts if one.weight is not Part.weight]
    return float(np.prod(factors)) * (n_items if world.train.weighs_data else 1.0)


def asks_to_forget(requests: RequestBatch) -> bool:
    """Whether requests ask for something to be forgotten at all."""
    if requests.kind in ("forget", "leave"):  # what of it was never shared the server does not hear
        return len(requests.senders) > 0
    return requests.kind == "unshare" and len(requests.items.ids) > 0


# On devices


def empty_log(n_users: int, width: int) -> StateUpdate:
    none, ids = np.zeros(n_users + 1, np.int64), np.zeros(0, np.int32)
    rounds: Arrays = {"block": ids, "count": ids, "weight": np.zeros(0)}
    return {"rows": Ragged(none, ids, {"row": np.zeros((0, width), np.float32)}), "rounds": Ragged(none, ids, rounds)}


def as_rows(value: Form) -> SparseRows:
    """Uploads as rows, whatever a part made of them."""
    if isinstance(value, SparseRows):
        return value
    if not isinstance(value, DenseArrays):
        raise TacitaError("a person's statistic has no rows to be kept.")
    clients, items = value.value.shape[:2]
    client = np.repeat(np.arange(clients, dtype=np.int32), items)
    item = np.tile(np.arange(items, dtype=np.int32), clients)
    return SparseRows(client, item, value.value.reshape(clients * items, -1))


def select_largest_rows(rows: SparseRows, n_clients: int, share: float) -> Longs:
    """The places of the rows that moved furthest: of every client a share of them, rounded up."""
    length = (rows.value.astype(np.float64) ** 2).sum(1)
    order = np.lexsort((rows.item, -length, rows.client))
    counts = np.bincount(rows.client, minlength=n_clients)
    kept = np.ceil(share * counts - 1e-9).astype(np.int64)
    return np.asarray(np.sort(order[expand_spans(np.cumsum(counts) - counts, kept)]))


def record_upload(view: CohortView, upload: Upload, share: float) -> StateUpdate:
    """What an upload adds to the log; who counts for nothing writes nothing. A silo's first user keeps its log."""
    rows = as_rows(upload.values["rows"])
    kept = select_largest_rows(rows, upload.n_clients, share)
    kept = kept[upload.weight[rows.client[kept]] > 0]
    n_users, first = len(view.user), view.user_ptr[:-1]
    moved = Ragged.from_pairs(first[rows.client[kept]], rows.item[kept], n_users, {"row": rows.value[kept]})
    who = np.flatnonzero(upload.weight > 0)
    counts = np.bincount(rows.client[kept], minlength=upload.n_clients)[who].astype(np.int32)
    entry: Arrays = {"block": np.full(len(who), view.block, np.int32), "count": counts, "weight": upload.weight[who]}
    rounds = Ragged.from_pairs(first[who], np.full(len(who), view.round, np.int32), n_users, entry)
    return {name: AppendedLists(one.ptr, one.ids, one.values) for name, one in (("rows", moved), ("rounds", rounds))}


def read_round(lists: Lists, moment: BlockRound) -> tuple[SparseRows, Doubles]:
    """What every device kept of a round, and the weight it counted with; 0: it did not take part."""
    rounds = lists["rounds"]
    count = rounds.values["count"].astype(np.int64)
    before = np.cumsum(count) - count  # rows lie in the order of their rounds, user by user
    at = np.flatnonzero((rounds.values["block"] == moment[0]) & (rounds.ids == moment[1]))
    owner = rounds.rows()[at]
    rows = slice_lists(lists, "rows", (owner, before[at] - before[rounds.ptr[owner]], count[at]))
    weight = np.zeros(len(rounds))
    weight[owner] = rounds.values["weight"][at]
    return SparseRows(np.repeat(owner, count[at]), rows.ids, rows.values["row"]), weight


def drop_rows(lists: Lists, gone: Bools) -> StateUpdate:
    """The log without some rows; its rounds stay."""
    rounds, rows = lists["rounds"], lists["rows"]
    count = rounds.values["count"].astype(np.int64)
    of_round = np.repeat(np.arange(len(count)), count)
    left = np.bincount(of_round[~gone], minlength=len(count)).astype(np.int32)
    stays = Ragged.from_pairs(rows.rows()[~gone], rows.ids[~gone], len(rows), {"row": rows.values["row"][~gone]})
    return {"rows": stays, "rounds": Ragged(rounds.ptr, rounds.ids, {**rounds.values, "count": left})}


def log_bytes(lists: Lists) -> Longs:
    """What each user's log takes: numbers and ids, nothing else is written."""
    out = np.zeros(len(lists["rows"]), np.int64)
    for one in lists.values():
        width = one.ids.itemsize + sum(v.itemsize * int(np.prod(v.shape[1:])) for v in one.values.values())
        out += one.counts() * width
    return out


# On the server


def empty_round_log() -> Arrays:
    return {
        "rounds": np.zeros((0, 2), np.int32),
        "ptr": np.zeros(1, np.int64),
        "clients": np.zeros(0, np.uint64),
    }


def record_participants(held: Arrays, moment: BlockRound, clients: Keys) -> Arrays:
    """One round more, and who takes part in it."""
    return {
        **held,
        "rounds": np.concatenate([held["rounds"], np.array([moment], np.int32)]),
        "ptr": np.append(held["ptr"], held["ptr"][-1] + len(clients)),
        "clients": np.concatenate([held["clients"], clients]),
    }


def iterate_rounds(held: Arrays) -> Iterator[tuple[BlockRound, Keys]]:
    """Every round that led to the model, in order, and who took part in it."""
    for k, (block, number) in enumerate(held["rounds"].tolist()):
        yield (block, number), held["clients"][held["ptr"][k] : held["ptr"][k + 1]]


def drop_clients(held: Arrays, gone: Keys) -> Arrays:
    stays = ~np.isin(held["clients"], gone)
    ends = np.concatenate([[0], np.cumsum(stays)])
    return {**held, "clients": held["clients"][stays], "ptr": ends[held["ptr"]]}


def append_new_rows(start: Floats | None, items: Floats) -> Floats:
    """The table that everything began with, and the rows of new items."""
    return items.copy() if start is None else np.concatenate([start, items[len(start) :]])


def packed_bytes(arrays: Arrays) -> int:
    """Serialised."""
    return len(pack(arrays)) if arrays else 0


def build_certificate(name: str, held: Arrays, **more: Any) -> dict[str, Any]:
    """What every certificate of a method says: its name, whether it is exact and what the server keeps for it."""
    return {"method": name, "exact": False, "storage_server": packed_bytes(held), **more}
