"""A server and three nodes in this process, with both pages served on loopback: quick, and nothing of it is pretended
but the network between server and nodes."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.loopback_site import Site, make_site, rows_of_blocks, site_config
from helpers.node_accounts import dpps_config as budget_config
from tacita.core.config import RunConfig, validate_model
from tacita.live.node.node import Node
from tacita.live.node.verbs import perform_verb
from tacita.live.pages.operator_app import make_operator_app
from tacita.live.pages.page_server import PageServer
from tacita.live.pages.person_app import make_node_app
from tacita.live.pages.tokens import OperatorCredentials, Principal, Tokens
from tacita.live.running import orders
from tacita.live.running.server import ServerConfig, create_server
from tacita.live.server.coordinator import STORE_FILE, continue_run
from tacita.live.server.store import count_done_blocks
from tacita.live.tls_certificates import make_node_key
from tacita.runs.assembly import Machine, assemble_federation

PASSWORD = "correct horse battery"
FIRST = ("The Quiet", "A Paper", "Northern", "The Last", "Winter", "The Glass", "Second", "A Borrowed", "Salt", "Blue")
SECOND = ("Harbour", "Lantern", "Orchard", "Witness", "Crossing", "Ferry", "Garden", "Hour", "Letter", "Railway")


def title_of(n: int) -> str:
    result = f"{FIRST[n % 10]} {SECOND[(n // 10 + 3 * n) % 10]} ({1960 + 7 * n % 60})"
    long = ", or how everybody came home from the coast after the longest winter that anybody could remember"
    return f"{result} <b>uncut</b>" if n == 5 else f"{result}{long}" if n % 20 == 17 else result


@dataclass
class PagesSite:
    site: Site
    person: PageServer
    operator: PageServer
    tokens: Tokens
    blocks: list[list[tuple[str, str, float]]]
    stopping: threading.Event = field(default_factory=threading.Event)
    played: int = 1

    @property
    def node(self) -> Node:
        return self.site.transport.members[1]

    def link(self, user: str) -> str:
        return f"{self.person.url}/enter/{self.tokens.make_link(Principal('person', user))}"

    def owners_link(self) -> str:
        return f"{self.person.url}/enter/{self.tokens.make_link(Principal('owner'))}"

    def crowd(self) -> str:
        """Somebody with 100,000 rows of history, and 1,000 nodes more; returns who it is."""
        user = str(self.node.store.list_users()[1][14])
        self.node.store.add_interactions([(user, f"other {n}", float(n), None) for n in range(100_000)])
        self.node.refresh_snapshot()
        with self.site.store as store, store._write_transaction() as db:
            key = db.execute("SELECT public_key FROM nodes WHERE number = '1'").fetchone()[0]
            many = ((f"node-{n}", f"{key}{n}", str(n + 100), 1.0) for n in range(1000))
            db.executemany("INSERT INTO nodes (name, public_key, number, enrolled) VALUES (?, ?, ?, ?)", many)
            notes = ((f"node/{n + 100}", '{"version": "0.1.0", "clock": 0.0, "time": 1.0}') for n in range(1000))
            db.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", notes)
            answers = (("films", 0, k, "x", str(n + 100), "x", 5, 1.0) for n in range(1000) for k in range(1, 21))
            db.executemany("INSERT INTO accepted VALUES (?, ?, ?, ?, ?, ?, ?, ?)", answers)
        return user

    def others_ask(self, user: str) -> None:
        """Five other people of the node take six items back: some only validate, and one at least was told."""
        request = 0
        done = {(entry.user, item) for entry in self.node.store.list_requests() for item in entry.items}
        for number, raw in zip(*self.node.store.list_users(), strict=True):
            rows = self.node.store.run_query(
                lambda db, n=int(number): db.execute(
                    "SELECT DISTINCT item FROM interactions WHERE user = ? AND released", (n,)
                ).fetchall()
            )
            fresh = [item for (item,) in rows if (int(number), item) not in done]
            if raw != user and len(fresh) >= 6 and request < 5:
                perform_verb(self.node, "request", {"kind": "forget", "user": raw, "items": fresh[:6]})
                request += 1

    def bring(self) -> None:
        """What people did since."""
        self.site.collect(self.blocks[self.played])
        self.played += 1

    def watch(self) -> None:
        """What the server's process does: carry out open blocks."""
        while not self.stopping.wait(0.2):
            with self.site.store as store:
                row = store.load_run("films")
                due = row.opened > count_done_blocks(row)
            if due:
                continue_run(self.site.folder, "films", self.site.transport)
                for node in self.site.transport.members.values():
                    node.refresh_snapshot()

    def close(self) -> None:
        self.stopping.set()
        self.person.stop()
        self.operator.stop()
        for node in self.site.transport.members.values():
            node.close()


def pages_site(folder: Path, monkeypatch: Any) -> PagesSite:
    """One block is learned; the pages are up."""
    server = folder / "server"
    create_server(server, ServerConfig(host="127.0.0.1"), [])
    for entry in server.glob(f"{STORE_FILE}*"):
        entry.unlink()
    plain = site_config("tally").model_dump()
    config = validate_model(RunConfig, {**plain, "split": {**plain["split"], "n_blocks": 3}}, "the test")
    site = make_site(server, config)
    site.run = "careful"
    with site.store as store:
        with store._write_transaction() as db:
            for number in (1, 2, 3):
                make_node_key(folder / f"{number}.key")
                key = (folder / f"{number}.key.pub").read_text(encoding="utf-8")
                name = ("library", "cinema", "school")[number - 1]
                db.execute("UPDATE nodes SET public_key = ?, name = ? WHERE number = ?", (key, name, str(number)))
        for run, settings in (("careful", budget_config(releases=12)), ("films", config)):
            store.create_run(run, settings, {"pause": 0.0, "give_up": 60.0})
        fed = assemble_federation(config, Machine())
        store.add_items([(item, title_of(n)) for n, item in enumerate(fed.stream.item_ids)])
        store._fetch_rows("DELETE FROM runs WHERE name = 'r'")
    blocks = rows_of_blocks(config)
    site.collect(blocks[0])
    site.next_block()  # under a budget, which some people run out of
    site.run = "films"
    site.next_block()
    tokens = Tokens()
    node = site.transport.members[1]
    node.config = node.config.model_copy(update={"name": "library"})
    for entry in site.transport.members.values():
        entry.refresh_snapshot()
    OperatorCredentials(server).set_password(PASSWORD)
    monkeypatch.setattr(orders, "is_up", lambda folder: True)
    monkeypatch.setattr("tacita.live.pages.operator_service.is_up", lambda folder: True)
    online = {1: "online", 2: "online", 3: "offline"}
    person = PageServer(make_node_app(node, tokens))
    operator = PageServer(make_operator_app(server, Tokens(), lambda: online))
    person.start()
    operator.start()
    result = PagesSite(site, person, operator, tokens, blocks)
    threading.Thread(target=result.watch, daemon=True).start()
    return result
