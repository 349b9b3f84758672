"""The table of an audit as a file and as a picture: what each protection costs, and whom it hides."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tacita.files import write_bytes
from tacita.report_charts import LIGHT


def quality_of(row: dict[str, Any]) -> str:
    """The name of the metric in a row."""
    return next(name for name in row if "@" in name)


def to_csv(found: dict[str, Any]) -> str:
    """One line a protection; people are counted block by block."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    metric = quality_of(found["rows"][0])
    blocks = range(len(found["users"]))
    people = [f"{name}_{b}" for name in ("read", "nearly", "part") for b in blocks]
    writer.writerow(["protection", metric, "valid", *people, "closest", "bytes_down"])
    for row in found["rows"]:
        valid = "" if row["valid"] is None else f"{row['valid']:.6f}"
        counts = [*row["read"], *row["nearly"], *row["parts"]]
        scores = [f"{row[metric]:.6f}", valid]
        writer.writerow([row["protection"], *scores, *counts, f"{row['closest']:.3f}", f"{row['bytes_down']:.0f}"])
    return out.getvalue()


def draw(found: dict[str, Any], path: Path) -> None:
    """Quality on the left, people who can be read on the right, one line a protection."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = found["rows"][::-1]
    own = ", ".join(f"{k} {found['settings'][k]}" for k in ("min_item", "min_pair", "keep") if found["settings"][k])
    metric, names = quality_of(rows[0]), [row["protection"].replace("as set", f"as set: {own}") for row in rows]
    everybody = sum(found["users"])
    read, nearly = ([sum(row[kind]) for row in rows] for kind in ("read", "nearly"))
    figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot([row[metric] for row in rows], names, "o", color=LIGHT[0])
    left.set(xlabel=f"{metric}, mean of the blocks after the first", xlim=(0, None))
    right.barh(names, nearly, color=LIGHT[1], label="nearly")
    right.barh(names, read, color=LIGHT[4], label="exactly")
    for n, count in enumerate(nearly):
        right.annotate(str(count), (count, n), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9)
    right.set(xlabel=f"histories read from B, of {everybody}", xlim=(0, 1.12 * max(1, *nearly)))
    if any(nearly):
        right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"tally on {found['data']}: what each protection costs and whom it hides", fontsize=11)
    page = io.BytesIO()
    figure.savefig(page, format="png", dpi=130, metadata={"Software": None})
    write_bytes(path, page.getvalue())


def write(found: dict[str, Any], folder: Path) -> Path:
    """`<data>.csv` and `<data>.png` in a folder that may be new; returns the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / Path(found["data"]).stem
    write_bytes(stem.with_suffix(".csv"), to_csv(found).encode())
    draw(found, stem.with_suffix(".png"))
    return stem
