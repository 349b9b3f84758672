"""A page server on loopback, in a thread beside a node or a server."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from tacita.core.errors import TacitaError

HOST = "127.0.0.1"


class PageServer:
    """An application at 127.0.0.1, from `start` to `stop`; there is no way to give it another address."""

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        self._app, self.port = app, port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, self.port))
        except OSError as error:
            listener.close()
            raise TacitaError(
                f"pages cannot be served on {HOST}:{self.port} ({error.strerror or error}); choose another page_port."
            ) from None
        self.port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=64,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=3,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="pages", daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise TacitaError(f"pages could not be served on {HOST}:{self.port}; the log says why.")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
            self._server = self._thread = None

    def __enter__(self) -> PageServer:
        self.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.stop()
