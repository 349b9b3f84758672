"""The engine with its real processes: who gets through the gateway, and what a round costs."""

from __future__ import annotations

import os
import signal
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

from flwr.proto import control_pb2, fleet_pb2
from live_cluster import Cluster, eventually, free_port

from tacita.core.errors import TacitaError
from tacita.live import tls_certificates
from tacita.live.engine.flower import Supernode
from tacita.live.processes import find_user_problem

pytestmark = pytest.mark.live


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def never_online(cluster: Cluster, one: Supernode, before: set[int]) -> None:
    """The client tries and gives up at least once, and the SuperLink has no more nodes online than before."""
    eventually(lambda: one.restarts > 0, 180, "a refused node gives up")
    assert one.node_id is None
    assert {n for n, state in cluster.link.list_node_states().items() if state == "online"} == before
    one.stop()


def test_enrolled_nodes_echo_through_tls_and_the_gateway(cluster: Cluster, three: dict[int, Supernode]) -> None:
    spent = {n: cpu_seconds(element.pid or 0) for n, element in three.items()}
    report = cluster.echo(3, [0, 64, 64, 64, 64, 64, 5_000_000])
    spent = {n: cpu_seconds(element.pid or 0) - spent[n] for n, element in three.items()}
    print(f"rounds {[round(r['took'], 2) for r in report['rounds']]} s, CPU of 7 messages {spent}")
    assert set(report["nodes"]) == set(three)
    for entry in report["rounds"]:
        assert set(entry["same"]) == set(three)
        assert not entry["other"]
    assert max(spent.values()) < 7 * 2.0


def test_flowers_own_supernode_carries_the_app(cluster: Cluster, three: dict[int, Supernode]) -> None:
    """The app that is delivered works where Flower runs it, though our nodes do not."""
    number = cluster.enrol("plain")
    cluster.serve("plain")
    entry = cluster.node("plain", port=free_port())
    eventually(lambda: entry.node_id == number, 180, "flower-supernode online")
    report = cluster.echo(4, [100])
    assert set(report["rounds"][0]["same"]) == {*three, number}
    entry.stop()


def test_a_node_that_fails_is_missing_and_says_nothing_of_itself(cluster: Cluster, three: dict[int, Supernode]) -> None:
    def fail(_: bytes, __: int) -> bytes:
        raise RuntimeError("secret words")

    number = cluster.enrol("failing")
    cluster.serve("failing", fail)
    entry = cluster.node("failing")
    eventually(lambda: entry.node_id == number, 180, "online")
    report = cluster.echo(4, [64])
    assert number in report["nodes"]
    assert set(report["rounds"][0]["same"]) == set(three)
    for file in (cluster.folder / "link").glob("*"):
        if file.is_file():
            assert b"secret words" not in file.read_bytes()
    entry.stop()


def test_a_slow_node_does_not_outlast_the_timeout(cluster: Cluster, three: dict[int, Supernode]) -> None:
    awake = threading.Event()

    def slow(body: bytes, _: int) -> bytes:
        awake.wait(60)
        return body

    number = cluster.enrol("slow")
    cluster.serve("slow", slow)
    entry = cluster.node("slow")
    eventually(lambda: entry.node_id == number, 180, "online")
    report = cluster.echo(4, [64], timeout=8.0)
    assert set(report["rounds"][0]["same"]) == set(three)
    assert report["rounds"][0]["took"] < 30  # half of what the node would take
    awake.set()
    entry.stop()


def test_an_unknown_key_is_refused(cluster: Cluster, three: dict[int, Supernode]) -> None:
    cluster.key("unknown")
    entry = cluster.node("unknown")
    never_online(cluster, entry, set(three))
    assert "enrol" in entry.reason


def test_a_key_that_passes_the_gateway_but_is_not_registered_is_refused(
    cluster: Cluster, three: dict[int, Supernode]
) -> None:
    public = cluster.key("unregistered").with_name("unregistered.pub")
    cluster.allowed.add(tls_certificates.compute_key_fingerprint(public.read_bytes()))
    entry = cluster.node("unregistered")
    never_online(cluster, entry, set(three))
    assert "enrol" in entry.reason


def test_a_revoked_key_is_cut_off_at_once(cluster: Cluster, three: dict[int, Supernode]) -> None:
    number = cluster.enrol("revoked")
    cluster.serve("revoked")
    entry = cluster.node("revoked")
    eventually(lambda: entry.node_id == number, 180, "online")
    cluster.allowed.discard(tls_certificates.compute_key_fingerprint((cluster.folder / "revoked.pub").read_bytes()))
    began = time.monotonic()
    eventually(lambda: entry.restarts > 0, 180, "the revoked node stops")
    assert time.monotonic() - began < 15
    assert "enrol" in entry.reason
    cluster.link.unregister_node(number)
    never_online(cluster, entry, set(three))
    assert number not in cluster.link.list_node_states()


def test_a_wrong_authority_is_refused(cluster: Cluster, three: dict[int, Supernode], tmp_path: Path) -> None:
    tls_certificates.make_ca(tmp_path)
    cluster.enrol("fooled")
    entry = cluster.node("fooled", ca=tmp_path / "ca.pem")
    never_online(cluster, entry, set(three))
    assert "ca.pem" in entry.reason


def test_plain_http_is_refused(cluster: Cluster, three: dict[int, Supernode]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{cluster.gateway.port}/v1/fleet/pull-messages", trust_env=False)
    entry = cluster.node("bare", insecure=True)
    time.sleep(5)
    assert entry.node_id is None
    assert {n for n, state in cluster.link.list_node_states().items() if state == "online"} == set(three)
    entry.stop()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/register-node",
        "/v1/control/start-run",
        "/v1/control/list-nodes",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1//control/list-nodes",
        "/docs",
        "/openapi.json",
        "/health",
    ],
)
def test_operator_calls_do_not_pass_the_gateway(cluster: Cluster, path: str) -> None:
    trust = ssl.create_default_context(cafile=str(cluster.ca))
    body = control_pb2.ListNodesRequest().SerializeToString()
    if "register" in path:
        pem = tls_certificates.convert_to_pem(_some_key(cluster))
        body = fleet_pb2.RegisterNodeFleetRequest(public_key=pem).SerializeToString()
    with httpx.Client(verify=trust, trust_env=False) as client:
        request = client.build_request(
            "POST",
            f"https://127.0.0.1:{cluster.gateway.port}/",
            content=body,
            headers={"content-type": "application/protobuf"},
        )
        request.url = request.url.copy_with(raw_path=path.encode())  # as it is, not normalised
        assert client.send(request).status_code == 403


def _some_key(cluster: Cluster) -> bytes:
    path = cluster.folder / "some"
    if not path.exists():
        tls_certificates.make_node_key(path)
    return path.with_name("some.pub").read_bytes()


def test_a_killed_client_comes_back_by_itself(cluster: Cluster, three: dict[int, Supernode]) -> None:
    """The new client closes the connection of the killed one, which the SuperLink would hold for a minute."""
    number, entry = next(iter(three.items()))
    before, began = entry.restarts, time.monotonic()
    os.kill(entry.pid or 0, signal.SIGKILL)
    eventually(lambda: entry.restarts > before, 10, "noticed")
    eventually(lambda: entry.node_id == number, 180, "online again")
    print(f"online again after {time.monotonic() - began:.1f} s")
    assert set(cluster.echo(3, [64])["rounds"][0]["same"]) == set(three)


def test_a_client_killed_within_a_round_does_not_hold_it_up(cluster: Cluster, three: dict[int, Supernode]) -> None:
    """What it was asked is lost; the round ends without it, the next one has it again."""
    request: list[int] = []

    def slow_once(body: bytes, _: int) -> bytes:
        request.append(len(request))
        if len(request) == 1:
            os.kill(entry.pid or 0, signal.SIGKILL)
            time.sleep(1)
        return body

    number = cluster.enrol("mortal")
    cluster.serve("mortal", slow_once)
    entry = cluster.node("mortal")
    eventually(lambda: entry.node_id == number, 180, "online")
    try:
        report = cluster.echo(4, [64], timeout=55.0)["rounds"][0]
        print(f"the round ended without it after {report['took']:.1f} s")
        assert set(report["same"]) == set(three)
        assert report["took"] < 40
        assert set(cluster.echo(4, [64])["rounds"][0]["same"]) == {*three, number}
    finally:
        entry.stop()


def test_a_killed_link_starts_again_with_its_nodes(cluster: Cluster, three: dict[int, Supernode]) -> None:
    pids = {entry.pid for entry in three.values()}
    os.kill(cluster.link.pid or 0, signal.SIGKILL)
    eventually(lambda: not cluster.link.is_alive, 10, "the link is dead")
    cluster.link.start()
    assert set(cluster.echo(3, [64], patience=60)["rounds"][0]["same"]) == set(three)
    assert pids == {entry.pid for entry in three.values()}


def test_the_client_runs_as_another_user(cluster: Cluster) -> None:
    if (why := find_user_problem("daemon")) is not None:
        pytest.skip(why)
    number = cluster.enrol("apart")
    observations: list[int] = []

    def handle(body: bytes, uid: int) -> bytes:
        observations.append(uid)
        return body

    path = cluster.serve("apart", handle)
    os.chmod(path, 0o666)
    for folder in [cluster.folder, *cluster.folder.parents][:3]:
        os.chmod(folder, 0o755)
    entry = cluster.node("apart", user="daemon")
    eventually(lambda: entry.node_id == number, 180, "online")
    assert os.stat(f"/proc/{entry.pid}").st_uid != os.geteuid()
    report = cluster.echo(1, [64])
    assert number in report["rounds"][0]["same"]
    assert observations == [os.stat(f"/proc/{entry.pid}").st_uid]
    entry.stop()


def test_a_port_that_is_taken_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    from tacita.live.engine.flower import SuperLink

    with pytest.raises(TacitaError, match=f"port {cluster.link.port} is in use"):
        SuperLink(tmp_path, cluster.link.port, insecure=True).start()
