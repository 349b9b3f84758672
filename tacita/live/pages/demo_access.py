"""Access to both pages of a demo: a link for its person, an address and a password for its operator."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.live.pages.operator_app import find_page_url
from tacita.live.pages.tokens import OperatorCredentials
from tacita.live.running import node_client


@dataclass(frozen=True)
class DemoAccess:
    """The ways in that a demo prints."""

    person_link: str  # a link that works once
    operator_url: str
    password: str


def make_demo_access(server: Path, node: Path, user: str, most: float = 60.0) -> DemoAccess:
    """Wait until both pages are served, and make a way in to each."""
    password = secrets.token_hex(8)
    end = time.monotonic() + most
    OperatorCredentials(server).set_password(password)
    while True:
        try:
            link = node_client.ask_daemon(node, "page", user=user)["link"]
            return DemoAccess(str(link), find_page_url(server), password)
        except (TacitaError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
