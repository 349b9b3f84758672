"""Single people on the wire: their names, what the server writes to each of them, and what each of them sends.

A server that has to know who is who gets names that a node makes up for one run; only the node knows who is behind a
name. A node sends what is about single people only where its owner allowed that (`insecure_single_user_uploads`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tacita.core.draws import Draws, hash_rows
from tacita.core.errors import TacitaError
from tacita.core.files import nest_parts
from tacita.core.ragged import are_borders
from tacita.core.types import AnyArray, Arrays, Broadcast, Keys, Ragged
from tacita.messages import DenseArrays, Form, PerClientField, SparseRows, Spec, Total
from tacita.round.broadcast import PerClientLists

ROSTER = "roster"  # the question who takes part, where the server has to know
CHOSEN = "chosen"
NAMES = "names"
TAKES_PART = "part"
OWN_PREFIX = "own/"
RECIPIENTS = "own/to"


# Names


def derive_run_secret(secret: str, run: str) -> str:
    """Each run has draws of its own, so that those of two runs do not cancel; an empty secret draws as the lab does."""
    if not secret:
        return ""
    text = f"{secret} {run}"
    return hashlib.sha256(text.encode()).hexdigest()


def derive_pseudonyms(draws: Draws, keys: Keys, purpose: str = "name") -> Keys:
    """The names of people in one run; an empty secret names them as the lab does.

    Ids are few and guessable, so names are digests under a key of 32 bytes. A mere mixing of an id can be inverted, and
    would give the key away with the first name whose person somebody guesses.
    """
    if not draws.secret:
        return keys
    return hash_rows(draws.secret_key(purpose), keys)


def resolve_pseudonyms(names: AnyArray, known: Keys, keys: Keys) -> Keys:
    """The keys of people by their names; refuses names that nobody here has."""
    if not _is_name_list(names) or not np.isin(names, known).all():
        raise TacitaError("the request names people who are not on this node.")
    order = np.argsort(known)
    place = np.searchsorted(known, names, sorter=order)
    return keys[order[place]]


def _is_name_list(array: AnyArray) -> bool:
    return array.dtype == np.uint64 and array.ndim == 1


# What the server writes to single people


def encode_per_client(broadcast: Broadcast, names: Keys) -> Arrays:
    """What is for these people alone, as arrays; nothing where nobody writes to single people."""
    lists_by_part = broadcast.per_client(names)
    if not lists_by_part:
        return {}
    arrays: Arrays = {RECIPIENTS: names}
    for part, lists in lists_by_part.items():
        prefix = f"{OWN_PREFIX}{part}"
        arrays[f"{prefix}/ptr"] = lists.ptr
        arrays[f"{prefix}/ids"] = lists.ids
        for column, values in lists.values.items():
            arrays[f"{prefix}/column.{column}"] = values
    return arrays


def decode_per_client(arrays: Arrays, n_items: int) -> PerClientLists:
    """What a server wrote to single people; refuses wrong places and borders, which compiled loops trust."""
    recipients = arrays.get(RECIPIENTS, np.zeros(0, np.uint64))
    distinct = np.unique(recipients)
    if not _is_name_list(recipients) or len(distinct) != len(recipients):
        raise TacitaError("the request names people in a way that this node does not know.")
    part_arrays = dict(arrays)
    part_arrays.pop(RECIPIENTS, None)
    lists = {}
    for part, columns in nest_parts(part_arrays, OWN_PREFIX).items():
        lists[part] = _decode_lists(columns, len(recipients), n_items)
    return PerClientLists(recipients, lists)


def _decode_lists(arrays: Arrays, n_recipients: int, n_items: int) -> Ragged:
    """One part's lists, a row for each recipient."""
    ptr = arrays.pop("ptr", np.zeros(0))
    ids = arrays.pop("ids", np.zeros(0))
    columns = {name.removeprefix("column."): values for name, values in arrays.items()}
    is_valid = _are_valid_borders(ptr, ids, n_recipients)
    is_valid = is_valid and _have_full_columns(columns, len(ids))
    is_valid = is_valid and _are_within_range(ids, n_items)
    if not is_valid:
        raise TacitaError("the lists that the request writes to single people do not fit each other.")
    return Ragged(ptr, ids, columns)


def _have_full_columns(columns: Arrays, n_entries: int) -> bool:
    """Whether each column has a value for each entry."""
    return all(values.shape[:1] == (n_entries,) for values in columns.values())


def _are_valid_borders(ptr: AnyArray, ids: AnyArray, n_recipients: int) -> bool:
    """Whether borders cut the entries into one list for each recipient."""
    if ptr.dtype != np.int64:
        return False
    if ids.dtype != np.int32 or ids.ndim != 1:
        return False
    if ptr.shape != (n_recipients + 1,):
        return False
    return are_borders(ptr, len(ids))


def _are_within_range(ids: AnyArray, n: int) -> bool:
    """Whether all numbers are from 0 to below n."""
    if len(ids) == 0:
        return True
    smallest = int(ids.min())
    largest = int(ids.max())
    return smallest >= 0 and largest < n


# What single people send


def encode_client_fields(total: Total, names: dict[int, int]) -> Arrays:
    """The fields that the server sees by person; `names`: key -> the name of its person."""
    arrays: Arrays = {}
    for name, client_field in total.each.items():
        content = client_field.value
        senders = [names[key] for key in client_field.sender.tolist()]
        arrays[f"{name}/sender"] = np.array(senders, np.uint64)
        if isinstance(content, SparseRows):
            arrays[f"{name}/client"] = content.client
            arrays[f"{name}/item"] = content.item
            arrays[f"{name}/each"] = content.value.astype(np.float32)
        elif isinstance(content, DenseArrays):
            arrays[f"{name}/each"] = content.value.astype(np.float32)
    return arrays


def decode_client_fields(arrays: Arrays, fields: Sequence[Spec]) -> dict[str, PerClientField]:
    """Single fields of a reply that was checked before."""
    client_fields = {}
    for spec in fields:
        name = spec.name
        if spec.seen != "each" or f"{name}/sender" not in arrays:
            continue
        values = arrays[f"{name}/each"]
        content: Form = DenseArrays(values)
        if f"{name}/item" in arrays:
            client = arrays[f"{name}/client"]
            item = arrays[f"{name}/item"]
            content = SparseRows(client, item, values)
        client_fields[name] = PerClientField(arrays[f"{name}/sender"], content)
    return client_fields


def list_client_array_names(spec: Spec) -> set[str]:
    """The arrays that a single field may travel as."""
    return {f"{spec.name}/{kind}" for kind in ("sender", "client", "item", "each")}


def is_valid_client_field(spec: Spec, arrays: Arrays, clients: int) -> bool:
    """Whether a single field is what so many people can have sent."""
    name = spec.name
    sender = arrays.get(f"{name}/sender")
    value = arrays.get(f"{name}/each")
    if clients == 0 and sender is None:
        return True
    if sender is None or value is None:
        return False
    if not _are_distinct_senders(sender, clients) or not _is_within_bounds(spec, value):
        return False
    client = arrays.get(f"{name}/client")
    item = arrays.get(f"{name}/item")
    if item is None:
        dense_shape = (clients, *spec.shape)
        return value.shape == dense_shape and client is None
    if client is None:
        client = np.zeros(0)
    return _are_valid_rows(spec, client, item, value, clients)


def _are_distinct_senders(sender: AnyArray, clients: int) -> bool:
    """Whether these are the names of so many people, each once."""
    if not _is_name_list(sender):
        return False
    distinct = np.unique(sender)
    return len(sender) == clients and len(distinct) == clients


def _is_within_bounds(spec: Spec, value: AnyArray) -> bool:
    if value.dtype != np.float32:
        return False
    is_above = value >= spec.least
    is_below = np.abs(value) <= spec.most * 1.001
    return bool((is_above & is_below).all())


def _are_valid_rows(spec: Spec, client: AnyArray, item: AnyArray, value: AnyArray, clients: int) -> bool:
    """Whether rows of items are inside the table, in order, and no person sends a row twice."""
    n_items = spec.shape[0]
    shape = value.shape[:1]
    for array in (client, item):
        if array.dtype != np.int32 or array.shape != shape:
            return False
    if value.shape[1:] != spec.shape[1:]:
        return False
    if len(item) > clients * n_items:
        return False
    if not _are_within_range(client, clients) or not _are_within_range(item, n_items):
        return False
    place = client.astype(np.int64) * n_items + item
    steps = np.diff(place)
    return bool((steps > 0).all())
