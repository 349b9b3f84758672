"""Verbs on data: list, get, describe, import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import (
    AsJson,
    Columns,
    DataDir,
    DateFormat,
    Decimal,
    DropMissing,
    check_decimal,
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
    from tacita.data.sources import load_interactions

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
    out: Annotated[Path, typer.Option(help="CSV file to write.")],
    columns: Columns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    drop_missing: DropMissing = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read any supported file and write it as a plain CSV with columns user, item, rating, timestamp, title.

    Example: `tacita data import ratings.dat --out clean.csv`
    """
    from tacita.data.sources import save_csv

    if out.exists():
        raise TacitaError(f"{out} exists; choose another --out.")
    with console.show_clock(f"reading {source}", quiet=as_json):
        table = _load(source, columns, date_format, decimal, drop_missing, data_dir)
        save_csv(table, out)
    if as_json:
        n_rows = len(table.user)
        console.print_json({"out": str(out), "rows": n_rows, "guessed": table.format_note, "notes": table.notes})
        return
    console.print_note("\n".join([table.format_note, *table.notes]))
    console.print_note(f"wrote {len(table.user):,} interactions to {out}")
