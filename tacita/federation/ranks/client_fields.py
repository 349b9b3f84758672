"""Sums and fields of single clients between ranks: as arrays, and put together in the order of all clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.sparse import Matrix, SparseSum
from tacita.core.types import AnyArray, Arrays, Doubles, Longs
from tacita.federation.ranks.rank_messages import RankReply, select_below
from tacita.messages import DenseArrays, PerClientField, SparseRows, Total


def encode_sparse_sums(total: Total) -> tuple[tuple[Doubles, ...], Arrays]:
    """The dense sums of a total, by name, and the others as arrays."""
    sums = []
    arrays: Arrays = {}
    for name in sorted(total.sums):
        value = total.sums[name]
        if not isinstance(value, SparseSum):
            sums.append(value)
            continue
        matrix = value.matrix()
        arrays[f"sparse/{name}/ptr"] = matrix.indptr
        arrays[f"sparse/{name}/column"] = matrix.indices
        arrays[f"sparse/{name}/value"] = matrix.data
    return tuple(sums), arrays


def join_sums(empty: Total, replies: Sequence[RankReply]) -> dict[str, Doubles]:
    """The sums of all ranks by name; the first reply has the dense ones, added up. `empty`: a total of these fields."""
    dense = iter(replies[0].sums)
    sums: dict[str, Doubles] = {}
    for name in sorted(empty.sums):
        joined: Any = empty.sums[name]
        if isinstance(joined, SparseSum):
            for reply in replies:
                joined = joined + _decode_matrix(reply.arrays, name, joined.shape)
        else:
            joined = next(dense)
        sums[name] = joined
    return {name: sums[name] for name in empty.sums}


def _decode_matrix(arrays: Arrays, name: str, shape: tuple[int, ...]) -> Matrix:
    columns = select_below(arrays, f"sparse/{name}/")
    return Matrix((columns["value"], columns["column"], columns["ptr"]), shape=shape)


def encode_client_fields(each: dict[str, PerClientField]) -> Arrays:
    """Fields that are seen each by itself."""
    arrays: Arrays = {}
    for name, field in each.items():
        prefix = f"each/{name}/"
        arrays[f"{prefix}sender"] = field.sender
        value = field.value
        if isinstance(value, DenseArrays):
            arrays[f"{prefix}value"] = value.value
        elif isinstance(value, SparseRows):
            rows = value.apply_factor()
            arrays |= {f"{prefix}client": rows.client, f"{prefix}item": rows.item, f"{prefix}value": rows.value}
        else:
            raise TacitaError(f"'{name}' is only ever summed; it cannot be seen each by itself.")
    return arrays


def join_client_fields(replies: Sequence[RankReply]) -> dict[str, PerClientField]:
    """The fields of single clients of all ranks, in the order of all clients."""
    names: dict[str, None] = {}
    for reply in replies:
        names.update(dict.fromkeys(reply.fields["each"]))
    return {name: _join_field(name, replies) for name in names}


def _join_field(name: str, replies: Sequence[RankReply]) -> PerClientField:
    columns = []
    places = []
    for reply in replies:
        if name in reply.fields["each"]:
            columns.append(select_below(reply.arrays, f"each/{name}/"))
            places.append(reply.arrays["senders"])
    order = np.argsort(np.concatenate(places), kind="stable")
    sender = np.concatenate([column["sender"] for column in columns])[order]
    value = np.concatenate([column["value"] for column in columns])
    if "client" not in columns[0]:
        return PerClientField(sender, DenseArrays(value[order]))
    item = np.concatenate([column["item"] for column in columns])
    client = _number_rows(columns, order)
    by_client = np.argsort(client, kind="stable")
    return PerClientField(sender, SparseRows(client[by_client], item[by_client], value[by_client]))


def _number_rows(columns: Sequence[Arrays], order: Longs) -> AnyArray:
    """The client of each row in the order of all clients."""
    new_number = np.empty(len(order), np.int32)
    new_number[order] = np.arange(len(order), dtype=np.int32)
    clients = []
    n_before = 0
    for column in columns:
        clients.append(new_number[column["client"] + n_before])
        n_before += len(column["sender"])
    return np.concatenate(clients)


def join_notes(replies: Sequence[RankReply]) -> Arrays:
    """The notes of single clients, in the order of all clients."""
    notes: dict[str, list[AnyArray]] = {}
    places: dict[str, list[AnyArray]] = {}
    for reply in replies:
        for name, values in select_below(reply.arrays, "notes/").items():
            notes.setdefault(name, []).append(values)
            places.setdefault(name, []).append(reply.arrays["clients"])
    joined: Arrays = {}
    for name, pieces in notes.items():
        order = np.argsort(np.concatenate(places[name]), kind="stable")
        joined[name] = np.concatenate(pieces)[order]
    return joined
