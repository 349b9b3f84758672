"""The verb that lists what there is to learn with."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import AsJson, Imports, import_modules


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One method, with all that is known of it.")
    ] = None,
    imports: Imports = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print everything as tables of Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """The methods there are: family, paper, what each promises and costs, whether live can.

    Examples:

    `tacita methods`

    `tacita methods f3crec`

    `tacita methods --import my_method.py`
    """
    from tacita.runs.method_reference import build_method_reference, list_methods, render_methods_page

    import_modules(imports)
    if name is not None:
        method = build_method_reference(name)
        if as_json:
            console.print_json(asdict(method))
            return
        result_tables.show_facts(asdict(method))
        console.print_note(
            f"Train it with `tacita train --method {name}`; `tacita settings {name}` lists its settings."
        )
        return
    listed = list_methods()
    if as_json:
        console.print_json([asdict(method) for method in listed])
        return
    if markdown:
        print(render_methods_page(listed))
        return
    rows = [method.to_row() for method in listed]
    result_tables.show_table("methods (--method)", rows, left_aligned=("method", "family", "about"))
    console.print_note("Without a method or backbone, `tacita train` takes the form of tally that fits the data best.")
    console.print_note("More of one: `tacita methods NAME`.")
