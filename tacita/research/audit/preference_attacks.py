"""Guesses of what a person likes from the item rows they upload, or from a sum of such uploads (sharing spec G.1).

Whoever reads has the model that was sent, knows how popular items are and how many negatives are drawn for each item
that a person has. Three guesses. `sign-split`: all rows of an upload lie along one direction, what is liked on one side
of it and drawn samples on the other; the side with far fewer rows, as there are fewer of what is liked, or else with
more popular items, is called liked. `top-guess`: that direction is
taken for the person's own vector, and of the rows that moved the share that should be liked is, by score. `shadow`
(IMIA): a fifth of the rows that moved is called liked by chance and a copy of the model trained as the device would;
what ends nearest to the upload is believed, the rest is drawn anew, and so on.

A guess is a set of items: F1 against what the person has. Beside it stand the same guess against what somebody else
has, and what as many items drawn by chance from the rows that moved would give.
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

GUESSES = {"sign": "sign-split", "top": "top-guess", "shadow": "shadow training"}
_FIRST_LIKED_SHARE = 0.2  # of the rows that moved, called liked by chance
_CLEAR_SHARE = 0.4  # a side with less than this share of the rows is the smaller one, and not by chance
_TURNS = 16  # of shadow training
_BELIEVED_SHARE = 0.25  # of what is still in doubt, in each turn


@dataclass(frozen=True)
class ObservedUploads:
    """All that a reader has of uploads: one table of rows for every group of people, whose sum it is."""

    tables: Floats  # (groups, items, width)
    group: Longs  # (people,) the group that each person is in; of one person, where single uploads are seen
    people: Longs  # (people,)


def guess_liked(fed: Federation, progress: Progress, uploads: ObservedUploads) -> dict[str, Bools]:
    """For every guess (groups, items) what is called liked."""
    train = fed.stream.blocks[0].train
    popularity = np.bincount(train.ids, minlength=uploads.tables.shape[1]).astype(np.float64)
    moved = np.abs(uploads.tables).max(axis=2) > 0
    share = liked_share(fed)
    along = np.stack([sign_split(table, popularity, share) for table in uploads.tables])
    vectors = np.stack([_unit_direction(table, one) for table, one in zip(uploads.tables, along)])
    score = ((progress.server.items + uploads.tables) * vectors[:, None, :]).sum(axis=2)
    return {
        "sign": moved & (along > 0),
        "top": _mark_best(score, moved, share),
        "shadow": train_shadows(fed, progress, uploads.tables, moved, vectors),
    }


def liked_share(fed: Federation) -> float:
    """How much of what a device learns from is liked: everybody knows it."""
    return 1 / (1 + max(1, fed.config.train.negatives))


def mean_f1(uploads: ObservedUploads, guess: Bools, train: Ragged) -> dict[str, float]:
    """Means over people: of what they have, of what the next person has, and of as many items drawn from what moved."""
    moved = np.abs(uploads.tables).max(axis=2) > 0
    said: dict[str, list[float]] = {"found": [], "control": [], "chance": []}
    for n, group in enumerate(uploads.group):
        for kind, whose in (("found", uploads.people[n]), ("control", uploads.people[(n + 1) % len(uploads.people)])):
            has = train.row(int(whose))
            said[kind].append(_f1(float(guess[group, has].sum()), guess[group].sum(), len(has)))
        has, support = train.row(int(uploads.people[n])), moved[group].sum()
        hits = guess[group].sum() * moved[group, has].sum() / max(1, support)
        said["chance"].append(_f1(float(hits), guess[group].sum(), len(has)))
    return {kind: float(np.mean(values)) for kind, values in said.items()}


def _f1(hits: float, said: int, has: int) -> float:
    return 2 * hits / max(1, said + has)


def sign_split(upload: Floats, popularity: Doubles, share: float = 0.5) -> Doubles:
    """How far every row goes along the direction that most rows go, towards the side of what is liked.

    `share`: how much of what moves is liked. Far below a half, the side with few rows is that side, if there is one;
    else the side of what is popular.
    """
    _, _, directions = np.linalg.svd(upload, full_matrices=False)
    along = upload @ directions[0]
    up, down = int((along > 0).sum()), int((along < 0).sum())
    if share < _CLEAR_SHARE and min(up, down) < _CLEAR_SHARE * (up + down):
        return np.asarray(along if up < down else -along)
    return np.asarray(along if along @ (popularity - popularity.mean()) >= 0 else -along)


def _unit_direction(table: Floats, along: Doubles) -> Floats:
    """The direction of length 1 that `along` was measured on."""
    found = along @ table
    return np.asarray(found / max(float(np.linalg.norm(found)), 1e-30), np.float32)


def _mark_best(score: Floats, moved: Bools, share: float) -> Bools:
    """Of each group's rows that moved, the share with the highest scores."""
    rank = np.argsort(np.argsort(-np.where(moved, score, -np.inf), axis=1, kind="stable"), axis=1)
    return np.asarray(rank < np.ceil(share * moved.sum(axis=1))[:, None]) & moved


class _LabelledRows(Part):
    """What a shadow trains on: the rows that moved, with the labels of the guess."""

    name = "guessed"
    moved: Bools
    liked: Bools

    def samples(self, view: CohortView, own: Ragged) -> Ragged:
        group, item = np.nonzero(self.moved)
        label = self.liked[group, item].astype(np.float32)
        return Ragged.from_pairs(group, item.astype(np.int32), len(self.moved), {"label": label})


def train_shadows(fed: Federation, progress: Progress, tables: Floats, moved: Bools, vectors: Floats) -> Bools:
    """What shadow models that end nearest to the tables were told to like."""
    rng = np.random.default_rng([fed.config.seed, 20])
    train = _make_trainer(fed, progress, vectors, moved)
    wanted = _normalise_tables(tables, moved)
    liked, left = moved & (rng.random(moved.shape) < _FIRST_LIKED_SHARE), moved.copy()
    for _ in range(_TURNS):
        apart = np.linalg.norm(_normalise_tables(train(liked), moved) - wanted, axis=2)
        left &= ~_mark_best(-apart, left, _BELIEVED_SHARE)  # the rest is doubted
        liked ^= left & (rng.random(moved.shape) < 0.5)
    return liked


def _normalise_tables(tables: Floats, moved: Bools) -> Floats:
    """Tables in units of the row that moved a usual way: how strongly uploads are scaled tells nothing."""
    lengths = np.where(moved, np.linalg.norm(tables, axis=2), np.nan)
    usual = np.array([np.nanmedian(one) if np.isfinite(one).any() else 1.0 for one in lengths])
    return np.asarray(tables / np.maximum(usual, 1e-30)[:, None, None])


def _make_trainer(fed: Federation, progress: Progress, vectors: Floats, moved: Bools) -> Callable[[Bools], Floats]:
    """A function that trains a copy of the model for every group, from what is liked."""
    groups = len(vectors)
    server, block = progress.server, fed.stream.blocks[0]
    keys = np.arange(1, groups + 1, dtype=np.uint64)  # nobody's
    private = fed.backbone.init_private(fed.draws, keys)
    if private.shape == vectors.shape:  # else everybody starts from what all know
        private = (np.linalg.norm(private, axis=1, keepdims=True) * vectors).astype(np.float32)
    view = build_user_view(progress.clients, server, block, np.arange(groups), keys, fed.broadcast_serving(server))
    nothing = Ragged.empty(groups)
    view = replace(view, train=nothing, exclude=nothing, private=private)
    part = _LabelledRows(PartConfig(), RunContext(fed.backbone, fed.draws, fed.config.train))
    part.moved = moved

    def train(liked: Bools) -> Floats:
        part.liked = liked
        trained = train_cohort(view, fed.scorer, (part,), fed.config.train, fed.draws)
        rows = trained.upload.values["rows"]
        assert isinstance(rows, SparseRows)
        made = np.zeros((*moved.shape, rows.value.shape[1]), np.float32)
        made[rows.client, rows.item] = rows.apply_factor().value
        return made

    return train
