"""A run inside Flower: bodies to nodes and back over its grid, and the server app that Flower starts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from tacita.live.engine.flower_client import MESSAGE_TYPE, pack, unpack
from tacita.live.processes import configure_logging

log = logging.getLogger(__name__)


class GridTransport:
    """Bodies to nodes and back over the grid of a Flower run."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        return sorted(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        """Send each node its body; the answers that came within the time. A node that failed is missing."""
        if not requests:
            return {}
        end = time.monotonic() + timeout
        packed = {id(body): pack(body) for body in requests.values()}  # the same body is packed and sent once
        order = list(requests)
        messages = [
            Message(packed[id(requests[node])], dst_node_id=node, message_type=MESSAGE_TYPE, ttl=timeout + 60.0)
            for node in order
        ]
        sent = dict(zip(list(self._grid.push_messages(messages)), order, strict=False))
        del messages, packed
        waiting = {message: node for message, node in sent.items() if message}
        for node in set(order) - set(waiting.values()):
            log.warning("node %s could not be addressed", node)
        answers: dict[int, bytes] = {}
        lock, over = threading.Lock(), threading.Event()
        # Flower claims a reply first and then waits for its bytes: a node that stalls or sends rubbish would hold up
        # all that are fetched with it. So each is fetched by itself, up to a number, and the deadline waits for none.
        count = min(_PULLERS, len(waiting))
        pause = max(0.2, 0.05 * count)
        parts = [set(list(waiting)[k::count]) for k in range(count)]
        threads = [
            threading.Thread(target=self._pull, args=(ids, waiting, answers, lock, over, pause), daemon=True)
            for ids in parts
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(max(0.0, end - time.monotonic()))
        over.set()
        with lock:
            got = dict(answers)
        if missing := [node for node in order if node not in got]:
            log.warning("no answer from %d of %d nodes: %s", len(missing), len(order), missing[:20])
        return got

    def _pull(
        self,
        ids: set[str],
        node_of: Mapping[str, int],
        answers: dict[int, bytes],
        lock: threading.Lock,
        over: threading.Event,
        pause: float,
    ) -> None:
        """Fetch the replies to some messages until all are there or it is over."""
        began = time.monotonic()
        while ids and not over.is_set():
            try:
                replies = list(self._grid.pull_messages(ids))
            except Exception as error:  # whatever a node made of its reply, the others count
                log.warning("the answers of nodes %s could not be fetched: %s", [node_of[one] for one in ids], error)
                return
            for reply in replies:
                to = reply.metadata.reply_to_message_id
                ids.discard(to)
                try:
                    if reply.has_error():
                        raise ValueError(f"error {reply.error.code}, {reply.error.reason}")
                    body = unpack(reply.content)
                except ValueError as error:
                    log.warning("node %s did not answer: %s", node_of[to], error)
                    continue
                with lock:
                    answers[node_of[to]] = body
            if ids:  # long rounds are looked at less often
                over.wait(min(max(pause, 2.0), max(pause, (time.monotonic() - began) / 20)))


_PULLERS = 32


def make_server_app() -> ServerApp:
    """The Flower app of the server: continue a run of the store that the run's settings name."""
    return server_app(_continue_run)


def server_app(body: Callable[[GridTransport, dict[str, Any]], None]) -> ServerApp:
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
    from tacita.live.database import vacuum
    from tacita.live.server.coordinator import continue_run

    folder = Path(settings["store"])
    continue_run(folder, settings["run"], transport, lambda: vacuum(folder / "flower" / "link.db"))
