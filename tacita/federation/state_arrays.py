"""What each side of a run holds, as named arrays for a file or a database, and back."""

from __future__ import annotations

import json
from typing import Any

from tacita.core.codec import ChunkedArray
from tacita.core.files import flatten_parts, nest_parts
from tacita.core.types import AnyArray, Arrays, ServerState, SharedRecord
from tacita.federation.devices import LocalDevices
from tacita.federation.rounds import Progress
from tacita.round.device_state import stream_devices, unflatten_devices

_SHARED_COLUMNS = ("sender", "item", "time")


def flatten_server(server: ServerState, prefix: str = "") -> Arrays:
    arrays: Arrays = {f"{prefix}items": server.items}
    for name, head in server.heads.items():
        arrays[f"{prefix}heads/{name}"] = head
    arrays |= flatten_parts(server.parts, f"{prefix}parts/")
    if len(server.shared):
        for column in _SHARED_COLUMNS:
            arrays[f"{prefix}given/{column}"] = getattr(server.shared, column)
    return arrays


def make_server_note(server: ServerState) -> dict[str, str]:
    return {"block": str(server.block), "round": str(server.round), "parts": json.dumps(sorted(server.parts))}


def read_server(arrays: Arrays, note: dict[str, str], prefix: str = "") -> ServerState:
    heads_prefix = f"{prefix}heads/"
    heads = {name.removeprefix(heads_prefix): head for name, head in arrays.items() if name.startswith(heads_prefix)}
    parts: dict[str, Arrays] = {name: {} for name in json.loads(note["parts"])}
    parts |= nest_parts(arrays, f"{prefix}parts/")
    shared = SharedRecord()
    if f"{prefix}given/item" in arrays:
        columns = [arrays[f"{prefix}given/{column}"] for column in _SHARED_COLUMNS]
        shared = SharedRecord(*columns)
    items = arrays[f"{prefix}items"]
    return ServerState(items, heads, int(note["block"]), int(note["round"]), parts, shared)


_JSON_FIELDS = ("best_score", "best_round", "stale", "in_block", "played", "bytes_up", "bytes_down", "results")


def collect_json_fields(now: Progress) -> dict[str, Any]:
    """What of a run's progress is not arrays."""
    return {name: getattr(now, name) for name in _JSON_FIELDS}


def flatten_progress_with_note(now: Progress) -> tuple[dict[str, AnyArray | ChunkedArray], dict[str, str]]:
    """Where a run stands, with its devices here, for a file."""
    persistent = now.clients.persistent  # the same in both
    arrays: dict[str, AnyArray | ChunkedArray] = {
        **flatten_server(now.server, "now/server/"),
        **flatten_server(now.best_server, "best/server/"),
        **stream_devices(now.clients, "now/device/"),
        **stream_devices(now.best_clients, "best/device/", without=persistent),
    }
    note = {
        "plain": json.dumps(collect_json_fields(now)),
        "now": json.dumps(make_server_note(now.server)),
        "best": json.dumps(make_server_note(now.best_server)),
    }
    return arrays, note


def read_progress(arrays: Arrays, note: dict[str, str]) -> Progress:
    server = read_server(arrays, json.loads(note["now"]), "now/server/")
    best_server = read_server(arrays, json.loads(note["best"]), "best/server/")
    clients = unflatten_devices(arrays, "now/device/")
    best_clients = unflatten_devices(arrays, "best/device/")
    devices = LocalDevices(clients.with_snapshot(best_clients))
    fields = json.loads(note["plain"])
    return Progress(server, devices, best_server, **fields)
