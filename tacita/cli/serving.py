"""The verbs that ask a run: what its people get, and which of its items are alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, HowMany, RunOption, split_run_argument
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.data.frames import Frame

MOST_ROWS = 1000  # that are printed for people


def recommend(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: Annotated[list[str] | None, typer.Option("--user", help="Raw user id; repeat for more.")] = None,
    everybody: Annotated[bool, typer.Option("--all", help="Everybody in the run.")] = False,
    history: Annotated[
        str | None,
        typer.Option("--history", metavar="A,B,...", help="Somebody the run never saw: items, oldest first."),
    ] = None,
    k: HowMany = 10,
    seen: Annotated[bool, typer.Option("--seen", help="Also items the user already knows.")] = False,
    exclude: Annotated[str, typer.Option(metavar="A,B,...", help="Items that nobody gets.")] = "",
    include: Annotated[str, typer.Option(metavar="A,B,...", help="Only these items.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Write the table to a .parquet or .csv file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Top items for users of a run, for all of them, or for a history, with raw ids and titles.

    Examples:

    `tacita recommend --run runs/first --user 196 -k 10`

    `tacita recommend --run runs/first --all --out recs.parquet`

    `tacita recommend --run runs/first --history 50,181,172 --exclude 1`
    """
    from tacita.data.frames import check_ending
    from tacita.report.promises import summarise_privacy
    from tacita.runs import loaded_run, serving

    user = [one.strip() for one in user or ()]
    asked_for = {"--user": bool(user), "--all": everybody, "--history": history is not None}
    if sum(asked_for.values()) != 1:
        both = " and ".join(name for name, given in asked_for.items() if given)
        raise TacitaError(
            f"say for whom: either --user ID, --all, or --history ITEM,ITEM,...{f', not {both} together.' * bool(both)}"
        )
    if out is not None:
        check_ending(out)
    opened, models = serving.open_run(run), loaded_run.load_run(run)
    wish = serving.build_query(models, k, seen, _split_ids(exclude), _split_ids(include) if include else None)
    if history is not None:
        found = serving.fold_in_history(models, _split_ids(history), serving.count_rounds(opened.result), wish)
        for line in serving.describe_unknown_items(models, _split_ids(history)):
            console.print_note(f"Note: {line}")
        _output_table(found, out, as_json, "for somebody with this history")
    elif everybody or out is not None:
        asked = models.users if everybody else list(dict.fromkeys(user))
        if out is None and not as_json and len(asked) * k > MOST_ROWS:
            raise TacitaError(
                f"{len(asked) * k:,} rows are too many to read; name a file, as in --out recs.parquet, or say --json."
            )
        _output_table(serving.build_recommendations(models, asked, wish), out, as_json, f"for {len(asked):,} users")
    else:
        _show_users(serving.list_recommendations(models, user, wish), k, as_json)
    if not as_json:
        tell = console.print_answer if out is None else console.print_note
        tell(summarise_privacy(opened.config, opened.result))


def similar(
    folder: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder.")] = None,
    word: Annotated[str | None, typer.Argument(metavar="ITEM", help="Raw item id.")] = None,
    named: RunOption = None,
    k: HowMany = 10,
    out: Annotated[Path | None, typer.Option("--out", help="Write the table to a .parquet or .csv file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Items that are like one of them: for tally by its matrix, for other models by the cosine of item rows.

    Examples:

    `tacita similar runs/first 50 -k 5`

    `tacita similar --run runs/first 50`
    """
    from tacita.data.frames import check_ending
    from tacita.report.promises import summarise_privacy
    from tacita.runs import loaded_run, serving

    run, item = split_run_argument(named, [folder, word], "tacita similar runs/first 50")
    if item is None:
        raise TacitaError("name the item, too, as in `tacita similar runs/first 50`.")
    item = item.strip()
    if out is not None:
        check_ending(out)
    opened, models = serving.open_run(run), loaded_run.load_run(run)
    found = serving.find_similar_items(models, item, k)
    if not found.height and not as_json:
        why = "" if opened.config.privacy.epsilon is None else "; under a budget only popular items are told of"
        console.print_answer(f"Nothing is known of what is like item {item}{why}.")
    if found.height or as_json or out is not None:
        _output_table(found, out, as_json, f"like item {item}")
    if not as_json:
        tell = console.print_answer if out is None else console.print_note
        tell(summarise_privacy(opened.config, opened.result))


def _show_users(recommendations: dict[str, list[dict[str, Any]]], k: int, as_json: bool) -> None:
    if as_json:
        console.print_json(recommendations)
        return
    for one, items in recommendations.items():
        console.show_recommendations(one, items, k)


def _output_table(table: Frame, out: Path | None, as_json: bool, title: str) -> None:
    """A table into a file, or to people or machines."""
    from tacita.data.frames import has_formula_text, write_frame

    if out is not None:
        write_frame(table, out)
        console.print_note(f"wrote {table.height:,} rows to {out}")
        if out.suffix.lower() == ".csv" and has_formula_text(table):
            console.print_note(
                "Note: some ids or titles begin with =, +, - or @, which a spreadsheet computes; open the file as "
                "text, or write a .parquet."
            )
    if as_json:
        console.print_json(table.to_dicts())
    elif out is None:
        console.show_table(title, table.to_dicts(), ("user", "item", "title", "basis"))


def _split_ids(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]
