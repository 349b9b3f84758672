"""The answers of nodes that counted, as a server's store has them."""

from __future__ import annotations

from typing import Any

from tacita.live.server.store import ServerStore


def list_accepted(store: ServerStore, run: str) -> list[tuple[Any, ...]]:
    """(block, round, kind, node, clients) of every answer that counted."""
    columns = "block, round, kind, node, clients"
    rows = store._fetch_rows(f"SELECT {columns} FROM accepted WHERE run = ? ORDER BY block, round, kind, node", run)
    return [(block, round, kind, int(node), clients) for block, round, kind, node, clients in rows]
