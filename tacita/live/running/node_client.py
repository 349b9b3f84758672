"""Verbs of a node, running or not: through its daemon's socket if one has the store open, else directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.database import DamagedFile
from tacita.live.engine import unix_socket
from tacita.live.node import store_file as node_file
from tacita.live.node.store_file import STORE_FILE

MOST_BYTES = 2**24  # of a question or an answer
CONTROL_SOCKET = Path("run") / "control.sock"
SHIM_SOCKET = Path("run") / "shim.sock"


def ask_node(folder: Path, verb: str, **arguments: Any) -> Any:
    """Ask a node: its daemon if one has it open, else the store itself, for as long as the answer takes."""
    if not node_file.is_locked(folder / STORE_FILE):
        return _ask_directly(folder, verb, arguments)
    if not (folder / CONTROL_SOCKET).exists():
        raise node_file.locked_error(folder / STORE_FILE)
    return ask_daemon(folder, verb, **arguments)


def ask_daemon(folder: Path, verb: str, **arguments: Any) -> Any:
    question = json.dumps({"verb": verb, **arguments}).encode()
    answer = json.loads(unix_socket.ask_socket(folder / CONTROL_SOCKET, question, most=MOST_BYTES))
    if "error" in answer:
        raise TacitaError(answer["error"])
    return answer["ok"]


def _ask_directly(folder: Path, verb: str, arguments: dict[str, Any]) -> Any:
    from tacita.live.node.node import Node  # brings the models, which a running daemon has loaded already
    from tacita.live.node.verbs import perform_verb

    try:
        node = Node.open(folder)
    except DamagedFile:
        if verb != "export" or arguments.get("user") is not None:
            raise
        file = arguments["file"]
        n_lines = node_file.salvage_lines(folder / STORE_FILE, Path(file))
        return {"lines": n_lines, "file": file}
    with node:
        return perform_verb(node, verb, arguments)
