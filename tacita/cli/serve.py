"""The verb that serves a run over HTTP until it is stopped."""

from __future__ import annotations

import os
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tacita.cli import console
from tacita.cli.options import DataDir, Imports, RunArgument, RunOption, Threads, choose_run, import_modules
from tacita.core.errors import TacitaError

NEEDED = ("fastapi", "starlette", "uvicorn")


def serve(
    folder: RunArgument = None,
    named: RunOption = None,
    block: Annotated[
        bool, typer.Option("--block", help="The newest block of a run that still trains: its last checkpoint.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="A file with the token that calls carry (default: $TACITA_SERVE_TOKEN)."),
    ] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="At another address than loopback: anybody there may call.")
    ] = False,
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
) -> None:
    """Serve recommendations of a run over HTTP until Ctrl-C or SIGTERM; /docs describes the calls.

    Whoever may call reads what people are recommended, and from explanations what they have.

    Examples:

    `tacita serve runs/first`

    `tacita serve runs/first --host 0.0.0.0 --token-file token`

    `tacita serve runs/first --block`
    """
    check_installed()
    from tacita.runs.assembly import Machine, use_threads
    from tacita.runs.served_models import serve_finished_run, serve_newest_block
    from tacita.web.answers import RunAnswers
    from tacita.web.api import make_serving_app
    from tacita.web.http_server import HttpServer, check_address, is_loopback, is_readable_by_others, read_token

    run = choose_run(folder, named, "tacita serve runs/first")
    token = read_token(token_file, os.environ)
    check_address(host, token is not None, without_token)
    import_modules(imports)
    use_threads(threads)
    models = serve_newest_block(run, Machine(threads, data_dir=data_dir)) if block else serve_finished_run(run)
    models.load()  # what cannot be served is refused before anybody calls
    if token_file is not None and is_readable_by_others(token_file):
        console.print_note(f"Note: others on this machine can read {token_file}; `chmod 600 {token_file}` mends that.")
    local_only = token is None and is_loopback(host)
    app = make_serving_app(RunAnswers(models), token, local_only)
    stop = _catch_stop_signals()
    with HttpServer(app, host, port) as server:
        access = "with a token" if token is not None else "without a token"
        console.print_note(f"Serving {run} at {server.url}, {access}; {server.url}/docs lists the calls.")
        stop.wait()
    console.print_note("Stopped; every call that had come was answered.")


def check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise TacitaError(
            f"`tacita serve` needs {' and '.join(missing)}; install the extra 'serve': pip install 'tacita[serve]'."
        )


def _catch_stop_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set."""
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop
