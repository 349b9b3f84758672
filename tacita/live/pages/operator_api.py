"""The HTTP API of a server: what its operator may see and order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse
from pydantic import Field

from tacita import __version__
from tacita.live.pages import answers
from tacita.live.pages.control_room import ControlRoom
from tacita.live.pages.person_api import Body, Limit, Offset, Text

Name = Annotated[str, Path(max_length=200, pattern=r"^[^\x00]+$")]
Search = Annotated[str, Query(max_length=200)]
Order = Literal["next-block", "stop", "resume"]


class Begin(Body):
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
    settings: Annotated[str, Field(max_length=100_000)] = ""
    quorum: Annotated[int, Field(ge=1, le=10**6)] | Literal["all"] = "all"
    timeout: float = Field(300.0, ge=1, le=1e6)


class Enrol(Body):
    name: Annotated[str, Field(max_length=200)]
    public_key: Annotated[str, Field(max_length=10_000)]


class Item(Body):
    item: Text
    title: Text = ""


class Publish(Body):
    items: list[Item] = Field(max_length=100_000)


def routes(room: ControlRoom) -> APIRouter:
    api = APIRouter(prefix="/v1")
    _watch(api, room)
    _order(api, room)
    return api


def _watch(api: APIRouter, room: ControlRoom) -> None:
    @api.get("/health", response_model=answers.Health)
    def health() -> dict[str, Any]:
        return {**room.health(), "version": __version__}

    @api.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(room.metrics(), media_type="text/plain; version=0.0.4")

    @api.get("/overview", response_model=answers.Overview)
    def overview() -> dict[str, Any]:
        return room.overview()

    @api.get("/alerts", response_model=answers.Alerts)
    def alerts() -> dict[str, Any]:
        return room.alerts()

    @api.get("/runs", response_model=answers.Runs)
    def runs() -> dict[str, Any]:
        return room.runs()

    @api.get("/runs/{run}/rounds", response_model=answers.Rounds)
    def rounds(run: Name, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.rounds(run, offset, limit)

    @api.get("/runs/{run}/budgets", response_model=answers.Spreads)
    def budgets(run: Name) -> dict[str, Any]:
        return room.budgets(run)

    @api.get("/nodes", response_model=answers.Nodes)
    def nodes(search: Search = "", offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.nodes(search, offset, limit)

    @api.get("/requests", response_model=answers.RequestsThere)
    def requests(offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return room.requests(offset, limit)


def _order(api: APIRouter, room: ControlRoom) -> None:
    @api.post("/runs", response_model=answers.Begun)
    def begin(asked: Begin) -> dict[str, Any]:
        return room.begin(asked.run, asked.settings, asked.quorum, asked.timeout)

    @api.post("/runs/{run}/{order}", response_model=answers.Ordered)
    def order(run: Name, order: Order) -> dict[str, Any]:
        return room.order(run, order)

    @api.post("/nodes", response_model=answers.Enrolled)
    def enroll(asked: Enrol) -> dict[str, Any]:
        return room.enroll(asked.name, asked.public_key)

    @api.post("/nodes/{name}/revoke", response_model=answers.Revoked)
    def revoke(name: Name) -> dict[str, Any]:
        return room.revoke(name)

    @api.post("/catalogue", response_model=answers.Published)
    def publish(asked: Publish) -> dict[str, Any]:
        return room.publish([(one.item, one.title) for one in asked.items])
