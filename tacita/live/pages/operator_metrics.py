"""A server's state in the text format of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tacita.live.pages.run_overview import is_number, list_results
from tacita.live.server.store import NodeRow, RunRow, count_done_blocks


@dataclass(frozen=True)
class ServerHealth:
    """What the metrics are made of."""

    is_up: bool
    nodes: list[NodeRow]
    n_online: int
    runs: list[RunRow]
    request_states: dict[str, int]
    certificate_end: float  # seconds since 1970
    n_alerts: int


def render_metrics(state: ServerHealth) -> str:
    lines = ["# TYPE tacita_up gauge", f"tacita_up {int(state.is_up)}"]
    lines += _list_node_lines(state.nodes, state.n_online)
    lines.append("# TYPE tacita_blocks_done counter")
    for row in state.runs:
        lines.append(f'tacita_blocks_done{{run="{row.name}"}} {count_done_blocks(row)}')
    lines.append("# TYPE tacita_quality gauge")
    for row in state.runs:
        for result in list_results(row):
            lines += _list_quality_lines(row.name, result)
    lines.append("# TYPE tacita_requests gauge")
    for name, n in sorted(state.request_states.items()):
        lines.append(f'tacita_requests{{state="{name}"}} {n}')
    lines.append("# TYPE tacita_certificate_end_seconds gauge")
    lines.append(f"tacita_certificate_end_seconds {state.certificate_end:.0f}")
    lines.append(f"tacita_alerts {state.n_alerts}")
    return "\n".join(lines) + "\n"


def _list_node_lines(nodes: list[NodeRow], n_online: int) -> list[str]:
    n_enrolled = sum(row.revoked is None for row in nodes)
    n_revoked = len(nodes) - n_enrolled
    return [
        "# TYPE tacita_nodes gauge",
        f'tacita_nodes{{state="enrolled"}} {n_enrolled}',
        f'tacita_nodes{{state="revoked"}} {n_revoked}',
        f'tacita_nodes{{state="online"}} {n_online}',
    ]


def _list_quality_lines(run: str, result: dict[str, Any]) -> list[str]:
    """The metrics of one block, of the run and of its controls."""
    lines = []
    scores_by_model = {"run": result, **result.get("controls", {})}
    for model, scores in scores_by_model.items():
        labels = f'run="{run}",block="{result["block"]}",model="{model}"'
        for name, value in scores.items():
            if "@" in name and is_number(value):
                lines.append(f'tacita_quality{{{labels},metric="{name}"}} {value}')
    return lines
