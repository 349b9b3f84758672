"""Parts of the live engine without Flower's processes: certificates, the gateway's rules, the socket's framing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import inspect
import os
import pwd
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

import httpx
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from tacita.core.errors import TacitaError
from tacita.live import tls_certificates
from tacita.live.engine import connection_limits, gateway, unix_socket
from tacita.live.engine.connection_limits import Connection
from tacita.live.processes import ChildProcess, exit_on_signals, find_user_problem, stop_on_signals

# Certificates


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    tls_certificates.make_ca(folder)
    tls_certificates.make_server_certificate(folder, ["rec.example.org", "192.0.2.7", "2001:db8::1"])
    return folder


def test_private_files_are_for_their_owner_and_never_overwritten(server: Path, tmp_path: Path) -> None:
    tls_certificates.make_node_key(tmp_path / "node")
    for path in (server / "ca.key", server / "server.key", tmp_path / "node"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = (server / "ca.key").read_bytes(), (tmp_path / "node").read_bytes()
    for repeat in (
        lambda: tls_certificates.make_ca(server),
        lambda: tls_certificates.make_server_certificate(server),
        lambda: tls_certificates.make_node_key(tmp_path / "node"),
    ):
        with pytest.raises(TacitaError, match="exists already"):
            repeat()
    (tmp_path / "node").rename(tmp_path / "moved")
    with pytest.raises(TacitaError, match="exists already"):  # half a pair is not completed by another half
        tls_certificates.make_node_key(tmp_path / "node")
    assert before == ((server / "ca.key").read_bytes(), (tmp_path / "moved").read_bytes())


def test_the_server_certificate_names_hosts_and_loopback(server: Path) -> None:
    hosts = tls_certificates.read_hosts(server / "server.pem")
    assert set(hosts) == {"rec.example.org", "192.0.2.7", "2001:db8::1", "localhost", "127.0.0.1"}


@pytest.mark.parametrize("host", ["https://rec.example.org", "rec.example.org:9093", "", "a b"])
def test_a_host_with_scheme_or_port_is_refused(server: Path, tmp_path: Path, host: str) -> None:
    tls_certificates.make_ca(tmp_path)
    with pytest.raises(TacitaError, match="without scheme and port"):
        tls_certificates.make_server_certificate(tmp_path, [host])
    assert not (tmp_path / "server.key").exists()


@pytest.mark.parametrize("host", ["localhost", "rec.example.org", "192.0.2.7"])
def test_a_strict_client_trusts_the_certificate(server: Path, host: str) -> None:
    """As Python 3.13 verifies by default, which needs key identifiers and usage."""
    trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    assert _handshake(server, trust, host) is None


def test_another_authority_and_another_host_are_not_trusted(server: Path, tmp_path: Path) -> None:
    tls_certificates.make_ca(tmp_path)
    other = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    assert isinstance(_handshake(server, other, "localhost"), ssl.SSLCertVerificationError)
    ours = ssl.create_default_context(cafile=str(server / "ca.pem"))
    assert isinstance(_handshake(server, ours, "elsewhere.example.org"), ssl.SSLCertVerificationError)


def _handshake(server: Path, trust: ssl.SSLContext, host: str) -> Exception | None:
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(server / "server.pem", server / "server.key")
    to_server, from_server, to_client, from_client = (ssl.MemoryBIO() for _ in range(4))
    client = trust.wrap_bio(from_server, to_server, server_hostname=host)
    other = own.wrap_bio(to_server, from_server, server_side=True)
    del to_client, from_client
    for _ in range(10):
        for side in (client, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
    return None


def test_an_expired_certificate_names_the_remedy(server: Path) -> None:
    path = server / "server.pem"
    tls_certificates.check_validity(path)
    end = tls_certificates.read_expiry(path)
    tls_certificates.check_validity(path, end - timedelta(seconds=1))
    with pytest.raises(TacitaError, match=rf"expired on {end:%Y-%m-%d}; make a new one with `tacita server renew`"):
        tls_certificates.check_validity(path, end)
    with pytest.raises(TacitaError, match="check the clock"):
        tls_certificates.check_validity(path, datetime.now(UTC) - timedelta(days=2))


def test_renewal_keeps_key_and_hosts(tmp_path: Path) -> None:
    tls_certificates.make_ca(tmp_path)
    tls_certificates.make_server_certificate(tmp_path, ["rec.example.org"], days=1)
    before, key = tls_certificates.read_expiry(tmp_path / "server.pem"), (tmp_path / "server.key").read_bytes()
    tls_certificates.renew_server_certificate(tmp_path)
    assert tls_certificates.read_expiry(tmp_path / "server.pem") > before + timedelta(days=300)
    assert "rec.example.org" in tls_certificates.read_hosts(tmp_path / "server.pem")
    assert (tmp_path / "server.key").read_bytes() == key
    tls_certificates.renew_server_certificate(tmp_path, ["other.example.org"])
    assert "rec.example.org" not in tls_certificates.read_hosts(tmp_path / "server.pem")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ca.key", "ca.pem", "server.key", "server.pem"]


def test_a_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    tls_certificates.make_ca(tmp_path, days=10)
    tls_certificates.make_server_certificate(tmp_path)
    assert tls_certificates.read_expiry(tmp_path / "server.pem") == tls_certificates.read_expiry(tmp_path / "ca.pem")


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no")
    for wrong in (
        lambda: tls_certificates.check_validity(tmp_path / "x"),
        lambda: tls_certificates.check_validity(tmp_path / "y"),
        lambda: tls_certificates.load_node_key(tmp_path / "x"),
        lambda: tls_certificates.load_node_key(tmp_path / "y"),
        lambda: tls_certificates.compute_key_fingerprint(b"no"),
        lambda: tls_certificates.renew_server_certificate(tmp_path),
    ):
        with pytest.raises(TacitaError):
            wrong()


def test_a_fingerprint_is_the_same_in_both_forms(tmp_path: Path) -> None:
    public = tls_certificates.make_node_key(tmp_path / "node").read_bytes()
    assert public.startswith(b"ecdsa-sha2-nistp384 ")
    assert tls_certificates.compute_key_fingerprint(public) == tls_certificates.compute_key_fingerprint(
        tls_certificates.convert_to_pem(public)
    )
    other = tls_certificates.make_node_key(tmp_path / "other").read_bytes()
    assert tls_certificates.compute_key_fingerprint(public) != tls_certificates.compute_key_fingerprint(other)


def test_a_node_key_is_one_that_flower_signs_with(tmp_path: Path) -> None:
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, sign_message, verify_signature

    public = tls_certificates.make_node_key(tmp_path / "node").read_bytes()
    signature = sign_message(tls_certificates.load_node_key(tmp_path / "node"), b"x")
    assert verify_signature(bytes_to_public_key(tls_certificates.convert_to_pem(public)), b"x", signature)


# The gateway


def test_every_call_of_flowers_fleet_is_decided() -> None:
    """A new call in another version of Flower must be looked at before it passes."""
    from flwr.superlink.routers.fleet.router import router

    calls = {route.path.rpartition("/")[2] for route in router.routes}
    assert calls == {*gateway.CALLS, "register-node", "unregister-node"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet%2fpull-messages",
        "/v1/fleet/pull%2dmessages",
        "/v1/fleet//pull-messages",
        "//v1/fleet/pull-messages",
        "/v1/fleet/./pull-messages",
        "/v1/fleet/pull-messages/",
        "/V1/fleet/pull-messages",
        "/v1/fleet/pull-messages;x",
        "/v1/fleet/",
        "/",
        "",
        "*",
        "/docs",
        "/v1\\fleet\\pull-messages",
    ],
)
def test_other_paths_and_spellings_are_refused(path: str) -> None:
    assert gateway.find_call_refusal("POST", path.encode(), b"") is not None


def test_only_post_without_a_query_passes() -> None:
    assert gateway.find_call_refusal("POST", b"/v1/fleet/pull-messages", b"") is None
    assert gateway.find_call_refusal("GET", b"/v1/fleet/pull-messages", b"") is not None
    assert gateway.find_call_refusal("POST", b"/v1/fleet/pull-messages", b"a=1") is not None


class Upstream:
    """A stand-in for the SuperLink that notes what reaches it."""

    def __init__(self, status: int = 200, error: Exception | None = None) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self._status, self._error = status, error

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if self._error is not None:
            raise self._error
        self.seen.append((request.url.raw_path.decode(), dict(request.headers), body))
        headers = {"content-type": "application/protobuf", "server": "flower", "set-cookie": "a"}

        async def answer() -> AsyncIterator[bytes]:
            yield b"answer:"
            yield body

        return httpx.Response(self._status, content=answer(), headers=headers)


def through(
    upstream: Upstream, headers: dict[str, str], body: Any = b"abc", allowed: bool = True, most: int = 1000
) -> httpx.Response:
    """One call of pull-messages through the gateway's application."""

    async def run() -> httpx.Response:
        behind = httpx.AsyncClient(base_url="https://link", transport=httpx.MockTransport(upstream))
        app: Any = gateway.make_proxy_app(behind, lambda _: allowed, most)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gateway") as client:
            return await client.post("/v1/fleet/pull-messages", headers=headers, content=body)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    public = tls_certificates.make_node_key(tmp_path_factory.mktemp("node") / "node").read_bytes()
    return {
        "flwr-public-key": base64.b64encode(tls_certificates.convert_to_pem(public)).decode(),
        "flwr-signature": "s",
    }


def test_a_nodes_call_passes_with_the_headers_it_needs(signed: dict[str, str]) -> None:
    upstream = Upstream()
    got = through(upstream, signed | {"cookie": "c", "x-forwarded-for": "1.2.3.4", "host": "evil"})
    assert (got.status_code, got.content) == (200, b"answer:abc")
    assert "set-cookie" not in got.headers
    assert "server" not in got.headers
    path, headers, body = upstream.seen[0]
    assert (path, body) == ("/v1/fleet/pull-messages", b"abc")
    assert headers["flwr-signature"] == "s"
    assert headers["content-length"] == "3"
    assert headers["host"] == "link"
    assert not {"cookie", "x-forwarded-for", "transfer-encoding"} & set(headers)


@pytest.mark.parametrize("header", [None, "", "%%%", base64.b64encode(b"no key").decode(), "A" * 5000])
def test_a_call_without_a_proper_key_is_refused(header: str | None) -> None:
    upstream = Upstream()
    assert through(upstream, {} if header is None else {"flwr-public-key": header}).status_code == 401
    assert not upstream.seen


def test_a_key_that_is_not_on_the_list_is_refused(signed: dict[str, str]) -> None:
    upstream = Upstream()
    assert through(upstream, signed, allowed=False).status_code == 401
    assert not upstream.seen


def test_a_body_has_a_known_length_within_bounds(signed: dict[str, str]) -> None:
    upstream = Upstream()
    assert through(upstream, signed, b"x" * 1000).status_code == 200
    assert through(upstream, signed, b"x" * 1001).status_code == 413

    async def pieces() -> Any:
        yield b"abc"

    assert through(upstream, signed, pieces()).status_code == 411
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    ("error", "code"), [(httpx.ConnectError("down"), 503), (httpx.ReadTimeout("slow"), 504), (None, 418)]
)
def test_server_errors_use_status_codes_that_nodes_retry(
    signed: dict[str, str], error: Exception | None, code: int
) -> None:
    assert through(Upstream(418, error), signed).status_code == code


def test_the_gateway_speaks_only_tls_and_needs_a_free_port(server: Path) -> None:
    state = tls_certificates.ServerKeys.in_folder(server)
    with gateway.Gateway("127.0.0.1", 0, "https://127.0.0.1:9", state, allowed=lambda _: True) as entry:
        trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
        with httpx.Client(verify=trust, trust_env=False) as client:
            assert client.get(f"https://localhost:{entry.port}/").status_code == 403
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{entry.port}/", trust_env=False)
        second = gateway.Gateway("127.0.0.1", entry.port, "https://127.0.0.1:9", state, allowed=lambda _: True)
        with pytest.raises(TacitaError, match=f"port {entry.port} is in use"):
            second.start()
    assert not entry.is_alive
    gateway.bind_listener("127.0.0.1", entry.port).close()


@pytest.fixture
def upstream(server: Path) -> Iterator[str]:
    """A stand-in for the SuperLink on loopback, with TLS."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Link(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Connections that end are not of interest."""

    link = Link(("127.0.0.1", 0), Answer)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server / "server.pem", server / "server.key")
    link.socket = tls.wrap_socket(link.socket, server_side=True)
    thread = threading.Thread(target=link.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{link.server_address[1]}"
    link.shutdown()
    link.server_close()
    thread.join(60)


def still_open(strangers: list[ssl.SSLSocket]) -> int:
    """How many have not been closed by the other side."""
    count = 0
    for stranger in strangers:
        stranger.settimeout(0.0)
        try:
            stranger.recv(1)
        except (ssl.SSLWantReadError, BlockingIOError):
            count += 1
        except OSError:
            continue
    return count


def test_unknown_connections_are_limited_and_never_block_a_node(
    server: Path, upstream: str, signed: dict[str, str]
) -> None:
    """600 idle connections without a key: an enrolled node gets through, on its old connection and on a new one."""
    state = tls_certificates.ServerKeys.in_folder(server)
    trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
    strangers: list[ssl.SSLSocket] = []

    def call(client: httpx.Client) -> httpx.Response:
        return client.post("/v1/fleet/pull-messages", headers=signed, content=b"abc")

    with contextlib.ExitStack() as exit_stack:
        entry = exit_stack.enter_context(gateway.Gateway("127.0.0.1", 0, upstream, state, allowed=lambda _: True))
        exit_stack.callback(lambda: [stranger.close() for stranger in strangers])
        url = f"https://127.0.0.1:{entry.port}"
        node = exit_stack.enter_context(httpx.Client(verify=trust, trust_env=False, base_url=url))
        assert call(node).status_code == 200
        for _ in range(300):  # these do not even begin TLS
            exit_stack.enter_context(socket.create_connection(("127.0.0.1", entry.port)))
        for n in range(600):
            plain = socket.create_connection(("127.0.0.1", entry.port))
            strangers.append(trust.wrap_socket(plain, server_hostname="localhost"))
            if n % 3 == 0:
                strangers[-1].send(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: a\r\n")  # and no more
        began = time.monotonic()
        got = call(node)  # on its old connection
        assert (got.status_code, got.content) == (200, b"abc")
        with httpx.Client(verify=trust, trust_env=False, base_url=url) as other:
            assert call(other).content == b"abc"  # on a new one
        print(f"two calls beside 600 strangers: {time.monotonic() - began:.2f} s")
        assert 0 < still_open(strangers) <= connection_limits.MOST_STRANGERS


def test_silent_connections_are_dropped_before_and_after_tls(
    server: Path, upstream: str, signed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HANDSHAKE_TIMEOUT", 1.0)
    monkeypatch.setattr(connection_limits, "HEADER_TIMEOUT", 1.0)
    monkeypatch.setattr(connection_limits, "MOST_PER_KEY", 3)
    state = tls_certificates.ServerKeys.in_folder(server)
    trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
    with gateway.Gateway("127.0.0.1", 0, upstream, state, allowed=lambda _: True) as entry:

        def connected() -> ssl.SSLSocket:
            plain = socket.create_connection(("127.0.0.1", entry.port))
            return trust.wrap_socket(plain, server_hostname="localhost")

        def call(on: ssl.SSLSocket) -> bytes:
            head = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
            on.sendall(f"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n{head}\r\nx".encode())
            on.settimeout(60)
            got = b""
            while not got.endswith(b"\r\n\r\nx"):
                got += on.recv(1000) or b"\r\n\r\nx"
            return got

        def gone(stream: socket.socket) -> bool:
            stream.settimeout(30)
            try:
                while stream.recv(1000):
                    pass
            except TimeoutError:
                return False
            except OSError:
                pass
            return True

        with socket.create_connection(("127.0.0.1", entry.port)) as silent, connected() as trickle:
            assert gone(silent)  # never began TLS
            trickle.settimeout(3)
            for _ in range(30):  # a letter now and then is no head of a call
                with contextlib.suppress(OSError):
                    trickle.send(b"P")
                time.sleep(0.05)
            assert gone(trickle)
        with connected() as node:
            assert b"200 OK" in call(node)
            time.sleep(1.2)  # a node may be idle between its calls
            assert b"200 OK" in call(node)
            node.sendall(b"POST /v1/fleet")  # but a call once begun has to come
            assert gone(node)
        monkeypatch.setattr(
            connection_limits, "HEADER_TIMEOUT", 60.0
        )  # the machine may be busy, and each waits for those before it
        many = [connected() for _ in range(5)]
        assert all(b"200 OK" in call(each) for each in many)
        end = time.monotonic() + 30
        while still_open(many) > 3 and time.monotonic() < end:
            time.sleep(0.05)
        assert still_open(many) == 3  # the key has so many places
        for each in many:
            each.close()


def test_uvicorn_has_the_methods_that_a_connection_overrides() -> None:
    """uvicorn's protocol is no public interface: a version that renames a method would switch the limits off."""
    functions = {name for name, value in vars(Connection).items() if inspect.isfunction(value)}
    overridden = {"connection_made", "data_received", "on_response_complete", "connection_lost"}
    assert functions - overridden == {"__init__", "drop_connection", "_start_head_timer", "_start_timer"}
    for name in overridden:
        assert name in vars(H11Protocol), name
        parameters = inspect.signature(getattr(Connection, name)).parameters
        assert list(inspect.signature(getattr(H11Protocol, name)).parameters) == list(parameters)
    assert list(inspect.signature(H11Protocol).parameters)[:3] == ["config", "server_state", "app_state"]


def test_uvicorn_has_the_attributes_that_a_connection_reads() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.new_event_loop()
    try:
        protocol = H11Protocol(config, uvicorn.server.ServerState(), {}, loop)
    finally:
        loop.close()
    assert {"app", "conn", "cycle", "transport"} <= vars(protocol).keys()
    assert protocol.conn.trailing_data[0] == b""
    assert "response_complete" in RequestResponseCycle.__init__.__code__.co_names


# The socket


def test_bodies_of_all_sizes_come_back(tmp_path: Path) -> None:
    observations = []

    def handle(body: bytes, uid: int) -> bytes:
        observations.append(uid)
        return body[::-1]

    with unix_socket.serve_socket(tmp_path / "s", handle):
        for size in (0, 1, 2**20, 2**20 + 1, 5_000_000):
            body = os.urandom(size)
            assert unix_socket.ask_socket(tmp_path / "s", body) == body[::-1]
    assert set(observations) <= {os.getuid(), -1}
    assert not (tmp_path / "s").exists()


def test_the_socket_has_its_mode_and_many_ask_at_once(tmp_path: Path) -> None:
    gate = threading.Barrier(8, timeout=60)

    def handle(body: bytes, _: int) -> bytes:
        gate.wait()
        return body

    answers: list[bytes] = []
    with unix_socket.serve_socket(tmp_path / "s", handle, mode=0o660):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
        askers = [
            threading.Thread(target=lambda k=k: answers.append(unix_socket.ask_socket(tmp_path / "s", bytes([k]))))
            for k in range(8)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(60)
    assert sorted(answers) == [bytes([k]) for k in range(8)]


def test_a_handler_that_fails_closes_the_connection_and_serves_on(tmp_path: Path) -> None:
    def handle(body: bytes, _: int) -> bytes:
        if body == b"bad":
            raise RuntimeError("no")
        return body

    with unix_socket.serve_socket(tmp_path / "s", handle):
        with pytest.raises(TacitaError, match="without an answer"):
            unix_socket.ask_socket(tmp_path / "s", b"bad")
        assert unix_socket.ask_socket(tmp_path / "s", b"good") == b"good"


def test_sizes_and_times_are_bounded(tmp_path: Path) -> None:
    def handle(body: bytes, _: int) -> bytes:
        time.sleep(0.5 if body == b"slow" else 0)
        return b"x" * 200 if body == b"long" else body

    with unix_socket.serve_socket(tmp_path / "s", handle, most=100, timeout=0.3):
        with pytest.raises(TacitaError, match="larger than"):
            unix_socket.ask_socket(tmp_path / "s", b"x" * 101, most=100)
        with pytest.raises(TacitaError, match="without an answer"):
            unix_socket.ask_socket(tmp_path / "s", b"x" * 101)
        with pytest.raises(TacitaError, match="without an answer"):
            unix_socket.ask_socket(tmp_path / "s", b"long")
        with pytest.raises(TacitaError, match=r"within 0.2 s"):
            unix_socket.ask_socket(tmp_path / "s", b"slow", timeout=0.2)
        with socket.socket(socket.AF_UNIX) as line:  # claims a length and sends nothing
            line.connect(str(tmp_path / "s"))
            line.sendall(struct.pack(">Q", 50))
            line.settimeout(5)
            assert line.recv(1) == b""


def test_missing_daemon_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match="is the node running"):
        unix_socket.ask_socket(tmp_path / "s", b"")


def test_a_left_over_socket_is_replaced_but_not_one_in_use(tmp_path: Path) -> None:
    remainder = socket.socket(socket.AF_UNIX)
    remainder.bind(str(tmp_path / "s"))
    remainder.close()
    with unix_socket.serve_socket(tmp_path / "s", lambda body, _: body):
        with pytest.raises(TacitaError, match="another process is serving"):
            unix_socket.serve_socket(tmp_path / "s", lambda body, _: body)
        assert unix_socket.ask_socket(tmp_path / "s", b"a") == b"a"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TacitaError, match="not a socket"):
        unix_socket.serve_socket(tmp_path / "file", lambda body, _: body)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_long_path_works_or_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    if sys.platform == "linux":
        with unix_socket.serve_socket(folder / "s", lambda body, _: body):
            assert unix_socket.ask_socket(folder / "s", b"far") == b"far"
        with pytest.raises(TacitaError, match="choose a shorter folder"):
            unix_socket.serve_socket(folder / ("s" * 70), lambda body, _: body)
    else:
        with pytest.raises(TacitaError, match="choose a shorter folder"):
            unix_socket.serve_socket(folder / "s", lambda body, _: body)


# Processes and imports


def test_a_child_leaves_no_descendants(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True); "
    script += "print(p.pid, flush=True); time.sleep(60)"
    child = ChildProcess([sys.executable, "-c", script], tmp_path, tmp_path / "log", dict(os.environ), None)
    end = time.monotonic() + 60
    while not child.read_tail().strip() and time.monotonic() < end:
        time.sleep(0.05)
    below = int(child.read_tail())
    child.stop()
    assert child.exit_code is not None
    time.sleep(0.1)
    state = Path(f"/proc/{below}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
from tacita.live.processes import ChildProcess
print(ChildProcess(["sleep", "60"], Path("/"), Path({str(tmp_path / "log")!r}), dict(os.environ), None).pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # nobody reaps orphans in some containers
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_a_child_runs_as_another_user(tmp_path: Path) -> None:
    child = ChildProcess(["id", "-u"], Path("/"), tmp_path / "log", dict(os.environ), "nobody")
    assert child.wait_for_end(60)
    assert child.read_tail().strip() == str(pwd.getpwnam("nobody").pw_uid)


def test_a_program_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match="cannot start nothing-here"):
        ChildProcess(["nothing-here"], tmp_path, tmp_path / "log", {}, None)


def test_another_user_is_refused_with_a_reason() -> None:
    assert "there is no user" in (find_user_problem("no-such-user-here") or "")
    assert "nothing is kept apart" in (find_user_problem(pwd.getpwuid(os.geteuid()).pw_name) or "")


def test_the_nodes_client_loads_nothing_of_the_recommender() -> None:
    script = "import sys, tacita.live.engine.flower_client; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not {"torch", "numba", "polars", "scipy", "matplotlib"} & loaded
    ours = {name for name in done.stdout.split() if name.startswith("tacita")}
    assert ours == {
        "tacita",
        "tacita.core",
        "tacita.core.python_messages",
        "tacita.core.errors",
        "tacita.live",
        "tacita.live.engine",
        "tacita.live.engine.unix_socket",
        "tacita.live.engine.flower_client",
    }


def test_bodies_survive_flowers_records() -> None:
    from tacita.live.engine.flower_client import SMALL_BODY_BYTES, pack_body, unpack_body

    for size in (0, 1, SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1, 300_000):
        body = os.urandom(size)
        assert unpack_body(pack_body(body)) == body
    from flwr.app import ConfigRecord, RecordDict

    for wrong in (RecordDict(), RecordDict({"body": ConfigRecord({"body": 3})}), RecordDict({"body": ConfigRecord()})):
        with pytest.raises(ValueError, match="no body"):
            unpack_body(wrong)


STALL = 20.0  # seconds: far above what is waited, on a busy machine too


class Replies:
    """A grid whose nodes answer, fail, send rubbish, stall or are not there."""

    def __init__(self, how: dict[int, str]) -> None:
        self._how = how
        self._sent: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        return list(self._how)

    def push_messages(self, messages: Any) -> list[str]:
        out = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            self._sent[f"m{number}"] = message
            gone = self._how[message.metadata.dst_node_id] == "gone"
            out.append("" if gone else f"m{number}")
        return out

    def pull_messages(self, ids: Any) -> list[Any]:
        from flwr.app import ConfigRecord, Error, Message, RecordDict

        result = []
        for entry in ids:
            message = self._sent[entry]
            how = self._how[message.metadata.dst_node_id]
            if how == "stalls":
                time.sleep(STALL)
            if how == "breaks":
                raise RuntimeError("not an object")
            content: Any = {
                "answers": message.content,
                "fails": Error(5, "no"),
                "rubbish": RecordDict({"x": ConfigRecord()}),
            }.get(how)
            if content is not None:
                reply = Message(content, reply_to=message)
                result.append(reply)
        return result


def test_an_exchange_returns_what_came_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    from tacita.live.engine.grid import GridTransport

    for name in ("_run_id", "_node_id", "_task_id"):  # as in the process of a run
        monkeypatch.setattr(TaskIdentity, name, 1)
    how = {1: "answers", 2: "fails", 3: "rubbish", 4: "gone", 5: "breaks", 6: "silent", 7: "stalls", 8: "answers"}
    grid: Any = Replies(how)
    began = time.monotonic()
    got = GridTransport(grid).exchange({node: bytes([node]) for node in how}, timeout=1.0)
    assert got == {1: b"\x01", 8: b"\x08"}
    assert 0.9 < time.monotonic() - began < STALL / 2
    replies: Any = Replies(dict.fromkeys(range(100), "answers"))
    began = time.monotonic()
    assert len(GridTransport(replies).exchange(dict.fromkeys(range(100), b"x"), timeout=30.0)) == 100
    assert time.monotonic() - began < 15  # one after the other, with a pause for each, they would take 20
    assert GridTransport(replies).exchange({}, timeout=1.0) == {}


def test_a_closed_terminal_stops_what_was_started_unless_it_is_to_be_ignored() -> None:
    stopping, before = threading.Event(), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        with stop_on_signals(stopping):
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopping.wait(5)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
        stopping.clear()
        with exit_on_signals(), stop_on_signals(stopping):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping.wait(0.2)
    finally:
        signal.signal(signal.SIGHUP, before)
