"""Controls that send as many items as an agent did: their number is read from the agent's finished cell (FedKDRec)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.methods.distillation.presets import TRANSFER
from tacita.research.experiments.experiment_cell import Cells, ExperimentCell
from tacita.research.experiments.single_block import CellLines, Line


def check_schedules(cells: Cells, lines: CellLines) -> None:
    """Refuse, before anything is run, cells whose agent is neither finished nor among them."""
    planned = {cell.key for cell in cells if cell.follows is None}
    for cell in cells:
        agent = cell.follows
        if agent is None:
            continue
        if agent.key in lines or agent.key in planned:
            continue
        raise TacitaError(
            f"variant '{cell.variant}' sends as many items as '{agent.variant}', whose cell on {cell.dataset}, "
            f"{cell.backbone}, seed {cell.seed} is not there; add --only {agent.variant}."
        )


def with_upload_sizes(cells: Cells, lines: CellLines) -> Cells:
    """The same cells, those that follow an agent with the number of items that it sent."""
    scheduled = []
    for cell in cells:
        if cell.follows:
            cell = _with_upload_size(cell, lines[cell.follows.key])
        scheduled.append(cell)
    return scheduled


def _with_upload_size(cell: ExperimentCell, agent: Line) -> ExperimentCell:
    if "failed" in agent:
        raise TacitaError(
            f"variant '{cell.variant}' sends as many items as '{agent['variant']}', whose cell on {cell.dataset}, "
            f"{cell.backbone}, seed {cell.seed} failed: {agent['failed']}"
        )
    picked = agent["values"]["picked"]
    n_sent = round(float(np.mean(picked[1:])), 3)  # in the first round nobody can send anything
    parts = []
    for spec in cell.config.parts or []:
        is_transfer = spec["name"] == TRANSFER
        parts.append({**spec, "scheduled": n_sent} if is_transfer else spec)
    config = cell.config.model_copy(update={"parts": parts})
    return replace(cell, config=config, follows=None)
