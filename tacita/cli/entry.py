"""The program: its verbs put together, and every error as a single sentence."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Annotated, Any

import typer

from tacita import __version__
from tacita.cli import (
    audit,
    bench,
    data,
    demo,
    doctor,
    experiments,
    methods,
    node,
    privacy,
    serve,
    server,
    serving,
    settings,
    train,
)
from tacita.core.errors import DiskFull, TacitaError, make_printable

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="**tacita** recommends without collecting: histories stay on people's devices.",
    epilog="Start with `tacita demo`, or with your own file: `tacita data describe my.csv`.",
)
USE = "Train and recommend"
LOOK_UP = "Look up"
PEOPLE = "What people decide, and what it cost them"
STUDY = "Study"
LIVE = "Between machines"
VERBS = {
    USE: (train.train, serving.recommend, serving.similar, serving.explain, serve.serve, train.report, demo.demo),
    LOOK_UP: (methods.methods, settings.settings, doctor.doctor),
    PEOPLE: (privacy.share, privacy.unshare, privacy.forget, privacy.ledger),
    STUDY: (experiments.reproduce, experiments.tune),
}
"""Panel of the help -> its verbs."""
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(rich_help_panel=panel)(verb)
app.add_typer(data.app, name="data", rich_help_panel=USE)
app.add_typer(bench.app, name="bench", rich_help_panel=STUDY)
app.add_typer(audit.audit_app, name="audit", rich_help_panel=STUDY)
app.add_typer(node.app, name="node", rich_help_panel=LIVE)
app.add_typer(server.app, name="server", rich_help_panel=LIVE)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if show:
        print(__version__)
        raise typer.Exit


# typer stands on click or, in newer versions, on a copy of it; what it raises for a wrong call is in its own family.
CallError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: bad input is one sentence on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    try:
        code = app(arguments, prog_name="tacita", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:  # typer's way of passing on Ctrl-C
            raise KeyboardInterrupt
    except CallError as error:
        code = _explain_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        code = _print_error("stopped; a run that had begun goes on with --resume.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads our output any more
        code = 0
    except (TacitaError, OSError, MemoryError, ModuleNotFoundError) as error:
        code = _print_error(_explain_error(error))
    sys.exit(code if isinstance(code, int) else 0)


def _explain_error(error: Exception) -> str:
    """An error that a user can mend, as a sentence."""
    if isinstance(error, TacitaError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory; use a smaller dataset, backbone.dim or --chunk."
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed; `tacita doctor` shows what is missing."
    assert isinstance(error, OSError)
    is_output_full = error.errno == errno.ENOSPC and not error.filename  # an error about a file of ours names it
    if is_output_full:
        return str(DiskFull("the output"))
    place = error.filename or "the system"
    return f"{place}: {error.strerror or error}."


def _explain_usage(error: Any) -> int:
    """A wrong command line, as one sentence; a command without arguments shows its help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    message = " ".join(error.format_message().split()).rstrip(".")
    message = _unify_wording(message, error.__cause__)
    problem, *suggestions = re.split(r"\.? \(?(?=Did you mean)", message)
    if suggestions:
        hint = f"d{suggestions[0][1:].rstrip(')')}"
    else:
        command = context.command_path if context is not None else "tacita"
        hint = f"see `{command} --help`."
    return _print_error(f"{problem[:1].lower()}{problem[1:]}; {hint}")


def _unify_wording(message: str, cause: Any) -> str:
    """Even out messages that differ between versions of typer: unknown options, and values that cannot be read."""
    message = re.sub(r"^No such option: ([^\s.]+)", r"No such option '\1'", message)
    match = re.search(r"\(Possible options: (.*)\)$", message)
    if match:
        options = ", ".join(repr(option) for option in match[1].split(", "))
        message = f"{message[: match.start()]}Did you mean one of: {options}?"
    value = cause.errors()[0].get("input") if hasattr(cause, "errors") else None
    return message if value is None else message.replace("Input should", f"'{value}' should", 1)


def _print_error(sentence: str, code: int = 2) -> int:
    print(f"tacita: {make_printable(sentence)}", file=sys.stderr)
    return code
