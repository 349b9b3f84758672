"""What an operator can see and order, as plain values: the API answers with these, the page shows them.

Of people it knows numbers only: never a history, a vector, or who asked for something.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.live.node.threat_model import list_uncovered_sentences
from tacita.live.pages.operator_alerts import list_certificate_alerts, list_node_alerts, list_run_alerts
from tacita.live.pages.operator_metrics import ServerHealth, render_metrics
from tacita.live.pages.response_models import JsonObject
from tacita.live.pages.run_overview import list_results, summarize_run
from tacita.live.running import orders
from tacita.live.running.orders import RunTerms
from tacita.live.running.server import enroll_key, find_stop_reason, is_up, open_store, read_config
from tacita.live.server.overview import OverviewReader
from tacita.live.server.store import STORE_FILE, NodeRow
from tacita.live.tls_certificates import SERVER_CERT, compute_key_fingerprint, read_expiry
from tacita.methods import resolve_config
from tacita.runs.assembly import build_plan

SERVER_SEES_TEXT = (
    "Of each node one sum per round: how item rows moved or which items go together, how many people are in it (a "
    "tally that counts epsilon does not tell), in runs that count no epsilon sums of scores; when the node is online, "
    "its address, version and clock. Of requests what is asked, from which node and "
    "when, under a made-up name. Of single people only what they chose to show, under made-up names. No history, no "
    "private vector, no name. This does not mean that nothing can be worked out: sums of several runs can be "
    "subtracted down to one person, and sums without noise bound nothing."
)
SPENDING_TEXT = (
    "Told when a block ends by nodes whose owners let servers see people one by one; no epsilon covers these numbers. "
    "Other nodes do not tell them."
)
ONLINE_CACHE_SECONDS = 5.0  # the engine is asked which nodes are online at most so often


class OperatorService:
    """A server's folder, as its operator reads it and gives orders to it."""

    def __init__(self, folder: Path, online: Callable[[], dict[int, str]] = dict) -> None:
        self.folder = folder
        self._online = online
        self._store_overview = OverviewReader(folder / STORE_FILE)
        self._online_cache: dict[int, str] = {}
        self._online_read_at = float("-inf")
        self._lock = threading.Lock()

    # Views

    def describe_health(self) -> JsonObject:
        return {"up": is_up(self.folder), "time": time.time()}

    def describe_overview(self) -> JsonObject:
        config = read_config(self.folder)
        with open_store(self.folder) as store:
            n_items = len(store.read_catalogue())
            return {
                "address": f"{config.host}:{config.port}",
                "up": is_up(self.folder),
                "catalogue": n_items,
                "sees": SERVER_SEES_TEXT,
                "certificate ends": self._read_certificate_expiry().timestamp(),
            }

    def list_runs(self) -> JsonObject:
        """Every run with its progress and the quality of its blocks, newest first."""
        summaries = []
        with open_store(self.folder) as store:
            for row in store.list_runs():
                stopped = find_stop_reason(store, row.name)
                summaries.append(summarize_run(row, stopped))
        return {"runs": summaries[::-1]}

    def list_rounds(self, run: str, offset: int, limit: int) -> JsonObject:
        with open_store(self.folder) as store:
            store.load_run(run)
        total, rows = self._store_overview.read_round_page(run, offset, limit)
        return {"run": run, "total": total, "offset": offset, "limit": limit, "rounds": rows}

    def list_nodes(self, search: str, offset: int, limit: int) -> JsonObject:
        with open_store(self.folder) as store:
            rows = store.list_nodes()
        matches = [row for row in rows if search.casefold() in row.name.casefold()]
        facts = _NodeFacts(
            self._store_overview.read_last_answer_times(),
            self._store_overview.read_last_errors(),
            self._find_online_nodes(),
            self._store_overview.read_node_reports(),
        )
        page = [_describe_node(row, facts) for row in matches[offset : offset + limit]]
        return {"total": len(matches), "offset": offset, "limit": limit, "nodes": page}

    def list_requests(self, offset: int, limit: int) -> JsonObject:
        total, rows = self._store_overview.read_request_page(offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "requests": rows}

    def describe_budgets(self, run: str) -> JsonObject:
        """How spending is spread over people, and how many can have been in how many sums; never one person's."""
        with open_store(self.folder) as store:
            row = store.load_run(run)
        results = list_results(row)
        promises = None
        for result in results:
            promises = result.get("promises") or promises
        spending = results[-1].get("spent", {}) if results else {}
        buckets = [{"spent": name, "people at least": n} for name, n in spending.items()]
        plan = build_plan(row.config)
        tells_people = plan.learner.ledger() is None
        spread = self._store_overview.count_release_spread(run) if tells_people else []
        return {
            "run": run,
            "spent": buckets,
            "spent said": SPENDING_TEXT,
            "spread": spread,
            "promises": promises,
            "counts": bool(plan.ledgers),
            "outside": list_uncovered_sentences(plan),
        }

    def list_alerts(self) -> JsonObject:
        """What an operator has to look at."""
        alerts = list_certificate_alerts(self._read_certificate_expiry(), datetime.now(UTC))
        with open_store(self.folder) as store:
            nodes = [row for row in store.list_nodes() if row.revoked is None]
            for row in store.list_runs():
                stopped = find_stop_reason(store, row.name)
                event = store.find_last_event(row.name)
                n_refusals = self._store_overview.count_refusals(row.name, max(0, row.opened - 1))
                alerts += list_run_alerts(row, stopped, event, n_refusals)
        online = self._find_online_nodes()
        reports = self._store_overview.read_node_reports()
        return {"alerts": alerts + list_node_alerts(nodes, online, reports)}

    def render_prometheus(self) -> str:
        """For Prometheus."""
        up = is_up(self.folder)
        with open_store(self.folder) as store:
            nodes = store.list_nodes()
            runs = store.list_runs()
        n_online = sum(state == "online" for state in self._find_online_nodes().values())
        request_states = self._store_overview.count_request_states()
        certificate_end = self._read_certificate_expiry().timestamp()
        n_alerts = len(self.list_alerts()["alerts"])
        return render_metrics(ServerHealth(up, nodes, n_online, runs, request_states, certificate_end, n_alerts))

    def _read_certificate_expiry(self) -> datetime:
        return read_expiry(self.folder / SERVER_CERT)

    def _find_online_nodes(self) -> dict[int, str]:
        with self._lock:
            now = time.monotonic()
            if now - self._online_read_at > ONLINE_CACHE_SECONDS:
                self._online_cache = self._online()
                self._online_read_at = now
            return self._online_cache

    # Orders

    def begin_run(self, run: str, settings: str, quorum: int | str, timeout: float) -> JsonObject:
        try:
            values = tomllib.loads(settings)
        except (ValueError, RecursionError) as error:  # a RecursionError: the text is nested too deep
            raise TacitaError(f"the settings are no TOML: {error}.") from None
        config = resolve_config(values, "the settings")
        orders.begin_run(self.folder, run, config, RunTerms(quorum, timeout, 3600.0))
        return {"run": run}

    def order_run(self, run: str, what: str) -> JsonObject:
        acts = {"next-block": orders.open_block, "stop": orders.stop_run, "resume": orders.resume_run}
        acts[what](self.folder, run)
        return {"run": run, "ordered": what}

    def enroll_node(self, name: str, key: str) -> JsonObject:
        public_key = key.encode("utf-8", "replace")
        return {"name": name, "fingerprint": enroll_key(self.folder, public_key, name)}

    def revoke_node(self, name: str) -> JsonObject:
        with open_store(self.folder) as store:
            return {"name": store.revoke_node(name).name}

    def publish_items(self, items: list[tuple[str, str]]) -> JsonObject:
        for item, title in items:
            is_printable = item.isprintable() and title.isprintable()
            if not item.strip() or not is_printable:
                raise TacitaError("an item has an id and may have a title, both without control characters.")
        with open_store(self.folder) as store:
            n_new = store.add_items(items)
            return {"new": n_new, "catalogue": len(store.read_catalogue())}


@dataclass(frozen=True)
class _NodeFacts:
    """What is known of nodes, by number."""

    answers: dict[int, float]
    errors: dict[int, tuple[float, str]]
    online: dict[int, str]
    self_reports: dict[int, JsonObject]


def _describe_node(row: NodeRow, facts: _NodeFacts) -> JsonObject:
    number = -1 if row.number is None else row.number
    error_time, error_text = facts.errors.get(number, (None, ""))
    report = facts.self_reports.get(number, {})
    return {
        "name": row.name,
        "state": _describe_node_state(row, facts.online.get(number)),
        "enrolled": row.enrolled,
        "last answer": facts.answers.get(number),
        "last seen": report.get("time"),
        "version": report.get("version", ""),
        "clock": report.get("clock"),
        "last error": error_text,
        "error time": error_time,
        "fingerprint": compute_key_fingerprint(row.public_key.encode()),
    }


def _describe_node_state(row: NodeRow, online: str | None) -> str:
    if row.revoked is not None:
        return "revoked"
    if online is not None:
        return online
    return "enrolled" if row.number else "waiting"
