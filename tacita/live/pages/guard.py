"""What stands before every page and call: names of this machine, nothing from other sites, nothing without a token.

A page on loopback can be reached by every program here and, through a name that an attacker points at 127.0.0.1, by
every web site in the same browser. So the Host header must name this machine, a change must come from the page itself,
and everything but the way in needs a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tacita.live.pages.rendering import is_htmx, render_message_page
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
    """The answer to a request without a session: a sentence for a call, a page for a browser."""

    message: str
    make_page: Callable[[], Response]


class RequestGuard:
    """An ASGI application in front of another one."""

    def __init__(
        self, app: ASGIApp, authenticate: Authenticator, is_open: Callable[[str, str], bool], sign_in: SignInPrompt
    ) -> None:
        self.app = app
        self._authenticate = authenticate
        self._is_open = is_open
        self._sign_in = sign_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _replace_headers(message["headers"])
            await send(message)

        refusal = self._find_refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, make_bounded_receive(receive), send_with_headers)

    def _find_refusal(self, request: Request) -> Response | None:
        """The first reason not to pass a request on; None: it may pass."""
        if not _is_local_host(request.headers.getlist("host")):
            return _make_error_response(request, 421, "this page answers to names of this machine only.")
        if _is_cross_site(request):
            return _make_error_response(request, 403, "this call comes from another site.")
        if _is_too_long(request.headers.get("content-length", "0")):
            return _make_error_response(request, 413, TOO_LONG)
        principal = self._authenticate(request)
        request.scope["state"] = {**request.scope.get("state", {}), "principal": principal}
        if self._is_open(request.method, request.url.path):
            return None
        if principal is None:
            return self._ask_to_sign_in(request)
        if not principal.may_change and not _only_reads(request):
            return _make_error_response(request, 403, "this token may only read.")
        return None

    def _ask_to_sign_in(self, request: Request) -> Response:
        if _is_program_call(request):
            return _make_error_response(request, 401, self._sign_in.message)
        return self._sign_in.make_page()


def _replace_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, with those of every page in place of its own of the same name."""
    other = [(name, value) for name, value in headers if name.decode() not in HEADERS]
    fixed = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    return other + fixed


def make_bounded_receive(receive: Receive) -> Receive:
    """Bound a body whose length no header states."""
    n_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal n_bytes
        message = await receive()
        n_bytes += len(message.get("body", b""))
        return message if n_bytes <= MOST_BODY else {"type": "http.disconnect"}

    return receive_bounded


def _is_too_long(content_length: str) -> bool:
    """Whether a body is announced as too long, or its length is no number."""
    is_number = content_length.isdecimal() and len(content_length) <= 20
    return not is_number or int(content_length) > MOST_BODY


def _is_local_host(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    match = _HOST.fullmatch(hosts[0])
    return match is not None and match[1].lower() in LOCAL_HOSTS


def _only_reads(request: Request) -> bool:
    return request.method in ("GET", "HEAD")


def _is_cross_site(request: Request) -> bool:
    """Another site, or another port of this machine, reads and changes nothing; a link to a page may be followed."""
    headers = request.headers
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if origin is not None and _parse_site(origin) != headers.get("host"):
        return True
    if site is not None and site not in ("same-origin", "none"):
        return not (_only_reads(request) and _follows_link(request))
    if _only_reads(request) or "authorization" in headers:  # no other site can make a browser send that header
        return False
    return site is None and origin is None


def _follows_link(request: Request) -> bool:
    headers = request.headers
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _is_program_call(request: Request) -> bool:
    """Whether a program calls, and not a browser that opens a page."""
    return request.url.path.startswith("/v1/") or not _only_reads(request) or is_htmx(request)


def _parse_site(origin: str) -> str | None:
    """The site that an address names; None: it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _make_error_response(request: Request, status: int, sentence: str) -> Response:
    if request.url.path.startswith("/v1/"):
        return JSONResponse({"error": sentence}, status)
    return render_message_page("Not from here", sentence, "tacita", status)
