"""A folder of shards: interactions that were split already, in arrays that are mapped and not read into memory.

shards.json says what the folder holds; every array is a file of plain numbers whose type and length stand there.
Nothing in the folder is executed when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from tacita.core.config import SplitConfig, StrictModel, validate_model
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import read_json
from tacita.core.ragged import are_borders
from tacita.core.types import AnyArray, Arrays, Block, BlockStream, Ragged
from tacita.data.delimited_text import POLARS_ERRORS
from tacita.data.shards.stored_ids import StoredIds

FORMAT = "tacita-shards/1"
LISTING = "shards.json"
ROLES = ("train", "valid", "test")
LOW_RATED = "low-rated"
USERS = "users.parquet"
ITEMS = "items.parquet"
USER_KEYS = "user-keys.bin"
COLUMN_TYPES: dict[str, np.dtype[Any]] = {"time": np.dtype("<i8"), "rating": np.dtype("<f4")}
_POINTERS = np.dtype("<i8")
_NUMBERS = np.dtype("<i4")
_KEYS = np.dtype("<u8")


class ListSizes(StrictModel):
    """Lists of items of some users."""

    entries: int = Field(ge=0)
    columns: list[str]  # beside the items


class BlockSizes(StrictModel):
    """A block of the stream."""

    users: int = Field(ge=0)
    rows: int = Field(ge=0)
    lists: dict[str, ListSizes]  # by role


class ShardListing(StrictModel):
    """What shards.json says."""

    format: str
    name: str
    fingerprint: str
    source: str
    shards: int = Field(ge=1)
    users: int = Field(ge=2)
    items: int = Field(ge=2)
    split: SplitConfig
    blocks: list[BlockSizes]
    low_rated: ListSizes | None = None
    notes: list[str]


def is_shard_folder(source: str) -> bool:
    """Whether a source is a folder that `tacita data import --shards` wrote."""
    try:
        return bool(source) and (Path(source) / LISTING).is_file()
    except (OSError, ValueError):
        return False


def refuse_shard_folder(source: str) -> None:
    """For what needs the rows themselves."""
    if is_shard_folder(source):
        raise TacitaError(
            f"{source} holds shards, which only runs read that name a model: use `tacita train --data {source} "
            "--backbone tally`, or --method fedavg."
        )


def read_listing(folder: Path) -> ShardListing:
    raw: Any = read_json(folder / LISTING)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise TacitaError(f"{folder} holds shards of another version of tacita; import the data again.")
    listing = validate_model(ShardListing, raw, str(folder / LISTING))
    texts = [listing.name, listing.fingerprint, listing.source, *listing.notes]
    if not all(_is_text(text) for text in texts):
        raise _damage_error(folder, f"{LISTING} holds half a character")
    return listing


def _is_text(text: str) -> bool:
    """Whether a text of JSON can be written in UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def open_shards(folder: Path) -> BlockStream:
    """The stream of a folder; its lists stay on disk until they are used."""
    listing = read_listing(folder)
    users = _read_ids(folder / USERS, ("user",), listing.users)
    items = _read_ids(folder / ITEMS, ("item", "title"), listing.items)
    item_ids = tuple(items["item"].to_list())
    titled = items.drop_nulls("title")
    blocks = []
    n_known = 0
    for index, sizes in enumerate(listing.blocks):
        if sizes.users < n_known:
            raise _damage_error(folder, f"block {index} has fewer users than the one before")
        blocks.append(_open_block(folder, listing, index, n_known))
        n_known = sizes.users
    if n_known != listing.users:
        raise _damage_error(folder, "the last block has not all users")
    low_rated = None
    if listing.low_rated is not None:
        low_rated = _map_lists(folder / LOW_RATED, listing.users, listing.items, listing.low_rated)
    return BlockStream(
        name=listing.name,
        blocks=tuple(blocks),
        user_ids=StoredIds(users["user"]),
        item_ids=item_ids,
        user_keys=np.array(_map_array(folder / USER_KEYS, _KEYS, listing.users)),
        item_keys=derive_keys(item_ids),
        titles=dict(zip(titled["item"].to_list(), titled["title"].to_list())),
        fingerprint=listing.fingerprint,
        source=listing.source,
        notes=tuple(listing.notes),
        low_rated=low_rated,
    )


def _open_block(folder: Path, listing: ShardListing, index: int, n_known: int) -> Block:
    sizes = listing.blocks[index]
    if sizes.lists.keys() != set(ROLES):
        raise _damage_error(folder, f"block {index} has not the lists {', '.join(ROLES)}")
    lists = {}
    for role in ROLES:
        lists[role] = _map_lists(name_lists(folder, index, role), sizes.users, listing.items, sizes.lists[role])
    is_new = np.arange(sizes.users) >= n_known
    return Block(index, sizes.users, listing.items, **lists, new_users=is_new, n_rows=sizes.rows)


def name_lists(folder: Path, block: int, role: str) -> Path:
    """Where the lists of a block and role are; each of their arrays adds its own ending."""
    return folder / f"block-{block}-{role}"


def name_array(lists: Path, array: str) -> Path:
    return lists.with_name(f"{lists.name}-{array}.bin")


def _map_lists(path: Path, n_rows: int, n_items: int, sizes: ListSizes) -> Ragged:
    """Lists on disk, checked: a number out of range would be read outside of an array later."""
    ptr = _map_array(name_array(path, "ptr"), _POINTERS, n_rows + 1)
    ids = _map_array(name_array(path, "ids"), _NUMBERS, sizes.entries)
    if not are_borders(ptr, len(ids)):
        raise _damage_error(path.parent, f"the lists of {path.name} do not fit their items")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= n_items):
        raise _damage_error(path.parent, f"{path.name} names an item that there is not")
    columns: Arrays = {}
    for name in sizes.columns:
        if name not in COLUMN_TYPES:
            raise _damage_error(path.parent, f"{path.name} has an unknown column")
        columns[name] = _map_array(name_array(path, name), COLUMN_TYPES[name], sizes.entries)
    return Ragged(ptr, ids, columns)


def _map_array(path: Path, kind: np.dtype[Any], length: int) -> AnyArray:
    """An array of plain numbers, of which the system reads what is used."""
    try:
        size = path.stat().st_size
        if size != length * kind.itemsize:
            raise _damage_error(path.parent, f"{path.name} has {size:,} bytes instead of {length * kind.itemsize:,}")
        if not length:
            return np.zeros(0, kind)
        return np.asarray(np.memmap(path, kind, mode="r", shape=(length,)))
    except OSError as error:
        raise TacitaError(f"cannot read {path}: {error.strerror or error}; import the data again.") from None


def _read_ids(path: Path, columns: Sequence[str], length: int) -> pl.DataFrame:
    """A table of texts whose first column is an id, each once."""
    if not path.is_file():  # a pipe would be waited for
        raise _damage_error(path.parent, f"{path.name} is no file")
    try:
        frame = pl.read_parquet(path, glob=False)
    except (*POLARS_ERRORS, OSError):
        raise _damage_error(path.parent, f"{path.name} cannot be read") from None
    if any(frame.schema.get(column) != pl.String for column in columns):
        raise _damage_error(path.parent, f"{path.name} has not the columns {', '.join(columns)}, all of them texts")
    ids = frame[columns[0]]
    is_whole = len(ids) == length and not ids.null_count() and ids.n_unique() == length and (ids != "").all()
    if not is_whole:
        raise _damage_error(path.parent, f"{path.name} has not {length:,} ids, each once")
    return frame


def _damage_error(folder: Path, problem: str) -> TacitaError:
    return TacitaError(f"{folder}: {problem}; import the data again with `tacita data import --shards`.")
