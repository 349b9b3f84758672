"""What each side of a run holds, as named arrays for a file or a database, and back."""

from __future__ import annotations

import json
from typing import Any

from tacita.core.codec import ChunkedArray
from tacita.core.files import flatten_parts, nest_parts
from tacita.core.types import AnyArray, Arrays, ServerState, SharedRecord
from tacita.federation.devices import LocalDevices
from tacita.federation.rounds import Progress
from tacita.round.device_state import read_devices, stream_devices

_SHARED_COLUMNS = ("sender", "item", "time")


def pack_server(server: ServerState, prefix: str = "") -> Arrays:
    heads = {f"{prefix}heads/{k}": v for k, v in server.heads.items()}
    given = {f"{prefix}given/{k}": getattr(server.shared, k) for k in _SHARED_COLUMNS} if len(server.shared) else {}
    return {f"{prefix}items": server.items, **heads, **flatten_parts(server.parts, f"{prefix}parts/"), **given}


def server_note(server: ServerState) -> dict[str, str]:
    return {"block": str(server.block), "round": str(server.round), "parts": json.dumps(sorted(server.parts))}


def read_server(arrays: Arrays, note: dict[str, str], prefix: str = "") -> ServerState:
    heads = {k[len(prefix) + 6 :]: v for k, v in arrays.items() if k.startswith(f"{prefix}heads/")}
    parts: dict[str, Arrays] = {name: {} for name in json.loads(note["parts"])}
    parts |= nest_parts(arrays, f"{prefix}parts/")
    held = [arrays[f"{prefix}given/{k}"] for k in _SHARED_COLUMNS] if f"{prefix}given/item" in arrays else []
    return ServerState(
        arrays[f"{prefix}items"], heads, int(note["block"]), int(note["round"]), parts, SharedRecord(*held)
    )


_JSON_FIELDS = ("best_score", "best_round", "stale", "in_block", "played", "bytes_up", "bytes_down", "results")


def json_fields(now: Progress) -> dict[str, Any]:
    """What of a standing is not arrays."""
    return {name: getattr(now, name) for name in _JSON_FIELDS}


def pack_progress(now: Progress) -> tuple[dict[str, AnyArray | ChunkedArray], dict[str, str]]:
    """Where a run stands, with its devices here, for a file."""
    lasting = now.clients.persistent  # the same in both
    arrays: dict[str, AnyArray | ChunkedArray] = {
        **pack_server(now.server, "now/server/"),
        **pack_server(now.best_server, "best/server/"),
        **stream_devices(now.clients, "now/device/"),
        **stream_devices(now.best_clients, "best/device/", without=lasting),
    }
    note = {
        "plain": json.dumps(json_fields(now)),
        "now": json.dumps(server_note(now.server)),
        "best": json.dumps(server_note(now.best_server)),
    }
    return arrays, note


def read_progress(arrays: Arrays, note: dict[str, str]) -> Progress:
    server, best = (read_server(arrays, json.loads(note[tag]), f"{tag}/server/") for tag in ("now", "best"))
    clients, kept = (read_devices(arrays, f"{tag}/device/") for tag in ("now", "best"))
    return Progress(server, LocalDevices(clients.with_snapshot(kept)), best, **json.loads(note["plain"]))
