"""The verb that lists settings."""

from __future__ import annotations

from typing import Annotated

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import AsJson, Imports, import_modules


def settings(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A setting, a table, a backbone, a part or a method.")
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Every setting of runs, backbones and parts, with what it does and its default.

    Settings go to a TOML file or to --set; those of a backbone are set as backbone.NAME, those of a part in its entry
    of `parts`. Of a method: what it sets, and where each value comes from (its paper, tuning, us, a default).

    Examples:

    `tacita settings`

    `tacita settings train.participation`

    `tacita settings tally`

    `tacita settings fedshare`

    `tacita settings f3crec-paper`
    """
    from tacita.runs.settings_reference import find_settings

    import_modules(imports)
    matches = find_settings(key)
    if as_json:
        console.print_json([vars(setting) for setting in matches])
        return
    result_tables.show_settings(matches)
