"""The way to both pages of a demo: a link for its person, an address and a password for its operator."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.live.pages.operator import address_of
from tacita.live.pages.tokens import Keys
from tacita.live.running import control


@dataclass(frozen=True)
class Welcome:
    """What is printed for somebody who wants to look."""

    person: str  # a link that works once
    operator: str
    password: str


def welcome(server: Path, node: Path, user: str, most: float = 60.0) -> Welcome:
    """Wait until both pages are served, and make a way in to each."""
    password, end = secrets.token_hex(8), time.monotonic() + most
    Keys(server).set_password(password)
    while True:
        try:
            link = control.ask_daemon(node, "page", user=user)["link"]
            return Welcome(str(link), address_of(server), password)
        except (TacitaError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
