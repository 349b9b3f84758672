"""The certificate of a retraction (spec D.5): what was asked, done and checked, and what was not; it names no item."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import tacita
from tacita.core.codec import digest
from tacita.core.files import nested
from tacita.core.types import Arrays, Ints, ServerState
from tacita.fields import wire_bytes
from tacita.lab.run_folder import Saved
from tacita.models.base import Backbone, Retracts

NOT_RUN = "not run"
SAME = 1e-6  # the largest difference of a score that counts as equal to retraining
LISTS = ("history", "past", "current")
ALONE = "A retraction sent alone shows its author's items to whoever compares the models before and after it."
RESIDUAL = (
    "Copies of the model sent before, and recommendations made from it, are not reached; which recency validation "
    "chose, and which items a large catalogue reads, stay as the data helped to choose them; result.json, events.jsonl "
    "and report.html keep averages that the data took part in, ids.json the user's id."
)
ASSUMPTIONS = (
    "the model is a function of a sum over users, so taking a term back leaves rounding only",
    "retraining means the same catalogue, inputs and ways of scoring, without the data",
)
AUDITS = (
    "auc_pairs", "auc_user", "param_distance_ratio", "gram_distance", "noise_floor", "rank_percentile", "jaccard20",
    "relearn_ratio", "canary_exposure",
)  # fmt: skip


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


@dataclass(frozen=True)
class Case:
    """A request and all that came of it; the saved run is as it was left."""

    saved: Saved
    backbone: Backbone
    model: Retracts
    request: Request
    outcome: Outcome | None  # None: the server has changed nothing yet
    proof: Proof | None

    @property
    def waits(self) -> bool:
        return self.request.number in self.saved.held["asked"]

    @property
    def heads(self) -> Arrays:
        return nested(self.saved.served, "")["heads"]

    @property
    def others(self) -> list[int]:
        """Who else was taken back in the same update."""
        return [] if self.outcome is None else [int(u) for u in self.outcome.subjects if u != self.request.number]


def certify(case: Case) -> dict[str, Any]:
    done, proof = case.outcome is not None, case.proof
    return {
        "request": _request(case),
        "method": _method(case),
        "model": _model(case),
        "participation": _participation(case),
        "cost": _cost(case),
        "guarantee": _guarantee(proof),
        "audit": {"reference": "none" if proof is None else "retrain", **dict.fromkeys(AUDITS, NOT_RUN)},
        "utility": NOT_RUN,
        "purged": [*LISTS, *(["told", "sums", "inverse", "weights"] if done else [])],
        "residual_risk": RESIDUAL + (f" {ALONE}" if done and not case.others else ""),
        "verdict": _verdict(case),
    }


def _verdict(case: Case) -> str:
    if case.waits:
        return "waiting"
    if case.proof is None:
        return "not verified"
    return f"{'pass' if case.proof.difference <= SAME else 'fail'}: score difference at most {SAME}"


def _request(case: Case) -> dict[str, Any]:
    saved, request = case.saved, case.request
    return {
        "id": 0,
        "received_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "subject_pseudonym": _pseudonym(saved, request.user),
        "sent_with": [_pseudonym(saved, saved.ids["users"][u]) for u in case.others],
        "scope": "user" if request.whole else "items",
        "n_edges": request.told,
        "n_items": len(request.items),
    }


def _pseudonym(saved: Saved, user: str) -> str:
    return hashlib.sha256(f"{saved.ids['fingerprint']} {user}".encode()).hexdigest()[:16]


def _method(case: Case) -> dict[str, Any]:
    mode = "none: the server was told of none of it"
    if case.waits:
        mode = f"waits until {case.model.held} users have asked"
    elif case.outcome is not None:
        mode = f"update of rank {case.outcome.rank}" if case.outcome.rank else "new solve"
    config = case.saved.config
    return {
        "name": case.backbone.name,
        "mode": mode,
        "exact": case.proof is not None and case.proof.same_bits,
        "parameters": case.backbone.config.model_dump(mode="json"),
        "code_version": tacita.__version__,
        "seeds": {"run": config.seed, "split": config.split.seed},
    }


def _model(case: Case) -> dict[str, Any]:
    told = {name: array for name, array in case.saved.held.items() if name.startswith("told/")}
    return {
        "sha256_before": digest(case.heads if case.outcome is None else case.outcome.before.heads),
        "sha256_after": digest(case.heads),
        "sha256_data_remaining": digest(told),
    }


def _participation(case: Case) -> dict[str, Any]:
    done = case.outcome is not None
    return {
        "clients_asked": 0,
        "rounds": int(done),
        "bytes_up": case.model.upload_bytes(len(case.saved.ids["items"])) if done else 0.0,
        "bytes_down": float(sum(wire_bytes(a) for a in case.heads.values())) if done else 0.0,
    }


def _cost(case: Case) -> dict[str, Any]:
    outcome, proof, saved = case.outcome, case.proof, case.saved
    return {
        "seconds_server": 0.0 if outcome is None else round(outcome.seconds, 4),
        "seconds_client_total": NOT_RUN,
        "seconds_retrain": NOT_RUN if proof is None else round(proof.seconds, 4),
        "ratio_to_retrain": NOT_RUN if proof is None or outcome is None else outcome.seconds / proof.seconds,
        "storage_bytes_server": sum(a.nbytes for a in saved.served.values()),
        "storage_bytes_client_mean": sum(a.nbytes for a in saved.held.values()) / len(saved.ids["users"]),
    }


def _guarantee(proof: Proof | None) -> dict[str, Any]:
    return {
        "type": NOT_RUN if proof is None else "exact" if proof.same_bits else "empirical",
        "epsilon": None,
        "delta": None,
        "psi_bound": None,
        "max_score_difference": NOT_RUN if proof is None else proof.difference,
        "assumptions": list(ASSUMPTIONS),
    }
