"""The operator's verbs: make a server, run it, let nodes in and out, publish the catalogue, train."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, ItemColumns, Quiet, parse_columns
from tacita.core.errors import TacitaError

app = typer.Typer(no_args_is_help=True, help="One server for many nodes: it is sent sums, not histories.")
catalogue_app = typer.Typer(no_args_is_help=True, help="The items that can be learned and recommended.")
app.add_typer(catalogue_app, name="catalogue")

Folder = Annotated[Path, typer.Option("--folder", file_okay=False, help="The server's folder.")]
Detach = Annotated[bool, typer.Option("--detach", help="Do not wait for the block to end.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name; `tacita server status` lists them.")]
DEFAULT_FOLDER = Path("server")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the server.")] = DEFAULT_FOLDER,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Host name or address that nodes will dial; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", help="Port for nodes.", min=1, max=65535)] = 9092,
    link_port: Annotated[
        int, typer.Option("--link-port", help="Port of Flower's SuperLink, on loopback.", min=1, max=65535)
    ] = 9091,
) -> None:
    """Make a server: an authority, a certificate for the names that nodes dial, a store.

    Example: `tacita server init --name recommender.example.org`
    """
    from tacita.live.running.server import ServerConfig, create_server

    if port == link_port:
        raise TacitaError(f"--port and --link-port are both {port}; give each its own.")
    create_server(folder, ServerConfig(host=host, port=port, link_port=link_port), name or [])
    dialled = name[0] if name else "localhost"
    console.print_answer(f"The server is in {folder}; owners of nodes need {folder / 'ca.pem'} and {dialled}:{port}.")
    if not name:
        console.print_note("Only nodes on this machine will trust it; --name HOST gives the name that others dial.")
    console.print_note(
        f"Then: tacita server catalogue add FILE --folder {folder}, and tacita server up --folder {folder}"
    )


@app.command()
def up(
    folder: Folder = DEFAULT_FOLDER,
    insecure_run_as_root: Annotated[
        bool,
        typer.Option("--insecure-run-as-root", help="Run as root, though every account here can then become root."),
    ] = False,
) -> None:
    """Run the server in the foreground until Ctrl-C; unfinished runs go on.

    Example: `tacita server up --folder server`
    """
    from tacita.live.pages.operator_app import serve_operator_page
    from tacita.live.processes import configure_logging
    from tacita.live.running.server import LiveServer

    configure_logging()
    try:
        LiveServer(folder).serve(insecure_run_as_root=insecure_run_as_root, extension=serve_operator_page)
    except KeyboardInterrupt:  # while it was starting
        raise SystemExit(130) from None


@app.command()
def page(folder: Folder = DEFAULT_FOLDER) -> None:
    """Where the operator's page is: on loopback of the server's machine, behind the operator's password.

    Example: `tacita server page`
    """
    from tacita.live.pages.operator_app import find_page_url

    console.print_answer(find_page_url(folder))


@app.command()
def password(folder: Folder = DEFAULT_FOLDER) -> None:
    """Set the operator's password for the page: typed twice, or one line of standard input.

    Example: `tacita server password`
    """
    from tacita.live.pages.tokens import OperatorCredentials
    from tacita.live.running.server import read_config

    read_config(folder)
    if sys.stdin.isatty():
        text = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        text = sys.stdin.readline()
    OperatorCredentials(folder).set_password(text.rstrip("\n"))
    console.print_answer("The password is set; it is kept hashed.")


@app.command()
def token(folder: Folder = DEFAULT_FOLDER) -> None:
    """A new read-only token for the server's API, shown once; the one before it ends.

    Example: `tacita server token`
    """
    from tacita.live.pages.tokens import OperatorCredentials
    from tacita.live.running.server import read_config

    read_config(folder)
    console.print_answer(OperatorCredentials(folder).make_reader_token())


@app.command()
def renew(folder: Folder = DEFAULT_FOLDER) -> None:
    """Make a new certificate for the same key and names, for when the old one expires.

    Example: `tacita server renew`
    """
    from tacita.live.running.server import read_config
    from tacita.live.tls_certificates import SERVER_CERT, read_expiry, renew_server_certificate

    read_config(folder)
    renew_server_certificate(folder)
    certificate = folder / SERVER_CERT
    expiry = read_expiry(certificate)
    console.print_answer(f"{certificate} is valid until {expiry:%Y-%m-%d}; start the server again.")


@app.command()
def enroll(
    key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The node's public key.")],
    name: Annotated[str, typer.Option("--name", help="What to call the node.")],
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Let a node in by its public key. Works while the server runs.

    Example: `tacita server enroll clinic-7.pub --name clinic-7`
    """
    from tacita.live.running.server import enroll_node

    fingerprint = enroll_node(folder, key, name)
    console.print_answer(
        f"Node '{name}' is enrolled; `tacita node init` showed its owner the same fingerprint:\n  {fingerprint}"
    )


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="The node's name.")], folder: Folder = DEFAULT_FOLDER) -> None:
    """Keep a node out from now on. Works while the server runs.

    Example: `tacita server revoke clinic-7`
    """
    from tacita.live.running.server import open_store

    with open_store(folder) as store:
        store.revoke_node(name)
    console.print_answer(f"Node '{name}' is revoked: its key is refused from now on.")


@catalogue_app.command("add")
def catalogue_add(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Item ids, maybe with titles: CSV, TSV, Parquet or atomic file.")
    ],
    folder: Folder = DEFAULT_FOLDER,
    columns: ItemColumns = "",
) -> None:
    """Publish items. Known ones keep their place; new ones take part from the next block on.

    Example: `tacita server catalogue add items.csv`
    """
    from tacita.data.columns import read_items_with_titles
    from tacita.live.running.server import open_store

    with open_store(folder) as store:
        with console.show_clock(f"reading {file}"):
            items, format_note = read_items_with_titles(file, parse_columns(columns))
            n_new = store.add_items(items)
        console.print_note(format_note)
        added = "1 new item" if n_new == 1 else f"{n_new:,} new items"
        console.print_answer(f"{added}; the catalogue has {len(store.read_catalogue()):,}.")


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", dir_okay=False, help="Settings as for `tacita train`.")
    ],
    folder: Folder = DEFAULT_FOLDER,
    name: Annotated[str, typer.Option("--name", help="What to call the run; default: the file's name.")] = "",
    quorum: Annotated[str, typer.Option("--quorum", help="Nodes that a round needs: 'all' or a number.")] = "all",
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a round waits for answers.", min=1)] = 300.0,
    give_up: Annotated[float, typer.Option("--give-up", help="Seconds without a quorum that end it.", min=1)] = 3600.0,
    detach: Detach = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Begin a run: its first block is trained with the nodes.

    Example: `tacita server train f3crec.toml --quorum 2`
    """
    from tacita.core.config import read_toml
    from tacita.live.running.orders import RunTerms, begin_run
    from tacita.live.settings import adapt_participation
    from tacita.methods import resolve_config

    values = read_toml(config)
    settings = adapt_participation(resolve_config(values, str(config)), values)
    run = name or config.stem
    begin_run(folder, run, settings, RunTerms(_parse_quorum(quorum), timeout, give_up))
    if "data" in values and not as_json:
        console.print_note(f"'data' in {config} is not used: every node brings its own.")
    _show_run(folder, run, detach, as_json, quiet)


@app.command("next-block")
def next_block(
    run: Run, folder: Folder = DEFAULT_FOLDER, detach: Detach = False, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Open the run's next block: nodes learn from what they collected since the last one.

    Example: `tacita server next-block f3crec`
    """
    from tacita.live.running.orders import open_block

    open_block(folder, run)
    _show_run(folder, run, detach, as_json, quiet)


@app.command()
def resume(
    run: Run, folder: Folder = DEFAULT_FOLDER, detach: Detach = False, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Go on with a run that stopped, or watch one that is under way.

    Example: `tacita server resume f3crec`
    """
    from tacita.live.running.orders import resume_run

    resume_run(folder, run)
    _show_run(folder, run, detach, as_json, quiet)


@app.command()
def status(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Nodes, runs and results.

    Example: `tacita server status`
    """
    from tacita.live.running.server import read_status

    facts = read_status(folder)
    if as_json:
        console.print_json(facts)
        return
    state = "up" if facts["up"] else f"not up; start it with `tacita server up --folder {folder}`"
    console.print_answer(f"The server on {facts['address']} is {state}.")
    console.print_answer(f"Catalogue: {facts['catalogue']:,} items. It sees {facts['sees']}.")
    if not facts["nodes"]:
        console.print_answer("Nodes: none; `tacita server enroll KEY.pub --name NAME` lets one in.")
    for node in facts["nodes"]:
        _show_node(node)
    for run in facts["runs"]:
        _show_run_status(run)


def _show_node(node: dict[str, Any]) -> None:
    online = {None: "", True: ", online", False: ", offline"}[node["online"]]
    states = {"waiting": "enrolled; let in when the server is up", "enrolled": f"enrolled{online}"}
    state = states.get(node["state"], node["state"])
    last_answer = ""
    if node["last answer"]:
        answered = datetime.fromtimestamp(node["last answer"])
        last_answer = f", last answer {answered:%Y-%m-%d %H:%M:%S}"
    console.print_answer(f"Node '{node['name']}': {state}{last_answer}")


def _show_run_status(run: dict[str, Any]) -> None:
    from tacita.live.formatting import format_age

    console.print_answer(f"Run '{run['name']}': {run['standing']}{_format_scores(run['results'])}")
    for request in run["requests"]:
        age = format_age(request["age"])
        attempts = f", tried in vain {request['tries']} times: {request['said']}" if request["tries"] else ""
        console.print_answer(f"  request {request['request']} of node '{request['node']}', open for {age}{attempts}")
    if run["stopped"]:
        console.print_answer(f"  stopped: {run['stopped']}")


def _format_scores(results: list[dict[str, Any]]) -> str:
    """The main score of each block, or nothing where no block has one."""
    scores = []
    for result in results:
        ranked = [name for name in result if "@" in name]
        preferred = [name for name in ranked if name.startswith("ndcg@")]
        metrics = preferred or ranked
        if metrics:
            metric = metrics[0]
            scores.append(f"{metric} of block {result['block']} {result[metric]:.4f}")
    return "; " + ", ".join(scores) if scores else ""


def _parse_quorum(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdigit() or int(text) < 1:
        raise TacitaError(f"--quorum '{text}' is neither 'all' nor a number of nodes.")
    return int(text)


def _show_run(folder: Path, run: str, detach: bool, as_json: bool, quiet: bool) -> None:
    """Show the progress of a run until all its open blocks are done."""
    if detach:
        console.print_note(f"Run '{run}' goes on in the server; `tacita server status --folder {folder}` tells how.")
        return
    try:
        results = watch(folder, run, quiet or as_json)
    except KeyboardInterrupt:
        console.print_note(f"Run '{run}' goes on in the server; `tacita server resume {run}` watches it again.")
        raise SystemExit(130) from None
    if as_json:
        console.print_json(results)
        return
    n_blocks = "1 block" if len(results) == 1 else f"{len(results)} blocks"
    console.print_answer(f"Run '{run}': {n_blocks} done{_format_scores(results)}")


def watch(folder: Path, run: str, quiet: bool = False, most: float = float("inf")) -> list[dict[str, Any]]:
    """Wait until a run's open blocks are done, with a bar over its rounds; returns the results of its blocks."""
    from tacita.live.running.run_progress import RunProgress, follow_run

    with console.show_progress(f"run '{run}'", quiet) as tell:
        printer = _EventPrinter(quiet=True)  # events from before this command are not printed

        def on_progress(progress: RunProgress) -> None:
            for event in progress.events:
                printer.handle_event(event, progress.node_names)
            printer.quiet = quiet
            tell(printer.rounds, progress.rounds, printer.note)

        return follow_run(folder, run, on_progress, most)


class _EventPrinter:
    """Prints a run's events that matter to people, each once."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.rounds = 0
        self.note = ""
        self._printed: set[str] = set()

    def handle_event(self, event: dict[str, Any], names: dict[str, str]) -> None:
        kind = event["event"]
        number = event.get("node")
        node = names.get(str(number), number)
        if kind == "waiting":
            self.note = f"{event['answered']} of {event['needed']} nodes answered"
            self._print_once(f"Waiting for nodes: {self.note}; `tacita server status` shows who is online.")
        elif kind == "refused":
            self._print_once(f"Node '{node}' sends nothing: {event['said']}")
        elif kind == "request stuck":
            self._print_once(
                f"A request of somebody on node '{node}' was tried in vain {event['tries']} times and stays open: "
                f"{event['said']} See that the node runs and answers; `tacita server status` shows what is open."
            )
        elif kind == "bad reply":
            self._print_once(f"Node '{node}': {event['said']}")
        elif kind in ("round", "block", "block done"):
            self.note = ""
            self.rounds = event["round"] if kind == "round" else 0

    def _print_once(self, line: str) -> None:
        if not self.quiet and line not in self._printed:
            console.print_note(line)
        self._printed.add(line)
