"""The program: its verbs put together, and every mistake told in one sentence."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Annotated, Any

import typer

from tacita import __version__
from tacita.cli import audit, bench, data, demo, doctor, experiments, node, privacy, server, serving, settings, train
from tacita.core.errors import DiskFull, TacitaError, make_printable

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="**tacita** recommends without collecting: histories stay on people's devices.",
    epilog="Start with `tacita demo`, or with your own file: `tacita data describe my.csv`.",
)
for verb in (
    train.train,
    serving.recommend,
    serving.similar,
    train.report,
    settings.settings,
    experiments.reproduce,
    experiments.tune,
    privacy.share,
    privacy.unshare,
    privacy.forget,
    privacy.ledger,
    doctor.doctor,
    demo.demo,
):
    app.command()(verb)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
app.add_typer(audit.audit_app, name="audit")
app.add_typer(node.app, name="node")
app.add_typer(server.app, name="server")


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if show:
        print(__version__)
        raise typer.Exit


# typer stands on click or, in newer versions, on a copy of it; what it raises for a wrong call is in its own family.
CallError: type[Any] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


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
    except TacitaError as error:
        code = _print_error(str(error))
    except CallError as error:
        code = _explain_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        code = _print_error("stopped; a run that had begun goes on with --resume.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has left
        code = 0
    except OSError as error:
        full = error.errno == errno.ENOSPC and not error.filename  # a file of ours would have been named
        said = str(DiskFull("the output")) if full else f"{error.filename or 'the system'}: {error.strerror or error}."
        code = _print_error(said)
    except MemoryError:
        code = _print_error("not enough memory; use a smaller dataset, backbone.dim or --chunk.")
    except ModuleNotFoundError as error:
        code = _print_error(f"the package {error.name} is not installed; `tacita doctor` shows what is missing.")
    sys.exit(code if isinstance(code, int) else 0)


def _explain_usage(error: Any) -> int:
    """A wrong command line, as one sentence; a command without arguments shows its help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    said = _unify_wording(" ".join(error.format_message().split()).rstrip("."), error.__cause__)
    said, *hints = re.split(r"\.? \(?(?=Did you mean)", said)
    where = context.command_path if context is not None else "tacita"
    hint = f"d{hints[0][1:].rstrip(')')}" if hints else f"see `{where} --help`."
    return _print_error(f"{said[:1].lower()}{said[1:]}; {hint}")


def _unify_wording(said: str, cause: Any) -> str:
    """What versions of typer say differently: options like an unknown one, and a value that cannot be read."""
    said = re.sub(r"^No such option: ([^\s.]+)", r"No such option '\1'", said)
    near = re.search(r"\(Possible options: (.*)\)$", said)
    if near:
        said = f"{said[: near.start()]}Did you mean one of: {', '.join(repr(one) for one in near[1].split(', '))}?"
    given = cause.errors()[0].get("input") if hasattr(cause, "errors") else None
    return said if given is None else said.replace("Input should", f"'{given}' should", 1)


def _print_error(sentence: str, code: int = 2) -> int:
    print(f"tacita: {make_printable(sentence)}", file=sys.stderr)
    return code
