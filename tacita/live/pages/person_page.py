"""The person's page: parts of HTML that show what the API answers, and forms that call it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError
from tacita.live.node.user_queries import PRESETS
from tacita.live.pages.person_api import BudgetBody, require_person
from tacita.live.pages.person_service import PersonService
from tacita.live.pages.rendering import is_htmx, redirect_to, render, render_page
from tacita.live.pages.tokens import Principal, Tokens

BRAND = "tacita · your page"
ROWS, RELEASES, CHARGES, MOST_FIELDS = 25, 8, 6, 50
Notice = tuple[str, str] | tuple[str, str, str] | None  # how it looks, what it says, where more of it stands
QUEUED_NOTICE = (
    "good",
    "Asked. How far it has come stands at the top of this page, and its certificate will.",
    "#requests",
)
ANSWERED_NOTICE = ("good stays", "The server has answered what you asked for.", "#requests")


class PersonPage:
    """Values for the templates of one person's page."""

    def __init__(self, desk: PersonService) -> None:
        self.service = desk

    def render_whole(self, user: str, asked: dict[str, str]) -> Response:
        shown, trouble = self._read_stored_values(user, asked), ""
        try:
            recommended = self.service.recommendations(user, 10)
        except TacitaError as error:
            recommended, trouble = [], str(error)
        more: dict[str, Any] = {"recommended": recommended, "trouble": trouble, "notice": None, "oob": False}
        return render_page("person.html", title="What is known, and what leaves", brand=BRAND, **shown, **more)

    def render_changes(self, user: str, asked: dict[str, str], notice: Notice) -> Response:
        """All parts that a decision may change, each put in its place."""
        shown = self._read_stored_values(user, asked)
        names = ("notice", "person_tiles", "person_requests", "person_choice", "person_history", "person_end")
        return HTMLResponse("".join(render(f"{name}.html", oob=True, notice=notice, **shown) for name in names))

    def respond_to_decision(self, request: Request, asked: dict[str, str], notice: Notice) -> Response:
        """What is shown when a decision was made, with scripts or without."""
        return self.render_changes(require_person(request), asked, notice) if is_htmx(request) else redirect_to("/")

    def render_history(self, user: str, asked: dict[str, str]) -> Response:
        return render_page("person_history.html", oob=False, **self._read_stored_values(user, asked))

    def render_budget(self, user: str) -> str:
        """The gauge of every run, with the last releases and what each cost."""
        found = self.service.budget(user)
        for one in found["runs"]:
            one["costs"] = self.service.costs(user, one["run"], 0, CHARGES)
        return render("person_budget.html", budget=found)

    def _read_stored_values(self, user: str, asked: dict[str, str]) -> dict[str, Any]:
        """What is read from tables, not from models."""
        only = asked.get("only") if asked.get("only") in ("all", "part", "kept") else "all"
        search = asked.get("search", "")[:200]
        offset = parse_number(asked.get("offset", ""))
        history = self.service.history(user, search, only, offset, ROWS)  # type: ignore[arg-type]
        if offset and not history["items"]:
            history = self.service.history(user, search, only, 0, ROWS)  # type: ignore[arg-type]
        return {
            "me": self.service.summarize_person(user),
            "asked": self.service.requests(user),
            "history": history,
            "shown": {"search": search, "only": only},
            "left": self.service.releases(user, 0, RELEASES),
            "may": self.service.allowed_kinds(user),
            "keeping": self.service.runs_without_forget(user),
            "taken": self.service.forget_states(user),
            "presets": PRESETS,
        }


def parse_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _parse_decimal(text: str) -> float:
    """A number as people type it."""
    try:
        return float(text.strip().replace(",", ".")) if len(text) < 40 else float("nan")
    except ValueError:
        raise TacitaError("a budget is a number such as 1.5; smaller is more private.") from None


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; of several of one name the last."""
    text = (await request.body()).decode("utf-8", "replace")
    if text.count("&") >= MOST_FIELDS:
        raise TacitaError(f"a form may have {MOST_FIELDS} fields.")
    return {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}


def make_part_routes(desk: PersonService) -> APIRouter:
    """What a person looks at."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.get("/part/history")
    def history(request: Request) -> Response:
        return made.render_history(require_person(request), dict(request.query_params))

    @pages.get("/part/why")
    def why(request: Request, item: str) -> Response:
        return render_page("person_why.html", why=desk.explain_item(require_person(request), item))

    @pages.get("/part/preview")
    def preview(request: Request, item: str, without: str) -> Response:
        return render_page("person_preview.html", preview=desk.preview_without(require_person(request), item, without))

    @pages.get("/part/requests")
    def requests(request: Request) -> Response:
        user = require_person(request)
        asked = desk.requests(user)
        shown = render("person_requests.html", asked=asked, oob=False)
        if all(one["done"] for one in asked["requests"]):  # what was said when it was asked is over
            shown += render("notice.html", notice=ANSWERED_NOTICE, oob=True)
            shown += render(
                "person_tiles.html", me=desk.summarize_person(user), left=desk.releases(user, 0, 1), oob=True
            )
            return HTMLResponse(shown, headers={"hx-trigger": "answered"})  # the rest of the page looks again
        return HTMLResponse(shown)

    @pages.get("/part/held")
    def held(request: Request) -> Response:
        return render_page("person_held.html", held=desk.describe_holdings(require_person(request)))

    @pages.get("/part/left")
    def left(request: Request, offset: str = "0") -> Response:
        found = desk.releases(require_person(request), parse_number(offset), RELEASES)
        return render_page("person_left.html", left=found, oob=False)

    @pages.get("/part/budget")
    def budget(request: Request) -> Response:
        return HTMLResponse(made.render_budget(require_person(request)))

    @pages.get("/part/costs")
    def costs(request: Request, run: str, offset: str = "0", number: str = "1") -> Response:
        found = desk.costs(require_person(request), run, parse_number(offset), CHARGES)
        return render_page("person_costs.html", costs=found, number=parse_number(number), spent=0)

    return pages


def make_choice_routes(desk: PersonService) -> APIRouter:
    """What a person decides of what takes part."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.post("/do/choice")
    async def choice(request: Request) -> Response:
        user, asked = require_person(request), await read_form(request)
        preset = asked.get("preset", "")
        if preset not in PRESETS:
            raise TacitaError("choose one of: nothing, some, everything.")
        desk.set_preset(user, preset)  # type: ignore[arg-type]
        return made.respond_to_decision(request, asked, ("good", f"{preset.capitalize()}: {PRESETS[preset]}"))

    @pages.post("/do/switch")
    async def switch(request: Request) -> Response:
        asked = await read_form(request)
        desk.set_item_consent(require_person(request), asked.get("item", ""), "takes_part" in asked)
        return made.respond_to_decision(request, asked, None)

    @pages.post("/do/pause")
    async def pause(request: Request) -> Response:
        asked = await read_form(request)
        desk.set_pause(require_person(request), asked.get("paused") == "yes")
        said = "You take a pause: nothing of yours leaves." if asked.get("paused") == "yes" else "You take part again."
        return made.respond_to_decision(request, asked, ("good", said))

    return pages


def make_request_routes(desk: PersonService) -> APIRouter:
    """What a person asks for, and what they are willing to spend."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.post("/do/budget")
    async def budget(request: Request) -> Response:
        user, asked = require_person(request), await read_form(request)
        try:
            given = validate_model(BudgetBody, {"epsilon": _parse_decimal(asked.get("epsilon", ""))}, "the budget")
            desk.declare_budget(user, given.epsilon)
        except TacitaError as error:
            said = ("note", str(error))
        else:
            said = ("good", f"From the next message on, at most {given.epsilon:g} of your budget is spent in a run.")
        if not is_htmx(request):
            return redirect_to("/")
        return HTMLResponse(made.render_budget(user) + render("notice.html", notice=said, oob=True))

    @pages.post("/do/ask")
    async def ask(request: Request) -> Response:
        asked = await read_form(request)
        try:
            desk.submit_request(
                require_person(request), asked.get("kind", ""), [asked["item"]] if "item" in asked else []
            )
        except TacitaError as error:
            return made.respond_to_decision(request, asked, ("note", str(error)))
        return made.respond_to_decision(request, asked, QUEUED_NOTICE)

    return pages


def make_exit_routes(desk: PersonService, tokens: Tokens, cookie: str) -> APIRouter:
    """How a person leaves the device, or the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.post("/do/erase")
    async def erase(request: Request) -> Response:
        user, asked = require_person(request), await read_form(request)
        try:
            gone = desk.erase_user(user, asked.get("confirm", ""))
        except TacitaError as error:
            return render_page(
                "word.html", 400, title="Nothing was erased", brand=BRAND, kind="note", said=error, back=True
            )
        tokens.close_user_sessions(user)
        said = (
            f"{gone['interactions']:,} rows are gone from this device, and so are your choices and requests. If you "
            "spent anything of a privacy budget, one number stays, without your name: how much."
        )
        done = render_page("word.html", title="Erased", brand=BRAND, kind="good", said=said, back=False)
        done.delete_cookie(cookie)
        return done

    @pages.post("/do/bye")
    def bye(request: Request) -> Response:
        tokens.close_session(request.cookies.get(cookie, ""))
        said = "This page is closed. `tacita node page` makes a new link."
        done = render_page("word.html", title="Closed", brand=BRAND, kind="good", said=said, back=False)
        done.delete_cookie(cookie)
        return done

    return pages


def make_owner_routes(desk: PersonService, tokens: Tokens) -> APIRouter:
    """An owner's list of people."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/part/people")
    def people(request: Request) -> Response:
        return _render_people(desk, request, "people_list.html")

    @pages.post("/do/link")
    async def link(request: Request) -> Response:
        _require_owner(request)
        user = (await read_form(request)).get("user", "")
        where = (
            f"{request.base_url}enter/{tokens.make_link(Principal('person', user, desk.node.store.find_user(user)))}"
        )
        return render_page(
            "notice.html", notice=("good", f"For {user}, once, within ten minutes: `{where}`"), oob=False
        )

    return pages


def _require_owner(request: Request) -> None:
    if request.state.who.role != "owner":
        raise TacitaError("this is for the owner of the node.")


def _render_people(desk: PersonService, request: Request, template: str) -> Response:
    _require_owner(request)
    search = request.query_params.get("search", "")[:200]
    found = desk.list_people(search, parse_number(request.query_params.get("offset", "")), ROWS)
    about: dict[str, Any] = {
        "title": "People",
        "brand": "tacita · owner",
        "node": desk.node.config.name,
        "notice": None,
        "oob": False,
    }
    return render_page(template, found=found, search=search, **about)


def make_front_routes(desk: PersonService) -> APIRouter:
    """The page itself, by who looks at it."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.get("/")
    def whole(request: Request) -> Response:
        if request.state.who.role == "owner":
            return _render_people(desk, request, "people.html")
        return made.render_whole(require_person(request), dict(request.query_params))

    return pages
