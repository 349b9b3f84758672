"""Limits on connections to the gateway: strangers are few and leave soon, and never take the place of a node.

A connection is a stranger's until a call on it carries an enrolled key. When strangers fill their places, the oldest
is closed. So a node that dials is let in, however many of them wait.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MOST_STRANGERS = 256
MOST_PER_KEY = 32  # a public key is no secret: a caller who shows it and cannot sign harms that node alone
HANDSHAKE_TIMEOUT = 5.0  # seconds for the TLS handshake
HEADER_TIMEOUT = 10.0  # seconds for the head of a call
SHUTDOWN_TIMEOUT = 3.0  # seconds for closing TLS


class Connection(H11Protocol):
    """A connection with a time limit on the head of every call.

    It overrides methods of uvicorn's protocol, so pyproject.toml bounds uvicorn's version and a test checks them.
    """

    def __init__(self, limiter: ConnectionLimiter, config: uvicorn.Config, state: Any) -> None:
        super().__init__(config, state, {})
        self._limiter = limiter
        self._head_timer = self._start_timer(HEADER_TIMEOUT + HANDSHAKE_TIMEOUT)
        inner = self.app
        recognise = functools.partial(limiter.mark_as_enrolled, self)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["recognise"] = recognise
            await inner(scope, receive, send)

        self.app = app

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._head_timer.cancelled():
            self._start_head_timer()
        cycle_before = self.cycle
        super().data_received(data)
        if self.cycle is not cycle_before:
            self._head_timer.cancel()

    def on_response_complete(self) -> None:
        cycle_before = self.cycle
        super().on_response_complete()
        is_same_call = self.cycle is cycle_before
        if is_same_call and self.conn.trailing_data[0]:  # the next call has begun already
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._limiter.forget_connection(self)
        super().connection_lost(exc)

    def drop_connection(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _start_head_timer(self) -> None:
        self._head_timer.cancel()
        self._head_timer = self._start_timer(HEADER_TIMEOUT)

    def _start_timer(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.drop_connection)


class ConnectionLimiter:
    """Accepts connections and keeps count of them."""

    def __init__(self) -> None:
        self._strangers: dict[Connection, Callable[[], object]] = {}  # how each is closed, the oldest first
        self._known: dict[str, dict[Connection, None]] = {}  # by key

    async def accept(self, listener: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext) -> None:
        """Let connections in until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of files, or the other side left already
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.2)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                self._evict(next(iter(self._strangers)))
            connection = make()
            task = loop.create_task(self._shake_hands(accepted, connection, tls))
            task.add_done_callback(functools.partial(_close_unused, accepted, connection))
            self._strangers[connection] = task.cancel

    async def _shake_hands(self, accepted: socket.socket, connection: Connection, tls: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT,
            )
            if connection in self._strangers:
                self._strangers[connection] = connection.drop_connection
        except (OSError, asyncio.CancelledError):  # no TLS, too slow, or evicted
            self.forget_connection(connection)
            connection.drop_connection()

    def mark_as_enrolled(self, connection: Connection, key: str) -> None:
        """A call on this connection carried an enrolled key."""
        if self._strangers.pop(connection, None) is None:
            return
        connections = self._known.setdefault(key, {})
        connections[connection] = None
        if len(connections) > MOST_PER_KEY:
            self._evict(next(iter(connections)))

    def forget_connection(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        for key, connections in list(self._known.items()):
            connections.pop(connection, None)
            if not connections:
                del self._known[key]

    def _evict(self, connection: Connection) -> None:
        close = self._strangers.get(connection, connection.drop_connection)
        self.forget_connection(connection)
        close()


def _close_unused(accepted: socket.socket, connection: Connection, _: object) -> None:
    """Close a socket that became no connection; a connection closes its own."""
    if connection.transport is None:
        accepted.close()
