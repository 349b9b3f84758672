"""cfru: the server takes back what it recorded of users who left, and asks nobody (CFRU, TOIS'25; spec C.7).

It sees every client's update by itself and keeps it: live this needs nodes whose owners allow that
(`insecure_single_user_uploads`). Devices remember which items their uploads were learned from. Only these items are
named to the server when they are to be forgotten: it never heard of the others. Every later round damps an early
disturbance by 1 - alpha beta, where beta is the weight of the other participants. Where a user has single items
forgotten, only the rows of these items are taken back.

With train.aggregation = "per-row" both are of the row: the record tells which rows a user who left had touched.

Where users share, the server's own steps are recorded as well, if this part comes after the one that makes them. Of an
item's part in these steps, the share of its edges that is unshared is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import (
    Arrays,
    Bools,
    CohortView,
    Doubles,
    Floats,
    Ints,
    Keys,
    Longs,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.learn.rows import apply_total, choose_denominator
from tacita.messages import DenseArrays, SparseRows, Spec, Total, Upload, touched_name
from tacita.methods.sharing import update_log as log
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.unlearning_report import UnlearningReport

_UPLOADED_ITEMS = "told"
_UNTOUCHED = 1e-300  # the divisor of a row that nobody touched


class CfruConfig(PartConfig):
    keep: float = Field(0.5, gt=0, le=1, description="share of the rows of an update that is kept, the largest ones")
    alpha: float = Field(0.5, ge=0, le=1, description="how strongly later rounds damp an earlier disturbance")
    theta: float = Field(1.0, gt=0, description="share of the estimated disturbance that is taken back")


@register
class Cfru(Part, Unlearning):
    name = "cfru"
    observes_only = True
    Config: ClassVar[type[PartConfig]] = CfruConfig
    config: CfruConfig

    def check(self, n_items: int) -> None:
        train = self.context.train
        log.check_replay_settings(self.name, train)
        log.check_part_order(self.name, self.context, ("encode", "after"), ("server_step", "after"))

    def state(self, n_users: int) -> Sequence[StateSpec]:
        no_items = Ragged.empty(n_users)
        return (StateSpec(_UPLOADED_ITEMS, no_items, Role.REPORTED),)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        most = log.bound_client_weight(self.context, n_items)
        weight = Spec("weight", (1,), seen="each", most=most, least=0.0, about="what an update counts")
        return PartFields(extra=(weight,), after_encoding=_to_per_client_spec)

    # on the device

    def known_items(self, view: CohortView) -> Ragged | None:
        """The items of single uploads; in a run whose devices do not remember them, all that users have."""
        return _read_uploaded_items(view, view.train)

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        uploaded = _read_uploaded_items(view)
        if uploaded is None or requests.kind not in ("forget", "leave"):
            return {}
        uploaded_rows = uploaded.rows()
        is_requested = requests.items.holds(uploaded_rows, uploaded.ids)
        stays = ~is_requested & (requests.kind == "forget")
        return {_UPLOADED_ITEMS: uploaded.filter_entries(stays)}

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """Each client's rows and weight, as single uploads travel."""
        rows = log.to_sparse_rows(upload.values["rows"])
        keys = (rows.item, rows.client)
        order = np.lexsort(keys)
        rows = _select_rows(rows, order)
        weight = upload.weight.astype(np.float32)
        upload = upload.with_value("rows", rows)
        column = DenseArrays(weight[:, None])
        name = f"{self.name}.weight"
        upload = upload.with_value(name, column)
        return upload, self._record_items(view)

    def _record_items(self, view: CohortView) -> StateUpdate:
        """The items that an upload was learned from, where devices remember them."""
        uploaded = _read_uploaded_items(view)
        if uploaded is None:
            return {}
        train = view.train
        items = Ragged(train.ptr, train.ids)
        item_rows = items.rows()
        is_new = ~uploaded.holds(item_rows, items.ids)
        if not is_new.any():
            return {}
        new_items = items.filter_entries(is_new)
        return {_UPLOADED_ITEMS: uploaded.join_rows(new_items)}

    # on the server

    def decode(self, server: ServerState, total: Total) -> Total:
        """The sum that all others need."""
        zeros = np.zeros(server.items.shape)
        sums: dict[str, Doubles] = {"rows": zeros}
        touched = np.zeros(len(server.items))
        uploads = total.each.get("rows")
        if uploads is not None:
            weights = _read_client_weights(total)
            row_sums = sums["rows"]
            uploads.value.add_to(row_sums, touched, weights)
        if self.context.train.aggregation == "per-row":
            sums[touched_name("rows")] = touched
        return total.with_sums(sums)

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Record every client's largest rows, and what the server's own steps added."""
        uploads = total.each.get("rows")
        if uploads is None or not isinstance(uploads.value, SparseRows):
            return server
        order = np.argsort(uploads.sender)  # so that the log does not depend on where users live
        rows = _reorder_clients(uploads.value, order)
        weight = _read_client_weights(total)[order]
        entry: Arrays = {"sender": uploads.sender[order]}
        entry |= self._build_round_entry(rows, weight, total)
        train = self.context.train
        without_parts = apply_total(before, total, train, 0.0)
        server_step = server.items - without_parts.items
        if server_step.any():
            entry["own"] = server_step
        moment = f"{server.block:04d}-{before.round:06d}"
        old_state = server.parts[self.name]
        state = dict(old_state)
        for name, array in entry.items():
            state[f"{moment}.{name}"] = array
        return server.with_part(self.name, state)

    def _build_round_entry(self, rows: SparseRows, weight: Doubles, total: Total) -> Arrays:
        train = self.context.train
        n_clients = len(weight)
        denominator = choose_denominator(total, "rows", train, 0.0)
        divisor = 1.0
        if isinstance(denominator, float):
            divisor = denominator
        share = self.config.keep
        places = log.select_largest_rows(rows, n_clients, share)
        client = rows.client[places]
        counts = np.bincount(client, minlength=n_clients)
        values = rows.value[places]
        entry: Arrays = {
            "part": train.server_lr * weight / divisor,
            "count": counts.astype(np.int32),
            "item": rows.item[places],
            "row": values.astype(np.float32),
        }
        if not isinstance(denominator, float):
            entry["by"] = denominator[:, 0]
        return entry

    # forgetting

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share":
            return None
        state = server.parts[self.name]
        entries = _group_by_round(state)
        if not entries or not log.asks_to_forget(requests):
            report = log.build_unlearning_report(self.name, state)
            return server, report
        disturbance = np.zeros(server.items.shape)
        withdrawn = _compute_withdrawn_share(server, requests)
        remaining = dict(state)
        for moment, entry in sorted(entries.items()):
            stripped = self._take_back_round(entry, requests, withdrawn, disturbance)
            for name, array in stripped.items():
                remaining[f"{moment}.{name}"] = array
        correction = self.config.theta * disturbance
        items = server.items + correction
        table: Floats = items.astype(np.float32)
        server = server.with_items(table)
        purged = ["updates of those who asked"]
        report = log.build_unlearning_report(self.name, remaining, purged=purged)
        updated = server.with_part(self.name, remaining)
        return updated, report

    def _take_back_round(
        self, entry: Arrays, requests: RequestBatch, withdrawn: Doubles, disturbance: Doubles
    ) -> Arrays:
        """Damp the disturbance by one round, add what the senders did in it, and strip its record of them."""
        takes_updates_back = requests.kind != "unshare"
        sender = entry["sender"]
        is_sender = np.isin(sender, requests.senders)
        is_sender &= takes_updates_back
        client = _find_row_clients(entry)
        item = entry["item"]
        row_weight = entry["part"][client]
        if "by" in entry:
            divisor = entry["by"][item]
            row_weight = row_weight / divisor
        n_items = len(disturbance)
        damping = self._compute_damping(n_items, entry, is_sender, row_weight)
        disturbance[: len(damping)] *= damping
        removed = is_sender[client]
        if requests.kind == "forget":
            removed &= match_requested_rows(requests, sender, client, item)
        removed_rows = entry["row"][removed]
        removed_weight = row_weight[removed, None]
        effect = -removed_weight * removed_rows
        removed_items = item[removed]
        np.add.at(disturbance, removed_items, effect)
        if "own" in entry and withdrawn.any():
            server_step = entry["own"]
            n_items = len(server_step)
            share = withdrawn[:n_items, None]
            disturbance[:n_items] -= share * server_step
        stripped = _drop_recorded_rows(entry, removed)
        if "own" in entry:
            own_step = entry["own"]
            stripped["own"] = _strip_server_step(own_step, withdrawn)
        if requests.kind == "leave":  # they took part in nothing
            counts = stripped["count"]
            stripped |= _strip_participation(entry, counts, is_sender)
        return stripped

    def _compute_damping(self, n_items: int, entry: Arrays, is_sender: Bools, row_weight: Doubles) -> Doubles:
        """(items, 1) what remains of earlier disturbances after a round, by what the others weigh in it."""
        if "by" not in entry:
            part = entry["part"]
            senders_part = part[is_sender].sum()
            weight = part.sum() - senders_part
            others = np.full(n_items, weight)
        else:
            divisor = entry["by"]
            is_senders_row = np.repeat(is_sender, entry["count"])
            senders_items = entry["item"][is_senders_row]
            weights = row_weight[is_senders_row]
            n_rows = len(divisor)
            senders_weight = np.bincount(senders_items, weights=weights, minlength=n_rows)
            is_touched = divisor > _UNTOUCHED
            rate = self.context.train.server_lr
            others = rate * is_touched - senders_weight
        absorbed = self.config.alpha * others
        remains = np.maximum(0.0, 1 - absorbed)
        return np.asarray(remains[:, None])


def _to_per_client_spec(spec: Spec) -> Spec:
    """Rows leave one client at a time, not as a sum."""
    if spec.name != "rows":
        return spec
    about = "how each one's item rows moved"
    return Spec("rows", spec.shape, "each", spec.by, spec.most, about=about)


def _reorder_clients(rows: SparseRows, order: Longs) -> SparseRows:
    """The same rows with their clients in another order."""
    n_clients = len(order)
    place = np.empty(n_clients, np.int32)
    sorted_places = np.arange(n_clients, dtype=np.int32)
    place[order] = sorted_places
    client = place[rows.client]
    row_order = np.argsort(client, kind="stable")
    renumbered = SparseRows(client, rows.item, rows.value)
    return _select_rows(renumbered, row_order)


def _select_rows(rows: SparseRows, places: Longs) -> SparseRows:
    client = rows.client[places]
    item = rows.item[places]
    value = rows.value[places]
    return SparseRows(client, item, value)


def _read_uploaded_items(view: CohortView, default: Ragged | None = None) -> Ragged | None:
    """The items that these users' uploads were learned from; `default`: where devices do not remember."""
    lists = view.lists.get(Cfru.name, {})
    items: Ragged | None = lists.get(_UPLOADED_ITEMS, default)
    if items is None:
        return None
    return Ragged(items.ptr, items.ids)


def _read_client_weights(total: Total) -> Doubles:
    weights = total.each["cfru.weight"].value
    assert isinstance(weights, DenseArrays)
    column = weights.value[:, 0]
    return column.astype(np.float64)


def _compute_withdrawn_share(server: ServerState, requests: RequestBatch) -> Doubles:
    """For every item, what share of its shared edges is withdrawn now; `server.shared` is without them already."""
    n_items = len(server.items)
    withdrawn = requests.withdrawn_items
    if withdrawn is None and requests.kind == "unshare":
        withdrawn = requests.items
    elif withdrawn is None:
        withdrawn = Ragged.empty(len(requests.senders))
    withdrawn_edges = np.bincount(withdrawn.ids, minlength=n_items)
    shared_items = server.shared.item
    remaining_edges = np.bincount(shared_items, minlength=n_items)
    edges = withdrawn_edges + remaining_edges
    divisor = np.maximum(edges, 1)
    return np.asarray(withdrawn_edges / divisor)


def _group_by_round(state: Arrays) -> dict[str, Arrays]:
    """What is kept of every round."""
    entries: dict[str, Arrays] = {}
    for key, array in state.items():
        moment, _, name = key.partition(".")
        entry = entries.setdefault(moment, {})
        entry[name] = array
    return entries


def match_requested_rows(requests: RequestBatch, sender: Keys, client: Longs, item: Ints) -> Bools:
    """Which rows are of items that their own sender has forgotten; `client` counts among `sender`."""
    is_requested = np.zeros(len(item), bool)
    order = np.argsort(requests.senders, kind="stable")
    if not len(order):
        return is_requested
    senders = requests.senders
    place = np.searchsorted(senders, sender, side="right", sorter=order)
    request = order[place - 1]
    has_request = requests.senders[request] == sender
    known = has_request[client]
    request_of_row = request[client[known]]
    known_items = item[known]
    holds = requests.items.holds(request_of_row, known_items)
    is_requested[known] = holds
    return is_requested


def _find_row_clients(entry: Arrays) -> Longs:
    """The client of every recorded row."""
    counts = entry["count"]
    places = np.arange(len(counts))
    return np.repeat(places, counts)


def _drop_recorded_rows(entry: Arrays, removed: Bools) -> Arrays:
    """A round's record without some rows."""
    stays = ~removed
    client = _find_row_clients(entry)
    n_clients = len(entry["count"])
    remaining_client = client[stays]
    counts = np.bincount(remaining_client, minlength=n_clients)
    return {
        "count": counts.astype(np.int32),
        "item": entry["item"][stays],
        "row": entry["row"][stays],
    }


def _strip_server_step(server_step: Floats, withdrawn: Doubles) -> Floats:
    """The server's own step of a round without what withdrawn edges had added."""
    n_items = len(server_step)
    lost = withdrawn[:n_items, None]
    share = 1 - lost
    return server_step * share.astype(np.float32)


def _strip_participation(entry: Arrays, counts: Ints, is_sender: Bools) -> Arrays:
    """A round's record without some of its participants."""
    stays = ~is_sender
    sender = entry["sender"][stays]
    part = entry["part"][stays]
    return {"sender": sender, "part": part, "count": counts[stays]}


register_preset("cfru", {"name": "withdrawal"}, {"name": "cfru"})
