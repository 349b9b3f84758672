"""Values that cross boundaries: ragged lists, time blocks, what each side holds and sees.

`ServerState` and the totals of `messages` are all the server ever sees. `CohortView` is what a group of clients sees
of itself. Nothing of the former may refer to a history or to a private parameter; a test walks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tacita.core.flat_indices import find_in_sorted
from tacita.core.ragged import AnyArray, Arrays, Bools, Doubles, Floats, Ints, Keys, Longs, Ragged, join_lists

__all__ = [
    "AnyArray",
    "Arrays",
    "Block",
    "BlockStream",
    "Bools",
    "Broadcast",
    "CohortView",
    "Doubles",
    "ExtraSamples",
    "FilterEffect",
    "Floats",
    "Ints",
    "Keys",
    "ListsByPart",
    "LocalModels",
    "Longs",
    "NormPenalty",
    "ProximalTerm",
    "Ragged",
    "RoundReplay",
    "ServerState",
    "SharedRecord",
    "StateUpdate",
    "make_single_list",
]

StateUpdate = Mapping[str, AnyArray | Ragged]
"""New device state, by name: an array with a row per user, or a list per user."""


@dataclass(frozen=True)
class Block:
    """One slice of time: what each user did in it, split for training and evaluation.

    Rows are users 0..n_users, all users up to and including this block; items likewise.
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
    """What one filter removed from a table: the size before it and after it."""

    reason: str
    rows: tuple[int, int]
    users: tuple[int, int]
    items: tuple[int, int]


@dataclass(frozen=True)
class BlockStream:
    """A dataset after filtering and splitting: blocks in time order, with raw ids to translate back."""

    name: str
    blocks: tuple[Block, ...]
    user_ids: Sequence[str]
    item_ids: tuple[str, ...]
    user_keys: Keys  # hash of the raw id: random streams do not depend on numbering
    item_keys: Keys
    titles: dict[str, str]
    fingerprint: str  # of data and split together
    removed: tuple[FilterEffect, ...] = ()  # by filters, in their order
    notes: tuple[str, ...] = ()  # sentences for people: which columns were read, and which could be
    items_from: Path | None = None  # the file that may describe the items: `data.features` reads it
    low_rated: Ragged | None = None  # (users) items rated below `split.min_rating`: never candidates
    source: str = ""  # fingerprint of the data alone, whatever the split

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    @property
    def n_users(self) -> int:
        return len(self.user_ids)

    def collect_history(self, before: int, with_columns: bool = True) -> Ragged:
        """Everything each user did in blocks 0..before-1, every split, oldest block first."""
        lists = []
        for block in self.blocks[:before]:
            lists += [block.train, block.valid, block.test]
        return join_lists(lists, with_columns)

    def collect_train_items(self, up_to: int) -> Ragged:
        """The training items of blocks 0..up_to, per user."""
        return join_lists([block.train for block in self.blocks[: up_to + 1]])


@dataclass(frozen=True)
class SharedRecord:
    """Interactions that users shared, by sender: only their requests write and remove them."""

    sender: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    item: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    time: Doubles = field(default_factory=lambda: np.zeros(0))  # when it was shared

    def __len__(self) -> int:
        return len(self.sender)

    def without_items(self, sender: int, items: AnyArray) -> SharedRecord:
        senders, lists = make_single_list(sender, items)
        return self.without_lists(senders, lists)

    def with_lists(self, senders: Keys, items: Ragged, time: float) -> SharedRecord:
        """With more items of several senders, a list each; items that are already shared stay unchanged."""
        sender = np.repeat(senders, items.counts())
        own_pairs, pairs = self._number_pairs(sender, items.ids)
        _, first = np.unique(pairs, return_index=True)
        is_known = np.isin(pairs[first], own_pairs)
        new = np.sort(first[~is_known])
        new_time = np.full(len(new), time)
        all_items = np.append(self.item, items.ids[new])
        return SharedRecord(
            np.append(self.sender, sender[new]),
            all_items.astype(np.int32),
            np.append(self.time, new_time),
        )

    def without_lists(self, senders: Keys, items: Ragged) -> SharedRecord:
        sender = np.repeat(senders, items.counts())
        own_pairs, pairs = self._number_pairs(sender, items.ids)
        stays = ~np.isin(own_pairs, pairs)
        return SharedRecord(self.sender[stays], self.item[stays], self.time[stays])

    def _number_pairs(self, sender: Keys, item: AnyArray) -> tuple[Longs, Longs]:
        """A number for each pair of sender and item: of this record, and of another list."""
        senders = np.append(self.sender, sender)
        _, number = np.unique(senders, return_inverse=True)
        items = np.append(self.item, item).astype(np.int64)
        width = 1 + items.max(initial=0)
        pairs = number * width + items
        n_own = len(self)
        return pairs[:n_own], pairs[n_own:]

    def take_sender_lists(self, senders: Keys) -> Ragged:
        """What each of some senders shared, oldest first."""
        order = np.argsort(senders)
        places, is_wanted = find_in_sorted(senders[order], self.sender)
        rows = order[places[is_wanted]]
        columns = {"time": self.time[is_wanted]}
        return Ragged.from_pairs(rows, self.item[is_wanted], len(senders), columns)


def make_single_list(sender: int, items: AnyArray) -> tuple[Keys, Ragged]:
    """One sender and the list of its items, as arrays of one row."""
    senders = np.array([sender], np.uint64)
    ptr = np.array([0, len(items)])
    ids = np.asarray(items, np.int32)
    return senders, Ragged(ptr, ids)


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
        parts = {**self.parts, name: arrays}
        return replace(self, parts=parts)


@dataclass(frozen=True)
class RoundReplay:
    """A round that is replayed: with the draws of an earlier one, and with a share of its local steps."""

    round: int
    share: float = 1.0


ListsByPart = dict[str, Ragged]
"""Part -> a list for each of some clients."""


def _send_no_lists(clients: Keys) -> ListsByPart:
    return {}


def _keep_lists(lists: ListsByPart, n_items: int) -> ListsByPart:
    return lists


@dataclass(frozen=True)
class Broadcast:
    """What travels down besides the model: the same for all clients, and for some clients a list of their own."""

    common: dict[str, Arrays] = field(default_factory=dict)  # part -> what its broadcast carries
    per_client: Callable[[Keys], ListsByPart] = _send_no_lists  # keys of clients -> their lists
    n_bytes: float = 0.0  # on average per client, the model included
    per_client_items: Callable[[Keys, Ragged], ListsByPart] | None = None  # the same about some items of each client
    decode_lists: Callable[[ListsByPart, int], ListsByPart] = _keep_lists  # as devices read them


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
    parts: dict[str, Arrays]  # part name -> (users, ...) what the part stores on the device
    items: Floats  # received: the item table
    heads: Arrays  # received: shared parameters
    received: dict[str, Arrays]  # received: part name -> what its broadcast carried
    per_client: dict[str, Ragged] = field(default_factory=dict)  # received: part name -> (clients) a list for each
    lists: dict[str, Mapping[str, Ragged]] = field(default_factory=dict)  # like `parts`: lists that a part stores
    history: Ragged | None = None  # (users) what each did in earlier blocks, where the model reads it
    replay: RoundReplay | None = None  # a replayed round; `round` is the earlier one

    @property
    def n_clients(self) -> int:
        return len(self.user_ptr) - 1

    @property
    def has_single_users(self) -> bool:
        return len(self.user) == self.n_clients

    @property
    def client_of_user(self) -> Ints:
        """(users,) the place of each user's client in the cohort."""
        clients = np.arange(self.n_clients, dtype=np.int32)
        return np.repeat(clients, np.diff(self.user_ptr))


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
    """The moments that lazy-adam continues from, where they are stored: private.mean, private.square, the same of
    heads.<name> and rows, rows.steps, and the clients' own steps so far."""
    n_part_samples: Longs | None = None  # (users,) how many of a user's last samples come from parts
    weight: Floats | None = None  # (samples,) what a sample's loss, or its pair's, is multiplied by; None: 1
    fold: Ints | None = None  # (samples,) of its item, where a model reads histories that are cut into folds
    personal: Arrays = field(default_factory=dict)  # pFedMe: the device's own private, rows and heads.<name>
    notes: Arrays = field(default_factory=dict)  # name -> (clients,) values of parts for the lab's log; nan: none
    batch_ptr: Longs | None = None  # (clients + 1,) batches of an epoch, where they hold whole users
    batch_start: Longs | None = None  # (epochs, batches + 1) the first turn of each, and where the last one ends
    batches_per_group: Longs | None = None  # (clients,) how many consecutive batches are about the same users

    @property
    def owner(self) -> Ints:
        """Which of the cohort's users each sample belongs to."""
        n_users = len(self.user_ptr) - 1
        user_numbers = np.arange(n_users, dtype=np.int32)
        return np.repeat(user_numbers, np.diff(self.user_ptr))

    @property
    def steps_per_epoch(self) -> Longs:
        if self.batch_ptr is not None:
            return np.diff(self.batch_ptr)
        turns = np.diff(self.turn_ptr)
        return -(-turns // self.batch)

    @property
    def n_steps(self) -> Longs:
        """SGD steps of each client in the round."""
        return self.steps_per_epoch * len(self.order)

    def find_step_batches(self, step: int) -> tuple[Longs, Longs, Longs, Longs]:
        """The clients that have a step, and the epoch, the first turn and the size of each one's batch."""
        active = np.flatnonzero(step < self.n_steps)
        epoch, within = np.divmod(step, self.steps_per_epoch[active])
        if self.batch_ptr is None or self.batch_start is None:
            start = self.turn_ptr[active] + within * self.batch
            remaining = self.turn_ptr[active + 1] - start
            return active, epoch, start, np.minimum(self.batch, remaining)
        batch = self.batch_ptr[active] + within
        start = self.batch_start[epoch, batch]
        end = self.batch_start[epoch, batch + 1]
        return active, epoch, start, end - start


@dataclass(frozen=True)
class ExtraSamples:
    """Samples with weights of their own that join one step's loss, picked from the lists that a part needs."""

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
