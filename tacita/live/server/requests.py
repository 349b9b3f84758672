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
from tacita.core.types import Ragged, Request, Requests, ServerState
from tacita.federation.requests import handle
from tacita.federation.rounds import Progress
from tacita.federation.state_arrays import server_arrays
from tacita.live.server.attempts import Unanswered
from tacita.live.server.remote import Remote
from tacita.live.server.waiting import Carried, Open, Settled
from tacita.live.wire import Outcome, Wanted
from tacita.round.plan import Federation

log = logging.getLogger(__name__)

WITHDRAW = ("unshare", "forget", "leave")
RESIDUAL = (
    "Models sent before, and what was recommended from them, are not reached; nor are choices that validation made "
    "while the data took part."
)


def grouped(requests: list[Open]) -> list[list[Open]]:
    """Requests in order; withdrawals of one kind by several people of a node are carried out together.

    A node that is silent or refuses then fails its own people alone.
    """
    groups: list[list[Open]] = []
    for one in requests:
        for group in reversed(groups):
            alike = (group[0].wanted.kind, group[0].node) == (one.wanted.kind, one.node)
            same = alike and one.wanted.kind in ("forget", "leave")
            mine = any(other.wanted.sender == one.wanted.sender for other in group)
            if same and not mine:
                group.append(one)
                break
            if mine:
                groups.append([one])
                break
        else:
            groups.append([one])
    return groups


def carry_out(fed: Federation, progress: Progress, group: list[Open]) -> Carried:
    """Requests of one kind that came with answers; those whose nodes do not answer stay open."""
    kind, before, remote = group[0].wanted.kind, progress.server, progress.devices
    assert isinstance(remote, Remote)
    fit = [one for one in group if not _unfit(progress, one)]
    refused = [_outcome(progress, one, "refused", said=_unfit(progress, one)) for one in group if one not in fit]
    withdrew = kind in WITHDRAW
    if not fit:
        return Carried({"kind": kind, "said": refused[0].outcome.said}, refused, withdrew, _NOBODY)
    state, effective = "refused", False
    remote.attempts.begin()
    try:
        if any(one.tries for one in fit) and not {one.node for one in fit} <= set(remote.transport.nodes()):
            remote.attempts.ask()  # a server that was killed may have asked with this number: it is used up
            raise Unanswered("the node is away.")  # it was waited for once
        remote.meet({one.wanted.sender: one.node for one in fit})
        said = handle(fed, progress, _together(fit, remote))
        effective = True
    except Unanswered as error:
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
        found = certificate(told, models, fit[0].wanted)
        state, verdict = "waits" if waits else "done", str(found["verdict"])
        settled = [
            _outcome(progress, one, state, said=verdict, certificate=own) for one, own in _each(found, models, fit)
        ]
        others = _outcome(progress, fit[0], state, said=verdict, certificate=_own(found, kind, 0)).outcome
        freed = [np.asarray(one["subjects"], np.uint64) for one in told if "subjects" in one and not one.get("waits")]
        done = {name: _plain(part) for name, part in said.items()}
        event = {"kind": kind, "people": len(fit), "done": done}
        return Carried(event, refused + settled, withdrew, np.concatenate([_NOBODY, *freed]), others)
    finally:
        remote.attempts.end(effective)
    if state == "refused":
        settled = [_outcome(progress, one, state, said=why) for one in fit]
        return Carried({"kind": kind, "said": why}, refused + settled, withdrew, _NOBODY)
    settled = [_outcome(progress, one, state, said=why, tries=one.tries + 1) for one in fit]
    vain: dict[str, Any] = {
        "kind": kind,
        "said": why,
        "state": state,
        "node": str(fit[0].node),
        "tries": fit[0].tries + 1,
    }
    return Carried(vain, refused + settled, bool(refused) and withdrew, _NOBODY)


MOST_TRIES = 5
"""Tries after which an operator is told that somebody's request is stuck; it stays open all the same."""


def due(requests: list[Open], server: ServerState) -> list[Open]:
    """What is to be carried out now: what was tried in vain after ever more rounds, and what its people ask for next
    only after it."""
    found, behind = [], set[tuple[int, int]]()
    for one in requests:
        who = (one.node, one.wanted.sender)
        if who in behind or not _again(one, server):
            behind.add(who)
        else:
            found.append(one)
    return found


def _again(one: Open, server: ServerState) -> bool:
    last = one.outcome
    if last is None or last.state != "pending" or last.block != server.block:
        return True
    return server.round >= last.round + (1 << min(max(last.tries - 1, 0), 6))


_NOBODY = np.zeros(0, np.uint64)


def _unfit(progress: Progress, one: Open) -> str:
    """Why a request cannot be meant; empty: it can."""
    if max(one.wanted.items, default=0) >= len(progress.server.items):
        return "the request is about items that are not in the catalogue."
    assert isinstance(progress.devices, Remote)
    if progress.devices.home(one.wanted.sender) not in (None, one.node):
        return "the request is for somebody of another node."
    return ""


def _together(group: list[Open], remote: Remote) -> Request | Requests:
    first = group[0].wanted
    at = remote.attempts.at(max(one.wanted.time for one in group), time.time())
    if len(group) == 1:
        return Request(first.kind, first.sender, np.array(first.items, np.int32), at, group[0].number)
    senders = np.array([one.wanted.sender for one in group], np.uint64)
    items = Ragged.from_lists([one.wanted.items for one in group])
    return Requests(first.kind, senders, items, at, group[0].number)


def _outcome(progress: Progress, one: Open, state: Any, **more: Any) -> Settled:
    server = progress.server
    return Settled(one.number, Outcome(id=one.wanted.id, state=state, block=server.block, round=server.round, **more))


# What a node is told


def certificate(told: list[dict[str, Any]], models: tuple[ServerState, ServerState], wanted: Wanted) -> dict[str, Any]:
    """What was done, in the terms of the lab's certificates, and what was not checked; of one person's own, `_own`."""
    before, after = (_digest(one) for one in models)
    waits = any(one.get("waits") for one in told)
    methods = list(dict.fromkeys(str(one["method"]) for one in told if "method" in one))
    unlearned = bool(methods) and wanted.kind != "share" and not waits  # a part says that it did, not that it could
    exact = [bool(one["exact"]) for one in told if "exact" in one]
    sums = {name: float(sum(one.get(name) or 0.0 for one in told)) for name in _SUMMED}
    purged = [str(line) for one in told for line in one.get("purged", ())]
    emptied = ["record of shared items"] if wanted.kind in WITHDRAW else []
    return {
        "request": wanted.kind,
        "method": ", ".join(methods) or "the record of what is shared",
        "mode": "; ".join(str(one["mode"]) for one in told if "mode" in one)[:500],
        "exact": bool(exact) and all(exact) and not waits,
        "model before": before,
        "model after": after,
        **{name.replace("_", " "): value for name, value in sums.items() if math.isfinite(value)},
        **_effect(waits, unlearned and before != after, models[1]),
        "purged": "" if waits else ", ".join(dict.fromkeys(["request", *emptied, *purged])),
        "residual risk": _residual(wanted.kind, unlearned or waits),
        "verdict": _verdict(wanted.kind, waits, unlearned, before != after),
    }


def _effect(waits: bool, unlearned: bool, after: ServerState) -> dict[str, Any]:
    """What happened, when, and how anybody knows."""
    if waits:
        return {"taken": "nothing yet", "verified": "nothing to verify yet"}
    return {
        "taken": _LEARNED if unlearned else "",
        "effective block": after.block,
        "effective after round": after.round,
        "effective at": time.time(),
        "verified": "by nobody: the server says so, and its model was compared with no run without the data",
    }


_LEARNED = "what was learned out of the model"


def _each(
    found: dict[str, Any], models: tuple[ServerState, ServerState], group: list[Open]
) -> list[tuple[Open, dict[str, Any]]]:
    """A certificate for everybody: who withdraws together does not learn how much others had shared."""
    senders = np.array([one.wanted.sender for one in group], np.uint64)
    before, after = (one.given.of(senders).counts() for one in models)
    return [
        (one, {"shared items": len(one.wanted.items)} | _own(found, one.wanted.kind, int(gone)))
        for one, gone in zip(group, before - after, strict=True)
    ]


def _own(found: dict[str, Any], kind: str, gone: int) -> dict[str, Any]:
    """A certificate with what was taken of one person: so many items out of the record."""
    if "effective at" not in found:  # it waits
        return found
    left = [f"{gone} shared items out of the record"] if gone > 0 else []
    left += [found["taken"]] if found["taken"] else []
    taken = " and ".join(left) or "nothing: the server held none of it"
    return {**found, "taken": "" if kind == "share" else taken}


_SUMMED = ("clients_asked", "rounds", "bytes_up", "bytes_down", "seconds_server")


def _digest(server: ServerState) -> str:
    """Of what is learned, without the record of what people shared."""
    arrays = server_arrays(server)
    return digest({name: v for name, v in arrays.items() if not name.startswith(("parts/", "given/"))})


def _residual(kind: str, unlearned: bool) -> str:
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


def _plain(value: Any) -> Any:
    """What a part says, as JSON that names nobody."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items() if name != "subjects"}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
