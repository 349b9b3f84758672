"""Take data back from a `tally` run: replace what a user told, solve again, and certify what was done (spec D.5).

The device forgets at once: the items leave its own lists. What it told is taken back from the server's sums then or,
where retractions are held, when enough users have asked. Files are replaced whole and in an order that a kill cannot
harm: the devices' lists with a note of who asked, the server's model, the devices' told lists. Both sides count
retractions, so the next request finishes one that a kill cut short.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.errors import TacitaError
from tacita.core.files import alone_in, nested, write_arrays, write_json
from tacita.core.types import AnyArray, Arrays, Ints, Ragged, ServerState
from tacita.federation.scoring import rows_of
from tacita.federation.state_arrays import read_server, server_arrays
from tacita.fields import wire_bytes
from tacita.lab.assembling import build
from tacita.lab.run_folder import Saved, lists_of, open_saved
from tacita.lab.serving import open_run, serve
from tacita.models.base import Backbone, Retracts
from tacita.models.scores import CHUNK

NOT_RUN = "not run"
SAME = 1e-6  # the largest difference of a score that counts as equal to retraining
ALONE = "A retraction sent alone shows its author's items to whoever compares the models before and after it."
LISTS = ("history", "past", "current")


@dataclass(frozen=True)
class Request:
    user: str
    number: int
    items: Ints  # what leaves the device; empty where a waiting request is only to be sent now
    whole: bool  # everything the user has
    told: int  # interactions among them that the server was told of


@dataclass(frozen=True)
class Outcome:
    """What the server made of the retraction of everybody who asked."""

    before: ServerState
    after: ServerState
    subjects: Ints
    rank: int  # of the update of the inverse; 0: solved anew
    seconds: float


@dataclass(frozen=True)
class Proof:
    """How the model compares with one that is trained again on what remains."""

    difference: float  # largest, of any user's score of any item
    same_bits: bool
    seconds: float


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
        certificate = _certificate(saved, backbone, model, request, outcome, proof)
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
    return Proof(difference, _sha(outcome.after.heads) == _sha(again.heads), seconds)


# What is written down


def _sha(arrays: Arrays) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        total.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _pseudonym(saved: Saved, user: str) -> str:
    return hashlib.sha256(f"{saved.ids['fingerprint']} {user}".encode()).hexdigest()[:16]


def _certificate(
    saved: Saved, backbone: Backbone, model: Retracts, request: Request, outcome: Outcome | None, proof: Proof | None
) -> dict[str, Any]:
    """Spec D.5: what was asked, done and checked, and what was not. No item is named in it."""
    users, config = saved.ids["users"], saved.config
    heads = nested(saved.served, "")["heads"]
    waits = request.number in saved.held["asked"]
    others = [] if outcome is None else [int(u) for u in outcome.subjects if u != request.number]
    mode = "none: the server was told of none of it"
    if waits:
        mode = f"waits until {model.held} users have asked"
    elif outcome is not None:
        mode = f"update of rank {outcome.rank}" if outcome.rank else "new solve"
    verdict = "not verified"
    if waits:
        verdict = "waiting"
    elif proof is not None:
        verdict = f"{'pass' if proof.difference <= SAME else 'fail'}: score difference at most {SAME}"
    return {
        "request": {
            "id": 0,
            "received_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "subject_pseudonym": _pseudonym(saved, request.user),
            "sent_with": [_pseudonym(saved, users[u]) for u in others],
            "scope": "user" if request.whole else "items",
            "n_edges": request.told,
            "n_items": len(request.items),
        },
        "method": {
            "name": backbone.name,
            "mode": mode,
            "exact": proof is not None and proof.same_bits,
            "parameters": backbone.config.model_dump(mode="json"),
            "code_version": tacita.__version__,
            "seeds": {"run": config.seed, "split": config.split.seed},
        },
        "model": {
            "sha256_before": _sha(heads if outcome is None else outcome.before.heads),
            "sha256_after": _sha(heads),
            "sha256_data_remaining": _sha({k: v for k, v in saved.held.items() if k.startswith("told/")}),
        },
        "participation": {
            "clients_asked": 0,
            "rounds": 0 if outcome is None else 1,
            "bytes_up": 0.0 if outcome is None else model.upload_bytes(len(saved.ids["items"])),
            "bytes_down": 0.0 if outcome is None else float(sum(wire_bytes(a) for a in heads.values())),
        },
        "cost": {
            "seconds_server": 0.0 if outcome is None else round(outcome.seconds, 4),
            "seconds_client_total": NOT_RUN,
            "seconds_retrain": NOT_RUN if proof is None else round(proof.seconds, 4),
            "ratio_to_retrain": NOT_RUN if proof is None or outcome is None else outcome.seconds / proof.seconds,
            "storage_bytes_server": sum(a.nbytes for a in saved.served.values()),
            "storage_bytes_client_mean": sum(a.nbytes for a in saved.held.values()) / len(users),
        },
        "guarantee": {
            "type": NOT_RUN if proof is None else "exact" if proof.same_bits else "empirical",
            "epsilon": None,
            "delta": None,
            "psi_bound": None,
            "max_score_difference": NOT_RUN if proof is None else proof.difference,
            "assumptions": [
                "the model is a function of a sum over users, so taking a term back leaves rounding only",
                "retraining means the same catalogue, inputs and ways of scoring, without the data",
            ],
        },
        "audit": {"reference": "none" if proof is None else "retrain"}
        | dict.fromkeys(
            [
                "auc_pairs", "auc_user", "param_distance_ratio", "gram_distance", "noise_floor", "rank_percentile",
                "jaccard20", "relearn_ratio", "canary_exposure",
            ],
            NOT_RUN,
        ),
        "utility": NOT_RUN,
        "purged": [*LISTS, *(["told", "sums", "inverse", "weights"] if outcome is not None else [])],
        "residual_risk": "Copies of the model sent before, and recommendations made from it, are not reached; which "
        "recency validation chose, and which items a large catalogue reads, stay as the data helped to choose them; "
        "result.json, events.jsonl and report.html keep averages that the data took part in, ids.json the user's id."
        + (f" {ALONE}" if outcome is not None and not others else ""),
        "verdict": verdict,
    }  # fmt: skip
