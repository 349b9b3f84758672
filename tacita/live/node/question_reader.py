"""A question as a node reads it: arrays and names are checked before anything is computed with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Broadcast, Keys, Ragged, ServerState
from tacita.live.json_object import JsonObject
from tacita.live.node.answers import QuestionNumber, StoredModel, make_question_number
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.per_client_arrays import CHOSEN, OWN_PREFIX, decode_per_client, resolve_pseudonyms
from tacita.live.wire import Catalogue, RequestHead, ServerRequest, decode_catalogue, decode_question, select_prefixed
from tacita.round.broadcast import PerClientLists
from tacita.round.clashes import check_parts
from tacita.round.question import Question
from tacita.runs.assembly import check_cutoffs

MOST_NUMBER = 1e6  # of a model that a node computes with; beyond, training has diverged or the server probes with it
_REQUIRED_ARRAYS = {"items", "catalogue"}
_ARRAY_PREFIXES = ("heads/", "parts-received/", OWN_PREFIX)


@dataclass(frozen=True)
class ReceivedQuestion:
    """One question with all that came with it."""

    request: ServerRequest
    server: ServerState
    broadcast: Broadcast
    respondents: Keys | None  # the people here whom it is about, where the server knows them
    is_per_client: bool = False  # it writes to single people

    @property
    def head(self) -> RequestHead:
        return self.request.head

    @cached_property
    def question(self) -> Question:
        return decode_question(self.head.kind)

    @property
    def number(self) -> QuestionNumber:
        return make_question_number(self.head)


# The model


def assemble_model(node: Node, request: ServerRequest) -> StoredModel | None:
    """All arrays of the model: those that travelled and those that the node has; None: some are missing."""
    head = request.head
    stored = _load_stored_arrays(node, head.run)
    arrays = {}
    for name, sha in head.names.items():
        if name in request.arrays:
            array = request.arrays[name]
            _refuse_damage(name, array, sha)
        elif sha in stored:
            array = stored[sha]
        else:
            return None
        arrays[name] = (sha, array)
    has_required = arrays.keys() >= _REQUIRED_ARRAYS
    if not has_required or arrays["items"][1].ndim != 2:
        raise Refusal("the request holds no item table and catalogue.")
    _refuse_unknown_arrays(arrays)
    config = serialise_config(head.config)
    note = {"config": config, "block": head.block, "round": head.round, "tag": "now"}
    return note, arrays


def _load_stored_arrays(node: Node, run: str) -> Arrays:
    """The arrays of the model that the node has, by digest."""
    model = node.store.load_model(run)
    if model is None:
        return {}
    _, named_arrays = model
    return dict(named_arrays.values())


def _refuse_damage(name: str, array: AnyArray, sha: str) -> None:
    if digest_array(array) != sha:
        raise Refusal(f"the request is damaged: '{name[:100]}' does not match its digest.")


def _refuse_unknown_arrays(names: Iterable[str]) -> None:
    for name in names:
        is_known = name in _REQUIRED_ARRAYS or name == CHOSEN
        if not is_known and not name.startswith(_ARRAY_PREFIXES):
            raise Refusal("the request holds arrays that no model has.")


def read_and_check_catalogue(node: Node, arrays: Arrays) -> Catalogue:
    """The items of the table. They must begin with those that this node knows, or the other way round."""
    try:
        items = decode_catalogue(arrays["catalogue"])
    except TacitaError as error:
        raise Refusal(str(error)) from None
    known_items = node.store.read_catalogue()
    for (new_id, _), (known_id, _) in zip(items, known_items, strict=False):
        if new_id != known_id:
            raise Refusal("the catalogue differs from the one this node has; an operator only adds items at its end.")
    return items


def serialise_config(config: JsonObject) -> str:
    return validate_model(RunConfig, config, "the settings").model_dump_json()


# The question


def read_question(node_run: NodeRun, arrays: Arrays, request: ServerRequest) -> ReceivedQuestion:
    """The server's state, what it sent along, and whom the question is about."""
    heads = select_prefixed(arrays, "heads/")
    head = request.head
    server = ServerState(arrays["items"], heads, head.block, head.round)
    common = nest_parts(arrays, "parts-received/")
    _refuse_misfitting_model(node_run, server, common)
    try:
        per_client = decode_per_client(arrays, len(server.items))
        recipients = resolve_pseudonyms(per_client.clients, node_run.pseudonyms, node_run.user_keys)
        respondents = _read_respondents(node_run, arrays)
    except TacitaError as error:
        raise Refusal(str(error)) from None
    for part_name, lists in per_client.lists.items():
        _refuse_unreadable_lists(node_run, part_name, lists, len(server.items))
    own_lists = PerClientLists(recipients, per_client.lists)
    broadcast = Broadcast(common, own_lists.select_lists, decode_lists=node_run.federation.decode_lists)
    return ReceivedQuestion(request, server, broadcast, respondents, bool(per_client.lists))


def _read_respondents(node_run: NodeRun, arrays: Arrays) -> Keys | None:
    """The keys of the people whom a question names; None: it names nobody."""
    if CHOSEN not in arrays:
        return None
    names = np.append(node_run.pseudonyms, node_run.requester_names)
    keys = np.tile(node_run.user_keys, 2)
    return resolve_pseudonyms(arrays[CHOSEN], names, keys)


def _refuse_unreadable_lists(node_run: NodeRun, part_name: str, lists: Ragged, n_items: int) -> None:
    """Lists to single people must fit the part that reads them."""
    part_by_name = {part.name: part for part in node_run.federation.parts}
    part = part_by_name.get(part_name)
    is_bounded = all(_has_bounded_numbers(column) for column in lists.values.values())
    if part is None or not is_bounded or not part.fields(n_items).accepts_lists(lists):
        raise Refusal("the request does not fit its own settings: it writes what no part reads.")


def _has_bounded_numbers(array: AnyArray) -> bool:
    return bool((np.abs(array) <= MOST_NUMBER).all())


def _refuse_misfitting_model(node_run: NodeRun, server: ServerState, common: dict[str, Arrays]) -> None:
    """Refuse arrays that do not fit the settings: compiled loops trust shapes."""
    federation = node_run.federation
    n_items = len(server.items)
    if not _fits_backbone(node_run, server) or not _fits_parts(node_run, common, n_items):
        raise Refusal("the request does not fit its own settings: its arrays have other shapes.")
    try:
        check_cutoffs(federation.config, n_items)
        check_parts(federation.parts, federation.config.train, n_items)
        for part in federation.parts:
            common.setdefault(part.name, {})
    except TacitaError as error:
        raise Refusal(str(error)) from None


def _fits_backbone(node_run: NodeRun, server: ServerState) -> bool:
    """Whether item table and heads have the shapes of the model, and bounded numbers."""
    federation = node_run.federation
    items = server.items
    expected_shape = (federation.stream.n_items, federation.backbone.item_width)
    if items.dtype != np.float32 or items.shape != expected_shape:
        return False
    if not federation.backbone.has_valid_heads(server.heads, len(items)):
        return False
    return _are_numbers_bounded([items, *server.heads.values()])


def _fits_parts(node_run: NodeRun, common: dict[str, Arrays], n_items: int) -> bool:
    """Whether each part finds what it reads, with bounded numbers, and nothing is for no part."""
    parts = node_run.federation.parts
    if not common.keys() <= {part.name for part in parts}:
        return False
    for arrays in common.values():
        if not _are_numbers_bounded(arrays.values()):
            return False
    for part in parts:
        arrays = common.get(part.name, {})
        if not part.fields(n_items).accepts_common(arrays):
            return False
    return True


def _are_numbers_bounded(arrays: Iterable[AnyArray]) -> bool:
    float_arrays = [array for array in arrays if array.dtype.kind == "f"]
    return all(_has_bounded_numbers(array) for array in float_arrays)
