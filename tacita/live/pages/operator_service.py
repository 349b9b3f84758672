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
from typing import Any

from tacita import __version__
from tacita.core.errors import TacitaError
from tacita.live.running import orders
from tacita.live.running.orders import RunTerms
from tacita.live.running.server import enroll_key, find_stop_reason, is_up, open_store, read_config
from tacita.live.server.overview import OverviewReader
from tacita.live.server.store import STORE_FILE, NodeRow, RunRow, count_done_blocks, describe_run
from tacita.live.tls_certificates import SERVER_CERT, fingerprint, read_expiry
from tacita.methods import resolve_config
from tacita.runs.assembly import build_plan

SERVER_SEES_TEXT = (
    "Of each node one sum per round: how item rows moved or which items go together, how many people are in it, in "
    "runs that count no epsilon sums of scores, in runs that do how many people spent how much of their budgets, "
    "rounded; when the node is online, its address, version and clock. Of requests what is asked, from which node and "
    "when, under a made-up name. Of single people only what they chose to show, under made-up names. No history, no "
    "private vector, no name. This does not mean that nothing can be worked out: sums of several runs can be "
    "subtracted down to one person, and sums without noise bound nothing."
)
CONTROLS_TEXT = (
    "In red, with an arrow: below a control. Controls are counted by the nodes over their own people, on the same "
    "test items, and sent as sums of scores. Random: any order. Most popular: by how many people of the node have an "
    "item. Each node alone: a linear model that it makes of its own people, for catalogues of up to 5,000 items."
)
SPENDING_TEXT = (
    "Told by nodes when a block ends. Each node rounds each number down to a multiple of its minimum (min_users), so "
    "no number stands for fewer people; who is left over is in no row. This lessens what the numbers tell of one "
    "person, and does not bound it."
)
CERTIFICATE_WARNING_DAYS = 30.0  # days before a certificate's end that it is told
CLOCK_SKEW_SECONDS = 30.0  # seconds that a node's clock may be off before it is told
ONLINE_CACHE_SECONDS = 5.0  # seconds for which the engine's word on who is online is kept


class OperatorService:
    """A server's folder, looked at and ordered about by its operator."""

    def __init__(self, folder: Path, online: Callable[[], dict[int, str]] = dict) -> None:
        self.folder, self._online = folder, online
        self._store_overview = OverviewReader(folder / STORE_FILE)
        self._online_cache: tuple[float, dict[int, str]] = (float("-inf"), {})
        self._lock = threading.Lock()

    # What is there

    def health(self) -> dict[str, Any]:
        return {"up": is_up(self.folder), "time": time.time()}

    def overview(self) -> dict[str, Any]:
        config = read_config(self.folder)
        with open_store(self.folder) as store:
            return {
                "address": f"{config.host}:{config.port}",
                "up": is_up(self.folder),
                "catalogue": len(store.catalogue()),
                "sees": SERVER_SEES_TEXT,
                "certificate ends": read_expiry(self.folder / SERVER_CERT).timestamp(),
            }

    def runs(self) -> dict[str, Any]:
        """Every run with its progress and the quality of its blocks."""
        with open_store(self.folder) as store:
            return {"runs": [self._describe_run(row, find_stop_reason(store, row.name)) for row in store.runs()][::-1]}

    def _describe_run(self, row: RunRow, stopped: str | None) -> dict[str, Any]:
        results = [] if row.note is None else row.note["plain"]["results"]
        done = count_done_blocks(row)
        rounds = build_plan(row.config).learner.rounds
        in_block = row.note is not None and done < row.opened and row.note["plain"]["in_block"]
        now = row.note["now"]["round"] if in_block and row.note is not None else 0
        return {
            "run": row.name,
            "standing": describe_run(row),
            "stopped": stopped,
            "under way": done < row.opened and stopped is None,
            "blocks done": done,
            "blocks opened": row.opened,
            "round": now,
            "rounds": rounds,
            "backbone": str(row.config.backbone["name"]),
            "method": row.config.method,
            "quality": [{name: value for name, value in one.items() if _is_number(value)} for one in results],
            "controls": [one.get("controls", {}) for one in results],
            "below most popular": _describe_shortfall(row, results),
            "controls said": CONTROLS_TEXT,
        }

    def rounds(self, run: str, offset: int, limit: int) -> dict[str, Any]:
        with open_store(self.folder) as store:
            store.load_run(run)
        total, rows = self._store_overview.rounds(run, offset, limit)
        return {"run": run, "total": total, "offset": offset, "limit": limit, "rounds": rows}

    def nodes(self, search: str, offset: int, limit: int) -> dict[str, Any]:
        with open_store(self.folder) as store:
            rows = store.nodes()
        found = [row for row in rows if search.casefold() in row.name.casefold()]
        known = _NodeFacts(
            self._store_overview.last_answers(),
            self._store_overview.last_errors(),
            self._find_online_nodes(),
            self._store_overview.node_reports(),
        )
        page = [self._describe_node(row, known) for row in found[offset : offset + limit]]
        return {"total": len(found), "offset": offset, "limit": limit, "nodes": page}

    def _describe_node(self, row: NodeRow, known: _NodeFacts) -> dict[str, Any]:
        number = -1 if row.number is None else row.number
        waits = "enrolled" if row.number else "waiting"
        state = "revoked" if row.revoked is not None else known.online.get(number, waits)
        at, said = known.errors.get(number, (None, ""))
        itself = known.self_reports.get(number, {})
        return {
            "name": row.name,
            "state": state,
            "enrolled": row.enrolled,
            "last answer": known.answers.get(number),
            "last seen": itself.get("time"),
            "version": itself.get("version", ""),
            "clock": itself.get("clock"),
            "last error": said,
            "error time": at,
            "fingerprint": fingerprint(row.public_key.encode()),
        }

    def requests(self, offset: int, limit: int) -> dict[str, Any]:
        total, rows = self._store_overview.requests(offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "requests": rows}

    def budgets(self, run: str) -> dict[str, Any]:
        """How spending is spread over people, and how many can have been in how many sums; never one person's."""
        with open_store(self.folder) as store:
            row = store.load_run(run)
        results = [] if row.note is None else row.note["plain"]["results"]
        stated = [one["promises"] for one in results if one.get("promises")]
        spent = (results[-1] if results else {}).get("spent", {})
        return {
            "run": run,
            "spent": [{"spent": name, "people at least": n} for name, n in spent.items()],
            "spent said": SPENDING_TEXT,
            "spread": self._store_overview.count_release_spread(run),
            "promises": stated[-1] if stated else None,
            "counts": bool(build_plan(row.config).ledgers),
        }

    def alerts(self) -> dict[str, Any]:
        """What somebody has to look at."""
        found: list[dict[str, str]] = []
        days = (read_expiry(self.folder / SERVER_CERT) - datetime.now(UTC)).total_seconds() / 86_400
        if days < CERTIFICATE_WARNING_DAYS:
            said = f"The server's certificate ends in {max(0, int(days))} days; `tacita server renew` makes a new one."
            found.append({"kind": "certificate", "said": said})
        with open_store(self.folder) as store:
            nodes = [row for row in store.nodes() if row.revoked is None]
            for row in store.runs():
                found += self._run_alerts(row, find_stop_reason(store, row.name), store.last_event(row.name))
        return {"alerts": found + self._node_alerts(nodes)}

    def _node_alerts(self, nodes: list[NodeRow]) -> list[dict[str, str]]:
        """Nodes that are silent, whose clock is wrong, or that run another version."""
        online, itself = self._find_online_nodes(), self._store_overview.node_reports()
        said = {row.name: itself.get(row.number or -1, {}) for row in nodes}
        groups = {
            "silent": [row.name for row in nodes if online.get(row.number or -1) == "offline"],
            "clock": [name for name, one in said.items() if abs(one.get("clock") or 0.0) > CLOCK_SKEW_SECONDS],
            "version": [name for name, one in said.items() if one.get("version", "") not in ("", __version__)],
        }
        words = {
            "silent": "silent",
            "clock": f"wrong about the time by more than {CLOCK_SKEW_SECONDS:.0f} seconds",
            "version": f"running another tacita than the server's {__version__}",
        }
        return [
            {"kind": kind, "said": f"{_format_share(len(names), len(nodes))} {words[kind]}: {_join_names(names)}."}
            for kind, names in groups.items()
            if names
        ]

    def _run_alerts(self, row: RunRow, stopped: str | None, last: dict[str, Any] | None) -> list[dict[str, str]]:
        found = []
        if stopped is not None:
            found.append({"kind": "stopped", "said": f"Run '{row.name}' stopped: {stopped}"})
        elif last is not None and last.get("event") == "waiting":
            said = (
                f"Run '{row.name}' waits: {last['answered']} of the {last['needed']} nodes that a round needs answered."
            )
            found.append({"kind": "quorum", "said": said})
        results = [] if row.note is None else row.note["plain"]["results"]
        below = _describe_shortfall(row, results)
        if below:
            found.append({"kind": "quality", "said": f"Run '{row.name}' is below most popular: {below}."})
        refused = self._store_overview.count_refusals(row.name, max(0, row.opened - 1))
        if refused:
            what = "1 node refuses" if refused == 1 else f"{refused:,} nodes refuse"
            found.append(
                {"kind": "refused", "said": f"{what} to take part in run '{row.name}'; the list of nodes says why."}
            )
        return found

    def metrics(self) -> str:
        """For Prometheus."""
        lines = ["# TYPE tacita_up gauge", f"tacita_up {int(is_up(self.folder))}"]
        with open_store(self.folder) as store:
            rows, runs = store.nodes(), store.runs()
        enrolled = sum(row.revoked is None for row in rows)
        lines += ["# TYPE tacita_nodes gauge", f'tacita_nodes{{state="enrolled"}} {enrolled}']
        lines.append(f'tacita_nodes{{state="revoked"}} {len(rows) - enrolled}')
        online = sum(one == "online" for one in self._find_online_nodes().values())
        lines.append(f'tacita_nodes{{state="online"}} {online}')
        lines.append("# TYPE tacita_blocks_done counter")
        lines += [f'tacita_blocks_done{{run="{row.name}"}} {count_done_blocks(row)}' for row in runs]
        lines.append("# TYPE tacita_quality gauge")
        for row in runs:
            for one in [] if row.note is None else row.note["plain"]["results"]:
                for model, scores in {"run": one, **one.get("controls", {})}.items():
                    where = f'run="{row.name}",block="{one["block"]}",model="{model}"'
                    shown = {name: value for name, value in scores.items() if "@" in name and _is_number(value)}
                    lines += [f'tacita_quality{{{where},metric="{name}"}} {value}' for name, value in shown.items()]
        lines.append("# TYPE tacita_requests gauge")
        lines += [
            f'tacita_requests{{state="{state}"}} {n}'
            for state, n in sorted(self._store_overview.request_states().items())
        ]
        ends = read_expiry(self.folder / SERVER_CERT).timestamp()
        lines += ["# TYPE tacita_certificate_end_seconds gauge", f"tacita_certificate_end_seconds {ends:.0f}"]
        return "\n".join([*lines, f"tacita_alerts {len(self.alerts()['alerts'])}"]) + "\n"

    def _find_online_nodes(self) -> dict[int, str]:
        with self._lock:
            if time.monotonic() - self._online_cache[0] > ONLINE_CACHE_SECONDS:
                self._online_cache = (time.monotonic(), self._online())
            return self._online_cache[1]

    # What is ordered

    def begin_run(self, run: str, settings: str, quorum: int | str, timeout: float) -> dict[str, Any]:
        try:
            given = tomllib.loads(settings)
        except (ValueError, RecursionError) as error:  # of the second kind what is nested too deep
            raise TacitaError(f"the settings are no TOML: {error}.") from None
        orders.begin_run(self.folder, run, resolve_config(given, "the settings"), RunTerms(quorum, timeout, 3600.0))
        return {"run": run}

    def order_run(self, run: str, what: str) -> dict[str, Any]:
        acts = {"next-block": orders.open_block, "stop": orders.stop_run, "resume": orders.resume_run}
        acts[what](self.folder, run)
        return {"run": run, "ordered": what}

    def enroll_node(self, name: str, key: str) -> dict[str, Any]:
        return {"name": name, "fingerprint": enroll_key(self.folder, key.encode("utf-8", "replace"), name)}

    def revoke_node(self, name: str) -> dict[str, Any]:
        with open_store(self.folder) as store:
            return {"name": store.revoke(name).name}

    def publish_items(self, items: list[tuple[str, str]]) -> dict[str, Any]:
        if any(not item.strip() or not item.isprintable() or not title.isprintable() for item, title in items):
            raise TacitaError("an item has an id and may have a title, both without control characters.")
        with open_store(self.folder) as store:
            return {"new": store.add_items(items), "catalogue": len(store.catalogue())}


@dataclass(frozen=True)
class _NodeFacts:
    """What is known of nodes, by number."""

    answers: dict[int, float]
    errors: dict[int, tuple[float, str]]
    online: dict[int, str]
    self_reports: dict[int, dict[str, Any]]


def _describe_shortfall(row: RunRow, results: list[dict[str, Any]]) -> str:
    """Where the last block of a run was ranked worse than by popularity, by the metric that chooses its rounds."""
    name = row.config.evaluate.select_by
    last = results[-1] if results else {}
    popular = last.get("controls", {}).get("popular", {}).get(name)
    if popular is None or name not in last or last[name] >= popular:
        return ""
    return f"{name} {last[name]:.4f} in block {last['block']}, most popular {popular:.4f}"


def _format_share(n: int, of: int) -> str:
    return f"{n:,} of {of:,} nodes {'is' if n == 1 else 'are'}"


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
