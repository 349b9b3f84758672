"""On which node users live, where the server has to know: by the names that nodes give them for one run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tacita.core.types import Arrays, Keys


class UserLocations:
    """Nodes by user: of those who take part, and of those who asked for something."""

    def __init__(self) -> None:
        self.participants: dict[int, int] = {}  # name of a user -> node
        self._requesters: dict[int, int] = {}

    def find_node(self, name: int) -> int | None:
        """The node that a user is known to live on."""
        if name in self.participants:
            return self.participants[name]
        return self._requesters.get(name)

    def are_requesters(self, names: Keys) -> bool:
        """Whether all of these asked for something."""
        return all(int(name) in self._requesters for name in names)

    def add_requesters(self, node_by_name: Mapping[int, int]) -> None:
        """Who asked for something, and with an answer of which node."""
        self._requesters |= node_by_name

    def drop_requesters(self, waiting: Keys) -> None:
        """Requests are carried out; only who waits for others has to be known by name."""
        waiting_names = set(waiting.tolist())
        done_names = self._requesters.keys() - waiting_names
        for name in done_names:
            del self._requesters[name]

    def split_by_node(self, names: Keys) -> dict[int, Keys]:
        """Some users by the node they live on, without unknown ones."""
        node_by_name = {**self._requesters, **self.participants}
        names_by_node: dict[int, list[int]] = {}
        for name in names.tolist():
            if name in node_by_name:
                node = node_by_name[name]
                names_by_node.setdefault(node, []).append(name)
        users_by_node = {}
        for node, members in names_by_node.items():
            users_by_node[node] = np.array(members, np.uint64)
        return users_by_node

    def to_arrays(self) -> Arrays:
        """All that is known, as arrays: a server that goes on has to know."""
        participants = _encode_nodes(self.participants, "")
        requesters = _encode_nodes(self._requesters, "/asked")
        return participants | requesters

    def restore_from_arrays(self, arrays: Arrays) -> None:
        self.participants = _decode_nodes(arrays, "")
        self._requesters = _decode_nodes(arrays, "/asked")


def _encode_nodes(node_by_name: Mapping[int, int], ending: str) -> Arrays:
    if not node_by_name:
        return {}
    arrays: Arrays = {}
    names = list(node_by_name.keys())
    nodes = list(node_by_name.values())
    arrays[f"names{ending}"] = np.array(names, np.uint64)
    arrays[f"nodes{ending}"] = np.array(nodes, np.uint64)
    return arrays


def _decode_nodes(arrays: Arrays, ending: str) -> dict[int, int]:
    nobody = np.zeros(0, np.uint64)
    names = arrays.get(f"names{ending}", nobody)
    nodes = arrays.get(f"nodes{ending}", nobody)
    pairs = zip(names.tolist(), nodes.tolist(), strict=True)
    return dict(pairs)
