"""Attempts of a server to carry requests out, as a node follows them: what may be asked in one, and how it ends.

What devices do in an attempt may be undone. So an attempt holds only questions that a request raises, and it ends
with its block at the latest. Else a server could have ordinary answers undone, and ask for them again.
"""

from __future__ import annotations

from tacita.core.config import RunConfig
from tacita.live.node import attempt_snapshot
from tacita.live.node.attempt_snapshot import UNKNOWN_BLOCK
from tacita.live.node.node import Node
from tacita.live.node.node_run import Refusal
from tacita.live.per_client_arrays import ROSTER
from tacita.live.wire import MOST_REQUESTS, RequestHead, decode_question
from tacita.runs.assembly import build_plan


def resolve_attempt(node: Node, head: RequestHead, config: RunConfig) -> None:
    """Keep what devices did for a request if it took effect; if the attempt failed, put them back.

    The server says so with its next question, whatever that is. An older question says nothing of it.
    """
    store = node.store
    run = head.run
    attempt, block, last_ended = store.run_query(lambda db: attempt_snapshot.read_attempt_state(db, run))
    if head.attempt:
        _refuse_other_questions(head, config)
    if attempt and head.attempt == attempt:
        if block not in (head.block, UNKNOWN_BLOCK):
            raise Refusal("what is asked to carry requests out ends with its block.")
        return
    if head.attempt and head.attempt <= max(attempt, last_ended):
        raise Refusal("this attempt to carry requests out is over.")
    if not attempt:
        return
    if head.resolved < attempt:
        raise Refusal("this question is older than an answer that this node gave since.")
    has_failed = _has_failed(attempt, head.failed)
    path = str(store.path)
    store.run_withdrawing_change(lambda db: attempt_snapshot.end_attempt(db, run, has_failed, path))
    node.open_runs.pop(run, None)


def _refuse_other_questions(head: RequestHead, config: RunConfig) -> None:
    """Requests raise questions of their own, and rounds where a run trains in rounds; nothing else."""
    raised_by_requests = decode_question(head.kind).owner is not None or head.kind in (ROSTER, "validate")
    if raised_by_requests:
        return
    if head.kind == "close" or build_plan(config).learner.model_after:
        raise Refusal(f"no request raises the question '{head.kind}'.")


def _has_failed(attempt: int, failed: list[int]) -> bool:
    """Whether an attempt failed.

    If a server can list no more, nobody knows of an attempt that is older than all it lists: it counts as failed. Users
    whose request is done do not go back all the same (request_queue.record_outcomes).
    """
    is_beyond_list = len(failed) >= MOST_REQUESTS and attempt < min(failed)
    return attempt in failed or is_beyond_list
