"""The request service of a finished run: requests are applied to its saved state, and the folder is written anew.

New files replace the old ones together: a kill leaves the folder as it was, or as it is then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.files import lock_folder, remove_temporary_files, write_json
from tacita.federation.devices import LocalDevices
from tacita.federation.rounds import Progress
from tacita.metrics import summarise_continual
from tacita.report.pages import write_report
from tacita.report.promises import PRIVACY_KEY, list_privacy_lines
from tacita.round.learner import Learner
from tacita.round.part import Part
from tacita.runs.artefacts import Traces, build_targets, find_traces
from tacita.runs.assembly import ALL_CORES, Machine
from tacita.runs.controls import average_incremental_blocks
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.certificate import Certificate
from tacita.runs.forgetting.certification import CertificateInput, build_certificate
from tacita.runs.forgetting.pseudonyms import create_key, list_certificates, parse_certificate_number, read_key
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.requests import RawRequest, explain_no_change, resolve_request
from tacita.runs.forgetting.routes import check_kind
from tacita.runs.forgetting.verification import AppliedRequest, Verification, verify_request
from tacita.runs.ledger import describe_request_cost, join_accounts, summarise_spending
from tacita.runs.run_folder import SavedRun, finish_change, read_result, replace_files, write_models


@dataclass(frozen=True)
class RunRequestResult:
    """What came of a request."""

    message: str  # which route it went and why, or why nothing changed
    certificate: Certificate | None = None  # None: nothing was withdrawn
    path: Path | None = None  # where the certificate is
    n_items: int = 0  # that it was about
    n_people: int = 0  # who asked
    cost_message: str = ""  # what it cost their budgets, in words


def submit_request(
    folder: Path, request: RawRequest, verify: bool = False, machine: Machine = ALL_CORES
) -> RunRequestResult:
    """Carry out what people request of a run folder."""
    began = time.perf_counter()
    read_result(folder)  # what is no finished run is refused before anybody is kept out of it
    with lock_folder(folder):
        remove_temporary_files(folder)
        finish_change(folder)
        run = reopen_run(folder, machine)
        check_kind(run.federation, request.kind)
        resolved = resolve_request(request, run.build_context())
        if resolved.is_empty:
            return RunRequestResult(explain_no_change(request, run.build_context()))
        route = run.choose_route(resolved, request.retrain)
        applied = apply_request(run.federation, run.progress, resolved, route)
        verification = None
        if verify and _admits_verification(applied):
            verification = verify_request(applied)
        return _write_result(run.saved, applied, verification, began)


def _admits_verification(applied: AppliedRequest) -> bool:
    """What is shared or waits cannot be compared; under a budget nothing is charged for a comparison of exact data."""
    if applied.request.requests.kind == "share" or applied.is_waiting:
        return False
    return not applied.counts_releases


# Writing


def _write_result(
    saved: SavedRun, applied: AppliedRequest, verification: Verification | None, began: float
) -> RunRequestResult:
    """New files in place of the old ones, all of them or none."""
    folder = saved.folder
    request = applied.request
    server = applied.after.server
    progress = Progress(server, LocalDevices(applied.after.clients), server)
    certificate = None
    path = None
    with replace_files(folder) as new_folder:
        write_models(applied.remaining, progress, new_folder)
        write_json(new_folder / "result.json", _update_result(folder, applied))
        if request.requests.kind != "share":
            number = _find_next_number(folder)
            path = folder / _name_certificate(applied, number)
            case = CertificateInput(
                saved=saved,
                applied=applied,
                verification=verification,
                traces=_search_traces(saved, applied, new_folder),
                number=number,
                seconds=time.perf_counter() - began,
                pseudonym_key=read_key(folder) or create_key(new_folder),
            )
            certificate = build_certificate(case)
            write_json(new_folder / path.name, certificate.to_json())
    write_report([folder], folder / "report.html")
    return RunRequestResult(
        message=applied.route.reason,
        certificate=certificate,
        path=path,
        n_items=len(request.items.ids),
        n_people=len(request.users),
        cost_message=_describe_budgets(applied),
    )


def _find_next_number(folder: Path) -> int:
    numbers = [parse_certificate_number(path) for path in list_certificates(folder)]
    return 1 + max(numbers, default=0)


def _name_certificate(applied: AppliedRequest, number: int) -> str:
    verb = "unshare" if applied.request.requests.kind == "unshare" else "forget"
    return f"{verb}-{number}.json"


def _search_traces(saved: SavedRun, applied: AppliedRequest, new_folder: Path) -> Traces:
    """Where the new files, or old ones that stay, still hold what was withdrawn."""
    request = applied.request
    leavers = request.users if request.whole else request.users[:0]
    targets = build_targets(saved, applied.removed_items, applied.withdrawn_items, leavers, applied.before)
    if applied.route.is_retraining:
        targets = replace(targets, persistent=applied.federation.persistent_names)
    return find_traces(new_folder, targets, fallback=saved.folder)


def _describe_budgets(applied: AppliedRequest) -> str:
    """What the request cost people of their budgets, in words."""
    before = applied.before.clients.parts
    after = applied.after.clients.parts
    return describe_request_cost(_account_owners(applied), before, after, applied.request.users)


def _account_owners(applied: AppliedRequest) -> list[Part | Learner]:
    federation = applied.federation
    return [*federation.parts, federation.learner]


def _update_result(folder: Path, applied: AppliedRequest) -> dict[str, Any]:
    """The numbers of the run with the last block measured again."""
    result = read_result(folder)
    blocks = applied.results
    by_block = [block["on_blocks"] for block in blocks]
    n_users = [block["users"] for block in blocks]
    continual = summarise_continual(by_block, n_users)
    accounts = join_accounts(_account_owners(applied), applied.after.clients.parts)
    if accounts is not None:
        result["privacy"] = summarise_spending(*accounts)
    result |= {
        "blocks": blocks,
        "mean": average_incremental_blocks(blocks),
        "continual": {name: None if np.isnan(value) else value for name, value in continual.items()},
        "requests": result.get("requests", 0) + 1,
    }
    return {**result, PRIVACY_KEY: list_privacy_lines(applied.federation.config, result)}
