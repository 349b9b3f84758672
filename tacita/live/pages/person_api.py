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
from tacita.live.pages import response_models
from tacita.live.pages.guard import TOO_LONG
from tacita.live.pages.person_service import PersonService
from tacita.live.pages.tokens import Principal, Tokens

Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=200)]
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00]*$")]
QueryText = Annotated[str, Query(max_length=1000)]


class ApiBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(ApiBody):
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


class ChoiceBody(ApiBody):
    preset: Literal["nothing", "some", "everything"]


class ItemConsentBody(ApiBody):
    item: Text
    takes_part: bool


class PauseBody(ApiBody):
    paused: bool


class BudgetBody(ApiBody):
    epsilon: float = Field(ge=0, lt=1e6, allow_inf_nan=False)


class SubmitRequestBody(ApiBody):
    kind: Literal["share", "unshare", "forget", "leave"]
    items: list[Text] = Field([], max_length=10_000)


class EraseBody(ApiBody):
    confirm: Text


class LinkBody(ApiBody):
    user: Text


def require_person(request: Request) -> str:
    """Whose page it is; nobody else's data can be named in a call."""
    who: Principal = request.state.who
    if who.role != "person":
        raise HTTPException(403, "this is for one person's own page.")
    return who.user


def require_owner(request: Request) -> None:
    if request.state.who.role != "owner":
        raise HTTPException(403, "this is for the owner of the node.")


def make_routes(desk: PersonService, tokens: Tokens) -> APIRouter:
    """Every call of /v1."""
    api = APIRouter(prefix="/v1")
    _add_view_routes(api, desk)
    _add_decision_routes(api, desk, tokens)
    _add_owner_routes(api, desk, tokens)
    return api


def _add_view_routes(api: APIRouter, desk: PersonService) -> None:
    @api.get("/health", response_model=response_models.Health)
    def health() -> dict[str, Any]:
        return {"up": True, "time": time.time(), "version": __version__}

    @api.get("/me", response_model=response_models.PersonSummary)
    def me(request: Request) -> dict[str, Any]:
        return desk.summarize_person(require_person(request))

    @api.get("/me/recommendations", response_model=response_models.RecommendationList)
    def recommendations(request: Request, k: Annotated[int, Query(ge=1, le=200)] = 10) -> dict[str, Any]:
        return {"recommendations": desk.recommendations(require_person(request), k)}

    @api.get("/me/reasons", response_model=response_models.Reasons)
    def why(request: Request, item: QueryText) -> dict[str, Any]:
        return desk.explain_item(require_person(request), item)

    @api.get("/me/preview", response_model=response_models.Preview, response_model_exclude_unset=True)
    def preview(request: Request, item: QueryText, without: QueryText) -> dict[str, Any]:
        return desk.preview_without(require_person(request), item, without)

    @api.get("/me/history", response_model=response_models.HistoryPage)
    def history(
        request: Request,
        search: QueryText = "",
        only: Literal["all", "part", "kept"] = "all",
        offset: Offset = 0,
        limit: Limit = 25,
    ) -> dict[str, Any]:
        return desk.history(require_person(request), search, only, offset, limit)

    @api.get("/me/releases", response_model=response_models.ReleasePage)
    def releases(request: Request, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return desk.releases(require_person(request), offset, limit)

    @api.get("/me/held", response_model=response_models.ServerHoldings)
    def held(request: Request) -> dict[str, Any]:
        return desk.describe_holdings(require_person(request))

    @api.get("/me/budget", response_model=response_models.Budgets, response_model_exclude_unset=True)
    def budget(request: Request) -> dict[str, Any]:
        return desk.budget(require_person(request))

    @api.get("/me/costs", response_model=response_models.Charges)
    def costs(request: Request, run: QueryText, offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return desk.costs(require_person(request), run, offset, limit)

    @api.get("/me/requests", response_model=response_models.RequestList)
    def requests(request: Request) -> dict[str, Any]:
        return {**desk.requests(require_person(request)), "may": desk.allowed_kinds(require_person(request))}

    @api.get("/me/export", response_class=Response)
    def export(request: Request) -> Response:
        found = desk.export_user(require_person(request))
        named = {"content-disposition": 'attachment; filename="my-data.jsonl"'}
        return Response(found, media_type="application/jsonl", headers=named)


def _add_decision_routes(api: APIRouter, desk: PersonService, tokens: Tokens) -> None:
    @api.put("/me/choice", response_model=response_models.PersonSummary)
    def choose(request: Request, asked: ChoiceBody) -> dict[str, Any]:
        return desk.set_preset(require_person(request), asked.preset)

    @api.put("/me/items", response_model=response_models.PersonSummary)
    def switch(request: Request, asked: ItemConsentBody) -> dict[str, Any]:
        return desk.set_item_consent(require_person(request), asked.item, asked.takes_part)

    @api.put("/me/pause", response_model=response_models.PersonSummary)
    def pause(request: Request, asked: PauseBody) -> dict[str, Any]:
        return desk.set_pause(require_person(request), asked.paused)

    @api.put("/me/budget", response_model=response_models.Budgets, response_model_exclude_unset=True)
    def declare(request: Request, asked: BudgetBody) -> dict[str, Any]:
        return desk.declare_budget(require_person(request), asked.epsilon)

    @api.post("/me/requests", response_model=response_models.QueuedRequests)
    def ask(request: Request, asked: SubmitRequestBody) -> dict[str, Any]:
        return desk.submit_request(require_person(request), asked.kind, asked.items)

    @api.post("/me/erase", response_model=response_models.ErasureReceipt)
    def erase(request: Request, asked: EraseBody) -> dict[str, Any]:
        user = require_person(request)
        found = desk.erase_user(user, asked.confirm)
        tokens.close_user_sessions(user)
        return found


def _add_owner_routes(api: APIRouter, desk: PersonService, tokens: Tokens) -> None:
    @api.get("/people", response_model=response_models.PeopleList)
    def people(request: Request, search: QueryText = "", offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        require_owner(request)
        return desk.list_people(search, offset, limit)

    @api.post("/people/links", response_model=response_models.PersonLink)
    def link(request: Request, asked: LinkBody) -> dict[str, Any]:
        require_owner(request)
        who = Principal("person", asked.user, desk.node.store.find_user(asked.user))
        return {"user": asked.user, "link": f"{request.base_url}enter/{tokens.make_link(who)}"}


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
