"""fru: go back to the start and replay every round without users who left (FRU, WSDM'23; sharing spec C.5).

Devices keep the rows of their uploads that moved furthest; the server keeps the first table and who took part. To
forget, each round is replayed with the same clients but those who left. They train a fraction of the steps, which
gives the direction; what they had kept gives the length. The first round is what they had kept, itself.

Where we differ: a round of an earlier block is what was kept of it, since devices learn from the present block. Shared
parameters get the length that the server saw, leavers included. Where a user has single items forgotten, the rows of
these items leave the log, and the first round is replayed without that user. The server is one more client where users
share: its own steps run inside each round, on what is shared now (`server.shared`), in full and not shortened to a
kept length. A part that would shorten them compares `before` and `server` in its `server_step`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Doubles, Ints, Keys, Longs, RoundReplay, ServerState, StateUpdate
from tacita.learn.rows import HEADS, MOST_MOVE, choose_denominator
from tacita.messages import CohortReply, DenseArrays, Spec, Total, Upload, touched_name
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.negatives import draw_mixed_negatives
from tacita.methods.sharing.replay_unlearning import ReplayUnlearning, find_leavers
from tacita.round.capabilities import DeviceQuery, RoundPlayer
from tacita.round.part import PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask
from tacita.round.unlearning_report import UnlearningReport

_TINY = 1e-12
_STORED_PATTERN = re.compile("stored-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")


class FruConfig(PartConfig):
    keep: float = Field(0.5, gt=0, le=1, description="share of the rows of an upload that is kept (alpha)")
    share: float = Field(0.1, gt=0, le=1, description="share of the local steps that gives the direction (lambda)")
    length: Literal["row", "table"] = Field("row", description="whose length is kept: every row's, or the table's")
    negatives: Literal["mixed", "uniform"] = Field(
        "mixed", description="mixed: from items near the user and near its items; how many: train.negatives"
    )
    pool: float = Field(0.1, gt=0, le=1, description="share of all items in each of the two pools (R)")


@dataclass(frozen=True)
class StoredRound:
    """What is known of an earlier round while it is replayed."""

    total: Total  # of what devices kept of it
    is_first: bool
    head_lengths: Doubles

    def to_state(self) -> Arrays:
        """What the server holds while the round is replayed."""
        no_counts = np.zeros(0)
        return {
            "stored": self.total["stored"],
            "touched": self.total.sums.get(touched_name("stored"), no_counts),
            "weight": np.array([self.total.weight]),
            "first": np.array([self.is_first]),
            "lengths": self.head_lengths,
        }


@register
class Fru(ReplayUnlearning):
    name = "fru"
    fills = frozenset({"negatives"})
    replay_key = "stored"
    required_order = ("encode", "after")
    Config: ClassVar[type[PartConfig]] = FruConfig
    config: FruConfig

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        backbone = self.context.backbone
        lists = log.make_empty_log(n_users, backbone.item_width)
        shape = (n_users, backbone.private_width)
        start = np.zeros(shape, np.float32)
        return (
            StateSpec("rows", lists["rows"]),
            StateSpec("rounds", lists["rounds"], Role.REPORTED),
            StateSpec("start", start),
        )

    def on_block_start(self, view: CohortView) -> StateUpdate:
        return {"start": view.private.copy()}

    def prepare(self, view: CohortView) -> LocalTask:
        if self.config.negatives == "uniform":
            return LocalTask()
        return LocalTask(negatives=self._draw_negatives)

    def _draw_negatives(self, view: CohortView, counts: Longs) -> Ints:
        backbone = self.context.backbone
        private = backbone.split_private(view.private)
        vectors = private.get("p")
        width = view.items.shape[1]
        if vectors is not None and vectors.shape[1] != width:
            vectors = None
        draws = self.context.draws
        key = draws.private("semi-hard", view.block, view.round)
        n_pool = self.config.pool
        return draw_mixed_negatives(view, counts, vectors, n_pool, key)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """Keep what leaves, as it leaves: this part stands after those that change uploads."""
        if view.replay is not None or "rows" not in upload.values:
            return upload, {}
        share = self.config.keep
        records = log.record_upload(view, upload, share)
        return upload, records

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if requests.kind == "leave":
            width = self.context.backbone.item_width
            return log.make_empty_log(len(view.user), width)
        if requests.kind != "forget":
            return {}
        lists = view.lists[self.name]
        rows = lists["rows"]
        row_owners = rows.rows()
        dropped = requests.items.holds(row_owners, rows.ids)
        return log.without_rows(lists, dropped)

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        if question == "back":
            return self._restore_block_start(view)
        match = _STORED_PATTERN.fullmatch(question)
        if match is None:  # a round has one name: under a second one it would be sent twice
            return super().answer_question(view, question)
        lists = view.lists[self.name]
        block = int(match[1])
        number = int(match[2])
        moment = (block, number)
        rows, weight = log.read_round(lists, moment)
        upload = Upload({"stored": rows}, weight, view.client_keys)
        return CohortReply(upload)

    def _restore_block_start(self, view: CohortView) -> CohortReply:
        """The private vectors of the block's start; the answer is the size of the log."""
        lists = view.lists[self.name]
        n_bytes = log.count_log_bytes(lists)
        size = n_bytes.astype(np.float64)
        column = DenseArrays(size[:, None])
        weight = np.ones(view.n_clients)
        upload = Upload({"bytes": column}, weight, view.client_keys)
        state = view.parts[self.name]
        start = state["start"]
        return CohortReply(upload, {"private": start})

    # on the server

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if question == "back":
            return (Spec("bytes", (1,), least=0.0, about="how much devices keep to be able to forget"),)
        per_row = self.context.train.aggregation == "per-row"
        about = "what was sent in an earlier round"
        shape = server.items.shape
        return (Spec("stored", shape, most=MOST_MOVE, touched=per_row, about=about),)

    def make_empty_state(self, server: ServerState) -> Arrays:
        n_heads = len(server.heads)
        no_lengths = np.zeros((0, n_heads))
        return log.make_empty_round_log() | {"lengths-seen": no_lengths}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        state = server.parts[self.name]
        if "stored" in state:
            return server
        moved = []
        for name, head in server.heads.items():
            step = head - before.heads[name]
            moved.append(np.linalg.norm(step))
        lengths_of_round = np.array([moved])
        new_lengths = lengths_of_round.reshape(1, -1)
        earlier = state["lengths-seen"]
        lengths = np.concatenate([earlier, new_lengths])
        updated = {**state, "lengths-seen": lengths}
        return server.with_part(self.name, updated)

    def decode(self, server: ServerState, total: Total) -> Total:
        """In a replayed round: the new direction, and the length that was kept."""
        state = server.parts.get(self.name, {})
        is_replay = "stored" in state and "rows" in total.sums
        if not is_replay or total.n_clients == 0:
            return total
        train = self.context.train
        denominator = choose_denominator(total, "rows", train, 0.0)
        old_step = self._compute_stored_step(state)
        if state["first"][0]:
            rows = old_step * denominator
        else:
            new_step = total["rows"] / denominator
            factor = self._compute_length_factor(old_step, new_step)
            rows = total["rows"] * factor
        divisor = total.weight
        if isinstance(denominator, float):
            divisor = denominator
        heads = self._scale_heads(server, total, divisor)
        return total.with_sums({"rows": rows, **heads})

    def _compute_stored_step(self, state: Arrays) -> Doubles:
        """The mean that devices' logs give for the replayed round."""
        name = touched_name("rows")
        stored_rows = state["stored"]
        touched_rows = state["touched"]
        sums = {"rows": stored_rows, name: touched_rows}
        weight = float(state["weight"][0])
        stored = Total(sums, weight)
        train = self.context.train
        denominator = choose_denominator(stored, "rows", train, 0.0)
        divisor = np.maximum(denominator, _TINY)
        return np.asarray(state["stored"] / divisor)

    def _compute_length_factor(self, old: Doubles, new: Doubles) -> Doubles:
        """What brings a new change to the length of the old one; what did not move now does not move."""
        axis = 1 if self.config.length == "row" else None
        old_length = np.linalg.norm(old, axis=axis, keepdims=True)
        new_length = np.linalg.norm(new, axis=axis, keepdims=True)
        divisor = np.maximum(new_length, _TINY)
        factor = old_length / divisor
        moved = new_length > _TINY
        factors = np.where(moved, factor, 0.0)
        return np.asarray(factors)

    def _scale_heads(self, server: ServerState, total: Total, divisor: float) -> dict[str, Doubles]:
        """Shared parameters' sums, brought to the lengths that the server saw."""
        state = server.parts[self.name]
        lengths = state["lengths"]
        sums = {}
        for index, head in enumerate(server.heads):
            name = f"{HEADS}{head}"
            norm = np.linalg.norm(total[name])
            rate = self.context.train.server_lr
            length = rate * norm / divisor
            factor = lengths[index] / max(length, _TINY)
            sums[name] = total[name] * factor
        return sums

    def replay_all(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport]:
        play.require_rounds_left(self.count_block_rounds(server))
        state = server.parts[self.name]
        leavers = find_leavers(requests)
        participants = np.unique(state["clients"])
        sizes = ask(server, "back", participants)  # leavers as well: their devices keep nothing that was learned
        server = self.restore_start(server)
        is_first = True
        skipped = 0
        rounds = log.iterate_rounds(state)
        for index, (moment, clients) in enumerate(rounds):
            has_left = np.isin(clients, leavers)
            remaining = clients[~has_left]
            if len(remaining) == 0:
                skipped += 1
                continue
            respondents = remaining
            if is_first and requests.kind == "forget":
                respondents = _drop_forgetting_users(remaining, requests.senders)
            block, number = moment
            question = f"stored-{block}-{number}"
            total = ask(server, question, respondents)
            lengths = state["lengths-seen"][index]
            stored = StoredRound(total, is_first, lengths)
            server = self._replay_round(server, stored, moment, remaining, play)
            is_first = False
        state = log.drop_clients(state, leavers)
        total_size = float(sizes["bytes"][0])
        size = total_size / max(1, sizes.n_clients)
        purged = ["logs of those who left", "tables after the first"]
        details = {"skipped": skipped}
        report = log.build_unlearning_report(self.name, state, storage_client=size, purged=purged, details=details)
        updated = server.with_part(self.name, state)
        return updated, report

    def _replay_round(
        self, server: ServerState, stored: StoredRound, moment: log.BlockRound, clients: Keys, play: RoundPlayer
    ) -> ServerState:
        """One round replayed; of an earlier block, what was kept of it."""
        train = self.context.train
        block, number = moment
        if block != server.block:
            denominator = choose_denominator(stored.total, "stored", train, 0.0)
            divisor = np.maximum(denominator, _TINY)
            move = stored.total["stored"]
            step = train.server_lr * move / divisor
            items = server.items + step
            return server.with_items(items.astype(np.float32))
        state = server.parts[self.name]
        replaying = {**state, **stored.to_state()}
        server = server.with_part(self.name, replaying)
        replay = RoundReplay(number, self.config.share)
        server = play(server, clients, replay)
        return server.with_part(self.name, state)


def _drop_forgetting_users(clients: Keys, senders: Keys) -> Keys:
    """The clients whose first round holds nothing that is to be forgotten; all, where there is no other."""
    asks = np.isin(clients, senders)
    others = clients[~asks]
    return others if len(others) else clients


register_preset("fru", {"name": "withdrawal"}, {"name": "fru"})
