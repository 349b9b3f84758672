"""The operator's page: parts of HTML that show what the API answers, and forms that call it."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from tacita.core.errors import TacitaError
from tacita.live.pages.forms import Fields, parse_count_or_zero, read_form
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.rendering import Notice, is_htmx, redirect_to, render, render_page
from tacita.live.pages.response_models import JsonObject

BRAND = "tacita · operator"
ROWS = 25
ROUNDS = 8  # that are shown as they happen; older ones by the page
MOST_RUNS = 20
MOST_METRICS = 6
CONTROL_NAMES = {"random": "random", "popular": "most popular", "node": "each node alone"}
ORDER_EFFECTS = {"next-block": "opens its next block", "stop": "stops", "resume": "goes on"}
EXAMPLE_SETTINGS = 'seed = 1\n[backbone]\nname = "tally"\n'


class OperatorPage:
    """Values for the templates of the operator's page."""

    def __init__(self, service: OperatorService) -> None:
        self.service = service

    def render_whole(self, fields: Fields, may_change: bool) -> Response:
        values = self._collect_values(fields, may_change)
        overview = self.service.describe_overview()
        title = f"Server {overview['address']}"
        return render_page(
            "operator.html",
            title=title,
            brand=BRAND,
            overview=overview,
            notice=None,
            oob=False,
            first=EXAMPLE_SETTINGS,
            **values,
        )

    def render_changes(self, fields: Fields, notice: Notice) -> Response:
        """All parts that an order may change."""
        values = self._collect_values(fields, may_change=True)
        names = ("notice", "operator_runs", "operator_nodes", "operator_requests")
        parts = [render(f"{name}.html", notice=notice, oob=True, **values) for name in names]
        return HTMLResponse("".join(parts))

    def _collect_values(self, fields: Fields, may_change: bool) -> JsonObject:
        return {
            **self.collect_run_values(may_change),
            **self.collect_node_values(fields, may_change),
            **self.collect_request_values(fields),
        }

    def collect_run_values(self, may_change: bool) -> JsonObject:
        runs = self.service.list_runs()["runs"][:MOST_RUNS]
        for run in runs:
            name = run["run"]
            run["timeline"] = self.service.list_rounds(name, 0, ROUNDS)
            run["budgets"] = self.service.describe_budgets(name)
            run["beside"] = _compare_blocks(run["quality"], run["controls"])
            run["metrics"] = _select_metrics(run["quality"])
        return {"runs": runs, "alerts": self.service.list_alerts()["alerts"], "may_change": may_change}

    def collect_node_values(self, fields: Fields, may_change: bool) -> JsonObject:
        search = fields.get("search", "")[:200]
        offset = parse_count_or_zero(fields.get("offset", ""))
        page = self.service.list_nodes(search, offset, ROWS)
        now = self.service.describe_health()["time"]
        return {"nodes": page, "search": search, "may_change": may_change, "now": now}

    def collect_request_values(self, fields: Fields) -> JsonObject:
        offset = parse_count_or_zero(fields.get("requests", ""))
        return {"requests": self.service.list_requests(offset, ROWS)}


def _compare_blocks(quality: list[dict[str, float]], controls: list[dict[str, dict[str, float]]]) -> list[JsonObject]:
    """The scores of each block beside those of its controls."""
    blocks = zip(quality, controls, strict=True)
    return [_compare_with_controls(scores, control_scores) for scores, control_scores in blocks]


def _compare_with_controls(own: dict[str, float], controls: dict[str, dict[str, float]]) -> JsonObject:
    """A block's scores, the best of its controls by metric, and the controls under the names that the page uses."""
    named = {}
    for name, scores in controls.items():
        if scores and name in CONTROL_NAMES:
            named[CONTROL_NAMES[name]] = scores
    best = {}
    for metric in own:
        values = [scores[metric] for scores in named.values() if metric in scores]
        best[metric] = max(values, default=0.0)
    return {"own": own, "best": best, "controls": named}


def _select_metrics(quality: list[dict[str, float]]) -> list[str]:
    """The columns of the table of quality, by what the last block was measured with."""
    names = quality[-1] if quality else {}
    ranked = [name for name in names if "@" in name or name == "auc"]
    return ranked[:MOST_METRICS]


def make_view_routes(service: OperatorService) -> APIRouter:
    """The routes that show something."""
    routes = APIRouter(include_in_schema=False)
    page = OperatorPage(service)

    def may_change(request: Request) -> bool:
        return bool(request.state.principal.may_change)

    @routes.get("/")
    def whole(request: Request) -> Response:
        return page.render_whole(dict(request.query_params), may_change(request))

    @routes.get("/part/runs")
    def runs(request: Request) -> Response:
        values = page.collect_run_values(may_change(request))
        n_shown = parse_count_or_zero(request.query_params.get("known", ""))
        if len(values["runs"]) != n_shown:  # a run began elsewhere
            return Response(headers={"hx-refresh": "true"})
        return render_page("operator_beat.html", **values)  # in pieces, so that unfolded details stay unfolded

    @routes.get("/part/rounds/{run}")
    def rounds(request: Request, run: str) -> Response:
        offset = max(ROUNDS, parse_count_or_zero(request.query_params.get("offset", "")))
        timeline = service.list_rounds(run, offset, ROUNDS)
        return render_page("operator_older.html", run=run, timeline=timeline, first=ROUNDS)

    @routes.get("/part/nodes")
    def nodes(request: Request) -> Response:
        values = page.collect_node_values(dict(request.query_params), may_change(request))
        return render_page("operator_nodes.html", oob=False, **values)

    return routes


def make_order_routes(service: OperatorService) -> APIRouter:
    """The routes that carry out an order."""
    routes = APIRouter(include_in_schema=False)
    page = OperatorPage(service)

    async def carry_out(request: Request, order: Callable[[OperatorService, Fields], str]) -> Response:
        fields = await read_form(request)
        try:
            notice = ("good", order(service, fields))
        except TacitaError as error:
            notice = ("bad", str(error))
        return page.render_changes(fields, notice) if is_htmx(request) else redirect_to("/")

    @routes.post("/do/begin")
    async def begin(request: Request) -> Response:
        return await carry_out(request, _begin_run)

    @routes.post("/do/order")
    async def order(request: Request) -> Response:
        return await carry_out(request, _order_run)

    @routes.post("/do/enroll")
    async def enroll(request: Request) -> Response:
        return await carry_out(request, _enroll_node)

    @routes.post("/do/revoke")
    async def revoke(request: Request) -> Response:
        return await carry_out(request, _revoke_node)

    @routes.post("/do/publish")
    async def publish(request: Request) -> Response:
        return await carry_out(request, _publish_items)

    return routes


# Orders: each takes a form's fields, and returns the sentence that the page shows


def _begin_run(service: OperatorService, fields: Fields) -> str:
    run = fields.get("run", "")
    quorum = _parse_quorum(fields.get("quorum", ""))
    service.begin_run(run, fields.get("settings", ""), quorum, 300.0)
    return f"Run '{run}' has begun."


def _order_run(service: OperatorService, fields: Fields) -> str:
    order = fields.get("order", "")
    run = fields.get("run", "")
    if order not in ORDER_EFFECTS:
        raise TacitaError("an order is one of: next-block, stop, resume.")
    service.order_run(run, order)
    return f"Run '{run}' {ORDER_EFFECTS[order]}."


def _enroll_node(service: OperatorService, fields: Fields) -> str:
    receipt = service.enroll_node(fields.get("name", ""), fields.get("public_key", ""))
    name = receipt["name"]
    return f"Node '{name}' is enrolled. Compare the fingerprint with its owner: {receipt['fingerprint']}"


def _revoke_node(service: OperatorService, fields: Fields) -> str:
    receipt = service.revoke_node(fields.get("name", ""))
    return f"Node '{receipt['name']}' is revoked."


def _publish_items(service: OperatorService, fields: Fields) -> str:
    items = []
    for line in fields.get("items", "").splitlines():
        separator = "\t" if "\t" in line else ","
        item, _, title = line.partition(separator)
        if item.strip():
            items.append((item.strip(), title.strip()))
    receipt = service.publish_items(items)
    return f"{receipt['new']:,} new items; the catalogue has {receipt['catalogue']:,}."


def _parse_quorum(text: str) -> int | str:
    if text in ("", "all"):
        return "all"
    n_nodes = parse_count_or_zero(text)
    if not n_nodes:
        raise TacitaError("a quorum is 'all' or a number of nodes.")
    return n_nodes
