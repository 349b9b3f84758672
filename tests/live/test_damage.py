"""Folders that are damaged, of another version or out of date: one sentence, and nothing of them is touched."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

from live_cluster import free_port
from live_site import UP, done, hashes, make_data, said

from tacita.live import tls_certificates
from tacita.live.node.store_file import STORE_FILE as NODE_STORE
from tacita.live.running.server import ServerConfig
from tacita.live.running.server import create_server as create_server
from tacita.live.server.coordinator import STORE_FILE
from tacita.live.server.store import ServerStore

pytestmark = pytest.mark.live


def damage(path: Path) -> None:
    """Overwrite the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = b"\xff" * (len(content) // 2 - len(content) // 4)
    path.write_bytes(content)


def test_a_damaged_node_or_one_of_another_version_is_not_touched(tmp_path: Path) -> None:
    folder, data = tmp_path / "node", make_data(tmp_path)
    tls_certificates.make_ca(tmp_path)
    done("node", "init", folder, "--server", "127.0.0.1:9", "--ca", tmp_path / "ca.pem", "--name", "n")
    done("node", "import", data, "--folder", folder)
    with contextlib.closing(sqlite3.connect(folder / NODE_STORE)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    good, settings = (folder / NODE_STORE).read_bytes(), (folder / "node.toml").read_text()
    damage(folder / NODE_STORE)
    before = hashes(folder)
    assert "is damaged" in said("node", "run", "--folder", folder)
    assert "is damaged" in said("node", "import", data, "--folder", folder)
    assert hashes(folder) == before
    (folder / NODE_STORE).write_bytes(good)
    (folder / "node.toml").write_text(settings.replace("version = 1", "version = 2"))
    before = hashes(folder)
    assert "is of version 2, made for a newer tacita" in said("node", "run", "--folder", folder)
    assert hashes(folder) == before
    (folder / "node.toml").write_text(settings)
    assert json.loads(done("node", "status", "--folder", folder, "--json"))["interactions"] > 2000


def test_a_damaged_server_or_one_of_another_version_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    ports = ["--port", free_port(), "--link-port", free_port()]
    done("server", "init", folder, "--host", "127.0.0.1", *ports)
    with ServerStore(folder / STORE_FILE) as store:
        store.add_items([(f"item {n}", "x" * 100) for n in range(400)])
    with ServerStore(folder / STORE_FILE) as store:
        store.add_items([(f"item {n}", "x" * 100) for n in range(400, 500)])
        remainder = [(path, path.read_bytes()) for path in (folder / STORE_FILE, folder / f"{STORE_FILE}-wal")]
    settings = (folder / "server.toml").read_text()
    for path, content in remainder:  # as a killed server leaves them: the last commit is in the log
        path.write_bytes(content)
    damage(folder / STORE_FILE)
    before = hashes(folder)
    assert f"{STORE_FILE}-wal" in before
    assert "is damaged" in said(*UP, "--folder", folder)
    assert "is damaged" in said("server", "status", "--folder", folder)
    assert hashes(folder) == before
    (folder / STORE_FILE).write_bytes(remainder[0][1])
    (folder / "server.toml").write_text(settings.replace("version = 1", "version = 2"))
    before = hashes(folder)
    assert "is of version 2, made for a newer tacita" in said(*UP, "--folder", folder)
    assert hashes(folder) == before
    (folder / "server.toml").write_text(settings)
    assert json.loads(done("server", "status", "--folder", folder, "--json"))["catalogue"] == 500


def test_an_expired_certificate_is_named_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2020, 1, 1, tzinfo=UTC) if tz is None else datetime.now(tz) - timedelta(days=400)

    folder, old = tmp_path / "server", tmp_path / "old"
    with monkeypatch.context() as past:
        past.setattr(tls_certificates, "datetime", Then)
        create_server(folder, ServerConfig(host="127.0.0.1", port=free_port(), link_port=free_port()), [])
        old.mkdir()
        tls_certificates.make_ca(old, days=300)
    before = hashes(folder)
    words = said(*UP, "--folder", folder)
    assert "expired on" in words
    assert "tacita server renew" in words
    assert hashes(folder) == before
    done("server", "renew", "--folder", folder)
    tls_certificates.check_validity(folder / tls_certificates.SERVER_CERT)
    node = tmp_path / "node"
    done("node", "init", node, "--server", "127.0.0.1:9", "--ca", folder / "ca.pem", "--name", "n")
    (node / "ca.pem").write_bytes((old / "ca.pem").read_bytes())
    before = hashes(node)
    assert "expired on" in said("node", "run", "--folder", node)
    assert before.items() <= hashes(node).items()
