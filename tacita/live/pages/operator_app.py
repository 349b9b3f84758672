"""A server's page: its login, its application behind a guard, and how it is served beside the server."""

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
from tacita.live.pages.forms import read_form
from tacita.live.pages.guard import RequestGuard, SignInPrompt
from tacita.live.pages.operator_api import make_routes
from tacita.live.pages.operator_page import BRAND, make_order_routes, make_view_routes
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.page_server import PageServer
from tacita.live.pages.person_api import make_api
from tacita.live.pages.rendering import STATIC, make_static_routes, redirect_to, render_page
from tacita.live.pages.tokens import SESSION_SECONDS, OperatorCredentials, Principal, Tokens, make_cookie_name
from tacita.live.running.server import LiveServer, is_up, read_online_nodes

URL_FILE = "page.url"  # in the server's folder, while it is up
SIGN_IN = "log in at /login, or send the read-only token of `tacita server token` as a bearer token."

log = logging.getLogger(__name__)


def make_operator_app(folder: Path, tokens: Tokens, online: Callable[[], dict[int, str]] = dict) -> ASGIApp:
    """The API and page of a server."""
    service = OperatorService(folder, online)
    credentials = OperatorCredentials(folder)
    app = make_api("tacita server")
    cookie = make_cookie_name("operator")
    for routes in (make_routes(service), make_view_routes(service), make_order_routes(service)):
        app.include_router(routes)
    app.router.routes.extend(make_static_routes())
    _add_login_routes(app, credentials, tokens, cookie)

    def authenticate(request: Request) -> Principal | None:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            is_reader = credentials.is_reader_token(bearer.strip())
            return Principal("reader") if is_reader else None
        session = request.cookies.get(cookie)
        return None if session is None else tokens.find_principal(session)

    def make_login_page() -> Response:
        return _render_login(credentials.has_password(), 401)

    return RequestGuard(app, authenticate, _is_open, SignInPrompt(SIGN_IN, make_login_page))


def _is_open(method: str, path: str) -> bool:
    """What is served without a session: the style sheet, the script and the login."""
    is_static = method in ("GET", "HEAD") and path in STATIC
    is_login = method in ("GET", "POST") and path == "/login"
    return is_static or is_login


def _render_login(has_password: bool, status: int = 200, sentence: str = "") -> Response:
    return render_page("login.html", status, title="Log in", brand=BRAND, said=sentence, ready=has_password)


def _add_login_routes(app: FastAPI, credentials: OperatorCredentials, tokens: Tokens, cookie: str) -> None:
    @app.get("/login", include_in_schema=False)
    def login() -> Response:
        return _render_login(credentials.has_password())

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        fields = await read_form(request)
        password = fields.get("password", "")
        try:
            is_right = await run_in_threadpool(credentials.check_password, password)
        except TacitaError as error:
            return _render_login(credentials.has_password(), 429, str(error))
        if not is_right:
            return _render_login(True, 401, "That is not the password.")
        response = redirect_to("/")
        session = tokens.open_session(Principal("operator"))
        response.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return response

    @app.post("/do/bye", include_in_schema=False)
    def bye(request: Request) -> Response:
        tokens.close_session(request.cookies.get(cookie, ""))
        response = redirect_to("/login")
        response.delete_cookie(cookie)
        return response


@contextlib.contextmanager
def serve_operator_page(server: LiveServer) -> Iterator[PageServer]:
    """Serve a running server's page, and write its address into the server's folder."""
    folder = server.folder
    config = server.config

    def online() -> dict[int, str]:
        return read_online_nodes(folder, config)

    app = make_operator_app(folder, Tokens(), online)
    with PageServer(app, config.page_port) as page_server:
        path = folder / URL_FILE
        write_bytes(path, f"{page_server.url}\n".encode())
        log.info("the operator's page is at %s", page_server.url)
        try:
            yield page_server
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
