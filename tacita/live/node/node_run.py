"""A run on a node: the stream of its people, and what their devices keep, in memory and as stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Block, BlockStream, Bools, Keys, Longs, Ragged
from tacita.data.splits import CollectedRows, split_collected_rows
from tacita.federation.clients import empty_device_state, grow_devices_for_block
from tacita.federation.devices import LocalDevices, empty_local_devices
from tacita.live.node.answers import StoredDevices
from tacita.live.node.node import Node
from tacita.live.node.row_index import (
    ItemNumbers,
    drop_user_id_column,
    find_item_numbers,
    find_user_rows,
    index_rows,
    map_item_numbers,
)
from tacita.live.node.store import InteractionRows, NodeStore
from tacita.live.node.withdrawal_batches import collect_withdrawn_items
from tacita.live.per_client_arrays import derive_pseudonyms, derive_run_secret
from tacita.round.device_state import DeviceState, flatten_devices, take_rows, unflatten_devices
from tacita.round.plan import Federation
from tacita.runs.assembly import build_components, build_plan

MOST_AHEAD = 100  # blocks that a server may be ahead of a node
RUN_TAGS = ("now", "best")  # under which devices are stored
ALONE_TAGS = ("alone", "best alone")  # the same, where a node has too few people for a sum
MISSING_TIME = 0.0  # of a row without a time, in a run that counts epsilon
MISSING_RATING = 1.0  # the same for a rating


class Refusal(TacitaError):
    """Why a request is not followed, in words that tell the server nothing about people."""


@dataclass
class NodeRun:
    """A run as it stands on this node, in memory between requests."""

    federation: Federation
    devices: LocalDevices
    users: Longs  # ids of the store, in the order of the arrays
    cache_key: tuple[Any, ...]
    tags: tuple[str, str] = RUN_TAGS
    block: int = -1  # begun last
    round: int = 0  # the round of `devices.clients`
    has_ended: bool = True

    @property
    def has_too_few_users(self) -> bool:
        """Whether the people here are too few for a sum, and train for themselves."""
        return self.tags == ALONE_TAGS

    @property
    def counts_epsilon(self) -> bool:
        """Whether the run counts what answers cost people."""
        return bool(self.federation.ledgers)

    @property
    def n_enrolled(self) -> int:
        """How many people are on this node, whatever they have."""
        return len(self.users)

    @property
    def user_keys(self) -> Keys:
        return self.federation.stream.user_keys

    @property
    def pseudonyms(self) -> Keys:
        """The pseudonyms of people towards the server of this run."""
        return derive_pseudonyms(self.federation.draws, self.user_keys)

    @property
    def requester_names(self) -> Keys:
        """The pseudonyms of requesters, where the server may not know people: nothing else of the run has them."""
        return derive_pseudonyms(self.federation.draws, self.user_keys, "requester")


# Loading


def open_node_run(node: Node, run: str, block: int, config: RunConfig, items: list[str]) -> NodeRun:
    """The run as it stands on this node, with the block of the request opened."""
    store = node.store
    last_block = max(store.find_last_block(run), 0)
    if block > last_block + MOST_AHEAD:
        raise Refusal(f"block {block} is too far ahead.")
    min_newcomers = count_newcomers_needed(node, config)
    store.reopen_block(run, block)
    store.assign_block(run, block, min_newcomers, items, config.split.min_rating)
    cache_key = (store.changes, block, len(items), config.model_dump_json())
    node_run = node.open_runs.get(run)
    if isinstance(node_run, NodeRun) and node_run.cache_key == cache_key:
        return node_run
    node_run = _load_node_run(node, run, block, config, items, cache_key)
    node.open_runs[run] = node_run
    return node_run


def count_newcomers_needed(node: Node, config: RunConfig) -> int:
    """How many people must have something new before any of it joins a block.

    In a run that counts epsilon nobody waits for others, not even where nobody has anything new: who came last would
    switch on the data of all who waited.
    """
    if build_plan(config).ledgers:
        return 0
    if node.config.insecure_single_user_uploads:
        return 1
    return node.config.min_users


def _load_node_run(
    node: Node, run: str, block: int, config: RunConfig, items: list[str], cache_key: tuple[Any, ...]
) -> NodeRun:
    """The stream of this node's people and their private state, from the store."""
    store = node.store
    users, raw_ids = store.list_users()
    stream = _build_stream(store, run, block, config, items, users, raw_ids)
    secret = derive_run_secret(store.secret, run)
    backbone, parts, draws = build_components(config, secret)
    federation = Federation(backbone, parts, config, draws, stream=stream)
    is_alone = node.is_too_few(_count_participants(federation, block))
    tags = ALONE_TAGS if is_alone else RUN_TAGS
    node_run = NodeRun(federation, empty_local_devices(federation), users, cache_key, tags)
    stored = _find_stored_devices(store, run, is_alone)
    if stored is not None:
        _restore_devices(node_run, *stored)
    return node_run


def _count_participants(federation: Federation, block: int) -> int:
    """The people whom `min_users` counts: those with data in the block; under a budget all who are enrolled."""
    stream = federation.stream
    if federation.ledgers:
        return len(stream.user_ids)
    has_training_items = stream.blocks[block].train.counts() > 0
    return int(has_training_items.sum())


def _build_stream(
    store: NodeStore,
    run: str,
    block: int,
    config: RunConfig,
    items: list[str],
    users: Longs,
    raw_ids: list[str],
) -> BlockStream:
    """What the people here contribute to each block so far, without what they withdrew."""
    row_of_user = index_rows(users)
    item_numbers = map_item_numbers(items)
    split = config.split
    user_keys = derive_keys(raw_ids)
    item_keys = derive_keys(items)
    has_earlier = np.zeros(len(users), bool)
    fills_gaps = bool(build_plan(config).ledgers)
    blocks = []
    for index in range(block + 1):
        stored_rows = store.read_block_rows(run, index)
        rows = _collect_rows(stored_rows, row_of_user, item_numbers, split.min_rating)
        if fills_gaps:
            rows = _fill_missing_columns(rows)
        is_new = ~has_earlier
        blocks.append(split_collected_rows(index, rows, is_new, user_keys, item_keys, split))
        has_earlier[rows.user] = True
    withdrawn = collect_withdrawn_items(store.list_requests(run))
    blocks = _drop_withdrawn(blocks, withdrawn, row_of_user, item_numbers)
    return BlockStream(run, tuple(blocks), tuple(raw_ids), tuple(items), user_keys, item_keys, {}, "")


def _collect_rows(
    rows: InteractionRows, row_of_user: dict[int, int], item_numbers: ItemNumbers, min_rating: float | None
) -> CollectedRows:
    """Interactions by row and item number, without unknown items and low ratings."""
    user_rows = [row_of_user[user_id] for user_id in rows.user.tolist()]
    user = np.array(user_rows, np.int32)
    item = find_item_numbers(item_numbers, rows.item).astype(np.int32)
    is_usable: Bools = item >= 0
    if min_rating is not None:
        is_usable &= rows.rating >= min_rating
    time = rows.time[is_usable]
    rating = rows.rating[is_usable]
    return CollectedRows(user[is_usable], item[is_usable], time, rating)


def _fill_missing_columns(rows: CollectedRows) -> CollectedRows:
    """The same rows, each with a time and a rating.

    A block has these columns only if no row lacks them: one person's gap would change what is learned of all others.
    """
    time = np.where(np.isnan(rows.time), MISSING_TIME, rows.time)
    rating = np.where(np.isnan(rows.rating), MISSING_RATING, rows.rating)
    return CollectedRows(rows.user, rows.item, time, rating)


def _drop_withdrawn(
    blocks: list[Block],
    withdrawn: dict[int, set[str] | None],
    row_of_user: dict[int, int],
    item_numbers: ItemNumbers,
) -> list[Block]:
    """The blocks without what people withdrew; what else they have stays where it is."""
    if not withdrawn:
        return blocks
    leavers = []
    items_by_row: list[list[int]] = [[] for _ in row_of_user]
    for user, items in withdrawn.items():
        row = row_of_user[user]
        if items is None:
            leavers.append(row)
        else:
            items_by_row[row] = [item_numbers[item] for item in items if item in item_numbers]
    leaver_rows = np.array(leavers, np.int64)
    withdrawn_items = Ragged.from_lists(items_by_row)
    return [_drop_from_block(block, leaver_rows, withdrawn_items) for block in blocks]


def _drop_from_block(block: Block, leaver_rows: Longs, withdrawn_items: Ragged) -> Block:
    """One block without all items of some users, and without some items of others."""

    def drop_withdrawn(lists: Ragged) -> Ragged:
        rows = lists.rows()
        has_left = np.isin(rows, leaver_rows)
        is_withdrawn = withdrawn_items.holds(rows, lists.ids)
        return lists.filter_entries(~(has_left | is_withdrawn))

    train = drop_withdrawn(block.train)
    valid = drop_withdrawn(block.valid)
    test = drop_withdrawn(block.test)
    return replace(block, train=train, valid=valid, test=test)


# What devices keep


def _find_stored_devices(store: NodeStore, run: str, is_alone: bool) -> tuple[StoredDevices, StoredDevices] | None:
    """Devices as stored last, and those of the best round; people alone go on from the run if that is further on."""
    tag_pairs = (RUN_TAGS, ALONE_TAGS) if is_alone else (RUN_TAGS,)
    candidates = []
    for current_tag, best_tag in tag_pairs:
        current = store.load_devices(run, current_tag)
        best = store.load_devices(run, best_tag)
        if current is not None and best is not None:
            candidates.append((current, best))
    if not candidates:
        return None
    return max(candidates, key=_read_progress_of_candidate)


def _read_progress_of_candidate(candidate: tuple[StoredDevices, StoredDevices]) -> tuple[int, int]:
    current, _ = candidate
    note, _ = current
    return note["block"], note["round"]


def _restore_devices(node_run: NodeRun, current: StoredDevices, best: StoredDevices) -> None:
    """Put the run where its devices were stored."""
    note, current_arrays = current
    _, best_arrays = best
    node_run.block = int(note["block"])
    node_run.round = int(note["round"])
    node_run.has_ended = bool(note["ended"])
    current_state = _build_device_state(current_arrays, node_run)
    best_state = _build_device_state(best_arrays, node_run)
    node_run.devices.clients = current_state.with_snapshot(best_state)


def _build_device_state(arrays: Arrays, node_run: NodeRun) -> DeviceState:
    """Private state in the order of the run's users; newcomers start as the model has them start."""
    federation = node_run.federation
    clients = empty_device_state(federation.backbone)
    grow_devices_for_block(clients, federation, federation.stream.user_keys)
    stored_row = find_user_rows(index_rows(arrays["users"]), node_run.users)
    is_stored = stored_row >= 0
    rows = np.flatnonzero(is_stored).astype(np.int32)
    source_rows = stored_row[is_stored]
    stored_arrays = take_rows(drop_user_id_column(arrays), source_rows)
    stored = unflatten_devices(stored_arrays, "")
    stored_order = np.arange(len(source_rows))
    state: dict[str, AnyArray | Ragged] = {}
    for name, array in stored.arrays.items():
        dtype = clients.arrays[name].dtype
        state[name] = array.astype(dtype)
    for name in stored.lists:
        state[name] = stored.read_list(name, stored_order)
    clients.put(rows, state)
    return clients


def pack_devices(node_run: NodeRun, clients: DeviceState) -> StoredDevices:
    """What devices keep, with a note of where the run stands, ready for the store."""
    note = {"block": node_run.block, "round": node_run.round, "ended": node_run.has_ended}
    arrays: Arrays = {"users": node_run.users[: clients.n_users]}
    for name, array in flatten_devices(clients, "").items():
        if not name.startswith("common/"):
            arrays[name] = array
    arrays["took_part"] = clients.took_part.astype(np.uint8)
    return note, arrays
