"""Who may stay connected to the gateway: strangers are few and leave soon, and never take the place of a node.

A connection is a stranger's until a call on it carried an enrolled key. When strangers fill their places the one that
came first goes, so a node that dials is let in however many of them wait.
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
MOST_PER_KEY = 32  # a public key is no secret: who shows it without being able to sign harms that node alone
HANDSHAKE_TIMEOUT, HEADER_TIMEOUT, SHUTDOWN_TIMEOUT = (
    5.0,
    10.0,
    3.0,
)  # seconds for TLS, for the head of a call, for a goodbye


class Connection(H11Protocol):
    """One connection, with a time limit on the head of every call."""

    def __init__(self, door: ConnectionLimiter, config: uvicorn.Config, state: Any) -> None:
        super().__init__(config, state, {})
        self._limiter, self._head_timer = (
            door,
            asyncio.get_running_loop().call_later(HEADER_TIMEOUT + HANDSHAKE_TIMEOUT, self.drop),
        )
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["recognise"] = lambda key: door.recognise(self, key)
            await inner(scope, receive, send)

        self.app = app

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer.cancelled():
            self._wait_for_head()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._head_timer.cancel()

    def on_response_complete(self) -> None:
        before = self.cycle
        super().on_response_complete()
        if self.cycle is before and self.conn.trailing_data[0]:  # a call has begun already
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._limiter.remove(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        self._head_timer.cancel()
        self._head_timer = asyncio.get_running_loop().call_later(HEADER_TIMEOUT, self.drop)


class ConnectionLimiter:
    """Accepts connections and keeps count of them."""

    def __init__(self) -> None:
        self._strangers: dict[Connection, Callable[[], object]] = {}  # how each is sent away, the first to come first
        self._known: dict[str, dict[Connection, None]] = {}  # by key

    async def accept(self, listener: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext) -> None:
        """Let connections in until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                one, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of files, or the other side left already
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.2)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                self._evict(next(iter(self._strangers)))
            connection = make()
            task = loop.create_task(self._shake_hands(one, connection, tls))
            task.add_done_callback(functools.partial(_close_unused, one, connection))
            self._strangers[connection] = task.cancel

    async def _shake_hands(self, one: socket.socket, connection: Connection, tls: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                one,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT,
            )
            if connection in self._strangers:
                self._strangers[connection] = connection.drop
        except (OSError, asyncio.CancelledError):  # no TLS, too slow, or sent away
            self.remove(connection)
            connection.drop()

    def recognise(self, connection: Connection, key: str) -> None:
        """A call on this connection carried an enrolled key."""
        if self._strangers.pop(connection, None) is None:
            return
        own = self._known.setdefault(key, {})
        own[connection] = None
        if len(own) > MOST_PER_KEY:
            self._evict(next(iter(own)))

    def remove(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        for key, own in list(self._known.items()):
            if connection in own:
                del own[connection]
                if not own:
                    del self._known[key]

    def _evict(self, connection: Connection) -> None:
        away = self._strangers.get(connection, connection.drop)
        self.remove(connection)
        away()


def _close_unused(one: socket.socket, connection: Connection, _: object) -> None:
    """A socket that no connection was made of; the others close their own."""
    if connection.transport is None:
        one.close()
