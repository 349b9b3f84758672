"""Take data back from a `tally` run: replace what a user told, solve again, and certify what was done (spec D.5).

The device forgets at once: the items leave its own lists. What it told is taken back from the server's sums then or,
where retractions are held, when enough users have asked. Files are replaced whole and in an order that a kill cannot
harm: the devices' lists with a note of who asked, the server's model, the devices' told lists. Both sides count
retractions, so the next request finishes one that a kill cut short.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.errors import TacitaError
from tacita.core.files import alone_in, write_arrays, write_json
from tacita.core.types import AnyArray, Arrays, Ragged
from tacita.federation.scoring import rows_of
from tacita.federation.state_arrays import read_server, server_arrays
from tacita.lab.assembling import build
from tacita.lab.certificate import LISTS, Case, Outcome, Proof, Request, certify
from tacita.lab.run_folder import Saved, lists_of, open_saved
from tacita.lab.serving import open_run, serve
from tacita.models.base import Backbone, Retracts
from tacita.models.scores import CHUNK


def forget(
    folder: Path, user: str, items: Sequence[str] | None = None, now: bool = False, verify: bool = False
) -> dict[str, Any]:
    """Forget some of a user's items, or all of them; returns the certificate that was written into the folder."""
    began = time.perf_counter()
    backbone, model = _model_of(folder)
    with alone_in(folder):
        saved = _finished(open_saved(folder))
        request = _checked(saved, user, items, now, model.held)
        saved = _forgotten_on_device(saved, request)
        outcome = proof = None
        asked = saved.held["asked"]
        if request.number in asked and (now or len(asked) >= model.held):
            outcome = _retract(saved, model)
            saved = _published(saved, outcome)
        seconds = time.perf_counter() - began
        if outcome is not None:
            proof = _proof(saved, model, outcome) if verify else None
        certificate = certify(Case(saved, backbone, model, request, outcome, proof))
        certificate["cost"]["seconds_total"] = round(seconds, 4)
        number = 1 + max(
            (int(one.stem[7:]) for one in folder.glob("forget-*.json") if one.stem[7:].isdigit()), default=0
        )
        certificate["request"]["id"] = number
        write_json(folder / f"forget-{number}.json", certificate)
    return certificate


def _model_of(folder: Path) -> tuple[Backbone, Retracts]:
    backbone, _, _ = build(open_run(folder).config)
    retracts = backbone.retracts
    if retracts is None:
        raise TacitaError(
            f"{folder} was trained with backbone '{backbone.name}', which cannot take data back; only 'tally' can, so "
            "train again without the data."
        )
    return backbone, retracts


# What the device does


def _checked(saved: Saved, user: str, items: Sequence[str] | None, now: bool, hold: int) -> Request:
    """The request in numbers, or one sentence that says what is wrong with it."""
    number = int(saved.numbers([user])[0])
    has = np.unique(lists_of(saved.held, "history").row(number))
    if items is None:
        gone = has
    else:
        known = {raw: n for n, raw in enumerate(saved.ids["items"])}
        if not items:
            raise TacitaError("no item is named; give --items a,b or --all.")
        for raw in items:
            if known.get(raw, -1) not in has and not (now and known.get(raw, -1) in _withdrawn(saved, number)):
                raise TacitaError(f"user '{user}' has no item '{raw}' in {saved.folder}: never liked or forgotten.")
        gone = np.intersect1d(has, [known.get(raw, -1) for raw in items]).astype(np.int32)
    if len(gone) == 0 and not _waits(saved, number):
        raise TacitaError(f"nothing of user '{user}' is left in {saved.folder}: it is already forgotten.")
    if len(gone) == 0 and not now and len(saved.held["asked"]) < hold:
        raise TacitaError(f"the request of user '{user}' already waits for others; --now sends it alone.")
    told = sum(int(np.isin(one.row(number), gone).sum()) for one in _told(saved) if number < len(one))
    return Request(user, number, gone, items is None, told)


def _waits(saved: Saved, number: int) -> bool:
    return number in saved.held.get("asked", ())


def _withdrawn(saved: Saved, number: int) -> set[int]:
    """Items whose retraction waits: told, but no longer on the device."""
    if not _waits(saved, number):
        return set()
    told = {int(i) for one in _told(saved) if number < len(one) for i in one.row(number)}
    return told - set(lists_of(saved.held, "history").row(number).tolist())


def _told(saved: Saved) -> list[Ragged]:
    """What the server was told in every block."""
    n = sum(name.startswith("told/") for name in saved.held) // 2
    return [lists_of(saved.held, f"told/{b}") for b in range(n)]


def _named(lists: Ragged, name: str) -> Arrays:
    return {f"{name}/ptr": lists.ptr, f"{name}/ids": lists.ids}


def _without(lists: Ragged, number: int, items: AnyArray) -> Ragged:
    """The lists after some items left one user's."""
    if number >= len(lists):
        return lists
    span = np.arange(lists.ptr[number], lists.ptr[number + 1])
    gone = span[np.isin(lists.ids[span], items)]
    ptr = lists.ptr.copy()
    ptr[number + 1 :] -= len(gone)
    columns = {name: np.delete(column, gone) for name, column in lists.values.items()}
    return Ragged(ptr, np.delete(lists.ids, gone), columns)


def _forgotten_on_device(saved: Saved, request: Request) -> Saved:
    """The items leave the device's own lists; a retraction is due if the server was told of any."""
    held = dict(saved.held)
    for name in LISTS:
        held |= _named(_without(lists_of(held, name), request.number, request.items), name)
    asked = held.get("asked", np.zeros(0, np.int32))
    held["asked"] = np.union1d(asked, [request.number] if request.told else []).astype(np.int32)
    if len(request.items):
        write_arrays(saved.folder / "clients.safetensors", held, saved.origin)
    return replace(saved, held=held)


# What the server does


def _retract(saved: Saved, model: Retracts) -> Outcome:
    """Take back what those who asked no longer have."""
    began = time.perf_counter()
    server, asked = read_server(saved.served, saved.note), saved.held["asked"]
    before, after = ([rows_of(one, asked) for one in lists] for lists in (_told(saved), _told_still(saved)))
    changed, rank = model.retracted(server, before, after)
    return Outcome(server, changed, asked, rank, time.perf_counter() - began)


def _told_still(saved: Saved) -> list[Ragged]:
    """What was told, without what those who asked have forgotten since."""
    told, history = _told(saved), lists_of(saved.held, "history")
    for number in saved.held["asked"]:
        told = [
            _without(one, number, np.setdiff1d(one.row(number), history.row(number))) if number < len(one) else one
            for one in told
        ]
    return told


def _published(saved: Saved, outcome: Outcome) -> Saved:
    """Write the model, then what its devices have told it."""
    served = server_arrays(outcome.after)
    note = saved.note | {"retractions": str(int(saved.note.get("retractions", "0")) + 1)}
    write_arrays(saved.folder / "server.safetensors", served, note)
    return _finished(replace(saved, served=served, note=note))


def _finished(saved: Saved) -> Saved:
    """If the server has had a retraction that its devices still have to note, they note it."""
    if saved.note.get("retractions", "0") == saved.origin.get("retractions", "0"):
        return saved
    held = dict(saved.held)
    for block, one in enumerate(_told_still(saved)):
        held |= _named(one, f"told/{block}")
    held["asked"] = np.zeros(0, np.int32)
    origin = saved.origin | {"retractions": saved.note["retractions"]}
    write_arrays(saved.folder / "clients.safetensors", held, origin)
    return replace(saved, held=held, origin=origin)


def _proof(saved: Saved, model: Retracts, outcome: Outcome) -> Proof:
    """Train again on what remains and compare every score of every user."""
    began = time.perf_counter()
    again = model.retrained(outcome.after, _told(saved))
    seconds = time.perf_counter() - began
    other = replace(saved, served=server_arrays(again))
    difference = 0.0
    for lo in range(0, len(saved.ids["users"]), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(saved.ids["users"])), dtype=np.int32)
        difference = max(difference, float(np.abs(serve(saved, some) - serve(other, some)).max()))
    return Proof(difference, digest(outcome.after.heads) == digest(again.heads), seconds)
