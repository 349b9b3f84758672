"""The verbs that query a run: recommendations for its people, their reasons, and items that are alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import (
    AsJson,
    HowMany,
    Imports,
    RunArgument,
    RunOption,
    choose_run,
    import_modules,
    split_list,
    split_run_argument,
)
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.data.frames import Frame
    from tacita.runs.loaded_run import LoadedRun
    from tacita.runs.serving import Run

TableOut = Annotated[Path | None, typer.Option("--out", help="Write the table to a .parquet or .csv file.")]

MOST_ROWS = 1000  # that are printed for people


def recommend(
    folder: RunArgument = None,
    named: RunOption = None,
    user: Annotated[list[str] | None, typer.Option("--user", help="Raw user id; repeat for more.")] = None,
    all_users: Annotated[bool, typer.Option("--all", help="Everybody in the run.")] = False,
    history: Annotated[
        str | None,
        typer.Option("--history", metavar="A,B,...", help="Somebody the run never saw: items, oldest first."),
    ] = None,
    k: HowMany = 10,
    include_seen: Annotated[bool, typer.Option("--seen", help="Also items the user already knows.")] = False,
    exclude: Annotated[str, typer.Option(metavar="A,B,...", help="Items that nobody gets.")] = "",
    include: Annotated[str, typer.Option(metavar="A,B,...", help="Only these items.")] = "",
    why: Annotated[
        bool, typer.Option("--why", help="With --user: the user's own items that speak most for each.")
    ] = False,
    out: TableOut = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Top items for users of a run, for all of them, or for a history, with raw ids and titles.

    Examples:

    `tacita recommend runs/first --user 196 -k 10 --why`

    `tacita recommend runs/first --all --out recs.parquet`

    `tacita recommend runs/first --history 50,181,172 --exclude 1`
    """
    from tacita.data.frames import check_table_ending
    from tacita.runs import loaded_run, serving

    run = choose_run(folder, named, "tacita recommend runs/first --user 196")
    users = [text.strip() for text in user or ()]
    _check_audience(bool(users), all_users, history is not None)
    if why and (not users or out is not None):
        raise TacitaError("--why goes with --user, on the screen or as --json; leave it out for files and others.")
    if out is not None:
        check_table_ending(out)
    import_modules(imports)
    opened = serving.open_run(run)
    models = loaded_run.load_run(run)
    included = split_list(include) if include else None
    query = serving.build_query(models, k, include_seen, split_list(exclude), included)
    if history is not None:
        items = split_list(history)
        table = serving.fold_in_history(models, items, serving.count_rounds(opened.result), query)
        for line in serving.describe_unknown_items(models, items):
            console.print_note(f"Note: {line}")
        _write_or_print_table(table, out, as_json, "for somebody with this history")
    elif all_users or out is not None:
        selected = models.users if all_users else list(dict.fromkeys(users))
        if out is None and not as_json:
            _check_readable(len(selected) * k)
        table = serving.build_recommendations(models, selected, query)
        _write_or_print_table(table, out, as_json, f"for {len(selected):,} users")
    else:
        lists = serving.list_recommendations(models, users, query)
        if why:
            _add_all_reasons(models, lists)
        _show_users(lists, k, as_json)
    if not as_json:
        _print_privacy(opened, out)


def _add_all_reasons(models: LoadedRun, lists: dict[str, list[dict[str, Any]]]) -> None:
    from tacita.runs.explanation import add_reasons

    for user, items in lists.items():
        number = int(models.saved.find_user_numbers([user])[0])
        add_reasons(models, number, items)


def _check_audience(has_users: bool, all_users: bool, has_history: bool) -> None:
    """Recommendations are for named users, for all of them, or for a history."""
    audiences = {"--user": has_users, "--all": all_users, "--history": has_history}
    chosen = [name for name, is_chosen in audiences.items() if is_chosen]
    if len(chosen) == 1:
        return
    conflict = f", not {' and '.join(chosen)} together." if chosen else ""
    raise TacitaError(f"say for whom: either --user ID, --all, or --history ITEM,ITEM,...{conflict}")


def _check_readable(n_rows: int) -> None:
    if n_rows > MOST_ROWS:
        raise TacitaError(
            f"{n_rows:,} rows are too many to read; name a file, as in --out recs.parquet, or say --json."
        )


def _print_privacy(run: Run, out: Path | None) -> None:
    """What the run promises, beside the answer or as a note."""
    from tacita.report.promises import summarise_privacy

    sentence = summarise_privacy(run.config, run.result)
    if out is None:
        console.print_answer(sentence)
    else:
        console.print_note(sentence)


def similar(
    folder: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder.")] = None,
    word: Annotated[str | None, typer.Argument(metavar="ITEM", help="Raw item id.")] = None,
    named: RunOption = None,
    k: HowMany = 10,
    out: TableOut = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Items that are like one of them: for tally by its matrix, for other models by the cosine of item rows.

    Examples:

    `tacita similar runs/first 50 -k 5`

    `tacita similar --run runs/first 50`
    """
    from tacita.data.frames import check_table_ending
    from tacita.runs import loaded_run, serving

    run, item = split_run_argument(named, [folder, word], "tacita similar runs/first 50")
    if item is None:
        raise TacitaError("name the item, too, as in `tacita similar runs/first 50`.")
    import_modules(imports)
    item = item.strip()
    if out is not None:
        check_table_ending(out)
    opened = serving.open_run(run)
    table = serving.find_similar_items(loaded_run.load_run(run), item, k)
    is_empty = not table.height
    if is_empty and not as_json:
        has_budget = opened.config.privacy.epsilon is not None
        reason = "; under a budget only popular items are told of" if has_budget else ""
        console.print_answer(f"Nothing is known of what is like item {item}{reason}.")
    if not is_empty or as_json or out is not None:
        _write_or_print_table(table, out, as_json, f"like item {item}")
    if not as_json:
        _print_privacy(opened, out)


EFFECTS = (
    "effect: what the score loses without the item (basis 'left out'), or how alike two items are (basis 'alike')."
)


def explain(
    folder: RunArgument = None,
    named: RunOption = None,
    user: Annotated[str, typer.Option("--user", help="Raw user id.")] = "",
    item: Annotated[str, typer.Option("--item", help="Raw item id: why it suits the user.")] = "",
    k: Annotated[int, typer.Option("-k", min=1, help="How many reasons.")] = 5,
    out: TableOut = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """The items of a user that speak most for another.

    For tally an effect is what the score loses without that item. Other models cannot be taken apart: there it is only
    how much two items are alike.

    Examples:

    `tacita explain runs/first --user 196 --item 50`
    """
    from tacita.data.frames import check_table_ending
    from tacita.runs import serving

    run = choose_run(folder, named, "tacita explain runs/first --user 196 --item 50")
    if not user or not item:
        raise TacitaError("name both, as in `tacita explain runs/first --user 196 --item 50`.")
    if out is not None:
        check_table_ending(out)
    import_modules(imports)
    opened = serving.open_run(run)
    table = opened.explain(user.strip(), item.strip(), k)
    is_silent = not table.height and not as_json and out is None
    if is_silent:
        console.print_answer(f"User {user} has no items that could speak for item {item}.")
    else:
        _write_or_print_table(table, out, as_json, f"why item {item} for user {user}")
        if not as_json:
            console.print_note(EFFECTS)
    if not as_json:
        _print_privacy(opened, out)


def _show_users(recommendations: dict[str, list[dict[str, Any]]], k: int, as_json: bool) -> None:
    if as_json:
        console.print_json(recommendations)
        return
    for user, items in recommendations.items():
        result_tables.show_recommendations(user, items, k)


def _write_or_print_table(table: Frame, out: Path | None, as_json: bool, title: str) -> None:
    """Write a table to a file, or print it for people or machines."""
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
        result_tables.show_table(title, table.to_dicts(), ("user", "item", "title", "basis"))
