"""The verbs that an owner can ask of an open node, as JSON: the same with a daemon and without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tacita.core.config import StrictModel, validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.live.json_object import JsonObject
from tacita.live.node.budgets import describe_spent_epsilon, set_budget
from tacita.live.node.node import Node
from tacita.live.node.release_log import read_release_log
from tacita.live.node.request_status import list_request_statuses
from tacita.live.node.threat_model import describe_uncovered
from tacita.live.node.user_requests import submit_request

log = logging.getLogger(__name__)


class NoArguments(StrictModel):
    pass


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # also refuses halves of characters
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]


class ImportArguments(StrictModel):
    file: Text
    columns: dict[str, str] = {}
    date_format: Text | None = None
    decimal: Literal[".", ","] | None = None


class RecommendArguments(StrictModel):
    user: Text
    k: int = Field(10, ge=1)


class LedgerArguments(StrictModel):
    user: Text | None = None


class EpsilonArguments(StrictModel):
    user: Text


class BudgetArguments(StrictModel):
    user: Text
    epsilon: float = Field(ge=0, lt=1e6, allow_inf_nan=False)
    run: RunName | None = None


class ConsentArguments(StrictModel):
    user: Text
    item: Text | None = None
    level: Literal["learn", "keep"]


class ExportArguments(StrictModel):
    file: Text
    user: Text | None = None


class EraseArguments(StrictModel):
    user: Text | None = None
    everybody: bool = False


class RequestArguments(StrictModel):
    kind: Literal["share", "unshare", "forget", "leave"]
    user: Text
    items: list[Text] = Field([], max_length=100_000)
    run: RunName | None = None


# Verbs


def _import_file(node: Node, arguments: ImportArguments) -> JsonObject:
    return node.import_file(arguments.file, arguments.columns, arguments.date_format, arguments.decimal)


def _show_status(node: Node, no_arguments: NoArguments) -> JsonObject:
    run = node.store.find_latest_run()
    requests = _list_requests(node, no_arguments)
    outside = [] if run is None else describe_uncovered(node, run)
    return {**node.describe_status(), "epsilon": describe_spent_epsilon(node), "requests": requests, "outside": outside}


def _list_requests(node: Node, _: NoArguments) -> list[JsonObject]:
    return [status.model_dump() for status in list_request_statuses(node)]


def _submit_request(node: Node, arguments: RequestArguments) -> JsonObject:
    statuses = submit_request(node, arguments.kind, arguments.user, arguments.items, arguments.run)
    return {"requests": [status.model_dump() for status in statuses]}


def _recommend(node: Node, arguments: RecommendArguments) -> list[JsonObject]:
    return node.recommend(arguments.user, arguments.k)


def _read_release_log(node: Node, arguments: LedgerArguments) -> JsonObject:
    return read_release_log(node, arguments.user)


def _describe_spending(node: Node, arguments: EpsilonArguments) -> str:
    return describe_spent_epsilon(node, arguments.user)


def _set_budget(node: Node, arguments: BudgetArguments) -> JsonObject:
    return set_budget(node, arguments.user, arguments.epsilon, arguments.run)


def _set_consent(node: Node, arguments: ConsentArguments) -> JsonObject:
    return node.set_consent(arguments.user, arguments.item, arguments.level)


def _export_data(node: Node, arguments: ExportArguments) -> JsonObject:
    return node.export_user_data(Path(arguments.file), arguments.user)


def _erase(node: Node, arguments: EraseArguments) -> JsonObject:
    if (arguments.user is None) != arguments.everybody:
        raise TacitaError("say whom to erase: either a user or everybody.")
    return node.erase_user(arguments.user)


_VERBS: dict[str, tuple[type[StrictModel], Callable[[Node, Any], Any]]] = {
    "import": (ImportArguments, _import_file),
    "status": (NoArguments, _show_status),
    "requests": (NoArguments, _list_requests),
    "request": (RequestArguments, _submit_request),
    "recommend": (RecommendArguments, _recommend),
    "ledger": (LedgerArguments, _read_release_log),
    "epsilon": (EpsilonArguments, _describe_spending),
    "budget": (BudgetArguments, _set_budget),
    "consent": (ConsentArguments, _set_consent),
    "export": (ExportArguments, _export_data),
    "erase": (EraseArguments, _erase),
}


def perform_verb(node: Node, verb: str, arguments: JsonObject) -> Any:
    """Carry out a verb; bad input raises one sentence."""
    if verb not in _VERBS:
        raise unknown_name_error("verb", verb[:100], _VERBS)
    model, act = _VERBS[verb]
    return act(node, validate_model(model, arguments, f"'{verb}'"))


def answer_json_question(do: Callable[[str, JsonObject], Any], question: bytes) -> bytes:
    """A question {"verb": ..., ...} answered by `do`: {"ok": ...} or {"error": one sentence}."""
    try:
        verb, arguments = _parse_question(question)
        return json.dumps({"ok": do(verb, arguments)}).encode()
    except TacitaError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or 'the system'}: {error.strerror or error}."
    except Exception:  # a mistake of ours; the daemon goes on
        log.exception("a command could not be done")
        message = "the node could not do that; its log says why."
    return json.dumps({"error": message}).encode()


def _parse_question(question: bytes) -> tuple[str, JsonObject]:
    try:
        arguments = json.loads(question)
    except (ValueError, RecursionError):
        raise TacitaError("the question is not JSON.") from None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("verb"), str):
        raise TacitaError('a question is an object such as {"verb": "status"}.')
    verb = arguments.pop("verb")
    return verb, arguments
