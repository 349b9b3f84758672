"""What left a node, in plain words: its log of releases and of what people here asked servers for."""

from __future__ import annotations

from typing import Any

from tacita.live.node.answers import REQUEST
from tacita.live.node.budgets import own_ledger
from tacita.live.node.node import Node
from tacita.live.words import plural, size, when

MOST_LINES = 50


def ledger(node: Node, user: str | None) -> dict[str, Any]:
    """A person's account in every run, and what left of what they asked for; without a person, the node's log."""
    if user is None:
        lines = node.store.ledger()
        return {"lines": lines[-MOST_LINES:], "earlier": max(0, len(lines) - MOST_LINES)}
    person = node.store.user(user)
    asked = [
        {
            "request": one.id,
            "run": one.run,
            "kind": one.kind,
            "time": one.sent,
            "items told": one.told,
            "bytes": one.n_bytes,
        }
        for one in node.store.wants()
        if one.user == person and one.sent is not None
    ]
    return {**own_ledger(node, user), "requests": asked}


def in_words(found: dict[str, Any]) -> list[str]:
    """The log, or what left of a person's requests, a line each, oldest first."""
    if "lines" in found:
        earlier = found["earlier"]
        before = [f"{plural(earlier, 'earlier line')}: `tacita node export` writes all of them."] if earlier else []
        return before + [_line(one) for one in found["lines"]] or ["Nothing has left this node."]
    return [
        f"{when(one['time'])}: request {one['request']} left for run {one['run']}: {_told(one)} "
        f"({size(one['bytes'])}); the same again with every answer until the server said that it has it."
        for one in found["requests"]
    ]


def _line(one: dict[str, Any]) -> str:
    asked = one["kind"].startswith(REQUEST)
    over = "" if asked or not one["users"] else f", over {plural(one['users'], 'person', 'people')}"
    cost = "" if asked else f"; {one['epsilon']}"
    where = f"run {one['run']}, block {one['block']}, round {one['round'] + 1}"
    return f"{when(one['time'])}: {one['sees']}{over} ({size(one['bytes'])}, {where}{cost})."


def _told(one: dict[str, Any]) -> str:
    items = plural(one["items told"], "item number") if one["items told"] else "no item"
    return f"the wish to {one['kind']}, {items}, a made-up name and the time"
