"""Single people on the wire: their names, what is written to each of them alone, and what each of them alone sends.

A server that has to know who is who gets names that a node makes up for one run; who is behind a name only the node
knows. A node speaks of single people only where its owner allowed that (`insecure_single_user_uploads`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tacita.core.draws import Draws, hash_rows
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Broadcast, Keys, Ragged
from tacita.messages import DenseArrays, Form, PerClientField, SparseRows, Spec, Total
from tacita.round.broadcast import PerClientLists

ROSTER = "roster"  # the question who takes part, where the server has to know
CHOSEN, NAMES, TAKES_PART = "chosen", "names", "part"
OWN_PREFIX, RECIPIENTS = "own/", "own/to"


def derive_run_secret(secret: str, run: str) -> str:
    """Each run has draws of its own, so that those of two runs do not cancel; an empty secret draws as the lab does."""
    return hashlib.sha256(f"{secret} {run}".encode()).hexdigest() if secret else ""


def derive_pseudonyms(draws: Draws, keys: Keys, purpose: str = "name") -> Keys:
    """What people are called in one run; an empty secret calls them as the lab does.

    Ids are few and guessable, so names are digests under a key of 32 bytes: a mere mixing of an id, which can be turned
    back, gives the key away with the first name whose person somebody guesses.
    """
    return hash_rows(draws.secret_key(purpose), keys) if draws.secret else keys


def encode_per_client(down: Broadcast, names: Keys) -> Arrays:
    """What is for these people alone, as arrays; nothing where nobody writes to single people."""
    lists = down.per_client(names)
    if not lists:
        return {}
    arrays: Arrays = {RECIPIENTS: names}
    for part, one in lists.items():
        arrays |= {f"{OWN_PREFIX}{part}/ptr": one.ptr, f"{OWN_PREFIX}{part}/ids": one.ids}
        arrays |= {f"{OWN_PREFIX}{part}/column.{k}": v for k, v in one.values.items()}
    return arrays


def decode_per_client(arrays: Arrays, n_items: int) -> PerClientLists:
    """What a server wrote to single people, found to be what it seems: compiled loops trust places and borders."""
    to = arrays.get(RECIPIENTS, np.zeros(0, np.uint64))
    if to.dtype != np.uint64 or to.ndim != 1 or len(np.unique(to)) != len(to):
        raise TacitaError("the request names people in a way that this node does not know.")
    lists = {}
    for part, held in nest_parts({k: v for k, v in arrays.items() if k != RECIPIENTS}, OWN_PREFIX).items():
        ptr, ids = held.pop("ptr", np.zeros(0)), held.pop("ids", np.zeros(0))
        columns = {name.removeprefix("column."): v for name, v in held.items()}
        whole = ptr.dtype == np.int64 and ids.dtype == np.int32 and ptr.shape == (len(to) + 1,) and ids.ndim == 1
        whole = whole and ptr[0] == 0 and ptr[-1] == len(ids) and bool((np.diff(ptr) >= 0).all())
        whole = whole and all(v.ndim >= 1 and len(v) == len(ids) for v in columns.values())
        if not whole or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n_items):
            raise TacitaError("the lists that the request writes to single people do not fit each other.")
        lists[part] = Ragged(ptr, ids, columns)
    return PerClientLists(to, lists)


def resolve_pseudonyms(names: AnyArray, known: Keys, keys: Keys) -> Keys:
    """The keys of people by their names; refuses names that nobody here has."""
    order = np.argsort(known)
    if names.dtype != np.uint64 or names.ndim != 1 or not np.isin(names, known).all():
        raise TacitaError("the request names people who are not on this node.")
    return keys[order[np.searchsorted(known, names, sorter=order)]]


# What single people send


def encode_client_fields(total: Total, names: dict[int, int]) -> Arrays:
    """The fields that are seen each by itself; `names`: key -> what its person is called."""
    arrays: Arrays = {}
    for name, one in total.each.items():
        called = np.array([names[int(key)] for key in one.sender], np.uint64)
        arrays[f"{name}/sender"] = called
        if isinstance(one.value, SparseRows):
            arrays |= {f"{name}/client": one.value.client, f"{name}/item": one.value.item}
            arrays[f"{name}/each"] = one.value.value.astype(np.float32)
        elif isinstance(one.value, DenseArrays):
            arrays[f"{name}/each"] = one.value.value.astype(np.float32)
    return arrays


def decode_client_fields(arrays: Arrays, fields: Sequence[Spec]) -> dict[str, PerClientField]:
    """Single fields of a reply that was found to fit."""
    out = {}
    for one in fields:
        if one.seen == "each" and f"{one.name}/sender" in arrays:
            value: Form = DenseArrays(arrays[f"{one.name}/each"])
            if f"{one.name}/item" in arrays:
                client, item = arrays[f"{one.name}/client"], arrays[f"{one.name}/item"]
                value = SparseRows(client, item, arrays[f"{one.name}/each"])
            out[one.name] = PerClientField(arrays[f"{one.name}/sender"], value)
    return out


def client_array_names(spec: Spec) -> set[str]:
    """The arrays that a single field may travel as."""
    return {f"{spec.name}/{kind}" for kind in ("sender", "client", "item", "each")}


def is_valid_client_field(spec: Spec, arrays: Arrays, clients: int) -> bool:
    """Whether a single field is what so many people can have sent."""
    if clients == 0 and f"{spec.name}/sender" not in arrays:
        return True
    sender, value = arrays.get(f"{spec.name}/sender"), arrays.get(f"{spec.name}/each")
    if sender is None or value is None or sender.dtype != np.uint64 or sender.ndim != 1 or value.dtype != np.float32:
        return False
    if len(sender) != clients or len(np.unique(sender)) != clients:
        return False
    if not ((value >= spec.least) & (np.abs(value) <= spec.most * 1.001)).all():
        return False
    if f"{spec.name}/item" not in arrays:
        return value.shape == (clients, *spec.shape) and f"{spec.name}/client" not in arrays
    client, item = arrays.get(f"{spec.name}/client", np.zeros(0)), arrays[f"{spec.name}/item"]
    if client.dtype != np.int32 or item.dtype != np.int32 or not (client.shape == item.shape == value.shape[:1]):
        return False
    if value.shape[1:] != spec.shape[1:] or len(item) > clients * spec.shape[0]:
        return False
    if len(item) == 0:
        return True
    inside = client.min() >= 0 and client.max() < clients and item.min() >= 0 and item.max() < spec.shape[0]
    once = np.diff(client.astype(np.int64) * spec.shape[0] + item) > 0  # nobody speaks of an item twice
    return bool(inside and once.all())
