"""Share a large file out over shards: one streaming pass over its rows, then every shard is split by itself.

What is in memory at once is a batch of rows, one shard, and the list of all items. So everybody's rows are split by
themselves, and nothing that needs all rows at once (time blocks of equal size, a k-core) is offered.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl

from tacita.core.config import SplitConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, read_arrays, write_arrays, write_json
from tacita.core.types import AnyArray, Block, BlockStream, Longs, Ragged
from tacita.data.block_cuts import PER_PERSON_NOTE, isolate_people_in_split
from tacita.data.catalogue import Catalogue, restrict_to_catalogue
from tacita.data.columns import make_interactions
from tacita.data.file_errors import file_error, unreadable_error
from tacita.data.shards.folder import (
    COLUMN_TYPES,
    FORMAT,
    ITEMS,
    LISTING,
    LOW_RATED,
    ROLES,
    USER_KEYS,
    USERS,
    BlockSizes,
    ListSizes,
    ShardListing,
    name_array,
    name_lists,
)
from tacita.data.shards.placement import assign_places, order_shards
from tacita.data.shards.row_batches import RowBatches, open_batches
from tacita.data.splits import resolve_split, split
from tacita.data.table_files import RawTable, find_main_file, make_raw_table
from tacita.data.values import FileHints

MOST_SHARDS = 4096
OWN_ROWS_NOTE = (
    "blocks: every person's own rows are cut into the blocks, because shards are split one by one; "
    "split.borders = ['2020-01-01', ...] cuts by dates."
)
OnBatch = Callable[[int], None]
"""Called with the rows that were read so far."""


def import_shards(
    source: Path, out: Path, n_shards: int, settings: SplitConfig, hints: FileHints, on_batch: OnBatch | None = None
) -> ShardListing:
    """Write a folder of shards that `tacita train --data` reads; whole or not at all."""
    _refuse_joint_split(settings)
    if not 1 <= n_shards <= MOST_SHARDS:
        raise TacitaError(f"--shards {n_shards}: choose 1 to {MOST_SHARDS}.")
    if out.exists() or out.is_symlink():
        raise TacitaError(f"{out} exists; choose another --out.")
    file = find_main_file(source) if source.is_dir() else source
    if file is None or not file.is_file():
        raise TacitaError(f"{source} is neither a file nor a folder with one table; check the path.")
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise disk_error(out, error) from None
    try:
        batches = _open_source(file, hints)
        stage = unfinished / "stage"
        stage.mkdir()
        staged = _stage_rows(batches, stage, n_shards, on_batch)
        listing = _write_shards(staged, unfinished, settings, hints)
        shutil.rmtree(stage)
        unfinished.chmod(0o755)
        unfinished.rename(out)
    except OSError as error:
        raise disk_error(out, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return listing


def _open_source(file: Path, hints: FileHints) -> RowBatches:
    try:
        batches = open_batches(file, hints)
    except OSError as error:
        raise unreadable_error(file, error) from None
    if "block" in batches.columns:
        raise file_error(file, "rows name their blocks", "leave that column out with --columns block=-")
    return batches


def _refuse_joint_split(settings: SplitConfig) -> None:
    """Refuse what would need everybody's rows at once."""
    joint = None
    if settings.k_core is not None and settings.k_core > 1:
        joint = f"split.k_core = {settings.k_core}"
    elif settings.kind == "global-random":
        joint = "split.kind = 'global-random'"
    elif settings.borders == "quantile":
        joint = "split.borders = 'quantile'"
    if joint:
        raise TacitaError(
            f"{joint} needs all rows at once, and shards are split person by person; leave it out (split.min_user, "
            "split.kind = 'random' and split.borders = 'person' or dates go)."
        )


# Rows to the shards of their people


@dataclass
class _StagedRows:
    """Rows by shard, still as they were written."""

    batches: RowBatches
    stage: Path
    n_shards: int
    n_rows: int = 0
    item_numbers: dict[str, int] = field(default_factory=dict)  # every raw id, in order of appearance

    def read_shard(self, shard: int, hints: FileHints) -> RawTable:
        """The rows of a shard, those of each person in the order of the file."""
        pieces = sorted(self.stage.glob(f"rows-*-{shard}.parquet"))
        if not pieces:
            raise TacitaError(f"shard {shard} of {self.n_shards} has no people; use fewer --shards.")
        frame = _read_pieces(pieces)
        chosen = dict.fromkeys(("rating", "timestamp", "title", "split"), "-") | self.batches.columns
        own_hints = FileHints(chosen, hints.date_format, hints.decimal, hints.drop_missing)
        path = self.batches.path.with_name(f"{self.batches.path.name}, shard {shard}")
        return make_raw_table(path, self.batches.kind, frame, own_hints)


def _stage_rows(batches: RowBatches, stage: Path, n_shards: int, on_batch: OnBatch | None) -> _StagedRows:
    """The streaming pass, and a second one over what it wrote: every row goes to the shard of its person.

    A person's shard follows a key that takes microseconds. So people are gathered first, and each key is made once.
    """
    staged = _StagedRows(batches, stage, n_shards)
    item = batches.columns["item"]
    for number, raw_batch in enumerate(batches):
        batch = _normalise_ids(raw_batch, (batches.columns["user"], item))
        for raw_id in batch[item].drop_nulls().unique(maintain_order=True):
            staged.item_numbers.setdefault(raw_id, len(staged.item_numbers))
        _write_groups(batch, _gather_people(staged, batch), stage, f"people-{number:06}")
        staged.n_rows += batch.height
        if on_batch:
            on_batch(staged.n_rows)
    if not staged.n_rows:
        raise file_error(batches.path, "a header but no rows", "give a file that has interactions in it")
    for gathered in range(n_shards):
        pieces = sorted(stage.glob(f"people-*-{gathered}.parquet"))
        if pieces:
            rows = _read_pieces(pieces)
            _write_groups(rows, _assign_rows(rows[batches.columns["user"]], n_shards), stage, f"rows-{gathered:06}")
        for piece in pieces:
            piece.unlink()
    return staged


def _gather_people(staged: _StagedRows, batch: pl.DataFrame) -> pl.Series:
    """A number for each row that is the same for all rows of a person, by any quick hash."""
    hashes = batch[staged.batches.columns["user"]].hash(0)
    return (hashes % staged.n_shards).cast(pl.Int32)


def _write_groups(rows: pl.DataFrame, group: pl.Series, stage: Path, name: str) -> None:
    """The rows of each group to a file of its own, in their order."""
    grouped = rows.with_columns(group.alias("_group"))
    for (number,), own_rows in grouped.partition_by("_group", as_dict=True, include_key=False).items():
        own_rows.write_parquet(stage / f"{name}-{number}.parquet", compression="lz4")


def _read_pieces(pieces: Sequence[Path]) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(piece, glob=False) for piece in pieces])


def _normalise_ids(batch: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Ids as text, each by itself, as other batches hold others: whole numbers without a point, null for nothing."""
    texts = []
    for name in columns:
        ids = pl.col(name)
        text = ids.cast(pl.String).str.strip_chars()
        if batch.schema[name].is_float():
            whole = ids.cast(pl.Int64, strict=False)
            is_whole = whole.cast(pl.Float64) == ids
            text = pl.when(is_whole).then(whole.cast(pl.String)).when(ids.is_not_nan()).then(text)
        texts.append(pl.when(text != "").then(text).alias(name))
    return batch.with_columns(texts)


def _assign_rows(users: pl.Series, n_shards: int) -> pl.Series:
    """The shard of each row; a row without a person goes to the first, which reports it."""
    distinct = users.drop_nulls().unique(maintain_order=True)
    shards = assign_places(derive_keys(distinct), n_shards)
    shard_of = users.replace_strict(distinct, pl.Series(shards), default=0, return_dtype=pl.Int32)
    return shard_of.fill_null(0)


# Shards to one folder


@dataclass(frozen=True)
class _SplitShard:
    """A shard that was split; its lists are on disk."""

    folder: Path
    stream: BlockStream  # with empty lists

    def list_first_users(self) -> list[int]:
        """Where the people of each block begin, and one more entry: how many there are."""
        return [0, *(block.n_users for block in self.stream.blocks)]


def _write_shards(staged: _StagedRows, out: Path, settings: SplitConfig, hints: FileHints) -> ShardListing:
    catalogue = Catalogue(tuple(staged.item_numbers), staged.batches.path.name, {})
    titles: dict[str, str] = {}
    shards = []
    n_dropped = 0
    resolved = settings
    for shard in order_shards(staged.n_shards):
        raw_table = staged.read_shard(shard, hints)
        table = make_interactions(staged.batches.path.name.split(".")[0], raw_table)
        n_dropped += raw_table.frame.height - len(table.user)
        titles |= {item: title for item, title in table.titles.items() if item not in titles}
        table = restrict_to_catalogue(table, catalogue)
        resolved = isolate_people_in_split(resolve_split(table, settings))
        if resolved.kind == "blocks" and resolved.n_blocks > 1 and resolved.borders == "auto":
            resolved = resolved.model_copy(update={"borders": "person"})
        shards.append(_store_shard(split(table, resolved), staged.stage / f"split-{shard}"))
    _write_ids(out, shards, staged, titles)
    blocks = [_merge_block(out, shards, index) for index in range(len(shards[0].stream.blocks))]
    low_rated = None
    if shards[0].stream.low_rated is not None:
        low_rated = _merge_lists(out / LOW_RATED, shards, len(blocks) - 1, lambda shard: shard.folder / LOW_RATED)
    sources = "\n".join(shard.stream.source for shard in shards)
    fingerprints = "\n".join(shard.stream.fingerprint for shard in shards)
    listing = ShardListing(
        format=FORMAT,
        name=shards[0].stream.name,
        fingerprint=_digest(fingerprints),
        source=_digest(sources),
        shards=staged.n_shards,
        users=sum(shard.stream.n_users for shard in shards),
        items=len(catalogue.item_ids),
        split=resolved,
        blocks=blocks,
        low_rated=low_rated,
        notes=_list_notes(staged, shards, n_dropped),
    )
    write_json(out / LISTING, listing.model_dump(mode="json"))
    return listing


def _list_notes(staged: _StagedRows, shards: Sequence[_SplitShard], n_dropped: int) -> list[str]:
    columns = ", ".join(f"{role}={name}" for role, name in staged.batches.columns.items())
    notes = [f"{staged.batches.path.name}: {staged.batches.kind}; {columns}; {staged.n_shards} shards."]
    if n_dropped:
        notes.append(f"{n_dropped:,} rows that lack a value were left out.")
    for note in shards[0].stream.notes:
        is_everywhere = all(note in shard.stream.notes for shard in shards[1:])
        if note == PER_PERSON_NOTE:
            notes.append(OWN_ROWS_NOTE)
        elif is_everywhere and not note.startswith(("catalogue:", staged.batches.path.name)):
            notes.append(note.replace("tacita train --set", "tacita data import --set"))
    return notes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _store_shard(stream: BlockStream, folder: Path) -> _SplitShard:
    """Put the lists of a shard on disk until all are merged."""
    folder.mkdir()
    blocks = []
    for block in stream.blocks:
        for role in ROLES:
            _store_lists(name_lists(folder, block.index, role), getattr(block, role))
        blocks.append(_without_lists(block))
    low_rated = stream.low_rated
    if low_rated is not None:
        missing = np.full(stream.n_users - len(low_rated), low_rated.ptr[-1])
        whole = Ragged(np.concatenate([low_rated.ptr, missing]), low_rated.ids, low_rated.values)
        _store_lists(folder / LOW_RATED, whole)
        low_rated = Ragged.empty(0)
    keys_alone = BlockStream(
        name=stream.name,
        blocks=tuple(blocks),
        user_ids=stream.user_ids,
        item_ids=(),
        user_keys=stream.user_keys,
        item_keys=np.zeros(0, np.uint64),
        titles={},
        fingerprint=stream.fingerprint,
        source=stream.source,
        notes=stream.notes,
        low_rated=low_rated,
    )
    return _SplitShard(folder, keys_alone)


def _without_lists(block: Block) -> Block:
    empty = Ragged.empty(0)
    return Block(block.index, block.n_users, block.n_items, empty, empty, empty, block.new_users, block.n_rows)


def _store_lists(path: Path, lists: Ragged) -> None:
    write_arrays(path, {"ptr": lists.ptr, "ids": lists.ids, **lists.values})


def _load_lists(path: Path) -> Ragged:
    arrays, _ = read_arrays(path)
    return Ragged(arrays.pop("ptr"), arrays.pop("ids"), arrays)


def _iterate_people(shards: Sequence[_SplitShard], n_blocks: int) -> Iterator[tuple[_SplitShard, int, int]]:
    """The people of some blocks in the order of their numbers: by first block, then shard, then place there."""
    for first_block in range(n_blocks):
        for shard in shards:
            borders = shard.list_first_users()
            yield shard, borders[first_block], borders[first_block + 1]


def _write_ids(out: Path, shards: Sequence[_SplitShard], staged: _StagedRows, titles: dict[str, str]) -> None:
    n_blocks = len(shards[0].stream.blocks)
    columns = []
    with (out / USER_KEYS).open("wb") as keys:
        for shard, start, end in _iterate_people(shards, n_blocks):
            columns.append(pl.Series(shard.stream.user_ids[start:end], dtype=pl.String))
            _append_array(keys, shard.stream.user_keys[start:end].astype("<u8"))
    pl.DataFrame({"user": pl.concat(columns)}).write_parquet(out / USERS)
    item_titles = [titles.get(item) for item in staged.item_numbers]
    items = pl.DataFrame(
        {
            "item": pl.Series(list(staged.item_numbers), dtype=pl.String),
            "title": pl.Series(item_titles, dtype=pl.String),
        }
    )
    items.write_parquet(out / ITEMS)


def _merge_block(out: Path, shards: Sequence[_SplitShard], index: int) -> BlockSizes:
    lists = {}
    for role in ROLES:
        lists[role] = _merge_lists(
            name_lists(out, index, role),
            shards,
            index,
            lambda shard, role=role: name_lists(shard.folder, index, role),  # type: ignore[misc]
        )
    blocks = [shard.stream.blocks[index] for shard in shards]
    return BlockSizes(
        users=sum(block.n_users for block in blocks), rows=sum(block.n_rows for block in blocks), lists=lists
    )


def _merge_lists(
    path: Path, shards: Sequence[_SplitShard], block: int, find_lists: Callable[[_SplitShard], Path]
) -> ListSizes:
    """Append the lists of all people, in the order of their numbers, to one file for each array."""
    names = list(_load_lists(find_lists(shards[0])).values)
    counts: list[Longs] = []
    n_entries = 0
    files = {name: name_array(path, name).open("wb") for name in ("ids", *names)}
    try:
        for shard, start, end in _iterate_people(shards, block + 1):
            lists = _load_lists(find_lists(shard))
            first = lists.ptr[start]
            last = lists.ptr[end]
            counts.append(np.diff(lists.ptr[start : end + 1]))
            _append_array(files["ids"], lists.ids[first:last].astype("<i4"))
            for name in names:
                _append_array(files[name], lists.values[name][first:last].astype(COLUMN_TYPES[name]))
            n_entries += int(last - first)
    finally:
        for file in files.values():
            file.close()
    ptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    with name_array(path, "ptr").open("wb") as file:
        _append_array(file, ptr.astype("<i8"))
    return ListSizes(entries=n_entries, columns=names)


def _append_array(file: BinaryIO, array: AnyArray) -> None:
    file.write(np.ascontiguousarray(array).data)
