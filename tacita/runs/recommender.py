"""An estimator as scikit-learn and LensKit users expect one: fit, recommend, predict, explain, evaluate, save, load."""

from __future__ import annotations

import importlib
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, temporary_path, to_folder_path
from tacita.core.python_messages import translate_errors
from tacita.data.frames import IN_MEMORY, Frame, convert_to_frame_or_none, is_pandas, to_pandas, to_raw_ids
from tacita.runs import training
from tacita.runs.assembly import ALL_CORES
from tacita.runs.callbacks import NO_CALLBACKS, join_callbacks, refuse_other_callbacks
from tacita.runs.default_model import resolve_model
from tacita.runs.run_folder import read_result
from tacita.runs.serving import Id, Ids, Run, open_run
from tacita.runs.trackers.registry import open_trackers

log = logging.getLogger(__name__)


class Recommender:
    """Learns from a table of interactions, and recommends.

    Without a model or method it takes the form of tally that fits the table best. `settings` are those of a config
    file, such as `train={"rounds": 50}`, and `callbacks` and `track` as in `tacita.train`. What is fitted is a run
    folder: in `out`, or in a temporary one. A folder in `out` has to be new, so before a second `fit` name another one
    with `set_params(out=...)`. A `fit` that fails leaves what was fitted before as it is.

    >>> import tacita as tc
    >>> clicks = {"user": ["ann", "ann", "ann", "bob", "bob", "bob"] * 5, "item": list("abcdefghij") * 3}
    >>> model = tc.Recommender(backbone="tally", evaluate={"k": [3], "select_by": "ndcg@3", "controls": False})
    >>> model.fit(clicks).recommend("ann", k=2).height <= 2
    True
    """

    def __init__(
        self,
        backbone: str | dict[str, Any] | None = None,
        method: str | None = None,
        seed: int | None = None,
        out: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.backbone = backbone
        self.method = method
        self.seed = seed
        self.out = out
        self.settings = settings

    # scikit-learn's protocol

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """What it was made with, by name; scikit-learn's `clone` reads it."""
        named = {"backbone": self.backbone, "method": self.method, "seed": self.seed, "out": self.out}
        return {**named, **self.settings}

    def set_params(self, **params: Any) -> Recommender:
        """Change what it was made with; the next `fit` reads it."""
        for name, value in params.items():
            if name in ("backbone", "method", "seed", "out"):
                setattr(self, name, value)
            else:
                self.settings[name] = value
        return self

    def __repr__(self) -> str:
        values = [f"{name}={value!r}" for name, value in self.get_params().items() if value is not None]
        return f"Recommender({', '.join(values)})"

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn, which alone asks, may assume: tables with named columns, no arrays of numbers."""
        utils = importlib.import_module("sklearn.utils")
        table_tags = utils.InputTags(two_d_array=False, string=True, categorical=True, dict=True)
        target_tags = utils.TargetTags(required=False)
        return utils.Tags(estimator_type=None, target_tags=target_tags, input_tags=table_tags)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process reads the same folder; a temporary one lasts as long as the original."""
        return {name: value for name, value in self.__dict__.items() if name != "_temporary"}

    def __sklearn_is_fitted__(self) -> bool:
        return "run_" in self.__dict__

    # learning

    def fit(self, X: Any, y: Any = None) -> Recommender:
        """Learn from a table with a user and an item column; ratings in `y` or in the table are optional."""
        table = convert_to_frame_or_none(X)
        if table is None:
            raise TacitaError(
                f"data of type {type(X).__name__} cannot be learned from; give a table of polars or pandas, or a dict "
                "of columns."
            )
        if y is not None:
            table = _add_ratings(table, y)
        temporary = None
        folder = self.out
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="tacita-")
            folder = Path(temporary.name) / "run"
        try:
            run = self._train(table, folder)
        except BaseException:
            if temporary is not None:
                temporary.cleanup()
            raise
        self._temporary = temporary  # the folder of an earlier fit goes only now
        self._gives_pandas = is_pandas(X)
        self.run_ = run
        self.n_features_in_ = table.width
        return self

    def _train(self, table: Frame, folder: str | Path) -> Run:
        settings = self._settings()
        own_callbacks = list(settings.pop("callbacks", None) or ())
        refuse_other_callbacks(own_callbacks)
        with translate_errors(), open_trackers(settings.pop("track", None)) as trackers:
            config, start = resolve_model(settings, "the settings", ALL_CORES, table, log.info)
            earlier = [] if start is None else [record.report for record in start.rounds]
            target = to_folder_path(folder, "out")
            callbacks = join_callbacks(NO_CALLBACKS, [*own_callbacks, *trackers], target, earlier)
            return training.train(config, target, ALL_CORES, callbacks, table, start)

    def _settings(self) -> dict[str, Any]:
        backbone = {"name": self.backbone} if isinstance(self.backbone, str) else self.backbone
        named = {"backbone": backbone, "method": self.method, "seed": self.seed}
        stated = {name: value for name, value in named.items() if value is not None}
        return {**self.settings, **stated, "data": IN_MEMORY}

    @property
    def fitted_run(self) -> Run:
        """The run that was fitted."""
        if not self.__sklearn_is_fitted__():
            raise TacitaError("the recommender is not fitted; call fit(table) first.")
        return self.run_

    # answers

    def recommend(self, users: Ids | None = None, k: int = 10, **options: Any) -> Any:
        """The k best items of one user, of several, or of everybody; see `Run.recommend`."""
        return self._to_pandas_if_given(self.fitted_run.recommend(_to_ids(users), k, **options))

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """The score of every row's user and item; NaN where the run does not know one of them."""
        run = self.fitted_run
        users, items = self._read_pairs(X, "predict")
        known_users = set(run.users)
        item_number = {item: number for number, item in enumerate(run.items)}
        scores = np.full(len(users), np.nan)
        rows_of_user: dict[str, list[int]] = {}
        for row, (user, item) in enumerate(zip(users, items, strict=True)):
            if user in known_users and item in item_number:
                rows_of_user.setdefault(user, []).append(row)
        for user, rows in rows_of_user.items():
            wanted = [items[row] for row in rows]
            scores[rows] = run.scores(user, wanted)["score"].to_numpy()
        return scores

    def explain(self, user: Id, item: Id, k: int = 5) -> Any:
        """The user's own items that speak most for an item; see `Run.explain`."""
        return self._to_pandas_if_given(self.fitted_run.explain(user, item, k))

    def similar(self, item: Id, k: int = 10) -> Any:
        """The items that are most like another; see `Run.similar`."""
        return self._to_pandas_if_given(self.fitted_run.similar(item, k))

    def evaluate(self, holdout: Any, k: int = 10) -> dict[str, float]:
        """Recall, hit rate and NDCG at k on a table of held-out interactions of users that the run knows."""
        run = self.fitted_run
        users, items = self._read_pairs(holdout, "evaluate")
        known_users = set(run.users)
        wanted: dict[str, set[str]] = {}
        for user, item in zip(users, items, strict=True):
            if user in known_users:
                wanted.setdefault(user, set()).add(item)
        if not wanted:
            raise TacitaError("the run knows no user of this holdout; hold out interactions of users it was fitted on.")
        lists = run.recommend(list(wanted), k)
        return _measure_lists(lists, wanted, k)

    def _read_pairs(self, source: Any, verb: str) -> tuple[list[str], list[str]]:
        """The users and items of a table whose columns are called so, or as in the table that was learned from."""
        table = convert_to_frame_or_none(source)
        if table is None:
            raise TacitaError(f"{verb} needs a table with the columns 'user' and 'item'.")
        names = self.settings.get("columns") or {}
        pairs = []
        for role in ("user", "item"):
            name = role if role in table.columns else names.get(role, role)
            if name not in table.columns:
                raise TacitaError(f"{verb} needs a table with the columns 'user' and 'item'; it has no '{name}'.")
            pairs.append(to_raw_ids(table[name], role))
        return pairs[0], pairs[1]

    # folders

    def save(self, folder: str | Path) -> Path:
        """Copy the fitted run to a new folder, from which `load` and the command line serve it."""
        source = self.fitted_run.folder
        target = to_folder_path(folder, "folder")
        if target.exists():
            raise TacitaError(f"{target} exists; choose another folder.")
        with translate_errors():
            read_result(source)  # a temporary folder may be gone
            _copy_folder(source, target)
        return target

    @classmethod
    def load(cls, folder: str | Path) -> Recommender:
        """A recommender with a fitted run of a folder, and with its settings."""
        with translate_errors():
            run = open_run(to_folder_path(folder))
        settings = run.config.model_dump(mode="json", exclude={"data"})
        recommender = cls(**settings)
        recommender.run_ = run
        recommender._gives_pandas = False
        return recommender

    def _to_pandas_if_given(self, frame: Frame) -> Any:
        """Pandas where pandas went in."""
        return to_pandas(frame) if self._gives_pandas else frame


def _add_ratings(table: Frame, ratings: Any) -> Frame:
    """The table with a column of ratings."""
    try:
        column = np.asarray(ratings)
    except ValueError:  # lists of several lengths
        column = np.zeros((0, 0))
    if column.shape != (table.height,):
        raise TacitaError(
            f"y is no list of {table.height:,} ratings, one for each row of the table; give one, or leave y out."
        )
    return table.with_columns(rating=column)


def _copy_folder(source: Path, target: Path) -> None:
    """A copy that appears whole or not at all."""
    side = temporary_path(target)

    def copy_file(original: str, copy: str) -> None:
        try:
            shutil.copy2(original, copy)
        except OSError as error:  # copytree would gather it in a list
            raise disk_error(target, error) from None

    try:
        shutil.copytree(source, side, copy_function=copy_file)
        side.rename(target)
    except OSError as error:
        raise disk_error(target, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)


def _to_ids(users: Any) -> Any:
    """Ids as they are; a column of pandas as a list."""
    is_column = hasattr(users, "iloc") and not is_pandas(users)
    return list(users) if is_column else users


def _measure_lists(lists: Frame, wanted: dict[str, set[str]], k: int) -> dict[str, float]:
    """Means over the users who want something; who gets no list scores 0."""
    recommended_to: dict[str, list[str]] = {user: [] for user in wanted}
    for user, item in zip(lists["user"], lists["item"], strict=True):
        recommended_to[user].append(item)
    recall = hits = gain = 0.0
    for user, items in wanted.items():
        recommended = recommended_to[user]
        is_hit = np.array([item in items for item in recommended], bool)
        recall += is_hit.sum() / len(items)
        hits += bool(is_hit.any())
        discounts = 1 / np.log2(np.arange(len(is_hit)) + 2)
        ideal = (1 / np.log2(np.arange(min(k, len(items))) + 2)).sum()
        gain += float((is_hit * discounts).sum() / ideal)
    n = len(wanted)
    return {f"recall@{k}": recall / n, f"hr@{k}": hits / n, f"ndcg@{k}": gain / n, "users": n}
