"""Transcripts of lab runs: what whoever gets the models, and what is handed out with them, can read.

Every play goes from a table of rows through `assemble_federation` and the loop of every run, with noise of its own.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.types import AnyArray, Broadcast, Doubles, Floats, Keys, ServerState
from tacita.data.frames import IN_MEMORY, convert_to_frame_or_none
from tacita.federation.device_protocol import RoundReply
from tacita.federation.devices import LocalDevices
from tacita.federation.one_round import Progress, RoundReport
from tacita.federation.rounds import begin_block, make_initial_progress, run_remaining_blocks
from tacita.federation.state_arrays import flatten_server, make_server_note
from tacita.messages import Total
from tacita.research.audit.canaries.neighbours import CATALOGUE, PERSON, World
from tacita.research.audit.canaries.transcripts import READER, Transcript
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.runs.assembly import Machine, RunTable, assemble_federation, load_run_table

ONE_THREAD = Machine(threads=1)
SMALL_EVALUATION = {"k": [2], "select_by": "ndcg@2", "controls": False, "every": 1000}
ONLY_TRAINING = {"kind": "leave-some-out", "held_out": "random", "least_items": 1000}
"""A split in which everybody's rows are all for training."""
SIZE_OF_NOISE = f"{READER}the size of the noise in a round"
SEEDS = 1500  # that plays have; what differs between plays of one seed is the secret of their noise
MAX_NUMBERS = 400  # of an array that a transcript holds whole; of a larger one its size and its first numbers


@dataclass(frozen=True)
class LabSetting:
    """A run under a budget, and the public list of its items."""

    values: dict[str, Any]
    catalogue: tuple[str, ...] = CATALOGUE

    def build_config(self, number: int) -> RunConfig:
        """The settings of one play."""
        values = {
            "data": IN_MEMORY,
            "catalogue": str(_write_catalogue(self.catalogue)),
            "split": ONLY_TRAINING,
            "evaluate": SMALL_EVALUATION,
            **self.values,
            "seed": number % SEEDS,
        }
        return validate_model(RunConfig, values, "the audit")


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@lru_cache(maxsize=16)
def _write_catalogue(items: tuple[str, ...]) -> Path:
    """A file that lists the items."""
    folder = tempfile.TemporaryDirectory(prefix="tacita-audit-")
    _folders.append(folder)
    path = Path(folder.name) / "catalogue.csv"
    lines = ["item", *items]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Release:
    """A noised sum, and the server that asked for it."""

    server: ServerState
    question: Question
    total: Total


@dataclass
class ReleaseRecorder(LocalDevices):
    """The lab's devices, which write down every sum that leaves them."""

    releases: list[Release] = field(default_factory=list)

    def exchange(
        self,
        federation: Federation,
        server: ServerState,
        broadcast: Broadcast,
        question: Question,
        chosen: Keys | None = None,
    ) -> RoundReply:
        reply = super().exchange(federation, server, broadcast, question, chosen)
        self.releases.append(Release(server, question, reply.total))
        return reply


@dataclass(frozen=True)
class LabPlay:
    """A run that was played, and what left."""

    federation: Federation
    progress: Progress
    transcript: Transcript
    releases: list[Release]


def assemble_world(setting: LabSetting, world: World, number: int) -> Federation:
    """A run whose noise follows a secret of its own, which the number of the play stands for."""
    data = _read_world(world)
    return assemble_federation(setting.build_config(number), ONE_THREAD, data=data, noise_secret=f"play {number}")


@lru_cache(maxsize=4)
def _read_world(world: World) -> RunTable:
    """The rows of a world, read once for all plays."""
    return load_run_table(RunConfig(data=IN_MEMORY), ONE_THREAD, convert_to_frame_or_none(world.to_columns()))


def play_lab(setting: LabSetting, world: World, number: int) -> LabPlay:
    """One run; the transcript holds the model of every round, and all that is exact of its shape."""
    federation = assemble_world(setting, world, number)
    devices = ReleaseRecorder(make_initial_progress(federation).clients)
    devices.clients.take_snapshot()
    progress = make_initial_progress(federation, devices)
    transcript = Transcript()
    recorder = RoundRecorder(transcript)
    run_remaining_blocks(federation, progress, recorder.record)
    recorder.add_mean_noise_size()
    _add_model(transcript, federation, progress)
    return LabPlay(federation, progress, transcript, devices.releases)


@dataclass
class RoundRecorder:
    """Writes down by how much the item rows moved in every round."""

    transcript: Transcript
    items: Floats | None = None
    sizes: list[float] = field(default_factory=list)

    def record(self, report: RoundReport, progress: Progress) -> None:
        now = progress.server.items
        before = self.items
        self.items = now
        if before is None or before.shape != now.shape or not now.size:
            return
        moved = (now - before).astype(np.float64)
        self.sizes.append(compute_mean_square(moved.ravel()))
        add_array_or_sample(self.transcript, f"block {report.block}, round {report.round}: how rows moved", moved)

    def add_mean_noise_size(self) -> None:
        """A reader who looks for the size of the noise, whatever its direction."""
        if self.sizes:
            mean_size = float(np.mean(self.sizes))
            self.transcript.add(SIZE_OF_NOISE, mean_size)


def _add_model(transcript: Transcript, federation: Federation, progress: Progress) -> None:
    """The model that is handed out, its shape and its catalogue."""
    stream = federation.stream
    transcript.add("catalogue", " ".join(stream.item_ids))
    transcript.add("blocks", len(stream.blocks))
    transcript.add_all("note: ", make_server_note(progress.server))
    transcript.add("fingerprint", stream.fingerprint)
    for name, array in flatten_server(progress.server).items():
        add_array_or_sample(transcript, f"model: {name}", array)


def add_array_or_sample(transcript: Transcript, name: str, array: AnyArray) -> None:
    """An array, or of a large one its shape, its size and its first numbers."""
    if array.size <= MAX_NUMBERS:
        transcript.add(name, array)
        return
    flat = np.asarray(array, np.float64).ravel()
    transcript.add(f"{name} (shape)", str(array.shape))
    transcript.add(f"{name} (size)", compute_mean_square(flat))
    transcript.add(f"{name} (first numbers)", flat[:16])


def compute_mean_square(values: Doubles) -> float:
    return float(values @ values) / len(values)


def play_own_release(setting: LabSetting, world: World, number: int) -> Transcript:
    """What a server gets of the person alone, where every release has noise of its own."""
    federation = assemble_world(setting, world, number)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    person = np.array([federation.stream.user_ids.index(PERSON)])
    keys = federation.stream.user_keys[person]
    broadcast = federation.broadcast_serving(progress.server)
    reply = progress.devices.exchange(federation, progress.server, broadcast, Question("round"), keys)
    transcript = Transcript()
    transcript.add("clients", reply.clients)
    transcript.add("expected", reply.expected)
    transcript.add("weight", reply.total.weight)
    for name, value in reply.total.sums.items():
        add_array_or_sample(transcript, name, value)
    return transcript
