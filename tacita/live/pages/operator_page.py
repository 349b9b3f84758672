"""The operator's page: parts of HTML that show what the API answers, and forms that call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from tacita.core.errors import TacitaError
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.person_page import Notice, parse_number, read_form
from tacita.live.pages.rendering import is_htmx, redirect_to, render, render_page

BRAND = "tacita · operator"
ROWS = 25
ROUNDS = 8  # that are shown as they happen; older ones by the page
CONTROL_NAMES = {"random": "random", "popular": "most popular", "node": "each node alone"}
EXAMPLE_SETTINGS = 'seed = 1\n[backbone]\nname = "tally"\n'


class OperatorPage:
    """Values for the templates of the operator's page."""

    def __init__(self, room: OperatorService) -> None:
        self.service = room

    def render_whole(self, asked: dict[str, str], may_change: bool) -> Response:
        shown = {**self.runs(may_change), **self.nodes(asked, may_change), **self.requests(asked)}
        more: dict[str, Any] = {
            "overview": self.service.overview(),
            "notice": None,
            "oob": False,
            "first": EXAMPLE_SETTINGS,
        }
        title = f"Server {more['overview']['address']}"
        return render_page("operator.html", title=title, brand=BRAND, **shown, **more)

    def runs(self, may_change: bool) -> dict[str, Any]:
        runs = self.service.runs()["runs"][:20]
        for one in runs:
            one["timeline"] = self.service.rounds(one["run"], 0, ROUNDS)
            one["budgets"] = self.service.budgets(one["run"])
            one["beside"] = [
                _compare_with_controls(*both) for both in zip(one["quality"], one["controls"], strict=True)
            ]
            one["metrics"] = [name for name in (one["quality"] or [{}])[-1] if "@" in name or name == "auc"][:6]
        return {"runs": runs, "alerts": self.service.alerts()["alerts"], "may_change": may_change}

    def nodes(self, asked: dict[str, str], may_change: bool) -> dict[str, Any]:
        search = asked.get("search", "")[:200]
        found = self.service.nodes(search, parse_number(asked.get("offset", "")), ROWS)
        return {"nodes": found, "search": search, "may_change": may_change, "now": self.service.health()["time"]}

    def requests(self, asked: dict[str, str]) -> dict[str, Any]:
        return {"requests": self.service.requests(parse_number(asked.get("requests", "")), ROWS)}

    def render_changes(self, asked: dict[str, str], notice: Notice) -> Response:
        """All parts that an order may change."""
        shown = {**self.runs(True), **self.nodes(asked, True), **self.requests(asked), "notice": notice, "oob": True}
        names = ("notice", "operator_runs", "operator_nodes", "operator_requests")
        return HTMLResponse("".join(render(f"{name}.html", **shown) for name in names))


def _compare_with_controls(own: dict[str, float], controls: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A block's scores, the best of its controls by metric, and the controls as they are called here."""
    found = {CONTROL_NAMES[name]: scores for name, scores in controls.items() if scores and name in CONTROL_NAMES}
    best = {name: max((one[name] for one in found.values() if name in one), default=0.0) for name in own}
    return {"own": own, "best": best, "controls": found}


def make_view_routes(room: OperatorService) -> APIRouter:
    """What an operator looks at."""
    made, shown = APIRouter(include_in_schema=False), OperatorPage(room)

    def may(request: Request) -> bool:
        return bool(request.state.who.may_change)

    @made.get("/")
    def whole(request: Request) -> Response:
        return shown.render_whole(dict(request.query_params), may(request))

    @made.get("/part/runs")
    def runs(request: Request) -> Response:
        found = shown.runs(may(request))
        if len(found["runs"]) != parse_number(request.query_params.get("known", "")):  # one began elsewhere
            return Response(headers={"hx-refresh": "true"})
        return render_page("operator_beat.html", **found)  # in pieces: what is unfolded stays so

    @made.get("/part/rounds/{run}")
    def rounds(request: Request, run: str) -> Response:
        offset = max(ROUNDS, parse_number(request.query_params.get("offset", "")))
        return render_page("operator_older.html", run=run, timeline=room.rounds(run, offset, ROUNDS), first=ROUNDS)

    @made.get("/part/nodes")
    def nodes(request: Request) -> Response:
        return render_page("operator_nodes.html", oob=False, **shown.nodes(dict(request.query_params), may(request)))

    return made


def make_order_routes(room: OperatorService) -> APIRouter:
    """What an operator orders."""
    made, shown = APIRouter(include_in_schema=False), OperatorPage(room)

    async def carry_out(request: Request, act: Callable[[dict[str, str]], str]) -> Response:
        asked = await read_form(request)
        try:
            notice = ("good", act(asked))
        except TacitaError as error:
            notice = ("bad", str(error))
        return shown.render_changes(asked, notice) if is_htmx(request) else redirect_to("/")

    @made.post("/do/begin")
    async def begin(request: Request) -> Response:
        def act(asked: dict[str, str]) -> str:
            room.begin_run(
                asked.get("run", ""), asked.get("settings", ""), _parse_quorum(asked.get("quorum", "")), 300.0
            )
            return f"Run '{asked.get('run', '')}' has begun."

        return await carry_out(request, act)

    @made.post("/do/order")
    async def order(request: Request) -> Response:
        said = {"next-block": "opens its next block", "stop": "stops", "resume": "goes on"}

        def act(asked: dict[str, str]) -> str:
            what, run = asked.get("order", ""), asked.get("run", "")
            if what not in said:
                raise TacitaError("an order is one of: next-block, stop, resume.")
            room.order_run(run, what)
            return f"Run '{run}' {said[what]}."

        return await carry_out(request, act)

    @made.post("/do/enroll")
    async def enroll(request: Request) -> Response:
        def act(asked: dict[str, str]) -> str:
            found = room.enroll_node(asked.get("name", ""), asked.get("public_key", ""))
            return f"Node '{found['name']}' is enrolled. Compare the fingerprint with its owner: {found['fingerprint']}"

        return await carry_out(request, act)

    @made.post("/do/revoke")
    async def revoke(request: Request) -> Response:
        return await carry_out(
            request, lambda asked: f"Node '{room.revoke_node(asked.get('name', ''))['name']}' is revoked."
        )

    @made.post("/do/publish")
    async def publish(request: Request) -> Response:
        def act(asked: dict[str, str]) -> str:
            lines = [line.partition("\t" if "\t" in line else ",") for line in asked.get("items", "").splitlines()]
            found = room.publish_items([(item.strip(), title.strip()) for item, _, title in lines if item.strip()])
            return f"{found['new']:,} new items; the catalogue has {found['catalogue']:,}."

        return await carry_out(request, act)

    return made


def _parse_quorum(text: str) -> int | str:
    if text in ("", "all"):
        return "all"
    if not parse_number(text):
        raise TacitaError("a quorum is 'all' or a number of nodes.")
    return parse_number(text)
