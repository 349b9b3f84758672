"""Loads all data: `load` takes a named dataset, any table file or folder, or synthetic data.

Every way to be wrong ends in one `TacitaError` that names the file and the line or column.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import polars as pl

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.data.columns import make_interactions
from tacita.data.datasets import DATASETS, DatasetInfo, cache_dir, fetch_dataset_folder, find_verified_file
from tacita.data.file_errors import file_error, unreadable_error
from tacita.data.frames import IN_MEMORY
from tacita.data.interaction_table import Interactions, compute_fingerprint, describe_interactions, number_by_appearance
from tacita.data.roles import normalise_roles
from tacita.data.row_by_row import read_interactions_row_by_row
from tacita.data.synthetic import generate_synthetic, parse_synthetic_options
from tacita.data.table_files import find_main_file, read_table
from tacita.data.values import FileHints

__all__ = [
    "DATASETS",
    "DatasetInfo",
    "Interactions",
    "cache_dir",
    "describe_interactions",
    "fetch_dataset_folder",
    "find_published_user_count",
    "is_synthetic",
    "load_interactions",
    "save_csv",
]


def load_interactions(
    source: str,
    *,
    data_dir: Path | None = None,
    columns: dict[str, str] | None = None,
    date_format: str | None = None,
    decimal: str | None = None,
    drop_missing: bool = False,
    row_by_row: bool = False,
) -> Interactions:
    """Interactions of a named dataset, of `synthetic:users=...`, or of a file or folder.

    `row_by_row`: under a budget, where one row of a file must not decide how others are read (row_by_row.py).
    """
    is_drawn = is_synthetic(source)
    is_file = not is_drawn and source not in DATASETS
    flags = {"--columns": columns, "--date-format": date_format, "--decimal": decimal}
    for flag, hint in flags.items():
        if hint and not is_file:
            raise TacitaError(f"{flag} is for files; '{source}' has columns that are known.")
    if source == IN_MEMORY:
        raise TacitaError(
            "the run learned from a table in memory, which is not kept; forgetting, sharing and audits read the data "
            "again, so write the table to a file and train a run on that."
        )
    if is_drawn:
        return _load_synthetic(source)
    if source in DATASETS:
        path = find_verified_file(source, data_dir)
        table = _load_file_or_folder(path, source, FileHints())
        if source == "ml-100k":
            table = _sort_by_time(table, path)
        return table
    path = Path(source)
    if not source or not _path_exists(path):
        raise _unknown_source_error(source)
    roles = normalise_roles(columns or {})
    hints = FileHints(roles, date_format, decimal, drop_missing, row_by_row)
    return _load_file_or_folder(path, _strip_suffixes(path), hints)


def find_published_user_count(source: str, table: Interactions) -> int | None:
    """How many people a source publishes, with data or without; None: a file says only who has data."""
    if is_synthetic(source):
        return parse_synthetic_options(source).users
    if source in DATASETS:
        return len(table.user_ids)
    return None


def is_synthetic(source: str) -> bool:
    return source == "synthetic" or source.startswith("synthetic:")


def save_csv(table: Interactions, out: Path) -> None:
    """Write a table as plain CSV with raw ids; `load` reads the same interactions back."""
    users = pl.Series(table.user_ids, dtype=pl.String)[table.user]
    items = pl.Series(table.item_ids, dtype=pl.String)[table.item]
    frame = pl.DataFrame({"user": users, "item": items})
    if table.rating is not None:
        frame = frame.with_columns(rating=table.rating)
    if table.timestamp is not None:
        name = "timestamp" if table.time_is_global else "position"
        frame = frame.with_columns(pl.Series(name, table.timestamp))
    if table.split is not None:
        parts = np.array(["train", "valid", "test"])
        frame = frame.with_columns(split=parts[table.split])
    if table.block is not None:
        frame = frame.with_columns(pl.Series("block", table.block))
    if table.titles:
        titles = items.replace_strict(table.titles, default=None)
        frame = frame.with_columns(title=titles)
    text = frame.write_csv()
    write_bytes(out, text.encode())


def _load_file_or_folder(path: Path, name: str, hints: FileHints) -> Interactions:
    """Interactions of a file, or of the one table in a folder."""
    try:
        file = find_main_file(path) if path.is_dir() else path
        if file is None:
            raise file_error(path, "the folder has no interactions file, or several", "name one file")
        if not file.is_file():
            raise file_error(path, "not a regular file", "save the data to a file first")
        if hints.row_by_row:
            return read_interactions_row_by_row(file, name, hints)
        return make_interactions(name, read_table(file, hints))
    except OSError as error:
        raise unreadable_error(path, error) from None


def _load_synthetic(source: str) -> Interactions:
    """Drawn interactions, with ids such as u17 and i5."""
    drawn = generate_synthetic(source)
    user, users = number_by_appearance(drawn.user)
    item, items = number_by_appearance(drawn.item)
    user_ids = tuple([f"u{number}" for number in users.tolist()])
    item_ids = tuple([f"i{number}" for number in items.tolist()])
    time = drawn.timestamp
    return Interactions(
        name=source,
        user=user,
        item=item,
        rating=None,
        timestamp=time,
        split=None,
        user_ids=user_ids,
        item_ids=item_ids,
        titles={},
        fingerprint=compute_fingerprint(user, item, None, time, None, user_ids, item_ids),
        format_note=f"{source}: drawn from a seed, nothing read.",
    )


def _sort_by_time(table: Interactions, path: Path) -> Interactions:
    """The rows of ml-100k by (timestamp, user, item), so that every copy gives the same numbering."""
    try:
        users = np.array(table.user_ids, np.int64)
        items = np.array(table.item_ids, np.int64)
    except (ValueError, OverflowError):
        raise TacitaError(f"{path}: the ids of ml-100k are whole numbers; copy the file again.") from None
    if table.timestamp is None or table.rating is None:
        raise TacitaError(f"{path}: ml-100k has ratings and timestamps; copy the file again.")
    order = np.lexsort((items[table.item], users[table.user], table.timestamp))
    user, user_codes = number_by_appearance(table.user[order])
    item, item_codes = number_by_appearance(table.item[order])
    user_ids = tuple([table.user_ids[code] for code in user_codes])
    item_ids = tuple([table.item_ids[code] for code in item_codes])
    rating = table.rating[order]
    time = table.timestamp[order]
    return replace(
        table,
        user=user,
        item=item,
        rating=rating,
        timestamp=time,
        user_ids=user_ids,
        item_ids=item_ids,
        fingerprint=compute_fingerprint(user, item, rating, time, None, user_ids, item_ids),
    )


def _path_exists(path: Path) -> bool:
    """Whether the path exists; a name that no file can have does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _unknown_source_error(source: str) -> TacitaError:
    near = get_close_matches(source, DATASETS, n=1)
    if near:
        hint = f"did you mean '{near[0]}'?"
    else:
        hint = "check the path, or see 'tacita data list'."
    return TacitaError(f"{source[:200]!r} is neither a file nor a named dataset; {hint}")


def _strip_suffixes(path: Path) -> str:
    """The file's name without its endings."""
    name = path.resolve().name
    if path.is_dir():
        return name
    return Path(name.removesuffix(".gz")).stem
