"""What each side of a run holds, as named arrays for a file or a database, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tacita.device_state import PARTS, DeviceState, Lists
from tacita.devices import Here
from tacita.files import flat, nested
from tacita.rounds import Progress
from tacita.types import Arrays, ServerState


def server_arrays(server: ServerState, prefix: str = "") -> Arrays:
    heads = {f"{prefix}heads/{k}": v for k, v in server.heads.items()}
    return {f"{prefix}items": server.items, **heads, **flat(server.parts, f"{prefix}parts/")}


def server_note(server: ServerState) -> dict[str, str]:
    return {"block": str(server.block), "round": str(server.round), "parts": json.dumps(sorted(server.parts))}


def read_server(arrays: Arrays, note: dict[str, str], prefix: str = "") -> ServerState:
    heads = {k[len(prefix) + 6 :]: v for k, v in arrays.items() if k.startswith(f"{prefix}heads/")}
    parts: dict[str, Arrays] = {name: {} for name in json.loads(note["parts"])}
    parts |= nested(arrays, f"{prefix}parts/")
    return ServerState(arrays[f"{prefix}items"], heads, int(note["block"]), int(note["round"]), parts)


def device_arrays(clients: DeviceState, prefix: str) -> Arrays:
    """What devices hold, lists packed in the order of users: the same bytes however they came about."""
    arrays: Arrays = {f"{prefix}{name}": v for name, v in clients.arrays.items()}
    arrays |= {f"{prefix}common/{name}": v for name, v in clients.common.items()}
    for name, one in clients.lists.items():
        ptr, columns = one.take(np.arange(clients.n_users))
        arrays |= {f"{prefix}lists/{name}/": ptr} | {f"{prefix}lists/{name}/{k}": v for k, v in columns.items()}
    return arrays


def read_devices(arrays: Arrays, prefix: str) -> DeviceState:
    mine = {name.removeprefix(prefix): v for name, v in arrays.items() if name.startswith(prefix)}
    plain = {name: v for name, v in mine.items() if name in ("private", "took_part") or name.startswith(PARTS)}
    common = {name.removeprefix("common/"): v for name, v in mine.items() if name.startswith("common/")}
    lists = {}
    for name, columns in nested(mine, "lists/").items():
        ptr = columns.pop("")
        lists[name] = Lists(columns, ptr[:-1].copy(), np.diff(ptr), int(ptr[-1]))
    return DeviceState(plain, lists, common)


_PLAIN = ("best_score", "best_round", "stale", "in_block", "bytes_up", "bytes_down", "results")


def plain_of(now: Progress) -> dict[str, Any]:
    """What of a standing is not arrays."""
    return {name: getattr(now, name) for name in _PLAIN}


def progress_arrays(now: Progress) -> tuple[Arrays, dict[str, str]]:
    """Where a run stands, with its devices here."""
    arrays: Arrays = {}
    for tag, server, clients in (("now", now.server, now.clients), ("best", now.best_server, now.best_clients)):
        arrays |= server_arrays(server, f"{tag}/server/") | device_arrays(clients, f"{tag}/device/")
    note = {
        "plain": json.dumps(plain_of(now)),
        "now": json.dumps(server_note(now.server)),
        "best": json.dumps(server_note(now.best_server)),
    }
    return arrays, note


def read_progress(arrays: Arrays, note: dict[str, str]) -> Progress:
    server, best = (read_server(arrays, json.loads(note[tag]), f"{tag}/server/") for tag in ("now", "best"))
    clients, kept = (read_devices(arrays, f"{tag}/device/") for tag in ("now", "best"))
    return Progress(server, Here(clients.with_kept(kept)), best, **json.loads(note["plain"]))
