"""The table of an audit as a file and as a picture: what each setting costs, and what the attacks find under it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tacita.core.files import write_bytes
from tacita.report.drawing import LIGHT, open_sheet

ATTACKS = {
    "membership": "took part, 90 % known (AUC)",
    "half_nearly": "half known, nearly read",
    "half_exactly": "half known, exactly read",
    "nothing_exactly": "nothing known, exactly read",
    "leaver_nearly": "lone leaver, nearly read",
    "leaver_exactly": "lone leaver, exactly read",
    "item": "one item taken back, named",
    "canary": "canary's last item, named",
}
CHART_ATTACKS = ("membership", "half_nearly", "leaver_nearly")


def find_metric(row: dict[str, Any]) -> str:
    """The name of the metric in a row."""
    return next(name for name in row if "@" in name)


def format_figure(attack: str, figure: dict[str, Any], which: str = "found") -> str:
    """A figure as people read it: an AUC, or how many of how many."""
    value, of = figure[which], figure["of_control" if which == "control" else "of"]
    if value is None:
        return "-"
    return f"{value:.3f}" if attack == "membership" else f"{round(value * of)} of {of}"


def to_csv(result: dict[str, Any]) -> str:
    """One line a setting; each figure has its control and the number of people beside it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    metric = find_metric(result["rows"][0])
    blocks = range(len(result["users"]))
    kinds = ("found", "control", "of", "of_control")
    figures = [name if kind == "found" else f"{name}_{kind}" for name in ATTACKS for kind in kinds]
    writer.writerow(["setting", metric, "valid", *figures, *(f"peeled_{b}" for b in blocks), "bytes_down"])
    for row in result["rows"]:
        values = [row["attacks"][name][kind] for name in ATTACKS for kind in kinds]
        told = ["" if one is None else one if isinstance(one, int) else f"{one:.4f}" for one in values]
        valid = "" if row["valid"] is None else f"{row['valid']:.6f}"
        name = name_setting(result, row)
        writer.writerow([name, f"{row[metric]:.6f}", valid, *told, *row["peeled"], f"{row['bytes_down']:.0f}"])
    return out.getvalue()


def name_setting(result: dict[str, Any], row: dict[str, Any]) -> str:
    """A setting's name; the run's own with what it is."""
    own = ", ".join(f"{k} {result['settings'][k]}" for k in ("min_item", "min_pair", "keep") if result["settings"][k])
    return str(row["setting"]).replace("as set", f"as set: {own or 'none'}")


def draw_chart(result: dict[str, Any]) -> bytes:
    """Quality on the left; on the right what three attacks find, filled, and their controls, hollow; as PNG."""
    rows = result["rows"][::-1]
    metric, names = find_metric(rows[0]), [name_setting(result, row) for row in rows]
    with open_sheet(800, 150 + 30 * len(rows)) as page:
        page.figure.set_layout_engine("constrained")
        page.figure.patch.set_visible(True)
        left, right = page.figure.subplots(1, 2, sharey=True)
        best = max(1e-3, *(row[metric] for row in rows), 0.0)
        left.plot([row[metric] for row in rows], range(len(rows)), "o", color=LIGHT["s0"])
        left.set(xlabel=f"{metric}, mean of the blocks after the first", xlim=(0, 1.1 * best))
        left.set(ylim=(-0.6, len(rows) - 0.4))
        left.set_yticks(range(len(rows)), names)
        left.locator_params(axis="x", nbins=5)
        for k, name in enumerate(CHART_ATTACKS):
            colour = LIGHT[f"s{k}"]
            for kind, fill in (("found", colour), ("control", LIGHT["card"])):
                spots = [(row["attacks"][name][kind], n) for n, row in enumerate(rows)]
                told = [(x, n + 0.2 * (1 - k)) for x, n in spots if x is not None]
                label = ATTACKS[name] if kind == "found" else None
                right.scatter(*zip(*told, strict=True) if told else ([], []), c=fill, edgecolors=colour, label=label)
        right.set(xlabel="AUC, or share of people; hollow: control", xlim=(-0.03, 1.03))
        keys = right.get_legend_handles_labels()
        page.figure.legend(*keys, loc="outside lower right", ncols=3, fontsize=10)
        for axes in (left, right):
            axes.grid(axis="x")
        title = f"tally on {result['data']}: what each setting costs, and what attacks find under it"
        page.figure.suptitle(title, fontsize=13)
        return page.save("png")


def write_audit(result: dict[str, Any], folder: Path) -> Path:
    """`<data>.csv` and `<data>.png` in a folder that may be new; returns the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / Path(result["data"]).stem
    write_bytes(stem.with_suffix(".csv"), to_csv(result).encode())
    write_bytes(stem.with_suffix(".png"), draw_chart(result))
    return stem
