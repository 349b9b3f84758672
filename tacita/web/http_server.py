"""A server at an address, from `start` to `stop`, and who may be given one.

Loopback is the default. Any other address needs a token, because whoever calls reads what people are recommended.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from tacita.core.errors import TacitaError
from tacita.web.connections import BoundedConnection

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "TACITA_SERVE_TOKEN"
LEAST_TOKEN = 16
START_SECONDS = 30.0
STOP_SECONDS = 10
MOST_CONNECTIONS = 256  # more are answered 503, so that connections that never end cannot take all descriptors


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(host: str, has_token: bool, allows_anybody: bool) -> None:
    """Refuse to serve people's recommendations to a whole network without a token."""
    if is_loopback(host) or has_token or allows_anybody:
        return
    raise TacitaError(
        f"--host {host} can be reached from other machines, and whoever calls reads what people are recommended: give "
        "--token-file FILE, or say --without-token."
    )


def read_token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that calls must carry: of a file, or of the environment; None: there is none."""
    if token_file is None:
        token = environment.get(TOKEN_VARIABLE)
        return None if token is None else _check_token(token.strip(), f"${TOKEN_VARIABLE}")
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise TacitaError(
            f"--token-file {token_file} cannot be read; make one with `openssl rand -hex 32 > {token_file}`."
        ) from None
    return _check_token(token, f"--token-file {token_file}")


def _check_token(token: str, source: str) -> str:
    is_visible = token.isascii() and token.isprintable() and " " not in token
    if len(token) < LEAST_TOKEN or not is_visible:
        raise TacitaError(
            f"{source} holds no token: it has at least {LEAST_TOKEN} letters and digits, without spaces; `openssl rand "
            "-hex 32` makes one."
        )
    return token


def is_readable_by_others(path: Path) -> bool:
    return bool(os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH))


class HttpServer:
    """An application at an address, served by a thread."""

    def __init__(self, app: ASGIApp, host: str = LOOPBACK, port: int = 0) -> None:
        self._app = app
        self.host = host.strip("[]")
        self.port = port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        listener = self._bind()
        self.port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            self._app,
            http=BoundedConnection,
            ws="none",
            log_config=None,
            access_log=False,  # a log of calls would say who was recommended to
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="http", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise TacitaError(f"the server at {self.url} did not start; the log says why.")
            time.sleep(0.01)

    def _bind(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
        except UnicodeError:  # a label that is empty or too long
            raise self._address_error("this is no name of a host") from None
        except OSError as error:
            raise self._address_error(error.strerror or error) from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise self._address_error(error.strerror or error) from None
        return listener

    def _address_error(self, reason: object) -> TacitaError:
        return TacitaError(f"cannot serve at {self.url} ({reason}); choose another --host or --port.")

    def stop(self) -> None:
        """Answer what has been asked, take no new calls, and end."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(STOP_SECONDS + 5)
            self._server = self._thread = None

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.stop()
