"""RankWorker: what every rank does for its own people when rank 0 asks, rank 0 included."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tacita.core.types import Arrays, Keys, Ragged
from tacita.federation.devices import DeviceAnswers, ExchangeQuery, empty_local_devices, replay_server
from tacita.federation.evaluation import EvaluationTask, TrainedState, build_ranking_mask, run_evaluation
from tacita.federation.ranks.broadcast_codec import (
    decode_down,
    decode_lists,
    decode_model,
    decode_question,
    decode_specs,
    encode_lists,
)
from tacita.federation.ranks.client_fields import encode_client_fields, encode_sparse_sums
from tacita.federation.ranks.rank_messages import Fields, RankMessage, RankReply
from tacita.federation.ranks.shard_devices import BlockRoll, ShardDevices, hash_validators
from tacita.federation.ranks.shards import Shard
from tacita.round.device_state import LISTS, DeviceState, flatten_devices, unflatten_devices
from tacita.round.request import RequestBatch

NOW = "now/"
BEST = "best/"


class RankWorker:
    """The devices of one rank, and the commands that they follow."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.federation = shard.federation
        self.devices = ShardDevices(empty_local_devices(self.federation).clients)
        self._commands: dict[str, Callable[[RankMessage], RankReply]] = {
            "begin-block": self._begin_block,
            "end-block": self._end_block,
            "list-active": self._list_active,
            "open-roll": self._open_roll,
            "list-participants": self._list_participants,
            "exchange": self._exchange,
            "apply-requests": self._apply_requests,
            "evaluate": self._evaluate,
            "keep-best": self._keep_best_round,
            "remember": self._remember,
            "restart": self._restart,
            "restore": self._restore,
            "gather": self._gather,
            "load": self._load,
        }

    def perform(self, message: RankMessage) -> RankReply:
        return self._commands[message.kind](message)

    # a block

    def _begin_block(self, message: RankMessage) -> RankReply:
        server, broadcast = decode_down(self.federation, message.fields, message.arrays)
        self.devices.begin_block(self.federation, server, broadcast)
        return RankReply()

    def _end_block(self, message: RankMessage) -> RankReply:
        server, broadcast = decode_down(self.federation, message.fields, message.arrays)
        self.devices.end_block(self.federation, server, broadcast)
        return RankReply()

    def _keep_best_round(self, message: RankMessage) -> RankReply:
        self.devices.keep_best_round(int(message.fields["round"]))
        return RankReply()

    # who takes part

    def _list_active(self, message: RankMessage) -> RankReply:
        """The rank's own active clients, and the smallest hashes of its users who may validate."""
        server = decode_model(message.fields, message.arrays)
        block = self.federation.stream.blocks[server.block]
        active = self.devices.group_active_clients(self.federation, server).active
        arrays: Arrays = {"active": self.shard.number_clients(active)}
        most = self.federation.config.evaluate.valid_users
        if most:
            _, hashes = hash_validators(self.federation, block)
            arrays["validators"] = np.sort(hashes)[: most + 1]
        return RankReply({}, arrays)

    def _open_roll(self, message: RankMessage) -> RankReply:
        server = decode_model(message.fields, message.arrays)
        own = self.devices.group_active_clients(self.federation, server).active
        active = message.arrays["active"]
        places = np.searchsorted(active, self.shard.number_clients(own))
        last = message.fields["last_validator"]
        self.devices.roll = BlockRoll(server.block, len(active), places, last)
        return RankReply()

    def _list_participants(self, message: RankMessage) -> RankReply:
        server = decode_model(message.fields, message.arrays)
        clients = self.devices.draw_round_participants(self.federation, server)
        keys = self.devices.group_active_clients(self.federation, server).keys[clients]
        return RankReply({}, {"keys": keys, "clients": self.shard.number_clients(clients)})

    # answers

    def _exchange(self, message: RankMessage) -> RankReply:
        """What this rank's people answer: dense sums to be added up, everything else as it is."""
        began = time.perf_counter()
        fields = message.fields
        federation = self.federation
        server, broadcast = decode_down(federation, fields, message.arrays)
        question = decode_question(fields["question"])
        chosen = message.arrays.get("chosen")
        query = ExchangeQuery(question, chosen, decode_specs(fields["specs"]))
        answers = self.devices.collect_answers(federation, server, broadcast, query)
        total = answers.sums.compute_total()
        clients = answers.respondents.clients
        is_drawn = True
        if question.owner is not None:
            is_drawn = False
        elif chosen is not None:
            is_drawn = self.devices.are_as_drawn(federation, replay_server(server, question), clients)
        reply: Fields = {
            "clients": len(clients),
            "is_drawn": is_drawn,
            "contributors": answers.contributors,
            "n_bytes": float(answers.sums.n_bytes),
            "weight": total.weight,
            "senders": total.n_clients,
            "nonce": total.nonce,
        }
        sums, sparse = encode_sparse_sums(total)
        arrays = sparse | self._encode_single_clients(answers)
        reply["each"] = list(total.each)
        arrays |= encode_client_fields(total.each)
        reply["seconds"] = time.perf_counter() - began
        return RankReply(reply, arrays, sums)

    def _encode_single_clients(self, answers: DeviceAnswers) -> Arrays:
        """Notes of single clients, and the numbers among all of those who wrote them and of those who sent."""
        arrays: Arrays = {"senders": self.shard.number_clients(answers.senders)}
        if answers.notes:
            arrays["clients"] = self.shard.number_clients(answers.respondents.clients)
        for name, values in answers.notes.items():
            arrays[f"notes/{name}"] = values
        return arrays

    def _apply_requests(self, message: RankMessage) -> RankReply:
        """What this rank's people ask for, as it leaves their devices."""
        arrays = message.arrays
        server = decode_model(message.fields, arrays)
        senders: Keys = arrays["senders"]
        items = decode_lists(arrays, "items/")
        fields = message.fields["batch"]
        batch = RequestBatch(senders=senders, items=items, **fields)
        own_keys = self.federation.stream.user_keys[: self.devices.clients.n_users]
        own_places = np.flatnonzero(np.isin(senders, own_keys))
        own = batch.take(own_places)
        leaving = self.devices.apply_requests(self.federation, server, own)
        order = np.argsort(senders)
        places = order[np.searchsorted(senders, leaving.senders, sorter=order)]
        return RankReply({}, {"own": own_places, "places": places, **encode_lists(leaving.items, "items/")})

    # measuring

    def _evaluate(self, message: RankMessage) -> RankReply:
        fields = message.fields
        federation = self.federation
        server, broadcast = decode_down(federation, fields, message.arrays)
        task = EvaluationTask(**{**fields["task"], "metrics": tuple(fields["task"]["metrics"])})
        block = federation.stream.blocks[task.block]
        clients = self.devices.best_devices if fields["best"] else self.devices.clients
        trained = TrainedState(server, clients, broadcast)
        wanted: Ragged | None = None
        mask: Ragged | None = None
        if task.purpose == "valid":
            wanted = self.devices.select_validators(federation, block)
            mask = self.devices.mask
            if mask is None:
                mask = self.devices.mask = build_ranking_mask(federation, block, "valid", task.mask)
        evaluation = run_evaluation(federation, trained, task, mask, wanted)
        arrays: Arrays = {"users": self.shard.users[evaluation.users]}
        for name, values in evaluation.values.items():
            arrays[f"values/{name}"] = values
        return RankReply({"names": list(evaluation.values)}, arrays)

    # a block again, and what devices keep

    def _remember(self, message: RankMessage) -> RankReply:
        self.devices.remember_devices()
        return RankReply()

    def _restart(self, message: RankMessage) -> RankReply:
        self.devices.restart_devices(self.federation)
        return RankReply()

    def _restore(self, message: RankMessage) -> RankReply:
        self.devices.restore_persistent_state(self.federation)
        return RankReply()

    def _gather(self, message: RankMessage) -> RankReply:
        """All that devices hold, now and in the best round."""
        clients = self.devices.clients
        arrays = flatten_devices(clients, NOW)
        for name, array in list_own_arrays(clients).items():
            arrays[f"{BEST}{name}"] = array
        return RankReply({"persistent": sorted(clients.persistent)}, arrays)

    def _load(self, message: RankMessage) -> RankReply:
        clients = unflatten_devices(message.arrays, NOW)
        best = unflatten_devices(message.arrays, BEST)
        self.devices.clients = clients.with_snapshot(best)
        return RankReply()


def list_own_arrays(clients: DeviceState) -> Arrays:
    """What the copy of the best round has by itself: nothing persistent."""
    own = {}
    for name, array in flatten_devices(clients.snapshot, "").items():
        list_name = name.removeprefix(LISTS).rpartition(":")[0]
        is_list = name.startswith(LISTS)
        if name not in clients.persistent and not (is_list and list_name in clients.persistent):
            own[name] = array
    return own
