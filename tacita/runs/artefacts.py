"""The artefact scan (sharing spec D.4.8): whether anything in a run folder still holds what was withdrawn.

Lists that name an item for a user are read as lists, so a pair is found wherever it stands. All files are searched for
bytes that only the withdrawn data has: the key and the private vector of a user who left, and the rows of withdrawn
items. The model itself may hold such a row by right (an item that others like and that did not move). So rows are
looked for in everything but the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tacita.core.codec import unpack_array_file
from tacita.core.draws import derive_keys
from tacita.core.types import AnyArray, Arrays, Ints, Keys, Ragged
from tacita.federation.evaluation import TrainedState
from tacita.round.device_state import LISTS, PARTS
from tacita.runs.run_folder import SavedRun

Traces = dict[str, list[str]]
"""Where withdrawn data still is, by kind: `pairs`, `people`, `rows`."""

MIN_BYTES = 8  # bytes; anything shorter occurs everywhere by chance
MODEL_ARRAYS = ("items", "heads/")  # arrays of the server that are the model itself
UNSCANNED_FILES = ("ids.json", "report.html", "config.toml")  # they name all ids and no pairs


def _make_no_users() -> Ints:
    return np.zeros(0, np.int32)


def _make_no_rows() -> AnyArray:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class ScanTargets:
    """What must not be found."""

    removed: Ragged  # (users) items that are nobody's any more
    withdrawn: Ragged  # (users) items that the server may not know of, even if their users still have them
    keys: Keys  # (users,) of all users
    names: tuple[str, ...]  # raw ids of users
    items: tuple[str, ...]  # raw ids of items
    leavers: Ints = field(default_factory=_make_no_users)
    private: AnyArray = field(default_factory=_make_no_rows)  # of those who left, before
    rows: AnyArray = field(default_factory=_make_no_rows)  # of withdrawn items, before
    persistent: frozenset[str] | None = None  # of a retrained run: the devices' lists that are from before

    def is_searched(self, name: str) -> bool:
        """Whether an array can hold a withdrawn pair.

        A retrained run never had the pair, and what it drew itself is its own: a withdrawn item may be a negative.
        """
        if self.persistent is None:
            return True
        list_name = name.removeprefix(LISTS)
        belongs_to_part = list_name.startswith(PARTS)
        return not belongs_to_part or list_name in self.persistent

    @property
    def users(self) -> Ints:
        """Those who withdrew something."""
        counts = self.removed.counts()
        return np.flatnonzero(counts > 0).astype(np.int32)


def build_targets(
    saved: SavedRun, removed: Ragged, withdrawn: Ragged, leavers: Ints, before: TrainedState
) -> ScanTargets:
    """What a request withdrew, as a run held it."""
    user_ids = saved.ids["users"]
    item_ids = saved.ids["items"]
    withdrawn_items = np.unique(withdrawn.ids)
    return ScanTargets(
        removed=removed,
        withdrawn=withdrawn,
        keys=derive_keys(user_ids),
        names=tuple(user_ids),
        items=tuple(item_ids),
        leavers=leavers,
        private=before.clients.private[leavers],
        rows=before.server.items[withdrawn_items],
    )


def find_traces(folder: Path, needles: ScanTargets, fallback: Path | None = None) -> Traces:
    """Where something of it is, by kind: `pairs`, `people`, `rows`.

    `fallback`: a folder whose files count where the first has none of that name.
    """
    files = _list_files(fallback) if fallback else {}
    files |= _list_files(folder)
    traces: Traces = {"pairs": [], "people": [], "rows": []}
    for name, path in sorted(files.items()):
        if name in UNSCANNED_FILES:
            continue
        for kind, place in _scan_file(path, needles):
            traces[kind].append(f"{name}: {place}")
    return traces


def _list_files(folder: Path) -> dict[str, Path]:
    files = {}
    for path in folder.iterdir():
        if path.is_file():
            files[path.name] = path
    return files


def _scan_file(path: Path, needles: ScanTargets) -> Iterator[tuple[str, str]]:
    """Every trace in a file, with its kind."""
    if path.suffix != ".safetensors":
        for place in _search_text(path, needles):
            yield "pairs", place
        return
    arrays, _ = unpack_array_file(path)
    pair_needles = needles
    if path.name == "server.safetensors":
        pair_needles = replace(needles, removed=needles.withdrawn)
    for place in _list_pair_traces(arrays, pair_needles):
        yield "pairs", place
    for place in _list_people_traces(arrays, needles):
        yield "people", place
    for place in _list_row_traces(arrays, needles):
        yield "rows", place


def _list_pair_traces(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Lists per user, and columns of senders beside items, that hold a withdrawn pair."""
    searched: Arrays = {}
    for name, array in arrays.items():
        array_name = name.partition(":")[0]
        if needles.is_searched(array_name):
            searched[name] = array
    places = []
    for name, lists in _collect_user_lists(searched):
        if _has_pair(lists, needles):
            places.append(name)
    for name, column in searched.items():
        if column.dtype == np.uint64 and column.ndim == 1:
            places += _find_sender_pairs(searched, name, needles)
    return places


def _find_sender_pairs(arrays: Arrays, sender_name: str, needles: ScanTargets) -> list[str]:
    """Columns of items that, beside a column of senders, hold a withdrawn pair."""
    sender = arrays[sender_name]
    withdrawing_keys = needles.keys[needles.users]
    entries = np.flatnonzero(np.isin(sender, withdrawing_keys))
    order = np.argsort(needles.keys)
    place_in_order = np.searchsorted(needles.keys, sender[entries], sorter=order)
    user = order[place_in_order]
    table = sender_name.rpartition("/")[0]
    places = []
    for name, column in arrays.items():
        same_table = name.rpartition("/")[0] == table
        is_whole_number = column.dtype.kind in "iu"
        if name == sender_name or not same_table:
            continue
        if column.shape != sender.shape or not is_whole_number:
            continue
        items = column[entries].astype(np.int64)
        if needles.removed.holds(user, items).any():
            places.append(f"{sender_name} with {name}")
    return places


def _collect_user_lists(arrays: Arrays) -> list[tuple[str, Ragged]]:
    """Everything that looks like a list per user."""
    lists = []
    for name, ptr in arrays.items():
        stem = _find_column_prefix(name)
        if stem is None or ptr.dtype.kind != "i":
            continue
        for column in ("ids", "item"):
            ids = arrays.get(stem + column)
            if ids is None or ids.ndim != 1:
                continue
            is_empty = len(ptr) == 0
            if is_empty or ptr[-1] != len(ids):
                continue
            list_name = stem.rstrip("/:")
            user_lists = Ragged(ptr, ids.astype(np.int32))
            lists.append((list_name, user_lists))
    return lists


def _find_column_prefix(name: str) -> str | None:
    """What the columns of a list begin with, if an array's name is one for the bounds of lists."""
    if name.endswith("/ptr"):
        return name.removesuffix("ptr")
    return name if name.endswith(":") else None


def _has_pair(lists: Ragged, needles: ScanTargets) -> bool:
    users = needles.users[needles.users < len(lists)]
    stored = lists.take(users)
    removed = needles.removed.take(users)
    return bool(removed.holds(stored.rows(), stored.ids).any())


def _list_people_traces(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Arrays with the key of a user who left, or with the private vector that they had."""
    leaver_keys = needles.keys[needles.leavers]
    places = []
    for name, array in arrays.items():
        if _contains_key(array, leaver_keys):
            places.append(f"{name} (key)")
        if _contains_row(array, needles.private):
            places.append(f"{name} (private vector)")
    return places


def _contains_key(array: AnyArray, keys: Keys) -> bool:
    if array.dtype.itemsize != MIN_BYTES:
        return False
    words = np.ascontiguousarray(array).view(np.uint64)
    return bool(np.isin(words, keys).any())


def _list_row_traces(arrays: Arrays, needles: ScanTargets) -> list[str]:
    """Arrays besides the model that hold a row as a withdrawn item had it."""
    rows = needles.rows
    item_table, head_prefix = MODEL_ARRAYS
    model = arrays.get(item_table)
    if model is not None:
        rows = _drop_rows_of_model(rows, model)
    places = []
    for name, array in arrays.items():
        is_model = name == item_table or name.startswith(head_prefix)
        if not is_model and _contains_row(array, rows):
            places.append(name)
    return places


def _drop_rows_of_model(rows: AnyArray, model: AnyArray) -> AnyArray:
    """Rows that the new model does not have: one that it has is no trace."""
    if model.shape[1:] != rows.shape[1:]:
        return rows
    row_hashes = _hash_rows(np.ascontiguousarray(rows))
    model_hashes = _hash_rows(np.ascontiguousarray(model))
    is_shared = np.isin(row_hashes, model_hashes)
    return rows[~is_shared]


def _contains_row(array: AnyArray, rows: AnyArray) -> bool:
    """Whether one of the rows stands in the array, at a multiple of its width, in its precision or in the array's."""
    width = rows.shape[1] if rows.ndim == 2 else 0
    if width * rows.itemsize < MIN_BYTES:
        return False
    if array.dtype.kind != "f":
        return False
    if array.size == 0 or array.size % width:
        return False
    nonzero_rows = rows[rows.any(axis=1)]
    targets = np.ascontiguousarray(nonzero_rows.astype(array.dtype))
    if len(targets) == 0:
        return False
    flat = np.ascontiguousarray(array).reshape(-1, width)
    may_match = np.isin(_hash_rows(flat), _hash_rows(targets))
    target_bytes = {row.tobytes() for row in targets}
    candidates = flat[may_match]
    return any(row.tobytes() in target_bytes for row in candidates)


def _hash_rows(rows: AnyArray) -> Keys:
    """A number for every row, equal where rows are."""
    row_bytes = rows.shape[1] * rows.itemsize
    words = rows.view(np.uint8).reshape(len(rows), row_bytes)
    words = words.astype(np.uint64)
    exponents = np.arange(1, row_bytes + 1, dtype=np.uint64)
    factors = np.power(np.uint64(6364136223846793005), exponents)
    with np.errstate(over="ignore"):
        products = words * factors
        return np.asarray(products.sum(axis=1, dtype=np.uint64))


def _search_text(path: Path, needles: ScanTargets) -> list[str]:
    """Lines, or whole JSON files, that name a user together with an item that the user withdrew."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ["cannot be read as text"]
    pieces = text.splitlines() if path.suffix == ".jsonl" else [text]
    for user in needles.users.tolist():
        name = json.dumps(needles.names[user])
        removed = needles.removed.row(user)
        item_ids = [needles.items[item] for item in removed.tolist()]
        items = [json.dumps(item_id) for item_id in item_ids]
        for piece in pieces:
            names_item = any(item in piece for item in items)
            if name in piece and names_item:
                return ["a user's id beside an item's"]
    return []


def is_clean(traces: Traces, kinds: Sequence[str] = ("pairs", "people")) -> bool:
    return not any(traces[kind] for kind in kinds)
