"""Recommendations on a node, from memory alone: a snapshot of model, private vectors and histories.

A snapshot never changes; a new one takes its place after a round or an import, so nobody waits for training.
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
from tacita.core.types import AnyArray, Arrays, Block, Broadcast, Floats, Ragged, ServerState, StateUpdate
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.ranking import best_items
from tacita.live.node.store import InteractionRows, NodeStore, unknown_user_error
from tacita.live.per_client_arrays import decode_per_client, derive_pseudonyms, derive_run_secret
from tacita.round.device_state import DeviceState, PagedLists, read_devices, take_rows
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
    seen: Ragged
    items: list[tuple[str, str]]  # raw id and title of what the model knows and the catalogue names
    scorer: DeviceScorer
    lists: _UserHistories  # kept for the next snapshot, with what they were made from
    cache_key: tuple[Any, ...]

    def recommend(self, user: str, k: int) -> list[dict[str, Any]]:
        """Top k of what the user does not have yet: [{item, title, score}], best first."""
        row = self.find_row(user)
        check_list_length(k, len(self.items))
        return self.top_items(row, k, self.scorer(np.array([row], np.int32)))

    def find_row(self, user: str) -> int:
        """Where a user stands; a sentence for somebody whom the model does not know."""
        found = self.row_of.get(user)
        if found is None:
            raise _unknown_user_error(user) if user in self.waiting else unknown_user_error(user)
        return found

    def top_items(self, row: int, k: int, scores: Floats) -> list[dict[str, Any]]:
        """The best k of one user's scores, which are overwritten where the user has the item."""
        scores[0, self.seen.row(row)] = -np.inf
        scores[0, len(self.items) :] = -np.inf
        top, value = best_items(scores, k)
        return [
            {"item": self.items[i][0], "title": self.items[i][1], "score": float(s)}
            for i, s in zip(top[0].tolist(), value[0].tolist(), strict=True)
            if np.isfinite(s)
        ]


def _unknown_user_error(user: str) -> TacitaError:
    return TacitaError(
        f"the model does not know user '{user[:100]}' yet; recommendations begin with the next round they take part in."
    )


def take_snapshot(store: NodeStore, before: Snapshot | None = None) -> Snapshot | None:
    """What can be served now, reusing what has not changed since `before`; None before the first model."""
    run = store.latest_run()
    found = None if run is None else store.model(run)
    if run is None or found is None:
        return None
    note, sent = found
    arrays: Arrays = {name: array for name, (_, array) in sent.items()}
    config = validate_model(RunConfig, json.loads(note["config"]), "the settings the server sent")
    plan = build_plan(config, derive_run_secret(store.secret, run))
    backbone = plan.backbone
    heads = {name.removeprefix("heads/"): array for name, array in arrays.items() if name.startswith("heads/")}
    # Column by column: a score runs over all items, and turning the table round costs more than scoring it.
    table: Floats = np.asfortranarray(arrays["items"])
    server = ServerState(table, heads, int(note["block"]), int(note["round"]))
    ids, raws = store.users()
    held = store.devices(run, str(note.get("tag", "now")))
    device_users = held[1]["users"] if held is not None else np.zeros(0, np.int64)
    # A model that reads histories serves everybody; one that trains knows those who have trained.
    known = np.isin(ids, device_users) if not plan.learner.model_after else np.ones(len(ids), bool)
    clients = _arrange_clients(ids[known], held[1] if held is not None else {}, backbone.private_width)
    users = [raw for raw, is_known in zip(raws, known) if is_known]
    catalogue = store.catalogue()[: len(table)]
    made_from = (store.changes, run, len(catalogue), ids[known].tobytes())
    if before is not None and before.cache_key == made_from:
        lists = before.lists
    else:
        lists = _UserHistories(store.history(run=run), ids[known], {item: n for n, (item, _) in enumerate(catalogue)})
    now = lists.rows
    current = lists.select((now.block == server.block) | (now.block < 0))
    past = lists.select((now.block >= 0) & (now.block < server.block))
    n, none = len(users), Ragged.empty(len(users))
    block = Block(server.block, n, len(table), current, none, none, np.zeros(n, bool), len(current.ids))
    earlier = past if backbone.reads_history else None
    scorer = DeviceScorer(
        plan, server, clients, block, derive_keys(users), _read_broadcast(plan, arrays), "serve", earlier
    )
    snapshot = Snapshot(
        run,
        server.block,
        server.round,
        {raw: row for row, raw in enumerate(users)},
        frozenset(raw for raw, is_known in zip(raws, known) if not is_known),
        lists.select(np.ones(len(now), bool)),
        catalogue,
        scorer,
        lists,
        made_from,
    )
    if users and catalogue:
        snapshot.recommend(users[0], 1)  # load the compiled loops before somebody waits for them
    return snapshot


def _read_broadcast(plan: Plan, arrays: Arrays) -> Broadcast:
    """What the server sent besides the model, to everybody and to each alone."""
    letters = decode_per_client(arrays, len(arrays["items"]))
    common: dict[str, Arrays] = {part.name: {} for part in plan.parts} | nest_parts(arrays, "parts-received/")
    return Broadcast(
        common, lambda keys: letters.select_lists(derive_pseudonyms(plan.draws, keys)), decode_lists=plan.decode_lists
    )


def _arrange_clients(ids: AnyArray, held: Arrays, width: int) -> DeviceState:
    """The devices' state in the order of `ids`; whoever has none starts with zeros and empty lists."""
    clients = DeviceState.from_private(np.zeros((len(ids), width), np.float32))
    if not held:
        return clients
    place = {int(one): n for n, one in enumerate(held["users"])}
    at = np.array([place.get(int(one), -1) for one in ids], np.int64)
    stored = read_devices(take_rows({name: v for name, v in held.items() if name != "users"}, at[at >= 0]), "")
    for name, array in stored.arrays.items():
        clients.arrays[name] = np.zeros((len(ids), *array.shape[1:]), array.dtype)
    for name, one in stored.lists.items():
        clients.lists[name] = PagedLists.empty(len(ids), {k: v[:0] for k, v in one.columns.items()})
    everybody = np.arange(int((at >= 0).sum()))
    kept: StateUpdate = {**stored.arrays, **{name: stored.read_list(name, everybody) for name in stored.lists}}
    clients.put(np.flatnonzero(at >= 0), kept)
    return clients


class _UserHistories:
    """The histories of some users as places in the catalogue, oldest first."""

    def __init__(self, rows: InteractionRows, ids: AnyArray, place: dict[str, int]) -> None:
        self.rows, self._n = rows, len(ids)
        row_of = {int(one): n for n, one in enumerate(ids)}
        self._row = np.array([row_of.get(int(user), -1) for user in rows.user], np.int64)
        self._item = np.array([place.get(item, -1) for item in rows.item], np.int64)
        self._order = np.argsort(rows.time, kind="stable")  # without a time: last, as imported

    def select(self, where: AnyArray) -> Ragged:
        """Some of them, with times and ratings if all have them, as the lists that were trained on."""
        order = self._order[(where & (self._row >= 0) & (self._item >= 0))[self._order]]
        columns: Arrays = {"time": self.rows.time[order], "rating": self.rows.rating[order].astype(np.float32)}
        known = {name: column for name, column in columns.items() if not np.isnan(column).any()}
        return Ragged.from_pairs(self._row[order], self._item[order], self._n, known)
