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
Notice = tuple[str, str] | tuple[str, str, str] | None
"""How a notice looks, its text, and where on the page there is more."""
STATIC = {"/htmx.js": "application/javascript", "/style.css": "text/css"}


@cache
def _load_templates() -> Environment:
    packages = [PackageLoader("tacita.live.pages", "templates"), PackageLoader("tacita.report", "templates")]
    environment = Environment(
        loader=ChoiceLoader(packages),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "colours": COLOURS,
        "version": __version__,
        "htmx": json.dumps(HTMX),
        "style": make_style_name(),
    }
    environment.filters |= {
        "when": format_time,
        "size": format_bytes,
        "ago": format_age,
        "span": format_duration,
        "plural": format_count,
        "sentence": format_sentence,
        "odds": format_odds,
    }
    return environment


def format_sentence(text: object) -> Markup:
    """A sentence of an error or an alert as a page shows it: with a capital, and text in backticks as code."""
    sentence = str(text)
    escaped = str(escape(sentence[:1].upper() + sentence[1:]))
    return Markup(_CODE.sub(r"<code>\1</code>", escaped))


def make_style_name() -> str:
    """A name that changes with the style sheets."""
    content = b"".join(sheet.read_bytes() for sheet in _list_style_sheets())
    return hashlib.sha256(content).hexdigest()[:8]


def _list_style_sheets() -> list[Any]:
    return [
        files("tacita.report") / "templates" / "page.css",
        files("tacita.live.pages") / "templates" / "pages.css",
    ]


def render(template: str, **values: Any) -> str:
    return _load_templates().get_template(template).render(**values)


def render_page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(render(template, **values), status)


def render_message_page(
    title: str, sentence: str, brand: str, status: int = 200, kind: str = "note", back: bool = False
) -> HTMLResponse:
    """A page with a single sentence."""
    return render_page("word.html", status, title=title, brand=brand, kind=kind, said=sentence, back=back)


def is_htmx(request: Request) -> bool:
    return request.headers.get("hx-request") == "true"


def redirect_to(path: str) -> Response:
    """After a change that was made without scripts, the browser loads the page again."""
    return RedirectResponse(path, 303)


def make_static_routes() -> list[Route]:
    """The script and the style sheet, both from this machine."""
    script = (files("tacita.live.pages") / "static" / "htmx.min.js").read_bytes()

    async def htmx(request: Request) -> Response:
        return Response(script, media_type="application/javascript")

    async def style(request: Request) -> Response:
        sheet = render("page.css") + render("pages.css")
        return Response(sheet, media_type="text/css")

    return [Route("/htmx.js", htmx), Route("/style.css", style)]
