"""The page that answers "Which should I use?": a few sentences made of the cells, then a table for each dataset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.lab.experiments.once import Line
from tacita.lab.experiments.plan import Cell, Experiment
from tacita.metrics import interval

_HEAD = ("method", "model", "NDCG@10", "HR@10", "KB up", "KB down", "seconds", "epsilon")
_HEAD_2 = ("forgetting one person", "what the server sees of a person", "seeds")
_QUALITY = "ndcg@10"
_CLOSE = 0.97  # of the best: near enough to choose by something else


@dataclass(frozen=True)
class Row:
    """One method on one dataset, over its seeds."""

    label: str
    backbone: str
    found: list[Line]

    def mean(self, name: str) -> float | None:
        told = self._told(name)
        return float(np.mean(told)) if told else None

    def shown(self, name: str, digits: int) -> str:
        told = self._told(name)
        if not told:
            return "–"
        mean, half = interval(told)
        return f"{mean:,.{digits}f}" + ("" if np.isnan(half) else f" ± {half:,.{digits}f}")

    def word(self, name: str) -> str:
        return str(self.found[0].get("words", {}).get(name, ""))

    def _told(self, name: str) -> list[float]:
        return [line["values"][name][0] for line in self.found if name in line["values"]]


def choose_page(experiment: Experiment, cells: list[Cell], lines: dict[str, Line]) -> str:
    """What to use for what, and all that was measured."""
    text = ["# Which should I use?", ""]
    text += ["Every method of this project under one protocol; `tacita reproduce choose` makes this page.", ""]
    tables = []
    for dataset in dict.fromkeys(one.dataset for one in cells):
        rows = _rows(experiment, [one for one in cells if one.dataset == dataset], lines)
        if not rows:
            continue
        text += [f"On {dataset}:", "", *(f"- {one}" for one in _advice(rows)), ""]
        tables += [f"## {dataset}", "", *_table(rows), ""]
    text += ["## How it was measured", "", *(f"- {note}" for note in experiment.notes)]
    text += [f"- {_INTERVALS}", "", *tables]
    return "\n".join(text).rstrip() + "\n"


_INTERVALS = "± is half of the 95 % interval over seeds; where it is missing there was one seed."


def _rows(experiment: Experiment, cells: list[Cell], lines: dict[str, Line]) -> list[Row]:
    """Best first."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for cell in cells:
        if "values" in lines.get(cell.key, {}):
            groups.setdefault((cell.variant, cell.backbone), []).append(lines[cell.key])
    rows = [Row(experiment.variants[name].label, backbone, found) for (name, backbone), found in groups.items()]
    return sorted(rows, key=lambda one: -(one.mean(_QUALITY) or 0.0))


def _advice(rows: list[Row]) -> list[str]:
    """The best of all, and of those that promise something."""
    best = rows[0]
    out = [f"**Best quality**: {_named(best)}."]
    bounded = [one for one in rows if one.mean("epsilon") is not None]
    if bounded:
        out.append(f"**With an epsilon**: {_named(bounded[0])}, epsilon {bounded[0].shown('epsilon', 1)}.")
    exact = [
        one for one in rows if one.word("forgets").endswith(": exact") and "trains again" not in one.word("forgets")
    ]
    if exact:
        price = exact[0].shown("forgetting, CPU seconds", 2)
        out.append(f"**Forgets exactly without training again**: {_named(exact[0])}, {price} s for one person.")
    near = [one for one in rows if (one.mean(_QUALITY) or 0) >= _CLOSE * (best.mean(_QUALITY) or 0)]
    sending = [one for one in near if one.mean("KB up, a person") is not None]
    if len(sending) > 1:
        least = min(sending, key=lambda one: one.mean("KB up, a person") or 0.0)
        out.append(f"**Least to send** of those within 3 % of the best: {_named(least)}.")
    popular = next((one for one in rows if one.label == "most popular"), None)
    if popular:
        below = [one.label for one in rows[rows.index(popular) + 1 :]]
        out.append(f"**Below most popular** ({popular.shown(_QUALITY, 4)}): {', '.join(below) or 'none'}.")
    return out


def _named(row: Row) -> str:
    return f"{row.label} on {row.backbone} (NDCG@10 {row.shown(_QUALITY, 4)})"


def _table(rows: list[Row]) -> list[str]:
    head = [*_HEAD, *_HEAD_2]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in rows:
        forgets = one.word("forgets")
        price = f"{forgets}, {one.shown('forgetting, CPU seconds', 2)} s" if forgets else "–"
        told = [one.label, one.backbone, one.shown(_QUALITY, 4), one.shown("hr@10", 4)]
        told += [one.shown(f"KB {way}, a person", 1) for way in ("up", "down")]
        told += [
            one.shown("CPU seconds", 1),
            one.shown("epsilon", 2),
            price,
            one.word("sees") or "–",
            str(len(one.found)),
        ]
        text.append("| " + " | ".join(told) + " |")
    return text
