"""A small federation on loopback: SuperLink, gateway and nodes that echo, ended by process id."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tacita.live import tls_certificates
from tacita.live.engine import unix_socket
from tacita.live.engine.flower import SuperLink, Supernode, write_flower_app
from tacita.live.engine.gateway import Gateway

ECHO = '''
import hashlib, json, os, time
from pathlib import Path
from tacita.live.engine.grid import make_flower_server_app

def body(transport, settings):
    """Send what the file asks for and write down what came back."""
    file = Path(settings["store"])
    asked = json.loads(file.read_text())
    end = time.monotonic() + asked["patience"]
    while len(transport.list_online_nodes()) < asked["nodes"] and time.monotonic() < end:
        time.sleep(0.2)
    nodes = transport.list_online_nodes()
    rounds = []
    for size in asked["sizes"]:
        sent = os.urandom(size)
        began = time.monotonic()
        got = transport.exchange({node: sent for node in nodes}, asked["timeout"])
        took = time.monotonic() - began
        rounds.append({"size": size, "took": took, "same": sorted(n for n, b in got.items() if b == sent),
                       "other": {str(n): b.decode() for n, b in got.items() if b != sent}})
    file.with_suffix(".side").write_text(json.dumps({"nodes": nodes, "rounds": rounds}))
    os.replace(file.with_suffix(".side"), file.with_suffix(".out"))

app = make_flower_server_app(body)
'''


_PORTS = itertools.count(secrets.randbelow(2_000))  # none is given twice


def free_port() -> int:
    """One that stays free until a server takes it: no client is given such a low one, and each worker has its own."""
    first = 20_000 + 2_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", first + next(_PORTS) % 2_000))
            return int(probe.getsockname()[1])


def eventually(true: Callable[[], bool], timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"{what}: not within {timeout:g} s"
        time.sleep(0.1)


class Cluster:
    """Server folder, SuperLink and gateway; nodes are added by the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed: set[str] = set()
        self._to_stop: list[Callable[[], None]] = []
        tls_certificates.make_ca(folder)
        tls_certificates.make_server_certificate(folder, ["localhost"])
        keys = tls_certificates.ServerKeys.in_folder(folder)
        self.ca = keys.ca
        self.app = write_flower_app(folder / "app")
        (self.app / "tacita_live" / "server_app.py").write_text(ECHO)
        self.link = SuperLink(folder / "link", free_port(), keys)
        self.gateway = Gateway("127.0.0.1", 0, self.link.url, keys, allowed=lambda who: who in self.allowed)

    def start(self) -> None:
        self._to_stop.append(self.link.stop)
        self.link.start()
        self._to_stop.append(self.gateway.stop)
        self.gateway.start()

    def stop(self) -> None:
        while self._to_stop:
            self._to_stop.pop()()

    def key(self, name: str) -> Path:
        tls_certificates.make_node_key(self.folder / name)
        return self.folder / name

    def enrol(self, name: str) -> int:
        """Make a key and let it in; the node's number."""
        public = self.key(name).with_name(name + ".pub")
        self.allowed.add(tls_certificates.compute_key_fingerprint(public.read_bytes()))
        return self.link.register_node(public, name)

    def serve(self, name: str, handle: Callable[[bytes, int], bytes] = lambda body, _: body) -> Path:
        path = self.folder / f"{name}.sock"
        self._to_stop.append(unix_socket.serve_socket(path, handle).stop)
        return path

    def node(self, name: str, **other: Any) -> Supernode:
        """The client of a node, started."""
        keys = tls_certificates.NodeKeys(other.pop("ca", self.ca), self.folder / name)
        inputs = {"keys": keys, "socket": self.folder / f"{name}.sock"} | other
        server = inputs.pop("server", f"127.0.0.1:{self.gateway.port}")
        supernode = Supernode(self.folder / f"{name}.home", server, **inputs)
        self._to_stop.append(supernode.stop)
        supernode.start()
        return supernode

    def echo(
        self, nodes: int, sizes: list[int], timeout: float = 60.0, patience: float = 30.0, wait: float = 120.0
    ) -> dict[str, Any]:
        """Run the echo app; what each node sent back."""
        request = self.folder / f"asked-{time.monotonic_ns()}.json"
        request.write_text(json.dumps({"nodes": nodes, "sizes": sizes, "timeout": timeout, "patience": patience}))
        run = self.link.start_run({"store": str(request)}, self.app)
        end = time.monotonic() + wait
        while not (state := self.link.read_run_state(run)).startswith("finished"):
            assert time.monotonic() < end, f"the run is {state} after {wait:g} s"
            time.sleep(0.5)
        assert state == "finished:completed", (self.folder / "link" / "superlink.log").read_text()[-3000:]
        document: dict[str, Any] = json.loads(request.with_suffix(".out").read_text())
        return document
