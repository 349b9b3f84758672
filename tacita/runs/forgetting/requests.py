"""What people request of a finished run, in raw ids: read, checked against the run, and turned into numbers.

A request that cannot be carried out is refused in one sentence before anything changes. One for what is so already
changes nothing and is no mistake. That an item was forgotten before cannot be told from its never having been there:
a folder that could tell would not have forgotten it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Bools, Ints, Keys, Longs, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.round.request import RequestBatch, RequestKind
from tacita.runs.run_folder import SavedRun

RawRequestKind = Literal["share", "unshare", "forget"]
"""Who forgets everything leaves."""

_NO_ITEMS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RawRequest:
    """What some people request, by raw ids."""

    kind: RawRequestKind
    items: dict[str, list[str] | None]  # user -> items; None: everything
    alone: bool = False  # do not wait for others where retractions are held
    retrain: bool = False  # retrain without it, whatever the run's own route is

    @property
    def is_whole(self) -> bool:
        """Everything of everybody in it is to be forgotten."""
        if self.kind != "forget" or not self.items:
            return False
        return all(named is None for named in self.items.values())


@dataclass(frozen=True)
class ResolvedRequest:
    """A request in numbers: whose it is, and which of their items it is about."""

    requests: RequestBatch  # as the server hears it: of who leaves, no items
    users: Ints  # (people,) row of each sender
    items: Ragged  # (people) what it is about
    whole: bool  # everything that they have
    waiting: bool = False  # some of them asked before, and what they told still waits to be taken back
    clears_residue: bool = False  # some of them asked before, and what that left in the model is to go as well

    @property
    def is_empty(self) -> bool:
        return len(self.items.ids) == 0 and not self.waiting and not self.clears_residue


@dataclass(frozen=True)
class RequestContext:
    """What a run knows of its people when they request something."""

    saved: SavedRun
    keys: Keys  # of all users
    history: Ragged  # what everybody has
    trained: Ragged  # what of it was learned from
    shared: Ragged  # what of that they share
    waiting: Keys  # who asked before and waits
    residue_users: frozenset[str] = frozenset()  # users of whom something stayed in the model when it was forgotten

    def is_waiting(self, users: Ints) -> Bools:
        return np.isin(self.keys[users], self.waiting)


# Reading


def read_request_file(path: Path, kind: RawRequestKind) -> RawRequest:
    """Requests of many people from a file with the columns user and item."""
    rows = _read_rows(path)
    header = [name.strip() for name in rows[0]] if rows else []
    if not {"user", "item"} <= set(header):
        raise TacitaError(f"{path} needs a first line with the columns user and item.")
    user_column = header.index("user")
    item_column = header.index("item")
    items_of: dict[str, list[str]] = {}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        is_complete = len(row) == len(header) and row[user_column].strip() and row[item_column].strip()
        if not is_complete:
            raise TacitaError(f"{path}, line {number}, does not name a user and an item.")
        items = items_of.setdefault(row[user_column].strip(), [])
        items.append(row[item_column].strip())
    return RawRequest(kind, dict(items_of))


def _read_rows(path: Path) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as lines:
            return list(csv.reader(lines))
    except FileNotFoundError:
        raise TacitaError(f"cannot read requests from {path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TacitaError(f"cannot read requests from {path}: {error}.") from None


# Drawing


def sample_requesters(candidates: Longs, keys: Keys, draws: Draws, share: float) -> Longs:
    """A drawn share of those who could ask, the same people in every run of a seed; ascending."""
    hashes = hash_owners(draws.public("requesters"), keys[candidates])
    order = candidates[np.argsort(hashes)]
    n_drawn = max(1, round(share * len(candidates)))
    return np.sort(order[:n_drawn])


def draw_unshare_request(shared: Ragged, keys: Keys, draws: Draws, share: float) -> ResolvedRequest:
    """A drawn share of those who share something take all of it back."""
    sharers = np.flatnonzero(shared.counts() > 0)
    if len(sharers) == 0:
        raise TacitaError("nobody in this run shares anything, so there is nothing to take back.")
    users = sample_requesters(sharers, keys, draws, share)
    items = Ragged(shared.ptr, shared.ids).take(users)
    requests = RequestBatch("unshare", keys[users], items, is_immediate=True)
    return ResolvedRequest(requests, users.astype(np.int32), items, False)


# Resolving


def resolve_request(request: RawRequest, context: RequestContext) -> ResolvedRequest:
    """The request in numbers, or one sentence that says what is wrong with it."""
    users = context.saved.find_user_numbers(list(request.items))
    items = _resolve_items(request, context, users)
    clears_residue = [request.retrain and user in context.residue_users for user in request.items]
    is_clearing = np.array(clears_residue, bool)
    is_waiting = context.is_waiting(users) if request.alone else np.zeros(len(users), bool)
    requesters = np.flatnonzero((items.counts() > 0) | is_waiting | is_clearing)
    requested = items.take(requesters)
    kind: RequestKind = "leave" if request.is_whole else request.kind
    sent_items = Ragged.empty(len(requesters)) if request.is_whole else requested
    keys = context.keys[users[requesters]]
    return ResolvedRequest(
        requests=RequestBatch(kind, keys, sent_items, is_immediate=request.alone),
        users=users[requesters],
        items=requested,
        whole=request.is_whole,
        waiting=bool(is_waiting.any()),
        clears_residue=bool(is_clearing.any()),
    )


def _resolve_items(request: RawRequest, context: RequestContext, users: Ints) -> Ragged:
    """(people) the items that a request is about."""
    number_of = {raw: number for number, raw in enumerate(context.saved.ids["items"])}
    shared = context.shared.take(users)
    rows = [_NO_ITEMS]
    ids = [_NO_ITEMS]
    for row, (user, named) in enumerate(request.items.items()):
        chosen = _find_eligible(request.kind, context, int(users[row]), shared.row(row))
        if named is not None:
            chosen = _select_named(request, context, user, named, number_of, chosen)
        if request.kind == "share":
            chosen = np.setdiff1d(chosen, shared.row(row))
        rows.append(np.full(len(chosen), row))
        ids.append(chosen)
    return Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), len(users))


def _find_eligible(kind: RawRequestKind, context: RequestContext, user: int, shared: AnyArray) -> Longs:
    """What a person could mean by everything."""
    if kind == "unshare":
        return np.unique(shared)
    lists = context.trained if kind == "share" else context.history
    return np.unique(lists.row(user)) if user < len(lists) else _NO_ITEMS


def _select_named(
    request: RawRequest,
    context: RequestContext,
    user: str,
    named: list[str],
    number_of: dict[str, int],
    eligible: Longs,
) -> Longs:
    """The items that somebody names, of those that they have."""
    folder = context.saved.folder
    if not named:
        raise TacitaError("no item is named; give --items a,b or --all.")
    chosen = []
    missing = []
    eligible_numbers = set(eligible.tolist())
    for raw in named:
        if raw not in number_of:
            raise TacitaError(f"item '{raw}' is not in {folder}; its {len(number_of):,} items are in ids.json.")
        chosen.append(number_of[raw])
        if number_of[raw] not in eligible_numbers:
            missing.append(raw)
    if missing and not _repeats_request(request, context, user):
        reason = _MISSING_ITEM[request.kind].format(item=missing[0], folder=folder)
        raise TacitaError(f"user '{user}' {reason}")
    return np.intersect1d(eligible, chosen)


def _repeats_request(request: RawRequest, context: RequestContext, user: str) -> bool:
    """Whether somebody sends a request that still waits, or clears what an earlier one left in the model."""
    if request.alone and context.is_waiting(context.saved.find_user_numbers([user])).any():
        return True
    return request.retrain and user in context.residue_users


_MISSING_ITEM = {
    "forget": "has no item '{item}' in {folder}: never liked or forgotten.",
    "share": "has no item '{item}' to share in {folder}: never learned from, forgotten, or taken back and gone.",
    "unshare": "does not share item '{item}' in {folder}: never shared, or taken back.",
}


# Requests that change nothing


NO_CHANGE = {
    "forget": "nothing of {whom} is left in {folder}: it is already forgotten.",
    "share": "{whom} shares nothing more in {folder}: all of that is shared already, or was taken back and is gone.",
    "unshare": "{whom} shares nothing in {folder}: it was never shared, or is taken back.",
}


def explain_no_change(request: RawRequest, context: RequestContext) -> str:
    """Why a request changes nothing."""
    folder = context.saved.folder
    users = list(request.items)
    if not users:
        return f"nobody asks for anything; {folder} stays as it is."
    is_waiting = context.is_waiting(context.saved.find_user_numbers(users))
    if is_waiting.any():
        first = users[int(is_waiting.argmax())]
        return f"the request of user '{first}' already waits for others; --now sends it alone."
    whom = f"user '{users[0]}'" if len(users) == 1 else f"these {len(users)} users"
    return NO_CHANGE[request.kind].format(whom=whom, folder=folder)
