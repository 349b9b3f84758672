"""People's requests as an answer carries them to the server, and what their own devices do for them first."""

from __future__ import annotations

import numpy as np

from tacita.core.config import validate_model
from tacita.core.types import AnyArray, Longs
from tacita.learn.statistic import CONTRIBUTION_LOG
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.row_index import ItemNumbers, index_rows, map_item_numbers
from tacita.live.node.withdrawal_batches import select_requests_to_send
from tacita.live.wire import RequestHead, UserRequest, decode_question
from tacita.round.device_state import PARTS
from tacita.round.request import Request, RequestBatch
from tacita.round.state import Role


def collect_requests(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> list[UserRequest]:
    """The requests that an answer carries, as the server gets them."""
    if not can_carry_requests(question.head):
        return []
    stream = node_run.federation.stream
    queue = node.store.list_requests(stream.name)
    item_numbers = map_item_numbers(stream.item_ids)
    empty_withdrawals = _find_empty_withdrawals(node_run, queue, item_numbers)
    in_batches = batches_withdrawals(node, node_run)
    due = select_requests_to_send(queue, node.config.min_users, in_batches, empty_withdrawals)
    senders = _list_earlier_pseudonyms(queue)
    carried = []
    for queued in due:
        request = queued.sent_request
        if request is None:
            request = _prepare_request(node, node_run, question, queued, item_numbers, senders)
        carried.append(request)
    return carried


def can_carry_requests(head: RequestHead) -> bool:
    """Answers to questions that a request raised, and the last one of a block, carry no requests.

    They would lie at the server for long, and what devices do in an attempt may be undone.
    """
    is_raised_by_request = decode_question(head.kind).owner is not None or head.attempt != 0
    return head.kind != "close" and not is_raised_by_request


def batches_withdrawals(node: Node, node_run: NodeRun) -> bool:
    """Whether the server asks those who withdraw what to take back, so that they must leave in a batch."""
    federation = node_run.federation
    parts_ask = bool(federation.implementing("answer_question"))
    is_asked = federation.learner.unlearning is not None or parts_ask
    return is_asked and not node_run.has_too_few_users and not node.config.insecure_single_user_uploads


def _list_earlier_pseudonyms(queue: list[QueuedRequest]) -> dict[int | None, int]:
    """The pseudonym under which each user asked first."""
    senders: dict[int | None, int] = {}
    for queued in reversed(queue):
        request = queued.sent_request
        if request is not None and request.sender:
            senders[queued.user] = request.sender
    return senders


def _find_empty_withdrawals(node_run: NodeRun, queue: list[QueuedRequest], item_numbers: ItemNumbers) -> set[int]:
    """Withdrawals that take nothing back from a sum: in a batch they hide nobody."""
    learner = node_run.federation.learner
    clients = node_run.devices.clients
    if learner.unlearning is None or node_run.counts_epsilon:  # under a budget nobody's data decides what waits
        return set()
    log_name = f"{PARTS}{learner.name}/{CONTRIBUTION_LOG}"
    row_of_user = index_rows(node_run.users[: clients.n_users])
    empty_withdrawals = set[int]()
    for queued in queue:
        if queued.sent is not None or not queued.is_withdrawal:
            continue
        user = queued.user
        rows = [row_of_user[user]] if user in row_of_user else []
        log = clients.read_list(log_name, np.array(rows, np.int64))
        contributed = log.ids
        if not _takes_items_back(queued, contributed, item_numbers):
            empty_withdrawals.add(queued.id)
    return empty_withdrawals


def _takes_items_back(queued: QueuedRequest, contributed: AnyArray, item_numbers: ItemNumbers) -> bool:
    """Whether a withdrawal is about something that its user contributed."""
    if not len(contributed):
        return False
    if queued.kind != "forget":
        return True
    withdrawn = [item_numbers.get(item, -1) for item in queued.items]
    return bool(np.isin(contributed, withdrawn).any())


def _prepare_request(
    node: Node,
    node_run: NodeRun,
    question: ReceivedQuestion,
    queued: QueuedRequest,
    item_numbers: ItemNumbers,
    senders: dict[int | None, int],
) -> UserRequest:
    """A request as the server gets it; the person's own device does its part now.

    Items travel only where they are, or were, shared with the server. A node that does not name its people gives who
    asks a name that nothing else of the run knows. Who has asked before keeps the earlier name: under another one the
    server would not find what it has of them.
    """
    row = np.flatnonzero(node_run.users == queued.user)
    known_items = {item_numbers[item] for item in queued.items if item in item_numbers}
    items = np.array(sorted(known_items), np.int32)
    sent_items: AnyArray = items
    if queued.kind not in ("share", "unshare"):
        sent_items = np.intersect1d(items, _read_shared_items(node_run, row))
    fields = {"id": queued.id, "kind": queued.kind, "items": sent_items.tolist(), "time": queued.created}
    user_request = validate_model(UserRequest, fields, "a request")
    if not len(row):
        return user_request
    first_row = row[0]
    key = int(node_run.user_keys[first_row])
    request = Request(user_request.kind, key, items, user_request.time, user_request.id)
    batch = RequestBatch.from_request(request)
    encoded = node_run.devices.apply_requests(node_run.federation, question.server, batch)
    encoded_items = encoded.items.ids.tolist()
    names = node_run.pseudonyms if node.config.insecure_single_user_uploads else node_run.requester_names
    own_name = int(names[first_row])
    sender = senders.get(queued.user, own_name)
    return user_request.model_copy(update={"sender": sender, "items": encoded_items})


def _read_shared_items(node_run: NodeRun, row: Longs) -> AnyArray:
    """What a person shares with the server of the run."""
    clients = node_run.devices.clients
    known_row = row[row < clients.n_users]
    item_lists: list[AnyArray] = [np.zeros(0, np.int32)]
    for name in node_run.federation.list_state_names(Role.SHARED):
        item_lists.append(clients.read_list(name, known_row).ids)
    return np.concatenate(item_lists)
