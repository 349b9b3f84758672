"""What one person can see and decide on a node, as plain values: the API answers with these, the page shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from tacita.core.errors import TacitaError
from tacita.live.node import explanations, user_queries
from tacita.live.node import store_file as node_file
from tacita.live.node.budgets import read_declared_budget, read_user_accounts, set_budget
from tacita.live.node.node import Node
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.request_status import list_request_statuses
from tacita.live.node.user_queries import ItemQuery, ItemSet, Preset
from tacita.live.node.user_requests import list_allowed_kinds, read_request_options, submit_request
from tacita.live.pages.holdings import collect_removals, describe_server_holdings, join_run_names
from tacita.live.pages.response_models import JsonObject
from tacita.runs.ledger import describe_ledger

KINDS = {
    "share": "show items to the server",
    "unshare": "hide shown items again",
    "forget": "take back",
    "leave": "leave, and take everything back",
}
MOST_NAMED_ITEMS = 20  # of a request, with their titles


class PersonService:
    """A node that serves one person at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._titles_version = -1
        self._titles: dict[str, str] = {}
        self._search_texts: list[tuple[str, str]] = []
        self._kinds: dict[str, list[str]] = {}  # by run: the kinds of request that its settings allow
        self._lock = threading.Lock()

    # Views

    def summarize_person(self, user: str) -> JsonObject:
        summary = user_queries.summarise_user(self.node.store, user)
        return {"user": user, "node": self.node.config.name, **summary}

    def list_recommendations(self, user: str, k: int) -> list[JsonObject]:
        n_items = len(self.node.snapshot.items)
        return self.node.recommend(user, min(k, max(1, n_items)))

    def explain_item(self, user: str, item: str) -> JsonObject:
        return explanations.explain_item(self.node.snapshot, user, item)

    def preview_without(self, user: str, item: str, without: str) -> JsonObject:
        return explanations.preview_removal(self.node.snapshot, user, item, without)

    def list_history(self, user: str, search: str, only: ItemSet, offset: int, limit: int) -> JsonObject:
        """A page of a person's items; a search finds words of titles and ids."""
        query = ItemQuery(self._match_items(search), only, offset, limit)
        total, rows = user_queries.list_user_items(self.node.store, user, query)
        return {"total": total, "offset": offset, "limit": limit, "items": self._add_titles(rows)}

    def list_releases(self, user: str, offset: int, limit: int) -> JsonObject:
        total, rows = user_queries.list_releases(self.node.store, user, offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "releases": rows}

    def describe_server_holdings(self, user: str) -> JsonObject:
        """What the server has of a person, as far as this node knows."""
        options = read_request_options(self.node, user)
        n_released, runs = user_queries.count_released_items(self.node.store, user)
        shared: set[str] = set()
        for items in options["shared"].values():
            shared.update(items)
        removals = collect_removals(self._list_own_requests(user))
        return {
            "shown items": self._name_items(sorted(shared)),
            "items in sums": n_released,
            "runs": runs,
            "left runs": options["left"],
            "said": describe_server_holdings(len(shared), n_released, runs, removals),
            "server sees": self.node.describe_exposure(),
        }

    def _list_own_requests(self, user: str) -> list[QueuedRequest]:
        user_number = self.node.store.find_user(user)
        requests = self.node.store.list_requests()
        return [request for request in requests if request.user == user_number]

    def describe_budget(self, user: str) -> JsonObject:
        """What a person spent in each run, by kind of release, and what they said that they are willing to spend."""
        accounts = read_user_accounts(self.node, user)["runs"]
        declared = read_declared_budget(self.node, user)
        rows = []
        for run, account in accounts.items():
            counts = "spent" in account
            rows.append({"run": run, "counts": counts, **account, "words": describe_ledger(account)})
        return {"declared": declared, "runs": rows}

    def list_costs(self, user: str, run: str, offset: int, limit: int) -> JsonObject:
        """What each release of a run cost a person."""
        total, rows = user_queries.list_costs(self.node.store, user, run, offset, limit)
        return {"run": run, "total": total, "offset": offset, "limit": limit, "costs": rows}

    def list_allowed_kinds(self, user: str) -> list[str]:
        """What a person may ask for in the runs they are in."""
        allowed: set[str] = set()
        for kinds in self._list_kinds_by_run(user).values():
            allowed.update(kinds)
        return sorted(allowed)

    def list_runs_without_forget(self, user: str) -> list[str]:
        """Runs that a person is in and that cannot take single items out of what they learned."""
        kinds_by_run = self._list_kinds_by_run(user)
        return sorted(run for run, kinds in kinds_by_run.items() if "forget" not in kinds)

    def _list_kinds_by_run(self, user: str) -> dict[str, list[str]]:
        store = self.node.store
        user_number = store.find_user(user)
        left_runs = set()
        for request in self._list_own_requests(user):
            if request.kind == "leave" and request.phase != "refused":
                left_runs.add(request.run)
        known_runs = set(store.list_user_runs(user_number)) & set(store.list_runs())
        runs = known_runs - left_runs
        for run in runs - self._kinds.keys():
            self._kinds[run] = list_allowed_kinds(self.node, run)
        return {run: self._kinds[run] for run in runs}

    def list_forget_states(self, user: str) -> dict[str, str]:
        """Items that a person has asked to be forgotten, and whether they are."""
        requests = self._list_own_requests(user)
        states = {}
        for item, runs in collect_removals(requests).items.items():
            states[item] = f"taken back from {join_run_names(runs)}"
        for request in requests:
            if request.kind == "forget" and not request.is_final:
                states |= dict.fromkeys(request.items, "asked back")
        return states

    def list_requests(self, user: str) -> JsonObject:
        """What a person asked of servers, newest first, with certificates."""
        queued = {request.id: request for request in self.node.store.list_requests()}
        if not queued:
            return {"requests": []}
        rows = []
        for status in reversed(list_request_statuses(self.node, user)):
            request = queued.get(status.request)
            created = None if request is None else request.created
            items = [] if request is None else request.items
            named = self._name_items(items[:MOST_NAMED_ITEMS])
            rows.append({**status.model_dump(), "asks": KINDS[status.kind], "created": created, "named": named})
        return {"requests": rows}

    # Decisions

    def set_preset(self, user: str, preset: Preset) -> JsonObject:
        user_queries.apply_consent_preset(self.node.store, user, preset)
        return self.summarize_person(user)

    def set_item_consent(self, user: str, item: str, takes_part: bool) -> JsonObject:
        user_queries.check_has_item(self.node.store, user, item)
        self.node.set_consent(user, item, "learn" if takes_part else "keep")
        return self.summarize_person(user)

    def set_pause(self, user: str, paused: bool) -> JsonObject:
        user_queries.set_pause(self.node.store, user, paused)
        return self.summarize_person(user)

    def declare_budget(self, user: str, epsilon: float) -> JsonObject:
        note = set_budget(self.node, user, epsilon)["note"]
        return {**self.describe_budget(user), "note": note}

    def submit_request(self, user: str, kind: str, items: Sequence[str]) -> JsonObject:
        """Queue a request to the servers. Forgotten items stay on this node from now on, in later runs as well."""
        statuses = submit_request(self.node, kind, user, items)
        if kind == "forget":
            for item in items:
                self.node.set_consent(user, item, "keep")
        return {"requests": [status.model_dump() for status in statuses]}

    def export_user(self, user: str) -> bytes:
        """Everything of a person as JSON lines."""
        store = self.node.store
        user_number = store.find_user(user)
        rows = store.run_query(lambda db: list(node_file.iter_export_lines(db, user_number)))
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = "\n".join(lines) + "\n"
        return text.encode("utf-8", "replace")

    def erase_user(self, user: str, confirm: str) -> JsonObject:
        if confirm != user:
            raise TacitaError("nothing was erased: type your id exactly as it stands on this page.")
        return self.node.erase_user(user)

    # The owner of a silo

    def list_people(self, search: str, offset: int, limit: int) -> JsonObject:
        total, rows = user_queries.list_users(self.node.store, search, offset, limit)
        return {"total": total, "offset": offset, "limit": limit, "people": rows}

    # Titles

    def _index_catalogue(self) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """Titles by item, and the texts that a search looks through; both follow the node's data."""
        version = self.node.store.changes
        with self._lock:
            if self._titles_version != version:
                catalogue = self.node.store.read_catalogue()
                self._titles = dict(catalogue)
                self._search_texts = [(item, f"{title} {item}".casefold()) for item, title in catalogue]
                self._titles_version = version
            return self._titles, self._search_texts

    def _match_items(self, search: str) -> list[str] | None:
        words = search.casefold().split()
        if not words:
            return None
        titles, texts = self._index_catalogue()
        matches = [item for item, text in texts if all(word in text for word in words)]
        if matches or search in titles:
            return matches
        return [search]  # an item that the catalogue does not know

    def _name_items(self, items: Sequence[str]) -> list[JsonObject]:
        titles, _ = self._index_catalogue()
        return [{"item": item, "title": titles.get(item, "")} for item in items]

    def _add_titles(self, rows: list[JsonObject]) -> list[JsonObject]:
        titles, _ = self._index_catalogue()
        return [{**row, "title": titles.get(row["item"], "")} for row in rows]
