"""What canaries show of every epsilon: the table as rows, as Markdown and as JSON, and the sentence under it."""

from __future__ import annotations

import json
from pathlib import Path

from tacita.report.text_tables import AuditResult, TextRow, markdown_page, write_text

COMMON_BUGS = ("half the noise", "no clip")
NOTES = (
    "Each bound is one that the real epsilon is above, in 95 of 100 audits or more. It may be far below: the claim is "
    "what bounds from above.",
    "By right guesses: nothing is assumed of the mechanism. By its law: noise is taken to be of the kind that is "
    "claimed, and the bound is on how much of it there is.",
    "A bug is caught where the larger of the two bounds is above the claim; where devices keep ledgers, above what "
    "these say with the bug.",
)


def make_rows(result: AuditResult) -> list[TextRow]:
    return [_make_row(row) for row in result["rows"]]


def _make_row(row: AuditResult) -> TextRow:
    cells = {
        "mechanism": row["mechanism"],
        "whom": row["unit"],
        "against": row["against"],
        "claimed": f"{row['epsilon']:.3g}",
        "canaries": f"{row['canaries']:,}",
        "at least, by guesses": f"{row['one_run']:.2f}",
        "at least, by its law": f"{row['within_law']:.2f}",
    }
    for bug in COMMON_BUGS:
        cells[f"with {bug}"] = _format_bug(row, bug)
    cells["with a bug of its own"] = _format_own_bugs(row)
    return cells


def _format_bug(row: AuditResult, bug: str) -> str:
    if bug not in row["bugs"]:
        return "-"
    return f"{row['bugs'][bug]:.2f}"


def _format_own_bugs(row: AuditResult) -> str:
    """Bugs that only this mechanism can have, and what its ledgers would say then."""
    own_bugs = []
    for bug, bound in row["bugs"].items():
        if bug in COMMON_BUGS:
            continue
        ledger_epsilon = row["said_with_bugs"][bug]
        words = f"{bound:.2f}: {bug}"
        if ledger_epsilon < 0.99 * row["epsilon"]:
            words += f" (ledgers say {ledger_epsilon:.3g})"
        own_bugs.append(words)
    return "; ".join(own_bugs) or "-"


def state_verdict(result: AuditResult) -> str:
    """Whether all claims stand, and whether the bugs were seen."""
    broken = []
    missed = []
    for row in result["rows"]:
        if not row["holds"]:
            broken.append(row["mechanism"])
        if not row["caught"]:
            missed.append(row["mechanism"])
    claims = "No bound is above its claim."
    if broken:
        claims = f"BROKEN: {', '.join(broken)}."
    bugs = "Every planted bug is caught."
    if missed:
        bugs = f"Not seen: a bug in {', '.join(missed)}."
    return f"{claims} {bugs}"


def to_markdown(result: AuditResult) -> str:
    rows = make_rows(result)
    verdict = state_verdict(result)
    title = f"Canaries, seed {result['seed']}. {verdict}"
    return markdown_page(title, rows, NOTES)


def write_audit(result: AuditResult, folder: Path) -> Path:
    """canaries.md and .json in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "canaries"
    json_text = json.dumps(result, indent=1) + "\n"
    write_text(stem.with_suffix(".md"), to_markdown(result))
    write_text(stem.with_suffix(".json"), json_text)
    return stem
