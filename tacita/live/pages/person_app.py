"""A node's pages: their application behind a guard, and how it is served beside the node's daemon."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

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
from tacita.live.pages.rendering import STATIC, make_static_routes, render_message_page, render_page
from tacita.live.pages.response_models import JsonObject
from tacita.live.pages.tokens import SESSION_SECONDS, Principal, Tokens, make_cookie_name
from tacita.live.running.daemon import Daemon

SIGN_IN = "`tacita node page USER` prints a link that opens this page once."

DEAD_LINK = "This link was used already, or is older than ten minutes. `tacita node page` makes a new one."

log = logging.getLogger(__name__)


def make_node_app(node: Node, tokens: Tokens) -> ASGIApp:
    """The API and pages of a node."""
    service = PersonService(node)
    cookie = make_cookie_name("person")
    app = make_api("tacita node")
    routers = (
        make_routes(service, tokens),
        make_front_routes(service),
        make_part_routes(service),
        make_choice_routes(service),
        make_request_routes(service),
        make_exit_routes(service, tokens, cookie),
        make_owner_routes(service, tokens),
    )
    for router in routers:
        app.include_router(router)
    app.router.routes.extend(make_static_routes())

    def check(principal: Principal) -> Principal | None:
        return confirm_identity(node, principal)

    @app.get("/enter/{link}", include_in_schema=False)
    def enter(link: str) -> Response:
        session = tokens.redeem_link(link, check)
        if session is None:
            return render_message_page("No entry", DEAD_LINK, BRAND, 401)
        response = render_page("entered.html", title="Welcome", brand=BRAND)
        response.set_cookie(cookie, session, int(SESSION_SECONDS), httponly=True, samesite="strict", path="/")
        return response

    def authenticate(request: Request) -> Principal | None:
        session = request.cookies.get(cookie)
        principal = None if session is None else tokens.find_principal(session)
        return None if principal is None else check(principal)

    return RequestGuard(app, authenticate, _is_open, SignInPrompt(SIGN_IN, _make_sign_in_page))


def confirm_identity(node: Node, principal: Principal) -> Principal | None:
    """Refuse a person whose id was erased and now belongs to another person."""
    if principal.role != "person":
        return principal
    try:
        number = node.store.find_user(principal.user)
    except TacitaError:
        return None
    is_same_person = principal.number in (0, number)
    return replace(principal, number=number) if is_same_person else None


def _is_open(method: str, path: str) -> bool:
    """What is served without a session: the style sheet, the script and links that open a session."""
    is_entry = path in STATIC or path.startswith("/enter/")
    return method in ("GET", "HEAD") and is_entry


def _make_sign_in_page() -> Response:
    return render_message_page("This page needs a link", SIGN_IN, BRAND, 401)


class PageArguments(StrictModel):
    """The person whose link is wanted; None: the owner's."""

    user: str | None = None


@contextlib.contextmanager
def serve_node_pages(daemon: Daemon) -> Iterator[PageServer]:
    """Serve a running node's pages, and hand out links to them by the owner's socket."""
    tokens = Tokens()
    store = daemon.node.store
    app = make_node_app(daemon.node, tokens)
    with PageServer(app, daemon.node.config.page_port) as server:

        def make_link(arguments: JsonObject) -> JsonObject:
            user = validate_model(PageArguments, arguments, "'page'").user
            if user is None:
                principal = Principal("owner")
            else:
                principal = Principal("person", user, store.find_user(user))
            token = tokens.make_link(principal)
            return {"user": user, "link": f"{server.url}/enter/{token}"}

        def make_all_links(arguments: JsonObject) -> list[JsonObject]:
            return [make_link({"user": user}) for user in store.list_users()[1]]

        daemon.verbs |= {"page": make_link, "pages": make_all_links}
        log.info("pages are served at %s; `tacita node page USER` prints a link", server.url)
        yield server
