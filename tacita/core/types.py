"""Values that cross boundaries: ragged lists, time blocks, what each side holds and sees.

`ServerState` and the totals of `fields` are all the server ever sees. `CohortView` is what a group of clients sees
of itself. Nothing of the former may refer to a history or to a private parameter; a test walks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tacita.core.flat_indices import expand_spans, find_in_sorted

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Keys = NDArray[np.uint64]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
Arrays = dict[str, AnyArray]


@dataclass(frozen=True)
class Ragged:
    """One list of item ids per row, stored flat: row r is `ids[ptr[r]:ptr[r + 1]]`, oldest first."""

    ptr: Longs  # (rows + 1,)
    ids: Ints  # (entries,)
    values: Arrays = field(default_factory=dict)  # columns aligned with ids, such as "rating" and "time"

    @staticmethod
    def from_pairs(rows: AnyArray, ids: AnyArray, n_rows: int, values: Arrays | None = None) -> Ragged:
        """Group `ids` by row, keeping the given order inside a row."""
        order = np.argsort(rows, kind="stable")
        ptr = np.zeros(n_rows + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=n_rows), out=ptr[1:])
        columns = {name: column[order] for name, column in (values or {}).items()}
        return Ragged(ptr, np.ascontiguousarray(ids[order], np.int32), columns)

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]]) -> Ragged:
        ptr = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(one) for one in lists], out=ptr[1:])
        flat = [i for one in lists for i in one]
        return Ragged(ptr, np.asarray(flat, np.int32))

    @staticmethod
    def empty(n_rows: int) -> Ragged:
        return Ragged(np.zeros(n_rows + 1, np.int64), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def row(self, r: int) -> Ints:
        return self.ids[self.ptr[r] : self.ptr[r + 1]]

    def counts(self) -> Longs:
        return np.diff(self.ptr)

    def rows(self) -> Ints:
        """The row of every entry."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.counts())

    def take(self, rows: AnyArray) -> Ragged:
        """The lists of the given rows, in that order; cost grows with what is taken."""
        starts = self.ptr[rows]
        return self.slice_entries(starts, self.ptr[np.asarray(rows) + 1] - starts)

    def slice_entries(self, starts: Longs, counts: Longs) -> Ragged:
        """One list for each start: that many of the entries from there on, wherever lists begin and end."""
        ptr = np.concatenate([[0], np.cumsum(counts)])
        source = expand_spans(starts, counts)
        return Ragged(ptr, self.ids[source], {name: column[source] for name, column in self.values.items()})

    def join_rows(self, other: Ragged) -> Ragged:
        """Row by row, this list followed by the other; a shorter operand counts as empty rows.

        A column stays if all entries have it, so lists without entries take none away.
        """
        n = max(len(self), len(other))
        rows = np.concatenate([self.rows(), other.rows()])
        filled = [one for one in (self, other) if len(one.ids)]
        shared = [name for name in filled[0].values if all(name in one.values for one in filled)] if filled else []
        columns = {name: np.concatenate([one.values[name] for one in filled]) for name in shared}
        return Ragged.from_pairs(rows, np.concatenate([self.ids, other.ids]), n, columns)

    def filter_entries(self, stays: Bools) -> Ragged:
        """The same lists with some of their entries only."""
        ptr = np.append(0, np.cumsum(stays))[self.ptr]
        return Ragged(ptr, self.ids[stays], {name: column[stays] for name, column in self.values.items()})

    def sort_by_time(self) -> Ragged:
        """The same lists with their entries in order of time; as they are, where no times are known."""
        order = np.lexsort((self.values.get("time", np.zeros(len(self.ids))), self.rows()))
        return Ragged(self.ptr, self.ids[order], {name: column[order] for name, column in self.values.items()})

    def holds(self, rows: AnyArray, ids: AnyArray) -> Bools:
        """Whether each id is in the list of its row."""
        width = 1 + max(int(self.ids.max(initial=0)), int(np.max(ids, initial=0)))
        own = np.sort(self.rows().astype(np.int64) * width + self.ids)  # nearly in order: much faster than hashing
        return find_in_sorted(own, np.asarray(rows, np.int64) * width + ids)[1]


StateUpdate = Mapping[str, AnyArray | Ragged]
"""What devices keep, by name: an array with a row per user, or a list per user."""


@dataclass(frozen=True)
class Block:
    """One slice of time: what each user did in it, split for training and evaluation.

    Rows are users 0..n_users, everybody seen up to and including this block; items likewise.
    """

    index: int
    n_users: int
    n_items: int
    train: Ragged
    valid: Ragged
    test: Ragged
    new_users: Bools  # (n_users,) first seen in this block
    n_rows: int  # interactions cut into this block, repeats included


@dataclass(frozen=True)
class FilterEffect:
    """What one filter took from a table: the size before it and after it."""

    reason: str
    rows: tuple[int, int]
    users: tuple[int, int]
    items: tuple[int, int]


@dataclass(frozen=True)
class BlockStream:
    """A dataset after filtering and splitting: blocks in time order, with raw ids to translate back."""

    name: str
    blocks: tuple[Block, ...]
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    user_keys: Keys  # hash of the raw id: random streams do not depend on numbering
    item_keys: Keys
    titles: dict[str, str]
    fingerprint: str  # of data and split together
    removed: tuple[FilterEffect, ...] = ()  # what filtering took, in its order
    notes: tuple[str, ...] = ()  # sentences for people: what was read for what, and what could be
    items_from: Path | None = None  # the file that may tell more of the items: `data.features` reads it
    low_rated: Ragged | None = (
        None  # (users) items that were chosen and rated below `split.min_rating`: never candidates
    )
    source: str = ""  # fingerprint of the data alone, whatever the split

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    @property
    def n_users(self) -> int:
        return len(self.user_ids)

    def history(self, before: int) -> Ragged:
        """Everything each user did in blocks 0..before-1, every split, oldest block first."""
        past = Ragged.empty(0)
        for block in self.blocks[:before]:
            past = past.join_rows(block.train).join_rows(block.valid).join_rows(block.test)
        return past

    def train_items(self, up_to: int) -> Ragged:
        """The training items of blocks 0..up_to, per user."""
        past = Ragged.empty(0)
        for block in self.blocks[: up_to + 1]:
            past = past.join_rows(block.train)
        return past


@dataclass(frozen=True)
class SharedRecord:
    """Interactions that people shared, by sender: written by their requests alone, and taken out by them."""

    sender: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    item: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    time: Doubles = field(default_factory=lambda: np.zeros(0))  # when it was shared

    def __len__(self) -> int:
        return len(self.sender)

    def with_shared(self, sender: int, items: AnyArray, time: float) -> SharedRecord:
        """Some more of one sender; what is there already stays as it was."""
        return self.with_lists(*_make_single_list(sender, np.unique(items)), time)

    def without_items(self, sender: int, items: AnyArray) -> SharedRecord:
        return self.without_lists(*_make_single_list(sender, items))

    def with_lists(self, senders: Keys, items: Ragged, time: float) -> SharedRecord:
        """Some more of several senders, a list each."""
        sender = np.repeat(senders, items.counts())
        known, fresh = self._pair_numbers(sender, items.ids)
        _, first = np.unique(fresh, return_index=True)
        new = np.sort(first[~np.isin(fresh[first], known)])
        return SharedRecord(
            np.append(self.sender, sender[new]),
            np.append(self.item, items.ids[new]).astype(np.int32),
            np.append(self.time, np.full(len(new), time)),
        )

    def without_lists(self, senders: Keys, items: Ragged) -> SharedRecord:
        known, gone = self._pair_numbers(np.repeat(senders, items.counts()), items.ids)
        stays = ~np.isin(known, gone)
        return SharedRecord(self.sender[stays], self.item[stays], self.time[stays])

    def _pair_numbers(self, sender: Keys, item: AnyArray) -> tuple[Longs, Longs]:
        """A number for each pair of sender and item, here and in another list."""
        _, number = np.unique(np.append(self.sender, sender), return_inverse=True)
        both = np.append(self.item, item).astype(np.int64)
        pairs = number * (1 + both.max(initial=0)) + both
        return pairs[: len(self)], pairs[len(self) :]

    def lists_of(self, senders: Keys) -> Ragged:
        """What each of some senders shared, oldest first."""
        order = np.argsort(senders)
        at, found = find_in_sorted(senders[order], self.sender)
        rows = order[at[found]]
        return Ragged.from_pairs(rows, self.item[found], len(senders), {"time": self.time[found]})


def _make_single_list(sender: int, items: AnyArray) -> tuple[Keys, Ragged]:
    return np.array([sender], np.uint64), Ragged(np.array([0, len(items)]), np.asarray(items, np.int32))


@dataclass(frozen=True)
class ServerState:
    """All that the server holds between rounds."""

    items: Floats  # (n_items, width) the item table
    heads: Arrays  # shared parameters that are not item rows
    block: int = 0
    round: int = 0  # rounds done in this block
    parts: dict[str, Arrays] = field(default_factory=dict)  # part or learner -> its server-side arrays
    shared: SharedRecord = field(default_factory=SharedRecord)

    def with_items(self, items: Floats) -> ServerState:
        return replace(self, items=items)

    def with_part(self, name: str, arrays: Arrays) -> ServerState:
        return replace(self, parts={**self.parts, name: arrays})


@dataclass(frozen=True)
class Request:
    """What a person asks for between rounds: to share items, take them back, have them forgotten, or leave."""

    kind: Literal["share", "unshare", "forget", "leave"]
    sender: int  # the key of its device
    items: Ints  # in the catalogue's numbers; of who leaves, nothing
    time: float = 0.0
    number: int = 0  # tells two requests of the same round apart


@dataclass(frozen=True)
class RequestBatch:
    """The same asked for by several people, to be carried out together."""

    kind: Literal["share", "unshare", "forget", "leave"]
    senders: Keys  # each of them once
    items: Ragged  # of each
    time: float = 0.0
    number: int = 0
    is_immediate: bool = False  # not to wait for others, where a method would
    withdrawn_items: Ragged | None = (
        None  # what of each the server held and holds no longer; filled in as it is carried out
    )

    @staticmethod
    def from_request(request: Request | RequestBatch) -> RequestBatch:
        if isinstance(request, RequestBatch):
            return request
        sender, items = _make_single_list(request.sender, request.items)
        return RequestBatch(request.kind, sender, items, request.time, request.number)

    def to_requests(self) -> list[Request]:
        lists = (self.items.row(n) for n in range(len(self.senders)))
        return [
            Request(self.kind, int(sender), one, self.time, self.number) for sender, one in zip(self.senders, lists)
        ]

    def concat(self, more: RequestBatch) -> RequestBatch:
        """These people's, then other people's; both as they were made."""
        if not len(more.senders):
            return self
        items = Ragged(
            np.concatenate([self.items.ptr, self.items.ptr[-1] + more.items.ptr[1:]]),
            np.concatenate([self.items.ids, more.items.ids]),
        )
        return replace(self, senders=np.concatenate([self.senders, more.senders]), items=items)

    def take(self, which: AnyArray) -> RequestBatch:
        """Those of some of the people, in that order."""
        taken = None if self.withdrawn_items is None else self.withdrawn_items.take(which)
        return replace(self, senders=self.senders[which], items=self.items.take(which), withdrawn_items=taken)


@dataclass(frozen=True)
class RoundReplay:
    """A round that is played once more: with the draws of an earlier one, and with a share of its local steps."""

    round: int
    share: float = 1.0


@dataclass(frozen=True)
class Broadcast:
    """What travels down besides the model: the same for everybody, and for some clients a list of their own."""

    common: dict[str, Arrays] = field(default_factory=dict)  # part -> what its broadcast carries
    per_client: Callable[[Keys], dict[str, Ragged]] = (
        lambda clients: {}
    )  # keys of clients -> part -> a list for each of them
    n_bytes: float = 0.0  # on average per client, the model included
    per_client_items: Callable[[Keys, Ragged], dict[str, Ragged]] | None = (
        None  # the same about some items of each client only
    )
    decode_lists: Callable[[dict[str, Ragged], int], dict[str, Ragged]] = lambda lists, n_items: (
        lists
    )  # as devices read them


@dataclass(frozen=True)
class CohortView:
    """What the clients of one cohort see of themselves, plus what the server sent them.

    One row per client; `users` of client c are `user[user_ptr[c]:user_ptr[c + 1]]` (one each by default).
    """

    block: int
    round: int
    n_items: int
    user_ptr: Longs  # (clients + 1,)
    user: Ints  # (users,) global index; only the lab's bookkeeping reads it
    user_keys: Keys  # (users,)
    client_keys: Keys  # (clients,)
    train: Ragged  # (users) positives to learn from
    exclude: Ragged  # (users) never drawn as negatives
    private: Floats  # (users, private width)
    parts: dict[str, Arrays]  # part name -> (users, ...) what the part keeps on the device
    items: Floats  # received: the item table
    heads: Arrays  # received: shared parameters
    received: dict[str, Arrays]  # received: part name -> what its broadcast carried
    per_client: dict[str, Ragged] = field(
        default_factory=dict
    )  # received: part name -> (clients) what is for each alone
    lists: dict[str, Mapping[str, Ragged]] = field(default_factory=dict)  # like `parts`: lists that a part keeps
    history: Ragged | None = None  # (users) what each did in earlier blocks, where the model reads it
    replay: RoundReplay | None = None  # a round that is played once more; `round` is the earlier one

    @property
    def n_clients(self) -> int:
        return len(self.user_ptr) - 1

    @property
    def has_single_users(self) -> bool:
        return len(self.user) == self.n_clients


@dataclass
class LocalModels:
    """Local models of a cohort while they train: every client's own version of the rows it touches.

    Client c's rows are `rows[row_start[c]:row_start[c + 1]]`; its samples `ptr[c]:ptr[c + 1]`.
    """

    view: CohortView
    ptr: Longs  # (clients + 1,) samples
    item: Ints  # (samples,)
    label: Floats  # (samples,) in [0, 1], or a rating
    user_ptr: Longs  # (users + 1,) samples, before shuffling
    turn_ptr: Longs  # (clients + 1,) samples, or pairs, that batches of one epoch are cut from
    order: Longs  # (epochs, turns) sample of each turn, shuffled inside each client; of a pair its negative
    partner: Longs | None  # (samples,) where pairs are learnt from: the positive that a negative is paired with
    batch: int
    row_of: Ints  # (samples,) local row of the sample's item, counted from row_start
    row_start: Longs  # (clients + 1,)
    row_item: Ints  # (rows,)
    rows: Floats  # (rows, width)
    private: Floats  # (users, private width)
    heads: Arrays  # name -> (clients, ...)
    rows_needed: dict[str, tuple[Ragged, Ints]]  # part name -> its lists per user, local row of each entry
    moments: Arrays = field(default_factory=dict)
    """What lazy-adam goes on from, where it is kept: private.mean, private.square, the same of heads.<name> and rows,
    rows.steps, and the clients' own steps so far."""
    n_part_samples: Longs | None = None  # (users,) how many of a user's samples, the last ones, parts gave it
    weight: Floats | None = None  # (samples,) what a sample's loss, or its pair's, is multiplied by; None: 1
    personal: Arrays = field(default_factory=dict)  # pFedMe: the device's own private, rows and heads.<name>
    notes: Arrays = field(default_factory=dict)  # name -> (clients,) what parts leave for the lab's log; nan: nothing
    batch_ptr: Longs | None = None  # (clients + 1,) batches of an epoch, where they hold whole people
    batch_start: Longs | None = None  # (epochs, batches + 1) the first turn of each, and where the last one ends
    batches_per_group: Longs | None = None  # (clients,) how many batches after each other are about the same people

    @property
    def owner(self) -> Ints:
        """Which of the cohort's users each sample belongs to."""
        return np.repeat(np.arange(len(self.user_ptr) - 1, dtype=np.int32), np.diff(self.user_ptr))

    @property
    def steps_per_epoch(self) -> Longs:
        return -(-np.diff(self.turn_ptr) // self.batch) if self.batch_ptr is None else np.diff(self.batch_ptr)

    @property
    def n_steps(self) -> Longs:
        """SGD steps of each client in the round."""
        return self.steps_per_epoch * len(self.order)

    def find_batches(self, step: int) -> tuple[Longs, Longs, Longs, Longs]:
        """The clients that have a step, and the epoch, the first turn and the size of each one's batch."""
        active = np.flatnonzero(step < self.n_steps)
        epoch, within = np.divmod(step, self.steps_per_epoch[active])
        if self.batch_ptr is None or self.batch_start is None:
            start = self.turn_ptr[active] + within * self.batch
            return active, epoch, start, np.minimum(self.batch, self.turn_ptr[active + 1] - start)
        begin, end = (self.batch_start[epoch, self.batch_ptr[active] + within + k] for k in (0, 1))
        return active, epoch, begin, end - begin


@dataclass(frozen=True)
class ExtraSamples:
    """Samples with weights of their own that join one step's loss, picked from a part's lists at hand."""

    ptr: Longs  # (clients + 1,)
    pick: Longs  # (samples,) entry of the part's list
    label: Floats
    weight: Floats  # what a sample's loss is multiplied by


@dataclass(frozen=True)
class NormPenalty:
    """strength * max(0, |change of item rows and shared parameters| - length)^2 joins a client's loss."""

    strength: float
    length: float


@dataclass(frozen=True)
class ProximalTerm:
    """A quadratic pull towards earlier values, applied implicitly after every step.

    Strength s adds s * |x - target|^2 to the loss of each pulled parameter.
    """

    strength: float
    rows: Floats  # (old items, width) target of item rows 0..old items
    private: Floats  # (users, private width)
    pulls_private: Bools  # (users,) whose private vector is pulled
