"""Flower's processes on either side: the SuperLink with the operator's calls to it, and the node's connection."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pwd
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from flwr.proto import control_pb2

from tacita.core.errors import TacitaError
from tacita.live.engine.gateway import bind_listener
from tacita.live.processes import ChildProcess, find_user_problem
from tacita.live.tls_certificates import NodeKeys, ServerKeys, check_validity, convert_to_pem

Response = TypeVar("Response")

log = logging.getLogger(__name__)

_NODE_VARIABLES = {"LANG", "LC_ALL", "LC_CTYPE", "TZ", "HTTPS_PROXY", "https_proxy", "LD_LIBRARY_PATH"}
_APP = {
    "pyproject.toml": """[project]
name = "tacita-live"
version = "1.0.0"
description = "Hands messages to tacita; holds no logic"
dependencies = []

[tool.flwr.app]
publisher = "tacita"

[tool.flwr.app.components]
serverapp = "tacita_live.server_app:app"
clientapp = "tacita_live.client_app:app"

[tool.flwr.app.config]
store = ""
run = ""
""",
    "tacita_live/__init__.py": '"""Handed to Flower."""\n',
    "tacita_live/server_app.py": "from tacita.live.engine.grid import make_server_app\n\napp = make_server_app()\n",
    "tacita_live/client_app.py": "from tacita.live.engine.flower_client import make_app\n\napp = make_app()\n",
}


def write_flower_app(folder: Path) -> Path:
    """Write the Flower app: two files that import from this package, so Flower delivers no logic to nodes."""
    for name, text in _APP.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return folder


def make_process_environment(home: Path, whole: bool = False) -> dict[str, str]:
    """The environment of a Flower process: nothing is sent home, and its files stay under `home`.

    A node's process gets only what it needs; the server's, which runs our own code, gets the `whole` environment.
    """
    environment = {name: value for name, value in os.environ.items() if whole or name in _NODE_VARIABLES}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [environment.get(name, ""), "127.0.0.1,localhost"]
        environment[name] = ",".join(filter(None, hosts))
    if not whole:
        environment |= {"HOME": str(home), "TMPDIR": str(home / "tmp")}
    programs = os.path.dirname(sys.executable)
    search_path = os.environ.get("PATH", os.defpath)
    return environment | {
        "PATH": os.pathsep.join([programs, search_path]),
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
    }


# The server


class SuperLinkClient:
    """The operator's calls to a SuperLink on this machine; `ca` is None for a link without TLS."""

    def __init__(self, port: int, ca: Path | None) -> None:
        self.port = port
        self.ca = ca

    @property
    def url(self) -> str:
        scheme = "http" if self.ca is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}"

    def register_node(self, public_key: Path, name: str) -> int:
        """Enrol a node's public key; the number under which the SuperLink knows the node."""
        try:
            pem = convert_to_pem(public_key.read_bytes())
        except OSError as error:
            raise TacitaError(f"cannot read {public_key}: {error.strerror or error}.") from None
        request = control_pb2.RegisterNodeRequest(public_key=pem, name=name)
        response = self._call_superlink("register-node", request, control_pb2.RegisterNodeResponse)
        return int(response.node_id)

    def unregister_node(self, node: int) -> None:
        request = control_pb2.UnregisterNodeRequest(node_id=node)
        self._call_superlink("unregister-node", request, control_pb2.UnregisterNodeResponse)

    def list_node_states(self) -> dict[int, str]:
        """The nodes that are enrolled: number -> registered, online or offline."""
        response = self._call_superlink("list-nodes", control_pb2.ListNodesRequest(), control_pb2.ListNodesResponse)
        states = {}
        for node in response.nodes_info:
            if node.status != "unregistered":
                states[int(node.node_id)] = str(node.status)
        return states

    def start_run(self, run_config: Mapping[str, str | int | float | bool], app: Path) -> int:
        """Start the app of a folder (see `write_flower_app`); the number of the run in Flower."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.supercore.fab import Fab

        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        settings = user_config_to_proto(dict(run_config))
        request = control_pb2.StartRunRequest(fab=fab_to_proto(fab), override_config=settings, federation="")
        response = self._call_superlink("start-run", request, control_pb2.StartRunResponse)
        if not response.HasField("run_id"):
            raise TacitaError("the SuperLink did not start the run; its log says why.")
        return int(response.run_id)

    def read_run_state(self, run: int) -> str:
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped."""
        request = control_pb2.ListRunsRequest(run_id=run)
        response = self._call_superlink("list-runs", request, control_pb2.ListRunsResponse)
        status = response.run_dict[run].status
        return ":".join(filter(None, [status.status, status.sub_status]))

    def stop_run(self, run: int) -> None:
        self._call_superlink("stop-run", control_pb2.StopRunRequest(run_id=run), control_pb2.StopRunResponse)

    def _call_superlink(self, name: str, request: Any, response: type[Response]) -> Response:
        verify = True if self.ca is None else _make_tls_context(self.ca)
        headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        try:
            with httpx.Client(verify=verify, timeout=30.0, trust_env=False) as client:
                content = request.SerializeToString()
                reply = client.post(f"{self.url}/v1/control/{name}", content=content, headers=headers)
        except httpx.TransportError as error:
            raise TacitaError(
                f"the SuperLink does not answer on port {self.port} ({error}); is the server up?"
            ) from None
        if reply.status_code != 200:
            raise TacitaError(f"the SuperLink refused {name}: {_read_error_text(reply)}.")
        parsed: Any = response()
        parsed.ParseFromString(reply.content)
        return cast(Response, parsed)


def _make_tls_context(ca: Path) -> Any:
    import ssl

    return ssl.create_default_context(cafile=str(ca))


def _read_error_text(reply: httpx.Response) -> str:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        problem = json.loads(reply.text)
        sentences = [problem[name] for name in ("message", "public_details", "detail") if problem.get(name)]
        if sentences:
            return " ".join(map(str, sentences)).rstrip(".")
    return f"{reply.status_code} {reply.text[:200]}".strip()


class SuperLink(SuperLinkClient):
    """The SuperLink process, on loopback only; nodes reach it through the gateway."""

    def __init__(self, home: Path, port: int, keys: ServerKeys | None = None, insecure: bool = False) -> None:
        if not insecure and keys is None:
            raise TacitaError("a SuperLink needs an authority, a certificate and a key.")
        tls_keys = None if insecure else keys
        super().__init__(port, None if tls_keys is None else tls_keys.ca)
        self.home = home
        self._keys = tls_keys
        self._child: ChildProcess | None = None

    def start(self, timeout: float = 90.0) -> None:
        """Start it and wait until it answers."""
        (self.home / "flwr").mkdir(parents=True, exist_ok=True, mode=0o700)
        bind_listener("127.0.0.1", self.port).close()
        command = self._make_command()
        environment = make_process_environment(self.home, whole=True)
        log_path = self.home / "superlink.log"
        self._child = ChildProcess(command, self.home, log_path, environment, None)
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(TacitaError):
                self.list_node_states()
                return
            if not self.is_alive or time.monotonic() > end:
                self.stop()
                raise TacitaError(f"the SuperLink did not start; {log_path} says why.")
            time.sleep(0.2)

    def _make_command(self) -> list[str]:
        command = [_find_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.home / "link.db"), "--disable-runtime-dependency-installation"]
        if self._keys is None:
            return [*command, "--insecure"]
        self._keys.check_validity()
        command += ["--ssl-ca-certfile", str(self._keys.ca), "--ssl-certfile", str(self._keys.certificate)]
        command += ["--ssl-keyfile", str(self._keys.key), "--enable-supernode-auth"]
        return command

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.exit_code is None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __enter__(self) -> SuperLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _find_program(name: str) -> str:
    """A program of the installation that this process runs in."""
    path = Path(sys.executable).parent / name
    program = str(path) if path.exists() else shutil.which(name)
    if not program:
        raise TacitaError(f"{name} is missing; install Flower with `pip install tacita[live]`.")
    return program


# The node


class Supernode:
    """The node's connection to the server, restarted after a pause when it ends.

    It runs our own client (`flower_client`), which fetches messages as a SuperNode does but executes nothing that comes
    from the server. With a `port` on loopback it runs Flower's `flower-supernode` instead. That one executes the app
    that the server sends, and starts a process per message.
    """

    def __init__(
        self,
        home: Path,
        server: str,
        socket: Path,
        keys: NodeKeys | None = None,
        insecure: bool = False,
        user: str | None = None,
        port: int | None = None,
    ) -> None:
        if not insecure and keys is None:
            raise TacitaError("a node needs the server's authority file and its own key.")
        self.home = home
        self.server = server
        self.socket = socket
        self._keys = None if insecure else keys
        self._user = user
        self._port = port
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: ChildProcess | None = None
        self.restarts = 0
        self.reason = ""  # why it is not online, in one sentence

    def start(self) -> None:
        """Begin to connect; `state` says how far it is."""
        command = self._prepare_files_and_command()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._keep_connected, args=(command,), name="supernode", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the server and end all processes."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def state(self) -> str:
        """stopped, connecting, online or waiting (to try again, see `reason`)."""
        if self._thread is None:
            return "stopped"
        if self._child is None or self._child.exit_code is not None:
            return "waiting" if self.restarts else "connecting"
        return "online" if self.node_id is not None else "connecting"

    @property
    def node_id(self) -> int | None:
        child = self._child
        if child is None or child.exit_code is not None:
            return None
        match = re.search(r"SuperNode ID: (\d+)", child.read_head())
        return int(match[1]) if match else None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def __enter__(self) -> Supernode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _prepare_files_and_command(self) -> list[str]:
        """Put the files that the client may read into a folder of its own; returns the command that starts it."""
        owner = self._find_client_user()
        for folder in (self.home, self.home / "tmp", self.home / "flwr"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chown(folder, owner, -1)
        if self._port is None:
            command = [sys.executable, "-P", "-m", "tacita.live.engine.flower_client", "--superlink", self.server]
            command += ["--socket", str(self.socket), "--memory", str(self.home / "connection")]
            key_option = "--key"
        else:
            bind_listener("127.0.0.1", self._port).close()
            command = [_find_program("flower-supernode"), "--superlink", self.server, "--port", str(self._port)]
            command += ["--node-config", f"socket={json.dumps(str(self.socket))}"]
            key_option = "--auth-supernode-private-key"
        if self._keys is None:
            return [*command, "--insecure"]
        ca = self.home / "ca.pem"
        key = self.home / "node.key"
        _copy_private(self._keys.ca, ca, owner)
        _copy_private(self._keys.key, key, owner)
        check_validity(self._keys.ca)
        return [*command, "--root-certificates", str(ca), key_option, str(key)]

    def _find_client_user(self) -> int:
        """The user id under which the client runs; -1: this process's own."""
        if self._user is None:
            return -1
        problem = find_user_problem(self._user)
        if problem is not None:
            raise TacitaError(problem)
        return pwd.getpwnam(self._user).pw_uid

    def _keep_connected(self, command: list[str]) -> None:
        pause = 1.0
        environment = make_process_environment(self.home)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._child = ChildProcess(command, self.home, self.home / "client.log", environment, self._user)
            except TacitaError as error:
                self.reason = str(error)
            else:
                while not self._child.wait_for_end(0.2) and not self._stopping.is_set():
                    pass
                if self._stopping.is_set():
                    break
                self.reason = _explain_client_end(self._child.read_tail())
            self.restarts += 1
            if time.monotonic() - began > 120:
                pause = 1.0
            log.warning("the connection to %s ended; next try in %g s: %s", self.server, pause, self.reason)
            self._stopping.wait(pause)
            pause = min(2 * pause, 20.0)  # after a kill the server holds the node online for up to a minute
        if self._child is not None:
            self._child.stop()


def _explain_client_end(text: str) -> str:
    """Why a client ended, by the end of its log."""
    if "refuses the key" in text:
        return "the server does not know this node's key; ask its operator to enrol it (if revoked: make a new node)."
    if "Failed to activate SuperNode" in text:
        return "the server still holds this node's last connection (for up to 90 s) or has not enrolled its key."
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "the server's certificate is not signed by this node's authority; get the right ca.pem."
    if "[SSL" in text:
        return "no TLS connection with the server; is the address the gateway's?"
    return "the connection ended; client.log says why."


def _copy_private(source: Path, target: Path, owner: int) -> None:
    """Copy a file so that only its owner reads it, replaced atomically; the owner may be another user."""
    try:
        content = source.read_bytes()
        side = target.with_name(f".{target.name}.{os.getpid()}")
        side.unlink(missing_ok=True)
        descriptor = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as out:
            out.write(content)
            os.fchown(descriptor, owner, -1)
        os.replace(side, target)
    except OSError as error:
        raise TacitaError(f"cannot copy {source} to {target}: {error.strerror or error}.") from None
