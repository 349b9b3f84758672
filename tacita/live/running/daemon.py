"""The node's resident process: it alone opens the store, trains, and decides what leaves.

Flower's process reaches it through one socket that takes request bodies and nothing else; the owner's commands
come through another. Requests are handled one at a time; recommendations come from a snapshot and do not wait.
"""

from __future__ import annotations

import contextlib
import importlib
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
from tacita.live.processes import stop_on_signals
from tacita.live.running import node_client

log = logging.getLogger(__name__)

Handle = Callable[[Node, bytes], bytes]
Engine = Callable[[Node, Path], contextlib.AbstractContextManager[Any]]
DaemonExtension = Callable[["Daemon"], contextlib.AbstractContextManager[Any]]
GRACE = 20.0  # seconds that a request may still take when the node is asked to stop


class Daemon:
    """An open node with somebody listening."""

    def __init__(self, node: Node, handle: Handle) -> None:
        self.node = node
        self.stopping = threading.Event()
        self.connection: Any = None  # to the server; tells its state and the reason if it is not online
        self.verbs: dict[str, Callable[[dict[str, Any]], Any]] = {}  # that others who serve this node add
        self._handle = handle
        self._training = threading.Lock()
        released = node.store.list_releases()
        self._last_logged_id = released[-1]["id"] if released else 0  # ledger lines that are in the log already

    def on_request(self, body: bytes, asker: int) -> bytes:
        """A message from the server, handed over by Flower's process."""
        if asker not in (-1, os.geteuid(), find_flower_user(self.node.config)):
            raise TacitaError(f"user id {asker} may not speak for the server; set run_as in node.toml.")
        with self._training:
            if self.stopping.is_set():
                raise TacitaError("the node is stopping.")
            began = time.monotonic()
            try:
                return self._handle(self.node, body)
            finally:
                self.node.refresh()
                self._log_releases(time.monotonic() - began)

    def on_command(self, body: bytes, asker: int) -> bytes:
        """A command of the owner."""
        return verbs.answer_json(self._run_command, body)

    def _run_command(self, verb: str, arguments: dict[str, Any]) -> Any:
        if verb == "stop":
            log.info("asked to stop")
            self.stopping.set()
            return "stopping"
        if verb in self.verbs:
            return self.verbs[verb](arguments)
        done = verbs.perform_verb(self.node, verb, arguments)
        if verb == "status":
            done["running"] = True
            if self.connection is not None:
                state, reason = self.connection.state, self.connection.reason
                done["connection"] = f"{state}: {reason}" if reason and state != "online" else state
        elif verb == "import":
            log.info("imported %d new interactions of %d new users", done["new interactions"], done["new users"])
        elif verb not in ("recommend", "requests"):
            log.info("%s done", verb)  # without a name: a log outlives an erasure
        return done

    def _log_releases(self, seconds: float) -> None:
        for one in self.node.store.list_releases(self._last_logged_id):
            self._last_logged_id = one["id"]
            log.info(
                "block %d round %d %s: %d bytes left this node, over %d people (%.1f s): %s",
                *(one[name] for name in ("block", "round", "kind", "bytes", "users")),
                seconds,
                one["sees"],
            )

    def finish(self) -> None:
        """Let a request that is being handled end; what is not committed by then is abandoned."""
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
    """Settings in which `auto` has become a user: another one where the system allows it."""
    if config.run_as != "auto":
        return config
    if os.geteuid() != 0:
        return config.model_copy(update={"run_as": ""})
    from tacita.live.processes import find_user_problem

    why_not = find_user_problem("nobody")
    if why_not is not None:
        log.warning("Flower's process runs as the node's own user: %s", why_not)
    return config.model_copy(update={"run_as": "nobody" if why_not is None else ""})


def run_daemon(
    folder: Path,
    insecure_single_user_uploads: bool = False,
    handle: Handle | None = None,
    engine: Engine | None = None,
    ready: Callable[[Daemon], None] = lambda daemon: None,
    extension: DaemonExtension | None = None,
) -> None:
    """Serve a node until it is told to stop; tests bring their own `handle` (the session) and `engine` (Flower).

    `beside` is what else serves the open node, such as its pages.
    """
    handle, engine = handle or _load_session(), engine or _make_supernode
    sys.setswitchinterval(0.001)  # an answer in memory does not wait long for a training thread
    with contextlib.ExitStack() as held:
        node = held.enter_context(Node.open(folder, insecure_single_user_uploads))
        node.config = _resolve_user(node.config)
        daemon, owner = Daemon(node, handle), find_flower_user(node.config)
        sockets = (folder / node_client.SHIM_SOCKET).parent
        sockets.mkdir(mode=0o711, exist_ok=True)
        sockets.chmod(0o711)
        if extension is not None:
            held.enter_context(extension(daemon))
        held.callback(daemon.finish)
        given = owner if owner != os.geteuid() else None
        held.enter_context(unix_socket.serve(folder / node_client.SHIM_SOCKET, daemon.on_request, 0o600, given))
        held.enter_context(
            unix_socket.serve(
                folder / node_client.CONTROL_SOCKET, daemon.on_command, 0o600, most=node_client.MOST_BYTES, timeout=10.0
            )
        )
        held.enter_context(stop_on_signals(daemon.stopping))
        daemon.connection = held.enter_context(engine(node, (folder / node_client.SHIM_SOCKET).absolute()))
        log.info("node '%s' is up; %s", node.config.name, node.describe_exposure())
        ready(daemon)
        daemon.stopping.wait()
        log.info("stopping")
    log.info("stopped")


def _load_session() -> Handle:
    """What answers the server; loaded late, since it brings the trainer."""
    found: Handle = importlib.import_module("tacita.live.node.question_handler").answer_message
    return found


def _make_supernode(node: Node, socket: Path) -> contextlib.AbstractContextManager[Any]:
    """Flower's process, which reaches this one by the socket only."""
    from tacita.live.engine.flower import Supernode
    from tacita.live.tls_certificates import NodeKeys

    config, folder = node.config, node.folder.absolute()
    keys = NodeKeys(folder / config.ca, folder / config.key)
    return Supernode(folder / "flower", config.server, socket, keys, user=config.run_as or None)
