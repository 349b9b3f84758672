"""Alerts of a server: sentences about a certificate, nodes and runs that an operator has to look at."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tacita import __version__
from tacita.live.pages.run_overview import describe_defeat_by_popularity, list_results
from tacita.live.server.store import NodeRow, RunRow

CERTIFICATE_WARNING_DAYS = 30.0  # an alert appears so long before the certificate ends
CLOCK_SKEW_SECONDS = 30.0  # a node's clock may be off by so much without an alert
MOST_NAMES = 5

Alert = dict[str, str]


def list_certificate_alerts(expiry: datetime, now: datetime) -> list[Alert]:
    days = (expiry - now).total_seconds() / 86_400
    if days >= CERTIFICATE_WARNING_DAYS:
        return []
    whole_days = max(0, int(days))
    sentence = f"The server's certificate ends in {whole_days} days; `tacita server renew` makes a new one."
    return [{"kind": "certificate", "said": sentence}]


def list_node_alerts(nodes: list[NodeRow], online: dict[int, str], reports: dict[int, dict[str, Any]]) -> list[Alert]:
    """Nodes that are silent, whose clock is wrong, or that run another version."""
    silent = []
    wrong_clock = []
    other_version = []
    for row in nodes:
        number = row.number or -1
        report = reports.get(number, {})
        if online.get(number) == "offline":
            silent.append(row.name)
        if abs(report.get("clock") or 0.0) > CLOCK_SKEW_SECONDS:
            wrong_clock.append(row.name)
        if report.get("version", "") not in ("", __version__):
            other_version.append(row.name)
    wrong_by = f"wrong about the time by more than {CLOCK_SKEW_SECONDS:.0f} seconds"
    groups = [
        ("silent", silent, "silent"),
        ("clock", wrong_clock, wrong_by),
        ("version", other_version, f"running another tacita than the server's {__version__}"),
    ]
    alerts = []
    for kind, names, predicate in groups:
        if names:
            subject = _format_share(len(names), len(nodes))
            alerts.append({"kind": kind, "said": f"{subject} {predicate}: {_join_names(names)}."})
    return alerts


def list_run_alerts(row: RunRow, stopped: str | None, event: dict[str, Any] | None, n_refusals: int) -> list[Alert]:
    """What is wrong with a run, by why it stopped, its last event and the nodes that refuse it."""
    alerts = []
    if stopped is not None:
        alerts.append({"kind": "stopped", "said": f"Run '{row.name}' stopped: {stopped}"})
    elif event is not None and event.get("event") == "waiting":
        answered = event["answered"]
        needed = event["needed"]
        sentence = f"Run '{row.name}' waits: {answered} of the {needed} nodes that a round needs answered."
        alerts.append({"kind": "quorum", "said": sentence})
    shortfall = describe_defeat_by_popularity(row, list_results(row))
    if shortfall:
        alerts.append({"kind": "quality", "said": f"Run '{row.name}' is below most popular: {shortfall}."})
    if n_refusals:
        subject = "1 node refuses" if n_refusals == 1 else f"{n_refusals:,} nodes refuse"
        sentence = f"{subject} to take part in run '{row.name}'; the list of nodes says why."
        alerts.append({"kind": "refused", "said": sentence})
    return alerts


def _format_share(n: int, total: int) -> str:
    verb = "is" if n == 1 else "are"
    return f"{n:,} of {total:,} nodes {verb}"


def _join_names(names: list[str]) -> str:
    text = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        text += f" and {len(names) - MOST_NAMES:,} more"
    return text
