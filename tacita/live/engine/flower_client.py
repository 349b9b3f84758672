"""The node's side of Flower: fetch messages, hand their bodies to the node's daemon, send its answers back.

`main` is a process that stays: it speaks to the SuperLink as a SuperNode does, but runs no code that comes from the
server and costs no process start per message. `make_app` is the same as a Flower app, for a plain SuperNode.
Neither loads anything of the recommender.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from tacita.core.errors import TacitaError
from tacita.live.engine import unix_socket

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

MESSAGE_TYPE = "query"  # one type for Flower; the body says what it is
SMALL_BODY_BYTES = 2**16  # up to here one record, above an array, which Flower sends in pieces
ERROR_CODE = 1000  # Flower's own codes end far below
_QUICK_POLL_SECONDS = 0.5
_SLOW_POLL_SECONDS = 3.0
_QUICK_FOR_SECONDS = 60.0  # after a message, polls are quick for so long
_OFFLINE_SECONDS = 3.0  # longer than a round waits between two looks

log = logging.getLogger("tacita.live")


def pack_body(body: bytes) -> RecordDict:
    """A body as Flower carries it."""
    if len(body) <= SMALL_BODY_BYTES:
        return RecordDict({"body": ConfigRecord({"body": body})})
    array = Array(dtype="uint8", shape=(len(body),), stype="bytes", data=body)
    return RecordDict({"body": ArrayRecord({"body": array})})


def unpack_body(content: RecordDict) -> bytes:
    """The body of a message; ValueError if it holds something else."""
    record = content.get("body")
    if isinstance(record, ConfigRecord):
        value = record.get("body")
    elif isinstance(record, ArrayRecord) and "body" in record:
        value = record["body"].data
    else:
        value = None
    if not isinstance(value, bytes):
        raise ValueError("the message has no body")
    return value


def answer_message(message: Message, socket_path: str) -> Message:
    """The daemon's answer to a message; a failure goes back without its reason, which may name files."""
    try:
        body = unix_socket.ask_socket(socket_path, unpack_body(message.content))
        return Message(pack_body(body), reply_to=message)
    except (TacitaError, ValueError, OSError) as error:
        log.error("a message was not answered: %s", error)
        return Message(Error(ERROR_CODE, "the node did not answer"), reply_to=message)


def make_app() -> ClientApp:
    """A Flower app that does the same in a SuperNode, which starts a process for every message."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer_message(message, str(context.node_config["socket"]))

    return app


class RetryLogFilter(logging.Filter):
    """Passes one line a minute about a server that is away; Flower reports it with every try."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -60.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("Connection attempt failed"):
            return True
        if time.monotonic() - self._last < 60:
            return False
        self._last = time.monotonic()
        return True


def main(arguments: list[str] | None = None) -> int:
    """Serve messages until SIGTERM; exit code 3 if the server refuses the key."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--superlink", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--root-certificates", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--memory", type=Path, help="where the number of an open connection is kept")
    parser.add_argument("--insecure", action="store_true")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = False  # it writes by itself
    logging.getLogger("flwr").addFilter(RetryLogFilter())

    def stop(_: int, __: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        keys = _load_key_pair(options.key)
        roots = None
        if options.root_certificates is not None and not options.insecure:
            roots = options.root_certificates.read_bytes()
        link = _Link(options.superlink, options.insecure, roots, keys)
        _serve_messages(link, options.socket, options.memory)
    except KeyboardInterrupt:  # how Flower's client reacts to 401
        log.error("the server refuses the key of this node")
        return 3
    except TacitaError as error:
        log.error("%s", error)
        return 2
    return 1


@dataclass(frozen=True)
class _Link:
    """How to reach the SuperLink."""

    server: str
    insecure: bool
    roots: bytes | None
    keys: tuple[Any, Any] | None  # private and public


def _load_key_pair(path: Path | None) -> tuple[Any, Any] | None:
    from tacita.live.tls_certificates import load_node_key

    if path is None:
        return None
    private_key = load_node_key(path)
    return private_key, private_key.public_key()


def _serve_messages(link: _Link, socket_path: str, memory: Path | None) -> None:
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode.fleet_http_connection import http_request_response

    if memory is not None and link.keys is not None and memory.exists():
        _close_last_connection(link, link.keys, memory)
    with contextlib.ExitStack() as stack:
        if memory is not None:
            stack.callback(memory.unlink, missing_ok=True)  # after the connection below is closed
        connection = http_request_response(link.server, link.insecure, link.roots, link.keys)
        node, receive, send, _, _, pull, push, confirm = stack.enter_context(connection)
        if memory is not None:
            memory.write_text(str(node))
        log.info("SuperNode ID: %s", node)
        last = time.monotonic()
        while True:
            try:
                received = receive()
                if received is None:
                    is_recent = time.monotonic() - last < _QUICK_FOR_SECONDS
                    time.sleep(_QUICK_POLL_SECONDS if is_recent else _SLOW_POLL_SECONDS)
                    continue
                head, tree = received
                run = head.metadata.run_id
                began = time.monotonic()
                message = _pull_message_objects(tree, functools.partial(pull, run), functools.partial(confirm, run))
                reply = answer_message(message, socket_path)
                _send_reply(reply, began, send, push)
            except RunNotRunningException:
                log.info("the run has ended; its message is dropped")
                time.sleep(_QUICK_POLL_SECONDS)
            last = time.monotonic()


def _close_last_connection(link: _Link, keys: tuple[Any, Any], memory: Path) -> None:
    """Close the connection of a client that was killed, which the server would hold for a minute.

    Then wait until a running round notices that the node is gone. The killed client's message is lost, and the round
    should not wait for it.
    """
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    try:
        node = int(memory.read_text())
        interceptors = [NodeAuthHttpInterceptor(*keys)]
        with FleetHttpClient.from_server_address(link.server, False, link.roots, interceptors) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except (ValueError, httpx.HTTPError) as error:  # gone already, or the server will say more
        log.info("the last connection could not be closed: %s", error)
    else:
        time.sleep(_OFFLINE_SECONDS)


def _pull_message_objects(tree: Any, pull: Callable[[str], bytes], confirm: Callable[[str], None]) -> Message:
    """The message of an object tree, as Flower's client process pulls it."""
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

    message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _send_reply(
    reply: Message,
    began: float,
    send: Callable[[Message, Any, float], tuple[set[str], str]],
    push: Callable[[int, str, str, bytes], None],
) -> None:
    """Send an answer and the objects of it that the server does not have, as Flower's SuperNode does."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        seconds = time.monotonic() - began
        missing_ids, session = send(reply, get_object_tree(reply), seconds)
        push_object = functools.partial(push, reply.metadata.run_id, session)
        push_objects(get_all_nested_objects(reply), push_object, object_ids_to_push=missing_ids)


if __name__ == "__main__":
    sys.exit(main())
