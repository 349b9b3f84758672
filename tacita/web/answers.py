"""Answers of a run to one call, as JSON has them: raw ids, titles where there are some, and plain sentences.

All of it runs on one thread: compiled loops of several threads at a time are not safe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.report.data import name_method
from tacita.runs.explanation import add_reasons, explain_item, list_reasons
from tacita.runs.fold_in import recommend_newcomer
from tacita.runs.loaded_run import HISTORY, LoadedRun, RankedItems, RecommendationQuery, rank_similar
from tacita.runs.served_models import ModelCache, ServedModels
from tacita.runs.serving import build_query

JsonObject = dict[str, Any]
ANSWERS_OUTSIDE = (
    "That is about the model. Answers of this service are outside of it: they tell who is in the run, and a list "
    "leaves out what the person has."
)
MOST_SHOWN = 60  # letters of an id that a sentence repeats

log = logging.getLogger(__name__)


class NotInRun(TacitaError):
    """A person or an item that the run does not know."""


class RunUnreadable(Exception):
    """The folder of the run cannot be read any more; nobody who calls can mend that."""


@dataclass(frozen=True)
class ListOptions:
    """What a list may hold; calls with the same options are scored together."""

    k: int = 10
    include_seen: bool = False
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] | None = None
    why: bool = False


def _describe_privacy(promise: str, has_budget: bool) -> str:
    """What the run promises, and that answers about single people are no part of it."""
    if not has_budget:
        return promise
    return f"{promise} {ANSWERS_OUTSIDE}"


class RunAnswers:
    """What a run answers, from its models as the folder has them now."""

    def __init__(self, models: ModelCache) -> None:
        self._models = models

    def load_models(self) -> ServedModels:
        try:
            return self._models.load()
        except TacitaError as error:
            log.error("the run cannot be read: %s", error)
            raise RunUnreadable from None

    def describe_run(self) -> JsonObject:
        served = self.load_models()
        loaded = served.loaded
        config = loaded.saved.config
        backbone = str(config.backbone.get("name", "mf"))
        return {
            "data": loaded.saved.ids["data"],
            "method": name_method(backbone, config.method, config.parts),
            "backbone": backbone,
            "block": loaded.server.block,
            "users": len(loaded.saved.ids["users"]),
            "items": len(loaded.saved.ids["items"]),
            "privacy": _describe_privacy(served.privacy, bool(loaded.plan.ledgers)),
        }

    def recommend(self, users: Sequence[str], options: ListOptions) -> list[JsonObject | None]:
        """The list of every person; None: the run does not know the person."""
        loaded = self.load_models().loaded
        number_of = loaded.saved.user_number
        known = [user for user in users if user in number_of]
        lists = dict(zip(known, _list_known(loaded, known, options), strict=True))
        return [lists.get(user) for user in users]

    def fold_in(self, history: Sequence[str], options: ListOptions) -> JsonObject:
        """The list of a person with this history, oldest first."""
        served = self.load_models()
        loaded = served.loaded
        items = list(dict.fromkeys(history))
        known = loaded.find_known_items(items)
        if items and not len(known):
            raise NotInRun(f"the run knows no item of this history, such as {_quote(items[0])}; name others.")
        ranked = recommend_newcomer(loaded, known, served.rounds, _build_query(loaded, options))
        return {"items": _list_items(loaded, ranked), "ignored": loaded.list_unknown_items(items)}

    def find_similar(self, item: str, k: int) -> JsonObject:
        loaded = self.load_models().loaded
        number = _find_item(loaded, item)
        top, scores = rank_similar(loaded, number, k)
        rank = np.arange(1, len(top) + 1, dtype=np.int32)
        ranked = RankedItems(np.zeros_like(rank), rank, top, scores, np.zeros(len(top), bool))
        return {"item": item, "title": loaded.titles[number], "items": _list_items(loaded, ranked)}

    def explain(self, user: str, item: str, k: int) -> JsonObject:
        loaded = self.load_models().loaded
        number = loaded.saved.user_number.get(user)
        if number is None:
            raise unknown_user_error(user)
        item_number = _find_item(loaded, item)
        explanation = explain_item(loaded, number, item_number)
        return {
            "user": user,
            "item": item,
            "title": loaded.titles[item_number],
            "score": _to_json_number(explanation.score),
            "basis": explanation.basis,
            "items": list_reasons(loaded, explanation, k),
        }


def unknown_user_error(user: str) -> NotInRun:
    return NotInRun(f"user {_quote(user)} is not in this run; POST /v1/fold-in recommends from a history, for anybody.")


def _find_item(loaded: LoadedRun, item: str) -> int:
    numbers = loaded.find_known_items([item])
    if not len(numbers):
        raise NotInRun(f"item {_quote(item)} is not in this run; name one that it learned from.")
    return int(numbers[0])


def _quote(raw_id: str) -> str:
    is_long = len(raw_id) > MOST_SHOWN
    shown = f"{raw_id[:MOST_SHOWN]}..." if is_long else raw_id
    return f"'{shown}'"


def _build_query(loaded: LoadedRun, options: ListOptions) -> RecommendationQuery:
    """The query, without a word of the folder or of other ids where it is refused."""
    if options.include is not None and not len(loaded.find_known_items(options.include)):
        raise NotInRun("the run knows none of the items of `include`; name others, or leave it out.")
    return build_query(loaded, options.k, options.include_seen, options.exclude, options.include)


def _list_known(loaded: LoadedRun, users: Sequence[str], options: ListOptions) -> list[JsonObject]:
    """The lists of people whom the run knows."""
    query = _build_query(loaded, options)
    numbers = loaded.saved.find_user_numbers(list(users))
    lists: list[JsonObject] = [{"user": user, "basis": HISTORY, "items": []} for user in users]
    for ranked in loaded.recommend(numbers, query):
        items = _list_items(loaded, ranked)
        places = ranked.user.tolist()
        is_unknown = ranked.is_unknown.tolist()
        for place, has_no_history, item in zip(places, is_unknown, items, strict=True):
            lists[place]["items"].append(item)
            if has_no_history:
                lists[place]["basis"] = loaded.basis_without_history
    if options.why:
        for number, entry in zip(numbers, lists, strict=True):
            add_reasons(loaded, int(number), entry["items"])
    return lists


def _list_items(loaded: LoadedRun, ranked: RankedItems) -> list[JsonObject]:
    item_ids = loaded.saved.ids["items"]
    titles = loaded.titles
    rows = zip(ranked.rank.tolist(), ranked.item.tolist(), ranked.score.tolist(), strict=True)
    return [
        {"rank": rank, "item": item_ids[item], "score": _to_json_number(score), "title": titles[item]}
        for rank, item, score in rows
    ]


def _to_json_number(value: float) -> float | None:
    """JSON has no infinite numbers."""
    return value if math.isfinite(value) else None
