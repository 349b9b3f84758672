"""Both APIs called at random by their own description: no answer is a server's error, and all conform to it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the pages need tacita[live]")
pytest.importorskip("schemathesis", reason="schemathesis is not installed; pip install tacita[dev]")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from helpers.loopback_site import close_nodes
from helpers.page_sites import ORIGIN, PASSWORD, SAME_ORIGIN, make_server, play_two_blocks, user_ids
from tacita.live.pages.operator_app import make_operator_app
from tacita.live.pages.person_api import make_api
from tacita.live.pages.person_app import make_node_app
from tacita.live.pages.tokens import Principal, Tokens
from tacita.live.running import orders

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def calls(app: Any, session: dict[str, str], each: int) -> int:
    """So many calls of every operation, right ones and wrong ones; how many were made."""
    own = {**SAME_ORIGIN, **session, "host": ORIGIN.removeprefix("http://")}
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", app, headers=own)
    made = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        wrong = [GenerationMode.NEGATIVE] if len(operation.body) or len(operation.query) else []
        for mode in (GenerationMode.POSITIVE, *wrong):  # a name in a path is hardly ever a wrong one

            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case: Any) -> None:
                nonlocal made
                case.call_and_validate(headers=own, checks=CHECKS)
                made += 1

            with warnings.catch_warnings(), contextlib.suppress(Unsatisfiable):
                warnings.simplefilter("ignore")
                one()
    return made


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A node's application, and the session of somebody on it."""
    site = play_two_blocks(tmp_path_factory.mktemp("site"))
    node, tokens = site.transport.members[1], Tokens()
    app = make_node_app(node, tokens)
    with TestClient(app, base_url=ORIGIN) as client:
        client.get(f"/enter/{tokens.make_link(Principal('person', user_ids(node)[0]))}")
        yield app, _cookies(client)
    close_nodes(site)


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server's application, and the session of its operator; orders are taken as if the server were up."""
    folder = make_server(tmp_path_factory.mktemp("server"))
    app = make_operator_app(folder, Tokens(), lambda: {1: "online", 2: "offline"})
    with pytest.MonkeyPatch.context() as patch, TestClient(app, base_url=ORIGIN, headers=SAME_ORIGIN) as client:
        patch.setattr(orders, "is_up", lambda folder: True)
        client.post("/login", data={"password": PASSWORD}, follow_redirects=False)
        yield app, _cookies(client)


def _cookies(client: TestClient) -> dict[str, str]:
    return {"cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}


@pytest.mark.parametrize("who", ["person", "operator"])
def test_a_hundred_calls_of_each_conform(who: str, request: pytest.FixtureRequest) -> None:
    app, session = request.getfixturevalue(who)
    assert calls(app, session, 7) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("who", ["person", "operator"])
def test_a_thousand_calls_of_each_conform(who: str, request: pytest.FixtureRequest) -> None:
    app, session = request.getfixturevalue(who)
    assert calls(app, session, 75) >= 1000


def test_an_answer_that_breaks_its_description_is_found(person: tuple[Any, dict[str, str]]) -> None:
    """The search itself can fail."""
    app = make_api("broken")

    @app.get("/v1/broken")
    def broken() -> dict[str, int]:
        raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, BaseExceptionGroup)):
        calls(app, {}, 1)
