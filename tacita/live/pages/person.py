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

from tacita.core.config import Strict, validated
from tacita.core.errors import TacitaError
from tacita.live.node.node import Node
from tacita.live.pages.desk import Desk
from tacita.live.pages.guard import Door, Guard
from tacita.live.pages.person_api import make_api, routes
from tacita.live.pages.person_page import BRAND, endings, forms, front, owner_pages, parts, wishes
from tacita.live.pages.rendering import STATIC, page, static_routes
from tacita.live.pages.serving import PageServer
from tacita.live.pages.tokens import SESSION_SECONDS, Tokens, Who, cookie_name
from tacita.live.running.daemon import Daemon

SIGN_IN = "`tacita node page USER` prints a link that opens this page once."

log = logging.getLogger(__name__)


def node_app(node: Node, tokens: Tokens) -> ASGIApp:
    """The API and pages of a node."""
    desk, cookie, app = Desk(node), cookie_name("person"), make_api("tacita node")
    own = (front(desk), parts(desk), forms(desk), wishes(desk), endings(desk, tokens, cookie))
    for one in (routes(desk, tokens), *own, owner_pages(desk, tokens)):
        app.include_router(one)
    app.router.routes.extend(static_routes())

    @app.get("/enter/{link}", include_in_schema=False)
    def enter(link: str) -> Response:
        session = tokens.enter(link, known)
        if session is None:
            said = "This link was used already, or is older than ten minutes. `tacita node page` makes a new one."
            return page("word.html", 401, title="No entry", brand=BRAND, kind="note", said=said, back=False)
        answer = page("entered.html", title="Welcome", brand=BRAND)
        answer.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return answer

    def known(found: Who | None) -> Who | None:
        """Who still is whom they were: an id that was erased and given again is somebody else's."""
        if found is None or found.role != "person":
            return found
        try:
            number = node.store.user(found.user)
        except TacitaError:
            return None
        return replace(found, number=number) if found.number in (0, number) else None

    def who(request: Request) -> Who | None:
        given = request.cookies.get(cookie)
        return None if given is None else known(tokens.who(given))

    def is_open(method: str, path: str) -> bool:
        return method in ("GET", "HEAD") and (path in STATIC or path.startswith("/enter/"))

    def closed() -> Response:
        return page(
            "word.html", 401, title="This page needs a link", brand=BRAND, kind="note", said=SIGN_IN, back=False
        )

    return Guard(app, who, is_open, Door(SIGN_IN, closed))


class Page(Strict):
    """Whose link is asked for; nobody's: the owner's."""

    user: str | None = None


@contextlib.contextmanager
def beside(daemon: Daemon) -> Iterator[PageServer]:
    """Serve a running node's pages, and hand out links to them by the owner's socket."""
    tokens = Tokens()
    with PageServer(node_app(daemon.node, tokens), daemon.node.config.page_port) as server:

        def link(arguments: dict[str, Any]) -> dict[str, Any]:
            user = validated(Page, arguments, "'page'").user
            who = Who("owner") if user is None else Who("person", user, daemon.node.store.user(user))
            return {"user": user, "link": f"{server.url}/enter/{tokens.link(who)}"}

        def links(arguments: dict[str, Any]) -> list[dict[str, Any]]:
            return [link({"user": raw}) for raw in daemon.node.store.users()[1]]

        daemon.verbs |= {"page": link, "pages": links}
        log.info("pages are served at %s; `tacita node page USER` prints a link", server.url)
        yield server
