"""What stands before every call: a token, or names of this machine where there is none; and short bodies.

A server on loopback without a token can be reached by every program of the machine. A web page in a browser there could
reach it, too, through a name that points to 127.0.0.1. So without a token the Host header must name this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tacita.web.limits import MOST_BODY

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
BODY_SECONDS = 30.0
NEEDS_TOKEN = "a token is needed: send the header `Authorization: Bearer TOKEN`."
NOT_LOCAL = "without a token this server answers to names of this machine only; start it with --token-file."
TOO_LONG = f"a body may have {MOST_BODY:,} bytes; ask for less in one call."
TOO_SLOW = "the body did not arrive in time; send it at once."
_HOST = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")


class JsonAnswer(Response):
    """JSON that any text fits into: half a character, which UTF-8 lacks, becomes a question mark."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status, {**HEADERS, **(headers or {})})

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def make_refusal(status: int, sentence: str) -> JsonAnswer:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return JsonAnswer({"error": sentence}, status, headers)


class BodyTooLong(Exception):
    """More bytes came than a call may have."""


class CallGuard:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, token: str | None, local_only: bool) -> None:
        self.app = app
        self._token_digest = None if token is None else _digest(token)
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refusal = self._find_refusal(scope["path"], headers)
        if refusal is None and _has_body(headers):
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    receive = await _read_body(receive)
            except BodyTooLong:
                refusal = make_refusal(413, TOO_LONG)
            except TimeoutError:
                refusal = make_refusal(408, TOO_SLOW)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _find_refusal(self, path: str, headers: Headers) -> JsonAnswer | None:
        """The first reason not to pass a call on; None: it may pass."""
        if self._local_only and not _names_this_machine(headers.getlist("host")):
            return make_refusal(421, NOT_LOCAL)
        if path not in OPEN_PATHS and not self._admits_token(headers.getlist("authorization")):
            return make_refusal(401, NEEDS_TOKEN)
        if _is_too_long(headers.get("content-length", "0")):
            return make_refusal(413, TOO_LONG)
        return None

    def _admits_token(self, credentials: list[str]) -> bool:
        """Whether a call carries the token; the comparison takes as long for every wrong one."""
        if self._token_digest is None:
            return True
        if len(credentials) != 1:
            return False
        scheme, _, token = credentials[0].partition(" ")
        is_same = hmac.compare_digest(_digest(token.strip()), self._token_digest)
        return is_same and scheme.lower() == "bearer"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _names_this_machine(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    match = _HOST.fullmatch(hosts[0])
    return match is not None and match[1].lower() in LOCAL_HOSTS


def _is_too_long(content_length: str) -> bool:
    """Whether a body is announced as too long, or its length is no number."""
    is_number = content_length.isdecimal() and len(content_length) <= 20
    return not is_number or int(content_length) > MOST_BODY


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _read_body(receive: Receive) -> Receive:
    """Read a bounded body to its end, and hand it on as one piece."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the caller went away
            break
        body += message.get("body", b"")
        if len(body) > MOST_BODY:
            raise BodyTooLong
        if not message.get("more_body", False):
            break
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return pieces.pop() if pieces else await receive()

    return receive_whole
