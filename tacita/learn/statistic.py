"""statistic: each client tells once a block, in a sum; the model turns the sum into what it scores with."""

from __future__ import annotations

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, ServerState
from tacita.fields import Answer, Spec, Total, Upload
from tacita.round.learner import Learner, extra_fields, register
from tacita.round.parts import overrides


@register
class StatisticLearner(Learner):
    """Passes the questions of a round on to a model that learns from sums."""

    name = "statistic"
    model_after = True

    def check(self) -> None:
        train, backbone = self.world.train, self.world.backbone
        if train.participation.kind != "all":
            raise TacitaError(
                f"backbone '{backbone.name}' asks everybody once a block; use train.participation.kind = 'all'."
            )
        if train.stepper == "fused":
            raise TacitaError(
                f"there is no fused step for backbone '{backbone.name}': it trains nothing; use train.stepper = 'auto'."
            )

        for part in self.parts:
            if overrides(part, "extras") or overrides(part, "after_training"):
                raise TacitaError(
                    f"part '{part.name}' looks at local training; backbone '{backbone.name}' has none: leave it out."
                )

    @property
    def rounds(self) -> int:
        return self.world.backbone.trials

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return self.world.backbone.questions(server) if server.round == 0 else ()

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        extras = extra_fields(self.parts, len(server.items))
        return (*self.world.backbone.statistic_fields(server, question), *extras)

    def answer(self, view: CohortView, question: str) -> Answer:
        told = self.world.backbone.tell(view, question)
        return Answer(Upload(told, np.ones(view.n_clients), view.client_keys))

    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return self.world.backbone.learn(server, total, question)

    def go_on(self, server: ServerState) -> ServerState:
        return self.world.backbone.try_next(server)
