"""The verbs of people who want to know, or to take back, what they gave: forget and audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, DataDir, Quiet, Threads
from tacita.core.errors import TacitaError

audit_app = typer.Typer(no_args_is_help=True, help="Attacks: what a release gives away, beside controls.")


def forget(
    run: Annotated[Path, typer.Option("--run", help="Run folder of backbone tally.")],
    user: Annotated[str, typer.Option("--user", help="Raw user id.")],
    items: Annotated[str | None, typer.Option("--items", help="Raw item ids, comma-separated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that the user has.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for others where retractions are held.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train again on what remains and compare every score.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take a user's data back: from the device, from what the server learned, with a certificate.

    Examples:

    `tacita forget --run runs/mine --user 196 --items 242,393`

    `tacita forget --run runs/mine --user 196 --all --verify`
    """
    from tacita.lab import certificate, forgetting

    if everything == (items is not None):
        raise TacitaError("say what to forget: either --items a,b or --all.")
    named = None if items is None else [one.strip() for one in items.split(",") if one.strip()]
    with console.working("taking it back", quiet=as_json):
        found = forgetting.forget(run, user, named, now, verify)
    if as_json:
        console.print_json(found)
        return
    if certificate.ALONE in found["residual_risk"]:
        console.say(f"Note: {certificate.ALONE}")
    cost, path = found["cost"], run / f"forget-{found['request']['id']}.json"
    console.tell(
        f"{found['request']['n_items']} items of user {user} have left the device; "
        f"the model: {found['method']['mode']}, {cost['seconds_total']:.2f} s."
    )
    difference = found["guarantee"]["max_score_difference"]
    if isinstance(difference, float):
        console.tell(
            f"Against training again ({cost['seconds_retrain']:.2f} s): largest difference of a score {difference:.1g}."
        )
    console.say(f"Verdict: {found['verdict']}. Certificate: {path}")


@audit_app.command("tally")
def audit_tally(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the settings of the run.")] = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (CSV) and a picture (PNG).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Who can be read from the matrices that tally releases, beside controls, and what each setting costs.

    No setting of tally protects people: the defaults do not either. Cuts (min_item, keep) are mitigations.

    Examples:

    `tacita audit tally --data ml-100k --out audits`

    `tacita audit tally --run runs/mine --brief --json`
    """
    from tacita.audit import table as audit
    from tacita.core.config import RunConfig
    from tacita.lab import assembling, serving
    from tacita.report import audit as report_audit

    if (run is None) == (data is None):
        raise TacitaError("say what to audit: either --run FOLDER or --data NAME.")
    config = serving.open_run(run).config if run is not None else RunConfig(data=data or "", backbone={"name": "tally"})
    with console.counting("attacks", quiet) as tell:
        on_data = None if quiet else console.say_data
        found = audit.audit_tally(config, assembling.Machine(threads, data_dir=data_dir), brief, tell, on_data)
    if out is not None:
        stem = report_audit.write(found, out)
        console.say(f"wrote {stem}.csv and .png")
    if as_json:
        console.print_json(found)
        return
    _show_audit(found)


@audit_app.command("scores")
def audit_scores(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with fedkdrec's settings.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="With --data: another method that sends scores.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Rounds that are listened to.")] = 10,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (Markdown, CSV).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What a server reads from the scores that devices send: four attacks beside controls, alpha and swap varied.

    No epsilon is claimed for any setting; with alpha of 0.5 or more a threshold reads every label that is not swapped.

    Examples:

    `tacita audit scores --data ml-100k --out audits`

    `tacita audit scores --run runs/mine --rounds 20 --json`
    """
    from tacita.audit import listening
    from tacita.lab.assembling import Machine
    from tacita.lab.serving import open_run
    from tacita.methods import configured
    from tacita.report import score_audit

    if (run is None) == (data is None):
        raise TacitaError("say what to audit: either --run FOLDER or --data NAME.")
    if run is not None and method is not None:
        raise TacitaError("--method goes with --data: a run folder has its own.")
    if run is not None:
        config = open_run(run).config
    else:
        config = configured({"data": data, "method": method or "fedkdrec"}, "the options")
    with console.counting("settings", quiet) as tell:
        on_data = None if quiet else console.say_data
        found = listening.audit_scores(config, Machine(threads, data_dir=data_dir), rounds, tell, on_data)
    if out is not None:
        stem = score_audit.write(found, listening.ATTACKS, out)
        console.say(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    facts = {name: str(found[name]) for name in ("data", "method", "backbone", "rounds", "seed")}
    console.show_bench({**facts, "rows": score_audit.rows_of(found, listening.ATTACKS)}, False)
    console.say("In brackets the control: the same attack on scores shuffled within every upload.")
    console.say(found["note"])


def _show_audit(found: dict[str, Any]) -> None:
    from tacita.report import audit as report_audit

    rows = [{"setting": report_audit.named(found, row)} | _row(row) for row in found["rows"]]
    console.show_bench({"data": found["data"], "users in each block": str(found["users"]), "rows": rows}, False)
    for row in found["rows"]:
        table = [
            {
                "attack": words,
                "found": report_audit.in_words(name, row["attacks"][name]),
                "control": report_audit.in_words(name, row["attacks"][name], "control"),
            }
            for name, words in report_audit.ATTACKS.items()
        ]
        console.show_bench({"setting": report_audit.named(found, row), "rows": table}, False)
    console.say("Control: the same attack where the person, or the answer, is not in the release.")
    console.say(
        f"Up per client: {found['bytes_up_readable']:,.0f} bytes as a readable list, "
        f"{found['bytes_up_maskable'] / 1e6:.2f} MB in a form that can be masked."
    )


def _row(row: dict[str, Any]) -> dict[str, str]:
    """What a setting costs, and whom peeling reads in each block."""
    from tacita.report.audit import quality_of

    metric = quality_of(row)
    return {
        metric: f"{row[metric]:.4f}",
        "peeled, each block": " / ".join(map(str, row["peeled"])),
        "MB down": f"{row['bytes_down'] / 1e6:.2f}",
    }
