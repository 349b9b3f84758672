"""The HTTP API of a node: what one person may see and decide about themselves, and an owner's list of people."""

from __future__ import annotations

import time
from typing import Annotated, Literal

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
from tacita.live.pages.response_models import JsonObject
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
    """The person whose page it is; no call can name another person."""
    principal: Principal = request.state.principal
    if principal.role != "person":
        raise HTTPException(403, "this is for one person's own page.")
    return principal.user


def require_owner(request: Request) -> None:
    if request.state.principal.role != "owner":
        raise HTTPException(403, "this is for the owner of the node.")


def make_routes(service: PersonService, tokens: Tokens) -> APIRouter:
    """Every call of /v1."""
    api = APIRouter(prefix="/v1")
    _add_view_routes(api, service)
    _add_decision_routes(api, service, tokens)
    _add_owner_routes(api, service, tokens)
    return api


def _add_view_routes(api: APIRouter, service: PersonService) -> None:
    @api.get("/health", response_model=response_models.Health)
    def health() -> JsonObject:
        return {"up": True, "time": time.time(), "version": __version__}

    @api.get("/me", response_model=response_models.PersonSummary)
    def me(request: Request) -> JsonObject:
        return service.summarize_person(require_person(request))

    @api.get("/me/recommendations", response_model=response_models.RecommendationList)
    def recommendations(request: Request, k: Annotated[int, Query(ge=1, le=200)] = 10) -> JsonObject:
        return {"recommendations": service.list_recommendations(require_person(request), k)}

    @api.get("/me/reasons", response_model=response_models.Reasons)
    def why(request: Request, item: QueryText) -> JsonObject:
        return service.explain_item(require_person(request), item)

    @api.get("/me/preview", response_model=response_models.Preview, response_model_exclude_unset=True)
    def preview(request: Request, item: QueryText, without: QueryText) -> JsonObject:
        return service.preview_without(require_person(request), item, without)

    @api.get("/me/history", response_model=response_models.HistoryPage)
    def history(
        request: Request,
        search: QueryText = "",
        only: Literal["all", "part", "kept"] = "all",
        offset: Offset = 0,
        limit: Limit = 25,
    ) -> JsonObject:
        return service.list_history(require_person(request), search, only, offset, limit)

    @api.get("/me/releases", response_model=response_models.ReleasePage)
    def releases(request: Request, offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        return service.list_releases(require_person(request), offset, limit)

    @api.get("/me/held", name="held", response_model=response_models.ServerHoldings)
    def holdings(request: Request) -> JsonObject:
        return service.describe_server_holdings(require_person(request))

    @api.get("/me/budget", response_model=response_models.Budgets, response_model_exclude_unset=True)
    def budget(request: Request) -> JsonObject:
        return service.describe_budget(require_person(request))

    @api.get("/me/costs", response_model=response_models.Charges)
    def costs(request: Request, run: QueryText, offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        return service.list_costs(require_person(request), run, offset, limit)

    @api.get("/me/requests", response_model=response_models.RequestList)
    def requests(request: Request) -> JsonObject:
        user = require_person(request)
        return {**service.list_requests(user), "may": service.list_allowed_kinds(user)}

    @api.get("/me/export", response_class=Response)
    def export(request: Request) -> Response:
        lines = service.export_user(require_person(request))
        headers = {"content-disposition": 'attachment; filename="my-data.jsonl"'}
        return Response(lines, media_type="application/jsonl", headers=headers)


def _add_decision_routes(api: APIRouter, service: PersonService, tokens: Tokens) -> None:
    @api.put("/me/choice", response_model=response_models.PersonSummary)
    def choose(request: Request, body: ChoiceBody) -> JsonObject:
        return service.set_preset(require_person(request), body.preset)

    @api.put("/me/items", response_model=response_models.PersonSummary)
    def switch(request: Request, body: ItemConsentBody) -> JsonObject:
        return service.set_item_consent(require_person(request), body.item, body.takes_part)

    @api.put("/me/pause", response_model=response_models.PersonSummary)
    def pause(request: Request, body: PauseBody) -> JsonObject:
        return service.set_pause(require_person(request), body.paused)

    @api.put("/me/budget", response_model=response_models.Budgets, response_model_exclude_unset=True)
    def declare(request: Request, body: BudgetBody) -> JsonObject:
        return service.declare_budget(require_person(request), body.epsilon)

    @api.post("/me/requests", response_model=response_models.QueuedRequests)
    def ask(request: Request, body: SubmitRequestBody) -> JsonObject:
        return service.submit_request(require_person(request), body.kind, body.items)

    @api.post("/me/erase", response_model=response_models.ErasureReceipt)
    def erase(request: Request, body: EraseBody) -> JsonObject:
        user = require_person(request)
        receipt = service.erase_user(user, body.confirm)
        tokens.close_user_sessions(user)
        return receipt


def _add_owner_routes(api: APIRouter, service: PersonService, tokens: Tokens) -> None:
    @api.get("/people", response_model=response_models.PeopleList)
    def people(request: Request, search: QueryText = "", offset: Offset = 0, limit: Limit = 25) -> JsonObject:
        require_owner(request)
        return service.list_people(search, offset, limit)

    @api.post("/people/links", response_model=response_models.PersonLink)
    def link(request: Request, body: LinkBody) -> JsonObject:
        require_owner(request)
        principal = Principal("person", body.user, service.node.store.find_user(body.user))
        token = tokens.make_link(principal)
        return {"user": body.user, "link": f"{request.base_url}enter/{token}"}


def make_api(title: str) -> FastAPI:
    """An application whose errors are one sentence, and whose description needs a token like everything else."""
    responses: dict[int | str, JsonObject] = {}
    for status, description in PROBLEMS.items():
        responses[status] = {"model": Problem, "description": description}
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        responses=responses,
    )
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(TacitaError)
    def refused_call(request: Request, error: TacitaError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(ClientDisconnect)
    def endless_body(request: Request, error: ClientDisconnect) -> Response:
        return JSONResponse({"error": TOO_LONG}, 413)  # or the client went away, and nobody reads this

    @app.exception_handler(AnyHTTPException)
    def http_error(request: Request, error: AnyHTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def malformed_call(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        steps = [str(step) for step in problem["loc"][1:]]
        place = ".".join(steps) or "the call"
        return JSONResponse({"error": f"{place[:100]}: {problem['msg'][:200]}."}, 422)
