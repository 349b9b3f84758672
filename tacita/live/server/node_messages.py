"""A question as each node gets it: the arrays that it lacks, and what is for some of its users alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tacita.core.codec import digest_array
from tacita.core.files import flatten_parts
from tacita.core.types import Arrays
from tacita.live.json_object import JsonObject
from tacita.live.per_client_arrays import CHOSEN, encode_per_client
from tacita.live.server.node_query import NodeQuery
from tacita.live.wire import Catalogue, RequestHead, RequestOutcome, ServerRequest, encode_catalogue, encode_message


def collect_common_arrays(query: NodeQuery, catalogue: Catalogue) -> Arrays:
    """What all nodes get."""
    server = query.server
    arrays: Arrays = {"items": server.items}
    arrays["catalogue"] = encode_catalogue(catalogue[: len(server.items)])
    for name, head in server.heads.items():
        arrays[f"heads/{name}"] = head
    return arrays | flatten_parts(query.broadcast.common, "parts-received/")


def digest_arrays(arrays: Arrays) -> dict[str, str]:
    return {name: digest_array(array) for name, array in arrays.items()}


class NodeMessages:
    """The messages of one question."""

    def __init__(
        self,
        query: NodeQuery,
        head: RequestHead,
        arrays: Arrays,
        outcomes: Mapping[int, list[RequestOutcome]],
        held_digests: Callable[[int], set[str]],
    ) -> None:
        self._query = query
        self._head = head  # for all nodes
        self._arrays = arrays  # for all nodes
        self._outcomes = outcomes  # of requests, by node
        self._held_digests = held_digests
        self._per_node: dict[int, Arrays] = {}

    def collect_node_arrays(self, node: int) -> Arrays:
        """What only this node gets."""
        query = self._query
        if query.users_by_node is None:
            return {}
        if node not in self._per_node:
            names = query.users_by_node.get(node, np.zeros(0, np.uint64))
            arrays = encode_per_client(query.broadcast, names)
            if query.expects_answers:
                arrays = {**arrays, CHOSEN: names}
            self._per_node[node] = arrays
        return self._per_node[node]

    def make_head(self, node: int) -> RequestHead:
        """The head of the message to a node."""
        head = self._head
        own_digests = digest_arrays(self.collect_node_arrays(node))
        changes: JsonObject = {}
        if own_digests:
            changes["names"] = {**head.names, **own_digests}
        if node in self._outcomes:
            changes["told"] = self._outcomes[node]
        return head.model_copy(update=changes) if changes else head

    def encode_bodies(self, nodes: set[int]) -> dict[int, bytes]:
        """What each node gets: all it does not have. Nodes that need the same share the bytes."""
        shared_bodies: dict[frozenset[str], bytes] = {}
        bodies = {}
        for node in sorted(nodes):
            head = self.make_head(node)
            own_arrays = self.collect_node_arrays(node)
            digests = self._held_digests(node)
            missing = _list_missing_arrays(head, digests)
            if own_arrays or head.told:
                bodies[node] = _encode_request(head, self._arrays | own_arrays, missing)
                continue
            if missing not in shared_bodies:
                shared_bodies[missing] = _encode_request(head, self._arrays, missing)
            bodies[node] = shared_bodies[missing]
        return bodies


def _list_missing_arrays(head: RequestHead, digests: set[str]) -> frozenset[str]:
    """Arrays of a question that a node does not hold."""
    missing = [name for name, sha in head.names.items() if sha not in digests]
    return frozenset(missing)


def _encode_request(head: RequestHead, arrays: Arrays, names: frozenset[str]) -> bytes:
    selected = {name: arrays[name] for name in names}
    return encode_message(ServerRequest(head, selected))
