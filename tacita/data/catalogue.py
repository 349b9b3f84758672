"""The public list of items that a model is about, whoever has which of them.

A model has a row for every item. Where the list is made of the data, its length and order tell who has rare items. A
catalogue comes from elsewhere: a file, the item file beside the data, or data that was published as a whole. Items that
nobody has stay in it, and rows of items that are not in it are left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tacita.core.errors import TacitaError
from tacita.data.columns import read_items_with_titles
from tacita.data.datasets import DATASETS
from tacita.data.file_errors import unreadable_error
from tacita.data.interaction_table import Interactions, select_rows
from tacita.data.sources import is_synthetic
from tacita.data.synthetic import parse_synthetic_options

FROM_DATA = "from-data"  # the setting that accepts a list made of the data


class Catalogue(NamedTuple):
    """Raw item ids in an order that depends on nobody's data, where they are from, and titles."""

    item_ids: tuple[str, ...]
    origin: str
    titles: dict[str, str]


def find_catalogue(setting: str | None, source: str, table: Interactions) -> Catalogue | None:
    """The catalogue that a setting names, or the one that belongs to the data; None: there is none."""
    if setting == FROM_DATA:
        return None
    if setting is not None:
        return read_catalogue(Path(setting))
    if is_synthetic(source):
        n_items = parse_synthetic_options(source).items
        item_ids = tuple([f"i{number}" for number in range(n_items)])
        return Catalogue(item_ids, "the options of the synthetic data", {})
    if table.item_file is not None:
        return read_catalogue(table.item_file)
    if source in DATASETS:
        return Catalogue(tuple(sorted(table.item_ids)), f"{source} as published", table.titles)
    return None


def missing_catalogue_error(table: Interactions) -> TacitaError:
    return TacitaError(
        f"a model of {table.name} shows which items its people have, which no epsilon counts: name a public list of "
        "items with --set catalogue=FILE (one column of item ids), or accept it with --set catalogue=from-data."
    )


def read_catalogue(path: Path) -> Catalogue:
    """The items of a file, each once, in the order of the file."""
    try:
        items, _ = read_items_with_titles(path)
    except OSError as error:
        raise unreadable_error(path, error) from None
    item_ids = tuple([item for item, _ in items])
    titles = {item: title for item, title in items if title}
    return Catalogue(item_ids, path.name, titles)


def restrict_to_catalogue(table: Interactions, catalogue: Catalogue, only_public: bool = False) -> Interactions:
    """The table with the items of a catalogue, in its order; rows of other items are left out.

    `only_public`: titles are the catalogue's, because those of the table are what somebody's row says.
    """
    number_of = {item: number for number, item in enumerate(catalogue.item_ids)}
    numbers = np.array([number_of.get(item, -1) for item in table.item_ids], np.int32)
    item = numbers[table.item]
    is_listed = item >= 0
    if not is_listed.any():
        raise TacitaError(f"no item of {table.name} is in the catalogue {catalogue.origin}; check its column of ids.")
    rows = np.flatnonzero(is_listed)
    listed_ids = "\n".join(catalogue.item_ids)
    digest = hashlib.sha256(listed_ids.encode()).hexdigest()
    return replace(
        select_rows(table, rows),
        item=item[rows],
        item_ids=catalogue.item_ids,
        titles=catalogue.titles if only_public else {**catalogue.titles, **table.titles},
        notes=(*table.notes, _describe_catalogue(catalogue, len(table.user) - len(rows))),
        catalogue=digest,
    )


def _describe_catalogue(catalogue: Catalogue, n_left_out: int) -> str:
    note = f"catalogue: {len(catalogue.item_ids):,} items of {catalogue.origin}, whoever has them"
    if n_left_out:
        note += f"; {n_left_out:,} rows of other items are left out"
    return f"{note}."
