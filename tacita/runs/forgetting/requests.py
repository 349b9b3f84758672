"""What people ask of a finished run, in raw ids: read, checked against the run, and turned into numbers.

A wish that cannot be granted is refused in one sentence before anything changes. One that asks for what is so already
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
from tacita.core.types import AnyArray, Ints, Keys, Longs, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.round.request import RequestBatch
from tacita.runs.run_folder import SavedRun

RequestKind = Literal["share", "unshare", "forget"]


@dataclass(frozen=True)
class RawRequest:
    """What some people ask for, by raw ids."""

    kind: RequestKind
    items: dict[str, list[str] | None]  # user -> items; None: everything
    alone: bool = False  # do not wait for others where retractions are held
    retrain: bool = False  # train again without it, whatever the run's own way is


def read_request_file(path: Path, kind: RequestKind) -> RawRequest:
    """Requests of many people from a file with the columns user and item."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.reader(lines))
    except FileNotFoundError:
        raise TacitaError(f"cannot read requests from {path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TacitaError(f"cannot read requests from {path}: {error}.") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if not {"user", "item"} <= set(header):
        raise TacitaError(f"{path} needs a first line with the columns user and item.")
    user, item = header.index("user"), header.index("item")
    wanted: dict[str, list[str] | None] = {}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(header) or not row[user].strip() or not row[item].strip():
            raise TacitaError(f"{path}, line {number}, does not name a user and an item.")
        found = wanted.setdefault(row[user].strip(), [])
        assert found is not None
        found.append(row[item].strip())
    return RawRequest(kind, wanted)


@dataclass(frozen=True)
class ResolvedRequest:
    """A wish in numbers: whose it is, and which of their items it is about."""

    requests: RequestBatch  # as the server hears it: of who leaves, no items
    users: Ints  # (people,) row of each sender
    items: Ragged  # (people) what it is about
    whole: bool  # everything that they have
    waiting: bool = False  # some of them asked before, and what they told still waits to be taken back
    clears_residue: bool = False  # some of them asked before, and what that left in the model is to go as well

    @property
    def is_empty(self) -> bool:
        return len(self.items.ids) == 0 and not self.waiting and not self.clears_residue


def sample_requesters(asking: Longs, keys: Keys, draws: Draws, share: float) -> Longs:
    """A drawn share of those who could ask, the same people in every run of a seed; ascending."""
    order = asking[np.argsort(hash_owners(draws.public("requesters"), keys[asking]))]
    return np.sort(order[: max(1, round(share * len(asking)))])


def draw_unshare_request(shared: Ragged, keys: Keys, draws: Draws, share: float) -> ResolvedRequest:
    """A drawn share of those who share something take all of it back."""
    asking = np.flatnonzero(shared.counts() > 0)
    if len(asking) == 0:
        raise TacitaError("nobody in this run shares anything, so there is nothing to take back.")
    users = sample_requesters(asking, keys, draws, share)
    items = Ragged(shared.ptr, shared.ids).take(users)
    return ResolvedRequest(
        RequestBatch("unshare", keys[users], items, is_immediate=True), users.astype(np.int32), items, False
    )


@dataclass(frozen=True)
class RequestContext:
    """What a run knows of its people when they ask for something."""

    saved: SavedRun
    keys: Keys  # of all users
    history: Ragged  # what everybody has
    trained: Ragged  # what of it was learned from
    shared: Ragged  # what of that they share
    waiting: Keys  # who asked before and waits
    residue_users: frozenset[str] = frozenset()  # users of whom something stayed in the model when it was forgotten


def resolve_request(request: RawRequest, now: RequestContext) -> ResolvedRequest:
    """The wish in numbers, or one sentence that says what is wrong with it."""
    users = now.saved.user_numbers(list(request.items))
    number = {raw: n for n, raw in enumerate(now.saved.ids["items"])}
    shared = now.shared.take(users)
    rest = np.array([request.retrain and user in now.residue_users for user in request.items], bool)
    rows, ids = [], []
    for row, (user, named) in enumerate(request.items.items()):
        has = _find_eligible(request.kind, now, int(users[row]), shared.row(row))
        chosen = has if named is None else _select_named(request, now, user, named, number, has)
        if request.kind == "share":
            chosen = np.setdiff1d(chosen, shared.row(row))
        rows.append(np.full(len(chosen), row))
        ids.append(chosen)
    items = Ragged.from_pairs(np.concatenate([*rows, _NONE]), np.concatenate([*ids, _NONE]), len(users))
    whole = request.kind == "forget" and bool(request.items) and all(one is None for one in request.items.values())
    waits = np.isin(now.keys[users], now.waiting) if request.alone else np.zeros(len(users), bool)
    asking = np.flatnonzero((items.counts() > 0) | waits | rest)
    kind: Literal["share", "unshare", "forget", "leave"] = "leave" if whole else request.kind
    told = Ragged.empty(len(asking)) if whole else items.take(asking)
    requests = RequestBatch(kind, now.keys[users[asking]], told, is_immediate=request.alone)
    return ResolvedRequest(requests, users[asking], items.take(asking), whole, bool(waits.any()), bool(rest.any()))


def _find_eligible(kind: RequestKind, now: RequestContext, user: int, shared: AnyArray) -> Longs:
    """What a person could mean by everything."""
    if kind == "unshare":
        return np.unique(shared)
    own = now.trained if kind == "share" else now.history
    return np.unique(own.row(user)) if user < len(own) else np.zeros(0, np.int64)


def _select_named(
    wish: RawRequest, now: RequestContext, user: str, named: list[str], number: dict[str, int], has: Longs
) -> Longs:
    """The items that somebody names, of those that they have."""
    folder = now.saved.folder
    if not named:
        raise TacitaError("no item is named; give --items a,b or --all.")
    chosen = []
    for raw in named:
        if raw not in number:
            raise TacitaError(f"item '{raw}' is not in {folder}; its {len(number):,} items are in ids.json.")
        chosen.append(number[raw])
    missing = [raw for raw, one in zip(named, chosen, strict=True) if one not in set(has.tolist())]
    waits = wish.alone and now.keys[now.saved.user_numbers([user])[0]] in now.waiting
    if missing and not waits and not (wish.retrain and user in now.residue_users):
        raise TacitaError(f"user '{user}' {_MISSING_ITEM[wish.kind].format(item=missing[0], folder=folder)}")
    return np.intersect1d(has, chosen)


_NONE = np.zeros(0, np.int64)

_MISSING_ITEM = {
    "forget": "has no item '{item}' in {folder}: never liked or forgotten.",
    "share": "has no item '{item}' to share in {folder}: never learned from, or forgotten.",
    "unshare": "does not share item '{item}' in {folder}: never shared, or taken back.",
}

NO_CHANGE = {
    "forget": "nothing of {whom} is left in {folder}: it is already forgotten.",
    "share": "{whom} shares all of that in {folder} already.",
    "unshare": "{whom} shares nothing in {folder}: it was never shared, or is taken back.",
}


def explain_no_change(request: RawRequest, now: RequestContext) -> str:
    """Why a wish changes nothing."""
    folder = now.saved.folder
    if not request.items:
        return f"nobody asks for anything; {folder} stays as it is."
    waits = np.isin(now.keys[now.saved.user_numbers(list(request.items))], now.waiting)
    if waits.any():
        first = list(request.items)[int(waits.argmax())]
        return f"the request of user '{first}' already waits for others; --now sends it alone."
    whom = f"user '{next(iter(request.items))}'" if len(request.items) == 1 else f"these {len(request.items)} users"
    return NO_CHANGE[request.kind].format(whom=whom, folder=folder)
