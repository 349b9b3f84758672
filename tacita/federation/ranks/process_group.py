"""RankGroup: processes that exchange arrays and add them up; the home of torch.distributed.

gloo neither authenticates nor encrypts: whoever reaches its ports reads what ranks exchange. So ranks of one machine
use its loopback interface and a file as meeting place, and any other interface has to be named. Nothing is pickled:
bytes travel as tensors, after their length.

gloo hears no signal while it waits. So operations of all ranks are waited for in slices, between which Python hears
Ctrl-C. Only a transfer from one rank to another, which both have begun, is waited for in one piece.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Work
from torch.distributed.rendezvous import rendezvous

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Doubles, Longs
from tacita.federation.ranks.rank_place import RankPlace

JOIN_SECONDS = 1800.0  # in which all processes of torchrun have to come
CONNECT_SECONDS = 60.0  # in which ranks that are all there have to connect
REPLY_SECONDS = 1800.0  # for which rank 0 waits for what it asked others
IDLE_SECONDS = 7 * 86400.0  # for which other ranks wait for rank 0, which may read data or solve for hours
ROLL_CALL_SECONDS = 5.0  # in which ranks that live say so, after one was lost
MOST_BYTES = 2**40  # of one message
_SLICE = timedelta(seconds=0.2)  # of a wait, after which Python hears signals
_ABANDONED = timedelta(milliseconds=1)  # a wait that gloo is to give up
_UNUSED_TAG = 1  # of messages that nobody sends
_PIECE_BYTES = 2**22  # of sums that are added up while more arrives
_SPARSE_ROWS = 1024  # arrays with fewer rows travel whole
_SAMPLE_ROWS = 512  # looked at first: going over all rows costs as much as sending them


class RankLost(TacitaError):
    """A rank ended or did not answer in time."""


def find_loopback() -> str:
    """The interface that no other machine reaches."""
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise TacitaError("this machine has no loopback interface; name another one with --rank-interface.")


def _check_interface(interface: str) -> None:
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise TacitaError(f"--rank-interface {interface}: this machine has {', '.join(names)}.")


def open_launched_group(place: RankPlace, interface: str | None) -> RankGroup:
    """The group of processes that torchrun started."""
    chosen = interface or os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None and place.local_size < place.size:
        raise TacitaError(
            "ranks on several hosts exchange people's sums without encryption; name the interface of a network that "
            "you trust with --rank-interface, such as eth0."
        )
    chosen = chosen or find_loopback()
    _check_interface(chosen)
    os.environ["GLOO_SOCKET_IFNAME"] = chosen
    with _explain_loss("the ranks did not meet; check that all hosts reach --master-addr and --master-port"):
        meeting, _, _ = next(rendezvous("env://"))
        store = PrefixStore("tacita", meeting)
        _wait_for_all(place, store, _ask_nobody, JOIN_SECONDS)
    return _join_group(place, store, _ask_nobody)


def open_local_group(place: RankPlace, folder: Path, check_others: Callable[[], None]) -> RankGroup:
    """A group on this machine that meets in a folder; `check_others` raises an error if one of them has ended."""
    store = FileStore(str(folder / "store"), place.size)
    _wait_for_all(place, store, check_others)
    os.environ["GLOO_SOCKET_IFNAME"] = find_loopback()
    return _join_group(place, store, check_others)


def _ask_nobody() -> None:
    """Processes on other hosts are not seen from here."""


def _wait_for_all(
    place: RankPlace, store: Store, check_others: Callable[[], None], most_seconds: float = math.inf
) -> None:
    """Wait until all ranks are at the meeting place."""
    store.set(f"there/{place.rank}", "yes")
    names = [f"there/{rank}" for rank in range(place.size)]
    until = time.monotonic() + most_seconds
    while not store.check(names):
        check_others()
        if time.monotonic() > until:
            absent = [rank for rank, name in enumerate(names) if not store.check([name])]
            raise RankLost(f"{name_ranks(absent, place.size)} did not come within {most_seconds / 60:.0f} minutes.")
        time.sleep(0.02)


def _join_group(place: RankPlace, store: Store, check_others: Callable[[], None]) -> RankGroup:
    """Connect with ranks that are at the meeting place; one may have ended since.

    torch waits for such a rank, and the only timeout of a group that all versions keep to is for everything: a week.
    So it connects in a thread, and this one watches.
    """
    errors: list[Exception] = []

    def connect() -> None:
        timeout = timedelta(seconds=IDLE_SECONDS)
        try:
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    until = time.monotonic() + CONNECT_SECONDS
    while thread.is_alive() and time.monotonic() < until:
        check_others()
        thread.join(0.02)
    if thread.is_alive() or errors:
        check_others()
        raise RankLost(
            "the ranks came but did not connect; check that none has ended, and that --rank-interface names the "
            "network between hosts."
        )
    return RankGroup(place, store)


@contextmanager
def _explain_loss(sentence: str = "a rank has ended or its connection broke") -> Iterator[None]:
    """An error of gloo as one of this package, in words that people know."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"{sentence}.") from error


def name_ranks(ranks: Sequence[int], size: int) -> str:
    """Some of a run's ranks as the subject of a sentence."""
    *first, last = [str(rank) for rank in ranks]
    if not first:
        return f"rank {last} of {size}"
    return f"ranks {', '.join(first)} and {last} of {size}"


class RankGroup:
    """All ranks of a run, as one of them sees them. All call the same methods in the same order."""

    def __init__(self, place: RankPlace, store: Store) -> None:
        self.store = store
        self.rank = place.rank
        self.size = place.size
        self.place = place
        self._most_seconds = REPLY_SECONDS if self.rank == 0 else IDLE_SECONDS

    def broadcast_bytes(self, content: bytes | None = None) -> bytes:
        """What rank 0 sends to all others."""
        length = np.array([0 if content is None else len(content)], np.int64)
        self.broadcast_array(length)
        buffer = np.empty(_check_length(int(length[0])), np.uint8)
        if content is not None:
            buffer[:] = np.frombuffer(content, np.uint8)
        self.broadcast_array(buffer)
        return buffer.tobytes()

    def broadcast_array(self, array: AnyArray) -> None:
        """The array of rank 0 to all others, into arrays of the same kind and shape."""
        if not array.size:
            return
        with _explain_loss():
            self._finish(dist.broadcast(_view_bytes(array), src=0, async_op=True))

    def share_numbers(self, numbers: Sequence[int]) -> Longs:
        """(ranks, numbers) what every rank says."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        shared = [torch.empty_like(own) for _ in range(self.size)]
        with _explain_loss():
            self._finish(dist.all_gather(shared, own, async_op=True))
        return torch.stack(shared).numpy()

    def send_bytes(self, content: bytes, rank: int) -> None:
        """To a rank that knows how many there are."""
        if content:
            self._send(np.frombuffer(content, np.uint8), rank)

    def receive_bytes(self, length: int, rank: int) -> bytes:
        buffer = np.empty(_check_length(length), np.uint8)
        if length:
            self._receive(buffer, rank)
        return buffer.tobytes()

    def send_array(self, array: AnyArray, rank: int) -> None:
        """To a rank that has an array of the same kind and shape."""
        self._send(np.ascontiguousarray(array), rank)

    def receive_array(self, array: AnyArray, rank: int) -> None:
        self._receive(array, rank)

    def scatter_bytes(self, contents: Sequence[bytes] | None = None) -> bytes:
        """What rank 0 has for each rank."""
        lengths = np.zeros(self.size, np.int64)
        if contents is not None:
            lengths[:] = [len(content) for content in contents]
        self.broadcast_array(lengths)
        if contents is None:
            return self.receive_bytes(int(lengths[self.rank]), 0)
        for rank in range(1, self.size):
            self.send_bytes(contents[rank], rank)
        return contents[0]

    def add_up(self, arrays: Sequence[Doubles]) -> None:
        """Sums over all ranks, in place at rank 0; the number of ranks alone decides the order of additions."""
        step = 1
        while step < self.size:
            place = self.rank % (2 * step)
            if place == step:
                for array in arrays:
                    self._send_addend(array, self.rank - step)
                return
            if self.rank + step < self.size:
                for array in arrays:
                    self._add_received(array, self.rank + step)
            step *= 2

    def _send_addend(self, array: Doubles, rank: int) -> None:
        """Only the rows that hold something, where that is less."""
        rows = _find_nonzero_rows(array)
        n_rows = -1 if rows is None else len(rows)
        self._send(np.array([n_rows], np.int64), rank)
        if rows is None:
            self._send_pieces(np.ascontiguousarray(array).reshape(-1), rank)
        elif len(rows):
            self._send(rows, rank)
            self._send(array[rows], rank)

    def _add_received(self, array: Doubles, rank: int) -> None:
        count = np.zeros(1, np.int64)
        self._receive(count, rank)
        n_rows = int(count[0])
        if n_rows < 0:
            flat = array.reshape(-1)
            assert np.shares_memory(flat, array), "sums are whole arrays"
            self._add_received_pieces(flat, rank)
        elif n_rows:
            rows = np.empty(n_rows, np.int64)
            values = np.empty((n_rows, *array.shape[1:]), array.dtype)
            self._receive(rows, rank)
            self._receive(values, rank)
            array[rows] += values

    def _send_pieces(self, numbers: Doubles, rank: int) -> None:
        """In pieces, so that the receiver adds one up while the next is on its way."""
        with _explain_loss():
            works = [dist.isend(_view_bytes(piece), dst=rank) for piece in _cut_pieces(numbers)]
            for work in works:
                self._finish_transfer(work)

    def _add_received_pieces(self, numbers: Doubles, rank: int) -> None:
        pieces = _cut_pieces(numbers)
        if not pieces:
            return
        buffers = [np.empty(pieces[0].shape, numbers.dtype) for _ in range(2)]
        with _explain_loss():
            work = _begin_piece(buffers[0], pieces[0], rank)
            for number, piece in enumerate(pieces):
                self._finish_transfer(work)
                if number + 1 < len(pieces):
                    work = _begin_piece(buffers[(number + 1) % 2], pieces[number + 1], rank)
                piece += buffers[number % 2][: len(piece)]

    def _send(self, array: AnyArray, rank: int) -> None:
        if array.size:
            with _explain_loss():
                self._finish_transfer(dist.isend(_view_bytes(array), dst=rank))

    def _receive(self, array: AnyArray, rank: int) -> None:
        if array.size:
            with _explain_loss():
                self._finish_transfer(dist.irecv(_view_bytes(array), src=rank))

    def _finish(self, work: Work | None) -> None:
        """Wait for an operation of all ranks, and hear signals meanwhile."""
        assert work is not None, "this process is a rank"
        until = time.monotonic() + self._most_seconds
        while not work.is_completed():
            if time.monotonic() > until:
                raise RankLost(f"a rank did not answer for {self._most_seconds / 60:.0f} minutes.")
            with suppress(RuntimeError):  # the slice is over; or the operation failed, which the last wait says
                work.wait(_SLICE)
        work.wait()

    def _finish_transfer(self, work: Work | None) -> None:
        assert work is not None, "this process is a rank"
        work.wait(timedelta(seconds=self._most_seconds))

    # after a loss

    def abandon(self) -> None:
        """Close all connections, so that nobody waits any longer, here or on another rank.

        gloo has no call for this. It closes all connections when one wait takes too long.
        """
        for rank in range(self.size):
            if rank != self.rank:
                with suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1, dtype=torch.uint8), src=rank, tag=_UNUSED_TAG)
                    assert work is not None, "this process is a rank"
                    work.wait(_ABANDONED)

    def answer_roll_call(self) -> None:
        """Say that this rank lives, so that others can tell who does not."""
        try:
            self.store.set(f"lives/{self.rank}", "yes")
        except RuntimeError:  # the meeting place is gone with rank 0
            return

    def call_roll(self) -> list[int]:
        """The ranks that do not say that they live."""
        missing = list(range(1, self.size))
        until = time.monotonic() + ROLL_CALL_SECONDS
        try:
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not self.store.check([f"lives/{rank}"])]
                time.sleep(0.05)
        except RuntimeError:
            return missing
        return missing

    def close(self) -> None:
        dist.destroy_process_group()


def limit_torch_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def _view_bytes(array: AnyArray) -> torch.Tensor:
    """The bytes of an array, in place; of what is only read a copy is not needed either."""
    flat = array.reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat)


def _cut_pieces(numbers: Doubles) -> list[Doubles]:
    """All of some numbers in views of the same length; the last may be shorter."""
    step = _PIECE_BYTES // numbers.itemsize
    return [numbers[start : start + step] for start in range(0, len(numbers), step)]


def _begin_piece(buffer: Doubles, piece: Doubles, rank: int) -> Work | None:
    """Begin to receive as many numbers as a piece has."""
    return dist.irecv(_view_bytes(buffer[: len(piece)]), src=rank)


def _check_length(length: int) -> int:
    if not 0 <= length <= MOST_BYTES:
        raise RankLost(f"a rank announces {length} bytes, which makes no sense.")
    return length


def _find_nonzero_rows(array: Doubles) -> Longs | None:
    """The rows that are not zero; None: too many, or the array is small."""
    if array.ndim == 0 or len(array) < _SPARSE_ROWS:
        return None
    flat = array.reshape(len(array), -1)
    sample = flat[:: len(flat) // _SAMPLE_ROWS]
    if 2 * np.count_nonzero(sample.any(axis=1)) >= len(sample):
        return None
    rows = np.flatnonzero(flat.any(axis=1))
    return rows if 2 * len(rows) < len(array) else None
