"""A server that asks a node questions of its own making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.loopback_site import Site, make_site, site_config
from helpers.request_script import collect_first_block
from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.live.node import question_handler, verbs
from tacita.live.wire import ServerRequest, decode_reply, decode_request, encode_message


class StopServer(BaseException):
    """A server that goes on by itself from here."""


class HostileServer:
    """Questions of a server's own making to node 1, from the first honest one of a kind."""

    def __init__(self, site: Site, kind: str) -> None:
        self.node, self.first = site.transport.members[1], Any

        def listen(number: int, body: bytes, answer: Any) -> bytes:
            request = decode_request(body)
            if number == 1 and request.head.kind.startswith(kind):
                self.first = request
                raise StopServer
            return bytes(answer())

        site.transport.spoil = listen
        with pytest.raises(StopServer):
            site.next_block()

    def asks(self, arrays: dict[str, Any] | None = None, **head: Any) -> Any:
        state = self.node.store.load_model("r")
        known = {} if state is None else {name: array for name, (_, array) in state[1].items()}
        results = {n: a for n, a in (known | self.first.arrays | (arrays or {})).items() if n in self.first.head.names}
        if "/" not in head.get("kind", self.first.head.kind):
            results = {n: a for n, a in results.items() if not n.startswith("chosen")}
        names = {name: digest_array(array) for name, array in results.items()}
        server_request = ServerRequest(self.first.head.model_copy(update={"names": names, **head}), results)
        return decode_reply(question_handler.answer_message(self.node, encode_message(server_request)))


def private_tally_config(epsilon: float = 1.0, blocks: int = 1, **privacy: Any) -> RunConfig:
    values = site_config("tally").model_dump(mode="json")
    values |= {"backbone": {"name": "tally"}, "privacy": {"epsilon": epsilon, "blocks": blocks, **privacy}}
    return validate_model(RunConfig, values, "the test")


def begin_site(folder: Path, config: RunConfig, **more: Any) -> Site:
    folder.mkdir(exist_ok=True)
    site = make_site(folder, config, **more)
    collect_first_block(site)
    return site


def spent_budgets(node: Any, run: str = "r") -> dict[str, float]:
    return {
        raw: verbs.perform_verb(node, "ledger", {"user": raw})["runs"][run]["spent"]
        for raw in node.store.list_users()[1]
    }
