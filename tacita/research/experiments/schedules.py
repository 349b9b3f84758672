"""Controls that send as many items as an agent did: their number is read from the agent's finished cell (FedKDRec)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.methods.distillation.presets import TRANSFER
from tacita.research.experiments.experiment_spec import ExperimentCell
from tacita.research.experiments.single_block import Line


def check_schedules(cells: list[ExperimentCell], known: dict[str, Line]) -> None:
    """Refuse, before anything is run, cells whose agent is neither finished nor among them."""
    asked = {one.key for one in cells if one.follows is None}
    for one in cells:
        if one.follows and one.follows.key not in known.keys() | asked:
            raise TacitaError(
                f"variant '{one.variant}' sends as many items as '{one.follows.variant}', whose cell on {one.dataset}, "
                f"{one.backbone}, seed {one.seed} is not there; add --only {one.follows.variant}."
            )


def with_schedules(cells: list[ExperimentCell], lines: dict[str, Line]) -> list[ExperimentCell]:
    """The same cells, those that follow an agent with the number of items that it sent."""
    return [_set_schedule(one, lines[one.follows.key]) if one.follows else one for one in cells]


def _set_schedule(cell: ExperimentCell, agent: Line) -> ExperimentCell:
    if "failed" in agent:
        raise TacitaError(
            f"variant '{cell.variant}' sends as many items as '{agent['variant']}', whose cell on {cell.dataset}, "
            f"{cell.backbone}, seed {cell.seed} failed: {agent['failed']}"
        )
    sent = round(float(np.mean(agent["values"]["picked"][1:])), 3)  # in the first round nobody can send anything
    parts = [{**one, "scheduled": sent} if one["name"] == TRANSFER else one for one in cell.config.parts or []]
    return replace(cell, config=cell.config.model_copy(update={"parts": parts}), follows=None)
