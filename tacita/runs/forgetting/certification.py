"""Certify a request that was carried out on a run folder: what was requested, done and checked, and what was not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import tacita
from tacita.core.codec import digest
from tacita.core.types import Arrays
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import flatten_devices
from tacita.round.unlearning_report import Cost, UnlearningReport, are_exact, list_purged, sum_cost
from tacita.runs.artefacts import Traces, is_clean
from tacita.runs.forgetting.certificate import (
    NOT_RUN,
    ROUNDING,
    SENT_ALONE,
    Certificate,
    CostSection,
    GuaranteeSection,
    MethodSection,
    ModelSection,
    ParticipationSection,
    PurgeSection,
    RequestSection,
)
from tacita.runs.forgetting.pseudonyms import join_pseudonyms, make_pseudonym
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.verdict import compute_auc_gap, run_checks, summarise_checks
from tacita.runs.forgetting.verification import AppliedRequest, Verification, digest_model
from tacita.runs.run_folder import SavedRun

NOT_COUNTED = (
    "the run states an epsilon: figures made of exact data, and a comparison with training again, are withheld, "
    "because no release of the run counts them"
)
MAX_SCORE_DIFFERENCE = 1e-6  # the largest difference of a score that counts as equal to retraining
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
    traces: Traces
    number: int
    seconds: float
    pseudonym_key: bytes  # of what it calls people

    @property
    def request(self) -> ResolvedRequest:
        return self.applied.request

    @property
    def part_reports(self) -> list[UnlearningReport]:
        return list(self.applied.part_reports.values())

    @property
    def method_reports(self) -> list[UnlearningReport]:
        """Of those alone that took something out of the model."""
        names = {*self.applied.route.by, self.applied.federation.learner.name}
        reports = [report for name, report in self.applied.part_reports.items() if name in names]
        return reports or self.part_reports

    @property
    def digest_before(self) -> str:
        return digest_model(self.applied.remaining, self.applied.before)

    @property
    def digest_after(self) -> str:
        return digest_model(self.applied.remaining, self.applied.after)

    def sum_reports(self, cost: Cost) -> float:
        return sum_cost(self.part_reports, cost)

    def name_users(self, users: list[int]) -> list[str]:
        """What the certificate calls people."""
        ids = self.saved.ids["users"]
        return [make_pseudonym(self.pseudonym_key, ids[user]) for user in users]


def build_certificate(case: CertificateInput) -> Certificate:
    certificate = _describe_case(case)
    return certificate.withhold_exact_figures() if case.applied.counts_releases else certificate


def _describe_case(case: CertificateInput) -> Certificate:
    return Certificate(
        request=_describe_request(case),
        method=_describe_method(case),
        model=_digest_models(case),
        participation=_sum_participation(case),
        cost=_describe_cost(case),
        guarantee=_describe_guarantee(case),
        audit=_describe_audit(case),
        utility=NOT_RUN if case.verification is None else case.verification.utility,
        purged=_describe_purge(case),
        residual_risk=_describe_residual_risk(case),
        verdict=_reach_verdict(case),
    )


# Request and method


def _describe_request(case: CertificateInput) -> RequestSection:
    request = case.request
    subjects = case.name_users(request.users.tolist())
    co_requesters = case.name_users(_find_co_requesters(case))
    stream = case.applied.federation.stream
    trained = stream.collect_train_items(len(stream.blocks) - 1)
    owners = request.users[request.items.rows()]
    is_trained = trained.holds(owners, request.items.ids)
    return RequestSection(
        id=case.number,
        received_at=datetime.now(UTC).isoformat(timespec="seconds"),
        subject_pseudonym=subjects[0] if len(subjects) == 1 else join_pseudonyms(subjects),
        subjects=subjects,
        sent_with=co_requesters,
        scope=_describe_scope(request),
        n_edges=int(is_trained.sum()),
        n_items=len(request.items.ids),
    )


def _describe_scope(request: ResolvedRequest) -> Literal["user", "shared_edges", "items"]:
    if request.whole:
        return "user"
    return "shared_edges" if request.requests.kind == "unshare" else "items"


def _find_co_requesters(case: CertificateInput) -> list[int]:
    """Who else was taken back in the same update."""
    keys = case.applied.federation.stream.user_keys.tolist()
    user_of = {key: user for user, key in enumerate(keys)}
    users: set[int] = set()
    for report in case.part_reports:
        if not report.is_waiting:
            users.update(user_of[key] for key in report.subjects)
    requesters = set(case.request.users.tolist())
    return sorted(users - requesters)


def _describe_method(case: CertificateInput) -> MethodSection:
    config = case.saved.config
    route = case.applied.route
    methods = [report.method for report in case.method_reports if report.method is not None]
    modes = [report.mode for report in case.part_reports if report.mode is not None]
    return MethodSection(
        name=methods[0] if methods else " and ".join(route.by),
        mode="; ".join(modes) or "as the method has it",
        why=route.reason,
        leaves=route.residue,
        exact=_is_exact(case),
        calibration=_describe_calibration(case),
        parameters={"backbone": config.backbone, "parts": config.parts, "method": config.method},
        code_version=tacita.__version__,
        seeds={"run": config.seed, "split": config.split.seed},
    )


def _describe_calibration(case: CertificateInput) -> dict[str, Any] | Literal["none"]:
    for report in case.method_reports:
        if report.calibration is not None:
            return report.calibration.model_dump(exclude_unset=True)
    return "none"


# Exactness


def _has_exact_sums(case: CertificateInput) -> bool:
    """Whether the model is a function of sums that nobody put noise into."""
    run = case.applied.remaining
    model = run.backbone
    return run.learner.unlearning is not None and isinstance(model, StatisticModel) and model.retracts_exactly


def _is_complete(case: CertificateInput) -> bool:
    """Whether all of the request was carried out."""
    return not case.applied.route.residue and not case.applied.is_waiting


def _is_exact(case: CertificateInput) -> bool:
    """Checked bit by bit, or, where nobody checked, exact by construction."""
    if not _is_complete(case) or _withdrew_nothing(case):
        return False
    if case.verification is not None:
        return case.verification.same_bits
    return are_exact(case.method_reports)


def _is_exact_to_rounding(case: CertificateInput) -> bool:
    """By construction, unless a check found more; the sums have the bits, what is solved from them need not."""
    if not _has_exact_sums(case) or not _is_complete(case):
        return False
    if case.verification is None:
        return True
    difference = case.verification.max_difference
    return difference is not None and difference <= MAX_SCORE_DIFFERENCE


def _withdrew_nothing(case: CertificateInput) -> bool:
    """Whether something is taken back from the server's record, and that held nothing of it."""
    applied = case.applied
    request = case.request
    if request.requests.kind != "unshare" or applied.route.is_retraining:
        return False
    keys = applied.federation.stream.user_keys[request.users]
    recorded = applied.before.server.shared.take_sender_lists(keys)
    is_taken = request.items.holds(recorded.rows(), recorded.ids)
    return not is_taken.any()


# Model and costs


def _digest_models(case: CertificateInput) -> ModelSection:
    remaining: Arrays = {}
    for block in case.applied.remaining.stream.blocks:
        remaining[f"{block.index}/ptr"] = block.train.ptr
        remaining[f"{block.index}/ids"] = block.train.ids
    return ModelSection(
        sha256_before=case.digest_before,
        sha256_after=case.digest_after,
        sha256_data_remaining=digest(remaining),
    )


def _sum_participation(case: CertificateInput) -> ParticipationSection:
    return ParticipationSection(
        clients_asked=int(case.sum_reports("clients_asked")),
        rounds=int(case.sum_reports("rounds")),
        bytes_up=case.sum_reports("bytes_up"),
        bytes_down=case.sum_reports("bytes_down"),
    )


def _describe_cost(case: CertificateInput) -> CostSection:
    applied = case.applied
    verification = case.verification
    seconds_server = case.sum_reports("seconds_server") or applied.seconds
    device_arrays = flatten_devices(applied.after.clients, "")
    device_bytes = sum(array.nbytes for array in device_arrays.values())
    n_devices = max(1, applied.after.clients.n_users)
    return CostSection(
        seconds_server=round(seconds_server, 4),
        seconds_client_total=round(case.sum_reports("seconds_client"), 4),
        seconds_request=round(applied.seconds, 4),
        seconds_total=round(case.seconds, 4),
        seconds_retrain=NOT_RUN if verification is None else round(verification.seconds, 4),
        ratio_to_retrain=NOT_RUN if verification is None else applied.seconds / max(verification.seconds, 1e-9),
        storage_bytes_server=case.sum_reports("storage_server"),
        storage_bytes_client_mean=case.sum_reports("storage_client"),
        bytes_on_devices_mean=device_bytes / n_devices,
    )


# Guarantee and audit


def _describe_guarantee(case: CertificateInput) -> GuaranteeSection:
    verification = case.verification
    bound = _find_bound(case) or UnlearningReport()
    return GuaranteeSection(
        type=_classify_guarantee(case),
        epsilon=bound.epsilon,
        delta=bound.delta,
        psi_bound=bound.psi_bound,
        max_score_difference=NOT_RUN if verification is None else verification.max_difference,
        people_compared=NOT_RUN if verification is None else verification.n_compared,
        assumptions=_list_assumptions(case),
    )


def _classify_guarantee(
    case: CertificateInput,
) -> Literal["exact", "up to rounding", "bounded", "empirical", "not run"]:
    if _is_exact(case):
        return "exact"
    if _is_exact_to_rounding(case):
        return ROUNDING
    if _find_bound(case) is not None:
        return "bounded"
    return NOT_RUN if case.verification is None else "empirical"


def _find_bound(case: CertificateInput) -> UnlearningReport | None:
    """The first report that bounds what is left."""
    return next((report for report in case.part_reports if report.guarantee == "bounded"), None)


def _list_assumptions(case: CertificateInput) -> list[str]:
    assumptions: list[str] = []
    for report in case.part_reports:
        assumptions += report.assumptions
    if case.applied.counts_releases:
        assumptions.append(NOT_COUNTED)
    return [*_list_retraining_assumptions(case), *dict.fromkeys(assumptions)]


def _list_retraining_assumptions(case: CertificateInput) -> tuple[str, ...]:
    """What retraining means for the model of this run."""
    if case.applied.remaining.learner.unlearning is None:
        return RETRAINING_ASSUMPTIONS
    return TALLY_ASSUMPTIONS if _has_exact_sums(case) else NOISE_ASSUMPTIONS


def _describe_audit(case: CertificateInput) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(AUDIT_FIGURES, NOT_RUN)
    if case.verification is None:
        return {"reference": "none", **figures}
    return {"reference": "retrain", **figures, **case.verification.audit}


# What is left


def _describe_purge(case: CertificateInput) -> PurgeSection:
    emptied: list[str] = []
    if len(case.applied.removed_items.ids):
        emptied += ["histories", "lists that parts keep"]
    if case.request.whole:
        emptied.append("private vectors")
    emptied += list_purged(case.part_reports)
    return PurgeSection(emptied=list(dict.fromkeys(emptied)), clean=is_clean(case.traces), **case.traces)


def _describe_residual_risk(case: CertificateInput) -> str:
    risks = [RESIDUAL_RISK, case.applied.route.residue]
    if _is_sent_alone(case) and case.digest_before != case.digest_after:
        risks.append(SENT_ALONE)
    risks += [report.residual_risk for report in case.part_reports]
    if case.traces["rows"]:
        risks.append(f"Item rows as they were before are still in {', '.join(case.traces['rows'])}.")
    return " ".join(risk for risk in risks if risk)


def _is_sent_alone(case: CertificateInput) -> bool:
    """Whether the change of the sums is the data of one person."""
    return len(case.request.users) == 1 and not _find_co_requesters(case) and _has_exact_sums(case)


# Verdict


def _reach_verdict(case: CertificateInput) -> str:
    if case.applied.is_waiting:
        return "waiting"
    if _withdrew_nothing(case):
        return "fail: the server's record held nothing of what is taken back"
    if not is_clean(case.traces):
        return "fail: the search of the folder found what was withdrawn"
    if case.applied.counts_releases:
        return f"not verified: {NOT_COUNTED}"
    if case.verification is None:
        return "not verified"
    return _judge_verification(case, case.verification)


def _judge_verification(case: CertificateInput, verification: Verification) -> str:
    difference = verification.max_difference
    if verification.same_bits and difference is None:
        return "pass: the model has the bits of one trained again; nobody is left to compare scores of"
    if difference is not None and (_has_exact_sums(case) or verification.same_bits):
        verdict = "pass" if difference <= MAX_SCORE_DIFFERENCE else "fail"
        return f"{verdict}: score difference at most {MAX_SCORE_DIFFERENCE}"
    auc = verification.audit["auc_pairs"]
    gap = compute_auc_gap(auc["after"], auc["retrain"])
    trace_counts = {kind: len(places) for kind, places in case.traces.items()}
    checks = run_checks(gap, verification.audit["param_distance_ratio"], None, trace_counts)
    return summarise_checks(checks)
