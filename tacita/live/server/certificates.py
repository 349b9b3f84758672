"""Certificates of requests that a server carried out: what was done and what was not; they name nobody and no item."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from tacita.core.codec import digest
from tacita.core.types import ServerState
from tacita.federation.state_arrays import flatten_server
from tacita.live.request_certificate import RequestCertificate
from tacita.live.server.open_requests import OpenRequest
from tacita.round.request import WITHDRAWAL_KINDS
from tacita.round.unlearning_report import Cost, UnlearningReport, are_exact, list_purged, sum_cost

RESIDUAL = (
    "Models sent before, and what was recommended from them, are not reached; nor are choices that validation made "
    "while the data took part."
)
NOT_UNLEARNED = "Nothing in this run unlearns this: what the model learned from the data stays."
NOT_VERIFIED = "by nobody: the server says so, and its model was compared with no run without the data"
_TAKEN_FROM_MODEL = "what was learned out of the model"
_CERTIFIED_COSTS: tuple[Cost, ...] = ("clients_asked", "rounds", "bytes_up", "bytes_down", "seconds_server")

ModelPair = tuple[ServerState, ServerState]  # before and after


def build_certificate(reports: list[UnlearningReport], models: ModelPair, kind: str) -> RequestCertificate:
    """What was done, in the terms of the lab's certificates, and what was not checked.

    `certify_user` adds what was taken of one person.
    """
    model_before, model_after = models
    digest_before = _digest_model(model_before)
    digest_after = _digest_model(model_after)
    has_changed = digest_before != digest_after
    waits = any(report.is_waiting for report in reports)
    methods = [report.method for report in reports if report.method is not None]
    modes = [report.mode for report in reports if report.mode is not None]
    is_unlearned = bool(methods) and kind != "share" and not waits  # a part says that it did, not that it could
    return RequestCertificate(
        request=kind,
        method=", ".join(dict.fromkeys(methods)) or "the record of what is shared",
        mode="; ".join(modes)[:500],
        exact=are_exact(reports) and not waits,
        model_before=digest_before,
        model_after=digest_after,
        **_sum_costs(reports),
        **_describe_effect(waits, is_unlearned and has_changed, model_after),
        purged="" if waits else _describe_purge(reports, kind),
        residual_risk=_describe_residual_risk(kind, is_unlearned or waits),
        verdict=_describe_verdict(kind, waits, is_unlearned, has_changed),
    )


def _sum_costs(reports: list[UnlearningReport]) -> dict[str, Any]:
    """What the request cost, over all parts."""
    costs: dict[str, Any] = {}
    for name in _CERTIFIED_COSTS:
        cost = sum_cost(reports, name)
        if math.isfinite(cost):
            costs[name] = cost
    return costs


def _describe_purge(reports: list[UnlearningReport], kind: str) -> str:
    """What the server no longer holds."""
    purged = ["request"]
    if kind in WITHDRAWAL_KINDS:
        purged.append("record of shared items")
    purged += list_purged(reports)
    return ", ".join(dict.fromkeys(purged))


def _describe_effect(waits: bool, is_unlearned: bool, model_after: ServerState) -> dict[str, Any]:
    """What happened, when, and how anybody knows."""
    if waits:
        return {"removal": "nothing yet", "verified": "nothing to verify yet"}
    return {
        "removal": _TAKEN_FROM_MODEL if is_unlearned else "",
        "effective_block": model_after.block,
        "effective_round": model_after.round,
        "effective_at": time.time(),
        "verified": NOT_VERIFIED,
    }


def _digest_model(server: ServerState) -> str:
    """A digest of what is learned, without the record of what people shared."""
    learned = {}
    for name, array in flatten_server(server).items():
        if not name.startswith(("parts/", "given/")):
            learned[name] = array
    return digest(learned)


def _describe_residual_risk(kind: str, is_unlearned: bool) -> str:
    if kind == "share":
        return ""
    return RESIDUAL if is_unlearned else f"{NOT_UNLEARNED} {RESIDUAL}"


def _describe_verdict(kind: str, waits: bool, is_unlearned: bool, has_changed: bool) -> str:
    if waits:
        return "waits until enough people have asked"
    if kind == "share":
        return "shared"
    if not is_unlearned:
        return "taken out of the server's record; not unlearned"
    if has_changed:
        return "taken out of the record and the model; not verified"
    return "taken out; the model held none of it"


# For one person


def certify_each_user(
    certificate: RequestCertificate, models: ModelPair, group: list[OpenRequest]
) -> list[tuple[OpenRequest, RequestCertificate]]:
    """A certificate for each user: who withdraws together does not learn how much others had shared."""
    model_before, model_after = models
    senders = np.array([request.sender for request in group], np.uint64)
    counts_before = model_before.shared.take_sender_lists(senders).counts()
    counts_after = model_after.shared.take_sender_lists(senders).counts()
    certificates = []
    for request, n_taken in zip(group, counts_before - counts_after, strict=True):
        user_certificate = certify_user(certificate, request.kind, int(n_taken))
        n_items = len(request.items)
        certificates.append((request, user_certificate.model_copy(update={"n_items": n_items})))
    return certificates


def certify_user(certificate: RequestCertificate, kind: str, n_taken: int) -> RequestCertificate:
    """A certificate with what was taken of one person: so many items out of the record."""
    if not certificate.is_effective:
        return certificate
    removal = "" if kind == "share" else _describe_removal(certificate, n_taken)
    return certificate.model_copy(update={"removal": removal})


def _describe_removal(certificate: RequestCertificate, n_taken: int) -> str:
    takings = []
    if n_taken > 0:
        takings.append(f"{n_taken} shared items out of the record")
    if certificate.removal:
        takings.append(certificate.removal)
    return " and ".join(takings) or "nothing: the server held none of it"
