"""The TLS proxy that nodes dial: it passes to the SuperLink only calls that nodes make, from keys that are enrolled.

The SuperLink itself listens on loopback, because whoever reaches its port may submit code (it has no operator login).
A call is matched by the bytes of its path, before any decoding, so there is nothing to normalise.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import functools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType

import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tacita.core.errors import TacitaError
from tacita.live.engine.connection_limits import Connection, ConnectionLimiter
from tacita.live.tls_certificates import ServerKeys, compute_key_fingerprint

# What a registered SuperNode calls. register-node and unregister-node are for nodes that enrol themselves.
CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
PATHS = frozenset(f"/v1/fleet/{call}".encode() for call in CALLS)
KEY_HEADER = "flwr-public-key"
HEADERS = frozenset({"content-type", "accept", "content-length"})  # and all that begin with flwr-
RETURNED_HEADERS = frozenset(
    {"content-type", "content-length", "content-encoding", "flwr-version-incompatibility-message"}
)
CLOSE_HEADERS = {"connection": "close"}  # a caller that is refused does not stay
MOST_BYTES = 16 * 2**20  # Flower cuts arrays into objects of 5 MiB, one per call
_PIECE_SECONDS = 30.0  # between two pieces of a body
_CALL_SECONDS = 300.0  # for a whole body

log = logging.getLogger(__name__)


def find_call_refusal(method: str, raw_path: bytes, query: bytes) -> str | None:
    """Why a call is not passed on, or None if it is one that nodes make."""
    if raw_path not in PATHS:
        return "this call is not for nodes"
    if method != "POST" or query:
        return "nodes call with POST and without a query"
    return None


def make_proxy_app(upstream: httpx.AsyncClient, allowed: Callable[[str], bool], most: int = MOST_BYTES) -> ASGIApp:
    """The proxy as an ASGI application; `allowed` decides on every call, by the fingerprint of the caller's key."""

    async def answer(request: Request) -> Response:
        raw_path = request.scope.get("raw_path") or b""
        refusal = find_call_refusal(request.method, raw_path, request.scope["query_string"])
        if refusal is not None:
            return PlainTextResponse(refusal, 403, CLOSE_HEADERS)
        key = _read_caller_key(request)
        # 401 and not 403: Flower's node stops on 401, but takes 403 for the end of a run and goes on asking.
        if key is None or not await asyncio.to_thread(allowed, key):
            return PlainTextResponse("this key is not enrolled", 401, CLOSE_HEADERS)
        recognise = request.scope.get("state", {}).get("recognise")
        if recognise is not None:
            recognise(key)
        size = request.headers.get("content-length", "")
        has_size = size.isascii() and size.isdigit()
        if "transfer-encoding" in request.headers or not has_size:
            return PlainTextResponse("say the length of the body", 411)
        if int(size) > most:
            return PlainTextResponse(f"a body may have {most} bytes", 413)
        return await _forward_call(upstream, request)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await answer(Request(scope, receive))
        except ClientDisconnect:
            return
        if response.status_code == 401:
            log.warning("refused a key that is not enrolled: %s", _read_caller_key(Request(scope)) or "none given")
        elif response.status_code == 403:
            log.warning("refused a call that is not for nodes: %s %.80r", scope["method"], scope.get("raw_path"))
        await response(scope, receive, send)

    return app


def _read_caller_key(request: Request) -> str | None:
    values = request.headers.getlist(KEY_HEADER)
    if len(values) != 1 or len(values[0]) > 4096:
        return None
    try:
        public_key = base64.b64decode(values[0], validate=True)
        return compute_key_fingerprint(public_key)
    except (TacitaError, binascii.Error, ValueError):
        return None


async def _forward_call(upstream: httpx.AsyncClient, request: Request) -> Response:
    headers = [(name, value) for name, value in request.headers.items() if _forwards_header(name)]
    path = request.scope["raw_path"].decode("ascii")
    forwarded = upstream.build_request("POST", path, headers=headers, content=_read_body(request))
    try:
        reply = await upstream.send(forwarded, stream=True)
    except TimeoutError:
        return PlainTextResponse("the body came too slowly", 408)
    except httpx.TimeoutException:
        return PlainTextResponse("the server did not answer in time", 504)
    except httpx.TransportError:
        return PlainTextResponse("the server is not ready", 503)  # Flower's node tries again on 503

    async def stream_back() -> AsyncIterator[bytes]:
        try:
            async for piece in reply.aiter_raw():
                yield piece
        finally:
            await reply.aclose()

    returned = {name: value for name, value in reply.headers.items() if name in RETURNED_HEADERS}
    return StreamingResponse(stream_back(), reply.status_code, returned)


def _forwards_header(header: str) -> bool:
    return header in HEADERS or header.startswith("flwr-")


async def _read_body(request: Request) -> AsyncIterator[bytes]:
    """The pieces of a body; TimeoutError if they come too slowly."""
    end = time.monotonic() + _CALL_SECONDS
    pieces = aiter(request.stream())
    while True:
        remaining = end - time.monotonic()
        async with asyncio.timeout(min(_PIECE_SECONDS, remaining)):
            piece = await anext(pieces, None)
        if piece is None:
            return
        yield piece


class Gateway:
    """The proxy in a thread, from `start` to `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        upstream: str,
        keys: ServerKeys,
        allowed: Callable[[str], bool],
        most: int = MOST_BYTES,
    ) -> None:
        self.host = host
        self.port = port
        self._upstream = upstream
        self._keys = keys
        self._allowed = allowed
        self._most = most
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen; port 0 takes a free one, which `port` then holds."""
        self._keys.check_validity()
        listener = bind_listener(self.host, self.port)
        self.port = listener.getsockname()[1]
        client = self._make_client()
        config = self._make_config(client)
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise TacitaError(
                f"the gateway cannot use {self._keys.certificate} with {self._keys.key}: {error}."
            ) from None
        server = uvicorn.Server(config)
        serving = _serve_until_exit(server, client, listener)
        self._server = server
        self._thread = threading.Thread(target=asyncio.run, args=(serving,), name="gateway", daemon=True)
        self._thread.start()
        end = time.monotonic() + 10
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise TacitaError(f"the gateway did not start on {self.host}:{self.port}; the log says why.")
            time.sleep(0.02)

    def _make_client(self) -> httpx.AsyncClient:
        """The client that calls the SuperLink."""
        return httpx.AsyncClient(
            base_url=self._upstream,
            verify=ssl.create_default_context(cafile=str(self._keys.ca)),
            timeout=httpx.Timeout(60.0, connect=5.0),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
            trust_env=False,  # loopback: no proxy of the environment in between
        )

    def _make_config(self, client: httpx.AsyncClient) -> uvicorn.Config:
        return uvicorn.Config(
            make_proxy_app(client, self._allowed, self._most),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=3,
            ssl_certfile=str(self._keys.certificate),
            ssl_keyfile=str(self._keys.key),
        )

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(15)
            self._server = self._thread = None

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.stop()


async def _serve_until_exit(server: uvicorn.Server, client: httpx.AsyncClient, listener: socket.socket) -> None:
    """Serve until the server is told to exit; connections come in through a limiter, not through uvicorn."""
    limiter = ConnectionLimiter()
    tls = server.config.ssl
    assert tls is not None
    async with client:
        make = functools.partial(Connection, limiter, server.config, server.server_state)
        accepting = asyncio.create_task(limiter.accept(listener, make, tls))
        try:
            await server.serve(sockets=[])
        finally:
            accepting.cancel()
            listener.close()


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening address, or one sentence why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except (OSError, OverflowError) as error:
        listener.close()
        is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if is_in_use:
            raise TacitaError(
                f"port {port} is in use; stop the program that holds it or choose another (a server's ports are in "
                "server.toml)."
            ) from None
        raise TacitaError(f"cannot listen on {host}:{port}: {error}.") from None
    return listener
