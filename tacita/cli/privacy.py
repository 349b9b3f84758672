"""The verbs of people who want to know, or to take back, what they gave: share, unshare, forget and ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, DataDir, RunOption, Threads, split_run_argument
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import RunRequestResult
    from tacita.runs.forgetting.requests import RawRequest, RequestKind

User = Annotated[str | None, typer.Option("--user", help="Raw user id.")]
Items = Annotated[str | None, typer.Option("--items", help="Raw item ids, comma-separated.")]
Everything = Annotated[bool, typer.Option("--all", help="All that the user has.")]
FromFile = Annotated[
    Path | None, typer.Option("--from", help="Requests of many people: a CSV file with the columns user and item.")
]
RetrainFlag = Annotated[bool, typer.Option("--again", help="Train again without it, whatever the run's own way is.")]
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
    again: RetrainFlag = False,
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
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

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
    wish = replace(_parse_request("forget", user, items, everything, requests), alone=now, retrain=again)
    with console.show_clock("taking it back", quiet=as_json):
        granted = submit_request(run, wish, verify, Machine(threads, data_dir=data_dir))
    _show_outcome(granted, as_json)


def unshare(
    run: Annotated[Path, typer.Option("--run", help="Run folder.")],
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    again: RetrainFlag = False,
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
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

    wish = replace(_parse_request("unshare", user, items, everything, requests), retrain=again)
    with console.show_clock("taking it back", quiet=as_json):
        granted = submit_request(run, wish, verify, Machine(threads, data_dir=data_dir))
    _show_outcome(granted, as_json)


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
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

    wish = _parse_request("share", user, items, everything, requests)
    with console.show_clock("sharing", quiet=as_json):
        granted = submit_request(run, wish, False, Machine(threads, data_dir=data_dir))
    _show_outcome(granted, as_json)


def _calibrate(run: Path, leavers: int, machine: Machine, as_json: bool) -> None:
    """What retractions of a run leave of those who leave for trial."""
    from tacita.runs.forgetting.run_calibration import calibrate_run

    with console.show_clock("letting people leave for trial", quiet=as_json):
        found, said = calibrate_run(run, leavers, machine)
    if as_json:
        console.print_json(found.model_dump())
        return
    console.print_markup(said[:1].upper() + said[1:])


def ledger(
    folder: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder.")] = None,
    word: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Raw user id: that person's own account.")
    ] = None,
    named: RunOption = None,
    user: User = None,
    as_json: AsJson = False,
) -> None:
    """What releases have cost people's privacy budgets: spent, left, by event.

    Without a user it is what an operator may see: how spending is spread, and nobody's own account. A person's
    account is on their device; in the lab that is the folder's clients file, which is opened for it.

    Examples:

    `tacita ledger runs/mine`

    `tacita ledger runs/mine 196`

    `tacita ledger --run runs/mine --user 196`
    """
    from tacita.runs.ledger import describe_ledger, read_run_ledger

    run, person = split_run_argument(named, [folder, word], "tacita ledger runs/mine 196")
    if person is not None and user is not None:
        raise TacitaError("a user is named twice; leave out --user.")
    user = person if user is None else user
    told = read_run_ledger(run, user)
    if as_json:
        console.print_json(told)
        return
    if user is not None:
        console.print_note("From the clients file of the run, which stands for the person's own device.")
    for line in describe_ledger(told):
        console.print_answer(line)


def _parse_request(
    kind: RequestKind, user: str | None, items: str | None, everything: bool, requests: Path | None
) -> RawRequest:
    """What the options ask for."""
    from tacita.runs.forgetting.requests import RawRequest, read_request_file

    if (user is None) == (requests is None):
        raise TacitaError("say who asks: either --user ID or --from FILE.")
    if requests is not None:
        if items is not None or everything:
            raise TacitaError("--from names users and items in its file; leave out --items and --all.")
        return read_request_file(requests, kind)
    if everything == (items is not None):
        raise TacitaError(f"say what to {kind}: either --items a,b or --all.")
    named = None if items is None else [one.strip() for one in items.split(",") if one.strip()]
    return RawRequest(kind, {user or "": named})


def _show_outcome(granted: RunRequestResult, as_json: bool) -> None:
    """What came of a wish, for people."""
    from tacita.runs.forgetting.certificate import ROUNDING, SENT_ALONE

    found = granted.certificate
    if as_json:
        console.print_json(found or {"said": granted.message, "items": granted.n_items, "people": granted.n_people})
        _report_verdict(found)
        return
    if found is None:
        console.print_markup(granted.message[:1].upper() + granted.message[1:])
        if granted.n_items:
            console.print_markup(
                f"{_format_count(granted.n_items, 'item')} of {_format_count(granted.n_people, 'user')} are shared now."
            )
        return
    if SENT_ALONE in found["residual_risk"]:
        console.print_note(f"Note: {SENT_ALONE}")
    request, cost, method = found["request"], found["cost"], found["method"]
    people = _format_count(len(request["subjects"]), "user")
    console.print_markup(f"{method['why'][:1].upper()}{method['why'][1:]}")
    console.print_markup(
        f"{request['n_items']} items of {people} are taken back; {method['name']}: {method['mode']}, "
        f"{cost['seconds_request']:.2f} s."
    )
    if granted.cost_message:
        console.print_answer(granted.cost_message)
    difference, audit = found["guarantee"]["max_score_difference"], found["audit"]
    if isinstance(difference, float):
        people = _format_count(found["guarantee"]["people_compared"], "user")
        console.print_markup(
            f"Against training again ({cost['seconds_retrain']:.2f} s): largest difference of a score {difference:.1g} "
            f"({people} compared)."
        )
        console.print_markup(f"Pair membership AUC: {_format_aucs(audit['auc_pairs'])}.")
    elif found["guarantee"]["type"] == ROUNDING:
        console.print_markup("That is equal to training again up to rounding, by construction; --verify checks it.")
    if method["leaves"]:
        console.print_markup(method["leaves"])
    console.print_note(f"Certificate: {granted.path}")
    _report_verdict(found)


def _format_aucs(aucs: dict[str, Any]) -> str:
    words = {"before": "before", "after": "after", "retrain": "trained again"}
    if all(aucs[name] is None for name in words):
        return "not measurable: what these people still have scores withdrawn items and others alike"
    said = {name: "not measurable" if aucs[name] is None else f"{aucs[name]:.3f}" for name in words}
    return ", ".join(f"{said[name]} {when}" for name, when in words.items())


def _format_count(n: int, what: str) -> str:
    return f"{n:,} {what}" + "s" * (n != 1)


def _report_verdict(certificate: dict[str, Any] | None) -> None:
    """Say the verdict; who calls this from a script must not take a failure for a success."""
    if certificate is not None:
        console.print_note(f"Verdict: {certificate['verdict']}.")
        if str(certificate["verdict"]).startswith("fail"):
            raise typer.Exit(1)
