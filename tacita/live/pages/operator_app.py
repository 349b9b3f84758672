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
from tacita.live.pages.guard import RequestGuard, SignInPrompt
from tacita.live.pages.operator_api import make_routes
from tacita.live.pages.operator_page import BRAND, make_order_routes, make_view_routes
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.page_server import PageServer
from tacita.live.pages.person_api import make_api
from tacita.live.pages.person_page import read_form
from tacita.live.pages.rendering import STATIC, redirect_to, render_page, static_routes
from tacita.live.pages.tokens import SESSION_SECONDS, OperatorCredentials, Principal, Tokens, make_cookie_name
from tacita.live.running.server import LiveServer, is_up, online_nodes

URL_FILE = "page.url"  # in the server's folder, while it is up
SIGN_IN = "log in at /login, or send the read-only token of `tacita server token` as a bearer token."

log = logging.getLogger(__name__)


def make_operator_app(folder: Path, tokens: Tokens, online: Callable[[], dict[int, str]] = dict) -> ASGIApp:
    """The API and page of a server."""
    room, keys, app = OperatorService(folder, online), OperatorCredentials(folder), make_api("tacita server")
    cookie = make_cookie_name("operator")
    for one in (make_routes(room), make_view_routes(room), make_order_routes(room)):
        app.include_router(one)
    app.router.routes.extend(static_routes())
    _add_login_routes(app, keys, tokens, cookie)

    def who(request: Request) -> Principal | None:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return Principal("reader") if keys.is_reader_token(bearer.strip()) else None
        given = request.cookies.get(cookie)
        return None if given is None else tokens.find_principal(given)

    def is_open(method: str, path: str) -> bool:
        return (method in ("GET", "HEAD") and path in STATIC) or (method in ("GET", "POST") and path == "/login")

    def closed() -> Response:
        return render_page("login.html", 401, title="Log in", brand=BRAND, said="", ready=keys.has_password())

    return RequestGuard(app, who, is_open, SignInPrompt(SIGN_IN, closed))


def _add_login_routes(app: FastAPI, keys: OperatorCredentials, tokens: Tokens, cookie: str) -> None:
    @app.get("/login", include_in_schema=False)
    def login() -> Response:
        return render_page("login.html", title="Log in", brand=BRAND, said="", ready=keys.has_password())

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        given = (await read_form(request)).get("password", "")
        try:
            right = await run_in_threadpool(keys.is_password, given)
        except TacitaError as error:
            return render_page(
                "login.html", 429, title="Log in", brand=BRAND, said=str(error), ready=keys.has_password()
            )
        if not right:
            said = "That is not the password."
            return render_page("login.html", 401, title="Log in", brand=BRAND, said=said, ready=True)
        answer = redirect_to("/")
        session = tokens.open_session(Principal("operator"))
        answer.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return answer

    @app.post("/do/bye", include_in_schema=False)
    def bye(request: Request) -> Response:
        tokens.close_session(request.cookies.get(cookie, ""))
        answer = redirect_to("/login")
        answer.delete_cookie(cookie)
        return answer


@contextlib.contextmanager
def serve_operator_page(server: LiveServer) -> Iterator[PageServer]:
    """Serve a running server's page, and say where."""
    folder, config = server.folder, server.config

    def online() -> dict[int, str]:
        return online_nodes(folder, config)

    with PageServer(make_operator_app(folder, Tokens(), online), config.page_port) as served:
        path = folder / URL_FILE
        write_bytes(path, f"{served.url}\n".encode())
        log.info("the operator's page is at %s", served.url)
        try:
            yield served
        finally:
            path.unlink(missing_ok=True)


def find_page_url(folder: Path) -> str:
    """Where a running server's page is."""
    path = folder / URL_FILE
    if not is_up(folder) or not path.exists():
        raise TacitaError(f"the server is not up; `tacita server up --folder {folder}` serves its page.")
    if not OperatorCredentials(folder).has_password():
        raise TacitaError(f"no password is set; `tacita server password --folder {folder}` sets one.")
    return path.read_text(encoding="utf-8").strip()
