"""A node's pages: the application with everything that stands before it, and how it runs beside the node's daemon."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from tacita.core.config import StrictModel, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node.node import Node
from tacita.live.pages.guard import RequestGuard, SignInPrompt
from tacita.live.pages.page_server import PageServer
from tacita.live.pages.person_api import make_api, make_routes
from tacita.live.pages.person_page import (
    BRAND,
    make_choice_routes,
    make_exit_routes,
    make_front_routes,
    make_owner_routes,
    make_part_routes,
    make_request_routes,
)
from tacita.live.pages.person_service import PersonService
from tacita.live.pages.rendering import STATIC, render_page, static_routes
from tacita.live.pages.tokens import SESSION_SECONDS, Principal, Tokens, make_cookie_name
from tacita.live.running.daemon import Daemon

SIGN_IN = "`tacita node page USER` prints a link that opens this page once."

log = logging.getLogger(__name__)


def make_node_app(node: Node, tokens: Tokens) -> ASGIApp:
    """The API and pages of a node."""
    desk, cookie, app = PersonService(node), make_cookie_name("person"), make_api("tacita node")
    own = (
        make_front_routes(desk),
        make_part_routes(desk),
        make_choice_routes(desk),
        make_request_routes(desk),
        make_exit_routes(desk, tokens, cookie),
    )
    for one in (make_routes(desk, tokens), *own, make_owner_routes(desk, tokens)):
        app.include_router(one)
    app.router.routes.extend(static_routes())

    @app.get("/enter/{link}", include_in_schema=False)
    def enter(link: str) -> Response:
        session = tokens.redeem_link(link, known)
        if session is None:
            said = "This link was used already, or is older than ten minutes. `tacita node page` makes a new one."
            return render_page("word.html", 401, title="No entry", brand=BRAND, kind="note", said=said, back=False)
        answer = render_page("entered.html", title="Welcome", brand=BRAND)
        answer.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return answer

    def known(found: Principal | None) -> Principal | None:
        """Who still is whom they were: an id that was erased and given again is somebody else's."""
        if found is None or found.role != "person":
            return found
        try:
            number = node.store.find_user(found.user)
        except TacitaError:
            return None
        return replace(found, number=number) if found.number in (0, number) else None

    def who(request: Request) -> Principal | None:
        given = request.cookies.get(cookie)
        return None if given is None else known(tokens.find_principal(given))

    def is_open(method: str, path: str) -> bool:
        return method in ("GET", "HEAD") and (path in STATIC or path.startswith("/enter/"))

    def closed() -> Response:
        return render_page(
            "word.html", 401, title="This page needs a link", brand=BRAND, kind="note", said=SIGN_IN, back=False
        )

    return RequestGuard(app, who, is_open, SignInPrompt(SIGN_IN, closed))


class PageArguments(StrictModel):
    """Whose link is asked for; nobody's: the owner's."""

    user: str | None = None


@contextlib.contextmanager
def serve_node_pages(daemon: Daemon) -> Iterator[PageServer]:
    """Serve a running node's pages, and hand out links to them by the owner's socket."""
    tokens = Tokens()
    with PageServer(make_node_app(daemon.node, tokens), daemon.node.config.page_port) as server:

        def link(arguments: dict[str, Any]) -> dict[str, Any]:
            user = validate_model(PageArguments, arguments, "'page'").user
            who = Principal("owner") if user is None else Principal("person", user, daemon.node.store.find_user(user))
            return {"user": user, "link": f"{server.url}/enter/{tokens.make_link(who)}"}

        def links(arguments: dict[str, Any]) -> list[dict[str, Any]]:
            return [link({"user": raw}) for raw in daemon.node.store.users()[1]]

        daemon.verbs |= {"page": link, "pages": links}
        log.info("pages are served at %s; `tacita node page USER` prints a link", server.url)
        yield server
