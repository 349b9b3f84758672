"""What left a node, in plain words: its log of releases and of what people here asked servers for."""

from __future__ import annotations

from typing import Any

from tacita.live.formatting import format_bytes, format_count, format_time
from tacita.live.node.answers import REQUEST_PREFIX
from tacita.live.node.budgets import read_user_accounts
from tacita.live.node.node import Node

MOST_LINES = 50


def read_release_log(node: Node, user: str | None) -> dict[str, Any]:
    """A person's account in every run, and what left of what they asked for; without a person, the node's log."""
    if user is None:
        lines = node.store.list_releases()
        return {"lines": lines[-MOST_LINES:], "earlier": max(0, len(lines) - MOST_LINES)}
    person = node.store.find_user(user)
    asked = [
        {
            "request": one.id,
            "run": one.run,
            "kind": one.kind,
            "time": one.sent,
            "items told": one.n_items_sent,
            "bytes": one.n_bytes,
        }
        for one in node.store.list_requests()
        if one.user == person and one.sent is not None
    ]
    return {**read_user_accounts(node, user), "requests": asked}


def describe_log(log: dict[str, Any]) -> list[str]:
    """The log, or what left of a person's requests, a line each, oldest first."""
    if "lines" in log:
        earlier = log["earlier"]
        before = (
            [f"{format_count(earlier, 'earlier line')}: `tacita node export` writes all of them."] if earlier else []
        )
        return before + [_describe_release(one) for one in log["lines"]] or ["Nothing has left this node."]
    return [
        f"{format_time(one['time'])}: request {one['request']} left for run {one['run']}: {_describe_request(one)} "
        f"({format_bytes(one['bytes'])}); the same again with every answer until the server said that it has it."
        for one in log["requests"]
    ]


def _describe_release(one: dict[str, Any]) -> str:
    asked = one["kind"].startswith(REQUEST_PREFIX)
    over = "" if asked or not one["users"] else f", over {format_count(one['users'], 'person', 'people')}"
    cost = "" if asked else f"; {one['epsilon']}"
    where = f"run {one['run']}, block {one['block']}, round {one['round'] + 1}"
    return f"{format_time(one['time'])}: {one['sees']}{over} ({format_bytes(one['bytes'])}, {where}{cost})."


def _describe_request(one: dict[str, Any]) -> str:
    items = format_count(one["items told"], "item number") if one["items told"] else "no item"
    return f"the wish to {one['kind']}, {items}, a made-up name and the time"
