"""Transcripts of certificates: somebody else leaves a private run, asks for verification, and shows the certificate."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

from tacita.research.audit.canaries.lab_plays import ONE_THREAD, LabSetting
from tacita.research.audit.canaries.neighbours import World
from tacita.research.audit.canaries.transcripts import Transcript
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.training import train

LEAVER = "other 1"
OF_THE_MOMENT = {
    "request.received_at": "when somebody asked",
    "request.subject*": "a pseudonym that a key of the folder makes",
    "cost.*": "seconds, bytes and storage",
    "model.sha256_before": "a digest of the model, which is noised",
    "model.sha256_after": "the same",
}
"""Entries of a certificate that differ from play to play, and are about the machine or the noised model."""


def play_certificate(setting: LabSetting, world: World, number: int) -> Transcript:
    with tempfile.TemporaryDirectory(prefix="tacita-audit-") as name:
        folder = Path(name)
        data = folder / "rows.csv"
        _write_rows(data, world)
        config = setting.build_config(number).model_copy(update={"data": str(data)})
        train(config, folder / "run", ONE_THREAD)
        request = RawRequest("forget", {LEAVER: None})
        result = submit_request(folder / "run", request, verify=True, machine=ONE_THREAD)
        transcript = Transcript()
        assert result.certificate is not None
        _add_tree(transcript, "", result.certificate.model_dump(mode="json"))
        return transcript


def _write_rows(path: Path, world: World) -> None:
    with open(path, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(["user", "item", "timestamp"])
        writer.writerows(world.rows)


def _add_tree(transcript: Transcript, prefix: str, value: Any) -> None:
    """Every leaf of nested tables and lists under its path."""
    if isinstance(value, dict):
        for name, child in value.items():
            _add_tree(transcript, f"{prefix}.{name}" if prefix else str(name), child)
    elif isinstance(value, list):
        transcript.add(f"{prefix} (length)", len(value))
        for place, child in enumerate(value):
            _add_tree(transcript, f"{prefix}.{place}", child)
    else:
        transcript.add(prefix, value)
