"""The models of a finished run in memory: its users, their scores, and the best items of many users at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Bools, Floats, Ints, Ragged, ServerState
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import read_server
from tacita.kernels.ranking import find_best_items
from tacita.metrics import ScoreUsers
from tacita.models.base import Backbone
from tacita.round.device_state import DeviceState, unflatten_devices
from tacita.round.plan import Plan
from tacita.runs.assembly import build_plan
from tacita.runs.run_folder import NEXT, SavedRun, open_saved, read_lists

T = TypeVar("T")
Stamp = tuple[object, ...]
MAX_SCORES = 2**24  # scores that are in memory together
MOST_READS = 5  # of a folder that changes again while it is read
HISTORY, POPULARITY, CATALOGUE = "history", "popularity", "catalogue"
"""What a list follows: the person's own items, what most people have, or nothing but the order of the catalogue."""


@dataclass(frozen=True)
class RecommendationQuery:
    """What is to be recommended: how many items, and from which."""

    k: int = 10
    include_seen: bool = False  # also items that a person knows
    exclude: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    include: Ints | None = None  # from these alone, ascending; None: from all


@dataclass(frozen=True)
class RankedItems:
    """The best items of some people, flat: a row for each item of each person, best first."""

    user: Ints  # place among the requested users
    rank: Ints  # from 1
    item: Ints
    score: Floats
    is_unknown: Bools  # nothing is known of the person

    @staticmethod
    def concatenate(rankings: Sequence[RankedItems]) -> RankedItems:
        columns = {}
        for column in fields(RankedItems):
            values = [getattr(ranking, column.name) for ranking in rankings]
            columns[column.name] = np.concatenate(values)
        return RankedItems(**columns)


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
        """Of every item; None where it has none."""
        titles = self.saved.ids["titles"]
        return [titles.get(item) or None for item in self.items]

    @cached_property
    def _item_number(self) -> dict[str, int]:
        return {item: number for number, item in enumerate(self.items)}

    def find_item_numbers(self, items: Sequence[str]) -> Ints:
        """The rows of raw item ids."""
        missing = self.list_unknown_items(items)
        if missing:
            raise self.saved.unknown_ids_error("item", missing)
        return self.find_known_items(items)

    def find_known_items(self, items: Sequence[str]) -> Ints:
        """The rows of those raw item ids that the run knows."""
        numbers = self._item_number
        known = [numbers[item] for item in items if item in numbers]
        return np.array(known, np.int32)

    def list_unknown_items(self, items: Sequence[str]) -> list[str]:
        """Those raw item ids that it does not know, each once."""
        numbers = self._item_number
        return [item for item in dict.fromkeys(items) if item not in numbers]

    @cached_property
    def histories(self) -> Ragged:
        """All items of each user, in whatever part of the data."""
        return read_lists(self.saved.client_arrays, "history")

    @cached_property
    def popularity(self) -> Floats:
        return self.plan.backbone.read_popularity(self.server)

    @property
    def basis_without_history(self) -> str:
        """What a list follows where nothing is known of the person; most servers do not learn what is popular."""
        return POPULARITY if self.popularity.any() else CATALOGUE

    @cached_property
    def scorer(self) -> DeviceScorer:
        """Scores as people's own devices would compute them, from saved state alone, without the dataset."""
        arrays = self.saved.client_arrays
        past = read_lists(arrays, "past") if "past/ptr" in arrays else None
        return DeviceScorer(
            self.plan,
            self.server,
            self.clients,
            self._build_last_block(),
            derive_keys(self.saved.ids["users"]),
            self.plan.broadcast_serving(self.server),
            "serve",
            past,
        )

    def _build_last_block(self) -> Block:
        """The block after which the run ended, with what devices read of it and nothing to test."""
        n_users = self.clients.n_users
        current = read_lists(self.saved.client_arrays, "current")
        no_items = Ragged.empty(n_users)
        return Block(
            self.server.block,
            n_users,
            len(self.server.items),
            train=current,
            valid=no_items,
            test=no_items,
            new_users=np.zeros(n_users, bool),
            n_rows=len(current.ids),
        )

    def recommend(self, users: Ints, query: RecommendationQuery) -> Iterator[RankedItems]:
        """The best items of these people, some people at a time."""
        check_list_length(query.k, len(self.items))
        n_items = max(1, len(self.server.items))
        chunk = max(1, MAX_SCORES // n_items)
        for start in range(0, len(users), chunk):
            chunk_users = users[start : start + chunk]
            histories = self.histories.take(chunk_users)
            yield rank_items(self.scorer, chunk_users, histories, query, self.popularity, start)


def rank_similar(loaded: LoadedRun, item: int, k: int) -> tuple[Ints, Floats]:
    """The items that are most like another, best first, and how much; see `Backbone.measure_similarity_to_item`."""
    n_others = len(loaded.items) - 1
    check_list_length(k, n_others, "find {} similar items")
    override = loaded.plan.find_serving_owner("scores")
    if override is not None:
        raise TacitaError(
            f"items of a run with part '{override.name}' cannot be compared: its item rows are not what answers there."
        )
    backbone = loaded.plan.backbone
    item_table = loaded.scorer.build_item_table()
    likeness = backbone.measure_similarity_to_item(loaded.server, item_table, item)
    likeness = likeness.astype(np.float32)
    likeness[item] = -np.inf
    scores = np.where(likeness == 0, -np.inf, likeness)
    scores = scores[None].astype(np.float32)
    top, values = find_best_items(scores, k)
    is_listed = np.isfinite(values[0])
    return top[0][is_listed], values[0][is_listed]


def rank_items(
    score: ScoreUsers, users: Ints, histories: Ragged, query: RecommendationQuery, popularity: Floats, first: int = 0
) -> RankedItems:
    """The best items of some people by their scores; a person with none gets popular items: zeros are no taste.

    Where the server does not learn what is popular, that is the catalogue in its order.

    `first`: the place of the first of them among all requested users.
    """
    scores = score(users)
    rows = histories.rows()
    if not query.include_seen:
        scores[rows, histories.ids] = 0
    is_unknown = ~(scores != 0).any(axis=1)
    if is_unknown.any():
        scores[is_unknown] = popularity
    if not query.include_seen:
        scores[rows, histories.ids] = -np.inf
    scores[:, query.exclude] = -np.inf
    if query.include is not None:
        scores = np.ascontiguousarray(scores[:, query.include])
    n_candidates = scores.shape[1]
    top, values = find_best_items(scores, min(query.k, n_candidates))
    is_listed = np.isfinite(values)
    row, place = np.nonzero(is_listed)
    item = top[is_listed]
    if query.include is not None:
        item = query.include[item]
    return RankedItems(
        user=(row + first).astype(np.int32),
        rank=(place + 1).astype(np.int32),
        item=item,
        score=values[is_listed],
        is_unknown=is_unknown[row],
    )


def load_run(folder: Path) -> LoadedRun:
    """The models of a finished run."""
    return load_saved(open_saved(folder))


def load_saved(saved: SavedRun) -> LoadedRun:
    plan = build_plan(saved.config)
    server = read_server_state(saved, plan.backbone)
    clients = unflatten_devices(saved.client_arrays, "")
    return LoadedRun(saved, plan, server, clients)


def read_server_state(saved: SavedRun, backbone: Backbone) -> ServerState:
    """The state of the server; a model that lacks an array that this version scores with is refused."""
    server = read_server(saved.server_arrays, saved.server_note)
    expected = backbone.init_heads(Draws(0))
    missing = sorted(expected.keys() - server.heads.keys())
    if missing:
        raise TacitaError(
            f"{saved.folder} was trained by an earlier version of tacita, whose '{backbone.name}' had no {missing[0]}; "
            "train it again."
        )
    return server


def read_settled(read: Callable[[], T], read_stamp: Callable[[], Stamp]) -> tuple[T, Stamp]:
    """What a folder holds while it does not change, and its stamp from before: a later one could hide a change."""
    for _ in range(MOST_READS):
        stamp = read_stamp()
        content = read()
        if read_stamp() == stamp:
            break
    return content, stamp


def read_stamp(folder: Path) -> Stamp:
    """What changes when a run folder does: a request may have made it forget meanwhile."""
    names = ("ids.json", "result.json", "server.safetensors", "clients.safetensors")
    try:
        stats = [(folder / name).stat() for name in names]
    except OSError:
        return ()
    stamps = []
    for stat in stats:
        stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    is_changing = (folder / NEXT).exists()
    return (*stamps, is_changing)
