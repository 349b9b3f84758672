"""What each side of a run holds, as named arrays for a file or a database, and back."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np

from tacita.clients import Clients, OwnRows
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


def device_arrays(clients: Clients, prefix: str) -> Arrays:
    arrays: Arrays = {f"{prefix}private": clients.private, f"{prefix}took_part": clients.took_part}
    arrays |= flat(clients.parts, f"{prefix}parts/")
    if clients.own is not None:
        ptr, item, moved = clients.own.take(np.arange(clients.n_users))  # in the order of users, whatever the chunks
        own = OwnRows(clients.own.base, ptr[:-1], np.diff(ptr), item, moved)
        arrays |= {f"{prefix}own/{one.name}": getattr(own, one.name) for one in fields(OwnRows)}
    return arrays


def read_devices(arrays: Arrays, prefix: str, names: list[str]) -> Clients:
    parts: dict[str, Arrays] = {name: {} for name in names}
    parts |= nested(arrays, f"{prefix}parts/")
    held = {one.name: arrays[key] for one in fields(OwnRows) if (key := f"{prefix}own/{one.name}") in arrays}
    own = OwnRows(**held) if held else None
    return Clients(arrays[f"{prefix}private"], parts, arrays[f"{prefix}took_part"], own)


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
        "device_parts": json.dumps(sorted(now.clients.parts)),
    }
    return arrays, note


def read_progress(arrays: Arrays, note: dict[str, str]) -> Progress:
    names = json.loads(note["device_parts"])
    server, best = (read_server(arrays, json.loads(note[tag]), f"{tag}/server/") for tag in ("now", "best"))
    clients, kept = (read_devices(arrays, f"{tag}/device/", names) for tag in ("now", "best"))
    return Progress(server, Here(clients, kept), best, **json.loads(note["plain"]))
