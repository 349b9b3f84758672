"""What a finished run is for: its numbers, and recommendations from what its devices hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import keys_of
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import (
    read_server,
)
from tacita.kernels.ranking import best_items
from tacita.lab.assembling import build, planned
from tacita.lab.run_folder import Saved, lists_of, open_saved, read_config, read_result
from tacita.round.device_state import read_devices
from tacita.round.plan import to_serve


@dataclass(frozen=True)
class Run:
    """A finished run: its numbers, and recommendations from what its devices hold."""

    folder: Path
    config: RunConfig
    result: dict[str, Any]

    def recommend(self, user: str | int, k: int = 10, exclude_seen: bool = True) -> list[dict[str, Any]]:
        """Top k for a raw user id: [{item, title, score, basis}], best first."""
        return recommend(self.folder, [str(user)], k, exclude_seen)[str(user)]


def open_run(folder: Path) -> Run:
    result = read_result(folder)
    return Run(folder, read_config(folder), result)


def check_wanted(k: int, n_items: int) -> None:
    """Refuse to recommend nothing, or more items than there are."""
    if not 1 <= k <= n_items:
        raise TacitaError(f"cannot recommend {k} items; choose from 1 to the {n_items:,} there are.")


def recommend(
    folder: Path, users: list[str], k: int = 10, exclude_seen: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Top k items for raw user ids, scored as their own devices would, or popular ones where nothing is known."""
    saved = open_saved(folder)
    chosen, ids = saved.numbers(users), saved.ids
    check_wanted(k, len(ids["items"]))
    scores = serve(saved, chosen)
    hidden, seen = np.zeros(scores.shape, bool), lists_of(saved.held, "history").take(chosen)
    hidden[seen.rows(), seen.ids] = exclude_seen
    unknown = ~((scores != 0) & ~hidden).any(axis=1)  # nobody's zeros are a taste: those people get what is popular
    if unknown.any():
        scores[unknown] = build(saved.config)[0].popularity(read_server(saved.served, saved.note))
    scores[hidden] = -np.inf
    top, top_scores = best_items(scores, k)
    out = {}
    for row, user in enumerate(users):
        basis = "popularity" if unknown[row] else "history"
        found = [(ids["items"][i], float(s)) for i, s in zip(top[row], top_scores[row], strict=True) if np.isfinite(s)]
        out[user] = [{"item": i, "title": ids["titles"].get(i, ""), "score": s, "basis": basis} for i, s in found]
    return out


def serve(saved: Saved, users: Ints) -> Floats:
    """Scores of the given users from saved state alone, without the dataset."""
    config, held = saved.config, saved.held
    plan, server = planned(config), read_server(saved.served, saved.note)
    clients = read_devices(held, "")
    current = lists_of(held, "current")
    n, none = clients.n_users, Ragged.empty(clients.n_users)
    block = Block(server.block, n, len(server.items), current, none, none, np.zeros(n, bool), len(current.ids))
    keys = keys_of(saved.ids["users"])
    past = lists_of(held, "past") if "past/ptr" in held else None
    return DeviceScorer(plan, server, clients, block, keys, to_serve(plan, server), "serve", past)(users)
