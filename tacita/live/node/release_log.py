"""What left a node, in plain words: its log of releases and of people's requests to servers."""

from __future__ import annotations

from tacita.live.formatting import format_bytes, format_count, format_time
from tacita.live.json_object import JsonObject
from tacita.live.node.answers import REQUEST_PREFIX
from tacita.live.node.budgets import read_user_accounts
from tacita.live.node.node import Node

MOST_LINES = 50


def read_release_log(node: Node, user: str | None) -> JsonObject:
    """A person's account in every run, and what left of their requests; without a person, the node's log."""
    if user is None:
        lines = node.store.list_releases()
        n_earlier = max(0, len(lines) - MOST_LINES)
        return {"lines": lines[-MOST_LINES:], "earlier": n_earlier}
    number = node.store.find_user(user)
    requests = []
    for queued in node.store.list_requests():
        if queued.user != number or queued.sent is None:
            continue
        request = {
            "request": queued.id,
            "run": queued.run,
            "kind": queued.kind,
            "time": queued.sent,
            "items told": queued.n_items_sent,
            "bytes": queued.n_bytes,
        }
        requests.append(request)
    return {**read_user_accounts(node, user), "requests": requests}


def list_log_lines(log: JsonObject) -> list[str]:
    """The log, or what left of a person's requests, a line each, oldest first."""
    if "lines" not in log:
        return [_describe_request(request) for request in log["requests"]]
    lines = [_describe_release(release) for release in log["lines"]]
    if log["earlier"]:
        earlier = format_count(log["earlier"], "earlier line")
        lines.insert(0, f"{earlier}: `tacita node export` writes all of them.")
    return lines or ["Nothing has left this node."]


def _describe_release(release: JsonObject) -> str:
    time = format_time(release["time"])
    size = format_bytes(release["bytes"])
    content = release["sees"]
    number = release["round"] + 1
    place = f"run {release['run']}, block {release['block']}, round {number}"
    if release["kind"].startswith(REQUEST_PREFIX):
        return f"{time}: {content} ({size}, {place})."
    n_users = release["users"]
    people = ""
    if n_users:
        people = f", over {format_count(n_users, 'person', 'people')}"
    epsilon = release["epsilon"]
    return f"{time}: {content}{people} ({size}, {place}; {epsilon})."


def _describe_request(request: JsonObject) -> str:
    time = format_time(request["time"])
    size = format_bytes(request["bytes"])
    n_items = request["items told"]
    items = format_count(n_items, "item number") if n_items else "no item"
    content = f"the wish to {request['kind']}, {items}, a made-up name and the time"
    return (
        f"{time}: request {request['request']} left for run {request['run']}: {content} "
        f"({size}); the same again with every answer until the server said that it has it."
    )
