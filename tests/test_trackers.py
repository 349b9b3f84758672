"""A run in each tool, offline, read back from what the tool wrote."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tacita as tc
from tacita.cli.entry import app

DATA = "synthetic:users=120,items=60,per_user=12,seed=3"
COMMAND = ["train", "--data", DATA, "--method", "fedavg", "--rounds", "3", "--set", "split.n_blocks=2", "--quiet"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def train_tracked(tool: str) -> tc.Run:
    result = CliRunner().invoke(app, [*COMMAND, "--out", "run", "--track", tool])
    assert result.exit_code == 0, result.output
    return tc.load("run")


def read_events() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]


def test_tensorboard_reads_the_run_back() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_tracked("tensorboard")
    log = EventAccumulator("run/tensorboard").Reload()
    valid = [event.value for event in log.Scalars("valid/ndcg@20")]
    assert valid == pytest.approx([line["valid"] for line in read_events()])
    tested = [event.value for event in log.Scalars("test/ndcg@20")]
    assert tested == pytest.approx([block["ndcg@20"] for block in run.result["blocks"]])
    [mean] = log.Scalars("mean/ndcg@20")
    assert mean.value == pytest.approx(run.result["mean"]["ndcg@20"])
    [settings] = log.Tensors("settings")
    assert b"method = fedavg" in settings.tensor_proto.string_val[0]


def test_mlflow_reads_the_run_back() -> None:
    from mlflow import MlflowClient

    run = train_tracked("mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{Path('mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("tacita")
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.info.run_name == "run"
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["method"] == "fedavg"
    assert tracked.data.metrics["mean/ndcg_at_20"] == pytest.approx(run.result["mean"]["ndcg@20"])
    history = client.get_metric_history(tracked.info.run_id, "valid/ndcg_at_20")
    assert [point.value for point in history] == pytest.approx([line["valid"] for line in read_events()])
    assert set(tracked.data.tags) == {"mlflow.runName"}  # neither a user nor a command line


def test_mlflow_goes_on_with_the_run_that_was_stopped() -> None:
    from mlflow import MlflowClient

    class Stop(tc.Callback):
        def on_round(self, report: Any) -> None:
            raise KeyboardInterrupt

    quick: dict[str, Any] = {"method": "fedavg", "train": {"rounds": 3}, "split": {"n_blocks": 2}}
    with pytest.raises(KeyboardInterrupt):
        tc.train(DATA, out="run", track="mlflow", callbacks=[Stop()], **quick)
    client = MlflowClient(tracking_uri=f"sqlite:///{Path('mlflow.db').resolve()}")
    experiments = [client.get_experiment_by_name("tacita").experiment_id]
    assert [run.info.status for run in client.search_runs(experiments)] == ["KILLED"]
    tc.train(out="run", resume=True, track="mlflow")
    [tracked] = client.search_runs(experiments)
    assert tracked.info.status == "FINISHED"


def test_wandb_reads_the_run_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train_tracked("wandb")
    [log] = Path("run/wandb").glob("offline-run-*/run-*.wandb")
    settings: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    kinds = set()
    for record in read_finished_wandb(log):
        kinds.add(record.WhichOneof("record_type"))
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        if record.HasField("history"):
            rows.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        summary |= {_name(item): json.loads(item.value_json) for item in record.summary.update}
    valid = [row["valid/ndcg@20"] for row in rows if "valid/ndcg@20" in row]
    assert valid == pytest.approx([line["valid"] for line in read_events()])
    tested = [row["test/ndcg@20"] for row in rows if "test/ndcg@20" in row]
    assert tested == pytest.approx([block["ndcg@20"] for block in run.result["blocks"]])
    assert summary["mean/ndcg@20"] == pytest.approx(run.result["mean"]["ndcg@20"])
    assert settings["method"] == "fedavg"
    assert not {"environment", "files", "stats", "output_raw"} & kinds  # no machine, no packages, no terminal


def _name(item: Any) -> str:
    return str(item.key or "/".join(item.nested_key))


def read_finished_wandb(path: Path) -> list[Any]:
    """The records of a log that wandb's service, another process, has written to its end."""
    until = time.monotonic() + 30
    records: list[Any] = []
    while time.monotonic() < until:
        records = list(read_wandb(path))
        if "exit" in [record.WhichOneof("record_type") for record in records]:
            return records
        time.sleep(0.1)
    raise AssertionError(f"{len(records)} records in 30 s, and none says that the run has ended")


def read_wandb(path: Path) -> Iterator[Any]:
    """The records of a log of wandb: a file of LevelDB's log format, after seven bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place = 7
    parts = b""
    block_size = 32_768
    while place + 7 <= len(content):
        left = block_size - place % block_size
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        place += 7
        parts += content[place : place + length]
        place += length
        is_last_part = kind in (1, 4)
        if is_last_part:
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow", "wandb"])
def test_tools_know_neither_user_nor_host(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tool would send holds no name of a person; TensorBoard's file is named after the machine."""
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, "mia-at-home")
    train_tracked(tool)
    logs = {"tensorboard": "run/tensorboard/*", "mlflow": "mlflow.db", "wandb": "run/wandb/offline-run-*/run-*.wandb"}
    paths = list(Path().glob(logs[tool]))
    assert paths
    for path in paths:
        assert b"mia-at-home" not in path.read_bytes()
