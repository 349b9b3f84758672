"""A run inside Flower: bodies to nodes and back over its grid, and the server app that Flower starts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from tacita.live.engine.flower_client import MESSAGE_TYPE, pack_body, unpack_body
from tacita.live.processes import configure_logging

log = logging.getLogger(__name__)


MOST_PULLERS = 32


@dataclass
class _Replies:
    """Replies to the messages of one exchange, collected by several threads until it is over."""

    node_by_message: Mapping[str, int]
    poll_seconds: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)
    bodies: dict[int, bytes] = field(default_factory=dict)

    def add(self, reply: Message) -> None:
        node = self.node_by_message[reply.metadata.reply_to_message_id]
        try:
            if reply.has_error():
                raise ValueError(f"error {reply.error.code}, {reply.error.reason}")
            body = unpack_body(reply.content)
        except ValueError as error:
            log.warning("node %s did not answer: %s", node, error)
            return
        with self.lock:
            self.bodies[node] = body


class GridTransport:
    """Bodies to nodes and back over the grid of a Flower run."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def list_online_nodes(self) -> list[int]:
        """The nodes that are online."""
        return sorted(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        """Send each node its body; the answers that came within the time. A node that failed is missing."""
        if not requests:
            return {}
        end = time.monotonic() + timeout
        node_by_message = self._send_requests(requests, timeout)
        for node in set(requests) - set(node_by_message.values()):
            log.warning("node %s could not be addressed", node)
        bodies = self._collect_replies(node_by_message, end)
        missing = [node for node in requests if node not in bodies]
        if missing:
            log.warning("no answer from %d of %d nodes: %s", len(missing), len(requests), missing[:20])
        return bodies

    def _send_requests(self, requests: Mapping[int, bytes], timeout: float) -> dict[str, int]:
        """Send each node its body; returns the node of each message that could be sent."""
        packed = {id(body): pack_body(body) for body in requests.values()}  # the same body is packed and sent once
        ttl = timeout + 60.0
        messages = []
        for node, body in requests.items():
            message = Message(packed[id(body)], dst_node_id=node, message_type=MESSAGE_TYPE, ttl=ttl)
            messages.append(message)
        message_ids = list(self._grid.push_messages(messages))
        sent = zip(message_ids, requests, strict=False)
        return {message_id: node for message_id, node in sent if message_id}

    def _collect_replies(self, node_by_message: Mapping[str, int], end: float) -> dict[int, bytes]:
        """Fetch replies until a time.

        Flower claims a reply first and then waits for its bytes: a node that stalls or sends rubbish would hold up
        all that are fetched with it. So each is fetched by itself, up to a number, and the deadline waits for none.
        """
        n_pullers = min(MOST_PULLERS, len(node_by_message))
        replies = _Replies(node_by_message, poll_seconds=max(0.2, 0.05 * n_pullers))
        message_ids = list(node_by_message)
        threads = []
        for k in range(n_pullers):
            part = set(message_ids[k::n_pullers])
            threads.append(threading.Thread(target=self._pull_replies, args=(part, replies), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            remaining = end - time.monotonic()
            thread.join(max(0.0, remaining))
        replies.is_over.set()
        with replies.lock:
            return dict(replies.bodies)

    def _pull_replies(self, message_ids: set[str], replies: _Replies) -> None:
        """Fetch the replies to some messages until all are there or the exchange is over."""
        began = time.monotonic()
        while message_ids and not replies.is_over.is_set():
            try:
                fetched = list(self._grid.pull_messages(message_ids))
            except Exception as error:  # whatever a node sent as its reply, the others count
                nodes = [replies.node_by_message[message_id] for message_id in message_ids]
                log.warning("the answers of nodes %s could not be fetched: %s", nodes, error)
                return
            for reply in fetched:
                message_ids.discard(reply.metadata.reply_to_message_id)
                replies.add(reply)
            if message_ids:
                pause = replies.poll_seconds
                longer = (time.monotonic() - began) / 20  # long rounds are polled less often
                replies.is_over.wait(min(max(pause, 2.0), max(pause, longer)))


def make_server_app() -> ServerApp:
    """The Flower app of the server: continue a run of the store that the run's settings name."""
    return make_flower_server_app(_continue_run)


def make_flower_server_app(body: Callable[[GridTransport, dict[str, Any]], None]) -> ServerApp:
    """A Flower server app that hands the transport and the run's settings to a function."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        configure_logging()
        _end_with_parent()
        body(GridTransport(grid), dict(context.run_config))

    return app


def _end_with_parent(grace: float = 2.0) -> None:
    """Leave no coordinator behind a killed server: Flower's process would first wait for a SuperLink that is gone.

    All that counts is committed by then, and the lock of the run is needed by the next coordinator.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _continue_run(transport: GridTransport, settings: dict[str, Any]) -> None:
    from tacita.live.database import vacuum_unless_in_use
    from tacita.live.server.coordinator import continue_run

    folder = Path(settings["store"])
    link_database = folder / "flower" / "link.db"
    continue_run(folder, settings["run"], transport, lambda: vacuum_unless_in_use(link_database))
