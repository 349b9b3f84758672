"""What a person may ask for, checked against what the node holds before it is queued.

A request that cannot be meant is refused in one sentence. One that asks for what is so already changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.core.errors import TacitaError
from tacita.live.json_object import JsonObject
from tacita.live.node.node import Node
from tacita.live.node.queued_request import check_request_kind
from tacita.live.node.request_status import RequestStatus, list_request_statuses
from tacita.live.node.row_index import ItemNumbers, map_item_numbers
from tacita.live.node.user_run import UserRun, load_plan, load_user_run
from tacita.round.fulfilment import can_fulfil, list_unlearning_scopes
from tacita.round.plan import Plan
from tacita.round.request import REQUEST_KINDS, UNLEARNING_KINDS

UNSUPPORTED = {
    "share": "no run that user '{user}' takes part in learns from what is shared; its operator trains with a method "
    "that does, such as fedshare.",
    "unshare": "user '{user}' shares nothing: no run that they take part in learns from what is shared.",
    "forget": "no run that user '{user}' takes part in can forget; `tacita node consent {user} keep` keeps data out of "
    "later sums.",
    "single": "runs that user '{user}' takes part in let whole people leave and forget no single items; `tacita node "
    "leave {user}` takes everything back, and an operator who trains with part 'fru' lets single items go.",
    "leave": "no run that user '{user}' takes part in can carry out that somebody leaves; `tacita node consent {user} "
    "keep` keeps data out of later sums.",
}


class Rejection(TacitaError):
    """Why a request cannot be meant in one run; another run may still take it."""


@dataclass(frozen=True)
class ItemRequest:
    """A request of one person about items, before it is queued."""

    kind: str
    user: str  # raw id, cut for messages
    number: int  # of the user in the store
    items: set[str]  # as named; none: all


# Submitting


def submit_request(
    node: Node, kind: str, user: str, items: Sequence[str], run: str | None = None
) -> list[RequestStatus]:
    """Queue a request, or say in one sentence why it cannot be meant."""
    check_request_kind(kind)
    store = node.store
    number = store.find_user(user)
    runs = _select_requested_runs(node, number, user, run)
    user_runs = [load_user_run(node, number, name) for name in runs]
    able_runs = [user_run for user_run in user_runs if _may_support(user_run, kind)]
    if not able_runs:
        raise _unsupported_error(user_runs, kind, user)
    item_numbers = map_item_numbers(item for item, _ in store.read_catalogue())
    own_items = set(store.read_history([number]).item)
    _check_items(items, user, item_numbers, own_items)
    open_runs = [user_run for user_run in able_runs if not user_run.has_left]
    if not open_runs:
        raise TacitaError(f"user '{user[:100]}' has left {_join_run_names(able_runs)} already.")
    request = ItemRequest(kind, user[:100], number, set(items))
    queued = []
    rejections = []
    for user_run in open_runs:
        known_items = _select_known_items(own_items, item_numbers, user_run)
        try:
            selected = _select_items(node, request, user_run, known_items)
        except Rejection as rejection:
            rejections.append(rejection)
            continue
        request_id = store.enqueue_request(kind, user_run.run, sorted(selected), number)
        queued.append(request_id)
    if not queued:
        raise TacitaError(str(rejections[0]))
    return [status for status in list_request_statuses(node) if status.request in queued]


def _select_requested_runs(node: Node, number: int, user: str, run: str | None) -> list[str]:
    """The runs that are meant: the one that is named, or all that the person takes part in."""
    if run is not None:
        return [run]
    runs = _list_known_runs(node, number)
    if not runs:
        raise TacitaError(
            f"user '{user[:100]}' takes part in no run yet; wait for its first round, or name the run with --run."
        )
    return runs


def _list_known_runs(node: Node, number: int) -> list[str]:
    """The runs that a person takes part in and whose model has come."""
    user_runs = set(node.store.list_user_runs(number))
    return sorted(user_runs & set(node.store.list_runs()))


def _may_support(user_run: UserRun, kind: str) -> bool:
    """Whether a run carries out such requests, or has not said yet."""
    return user_run.plan is None or can_fulfil(user_run.plan, kind)


def _unsupported_error(user_runs: Sequence[UserRun], kind: str, user: str) -> TacitaError:
    """What to do instead, where no run carries the request out."""
    scopes = set[str]()
    for user_run in user_runs:
        if user_run.plan is not None:
            scopes.update(list_unlearning_scopes(user_run.plan))
    reason = "single" if kind == "forget" and "people" in scopes else kind
    return TacitaError(UNSUPPORTED[reason].format(user=user[:100]))


def _check_items(items: Sequence[str], user: str, item_numbers: ItemNumbers, own_items: set[str]) -> None:
    """Refuse items that are in no catalogue, or that the person does not have."""
    for item in items:
        if item_numbers and item not in item_numbers:
            raise TacitaError(f"item '{item[:100]}' is not in the server's catalogue of {len(item_numbers):,} items.")
        if item not in own_items:
            raise TacitaError(f"user '{user[:100]}' has no item '{item[:100]}' on this node.")


def _select_known_items(own_items: set[str], item_numbers: ItemNumbers, user_run: UserRun) -> set[str]:
    """The person's items that a run knows; all of them where it has not come yet."""
    if user_run.plan is None:
        return set(own_items)
    n_catalogue = len(item_numbers)
    return {item for item in own_items if item_numbers.get(item, n_catalogue) < user_run.n_items}


def _join_run_names(user_runs: Sequence[UserRun]) -> str:
    return "run " + ", ".join(f"'{user_run.run}'" for user_run in user_runs)


# Items of a request


def _select_items(node: Node, request: ItemRequest, user_run: UserRun, known_items: set[str]) -> set[str]:
    """The items that a request is about in one run; a `Rejection` if it cannot be meant."""
    _reject_late_items(request, user_run, known_items)
    if request.kind in UNLEARNING_KINDS:
        _reject_empty_withdrawal(request, user_run)
    if request.kind == "leave":
        return set()
    if request.kind == "unshare":
        return _select_to_unshare(request, user_run)
    _reject_forgotten_items(request, user_run)
    if request.kind == "forget":
        return _select_to_forget(request, user_run, known_items)
    return _select_to_share(node, request, user_run, known_items)


def _reject_late_items(request: ItemRequest, user_run: UserRun, known_items: set[str]) -> None:
    late_items = sorted(request.items - known_items)
    if late_items:
        raise Rejection(
            f"item '{late_items[0][:100]}' is newer than the open block of run '{user_run.run}'; wait for its next."
        )


def _reject_empty_withdrawal(request: ItemRequest, user_run: UserRun) -> None:
    """Who contributed nothing has nothing to withdraw."""
    user = request.user
    if user_run.plan is not None and not user_run.has_contributed:
        raise Rejection(
            f"the server was told nothing of user '{user}' in run '{user_run.run}'; "
            f"`tacita node consent {user} keep` keeps it so."
        )


def _reject_forgotten_items(request: ItemRequest, user_run: UserRun) -> None:
    forgotten = sorted(request.items & user_run.forgotten)
    if forgotten:
        raise Rejection(
            f"item '{forgotten[0][:100]}' of user '{request.user}' is forgotten in run '{user_run.run}' already."
        )


def _select_to_unshare(request: ItemRequest, user_run: UserRun) -> set[str]:
    unshared = sorted(request.items - user_run.shared)
    if not user_run.shared or unshared:
        subject = f"item '{unshared[0][:100]}'" if unshared else "anything"
        raise Rejection(
            f"user '{request.user}' does not share {subject} in run '{user_run.run}': never shared, or taken back."
        )
    return request.items or user_run.shared


def _select_to_forget(request: ItemRequest, user_run: UserRun, known_items: set[str]) -> set[str]:
    where = f"in run '{user_run.run}'"
    remaining_items = (request.items or known_items) - user_run.forgotten
    if not remaining_items:
        raise Rejection(f"everything of user '{request.user}' is forgotten {where} already.")
    learned_items = user_run.learned | user_run.shared
    if user_run.plan is not None and not remaining_items & learned_items:
        hint = f"`tacita node consent {request.user} ITEM keep` keeps it so"
        raise Rejection(f"nothing of that was ever learned from {where}, so there is nothing to take back; {hint}.")
    return remaining_items


def _select_to_share(node: Node, request: ItemRequest, user_run: UserRun, known_items: set[str]) -> set[str]:
    """Items to share: never those that are marked 'keep'."""
    user = request.user
    private_items = node.store.list_private_items(request.number)
    private_named = sorted(request.items & private_items)
    if private_named:
        item = private_named[0][:100]
        hint = f"`tacita node consent {user} {item} learn` allows it"
        raise Rejection(f"item '{item}' of user '{user}' is marked 'keep' and never leaves; {hint}.")
    wanted = request.items or known_items - user_run.forgotten
    new_items = wanted - private_items - user_run.shared
    if not new_items:
        raise Rejection(f"user '{user}' shares all of that in run '{user_run.run}' already, or keeps it.")
    return new_items


# What runs allow


def read_request_options(node: Node, user: str) -> JsonObject:
    """What a person may ask for in the runs they take part in, what they share there and what they have taken back."""
    number = node.store.find_user(user)
    runs = _list_known_runs(node, number)
    user_runs = [load_user_run(node, number, run) for run in runs]
    forgotten = set[str]()
    kinds = set[str]()
    for user_run in user_runs:
        forgotten |= user_run.forgotten
        if user_run.plan is not None and not user_run.has_left:
            kinds |= set(_list_supported_kinds(user_run.plan))
    return {
        "kinds": [kind for kind in REQUEST_KINDS if kind in kinds],
        "shared": {user_run.run: sorted(user_run.shared) for user_run in user_runs if user_run.shared},
        "forgotten": sorted(forgotten),
        "left": [user_run.run for user_run in user_runs if user_run.has_left],
    }


def list_allowed_kinds(node: Node, run: str) -> list[str]:
    """What the settings of a run allow people to ask for; they never change."""
    plan = load_plan(node, run)
    return [] if plan is None else _list_supported_kinds(plan)


def _list_supported_kinds(plan: Plan) -> list[str]:
    return [kind for kind in REQUEST_KINDS if can_fulfil(plan, kind)]
