"""Accuracy against epsilon as a picture: from a table of figures, a panel for each dataset.

The table is CSV with the columns data, model, epsilon, mean, deviation; what has no epsilon is a line across.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.report.drawing import LIGHT, SERIES, open_sheet
from tacita.report.text_tables import render_csv_text

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
        text = path.read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (OSError, UnicodeDecodeError) as error:
        raise TacitaError(f"{path} cannot be read as a table of figures: {error}.") from None
    has_columns = rows and set(COLUMNS) <= rows[0].keys()
    if not has_columns:
        raise TacitaError(f"{path} must be CSV with the columns {', '.join(COLUMNS)}; an empty epsilon is no budget.")
    points = []
    for line, row in enumerate(rows, 2):
        try:
            points.append(_parse_point(row))
        except (TypeError, ValueError):
            raise TacitaError(f"{path}, line {line}: epsilon, mean and deviation must be numbers or empty.") from None
    return points


def _parse_point(row: dict[str, str]) -> AccuracyPoint:
    epsilon = float(row["epsilon"]) if row["epsilon"] else None
    return AccuracyPoint(
        data=row["data"],
        model=row["model"],
        epsilon=epsilon,
        mean=float(row["mean"]),
        deviation=float(row["deviation"] or 0),
    )


def to_csv(points: list[AccuracyPoint]) -> str:
    """The table that `read_points` reads."""
    rows = []
    for point in points:
        epsilon = "" if point.epsilon is None else f"{point.epsilon:g}"
        deviation = f"{point.deviation:.4f}" if point.deviation else ""  # a single draw has none
        mean = f"{point.mean:.4f}"
        rows.append([point.data, point.model, epsilon, mean, deviation])
    return render_csv_text(COLUMNS, rows)


def draw_points(points: list[AccuracyPoint], kind: str) -> bytes:
    """A panel for each dataset; a colour for each model, wherever it stands; bars are one standard deviation."""
    datasets = _list_distinct([point.data for point in points])
    models = _list_distinct([point.model for point in points])
    epsilons = {point.epsilon for point in points if point.epsilon is not None}
    ticks = sorted(epsilons)
    wide = 60 + 360 * len(datasets)
    with open_sheet(wide, 340) as page:
        page.figure.set_layout_engine("constrained")
        page.figure.patch.set_visible(True)
        grid = page.figure.subplots(1, len(datasets), squeeze=False)
        panels = grid[0]
        for axes, dataset in zip(panels, datasets, strict=True):
            own_points = [point for point in points if point.data == dataset]
            _draw_panel(axes, own_points, models)
            _scale_panel(axes, dataset, ticks)
        handles = _collect_handles(panels)
        shown = [model for model in models if model in handles]
        shown_handles = [handles[model] for model in shown]
        page.figure.legend(shown_handles, shown, loc="outside lower center", ncols=3, fontsize=10)
        return page.save(kind)


def _list_distinct(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _draw_panel(axes: Any, points: Sequence[AccuracyPoint], models: Sequence[str]) -> None:
    for number, model in enumerate(models):
        colour = LIGHT[f"s{number % SERIES}"]
        own_points = [point for point in points if point.model == model]
        _draw_model(axes, model, own_points, colour)


def _draw_model(axes: Any, model: str, points: Sequence[AccuracyPoint], colour: str) -> None:
    """A curve over epsilon, and a line across for what has no budget."""
    private = []
    for point in points:
        if point.epsilon is not None:
            private.append((point.epsilon, point.mean, point.deviation))
    if private:
        private.sort()
        epsilons, means, deviations = zip(*private, strict=True)
        axes.errorbar(epsilons, means, deviations, color=colour, marker="o", capsize=3, label=model)
    for point in points:
        if point.epsilon is None:
            axes.axhline(point.mean, color=colour, linestyle="--", label=model)


def _scale_panel(axes: Any, dataset: str, epsilons: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    labels = [f"{epsilon:g}" for epsilon in epsilons]
    axes.set_xticks(epsilons, labels)
    axes.set(xlabel="epsilon (smaller is stricter)", title=dataset, ylabel="NDCG@20", ylim=(0, None))
    axes.grid(axis="y")


def _collect_handles(panels: Sequence[Any]) -> dict[str, Any]:
    """The last handle of each model over all panels."""
    by_model: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        by_model.update(zip(labels, handles))
    return by_model


def write_picture(table: Path, picture: Path) -> None:
    suffix = picture.suffix.lower()
    if suffix not in KINDS:
        raise TacitaError(f"{picture}: a picture goes to a .svg or .png file; choose one of these endings.")
    points = read_points(table)
    write_bytes(picture, draw_points(points, suffix[1:]))
