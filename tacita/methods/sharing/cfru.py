"""cfru: the server takes back what it wrote down of those who left, and asks nobody (CFRU, TOIS'25; spec C.7).

It sees every client's update by itself and keeps it: live this needs nodes whose owners allow that
(`insecure_single_user_uploads`). Devices remember which items they learned from in what they sent, and only these are
named to the server when they are to be forgotten: of the others it never heard. An early disturbance is damped by
every later round, by 1 - alpha beta, where beta is what the other participants weigh. Of who has single items
forgotten, these items' rows alone are taken back.

With train.aggregation = "per-row" both are of the row: what is kept tells which rows who left had touched.

Where people share, the server's own steps are written down as well, if this part comes after the one that makes them;
of what is unshared, an item's part of them is taken back as its withdrawn edges are to all it had.
"""

from __future__ import annotations

from typing import Any, ClassVar

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
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch

_UPLOADED_ITEMS = "told"
_UNTOUCHED = 1e-300  # what a row is divided by that nobody touched


class CfruConfig(PartConfig):
    keep: float = Field(0.5, gt=0, le=1, description="share of the rows of an update that is kept, the largest ones")
    alpha: float = Field(0.5, ge=0, le=1, description="how strongly later rounds damp an earlier disturbance")
    theta: float = Field(1.0, gt=0, description="share of the estimated disturbance that is taken back")


@register
class Cfru(Part):
    name = "cfru"
    only_notes = True
    Config: ClassVar[type[PartConfig]] = CfruConfig
    config: CfruConfig

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        most = log.compute_max_weight(self.context, n_items)
        return (Spec("weight", (1,), seen="each", most=most, least=0.0, about="what an update counts"),)

    def check(self, n_items: int) -> None:
        log.check_replay_settings(self.name, self.context.train)
        log.check_part_order(self.name, self.context, ("encode", "after"), ("server_step", "after"))

    # on the device

    def device_arrays(self, n_users: int) -> StateUpdate:
        return {_UPLOADED_ITEMS: Ragged.empty(n_users)}

    def server_knows(self, view: CohortView) -> Ragged | None:
        """What single updates were made of; a run of before devices remembered it: all they have."""
        return _read_uploaded_items(view, view.train)

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        told = _read_uploaded_items(view)
        if told is None or requests.kind not in ("forget", "leave"):
            return {}
        stays = ~requests.items.holds(told.rows(), told.ids) & (requests.kind == "forget")
        return {_UPLOADED_ITEMS: told.filter_entries(stays)}

    # what the server sees of everybody

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        sent = log.as_rows(upload.values["rows"])
        order = np.lexsort((sent.item, sent.client))  # as singles travel
        rows = SparseRows(sent.client[order], sent.item[order], sent.value[order])
        weight = DenseArrays(upload.weight.astype(np.float32)[:, None])
        told, mine = _read_uploaded_items(view), Ragged(view.train.ptr, view.train.ids)
        new = None if told is None else ~told.holds(mine.rows(), mine.ids)
        kept = (
            {}
            if told is None or new is None or not new.any()
            else {_UPLOADED_ITEMS: told.join_rows(mine.filter_entries(new))}
        )
        return upload.with_value("rows", rows).with_value(f"{self.name}.weight", weight), kept

    def field_sent(self, field: Spec) -> Spec:
        if field.name != "rows":
            return field
        return Spec("rows", field.shape, "each", field.by, field.most, about="how each one's item rows moved")

    def decode(self, server: ServerState, total: Total) -> Total:
        """The sum that everybody else needs."""
        told, sums, touched = total.each.get("rows"), np.zeros(server.items.shape), np.zeros(len(server.items))
        if told is not None:
            told.value.add_to(sums, touched, _read_weights(total))
        per_row = {touched_name("rows"): touched} if self.context.train.aggregation == "per-row" else {}
        return total.with_sums({"rows": sums, **per_row})

    def server_begin_block(self, server: ServerState) -> Arrays:
        return server.parts.get(self.name, {})

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        told, plan = total.each.get("rows"), self.context.train
        if told is None or not isinstance(told.value, SparseRows):
            return server
        order = np.argsort(told.sender)  # so that the log does not depend on where people live
        rows, weight = _reorder_clients(told.value, order), _read_weights(total)[order]
        divided_by = choose_denominator(total, "rows", plan, 0.0)
        whole = divided_by if isinstance(divided_by, float) else 1.0
        kept = log.select_largest_rows(rows, len(weight), self.config.keep)
        entry: Arrays = {
            "sender": told.sender[order],
            "part": plan.server_lr * weight / whole,
            "count": np.bincount(rows.client[kept], minlength=len(weight)).astype(np.int32),
            "item": rows.item[kept],
            "row": rows.value[kept].astype(np.float32),
        }
        if not isinstance(divided_by, float):
            entry["by"] = divided_by[:, 0]
        own = server.items - apply_total(before, total, plan, 0.0).items
        if own.any():
            entry["own"] = own
        at = f"{server.block:04d}-{before.round:06d}"
        held = {**server.parts[self.name], **{f"{at}.{name}": v for name, v in entry.items()}}
        return server.with_part(self.name, held)

    # forgetting

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind == "share":
            return None
        held = server.parts[self.name]
        moments = _group_by_round(held)
        if not log.asks_to_forget(requests) or not moments:
            return server, log.build_certificate(self.name, held)
        error, left = np.zeros(server.items.shape), dict(held)
        withdrawn = _compute_withdrawn_share(server, requests)
        for at, entry in sorted(moments.items()):
            target = np.isin(entry["sender"], requests.senders) & (requests.kind != "unshare")
            client = np.repeat(np.arange(len(target)), entry["count"])
            taken = target[client]
            part = entry["part"][client] / (entry["by"][entry["item"]] if "by" in entry else 1.0)
            damping = self._compute_damping(error, entry, target, part)
            error[: len(damping)] *= damping
            if requests.kind == "forget":
                taken &= match_requested_rows(requests, entry["sender"], client, entry["item"])
            np.add.at(error, entry["item"][taken], -part[taken, None] * entry["row"][taken])
            if "own" in entry and withdrawn.any():
                error[: len(entry["own"])] -= withdrawn[: len(entry["own"]), None] * entry["own"]
            left |= {f"{at}.{name}": v for name, v in _strip_entry(entry, target, taken, withdrawn, requests).items()}
        items: Floats = (server.items + self.config.theta * error).astype(np.float32)
        said = log.build_certificate(self.name, left, purged=["updates of those who asked"])
        return server.with_items(items).with_part(self.name, left), said

    def _compute_damping(self, error: Doubles, entry: Arrays, target: Bools, part: Doubles) -> Doubles:
        """(items, 1) what is left of earlier disturbances after a round, by what the others weigh in it."""
        if "by" not in entry:
            others = np.full(len(error), entry["part"].sum() - entry["part"][target].sum())
        else:
            theirs = np.repeat(target, entry["count"])
            mine = np.bincount(entry["item"][theirs], weights=part[theirs], minlength=len(entry["by"]))
            others = self.context.train.server_lr * (entry["by"] > _UNTOUCHED) - mine
        return np.asarray(np.maximum(0.0, 1 - self.config.alpha * others)[:, None])


def _reorder_clients(rows: SparseRows, order: Longs) -> SparseRows:
    """The same rows with their clients in another order."""
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    client = place[rows.client]
    at = np.argsort(client, kind="stable")
    return SparseRows(client[at], rows.item[at], rows.value[at])


def _read_uploaded_items(view: CohortView, otherwise: Ragged | None = None) -> Ragged | None:
    """The items that these people's uploads were made of; `otherwise`: where devices do not remember."""
    found: Ragged | None = view.lists.get(Cfru.name, {}).get(_UPLOADED_ITEMS, otherwise)
    return found if found is None else Ragged(found.ptr, found.ids)


def _read_weights(total: Total) -> Doubles:
    told = total.each["cfru.weight"].value
    assert isinstance(told, DenseArrays)
    return told.value[:, 0].astype(np.float64)


def _compute_withdrawn_share(server: ServerState, requests: RequestBatch) -> Doubles:
    """For every item, what share of its shared edges is withdrawn now; `given` is without them already."""
    n_items, taken = len(server.items), requests.withdrawn_items
    if taken is None:  # nobody filled in what the server held
        taken = requests.items if requests.kind == "unshare" else Ragged.empty(len(requests.senders))
    gone = np.bincount(taken.ids, minlength=n_items)
    return np.asarray(gone / np.maximum(gone + np.bincount(server.shared.item, minlength=n_items), 1))


def _group_by_round(held: Arrays) -> dict[str, Arrays]:
    """What is kept of every round."""
    found: dict[str, Arrays] = {}
    for name, value in held.items():
        at, _, what = name.partition(".")
        found.setdefault(at, {})[what] = value
    return found


def match_requested_rows(requests: RequestBatch, sender: Keys, client: Longs, item: Ints) -> Bools:
    """Which rows are of items that their own sender has forgotten; `client` counts among `sender`."""
    order = np.argsort(requests.senders, kind="stable")
    found = np.zeros(len(item), bool)
    if not len(order):
        return found
    who = order[np.searchsorted(requests.senders, sender, side="right", sorter=order) - 1]
    known = (requests.senders[who] == sender)[client]
    found[known] = requests.items.holds(who[client[known]], item[known])
    return found


def _strip_entry(entry: Arrays, target: Any, taken: Any, withdrawn: Doubles, requests: RequestBatch) -> Arrays:
    """What is left of one round's record."""
    client = np.repeat(np.arange(len(target)), entry["count"])[~taken]
    count = np.bincount(client, minlength=len(target)).astype(np.int32)
    out: Arrays = {"count": count, "item": entry["item"][~taken], "row": entry["row"][~taken]}
    if "own" in entry:
        out["own"] = entry["own"] * (1 - withdrawn[: len(entry["own"]), None]).astype(np.float32)
    if requests.kind == "leave":  # they took part in nothing
        out |= {"sender": entry["sender"][~target], "part": entry["part"][~target], "count": count[~target]}
    return out


register_preset("cfru", {"name": "withdrawal"}, {"name": "cfru"})
