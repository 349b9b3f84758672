"""What the owner can ask of an open node, as JSON: the same verbs with a daemon and without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tacita.core.config import StrictModel, validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.live.node.budgets import describe_epsilon, set_budget
from tacita.live.node.node import Node
from tacita.live.node.release_log import read_release_log
from tacita.live.node.user_requests import list_request_states, submit_request

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


def _reading_options(asked: ImportArguments) -> tuple[dict[str, str], str | None, str | None]:
    return asked.columns, asked.date_format, asked.decimal


def _erase(node: Node, asked: EraseArguments) -> dict[str, Any]:
    if (asked.user is None) != asked.everybody:
        raise TacitaError("say whom to erase: either a user or everybody.")
    return node.erase(asked.user)


_VERBS: dict[str, tuple[type[StrictModel], Callable[[Node, Any], Any]]] = {
    "import": (ImportArguments, lambda node, asked: node.import_file(asked.file, *_reading_options(asked))),
    "status": (
        NoArguments,
        lambda node, asked: {**node.status(), "epsilon": describe_epsilon(node), "requests": list_request_states(node)},
    ),
    "requests": (NoArguments, lambda node, asked: list_request_states(node)),
    "request": (
        RequestArguments,
        lambda node, asked: submit_request(node, asked.kind, asked.user, asked.items, asked.run),
    ),
    "recommend": (RecommendArguments, lambda node, asked: node.recommend(asked.user, asked.k)),
    "ledger": (LedgerArguments, lambda node, asked: read_release_log(node, asked.user)),
    "epsilon": (EpsilonArguments, lambda node, asked: describe_epsilon(node, asked.user)),
    "budget": (BudgetArguments, lambda node, asked: set_budget(node, asked.user, asked.epsilon, asked.run)),
    "consent": (ConsentArguments, lambda node, asked: node.set_consent(asked.user, asked.item, asked.level)),
    "export": (ExportArguments, lambda node, asked: node.export(Path(asked.file), asked.user)),
    "erase": (EraseArguments, _erase),
}


def perform_verb(node: Node, verb: str, arguments: dict[str, Any]) -> Any:
    """Do what was asked; bad input is one sentence."""
    if verb not in _VERBS:
        raise unknown_name_error("verb", verb[:100], _VERBS)
    model, act = _VERBS[verb]
    return act(node, validate_model(model, arguments, f"'{verb}'"))


def answer_json(do: Callable[[str, dict[str, Any]], Any], question: bytes) -> bytes:
    """A question {"verb": ..., ...} answered by `do`: {"ok": ...} or {"error": one sentence}."""
    try:
        try:
            asked = json.loads(question)
        except (ValueError, RecursionError):
            raise TacitaError("the question is not JSON.") from None
        if not isinstance(asked, dict) or not isinstance(asked.get("verb"), str):
            raise TacitaError('a question is an object such as {"verb": "status"}.')
        verb = asked.pop("verb")
        return json.dumps({"ok": do(verb, asked)}).encode()
    except TacitaError as error:
        said = str(error)
    except OSError as error:
        said = f"{error.filename or 'the system'}: {error.strerror or error}."
    except Exception:  # a mistake of ours; the daemon goes on
        log.exception("a command could not be done")
        said = "the node could not do that; its log says why."
    return json.dumps({"error": said}).encode()
