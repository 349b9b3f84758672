"""Servers and nodes behind the pages."""

from __future__ import annotations

from pathlib import Path

from helpers.loopback_site import Site, make_site, play_blocks, site_config
from tacita.core.config import RunConfig, validate_model
from tacita.live.node.node import Node
from tacita.live.pages.tokens import OperatorCredentials
from tacita.live.running.server import ServerConfig, create_server, open_store
from tacita.live.server.node_query import AcceptedAnswer
from tacita.live.server.open_requests import ReceivedRequests
from tacita.live.tls_certificates import make_node_key
from tacita.live.wire import UserRequest

ORIGIN = "http://127.0.0.1:8000"
SAME_ORIGIN = {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
PASSWORD = "correct horse battery"
CONTROLS = {"random": {"ndcg@20": 0.0625}, "popular": {"ndcg@20": 0.375}, "node": {"ndcg@20": 0.125}}
SPENT_SHARES = {"up to a quarter": 0, "up to a half": 40, "up to three quarters": 20, "more": 0, "no limit set": 0}


def make_server(tmp_path: Path) -> Path:
    """A server with two nodes, a run of one block, something refused and something asked for."""
    result = tmp_path / "server"
    create_server(result, ServerConfig(), [])
    with open_store(result) as store:
        store.add_items([(f"i{n}", f"<i>Film {n}</i>") for n in range(10)])
        settings = validate_model(RunConfig, {"backbone": {"name": "tally"}}, "the test")
        for number, name in ((1, "north"), (2, "south")):
            store.add_node(name, public_key_of(tmp_path, name))
            store.set_node_number(name, number)
        store.create_run("r", settings, {"quorum": "all", "timeout": 1.0, "give_up": 1.0})
        store.open_block("r")
        store.log_event("r", {"event": "block", "block": 0})
        store.log_event(
            "r", {"event": "refused", "kind": "statistic", "node": "2", "said": "fewer people than <b>min</b>."}
        )
        event = {
            "event": "round",
            "asked": 2,
            "block": 0,
            "round": 1,
            "clients": 30,
            "valid": 0.2,
            "bytes_up": 1e6,
            "bytes_down": 2e6,
        }
        received_requests = ReceivedRequests(
            [(1, UserRequest(id=7, kind="forget", sender=123456789, items=[3], time=1.0))]
        )
        note = {
            "plain": {
                "results": [{"block": 0, "ndcg@20": 0.25, "users": 30, "controls": CONTROLS, "spent": SPENT_SHARES}],
                "in_block": False,
            },
            "now": {"block": 0, "round": 1},
            "best": {"block": 0, "round": 1},
        }
        store.commit_round("r", note, {}, [AcceptedAnswer(0, 0, "statistic", 1, "x", 30)], received_requests, event)
    OperatorCredentials(result).set_password(PASSWORD)
    return result


def public_key_of(folder: Path, name: str) -> str:
    node_key = make_node_key(folder / f"{name}.key")
    return Path(f"{folder / name}.key.pub").read_text(encoding="utf-8") if node_key else ""


MARKUP = "<script>alert('x')</script> & <b>Film</b>"


def play_two_blocks(folder: Path) -> Site:
    """Two blocks of tally over three nodes; titles are markup."""
    site = make_site(folder, site_config("tally"))
    play_blocks(site)
    for node in site.transport.members.values():
        node.store.extend_catalogue([(item, f"{MARKUP} {item}") for item, _ in node.store.read_catalogue()])
        node.refresh_snapshot()
    return site


def user_ids(node: Node) -> list[str]:
    return node.store.list_users()[1]
