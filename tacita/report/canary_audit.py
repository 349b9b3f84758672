"""What canaries show of every epsilon: the table as rows, as Markdown and as JSON, and the sentence under it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tacita.report.text_tables import AuditResult, TextRow, render_markdown_page, write_text

COMMON_BUGS = ("half the noise", "no clip")
NOTES = (
    "Each bound is one that the real epsilon is above, in 95 of 100 audits or more. It may be far below: the claim is "
    "what bounds from above.",
    "By right guesses: nothing is assumed of the mechanism. By its law: noise is taken to be of the kind that is "
    "claimed, and the bound is on how much of it there is.",
    "A bug is caught where the larger of the two bounds is above the claim; where devices keep ledgers, above what "
    "these say with the bug.",
)


TRANSCRIPT_TITLE = (
    "Whole transcripts: all that leaves, with one person and without them. What is exact has to be the same in both."
)
TRANSCRIPT_NOTES = (
    "At least: a lower bound on epsilon, wrong in at most 5 of 100 audits, by a statistic that half of the plays chose "
    "and the other half tested. mu: by how many deviations the best reader tells the worlds apart, and the claim.",
    "A leak is a mended mistake that is put back. It is caught where something exact differs (no finite epsilon), or "
    "where the bound is above the claim.",
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


# Transcripts


def make_transcript_rows(result: AuditResult) -> list[TextRow]:
    return [_make_transcript_row(row) for row in result.get("transcripts", [])]


def _make_transcript_row(row: AuditResult) -> TextRow:
    return {
        "mechanism": row["mechanism"],
        "neighbour": row["neighbour"],
        "against": row["against"],
        "claimed": f"{row['epsilon']:.3g}",
        "plays": f"{row['plays']:,}",
        "exact differences": str(len(row["exact"])) if row["exact"] else "none",
        "at least": _format_bound(row["exact"], row["bound"]),
        "mu (claimed)": _format_mu(row),
        "planted leak": row["leak"] or "-",
        "with the leak": _format_bound(row["leak_exact"], row["leak_bound"]) if row["leak"] else "-",
    }


def _format_bound(exact: Sequence[str], bound: float) -> str:
    if exact:
        return "no finite epsilon"
    return f"{bound:.2f}"


def _format_mu(row: AuditResult) -> str:
    if not row["mu_claimed"] or row["exact"]:
        return "-"
    return f"{row['mu']:.2f} ({row['mu_claimed']:.2f})"


def list_uncovered_entries(result: AuditResult) -> list[str]:
    """What of a transcript no epsilon covers, each once, with the reason."""
    reasons: dict[str, None] = {}
    for row in result.get("transcripts", []):
        for entry, reason in row["outside"].items():
            reasons[f"`{entry}`: {reason}"] = None
    if not reasons:
        return []
    return [f"Outside of every epsilon: {'; '.join(reasons)}."]


def list_uncovered(result: AuditResult) -> list[str]:
    """Rows that show what the claim does not cover, and the words that say so."""
    lines = []
    for row in result.get("transcripts", []):
        if row["uncovered"]:
            lines.append(f"Not covered, and not judged: {row['mechanism']} ({row['neighbour']}): {row['uncovered']}.")
    return lines


def list_exact_differences(result: AuditResult) -> list[str]:
    """The first exact difference of every transcript that has one."""
    lines = []
    for row in result.get("transcripts", []):
        if row["exact"]:
            lines.append(f"{row['mechanism']}, {row['neighbour']}: {row['exact'][0]}")
    return lines


def list_transcript_notes(result: AuditResult) -> list[str]:
    return [*list_uncovered_entries(result), *list_uncovered(result), *list_exact_differences(result)]


def state_verdict(result: AuditResult) -> str:
    """Whether all claims stand, and whether the bugs were seen."""
    broken = []
    missed = []
    for row in [*result["rows"], *result.get("transcripts", [])]:
        name = row["mechanism"]
        if "neighbour" in row:
            name = f"{name} ({row['neighbour']})"
        if not row["holds"]:
            broken.append(name)
        if not row["caught"]:
            missed.append(name)
    claims = "No bound is above its claim."
    if broken:
        claims = f"BROKEN: {', '.join(broken)}."
    bugs = "Every planted bug is caught."
    if missed:
        bugs = f"Not seen: a bug in {', '.join(missed)}."
    return f"{claims} {bugs}"


def to_markdown(result: AuditResult) -> str:
    verdict = state_verdict(result)
    title = f"Canaries, seed {result['seed']}. {verdict}"
    pages = []
    rows = make_rows(result)
    if rows:
        pages.append(render_markdown_page(title, rows, NOTES))
    transcript_rows = make_transcript_rows(result)
    if transcript_rows:
        transcript_title = TRANSCRIPT_TITLE if rows else f"{title} {TRANSCRIPT_TITLE}"
        notes = [*TRANSCRIPT_NOTES, *list_transcript_notes(result)]
        pages.append(render_markdown_page(transcript_title, transcript_rows, notes))
    return "\n".join(pages)


def write_audit(result: AuditResult, folder: Path) -> Path:
    """canaries.md and .json in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "canaries"
    json_text = json.dumps(result, indent=1) + "\n"
    write_text(stem.with_suffix(".md"), to_markdown(result))
    write_text(stem.with_suffix(".json"), json_text)
    return stem
