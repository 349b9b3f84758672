"""Where a run stands on a node: the stream of its people, and what their devices keep, in memory and as stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Block, BlockStream, Keys, Longs, Ragged, StateUpdate
from tacita.data.splits import CollectedRows, split_collected_rows
from tacita.federation.clients import empty_device_state, grow_devices
from tacita.federation.devices import LocalDevices, empty_local_devices
from tacita.live.node.node import Node
from tacita.live.node.request_queue import collect_withdrawn
from tacita.live.per_client_arrays import derive_pseudonyms, derive_run_secret
from tacita.round.device_state import DeviceState, flatten_devices, read_devices, take_rows
from tacita.round.plan import Federation
from tacita.runs.assembly import build_components

MOST_AHEAD = 100  # blocks that a server may be ahead of a node
RUN_TAGS, ALONE_TAGS = ("now", "best"), ("alone", "best alone")  # what devices are stored as


class Refusal(TacitaError):
    """Why a request is not followed, in words that tell the server nothing about people."""


@dataclass
class NodeRun:
    """Where a run stands on this node, in memory between requests."""

    federation: Federation
    devices: LocalDevices
    users: Longs  # ids of the store, in the order of the arrays
    cache_key: tuple[Any, ...]
    tags: tuple[str, str] = RUN_TAGS
    block: int = -1  # begun last
    round: int = 0  # the round of `here.clients`
    has_ended: bool = True

    @property
    def keys(self) -> Keys:
        return self.federation.stream.user_keys

    @property
    def names(self) -> Keys:
        """What the server of this run may call people."""
        return derive_pseudonyms(self.federation.draws, self.keys)

    @property
    def requester_names(self) -> Keys:
        """What it calls who asks for something, where it may not know people: nothing else of the run has this name."""
        return derive_pseudonyms(self.federation.draws, self.keys, "requester")


def open_node_run(node: Node, run: str, block: int, config: RunConfig, items: list[str]) -> NodeRun:
    """The run as it stands on this node, with the block of the request opened."""
    store = node.store
    if block > max(store.last_block(run), 0) + MOST_AHEAD:
        raise Refusal(f"block {block} is too far ahead.")
    least = 1 if node.config.insecure_single_user_uploads else node.config.min_users
    store.reopen_block(run, block)
    store.assign_block(run, block, least, items, config.split.min_rating)
    made_from = (store.changes, block, len(items), config.model_dump_json())
    standing = node.open_runs.get(run)
    if not isinstance(standing, NodeRun) or standing.cache_key != made_from:
        standing = _load_node_run(node, run, block, config, items, made_from)
        node.open_runs[run] = standing
    return standing


def _load_node_run(
    node: Node, run: str, block: int, config: RunConfig, catalogue: list[str], made_from: tuple[Any, ...]
) -> NodeRun:
    """From what the store holds: the stream of this node's people, and their private state."""
    store = node.store
    ids, raws = store.users()
    number = {item: n for n, item in enumerate(catalogue)}
    row_of = {int(one): n for n, one in enumerate(ids)}
    keys, item_keys = derive_keys(raws), derive_keys(catalogue)
    seen, blocks = np.zeros(len(ids), bool), []
    for index in range(block + 1):
        rows = store.block_rows(run, index)
        user = np.array([row_of[int(u)] for u in rows.user], np.int32)
        item = np.array([number.get(i, -1) for i in rows.item], np.int32)
        keep = item >= 0
        if config.split.min_rating is not None:
            keep &= rows.rating >= config.split.min_rating
        new = ~seen
        told = CollectedRows(user[keep], item[keep], rows.time[keep], rows.rating[keep])
        blocks.append(split_collected_rows(index, told, new, keys, item_keys, config.split))
        seen[user[keep]] = True
    blocks = _drop_withdrawn(blocks, collect_withdrawn(store.list_requests(run)), row_of, number)
    backbone, parts, draws = build_components(config, derive_run_secret(store.secret, run))
    stream = BlockStream(run, tuple(blocks), tuple(raws), tuple(catalogue), keys, item_keys, {}, "")
    fed = Federation(backbone, parts, config, draws, stream=stream)
    here = empty_local_devices(fed)
    alone = node.is_too_few(int((blocks[block].train.counts() > 0).sum()))
    standing = NodeRun(fed, here, ids, made_from, ALONE_TAGS if alone else RUN_TAGS)
    kept = [[store.devices(run, tag) for tag in tags] for tags in ((RUN_TAGS, ALONE_TAGS) if alone else (RUN_TAGS,))]
    whole = [[one for one in both if one is not None] for both in kept if None not in both]
    if whole:  # alone: from where the run stood, if that was later
        found = max(whole, key=lambda both: (both[0][0]["block"], both[0][0]["round"]))
        note = found[0][0]
        standing.block, standing.round, standing.has_ended = int(note["block"]), int(note["round"]), bool(note["ended"])
        now, best = (_load_clients(one[1], standing, ids) for one in found)
        here.clients = now.with_snapshot(best)
    return standing


def _drop_withdrawn(
    blocks: list[Block], gone: dict[int, set[str] | None], row_of: dict[int, int], number: dict[str, int]
) -> list[Block]:
    """The blocks without what people withdrew; what else they have stays where it is."""
    if not gone:
        return blocks
    whole = np.array([row_of[one] for one, items in gone.items() if items is None], np.int64)
    some = {row_of[one]: [number[i] for i in items if i in number] for one, items in gone.items() if items is not None}
    away = Ragged.from_lists([some.get(row, []) for row in range(len(row_of))])

    def left(lists: Ragged) -> Ragged:
        rows = lists.rows()
        return lists.filter_entries(~(np.isin(rows, whole) | away.holds(rows, lists.ids)))

    return [replace(one, train=left(one.train), valid=left(one.valid), test=left(one.test)) for one in blocks]


def _load_clients(held: Arrays, standing: NodeRun, ids: Longs) -> DeviceState:
    """Private state in the order of `ids`; people who came since start as the model has newcomers start."""
    fed = standing.federation
    clients = empty_device_state(fed.backbone)
    grow_devices(clients, fed, fed.stream.user_keys)
    place = {int(one): n for n, one in enumerate(held["users"])}
    at = np.array([place.get(int(one), -1) for one in ids], np.int64)
    rows, source = np.flatnonzero(at >= 0).astype(np.int32), at[at >= 0]
    stored = read_devices(take_rows({name: v for name, v in held.items() if name != "users"}, source), "")
    kept: StateUpdate = {name: v.astype(clients.arrays[name].dtype) for name, v in stored.arrays.items()}
    lists = {name: stored.read_list(name, np.arange(len(source))) for name in stored.lists}
    clients.put(rows, {**kept, **lists})
    return clients


def pack_devices(standing: NodeRun, clients: DeviceState) -> tuple[dict[str, Any], Arrays]:
    """What devices keep, with a note of where the run stands, ready for the store."""
    note = {"block": standing.block, "round": standing.round, "ended": standing.has_ended}
    arrays = {name: v for name, v in flatten_devices(clients, "").items() if not name.startswith("common/")}
    arrays["took_part"] = clients.took_part.astype(np.uint8)
    return note, {"users": standing.users[: clients.n_users], **arrays}
