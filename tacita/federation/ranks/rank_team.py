"""RankTeam: the ranks of a run as rank 0 leads them; and the service loop of all others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tacita.core.errors import TacitaError
from tacita.federation.devices import LocalDevices
from tacita.federation.ranks.process_group import RankGroup, RankLost
from tacita.federation.ranks.rank_messages import Fields, MessageChannel, RankMessage, RankReply, describe_problem
from tacita.federation.ranks.rank_worker import RankWorker
from tacita.federation.ranks.sharded_devices import ShardedDevices
from tacita.federation.ranks.shards import take_shard
from tacita.kernels.threads import threads_in_use
from tacita.round.plan import Federation

SET_UP = "set-up"
STOP = "stop"

MakeFederation = Callable[[Fields], Federation]
"""From what rank 0 says of a run to the same run on another rank."""


@dataclass(frozen=True)
class RankSummary:
    """Who took part in a run."""

    ranks: int
    hosts: int
    threads: int  # of each rank; of the one with the fewest


class RankTeam:
    """All ranks, led by this process."""

    def __init__(self, open_group: Callable[[], RankGroup], list_ended: Callable[[], Sequence[int]] = list) -> None:
        """`open_group`: waits for the others, as late as possible; `list_ended`: the ranks known to have ended."""
        self.summary = RankSummary(1, 1, threads_in_use())
        self._open_group = open_group
        self._list_ended = list_ended
        self._channel: MessageChannel | None = None

    def share_out(self, federation: Federation, devices: LocalDevices, setup: Fields) -> ShardedDevices:
        """Everybody's devices on the ranks where they live; `setup`: what the others make the run of."""
        if self._channel is None:
            self._channel = MessageChannel(self._open_group())
        channel = self._channel
        channel.send(RankMessage(SET_UP, setup))
        replies = channel.collect_replies(RankReply(_describe_rank(channel.group, federation)))
        descriptions = [reply.fields for reply in replies]
        for rank, description in enumerate(descriptions):
            if description["data"] != federation.stream.fingerprint:
                raise TacitaError(f"rank {rank} reads other data than rank 0; give all hosts the same files.")
        hosts = sum(int(description["is_first"]) for description in descriptions)
        threads = min(int(description["threads"]) for description in descriptions)
        self.summary = RankSummary(channel.group.size, hosts, threads)
        return ShardedDevices(channel, federation, devices)

    def explain_loss(self, error: RankLost, remedy: str) -> TacitaError:
        """Which rank was lost, as far as anybody knows, and how to go on."""
        if self._channel is None:
            return TacitaError(f"{str(error).rstrip('.')}; {remedy}.")
        group = self._channel.group
        self._channel = None
        lost = list(self._list_ended()) or group.call_roll()
        if not lost:
            return TacitaError(f"{str(error).rstrip('.')}; {remedy}.")
        names = ", ".join(str(rank) for rank in lost)
        subject = f"rank {names} of {group.size} has" if len(lost) == 1 else f"ranks {names} of {group.size} have"
        return TacitaError(f"{subject} ended or does not answer, so the run stopped; {remedy}.")

    def close(self) -> None:
        """Let the others go."""
        if self._channel is None:
            return
        self._channel.send(RankMessage(STOP))
        self._channel.group.close()
        self._channel = None


def serve_rank(group: RankGroup, make_federation: MakeFederation) -> None:
    """Do what rank 0 asks until it stops."""
    channel = MessageChannel(group)
    try:
        _serve_messages(group, channel, make_federation)
    except RankLost:
        group.answer_roll_call()
        raise
    group.close()


def _serve_messages(group: RankGroup, channel: MessageChannel, make_federation: MakeFederation) -> None:
    worker: RankWorker | None = None
    while True:
        message = channel.receive()
        if message.kind == STOP:
            return
        try:
            if message.kind == SET_UP:
                federation = make_federation(message.fields)
                worker = RankWorker(take_shard(federation, group.rank, group.size))
                reply = RankReply(_describe_rank(group, federation))
            else:
                assert worker is not None, "a run is set up before anything is asked"
                reply = worker.perform(message)
        except Exception as error:
            if not isinstance(error, TacitaError):
                traceback.print_exc(file=sys.stderr)
            channel.collect_replies(None, describe_problem(error))
            continue
        channel.collect_replies(reply)


def _describe_rank(group: RankGroup, federation: Federation) -> Fields:
    return {
        "is_first": group.place.local_rank == 0,
        "threads": threads_in_use(),
        "data": federation.stream.fingerprint,
    }
