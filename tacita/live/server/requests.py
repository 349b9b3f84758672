"""Carrying out what came with answers: in order, what many withdraw together at once, and what a node is told of it.

What cannot be carried out is told and stops no run. A certificate says what was done and what was not; it names
nobody and no item.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged, Request, Requests, ServerState
from tacita.federation.requests import handle
from tacita.federation.rounds import Progress
from tacita.federation.state_arrays import server_arrays
from tacita.live.server.remote import Remote
from tacita.live.server.store import Carried, Open, Settled
from tacita.live.wire import Outcome, Wanted
from tacita.round.parts import overrides
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
    """Requests of one kind that came with answers."""
    kind, before = group[0].wanted.kind, progress.server
    fit = [one for one in group if not _unfit(progress, one)]
    refused = [_outcome(progress, one, "refused", said=_unfit(progress, one)) for one in group if one not in fit]
    withdrew = kind in WITHDRAW
    if not fit:
        return Carried({"kind": kind, "said": refused[0].outcome.said}, refused, withdrew, _NOBODY)
    try:
        assert isinstance(progress.devices, Remote)
        progress.devices.meet({one.wanted.sender: one.node for one in fit})
        said = handle(fed, progress, _together(fit))
    except TacitaError as error:
        why = str(error)[:500]
    except Exception as error:  # of a part: whatever it was, the next round must not meet it again
        log.exception("requests %s", [one.number for one in fit])
        why = f"it failed: {type(error).__name__}"
    else:
        told = [one for part in said.values() for one in part.get("each", [part])]
        waits = any(one.get("waits") for one in told)
        found = certificate(fed, told, (before, progress.server), group[0].wanted)
        state = "waits" if waits else "done"
        settled = [_outcome(progress, one, state, said=str(found["verdict"]), certificate=found) for one in fit]
        freed = [np.asarray(one["subjects"], np.uint64) for one in told if "subjects" in one and not one.get("waits")]
        done = {name: _plain(part) for name, part in said.items()}
        event = {"kind": kind, "people": len(fit), "done": done}
        return Carried(event, refused + settled, withdrew, np.concatenate([_NOBODY, *freed]))
    settled = [_outcome(progress, one, "refused", said=why) for one in fit]
    return Carried({"kind": kind, "said": why}, refused + settled, withdrew, _NOBODY)


_NOBODY = np.zeros(0, np.uint64)


def _unfit(progress: Progress, one: Open) -> str:
    """Why a request cannot be meant; empty: it can."""
    if max(one.wanted.items, default=0) >= len(progress.server.items):
        return "the request is about items that are not in the catalogue."
    assert isinstance(progress.devices, Remote)
    if progress.devices.home(one.wanted.sender) not in (None, one.node):
        return "the request is for somebody of another node."
    return ""


def _together(group: list[Open]) -> Request | Requests:
    first = group[0].wanted
    if len(group) == 1:
        return Request(first.kind, first.sender, np.array(first.items, np.int32), first.time, group[0].number)
    senders = np.array([one.wanted.sender for one in group], np.uint64)
    items = Ragged.from_lists([one.wanted.items for one in group])
    return Requests(first.kind, senders, items, first.time, group[0].number)


def _outcome(progress: Progress, one: Open, state: Any, **more: Any) -> Settled:
    server = progress.server
    return Settled(one.number, Outcome(id=one.wanted.id, state=state, block=server.block, round=server.round, **more))


# What a node is told


def certificate(
    fed: Federation, told: list[dict[str, Any]], models: tuple[ServerState, ServerState], wanted: Wanted
) -> dict[str, Any]:
    """What was done, in the terms of the lab's certificates, and what was not checked."""
    before, after = (_digest(one) for one in models)
    waits = any(one.get("waits") for one in told)
    shared = wanted.kind in ("share", "unshare")
    able = [p.name for p in fed.parts if p.takes_back and (overrides(p, "handle") or overrides(p, "handle_many"))]
    taken = bool(able) or (fed.learner.takes_back and not shared)
    exact = [bool(one["exact"]) for one in told if "exact" in one]
    sums = {name: float(sum(one.get(name) or 0.0 for one in told)) for name in _SUMMED}
    purged = [str(line) for one in told for line in one.get("purged", ())]
    record = ["record of shared items"] if wanted.kind in WITHDRAW else []
    return {
        "request": wanted.kind,
        "shared items": len(wanted.items),
        "method": ", ".join(dict.fromkeys(str(one["method"]) for one in told if "method" in one))
        or (", ".join(able) if taken and wanted.kind != "share" else "the record of what is shared"),
        "mode": "; ".join(str(one["mode"]) for one in told if "mode" in one)[:500],
        "exact": bool(exact) and all(exact) and not waits,
        "model before": before,
        "model after": after,
        **{name.replace("_", " "): value for name, value in sums.items() if math.isfinite(value)},
        "purged": "" if waits else ", ".join(dict.fromkeys(["request", *record, *purged])),
        "residual risk": _residual(wanted.kind, taken),
        "verdict": _verdict(wanted.kind, waits, taken, before != after),
    }


_SUMMED = ("clients_asked", "rounds", "bytes_up", "bytes_down", "seconds_server")


def _digest(server: ServerState) -> str:
    """Of what is learned, without the record of what people shared."""
    arrays = server_arrays(server)
    return digest({name: v for name, v in arrays.items() if not name.startswith(("parts/", "given/"))})


def _residual(kind: str, taken: bool) -> str:
    if kind == "share":
        return ""
    return (
        RESIDUAL if taken else f"Nothing in this run unlearns: what the model learned from the data stays. {RESIDUAL}"
    )


def _verdict(kind: str, waits: bool, taken: bool, changed: bool) -> str:
    if waits:
        return "waits until enough people have asked"
    if kind == "share":
        return "shared"
    if not taken:
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
