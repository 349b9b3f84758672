"""Requests of people as Python callers state them: one person's items, several people, or a table of pairs."""

from __future__ import annotations

from typing import Any

from tacita.core.errors import TacitaError
from tacita.data.frames import convert_to_frame_or_none, to_raw_ids
from tacita.runs.forgetting.requests import RawRequest, RawRequestKind


def build_request(
    kind: RawRequestKind, users: Any, items: Any = None, alone: bool = False, retrain: bool = False
) -> RawRequest:
    """The request; None for a person's items means everything."""
    return RawRequest(kind, _list_requested(kind, users, items), alone, retrain)


def _list_requested(kind: RawRequestKind, users: Any, items: Any) -> dict[str, list[str] | None]:
    table = None if isinstance(users, str) else convert_to_frame_or_none(users)
    if table is not None and "item" in table.columns:
        if items is not None:
            raise TacitaError("the table names users and items; leave out items.")
        return _group_pairs(to_raw_ids(table, "user"), to_raw_ids(table, "item"))
    user_ids = list(dict.fromkeys(to_raw_ids(users, "user")))
    if not user_ids:
        raise TacitaError(f"nobody is named; say whose items to {kind}.")
    if items is None:
        return dict.fromkeys(user_ids)
    if len(user_ids) > 1:
        raise TacitaError("items are one user's; give a table with the columns user and item for several users.")
    return {user_ids[0]: to_raw_ids(items, "item")}


def _group_pairs(users: list[str], items: list[str]) -> dict[str, list[str] | None]:
    items_of: dict[str, list[str]] = {}
    for user, item in zip(users, items, strict=True):
        items_of.setdefault(user, []).append(item)
    return dict(items_of)
