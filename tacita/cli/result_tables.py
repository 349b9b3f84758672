"""Results as tables and lines in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from tacita.cli.console import CONTROL_NAMES, Screen, print_answer, print_json, print_markup, print_note

if TYPE_CHECKING:
    from tacita.data.datasets import DatasetInfo
    from tacita.research.experiments.tables import TableEntry
    from tacita.runs.serving import Run
    from tacita.runs.settings_reference import Setting

MOST_BLOCK_COLUMNS = 5  # fit in 80 characters; more blocks become rows
DASH = "–"

Row = Mapping[str, Any]
BlockScores = tuple[list[dict[str, Any]], dict[str, float]]
"""The scores of a model in each block, and their means."""


def show_result(run: Run, brief: bool = False) -> None:
    """Quality per block beside the controls, a table for each metric, and a verdict."""
    from tacita.report.data import describe_read_mode, find_read_mode, name_method

    result = run.result
    backbone = run.config.backbone.get("name", "mf")
    method = name_method(backbone, run.config.method, run.config.parts)
    read_mode = find_read_mode(result)
    scores = {method: (result["blocks"], result["mean"])}
    skipped = []
    for key, control in result["controls"].items():
        name = CONTROL_NAMES.get(key, key)
        if "skipped" in control:
            skipped.append(f"{name} was skipped: {control['skipped']}.")
        else:
            scores[name] = (control["blocks"], control["mean"])
    for metric in list(result["mean"])[:2]:
        title = f"{metric}: {method} on {result['data']['name']}"
        if backbone != method:
            title += f", backbone {backbone}"
        if read_mode:
            title += f", {describe_read_mode(read_mode)}"
        Screen().print(_make_score_table(title, metric, scores))
    _show_untested(result["blocks"])
    for line in skipped:
        print_note(line)
    if not brief:
        show_verdict(run)


def _show_untested(blocks: list[dict[str, Any]]) -> None:
    untested = [str(block["block"]) for block in blocks if not block["users"]]
    if untested:
        print_answer(f"Nobody could be tested in block {', '.join(untested)}: no score, left out of every mean.")


def _make_score_table(title: str, metric: str, scores: Mapping[str, BlockScores]) -> Table:
    """Methods as rows and blocks as columns, or the other way round where there are many blocks."""
    first_blocks, _ = next(iter(scores.values()))
    tested = [bool(block["users"]) for block in first_blocks]
    cells = {name: _format_scores(metric, of_model, tested) for name, of_model in scores.items()}
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    table.add_column("")
    headings = _list_headings(tested)
    if len(tested) <= MOST_BLOCK_COLUMNS:
        _fill_by_method(table, headings, cells)
    else:
        _fill_by_block(table, headings, cells)
    return table


def _format_scores(metric: str, scores: BlockScores, tested: list[bool]) -> list[str]:
    """The scores of each block and their mean; a block that tested nobody has a dash."""
    blocks, mean = scores
    has_mean = any(tested[1:] or tested)
    texts = []
    for block, is_tested in zip(blocks, tested):
        texts.append(f"{block[metric]:.4f}" if is_tested else DASH)
    texts.append(f"{mean[metric]:.4f}" if has_mean else DASH)
    return texts


def _list_headings(tested: list[bool]) -> list[str]:
    n_blocks = len(tested)
    headings = [f"block {block}" for block in range(n_blocks)]
    leaves_out_first = n_blocks >= 3 and all(tested[1:])
    headings.append(f"mean 1–{n_blocks - 1}" if leaves_out_first else "mean")
    return headings


def _fill_by_method(table: Table, headings: list[str], cells: Mapping[str, list[str]]) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", style=_choose_heading_style(heading))
    for place, (name, texts) in enumerate(cells.items()):
        table.add_row(escape(name), *texts, style=_choose_model_style(place))


def _fill_by_block(table: Table, headings: list[str], cells: Mapping[str, list[str]]) -> None:
    for place, name in enumerate(cells):
        table.add_column(escape(name), justify="right", style=_choose_model_style(place))
    rows = zip(*cells.values(), strict=True)
    for heading, row in zip(headings, rows, strict=True):
        table.add_row(heading, *row, style=_choose_heading_style(heading))


def _choose_heading_style(heading: str) -> str:
    return "bold" if heading.startswith("mean") else ""


def _choose_model_style(place: int) -> str:
    """The run stands out, its controls do not."""
    return "" if place else "cyan"


def show_verdict(run: Run) -> None:
    """Whether the run beats its controls, what clients send, and where the report is."""
    from tacita.report.advice import list_advice
    from tacita.report.data import read_run
    from tacita.report.formats import format_bytes
    from tacita.report.judgement import judge_run

    facts = read_run(run.folder)
    n_sentences = max(1, len(facts.better_controls))
    for _, sentence in judge_run(facts)[:n_sentences]:
        print_note(sentence)
    for sentence in list_advice(run.config, run.result):
        print_note(sentence)
    up = format_bytes(facts.up)
    down = format_bytes(facts.down)
    print_note(f"Sent per client and {facts.exchange_unit}: {up} up, {down} down.")
    print_note(f"Report: {run.folder / 'report.html'}")


def show_entries(title: str, entries: Sequence[TableEntry], labels: Mapping[str, str]) -> None:
    """Cells of a paper's table: ours with its interval, the published value, and a verdict."""
    print_markup(f"[bold]{escape(title)}[/bold]")
    places = dict.fromkeys((entry.dataset, entry.backbone) for entry in entries)
    for place in places:
        table = Table(title=escape(", ".join(place)), title_justify="left")
        for name in ("method", "what", "ours", "paper", ""):
            justify = "right" if name in ("ours", "paper") else "left"
            table.add_column(name, justify=justify, no_wrap=name == "ours")  # type: ignore[arg-type]
        for entry in entries:
            if (entry.dataset, entry.backbone) == place:
                _add_entry(table, entry, labels)
        Screen().print(table)


def _add_entry(table: Table, entry: TableEntry, labels: Mapping[str, str]) -> None:
    colours = {"agrees": "green", "higher": "cyan", "lower": "red"}
    label = labels.get(entry.variant, entry.variant)
    ours = f"{entry.mean:.4f}"
    if not math.isnan(entry.half):
        ours += f" ± {entry.half:.4f}"
    published = "" if entry.published is None else f"{entry.published:.4f}"
    texts = (label, f"{entry.metric} {entry.column}", ours, published)
    table.add_row(*map(escape, texts), entry.verdict, style=colours.get(entry.verdict, ""))


def _format_reasons(why: Row) -> str:
    """The items that speak for another, by title where there is one; who has none, or only others, gets no reason."""
    names = []
    for reason in why["items"]:
        if reason["effect"] is not None and reason["effect"] > 0:
            names.append(str(reason["title"] or reason["item"]))
    return "; ".join(names)


def show_recommendations(user: str, items: Sequence[Row], wanted: int = 0) -> None:
    has_titles = any(item["title"] for item in items)
    bases = {item.get("basis") for item in items}
    is_popularity = "popularity" in bases
    title = f"for user {user}"
    if is_popularity:
        title += ": popular items, nothing is known of this person"
    if "catalogue" in bases:
        title += ": first items of the catalogue, nothing is known of this person or of what is popular"
    table = Table(title=escape(title), title_justify="left")
    value = "popularity" if is_popularity else "score"  # decayed over blocks, noisy under a budget: no count of people
    table.add_column("", justify="right", overflow="fold")
    table.add_column("item", justify="left", overflow="fold")
    if has_titles:
        table.add_column("title", justify="left", overflow="fold")
    table.add_column(value, justify="right", overflow="fold")
    has_reasons = any("why" in item for item in items)
    if has_reasons:
        table.add_column("because of", justify="left", overflow="fold")
    for place, item in enumerate(items, 1):
        cells = [str(place), escape(item["item"])]
        if has_titles:
            cells.append(escape(item["title"] or ""))
        cells.append(f"{item['score']:.4g}")
        if has_reasons:
            cells.append(escape(_format_reasons(item["why"])))
        table.add_row(*cells)
    Screen().print(table)
    if len(items) < wanted:
        print_note(f"Only {len(items)} items are left that user {user} does not know; --seen lists the others too.")


def show_table(title: str, rows: Sequence[Row], left_aligned: Sequence[str] = ()) -> None:
    """Plain rows under a title; columns that are empty in every row are left out."""
    names = [name for name in (rows[0] if rows else ()) if _has_values(rows, name)]
    table = Table(title=escape(title), title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left_aligned else "right", overflow="fold")
    for row in rows:
        texts = ["" if row[name] is None else format_value(row[name]) for name in names]
        table.add_row(*map(escape, texts))
    Screen().print(table)


def _has_values(rows: Iterable[Row], name: str) -> bool:
    return any(row[name] not in (None, "") for row in rows)


def show_settings(settings: Sequence[Setting]) -> None:
    """Settings under the table, model or part they belong to."""
    owners = dict.fromkeys(setting.owner for setting in settings)
    for owner in owners:
        print_markup(f"[bold]{escape(owner)}[/bold]")
        for setting in settings:
            if setting.owner == owner:
                _show_setting(setting)


def _show_setting(setting: Setting) -> None:
    key = escape(setting.key)
    default = escape(setting.default)
    kind = escape(setting.kind)
    if setting.origin:
        value = escape(setting.value)
        origin = escape(setting.origin)
        print_markup(f"  [cyan]{key}[/cyan] = {value}  {origin}  [dim]({kind}; default {default})[/dim]")
    else:
        print_markup(f"  [cyan]{key}[/cyan] = {default}  [dim]({kind})[/dim]")
    print_markup(f"      {escape(setting.about)}")


def show_datasets(datasets: Mapping[str, DatasetInfo]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, info in datasets.items():
        table.add_row(name, f"{escape(info.about)}\n[dim]{escape(info.terms)}[/dim]")
    Screen(highlight=False).print(table)
    print_note(
        "ml-100k is downloaded when it is first used; the others are read from a folder (--data-dir or TACITA_DATA)."
    )


def show_facts(facts: Row) -> None:
    for key, value in facts.items():
        is_range = key == "time range" and value is not None
        text = " to ".join(map(str, value)) if is_range else format_value(value)
        print_markup(f"[bold]{escape(key)}[/bold]: {escape(text)}")


def format_value(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(element) for element in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(element)}" for name, element in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_bench(result: Row, as_json: bool) -> None:
    """Medians; single timings are in the JSON."""
    if as_json:
        print_json(result)
        return
    facts = _drop_single_timings(result)
    facts.pop("rows", None)
    show_facts(facts)
    rows = [_drop_single_timings(row) for row in result.get("rows", [])]
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*map(format_value, row.values()))
        Screen().print(table)


def _drop_single_timings(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("_all")}


def show_checks(checks: Sequence[Mapping[str, str]]) -> None:
    marks = {"ok": "[green]ok   [/green]", "note": "[yellow]note [/yellow]", "fails": "[red]fails[/red]"}
    for check in checks:
        mark = marks[check["state"]]
        print_markup(f"{mark}  {escape(check['what'])}: {escape(check['detail'])}")
