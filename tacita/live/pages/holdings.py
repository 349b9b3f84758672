"""What servers certified as removed for one person, and the sentences that tell what a server still holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.live.node.queued_request import QueuedRequest


@dataclass(frozen=True)
class CertifiedRemovals:
    """The runs that certified the removal of an item, of a whole person, or of the record alone."""

    items: dict[str, set[str]]  # runs by item
    left_runs: set[str]
    retaining_runs: set[str]  # the record is empty there, and the model is not unlearned


def collect_removals(requests: Sequence[QueuedRequest]) -> CertifiedRemovals:
    """The removals among one person's requests that a server has certified."""
    items: dict[str, set[str]] = {}
    left_runs: set[str] = set()
    retaining_runs: set[str] = set()
    for request in requests:
        if request.phase != "applied":
            continue
        if request.kind == "forget":
            for item in request.items:
                items.setdefault(item, set()).add(request.run)
        if request.kind == "leave":
            left_runs.add(request.run)
        if request.is_withdrawal and "not unlearned" in request.certificate.verdict:
            retaining_runs.add(request.run)
    return CertifiedRemovals(items, left_runs, retaining_runs)


def join_run_names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def describe_server_holdings(shown: int, n_released: int, runs: list[str], removals: CertifiedRemovals) -> list[str]:
    """Sentences that promise no more than is so."""
    sentences = [_describe_shown(shown), _describe_released(n_released, runs)]
    sentences += _describe_removals(removals)
    sentences.append("The model that it learned from everybody's sums.")
    return sentences


def _describe_shown(n: int) -> str:
    if not n:
        return "No item of yours by itself: you have shown it none."
    items = "1 item that you showed it" if n == 1 else f"{n:,} items that you showed it"
    return f"{items}, together under a made-up name: who knows some of them finds the others."


def _describe_released(n: int, runs: list[str]) -> str:
    if not n:
        return "No sum that left this device had anything of yours in it."
    subject = _count_own_items(n)
    names = ", ".join(runs)
    return (
        f"{subject} part of sums over many people that it was sent ({names}). It was told neither your name "
        "nor your list; a server that compares many sums can still work out much of what one person did."
    )


def _describe_removals(removals: CertifiedRemovals) -> list[str]:
    sentences = []
    retaining_runs = removals.retaining_runs
    n_unlearned = 0
    unlearned_runs: set[str] = set()
    for runs in removals.items.values():
        remaining_runs = runs - retaining_runs
        n_unlearned += bool(remaining_runs)
        unlearned_runs |= remaining_runs
    if n_unlearned:
        subject = _count_own_items(n_unlearned)
        names = join_run_names(unlearned_runs)
        sentences.append(f"It has certified since that {subject} taken out of its record and its model ({names}).")
    left_runs = removals.left_runs - retaining_runs
    if left_runs:
        sentences.append(f"It has certified that you left {join_run_names(left_runs)}, with everything.")
    if retaining_runs:
        names = join_run_names(retaining_runs)
        sentences.append(
            f"It has taken what you took back out of its record of {names}; what that model learned stays."
        )
    return sentences


def _count_own_items(n: int) -> str:
    return "1 item of yours is" if n == 1 else f"{n:,} items of yours are"
