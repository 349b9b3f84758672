"""Accuracy against epsilon as a picture: from a table of figures, a panel for each dataset.

The table is CSV with the columns data, model, epsilon, mean, deviation; what has no epsilon is a line across.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.report.drawing import LIGHT, open_sheet

COLUMNS = ("data", "model", "epsilon", "mean", "deviation")
KINDS = (".svg", ".png")


@dataclass(frozen=True)
class AccuracyPoint:
    data: str
    model: str
    epsilon: float | None  # None: no budget
    mean: float
    deviation: float


def read_points(path: Path) -> list[AccuracyPoint]:
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError) as error:
        raise TacitaError(f"{path} cannot be read as a table of figures: {error}.") from None
    if not rows or set(COLUMNS) - rows[0].keys():
        raise TacitaError(f"{path} must be CSV with the columns {', '.join(COLUMNS)}; an empty epsilon is no budget.")
    out = []
    for line, row in enumerate(rows, 2):
        try:
            epsilon = float(row["epsilon"]) if row["epsilon"] else None
            out.append(
                AccuracyPoint(row["data"], row["model"], epsilon, float(row["mean"]), float(row["deviation"] or 0))
            )
        except (TypeError, ValueError):
            raise TacitaError(f"{path}, line {line}: epsilon, mean and deviation must be numbers or empty.") from None
    return out


def to_csv(points: list[AccuracyPoint]) -> str:
    """The table that `read` reads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in points:
        epsilon = "" if one.epsilon is None else f"{one.epsilon:g}"
        deviation = f"{one.deviation:.4f}" if one.deviation else ""  # of one draw there is none
        writer.writerow([one.data, one.model, epsilon, f"{one.mean:.4f}", deviation])
    return out.getvalue()


def draw_points(points: list[AccuracyPoint], kind: str) -> bytes:
    """A panel for each dataset; a colour for each model, wherever it stands; bars are one standard deviation."""
    names = list(dict.fromkeys(one.data for one in points))
    models = list(dict.fromkeys(one.model for one in points))
    colour = {model: LIGHT[f"s{n % 9}"] for n, model in enumerate(models)}
    ticks = sorted({one.epsilon for one in points if one.epsilon is not None})
    with open_sheet(60 + 360 * len(names), 340) as page:
        page.figure.set_layout_engine("constrained")
        page.figure.patch.set_visible(True)
        panels = page.figure.subplots(1, len(names), squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            for model in models:
                own = [one for one in points if (one.data, one.model) == (name, model)]
                spent = sorted((one.epsilon, one.mean, one.deviation) for one in own if one.epsilon is not None)
                if spent:
                    axes.errorbar(*zip(*spent, strict=True), color=colour[model], marker="o", capsize=3, label=model)
                for one in own:
                    if one.epsilon is None:
                        axes.axhline(one.mean, color=colour[model], linestyle="--", label=model)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
            axes.set(xlabel="epsilon (smaller is stricter)", title=name, ylabel="NDCG@20", ylim=(0, None))
            axes.grid(axis="y")
        keys = {word: key for axes in panels for key, word in zip(*axes.get_legend_handles_labels())}
        shown = [model for model in models if model in keys]
        page.figure.legend([keys[one] for one in shown], shown, loc="outside lower center", ncols=3, fontsize=10)
        return page.save(kind)


def write_picture(table: Path, picture: Path) -> None:
    if picture.suffix.lower() not in KINDS:
        raise TacitaError(f"{picture}: a picture goes to a .svg or .png file; choose one of these endings.")
    write_bytes(picture, draw_points(read_points(table), picture.suffix.lower()[1:]))
