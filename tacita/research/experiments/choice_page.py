"""The page that answers "Which should I use?": an answer made of the cells, then a table for each dataset."""

from __future__ import annotations

from tacita.research.experiments.cell_status import list_earlier_rows
from tacita.research.experiments.choice_advice import list_advice_lines
from tacita.research.experiments.choice_rows import (
    DOWN,
    POPULAR,
    UP,
    ChoiceRow,
    build_rows,
    format_epsilon,
    format_forgetting,
)
from tacita.research.experiments.experiment_cell import Cells
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.single_block import CellLines, Line
from tacita.research.experiments.tables import label_variants

HEAD = ("method", "NDCG@10", "HR@10", "up", "down", "seconds", "epsilon", "forgetting one person", "sees")
OTHERS = "Others"

Letters = dict[str, str]
"""What the server sees -> the letter that stands for it."""


def render_choice_page(experiment: Experiment, cells: Cells, lines: CellLines) -> str:
    """What to use for what, and all that was measured."""
    cells_of: dict[str, Cells] = {}
    for cell in cells:
        cells_of.setdefault(cell.dataset, []).append(cell)
    rows_of = {}
    for dataset, own_cells in cells_of.items():
        rows = build_rows(experiment, own_cells, lines)
        if rows:
            rows_of[dataset] = rows
    aside: set[str] = set()
    for title in experiment.aside:
        aside.update(experiment.groups[title])
    advice = list_advice_lines(rows_of, aside)
    letters: Letters = {}
    text = [
        "# Which should I use?",
        "",
        "Every method of this project under one protocol, one table for each dataset.",
        "",
        *_format_bullets(advice),
        "",
    ]
    for dataset, rows in rows_of.items():
        text += [f"## {dataset}", ""]
        text += _format_tables(experiment, rows, letters)
        text += _list_missing(experiment, dataset, cells_of[dataset], lines)
        text.append("")
    text += [
        "## What the server sees of a person",
        "",
        *_format_bullets([f"**{letter}**: {sees}" for sees, letter in letters.items()]),
        "",
        "## How it was measured",
        "",
        *_format_bullets(experiment.notes),
        *_format_bullets(list_earlier_rows(cells, lines, label_variants(experiment))),
        "- `tacita reproduce choose` makes this page; finished cells are kept under docs/reproduction/cells.",
    ]
    return "\n".join(text).rstrip() + "\n"


def _format_bullets(sentences: list[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


# The tables


def _format_tables(experiment: Experiment, rows: list[ChoiceRow], letters: Letters) -> list[str]:
    """A table for each group, best first; rows of no group come last."""
    groups = dict(experiment.groups)
    in_group: set[str] = set()
    for names in groups.values():
        in_group.update(names)
    names_of_rows = [row.name for row in rows]
    groups[OTHERS] = [name for name in names_of_rows if name not in in_group]
    text = []
    for title, names in groups.items():
        members = [row for row in rows if row.name in names]
        if not members:
            continue
        if experiment.groups:
            text += [f"**{title}**", ""]
        text += [_format_line(HEAD), "|" + "---|" * len(HEAD)]
        text += [_format_row(row, letters) for row in members]
        text.append("")
    return text


def _format_row(row: ChoiceRow, letters: Letters) -> str:
    cells = (
        _format_name(row),
        row.format_interval(),
        row.format_interval("hr@10"),
        row.format_median(UP),
        row.format_median(DOWN),
        row.format_median("CPU seconds"),
        format_epsilon(row),
        format_forgetting(row),
        _find_letter(row.find_word("sees"), letters),
    )
    return _format_line(cells)


def _format_line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _format_name(row: ChoiceRow) -> str:
    name = row.label
    if row.name != POPULAR:
        n_seeds = len(row.lines)
        plural = "s" if n_seeds > 1 else ""
        name += f" ({n_seeds} seed{plural})"
    if row.is_earlier:
        name += " †"
    if row.same_runs:
        name += f"; the same run: {', '.join(row.same_runs)}"
    return name


def _find_letter(sees: str, letters: Letters) -> str:
    """The letter for what the server sees; the next one where it is new."""
    if not sees:
        return "–"
    following = chr(ord("A") + len(letters))
    return letters.setdefault(sees, following)


# What is missing


def _find_failure(lines: list[Line]) -> str:
    """Why the first seed that failed did; empty: none failed."""
    for line in lines:
        if "failed" in line:
            return str(line["failed"])
    return ""


def _list_missing(experiment: Experiment, dataset: str, cells: Cells, lines: CellLines) -> list[str]:
    """What has no figure, and why."""
    most_seeds = max((cell.seed for cell in cells), default=0)
    failed: dict[str, str] = {}
    unfinished = []
    lines_of: dict[str, list[Line]] = {}
    for cell in cells:
        own_lines = lines_of.setdefault(cell.variant, [])
        own_lines.append(lines.get(cell.key, {}))
    for name, own_lines in lines_of.items():
        label = experiment.variants[name].label
        n_planned = len(own_lines)
        n_done = sum("values" in line for line in own_lines)
        reason = _find_failure(own_lines)
        if reason and not n_done:
            failed[label] = reason
        elif n_done < min(most_seeds, n_planned):
            progress = f" ({n_done} of {n_planned} seeds)" if n_done else ""
            unfinished.append(label + progress)
    text = []
    for label, reason in failed.items():
        text.append(f"{label} failed: {reason}")
    if unfinished:
        text.append(f"Not run, or not all of it: {'; '.join(unfinished)}.")
    if text and dataset in experiment.missing:
        text.append(experiment.missing[dataset])
    return text
