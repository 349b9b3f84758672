"""What a person may ask for, checked against what the node holds before it is queued; and how it stands, in words.

A request that cannot be meant is refused in one sentence. One that asks for what is so already changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.federation.requests import can_handle
from tacita.live.formatting import format_age, format_time
from tacita.live.node import blocks
from tacita.live.node.node import Node
from tacita.live.node.request_queue import WITHDRAWALS, QueuedRequest
from tacita.live.node.store import REQUEST_KINDS
from tacita.round.device_state import read_devices
from tacita.round.part import implements
from tacita.round.plan import Plan
from tacita.runs.assembly import build_plan

CONTRIBUTION_LISTS = ("/told", "fru/rounds")  # lists of what was told; of `fru`, the rounds that somebody took part in
UNSUPPORTED = {
    "share": "no run that user '{user}' takes part in learns from what is shared; its operator trains with a method "
    "that does, such as fedshare.",
    "unshare": "user '{user}' shares nothing: no run that they take part in learns from what is shared.",
    "forget": "no run that user '{user}' takes part in can forget; `tacita node consent {user} keep` keeps data out of "
    "later sums.",
    "single": "runs that user '{user}' takes part in let whole people leave and forget no single items; `tacita node "
    "leave {user}` takes everything back, and an operator who trains with part 'fru' lets single items go.",
    "leave": "no run that user '{user}' takes part in can carry out that somebody leaves; `tacita node consent {user} "
    "keep` keeps data out of later sums.",
}


@dataclass(frozen=True)
class UserRun:
    """A run as one person finds it."""

    run: str
    plan: Plan | None  # None: the run has not come here yet
    n_items: int  # of the catalogue, the run knows the first so many
    shared: set[str]  # with what is queued already
    has_contributed: bool  # something of the person may be in the model or in a record of the server
    has_left: bool
    forgotten: set[str]
    learned: set[str] = field(default_factory=set)  # what of the person's own belongs to a block of the run


def submit_request(node: Node, kind: str, user: str, items: Sequence[str], run: str | None = None) -> dict[str, Any]:
    """Queue a request, or say in one sentence why it cannot be meant."""
    store = node.store
    person = store.find_user(user)
    places = [_load_user_run(node, person, one) for one in _select_runs(node, person, user, run)]
    able = [one for one in places if one.plan is None or _is_supported(one.plan, kind)]
    if not able:
        people = any("people" in part.takes_back for one in places if one.plan for part in one.plan.parts)
        raise TacitaError(UNSUPPORTED["single" if kind == "forget" and people else kind].format(user=user[:100]))
    number = {item: n for n, (item, _) in enumerate(store.catalogue())}
    own = set(store.history([person]).item)
    for item in items:
        if number and item not in number:
            raise TacitaError(f"item '{item[:100]}' is not in the server's catalogue of {len(number):,} items.")
        if item not in own:
            raise TacitaError(f"user '{user[:100]}' has no item '{item[:100]}' on this node.")
    left = [one for one in able if not one.has_left]
    if not left:
        raise TacitaError(f"user '{user[:100]}' has left {_name_runs(able)} already.")
    queued, sentences = [], []
    for place in left:
        known = {item for item in own if number.get(item, len(number)) < place.n_items or place.plan is None}
        chosen, why = _select_items(node, kind, (user, person), items, place, known)
        if why:
            sentences.append(why)
            continue
        queued.append(store.enqueue_request(kind, place.run, sorted(chosen), person))
    if not queued:
        raise TacitaError(sentences[0])
    return {"requests": [one for one in list_request_states(node) if one["request"] in queued]}


def read_request_options(node: Node, user: str) -> dict[str, Any]:
    """What a person may ask for in the runs they take part in, what they share there and what they have taken back."""
    person = node.store.find_user(user)
    runs = sorted(set(node.store.list_user_runs(person)) & set(node.store.runs()))
    places = [_load_user_run(node, person, run) for run in runs]
    here = [one for one in places if one.plan is not None and not one.has_left]
    return {
        "kinds": [kind for kind in REQUEST_KINDS if any(one.plan and _is_supported(one.plan, kind) for one in here)],
        "shared": {one.run: sorted(one.shared) for one in places if one.shared},
        "forgotten": sorted({item for one in places for item in one.forgotten}),
        "left": [one.run for one in places if one.has_left],
    }


def allowed_kinds(node: Node, run: str) -> list[str]:
    """What the settings of a run allow people to ask for; they never change."""
    plan = _load_plan(node, run)
    return [] if plan is None else [kind for kind in REQUEST_KINDS if _is_supported(plan, kind)]


def _load_plan(node: Node, run: str) -> Plan | None:
    """A run's plan, from its settings alone: its arrays stay where they are. None: it has not come here yet."""
    note = node.store.run_query(lambda db: db.execute("SELECT note FROM models WHERE run = ?", (run,)).fetchone())
    if note is None:
        return None
    return build_plan(
        validate_model(RunConfig, json.loads(json.loads(note[0])["config"]), "the settings the server sent")
    )


def _select_runs(node: Node, person: int, user: str, run: str | None) -> list[str]:
    """The runs that are meant: the one that is named, or all that the person takes part in."""
    if run is not None:
        return [run]
    found = set(node.store.list_user_runs(person)) & set(node.store.runs())
    if not found:
        raise TacitaError(
            f"user '{user[:100]}' takes part in no run yet; wait for its first round, or name the run with --run."
        )
    return sorted(found)


def _load_user_run(node: Node, person: int, run: str) -> UserRun:
    held = node.store.model(run)
    mine = [one for one in node.store.list_requests(run) if one.user == person]
    left = any(one.kind == "leave" and not one.is_refused for one in mine)
    if held is None:
        return UserRun(run, None, 0, _apply_to_shared(set(), mine), False, left, set())
    plan = build_plan(validate_model(RunConfig, json.loads(held[0]["config"]), "the settings the server sent"))
    catalogue = [item for item, _ in node.store.catalogue()]
    shared, told = _read_device_record(node, person, run, held[0]["tag"], catalogue)
    forgotten = {item for one in mine if one.kind == "forget" and not one.is_refused for item in one.items}
    now = _apply_to_shared(shared, [one for one in mine if one.sent is None])
    learned = node.store.run_query(lambda db: blocks.list_assigned_items(db, run, person))
    return UserRun(run, plan, len(held[1]["items"][1]), now, told or bool(now), left, forgotten, learned)


def _read_device_record(node: Node, person: int, run: str, tag: str, catalogue: list[str]) -> tuple[set[str], bool]:
    """What a person's device keeps: what is shared, and whether anything was told that could be taken back."""
    found = node.store.devices(run, tag)
    at = np.flatnonzero(found[1]["users"] == person) if found is not None else np.zeros(0, np.int64)
    if found is None or len(at) == 0:
        return set(), False
    devices = read_devices({name: v for name, v in found[1].items() if name != "users"}, "")
    lists = {name: devices.read_list(name, at).ids for name in devices.lists}
    shared = {catalogue[i] for name, ids in lists.items() if name.endswith("/shared") for i in ids.tolist()}
    told = [ids for name, ids in lists.items() if name.endswith(CONTRIBUTION_LISTS)]
    return shared, any(len(ids) for ids in told) if told else True


def _apply_to_shared(shared: set[str], queued: Sequence[QueuedRequest]) -> set[str]:
    """What is shared when those requests have left."""
    for one in queued:
        if one.kind == "share":
            shared = shared | set(one.items)
        else:
            shared = set() if one.kind == "leave" else shared - set(one.items)
    return shared


def _is_supported(plan: Plan, kind: str) -> bool:
    """Whether a run carries out such requests."""
    shares = any("shared" in part.device_arrays(0) for part in plan.parts)
    reach = {one for part in plan.parts if can_handle(part) for one in part.takes_back}
    able = bool(reach) if kind == "leave" else bool(reach - {"people"})
    if kind in ("share", "unshare"):
        return shares
    return able or plan.learner.unlearning is not None or (shares and kind == "leave")


def _select_items(
    node: Node, kind: str, who: tuple[str, int], items: Sequence[str], place: UserRun, known: set[str]
) -> tuple[set[str], str]:
    """What of a person's items a request is about in one run; or why it cannot be meant."""
    user, person = who[0][:100], who[1]
    chosen = set(items)
    where = f"in run '{place.run}'"
    late = sorted(chosen - known)
    if late:
        return set(), f"item '{late[0][:100]}' is newer than the open block of run '{place.run}'; wait for its next."
    if kind in WITHDRAWALS and place.plan is not None and not place.has_contributed:
        return (
            set(),
            f"the server was told nothing of user '{user}' {where}; `tacita node consent {user} keep` keeps it so.",
        )
    if kind == "leave":
        return set(), ""
    if kind == "unshare":
        wrong = sorted(chosen - place.shared)
        if not place.shared or wrong:
            what = f"item '{wrong[0][:100]}'" if wrong else "anything"
            return set(), f"user '{user}' does not share {what} {where}: never shared, or taken back."
        return chosen or place.shared, ""
    wrong = sorted(chosen & place.forgotten)
    if wrong:
        return set(), f"item '{wrong[0][:100]}' of user '{user}' is forgotten {where} already."
    if kind == "forget":
        left = (chosen or known) - place.forgotten
        if left and place.plan is not None and not left & (place.learned | place.shared):
            allow = f"`tacita node consent {user} ITEM keep` keeps it so"
            return set(), f"nothing of that was ever learned from {where}, so there is nothing to take back; {allow}."
        return left, "" if left else f"everything of user '{user}' is forgotten {where} already."
    kept = node.store.list_private_items(person)
    wrong = sorted(chosen & kept)
    if wrong:
        allow = f"`tacita node consent {user} {wrong[0][:100]} learn` allows it"
        return set(), f"item '{wrong[0][:100]}' of user '{user}' is marked 'keep' and never leaves; {allow}."
    fresh = (chosen or known - place.forgotten) - kept - place.shared
    return fresh, "" if fresh else f"user '{user}' shares all of that {where} already, or keeps it."


def _name_runs(places: Sequence[UserRun]) -> str:
    return "run " + ", ".join(f"'{one.run}'" for one in places)


# How requests stand


def list_request_states(node: Node, user: str | None = None) -> list[dict[str, Any]]:
    """Every request, or those of one person, with how far it has come, for people and machines."""
    raw_of = dict(zip(*(one if isinstance(one, list) else one.tolist() for one in node.store.users()), strict=True))
    wants = node.store.list_requests()
    number = None if user is None else node.store.find_user(user)
    waits = {
        one.run: _batches_withdrawals(node, one.run) for one in wants if one.carrier is None and one.kind in WITHDRAWALS
    }
    return [
        {
            "request": one.id,
            "user": raw_of.get(one.user) if one.user is not None else None,
            "kind": one.kind,
            "items": len(one.items),
            "run": one.run,
            "state": _describe_state(node, one, wants, waits),
            "age": None if one.is_final else max(0.0, time.time() - one.created),
            "done": one.is_final,
            "effect": _describe_effect(one),
            "certificate": one.outcome.certificate if one.outcome is not None else {},
        }
        for one in wants
        if number is None or one.user == number
    ]


def _describe_state(node: Node, one: QueuedRequest, wants: Sequence[QueuedRequest], waits: dict[str, bool]) -> str:
    if one.carrier is None:
        return "queued" + (
            _describe_shortfall(node, one, wants) if waits.get(one.run) and one.kind in WITHDRAWALS else ""
        )
    if one.outcome is None:
        return f"carried with block {one.carrier.block} round {one.carrier.round + 1}"
    told = one.outcome
    if told.state == "heard":
        return "acknowledged: carried out before the next round"
    if told.state == "pending":
        tries = "once" if told.tries == 1 else f"{told.tries} times"
        age = format_age(time.time() - one.created)
        return f"open for {age}, tried in vain {tries}, to be tried again in later rounds: {told.said.rstrip('.')}"
    if told.state == "waits":
        return f"waits at the server: {told.said}"
    if told.state == "refused":
        return f"refused: {told.said}"
    return f"done in block {told.block} after round {told.round}: {told.said}"


def _describe_effect(one: QueuedRequest) -> str:
    """What the server says has happened, when, and how anybody knows; a sentence for people."""
    said = one.outcome.certificate if one.outcome is not None and one.outcome.state == "done" else {}
    at = said.get("effective at")
    if not isinstance(at, int | float):
        return ""
    where = f"block {said.get('effective block')} after round {said.get('effective after round')}"
    taken = f"; taken: {said['taken']}" if said.get("taken") else ""
    return f"effective since {format_time(at)}, in {where}{taken}; verified {said.get('verified')}"


def _batches_withdrawals(node: Node, run: str) -> bool:
    """Whether who withdraws from a run has to wait for others here."""
    plan = None if node.config.insecure_single_user_uploads else _load_plan(node, run)
    return plan is not None and (plan.learner.unlearning is not None or any(implements(part, "answer") for part in plan.parts))


def _describe_shortfall(node: Node, one: QueuedRequest, wants: Sequence[QueuedRequest]) -> str:
    """How many of those are there whose withdrawals leave together."""
    least = node.config.min_users
    same = {w.user for w in wants if w.sent is None and (w.run, w.kind) == (one.run, one.kind)}
    if len(same) >= least:
        return ""
    return f": {len(same)} of the {least} people have asked whose withdrawals leave in one sum (min_users)"
