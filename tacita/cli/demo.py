"""The verb of the demo: in the lab, or live with a server and three nodes on this machine."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import DataDir, Quiet, RunOut, Threads
from tacita.cli.server import watch
from tacita.cli.train import show_run_progress

HOUR = 3600.0


def demo(
    out: RunOut = None,
    user: Annotated[str, typer.Option(help="Whose recommendations to show.")] = "196",
    live: Annotated[bool, typer.Option("--live", help="A server and three nodes on this machine, over TLS.")] = False,
    stay: Annotated[
        float | None,
        typer.Option(
            "--stay",
            min=0,
            max=86_400,
            help="With --live: seconds that the two pages stay open; default: an hour, or 0 where nobody looks on.",
        ),
    ] = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    quiet: Quiet = False,
) -> None:
    """The whole story on MovieLens-100K, four blocks of time: the best model here beside a published method.

    With --live: one model on real nodes, then a person's and an operator's page in your browser.

    Example: `tacita demo --out runs/demo`
    """
    if live:
        if stay is None:
            stay = HOUR if sys.stdout.isatty() else 0.0
        _run_live_demo(user, data_dir, out, quiet, stay)
        return
    from tacita.runs import assembly, demo_script

    folder = demo_script.choose_folder(out)
    console.print_markup(
        "[bold]tacita demo[/bold]: MovieLens-100K in four blocks of time. Every user is a client whose ratings stay "
        "with it. First tally-order, the best model here: one exchange of sums a block. Then F3CRec on matrix "
        "factorisation, a published method: changes of item rows, round after round."
    )
    machine = assembly.Machine(threads, data_dir=data_dir)
    best, published = demo_script.train_demo("ml-100k", folder, machine, partial(show_run_progress, quiet=quiet))
    result_tables.show_result(best.run, brief=True)
    rows = [best.table_row(), published.table_row()]
    result_tables.show_table("Which is which", rows, left_aligned=("model", "which is", "privacy"))
    console.print_note(
        "No epsilon: neither has noise with a budget. What tally-order releases gives people away; a budget is "
        "--set privacy.epsilon=8 (docs/privacy.md)."
    )
    result_tables.show_recommendations(user, best.run.recommend(user, 10).to_dicts())
    console.print_note(f"Both runs: {folder} (open {folder / demo_script.PAGE} in a browser)")
    console.print_note(f"Go on with: tacita recommend {best.run.folder} --user {user} -k 20")
    console.print_note(f"One picture of both: {folder / demo_script.PICTURE}")


def _run_live_demo(user: str, data_dir: Path | None, out: Path | None, quiet: bool, stay: float) -> None:
    """Train two blocks of MovieLens-100K over three nodes; show recommendations on a node, and both pages."""
    from tacita.live.processes import exit_on_signals
    from tacita.live.running.demo import make_demo_folder

    began = time.monotonic()
    with make_demo_folder(out) as folder:
        with exit_on_signals():
            _run_demo_script(folder, user, data_dir, quiet, stay)
        console.print_note(f"All processes are stopped; {time.monotonic() - began:.0f} s in all.")
        if out is not None:
            remedy = "start them again with `tacita server up` and `tacita node run`"
            console.print_note(f"Server and nodes are in {out}; {remedy}.")


def _run_demo_script(folder: Path, user: str, data_dir: Path | None, quiet: bool, stay: float) -> None:
    from tacita.live.running import node_client
    from tacita.live.running.demo import (
        begin_run,
        import_block,
        make_demo_site,
        open_next_block,
        run_demo_site,
        write_demo_data,
    )

    console.print_markup(
        "[bold]tacita demo --live[/bold]: one server and three nodes on this machine, TLS and enrolment between them. "
        "Each node holds a third of the people of MovieLens-100K; only sums leave it."
    )
    if os.geteuid() == 0:
        console.print_note(
            "You are root: while the demo runs, every account on this machine could become root through it."
        )
    with console.show_clock("splitting MovieLens-100K over three nodes", quiet):
        people = write_demo_data(folder, data_dir)
    home = people.find_home_node(user)
    with console.show_clock("making keys, a server and three nodes", quiet):
        make_demo_site(folder, people)
    with ExitStack() as processes:
        with console.show_clock("starting the server and the nodes", quiet):
            server = processes.enter_context(run_demo_site(folder))
        begin_run(folder)
        _show_block(server, quiet)
        with console.show_clock("new interactions arrive on the nodes", quiet):
            import_block(folder, people, block=1)
        open_next_block(folder)
        _show_block(server, quiet)
        status = node_client.ask_node(folder / home, "status")
        console.print_markup(f"What node '{home}' says of itself: {status['server sees']}")
        recommendations = node_client.ask_node(folder / home, "recommend", user=user)
        console.print_markup(f"On node '{home}', without asking anybody:")
        result_tables.show_recommendations(user, recommendations)
        if stay:
            _show_pages(folder, people, user, stay)


def _show_pages(folder: Path, people: Any, user: str, stay: float) -> None:
    """Serve both pages until Ctrl-C; actors play everybody else."""
    from tacita.live.pages.demo_access import make_demo_access
    from tacita.live.processes import stop_on_signals
    from tacita.live.running.demo_actors import DemoActors

    home = folder / people.find_home_node(user)
    stopping = threading.Event()
    access = make_demo_access(folder / "server", home, user)
    console.print_note("")
    console.print_answer(f"Page of person {user}: {access.person_link}")
    console.print_answer(f"Page of the operator: {access.operator_url} (password: {access.password})")
    console.print_note(
        "Open both in a browser on this machine. Take one film back on the first: its certificate comes to the top of "
        "that page, and the operator's page shows that somebody asked, not who. The link works once; "
        f"`tacita node page {user} --folder {home}` makes another. Ctrl-C ends everything."
    )
    with stop_on_signals(stopping):
        DemoActors(folder, people, user).play_until_stopped(stopping, stay, console.print_note)


def _show_block(server: Path, quiet: bool) -> None:
    from tacita.live.running.demo import BLOCK_TIMEOUT, RUN

    result: dict[str, Any] = watch(server, RUN, quiet, BLOCK_TIMEOUT)[-1]
    score = f"NDCG@20 {result['ndcg@20']:.4f} over {result['users']:,} people"
    console.print_markup(
        f"Block {result['block']}: learned in one exchange of sums; {score}, of which the server got the sum and the "
        "count."
    )
