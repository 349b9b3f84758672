"""The verbs of people about their own data: share, unshare, forget and ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import (
    AsJson,
    DataDir,
    Imports,
    RunArgument,
    RunOption,
    Threads,
    choose_run,
    import_modules,
    split_list,
    split_run_argument,
)
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.certificate import Certificate
    from tacita.runs.forgetting.request_service import RunRequestResult
    from tacita.runs.forgetting.requests import RawRequest, RawRequestKind

User = Annotated[str | None, typer.Option("--user", help="Raw user id.")]
Items = Annotated[str | None, typer.Option("--items", help="Raw item ids, comma-separated.")]
Everything = Annotated[bool, typer.Option("--all", help="All that the user has.")]
FromFile = Annotated[
    Path | None, typer.Option("--from", help="Requests of many people: a CSV file with the columns user and item.")
]
RetrainFlag = Annotated[bool, typer.Option("--again", help="Train again without it, whatever the run's own way is.")]
Verify = Annotated[bool, typer.Option("--verify", help="Train again on what remains, and compare.")]


def forget(
    folder: RunArgument = None,
    named: RunOption = None,
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    calibrate: Annotated[
        int | None,
        typer.Option("--calibrate", min=1, help="Before anybody leaves by retraction: let so many leave for trial."),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for others where retractions are held.")] = False,
    retrain: RetrainFlag = False,
    verify: Verify = False,
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Take people's data back: from their devices, and from what was learned, with a certificate.

    Examples:

    `tacita forget runs/mine --user 196 --items 242,393`

    `tacita forget runs/mine --user 196 --all --verify`

    `tacita forget runs/mine --calibrate 20`
    """
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

    run = choose_run(folder, named, "tacita forget runs/mine --user 196 --all")
    import_modules(imports)
    machine = Machine(threads, data_dir=data_dir)
    if calibrate is not None:
        other_options = {
            "--user": user,
            "--items": items,
            "--all": everything,
            "--from": requests,
            "--now": now,
            "--again": retrain,
            "--verify": verify,
        }
        _check_calibrates_alone(other_options)
        _calibrate(run, calibrate, machine, as_json)
        return
    request = replace(_parse_request("forget", user, items, everything, requests), alone=now, retrain=retrain)
    with console.show_clock("taking it back", quiet=as_json):
        result = submit_request(run, request, verify, machine)
    _show_request_result(result, as_json)


def _check_calibrates_alone(other_options: dict[str, Any]) -> None:
    conflicts = [name for name, value in other_options.items() if value not in (None, False)]
    if conflicts:
        raise TacitaError(
            f"--calibrate is asked for by itself, before anybody leaves; leave out {' and '.join(conflicts)}."
        )


def unshare(
    folder: RunArgument = None,
    named: RunOption = None,
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    retrain: RetrainFlag = False,
    verify: Verify = False,
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Take back what people shared with the server, and what it learned from that, with a certificate.

    Examples:

    `tacita unshare runs/mine --user 196 --items 242,393`

    `tacita unshare runs/mine --from requests.csv --verify`
    """
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

    run = choose_run(folder, named, "tacita unshare runs/mine --user 196 --all")
    import_modules(imports)
    request = replace(_parse_request("unshare", user, items, everything, requests), retrain=retrain)
    with console.show_clock("taking it back", quiet=as_json):
        result = submit_request(run, request, verify, Machine(threads, data_dir=data_dir))
    _show_request_result(result, as_json)


def share(
    folder: RunArgument = None,
    named: RunOption = None,
    user: User = None,
    items: Items = None,
    everything: Everything = False,
    requests: FromFile = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Share some of people's items with the server of a run; what is shared can be taken back.

    Examples:

    `tacita share runs/mine --user 196 --items 242,393`
    """
    from tacita.runs.assembly import Machine
    from tacita.runs.forgetting.request_service import submit_request

    run = choose_run(folder, named, "tacita share runs/mine --user 196 --items 242,393")
    import_modules(imports)
    request = _parse_request("share", user, items, everything, requests)
    with console.show_clock("sharing", quiet=as_json):
        result = submit_request(run, request, False, Machine(threads, data_dir=data_dir))
    _show_request_result(result, as_json)


def _calibrate(run: Path, leavers: int, machine: Machine, as_json: bool) -> None:
    """Measure what retractions of a run leave behind, with people who leave for trial."""
    from tacita.runs.forgetting.run_calibration import calibrate_run

    with console.show_clock("letting people leave for trial", quiet=as_json):
        calibration, sentence = calibrate_run(run, leavers, machine)
    if as_json:
        console.print_json(calibration.model_dump())
        return
    console.print_markup(_capitalize(sentence))


def ledger(
    folder: Annotated[str | None, typer.Argument(metavar="RUN", help="Run folder.")] = None,
    word: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Raw user id: that person's own account.")
    ] = None,
    named: RunOption = None,
    user: User = None,
    imports: Imports = None,
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
    import_modules(imports)
    account = read_run_ledger(run, user)
    if as_json:
        console.print_json(account)
        return
    if user is not None:
        console.print_note("From the clients file of the run, which stands for the person's own device.")
    for line in describe_ledger(account):
        console.print_answer(line)


def _parse_request(
    kind: RawRequestKind, user: str | None, items: str | None, everything: bool, requests: Path | None
) -> RawRequest:
    """The request that the options state."""
    from tacita.runs.forgetting.requests import RawRequest, read_request_file

    if (user is None) == (requests is None):
        raise TacitaError("say who asks: either --user ID or --from FILE.")
    if requests is not None:
        if items is not None or everything:
            raise TacitaError("--from names users and items in its file; leave out --items and --all.")
        return read_request_file(requests, kind)
    if everything == (items is not None):
        raise TacitaError(f"say what to {kind}: either --items a,b or --all.")
    named_items = None if items is None else split_list(items)
    return RawRequest(kind, {user or "": named_items})


def _show_request_result(result: RunRequestResult, as_json: bool) -> None:
    """Print what became of a request, for people or machines."""
    certificate = result.certificate
    if as_json:
        counts = {"said": result.message, "items": result.n_items, "people": result.n_people}
        console.print_json(counts if certificate is None else certificate.to_json())
    elif certificate is None:
        _show_sharing(result)
    else:
        _show_certificate(certificate, result)
    if certificate is not None:
        _report_verdict(certificate.verdict)


def _show_sharing(result: RunRequestResult) -> None:
    console.print_markup(_capitalize(result.message))
    if result.n_items:
        items = _format_count(result.n_items, "item")
        people = _format_count(result.n_people, "user")
        console.print_markup(f"{items} of {people} are shared now.")


def _show_certificate(certificate: Certificate, result: RunRequestResult) -> None:
    from tacita.runs.forgetting.certificate import SENT_ALONE

    if SENT_ALONE in certificate.residual_risk:
        console.print_note(f"Note: {SENT_ALONE}")
    method = certificate.method
    people = _format_count(len(certificate.request.subjects), "user")
    seconds = certificate.cost.seconds_request
    console.print_markup(_capitalize(method.why))
    console.print_markup(
        f"{result.n_items} items of {people} are taken back; {method.name}: {method.mode}, {seconds:.2f} s."
    )
    if result.cost_message:
        console.print_answer(result.cost_message)
    _show_comparison(certificate)
    if method.leaves:
        console.print_markup(method.leaves)
    console.print_note(f"Certificate: {result.path}")


def _show_comparison(certificate: Certificate) -> None:
    """Print how far the model is from training again, if that was measured or is known."""
    from tacita.runs.forgetting.certificate import ROUNDING

    guarantee = certificate.guarantee
    difference = guarantee.max_score_difference
    n_people = guarantee.people_compared
    seconds = certificate.cost.seconds_retrain
    if isinstance(difference, float) and isinstance(n_people, int) and isinstance(seconds, float):
        people = _format_count(n_people, "user")
        aucs = _format_aucs(certificate.audit["auc_pairs"])
        console.print_markup(
            f"Against training again ({seconds:.2f} s): largest difference of a score {difference:.1g} "
            f"({people} compared)."
        )
        console.print_markup(f"Pair membership AUC: {aucs}.")
    elif guarantee.type == ROUNDING:
        console.print_markup("That is equal to training again up to rounding, by construction; --verify checks it.")


def _format_aucs(aucs: dict[str, Any]) -> str:
    times = {"before": "before", "after": "after", "retrain": "trained again"}
    if all(aucs[name] is None for name in times):
        return "not measurable: what these people still have scores withdrawn items and others alike"
    parts = []
    for name, time in times.items():
        value = "not measurable" if aucs[name] is None else f"{aucs[name]:.3f}"
        parts.append(f"{value} {time}")
    return ", ".join(parts)


def _format_count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _capitalize(sentence: str) -> str:
    """A capital for the first letter; the others stay."""
    return sentence[:1].upper() + sentence[1:]


def _report_verdict(verdict: str) -> None:
    """Print the verdict; a failure ends the program with an error code, so that a script notices it."""
    console.print_note(f"Verdict: {verdict}.")
    if verdict.startswith("fail"):
        raise typer.Exit(1)
