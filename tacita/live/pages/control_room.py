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
from tacita.lab.assembling import planned
from tacita.live.certificates import SERVER, expires, fingerprint
from tacita.live.running import orders
from tacita.live.running.orders import Terms
from tacita.live.running.server import enroll_key, is_up, open_store, read_config, why_stopped
from tacita.live.server.overview import Overview
from tacita.live.server.store import STORE, NodeRow, RunRow, done_blocks, standing
from tacita.methods import configured

SEES = (
    "Of each node one sum per round: how item rows moved or which items go together, how many people are in it, in "
    "runs that count no epsilon sums of scores, in runs that do how many people spent how much of their budgets, "
    "rounded; when the node is online, its address, version and clock. Of requests what is asked, from which node and "
    "when, under a made-up name. Of single people only what they chose to show, under made-up names. No history, no "
    "private vector, no name. This does not mean that nothing can be worked out: sums of several runs can be "
    "subtracted down to one person, and sums without noise bound nothing."
)
CONTROL = (
    "In red, with an arrow: below a control. Controls are counted by the nodes over their own people, on the same "
    "test items, and sent as sums of scores. Random: any order. Most popular: by how many people of the node have an "
    "item. Each node alone: a linear model that it makes of its own people, for catalogues of up to 5,000 items."
)
SPENDING = (
    "Told by nodes when a block ends. Each node rounds each number down to a multiple of its minimum (min_users), so "
    "no number stands for fewer people; who is left over is in no row. This lessens what the numbers tell of one "
    "person, and does not bound it."
)
SOON = 30.0  # days before a certificate's end that it is told
ASKEW = 30.0  # seconds that a node's clock may be off before it is told
KNOWN = 5.0  # seconds for which the engine's word on who is online is kept


class ControlRoom:
    """A server's folder, looked at and ordered about by its operator."""

    def __init__(self, folder: Path, online: Callable[[], dict[int, str]] = dict) -> None:
        self.folder, self._online = folder, online
        self._look = Overview(folder / STORE)
        self._known: tuple[float, dict[int, str]] = (float("-inf"), {})
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
                "sees": SEES,
                "certificate ends": expires(self.folder / SERVER).timestamp(),
            }

    def runs(self) -> dict[str, Any]:
        """Every run with its progress and the quality of its blocks."""
        with open_store(self.folder) as store:
            return {"runs": [self._run(row, why_stopped(store, row.name)) for row in store.runs()][::-1]}

    def _run(self, row: RunRow, stopped: str | None) -> dict[str, Any]:
        results = [] if row.note is None else row.note["plain"]["results"]
        done = done_blocks(row)
        rounds = planned(row.config).learner.rounds
        in_block = row.note is not None and done < row.opened and row.note["plain"]["in_block"]
        now = row.note["now"]["round"] if in_block and row.note is not None else 0
        return {
            "run": row.name,
            "standing": standing(row),
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
            "below most popular": _below(row, results),
            "controls said": CONTROL,
        }

    def rounds(self, run: str, offset: int, limit: int) -> dict[str, Any]:
        with open_store(self.folder) as store:
            store.run(run)
        total, rows = self._look.rounds(run, offset, limit)
        return {"run": run, "total": total, "offset": offset, "limit": limit, "rounds": rows}

    def nodes(self, search: str, offset: int, limit: int) -> dict[str, Any]:
        with open_store(self.folder) as store:
            rows = store.nodes()
        found = [row for row in rows if search.casefold() in row.name.casefold()]
        known = _Known(
            self._look.last_answers(), self._look.last_errors(), self._who_is_online(), self._look.of_themselves()
        )
        page = [self._node(row, known) for row in found[offset : offset + limit]]
        return {"total": len(found), "offset": offset, "limit": limit, "nodes": page}

    def _node(self, row: NodeRow, known: _Known) -> dict[str, Any]:
        number = -1 if row.number is None else row.number
        waits = "enrolled" if row.number else "waiting"
        state = "revoked" if row.revoked is not None else known.online.get(number, waits)
        at, said = known.errors.get(number, (None, ""))
        itself = known.itself.get(number, {})
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
        total, rows = self._look.requests(offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "requests": rows}

    def budgets(self, run: str) -> dict[str, Any]:
        """How spending is spread over people, and how many can have been in how many sums; never one person's."""
        with open_store(self.folder) as store:
            row = store.run(run)
        results = [] if row.note is None else row.note["plain"]["results"]
        stated = [one["promises"] for one in results if one.get("promises")]
        spent = (results[-1] if results else {}).get("spent", {})
        return {
            "run": run,
            "spent": [{"spent": name, "people at least": n} for name, n in spent.items()],
            "spent said": SPENDING,
            "spread": self._look.spread(run),
            "promises": stated[-1] if stated else None,
            "counts": bool(planned(row.config).ledgers),
        }

    def alerts(self) -> dict[str, Any]:
        """What somebody has to look at."""
        found: list[dict[str, str]] = []
        days = (expires(self.folder / SERVER) - datetime.now(UTC)).total_seconds() / 86_400
        if days < SOON:
            said = f"The server's certificate ends in {max(0, int(days))} days; `tacita server renew` makes a new one."
            found.append({"kind": "certificate", "said": said})
        with open_store(self.folder) as store:
            nodes = [row for row in store.nodes() if row.revoked is None]
            for row in store.runs():
                found += self._alerts_of(row, why_stopped(store, row.name), store.last_event(row.name))
        return {"alerts": found + self._alerts_of_nodes(nodes)}

    def _alerts_of_nodes(self, nodes: list[NodeRow]) -> list[dict[str, str]]:
        """Nodes that are silent, whose clock is wrong, or that run another version."""
        online, itself = self._who_is_online(), self._look.of_themselves()
        said = {row.name: itself.get(row.number or -1, {}) for row in nodes}
        groups = {
            "silent": [row.name for row in nodes if online.get(row.number or -1) == "offline"],
            "clock": [name for name, one in said.items() if abs(one.get("clock") or 0.0) > ASKEW],
            "version": [name for name, one in said.items() if one.get("version", "") not in ("", __version__)],
        }
        words = {
            "silent": "silent",
            "clock": f"wrong about the time by more than {ASKEW:.0f} seconds",
            "version": f"running another tacita than the server's {__version__}",
        }
        return [
            {"kind": kind, "said": f"{_some(len(names), len(nodes))} {words[kind]}: {_listed(names)}."}
            for kind, names in groups.items()
            if names
        ]

    def _alerts_of(self, row: RunRow, stopped: str | None, last: dict[str, Any] | None) -> list[dict[str, str]]:
        found = []
        if stopped is not None:
            found.append({"kind": "stopped", "said": f"Run '{row.name}' stopped: {stopped}"})
        elif last is not None and last.get("event") == "waiting":
            said = (
                f"Run '{row.name}' waits: {last['answered']} of the {last['needed']} nodes that a round needs answered."
            )
            found.append({"kind": "quorum", "said": said})
        results = [] if row.note is None else row.note["plain"]["results"]
        below = _below(row, results)
        if below:
            found.append({"kind": "quality", "said": f"Run '{row.name}' is below most popular: {below}."})
        refused = self._look.refusals(row.name, max(0, row.opened - 1))
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
        online = sum(one == "online" for one in self._who_is_online().values())
        lines.append(f'tacita_nodes{{state="online"}} {online}')
        lines.append("# TYPE tacita_blocks_done counter")
        lines += [f'tacita_blocks_done{{run="{row.name}"}} {done_blocks(row)}' for row in runs]
        lines.append("# TYPE tacita_quality gauge")
        for row in runs:
            for one in [] if row.note is None else row.note["plain"]["results"]:
                for model, scores in {"run": one, **one.get("controls", {})}.items():
                    where = f'run="{row.name}",block="{one["block"]}",model="{model}"'
                    shown = {name: value for name, value in scores.items() if "@" in name and _is_number(value)}
                    lines += [f'tacita_quality{{{where},metric="{name}"}} {value}' for name, value in shown.items()]
        lines.append("# TYPE tacita_requests gauge")
        lines += [f'tacita_requests{{state="{state}"}} {n}' for state, n in sorted(self._look.request_states().items())]
        ends = expires(self.folder / SERVER).timestamp()
        lines += ["# TYPE tacita_certificate_end_seconds gauge", f"tacita_certificate_end_seconds {ends:.0f}"]
        return "\n".join([*lines, f"tacita_alerts {len(self.alerts()['alerts'])}"]) + "\n"

    def _who_is_online(self) -> dict[int, str]:
        with self._lock:
            if time.monotonic() - self._known[0] > KNOWN:
                self._known = (time.monotonic(), self._online())
            return self._known[1]

    # What is ordered

    def begin(self, run: str, settings: str, quorum: int | str, timeout: float) -> dict[str, Any]:
        try:
            given = tomllib.loads(settings)
        except (ValueError, RecursionError) as error:  # of the second kind what is nested too deep
            raise TacitaError(f"the settings are no TOML: {error}.") from None
        orders.begin_run(self.folder, run, configured(given, "the settings"), Terms(quorum, timeout, 3600.0))
        return {"run": run}

    def order(self, run: str, what: str) -> dict[str, Any]:
        acts = {"next-block": orders.open_block, "stop": orders.stop_run, "resume": orders.resume_run}
        acts[what](self.folder, run)
        return {"run": run, "ordered": what}

    def enroll(self, name: str, key: str) -> dict[str, Any]:
        return {"name": name, "fingerprint": enroll_key(self.folder, key.encode("utf-8", "replace"), name)}

    def revoke(self, name: str) -> dict[str, Any]:
        with open_store(self.folder) as store:
            return {"name": store.revoke(name).name}

    def publish(self, items: list[tuple[str, str]]) -> dict[str, Any]:
        if any(not item.strip() or not item.isprintable() or not title.isprintable() for item, title in items):
            raise TacitaError("an item has an id and may have a title, both without control characters.")
        with open_store(self.folder) as store:
            return {"new": store.add_items(items), "catalogue": len(store.catalogue())}


@dataclass(frozen=True)
class _Known:
    """What is known of nodes, by number."""

    answers: dict[int, float]
    errors: dict[int, tuple[float, str]]
    online: dict[int, str]
    itself: dict[int, dict[str, Any]]


def _below(row: RunRow, results: list[dict[str, Any]]) -> str:
    """Where the last block of a run was ranked worse than by popularity, by the metric that chooses its rounds."""
    name = row.config.evaluate.select_by
    last = results[-1] if results else {}
    popular = last.get("controls", {}).get("popular", {}).get(name)
    if popular is None or name not in last or last[name] >= popular:
        return ""
    return f"{name} {last[name]:.4f} in block {last['block']}, most popular {popular:.4f}"


def _some(n: int, of: int) -> str:
    return f"{n:,} of {of:,} nodes {'is' if n == 1 else 'are'}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
