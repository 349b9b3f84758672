"""What stands before every page and call: names of this machine, nothing from other sites, nothing without a token.

A page on loopback can be reached by every program here and, through a name that an attacker points at 127.0.0.1, by
every web site in the same browser. So the Host header must name this machine, a change must come from the page itself,
and everything but the way in needs a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tacita.live.pages.rendering import is_htmx, render_page
from tacita.live.pages.tokens import Principal

MOST_BODY = 2**20
TOO_LONG = f"a body may have {MOST_BODY:,} bytes."
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with none, browsers name no origin when a form is sent
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "geolocation=(), camera=(), microphone=()",
    "cache-control": "no-store",
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")

Authenticator = Callable[[Request], Principal | None]


@dataclass(frozen=True)
class SignInPrompt:
    """What somebody without a session is told, and what they are shown in a browser."""

    message: str
    make_page: Callable[[], Response]


class RequestGuard:
    """An ASGI application before another one."""

    def __init__(
        self, app: ASGIApp, who: Authenticator, is_open: Callable[[str, str], bool], door: SignInPrompt
    ) -> None:
        self.app, self._authenticate, self._is_open, self._sign_in = app, who, is_open, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.decode() not in HEADERS]
                message["headers"] = kept + [(k.encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        refused = self._find_refusal(request)
        if refused is not None:
            await refused(scope, receive, answer)
            return
        await self.app(scope, limit_body(receive), answer)

    def _find_refusal(self, request: Request) -> Response | None:
        if not _is_local_host(request.headers.getlist("host")):
            return _make_error(request, 421, "this page answers to names of this machine only.")
        if _is_cross_site(request):
            return _make_error(request, 403, "this call comes from another site.")
        size = request.headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 20 or int(size) > MOST_BODY:
            return _make_error(request, 413, TOO_LONG)
        found = self._authenticate(request)
        request.scope["state"] = {**request.scope.get("state", {}), "who": found}
        if self._is_open(request.method, request.url.path):
            return None
        if found is None:
            return _make_error(request, 401, self._sign_in.message) if _is_call(request) else self._sign_in.make_page()
        if not found.may_change and request.method not in ("GET", "HEAD"):
            return _make_error(request, 403, "this token may only read.")
        return None


def limit_body(receive: Receive) -> Receive:
    """A body of unknown length ends, too."""
    seen = 0

    async def take() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= MOST_BODY else {"type": "http.disconnect"}

    return take


def _is_local_host(hosts: list[str]) -> bool:
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return found is not None and found[1].lower() in LOCAL_HOSTS


def _is_cross_site(request: Request) -> bool:
    """Another site, or another port of this machine, reads and changes nothing; a link to a page may be followed."""
    headers, reads = request.headers, request.method in ("GET", "HEAD")
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin is not None and _parse_site(origin) != headers.get("host"):
        return True
    if site is not None and site not in ("same-origin", "none"):
        follows = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (reads and follows)
    if reads or "authorization" in headers:  # no site can make a browser send that one unasked
        return False
    return site is None and origin is None


def _is_call(request: Request) -> bool:
    """Not somebody who opens a page."""
    return request.url.path.startswith("/v1/") or request.method not in ("GET", "HEAD") or is_htmx(request)


def _parse_site(origin: str) -> str | None:
    """The site that an address names; None: it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _make_error(request: Request, status: int, said: str) -> Response:
    if request.url.path.startswith("/v1/"):
        return JSONResponse({"error": said}, status)
    return render_page("word.html", status, title="Not from here", brand="tacita", kind="note", said=said, back=False)
