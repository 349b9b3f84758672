"""Templates of the pages, in the style of the reports. Every text is escaped, and a missing value is an error."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tacita import __version__
from tacita.live.formatting import format_age, format_bytes, format_count, format_duration, format_odds, format_time
from tacita.report.drawing import COLOURS

HTMX = {"includeIndicatorStyles": False, "allowEval": False, "selfRequestsOnly": True, "historyCacheSize": 0}
_CODE = re.compile(r"`([^`]+)`")
STATIC = {"/htmx.js": "application/javascript", "/style.css": "text/css"}


@cache
def _load_templates() -> Environment:
    loader = ChoiceLoader(
        [PackageLoader("tacita.live.pages", "templates"), PackageLoader("tacita.report", "templates")]
    )
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals |= {"colours": COLOURS, "version": __version__, "htmx": json.dumps(HTMX), "style": style_name()}
    found.filters |= {
        "when": format_time,
        "size": format_bytes,
        "ago": format_age,
        "span": format_duration,
        "plural": format_count,
        "sentence": format_sentence,
    }
    found.filters |= {"odds": format_odds}
    return found


def format_sentence(text: object) -> Markup:
    """A sentence of an error or an alert as a page shows it: with a capital, and what is in backticks as code."""
    said = str(text)
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(said[:1].upper() + said[1:]))))


def style_name() -> str:
    return hashlib.sha256(b"".join(one.read_bytes() for one in _sheets())).hexdigest()[:8]


def _sheets() -> list[Any]:
    return [
        files("tacita.report") / "templates" / "page.css",
        files("tacita.live.pages") / "templates" / "pages.css",
    ]


def render(template: str, **shown: Any) -> str:
    return _load_templates().get_template(template).render(**shown)


def render_page(template: str, status: int = 200, **shown: Any) -> HTMLResponse:
    return HTMLResponse(render(template, **shown), status)


def is_htmx(request: Request) -> bool:
    return request.headers.get("hx-request") == "true"


def redirect_to(path: str) -> Response:
    """After a change that was made without scripts: the page anew."""
    return RedirectResponse(path, 303)


def static_routes() -> list[Route]:
    """The one script and the one style sheet, both from this machine."""
    script = (files("tacita.live.pages") / "static" / "htmx.min.js").read_bytes()

    async def htmx(request: Request) -> Response:
        return Response(script, media_type="application/javascript")

    async def style(request: Request) -> Response:
        return Response(render("page.css") + render("pages.css"), media_type="text/css")

    return [Route("/htmx.js", htmx), Route("/style.css", style)]
