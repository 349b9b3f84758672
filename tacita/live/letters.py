"""Single people on the wire: their names, what is written to each of them alone, and what each of them alone sends.

A server that has to know who is who gets names that a node makes up for one run; who is behind a name only the node
knows. A node speaks of single people only where its owner allowed that (`insecure_single_user_uploads`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tacita.core.draws import Draws, sealed_numbers
from tacita.core.errors import TacitaError
from tacita.core.files import nested
from tacita.core.types import AnyArray, Arrays, Down, Keys, Ragged
from tacita.fields import Dense, Each, Form, Rows, Spec, Total
from tacita.round.plan import Letters

ROSTER = "roster"  # the question who takes part, where the server has to know
CHOSEN, NAMES, PART = "chosen", "names", "part"
OWN, TO = "own/", "own/to"


def secret_of(secret: str, run: str) -> str:
    """Each run has draws of its own, so that those of two runs do not cancel; an empty secret draws as the lab does."""
    return hashlib.sha256(f"{secret} {run}".encode()).hexdigest() if secret else ""


def names_of(draws: Draws, keys: Keys, purpose: str = "name") -> Keys:
    """What people are called in one run; an empty secret calls them as the lab does.

    Ids are few and guessable, so names are digests under a key of 32 bytes: a mere mixing of an id, which can be turned
    back, gives the key away with the first name whose person somebody guesses.
    """
    return sealed_numbers(draws.sealed(purpose), keys) if draws.secret else keys


def written(down: Down, names: Keys) -> Arrays:
    """What is for these people alone, as arrays; nothing where nobody writes to single people."""
    lists = down.own(names)
    if not lists:
        return {}
    arrays: Arrays = {TO: names}
    for part, one in lists.items():
        arrays |= {f"{OWN}{part}/ptr": one.ptr, f"{OWN}{part}/ids": one.ids}
        arrays |= {f"{OWN}{part}/column.{k}": v for k, v in one.values.items()}
    return arrays


def read_written(arrays: Arrays, n_items: int) -> Letters:
    """What a server wrote to single people, found to be what it seems: compiled loops trust places and borders."""
    to = arrays.get(TO, np.zeros(0, np.uint64))
    if to.dtype != np.uint64 or to.ndim != 1 or len(np.unique(to)) != len(to):
        raise TacitaError("the request names people in a way that this node does not know.")
    lists = {}
    for part, held in nested({k: v for k, v in arrays.items() if k != TO}, OWN).items():
        ptr, ids = held.pop("ptr", np.zeros(0)), held.pop("ids", np.zeros(0))
        columns = {name.removeprefix("column."): v for name, v in held.items()}
        whole = ptr.dtype == np.int64 and ids.dtype == np.int32 and ptr.shape == (len(to) + 1,) and ids.ndim == 1
        whole = whole and ptr[0] == 0 and ptr[-1] == len(ids) and bool((np.diff(ptr) >= 0).all())
        whole = whole and all(v.ndim >= 1 and len(v) == len(ids) for v in columns.values())
        if not whole or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n_items):
            raise TacitaError("the lists that the request writes to single people do not fit each other.")
        lists[part] = Ragged(ptr, ids, columns)
    return Letters(to, lists)


def people_named(names: AnyArray, known: Keys, keys: Keys) -> Keys:
    """The keys of people by their names; refuses names that nobody here has."""
    order = np.argsort(known)
    if names.dtype != np.uint64 or names.ndim != 1 or not np.isin(names, known).all():
        raise TacitaError("the request names people who are not on this node.")
    return keys[order[np.searchsorted(known, names, sorter=order)]]


# What single people send


def each_arrays(total: Total, names: dict[int, int]) -> Arrays:
    """The fields that are seen each by itself; `names`: key -> what its person is called."""
    arrays: Arrays = {}
    for name, one in total.each.items():
        called = np.array([names[int(key)] for key in one.sender], np.uint64)
        arrays[f"{name}/sender"] = called
        if isinstance(one.value, Rows):
            arrays |= {f"{name}/client": one.value.client, f"{name}/item": one.value.item}
            arrays[f"{name}/each"] = one.value.value.astype(np.float32)
        elif isinstance(one.value, Dense):
            arrays[f"{name}/each"] = one.value.value.astype(np.float32)
    return arrays


def read_each(arrays: Arrays, fields: Sequence[Spec]) -> dict[str, Each]:
    """Single fields of a reply that was found to fit."""
    out = {}
    for one in fields:
        if one.seen == "each" and f"{one.name}/sender" in arrays:
            value: Form = Dense(arrays[f"{one.name}/each"])
            if f"{one.name}/item" in arrays:
                client, item = arrays[f"{one.name}/client"], arrays[f"{one.name}/item"]
                value = Rows(client, item, arrays[f"{one.name}/each"])
            out[one.name] = Each(arrays[f"{one.name}/sender"], value)
    return out


def each_names(one: Spec) -> set[str]:
    """The arrays that a single field may travel as."""
    return {f"{one.name}/{kind}" for kind in ("sender", "client", "item", "each")}


def check_each(one: Spec, arrays: Arrays, clients: int) -> bool:
    """Whether a single field is what so many people can have sent."""
    if clients == 0 and f"{one.name}/sender" not in arrays:
        return True
    sender, value = arrays.get(f"{one.name}/sender"), arrays.get(f"{one.name}/each")
    if sender is None or value is None or sender.dtype != np.uint64 or sender.ndim != 1 or value.dtype != np.float32:
        return False
    if len(sender) != clients or len(np.unique(sender)) != clients:
        return False
    if not ((value >= one.least) & (np.abs(value) <= one.most * 1.001)).all():
        return False
    if f"{one.name}/item" not in arrays:
        return value.shape == (clients, *one.shape) and f"{one.name}/client" not in arrays
    client, item = arrays.get(f"{one.name}/client", np.zeros(0)), arrays[f"{one.name}/item"]
    if client.dtype != np.int32 or item.dtype != np.int32 or not (client.shape == item.shape == value.shape[:1]):
        return False
    if value.shape[1:] != one.shape[1:] or len(item) > clients * one.shape[0]:
        return False
    if len(item) == 0:
        return True
    inside = client.min() >= 0 and client.max() < clients and item.min() >= 0 and item.max() < one.shape[0]
    once = np.diff(client.astype(np.int64) * one.shape[0] + item) > 0  # nobody speaks of an item twice
    return bool(inside and once.all())
