"""Weights & Biases: a run of the project `tacita`, offline unless WANDB_MODE says otherwise; `wandb sync` sends it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from tacita.runs.callbacks import RunStart
from tacita.runs.trackers.tracked_ids import read_tracked_id, write_tracked_id
from tacita.runs.trackers.tracker import Figures, Tracker, missing_package_error

PROJECT = "tacita"
STEP = "step"


class WandbTracker(Tracker):
    name = "wandb"

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read as wandb is imported
        try:
            import wandb
        except ImportError:
            raise missing_package_error(self.name, "wandb") from None
        self._wandb: Any = wandb

    def open(self, start: RunStart, settings: Mapping[str, str]) -> None:
        run_id = read_tracked_id(start.folder, self.name)
        if run_id is None:
            run_id = secrets.token_hex(8)
            write_tracked_id(start.folder, self.name, run_id)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            mode=os.environ.get("WANDB_MODE") or "offline",
            dir=str(start.folder.resolve()),  # its service has a working folder of its own
            id=run_id,
            name=start.folder.name,
            config=dict(settings),
            resume="allow",
            settings=self._collect_nothing_else(),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def _collect_nothing_else(self) -> Any:
        """Settings that keep code, command line, packages, host and user name out of the log."""
        return self._wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )

    def log(self, figures: Figures, step: int) -> None:
        self._run.log({**figures, STEP: step})

    def summarise(self, figures: Figures, step: int) -> None:
        self._run.summary.update(figures)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)
