"""RankTeam: the ranks of a run as rank 0 leads them; and the service loop of all others."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tacita
from tacita.core.errors import TacitaError
from tacita.federation.devices import LocalDevices
from tacita.federation.ranks.process_group import RankGroup, RankLost, name_ranks
from tacita.federation.ranks.rank_messages import Fields, MessageChannel, RankMessage, RankReply, describe_problem
from tacita.federation.ranks.rank_place import RankPlace
from tacita.federation.ranks.rank_worker import RankWorker
from tacita.federation.ranks.sharded_devices import ShardedDevices
from tacita.federation.ranks.shards import take_shard
from tacita.kernels.threads import threads_in_use
from tacita.round.plan import Federation

SET_UP = "set-up"
STOP = "stop"

COMPARED = {
    "version": "has another version of tacita than rank 0; install the same on all hosts",
    "data": "reads other data than rank 0; give all hosts the same files",
    "parts": "has other parts or fields than rank 0; give all hosts the same files of --import",
}
"""What has to be alike on all ranks -> what is said of a rank where it is not."""

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
        self.has_met = False  # the others have joined
        self._open_group = open_group
        self._list_ended = list_ended
        self._channel: MessageChannel | None = None

    def open(self) -> MessageChannel:
        """Wait for the others, if they have not joined yet."""
        if self._channel is None:
            self._channel = MessageChannel(self._open_group())
            self.has_met = True
        return self._channel

    def share_out(self, federation: Federation, devices: LocalDevices, setup: Fields) -> ShardedDevices:
        """Everybody's devices on the ranks where they live; `setup`: what the others make the run of."""
        channel = self.open()
        place = channel.group.place
        channel.send(RankMessage(SET_UP, setup))
        replies = channel.gather_replies(RankReply(describe_rank(place, federation)))
        descriptions = [reply.fields for reply in replies]
        compare_ranks(descriptions)
        hosts = sum(int(description["is_first"]) for description in descriptions)
        threads = min(int(description["threads"]) for description in descriptions)
        self.summary = RankSummary(place.size, hosts, threads)
        return ShardedDevices(channel, federation, devices)

    def explain_loss(self, error: RankLost, remedy: str) -> TacitaError:
        """Which rank was lost, as far as anybody knows, and how to go on."""
        return self.explain_end(remedy) or TacitaError(f"{str(error).rstrip('.')}; {remedy}.")

    def explain_end(self, remedy: str) -> TacitaError | None:
        """Which ranks have ended or do not say that they live; None: all live. Connections are closed."""
        channel = self._channel
        if channel is None:
            return None
        self._channel = None
        group = channel.group
        group.abandon()
        lost = list(self._list_ended()) or group.call_roll()
        if not lost:
            return None
        verbs = "has ended or does not answer" if len(lost) == 1 else "have ended or do not answer"
        return TacitaError(f"{name_ranks(lost, group.size)} {verbs}, so the run stopped; {remedy}.")

    def close(self) -> None:
        """Let the others go; one that is lost by now is missed by nobody."""
        channel = self._channel
        if channel is None:
            return
        self._channel = None
        if not channel.is_idle:
            channel.group.abandon()
            return
        with contextlib.suppress(RankLost):
            channel.send(RankMessage(STOP))
        channel.group.close()


def serve_rank(group: RankGroup, make_federation: MakeFederation) -> None:
    """Do what rank 0 asks until it stops."""
    channel = MessageChannel(group)
    try:
        _serve_messages(group, channel, make_federation)
    except (RankLost, KeyboardInterrupt):
        group.answer_roll_call()
        group.abandon()
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
                reply = RankReply(describe_rank(group.place, federation))
            else:
                assert worker is not None, "a run is set up before anything is asked"
                reply = worker.perform(message)
        except Exception as error:
            if not isinstance(error, TacitaError):
                traceback.print_exc(file=sys.stderr)
            channel.report_problem(describe_problem(error))
            continue
        channel.send_reply(reply)


def describe_rank(place: RankPlace, federation: Federation) -> Fields:
    """What a rank says of itself when a run is set up."""
    return {
        "is_first": place.local_rank == 0,
        "threads": threads_in_use(),
        "version": tacita.__version__,
        "data": federation.stream.fingerprint,
        "parts": _list_part_fields(federation),
    }


def _list_part_fields(federation: Federation) -> list[str]:
    """The parts of a run, what they and the learner keep, and what they send."""
    names = [part.name for part in federation.parts]
    for owner, state_specs in federation.list_state_specs().items():
        names += [f"{owner} keeps {spec.name}" for spec in state_specs]
    n_items = federation.stream.blocks[0].n_items
    for owner, fields in federation.declared_fields(n_items).items():
        names += [f"{owner} sends {spec.name}" for spec in fields.extra]
    return names


def compare_ranks(descriptions: Sequence[Fields]) -> None:
    """Refuse ranks that would compute something else than rank 0, whose description is the first."""
    for rank, description in enumerate(descriptions):
        for name, sentence in COMPARED.items():
            if description.get(name) != descriptions[0][name]:
                raise TacitaError(f"rank {rank} {sentence}.")
