"""The verbs of a node's owner: make it, import data, run it, query it, erase people from it."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import AsJson, DateFormat, Decimal, HowMany, NodeColumns, Quiet, check_decimal, parse_columns
from tacita.core.errors import TacitaError

app = typer.Typer(no_args_is_help=True, help="A device or silo: its histories stay here, its models learn with others.")

Folder = Annotated[Path, typer.Option("--folder", file_okay=False, help="The node's folder.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-single-user-uploads",
        help="Also send sums of fewer people than min_users: the server can read what they did.",
    ),
]
DEFAULT_FOLDER = Path("node")


def _call_node(folder: Path, verb: str, what: str = "", quiet: bool = False, **arguments: Any) -> Any:
    from tacita.live.running import node_client

    with console.show_clock(what or verb, quiet):
        return node_client.ask_node(folder, verb, **arguments)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the node.")] = DEFAULT_FOLDER,
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.")] = "",
    ca: Annotated[
        Path | None, typer.Option("--ca", dir_okay=False, help="The server's CA file, from its operator.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What the operator calls this node.")] = "",
    min_users: Annotated[int, typer.Option("--min-users", min=1, help="Send no sum over fewer people.")] = 20,
    run_as: Annotated[
        str, typer.Option("--run-as", help="OS user for Flower's process; auto: tacita-node, if there is one.")
    ] = "auto",
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Make a node: its store with a secret of its own, and its key pair.

    Example: `tacita node init clinic --server recommender.example.org:9092 --ca ca.pem --name clinic-7`
    """
    from tacita.live.running.node_setup import make_node

    if not server or ca is None:
        raise TacitaError("a node needs its server: give --server HOST:PORT and --ca FILE, both from the operator.")
    values = {
        "name": name or folder.absolute().name,
        "server": server,
        "min_users": min_users,
        "insecure_single_user_uploads": insecure,
        "run_as": run_as,
    }
    node = make_node(folder, values, ca)
    if as_json:
        console.print_json(node)
        return
    console.print_answer(f"Node '{node['name']}' is in {folder}.")
    console.print_answer(f"Hand {node['public key']} to the operator of {server}, who enrols it; its fingerprint is")
    console.print_answer(f"  {node['fingerprint']}")
    console.print_note(f"Then: tacita node import FILE --folder {folder}, and tacita node run --folder {folder}")


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV, TSV, Parquet or atomic file of interactions.")],
    folder: Folder = DEFAULT_FOLDER,
    columns: NodeColumns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Add interactions; a file that is imported twice adds nothing. Works while the node runs.

    Example: `tacita node import visits.csv --columns user=patient,item=article`
    """
    source = str(Path(file).absolute()) if file and Path(file).exists() else file
    result = _call_node(
        folder,
        "import",
        f"importing {file}",
        quiet or as_json,
        file=source,
        columns=parse_columns(columns),
        date_format=date_format,
        decimal=check_decimal(decimal),
    )
    if as_json:
        console.print_json(result)
        return
    console.print_note(result["guessed"])
    n_new = result["new interactions"]
    n_new_users = result["new users"]
    console.print_answer(f"{n_new:,} new interactions of {result['rows']:,} rows; {n_new_users:,} new users.")
    n_unknown = result["items not in the catalogue"]
    if not result["catalogue"]:
        console.print_note("The server's catalogue has not come yet; items outside it will stay on this node.")
    elif n_unknown:
        console.print_note(
            f"{n_unknown:,} of {result['items']:,} items are not in the catalogue: "
            "they stay on this node, and nothing is learned from them."
        )


@app.command()
def run(folder: Folder = DEFAULT_FOLDER, insecure: Insecure = False) -> None:
    """Run the node in the foreground: it answers the server and the owner's commands until Ctrl-C.

    Example: `tacita node run --folder clinic`
    """
    import logging

    from tacita.live.pages.person_app import serve_node_pages
    from tacita.live.running.daemon import run_daemon

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    try:
        run_daemon(folder, insecure, extension=serve_node_pages)
    except KeyboardInterrupt:  # while it was starting
        raise SystemExit(130) from None


@app.command()
def status(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Where the node stands, and in plain words what the server can see.

    Example: `tacita node status --json`
    """
    facts = {"running": False, **_call_node(folder, "status", quiet=as_json)}
    if as_json:
        console.print_json(facts)
        return
    if facts["last release"] is not None:
        released = datetime.fromtimestamp(facts["last release"])
        facts["last release"] = f"{released:%Y-%m-%d %H:%M:%S}"
    facts["running"] = "yes" if facts["running"] else f"no; `tacita node run --folder {folder}` starts it"
    facts["kept"] = f"{facts['kept']:,} interactions that never leave"
    facts["catalogue"] = facts["catalogue"] or "not here yet; it comes with the server's first message"
    facts["serving"] = facts["serving"] or "no model yet; it comes with the server's first round"
    requests = facts.pop("requests")
    facts["outside"] = " ".join(facts["outside"]) or "the run that is served from counts no epsilon"
    result_tables.show_facts(facts)
    for request in requests:
        _show_request(request)


def _show_request(request: dict[str, Any]) -> None:
    from tacita.live.formatting import format_age

    subject = str(request["kind"])
    if request["items"]:
        subject += f" {request['items']:,} items"
    age = "" if request["age"] is None else f" (asked {format_age(request['age'])} ago)"
    console.print_answer(
        f"request {request['request']}: {subject} of user {request['user']}, "
        f"run {request['run']}: {request['state']}{age}."
    )
    if request["effect"]:
        console.print_answer(f"  {request['effect']}.")


@app.command()
def page(
    user: Annotated[str | None, typer.Argument(metavar="USER", help="Raw user id.")] = None,
    all_users: Annotated[bool, typer.Option("--all", help="A link for everybody on this node.")] = False,
    owner: Annotated[bool, typer.Option("--owner", help="A list of people, from which links can be made.")] = False,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """A link to a person's own page on this machine: it works once, within ten minutes. The node must be running.

    Examples:

    `tacita node page 196`

    `tacita node page --owner`
    """
    from tacita.live.running import node_client

    if (user is not None) + all_users + owner != 1:
        raise TacitaError("say whose page: USER, --all or --owner.")
    if not (folder / node_client.CONTROL_SOCKET).exists():
        raise TacitaError(f"the node is not running; `tacita node run --folder {folder}` serves its pages.")
    if all_users:
        answer = node_client.ask_daemon(folder, "pages")
    elif owner:
        answer = node_client.ask_daemon(folder, "page")
    else:
        answer = node_client.ask_daemon(folder, "page", user=user)
    if as_json:
        console.print_json(answer)
    elif all_users:
        for row in answer:
            console.print_answer(f"{row['user']}\t{row['link']}")
    else:
        console.print_answer(answer["link"])


@app.command()
def recommend(
    user: Annotated[str, typer.Argument(metavar="USER", help="Raw user id.")],
    k: HowMany = 10,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Top items for one of the node's users, worked out here.

    Example: `tacita node recommend 196 -k 10`
    """
    items = _call_node(folder, "recommend", quiet=as_json, user=user, k=k)
    if as_json:
        console.print_json(items)
        return
    result_tables.show_recommendations(user, items)
    if len(items) < k:
        console.print_note(f"Only {len(items)} items are left that user {user} does not have.")
    cost = _call_node(folder, "epsilon", user=user)
    console.print_note(f"What this cost user {user}: {cost}.")


@app.command()
def ledger(
    user: Annotated[str | None, typer.Argument(metavar="[USER]", help="Raw user id; none: the node's log.")] = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """What left: of a user what they have spent of their privacy budget, run by run, and what left of their requests.

    Budgets are charged before anything leaves. Without a user: the node's log, sums and requests alike, with bytes.

    Examples:

    `tacita node ledger 196`

    `tacita node ledger`
    """
    from tacita.live.node import release_log
    from tacita.runs.ledger import describe_ledger

    log = _call_node(folder, "ledger", quiet=as_json, user=user)
    if as_json:
        console.print_json(log)
        return
    for line in release_log.list_log_lines(log):
        console.print_answer(line)
    if user is None:
        return
    if not log["runs"]:
        console.print_note(f"No run has heard anything of user {user}.")
    for run, account in log["runs"].items():
        console.print_answer(f"Run {run}:")
        for line in describe_ledger(account):
            console.print_answer(line)


@app.command()
def budget(
    user: Annotated[str, typer.Argument(metavar="USER", help="Raw user id.")],
    epsilon: Annotated[float, typer.Argument(metavar="EPSILON", help="What they are willing to spend in all.")],
    run: Annotated[str | None, typer.Option("--run", help="Only in this run; default: in every one.")] = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """How much of their privacy a user is willing to spend; the server is not told.

    It holds from the node's next answer on, and what is spent stays spent. With 0 somebody is in no run at all. Runs
    that count nothing have no epsilon, and no other budget holds there; `node status` says so. A budget that is raised
    after releases is counted on, and is an odometer: the bound is proven for one that stood from the beginning.

    Example: `tacita node budget 196 1.0`
    """
    result = _call_node(folder, "budget", quiet=as_json, user=user, epsilon=epsilon, run=run)
    if as_json:
        console.print_json(result)
        return
    scope = f"run {run}" if run else "every run that counts"
    console.print_answer(f"User {user} spends at most epsilon {epsilon:g} in {scope}, from the next answer on.")
    if result["note"]:
        console.print_note(result["note"])
    console.print_note(f"`tacita node ledger {user}` shows what is spent and what is left.")


@app.command()
def consent(
    words: Annotated[list[str], typer.Argument(metavar="USER [ITEM] learn|keep", help="Who, maybe which item, what.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Whether an item, or everything of a user, may take part in sums (learn) or never leaves (keep).

    Examples:

    `tacita node consent 196 keep`

    `tacita node consent 196 242 keep`
    """
    if len(words) not in (2, 3):
        raise TacitaError("say whose and what: `tacita node consent USER [ITEM] learn|keep`.")
    user = words[0]
    item = words[1] if len(words) == 3 else None
    level = words[-1]
    result = _call_node(folder, "consent", quiet=as_json, user=user, item=item, level=level)
    if as_json:
        console.print_json(result)
        return
    if item is not None:
        subject = f"item {item}"
    else:
        subject = "everything not marked 'keep'" if level == "learn" else "everything"
    console.print_note(f"{subject} of user {user}: {result['means']}.")


User = Annotated[str, typer.Argument(metavar="USER", help="Raw user id.")]
Run = Annotated[str | None, typer.Option("--run", help="Only this run; default: all that the user takes part in.")]


def _submit_request(
    kind: str, folder: Path, user: str, items: list[str] | None, run: str | None, as_json: bool
) -> None:
    receipt = _call_node(folder, "request", quiet=as_json, kind=kind, user=user, items=items or [], run=run)
    if as_json:
        console.print_json(receipt)
        return
    for request in receipt["requests"]:
        _show_request(request)
    console.print_note("It leaves with the node's next answer; `tacita node status` shows how far it has come.")


@app.command()
def share(
    user: User,
    items: Annotated[list[str] | None, typer.Argument(metavar="[ITEM]...", help="Raw ids; none: all of them.")] = None,
    run: Run = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Show items of a user to the server, which learns from them; they are no longer learned from here.

    Items marked 'keep' are never shared. Example: `tacita node share 196 242 51`
    """
    _submit_request("share", folder, user, items, run, as_json)


@app.command()
def unshare(
    user: User,
    items: Annotated[list[str] | None, typer.Argument(metavar="[ITEM]...", help="Raw ids; none: all shared.")] = None,
    run: Run = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Take back items that a user shares: the server drops them, and unlearns them where its method can.

    Example: `tacita node unshare 196 242`
    """
    _submit_request("unshare", folder, user, items, run, as_json)


@app.command()
def forget(
    user: User,
    items: Annotated[list[str] | None, typer.Argument(metavar="[ITEM]...", help="Raw ids; none: all of them.")] = None,
    run: Run = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Have what was learned from items of a user taken out of the server's model; they stay on this node.

    Example: `tacita node forget 196 242`
    """
    _submit_request("forget", folder, user, items, run, as_json)


@app.command()
def leave(user: User, run: Run = None, folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """A user takes part no more: all that was shared and, where the method can, learned is taken back.

    What the user has stays on this node; `node erase` removes it from here, too.

    Example: `tacita node leave 196`
    """
    _submit_request("leave", folder, user, None, run, as_json)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file of JSON lines.")],
    user: Annotated[str | None, typer.Option("--user", help="Only this raw user id.")] = None,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Everything the node's people own, as JSON lines: histories, consent, what left. Reads damaged stores, too.

    Example: `tacita node export mine.jsonl`
    """
    result = _call_node(folder, "export", quiet=as_json, file=str(file.absolute()), user=user)
    if as_json:
        console.print_json(result)
    else:
        console.print_note(f"wrote {result['lines']:,} lines to {file}")


@app.command()
def erase(
    user: Annotated[str | None, typer.Argument(metavar="USER", help="Raw user id.")] = None,
    all_users: Annotated[bool, typer.Option("--all", help="Everybody on this node.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --all: do not ask.")] = False,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Remove a user, or everybody, from this node: to the last byte of its store, and from nowhere else.

    Erased here: history, consent, private parameters, accounts of privacy budgets, and requests, open ones too. How
    much of a budget was spent in all stays, under a keyed digest of the id: who is imported again has no new budget.

    It stays elsewhere: what the server learned from sums that were sent, what was shared with it, models that others
    have, files that were imported or exported, backups. The node's log of what left names nobody, and stays.

    First, therefore, take back what can be: 'tacita node leave USER' (or forget, unshare), then wait until
    'tacita node status' says that it is done. Once erased, nobody here can ask for it, or send what to take back.

    Example: `tacita node erase 196`
    """
    if (user is None) != all_users:
        raise TacitaError("say whom to erase: either USER or --all.")
    must_ask = all_users and not yes and sys.stdin.isatty()
    if must_ask and not typer.confirm(f"Erase everybody in {folder} for good?"):
        raise TacitaError("nothing was erased; --yes erases without asking.")
    receipt = _call_node(folder, "erase", quiet=as_json, user=user, everybody=all_users)
    if as_json:
        console.print_json(receipt)
        return
    n_rows = receipt["interactions"]
    console.print_note(f"{n_rows:,} interactions are gone from this node; users gone: {receipt['users']:,}.")
