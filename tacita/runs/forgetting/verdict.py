"""Whether a withdrawal did what it should, check by check (sharing spec D.4), and a sentence that names what failed.

Good forgetting looks like training again. A model that tells withdrawn pairs better than that has not forgotten them;
one that tells them worse marks them, which is a failure as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAME_AUC = 0.02  # the most that the AUC of pairs may be away from that of training again


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None  # None: there was nothing to judge it by
    message: str


def auc_gap(after: float | None, retrained: float | None) -> float | None:
    """AUC above that of training again; None where either could not be measured."""
    return None if after is None or retrained is None else after - retrained


def run_checks(
    gap: float | None, ratio: float | None, floor: float | None, trace_counts: dict[str, int]
) -> list[Check]:
    """All checks of a withdrawal.

    `gap`: AUC of pairs above that of training again. `ratio`: distance to training again, where 1 is the model as it
    was before; `floor`: that of training again with another seed. `trace_counts`: places in files, by what is in them.
    """
    return [*_check_pairs(gap), _check_distance(ratio, floor), _check_files(trace_counts)]


def _check_pairs(gap: float | None) -> list[Check]:
    if gap is None or math.isnan(gap):
        return [Check("pairs", None, "no pair could be compared"), Check("over-forgetting", None, "no pair either")]
    told = f"AUC of pairs {gap:+.3f} from training again, {SAME_AUC} at most"
    return [Check("pairs", gap <= SAME_AUC, told), Check("over-forgetting", gap >= -SAME_AUC, told)]


def _check_distance(ratio: float | None, floor: float | None) -> Check:
    if ratio is None or math.isnan(ratio):
        return Check("distance", None, "the data had moved nothing that could be compared")
    other = "" if floor is None or math.isnan(floor) else f", another seed alone {floor:.3f}"
    return Check("distance", ratio < 1, f"distance to training again {ratio:.3f} of what it was, below 1{other}")


def _check_files(found: dict[str, int]) -> Check:
    places = [f"{n} of {what}" for what, n in found.items() if n]
    return Check("search", not places, f"places in files: {', '.join(places)}" if places else "nothing found in files")


def summarise_checks(checks: Sequence[Check]) -> str:
    """`pass` or `fail`, and why; what could not be judged says so."""
    failed = [one for one in checks if one.passed is False]
    if failed:
        return "fail: " + "; ".join(f"{one.name} ({one.message})" for one in failed)
    said = [one.message if one.passed else f"{one.name} not judged" for one in checks]
    return "pass: " + "; ".join(dict.fromkeys(said))
