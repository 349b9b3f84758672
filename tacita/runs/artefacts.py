"""The artefact scan (sharing spec D.4.8): whether anything in a run folder still holds what was withdrawn.

Lists that name an item for a user are read as lists, so that a pair is found wherever it stands, whatever it is
called. All files, whatever is in them, are searched for bytes that only the withdrawn data has: the key and the
private vector of who left, and the rows that withdrawn items had. The model itself may have such a row by right (an
item that others like and that did not move), so rows are looked for in everything else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tacita.core.codec import unpack_file
from tacita.core.draws import derive_keys
from tacita.core.types import AnyArray, Arrays, Ints, Keys, Ragged
from tacita.federation.evaluation import TrainedState
from tacita.round.device_state import LISTS, PARTS
from tacita.runs.run_folder import SavedRun

MIN_BYTES = 8  # bytes; what is shorter is found anywhere by chance
MODEL_ARRAYS = ("items", "heads/")  # arrays of the server that are the model itself


@dataclass(frozen=True)
class ScanTargets:
    """What must not be found."""

    removed: Ragged  # (users) items that are nobody's any more
    withdrawn: Ragged  # (users) items that the server may not know of, be they their users' still
    keys: Keys  # (users,) of everybody
    names: tuple[str, ...]  # raw ids of users
    items: tuple[str, ...]  # raw ids of items
    leavers: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    private: AnyArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # of those who left, before
    rows: AnyArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # of withdrawn items, before
    persistent: frozenset[str] | None = (
        None  # of a run that was trained again: what of the devices' lists is from before
    )

    def is_searched(self, name: str) -> bool:
        """Whether an array can hold a withdrawn pair.

        What a run made that never had it is its own: a withdrawn item may be among those that were drawn as not liked.
        """
        inside = name.removeprefix(LISTS)
        return self.persistent is None or not inside.startswith(PARTS) or inside in self.persistent

    @property
    def users(self) -> Ints:
        """Who withdrew something."""
        return np.flatnonzero(self.removed.counts() > 0).astype(np.int32)


def build_targets(saved: SavedRun, gone: Ragged, taken: Ragged, leavers: Ints, was: TrainedState) -> ScanTargets:
    """What a request withdrew, as a run held it."""
    rows, private, ids = was.server.items[np.unique(taken.ids)], was.clients.private[leavers], saved.ids
    return ScanTargets(
        gone, taken, derive_keys(ids["users"]), tuple(ids["users"]), tuple(ids["items"]), leavers, private, rows
    )


def find_traces(folder: Path, needles: ScanTargets, fallback: Path | None = None) -> dict[str, list[str]]:
    """Where something of it is, by kind: `pairs`, `people`, `rows`.

    `besides`: a folder whose files count where the first has none of that name.
    """
    files = {one.name: one for one in (fallback.iterdir() if fallback else ()) if one.is_file()}
    files |= {one.name: one for one in folder.iterdir() if one.is_file()}
    found: dict[str, list[str]] = {"pairs": [], "people": [], "rows": []}
    for name, path in sorted(files.items()):
        if name in ("ids.json", "report.html", "config.toml"):  # all ids, and nothing of who has what
            continue
        if path.suffix == ".safetensors":
            arrays, _ = unpack_file(path)
            sought = replace(needles, removed=needles.withdrawn) if name == "server.safetensors" else needles
            found["pairs"] += [f"{name}: {where}" for where in _find_pairs(arrays, sought)]
            found["people"] += [f"{name}: {where}" for where in _find_people(arrays, needles)]
            found["rows"] += [f"{name}: {where}" for where in _find_rows(arrays, needles)]
        else:
            found["pairs"] += [f"{name}: {where}" for where in _search_text(path, needles)]
    return found


def _find_pairs(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Lists per user, and columns of senders beside items, that hold a withdrawn pair."""
    arrays = {name: v for name, v in arrays.items() if needles.is_searched(name.partition(":")[0])}
    found = [name for name, lists in _find_lists(arrays) if _has_pair(lists, needles)]
    for name, sender in arrays.items():
        if sender.dtype != np.uint64 or sender.ndim != 1:
            continue
        mine = np.flatnonzero(np.isin(sender, needles.keys[needles.users]))
        order = np.argsort(needles.keys)
        user = order[np.searchsorted(needles.keys, sender[mine], sorter=order)]
        prefix = name.rpartition("/")[0]
        for other, item in arrays.items():
            beside = other.rpartition("/")[0] == prefix and item.shape == sender.shape and item.dtype.kind in "iu"
            if other != name and beside and needles.removed.holds(user, item[mine].astype(np.int64)).any():
                found.append(f"{name} with {other}")
    return found


def _find_lists(arrays: Arrays) -> list[tuple[str, Ragged]]:
    """Everything that looks like a list per user."""
    found = []
    for name, ptr in arrays.items():
        stem = name.removesuffix("ptr") if name.endswith("/ptr") else name if name.endswith(":") else None
        if stem is None or ptr.dtype.kind != "i":
            continue
        for column in ("ids", "item"):
            ids = arrays.get(stem + column)
            if ids is not None and ids.ndim == 1 and len(ptr) and ptr[-1] == len(ids):
                found.append((stem.rstrip("/:"), Ragged(ptr, ids.astype(np.int32))))
    return found


def _has_pair(lists: Ragged, needles: ScanTargets) -> bool:
    users = needles.users[needles.users < len(lists)]
    mine = lists.take(users)
    return bool(needles.removed.take(users).holds(mine.rows(), mine.ids).any())


def _find_people(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Arrays with the key of somebody who left, or with the private vector that they had."""
    keys, found = needles.keys[needles.leavers], []
    for name, array in arrays.items():
        if array.dtype.itemsize == MIN_BYTES and np.isin(np.ascontiguousarray(array).view(np.uint64), keys).any():
            found.append(f"{name} (key)")
        if _contains_row(array, needles.private):
            found.append(f"{name} (private vector)")
    return found


def _find_rows(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Arrays besides the model that hold a row as a withdrawn item had it."""
    rows, model = needles.rows, arrays.get(MODEL_ARRAYS[0])
    if model is not None and model.shape[1:] == rows.shape[1:]:  # what the new model has as well is nothing of before
        rows = rows[~np.isin(_hash_rows(np.ascontiguousarray(rows)), _hash_rows(np.ascontiguousarray(model)))]
    inside = [name for name in arrays if name != MODEL_ARRAYS[0] and not name.startswith(MODEL_ARRAYS[1])]
    return [name for name in inside if _contains_row(arrays[name], rows)]


def _contains_row(array: AnyArray, rows: AnyArray) -> bool:
    """Whether one of the rows stands in the array, at a multiple of its width, in its precision or in the array's."""
    width = rows.shape[1] if rows.ndim == 2 else 0
    if width * rows.itemsize < MIN_BYTES or array.size == 0 or array.size % width or array.dtype.kind != "f":
        return False
    wanted = np.ascontiguousarray(rows[rows.any(axis=1)].astype(array.dtype))
    if len(wanted) == 0:
        return False
    flat = np.ascontiguousarray(array).reshape(-1, width)
    hits = flat[np.isin(_hash_rows(flat), _hash_rows(wanted))]
    exact = {row.tobytes() for row in wanted}
    return any(row.tobytes() in exact for row in hits)


def _hash_rows(rows: AnyArray) -> Keys:
    """A number for every row, equal where rows are."""
    words = rows.view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize).astype(np.uint64)
    factors = np.power(np.uint64(6364136223846793005), np.arange(1, words.shape[1] + 1, dtype=np.uint64))
    with np.errstate(over="ignore"):
        return np.asarray((words * factors).sum(axis=1, dtype=np.uint64))


def _search_text(path: Path, needles: ScanTargets) -> list[str]:
    """Lines, or whole JSON files, that name a user together with an item that the user withdrew."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ["cannot be read as text"]
    pieces = text.splitlines() if path.suffix == ".jsonl" else [text]
    for user in needles.users.tolist():
        name = json.dumps(needles.names[user])
        for piece in pieces:
            if name in piece and any(json.dumps(needles.items[i]) in piece for i in needles.removed.row(user).tolist()):
                return ["a user's id beside an item's"]
    return []


def is_clean(traces: dict[str, list[str]], kinds: tuple[str, ...] = ("pairs", "people")) -> bool:
    return not any(traces[kind] for kind in kinds)
