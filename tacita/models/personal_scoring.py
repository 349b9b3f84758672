"""Scores of users whose shared parameters are their own, as well as some item rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Arrays, Floats, Ints, Ragged
from tacita.models.lanes import (
    LANES,
    TILE,
    group_lanes,
    join_arrays,
    lay_tiles,
    map_threads,
    pad_rows,
    score_tiles,
    select_users,
)
from tacita.models.scorer import Context, Scorer, Tensors
from tacita.models.scoring import score_with_own_rows


def score_personal(
    backbone: Scorer,
    private: Floats,
    heads: Arrays,
    items: Floats,
    own: Ragged,
    context: Ragged | None,
    only: Ragged | None = None,
) -> Floats:
    """Logits (users, items), heads being (users, ...); with `only`, flat logits of these items."""
    personal = PersonalModels(backbone, private, heads, items, own, context)
    if backbone.grouped and heads:
        return personal.score_towers(only)
    scores = personal.score_catalogue()
    if only is None:
        return scores
    return scores[only.rows(), only.ids]


@dataclass(frozen=True)
class PersonalModels:
    """Users with private vectors, shared parameters (users, ...) and some item rows of their own."""

    backbone: Scorer
    private: Floats
    heads: Arrays
    items: Floats
    own: Ragged
    context: Ragged | None

    def score_catalogue(self) -> Floats:
        """Logits (users, items)."""
        if not self.heads:
            return score_with_own_rows(self.backbone, self.private, {}, self.items, self.own, self.context)
        n_users = len(self.private)
        if n_users == 0:
            return np.zeros((0, len(self.items)), np.float32)
        scores = [self._score_user(user) for user in range(n_users)]
        return np.stack(scores)

    def _score_user(self, user: int) -> Floats:
        chosen = np.array([user])
        lists = None
        if self.context is not None:
            lists = self.context.take(chosen)
        private = self.private[chosen]
        heads = select_users(self.heads, user)
        own = self.own.take(chosen)
        scores = score_with_own_rows(self.backbone, private, heads, self.items, own, lists)
        return np.asarray(scores[0])

    def score_towers(self, only: Ragged | None) -> Floats:
        """A user at a time, users on all cores, each with its own tower and its own version of the rows it has."""
        n_items = len(self.items)
        tiles = pad_rows(self.items, TILE)

        def score_user(user: int) -> Floats:
            table = self._build_own_table(tiles, user)
            if only is None:
                return self._score_table(table, user)[:n_items]
            return self._score_listed(table, user, only.row(user))

        scores = map_threads(score_user, range(len(self.private)))
        if only is not None:
            return join_arrays(scores).astype(np.float32)
        if not scores:
            return np.zeros((0, n_items), np.float32)
        return np.stack(scores).astype(np.float32)

    def _build_own_table(self, items: Floats, user: int) -> Floats:
        """The item table as one user has it."""
        own = self.own.take(np.array([user]))
        table = items.copy()
        table[own.ids] += own.values["moved"]
        return table

    def _represent_user(self, table: Floats, user: int) -> tuple[Tensors, Arrays]:
        """One user as a group of its own, and its shared parameters."""
        chosen = np.array([user])
        heads = select_users(self.heads, chosen)
        context = None
        if self.context is not None:
            context = Context.from_lists(self.context.take(chosen), table)
        private = self.backbone.split_private(self.private[chosen])
        rep = self.backbone.represent_users(private, heads, context)
        group = {}
        for name, value in rep.items():
            group[name] = value[:, None]
        return group, heads

    def _score_table(self, table: Floats, user: int) -> Floats:
        group, heads = self._represent_user(table, user)
        tiles = lay_tiles(table)
        return score_tiles(self.backbone, group, heads, tiles)

    def _score_listed(self, table: Floats, user: int, listed: Ints) -> Floats:
        group, heads = self._represent_user(table, user)
        idle = -len(listed) % LANES
        padded = np.pad(listed, (0, idle))
        lanes = group_lanes(table[padded])
        logits = self.backbone.compute_group_logits(group, heads, lanes)
        flat = np.asarray(logits, np.float32).reshape(-1)
        return flat[: len(listed)]
