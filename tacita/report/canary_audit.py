"""What canaries show of every epsilon: the table as rows, as Markdown and as JSON, and the sentence under it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacita.core.files import write_bytes

COMMON_BUGS = ("half the noise", "no clip")
NOTES = (
    "Each bound is one that the real epsilon is above, in 95 of 100 audits or more. It may be far below: the claim is "
    "what bounds from above.",
    "By right guesses: nothing is assumed of the mechanism. By its law: noise is taken to be of the kind that is "
    "claimed, and the bound is on how much of it there is.",
    "A bug is caught where the larger of the two bounds is above the claim; where devices keep ledgers, above what "
    "these say with the bug.",
)


def make_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "mechanism": row["mechanism"],
            "whom": row["unit"],
            "against": row["against"],
            "claimed": f"{row['epsilon']:.3g}",
            "canaries": f"{row['canaries']:,}",
            "at least, by guesses": f"{row['one_run']:.2f}",
            "at least, by its law": f"{row['within_law']:.2f}",
            **{f"with {bug}": _format_bug(row, bug) for bug in COMMON_BUGS},
            "with a bug of its own": _format_own_bugs(row),
        }
        for row in result["rows"]
    ]


def _format_bug(row: Mapping[str, Any], bug: str) -> str:
    return f"{row['bugs'][bug]:.2f}" if bug in row["bugs"] else "-"


def _format_own_bugs(row: Mapping[str, Any]) -> str:
    """Bugs that only this mechanism can have, and what its ledgers would say then."""
    own, said = [bug for bug in row["bugs"] if bug not in COMMON_BUGS], row["said_with_bugs"]
    less = {bug: f" (ledgers say {said[bug]:.3g})" if said[bug] < 0.99 * row["epsilon"] else "" for bug in own}
    return "; ".join(f"{row['bugs'][bug]:.2f}: {bug}{less[bug]}" for bug in own) or "-"


def state_verdict(result: Mapping[str, Any]) -> str:
    """Whether all claims stand, and whether the bugs were seen."""
    broken = [row["mechanism"] for row in result["rows"] if not row["holds"]]
    missed = [row["mechanism"] for row in result["rows"] if not row["caught"]]
    said = f"BROKEN: {', '.join(broken)}." if broken else "No bound is above its claim."
    return f"{said} " + (f"Not seen: a bug in {', '.join(missed)}." if missed else "Every planted bug is caught.")


def to_markdown(result: Mapping[str, Any]) -> str:
    rows = make_rows(result)
    lines = ["|" + "|".join(f" {one} " for one in row) + "|" for row in (list(rows[0]), *(r.values() for r in rows))]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([f"Canaries, seed {result['seed']}. {state_verdict(result)}", "", *lines, "", *NOTES]) + "\n"


def write_audit(result: Mapping[str, Any], folder: Path) -> Path:
    """canaries.md and .json in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "canaries"
    write_bytes(stem.with_suffix(".md"), to_markdown(result).encode())
    write_bytes(stem.with_suffix(".json"), (json.dumps(result, indent=1) + "\n").encode())
    return stem
