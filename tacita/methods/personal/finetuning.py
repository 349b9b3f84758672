"""fine-tuning: a device takes a few steps on its person's own data before it answers, and forgets them (spec E.5).

theta_i = theta - lambda grad L_i(theta). The paper prints a plus, which climbs the loss; `sign = "printed"` does so, to
show it. With `pull` it is pFedMe's inner problem: theta_i also stays close to theta. Nothing of it is kept or sent, and
the next local training starts from the model as it was received. Every person has a model of their own here, also where
several live in a silo: who is served is a person.

Rounds are validated without it; tests and recommendations have it.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from tacita.core.config import PFedMeConfig, TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Floats, Ragged
from tacita.learn.training import train_without_upload
from tacita.models.personal_scoring import score_personal
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.serving import Purpose, Serving
from tacita.round.task import CohortTask

_FULL_BATCH = 2**40  # a batch that holds everything


class FineTuningConfig(PartConfig):
    steps: int = Field(1, ge=1, le=100, description="steps before a device answers")
    rate: float = Field(1e-3, gt=0, description="their length, lambda")
    pull: float = Field(0.0, ge=0, description="how strongly the model is held to the received one (pFedMe: 15)")
    sign: Literal["descend", "printed"] = Field("descend", description="printed: as the paper has it, up the loss")


@register
class FineTuning(Part):
    name = "fine-tuning"
    serves = frozenset({"personal_scores"})
    reads_items = True
    Config: ClassVar[type[PartConfig]] = FineTuningConfig
    config: FineTuningConfig

    def check(self, n_items: int) -> None:
        backbone = self.context.scorer
        if len(backbone.phases) > 1:
            raise TacitaError(
                f"part 'fine-tuning' moves a whole model at once, and backbone '{backbone.name}' moves in "
                f"{len(backbone.phases)} phases; use another backbone."
            )

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        if purpose == "valid":
            return Serving()
        return Serving(personal_scores=partial(self.score_fine_tuned, view))

    def score_fine_tuned(self, view: CohortView, only: Ragged | None) -> Floats:
        """Scores by the model that the device makes for its user."""
        private, heads, own_rows = self.fine_tune_models(view)
        backbone = self.context.scorer
        context = backbone.list_context_items(view)
        return score_personal(backbone, private, heads, view.items, own_rows, context, only)

    def fine_tune_models(self, view: CohortView) -> tuple[Floats, dict[str, Floats], Ragged]:
        """Everybody's private vector, shared parameters and moved rows after the steps."""
        task = CohortTask(view)
        config = self._make_training_config()
        scorer = self.context.scorer
        local = train_without_upload(task, scorer, config, self.context.draws)
        heads = {}
        for name in local.heads:
            heads[name] = local.personal[f"heads.{name}"]
        received_rows = view.items[local.row_item]
        moved = local.personal["rows"] - received_rows
        moved_rows = Ragged(local.row_start, local.row_item, {"moved": moved})
        return local.personal["private"], heads, moved_rows

    def _make_training_config(self) -> TrainConfig:
        """Settings for steps on all of a user's samples at once, towards a received model that stands still."""
        train = self.context.train
        rate = self.config.rate
        if self.config.sign == "printed":
            rate = -rate
        stepper = "auto"
        if train.stepper == "autograd":
            stepper = "autograd"
        pfedme = {"lam": self.config.pull, "inner_steps": self.config.steps, "inner_lr": rate, "eta": 0.0}
        return train.model_copy(
            update={
                "optimiser": "pfedme",
                "pfedme": PFedMeConfig().model_copy(update=pfedme),
                "stepper": stepper,
                "local_epochs": 1,
                "batch_size": _FULL_BATCH,
                "weight_decay": 0.0,
                "decay": 1.0,
                "moments": "fresh",
            }
        )
