"""Recommendations on a node, from memory alone: a snapshot of model, private vectors and histories.

A snapshot never changes. A new one takes its place after a round or an import, so nobody waits for training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Block, Broadcast, Floats, Keys, Ragged, ServerState
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.ranking import find_best_items
from tacita.live.json_object import JsonObject
from tacita.live.node.row_index import (
    ItemNumbers,
    drop_user_id_column,
    find_item_numbers,
    find_user_rows,
    index_rows,
    map_item_numbers,
)
from tacita.live.node.store import InteractionRows, NodeStore, unknown_user_error
from tacita.live.per_client_arrays import decode_per_client, derive_pseudonyms, derive_run_secret
from tacita.live.wire import Catalogue, select_prefixed
from tacita.round.device_state import DeviceState, take_rows, unflatten_devices
from tacita.round.paged_lists import PagedLists
from tacita.round.plan import Plan
from tacita.runs.assembly import build_plan
from tacita.runs.serving import check_list_length

NO_MODEL = "the server has not sent a model yet; recommendations begin after the node's first round."


@dataclass(frozen=True)
class Snapshot:
    """All that one answer needs. Rows of the lists are users of the model, items are places in the catalogue."""

    run: str
    block: int
    round: int
    row_of: dict[str, int]  # raw user id -> row
    waiting: frozenset[str]  # users who came after the last round
    own_items: Ragged  # what each user has
    items: Catalogue  # raw id and title of what the model knows and the catalogue names
    scorer: DeviceScorer
    histories: _UserHistories  # for the next snapshot, if nothing has changed
    cache_key: tuple[Any, ...]

    def recommend(self, user: str, k: int) -> list[JsonObject]:
        """Top k of what the user does not have yet: [{item, title, score}], best first."""
        row = self.find_user_row(user)
        check_list_length(k, len(self.items))
        scores = self.scorer(np.array([row], np.int32))
        return self.list_top_items(row, k, scores)

    def find_user_row(self, user: str) -> int:
        """The row of a user; refuses who is unknown to the model."""
        row = self.row_of.get(user)
        if row is None:
            raise _waiting_user_error(user) if user in self.waiting else unknown_user_error(user)
        return row

    def list_top_items(self, row: int, k: int, scores: Floats) -> list[JsonObject]:
        """The best k of one user's scores, which are overwritten where the user has the item."""
        scores[0, self.own_items.row(row)] = -np.inf
        scores[0, len(self.items) :] = -np.inf
        places, top_scores = find_best_items(scores, k)
        entries = []
        ranking = zip(places[0].tolist(), top_scores[0].tolist(), strict=True)
        for place, score in ranking:
            if np.isfinite(score):
                item, title = self.items[place]
                entries.append({"item": item, "title": title, "score": float(score)})
        return entries


def _waiting_user_error(user: str) -> TacitaError:
    return TacitaError(
        f"the model does not know user '{user[:100]}' yet; recommendations begin with the next round they take part in."
    )


def take_snapshot(store: NodeStore, before: Snapshot | None = None) -> Snapshot | None:
    """What can be served now, reusing what has not changed since `before`; None before the first model."""
    received = _load_received_model(store)
    if received is None:
        return None
    server = received.server
    users = _select_served_users(store, received)
    user_ids = users.ids.tobytes()
    catalogue = store.read_catalogue()[: len(server.items)]
    cache_key = (store.changes, received.run, len(catalogue), user_ids)
    if before is not None and before.cache_key == cache_key:
        histories = before.histories
    else:
        item_numbers = map_item_numbers(item for item, _ in catalogue)
        rows = store.read_history(run=received.run)
        histories = _UserHistories(rows, users.ids, item_numbers)
    all_rows = np.ones(len(histories.rows), bool)
    snapshot = Snapshot(
        run=received.run,
        block=server.block,
        round=server.round,
        row_of={raw_id: row for row, raw_id in enumerate(users.raw_ids)},
        waiting=users.waiting,
        own_items=histories.select_entries(all_rows),
        items=catalogue,
        scorer=_make_scorer(received, users, histories),
        histories=histories,
        cache_key=cache_key,
    )
    if users.raw_ids and catalogue:
        snapshot.recommend(users.raw_ids[0], 1)  # load the compiled loops before somebody waits for them
    return snapshot


@dataclass(frozen=True)
class _ReceivedModel:
    """The model that a server sent last, and its run."""

    run: str
    plan: Plan
    server: ServerState
    arrays: Arrays
    device_arrays: Arrays  # empty: no device was stored yet


def _load_received_model(store: NodeStore) -> _ReceivedModel | None:
    run = store.find_latest_run()
    model = None if run is None else store.load_model(run)
    if run is None or model is None:
        return None
    note, named_arrays = model
    arrays: Arrays = {name: array for name, (_, array) in named_arrays.items()}
    config = validate_model(RunConfig, json.loads(note["config"]), "the settings the server sent")
    plan = build_plan(config, derive_run_secret(store.secret, run))
    heads = select_prefixed(arrays, "heads/")
    # Column by column: a score runs over all items, and transposing the table costs more than scoring it.
    item_table: Floats = np.asfortranarray(arrays["items"])
    block = int(note["block"])
    round = int(note["round"])
    server = ServerState(item_table, heads, block, round)
    devices = store.load_devices(run, str(note.get("tag", "now")))
    device_arrays = {} if devices is None else devices[1]
    return _ReceivedModel(run, plan, server, arrays, device_arrays)


@dataclass(frozen=True)
class _ServedUsers:
    """The users whom a model can serve, and those who wait for it."""

    ids: AnyArray
    raw_ids: list[str]
    waiting: frozenset[str]


def _select_served_users(store: NodeStore, received: _ReceivedModel) -> _ServedUsers:
    """A model that reads histories serves all users; one that trains knows those who have trained."""
    user_ids, raw_ids = store.list_users()
    if received.plan.learner.model_after:
        is_known = np.ones(len(user_ids), bool)
    else:
        trained_users = received.device_arrays.get("users", np.zeros(0, np.int64))
        is_known = np.isin(user_ids, trained_users)
    served_ids = [raw_ids[row] for row in np.flatnonzero(is_known).tolist()]
    waiting = frozenset(raw_ids).difference(served_ids)
    return _ServedUsers(user_ids[is_known], served_ids, waiting)


def _make_scorer(received: _ReceivedModel, users: _ServedUsers, histories: _UserHistories) -> DeviceScorer:
    """Score as devices do in the open block: from what is new in it, and, where the model reads it, the past."""
    plan = received.plan
    server = received.server
    row_block = histories.rows.block
    is_current = (row_block == server.block) | (row_block < 0)
    is_past = (row_block >= 0) & (row_block < server.block)
    current = histories.select_entries(is_current)
    past = histories.select_entries(is_past) if plan.backbone.reads_history else None
    n_users = len(users.raw_ids)
    no_items = Ragged.empty(n_users)
    block = Block(
        server.block,
        n_users,
        len(server.items),
        current,
        no_items,
        no_items,
        np.zeros(n_users, bool),
        len(current.ids),
    )
    clients = _arrange_device_state(users.ids, received.device_arrays, plan.backbone.private_width)
    broadcast = _read_broadcast(plan, received.arrays)
    user_keys = derive_keys(users.raw_ids)
    return DeviceScorer(plan, server, clients, block, user_keys, broadcast, "serve", past)


def _read_broadcast(plan: Plan, arrays: Arrays) -> Broadcast:
    """What the server sent besides the model, to all users and to each alone."""
    per_client = decode_per_client(arrays, len(arrays["items"]))
    common: dict[str, Arrays] = {part.name: {} for part in plan.parts}
    common |= nest_parts(arrays, "parts-received/")

    def select_lists(keys: Keys) -> dict[str, Ragged]:
        pseudonyms = derive_pseudonyms(plan.draws, keys)
        return per_client.select_lists(pseudonyms)

    return Broadcast(common, select_lists, decode_lists=plan.decode_lists)


def _arrange_device_state(user_ids: AnyArray, arrays: Arrays, width: int) -> DeviceState:
    """The devices' state in the order of `user_ids`; who has none starts with zeros and empty lists."""
    n_users = len(user_ids)
    clients = DeviceState.from_private(np.zeros((n_users, width), np.float32))
    if not arrays:
        return clients
    stored_row = find_user_rows(index_rows(arrays["users"]), user_ids)
    is_stored = stored_row >= 0
    stored_arrays = take_rows(drop_user_id_column(arrays), stored_row[is_stored])
    stored = unflatten_devices(stored_arrays, "")
    for name, array in stored.arrays.items():
        shape = (n_users, *array.shape[1:])
        clients.arrays[name] = np.zeros(shape, array.dtype)
    for name, paged in stored.lists.items():
        empty_columns = {column: values[:0] for column, values in paged.columns.items()}
        clients.lists[name] = PagedLists.empty(n_users, empty_columns)
    stored_rows = np.arange(int(is_stored.sum()))
    lists = {name: stored.read_list(name, stored_rows) for name in stored.lists}
    clients.put(np.flatnonzero(is_stored), {**stored.arrays, **lists})
    return clients


class _UserHistories:
    """The histories of some users as places in the catalogue, oldest first."""

    def __init__(self, rows: InteractionRows, user_ids: AnyArray, item_numbers: ItemNumbers) -> None:
        self.rows = rows
        self._n_users = len(user_ids)
        self._row = find_user_rows(index_rows(user_ids), rows.user)
        self._item = find_item_numbers(item_numbers, rows.item)
        self._is_known = (self._row >= 0) & (self._item >= 0)
        self._order = np.argsort(rows.time, kind="stable")  # without a time: last, as imported

    def select_entries(self, where: AnyArray) -> Ragged:
        """Some of them, with times and ratings if all have them, as the lists that were trained on."""
        is_selected = where & self._is_known
        order = self._order[is_selected[self._order]]
        time = self.rows.time[order]
        rating = self.rows.rating[order].astype(np.float32)
        columns: Arrays = {}
        if not np.isnan(time).any():
            columns["time"] = time
        if not np.isnan(rating).any():
            columns["rating"] = rating
        row = self._row[order]
        item = self._item[order]
        return Ragged.from_pairs(row, item, self._n_users, columns)
