"""The table of an audit as a file and as a picture: what each setting costs, and what the attacks find under it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacita.core.files import write_bytes
from tacita.report.drawing import LIGHT, open_sheet
from tacita.report.text_tables import (
    AuditResult,
    format_csv_number,
    list_figure_columns,
    list_figure_values,
    render_csv_text,
    write_text,
)

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
KINDS = ("found", "control", "of", "of_control")
CUTS = ("min_item", "min_pair", "keep")
CHART_ATTACKS = ("membership", "half_nearly", "leaver_nearly")


def find_metric(row: AuditResult) -> str:
    """The name of the metric in a row."""
    return next(name for name in row if "@" in name)


def format_figure(attack: str, figure: AuditResult, which: str = "found") -> str:
    """A figure as people read it: an AUC, or how many of how many."""
    value = figure[which]
    if value is None:
        return "-"
    if attack == "membership":
        return f"{value:.3f}"
    people = figure["of_control" if which == "control" else "of"]
    return f"{round(value * people)} of {people}"


def to_csv(result: AuditResult) -> str:
    """One line a setting; each figure has its control and the number of people with it."""
    metric = find_metric(result["rows"][0])
    n_blocks = len(result["users"])
    header = ["setting", metric, "valid"]
    header += list_figure_columns(ATTACKS, KINDS)
    header += [f"peeled_{block}" for block in range(n_blocks)]
    header.append("bytes_down")
    rows = []
    for row in result["rows"]:
        values = list_figure_values(row["attacks"], ATTACKS, KINDS)
        cells = [
            name_setting(result, row),
            f"{row[metric]:.6f}",
            "" if row["valid"] is None else f"{row['valid']:.6f}",
            *(format_csv_number(value, 4) for value in values),
            *row["peeled"],
            f"{row['bytes_down']:.0f}",
        ]
        rows.append(cells)
    return render_csv_text(header, rows)


def name_setting(result: AuditResult, row: AuditResult) -> str:
    """A setting's name; the run's own with what it is."""
    settings = result["settings"]
    cuts = []
    for name in CUTS:
        value = settings[name]
        if value:
            cuts.append(f"{name} {value}")
    own = ", ".join(cuts) or "none"
    return str(row["setting"]).replace("as set", f"as set: {own}")


def draw_chart(result: AuditResult) -> bytes:
    """Quality at the side; what three attacks find, filled, and their controls, hollow; as PNG."""
    rows = result["rows"][::-1]
    names = [name_setting(result, row) for row in rows]
    high = 150 + 30 * len(rows)
    with open_sheet(800, high) as page:
        page.figure.set_layout_engine("constrained")
        page.figure.patch.set_visible(True)
        quality_axes, attack_axes = page.figure.subplots(1, 2, sharey=True)
        _draw_quality(quality_axes, rows, names)
        for number, attack in enumerate(CHART_ATTACKS):
            _draw_attack(attack_axes, rows, attack, number)
        attack_axes.set_xlabel("AUC, or share of people; hollow: control")
        attack_axes.set_xlim(-0.03, 1.03)
        handles, labels = attack_axes.get_legend_handles_labels()
        page.figure.legend(handles, labels, loc="outside lower right", ncols=3, fontsize=10)
        quality_axes.grid(axis="x")
        attack_axes.grid(axis="x")
        title = f"tally on {result['data']}: what each setting costs, and what attacks find under it"
        page.figure.suptitle(title, fontsize=13)
        return page.save("png")


def _draw_quality(axes: Any, rows: Sequence[AuditResult], names: Sequence[str]) -> None:
    metric = find_metric(rows[0])
    scores = [row[metric] for row in rows]
    best = max(1e-3, *scores, 0.0)
    places = range(len(rows))
    axes.plot(scores, places, "o", color=LIGHT["s0"])
    axes.set_xlabel(f"{metric}, mean of the blocks after the first")
    axes.set_xlim(0, 1.1 * best)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks(places, names)
    axes.locator_params(axis="x", nbins=5)


def _draw_attack(axes: Any, rows: Sequence[AuditResult], attack: str, number: int) -> None:
    """What an attack finds under each setting, and what its control finds."""
    colour = LIGHT[f"s{number}"]
    lift = 0.2 * (1 - number)
    fills = {"found": colour, "control": LIGHT["card"]}
    for kind, fill in fills.items():
        values = []
        places = []
        for place, row in enumerate(rows):
            value = row["attacks"][attack][kind]
            if value is not None:
                values.append(value)
                places.append(place + lift)
        label = ATTACKS[attack] if kind == "found" else None
        axes.scatter(values, places, c=fill, edgecolors=colour, label=label)


def write_audit(result: AuditResult, folder: Path) -> Path:
    """`<data>.csv` and `<data>.png` in a folder that may be new; returns the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / Path(result["data"]).stem
    write_text(stem.with_suffix(".csv"), to_csv(result))
    write_bytes(stem.with_suffix(".png"), draw_chart(result))
    return stem
