"""Connections that end by themselves: the head of a call has a length, and a time in which it must arrive.

uvicorn waits for a head as long as a caller likes, and its faster parser takes one of any length. Both come before any
token is looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
MOST_HEAD = 64 << 10

_Protocol: Any = AutoHTTPProtocol


class BoundedConnection(_Protocol):  # type: ignore[misc]
    """One connection of uvicorn's, whichever parser is installed."""

    _head_bytes = 0
    _is_in_head = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        call_before = self.cycle
        super().data_received(data)
        if self.cycle is not call_before:  # a head is whole
            self._stop_timer()
        elif self._awaits_head() and self._timer is None:
            self._start_timer()
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD:
                self.transport.close()

    def on_message_begin(self) -> None:
        """The fast parser has seen the first letter of a head; the other one bounds heads itself."""
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_waiting)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self._awaits_head():
            self.transport.close()
