"""A server's page: login, the application with everything that stands before it, and how it runs beside the server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.types import ASGIApp

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.live.pages.control_room import ControlRoom
from tacita.live.pages.guard import Door, Guard
from tacita.live.pages.operator_api import routes
from tacita.live.pages.operator_page import BRAND, orders, pages
from tacita.live.pages.person_api import make_api
from tacita.live.pages.person_page import form
from tacita.live.pages.rendering import STATIC, away, page, static_routes
from tacita.live.pages.serving import PageServer
from tacita.live.pages.tokens import SESSION_SECONDS, Keys, Tokens, Who, cookie_name
from tacita.live.running.server import Server, is_up, online_nodes

ADDRESS = "page.url"  # in the server's folder, while it is up
SIGN_IN = "log in at /login, or send the read-only token of `tacita server token` as a bearer token."

log = logging.getLogger(__name__)


def server_app(folder: Path, tokens: Tokens, online: Callable[[], dict[int, str]] = dict) -> ASGIApp:
    """The API and page of a server."""
    room, keys, app = ControlRoom(folder, online), Keys(folder), make_api("tacita server")
    cookie = cookie_name("operator")
    for one in (routes(room), pages(room), orders(room)):
        app.include_router(one)
    app.router.routes.extend(static_routes())
    _doors(app, keys, tokens, cookie)

    def who(request: Request) -> Who | None:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return Who("reader") if keys.is_reader(bearer.strip()) else None
        given = request.cookies.get(cookie)
        return None if given is None else tokens.who(given)

    def is_open(method: str, path: str) -> bool:
        return (method in ("GET", "HEAD") and path in STATIC) or (method in ("GET", "POST") and path == "/login")

    def closed() -> Response:
        return page("login.html", 401, title="Log in", brand=BRAND, said="", ready=keys.has_password())

    return Guard(app, who, is_open, Door(SIGN_IN, closed))


def _doors(app: FastAPI, keys: Keys, tokens: Tokens, cookie: str) -> None:
    @app.get("/login", include_in_schema=False)
    def login() -> Response:
        return page("login.html", title="Log in", brand=BRAND, said="", ready=keys.has_password())

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        given = (await form(request)).get("password", "")
        try:
            right = await run_in_threadpool(keys.is_password, given)
        except TacitaError as error:
            return page("login.html", 429, title="Log in", brand=BRAND, said=str(error), ready=keys.has_password())
        if not right:
            said = "That is not the password."
            return page("login.html", 401, title="Log in", brand=BRAND, said=said, ready=True)
        answer = away("/")
        session = tokens.open(Who("operator"))
        answer.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return answer

    @app.post("/do/bye", include_in_schema=False)
    def bye(request: Request) -> Response:
        tokens.close(request.cookies.get(cookie, ""))
        answer = away("/login")
        answer.delete_cookie(cookie)
        return answer


@contextlib.contextmanager
def beside(server: Server) -> Iterator[PageServer]:
    """Serve a running server's page, and say where."""
    folder, config = server.folder, server.config

    def online() -> dict[int, str]:
        return online_nodes(folder, config)

    with PageServer(server_app(folder, Tokens(), online), config.page_port) as served:
        path = folder / ADDRESS
        write_bytes(path, f"{served.url}\n".encode())
        log.info("the operator's page is at %s", served.url)
        try:
            yield served
        finally:
            path.unlink(missing_ok=True)


def address_of(folder: Path) -> str:
    """Where a running server's page is."""
    path = folder / ADDRESS
    if not is_up(folder) or not path.exists():
        raise TacitaError(f"the server is not up; `tacita server up --folder {folder}` serves its page.")
    if not Keys(folder).has_password():
        raise TacitaError(f"no password is set; `tacita server password --folder {folder}` sets one.")
    return path.read_text(encoding="utf-8").strip()
