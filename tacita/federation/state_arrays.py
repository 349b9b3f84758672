"""What each side of a run holds, as named arrays for a file or a database, and back."""

from __future__ import annotations

import json
from typing import Any

from tacita.core.codec import Pieces
from tacita.core.files import flat, nested
from tacita.core.types import AnyArray, Arrays, Given, ServerState
from tacita.federation.devices import Here
from tacita.federation.rounds import Progress
from tacita.round.device_state import device_pieces, read_devices

_GIVEN = ("sender", "item", "time")


def server_arrays(server: ServerState, prefix: str = "") -> Arrays:
    heads = {f"{prefix}heads/{k}": v for k, v in server.heads.items()}
    given = {f"{prefix}given/{k}": getattr(server.given, k) for k in _GIVEN} if len(server.given) else {}
    return {f"{prefix}items": server.items, **heads, **flat(server.parts, f"{prefix}parts/"), **given}


def server_note(server: ServerState) -> dict[str, str]:
    return {"block": str(server.block), "round": str(server.round), "parts": json.dumps(sorted(server.parts))}


def read_server(arrays: Arrays, note: dict[str, str], prefix: str = "") -> ServerState:
    heads = {k[len(prefix) + 6 :]: v for k, v in arrays.items() if k.startswith(f"{prefix}heads/")}
    parts: dict[str, Arrays] = {name: {} for name in json.loads(note["parts"])}
    parts |= nested(arrays, f"{prefix}parts/")
    held = [arrays[f"{prefix}given/{k}"] for k in _GIVEN] if f"{prefix}given/item" in arrays else []
    return ServerState(arrays[f"{prefix}items"], heads, int(note["block"]), int(note["round"]), parts, Given(*held))


_PLAIN = ("best_score", "best_round", "stale", "in_block", "played", "bytes_up", "bytes_down", "results")


def plain_of(now: Progress) -> dict[str, Any]:
    """What of a standing is not arrays."""
    return {name: getattr(now, name) for name in _PLAIN}


def progress_arrays(now: Progress) -> tuple[dict[str, AnyArray | Pieces], dict[str, str]]:
    """Where a run stands, with its devices here, for a file."""
    lasting = now.clients.lasting  # the same in both
    arrays: dict[str, AnyArray | Pieces] = {
        **server_arrays(now.server, "now/server/"),
        **server_arrays(now.best_server, "best/server/"),
        **device_pieces(now.clients, "now/device/"),
        **device_pieces(now.best_clients, "best/device/", without=lasting),
    }
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
