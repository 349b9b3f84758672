"""What earlier numbers and files depend on is as it was: purposes, cell keys, run folders, stores, messages."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stable_names
from helpers.loopback_site import Loopback, Site, close_nodes, without_timestamp
from tacita.core.codec import unpack
from tacita.core.config import RunConfig, validate_model
from tacita.live.node import question_handler
from tacita.live.node.node import Node
from tacita.live.server.store import STORE_FILE, ServerStore
from tacita.live.wire import decode_reply, decode_request, encode_message
from tacita.runs import serving, training

EARLIER = stable_names.FOLDER / "version-0.1.0.tar.xz"
SITES = ("f3crec", "fedshare", "retraction", "tally")
RUNS = ("f3crec", "fedshare", "fru", "tally-budget", "tally-order", "dpps", "fedkdrec")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Run folders, stores of nodes and servers, and messages, all written by version 0.1.0."""
    with tarfile.open(EARLIER) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def expected(earlier: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((earlier / "expected.json").read_text())
    return values


def test_purposes_of_draws_are_as_they_were() -> None:
    assert stable_names.package_purposes() == json.loads(stable_names.PURPOSES.read_text())


def test_a_renamed_purpose_is_found() -> None:
    source = "key = self.context.draws.public(f'{self.name}-repair', 1) ^ draws.private('station')"
    assert list(stable_names.find_purposes(source)) == ["{}-repair", "station"]


def test_keys_of_cells_are_as_they_were() -> None:
    assert stable_names.planned_cell_keys() == json.loads(stable_names.CELL_KEYS.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_folder_of_an_earlier_version_recommends_as_it_did(earlier: Path, name: str) -> None:
    want = expected(earlier)["runs"][name]["served"]
    served = serving.recommend(earlier / "runs" / name, list(want), 5)
    for user, items in want.items():
        assert [item["item"] for item in served[user]] == [item for item, _ in items]
        assert [item["score"] for item in served[user]] == pytest.approx([score for _, score in items], rel=2e-4)


def test_a_run_that_an_earlier_version_began_goes_on(earlier: Path) -> None:
    run = training.resume(earlier / "runs" / "stopped")
    assert run.result["mean"] == pytest.approx(expected(earlier)["runs"]["stopped"]["mean"], rel=2e-4)


@pytest.mark.parametrize("name", SITES)
def test_messages_of_an_earlier_version_are_read_and_written_alike(earlier: Path, name: str) -> None:
    files = sorted((earlier / "messages" / name).iterdir())
    assert files
    for path in files:
        decode = decode_request if path.suffix == ".request" else decode_reply
        message = decode(path.read_bytes())
        again = decode(encode_message(message))
        assert again.head == message.head
        assert again.arrays.keys() == message.arrays.keys()


@pytest.mark.parametrize("name", SITES)
def test_stores_of_an_earlier_version_go_on_where_they_stood(earlier: Path, name: str) -> None:
    folder = earlier / "sites" / name
    data = json.loads((earlier / "sites" / f"{name}.rows.json").read_text())
    nodes = {number: Node.open(folder / f"node{number}") for number in (1, 2, 3)}
    site = Site(folder, _stored_config(folder), Loopback(nodes))
    for path in sorted((earlier / "messages" / name).glob("close.*.request")):
        number = int(path.name.split(".")[1])
        stored = question_handler.answer_message(
            nodes[number], path.read_bytes()
        )  # what was answered is answered alike
        assert without_timestamp(stored) == without_timestamp(path.with_suffix(".reply").read_bytes())
    site.publish(data["items"][1])
    site.collect([tuple(row) for row in data["rows"][1]])
    site.next_block()
    after = unpack((earlier / "sites" / f"{name}.after.safetensors").read_bytes(), "the store")
    arrays = site.arrays()
    assert {key for key in arrays if key.startswith("now/")} == after.keys()
    for key, want in after.items():
        assert arrays[key].dtype == want.dtype
        if want.dtype.kind == "f" and not key.endswith(("commitment", "/time")):
            np.testing.assert_allclose(arrays[key], want, rtol=2e-4, atol=2e-4 * np.abs(want).max(initial=1e-6))
    close_nodes(site)


def _stored_config(folder: Path) -> RunConfig:
    with ServerStore(folder / STORE_FILE) as store:
        return validate_model(RunConfig, store.load_run("r").config.model_dump(), "the store")
