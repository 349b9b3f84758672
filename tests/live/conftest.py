"""Fixtures for tests with Flower's real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

from live_cluster import Cluster, eventually

from tacita.live.engine.flower import Supernode


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SuperLink and a gateway without nodes."""
    result = Cluster(tmp_path_factory.mktemp("live"))
    try:
        result.start()
        yield result
    finally:
        result.stop()


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> dict[int, Supernode]:
    """Three enrolled nodes that echo, online."""
    result = {}
    for name in ("a", "b", "c"):
        number = cluster.enrol(name)
        cluster.serve(name)
        result[number] = cluster.node(name)
    for number, entry in result.items():
        eventually(lambda element=entry, number=number: element.node_id == number, 180, f"{entry.home.name} online")
    return result
