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
from tacita.live.json_object import JsonObject
from tacita.live.per_client_arrays import decode_client_fields
from tacita.messages import Spec, Total, map_symmetric_fields, touched_name
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
    """The name of a control's score, next to those of the run."""
    return f"{control} {metric}"


def make_printable(text: str) -> str:
    """Text from elsewhere as a terminal may show it: control characters become question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


Catalogue = list[tuple[str, str]]  # raw id and title of each item
Printable = Annotated[str, AfterValidator(make_printable)]
FactName = Annotated[Printable, Field(max_length=100)]
FactText = Annotated[Printable, Field(max_length=1000)]
Fact = FactText | bool | int | float | None
RequestId = Annotated[int, Field(ge=0, le=2**62)]
AttemptNumber = Annotated[int, Field(ge=1, le=2**53)]
ItemNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]
PeopleCount = Annotated[int, Field(ge=0, le=MOST_PEOPLE)]


class RequestOutcome(StrictModel):
    """What became of a request that a node carried; it says neither who asked nor for what."""

    id: int = Field(ge=0, le=2**62)
    state: Literal["heard", "waits", "pending", "done", "refused"]  # pending: tried in vain, to be tried again
    block: int = Field(0, ge=0, le=100_000)
    round: int = Field(0, ge=0, le=10_000_000)  # after which it was carried out, or tried last
    tries: int = Field(0, ge=0, le=1_000_000)  # in vain
    said: Printable = Field("", max_length=500)
    certificate: dict[FactName, Fact] = Field({}, max_length=40)

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
    config: JsonObject  # the run's settings
    names: dict[str, str]  # every array of the model -> its sha256; what is not sent the node already has
    told: list[RequestOutcome] = Field([], max_length=MOST_REQUESTS)  # of requests of this node's people
    attempt: int = Field(0, ge=0, le=2**53)  # number of the attempt to carry out requests; 0: in none
    resolved: int = Field(0, ge=0, le=2**53)  # attempts that are over
    failed: list[AttemptNumber] = Field([], max_length=MOST_REQUESTS)  # of these


class UserRequest(StrictModel):
    """A request of somebody on a node."""

    id: int = Field(ge=0, le=2**62)
    kind: Literal["share", "unshare", "forget", "leave"]
    sender: int = Field(0, ge=0, lt=2**64)  # the person's name in the run; 0: nobody in particular
    items: list[ItemNumber] = Field([], max_length=100_000)
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
    spent: list[PeopleCount] = Field([], max_length=len(SPENT_BINS))  # people
    have: list[str] = Field([], max_length=10_000)  # digests of the arrays the node holds
    requests: list[UserRequest] = Field([], max_length=MOST_REQUESTS)  # until the server acknowledges them
    heard: list[RequestId] = Field([], max_length=MOST_REQUESTS)  # requests whose outcome the node has read
    version: Printable = Field("", max_length=40)  # of tacita on the node, when the reply was sent
    time: float = Field(0.0, ge=0, le=1e12)  # of the node's clock, then; 0: unknown


def make_reply_head(request: RequestHead, **fields: Any) -> ReplyHead:
    """The head of a reply to a request; `fields`: what it says."""
    return ReplyHead(kind=request.kind, run=request.run, block=request.block, round=request.round, **fields)


@dataclass(frozen=True)
class ServerRequest:
    head: RequestHead
    arrays: Arrays = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """A digest of the question, whichever arrays travel, whatever titles items have and what else it carries."""
        names = dict(sorted(self.head.names.items()))
        names.pop("catalogue", None)
        question = self.head.model_copy(update={"names": names, "told": [], "resolved": 0, "failed": []})
        text = question.model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    head: ReplyHead
    arrays: Arrays = field(default_factory=dict)

    def read_total(self, fields: Sequence[Spec]) -> Total:
        """The sum in a reply that was checked against the fields."""
        arrays = self.arrays
        sums = {}
        for spec in list_sum_specs(fields):
            place = arrays.get(f"{spec.name}/at")
            if place is None:
                array = arrays[spec.name].astype(np.float64)
                sums[spec.name] = array.reshape(spec.shape)
            else:
                dense = np.zeros(spec.shape)
                flat = dense.reshape(-1)
                flat[place] = arrays[f"{spec.name}/value"]
                sums[spec.name] = dense
        each = decode_client_fields(arrays, fields)
        head = self.head
        symmetric = map_symmetric_fields(fields)
        return Total(sums, head.weight, head.clients, each, symmetric=symmetric)


def list_sum_specs(fields: Sequence[Spec]) -> list[Spec]:
    """Every sum that belongs to some fields, those of touched rows among them."""
    specs = []
    for spec in fields:
        if spec.seen == "each":
            continue
        specs.append(spec)
        if spec.touched:
            name = touched_name(spec.name)
            touched = replace(spec, name=name, shape=spec.shape[:1], most=1.0, least=0.0)
            specs.append(touched)
    return specs


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
    return _join_message(head, pack(message.arrays))


def _join_message(head: bytes, arrays: bytes) -> bytes:
    size = _LENGTH.pack(len(head))
    return b"".join([MAGIC, size, head, arrays])


def stamp_reply(body: bytes, version: str, at: float) -> bytes:
    """A reply as it is sent now, also one that was stored: with the clock of today."""
    start = len(MAGIC) + _LENGTH.size
    (size,) = _LENGTH.unpack(body[len(MAGIC) : start])
    end = start + int(size)
    fields = json.loads(body[start:end])
    fields["version"] = version
    fields["time"] = at
    head = json.dumps(fields).encode()
    return _join_message(head, body[end:])


def decode_request(body: bytes) -> ServerRequest:
    head, arrays = _decode_message(body, RequestHead, "the server's request")
    return ServerRequest(head, arrays)


def decode_reply(body: bytes) -> Reply:
    head, arrays = _decode_message(body, ReplyHead, "the node's reply")
    return Reply(head, arrays)


def _decode_message(body: bytes, model: type[Head], what: str) -> tuple[Head, Arrays]:
    text, rest = _split_message(body, what)
    fields = _parse_head(text, what)
    arrays = unpack(rest, what)
    for name, array in arrays.items():
        _check_numbers(name, array, what)
    return validate_model(model, fields, what), arrays


def _split_message(body: bytes, what: str) -> tuple[bytes, bytes]:
    """The head of a message as JSON, and its arrays as bytes."""
    if not body.startswith(MAGIC[:7]):
        raise TacitaError(f"{what} is not a message of tacita.")
    if not body.startswith(MAGIC):
        raise TacitaError(f"{what} speaks another version of the protocol; use the same tacita on both sides.")
    start = len(MAGIC) + _LENGTH.size
    size = MOST_HEADER + 1
    if len(body) >= start:
        (size,) = _LENGTH.unpack(body[len(MAGIC) : start])
    end = start + size
    if size > MOST_HEADER or end > len(body):
        raise TacitaError(f"{what} is cut short or damaged.")
    return body[start:end], body[end:]


def _parse_head(text: bytes, what: str) -> JsonObject:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise TacitaError(f"{what} is damaged: not valid JSON.") from None
    if not isinstance(fields, dict):
        raise TacitaError(f"{what} is damaged: no table.")
    sums = fields.get("sums")
    if isinstance(sums, dict):
        for name, pair in sums.items():
            if isinstance(pair, list):
                sums[name] = tuple(pair)
    return fields


def _check_numbers(name: str, array: AnyArray, what: str) -> None:
    """Refuse what is no number, or not finite."""
    kind = array.dtype.kind
    if kind == "f" and not np.isfinite(array).all():
        raise TacitaError(f"{what} holds numbers that are not finite in '{name}'.")
    if kind not in "fiu":
        raise TacitaError(f"{what} holds '{name}' of kind {array.dtype}, which is not a number.")


def encode_total(total: Total, fields: Sequence[Spec]) -> Arrays:
    """A sum as arrays to send: each field whole, or as places and values where that is smaller."""
    arrays: Arrays = {}
    for spec in list_sum_specs(fields):
        name = spec.name
        value_type = np.float64 if spec.exact else np.float32
        value = total[name].astype(value_type)
        place = np.flatnonzero(value)
        is_small = value.size < 2**31
        place_type = np.dtype(np.int32 if is_small else np.int64)
        entry_bytes = value.itemsize + place_type.itemsize
        sparse_bytes = len(place) * entry_bytes
        if value.size <= 64 or sparse_bytes >= value.nbytes:
            arrays[name] = value.reshape(spec.shape or (1,))
        else:
            flat = value.reshape(-1)
            arrays[f"{name}/at"] = place.astype(place_type)
            arrays[f"{name}/value"] = flat[place]
    return arrays


def select_prefixed(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, without the prefix."""
    selected = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            selected[name.removeprefix(prefix)] = array
    return selected


# The catalogue travels as an array like any other


def encode_catalogue(items: Sequence[tuple[str, str]]) -> AnyArray:
    pairs = [[item, title] for item, title in items]
    text = json.dumps(pairs, ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(text.encode(), np.uint8)


def decode_catalogue(array: AnyArray) -> Catalogue:
    items = []
    try:
        for item, title in json.loads(array.tobytes().decode()):
            printable_title = make_printable(title) if isinstance(title, str) else title
            items.append((item, printable_title))
    except (ValueError, TypeError, RecursionError):
        raise TacitaError("the server's catalogue is damaged.") from None
    for item, title in items:
        if not isinstance(item, str) or not isinstance(title, str):
            raise TacitaError("the server's catalogue is damaged: ids and titles are texts.")
    return items
