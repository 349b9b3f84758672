"""Guesses of what a person likes from the item rows they upload, or from a sum of such uploads (sharing spec G.1).

A reader has the model that was sent, knows how popular items are and how many negatives are drawn for each item that a
person has. There are three guesses. `sign-split`: all rows of an upload lie along one direction, what is liked on one
side of it and drawn samples on the other. The side with far fewer rows is called liked, as there are fewer of what is
liked; where neither has, the side with more popular items is. `top-guess`: that direction is taken for the person's own
vector, and of the rows that moved the share that should be liked is called liked, by score. `shadow` (IMIA): a fifth of
the rows that moved is called liked by chance and a copy of the model trained as the device would; the labels that end
nearest to the upload stay, the rest is drawn once more, and so on.

A guess is a set of items, judged by its F1 against what the person has. Its controls are the same guess against what
another person has, and what as many items drawn by chance from the rows that moved would give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Bools, CohortView, Doubles, Floats, Longs, Ragged
from tacita.federation.clients import build_user_view
from tacita.federation.rounds import Progress
from tacita.learn.training import train_cohort
from tacita.messages import SparseRows
from tacita.round.part import Part, PartConfig, RunContext
from tacita.round.plan import Federation
from tacita.round.task import LocalTask, prepare_cohort

GUESSES = {"sign": "sign-split", "top": "top-guess", "shadow": "shadow training"}
_FIRST_LIKED_SHARE = 0.2  # of the rows that moved, called liked by chance
_CLEAR_SHARE = 0.4  # a side with less than this share of the rows is the smaller one, and not by chance
_TURNS = 16  # of shadow training
_BELIEVED_SHARE = 0.25  # of what is still in doubt, in each turn
TINY = 1e-30


@dataclass(frozen=True)
class ObservedUploads:
    """All that a reader has of uploads: one table of rows for every group of people, whose sum it is."""

    tables: Floats  # (groups, items, width)
    group: Longs  # (people,) the group that each person is in; of one person, where single uploads are seen
    people: Longs  # (people,)

    @property
    def moved_rows(self) -> Bools:
        """(groups, items) rows that changed at all."""
        largest = np.abs(self.tables).max(axis=2)
        return np.asarray(largest > 0)

    def pick_person_and_control(self, place: int) -> dict[str, int]:
        """The person whose upload is read, and the next one as a control."""
        next_place = (place + 1) % len(self.people)
        person = int(self.people[place])
        next_person = int(self.people[next_place])
        return {"found": person, "control": next_person}


def guess_liked(federation: Federation, progress: Progress, uploads: ObservedUploads) -> dict[str, Bools]:
    """For every guess (groups, items) what is called liked."""
    train = federation.stream.blocks[0].train
    n_items = uploads.tables.shape[1]
    counts = np.bincount(train.ids, minlength=n_items)
    popularity = counts.astype(np.float64)
    moved = uploads.moved_rows
    share = compute_liked_share(federation)
    signs = []
    directions = []
    for table in uploads.tables:
        along = score_along_main_direction(table, popularity, share)
        signs.append(along)
        directions.append(_compute_unit_direction(table, along))
    vectors = np.stack(directions)
    moved_items = progress.server.items + uploads.tables
    products = moved_items * vectors[:, None, :]
    score = products.sum(axis=2)
    return {
        "sign": moved & (np.stack(signs) > 0),
        "top": _mark_best(score, moved, share),
        "shadow": label_by_shadow_models(federation, progress, uploads.tables, moved, vectors),
    }


def compute_liked_share(federation: Federation) -> float:
    """How much of what a device learns from is liked: everybody knows it."""
    negatives = max(1, federation.config.train.negatives)
    return 1 / (1 + negatives)


def average_f1(uploads: ObservedUploads, guess: Bools, train: Ragged) -> dict[str, float]:
    """Means over people: of what they have, of what the next person has, and of as many items drawn from what moved."""
    all_moved = uploads.moved_rows
    f1: dict[str, list[float]] = {"found": [], "control": [], "chance": []}
    for place, group in enumerate(uploads.group):
        guessed = guess[group]
        n_guessed = guessed.sum()
        for kind, person in uploads.pick_person_and_control(place).items():
            items = train.row(person)
            hits = float(guessed[items].sum())
            score = _compute_f1(hits, n_guessed, len(items))
            f1[kind].append(score)
        person = int(uploads.people[place])
        own_items = train.row(person)
        moved = all_moved[group]
        n_moved = max(1, moved.sum())
        n_own_moved = moved[own_items].sum()
        chance_hits = float(n_guessed * n_own_moved / n_moved)
        chance_score = _compute_f1(chance_hits, n_guessed, len(own_items))
        f1["chance"].append(chance_score)
    means = {}
    for kind, values in f1.items():
        means[kind] = float(np.mean(values))
    return means


def _compute_f1(hits: float, n_guessed: int, n_items: int) -> float:
    return 2 * hits / max(1, n_guessed + n_items)


def score_along_main_direction(upload: Floats, popularity: Doubles, share: float = 0.5) -> Doubles:
    """How far every row goes along the direction that most rows go, towards the side of what is liked.

    `share`: how much of what moves is liked. Far below a half, the side with few rows is that side, if there is one;
    else the side of what is popular.
    """
    _, _, directions = np.linalg.svd(upload, full_matrices=False)
    along = upload @ directions[0]
    n_up = int((along > 0).sum())
    n_down = int((along < 0).sum())
    few_are_liked = share < _CLEAR_SHARE
    smaller_side = min(n_up, n_down)
    has_small_side = smaller_side < _CLEAR_SHARE * (n_up + n_down)
    if few_are_liked and has_small_side:
        is_liked_up = n_up < n_down
    else:
        centred_popularity = popularity - popularity.mean()
        is_liked_up = along @ centred_popularity >= 0
    return np.asarray(along if is_liked_up else -along)


def _compute_unit_direction(table: Floats, along: Doubles) -> Floats:
    """The direction of length 1 that `along` was measured on."""
    direction = along @ table
    length = float(np.linalg.norm(direction))
    unit = direction / max(length, TINY)
    return np.asarray(unit, np.float32)


def _mark_best(score: Floats, moved: Bools, share: float) -> Bools:
    """Of each group's rows that moved, the share with the highest scores."""
    moved_score = np.where(moved, score, -np.inf)
    order = np.argsort(-moved_score, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    n_moved = moved.sum(axis=1)
    sizes = np.ceil(share * n_moved)
    is_best = rank < sizes[:, None]
    return np.asarray(is_best) & moved


class _LabelledRows(Part):
    """What a shadow trains on: the rows that moved, with the labels of the guess."""

    name = "guessed"
    fills = frozenset({"samples"})
    moved: Bools
    liked: Bools

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(samples=self.label_rows)

    def label_rows(self, view: CohortView, own: Ragged) -> Ragged:
        group, item = np.nonzero(self.moved)
        is_liked = self.liked[group, item]
        columns = {"label": is_liked.astype(np.float32)}
        ids = item.astype(np.int32)
        return Ragged.from_pairs(group, ids, len(self.moved), columns)


def label_by_shadow_models(
    federation: Federation, progress: Progress, tables: Floats, moved: Bools, vectors: Floats
) -> Bools:
    """The labels of shadow models that end nearest to the tables."""
    seed = federation.config.seed
    rng = np.random.default_rng([seed, 20])
    train = _make_trainer(federation, progress, vectors, moved)
    observed = _normalise_tables(tables, moved)
    by_chance = rng.random(moved.shape) < _FIRST_LIKED_SHARE
    liked = moved & by_chance
    in_doubt = moved.copy()
    for _ in range(_TURNS):
        shadow = _normalise_tables(train(liked), moved)
        distance = np.linalg.norm(shadow - observed, axis=2)
        believed = _mark_best(-distance, in_doubt, _BELIEVED_SHARE)
        in_doubt &= ~believed
        coin = rng.random(moved.shape) < 0.5
        liked ^= in_doubt & coin
    return liked


def _normalise_tables(tables: Floats, moved: Bools) -> Floats:
    """Tables in units of the median row that moved: how strongly uploads are scaled tells nothing."""
    row_lengths = np.linalg.norm(tables, axis=2)
    scales = []
    for lengths in np.where(moved, row_lengths, np.nan):
        has_moved = np.isfinite(lengths).any()
        scales.append(np.nanmedian(lengths) if has_moved else 1.0)
    scale = np.maximum(np.array(scales), TINY)
    scale_column = scale[:, None, None]
    return np.asarray(tables / scale_column)


def _make_trainer(
    federation: Federation, progress: Progress, vectors: Floats, moved: Bools
) -> Callable[[Bools], Floats]:
    """A function that trains a copy of the model for every group, from what is liked."""
    view = _make_shadow_view(federation, progress, vectors)
    backbone = federation.scorer
    draws = federation.draws
    config = federation.config.train
    context = RunContext(backbone, draws, config)
    part = _LabelledRows(PartConfig(), context)
    part.moved = moved

    def train(liked: Bools) -> Floats:
        part.liked = liked
        task = prepare_cohort([part], view)
        trained = train_cohort(task, backbone, (), config, draws)
        rows = trained.upload.values["rows"]
        assert isinstance(rows, SparseRows)
        width = rows.value.shape[1]
        tables = np.zeros((*moved.shape, width), np.float32)
        scaled = rows.apply_factor()
        tables[rows.client, rows.item] = scaled.value
        return tables

    return train


def _make_shadow_view(federation: Federation, progress: Progress, vectors: Floats) -> CohortView:
    """A client without items for every group, whose user vector points where the group's upload does."""
    n_groups = len(vectors)
    keys = np.arange(1, n_groups + 1, dtype=np.uint64)  # nobody's
    private = federation.backbone.init_private(federation.draws, keys)
    if private.shape == vectors.shape:  # else everybody starts from what all know
        length = np.linalg.norm(private, axis=1, keepdims=True)
        private = (length * vectors).astype(np.float32)
    view = build_user_view(
        progress.clients,
        progress.server,
        federation.stream.blocks[0],
        np.arange(n_groups),
        keys,
        federation.broadcast_serving(progress.server),
    )
    nothing = Ragged.empty(n_groups)
    return replace(view, train=nothing, exclude=nothing, private=private)
