"""rows: clients train locally and send how item rows and shared parameters moved; the server averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts
from tacita.core.types import AnyArray, Doubles, Ragged, ServerState
from tacita.learn.training import Workspace, check_training, train_cohort
from tacita.messages import CohortReply, Spec, Total, touched_name
from tacita.round.device_state import OWN_ROWS, PARTS
from tacita.round.learner import Learner, register
from tacita.round.part import Part, RunContext
from tacita.round.task import CohortTask

HEADS = "heads/"
MOST_MOVE = 1e4  # of one number by one client in one round; where clients do that, training has diverged


@register
class RowsLearner(Learner):
    name = "rows"

    def __init__(self, context: RunContext, parts: Sequence[Part]) -> None:
        super().__init__(context, parts)
        self.workspace = Workspace()

    def check(self) -> None:
        train = self.context.train
        check_training(self.context.scorer, self.parts, train)
        if train.moments == "kept":
            raise TacitaError(
                "train.moments = 'kept' is for clients that keep models of their own, and here they begin every round "
                "with the server's; leave it at 'fresh'."
            )
        if train.weigh_by == "data" and train.aggregation == "mean":
            raise TacitaError("train.weigh_by = 'data' with train.aggregation = 'mean' is 'weighted'; say that.")
        if train.weigh_by == "data" and train.aggregation == "fixed" and train.denominator is None:
            raise TacitaError(
                "train.weigh_by = 'data' with train.aggregation = 'fixed' needs train.denominator: how many "
                "interactions a round learns from on average."
            )

    @property
    def rounds(self) -> int:
        return self.context.train.rounds

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return ("round",)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "how item rows and shared parameters moved"
        per_row = self.context.train.aggregation == "per-row"  # else nobody's business
        rows = Spec("rows", server.items.shape, most=MOST_MOVE, touched=per_row, about=about)
        specs = [rows]
        for name, head in server.heads.items():
            specs.append(Spec(f"{HEADS}{name}", head.shape, most=MOST_MOVE))
        return tuple(specs)

    def answer(self, task: CohortTask, question: str) -> CohortReply:
        context = self.context
        view = task.view
        trained = train_cohort(task, context.scorer, self.watching_parts, context.train, context.draws, self.workspace)
        upload = trained.upload
        local = trained.local
        if context.train.weighs_data:
            n_samples = np.diff(view.train.ptr[view.user_ptr])
            upload = replace(upload, weight=n_samples.astype(np.float64))
        state: dict[str, AnyArray | Ragged] = {"private": local.private}
        state["took_part"] = np.ones(len(view.user), bool)
        state |= flatten_parts(trained.part_state, PARTS)
        own_rows = Ragged(local.row_start, local.row_item, {"moved": local.rows})
        state[OWN_ROWS] = own_rows  # where devices have room for it
        return CohortReply(upload, state, local.notes)

    def learn_from_total(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return apply_total(server, total, self.context.train, expected)


def choose_denominator(total: Total, name: str, train: TrainConfig, expected: float) -> float | Doubles:
    """What the sum of a field of item rows is divided by."""
    if train.aggregation == "per-row":
        touched = total.sums[touched_name(name)]
        return np.maximum(touched, 1e-300)[:, None]
    if train.aggregation == "fixed":
        return train.denominator or expected
    return total.weight


def apply_total(server: ServerState, total: Total, train: TrainConfig, expected: float) -> ServerState:
    """The table after the round, before any part's server step."""
    if total.n_clients == 0:
        return server
    _check_shapes(server, total)
    denominator = choose_denominator(total, "rows", train, expected)
    whole = denominator if isinstance(denominator, float) else total.weight
    step = train.server_lr
    items = server.items + step * total.sums["rows"] / denominator
    heads: dict[str, AnyArray] = {}
    for name, head in server.heads.items():
        moved = head + step * total.sums[f"{HEADS}{name}"] / whole
        heads[name] = moved.astype(np.float32)
    return replace(server, items=items.astype(np.float32), heads=heads)


def _check_shapes(server: ServerState, total: Total) -> None:
    """Refuse a total that does not fit the model."""
    tables = {"rows": server.items}
    for name, head in server.heads.items():
        tables[f"{HEADS}{name}"] = head
    for name, table in tables.items():
        shape = total.sums[name].shape
        if shape != table.shape:
            raise TacitaError(f"the total of '{name}' has shape {shape}, where the model has {table.shape}.")
