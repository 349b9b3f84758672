"""What a finished run is for: its numbers as tables, and recommendations from what its devices hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.python_messages import translate_errors, translate_message
from tacita.core.types import Floats, Ints
from tacita.data.filters import format_data_notes
from tacita.data.frames import Frame, integer_column, lookup_names, make_frame, number_column, to_raw_ids
from tacita.report.data import control_name, method_name, parse_removals
from tacita.report.promises import NO_EPSILON, describe_leaks, privacy_lines, summarise_privacy
from tacita.runs.fold_in import recommend_newcomer
from tacita.runs.loaded_run import (
    LoadedRun,
    RankedItems,
    RecommendationQuery,
    check_list_length,
    load_run,
    load_saved,
    rank_similar,
    read_stamp,
)
from tacita.runs.run_folder import SavedRun, abbreviate_ids, read_config, read_result

__all__ = ["Run", "check_list_length", "open_run", "recommend", "score_users"]

Id = str | int
"""A raw id as the data has it; whole numbers may be given as such."""

Ids = Id | Iterable[Id] | Frame
"""One of them, several, or a table with a column of them."""


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
    result: dict[str, Any]
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        data = self.result["data"]
        people = f"{data['users']:,} users, {data['items']:,} items"
        privacy = _describe_privacy(self.config, self.result)
        return f"Run('{self.folder}', backbone '{self._backbone_name}', {people}, {privacy})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"- {one}" for one in _list_notes(self.config, self.result, self.folder))])

    def _load_models(self) -> LoadedRun:
        """Its models, read once and kept until the folder changes."""
        now = read_stamp(self.folder)
        if not now or self._cache.get("stamp") != now:
            self._cache.clear()
            self._cache["models"] = load_run(self.folder)
            self._cache["stamp"] = read_stamp(self.folder)
        models: LoadedRun = self._cache["models"]
        return models

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
        """What one should know of the run, a sentence each: how its data was read, what was left out of it, and what is
        said of privacy, as it stands now.

        >>> print(*run.notes, sep="\\n")
        Privacy: no epsilon. Nothing that this run releases has noise with a budget.
        what tally releases gives people away: `tacita audit tally --run example` shows it.
        """
        with translate_errors():
            return _list_notes(self.config, read_result(self.folder), self.folder)

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

        Columns: user, rank (from 1), item, score, title (null where nobody said it) and basis: "history", or
        "popularity" for people of whom nothing is known. What a person did before is left out unless `seen`. `exclude`
        are items that nobody gets, `include` the only ones that anybody gets; in both, items that the run does not know
        count for nothing, and an `include` of no others is refused. Nobody's list depends on who else was asked for.

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
            asked = models.users if users is None else to_raw_ids(users, "user")
            return build_recommendations(models, asked, build_query(models, k, seen, exclude, include))

    def scores(self, user: Id, items: Ids | None = None) -> Frame:
        """What a person's device thinks of some items, or of all, in the order they are given: item, score, title.

        Scores order one person's items. They are no probabilities, and say nothing across people.

        >>> run.scores("u1", ["i3", "i4"])["item"].to_list()
        ['i3', 'i4']
        """
        with translate_errors():
            models = self._load_models()
            (person,) = _parse_single_id(user, "user")
            wanted = models.item_numbers(models.items if items is None else to_raw_ids(items, "item"))
            found = models.scorer(models.saved.user_numbers([person]))[0]
            return make_frame(_item_columns(models, wanted, found[wanted]))

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
            (one,) = _parse_single_id(item, "item")
            return find_similar_items(models, one, k)

    def fold_in(
        self,
        history: Ids,
        k: int = 10,
        *,
        exclude: Ids | None = (),
        include: Ids | None = None,
        seen: bool = False,
    ) -> Frame:
        """The k best items for somebody whom the run never saw, from a history alone, oldest first: rank, item, score,
        title.

        It is computed as the person's own device would, and nothing is kept or told to anybody. Backbone `tally` reads
        the history: the scores are those that a person of the run with the same history has. Models with private
        vectors train one on it, with item rows and shared parameters as they are, in as many rounds as the run took;
        the same history gives the same answer. Methods whose devices score with more than that (prediction transfer,
        sharing) refuse.

        Items that the run does not know are left out of the history with a warning; if it knows none, that is an error.

        >>> run.fold_in(["i3", "i4", "i9"], k=4)["rank"].to_list()
        [1, 2, 3, 4]
        """
        with translate_errors():
            models, items = self._load_models(), to_raw_ids(history, "item")
            wish = build_query(models, k, seen, exclude, include)
            found = fold_in_history(models, items, count_rounds(read_result(self.folder)), wish)
            for line in describe_unknown_items(models, items):
                warnings.warn(translate_message(line), stacklevel=2)
            return found

    def metrics(self) -> Frame:
        """Test quality of the run and of its controls: scorer, block (null: the mean), users, a column a metric.

        The mean is over blocks 1 and later, or of the only one. What was not measured is null.

        >>> run.metrics().columns
        ['scorer', 'block', 'users', 'ndcg@20', 'recall@20']
        """
        with translate_errors():
            result = read_result(self.folder)
            return _build_metrics(result, method_name(self._backbone_name, self.config.method, self.config.parts))

    @property
    def _backbone_name(self) -> str:
        return str(self.config.backbone.get("name", "mf"))


def open_run(folder: Path) -> Run:
    result = read_result(folder)
    return Run(folder, read_config(folder), result)


def build_query(
    models: LoadedRun, k: int, seen: bool, exclude: Ids | None = (), include: Ids | None = None
) -> RecommendationQuery:
    """What is wanted, with items by their number."""
    without = models.known_items([] if exclude is None else to_raw_ids(exclude, "item"))
    if include is None:
        return RecommendationQuery(k, seen, without)
    wanted = to_raw_ids(include, "item")
    if not wanted:
        raise TacitaError("the list of items to choose from is empty; give some, or leave it out.")
    return RecommendationQuery(k, seen, without, np.unique(_find_known_items(models, wanted)))


def describe_unknown_items(models: LoadedRun, history: Sequence[str]) -> list[str]:
    """Which items of a history the run does not know, in one line; none where it knows all."""
    missing = models.unknown_items(history)
    if not missing:
        return []
    saved, n = models.saved, len(set(history))
    return [
        f"{len(missing):,} of {n:,} items of the history left out: {abbreviate_ids(missing, 3)} not in {saved.folder}"
        f"{saved.filter_note('item')}."
    ]


def _find_known_items(models: LoadedRun, items: Sequence[str]) -> Ints:
    """The rows of the items that the run knows; none at all is a mistake."""
    found = models.known_items(items)
    return found if len(found) else models.item_numbers(items)


def count_rounds(result: dict[str, Any]) -> int:
    """How many rounds the run's own people had, up to the models that are served."""
    return max(1, sum(int(block["best_round"]) for block in result["blocks"]))


def build_recommendations(models: LoadedRun, users: Sequence[str], query: RecommendationQuery) -> Frame:
    """The best items of some people: user, rank, item, score, title, basis."""
    found = RankedItems.concatenate(
        [*models.recommend(models.saved.user_numbers(list(users)), query)] or [_empty_ranking()]
    )
    who = {"user": lookup_names(users, found.user), "rank": found.rank.astype(np.int64)}
    basis = lookup_names(["history", "popularity"], found.popular)
    return make_frame({**who, **_item_columns(models, found.item, found.score), "basis": basis})


def fold_in_history(models: LoadedRun, history: Sequence[str], rounds: int, query: RecommendationQuery) -> Frame:
    """The best items for somebody with this history: rank, item, score, title.

    A repeated item counts once, and one that the run does not know not at all (see `left_out`).
    """
    found = recommend_newcomer(models, _find_known_items(models, list(dict.fromkeys(history))), rounds, query)
    return make_frame({"rank": found.rank.astype(np.int64), **_item_columns(models, found.item, found.score)})


def find_similar_items(models: LoadedRun, item: str, k: int) -> Frame:
    """The items that are most like one of them: rank, item, score, title."""
    top, score = rank_similar(models, int(models.item_numbers([item])[0]), k)
    return make_frame({"rank": np.arange(1, len(top) + 1), **_item_columns(models, top, score)})


def recommend(
    folder: Path, users: list[str], k: int = 10, exclude_seen: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Top k items for raw user ids, scored as their own devices would, or popular ones where nothing is known."""
    models = load_run(folder)
    return list_recommendations(models, users, RecommendationQuery(k, seen=not exclude_seen))


def list_recommendations(
    models: LoadedRun, users: Sequence[str], query: RecommendationQuery
) -> dict[str, list[dict[str, Any]]]:
    """The best items of some people as plain lists: user -> [{rank, item, score, title, basis}], best first."""
    users = list(dict.fromkeys(users))
    out: dict[str, list[dict[str, Any]]] = {user: [] for user in users}
    items, titles = models.items, models.titles
    for best in models.recommend(models.saved.user_numbers(users), query):
        rows = zip(best.user.tolist(), best.item.tolist(), best.score.tolist(), best.popular.tolist(), strict=True)
        for user, item, score, popular in rows:
            basis = "popularity" if popular else "history"
            mine = out[users[user]]
            told = {"rank": len(mine) + 1, "item": items[item], "score": score, "title": titles[item], "basis": basis}
            mine.append(told)
    return out


def score_users(saved: SavedRun, users: Ints) -> Floats:
    """Scores of the given users from saved state alone, without the dataset."""
    return load_saved(saved).scorer(users)


def _parse_single_id(given: Any, what: str) -> list[str]:
    found = to_raw_ids(given, what)
    if len(found) != 1:
        raise TacitaError(f"one {what} is asked for, not {len(found)}; ask for each by itself.")
    return found


def _empty_ranking() -> RankedItems:
    none = np.zeros(0, np.int32)
    return RankedItems(none, none, none, none.astype(np.float32), none.astype(bool))


def _item_columns(models: LoadedRun, item: Ints, score: Floats) -> dict[str, Any]:
    return {"item": lookup_names(models.items, item), "score": score, "title": lookup_names(models.titles, item)}


def _list_notes(config: RunConfig, result: dict[str, Any], folder: Path) -> list[str]:
    """What the command line says of a run, in Python's words."""
    data, parts = result["data"], [str(part["name"]) for part in config.parts or ()]
    told = format_data_notes(
        data.get("notes", ()), parse_removals(data.get("removed") or []), len(result["blocks"]), parts
    )
    said = [*told, *privacy_lines(config, result), *describe_leaks(config, folder)]
    return [translate_message(one) for one in said]


def _describe_privacy(config: RunConfig, result: dict[str, Any]) -> str:
    """What is promised, in the fewest words that promise no more than that."""
    if summarise_privacy(config, result) != NO_EPSILON:
        return "privacy: see notes"
    return "no epsilon" + (": what it releases gives people away" if describe_leaks(config, Path()) else "")


def _build_metrics(result: dict[str, Any], method: str) -> Frame:
    """Rows of the method, then of its controls; each block, then the mean."""
    scored = {method: result} | {
        control_name(name): one for name, one in result["controls"].items() if "skipped" not in one
    }
    tested = [int(block["users"]) for block in result["blocks"]]
    counted = sum(tested[1:] or tested)
    columns: dict[str, list[Any]] = {name: [] for name in ("scorer", "block", "users", *result["mean"])}
    for name, one in scored.items():
        rows = [*((n, tested[n], block) for n, block in enumerate(one["blocks"])), (None, counted, one["mean"])]
        for block, users, found in rows:
            columns["scorer"].append(name)
            columns["block"].append(block)
            columns["users"].append(users)
            for metric in result["mean"]:
                columns[metric].append(found.get(metric) if users else None)
    plain = {
        "scorer": columns.pop("scorer"),
        "block": integer_column(columns.pop("block")),
        "users": columns.pop("users"),
    }
    return make_frame({**plain, **{name: number_column(values) for name, values in columns.items()}})
