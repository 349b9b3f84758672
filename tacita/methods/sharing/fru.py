"""fru: go back to the start and over every round again without those who left (FRU, WSDM'23; sharing spec C.5).

Devices keep what they sent, the rows that moved furthest; the server keeps the first table and who took part. To
forget, each round is played once more with the same people but those who left: they train a fraction of the steps,
which gives the direction, and what they had kept gives the length. The first round is what they had kept, itself.

Where we differ: a round of an earlier block is what was kept of it, since devices learn from the present block. Shared
parameters get the length that the server saw, leavers included. Of who has single items forgotten, the rows of these
items leave the log, and the first round is played without them. The server is one more client where people share: its
own steps run inside each round, on what is shared now (`server.given`), in full and not shortened to a kept length; a
part that would do that compares `before` and `server` in its `server_step`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Doubles, Ints, Keys, Longs, RoundReplay, ServerState, StateUpdate
from tacita.learn.rows import HEADS, MOST_MOVE, choose_denominator
from tacita.messages import CohortReply, DenseArrays, Spec, Total, Upload, touched_name
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.negatives import draw_mixed_negatives
from tacita.methods.sharing.replay_unlearning import ReplayUnlearning, find_leavers
from tacita.round.parts import DeviceQuery, PartConfig, RoundPlayer
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch

_TINY = 1e-12
_STORED_PATTERN = re.compile("stored-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_REPLAY_KEYS = ("stored", "touched", "weight", "first", "lengths")  # held only while a round is played once more


class FruConfig(PartConfig):
    keep: float = Field(0.5, gt=0, le=1, description="share of the rows of an upload that is kept (alpha)")
    share: float = Field(0.1, gt=0, le=1, description="share of the local steps that gives the direction (lambda)")
    length: Literal["row", "table"] = Field("row", description="whose length is kept: every row's, or the table's")
    negatives: Literal["mixed", "uniform"] = Field(
        "mixed", description="mixed: from items near the user and near its items; how many: train.negatives"
    )
    pool: float = Field(0.1, gt=0, le=1, description="share of all items in each of the two pools (R)")


@register
class Fru(ReplayUnlearning):
    name = "fru"
    replay_key = "stored"
    required_order = ("encode", "after")
    Config: ClassVar[type[PartConfig]] = FruConfig
    config: FruConfig

    # on the device

    def device_arrays(self, n_users: int) -> StateUpdate:
        width = self.context.backbone.private_width
        kept = log.empty_log(n_users, self.context.backbone.item_width)
        return {**kept, "start": np.zeros((n_users, width), np.float32)}

    def begin_block(self, view: CohortView) -> StateUpdate:
        return {"start": view.private.copy()}

    def negatives(self, view: CohortView, counts: Longs) -> Ints | None:
        if self.config.negatives == "uniform":
            return None
        private = self.context.backbone.named(view.private)
        fits = "p" in private and private["p"].shape[1] == view.items.shape[1]
        key = self.context.draws.private("semi-hard", view.block, view.round)
        return draw_mixed_negatives(view, counts, private["p"] if fits else None, self.config.pool, key)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """Keep what leaves, as it leaves: this part stands after those that change uploads."""
        if view.replay is not None or "rows" not in upload.values:
            return upload, {}
        return upload, log.record_upload(view, upload, self.config.keep)

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        lists = view.lists[self.name]
        rows = lists["rows"]
        if requests.kind == "leave":
            return log.empty_log(len(view.user), self.context.backbone.item_width)
        gone = requests.items.holds(rows.rows(), rows.ids)
        return log.drop_rows(lists, gone) if requests.kind == "forget" else {}

    def answer(self, view: CohortView, question: str) -> CohortReply:
        what = question.split("/")[1]
        if what == "back":  # to where the block began, and how much is kept here
            size = log.log_bytes(view.lists[self.name]).astype(np.float64)[:, None]
            told = Upload({"bytes": DenseArrays(size)}, np.ones(view.n_clients), view.client_keys)
            return CohortReply(told, {"private": view.parts[self.name]["start"]})
        moment = _STORED_PATTERN.fullmatch(what)
        if moment is None:  # a round has one name: under a second one it would be told twice
            return super().answer(view, question)
        rows, weight = log.read_round(view.lists[self.name], (int(moment[1]), int(moment[2])))
        return CohortReply(Upload({"stored": rows}, weight, view.client_keys))

    # on the server

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if question.split("/")[1] == "back":
            return (Spec("bytes", (1,), least=0.0, about="how much devices keep to be able to forget"),)
        per_row, about = self.context.train.aggregation == "per-row", "what was sent in an earlier round"
        return (Spec("stored", server.items.shape, most=MOST_MOVE, touched=per_row, about=about),)

    def empty_state(self, server: ServerState) -> Arrays:
        return log.empty_round_log() | {"lengths-seen": np.zeros((0, len(server.heads)))}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        held = server.parts[self.name]
        if "stored" in held:
            return server
        moved = [np.linalg.norm(v - before.heads[name]) for name, v in server.heads.items()]
        seen = np.concatenate([held["lengths-seen"], np.array([moved]).reshape(1, -1)])
        return server.with_part(self.name, {**held, "lengths-seen": seen})

    def decode(self, server: ServerState, total: Total) -> Total:
        """In a round that is played once more: the new direction, and the length that was kept."""
        held = server.parts.get(self.name, {})
        if "stored" not in held or "rows" not in total.sums or total.n_clients == 0:
            return total
        plan, name = self.context.train, touched_name("rows")
        kept = Total({"rows": held["stored"], name: held["touched"]}, float(held["weight"][0]))
        by, kept_by = (choose_denominator(one, "rows", plan, 0.0) for one in (total, kept))
        old = held["stored"] / np.maximum(kept_by, _TINY)
        if held["first"][0]:
            sums: dict[str, Doubles] = {"rows": old * by}
        else:
            sums = {"rows": total["rows"] * self._compute_length_factor(old, total["rows"] / by)}
        whole = by if isinstance(by, float) else total.weight
        for k, head in enumerate(server.heads):
            length = plan.server_lr * np.linalg.norm(total[f"{HEADS}{head}"]) / whole
            sums[f"{HEADS}{head}"] = total[f"{HEADS}{head}"] * (held["lengths"][k] / max(length, _TINY))
        return total.with_sums(sums)

    def _compute_length_factor(self, old: Doubles, new: Doubles) -> Doubles:
        """What brings a new change to the length of the old one; what did not move now does not move."""
        axis = 1 if self.config.length == "row" else None
        lengths, now = (np.linalg.norm(one, axis=axis, keepdims=True) for one in (old, new))
        return np.asarray(np.where(now > _TINY, lengths / np.maximum(now, _TINY), 0.0))

    def replay_rounds(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]]:
        play.require_rounds(self.count_block_rounds(server))
        held, gone = server.parts[self.name], find_leavers(requests)
        everybody = np.unique(held["clients"])
        size = ask(server, f"{self.name}/back", everybody)  # who left, too, keeps nothing of what was learnt
        server, first, skipped = self.restore_start(server), True, 0
        for k, (moment, clients) in enumerate(log.iterate_rounds(held)):
            stay = clients[~np.isin(clients, gone)]
            if len(stay) == 0:
                skipped += 1
                continue
            made_with = first and requests.kind == "forget"  # what they forget
            whole = stay[~np.isin(stay, requests.senders)] if made_with else stay
            told = ask(server, f"{self.name}/stored-{moment[0]}-{moment[1]}", whole if len(whole) else stay)
            server = self._replay_round(server, (told, first, held["lengths-seen"][k]), moment, stay, play)
            first = False
        held = log.drop_clients(held, gone)
        said = log.build_certificate(
            self.name, held, storage_client=float(size["bytes"][0]) / max(1, size.n_clients), skipped=skipped,
            purged=["logs of those who left", "tables after the first"],
        )  # fmt: skip
        return server.with_part(self.name, held), said

    def _replay_round(
        self,
        server: ServerState,
        stored: tuple[Total, bool, Doubles],
        moment: log.BlockRound,
        clients: Keys,
        play: RoundPlayer,
    ) -> ServerState:
        """One round over again; of an earlier block, what was kept of it."""
        (told, first, lengths), plan = stored, self.context.train
        if moment[0] != server.block:
            step = plan.server_lr * told["stored"] / np.maximum(choose_denominator(told, "stored", plan, 0.0), _TINY)
            return server.with_items((server.items + step).astype(np.float32))
        touched = told.sums.get(touched_name("stored"), np.zeros(0))
        now = dict(zip(_REPLAY_KEYS, (told["stored"], touched, np.array([told.weight]), np.array([first]), lengths)))
        held = server.parts[self.name]
        server = play(server.with_part(self.name, {**held, **now}), clients, RoundReplay(moment[1], self.config.share))
        return server.with_part(self.name, held)


register_preset("fru", {"name": "withdrawal"}, {"name": "fru"})
