"""Requests and replies as bytes: a line of JSON, then safetensors. Whatever arrives is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, Field

from tacita.core.codec import pack, unpack
from tacita.core.config import StrictModel, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, RoundReplay
from tacita.live.per_client_arrays import decode_client_fields
from tacita.messages import Spec, Total, find_symmetric, touched_name
from tacita.round.question import Question

VERSION = 2
MAGIC = b"tacita/2"
MOST_HEADER = 2**24
_LENGTH = struct.Struct(">I")

MOST_PEOPLE = 10**9
MOST_REQUESTS = 1000  # in one reply; the others wait for the next
MOST_PLAYED = 1000  # rounds that requests may take in a block, beside its own
CONTROLS = ("random", "popular", "node")  # scored on the same test items; node: a linear model of its own people
SPENT_BINS = ("up to a quarter", "up to a half", "up to three quarters", "more", "no limit set")
"""Of their budgets: how many people spent how much, in numbers that a node rounds."""
SCORE_QUESTIONS = ("validate", "close")
"""Questions about scores; every other one belongs to the learner of the run and is answered by a sum over people."""


def control_score_name(control: str, metric: str) -> str:
    """What a score of a control is called beside the run's own."""
    return f"{control} {metric}"


def make_printable(text: str) -> str:
    """Text from elsewhere as a terminal may show it: control characters become question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


Printable = Annotated[str, AfterValidator(make_printable)]
Fact = Annotated[Printable, Field(max_length=1000)] | bool | int | float | None


class RequestOutcome(StrictModel):
    """What became of a request that a node carried; of who asked and for what, it says nothing."""

    id: int = Field(ge=0, le=2**62)
    state: Literal[
        "heard", "waits", "pending", "done", "refused"
    ]  # pending: tried in vain, and going to be tried again
    block: int = Field(0, ge=0, le=100_000)
    round: int = Field(0, ge=0, le=10_000_000)  # after which it was carried out, or tried last
    tries: int = Field(0, ge=0, le=1_000_000)  # in vain
    said: Printable = Field("", max_length=500)
    certificate: dict[Annotated[Printable, Field(max_length=100)], Fact] = Field({}, max_length=40)

    @property
    def is_final(self) -> bool:
        return self.state in ("done", "refused")


class RequestHead(StrictModel):
    """What a server asks of a node, without the arrays."""

    kind: str = Field(pattern=r"^[a-z][a-z0-9/._-]{0,99}$")  # the question
    run: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")
    block: int = Field(ge=0, le=100_000)
    round: int = Field(ge=0, le=10_000_000)  # rounds done in this block
    best_round: int = Field(ge=0, le=10_000_000)  # the best round of the block so far; 0: none yet
    config: dict[str, Any]  # the run's settings
    names: dict[str, str]  # every array of the model -> its sha256; what is not sent the node already has
    told: list[RequestOutcome] = Field([], max_length=MOST_REQUESTS)  # of what this node's people asked for
    attempt: int = Field(0, ge=0, le=2**53)  # asked to carry out requests, in the attempt of this number; 0: it is not
    resolved: int = Field(0, ge=0, le=2**53)  # attempts that are over
    failed: list[Annotated[int, Field(ge=1, le=2**53)]] = Field([], max_length=MOST_REQUESTS)  # that came to nothing


class UserRequest(StrictModel):
    """What somebody on a node asks of the server."""

    id: int = Field(ge=0, le=2**62)
    kind: Literal["share", "unshare", "forget", "leave"]
    sender: int = Field(0, ge=0, lt=2**64)  # what the person is called; 0: nobody in particular
    items: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field([], max_length=100_000)
    time: float = Field(0.0, ge=0, le=1e12)


class ReplyHead(StrictModel):
    """What a node answers, without the arrays."""

    kind: str
    run: str
    block: int
    round: int
    verdict: Literal["ok", "refused", "missing"]  # missing: send all arrays again
    said: Printable = Field("", max_length=500)
    clients: int = Field(0, ge=0, le=MOST_PEOPLE)
    expected: float = Field(0.0, ge=0, le=MOST_PEOPLE)
    weight: float = Field(0.0, ge=0, le=1e12)
    sums: dict[str, tuple[float, int]] = {}
    spent: list[Annotated[int, Field(ge=0, le=MOST_PEOPLE)]] = Field(
        [], max_length=len(SPENT_BINS)
    )  # people, as SPENT names
    have: list[str] = Field([], max_length=10_000)  # digests of the arrays the node holds
    requests: list[UserRequest] = Field([], max_length=MOST_REQUESTS)  # until the server says that it has them
    heard: list[Annotated[int, Field(ge=0, le=2**62)]] = Field([], max_length=MOST_REQUESTS)  # what became of these
    version: Printable = Field("", max_length=40)  # of tacita on the node, when the reply was sent
    time: float = Field(0.0, ge=0, le=1e12)  # of the node's clock, then; 0: it was not told


def make_reply_head(request: RequestHead, **fields: Any) -> ReplyHead:
    """The head of a reply to a request; `fields`: what it says."""
    return ReplyHead(kind=request.kind, run=request.run, block=request.block, round=request.round, **fields)


@dataclass(frozen=True)
class ServerRequest:
    head: RequestHead
    arrays: Arrays = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """What is asked, whichever arrays had to travel, whatever items are called and whatever was told beside."""
        names = {name: sha for name, sha in sorted(self.head.names.items()) if name != "catalogue"}
        asked = self.head.model_copy(update={"names": names, "told": [], "resolved": 0, "failed": []})
        return hashlib.sha256(asked.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    head: ReplyHead
    arrays: Arrays = field(default_factory=dict)

    def read_total(self, fields: Sequence[Spec]) -> Total:
        """The sum in a reply that was found to fit the fields."""
        sums = {}
        for one in list_sum_specs(fields):
            at, value = f"{one.name}/at", f"{one.name}/value"
            if at in self.arrays:
                sums[one.name] = np.zeros(one.shape)
                sums[one.name].reshape(-1)[self.arrays[at]] = self.arrays[value]
            else:
                sums[one.name] = self.arrays[one.name].astype(np.float64).reshape(one.shape)
        each = decode_client_fields(self.arrays, fields)
        return Total(sums, self.head.weight, self.head.clients, each, symmetric=find_symmetric(fields))


def list_sum_specs(fields: Sequence[Spec]) -> list[Spec]:
    """Every sum that belongs to some fields, those of touched rows among them."""
    wanted = []
    for one in fields:
        if one.seen == "each":
            continue
        wanted.append(one)
        if one.touched:
            wanted.append(replace(one, name=touched_name(one.name), shape=one.shape[:1], most=1.0, least=0.0))
    return wanted


# Questions

_REPLAY = re.compile(r"(.+)\.again-([0-9]{1,9})-([0-9.e-]{1,30})")
_SERIAL = re.compile(r"(.+)/([0-9]{1,19})\.([0-9]{1,19})")


def encode_question(question: Question) -> str:
    """A question as it stands in a message."""
    return str(question)


def decode_question(text: str) -> Question:
    """The question that a message asks; text that no server writes is a question that no part has."""
    replay = None
    replayed = _REPLAY.fullmatch(text)
    if replayed is not None:
        text = replayed[1]
        replay = RoundReplay(int(replayed[2]), _decode_share(replayed[3], text))
    owner, slash, kind = text.partition("/")
    if not slash:
        return Question(text, replay=replay)
    numbered = _SERIAL.fullmatch(kind)
    if numbered is None:
        return Question(kind, owner, replay)
    return Question(numbered[1], owner, replay, (int(numbered[2]), int(numbered[3])))


def _decode_share(text: str, question: str) -> float:
    """The share of a round's local steps that a replay takes."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise TacitaError(f"'{question[:100]}' asks for a share of a round that is not above 0 and at most 1.")
    return share


Head = TypeVar("Head", bound=StrictModel)


def encode_message(message: ServerRequest | Reply) -> bytes:
    head = message.head.model_dump_json().encode()
    return b"".join([MAGIC, _LENGTH.pack(len(head)), head, pack(message.arrays)])


def stamp_reply(body: bytes, version: str, at: float) -> bytes:
    """A reply as it is sent now: one that was stored is sent again as it was, with the clock of today."""
    start = len(MAGIC) + _LENGTH.size
    end = start + int(_LENGTH.unpack(body[len(MAGIC) : start])[0])
    head = json.dumps({**json.loads(body[start:end]), "version": version, "time": at}).encode()
    return b"".join([MAGIC, _LENGTH.pack(len(head)), head, body[end:]])


def decode_request(body: bytes) -> ServerRequest:
    return ServerRequest(*_decode_message(body, RequestHead, "the server's request"))


def decode_reply(body: bytes) -> Reply:
    return Reply(*_decode_message(body, ReplyHead, "the node's reply"))


def _decode_message(body: bytes, model: type[Head], what: str) -> tuple[Head, Arrays]:
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
    return validate_model(model, values, what), arrays


def encode_total(total: Total, fields: Sequence[Spec]) -> Arrays:
    """A sum as arrays to send: each field whole, or as places and values where that is smaller."""
    arrays: Arrays = {}
    for one in list_sum_specs(fields):
        kind = np.float64 if one.exact else np.float32
        value = total[one.name].astype(kind)
        at = np.flatnonzero(value)
        place = np.dtype(np.int32 if value.size < 2**31 else np.int64)
        if value.size <= 64 or len(at) * (value.itemsize + place.itemsize) >= value.nbytes:
            arrays[one.name] = value.reshape(one.shape or (1,))
        else:
            arrays |= {f"{one.name}/at": at.astype(place), f"{one.name}/value": value.reshape(-1)[at]}
    return arrays


# The catalogue travels as an array like any other


def encode_catalogue(items: Sequence[tuple[str, str]]) -> AnyArray:
    text = json.dumps([list(one) for one in items], ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(text.encode(), np.uint8)


def decode_catalogue(array: AnyArray) -> list[tuple[str, str]]:
    try:
        listed = json.loads(array.tobytes().decode())
        items = [(item, make_printable(title) if isinstance(title, str) else title) for item, title in listed]
    except (ValueError, TypeError, RecursionError):
        raise TacitaError("the server's catalogue is damaged.") from None
    if any(not isinstance(item, str) or not isinstance(title, str) for item, title in items):
        raise TacitaError("the server's catalogue is damaged: ids and titles are texts.")
    return items
