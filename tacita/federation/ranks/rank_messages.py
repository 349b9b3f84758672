"""What rank 0 tells the others, and what they reply: JSON and arrays.

Arrays of the server's state and of broadcasts travel only when they have changed since they were last sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Doubles
from tacita.federation.ranks.process_group import RankGroup

Fields = dict[str, Any]
"""What is no array: JSON."""

REMEMBERED = ("server/", "common/")  # arrays that a receiver keeps until they change
_SAMPLE_BYTES = 4096  # of two arrays that are compared first
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_KINDS = ("bool", *_INTEGERS, "float16", "float32", "float64")


@dataclass(frozen=True)
class RankMessage:
    """One command, the same for all ranks."""

    kind: str
    fields: Fields = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    per_rank: tuple[Arrays, ...] = ()  # what each rank gets alone; a receiver finds its own in `arrays`


@dataclass(frozen=True)
class RankReply:
    """What one rank says."""

    fields: Fields = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    sums: tuple[Doubles, ...] = ()  # added up over ranks at rank 0


@dataclass(frozen=True)
class _ArrayNote:
    name: str
    kind: str
    shape: tuple[int, ...]
    is_known: bool  # the receiver has it from an earlier message


class MessageChannel:
    """Sends messages from rank 0 and receives them elsewhere; remembers what the others have already.

    Every message but the last is replied to: on rank 0 by `gather_replies` or `discard_replies`, elsewhere by
    `send_reply` or `report_problem`. Where one rank has a problem, nobody adds anything.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.is_idle = True  # on rank 0: all others wait for the next message
        self._remembered: Arrays = {}

    def send(self, message: RankMessage) -> None:
        """Send a message to all ranks.

        Arrays below `REMEMBERED` must never be changed in place afterwards: the same array counts as the same bytes.
        """
        self.is_idle = False
        notes = []
        sent = []
        for name, array in message.arrays.items():
            is_new = self._note_if_new(name, array)
            notes.append(_ArrayNote(name, array.dtype.name, array.shape, not is_new))
            if is_new:
                sent.append(np.ascontiguousarray(array))
        table = [asdict(note) for note in notes]
        has_own = bool(message.per_rank)
        head = {"kind": message.kind, "fields": message.fields, "arrays": table, "has_own": has_own}
        self.group.broadcast_bytes(json.dumps(head).encode())
        for array in sent:
            self.group.broadcast_array(array)
        if has_own:
            self.group.scatter_bytes([pack(arrays) for arrays in message.per_rank])

    def _note_if_new(self, name: str, array: AnyArray) -> bool:
        """Whether the others lack these very bytes; notes that they are about to have them."""
        if not name.startswith(REMEMBERED):
            return True
        before = self._remembered.get(name)
        self._remembered[name] = array
        if before is None:
            return True
        return before is not array and not _are_same_bytes(before, array)

    def receive(self) -> RankMessage:
        head = json.loads(self.group.broadcast_bytes())
        arrays: Arrays = {}
        for fields in head["arrays"]:
            note = _ArrayNote(**fields)
            if note.is_known:
                arrays[note.name] = self._remembered[note.name]
                continue
            array = _make_empty(note)
            self.group.broadcast_array(array)
            arrays[note.name] = array
            if note.name.startswith(REMEMBERED):
                self._remembered[note.name] = array
        if head["has_own"]:
            arrays |= unpack(self.group.scatter_bytes(), "a message of rank 0")
        return RankMessage(head["kind"], head["fields"], arrays)

    # on all ranks but 0

    def send_reply(self, reply: RankReply) -> None:
        has_problem = self._send_body(reply, False)
        if not has_problem:
            self.group.add_up(reply.sums)

    def report_problem(self, problem: Fields) -> None:
        """Say why this rank has no reply."""
        self._send_body(RankReply(problem), True)

    def _send_body(self, reply: RankReply, is_problem: bool) -> bool:
        """Send all but the sums; returns whether any rank has a problem."""
        head = _encode_reply_head(reply)
        statuses = self.group.share_numbers([int(is_problem), len(head)])
        self.group.send_bytes(head, 0)
        for array in reply.arrays.values():
            self.group.send_array(array, 0)
        return bool(statuses[:, 0].any())

    # on rank 0

    def gather_replies(self, reply: RankReply) -> list[RankReply]:
        """The replies of all ranks, with sums added up in rank 0's own."""
        replies, problems = self._receive_bodies(False)
        if problems:
            self.is_idle = True
            raise problems[0]
        self.group.add_up(reply.sums)
        self.is_idle = True
        return [reply, *replies]

    def discard_replies(self) -> None:
        """Take what the others reply, where rank 0 itself has a problem."""
        self._receive_bodies(True)
        self.is_idle = True

    def _receive_bodies(self, has_problem: bool) -> tuple[list[RankReply], list[TacitaError]]:
        """What all other ranks sent, and what is wrong there."""
        statuses = self.group.share_numbers([int(has_problem), 0])
        replies = []
        problems = []
        for rank in range(1, self.group.size):
            is_problem, n_bytes = statuses[rank].tolist()
            reply = self._receive_reply(n_bytes, rank)
            replies.append(reply)
            if is_problem:
                problems.append(_explain_problem(rank, reply.fields))
        return replies, problems

    def _receive_reply(self, n_bytes: int, rank: int) -> RankReply:
        """A reply but for its sums; each array goes where it stays, so that large ones are in memory once."""
        head = json.loads(self.group.receive_bytes(n_bytes, rank))
        arrays: Arrays = {}
        for fields in head["arrays"]:
            note = _ArrayNote(**fields)
            arrays[note.name] = _make_empty(note, f"rank {rank}")
            self.group.receive_array(arrays[note.name], rank)
        return RankReply(head["fields"], arrays)


def describe_problem(error: Exception) -> Fields:
    """An error as a rank reports it; what people can mend is a sentence already."""
    if isinstance(error, TacitaError):
        return {"sentence": str(error)}
    return {"failure": f"{type(error).__name__}: {error}"}


def _explain_problem(rank: int, problem: Fields) -> TacitaError:
    if "sentence" in problem:
        return TacitaError(str(problem["sentence"]))
    return TacitaError(f"rank {rank} failed: {problem.get('failure', 'it does not say why')}.")


def _encode_reply_head(reply: RankReply) -> bytes:
    notes = []
    for name, array in reply.arrays.items():
        notes.append(asdict(_ArrayNote(name, array.dtype.name, array.shape, is_known=False)))
    return json.dumps({"fields": reply.fields, "arrays": notes}).encode()


def _make_empty(note: _ArrayNote, sender: str = "rank 0") -> AnyArray:
    if note.kind not in _KINDS:
        raise TacitaError(f"{sender} sent '{note.name}' of kind {note.kind}, which is no number.")
    return np.empty(tuple(note.shape), np.dtype(note.kind))


def _are_same_bytes(first: AnyArray, second: AnyArray) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first_bytes = np.ascontiguousarray(first).reshape(-1).view(np.uint8)
    second_bytes = np.ascontiguousarray(second).reshape(-1).view(np.uint8)
    step = max(1, len(first_bytes) // _SAMPLE_BYTES)
    if not np.array_equal(first_bytes[::step], second_bytes[::step]):  # most arrays that changed did so everywhere
        return False
    return np.array_equal(first_bytes, second_bytes)


def select_below(arrays: Mapping[str, AnyArray], prefix: str) -> Arrays:
    """The arrays whose names begin so, without the prefix."""
    selected = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            selected[name.removeprefix(prefix)] = array
    return selected
