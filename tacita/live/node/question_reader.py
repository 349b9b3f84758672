"""What a server sent to a node, found to fit before anything is computed with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import Arrays, Broadcast, Keys, ServerState
from tacita.live.node.answers import StoredModel
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.per_client_arrays import CHOSEN, OWN_PREFIX, decode_per_client, resolve_pseudonyms
from tacita.live.wire import ServerRequest, decode_catalogue
from tacita.round.plan import PerClientLists
from tacita.runs.assembly import check_cutoffs

MOST_NUMBER = 1e6  # of a model that a node computes with; beyond, training has diverged or somebody is asking with it


@dataclass(frozen=True)
class ReceivedQuestion:
    """One question with all that came with it."""

    server: ServerState
    down: Broadcast
    respondents: Keys | None  # whom of the people here it is about, where the server knows them
    is_per_client: bool = False  # it writes to single people


def assemble_model(node: Node, request: ServerRequest) -> StoredModel | None:
    """All arrays of the model: those that travelled and those that were here; None: some are missing."""
    held = node.store.model(request.head.run)
    kept = {} if held is None else {sha: array for sha, array in held[1].values()}
    arrays = {}
    for name, sha in request.head.names.items():
        if name in request.arrays:
            if digest_array(request.arrays[name]) != sha:
                raise Refusal(f"the request is damaged: '{name[:100]}' does not match its digest.")
            arrays[name] = (sha, request.arrays[name])
        elif sha in kept:
            arrays[name] = (sha, kept[sha])
        else:
            return None
    if not {"items", "catalogue"} <= arrays.keys() or arrays["items"][1].ndim != 2:
        raise Refusal("the request holds no item table and catalogue.")
    known = {"items", "catalogue", CHOSEN}
    if any(not name.startswith(("heads/", "parts-received/", OWN_PREFIX)) for name in arrays.keys() - known):
        raise Refusal("the request holds arrays that no model has.")
    head = request.head
    note = {"config": normalise_config(head.config), "block": head.block, "round": head.round, "tag": "now"}
    return note, arrays


def check_catalogue(node: Node, arrays: Arrays) -> list[tuple[str, str]]:
    """The items of the table, which must be the first of those this node knows, or the other way round."""
    try:
        items = decode_catalogue(arrays["catalogue"])
    except TacitaError as error:
        raise Refusal(str(error)) from None
    if any(new != old for (new, _), (old, _) in zip(items, node.store.catalogue(), strict=False)):
        raise Refusal("the catalogue differs from the one this node has; an operator only adds items at its end.")
    return items


def normalise_config(config: dict[str, Any]) -> str:
    return validate_model(RunConfig, config, "the settings").model_dump_json()


def read_question(standing: NodeRun, arrays: Arrays, block: int, round: int) -> ReceivedQuestion:
    """The server's state, what it sent along and whom it is about."""
    heads = {name.removeprefix("heads/"): v for name, v in arrays.items() if name.startswith("heads/")}
    server = ServerState(arrays["items"], heads, block, round)
    common = nest_parts(arrays, "parts-received/")
    _check_model(standing, server, common)
    try:
        letters = decode_per_client(arrays, len(server.items))
        to = resolve_pseudonyms(letters.clients, standing.names, standing.keys)
        known, keys = np.append(standing.names, standing.requester_names), np.tile(standing.keys, 2)
        chosen = resolve_pseudonyms(arrays[CHOSEN], known, keys) if CHOSEN in arrays else None
    except TacitaError as error:
        raise Refusal(str(error)) from None
    by_name = {part.name: part for part in standing.federation.parts}
    for name, lists in letters.lists.items():
        mild = all(bool((np.abs(v) <= MOST_NUMBER).all()) for v in lists.values.values())
        if name not in by_name or not mild or not by_name[name].own_fits(lists, len(server.items)):
            raise Refusal("the request does not fit its own settings: it writes what no part reads.")
    own = Broadcast(
        common, PerClientLists(to, letters.lists).select_lists, decode_lists=standing.federation.decode_lists
    )
    return ReceivedQuestion(server, own, chosen, bool(letters.lists))


def _check_model(standing: NodeRun, server: ServerState, received: dict[str, Arrays]) -> None:
    """Refuse arrays that do not fit the settings: compiled loops trust the shapes they are given."""
    fed, items = standing.federation, server.items
    fits = items.dtype == np.float32 and items.shape == (fed.stream.n_items, fed.backbone.item_width)
    fits = fits and fed.backbone.heads_fit(server.heads, len(items))
    fits = fits and received.keys() <= {part.name for part in fed.parts}
    numbers = [items, *server.heads.values(), *(v for one in received.values() for v in one.values())]
    fits = fits and all(v.dtype.kind != "f" or bool((np.abs(v) <= MOST_NUMBER).all()) for v in numbers)
    if not fits or not all(p.received_fits(received.get(p.name, {}), len(items)) for p in fed.parts):
        raise Refusal("the request does not fit its own settings: its arrays have other shapes.")
    try:
        check_cutoffs(fed.config, len(items))
        for part in fed.parts:
            part.check(len(items))
            received.setdefault(part.name, {})
    except TacitaError as error:
        raise Refusal(str(error)) from None
