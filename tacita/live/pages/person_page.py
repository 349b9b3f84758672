"""The person's page: parts of HTML that show what the API answers, and forms that call it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError
from tacita.live.node.user_queries import PRESETS
from tacita.live.pages.forms import Fields, parse_count_or_zero, parse_decimal, read_form
from tacita.live.pages.person_api import BudgetBody, require_person
from tacita.live.pages.person_service import PersonService
from tacita.live.pages.rendering import Notice, is_htmx, redirect_to, render, render_message_page, render_page
from tacita.live.pages.response_models import JsonObject
from tacita.live.pages.tokens import Principal, Tokens

BRAND = "tacita · your page"
RECOMMENDATIONS = 10
ROWS = 25
RELEASES = 8
CHARGES = 6
QUEUED_NOTICE = (
    "good",
    "Asked. How far it has come stands at the top of this page, and its certificate will.",
    "#requests",
)
ANSWERED_NOTICE = ("good stays", "The server has answered what you asked for.", "#requests")


class PersonPage:
    """Values for the templates of one person's page."""

    def __init__(self, service: PersonService) -> None:
        self.service = service

    def render_whole(self, user: str, fields: Fields) -> Response:
        values = self._read_stored_values(user, fields)
        trouble = ""
        recommended: list[JsonObject] = []
        try:
            recommended = self.service.list_recommendations(user, RECOMMENDATIONS)
        except TacitaError as error:
            trouble = str(error)
        return render_page(
            "person.html",
            title="Your items, and who may learn from them",
            brand=BRAND,
            recommended=recommended,
            trouble=trouble,
            notice=None,
            oob=False,
            **values,
        )

    def render_changes(self, user: str, fields: Fields, notice: Notice) -> Response:
        """All parts that a decision may change, each put in its place."""
        values = self._read_stored_values(user, fields)
        names = ("notice", "person_tiles", "person_requests", "person_choice", "person_history", "person_end")
        parts = [render(f"{name}.html", oob=True, notice=notice, **values) for name in names]
        return HTMLResponse("".join(parts))

    def respond_to_decision(self, request: Request, fields: Fields, notice: Notice) -> Response:
        """The response to a decision, for a browser with scripts or without."""
        if is_htmx(request):
            return self.render_changes(require_person(request), fields, notice)
        return redirect_to("/")

    def render_history(self, user: str, fields: Fields) -> Response:
        return render_page("person_history.html", oob=False, **self._read_stored_values(user, fields))

    def render_budget(self, user: str) -> str:
        """The gauge of every run, with the last releases and what each cost."""
        budget = self.service.describe_budget(user)
        for account in budget["runs"]:
            account["costs"] = self.service.list_costs(user, account["run"], 0, CHARGES)
        return render("person_budget.html", budget=budget)

    def render_tiles(self, user: str) -> str:
        person = self.service.summarize_person(user)
        releases = self.service.list_releases(user, 0, 1)
        return render("person_tiles.html", me=person, left=releases, oob=True)

    def _read_stored_values(self, user: str, fields: Fields) -> JsonObject:
        """Values from tables; none needs a model."""
        only = fields.get("only")
        if only not in ("all", "part", "kept"):
            only = "all"
        search = fields.get("search", "")[:200]
        offset = parse_count_or_zero(fields.get("offset", ""))
        history = self.service.list_history(user, search, only, offset, ROWS)  # type: ignore[arg-type]
        if offset and not history["items"]:
            history = self.service.list_history(user, search, only, 0, ROWS)  # type: ignore[arg-type]
        return {
            "me": self.service.summarize_person(user),
            "asked": self.service.list_requests(user),
            "history": history,
            "shown": {"search": search, "only": only},
            "left": self.service.list_releases(user, 0, RELEASES),
            "may": self.service.list_allowed_kinds(user),
            "keeping": self.service.list_runs_without_forget(user),
            "taken": self.service.list_forget_states(user),
            "presets": PRESETS,
        }


def make_part_routes(service: PersonService) -> APIRouter:
    """The routes that show a part of the page."""
    routes = APIRouter(include_in_schema=False)
    page = PersonPage(service)

    @routes.get("/part/history")
    def history(request: Request) -> Response:
        return page.render_history(require_person(request), dict(request.query_params))

    @routes.get("/part/why")
    def why(request: Request, item: str) -> Response:
        reasons = service.explain_item(require_person(request), item)
        return render_page("person_why.html", why=reasons)

    @routes.get("/part/preview")
    def preview(request: Request, item: str, without: str) -> Response:
        comparison = service.preview_without(require_person(request), item, without)
        return render_page("person_preview.html", preview=comparison)

    @routes.get("/part/requests")
    def requests(request: Request) -> Response:
        user = require_person(request)
        page_requests = service.list_requests(user)
        html = render("person_requests.html", asked=page_requests, oob=False)
        if not all(row["done"] for row in page_requests["requests"]):
            return HTMLResponse(html)
        html += render("notice.html", notice=ANSWERED_NOTICE, oob=True)  # in place of the notice that it was queued
        html += page.render_tiles(user)
        return HTMLResponse(html, headers={"hx-trigger": "answered"})  # other parts of the page reload on this

    @routes.get("/part/held")
    def holdings(request: Request) -> Response:
        values = service.describe_server_holdings(require_person(request))
        return render_page("person_held.html", held=values)

    @routes.get("/part/left")
    def releases(request: Request, offset: str = "0") -> Response:
        values = service.list_releases(require_person(request), parse_count_or_zero(offset), RELEASES)
        return render_page("person_left.html", left=values, oob=False)

    @routes.get("/part/budget")
    def budget(request: Request) -> Response:
        return HTMLResponse(page.render_budget(require_person(request)))

    @routes.get("/part/costs")
    def costs(request: Request, run: str, offset: str = "0", number: str = "1") -> Response:
        values = service.list_costs(require_person(request), run, parse_count_or_zero(offset), CHARGES)
        return render_page("person_costs.html", costs=values, number=parse_count_or_zero(number), spent=0)

    return routes


def make_choice_routes(service: PersonService) -> APIRouter:
    """The routes by which a person decides what takes part."""
    routes = APIRouter(include_in_schema=False)
    page = PersonPage(service)

    @routes.post("/do/choice")
    async def choice(request: Request) -> Response:
        user = require_person(request)
        fields = await read_form(request)
        preset = fields.get("preset", "")
        if preset not in PRESETS:
            raise TacitaError("choose one of: nothing, some, everything.")
        service.set_preset(user, preset)  # type: ignore[arg-type]
        sentence = f"{preset.capitalize()}: {PRESETS[preset]}"
        return page.respond_to_decision(request, fields, ("good", sentence))

    @routes.post("/do/switch")
    async def switch(request: Request) -> Response:
        fields = await read_form(request)
        takes_part = "takes_part" in fields
        service.set_item_consent(require_person(request), fields.get("item", ""), takes_part)
        return page.respond_to_decision(request, fields, None)

    @routes.post("/do/pause")
    async def pause(request: Request) -> Response:
        fields = await read_form(request)
        paused = fields.get("paused") == "yes"
        service.set_pause(require_person(request), paused)
        sentence = "You take a pause: nothing of yours leaves." if paused else "You take part again."
        return page.respond_to_decision(request, fields, ("good", sentence))

    return routes


def make_request_routes(service: PersonService) -> APIRouter:
    """The routes for a person's requests, and for the budget that they declare."""
    routes = APIRouter(include_in_schema=False)
    page = PersonPage(service)

    @routes.post("/do/budget")
    async def budget(request: Request) -> Response:
        user = require_person(request)
        fields = await read_form(request)
        try:
            epsilon = _parse_budget(fields.get("epsilon", ""))
            note = service.declare_budget(user, epsilon)["note"]
        except TacitaError as error:
            notice = ("note", str(error))
        else:
            confirmation = f"From the next message on, at most {epsilon:g} of your budget is spent in a run. {note}"
            notice = ("good", confirmation.strip())
        if not is_htmx(request):
            return redirect_to("/")
        html = page.render_budget(user) + render("notice.html", notice=notice, oob=True)
        return HTMLResponse(html)

    @routes.post("/do/ask")
    async def ask(request: Request) -> Response:
        fields = await read_form(request)
        items = [fields["item"]] if "item" in fields else []
        try:
            service.submit_request(require_person(request), fields.get("kind", ""), items)
        except TacitaError as error:
            return page.respond_to_decision(request, fields, ("note", str(error)))
        return page.respond_to_decision(request, fields, QUEUED_NOTICE)

    return routes


def _parse_budget(text: str) -> float:
    values = {"epsilon": parse_decimal(text)}
    return validate_model(BudgetBody, values, "the budget").epsilon


def make_exit_routes(service: PersonService, tokens: Tokens, cookie: str) -> APIRouter:
    """The routes by which a person leaves the device, or the page."""
    routes = APIRouter(include_in_schema=False)

    @routes.post("/do/erase")
    async def erase(request: Request) -> Response:
        user = require_person(request)
        fields = await read_form(request)
        try:
            receipt = service.erase_user(user, fields.get("confirm", ""))
        except TacitaError as error:
            return render_message_page("Nothing was erased", str(error), BRAND, status=400, back=True)
        tokens.close_user_sessions(user)
        sentence = (
            f"{receipt['interactions']:,} rows are gone from this device, and so are your choices and requests. If you "
            "spent anything of a privacy budget, one number stays, without your name: how much."
        )
        response = render_message_page("Erased", sentence, BRAND, kind="good")
        response.delete_cookie(cookie)
        return response

    @routes.post("/do/bye")
    def bye(request: Request) -> Response:
        tokens.close_session(request.cookies.get(cookie, ""))
        sentence = "This page is closed. `tacita node page` makes a new link."
        response = render_message_page("Closed", sentence, BRAND, kind="good")
        response.delete_cookie(cookie)
        return response

    return routes


def make_owner_routes(service: PersonService, tokens: Tokens) -> APIRouter:
    """The routes of an owner's list of people."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/part/people")
    def people(request: Request) -> Response:
        return _render_people(service, request, "people_list.html")

    @routes.post("/do/link")
    async def link(request: Request) -> Response:
        _require_owner(request)
        fields = await read_form(request)
        user = fields.get("user", "")
        principal = Principal("person", user, service.node.store.find_user(user))
        url = f"{request.base_url}enter/{tokens.make_link(principal)}"
        notice = ("good", f"For {user}, once, within ten minutes: `{url}`")
        return render_page("notice.html", notice=notice, oob=False)

    return routes


def _require_owner(request: Request) -> None:
    if request.state.principal.role != "owner":
        raise TacitaError("this is for the owner of the node.")


def _render_people(service: PersonService, request: Request, template: str) -> Response:
    _require_owner(request)
    search = request.query_params.get("search", "")[:200]
    offset = parse_count_or_zero(request.query_params.get("offset", ""))
    people = service.list_people(search, offset, ROWS)
    return render_page(
        template,
        title="People",
        brand="tacita · owner",
        node=service.node.config.name,
        notice=None,
        oob=False,
        found=people,
        search=search,
    )


def make_front_routes(service: PersonService) -> APIRouter:
    """The page itself: a person's own, or the owner's list of people."""
    routes = APIRouter(include_in_schema=False)
    page = PersonPage(service)

    @routes.get("/")
    def whole(request: Request) -> Response:
        if request.state.principal.role == "owner":
            return _render_people(service, request, "people.html")
        return page.render_whole(require_person(request), dict(request.query_params))

    return routes
