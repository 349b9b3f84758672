"""What travels to and from single people: nothing that a hostile server or node made up is computed with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tacita.core.draws import Draws, derive_keys, hash_rows
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Broadcast, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.live.per_client_arrays import (
    decode_client_fields,
    decode_per_client,
    derive_pseudonyms,
    encode_client_fields,
    encode_per_client,
    resolve_pseudonyms,
)
from tacita.live.server.bounds import ExpectedSum, check_total
from tacita.live.wire import Reply, ReplyHead
from tacita.messages import DenseArrays, PerClientField, SparseRows, Spec, Total

SCORES = Spec("scores", (6,), seen="each", most=1.0, least=0.0)
VECTOR = Spec("vector", (2,), seen="each", most=5.0)
NAMES = np.array([11, 7, 2**63 + 5], np.uint64)
LISTS = Ragged(
    np.array([0, 2, 2, 5]), np.array([1, 4, 0, 2, 5], np.int32), {"score": np.linspace(0, 1, 5).astype(np.float32)}
)


def test_per_client_lists_arrive_unchanged() -> None:
    arrays = encode_per_client(Broadcast(per_client=lambda keys: {"part": LISTS}), NAMES)
    read = decode_per_client(arrays, 6)
    assert read.clients.tolist() == NAMES.tolist()
    part = read.select_lists(NAMES[[2, 0]])["part"]
    assert [part.row(r).tolist() for r in range(2)] == [[0, 2, 5], [1, 4]]
    assert part.values["score"].dtype == np.float32
    assert encode_per_client(Broadcast(), NAMES) == {}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("own/part/ids", np.array([1, 4, 0, 2, 6], np.int32)),  # no such item
        ("own/part/ids", np.array([1, 4, -1, 2, 5], np.int32)),
        ("own/part/ids", np.arange(5, dtype=np.int64)),
        ("own/part/ptr", np.array([0, 5, 2, 5])),
        ("own/part/ptr", np.array([0, 2, 2, 4])),
        ("own/part/ptr", np.array([0, 2, 5])),
        ("own/part/ptr", np.array([0, 2**63 - 1, 2, 5])),
        ("own/part/column.score", np.zeros(4, np.float32)),
        ("own/part/column.score", np.float32(0.5)),
        ("own/to", np.array([11, 11, 7], np.uint64)),  # one person twice
        ("own/to", np.array([11, 7, 5])),
        ("own/to", NAMES[:2]),
    ],
)
def test_lists_that_do_not_fit_are_refused(name: str, wrong: Any) -> None:
    arrays = {**encode_per_client(Broadcast(per_client=lambda keys: {"part": LISTS}), NAMES), name: np.asarray(wrong)}
    with pytest.raises(TacitaError):
        decode_per_client(arrays, 6)


def test_node_resolves_only_its_own_client_keys() -> None:
    keys = derive_keys(["a", "b", "c"])
    names = derive_pseudonyms(Draws(1, "secret"), keys)
    assert resolve_pseudonyms(names[[2, 0]], names, keys).tolist() == keys[[2, 0]].tolist()
    for wrong in (keys, names.astype(np.int64), np.append(names, np.uint64(1)), names[None]):
        with pytest.raises(TacitaError, match="not on this node"):
            resolve_pseudonyms(wrong, names, keys)
    assert not set(names.tolist()) & set(derive_pseudonyms(Draws(1, "another"), keys).tolist())
    assert derive_pseudonyms(Draws(1), keys).tolist() == keys.tolist()  # the lab's own


def mixed(x: Any) -> Any:
    """SplitMix64, which can be turned back."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def turned_back(x: int) -> int:
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        whole = x
        for _ in range(64 // shift + 1):
            whole = x ^ (whole >> shift)
        x = whole * pow(factor, -1, 2**64) % 2**64
    return x


def keys_that_fit(names: Any, listed: list[str]) -> list[int]:
    """Keys of 64 bits under which two names are mixings of two ids of a list: a name and a guess give the key."""
    inner = np.sort(mixed(derive_keys(listed) + np.uint64(0x9E3779B97F4A7C15)))
    first, second = (np.uint64(turned_back(int(name))) for name in names[:2])
    keys = first ^ inner
    return [int(key) for key in keys[np.isin(second ^ keys, inner)]]


def test_client_keys_do_not_reveal_ids() -> None:
    """Control: of names that are mere mixings, the same reader finds the key, and with it everybody."""
    listed = [f"u{n}" for n in range(2000)]
    people = derive_keys(listed[100:105])
    draws = Draws(1, "secret")
    key = draws.private("name")
    assert int(key) in keys_that_fit(hash_owners(key, people), listed)  # and one that swaps the two
    for purpose in ("name", "requester"):
        names = derive_pseudonyms(draws, people, purpose)
        assert names.dtype == np.uint64
        assert len(set(names.tolist())) == len(people)
        assert keys_that_fit(names, listed) == []


def a_total() -> Total:
    sparse_rows = SparseRows(
        np.array([0, 0, 2], np.int32), np.array([1, 4, 0], np.int32), np.array([0.5, 1.0, 0.0], np.float32)
    )
    each = {
        "scores": PerClientField(NAMES, sparse_rows),
        "vector": PerClientField(NAMES, DenseArrays(np.ones((3, 2), np.float32))),
    }
    return Total({}, 3.0, 3, each)


def a_reply(**changed: Any) -> Reply:
    arrays: Arrays = {**encode_client_fields(a_total(), {int(n): int(n) for n in NAMES}), **changed}
    head = ReplyHead(kind="k", run="r", block=0, round=0, verdict="ok", clients=3, expected=3.0, weight=3.0)
    return Reply(head, {k: v for k, v in arrays.items() if v is not None})


ASKED = ExpectedSum((SCORES, VECTOR))


def test_per_client_uploads_arrive_unchanged() -> None:
    reply = a_reply()
    check_total(reply, ASKED)
    client_fields = decode_client_fields(reply.arrays, ASKED.fields)
    assert client_fields["scores"].sender.tolist() == NAMES.tolist()
    value = client_fields["scores"].value
    assert isinstance(value, SparseRows)
    assert value.item.tolist() == [1, 4, 0]
    assert isinstance(client_fields["vector"].value, DenseArrays)


@pytest.mark.parametrize(
    "changed",
    [
        {"scores/item": np.array([1, 4, 6], np.int32)},
        {"scores/item": np.array([1, 4], np.int32)},
        {"scores/item": None},
        {"scores/client": np.array([0, 0, 3], np.int32)},
        {"scores/client": np.array([2, 0, 0], np.int32)},
        {"scores/client": np.array([-1, 0, 2], np.int32)},
        {"scores/item": np.array([4, 4, 0], np.int32)},  # one item twice
        {"scores/each": np.array([0.5, 1.1, 0.0], np.float32)},
        {"scores/each": np.array([0.5, -0.1, 0.0], np.float32)},
        {"scores/each": np.array([0.5, 1.0, 0.0])},
        {"scores/sender": NAMES[:2]},
        {"scores/sender": np.array([7, 7, 11], np.uint64)},
        {"scores/sender": None},
        {"vector/each": np.ones((3, 3), np.float32)},
        {"vector/each": np.full((3, 2), 9.0, np.float32)},
        {"vector/client": np.zeros(3, np.int32)},
        {"more": np.zeros(1, np.float32)},
    ],
    ids=str,
)
def test_impossible_per_client_uploads_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TacitaError):
        check_total(a_reply(**changed), ASKED)


@pytest.mark.parametrize(
    ("clients", "expected", "fits"), [(3, 3.0, True), (0, 3.0, True), (3, 90.0, False), (90, 3.0, False)]
)
def test_sampled_participation_matches_its_rate(clients: int, expected: float, fits: bool) -> None:
    head = ReplyHead(
        kind="k", run="r", block=0, round=0, verdict="ok", clients=clients, expected=expected, weight=float(clients)
    )
    request = replace(ExpectedSum(()), is_sampled=True)
    if fits:
        check_total(Reply(head), request)
    else:
        with pytest.raises(TacitaError, match="expected"):
            check_total(Reply(head), request)


def test_sealed_draws_depend_on_key_and_every_column() -> None:
    entry, other = np.array([1, 2, 2], np.uint64), np.array([2, 1, 2], np.uint64)
    result = hash_rows(b"k" * 32, entry, other)
    assert len(set(result.tolist())) == 3
    assert hash_rows(b"k" * 32, entry[1:], other[1:]).tolist() == result[1:].tolist()
    assert not set(result.tolist()) & set(hash_rows(b"l" * 32, entry, other).tolist())
    assert hash_rows(b"k" * 32, entry[:0]).shape == (0,)
