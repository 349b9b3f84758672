"""Attempts of a server to carry requests out, as a node follows them: what may be asked in one, and how it ends.

What devices do in an attempt may be undone, so nothing else may be asked in one than what a request raises, and it ends
with its block at the latest. Else a server could have ordinary answers undone, and ask for them again.
"""

from __future__ import annotations

from tacita.core.config import RunConfig
from tacita.live.node import attempt_snapshot
from tacita.live.node.node import Node
from tacita.live.node.node_run import Refusal
from tacita.live.per_client_arrays import ROSTER
from tacita.live.wire import MOST_REQUESTS, RequestHead
from tacita.runs.assembly import build_plan


def resolve_attempt(node: Node, head: RequestHead, config: RunConfig) -> None:
    """What devices here did for a request holds if it took effect; if it came to nothing, they are as they were.

    The server says so with its next question, whatever that is. A question from before tells nothing of it.
    """
    store, run = node.store, head.run
    mine, block, over = store.run_query(lambda db: attempt_snapshot.read_attempt_state(db, run))
    if head.attempt:
        _check_question(head, config)
    if mine and head.attempt == mine:
        if block not in (head.block, attempt_snapshot.UNKNOWN_BLOCK):
            raise Refusal("what is asked to carry requests out ends with its block.")
        return
    if head.attempt and head.attempt <= max(mine, over):
        raise Refusal("this attempt to carry requests out is over.")
    if not mine:
        return
    if head.resolved < mine:
        raise Refusal("this question is older than an answer that this node gave since.")
    store.run_withdrawal(
        lambda db: attempt_snapshot.end_attempt(db, run, _has_failed(mine, head.failed), str(store.path))
    )
    node.open_runs.pop(run, None)


def _check_question(head: RequestHead, config: RunConfig) -> None:
    """Requests raise questions of their own, and rounds where a run learns in rounds; all else is no part of them."""
    own = "/" in head.kind or head.kind in (ROSTER, "validate")
    if head.kind == "close" or (not own and build_plan(config).learner.model_after):
        raise Refusal(f"no request raises the question '{head.kind}'.")


def _has_failed(mine: int, failed: list[int]) -> bool:
    """Whether an attempt came to nothing.

    Of one that is older than all a server lists, when it can list no more, nobody knows: it counts as failed. Who was
    told that their request is done does not go back all the same (wants.hear).
    """
    return mine in failed or (len(failed) >= MOST_REQUESTS and mine < min(failed))
