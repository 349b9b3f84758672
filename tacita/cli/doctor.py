"""The verb that checks the installation."""

from __future__ import annotations

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import AsJson, DataDir


def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Check the installation and say what is missing.

    Example: `tacita doctor`
    """
    from tacita.doctor import check_installation

    checks = check_installation(data_dir)
    if as_json:
        console.print_json(checks)
    else:
        result_tables.show_checks(checks)
    if any(check["state"] == "fails" for check in checks):
        raise typer.Exit(1)
