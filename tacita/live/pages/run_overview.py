"""A run as the operator sees it: progress, the quality of its blocks, and where that is below a control."""

from __future__ import annotations

from typing import Any

from tacita.live.pages.response_models import JsonObject
from tacita.live.server.store import RunRow, count_done_blocks, describe_run_progress
from tacita.runs.assembly import build_plan

CONTROLS_TEXT = (
    "In red, with an arrow: below a control. Controls are counted by the nodes over their own people, on the same "
    "test items, and sent as sums of scores. Random: any order. Most popular: by how many people of the node have an "
    "item. Each node alone: a linear model that it makes of its own people, for catalogues of up to 5,000 items."
)


def list_results(row: RunRow) -> list[JsonObject]:
    """What was measured after each finished block of a run."""
    if row.note is None:
        return []
    results: list[JsonObject] = row.note["plain"]["results"]
    return results


def summarize_run(row: RunRow, stopped: str | None) -> JsonObject:
    results = list_results(row)
    n_done = count_done_blocks(row)
    has_open_block = n_done < row.opened
    return {
        "run": row.name,
        "standing": describe_run_progress(row),
        "stopped": stopped,
        "under way": has_open_block and stopped is None,
        "blocks done": n_done,
        "blocks opened": row.opened,
        "round": _find_current_round(row) if has_open_block else 0,
        "rounds": build_plan(row.config).learner.rounds,
        "backbone": str(row.config.backbone["name"]),
        "method": row.config.method,
        "quality": [_select_numbers(result) for result in results],
        "controls": [result.get("controls", {}) for result in results],
        "below most popular": describe_defeat_by_popularity(row, results),
        "controls said": CONTROLS_TEXT,
    }


def _find_current_round(row: RunRow) -> int:
    """The round of the block that is being trained; 0: none has ended."""
    if row.note is None or not row.note["plain"]["in_block"]:
        return 0
    current: int = row.note["now"]["round"]
    return current


def _select_numbers(result: JsonObject) -> dict[str, float]:
    return {name: value for name, value in result.items() if is_number(value)}


def describe_defeat_by_popularity(row: RunRow, results: list[JsonObject]) -> str:
    """Where the last block of a run was ranked worse than by popularity, by the metric that chooses its rounds."""
    if not results:
        return ""
    metric = row.config.evaluate.select_by
    result = results[-1]
    popular = result.get("controls", {}).get("popular", {}).get(metric)
    if popular is None or metric not in result or result[metric] >= popular:
        return ""
    return f"{metric} {result[metric]:.4f} in block {result['block']}, most popular {popular:.4f}"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
