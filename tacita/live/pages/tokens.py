"""Who may see a page: links that work once, sessions behind them, and an operator's password and read-only token.

Links and sessions live in memory, as digests. They end with the process, and no file holds them.
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
    """The holder of a token."""

    role: Role
    user: str = ""  # of a person
    number: int = 0  # of a person on this node, never used for another person; 0: known when they enter

    @property
    def may_change(self) -> bool:
        return self.role != "reader"


Expiring = dict[str, tuple[Principal, float]]
"""Principals by the digest of their token, each with the time at which it ends."""


def make_cookie_name(role: str) -> str:
    """Browsers send cookies to every port of a host, so each page server that starts has a name of its own."""
    return f"tacita-{role}-{secrets.token_hex(6)}"


def _accept_any(principal: Principal) -> Principal | None:
    return principal


class Tokens:
    """Links that wait to be used, and sessions that are open."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._links: Expiring = {}
        self._sessions: Expiring = {}

    def make_link(self, principal: Principal) -> str:
        """A token that opens one session, soon."""
        return self._store_token(self._links, principal, LINK_SECONDS)

    def redeem_link(self, link: str, check: Callable[[Principal], Principal | None] = _accept_any) -> str | None:
        """The token of a new session; the link is used up. None: it was used, is too old, or `check` refuses it."""
        with self._lock:
            entry = self._links.pop(_digest_token(link), None)
        principal = self._get_unexpired(entry)
        if principal is not None:
            principal = check(principal)
        return None if principal is None else self.open_session(principal)

    def open_session(self, principal: Principal) -> str:
        return self._store_token(self._sessions, principal, SESSION_SECONDS)

    def find_principal(self, session: str) -> Principal | None:
        with self._lock:
            entry = self._sessions.get(_digest_token(session))
        return self._get_unexpired(entry)

    def _get_unexpired(self, entry: tuple[Principal, float] | None) -> Principal | None:
        if entry is None:
            return None
        principal, end = entry
        return None if end < self._now() else principal

    def close_session(self, session: str) -> None:
        with self._lock:
            self._sessions.pop(_digest_token(session), None)

    def close_user_sessions(self, user: str) -> None:
        """End all sessions and links of a person who is gone from the node."""
        with self._lock:
            for table in (self._links, self._sessions):
                for digest, (principal, _) in list(table.items()):
                    if principal.role == "person" and principal.user == user:
                        del table[digest]

    def _store_token(self, table: Expiring, principal: Principal, seconds: float) -> str:
        token = secrets.token_urlsafe(32)
        now = self._now()
        with self._lock:
            _drop_expired(table, now)
            if len(table) >= MOST_LINKS:
                raise TacitaError("too many links are waiting to be used; try again in ten minutes.")
            table[_digest_token(token)] = (principal, now + seconds)
        return token


def _drop_expired(table: Expiring, now: float) -> None:
    for digest, (_, end) in list(table.items()):
        if end < now:
            del table[digest]


def _digest_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


class OperatorCredentials:
    """operator.json: the password of a server's operator, hashed with scrypt, and the digest of the read-only token."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "operator.json"
        self._lock = threading.Lock()
        self._misses = 0
        self._not_before = 0.0

    def set_password(self, password: str) -> None:
        if len(password) < LEAST_PASSWORD:
            raise TacitaError(f"a password has at least {LEAST_PASSWORD} characters.")
        salt = secrets.token_bytes(16)
        key = hashlib.scrypt(password.encode(), salt=salt, **_COST)
        self._write_credentials({**self._read_credentials(), "salt": salt.hex(), "scrypt": key.hex()})

    def make_reader_token(self) -> str:
        """A new read-only token; the one before it does not work any more."""
        token = secrets.token_urlsafe(32)
        self._write_credentials({**self._read_credentials(), "reader": _digest_token(token)})
        return token

    def has_password(self) -> bool:
        return "scrypt" in self._read_credentials()

    def check_password(self, password: str) -> bool:
        """Whether it is right; after wrong ones there is a pause, longer with each."""
        with self._lock:
            if time.monotonic() < self._not_before:
                raise TacitaError("too many wrong passwords; wait a minute and try again.")
            stored = self._read_credentials()
            if "scrypt" not in stored:
                raise TacitaError("no password is set; `tacita server password` sets one.")
            salt = bytes.fromhex(stored["salt"])
            key = hashlib.scrypt(password.encode("utf-8", "replace"), salt=salt, **_COST)
            is_right = hmac.compare_digest(key.hex(), stored["scrypt"])
            self._count_attempt(is_right)
            return is_right

    def _count_attempt(self, is_right: bool) -> None:
        self._misses = 0 if is_right else self._misses + 1
        if self._misses >= 5:
            pause = min(60.0, 2.0 ** (self._misses - 4))
            self._not_before = time.monotonic() + pause

    def is_reader_token(self, token: str) -> bool:
        digest = self._read_credentials().get("reader", "")
        return bool(digest) and hmac.compare_digest(_digest_token(token), digest)

    def _read_credentials(self) -> dict[str, Any]:
        return dict(read_json(self._path)) if self._path.exists() else {}

    def _write_credentials(self, values: dict[str, Any]) -> None:
        side = temporary_path(self._path)
        descriptor = os.open(side, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="utf-8") as out:
            json.dump(values, out)
        os.replace(side, self._path)
