"""What the owner can ask of an open node, as JSON: the same verbs with a daemon and without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tacita.core.config import Strict, validated
from tacita.core.errors import TacitaError, unknown_name
from tacita.live.node.budgets import epsilon_in_words, set_budget
from tacita.live.node.left import ledger
from tacita.live.node.node import Node
from tacita.live.node.wishes import standings, wish

log = logging.getLogger(__name__)


class Nothing(Strict):
    pass


Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # also refuses halves of characters


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]


class Import(Strict):
    file: Text
    columns: dict[str, str] = {}
    date_format: Text | None = None
    decimal: Literal[".", ","] | None = None


class Recommend(Strict):
    user: Text
    k: int = Field(10, ge=1)


class Ledger(Strict):
    user: Text | None = None


class Person(Strict):
    user: Text


class Budget(Strict):
    user: Text
    epsilon: float = Field(ge=0, lt=1e6, allow_inf_nan=False)
    run: RunName | None = None


class Consent(Strict):
    user: Text
    item: Text | None = None
    level: Literal["learn", "keep"]


class Export(Strict):
    file: Text
    user: Text | None = None


class Erase(Strict):
    user: Text | None = None
    everybody: bool = False


class Wish(Strict):
    kind: Literal["share", "unshare", "forget", "leave"]
    user: Text
    items: list[Text] = Field([], max_length=100_000)
    run: RunName | None = None


def _reading(asked: Import) -> tuple[dict[str, str], str | None, str | None]:
    return asked.columns, asked.date_format, asked.decimal


def _erase(node: Node, asked: Erase) -> dict[str, Any]:
    if (asked.user is None) != asked.everybody:
        raise TacitaError("say whom to erase: either a user or everybody.")
    return node.erase(asked.user)


_VERBS: dict[str, tuple[type[Strict], Callable[[Node, Any], Any]]] = {
    "import": (Import, lambda node, asked: node.import_file(asked.file, *_reading(asked))),
    "status": (
        Nothing,
        lambda node, asked: {**node.status(), "epsilon": epsilon_in_words(node), "requests": standings(node)},
    ),
    "requests": (Nothing, lambda node, asked: standings(node)),
    "request": (Wish, lambda node, asked: wish(node, asked.kind, asked.user, asked.items, asked.run)),
    "recommend": (Recommend, lambda node, asked: node.recommend(asked.user, asked.k)),
    "ledger": (Ledger, lambda node, asked: ledger(node, asked.user)),
    "epsilon": (Person, lambda node, asked: epsilon_in_words(node, asked.user)),
    "budget": (Budget, lambda node, asked: set_budget(node, asked.user, asked.epsilon, asked.run)),
    "consent": (Consent, lambda node, asked: node.set_consent(asked.user, asked.item, asked.level)),
    "export": (Export, lambda node, asked: node.export(Path(asked.file), asked.user)),
    "erase": (Erase, _erase),
}


def perform(node: Node, verb: str, arguments: dict[str, Any]) -> Any:
    """Do what was asked; bad input is one sentence."""
    if verb not in _VERBS:
        raise unknown_name("verb", verb[:100], _VERBS)
    model, act = _VERBS[verb]
    return act(node, validated(model, arguments, f"'{verb}'"))


def answer(do: Callable[[str, dict[str, Any]], Any], question: bytes) -> bytes:
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
