"""The HTTP API of a server: what its operator may see and order."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse
from pydantic import Field

from tacita import __version__
from tacita.live.pages import response_models
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.person_api import ApiBody, Limit, Offset, Text
from tacita.live.pages.response_models import JsonObject

Name = Annotated[str, Path(max_length=200, pattern=r"^[^\x00]+$")]
Search = Annotated[str, Query(max_length=200)]
Order = Literal["next-block", "stop", "resume"]


class StartRunBody(ApiBody):
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
    settings: Annotated[str, Field(max_length=100_000)] = ""
    quorum: Annotated[int, Field(ge=1, le=10**6)] | Literal["all"] = "all"
    timeout: float = Field(300.0, ge=1, le=1e6)


class EnrolBody(ApiBody):
    name: Annotated[str, Field(max_length=200)]
    public_key: Annotated[str, Field(max_length=10_000)]


class ItemBody(ApiBody):
    item: Text
    title: Text = ""


class PublishBody(ApiBody):
    items: list[ItemBody] = Field(max_length=100_000)


def make_routes(service: OperatorService) -> APIRouter:
    api = APIRouter(prefix="/v1")
    _add_view_routes(api, service)
    _add_order_routes(api, service)
    return api


def _add_view_routes(api: APIRouter, service: OperatorService) -> None:
    @api.get("/health", response_model=response_models.Health)
    def health() -> JsonObject:
        return {**service.describe_health(), "version": __version__}

    @api.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.render_prometheus(), media_type="text/plain; version=0.0.4")

    @api.get("/overview", response_model=response_models.OverviewResponse)
    def overview() -> JsonObject:
        return service.describe_overview()

    @api.get("/alerts", response_model=response_models.Alerts)
    def alerts() -> JsonObject:
        return service.list_alerts()

    @api.get("/runs", response_model=response_models.Runs)
    def runs() -> JsonObject:
        return service.list_runs()

    @api.get("/runs/{run}/rounds", response_model=response_models.RoundPage)
    def rounds(run: Name, offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        return service.list_rounds(run, offset, limit)

    @api.get("/runs/{run}/budgets", response_model=response_models.RunSpending)
    def budgets(run: Name) -> JsonObject:
        return service.describe_budgets(run)

    @api.get("/nodes", response_model=response_models.NodePage)
    def nodes(search: Search = "", offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        return service.list_nodes(search, offset, limit)

    @api.get("/requests", response_model=response_models.ServerRequestPage)
    def requests(offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        return service.list_requests(offset, limit)


def _add_order_routes(api: APIRouter, service: OperatorService) -> None:
    @api.post("/runs", response_model=response_models.RunReceipt)
    def begin(body: StartRunBody) -> JsonObject:
        return service.begin_run(body.run, body.settings, body.quorum, body.timeout)

    @api.post("/runs/{run}/{order}", response_model=response_models.OrderReceipt)
    def order(run: Name, order: Order) -> JsonObject:
        return service.order_run(run, order)

    @api.post("/nodes", response_model=response_models.EnrolmentReceipt)
    def enroll(body: EnrolBody) -> JsonObject:
        return service.enroll_node(body.name, body.public_key)

    @api.post("/nodes/{name}/revoke", response_model=response_models.NodeReceipt)
    def revoke(name: Name) -> JsonObject:
        return service.revoke_node(name)

    @api.post("/catalogue", response_model=response_models.PublishReceipt)
    def publish(body: PublishBody) -> JsonObject:
        items = [(row.item, row.title) for row in body.items]
        return service.publish_items(items)
