"""Who may see a page: links that work once, sessions behind them, and an operator's password and read-only token.

Links and sessions live in memory, as digests: they end with the process, and no file can be read for them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tacita.core.errors import TacitaError
from tacita.core.files import read_json, temporary_path

LINK_SECONDS = 600.0
SESSION_SECONDS = 12 * 3600.0
MOST_LINKS = 100_000
LEAST_PASSWORD = 10
_COST = {"n": 2**15, "r": 8, "p": 1, "maxmem": 2**26}

Role = Literal["person", "owner", "operator", "reader"]


@dataclass(frozen=True)
class Principal:
    """Somebody who showed a token."""

    role: Role
    user: str = ""  # of a person
    number: int = 0  # of a person on this node, never given twice; 0: known when they enter

    @property
    def may_change(self) -> bool:
        return self.role != "reader"


def make_cookie_name(whose: str) -> str:
    """Browsers do not tell ports apart when they send cookies: every page server that is started has its own name."""
    return f"tacita-{whose}-{secrets.token_hex(6)}"


class Tokens:
    """Links that were handed out and sessions that are open."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._links: dict[str, tuple[Principal, float]] = {}
        self._sessions: dict[str, tuple[Principal, float]] = {}

    def make_link(self, who: Principal) -> str:
        """A token that opens one session, soon."""
        return self._store_token(self._links, who, LINK_SECONDS)

    def redeem_link(self, link: str, known: Callable[[Principal], Principal | None] = lambda who: who) -> str | None:
        """The token of a new session; the link is used up. None: it was, is too old, or `known` knows nobody of it."""
        with self._lock:
            found = self._links.pop(_digest(link), None)
        who = None if found is None or found[1] < self._now() else known(found[0])
        return None if who is None else self.open_session(who)

    def open_session(self, who: Principal) -> str:
        return self._store_token(self._sessions, who, SESSION_SECONDS)

    def find_principal(self, session: str) -> Principal | None:
        with self._lock:
            found = self._sessions.get(_digest(session))
        return None if found is None or found[1] < self._now() else found[0]

    def close_session(self, session: str) -> None:
        with self._lock:
            self._sessions.pop(_digest(session), None)

    def close_user_sessions(self, user: str) -> None:
        """Somebody is gone from the node: so are their sessions and links."""
        with self._lock:
            for held in (self._links, self._sessions):
                for key in [key for key, (who, _) in held.items() if who.user == user and who.role == "person"]:
                    del held[key]

    def _store_token(self, held: dict[str, tuple[Principal, float]], who: Principal, seconds: float) -> str:
        made, now = secrets.token_urlsafe(32), self._now()
        with self._lock:
            for key in [key for key, (_, end) in held.items() if end < now]:
                del held[key]
            if len(held) >= MOST_LINKS:
                raise TacitaError("too many links are waiting to be used; try again in ten minutes.")
            held[_digest(made)] = (who, now + seconds)
        return made


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


class OperatorCredentials:
    """operator.json: the password of a server's operator, hashed with scrypt, and the digest of the read-only token."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "operator.json"
        self._lock = threading.Lock()
        self._misses, self._not_before = 0, 0.0

    def set_password(self, password: str) -> None:
        if len(password) < LEAST_PASSWORD:
            raise TacitaError(f"a password has at least {LEAST_PASSWORD} characters.")
        salt = secrets.token_bytes(16)
        made = hashlib.scrypt(password.encode(), salt=salt, **_COST)
        self._write({**self._read(), "salt": salt.hex(), "scrypt": made.hex()})

    def make_reader_token(self) -> str:
        """A new read-only token; the one before it does not work any more."""
        made = secrets.token_urlsafe(32)
        self._write({**self._read(), "reader": _digest(made)})
        return made

    def has_password(self) -> bool:
        return "scrypt" in self._read()

    def is_password(self, password: str) -> bool:
        """Whether it is right; after wrong ones there is a pause, longer with each."""
        with self._lock:
            if time.monotonic() < self._not_before:
                raise TacitaError("too many wrong passwords; wait a minute and try again.")
            held = self._read()
            if "scrypt" not in held:
                raise TacitaError("no password is set; `tacita server password` sets one.")
            tried = hashlib.scrypt(password.encode("utf-8", "replace"), salt=bytes.fromhex(held["salt"]), **_COST)
            right = hmac.compare_digest(tried.hex(), held["scrypt"])
            self._misses = 0 if right else self._misses + 1
            if self._misses >= 5:
                self._not_before = time.monotonic() + min(60.0, 2.0 ** (self._misses - 4))
            return right

    def is_reader_token(self, token: str) -> bool:
        held = self._read().get("reader", "")
        return bool(held) and hmac.compare_digest(_digest(token), held)

    def _read(self) -> dict[str, Any]:
        return dict(read_json(self._path)) if self._path.exists() else {}

    def _write(self, values: dict[str, Any]) -> None:
        side = temporary_path(self._path)
        with open(os.open(side, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            json.dump(values, out)
        os.replace(side, self._path)
