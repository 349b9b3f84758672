"""What one person can see and decide on a node, as plain values: the API answers with these, the page shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.node import explanations, user_queries
from tacita.live.node import store_file as node_file
from tacita.live.node.budgets import declared_budget, read_user_accounts, set_budget
from tacita.live.node.node import Node
from tacita.live.node.request_queue import WITHDRAWALS
from tacita.live.node.user_queries import ItemQuery, ItemSet, Preset
from tacita.live.node.user_requests import allowed_kinds, list_request_states, read_request_options, submit_request
from tacita.runs.ledger import describe_ledger

KINDS = {
    "share": "show items to the server",
    "unshare": "hide shown items again",
    "forget": "take back",
    "leave": "leave, and take everything back",
}


class PersonService:
    """A node, asked by one person at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._titles: tuple[int, dict[str, str], list[tuple[str, str]]] = (-1, {}, [])
        self._kinds: dict[str, list[str]] = {}  # what a run's settings allow to ask for
        self._lock = threading.Lock()

    # What is there

    def summarize_person(self, user: str) -> dict[str, Any]:
        found = user_queries.summarise_user(self.node.store, user)
        return {"user": user, "node": self.node.config.name, **found}

    def recommendations(self, user: str, k: int) -> list[dict[str, Any]]:
        return self.node.recommend(user, min(k, max(1, len(self.node.snapshot.items))))

    def explain_item(self, user: str, item: str) -> dict[str, Any]:
        return explanations.explain_item(self.node.snapshot, user, item)

    def preview_without(self, user: str, item: str, without: str) -> dict[str, Any]:
        return explanations.preview_removal(self.node.snapshot, user, item, without)

    def history(self, user: str, search: str, only: ItemSet, offset: int, limit: int) -> dict[str, Any]:
        """A page of a person's items; a search finds words of titles and ids."""
        look = ItemQuery(self._match_items(search), only, offset, limit)
        total, rows = user_queries.list_items(self.node.store, user, look)
        return {"total": total, "offset": offset, "limit": limit, "items": self._add_titles(rows)}

    def releases(self, user: str, offset: int, limit: int) -> dict[str, Any]:
        total, rows = user_queries.list_releases(self.node.store, user, offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "releases": rows}

    def describe_holdings(self, user: str) -> dict[str, Any]:
        """What the server has of a person, as far as this node knows."""
        may = read_request_options(self.node, user)
        n, runs = user_queries.count_released_items(self.node.store, user)
        names, _ = self._catalogue()
        shared = sorted({item for items in may["shared"].values() for item in items})
        return {
            "shown items": [{"item": item, "title": names.get(item, "")} for item in shared],
            "items in sums": n,
            "runs": runs,
            "left runs": may["left"],
            "said": _describe_in_words(len(shared), n, runs, self._find_removals(user)),
            "server sees": self.node.describe_exposure(),
        }

    def _find_removals(self, user: str) -> CertifiedRemovals:
        """What servers certified as taken back."""
        one = self.node.store.find_user(user)
        mine = [want for want in self.node.store.list_requests() if want.user == one]
        done = [want for want in mine if want.outcome is not None and want.outcome.state == "done"]
        items: dict[str, set[str]] = {}
        for item, run in ((item, want.run) for want in done if want.kind == "forget" for item in want.items):
            items.setdefault(item, set()).add(run)
        back = [(want.run, want.outcome.certificate) for want in done if want.outcome and want.kind in WITHDRAWALS]
        kept = {run for run, said in back if "not unlearned" in str(said.get("verdict", ""))}
        return CertifiedRemovals(items, {want.run for want in done if want.kind == "leave"}, kept)

    def budget(self, user: str) -> dict[str, Any]:
        """What a person spent in each run, by kind of release, and what they said that they are willing to spend."""
        runs, declared = read_user_accounts(self.node, user)["runs"], declared_budget(self.node, user)
        told = [
            {"run": run, "counts": "spent" in one, **one, "words": describe_ledger(one)} for run, one in runs.items()
        ]
        return {"declared": declared, "runs": told}

    def costs(self, user: str, run: str, offset: int, limit: int) -> dict[str, Any]:
        """What each release of a run cost a person."""
        total, rows = user_queries.list_costs(self.node.store, user, run, offset, limit)
        return {"run": run, "total": total, "offset": offset, "limit": limit, "costs": rows}

    def allowed_kinds(self, user: str) -> list[str]:
        """What a person may ask for in the runs they are in."""
        return sorted({kind for kinds in self._kinds_by_run(user).values() for kind in kinds})

    def runs_without_forget(self, user: str) -> list[str]:
        """Runs that a person is in and that cannot take single items out of what they learned."""
        return sorted(run for run, kinds in self._kinds_by_run(user).items() if "forget" not in kinds)

    def _kinds_by_run(self, user: str) -> dict[str, list[str]]:
        store = self.node.store
        one = store.find_user(user)
        gone = (
            want for want in store.list_requests() if want.user == one and want.kind == "leave" and not want.is_refused
        )
        left = {want.run for want in gone}
        runs = (set(store.list_user_runs(one)) & set(store.runs())) - left
        self._kinds |= {run: allowed_kinds(self.node, run) for run in runs - self._kinds.keys()}
        return {run: self._kinds[run] for run in runs}

    def forget_states(self, user: str) -> dict[str, str]:
        """Items that a person has asked to be forgotten, and whether they are."""
        one, done = self.node.store.find_user(user), self._find_removals(user).items
        mine = [want for want in self.node.store.list_requests() if want.user == one and want.kind == "forget"]
        asked = {item for want in mine if want.outcome is None or not want.outcome.is_final for item in want.items}
        back = {item: f"taken back from {_join_names(runs)}" for item, runs in done.items()}
        return back | dict.fromkeys(asked, "asked back")

    def requests(self, user: str) -> dict[str, Any]:
        """What a person asked of servers, newest first, with certificates."""
        names, _ = self._catalogue()
        wants = {one.id: one for one in self.node.store.list_requests()}
        found = []
        for one in reversed(list_request_states(self.node, user)) if wants else ():
            want = wants.get(one["request"])
            items = [] if want is None else want.items
            listed = [{"item": item, "title": names.get(item, "")} for item in items[:20]]
            made = None if want is None else want.created
            found.append({**one, "asks": KINDS[one["kind"]], "created": made, "named": listed})
        return {"requests": found}

    # What is decided

    def set_preset(self, user: str, preset: Preset) -> dict[str, Any]:
        user_queries.apply_preset(self.node.store, user, preset)
        return self.summarize_person(user)

    def set_item_consent(self, user: str, item: str, takes_part: bool) -> dict[str, Any]:
        user_queries.check_has_item(self.node.store, user, item)
        self.node.set_consent(user, item, "learn" if takes_part else "keep")
        return self.summarize_person(user)

    def set_pause(self, user: str, paused: bool) -> dict[str, Any]:
        user_queries.set_pause(self.node.store, user, paused)
        return self.summarize_person(user)

    def declare_budget(self, user: str, epsilon: float) -> dict[str, Any]:
        set_budget(self.node, user, epsilon)
        return self.budget(user)

    def submit_request(self, user: str, kind: str, items: Sequence[str]) -> dict[str, Any]:
        """Ask servers for something; what is taken back stays here from now on, in later runs as well."""
        found = submit_request(self.node, kind, user, items)
        for item in items if kind == "forget" else ():
            self.node.set_consent(user, item, "keep")
        return {"requests": found["requests"]}

    def export_user(self, user: str) -> bytes:
        """Everything of a person as JSON lines."""
        store, one = self.node.store, self.node.store.find_user(user)
        lines = store.run_query(
            lambda db: [json.dumps(line, ensure_ascii=False) for line in node_file.iter_lines(db, one)]
        )
        return ("\n".join(lines) + "\n").encode("utf-8", "replace")

    def erase_user(self, user: str, confirm: str) -> dict[str, Any]:
        if confirm != user:
            raise TacitaError("nothing was erased: type your id exactly as it stands on this page.")
        return self.node.erase(user)

    # The owner of a silo

    def list_people(self, search: str, offset: int, limit: int) -> dict[str, Any]:
        total, rows = user_queries.list_users(self.node.store, search, offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "people": rows}

    # Titles

    def _catalogue(self) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Titles by item, and what a search looks through; read again when the node's data changed."""
        changes = self.node.store.changes
        with self._lock:
            if self._titles[0] != changes:
                listed = self.node.store.catalogue()
                self._titles = (changes, dict(listed), [(item, f"{title} {item}".casefold()) for item, title in listed])
            return self._titles[1], self._titles[2]

    def _match_items(self, search: str) -> list[str] | None:
        words = search.casefold().split()
        if not words:
            return None
        names, texts = self._catalogue()
        found = [item for item, text in texts if all(word in text for word in words)]
        return found if search in names or found else [search]  # an item that the catalogue does not know

    def _add_titles(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names, _ = self._catalogue()
        return [{**row, "title": names.get(row["item"], "")} for row in rows]


@dataclass(frozen=True)
class CertifiedRemovals:
    """What servers certified: items by the runs that are meant, runs that were left, and runs whose model keeps it."""

    items: dict[str, set[str]]
    left_runs: set[str]
    retaining_runs: set[str]  # it is out of the record there, and not unlearned


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _describe_in_words(shown: int, n: int, runs: list[str], out: CertifiedRemovals) -> list[str]:
    """Sentences that promise no more than is so."""
    said = []
    if shown:
        items = "1 item that you showed it" if shown == 1 else f"{shown:,} items that you showed it"
        said.append(f"{items}, together under a made-up name: who knows some of them finds the others.")
    else:
        said.append("No item of yours by itself: you have shown it none.")
    if n:
        what = "1 item of yours is" if n == 1 else f"{n:,} items of yours are"
        said.append(
            f"{what} part of sums over many people that it was sent ({', '.join(runs)}). It was told neither your name "
            "nor your list; a server that compares many sums can still work out much of what one person did."
        )
    else:
        said.append("No sum that left this device had anything of yours in it.")
    gone = {item: those - out.retaining_runs for item, those in out.items.items() if those - out.retaining_runs}
    left = out.left_runs - out.retaining_runs
    if gone:
        some = "1 item of yours is" if len(gone) == 1 else f"{len(gone):,} items of yours are"
        where = _join_names({run for those in gone.values() for run in those})
        said.append(f"It has certified since that {some} taken out of its record and its model ({where}).")
    if left:
        said.append(f"It has certified that you left {_join_names(left)}, with everything.")
    if out.retaining_runs:
        where = _join_names(out.retaining_runs)
        said.append(f"It has taken what you took back out of its record of {where}; what that model learned stays.")
    said.append("The model that it learned from everybody's sums.")
    return said
