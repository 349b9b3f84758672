"""The verbs of those who doubt: attacks on what is released, on what is left of withdrawn data, on the budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, Columns, DataDir, Quiet, Sets, Threads, merge_settings, parse_columns
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.runs.assembly import Machine

audit_app = typer.Typer(no_args_is_help=True, help="Attacks: what a release gives away, beside controls.")


@audit_app.command("tally")
def audit_tally(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the settings of the run.")] = False,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Who took part under this budget; repeat for more.")
    ] = None,
    sets: Sets = None,
    columns: Columns = "",
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

    `tacita audit tally --data my.csv --columns user=customer,item=sku --set backbone.keep=50 --brief`
    """
    from tacita.report import tally_audit as report_audit
    from tacita.research.audit import tally_settings as audit
    from tacita.runs import assembly

    config = _load_config(run, {"data": data, "backbone.name": "tally"}, sets, columns)
    budgets = epsilon or ([] if config.privacy.epsilon is None else [config.privacy.epsilon])
    if budgets:
        _audit_budgets(config, assembly.Machine(threads, data_dir=data_dir), budgets, out, as_json, quiet)
        return
    with console.show_progress("attacks", quiet) as tell:
        on_data = None if quiet else console.print_data_notes
        found = audit.audit_tally(config, assembly.Machine(threads, data_dir=data_dir), brief, tell, on_data)
    if out is not None:
        stem = report_audit.write_audit(found, out)
        console.print_note(f"wrote {stem}.csv and .png")
    if as_json:
        console.print_json(found)
        return
    _show_audit(found)


def _load_config(run: Path | None, flags: dict[str, Any], sets: list[str] | None, columns: str) -> RunConfig:
    """The settings that are audited: those of a run folder, or what the options say of a dataset."""
    from tacita.methods import resolve_config
    from tacita.runs.serving import open_run

    if (run is None) == (flags["data"] is None):
        raise TacitaError("say what to audit: either --run FOLDER or --data NAME.")
    if run is None:
        told = parse_columns(columns) or None
        return resolve_config(merge_settings(None, {**flags, "columns": told}, sets or []), "the options")
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
    audit_budget = budget_order.audit_order_budget if order else budget.audit_budget

    for one in budgets:
        validate_model(PrivacyConfig, {"epsilon": one}, "--epsilon")
    with console.show_progress("draws of people", quiet) as tell:
        found = audit_budget(config, machine, budgets, tell, None if quiet else console.print_data_notes)
    if out is not None:
        stem = budget_audit.write_audit(found, readers, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    facts = {name: str(found[name]) for name in ("data", "people", "delta")}
    console.show_bench({**facts, "rows": budget_audit.make_rows(found, readers)}, False)
    for line in budget_audit.NOTES:
        console.print_note(line)


@audit_app.command("order")
def audit_order(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with default settings.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Who took part under this budget; repeat for more.")
    ] = None,
    sets: Sets = None,
    columns: Columns = "",
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

    config = _load_config(run, {"data": data, "backbone.name": "tally-order"}, sets, columns)
    budgets = epsilon or ([] if config.privacy.epsilon is None else [config.privacy.epsilon])
    if budgets:
        machine = assembly.Machine(threads, data_dir=data_dir)
        _audit_budgets(config, machine, budgets, out, as_json, quiet, order=True)
        return
    if out is not None:
        raise TacitaError("--out goes with --epsilon: without a budget there are two figures and no table.")
    with console.show_progress("attacks", quiet) as tell:
        on_data = None if quiet else console.print_data_notes
        found = audit(config, assembly.Machine(threads, data_dir=data_dir), tell, on_data)
    if as_json:
        console.print_json(found)
        return
    named = {"membership": "took part, 90 % of the line known (AUC)", "canary": "planted line's last item, named"}
    rows = []
    for name, one in found["attacks"].items():
        shown = [
            "–" if v is None else f"{v:.3f}" if name == "membership" else f"{round(v * n)} of {n}"
            for v, n in ((one["found"], one["of"]), (one["control"], one["of_control"]))
        ]
        rows.append({"attack": named[name], "found": shown[0], "control": shown[1]})
    console.show_table(f"B' of {found['data']}, {found['people']:,} people", rows, left_aligned=("attack",))
    console.print_note("A smaller figure is no protection: these are two readers; another may find more. No epsilon.")


@audit_app.command("scores")
def audit_scores(
    run: Annotated[Path | None, typer.Option("--run", help="Run folder whose settings are audited.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Dataset name or file, with fedkdrec's settings.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="With --data: another method that sends scores.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Rounds that are listened to.")] = 10,
    sets: Sets = None,
    columns: Columns = "",
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
    from tacita.report import score_audit
    from tacita.research.audit import curious_server
    from tacita.runs.assembly import Machine

    if run is not None and method is not None:
        raise TacitaError("--method goes with --data: a run folder has its own.")
    config = _load_config(run, {"data": data, "method": method or "fedkdrec"}, sets, columns)
    with console.show_progress("settings", quiet) as tell:
        on_data = None if quiet else console.print_data_notes
        found = curious_server.audit_scores(config, Machine(threads, data_dir=data_dir), rounds, tell, on_data)
    if out is not None:
        stem = score_audit.write_audit(found, curious_server.ATTACKS, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    facts = {name: str(found[name]) for name in ("data", "method", "backbone", "rounds", "seed")}
    console.show_bench({**facts, "rows": score_audit.make_rows(found, curious_server.ATTACKS)}, False)
    console.print_note("In brackets the control: the same attack on scores shuffled within every upload.")
    console.print_note(found["note"])


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
    from tacita.report import forgetting_audit
    from tacita.research.audit import forgetting
    from tacita.runs.assembly import Machine

    with console.show_progress("models", quiet) as tell:
        machine = Machine(threads, data_dir=data_dir)
        found = forgetting.audit_forgetting(run, requests, not brief, machine, tell)
    if out is not None:
        stem = forgetting_audit.write_audit(found, forgetting.MODELS, out)
        console.print_note(f"wrote {stem}.md and .csv")
    if as_json:
        console.print_json(found)
        return
    console.print_note(forgetting_audit.describe_audit(found))
    console.show_bench({"rows": forgetting_audit.make_rows(found, forgetting.MODELS)}, False)
    console.print_note("; ".join(f"{name}: {words}" for name, words in forgetting.MODELS.items()) + ".")
    for line in forgetting_audit.list_notes(found):
        console.print_note(line)


def _show_audit(result: dict[str, Any]) -> None:
    from tacita.report import tally_audit as report_audit

    rows = [{"setting": report_audit.name_setting(result, row)} | _format_row(row) for row in result["rows"]]
    console.show_bench({"data": result["data"], "users in each block": str(result["users"]), "rows": rows}, False)
    for row in result["rows"]:
        table = [
            {
                "attack": words,
                "found": report_audit.format_figure(name, row["attacks"][name]),
                "control": report_audit.format_figure(name, row["attacks"][name], "control"),
            }
            for name, words in report_audit.ATTACKS.items()
        ]
        console.show_bench({"setting": report_audit.name_setting(result, row), "rows": table}, False)
    console.print_note("Control: the same attack where the person, or the answer, is not in the release.")
    console.print_note(
        f"Up per client: {result['bytes_up_readable']:,.0f} bytes as a readable list, "
        f"{result['bytes_up_maskable'] / 1e6:.2f} MB in a form that can be masked."
    )


def _format_row(row: dict[str, Any]) -> dict[str, str]:
    """What a setting costs, and whom peeling reads in each block."""
    from tacita.report.tally_audit import find_metric

    metric = find_metric(row)
    return {
        metric: f"{row[metric]:.4f}",
        "peeled, each block": " / ".join(map(str, row["peeled"])),
        "MB down": f"{row['bytes_down'] / 1e6:.2f}",
    }


@audit_app.command("canary")
def audit_canary(
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise and of who is inside.")] = 1,
    only: Annotated[str, typer.Option("--only", help="Mechanisms whose name holds this.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the table (Markdown, JSON).")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """How large every claimed epsilon really is, at least: canaries through the releases themselves.

    Each mechanism is played with the worst data there is. The bounds must lie below the claim, and with half of the
    noise, without the clip, or with a bug of its own above it. Exit code 1: a claim is broken.

    Examples:

    `tacita audit canary`

    `tacita audit canary --only tally --seed 2 --json`
    """
    from tacita.report import canary_audit
    from tacita.research.audit.canaries.mechanism_audit import audit_canaries

    with console.show_progress("mechanisms", quiet) as tell:
        found = audit_canaries(seed, on_done=tell, only=only)
    if out is not None:
        console.print_note(f"wrote {canary_audit.write_audit(found, out)}.md and .json")
    if as_json:
        console.print_json(found)
    else:
        console.show_bench({"rows": canary_audit.make_rows(found)}, False)
        for line in (canary_audit.state_verdict(found), *canary_audit.NOTES):
            console.print_note(line)
    if not found["holds"]:
        raise typer.Exit(1)


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
        machine, on_data = Machine(threads, data_dir=data_dir), None if quiet else console.print_data_notes
        found = uploads.audit_uploads(resolve_config(settings, "the options"), machine, budgets, tell, on_data)
    if out is not None:
        console.print_note(f"wrote {upload_audit.write_audit(found, uploads.READERS, out)}.md and .json")
    if as_json:
        console.print_json(found)
        return
    facts = {name: str(found[name]) for name in ("data", "backbone", "people", "seed")}
    console.show_bench({**facts, "rows": upload_audit.make_rows(found, uploads.READERS)}, False)
    for line in upload_audit.NOTES:
        console.print_note(line)
