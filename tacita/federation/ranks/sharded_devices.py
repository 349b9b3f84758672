"""ShardedDevices: all people of a run on several ranks, as the loop on rank 0 sees them.

Totals are added up without noise; rank 0 draws the noise once, on the whole sum. So a partial sum between ranks is not
protected, and ranks belong to one lab.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Broadcast, Keys, Ragged, ServerState
from tacita.federation.clients import compute_expected_clients
from tacita.federation.device_protocol import RoundReply
from tacita.federation.devices import LocalDevices, average_notes, replay_server
from tacita.federation.evaluation import EvaluationTask, MetricSums, plan_validation, summarise_block
from tacita.federation.ranks.broadcast_codec import (
    decode_lists,
    encode_down,
    encode_lists,
    encode_model,
    encode_question,
    encode_specs,
)
from tacita.federation.ranks.client_fields import join_client_fields, join_notes, join_sums
from tacita.federation.ranks.gathered_state import cut_devices, join_devices
from tacita.federation.ranks.rank_messages import Fields, MessageChannel, RankMessage, RankReply
from tacita.federation.ranks.rank_worker import RankWorker
from tacita.federation.ranks.shards import assign_user_ranks, take_shard
from tacita.kernels.threads import limit_library_threads, threads_in_use
from tacita.messages import Spec, Total, empty_total
from tacita.metrics import Evaluation
from tacita.round.part import Part
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.round.request import RequestBatch


class ShardedDevices:
    """Asks every rank for its own people, and puts together what comes back."""

    def __init__(self, channel: MessageChannel, federation: Federation, devices: LocalDevices) -> None:
        """`devices`: everybody's, to be shared out."""
        check_rank_settings(federation, channel.group.size)
        self.channel = channel
        self.federation = federation
        n_ranks = channel.group.size
        ranks = assign_user_ranks(federation, n_ranks)
        self.users = [np.flatnonzero(ranks == rank) for rank in range(n_ranks)]
        self.worker = RankWorker(take_shard(federation, 0, n_ranks))
        self._roll: tuple[int, int] | None = None  # block and active clients
        self.exchange_overhead = 0.0  # seconds of the last exchange in which no rank computed
        self._load_devices(devices)

    @property
    def lab(self) -> ShardedDevices:
        return self

    @property
    def max_request_rounds(self) -> int | None:
        return None

    def ask(
        self,
        kind: str,
        fields: Fields | None = None,
        arrays: Arrays | None = None,
        per_rank: tuple[Arrays, ...] = (),
    ) -> list[RankReply]:
        """What all ranks reply, in their order; the first has the sums over all of them."""
        message = RankMessage(kind, fields or {}, arrays or {}, per_rank)
        self.channel.send(message)
        own = message
        if per_rank:
            own = replace(message, arrays=message.arrays | per_rank[0])
        try:
            with limit_library_threads(threads_in_use()):  # the server's own work has all cores
                reply = self.worker.perform(own)
        except Exception:
            self.channel.discard_replies()
            raise
        return self.channel.gather_replies(reply)

    # a block

    def begin_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None:
        self._roll = None
        self.ask("begin-block", *encode_down(self.federation, server, broadcast))

    def end_block(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> None:
        self.ask("end-block", *encode_down(self.federation, server, broadcast))

    def keep_best_round(self, round: int) -> None:
        self.ask("keep-best", {"round": round})

    # who takes part

    def _count_active(self, server: ServerState) -> int:
        """How many clients are active on all ranks; tells every rank where its own stand among them."""
        if self._roll is not None and self._roll[0] == server.block:
            return self._roll[1]
        fields, arrays = encode_model(server)
        replies = self.ask("list-active", fields, arrays)
        active = np.sort(np.concatenate([reply.arrays["active"] for reply in replies]))
        last = _find_validator_hash_limit(replies, self.federation.config.evaluate.valid_users)
        self.ask("open-roll", {**fields, "last_validator": last}, {**arrays, "active": active})
        self._roll = (server.block, len(active))
        return len(active)

    def has_training_data(self, federation: Federation, server: ServerState) -> bool:
        return self._count_active(server) > 0

    def choose_clients(self, federation: Federation, server: ServerState) -> Keys:
        self._count_active(server)
        replies = self.ask("list-participants", *encode_model(server))
        keys: Keys = _join_by_number(replies, "keys", "clients")
        return keys

    # answers

    def exchange(
        self,
        federation: Federation,
        server: ServerState,
        broadcast: Broadcast,
        question: Question,
        chosen: Keys | None = None,
    ) -> RoundReply:
        n_active = self._count_active(server)
        began = time.perf_counter()
        specs = federation.fields(server, question)
        fields, arrays = encode_down(self.federation, server, broadcast, chosen)
        fields |= {"question": encode_question(question), "specs": encode_specs(specs)}
        if chosen is not None:
            arrays["chosen"] = chosen
        replies = self.ask("exchange", fields, arrays)
        total = _join_totals(specs, replies)
        slowest = max(float(reply.fields["seconds"]) for reply in replies)
        self.exchange_overhead = time.perf_counter() - began - slowest
        statements = [reply.fields for reply in replies]
        n_clients = sum(int(fields["clients"]) for fields in statements)
        expected = float(n_clients)
        if all(fields["is_drawn"] for fields in statements):
            expected = compute_expected_clients(n_active, federation.config.train.participation)
        mean_notes = average_notes(join_notes(replies))
        bytes_up = federation.count_upload_bytes(specs, sum(fields["n_bytes"] for fields in statements))
        contributors = sum(int(fields["contributors"]) for fields in statements)
        noisy_total = federation.noise_sum(replay_server(server, question), total, question)
        return RoundReply(noisy_total, n_clients, expected, bytes_up, mean_notes, contributors)

    # requests

    def apply_requests(self, federation: Federation, server: ServerState, requests: RequestBatch) -> RequestBatch:
        fields, arrays = encode_model(server)
        fields["batch"] = {
            "kind": requests.kind,
            "time": requests.time,
            "number": requests.number,
            "is_immediate": requests.is_immediate,
        }
        arrays |= {"senders": requests.senders, **encode_lists(requests.items, "items/")}
        replies = self.ask("apply-requests", fields, arrays)
        places = np.concatenate([reply.arrays["places"] for reply in replies])
        items = _join_lists([decode_lists(reply.arrays, "items/") for reply in replies])
        order = np.argsort(places, kind="stable")
        leaving = replace(requests, senders=requests.senders[places[order]], items=items.take(order))
        is_unknown = np.ones(len(requests.senders), bool)
        for reply in replies:
            is_unknown[reply.arrays["own"]] = False
        return leaving.concat(requests.take(np.flatnonzero(is_unknown)))

    def enrol(self, federation: Federation, server: ServerState, part: Part) -> RequestBatch | None:
        """Who shares how much is drawn among all, so it is worked out where all are."""
        devices = self.gather_devices()
        requests = devices.enrol(federation, server, part)
        self._load_devices(devices)
        return requests

    def remember_devices(self) -> None:
        self.ask("remember")

    def restart_devices(self, federation: Federation) -> None:
        self._roll = None
        self.ask("restart")

    def restore_persistent_state(self, federation: Federation) -> None:
        self.ask("restore")

    # measuring

    def measure(self, server: ServerState, broadcast: Broadcast, task: EvaluationTask, best: bool) -> Evaluation:
        """A measurement of all devices, users in their order, as they are now or in the best round."""
        if task.purpose == "valid":
            self._count_active(server)
        fields, arrays = encode_down(self.federation, server, broadcast)
        fields |= {"task": asdict(task), "best": best}
        replies = self.ask("evaluate", fields, arrays)
        users = np.concatenate([reply.arrays["users"] for reply in replies])
        order = np.argsort(users, kind="stable")
        values = {}
        for name in replies[0].fields["names"]:
            values[name] = np.concatenate([reply.arrays[f"values/{name}"] for reply in replies])[order]
        return Evaluation(users[order].astype(np.int32), values)

    def sum_validation(self, federation: Federation, server: ServerState, broadcast: Broadcast) -> MetricSums:
        block = federation.stream.blocks[server.block]
        if len(block.valid.ids) == 0:
            return {}
        task = plan_validation(federation, block)
        return self.measure(server, broadcast, task, best=False).compute_sums()

    def evaluate_best_round(
        self, federation: Federation, server: ServerState, broadcast: Broadcast
    ) -> tuple[dict[str, Any], Evaluation]:
        def measure(task: EvaluationTask) -> Evaluation:
            return self.measure(server, broadcast, task, best=True)

        return summarise_block(federation, server.block, measure)

    # what devices keep

    def gather_devices(self) -> LocalDevices:
        return join_devices(self.ask("gather"), self.users)

    def _load_devices(self, devices: LocalDevices) -> None:
        self.ask("load", per_rank=cut_devices(devices, self.users))


def check_rank_settings(federation: Federation, n_ranks: int) -> None:
    """Refuse what only one process can play."""
    if n_ranks > 1 and federation.config.train.aggregator == "secure":
        raise TacitaError(
            "train.aggregator = 'secure' plays the masks of all clients of a round in one process; use 'ideal', which "
            "gives the same sums, or leave out --ranks."
        )


def _join_totals(specs: Sequence[Spec], replies: Sequence[RankReply]) -> Total:
    """The total of all ranks, without noise."""
    empty = empty_total(specs)
    nonce = 0
    weight = 0.0
    n_clients = 0
    for reply in replies:
        nonce ^= int(reply.fields["nonce"])
        weight += reply.fields["weight"]
        n_clients += int(reply.fields["senders"])
    return replace(
        empty,
        sums=join_sums(empty, replies),
        weight=weight,
        n_clients=n_clients,
        each=join_client_fields(replies),
        nonce=nonce,
    )


def _join_by_number(replies: Sequence[RankReply], name: str, number: str) -> Any:
    """A column of all ranks in the order of another."""
    numbers = np.concatenate([reply.arrays[number] for reply in replies])
    values = np.concatenate([reply.arrays[name] for reply in replies])
    return values[np.argsort(numbers, kind="stable")]


def _join_lists(lists: Sequence[Ragged]) -> Ragged:
    """The lists of several ranks, one after the other."""
    joined = lists[0]
    for more in lists[1:]:
        n_before = len(joined)
        shifted = np.concatenate([np.zeros(n_before, np.int64), more.ptr])
        joined = joined.join_rows(replace(more, ptr=shifted))
    return joined


def _find_validator_hash_limit(replies: Sequence[RankReply], most: int) -> int | None:
    """The largest hash among the users who validate; None: all do."""
    if not most:
        return None
    hashes = np.sort(np.concatenate([reply.arrays["validators"] for reply in replies]))
    return None if len(hashes) <= most else int(hashes[most - 1])
