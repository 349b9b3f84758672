"""The verbs of people who want to know, or to take back, what they gave: share, unshare, forget, ledger and audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, DataDir, Quiet, Threads
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.lab.assembling import Machine
    from tacita.lab.forgetting.door import Granted
    from tacita.lab.forgetting.wishes import Kind, Wish

audit_app = typer.Typer(no_args_is_help=True, help="Attacks: what a release gives away, beside controls.")


User = Annotated[str | None, typer.Option("--user", help="Raw user id.")]
Items = Annotated[str | None, typer.Option("--items", help="Raw item ids, comma-separated.")]
Everything = Annotated[bool, typer.Option("--all", help="All that the user has.")]
FromFile = Annotated[
    Path | None, typer.Option("--from", help="Requests of many people: a CSV file with the columns user and item.")
]
Again = Annotated[bool, typer.Option("--again", help="Train again without it, whatever the run's own way is.")]
Verify = Annotated[bool, typer.Option("--verify", help="Train again on what remains, and compare.")]


def forget(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    calibrate: Annotated[
        int | None,
        typer.Option("--calibrate", min=1, help="Before anybody leaves by retraction: let so many leave for trial."),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for others where retractions are held.")] = False,
    again: Again = False,
    verify: Verify = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Take people's data back: from their devices, and from what was learned, with a certificate.

    Examples:

    `tacita forget --run runs/mine --user 196 --items 242,393`

    `tacita forget --run runs/mine --user 196 --all --verify`

    `tacita forget --run runs/mine --calibrate 20`
    """
    from tacita.lab.assembling import Machine
    from tacita.lab.forgetting.door import grant

    if calibrate is not None:
        given = {"--user": user, "--items": items, "--all": everything, "--from": requests, "--now": now,
                 "--again": again, "--verify": verify}  # fmt: skip
        wrong = [name for name, value in given.items() if value not in (None, False)]
        if wrong:
            raise TacitaError(
                f"--calibrate is asked for by itself, before anybody leaves; leave out {' and '.join(wrong)}."
            )
        _calibrate(run, calibrate, Machine(threads, data_dir=data_dir), as_json)
        return
    wish = replace(_wish("forget", user, items, everything, requests), alone=now, again=again)
    with console.working("taking it back", quiet=as_json):
        granted = grant(run, wish, verify, Machine(threads, data_dir=data_dir))
    _tell(granted, as_json)


def unshare(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    again: Again = False,
    verify: Verify = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Take back what people shared with the server, and what it learned from that, with a certificate.

    Examples:

    `tacita unshare --run runs/mine --user 196 --items 242,393`

    `tacita unshare --run runs/mine --from requests.csv --verify`
    """
    from tacita.lab.assembling import Machine
    from tacita.lab.forgetting.door import grant

    wish = replace(_wish("unshare", user, items, everything, requests), again=again)
    with console.working("taking it back", quiet=as_json):
        granted = grant(run, wish, verify, Machine(threads, data_dir=data_dir))
    _tell(granted, as_json)


def share(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Share some of people's items with the server of a run; what is shared can be taken back.

    Examples:

    `tacita share --run runs/mine --user 196 --items 242,393`
    """
    from tacita.lab.assembling import Machine
    from tacita.lab.forgetting.door import grant

    wish = _wish("share", user, items, everything, requests)
    with console.working("sharing", quiet=as_json):
        granted = grant(run, wish, False, Machine(threads, data_dir=data_dir))
    _tell(granted, as_json)


def _calibrate(run: Path, leavers: int, machine: Machine, as_json: bool) -> None:
    """What retractions of a run leave of those who leave for trial."""
    from tacita.lab.forgetting.calibrating import calibrate_run

    with console.working("letting people leave for trial", quiet=as_json):
        found, said = calibrate_run(run, leavers, machine)
    if as_json:
        console.print_json(found.model_dump())
        return
    console.tell(said[:1].upper() + said[1:])


def ledger(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    user: Annotated[str | None, typer.Argument(help="Raw user id: that person's own account.")] = None,
    as_json: AsJson = False,
) -> None:
    """What releases have cost people's privacy budgets: spent, left, by event.

    Without a user it is what an operator may see: how spending is spread, and nobody's own account. A person's
    account is on their device; in the lab that is the folder's clients file, which is opened for it.

    Examples:

    `tacita ledger runs/mine`

    `tacita ledger runs/mine 196`
    """
    from tacita.lab.ledger import in_words, run_ledger

    told = run_ledger(run, user)
    if as_json:
        console.print_json(told)
        return
    if user is not None:
        console.say("From the clients file of the run, which stands for the person's own device.")
    for line in in_words(told):
        console.answer(line)


def _wish(kind: Kind, user: str | None, items: str | None, everything: bool, requests: Path | None) -> Wish:
    """What the options ask for."""
    from tacita.lab.forgetting.wishes import Wish, read_wish

    if (user is None) == (requests is None):
        raise TacitaError("say who asks: either --user ID or --from FILE.")
    if requests is not None:
        if items is not None or everything:
            raise TacitaError("--from names users and items in its file; leave out --items and --all.")
        return read_wish(requests, kind)
    if everything == (items is not None):
        raise TacitaError(f"say what to {kind}: either --items a,b or --all.")
    named = None if items is None else [one.strip() for one in items.split(",") if one.strip()]
    return Wish(kind, {user or "": named})


def _tell(granted: Granted, as_json: bool) -> None:
    """What came of a wish, for people."""
    from tacita.lab.forgetting.certificate import ALONE

    found = granted.certificate
    if as_json:
        console.print_json(found or {"said": granted.said, "items": granted.n_items, "people": granted.n_people})
        _judge(found)
        return
    if found is None:
        console.tell(granted.said[:1].upper() + granted.said[1:])
        if granted.n_items:
            console.tell(f"{_counted(granted.n_items, 'item')} of {_counted(granted.n_people, 'user')} are shared now.")
        return
    if ALONE in found["residual_risk"]:
        console.say(f"Note: {ALONE}")
    request, cost, method = found["request"], found["cost"], found["method"]
    people = _counted(len(request["subjects"]), "user")
    console.tell(f"{method['why'][:1].upper()}{method['why'][1:]}")
    console.tell(
        f"{request['n_items']} items of {people} are taken back; {method['name']}: {method['mode']}, "
        f"{cost['seconds_request']:.2f} s."
    )
    difference, audit = found["guarantee"]["max_score_difference"], found["audit"]
    if isinstance(difference, float):
        console.tell(
            f"Against training again ({cost['seconds_retrain']:.2f} s): largest difference of a score {difference:.1g}."
        )
        auc = {name: "-" if v is None else f"{v:.3f}" for name, v in audit["auc_pairs"].items() if name != "ci"}
        console.tell(
            f"Pair membership AUC: {auc['before']} before, {auc['after']} after, {auc['retrain']} trained again."
        )
    if method["leaves"]:
        console.tell(method["leaves"])
    console.say(f"Certificate: {granted.path}")
    _judge(found)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" + "s" * (n != 1)


def _judge(found: dict[str, Any] | None) -> None:
    """Say the verdict; who calls this from a script must not take a failure for a success."""
    if found is not None:
        console.say(f"Verdict: {found['verdict']}.")
        if str(found["verdict"]).startswith("fail"):
            raise typer.Exit(1)


@audit_app.command("tally")
def audit_tally(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the settings of the run.")] = False,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Who took part under this budget; repeat for more.")
    ] = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (CSV) and a picture (PNG).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Who can be read from the matrices that tally releases, beside controls, and what each setting costs.

    Without a budget no setting of tally protects people: the defaults do not either. Cuts (min_item, keep) are
    mitigations. With --epsilon, or for a run under a budget: who took part, without a budget and under each.

    Examples:

    `tacita audit tally --data ml-100k --out audits`

    `tacita audit tally --run runs/mine --brief --json`

    `tacita audit tally --data ml-100k --epsilon 1 --epsilon 8`
    """
    from tacita.audit import table as audit
    from tacita.core.config import RunConfig
    from tacita.lab import assembling, serving
    from tacita.report import audit as report_audit

    if (run is None) == (data is None):
        raise TacitaError("say what to audit: either --run FOLDER or --data NAME.")
    config = serving.open_run(run).config if run is not None else RunConfig(data=data or "", backbone={"name": "tally"})
    budgets = epsilon or ([] if config.privacy.epsilon is None else [config.privacy.epsilon])
    if budgets:
        _audit_budgets(config, assembling.Machine(threads, data_dir=data_dir), budgets, out, as_json, quiet)
        return
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


def _audit_budgets(
    config: RunConfig, machine: Machine, budgets: list[float], out: Path | None, as_json: bool, quiet: bool
) -> None:
    from tacita.audit.budget import READERS, audit_budget
    from tacita.core.config import PrivacyConfig, validated
    from tacita.report import budget_audit

    for one in budgets:
        validated(PrivacyConfig, {"epsilon": one}, "--epsilon")
    with console.counting("draws of people", quiet) as tell:
        found = audit_budget(config, machine, budgets, tell, None if quiet else console.say_data)
    if out is not None:
        stem = budget_audit.write(found, READERS, out)
        console.say(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    facts = {name: str(found[name]) for name in ("data", "people", "delta")}
    console.show_bench({**facts, "rows": budget_audit.rows_of(found, READERS)}, False)
    for line in budget_audit.NOTES:
        console.say(line)


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


@audit_app.command("forget")
def audit_forget(
    run: Annotated[Path, typer.Argument(help="Run folder of a method that takes data back.")],
    requests: Annotated[
        float, typer.Option("--requests", min=0.001, max=1.0, help="Share of the sharers, or of all, who withdraw.")
    ] = 0.3,
    brief: Annotated[
        bool, typer.Option("--brief", help="The run's own model: nothing planted, nobody held out.")
    ] = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (Markdown, CSV).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What withdrawn data still shows of itself, beside training again without it. The run stays as it is.

    Examples:

    `tacita audit forget runs/mine`

    `tacita audit forget runs/mine --requests 0.3 --brief --out audits`
    """
    from tacita.audit import forgetting
    from tacita.lab.assembling import Machine
    from tacita.report import forgetting_audit

    with console.counting("models", quiet) as tell:
        machine = Machine(threads, data_dir=data_dir)
        found = forgetting.audit_forgetting(run, requests, not brief, machine, tell)
    if out is not None:
        stem = forgetting_audit.write(found, forgetting.MODELS, out)
        console.say(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    console.say(forgetting_audit.about(found))
    console.show_bench({"rows": forgetting_audit.rows_of(found, forgetting.MODELS)}, False)
    console.say("; ".join(f"{name}: {words}" for name, words in forgetting.MODELS.items()) + ".")
    for line in forgetting_audit.lines_of(found):
        console.say(line)


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
