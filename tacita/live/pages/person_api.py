"""The HTTP API of a node: what one person may see and decide about themselves, and an owner's list of people."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from tacita import __version__
from tacita.core.errors import TacitaError
from tacita.live.pages import answers
from tacita.live.pages.desk import Desk
from tacita.live.pages.guard import TOO_LONG
from tacita.live.pages.tokens import Tokens, Who

Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=200)]
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00]*$")]
Item = Annotated[str, Query(max_length=1000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(Body):
    """Why a call was not followed, in one sentence."""

    error: str


PROBLEMS = {
    400: "What was asked cannot be meant.",
    401: "A session is needed.",
    403: "Not with this session, or not from another site.",
    404: "There is nothing here.",
    405: "Not in this way.",
    413: "The body is too long.",
    421: "Only names of this machine are answered to.",
    422: "The call does not fit its description.",
}


class Choice(Body):
    preset: Literal["nothing", "some", "everything"]


class Switch(Body):
    item: Text
    takes_part: bool


class Pause(Body):
    paused: bool


class Budget(Body):
    epsilon: float = Field(ge=0, lt=1e6, allow_inf_nan=False)


class Ask(Body):
    kind: Literal["share", "unshare", "forget", "leave"]
    items: list[Text] = Field([], max_length=10_000)


class Erase(Body):
    confirm: Text


class Whom(Body):
    user: Text


def person(request: Request) -> str:
    """Whose page it is; nobody else's data can be named in a call."""
    who: Who = request.state.who
    if who.role != "person":
        raise HTTPException(403, "this is for one person's own page.")
    return who.user


def owner(request: Request) -> None:
    if request.state.who.role != "owner":
        raise HTTPException(403, "this is for the owner of the node.")


def routes(desk: Desk, tokens: Tokens) -> APIRouter:
    """Every call of /v1."""
    api = APIRouter(prefix="/v1")
    _reads(api, desk)
    _decides(api, desk, tokens)
    _owns(api, desk, tokens)
    return api


def _reads(api: APIRouter, desk: Desk) -> None:
    @api.get("/health", response_model=answers.Health)
    def health() -> dict[str, Any]:
        return {"up": True, "time": time.time(), "version": __version__}

    @api.get("/me", response_model=answers.Me)
    def me(request: Request) -> dict[str, Any]:
        return desk.me(person(request))

    @api.get("/me/recommendations", response_model=answers.Recommended)
    def recommendations(request: Request, k: Annotated[int, Query(ge=1, le=200)] = 10) -> dict[str, Any]:
        return {"recommendations": desk.recommendations(person(request), k)}

    @api.get("/me/reasons", response_model=answers.Reasons)
    def why(request: Request, item: Item) -> dict[str, Any]:
        return desk.why(person(request), item)

    @api.get("/me/preview", response_model=answers.Preview, response_model_exclude_unset=True)
    def preview(request: Request, item: Item, without: Item) -> dict[str, Any]:
        return desk.preview(person(request), item, without)

    @api.get("/me/history", response_model=answers.History)
    def history(
        request: Request,
        search: Item = "",
        only: Literal["all", "part", "kept"] = "all",
        offset: Offset = 0,
        limit: Limit = 25,
    ) -> dict[str, Any]:
        return desk.history(person(request), search, only, offset, limit)

    @api.get("/me/releases", response_model=answers.Releases)
    def releases(request: Request, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return desk.releases(person(request), offset, limit)

    @api.get("/me/held", response_model=answers.HeldThere)
    def held(request: Request) -> dict[str, Any]:
        return desk.held(person(request))

    @api.get("/me/budget", response_model=answers.Budgets, response_model_exclude_unset=True)
    def budget(request: Request) -> dict[str, Any]:
        return desk.budget(person(request))

    @api.get("/me/costs", response_model=answers.Charges)
    def costs(request: Request, run: Item, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return desk.costs(person(request), run, offset, limit)

    @api.get("/me/requests", response_model=answers.Requests)
    def requests(request: Request) -> dict[str, Any]:
        return {**desk.requests(person(request)), "may": desk.may(person(request))}

    @api.get("/me/export", response_class=Response)
    def export(request: Request) -> Response:
        found = desk.export(person(request))
        named = {"content-disposition": 'attachment; filename="my-data.jsonl"'}
        return Response(found, media_type="application/jsonl", headers=named)


def _decides(api: APIRouter, desk: Desk, tokens: Tokens) -> None:
    @api.put("/me/choice", response_model=answers.Me)
    def choose(request: Request, asked: Choice) -> dict[str, Any]:
        return desk.choose(person(request), asked.preset)

    @api.put("/me/items", response_model=answers.Me)
    def switch(request: Request, asked: Switch) -> dict[str, Any]:
        return desk.switch(person(request), asked.item, asked.takes_part)

    @api.put("/me/pause", response_model=answers.Me)
    def pause(request: Request, asked: Pause) -> dict[str, Any]:
        return desk.pause(person(request), asked.paused)

    @api.put("/me/budget", response_model=answers.Budgets, response_model_exclude_unset=True)
    def declare(request: Request, asked: Budget) -> dict[str, Any]:
        return desk.declare(person(request), asked.epsilon)

    @api.post("/me/requests", response_model=answers.Queued)
    def ask(request: Request, asked: Ask) -> dict[str, Any]:
        return desk.ask(person(request), asked.kind, asked.items)

    @api.post("/me/erase", response_model=answers.Erased)
    def erase(request: Request, asked: Erase) -> dict[str, Any]:
        user = person(request)
        found = desk.erase(user, asked.confirm)
        tokens.close_all(user)
        return found


def _owns(api: APIRouter, desk: Desk, tokens: Tokens) -> None:
    @api.get("/people", response_model=answers.People)
    def people(request: Request, search: Item = "", offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        owner(request)
        return desk.people(search, offset, limit)

    @api.post("/people/links", response_model=answers.Link)
    def link(request: Request, asked: Whom) -> dict[str, Any]:
        owner(request)
        who = Who("person", asked.user, desk.node.store.user(asked.user))
        return {"user": asked.user, "link": f"{request.base_url}enter/{tokens.link(who)}"}


def make_api(title: str) -> FastAPI:
    """An application whose errors are one sentence, and whose description needs a token like everything else."""
    told: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": said} for status, said in PROBLEMS.items()
    }
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        responses=told,
    )

    @app.exception_handler(TacitaError)
    def sentence(request: Request, error: TacitaError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(ClientDisconnect)
    def endless(request: Request, error: ClientDisconnect) -> Response:
        return JSONResponse({"error": TOO_LONG}, 413)  # or it went away, and nobody reads this

    @app.exception_handler(AnyHTTPException)
    def refused(request: Request, error: AnyHTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def wrong(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(one) for one in first["loc"][1:]) or "the call"
        return JSONResponse({"error": f"{where[:100]}: {first['msg'][:200]}."}, 422)

    return app
