"""MLflow: a run of the experiment `tacita`, in mlflow.db of this folder or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tacita.runs.callbacks import RunStart
from tacita.runs.trackers.tracked_ids import read_tracked_id, write_tracked_id
from tacita.runs.trackers.tracker import Figures, Tracker, missing_package_error

EXPERIMENT = "tacita"
LOCAL_STORE = "mlflow.db"
MOST_PARAMETERS = 100
"""MLflow takes no more in one call."""


class MlflowTracker(Tracker):
    name = "mlflow"

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read as mlflow is imported
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError:
            raise missing_package_error(self.name, "mlflow-skinny") from None
        self._client_class = MlflowClient
        self._metric = Metric
        self._parameter = Param

    def open(self, start: RunStart, settings: Mapping[str, str]) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(LOCAL_STORE).resolve()}"
        self._client = self._client_class(tracking_uri=store)
        earlier = read_tracked_id(start.folder, self.name)
        if earlier is not None:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            return
        experiment = self._find_experiment()
        run = self._client.create_run(experiment, run_name=start.folder.name)  # no tag: MLflow would name the user
        self._run_id = run.info.run_id
        write_tracked_id(start.folder, self.name, self._run_id)
        parameters = [self._parameter(name, value) for name, value in settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + MOST_PARAMETERS])

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(EXPERIMENT))

    def log(self, figures: Figures, step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_name_figure(name), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if is_finished else "KILLED")


def _name_figure(name: str) -> str:
    """MLflow refuses the sign in ndcg@20."""
    return name.replace("@", "_at_")
