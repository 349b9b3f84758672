"""The HTTP API of a run: its calls, and every error as one sentence of JSON."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp

from tacita import __version__
from tacita.core.errors import TacitaError
from tacita.web import schemas
from tacita.web.answers import ListOptions, NotInRun, RunAnswers, RunUnreadable, unknown_user_error
from tacita.web.guard import CallGuard, JsonAnswer, make_refusal
from tacita.web.limits import MOST_ITEMS, MOST_K, MOST_LETTERS, MOST_REASONS, check_batch
from tacita.web.reference_page import render_reference
from tacita.web.scoring_queue import Busy, ScoringQueue

ABOUT = (
    "Recommendations of a run, by raw ids. Scores are computed as each person's own device would compute them. "
    "Whoever may call learns what people are recommended, and from explanations what they have."
)
PROBLEMS = {
    400: "What was asked cannot be answered.",
    401: "A token is needed.",
    404: "The run does not know this person or item.",
    405: "The call takes another method.",
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    421: "Without a token only names of this machine are answered to.",
    422: "The call does not fit its description.",
    503: "Busy, or the run cannot be read.",
}
NO_JSON = "the body is no JSON object; send one with the header `content-type: application/json`."
HTTP_REASONS = {404: "there is no such call", 405: "this call takes another method"}
User = Annotated[str, Query(min_length=1, max_length=MOST_LETTERS, description="Raw id of a person of the run.")]
Item = Annotated[str, Query(min_length=1, max_length=MOST_LETTERS, description="Raw id of an item.")]
HowMany = Annotated[int, Query(ge=1, le=MOST_K, description="How many items.")]
QueryItem = Annotated[str, Query(max_length=MOST_LETTERS)]

log = logging.getLogger(__name__)


def make_serving_app(answers: RunAnswers, token: str | None = None, local_only: bool = False) -> ASGIApp:
    """The application of a run, behind its guard."""
    queue = ScoringQueue(answers)

    @asynccontextmanager
    async def close_after(app: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    responses: dict[int | str, dict[str, Any]] = {}
    for status, description in PROBLEMS.items():
        responses[status] = {"model": schemas.CallProblem, "description": description}
    app = FastAPI(
        title="tacita serve",
        version=__version__,
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        responses=responses,
        lifespan=close_after,
    )
    _add_error_handlers(app)
    app.include_router(_make_open_routes(app))
    app.include_router(_make_list_routes(queue))
    app.include_router(_make_item_routes(queue))
    return CallGuard(app, token, local_only)


def _make_open_routes(app: FastAPI) -> APIRouter:
    api = APIRouter()

    @api.get("/health", response_model=schemas.Liveness)
    async def health() -> Response:
        """Whether the server is up; needs no token."""
        return JsonAnswer({"up": True, "version": __version__})

    @api.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(render_reference(app.openapi()))

    return api


def _make_list_routes(queue: ScoringQueue) -> APIRouter:
    """Calls that recommend."""
    api = APIRouter(prefix="/v1")

    @api.get("/recommendations", response_model=schemas.PersonList)
    async def recommend_person(
        user: User,
        k: HowMany = 10,
        include_seen: Annotated[bool, Query(alias="seen", description="Also items that the person has.")] = False,
        exclude: Annotated[
            list[QueryItem] | None, Query(max_length=MOST_ITEMS, description="Items left out; repeat for more.")
        ] = None,
        include: Annotated[
            list[QueryItem] | None, Query(max_length=MOST_ITEMS, description="The only items; repeat for more.")
        ] = None,
        why: Annotated[bool, Query(description="With the person's own items that speak for each.")] = False,
    ) -> Response:
        """The best items of one person of the run."""
        excluded = tuple(to_texts(exclude))
        included = None if include is None else tuple(to_texts(include))
        options = ListOptions(k, include_seen, excluded, included, why)
        answer = await queue.recommend(user.strip(), options)
        if answer is None:
            raise unknown_user_error(user)
        return JsonAnswer(answer)

    @api.post("/recommendations", response_model=schemas.BatchLists)
    async def recommend_people(body: schemas.BatchBody) -> Response:
        """The best items of many people of the run; nobody's list depends on the others."""
        users = list(dict.fromkeys(to_texts(body.users)))
        options = body.to_options()
        check_batch(len(users), options.k)
        lists = await queue.compute(lambda answers: answers.recommend(users, options))
        known = [entry for entry in lists if entry is not None]
        unknown = [user for user, entry in zip(users, lists, strict=True) if entry is None]
        if not known:
            raise unknown_user_error(unknown[0])
        return JsonAnswer({"recommendations": known, "unknown": unknown})

    @api.post("/fold-in", response_model=schemas.NewcomerList)
    async def recommend_newcomer(body: schemas.HistoryBody) -> Response:
        """The best items for somebody whom the run never saw, from a history; nothing is stored."""
        history = to_texts(body.history)
        options = body.to_options()
        return JsonAnswer(await queue.compute(lambda answers: answers.fold_in(history, options)))

    return api


def _make_item_routes(queue: ScoringQueue) -> APIRouter:
    """Calls about items, reasons and the run."""
    api = APIRouter(prefix="/v1")

    @api.get("/similar", response_model=schemas.SimilarItems)
    async def find_similar(item: Item, k: HowMany = 10) -> Response:
        """The items that are most like another."""
        return JsonAnswer(await queue.compute(lambda answers: answers.find_similar(item.strip(), k)))

    @api.get("/explanation", response_model=schemas.ItemExplanation)
    async def explain(
        user: User,
        item: Item,
        k: Annotated[int, Query(ge=1, le=MOST_REASONS, description="How many reasons.")] = 5,
    ) -> Response:
        """The items of a person that speak most for another. This tells what the person has."""
        return JsonAnswer(await queue.compute(lambda answers: answers.explain(user.strip(), item.strip(), k)))

    @api.get("/run", response_model=schemas.RunDescription)
    async def describe_run() -> Response:
        """What is served: data, method, sizes, and what the run promises of privacy."""
        return JsonAnswer(await queue.compute(RunAnswers.describe_run))

    return api


def to_texts(raw_ids: list[str] | list[str | int] | None) -> list[str]:
    return [schemas.to_text(raw_id) for raw_id in raw_ids or ()]


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(NotInRun)
    async def unknown_id(request: Request, error: NotInRun) -> Response:
        return make_refusal(404, str(error))

    @app.exception_handler(TacitaError)
    async def refused_call(request: Request, error: TacitaError) -> Response:
        return make_refusal(400, str(error))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> Response:
        return make_refusal(503, "too many calls are waiting; try again in a second.")

    @app.exception_handler(RunUnreadable)
    async def unreadable_run(request: Request, error: RunUnreadable) -> Response:
        return make_refusal(503, "the run cannot be read just now; the server's log says why.")

    @app.exception_handler(AnyHTTPException)
    async def http_error(request: Request, error: AnyHTTPException) -> Response:
        reason = HTTP_REASONS.get(error.status_code, str(error.detail))
        return make_refusal(error.status_code, f"{reason}; /docs lists the calls.")

    @app.exception_handler(RequestValidationError)
    async def malformed_call(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        place = problem["loc"][1:]
        is_body = not place or problem["type"] == "json_invalid"
        if is_body:
            return make_refusal(422, NO_JSON)
        reason = problem["msg"][:200]
        return make_refusal(422, f"{str(place[0])[:100]}: {reason}; /docs lists the calls.")

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> Response:
        log.error("a call to %s failed: %s", request.url.path, type(error).__name__, exc_info=error)
        return make_refusal(500, "this call failed for a reason of the server's own; its log says why.")
