"""The node's resident process: it alone opens the store, trains, and decides what leaves.

Flower's process reaches it through a socket that takes request bodies and nothing else; the owner's commands
come through another. Requests are handled one at a time; recommendations come from a snapshot and do not wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.engine import unix_socket
from tacita.live.node import verbs
from tacita.live.node.node import Node, NodeConfig
from tacita.live.processes import CONNECTION_ACCOUNT, find_user_problem, stop_on_signals
from tacita.live.running import node_client

log = logging.getLogger(__name__)

Handle = Callable[[Node, bytes], bytes]
Engine = Callable[[Node, Path], contextlib.AbstractContextManager[Any]]
DaemonExtension = Callable[["Daemon"], contextlib.AbstractContextManager[Any]]
GRACE = 20.0  # seconds that a request may still take when the node is asked to stop


class Daemon:
    """An open node that answers the server and its owner."""

    def __init__(self, node: Node, handle: Handle) -> None:
        self.node = node
        self.stopping = threading.Event()
        self.connection: Any = None  # to the server; has a state, and a reason if it is not online
        self.verbs: dict[str, Callable[[dict[str, Any]], Any]] = {}  # added by extensions
        self._handle = handle
        self._training = threading.Lock()
        releases = node.store.list_releases()
        self._last_logged_id = releases[-1]["id"] if releases else 0  # ledger lines that are in the log already

    def on_request(self, body: bytes, asker: int) -> bytes:
        """Answer a message from the server, handed over by Flower's process."""
        self._refuse_other_users(asker)
        with self._training:
            if self.stopping.is_set():
                raise TacitaError("the node is stopping.")
            began = time.monotonic()
            try:
                return self._handle(self.node, body)
            finally:
                self.node.refresh_snapshot()
                self._log_releases(time.monotonic() - began)

    def _refuse_other_users(self, asker: int) -> None:
        """Only Flower's process and the node's own user may hand over a server's message."""
        if asker not in (-1, os.geteuid(), find_flower_user(self.node.config)):
            raise TacitaError(f"user id {asker} may not speak for the server; set run_as in node.toml.")

    def on_command(self, body: bytes, asker: int) -> bytes:
        """Carry out a command of the owner."""
        return verbs.answer_json_question(self._run_command, body)

    def _run_command(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb == "stop":
            log.info("asked to stop")
            self.stopping.set()
            return "stopping"
        if verb in self.verbs:
            return self.verbs[verb](arguments)
        result = verbs.perform_verb(self.node, verb, arguments)
        if verb == "status":
            result["running"] = True
            if self.connection is not None:
                result["connection"] = self._describe_connection()
        elif verb == "import":
            log.info("imported %d new interactions of %d new users", result["new interactions"], result["new users"])
        elif verb not in ("recommend", "requests"):
            log.info("%s done", verb)  # without a name: a log outlives an erasure
        return result

    def _describe_connection(self) -> str:
        state: str = self.connection.state
        reason = self.connection.reason
        return f"{state}: {reason}" if reason and state != "online" else state

    def _log_releases(self, seconds: float) -> None:
        for release in self.node.store.list_releases(self._last_logged_id):
            self._last_logged_id = release["id"]
            log.info(
                "block %d round %d %s: %d bytes left this node, over %d people (%.1f s): %s",
                release["block"],
                release["round"],
                release["kind"],
                release["bytes"],
                release["users"],
                seconds,
                release["sees"],
            )

    def finish_request(self) -> None:
        """Let a request that is being handled end; after a grace period it is abandoned."""
        self.stopping.set()
        if self._training.acquire(timeout=GRACE):
            self._training.release()
        else:
            log.warning("a request was still being handled after %.0f s and is abandoned", GRACE)


def find_flower_user(config: NodeConfig) -> int:
    """The user id that Flower's process runs under."""
    if config.run_as in ("", "auto"):
        return os.geteuid()
    try:
        return pwd.getpwnam(config.run_as).pw_uid
    except KeyError:
        raise TacitaError(f"there is no user '{config.run_as}' on this system; correct run_as in node.toml.") from None


def _resolve_user(config: NodeConfig) -> NodeConfig:
    """Settings in which `auto` is replaced by a user: the node's own account, never one that others share."""
    if config.run_as != "auto":
        return config
    if os.geteuid() != 0:
        return config.model_copy(update={"run_as": ""})
    problem = find_user_problem(CONNECTION_ACCOUNT)
    if problem is not None:
        log.warning("Flower's process runs as the node's own user: %s", problem)
    user = CONNECTION_ACCOUNT if problem is None else ""
    return config.model_copy(update={"run_as": user})


def run_daemon(
    folder: Path,
    insecure_single_user_uploads: bool = False,
    handle: Handle | None = None,
    engine: Engine | None = None,
    ready: Callable[[Daemon], None] = lambda daemon: None,
    extension: DaemonExtension | None = None,
) -> None:
    """Serve a node until it is stopped; tests bring their own `handle` (the session) and `engine` (Flower).

    `extension` serves the open node in another way too, such as its pages.
    """
    handle = handle or _load_message_handler()
    engine = engine or _make_supernode
    shim_socket = folder / node_client.SHIM_SOCKET
    control_socket = folder / node_client.CONTROL_SOCKET
    sys.setswitchinterval(0.001)  # an answer in memory does not wait long for a training thread
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node.open(folder, insecure_single_user_uploads))
        node.config = _resolve_user(node.config)
        daemon = Daemon(node, handle)
        flower_user = find_flower_user(node.config)
        shim_socket.parent.mkdir(mode=0o711, exist_ok=True)
        shim_socket.parent.chmod(0o711)
        if extension is not None:
            stack.enter_context(extension(daemon))
        stack.callback(daemon.finish_request)
        shim_owner = flower_user if flower_user != os.geteuid() else None
        stack.enter_context(unix_socket.serve_socket(shim_socket, daemon.on_request, 0o600, shim_owner))
        stack.enter_context(
            unix_socket.serve_socket(
                control_socket, daemon.on_command, 0o600, most=node_client.MOST_BYTES, timeout=10.0
            )
        )
        stack.enter_context(stop_on_signals(daemon.stopping))
        daemon.connection = stack.enter_context(engine(node, shim_socket.absolute()))
        log.info("node '%s' is up; %s", node.config.name, node.describe_exposure())
        ready(daemon)
        daemon.stopping.wait()
        log.info("stopping")
    log.info("stopped")


def _load_message_handler() -> Handle:
    """The function that answers the server; loaded late, since it brings the trainer."""
    from tacita.live.node.question_handler import answer_message

    return answer_message


def _make_supernode(node: Node, socket: Path) -> contextlib.AbstractContextManager[Any]:
    """Flower's process, which reaches this process by the socket only."""
    from tacita.live.engine.flower import Supernode
    from tacita.live.tls_certificates import NodeKeys

    config = node.config
    folder = node.folder.absolute()
    keys = NodeKeys(folder / config.ca, folder / config.key)
    return Supernode(folder / "flower", config.server, socket, keys, user=config.run_as or None)
