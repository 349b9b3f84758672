"""The models of a finished run in memory: who its people are, what they score, and the best of it, for many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Bools, Floats, Ints, Ragged, ServerState
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import read_server
from tacita.kernels.ranking import best_items
from tacita.metrics import ScoreUsers
from tacita.models.base import Backbone
from tacita.round.device_state import DeviceState, read_devices

from tacita.round.plan import Plan
from tacita.runs.assembly import build_plan
from tacita.runs.run_folder import NEXT, SavedRun, open_saved, read_lists

MAX_SCORES = 2**24  # scores that are in memory together


@dataclass(frozen=True)
class RecommendationQuery:
    """What somebody wants to have recommended: how many, and from which items."""

    k: int = 10
    seen: bool = False  # also items that a person knows
    exclude: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    include: Ints | None = None  # from these alone, ascending; None: from all


@dataclass(frozen=True)
class RankedItems:
    """The best items of some people, flat: a row for each item of each person, best first."""

    user: Ints  # place among those who were asked for
    rank: Ints  # from 1
    item: Ints
    score: Floats
    popular: Bools  # what is popular, because nothing is known of the person

    @staticmethod
    def concatenate(some: Sequence[RankedItems]) -> RankedItems:
        return RankedItems(
            *(np.concatenate([getattr(one, name) for one in some]) for name in RankedItems.__dataclass_fields__)
        )


def check_list_length(k: object, n_items: int, what: str = "recommend {} items") -> None:
    """Refuse to list nothing, or more items than there are."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TacitaError(f"k = {k!r} is no whole number; say how many items are wanted, such as k = 10.")
    if not 1 <= k <= n_items:
        raise TacitaError(f"cannot {what.format(k)}; choose from 1 to the {n_items:,} there are.")


@dataclass(frozen=True)
class LoadedRun:
    """A run folder as it was read: nothing in it changes."""

    saved: SavedRun
    plan: Plan
    server: ServerState
    clients: DeviceState

    @property
    def users(self) -> list[str]:
        return list(self.saved.ids["users"])

    @property
    def items(self) -> list[str]:
        return list(self.saved.ids["items"])

    @cached_property
    def titles(self) -> list[str | None]:
        """Of every item; None where nobody said it."""
        known = self.saved.ids["titles"]
        return [known.get(item) or None for item in self.saved.ids["items"]]

    @cached_property
    def _item_number(self) -> dict[str, int]:
        return {raw: n for n, raw in enumerate(self.saved.ids["items"])}

    def item_numbers(self, items: Sequence[str]) -> Ints:
        """The rows of raw item ids."""
        missing = self.unknown_items(items)
        if missing:
            raise self.saved.unknown_ids_error("item", missing)
        return self.known_items(items)

    def known_items(self, items: Sequence[str]) -> Ints:
        """The rows of those raw item ids that the run knows."""
        known = self._item_number
        return np.array([known[one] for one in items if one in known], np.int32)

    def unknown_items(self, items: Sequence[str]) -> list[str]:
        """Those raw item ids that it does not know, each once."""
        return [one for one in dict.fromkeys(items) if one not in self._item_number]

    @cached_property
    def seen(self) -> Ragged:
        """All that everybody did, in whatever part of the data."""
        return read_lists(self.saved.client_arrays, "history")

    @cached_property
    def popularity(self) -> Floats:
        return self.plan.backbone.popularity(self.server)

    @cached_property
    def scorer(self) -> DeviceScorer:
        """Scores as people's own devices would compute them, from saved state alone, without the dataset."""
        held, server, n = self.saved.client_arrays, self.server, self.clients.n_users
        current, none = read_lists(held, "current"), Ragged.empty(n)
        block = Block(server.block, n, len(server.items), current, none, none, np.zeros(n, bool), len(current.ids))
        past = read_lists(held, "past") if "past/ptr" in held else None
        keys, down = derive_keys(self.saved.ids["users"]), self.plan.broadcast_serving(server)
        return DeviceScorer(self.plan, server, self.clients, block, keys, down, "serve", past)

    def recommend(self, users: Ints, query: RecommendationQuery) -> Iterator[RankedItems]:
        """The best items of these people, some people at a time."""
        check_list_length(query.k, len(self.saved.ids["items"]))
        at_once = max(1, MAX_SCORES // max(1, len(self.server.items)))
        for lo in range(0, len(users), at_once):
            some = users[lo : lo + at_once]
            yield rank_items(self.scorer, some, self.seen.take(some), query, self.popularity, lo)


def rank_similar(loaded: LoadedRun, item: int, k: int) -> tuple[Ints, Floats]:
    """The items that are most like one of them, best first, and how much; see `Backbone.likeness`."""
    check_list_length(k, len(loaded.saved.ids["items"]) - 1, "find {} similar items")
    answering = loaded.plan.serving_owner("scores")
    if answering is not None:
        raise TacitaError(
            f"items of a run with part '{answering.name}' cannot be compared: its item rows are not what answers there."
        )
    like = loaded.plan.backbone.likeness(loaded.server, loaded.scorer.item_table(), item).astype(np.float32)
    like[item] = -np.inf
    top, value = best_items(np.where(like == 0, -np.inf, like)[None].astype(np.float32), k)
    found = np.isfinite(value[0])
    return top[0][found], value[0][found]


def rank_items(
    score: ScoreUsers, users: Ints, seen: Ragged, query: RecommendationQuery, popularity: Floats, first: int = 0
) -> RankedItems:
    """The best items of some people by their scores; who has none gets what is popular: zeros are no taste.

    `first`: the place of the first of them among all who were asked for.
    """
    scores, row = score(users), seen.rows()
    if not query.seen:
        scores[row, seen.ids] = 0
    unknown = ~(scores != 0).any(axis=1)
    if unknown.any():
        scores[unknown] = popularity
    if not query.seen:
        scores[row, seen.ids] = -np.inf
    scores[:, query.exclude] = -np.inf
    if query.include is not None:
        scores = np.ascontiguousarray(scores[:, query.include])
    top, value = best_items(scores, min(query.k, scores.shape[1]))
    found = np.isfinite(value)
    user, place = np.nonzero(found)
    item = top[found] if query.include is None else query.include[top[found]]
    return RankedItems((user + first).astype(np.int32), (place + 1).astype(np.int32), item, value[found], unknown[user])


def load_run(folder: Path) -> LoadedRun:
    """The models of a finished run."""
    return load_saved(open_saved(folder))


def load_saved(saved: SavedRun) -> LoadedRun:
    plan = build_plan(saved.config)
    return LoadedRun(saved, plan, read_server_state(saved, plan.backbone), read_devices(saved.client_arrays, ""))


def read_server_state(saved: SavedRun, backbone: Backbone) -> ServerState:
    """What the server holds; a model that lacks what this version scores with is refused."""
    server = read_server(saved.server_arrays, saved.server_note)
    missing = sorted(backbone.init_heads(Draws(0)).keys() - server.heads.keys())
    if missing:
        raise TacitaError(
            f"{saved.folder} was trained by an earlier version of tacita, whose '{backbone.name}' had no {missing[0]}; "
            "train it again."
        )
    return server


def read_stamp(folder: Path) -> tuple[object, ...]:
    """What changes when a run folder does: somebody may have asked it to forget meanwhile."""
    names = ("ids.json", "result.json", "server.safetensors", "clients.safetensors")
    try:
        told = [(folder / name).stat() for name in names]
    except OSError:
        return ()
    return (*((one.st_ino, one.st_size, one.st_mtime_ns) for one in told), (folder / NEXT).exists())
