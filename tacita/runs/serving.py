"""A finished run in use: its numbers as tables, and recommendations from the state of its devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.python_messages import replace_options_with_keywords, translate_errors
from tacita.core.types import Floats, Ints
from tacita.data.frames import Frame, lookup_names, make_frame, to_raw_ids
from tacita.report.data import name_method
from tacita.runs.explanation import explain_item
from tacita.runs.file_schemas import RunResult
from tacita.runs.fold_in import recommend_newcomer
from tacita.runs.loaded_run import (
    HISTORY,
    LoadedRun,
    RankedItems,
    RecommendationQuery,
    check_list_length,
    load_run,
    load_saved,
    rank_similar,
    read_settled,
    read_stamp,
)
from tacita.runs.metrics_table import build_metrics
from tacita.runs.request_parsing import build_request
from tacita.runs.run_folder import SavedRun, abbreviate_ids, read_config, read_result
from tacita.runs.run_notes import describe_privacy, list_notes

if TYPE_CHECKING:
    from tacita.runs.forgetting.certificate import Certificate
    from tacita.runs.forgetting.request_service import RunRequestResult
    from tacita.runs.forgetting.requests import RawRequest

__all__ = ["Run", "check_list_length", "open_run", "recommend", "score_users"]

Id = str | int
"""A raw id as the data has it; whole numbers may be given as such."""

Ids = Id | Iterable[Id] | Frame
"""One of them, several, or a table with a column of them."""

Columns = dict[str, Any]
"""Columns of a table, by name."""

Recommendation = dict[str, Any]
RecommendationLists = dict[str, list[Recommendation]]
"""user -> [{rank, item, score, title, basis}], best first."""


@dataclass(frozen=True)
class Run:
    """A finished run: what its people get, what its items are like, and how good it is.

    It reads its folder when it is first asked, and again whenever the folder has changed. The examples below are of
    this run:

    >>> import tacita as tc
    >>> run = tc.train("synthetic:users=60,items=40,per_user=12", backbone="tally", out="example")
    >>> run
    Run('example', backbone 'tally', 60 users, 40 items, no epsilon: what it releases gives people away)

    Printed, its notes stand below that line.
    """

    folder: Path
    config: RunConfig
    result: RunResult
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied to another process as the path of its folder."""
        return open_run, (self.folder,)

    def __repr__(self) -> str:
        data = self.result["data"]
        size = f"{data['users']:,} users, {data['items']:,} items"
        backbone = f"backbone '{self._backbone_name}'"
        privacy = describe_privacy(self.config, self.result)
        return f"Run('{self.folder}', {backbone}, {size}, {privacy})"

    def __str__(self) -> str:
        notes = list_notes(self.config, self.result, self.folder)
        lines = [repr(self)]
        for note in notes:
            lines.append(f"- {note}")
        return "\n".join(lines)

    def _load_models(self) -> LoadedRun:
        """Its models, read once and kept until the folder changes."""
        stamp = read_stamp(self.folder)
        is_current = self._cache.get("stamp") == stamp
        if not stamp or not is_current:
            self._cache.clear()
            models, stamp = read_settled(lambda: load_run(self.folder), lambda: read_stamp(self.folder))
            self._cache.update(models=models, stamp=stamp)
        loaded: LoadedRun = self._cache["models"]
        return loaded

    @property
    def users(self) -> list[str]:
        """The raw ids of everybody in the run.

        >>> len(run.users), "u1" in run.users
        (60, True)
        """
        with translate_errors():
            return self._load_models().users

    @property
    def items(self) -> list[str]:
        """The raw ids of all its items.

        >>> len(run.items)
        40
        """
        with translate_errors():
            return self._load_models().items

    @property
    def notes(self) -> list[str]:
        """Notes on the run, a sentence each: how its data was read, what was left out, and what holds of privacy now.

        >>> print(*run.notes, sep="\\n")
        Privacy: no epsilon. Nothing that this run releases has noise with a budget.
        what tally releases gives people away: `tacita audit tally --run example` shows it.
        """
        with translate_errors():
            result = read_result(self.folder)
            return list_notes(self.config, result, self.folder)

    def recommend(
        self,
        users: Ids | None = None,
        k: int = 10,
        *,
        exclude: Ids | None = (),
        include: Ids | None = None,
        seen: bool = False,
    ) -> Frame:
        """The k best items of one person, of several, or (None) of everybody, as a table with a row for each item.

        Columns: user, rank (from 1), item, score, title (null where there is none) and basis. The basis is "history".
        For people of whom nothing is known it is "popularity", or "catalogue" (its first items) where the server does
        not learn what is popular. Items of a person's history are left out unless `seen`.
        `exclude` are items that nobody gets, `include` the only ones that anybody gets. Items that the run does not
        know count for nothing in both, and an `include` of no others is refused. Nobody's list depends on the other
        users of the call.

        `users` is an id, a list, array or column of them, or a table with a column "user". Who is not in the run is
        refused.

        >>> run.recommend("u1", k=3).columns
        ['user', 'rank', 'item', 'score', 'title', 'basis']
        >>> run.recommend(["u1", "u2"], k=3)["rank"].to_list()
        [1, 2, 3, 1, 2, 3]
        >>> run.recommend(k=5).height
        300
        >>> set(run.recommend("u1", k=9, include=["i3", "i4"])["item"]) <= {"i3", "i4"}
        True
        """
        with translate_errors():
            models = self._load_models()
            user_ids = models.users if users is None else to_raw_ids(users, "user")
            query = build_query(models, k, seen, exclude, include)
            return build_recommendations(models, user_ids, query)

    def scores(self, user: Id, items: Ids | None = None) -> Frame:
        """What a person's device thinks of some items, or of all, in the order they are given: item, score, title.

        Scores order one person's items. They are no probabilities, and say nothing across people.

        >>> run.scores("u1", ["i3", "i4"])["item"].to_list()
        ['i3', 'i4']
        """
        with translate_errors():
            models = self._load_models()
            user_id = _parse_single_id(user, "user")
            item_ids = models.items if items is None else to_raw_ids(items, "item")
            item_numbers = models.find_item_numbers(item_ids)
            user_numbers = models.saved.find_user_numbers([user_id])
            scores = models.scorer(user_numbers)[0]
            return make_frame(_build_item_columns(models, item_numbers, scores[item_numbers]))

    def explain(self, user: Id, item: Id, k: int = 5) -> Frame:
        """The k items of a person that speak most for another: item, effect, basis, title.

        For `tally` the basis is "left out": an effect is what the score loses without that item. Other models cannot be
        taken apart; their basis is "alike", and an effect is only how much the two items resemble each other.

        >>> run.explain("u1", "i3", k=2).columns
        ['item', 'effect', 'basis', 'title']
        """
        with translate_errors():
            models = self._load_models()
            user_numbers = models.saved.find_user_numbers([_parse_single_id(user, "user")])
            item_numbers = models.find_item_numbers([_parse_single_id(item, "item")])
            explanation = explain_item(models, int(user_numbers[0]), int(item_numbers[0]))
            shown = explanation.items[:k]
            columns = _build_item_columns(models, shown, explanation.effects[:k].astype(np.float32))
            columns["effect"] = columns.pop("score")
            columns["basis"] = [explanation.basis] * len(shown)
            columns["title"] = columns.pop("title")
            return make_frame(columns)

    def similar(self, item: Id, k: int = 10) -> Frame:
        """The k items that are most like one of them: rank, item, score, title.

        For backbone `tally` the score is the item's column of its matrix: how much having the other item speaks for
        this one. For models with item rows it is the cosine of the two rows that devices score with. Items with a score
        of exactly 0, of which the model says nothing, are left out.

        >>> near = run.similar("i3", k=5)
        >>> near["score"].is_sorted(descending=True)
        True
        """
        with translate_errors():
            models = self._load_models()
            return find_similar_items(models, _parse_single_id(item, "item"), k)

    def fold_in(
        self,
        history: Ids,
        k: int = 10,
        *,
        exclude: Ids | None = (),
        include: Ids | None = None,
        seen: bool = False,
    ) -> Frame:
        """The k best items for a newcomer, from a history alone, oldest first: rank, item, score, title.

        It is computed as the person's own device would, and nothing is stored or sent. Backbone `tally` reads the
        history: the scores are those of a person of the run with the same history. Models with private vectors train
        one on it, with item rows and shared parameters as they are, in as many rounds as the run took. The same history
        gives the same answer. Methods whose devices score with more than that (prediction transfer, sharing) refuse.

        Items that the run does not know are left out of the history with a warning; if it knows none, that is an error.

        >>> run.fold_in(["i3", "i4", "i9"], k=4)["rank"].to_list()
        [1, 2, 3, 4]
        """
        with translate_errors():
            models = self._load_models()
            items = to_raw_ids(history, "item")
            query = build_query(models, k, seen, exclude, include)
            rounds = count_rounds(read_result(self.folder))
            recommended = fold_in_history(models, items, rounds, query)
            for line in describe_unknown_items(models, items):
                warnings.warn(replace_options_with_keywords(line), stacklevel=2)
            return recommended

    def metrics(self) -> Frame:
        """Test quality of the run and of its controls: scorer, block (null: the mean), users, a column a metric.

        The mean is over blocks 1 and later, or of the only one. What was not measured is null.

        >>> run.metrics().columns
        ['scorer', 'block', 'users', 'ndcg@20', 'recall@20']
        """
        with translate_errors():
            result = read_result(self.folder)
            method = name_method(self._backbone_name, self.config.method, self.config.parts)
            return build_metrics(result, method)

    def forget(
        self,
        users: Ids,
        items: Ids | None = None,
        *,
        now: bool = False,
        retrain: bool = False,
        verify: bool = False,
    ) -> Certificate | None:
        """Take people's data back, from their devices and from what was learned; the certificate says what was done.

        `users` is one person with some of their items (None: everything), several people with everything, or a table
        with the columns user and item. `now` does not wait for others where retractions are held, `retrain` trains
        again whatever the run's own way is, and `verify` compares with that. None: nothing was left to forget, which a
        warning says. A run of a table in memory cannot forget, because it reads its data again.
        """
        with translate_errors():
            request = build_request("forget", users, items, now, retrain)
            return self._submit(request, verify).certificate

    def unshare(
        self, users: Ids, items: Ids | None = None, *, retrain: bool = False, verify: bool = False
    ) -> Certificate | None:
        """Take back what people shared with the server, and what it learned from that; see `forget`."""
        with translate_errors():
            request = build_request("unshare", users, items, retrain=retrain)
            return self._submit(request, verify).certificate

    def share(self, users: Ids, items: Ids | None = None) -> int:
        """Share some of people's items with the server of the run; how many are shared by that."""
        with translate_errors():
            return self._submit(build_request("share", users, items)).n_items

    def _submit(self, request: RawRequest, verify: bool = False) -> RunRequestResult:
        from tacita.runs.forgetting.request_service import submit_request  # it draws reports: slow to import

        result = submit_request(self.folder, request, verify)
        if not result.n_items and result.certificate is None:
            warnings.warn(replace_options_with_keywords(result.message), stacklevel=3)
        return result

    @property
    def _backbone_name(self) -> str:
        return str(self.config.backbone.get("name", "mf"))


def open_run(folder: Path) -> Run:
    result = read_result(folder)
    return Run(folder, read_config(folder), result)


def build_query(
    models: LoadedRun, k: int, include_seen: bool, exclude: Ids | None = (), include: Ids | None = None
) -> RecommendationQuery:
    """A query with items by their number."""
    excluded_ids = [] if exclude is None else to_raw_ids(exclude, "item")
    excluded = models.find_known_items(excluded_ids)
    if include is None:
        return RecommendationQuery(k, include_seen, excluded)
    included_ids = to_raw_ids(include, "item")
    if not included_ids:
        raise TacitaError("the list of items to choose from is empty; give some, or leave it out.")
    included = np.unique(_find_known_items(models, included_ids))
    return RecommendationQuery(k, include_seen, excluded, included)


def describe_unknown_items(models: LoadedRun, history: Sequence[str]) -> list[str]:
    """Which items of a history the run does not know, in one line; none where it knows all."""
    missing = models.list_unknown_items(history)
    if not missing:
        return []
    saved = models.saved
    n_items = len(set(history))
    listed = abbreviate_ids(missing, 3)
    return [
        f"{len(missing):,} of {n_items:,} items of the history left out: {listed} not in {saved.folder}"
        f"{saved.describe_filter('item')}."
    ]


def _find_known_items(models: LoadedRun, items: Sequence[str]) -> Ints:
    """The rows of the items that the run knows; none at all is a mistake."""
    known = models.find_known_items(items)
    return known if len(known) else models.find_item_numbers(items)


def count_rounds(result: RunResult) -> int:
    """How many rounds the run's own people had, up to the models that are served."""
    rounds = [int(block["best_round"]) for block in result["blocks"]]
    return max(1, sum(rounds))


def build_recommendations(models: LoadedRun, users: Sequence[str], query: RecommendationQuery) -> Frame:
    """The best items of some people: user, rank, item, score, title, basis."""
    numbers = models.saved.find_user_numbers(list(users))
    rankings = list(models.recommend(numbers, query))
    ranked = RankedItems.concatenate(rankings or [_empty_ranking()])
    columns: Columns = {}
    columns["user"] = lookup_names(users, ranked.user)
    columns["rank"] = ranked.rank.astype(np.int64)
    columns |= _build_item_columns(models, ranked.item, ranked.score)
    columns["basis"] = lookup_names([HISTORY, models.basis_without_history], ranked.is_unknown)
    return make_frame(columns)


def fold_in_history(models: LoadedRun, history: Sequence[str], rounds: int, query: RecommendationQuery) -> Frame:
    """The best items for a newcomer with this history: rank, item, score, title.

    A repeated item counts once; an item that the run does not know is left out (see `describe_unknown_items`).
    """
    items = _find_known_items(models, list(dict.fromkeys(history)))
    ranked = recommend_newcomer(models, items, rounds, query)
    rank = ranked.rank.astype(np.int64)
    item_columns = _build_item_columns(models, ranked.item, ranked.score)
    return make_frame({"rank": rank, **item_columns})


def find_similar_items(models: LoadedRun, item: str, k: int) -> Frame:
    """The items that are most like another: rank, item, score, title."""
    number = int(models.find_item_numbers([item])[0])
    top, scores = rank_similar(models, number, k)
    rank = np.arange(1, len(top) + 1)
    item_columns = _build_item_columns(models, top, scores)
    return make_frame({"rank": rank, **item_columns})


def recommend(folder: Path, users: list[str], k: int = 10, exclude_seen: bool = True) -> RecommendationLists:
    """Top k items for raw user ids, scored as their own devices would, or popular ones where nothing is known."""
    models = load_run(folder)
    query = RecommendationQuery(k, include_seen=not exclude_seen)
    return list_recommendations(models, users, query)


def list_recommendations(models: LoadedRun, users: Sequence[str], query: RecommendationQuery) -> RecommendationLists:
    """The best items of some people as plain lists: user -> [{rank, item, score, title, basis}], best first."""
    users = list(dict.fromkeys(users))
    lists: RecommendationLists = {user: [] for user in users}
    for entry in build_recommendations(models, users, query).iter_rows(named=True):
        user = entry.pop("user")
        lists[user].append(entry)
    return lists


def score_users(saved: SavedRun, users: Ints) -> Floats:
    """Scores of some users from saved state alone, without the dataset."""
    return load_saved(saved).scorer(users)


def _parse_single_id(value: Any, what: str) -> str:
    ids = to_raw_ids(value, what)
    if len(ids) != 1:
        raise TacitaError(f"one {what} is asked for, not {len(ids)}; ask for each by itself.")
    return ids[0]


def _empty_ranking() -> RankedItems:
    no_numbers = np.zeros(0, np.int32)
    no_scores = np.zeros(0, np.float32)
    no_flags = np.zeros(0, bool)
    return RankedItems(no_numbers, no_numbers, no_numbers, no_scores, no_flags)


def _build_item_columns(models: LoadedRun, item: Ints, score: Floats) -> Columns:
    item_ids = lookup_names(models.items, item)
    titles = lookup_names(models.titles, item)
    return {"item": item_ids, "score": score, "title": titles}
