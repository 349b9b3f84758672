"""The certificate of a withdrawal (sharing spec D.5): what was asked, done and checked, and what was not.

It names no item, and nobody but by a pseudonym. What was not measured says so. `exact` is about bits: true only where
the model has those of one that was trained again, or where the method has them by construction and says so. A tally has
the bits of its sums, and what it solves from them up to rounding: its guarantee says that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import tacita
from tacita.core.codec import digest
from tacita.core.types import Arrays
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import flatten_devices
from tacita.round.unlearning_report import Cost, UnlearningReport, are_exact, list_purged, sum_cost
from tacita.runs.artefacts import is_clean
from tacita.runs.forgetting.pseudonyms import joint_pseudonym, pseudonym
from tacita.runs.forgetting.verdict import auc_gap, run_checks, summarise_checks
from tacita.runs.forgetting.verification import AppliedRequest, Verification, model_digest
from tacita.runs.run_folder import SavedRun

NOT_RUN = "not run"
ROUNDING = "up to rounding"
WITHHELD = "withheld"
NOT_COUNTED = (
    "the run states an epsilon: figures made of exact data, and a comparison with training again, are withheld, "
    "because no release of the run counts them"
)
_EXACT_FIGURES = {
    "request": ("n_edges", "n_items"),
    "model": ("sha256_data_remaining",),
    "participation": ("bytes_up",),
    "cost": ("storage_bytes_client_mean", "bytes_on_devices_mean"),
}
"""What a certificate says of exact data, by its sections."""
MAX_SCORE_DIFFERENCE = 1e-6  # the largest difference of a score that counts as equal to training again
SENT_ALONE = "A retraction sent alone shows its author's items to whoever compares the models before and after it."
RESIDUAL_RISK = (
    "Copies of the model sent before, and recommendations made from it, are not reached; choices that validation made "
    "(the best round, tally's recency and inputs) stay as the data helped to make them; result.json and events.jsonl "
    "keep averages of rounds that the data took part in, ids.json the user's id."
)
TALLY_ASSUMPTIONS = (
    "the model is a function of a sum over users, so taking a term back leaves rounding only",
    "training again means the same catalogue, inputs and ways of scoring, without the data",
)
NOISE_ASSUMPTIONS = (
    "training again means the same catalogue, items and ways of scoring, without the data, and other noise",
)
RETRAINING_ASSUMPTIONS = (
    "training again means the same seed, catalogue, rounds and remaining choices to share, without the data",
)
AUDIT_FIGURES = (
    "auc_pairs", "auc_difference", "auc_user", "param_distance_ratio", "gram_distance", "noise_floor",
    "rank_percentile", "jaccard20", "relearn_ratio", "canary_exposure",
)  # fmt: skip


@dataclass(frozen=True)
class CertificateInput:
    """A request, all that came of it, and what is left of it in the new folder."""

    saved: SavedRun  # the run as it was
    applied: AppliedRequest
    verification: Verification | None
    traces: dict[str, list[str]]
    number: int
    seconds: float
    pseudonym_key: bytes  # of what it calls people

    @property
    def part_reports(self) -> list[UnlearningReport]:
        return list(self.applied.part_reports.values())

    @property
    def method_reports(self) -> list[UnlearningReport]:
        """Of those alone that took something out of the model."""
        names = {*self.applied.route.by, self.applied.federation.learner.name}
        reports = [report for name, report in self.applied.part_reports.items() if name in names]
        return reports or self.part_reports

    def sum_reports(self, cost: Cost) -> float:
        return sum_cost(self.part_reports, cost)


def certify(case: CertificateInput) -> dict[str, Any]:
    found = {
        "request": _describe_request(case),
        "method": _describe_method(case),
        "model": _digest_models(case),
        "participation": _sum_participation(case),
        "cost": _describe_cost(case),
        "guarantee": _describe_guarantee(case),
        "audit": _describe_audit(case),
        "utility": NOT_RUN if case.verification is None else case.verification.utility,
        "purged": _describe_purge(case),
        "residual_risk": _describe_residual_risk(case),
        "verdict": _reach_verdict(case),
    }
    if case.applied.counts_releases:
        found = withhold_exact_figures(found)
    return {name: _to_json(value) for name, value in found.items()}


def withhold_exact_figures(certificate: dict[str, Any]) -> dict[str, Any]:
    """A certificate of a run that states an epsilon holds nothing that is not charged to somebody."""
    released = dict(certificate)
    for section, names in _EXACT_FIGURES.items():
        released[section] = {**certificate[section], **dict.fromkeys(names, WITHHELD)}
    return released


def _to_json(value: Any) -> Any:
    """Numbers that JSON knows."""
    if isinstance(value, dict):
        return {name: _to_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _describe_request(case: CertificateInput) -> dict[str, Any]:
    ids, asked = case.saved.ids["users"], case.applied.request
    subjects = [pseudonym(case.pseudonym_key, ids[u]) for u in asked.users.tolist()]
    others = [pseudonym(case.pseudonym_key, ids[u]) for u in _find_co_requesters(case)]
    one = subjects[0] if len(subjects) == 1 else joint_pseudonym(subjects)
    told = case.applied.federation.stream.train_items(len(case.applied.federation.stream.blocks) - 1)
    edges = int(told.holds(asked.users[asked.items.rows()], asked.items.ids).sum())
    return {
        "id": case.number,
        "received_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "subject_pseudonym": one,
        "subjects": subjects,
        "sent_with": others,
        "scope": "user" if asked.whole else "shared_edges" if asked.requests.kind == "unshare" else "items",
        "n_edges": edges,
        "n_items": len(asked.items.ids),
    }


def _find_co_requesters(case: CertificateInput) -> list[int]:
    """Who else was taken back in the same update."""
    row = {int(key): n for n, key in enumerate(case.applied.federation.stream.user_keys.tolist())}
    mine = set(case.applied.request.users.tolist())
    named: set[int] = set()
    for report in case.part_reports:
        if not report.waits:
            named.update(row[key] for key in report.subjects)
    return sorted(named - mine)


def _describe_method(case: CertificateInput) -> dict[str, Any]:
    config = case.saved.config
    methods = [report.method for report in case.method_reports if report.method is not None]
    modes = [report.mode for report in case.part_reports if report.mode is not None]
    return {
        "name": methods[0] if methods else " and ".join(case.applied.route.by),
        "mode": "; ".join(modes) or "as the method has it",
        "why": case.applied.route.reason,
        "leaves": case.applied.route.residue,
        "exact": _is_exact(case),
        "calibration": _describe_calibration(case),
        "parameters": {"backbone": config.backbone, "parts": config.parts, "method": config.method},
        "code_version": tacita.__version__,
        "seeds": {"run": config.seed, "split": config.split.seed},
    }


def _describe_calibration(case: CertificateInput) -> dict[str, Any] | str:
    """The damping that retractions were carried with, what it leaves, and which way was taken for that."""
    for report in case.method_reports:
        if report.calibration is not None:
            return report.calibration.model_dump(exclude_unset=True)
    return "none"


def _has_exact_sums(case: CertificateInput) -> bool:
    """Whether the model is a function of sums that nobody put noise into."""
    run = case.applied.remaining
    model = run.backbone
    return run.learner.unlearning is not None and isinstance(model, StatisticModel) and model.retracts_exactly


def _is_exact(case: CertificateInput) -> bool:
    """Checked bit by bit, or, where nobody checked, exact by construction."""
    if case.applied.route.residue or case.applied.is_waiting or _took_nothing(case):
        return False
    if case.verification is not None:
        return case.verification.same_bits
    return are_exact(case.method_reports)


def _is_exact_to_rounding(case: CertificateInput) -> bool:
    """By construction, unless a check found more; the sums have the bits, what is solved from them need not."""
    if not _has_exact_sums(case) or case.applied.route.residue or case.applied.is_waiting:
        return False
    return case.verification is None or (
        case.verification.max_difference is not None and case.verification.max_difference <= MAX_SCORE_DIFFERENCE
    )


def _digest_models(case: CertificateInput) -> dict[str, Any]:
    done = case.applied
    left: Arrays = {}
    for block in done.remaining.stream.blocks:
        left |= {f"{block.index}/ptr": block.train.ptr, f"{block.index}/ids": block.train.ids}
    return {
        "sha256_before": model_digest(done.remaining, done.before),
        "sha256_after": model_digest(done.remaining, done.after),
        "sha256_data_remaining": digest(left),
    }


def _sum_participation(case: CertificateInput) -> dict[str, Any]:
    return {
        "clients_asked": int(case.sum_reports("clients_asked")),
        "rounds": int(case.sum_reports("rounds")),
        "bytes_up": case.sum_reports("bytes_up"),
        "bytes_down": case.sum_reports("bytes_down"),
    }


def _describe_cost(case: CertificateInput) -> dict[str, Any]:
    done, proof = case.applied, case.verification
    held = flatten_devices(done.after.clients, "")
    server = case.sum_reports("seconds_server") or done.seconds
    return {
        "seconds_server": round(server, 4),
        "seconds_client_total": round(case.sum_reports("seconds_client"), 4),
        "seconds_request": round(done.seconds, 4),
        "seconds_total": round(case.seconds, 4),
        "seconds_retrain": NOT_RUN if proof is None else round(proof.seconds, 4),
        "ratio_to_retrain": NOT_RUN if proof is None else done.seconds / max(proof.seconds, 1e-9),
        "storage_bytes_server": case.sum_reports("storage_server"),
        "storage_bytes_client_mean": case.sum_reports("storage_client"),
        "bytes_on_devices_mean": sum(a.nbytes for a in held.values()) / max(1, done.after.clients.n_users),
    }


def _describe_guarantee(case: CertificateInput) -> dict[str, Any]:
    proof, sums = case.verification, case.applied.remaining.learner.unlearning is not None
    again = RETRAINING_ASSUMPTIONS if not sums else TALLY_ASSUMPTIONS if _has_exact_sums(case) else NOISE_ASSUMPTIONS
    bounded = next((report for report in case.part_reports if report.guarantee == "bounded"), None)
    kind = "bounded" if bounded is not None else "empirical" if proof else NOT_RUN
    kind = "exact" if _is_exact(case) else ROUNDING if _is_exact_to_rounding(case) else kind
    said: list[str] = []
    for report in case.part_reports:
        said += report.assumptions
    if case.applied.counts_releases:
        said.append(NOT_COUNTED)
    return {
        "type": kind,
        "epsilon": None if bounded is None else bounded.epsilon,
        "delta": None if bounded is None else bounded.delta,
        "psi_bound": None if bounded is None else bounded.psi_bound,
        "max_score_difference": NOT_RUN if proof is None else proof.max_difference,
        "people_compared": NOT_RUN if proof is None else proof.n_compared,
        "assumptions": [*again, *dict.fromkeys(said)],
    }


def _describe_audit(case: CertificateInput) -> dict[str, Any]:
    found = dict.fromkeys(AUDIT_FIGURES, NOT_RUN)
    if case.verification is None:
        return {"reference": "none", **found}
    return {"reference": "retrain", **found, **case.verification.audit}


def _describe_purge(case: CertificateInput) -> dict[str, Any]:
    """What was emptied, and what a search of the new folder finds."""
    lists = ["histories", "lists that parts keep"] if len(case.applied.removed_items.ids) else []
    private = ["private vectors"] if case.applied.request.whole else []
    said = list_purged(case.part_reports)
    return {"emptied": list(dict.fromkeys([*lists, *private, *said])), "clean": is_clean(case.traces), **case.traces}


def _describe_residual_risk(case: CertificateInput) -> str:
    alone = len(case.applied.request.users) == 1 and not _find_co_requesters(case) and _has_exact_sums(case)
    moved = model_digest(case.applied.remaining, case.applied.before) != model_digest(
        case.applied.remaining, case.applied.after
    )
    more = [case.applied.route.residue, SENT_ALONE if alone and moved else ""]
    more += [report.residual_risk for report in case.part_reports]
    if case.traces["rows"]:
        more.append(f"Item rows as they were before are still in {', '.join(case.traces['rows'])}.")
    return " ".join([RESIDUAL_RISK, *(one for one in more if one)])


def _took_nothing(case: CertificateInput) -> bool:
    """Whether something is taken back from the server's record, and that held nothing of it."""
    done, asked = case.applied, case.applied.request
    if asked.requests.kind != "unshare" or done.route.is_retraining:
        return False
    held = done.before.server.shared.lists_of(done.federation.stream.user_keys[asked.users])
    return not asked.items.holds(held.rows(), held.ids).any()


def _reach_verdict(case: CertificateInput) -> str:
    if case.applied.is_waiting:
        return "waiting"
    if _took_nothing(case):
        return "fail: the server's record held nothing of what is taken back"
    if not is_clean(case.traces):
        return "fail: the search of the folder found what was withdrawn"
    if case.applied.counts_releases:
        return f"not verified: {NOT_COUNTED}"
    if case.verification is None:
        return "not verified"
    proof = case.verification
    if proof.same_bits and proof.max_difference is None:
        return "pass: the model has the bits of one trained again; nobody is left to compare scores of"
    if proof.max_difference is not None and (_has_exact_sums(case) or proof.same_bits):
        verdict = "pass" if proof.max_difference <= MAX_SCORE_DIFFERENCE else "fail"
        return f"{verdict}: score difference at most {MAX_SCORE_DIFFERENCE}"
    auc = proof.audit["auc_pairs"]
    gap = auc_gap(auc["after"], auc["retrain"])
    found = {kind: len(where) for kind, where in case.traces.items()}
    return summarise_checks(run_checks(gap, proof.audit["param_distance_ratio"], None, found))
