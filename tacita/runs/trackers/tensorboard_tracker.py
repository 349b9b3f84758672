"""TensorBoard: event files in the folder `tensorboard` of a run; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tacita.runs.callbacks import RunStart
from tacita.runs.trackers.tracker import Figures, Tracker, missing_package_error

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    name = "tensorboard"

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise missing_package_error(self.name, "tensorboard") from None
        self._event = Event
        self._summary = Summary
        self._text = text_pb
        self._open_writer = EventFileWriter

    def open(self, start: RunStart, settings: Mapping[str, str]) -> None:
        self._writer = self._open_writer(str(start.folder / FOLDER))
        lines = [f"    {name} = {value}" for name, value in settings.items()]
        text = self._text("settings", "\n".join(lines))
        self._writer.add_event(self._event(wall_time=time.time(), step=0, summary=text))

    def log(self, figures: Figures, step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self, is_finished: bool) -> None:
        self._writer.close()
