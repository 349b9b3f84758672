"""rows: clients train locally and send how item rows and shared parameters moved; the server averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.files import flat
from tacita.core.types import AnyArray, CohortView, Doubles, Floats, Ragged, ServerState
from tacita.fields import Answer, Spec, Total, touched_of
from tacita.learn.training import Workspace, check_training, train_cohort
from tacita.round.device_state import OWN, PARTS
from tacita.round.learner import Learner, extra_fields, register
from tacita.round.parts import Part, World

HEADS = "heads/"
MOST_MOVE = 1e4  # of one number by one client in one round; where clients do that, training has diverged


@register
class RowsLearner(Learner):
    name = "rows"

    def __init__(self, world: World, parts: Sequence[Part]) -> None:
        super().__init__(world, parts)
        self.space = Workspace()

    def check(self) -> None:
        check_training(self.world.backbone, self.parts, self.world.train)
        if self.world.train.moments == "kept":
            raise TacitaError(
                "train.moments = 'kept' is for clients that keep models of their own, and here they begin every round "
                "with the server's; leave it at 'fresh'."
            )

    @property
    def rounds(self) -> int:
        return self.world.train.rounds

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return ("round",)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "how item rows and shared parameters moved"
        per_row = self.world.train.aggregation == "per-row"  # else nobody's business
        rows = Spec("rows", server.items.shape, most=MOST_MOVE, touched=per_row, about=about)
        heads = [Spec(f"{HEADS}{name}", v.shape, most=MOST_MOVE) for name, v in server.heads.items()]
        extras = extra_fields(self.parts, len(server.items))
        return (rows, *heads, *extras)

    def answer(self, view: CohortView, question: str) -> Answer:
        world = self.world
        trained = train_cohort(view, world.backbone, self.parts, world.train, world.draws, self.space)
        upload, local = trained.upload, trained.local
        if world.train.aggregation == "weighted":
            upload = replace(upload, weight=np.diff(view.train.ptr[view.user_ptr]).astype(np.float64))
        kept: dict[str, AnyArray | Ragged] = {"private": local.private, "took_part": np.ones(len(view.user), bool)}
        kept |= flat(trained.parts, PARTS)
        kept[OWN] = Ragged(local.row_start, local.row_item, {"moved": local.rows})  # where devices have room for it
        return Answer(upload, kept, local.notes)

    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return apply_total(server, total, self.world.train, expected)


def apply_total(server: ServerState, total: Total, plan: TrainConfig, expected: float) -> ServerState:
    """The table after the round, before any part's server step."""
    if total.n_clients == 0:
        return server
    for name, now in (("rows", server.items), *((f"{HEADS}{k}", v) for k, v in server.heads.items())):
        if total[name].shape != now.shape:
            raise TacitaError(f"the total of '{name}' has shape {total[name].shape}, where the model has {now.shape}.")
    denominator: float | Doubles
    if plan.aggregation == "per-row":
        denominator = np.maximum(total[touched_of("rows")], 1e-300)[:, None]
    elif plan.aggregation == "fixed":
        denominator = plan.denominator or expected
    else:
        denominator = total.weight
    whole = denominator if isinstance(denominator, float) else total.weight
    step = plan.server_lr
    items: Floats = (server.items + step * total["rows"] / denominator).astype(np.float32)
    heads: dict[str, AnyArray] = {
        name: (v + step * total[f"{HEADS}{name}"] / whole).astype(np.float32) for name, v in server.heads.items()
    }
    return replace(server, items=items, heads=heads)
