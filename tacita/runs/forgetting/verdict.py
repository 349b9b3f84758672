"""Whether a withdrawal did what it should, check by check (sharing spec D.4), and a sentence that names what failed.

Good forgetting looks like retraining. A model that tells withdrawn pairs better than that has not forgotten them; one
that tells them worse marks them, which is a failure as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAME_AUC = 0.02  # the most that the AUC of pairs may be away from that of retraining


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None  # None: there was nothing to judge it by
    message: str


def compute_auc_gap(after: float | None, retrained: float | None) -> float | None:
    """AUC above that of retraining; None where either could not be measured."""
    return None if after is None or retrained is None else after - retrained


def run_checks(
    gap: float | None, ratio: float | None, floor: float | None, trace_counts: dict[str, int]
) -> list[Check]:
    """All checks of a withdrawal.

    `gap`: AUC of pairs above that of retraining. `ratio`: distance to retraining, where 1 is the model as it was
    before; `floor`: that of retraining with another seed. `trace_counts`: places in files, by what is in them.
    """
    return [*_check_pairs(gap), _check_distance(ratio, floor), _check_files(trace_counts)]


def _is_measured(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _check_pairs(gap: float | None) -> list[Check]:
    if gap is None or math.isnan(gap):
        return [Check("pairs", None, "no pair could be compared"), Check("over-forgetting", None, "no pair either")]
    message = f"AUC of pairs {gap:+.3f} from training again, {SAME_AUC} at most"
    forgets = Check("pairs", gap <= SAME_AUC, message)
    leaves_no_mark = Check("over-forgetting", gap >= -SAME_AUC, message)
    return [forgets, leaves_no_mark]


def _check_distance(ratio: float | None, floor: float | None) -> Check:
    if ratio is None or math.isnan(ratio):
        return Check("distance", None, "the data had moved nothing that could be compared")
    other_seed = f", another seed alone {floor:.3f}" if _is_measured(floor) else ""
    message = f"distance to training again {ratio:.3f} of what it was, below 1{other_seed}"
    return Check("distance", ratio < 1, message)


def _check_files(trace_counts: dict[str, int]) -> Check:
    places = [f"{count} of {kind}" for kind, count in trace_counts.items() if count]
    if places:
        return Check("search", False, f"places in files: {', '.join(places)}")
    return Check("search", True, "nothing found in files")


def summarise_checks(checks: Sequence[Check]) -> str:
    """`pass` or `fail`, and why; what could not be judged says so."""
    failures = [f"{check.name} ({check.message})" for check in checks if check.passed is False]
    if failures:
        return "fail: " + "; ".join(failures)
    messages = [check.message if check.passed else f"{check.name} not judged" for check in checks]
    return "pass: " + "; ".join(dict.fromkeys(messages))
