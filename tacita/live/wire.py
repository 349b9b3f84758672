"""Requests and replies as bytes: a line of JSON, then safetensors. Whatever arrives is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from tacita.config import Strict, validated
from tacita.errors import TacitaError
from tacita.live.blobs import pack, unpack
from tacita.types import AnyArray, Arrays, Total

VERSION = 1
MAGIC = b"tacita/1"
MOST_HEADER = 2**24
_LENGTH = struct.Struct(">I")

Kind = Literal["train", "survey", "statistic", "validate", "close"]
MOST_PEOPLE = 10**9
MOST_REQUESTS = 1000  # in one reply; the others wait for the next
SUMS = ("train", "survey", "statistic")
"""Kinds whose reply holds a sum over people."""


class RequestHead(Strict):
    """What a server asks of a node, without the arrays."""

    kind: Kind
    run: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")
    block: int = Field(ge=0, le=100_000)
    round: int = Field(ge=0, le=10_000_000)  # rounds done in this block
    best_round: int = Field(ge=0, le=10_000_000)  # the best round of the block so far; 0: none yet
    config: dict[str, Any]  # the run's settings
    names: dict[str, str]  # every array of the model -> its sha256; what is not sent the node already has


class ReplyHead(Strict):
    """What a node answers, without the arrays."""

    kind: Kind
    run: str
    block: int
    round: int
    verdict: Literal["ok", "refused", "missing"]  # missing: send all arrays again
    said: str = Field("", max_length=500)
    clients: int = Field(0, ge=0, le=MOST_PEOPLE)
    expected: float = Field(0.0, ge=0, le=MOST_PEOPLE)
    weight: float = Field(0.0, ge=0, le=1e12)
    sums: dict[str, tuple[float, int]] = {}
    shape: list[int] = []  # of the rows where they are sent as places and values
    have: list[str] = Field([], max_length=10_000)  # digests of the arrays the node holds
    requests: list[dict[str, Any]] = Field(
        [], max_length=MOST_REQUESTS
    )  # share, unshare and forget requests that waited for a reply


@dataclass(frozen=True)
class Request:
    head: RequestHead
    arrays: Arrays = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """What is asked, whichever arrays had to travel for it and whatever items are called."""
        names = {name: sha for name, sha in sorted(self.head.names.items()) if name != "catalogue"}
        asked = self.head.model_copy(update={"names": names})
        return hashlib.sha256(asked.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    head: ReplyHead
    arrays: Arrays = field(default_factory=dict)

    def total(self) -> Total:
        """The sum in a reply."""
        rows = self.arrays["rows"] if "rows" in self.arrays else self._sparse()
        heads, extras = (
            {k.removeprefix(p): v.astype(np.float64) for k, v in self.arrays.items() if k.startswith(p)}
            for p in ("heads/", "extras/")
        )
        weight = self.arrays["row_weight"].astype(np.float64)
        return Total(rows.astype(np.float64), weight, heads, extras, self.head.weight, self.head.clients)

    def _sparse(self) -> AnyArray:
        rows = np.zeros(int(np.prod(self.head.shape)))
        rows[self.arrays["rows/at"]] = self.arrays["rows/value"]
        return rows.reshape(self.head.shape)


Head = TypeVar("Head", bound=Strict)


def encode(message: Request | Reply) -> bytes:
    head = message.head.model_dump_json().encode()
    return b"".join([MAGIC, _LENGTH.pack(len(head)), head, pack(message.arrays)])


def decode_request(body: bytes) -> Request:
    return Request(*_decode(body, RequestHead, "the server's request"))


def decode_reply(body: bytes) -> Reply:
    return Reply(*_decode(body, ReplyHead, "the node's reply"))


def _decode(body: bytes, model: type[Head], what: str) -> tuple[Head, Arrays]:
    if not body.startswith(MAGIC[:7]):
        raise TacitaError(f"{what} is not a message of tacita.")
    if not body.startswith(MAGIC):
        raise TacitaError(f"{what} speaks another version of the protocol; use the same tacita on both sides.")
    start = len(MAGIC) + _LENGTH.size
    size = _LENGTH.unpack(body[len(MAGIC) : start])[0] if len(body) >= start else MOST_HEADER + 1
    if size > MOST_HEADER or start + size > len(body):
        raise TacitaError(f"{what} is cut short or damaged.")
    try:
        values = json.loads(body[start : start + size])
    except (ValueError, RecursionError):
        raise TacitaError(f"{what} is damaged: not valid JSON.") from None
    if not isinstance(values, dict):
        raise TacitaError(f"{what} is damaged: no table.")
    for name, pair in values["sums"].items() if isinstance(values.get("sums"), dict) else ():
        values["sums"][name] = tuple(pair) if isinstance(pair, list) else pair
    arrays = unpack(body[start + size :], what)
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise TacitaError(f"{what} holds numbers that are not finite in '{name}'.")
        if array.dtype.kind not in "fiu":
            raise TacitaError(f"{what} holds '{name}' of kind {array.dtype}, which is not a number.")
    return validated(model, values, what), arrays


def sha_of(array: AnyArray) -> str:
    total = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def total_arrays(total: Total, single: bool) -> tuple[Arrays, list[int]]:
    """A sum as arrays to send: rows whole, or as places and values where that is smaller.

    `single`: in single precision, as models are; statistics stay in double, so that they can be taken back exactly.
    """
    kind = np.float32 if single else np.float64
    rows = total.rows.astype(kind)
    arrays: Arrays = {f"heads/{k}": v.astype(kind) for k, v in total.heads.items()}
    arrays |= {f"extras/{k}": v.astype(kind) for k, v in total.extras.items()}
    arrays["row_weight"] = total.row_weight.astype(kind)
    at = np.flatnonzero(rows)
    place = np.int32 if rows.size < 2**31 else np.int64
    if len(at) * (rows.itemsize + np.dtype(place).itemsize) >= rows.nbytes:
        return arrays | {"rows": rows}, []
    arrays |= {"rows/at": at.astype(place), "rows/value": rows.reshape(-1)[at]}
    return arrays, list(rows.shape)


# The catalogue travels as an array like any other


def catalogue_array(items: Sequence[tuple[str, str]]) -> AnyArray:
    text = json.dumps([list(one) for one in items], ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(text.encode(), np.uint8)


def read_catalogue(array: AnyArray) -> list[tuple[str, str]]:
    try:
        listed = json.loads(array.tobytes().decode())
        items = [(item, title) for item, title in listed]
    except (ValueError, TypeError, RecursionError):
        raise TacitaError("the server's catalogue is damaged.") from None
    if any(not isinstance(item, str) or not isinstance(title, str) for item, title in items):
        raise TacitaError("the server's catalogue is damaged: ids and titles are texts.")
    return items
