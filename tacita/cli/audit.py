"""The verbs of auditors: attacks on releases, on the traces of withdrawn data, and on budgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.audit_tables import format_attack, show_audit
from tacita.cli.options import (
    AsJson,
    Columns,
    DataDir,
    Imports,
    Quiet,
    RunArgument,
    RunOption,
    Sets,
    Threads,
    choose_run,
    find_run,
    import_modules,
    merge_settings,
    parse_columns,
)
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.core.types import BlockStream
    from tacita.runs.assembly import Machine

audit_app = typer.Typer(no_args_is_help=True, help="Attacks: what a release gives away, beside controls.")


@audit_app.command("tally")
def audit_tally(
    folder: RunArgument = None,
    named: RunOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the settings of the run.")] = False,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Who took part under this budget; repeat for more.")
    ] = None,
    sets: Sets = None,
    columns: Columns = "",
    imports: Imports = None,
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

    `tacita audit tally runs/mine --brief --json`

    `tacita audit tally --data ml-100k --epsilon 1 --epsilon 8`

    `tacita audit tally --data my.csv --columns user=customer,item=sku --set backbone.keep=50 --brief`
    """
    from tacita.report import tally_audit as report_audit
    from tacita.research.audit import tally_settings as audit
    from tacita.runs import assembly

    import_modules(imports)
    config = _load_config(find_run(folder, named), {"data": data, "backbone.name": "tally"}, sets, columns)
    machine = assembly.Machine(threads, data_dir=data_dir)
    budgets = _list_budgets(config, epsilon)
    if budgets:
        _audit_budgets(config, machine, budgets, out, as_json, quiet)
        return
    with console.show_progress("attacks", quiet) as tell:
        result = audit.audit_tally(config, machine, brief, tell, _make_data_printer(quiet))
    if out is not None:
        stem = report_audit.write_audit(result, out)
        console.print_note(f"wrote {stem}.csv and .png")
    if as_json:
        console.print_json(result)
        return
    show_audit(result)


def _list_budgets(config: RunConfig, epsilon: list[float] | None) -> list[float]:
    """The budgets to audit: those of the options, or else that of the run."""
    if epsilon:
        return epsilon
    return [] if config.privacy.epsilon is None else [config.privacy.epsilon]


def _make_data_printer(quiet: bool) -> Callable[[BlockStream], None] | None:
    return None if quiet else console.print_data_notes


def _select_facts(result: dict[str, Any], *names: str) -> dict[str, str]:
    return {name: str(result[name]) for name in names}


def _load_config(run: Path | None, flags: dict[str, Any], sets: list[str] | None, columns: str) -> RunConfig:
    """The settings to audit: those of a run folder, or the options for a dataset."""
    from tacita.methods import resolve_config
    from tacita.runs.serving import open_run

    if (run is None) == (flags["data"] is None):
        raise TacitaError("say what to audit: either a run folder, RUN or --run RUN, or --data NAME.")
    if run is None:
        roles = parse_columns(columns) or None
        settings = merge_settings(None, {**flags, "columns": roles}, sets or [])
        return resolve_config(settings, "the options")
    if sets or columns:
        raise TacitaError("--set and --columns go with --data: a run folder has its own settings.")
    return open_run(run).config


def _audit_budgets(
    config: RunConfig,
    machine: Machine,
    budgets: list[float],
    out: Path | None,
    as_json: bool,
    quiet: bool,
    order: bool = False,
) -> None:
    from tacita.core.config import PrivacyConfig, validate_model
    from tacita.report import budget_audit
    from tacita.research.audit import budget, budget_order

    readers = budget_order.READERS if order else budget.READERS
    audit_budget = budget_order.audit_order_membership if order else budget.audit_budget

    for epsilon in budgets:
        validate_model(PrivacyConfig, {"epsilon": epsilon}, "--epsilon")
    with console.show_progress("draws of people", quiet) as tell:
        result = audit_budget(config, machine, budgets, tell, _make_data_printer(quiet))
    if out is not None:
        stem = budget_audit.write_audit(result, readers, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(result)
        return
    facts = _select_facts(result, "data", "people", "delta")
    rows = budget_audit.make_rows(result, readers)
    result_tables.show_bench({**facts, "rows": rows}, False)
    for line in budget_audit.NOTES:
        console.print_note(line)


@audit_app.command("order")
def audit_order(
    folder: RunArgument = None,
    named: RunOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Who took part under this budget; repeat for more.")
    ] = None,
    sets: Sets = None,
    columns: Columns = "",
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="With budgets: folder for the table (Markdown, CSV).")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Who can be read from the matrix of what follows what that tally-order releases beside B, with controls.

    What 'tacita audit tally' reads is B; this reads B' alone, in the first block. With --epsilon, or for a run under a
    budget: who took part, by readers of B, of B', of both and of the server's sums, without a budget and under each.

    Examples:

    `tacita audit order --data ml-100k`

    `tacita audit order --data ml-100k --set split.kind=random --epsilon 8 --epsilon 1`
    """
    from tacita.research.audit.order import audit_order as audit
    from tacita.runs import assembly

    import_modules(imports)
    config = _load_config(find_run(folder, named), {"data": data, "backbone.name": "tally-order"}, sets, columns)
    machine = assembly.Machine(threads, data_dir=data_dir)
    budgets = _list_budgets(config, epsilon)
    if budgets:
        _audit_budgets(config, machine, budgets, out, as_json, quiet, order=True)
        return
    if out is not None:
        raise TacitaError("--out goes with --epsilon: without a budget there are two figures and no table.")
    with console.show_progress("attacks", quiet) as tell:
        result = audit(config, machine, tell, _make_data_printer(quiet))
    if as_json:
        console.print_json(result)
        return
    rows = [format_attack(name, attack) for name, attack in result["attacks"].items()]
    title = f"B' of {result['data']}, {result['people']:,} people"
    result_tables.show_table(title, rows, left_aligned=("attack",))
    console.print_note("A smaller figure is no protection: these are two readers; another may find more. No epsilon.")


@audit_app.command("scores")
def audit_scores(
    folder: RunArgument = None,
    named: RunOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with fedkdrec's settings.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="With --data: another method that sends scores.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Rounds that are listened to.")] = 10,
    sets: Sets = None,
    columns: Columns = "",
    imports: Imports = None,
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

    `tacita audit scores runs/mine --rounds 20 --json`
    """
    from tacita.report import score_audit
    from tacita.research.audit import curious_server
    from tacita.runs.assembly import Machine

    import_modules(imports)
    run = find_run(folder, named)
    if run is not None and method is not None:
        raise TacitaError("--method goes with --data: a run folder has its own.")
    config = _load_config(run, {"data": data, "method": method or "fedkdrec"}, sets, columns)
    machine = Machine(threads, data_dir=data_dir)
    with console.show_progress("settings", quiet) as tell:
        result = curious_server.audit_scores(config, machine, rounds, tell, _make_data_printer(quiet))
    if out is not None:
        stem = score_audit.write_audit(result, curious_server.ATTACKS, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(result)
        return
    facts = _select_facts(result, "data", "method", "backbone", "rounds", "seed")
    rows = score_audit.make_rows(result, curious_server.ATTACKS)
    result_tables.show_bench({**facts, "rows": rows}, False)
    console.print_note("In brackets the control: the same attack on scores shuffled within every upload.")
    console.print_note(result["note"])


@audit_app.command("forget")
def audit_forget(
    folder: RunArgument = None,
    named: RunOption = None,
    requests: Annotated[
        float, typer.Option("--requests", min=0.001, max=1.0, help="Share of the sharers, or of all, who withdraw.")
    ] = 0.3,
    brief: Annotated[
        bool, typer.Option("--brief", help="The run's own model: nothing planted, nobody held out.")
    ] = False,
    imports: Imports = None,
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
    from tacita.report import forgetting_audit
    from tacita.research.audit import forgetting
    from tacita.runs.assembly import Machine

    run = choose_run(folder, named, "tacita audit forget runs/mine")
    import_modules(imports)
    with console.show_progress("models", quiet) as tell:
        machine = Machine(threads, data_dir=data_dir)
        result = forgetting.audit_forgetting(run, requests, not brief, machine, tell)
    if out is not None:
        stem = forgetting_audit.write_audit(result, forgetting.MODELS, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(result)
        return
    console.print_note(forgetting_audit.describe_audit(result))
    rows = forgetting_audit.make_rows(result, forgetting.MODELS)
    result_tables.show_bench({"rows": rows}, False)
    models = [f"{name}: {description}" for name, description in forgetting.MODELS.items()]
    console.print_note("; ".join(models) + ".")
    for line in forgetting_audit.list_notes(result):
        console.print_note(line)


@audit_app.command("canary")
def audit_canary(
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise and of who is inside.")] = 1,
    only: Annotated[str, typer.Option("--only", help="Mechanisms whose name holds this.")] = "",
    factor: Annotated[
        float, typer.Option("--factor", min=0.1, max=100, help="So many times the canaries and plays.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (Markdown, JSON).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """How large every claimed epsilon really is, at least: canaries through the releases themselves.

    Each mechanism is played with the worst data there is. The bounds must lie below the claim, and with half of the
    noise, without the clip, or with a bug of its own above it. Then whole transcripts are compared, with one person and
    without them: replies, refusals, blocks, catalogue, models, certificates. Exit code 1: a claim is broken.

    Examples:

    `tacita audit canary`

    `tacita audit canary --only "first block" --factor 5`

    `tacita audit canary --only tally --seed 2 --json`
    """
    from tacita.report import canary_audit
    from tacita.research.audit.canaries.mechanism_audit import audit_canaries

    with console.show_progress("mechanisms", quiet) as tell:
        result = audit_canaries(seed, factor, tell, only)
    if out is not None:
        stem = canary_audit.write_audit(result, out)
        console.print_note(f"wrote {stem}.md and .json")
    if as_json:
        console.print_json(result)
    else:
        _show_canaries(result)
    if not result["holds"]:
        raise typer.Exit(1)


def _show_canaries(result: dict[str, Any]) -> None:
    from tacita.report import canary_audit

    if result["rows"]:
        result_tables.show_bench({"rows": canary_audit.make_rows(result)}, False)
        for line in canary_audit.NOTES:
            console.print_note(line)
    if result["transcripts"]:
        result_tables.show_bench({"rows": canary_audit.make_transcript_rows(result)}, False)
        for line in (*canary_audit.TRANSCRIPT_NOTES, *canary_audit.list_transcript_notes(result)):
            console.print_note(line)
    console.print_note(canary_audit.state_verdict(result))


@audit_app.command("uploads")
def audit_uploads(
    data: Annotated[str, typer.Option("--data", help="Dataset name or file.")] = "ml-100k",
    backbone: Annotated[str, typer.Option("--backbone", help="A model whose item rows travel.")] = "mf",
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="A budget to try; repeat for more (default: 8 and 1).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the run and of who is read.")] = 1,
    data_dir: DataDir = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (Markdown, JSON).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What one round's parameter uploads show: what people like, who took part; without a defence, under budgets.

    Examples:

    `tacita audit uploads --data ml-100k`

    `tacita audit uploads --data ml-100k --epsilon 2 --epsilon 0.5 --json`
    """
    from tacita.methods import resolve_config
    from tacita.report import upload_audit
    from tacita.research.audit import uploads
    from tacita.runs.assembly import Machine

    budgets = epsilon or [8.0, 1.0]
    if min(budgets) <= 0:
        raise TacitaError("--epsilon must be a number above 0.")
    settings = {"data": data, "backbone": {"name": backbone}, "split": {"kind": "random"}, "seed": seed}
    with console.show_progress("settings", quiet) as tell:
        machine = Machine(threads, data_dir=data_dir)
        config = resolve_config(settings, "the options")
        result = uploads.audit_uploads(config, machine, budgets, tell, _make_data_printer(quiet))
    if out is not None:
        stem = upload_audit.write_audit(result, uploads.READERS, out)
        console.print_note(f"wrote {stem}.md and .json")
    if as_json:
        console.print_json(result)
        return
    facts = _select_facts(result, "data", "backbone", "people", "seed")
    rows = upload_audit.make_rows(result, uploads.READERS)
    result_tables.show_bench({**facts, "rows": rows}, False)
    for line in upload_audit.NOTES:
        console.print_note(line)
