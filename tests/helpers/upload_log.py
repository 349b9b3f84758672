"""A part whose devices keep their uploads and hand out the sum to be forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from helpers.loopback_site import (
    site_config,
)
from tacita.core.config import RunConfig, validate_model
from tacita.core.types import (
    CohortView,
    LocalModels,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.messages import CohortReply, SparseRows, Spec, Upload
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.request import RequestBatch
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask, TrainingOutcome
from tacita.round.unlearning_report import UnlearningReport


class UploadLog(Part, Unlearning):
    """Devices keep what they sent; who wants to be forgotten sends the sum of it, and trains no more."""

    name = "probe-log"
    scope = ("given",)
    fills = frozenset({"data"})

    def state(self, n_users: int) -> Sequence[StateSpec]:
        width = self.context.backbone.item_width
        none = Ragged(np.zeros(n_users + 1, np.int64), np.zeros(0, np.int32), {"row": np.zeros((0, width), np.float32)})
        return [StateSpec("sent", none), StateSpec("gone", np.zeros(n_users, bool))]

    def prepare(self, view: CohortView) -> LocalTask:
        stays = ~view.parts[self.name]["gone"][view.train.rows()]
        train = Ragged.from_pairs(view.train.rows()[stays], view.train.ids[stays], len(view.train))
        return LocalTask(view=replace(view, train=train, exclude=view.train))

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        moved = Ragged(local.row_start, local.row_item, {"row": local.rows - view.items[local.row_item]})
        return TrainingOutcome(state={"sent": view.lists[self.name]["sent"].join_rows(moved)})

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return (Spec("sent", server.items.shape, most=1e4),)

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        log = view.lists[self.name]["sent"]
        sparse_rows = SparseRows(log.rows(), log.ids, log.values["row"])
        return CohortReply(Upload({"sent": sparse_rows}, np.ones(view.n_clients), view.client_keys))

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        return {"gone": np.ones(len(view.user), bool)}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        (sender,) = requests.senders.tolist()
        total = ask(server, "stored", np.array([sender], np.uint64))
        assert total.n_clients == 1
        denominator = self.context.train.denominator
        assert denominator is not None
        items = server.items - total["sent"] / denominator
        report = UnlearningReport(details={"taken back": float(np.abs(total["sent"]).sum())})
        return server.with_items(items.astype(np.float32)), report


def config_with_parts(name: str, *parts: type[Part], rounds: int = 3, **train: Any) -> RunConfig:
    values = site_config(name, rounds, **train).model_dump(mode="json") | {
        "parts": [{"name": part.name} for part in parts]
    }
    return validate_model(RunConfig, values, "the test")
