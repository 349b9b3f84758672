"""The person's page: parts of HTML that show what the API answers, and forms that call it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from tacita.core.config import validated
from tacita.core.errors import TacitaError
from tacita.live.node.persons import PRESETS
from tacita.live.pages.desk import Desk
from tacita.live.pages.person_api import Budget, person
from tacita.live.pages.rendering import away, is_htmx, page, render
from tacita.live.pages.tokens import Tokens, Who

BRAND = "tacita · your page"
ROWS, RELEASES, CHARGES, MOST_FIELDS = 25, 8, 6, 50
Notice = tuple[str, str] | tuple[str, str, str] | None  # how it looks, what it says, where more of it stands
ASKED = ("good", "Asked. How far it has come stands at the top of this page, and its certificate will.", "#requests")
ANSWERED = ("good stays", "The server has answered what you asked for.", "#requests")


class PersonPage:
    """Values for the templates of one person's page."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def whole(self, user: str, asked: dict[str, str]) -> Response:
        shown, trouble = self._cheap(user, asked), ""
        try:
            recommended = self.desk.recommendations(user, 10)
        except TacitaError as error:
            recommended, trouble = [], str(error)
        more: dict[str, Any] = {"recommended": recommended, "trouble": trouble, "notice": None, "oob": False}
        return page("person.html", title="What is known, and what leaves", brand=BRAND, **shown, **more)

    def anew(self, user: str, asked: dict[str, str], notice: Notice) -> Response:
        """All parts that a decision may change, each put in its place."""
        shown = self._cheap(user, asked)
        names = ("notice", "person_tiles", "person_requests", "person_choice", "person_history", "person_end")
        return HTMLResponse("".join(render(f"{name}.html", oob=True, notice=notice, **shown) for name in names))

    def after(self, request: Request, asked: dict[str, str], notice: Notice) -> Response:
        """What is shown when a decision was made, with scripts or without."""
        return self.anew(person(request), asked, notice) if is_htmx(request) else away("/")

    def history(self, user: str, asked: dict[str, str]) -> Response:
        return page("person_history.html", oob=False, **self._cheap(user, asked))

    def budget(self, user: str) -> str:
        """The gauge of every run, with the last releases and what each cost."""
        found = self.desk.budget(user)
        for one in found["runs"]:
            one["costs"] = self.desk.costs(user, one["run"], 0, CHARGES)
        return render("person_budget.html", budget=found)

    def _cheap(self, user: str, asked: dict[str, str]) -> dict[str, Any]:
        """What is read from tables, not from models."""
        only = asked.get("only") if asked.get("only") in ("all", "part", "kept") else "all"
        search = asked.get("search", "")[:200]
        offset = number_of(asked.get("offset", ""))
        history = self.desk.history(user, search, only, offset, ROWS)  # type: ignore[arg-type]
        if offset and not history["items"]:
            history = self.desk.history(user, search, only, 0, ROWS)  # type: ignore[arg-type]
        return {
            "me": self.desk.me(user),
            "asked": self.desk.requests(user),
            "history": history,
            "shown": {"search": search, "only": only},
            "left": self.desk.releases(user, 0, RELEASES),
            "may": self.desk.may(user),
            "keeping": self.desk.keeping(user),
            "taken": self.desk.taken(user),
            "presets": PRESETS,
        }


def number_of(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _decimal(text: str) -> float:
    """A number as people type it."""
    try:
        return float(text.strip().replace(",", ".")) if len(text) < 40 else float("nan")
    except ValueError:
        raise TacitaError("a budget is a number such as 1.5; smaller is more private.") from None


async def form(request: Request) -> dict[str, str]:
    """The fields of a form; of several of one name the last."""
    text = (await request.body()).decode("utf-8", "replace")
    if text.count("&") >= MOST_FIELDS:
        raise TacitaError(f"a form may have {MOST_FIELDS} fields.")
    return {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}


def parts(desk: Desk) -> APIRouter:
    """What a person looks at."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.get("/part/history")
    def history(request: Request) -> Response:
        return made.history(person(request), dict(request.query_params))

    @pages.get("/part/why")
    def why(request: Request, item: str) -> Response:
        return page("person_why.html", why=desk.why(person(request), item))

    @pages.get("/part/preview")
    def preview(request: Request, item: str, without: str) -> Response:
        return page("person_preview.html", preview=desk.preview(person(request), item, without))

    @pages.get("/part/requests")
    def requests(request: Request) -> Response:
        user = person(request)
        asked = desk.requests(user)
        shown = render("person_requests.html", asked=asked, oob=False)
        if all(one["done"] for one in asked["requests"]):  # what was said when it was asked is over
            shown += render("notice.html", notice=ANSWERED, oob=True)
            shown += render("person_tiles.html", me=desk.me(user), left=desk.releases(user, 0, 1), oob=True)
            return HTMLResponse(shown, headers={"hx-trigger": "answered"})  # the rest of the page looks again
        return HTMLResponse(shown)

    @pages.get("/part/held")
    def held(request: Request) -> Response:
        return page("person_held.html", held=desk.held(person(request)))

    @pages.get("/part/left")
    def left(request: Request, offset: str = "0") -> Response:
        found = desk.releases(person(request), number_of(offset), RELEASES)
        return page("person_left.html", left=found, oob=False)

    @pages.get("/part/budget")
    def budget(request: Request) -> Response:
        return HTMLResponse(made.budget(person(request)))

    @pages.get("/part/costs")
    def costs(request: Request, run: str, offset: str = "0", number: str = "1") -> Response:
        found = desk.costs(person(request), run, number_of(offset), CHARGES)
        return page("person_costs.html", costs=found, number=number_of(number), spent=0)

    return pages


def forms(desk: Desk) -> APIRouter:
    """What a person decides of what takes part."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.post("/do/choice")
    async def choice(request: Request) -> Response:
        user, asked = person(request), await form(request)
        preset = asked.get("preset", "")
        if preset not in PRESETS:
            raise TacitaError("choose one of: nothing, some, everything.")
        desk.choose(user, preset)  # type: ignore[arg-type]
        return made.after(request, asked, ("good", f"{preset.capitalize()}: {PRESETS[preset]}"))

    @pages.post("/do/switch")
    async def switch(request: Request) -> Response:
        asked = await form(request)
        desk.switch(person(request), asked.get("item", ""), "takes_part" in asked)
        return made.after(request, asked, None)

    @pages.post("/do/pause")
    async def pause(request: Request) -> Response:
        asked = await form(request)
        desk.pause(person(request), asked.get("paused") == "yes")
        said = "You take a pause: nothing of yours leaves." if asked.get("paused") == "yes" else "You take part again."
        return made.after(request, asked, ("good", said))

    return pages


def wishes(desk: Desk) -> APIRouter:
    """What a person asks for, and what they are willing to spend."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.post("/do/budget")
    async def budget(request: Request) -> Response:
        user, asked = person(request), await form(request)
        try:
            given = validated(Budget, {"epsilon": _decimal(asked.get("epsilon", ""))}, "the budget")
            desk.declare(user, given.epsilon)
        except TacitaError as error:
            said = ("note", str(error))
        else:
            said = ("good", f"From the next message on, at most {given.epsilon:g} of your budget is spent in a run.")
        if not is_htmx(request):
            return away("/")
        return HTMLResponse(made.budget(user) + render("notice.html", notice=said, oob=True))

    @pages.post("/do/ask")
    async def ask(request: Request) -> Response:
        asked = await form(request)
        try:
            desk.ask(person(request), asked.get("kind", ""), [asked["item"]] if "item" in asked else [])
        except TacitaError as error:
            return made.after(request, asked, ("note", str(error)))
        return made.after(request, asked, ASKED)

    return pages


def endings(desk: Desk, tokens: Tokens, cookie: str) -> APIRouter:
    """How a person leaves the device, or the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.post("/do/erase")
    async def erase(request: Request) -> Response:
        user, asked = person(request), await form(request)
        try:
            gone = desk.erase(user, asked.get("confirm", ""))
        except TacitaError as error:
            return page("word.html", 400, title="Nothing was erased", brand=BRAND, kind="note", said=error, back=True)
        tokens.close_all(user)
        said = (
            f"{gone['interactions']:,} rows are gone from this device, and so are your choices and requests. If you "
            "spent anything of a privacy budget, one number stays, without your name: how much."
        )
        done = page("word.html", title="Erased", brand=BRAND, kind="good", said=said, back=False)
        done.delete_cookie(cookie)
        return done

    @pages.post("/do/bye")
    def bye(request: Request) -> Response:
        tokens.close(request.cookies.get(cookie, ""))
        said = "This page is closed. `tacita node page` makes a new link."
        done = page("word.html", title="Closed", brand=BRAND, kind="good", said=said, back=False)
        done.delete_cookie(cookie)
        return done

    return pages


def owner_pages(desk: Desk, tokens: Tokens) -> APIRouter:
    """An owner's list of people."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/part/people")
    def people(request: Request) -> Response:
        return _people(desk, request, "people_list.html")

    @pages.post("/do/link")
    async def link(request: Request) -> Response:
        _owner(request)
        user = (await form(request)).get("user", "")
        where = f"{request.base_url}enter/{tokens.link(Who('person', user, desk.node.store.user(user)))}"
        return page("notice.html", notice=("good", f"For {user}, once, within ten minutes: `{where}`"), oob=False)

    return pages


def _owner(request: Request) -> None:
    if request.state.who.role != "owner":
        raise TacitaError("this is for the owner of the node.")


def _people(desk: Desk, request: Request, template: str) -> Response:
    _owner(request)
    search = request.query_params.get("search", "")[:200]
    found = desk.people(search, number_of(request.query_params.get("offset", "")), ROWS)
    about: dict[str, Any] = {
        "title": "People",
        "brand": "tacita · owner",
        "node": desk.node.config.name,
        "notice": None,
        "oob": False,
    }
    return page(template, found=found, search=search, **about)


def front(desk: Desk) -> APIRouter:
    """The page itself, by who looks at it."""
    pages, made = APIRouter(include_in_schema=False), PersonPage(desk)

    @pages.get("/")
    def whole(request: Request) -> Response:
        if request.state.who.role == "owner":
            return _people(desk, request, "people.html")
        return made.whole(person(request), dict(request.query_params))

    return pages
