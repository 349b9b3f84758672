"""The command line: parse, call, print. No logic lives here."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita import __version__, cli_bench, cli_data, cli_experiments, cli_node, cli_privacy, cli_server, console
from tacita.cli_data import AsJson, Columns, DataDir, DateFormat, Decimal, columns_of, decimal_of
from tacita.errors import DiskFull, TacitaError

if TYPE_CHECKING:
    from tacita.runs import Watcher

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="**tacita** recommends without collecting: histories stay on people's devices.",
    epilog="Start with `tacita demo`, or with your own file: `tacita data describe my.csv`.",
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_bench.app, name="bench")

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Threads = Annotated[int, typer.Option("--threads", help="Cores to use; 0: all. Never changes a number.")]


def _merge(into: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for key in path:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise TacitaError(f"cannot set {dotted}: '{key}' is a single value here, not a table.")
    into[last] = value


def _value(key: str, text: str) -> Any:
    """A TOML value; a bare word stands for itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            raise TacitaError(
                f'--set {key}: {text} is not valid TOML; names in lists need quotes: ["a", "b"].'
            ) from None
        return text


def _settings(config: Path | None, flags: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    """The config file, changed by flags, changed by --set."""
    from tacita.config import read_toml

    if config is not None and config.suffix != ".toml":
        raise TacitaError(f"'{config}' is not a .toml config file; data is given with --data {config}.")
    values = read_toml(config) if config is not None else {}
    for dotted, value in flags.items():
        if value is not None:
            _merge(values, dotted, value)
    for one in sets:
        key, equals, text = (piece.strip() for piece in one.partition("="))
        if not equals or not all(key.split(".")):
            raise TacitaError(f"--set '{one}' is not key=value, for example train.rounds=50.")
        _merge(values, key, _value(key, text))
    return values


@contextmanager
def _training(folder: Path, quiet: bool) -> Iterator[Watcher]:
    """Show how a run goes; if the disk fills up after it began, say how it goes on."""
    try:
        with console.watching(quiet) as watcher:
            yield watcher
    except DiskFull as error:
        if not folder.is_dir():
            raise
        remedy = f"free some, then `tacita train --out {folder} --resume` goes on"
        raise TacitaError(f"no space left to write {error.path}; {remedy}.") from None


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Settings; flags override them.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Dataset name (default: ml-100k), file, or synthetic:...")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="The model: mf, ncf, pfedrec, ego, lightgcn, neumf, neuncf or tally (its release gives people away)."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="fedavg, f3crec, reg, kd, rlp2, spp, ...")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same numbers.")] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate of the backbone.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Most rounds in a block.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Controls beside the result; also with --resume.")
    ] = True,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; repeat for more.")
    ] = None,
    columns: Columns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    chunk: Annotated[int, typer.Option(help="Clients trained together. Never changes a number.")] = 256,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train one run and write its folder.

    CONFIG.toml holds settings; flags override them. The run's own config.toml lists every setting there is.

    Examples:

    `tacita train --data ml-100k --method f3crec --seed 1 --out runs/first`

    `tacita train --data my.csv --columns user=customer,item=sku`

    `tacita train study.toml --set train.batch_size=256`

    `tacita train --out runs/first --resume`
    """
    from tacita import runs
    from tacita.config import RunConfig, validated

    flags: dict[str, Any] = {
        "data": data,
        "backbone.name": backbone,
        "backbone.lr": lr,
        "method": method,
        "seed": seed,
        "train.rounds": rounds,
        "columns": columns_of(columns) or None,
        "date_format": date_format,
        "decimal": decimal_of(decimal),
        "evaluate.controls": None if controls else False,
    }
    if chunk < 1:
        raise TacitaError(f"--chunk {chunk}: at least one client must be trained at a time.")
    machine = runs.Machine(threads, chunk, data_dir)
    if resume:
        if out is None:
            raise TacitaError("--resume needs --out FOLDER, the run to go on with.")
        given = [v for name, v in flags.items() if name != "evaluate.controls"]
        if config is not None or sets or any(v is not None for v in given):
            raise TacitaError(f"--resume goes on with the settings in {out / 'config.toml'}; leave out all others.")
        finished = runs.is_finished(out)
        with _training(out, quiet) as watcher:
            run = runs.resume(out, machine, watcher, controls)
        if finished and not quiet:
            console.say(f"{out} was finished before: nothing was left to do.")
    else:
        checked = validated(RunConfig, _settings(config, flags, sets or []), str(config or "the settings"))
        folder = out if out is not None else runs.free_folder(checked)
        with _training(folder, quiet) as watcher:
            run = runs.train(checked, folder, machine, watcher)
    if as_json:
        print(json.dumps(run.result))
    else:
        console.show_result(run, brief=quiet)
        if run.config.backbone["name"] == "tally" and not quiet:
            console.say(
                f"Note: what tally releases gives people away: `tacita audit tally --run {run.folder}` shows it."
            )


@app.command()
def recommend(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: Annotated[list[str], typer.Option("--user", help="Raw user id; repeat for more.")],
    k: Annotated[int, typer.Option("-k", help="How many.")] = 10,
    seen: Annotated[bool, typer.Option("--seen", help="Also items the user already knows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Top items for users of a run, with raw ids and titles.

    Example: `tacita recommend --run runs/first --user 196 -k 10`
    """
    from tacita import runs

    found = runs.recommend(run, user, k, exclude_seen=not seen)
    if as_json:
        print(json.dumps(found))
        return
    for one, items in found.items():
        console.show_recommendations(one, items, k)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run folders.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """An HTML report with pictures from one or many run folders.

    Example: `tacita report runs/a runs/b --out compare.html`
    """
    from tacita.report import write_report

    write_report(folders, out)
    console.say(f"wrote {out}")


app.command()(cli_experiments.reproduce)
app.command()(cli_experiments.tune)
app.command()(cli_privacy.forget)
app.add_typer(cli_privacy.audit_app, name="audit")
app.add_typer(cli_node.app, name="node")
app.add_typer(cli_server.app, name="server")


@app.command()
def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Check the installation and say what is missing.

    Example: `tacita doctor`
    """
    from tacita.doctor import examine

    checks = examine(data_dir)
    if as_json:
        print(json.dumps(checks))
    else:
        console.show_checks(checks)
    if any(c["state"] == "fails" for c in checks):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    user: Annotated[str, typer.Option(help="Whose recommendations to show.")] = "196",
    live: Annotated[bool, typer.Option("--live", help="A server and three nodes on this machine, over TLS.")] = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    quiet: Quiet = False,
) -> None:
    """The whole story on MovieLens-100K: a federated stream of four time blocks, controls, recommendations.

    With --live: the same round on real nodes. Example: `tacita demo --out runs/demo`
    """
    from tacita import runs
    from tacita.config import RunConfig

    if live:
        from tacita.cli_live_demo import show

        show(user, data_dir, out, quiet)
        return

    config = RunConfig(data="ml-100k", backbone={"name": "mf"})
    folder = out if out is not None else runs.free_folder(config)
    console.tell(
        "[bold]tacita demo[/bold]: MovieLens-100K in four blocks of time. Every user is a client; ratings stay with "
        "it, only changes of item rows travel."
    )
    with _training(folder, quiet) as watcher:
        run = runs.train(config, folder, runs.Machine(threads, data_dir=data_dir), watcher)
    console.show_result(run)
    console.show_recommendations(user, run.recommend(user, 10))
    console.say(f"Run folder: {run.folder} (open {run.folder / 'report.html'} in a browser)")
    console.say(f"Go on with: tacita recommend --run {run.folder} --user {user} -k 20")


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
        code = _complain(str(error))
    except CallError as error:
        code = _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        code = _complain("stopped; a run that had begun goes on with --resume.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has left
        code = 0
    except OSError as error:
        full = error.errno == errno.ENOSPC and not error.filename  # a file of ours would have been named
        said = str(DiskFull("the output")) if full else f"{error.filename or 'the system'}: {error.strerror or error}."
        code = _complain(said)
    except MemoryError:
        code = _complain("not enough memory; use a smaller dataset, backbone.dim or --chunk.")
    except ModuleNotFoundError as error:
        code = _complain(f"the package {error.name} is not installed; `tacita doctor` shows what is missing.")
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> int:
    """A wrong command line, as one sentence; a command without arguments shows its help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    said = _one_dialect(" ".join(error.format_message().split()).rstrip("."), error.__cause__)
    said, *hints = re.split(r"\.? \(?(?=Did you mean)", said)
    where = context.command_path if context is not None else "tacita"
    hint = f"d{hints[0][1:].rstrip(')')}" if hints else f"see `{where} --help`."
    return _complain(f"{said[:1].lower()}{said[1:]}; {hint}")


def _one_dialect(said: str, cause: Any) -> str:
    """What versions of typer say differently: options like an unknown one, and a value that cannot be read."""
    said = re.sub(r"^No such option: ([^\s.]+)", r"No such option '\1'", said)
    near = re.search(r"\(Possible options: (.*)\)$", said)
    if near:
        said = f"{said[: near.start()]}Did you mean one of: {', '.join(repr(one) for one in near[1].split(', '))}?"
    given = cause.errors()[0].get("input") if hasattr(cause, "errors") else None
    return said if given is None else said.replace("Input should", f"'{given}' should", 1)


def _complain(sentence: str, code: int = 2) -> int:
    print(f"tacita: {sentence}", file=sys.stderr)
    return code
