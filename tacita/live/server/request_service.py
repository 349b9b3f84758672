"""Carrying out what came with answers: in order, what many withdraw together at once, and what a node is told of it.

What cannot be carried out is told and stops no run. A certificate says what was done and what was not; it names
nobody and no item.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged, ServerState
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress
from tacita.federation.state_arrays import pack_server
from tacita.live.server.attempts import NoAnswer
from tacita.live.server.open_requests import ApplyResult, NumberedOutcome, OpenRequest
from tacita.live.server.remote_devices import RemoteDevices
from tacita.live.wire import RequestOutcome, UserRequest
from tacita.round.plan import Federation
from tacita.round.request import Request, RequestBatch

log = logging.getLogger(__name__)

WITHDRAWALS = ("unshare", "forget", "leave")
RESIDUAL = (
    "Models sent before, and what was recommended from them, are not reached; nor are choices that validation made "
    "while the data took part."
)


def group_requests(requests: list[OpenRequest]) -> list[list[OpenRequest]]:
    """Requests in order; withdrawals of one kind by several people of a node are carried out together.

    A node that is silent or refuses then fails its own people alone.
    """
    groups: list[list[OpenRequest]] = []
    for one in requests:
        for group in reversed(groups):
            alike = (group[0].request.kind, group[0].node) == (one.request.kind, one.node)
            same = alike and one.request.kind in ("forget", "leave")
            mine = any(other.request.sender == one.request.sender for other in group)
            if same and not mine:
                group.append(one)
                break
            if mine:
                groups.append([one])
                break
        else:
            groups.append([one])
    return groups


def apply_requests(fed: Federation, progress: Progress, group: list[OpenRequest]) -> ApplyResult:
    """Requests of one kind that came with answers; those whose nodes do not answer stay open."""
    kind, before, remote = group[0].request.kind, progress.server, progress.devices
    assert isinstance(remote, RemoteDevices)
    fit = [one for one in group if not _find_misfit(progress, one)]
    refused = [
        _make_outcome(progress, one, "refused", said=_find_misfit(progress, one)) for one in group if one not in fit
    ]
    withdrew = kind in WITHDRAWALS
    if not fit:
        return ApplyResult({"kind": kind, "said": refused[0].outcome.said}, refused, withdrew, _NO_KEYS)
    state, effective = "refused", False
    remote.attempts.begin()
    try:
        if any(one.tries for one in fit) and not {one.node for one in fit} <= set(remote.transport.nodes()):
            remote.attempts.take_number()  # a server that was killed may have asked with this number: it is used up
            raise NoAnswer("the node is away.")  # it was waited for once
        remote.add_requesters({one.request.sender: one.node for one in fit})
        said = handle_requests(fed, progress, _merge_requests(fit, remote))
        effective = True
    except NoAnswer as error:
        why, state = str(error)[:500], "pending"
    except TacitaError as error:
        why = str(error)[:500]
    except Exception as error:  # of a part: whatever it was, the next round must not meet it again
        log.exception("requests %s", [one.number for one in fit])
        why = f"it failed: {type(error).__name__}"
    else:
        told = [one for part in said.values() for one in part.get("each", [part])]
        waits = any(one.get("waits") for one in told)
        models = (before, progress.server)
        found = build_certificate(told, models, fit[0].request)
        state, verdict = "waits" if waits else "done", str(found["verdict"])
        settled = [
            _make_outcome(progress, one, state, said=verdict, certificate=own)
            for one, own in _certify_each(found, models, fit)
        ]
        others = _make_outcome(progress, fit[0], state, said=verdict, certificate=_certify_user(found, kind, 0)).outcome
        freed = [np.asarray(one["subjects"], np.uint64) for one in told if "subjects" in one and not one.get("waits")]
        done = {name: _to_json(part) for name, part in said.items()}
        event = {"kind": kind, "people": len(fit), "done": done}
        return ApplyResult(event, refused + settled, withdrew, np.concatenate([_NO_KEYS, *freed]), others)
    finally:
        remote.attempts.end(effective)
    if state == "refused":
        settled = [_make_outcome(progress, one, state, said=why) for one in fit]
        return ApplyResult({"kind": kind, "said": why}, refused + settled, withdrew, _NO_KEYS)
    settled = [_make_outcome(progress, one, state, said=why, tries=one.tries + 1) for one in fit]
    vain: dict[str, Any] = {
        "kind": kind,
        "said": why,
        "state": state,
        "node": str(fit[0].node),
        "tries": fit[0].tries + 1,
    }
    return ApplyResult(vain, refused + settled, bool(refused) and withdrew, _NO_KEYS)


MOST_TRIES = 5
"""Tries after which an operator is told that somebody's request is stuck; it stays open all the same."""


def select_due(requests: list[OpenRequest], server: ServerState) -> list[OpenRequest]:
    """What is to be carried out now: what was tried in vain after ever more rounds, and what its people ask for next
    only after it."""
    found, behind = [], set[tuple[int, int]]()
    for one in requests:
        who = (one.node, one.request.sender)
        if who in behind or not _is_due(one, server):
            behind.add(who)
        else:
            found.append(one)
    return found


def _is_due(one: OpenRequest, server: ServerState) -> bool:
    last = one.outcome
    if last is None or last.state != "pending" or last.block != server.block:
        return True
    return server.round >= last.round + (1 << min(max(last.tries - 1, 0), 6))


_NO_KEYS = np.zeros(0, np.uint64)


def _find_misfit(progress: Progress, one: OpenRequest) -> str:
    """Why a request cannot be meant; empty: it can."""
    if max(one.request.items, default=0) >= len(progress.server.items):
        return "the request is about items that are not in the catalogue."
    assert isinstance(progress.devices, RemoteDevices)
    if progress.devices.find_node(one.request.sender) not in (None, one.node):
        return "the request is for somebody of another node."
    return ""


def _merge_requests(group: list[OpenRequest], remote: RemoteDevices) -> Request | RequestBatch:
    first = group[0].request
    at = remote.attempts.order_time(max(one.request.time for one in group), time.time())
    if len(group) == 1:
        return Request(first.kind, first.sender, np.array(first.items, np.int32), at, group[0].number)
    senders = np.array([one.request.sender for one in group], np.uint64)
    items = Ragged.from_lists([one.request.items for one in group])
    return RequestBatch(first.kind, senders, items, at, group[0].number)


def _make_outcome(progress: Progress, one: OpenRequest, state: Any, **more: Any) -> NumberedOutcome:
    server = progress.server
    return NumberedOutcome(
        one.number, RequestOutcome(id=one.request.id, state=state, block=server.block, round=server.round, **more)
    )


# What a node is told


def build_certificate(
    reports: list[dict[str, Any]], models: tuple[ServerState, ServerState], wanted: UserRequest
) -> dict[str, Any]:
    """What was done, in the terms of the lab's certificates, and what was not checked; of one person's own, `_own`."""
    before, after = (_digest_model(one) for one in models)
    waits = any(one.get("waits") for one in reports)
    methods = list(dict.fromkeys(str(one["method"]) for one in reports if "method" in one))
    unlearned = bool(methods) and wanted.kind != "share" and not waits  # a part says that it did, not that it could
    exact = [bool(one["exact"]) for one in reports if "exact" in one]
    sums = {name: float(sum(one.get(name) or 0.0 for one in reports)) for name in _SUMMED_FIELDS}
    purged = [str(line) for one in reports for line in one.get("purged", ())]
    emptied = ["record of shared items"] if wanted.kind in WITHDRAWALS else []
    return {
        "request": wanted.kind,
        "method": ", ".join(methods) or "the record of what is shared",
        "mode": "; ".join(str(one["mode"]) for one in reports if "mode" in one)[:500],
        "exact": bool(exact) and all(exact) and not waits,
        "model before": before,
        "model after": after,
        **{name.replace("_", " "): value for name, value in sums.items() if math.isfinite(value)},
        **_certify_effect(waits, unlearned and before != after, models[1]),
        "purged": "" if waits else ", ".join(dict.fromkeys(["request", *emptied, *purged])),
        "residual risk": _residual_risk(wanted.kind, unlearned or waits),
        "verdict": _verdict(wanted.kind, waits, unlearned, before != after),
    }


def _certify_effect(waits: bool, unlearned: bool, after: ServerState) -> dict[str, Any]:
    """What happened, when, and how anybody knows."""
    if waits:
        return {"taken": "nothing yet", "verified": "nothing to verify yet"}
    return {
        "taken": _TAKEN_FROM_MODEL if unlearned else "",
        "effective block": after.block,
        "effective after round": after.round,
        "effective at": time.time(),
        "verified": "by nobody: the server says so, and its model was compared with no run without the data",
    }


_TAKEN_FROM_MODEL = "what was learned out of the model"


def _certify_each(
    found: dict[str, Any], models: tuple[ServerState, ServerState], group: list[OpenRequest]
) -> list[tuple[OpenRequest, dict[str, Any]]]:
    """A certificate for everybody: who withdraws together does not learn how much others had shared."""
    senders = np.array([one.request.sender for one in group], np.uint64)
    before, after = (one.shared.lists_of(senders).counts() for one in models)
    return [
        (one, {"shared items": len(one.request.items)} | _certify_user(found, one.request.kind, int(gone)))
        for one, gone in zip(group, before - after, strict=True)
    ]


def _certify_user(found: dict[str, Any], kind: str, gone: int) -> dict[str, Any]:
    """A certificate with what was taken of one person: so many items out of the record."""
    if "effective at" not in found:  # it waits
        return found
    left = [f"{gone} shared items out of the record"] if gone > 0 else []
    left += [found["taken"]] if found["taken"] else []
    taken = " and ".join(left) or "nothing: the server held none of it"
    return {**found, "taken": "" if kind == "share" else taken}


_SUMMED_FIELDS = ("clients_asked", "rounds", "bytes_up", "bytes_down", "seconds_server")


def _digest_model(server: ServerState) -> str:
    """Of what is learned, without the record of what people shared."""
    arrays = pack_server(server)
    return digest({name: v for name, v in arrays.items() if not name.startswith(("parts/", "given/"))})


def _residual_risk(kind: str, unlearned: bool) -> str:
    if kind == "share":
        return ""
    return (
        RESIDUAL
        if unlearned
        else f"Nothing in this run unlearns this: what the model learned from the data stays. {RESIDUAL}"
    )


def _verdict(kind: str, waits: bool, unlearned: bool, changed: bool) -> str:
    if waits:
        return "waits until enough people have asked"
    if kind == "share":
        return "shared"
    if not unlearned:
        return "taken out of the server's record; not unlearned"
    return "taken out of the record and the model; not verified" if changed else "taken out; the model held none of it"


def _to_json(value: Any) -> Any:
    """What a part says, as JSON that names nobody."""
    if isinstance(value, dict):
        return {str(name): _to_json(one) for name, one in value.items() if name != "subjects"}
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
