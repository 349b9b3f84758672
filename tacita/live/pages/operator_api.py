"""The HTTP API of a server: what its operator may see and order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse
from pydantic import Field

from tacita import __version__
from tacita.live.pages import response_models
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.person_api import ApiBody, Limit, Offset, Text

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


def make_routes(room: OperatorService) -> APIRouter:
    api = APIRouter(prefix="/v1")
    _add_view_routes(api, room)
    _add_order_routes(api, room)
    return api


def _add_view_routes(api: APIRouter, room: OperatorService) -> None:
    @api.get("/health", response_model=response_models.Health)
    def health() -> dict[str, Any]:
        return {**room.health(), "version": __version__}

    @api.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(room.metrics(), media_type="text/plain; version=0.0.4")

    @api.get("/overview", response_model=response_models.OverviewResponse)
    def overview() -> dict[str, Any]:
        return room.overview()

    @api.get("/alerts", response_model=response_models.Alerts)
    def alerts() -> dict[str, Any]:
        return room.alerts()

    @api.get("/runs", response_model=response_models.Runs)
    def runs() -> dict[str, Any]:
        return room.runs()

    @api.get("/runs/{run}/rounds", response_model=response_models.RoundPage)
    def rounds(run: Name, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.rounds(run, offset, limit)

    @api.get("/runs/{run}/budgets", response_model=response_models.RunSpending)
    def budgets(run: Name) -> dict[str, Any]:
        return room.budgets(run)

    @api.get("/nodes", response_model=response_models.NodePage)
    def nodes(search: Search = "", offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.nodes(search, offset, limit)

    @api.get("/requests", response_model=response_models.ServerRequestPage)
    def requests(offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.requests(offset, limit)


def _add_order_routes(api: APIRouter, room: OperatorService) -> None:
    @api.post("/runs", response_model=response_models.RunReceipt)
    def begin(asked: StartRunBody) -> dict[str, Any]:
        return room.begin_run(asked.run, asked.settings, asked.quorum, asked.timeout)

    @api.post("/runs/{run}/{order}", response_model=response_models.OrderReceipt)
    def order(run: Name, order: Order) -> dict[str, Any]:
        return room.order_run(run, order)

    @api.post("/nodes", response_model=response_models.EnrolmentReceipt)
    def enroll(asked: EnrolBody) -> dict[str, Any]:
        return room.enroll_node(asked.name, asked.public_key)

    @api.post("/nodes/{name}/revoke", response_model=response_models.NodeReceipt)
    def revoke(name: Name) -> dict[str, Any]:
        return room.revoke_node(name)

    @api.post("/catalogue", response_model=response_models.PublishReceipt)
    def publish(asked: PublishBody) -> dict[str, Any]:
        return room.publish_items([(one.item, one.title) for one in asked.items])
