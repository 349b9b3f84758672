"""Verbs on data: list, get, describe, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import (
    AsJson,
    Columns,
    DataDir,
    DateFormat,
    Decimal,
    DropMissing,
    Quiet,
    Sets,
    check_decimal,
    merge_settings,
    parse_columns,
)
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.data.interaction_table import Interactions

app = typer.Typer(no_args_is_help=True, help="Datasets: list, get, describe, import.")

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A file, folder, dataset name or synthetic:...")]


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """The datasets known by name.

    Example: `tacita data list`
    """
    from tacita.data.datasets import DATASETS

    if as_json:
        console.print_json({name: vars(info) for name, info in DATASETS.items()})
    else:
        result_tables.show_datasets(DATASETS)


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Fetch a dataset, or find it in --data-dir, and check it.

    Example: `tacita data get ml-100k`
    """
    from tacita.data.sources import fetch_dataset_folder

    with console.show_clock(f"getting {name}", quiet=as_json):
        folder = fetch_dataset_folder(name, data_dir=data_dir)
    if as_json:
        console.print_json({"name": name, "folder": str(folder)})
        return
    console.print_note(f"{name} is ready in {folder}")


def _load(
    source: str, columns: str, date_format: str | None, decimal: str | None, drop_missing: bool, data_dir: Path | None
) -> Interactions:
    from tacita.data.shards.folder import refuse_shard_folder
    from tacita.data.sources import load_interactions

    refuse_shard_folder(source)
    roles = parse_columns(columns) or None
    return load_interactions(
        source,
        data_dir=data_dir,
        columns=roles,
        date_format=date_format,
        decimal=check_decimal(decimal),
        drop_missing=drop_missing,
    )


@app.command("describe")
def data_describe(
    source: Source,
    columns: Columns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    drop_missing: DropMissing = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """What is in a file, folder or named dataset, and what was guessed about its columns.

    Examples:

    `tacita data describe my.csv`

    `tacita data describe my.csv --columns user=customer,time=-`

    `tacita data describe my.csv --date-format "%d.%m.%Y"`
    """
    from tacita.data.sources import describe_interactions

    with console.show_clock(f"reading {source}", quiet=as_json):
        table = _load(source, columns, date_format, decimal, drop_missing, data_dir)
    facts = {"name": table.name, "guessed": table.format_note, **describe_interactions(table)}
    if as_json:
        console.print_json(facts)
        return
    dates = facts.pop("dates")
    notes = cast(list[str], facts.pop("notes"))
    for key in ("columns", "unused columns"):  # the sentence about the guess has them
        facts.pop(key, None)
    result_tables.show_facts({**facts, "time range": dates or facts["time range"]})
    for note in notes:
        console.print_note(note)


@app.command("import")
def data_import(
    source: Source,
    out: Annotated[Path, typer.Option(help="CSV file to write; with --shards a folder.")],
    shards: Annotated[
        int, typer.Option(min=0, help="Split people over so many shards, for data past memory; 0: write a CSV.")
    ] = 0,
    columns: Columns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    drop_missing: DropMissing = False,
    sets: Sets = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Read any supported file and write it as a plain CSV with columns user, item, rating, timestamp, title.

    With --shards, read it once in pieces and write a folder that training maps instead of loading; rows are split
    then, by the settings of --set split.

    Examples:

    `tacita data import ratings.dat --out clean.csv`

    `tacita data import clicks.parquet --shards 16 --out clicks`

    `tacita data import clicks.csv --shards 16 --set split.kind=leave-one-out --out clicks`
    """
    from tacita.data.sources import save_csv

    if shards:
        hints = FileHintArguments(columns, date_format, check_decimal(decimal), drop_missing)
        _import_shards(Path(source), out, shards, hints, sets or [], as_json, quiet)
        return
    if sets:
        raise TacitaError("--set is for --shards, which split rows when they are read; leave it out.")
    if out.exists():
        raise TacitaError(f"{out} exists; choose another --out.")
    with console.show_clock(f"reading {source}", quiet=as_json or quiet):
        table = _load(source, columns, date_format, decimal, drop_missing, data_dir)
        save_csv(table, out)
    if as_json:
        n_rows = len(table.user)
        console.print_json({"out": str(out), "rows": n_rows, "guessed": table.format_note, "notes": table.notes})
        return
    console.print_note("\n".join([table.format_note, *table.notes]))
    console.print_note(f"wrote {len(table.user):,} interactions to {out}")


class FileHintArguments(NamedTuple):
    """What the command line says of a file."""

    columns: str
    date_format: str | None
    decimal: str | None
    drop_missing: bool


def _import_shards(
    source: Path, out: Path, n_shards: int, arguments: FileHintArguments, sets: list[str], as_json: bool, quiet: bool
) -> None:
    """Write a folder of shards, and say what is in it."""
    from tacita.core.config import SplitConfig, validate_model
    from tacita.data.roles import normalise_roles
    from tacita.data.shards.shard_import import import_shards
    from tacita.data.values import FileHints

    values = merge_settings(None, {}, sets)
    others = values.keys() - {"split"}
    if others:
        raise TacitaError(
            f"--set {min(others)}: only settings of the split are for an import; say the others to train."
        )
    settings = validate_model(SplitConfig, values.get("split", {}), "--set split")
    roles = normalise_roles(parse_columns(arguments.columns))
    hints = FileHints(roles, arguments.date_format, arguments.decimal, arguments.drop_missing)
    with console.show_clock(f"reading {source}", quiet=as_json or quiet):
        listing = import_shards(source, out, n_shards, settings, hints)
    if as_json:
        console.print_json({"out": str(out), **listing.model_dump(mode="json")})
        return
    console.print_note("\n".join(listing.notes))
    console.print_note(
        f"wrote {listing.shards} shards of {listing.users:,} people and {listing.items:,} items to {out}; "
        f"try `tacita train --data {out} --backbone mf --ranks 2`"
    )
