"""A node: a folder with its settings and its store, and what its owner can ask of it.

A node is a device or a silo of many people. What it lets out, and when, is decided here and nowhere else.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from tacita.core.config import StrictModel, to_toml
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, temporary_path, write_bytes
from tacita.data.interaction_table import Interactions
from tacita.data.sources import load_interactions
from tacita.live.json_object import JsonObject
from tacita.live.node.erased_spending import collect_spending_by_digest
from tacita.live.node.serving import NO_MODEL, Snapshot, take_snapshot
from tacita.live.node.store import Interaction, NodeStore
from tacita.live.node.store_file import STORE_FILE
from tacita.live.processes import SHARED_ACCOUNT
from tacita.live.settings import read_settings

log = logging.getLogger(__name__)

VERSION = 1
MOST_EPSILON = 100.0  # of any budget here: more promises nothing, and takes minutes and gigabytes to count
DAY = 86_400.0
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class NodeConfig(StrictModel):
    """node.toml: where the server is, and what may be sent to it."""

    version: int = Field(VERSION, description="of this file's format")
    name: str = Field(min_length=1, max_length=100, description="what the operator calls this node")
    server: str = Field(description="address of the server, host:port")
    ca: str = Field("ca.pem", description="certificate of the server's authority, a file in this folder")
    key: str = Field("node.key", description="this node's private key, a file in this folder")
    min_users: int = Field(20, ge=1, description="send nothing readable that sums fewer people")
    min_contributors: int = Field(5, ge=1, description="statistics leave out items that fewer people here have")
    insecure_single_user_uploads: bool = Field(False, description="send sums of fewer people all the same")
    min_seconds_between_rounds: float = Field(0.0, ge=0, description="refuse to send sooner than this")
    max_releases_per_day: int = Field(10_000, ge=0, description="refuse to send more often than this in 24 hours")
    max_delta: float = Field(1e-5, gt=0, lt=1, description="refuse runs that count epsilon at a larger delta")
    max_epsilon: float = Field(
        8.0,
        ge=0,
        le=MOST_EPSILON,
        description="refuse runs that plan a larger epsilon; who declared no budget spends at most this in all runs",
    )
    page_port: int = Field(0, ge=0, le=65535, description="port of people's pages, on loopback; 0: any that is free")
    run_as: str = Field(
        "auto", description="OS user of Flower's process; '': the node's own; auto: tacita-node, if there is one"
    )

    @field_validator("run_as")
    @classmethod
    def _check_account(cls, value: str) -> str:
        if value == SHARED_ACCOUNT:
            raise PydanticCustomError(
                "account",
                "an account of its own: whatever else runs as nobody could read the key and ask as the server",
            )
        return value

    @field_validator("server")
    @classmethod
    def _check_address(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value)
        if match is None or not 0 < int(match[2]) < 65536:
            raise PydanticCustomError("address", "an address such as recommender.example.org:9092")
        return value


class Node:
    """An open node. One process at a time has it."""

    def __init__(self, folder: Path, config: NodeConfig, store: NodeStore) -> None:
        self.folder = folder
        self.config = config
        self.store = store
        self.open_runs: JsonObject = {}  # run -> its NodeRun, between requests
        self.serving_error = ""  # why nothing can be served, if that is so
        self._snapshot: Snapshot | None = None
        self._refreshing = threading.Lock()
        self.refresh_snapshot()

    @staticmethod
    def create(
        folder: Path,
        config: NodeConfig,
        ca: Path | None = None,
        secret: str | None = None,
        also: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """A new folder that appears whole or not at all; `ca` is copied into it, `also` adds files to it.

        `secret` is for tests that need known draws.
        """
        if folder.exists() or folder.is_symlink():
            raise TacitaError(f"{folder} exists; a node is made in a new folder, choose another.")
        trusted = None if ca is None else _read_certificate(ca)
        side = temporary_path(folder)
        try:
            side.mkdir(parents=True, mode=0o711)  # Flower's process passes through to its socket, and reads nothing
            side.chmod(0o711)
            write_bytes(side / "node.toml", to_toml(config).encode())
            if trusted is not None:
                write_bytes(side / config.ca, trusted)
            NodeStore.create(side / STORE_FILE, secret).close()
            also(side)
            side.rename(folder)
        except OSError as error:
            raise disk_error(folder, error) from None
        finally:
            shutil.rmtree(side, ignore_errors=True)

    @staticmethod
    def open(folder: Path, insecure_single_user_uploads: bool = False) -> Node:
        """Open a node's folder for this process; the flag adds to what node.toml says."""
        config = read_config(folder)
        if insecure_single_user_uploads:
            config = config.model_copy(update={"insecure_single_user_uploads": True})
        store = NodeStore.open(folder / STORE_FILE)
        try:
            return Node(folder, config, store)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Serving

    def refresh_snapshot(self) -> None:
        """Serve from what the store holds now: after a handled request, an import, an erasure."""
        with self._refreshing:
            try:
                self._snapshot = take_snapshot(self.store, self._snapshot)
                self.serving_error = ""
            except Exception as error:  # whatever a server sent, the owner must still be able to export and erase
                self._snapshot = None
                self.serving_error = "the last model cannot be served; wait for the next round."
                if isinstance(error, TacitaError):
                    self.serving_error = str(error)
                log.warning("nothing can be recommended: %s", str(error)[:500])

    def recommend(self, user: str, k: int = 10) -> list[JsonObject]:
        """Top k for a raw user id: [{item, title, score}], best first. Reads memory only."""
        return self.snapshot.recommend(user, k)

    @property
    def snapshot(self) -> Snapshot:
        """What serves recommendations now; an error where there is nothing yet."""
        if self._snapshot is None:
            raise TacitaError(self.serving_error or NO_MODEL)
        return self._snapshot

    # For the owner

    def import_file(
        self,
        path: str,
        columns: dict[str, str] | None = None,
        date_format: str | None = None,
        decimal: str | None = None,
    ) -> JsonObject:
        """Add the interactions of a file; what is there already is not added twice."""
        table = load_interactions(path, columns=columns or None, date_format=date_format, decimal=decimal)
        known = {item for item, _ in self.store.read_catalogue()}
        n_users, n_rows = self.store.add_interactions(_iter_interactions(table))
        self.refresh_snapshot()
        n_unknown = sum(item not in known for item in table.item_ids) if known else 0
        return {
            "guessed": " ".join([table.format_note, *table.notes]),
            "rows": len(table.user),
            "new interactions": n_rows,
            "new users": n_users,
            "items": len(table.item_ids),
            "items not in the catalogue": n_unknown,
            "catalogue": len(known),
        }

    def set_consent(self, user: str, item: str | None, level: str) -> JsonObject:
        self.store.set_consent(user, item, level)
        return {"user": user, "item": item, "level": level, "means": LEVEL_MEANS[level]}

    def export_user_data(self, path: Path, user: str | None = None) -> JsonObject:
        return {"lines": self.store.export_user_data(path, user), "file": str(path)}

    def erase_user(self, user: str | None) -> JsonObject:
        """Remove a user, or all (None), from this node; what was spent stays spent (erased_spending.py)."""
        counts = self.store.erase_user(user, lambda number: collect_spending_by_digest(self.store, number))
        self._snapshot = None  # holds what was erased
        self.refresh_snapshot()
        return dict(counts)

    def describe_status(self) -> JsonObject:
        """How the node is, and in plain words what the server can see."""
        snapshot = self._snapshot
        n_today, last_release = self.store.count_releases_since(time.time() - DAY)
        return {
            "name": self.config.name,
            "server": self.config.server,
            **self.store.count_rows(),
            "catalogue": len(self.store.read_catalogue()),
            "releases today": n_today,
            "last release": last_release,
            "serving": None if snapshot is None else f"block {snapshot.block} round {snapshot.round}",
            "server sees": self.describe_exposure(),
        }

    # What may leave

    @property
    def min_contributors(self) -> int:
        """How many people must have an item before a statistic tells of it."""
        config = self.config
        return 1 if config.insecure_single_user_uploads else config.min_contributors

    def describe_exposure(self) -> str:
        people = self.store.count_learning_users()
        min_users = self.config.min_users
        if people == 0:
            return "Nothing of anybody: there is nobody on this node whose data may be learned from."
        if people >= min_users:
            return (
                f"The server sees one sum over up to {people:,} people per round: how item rows moved, or which items "
                "go together, how many people took part (a tally that counts epsilon does not tell), of runs that "
                f"count no epsilon sums of scores, and that at least {min_users:,} people are enrolled here. It is not "
                "told who they are. That does not hide what one of them did from a server that looks for it: two runs "
                "with other settings can be subtracted, every new run is another exact answer, and people whom "
                f"somebody invented on this node hide nobody. An item must be with {self.config.min_contributors} "
                "people before a statistic tells of it; a moved row may be one person's. It also sees when this node "
                "is online, its address, version and clock."
            )
        if self.config.insecure_single_user_uploads:
            return (
                f"insecure_single_user_uploads is on and this node has {people:,} "
                f"{'person' if people == 1 else 'people'}: from what is sent in a round the server can work out "
                f"{'everything this person' if people == 1 else 'much of what they'} did in the block."
            )
        return (
            f"Nothing of anybody: {people:,} of the {min_users:,} people are here that one sum needs (min_users), so "
            "this node receives models and sends no sum but to runs that count epsilon, whose noise protects also one "
            "alone. The server sees when this node is online, and its address."
        )

    def is_too_few(self, people: int) -> bool:
        """Whether this node never sends a sum over so many people."""
        config = self.config
        return people < config.min_users and not config.insecure_single_user_uploads

    def find_sum_refusal(self, people: int, kind: str | None = None) -> str | None:
        """Why a sum over so many people may not be sent now; None: it may. The server reads it, so it counts nobody.

        With a kind, the pause between rounds is counted from the last release of that kind: a round has several.
        """
        config = self.config
        if self.is_too_few(people):
            return "fewer people than this node's minimum (min_users) take part, so nothing is sent."
        n_today, last_release = self.store.count_releases_since(time.time() - DAY, kind)
        if n_today >= config.max_releases_per_day:
            return "this node has answered as often as it does in 24 hours (max_releases_per_day)."
        if last_release is None:
            return None
        waited = time.time() - last_release
        if 0 <= waited < config.min_seconds_between_rounds:
            return "this node takes a pause between answers (min_seconds_between_rounds); ask later."
        return None


LEVEL_MEANS = {
    "learn": "may take part in sums that are sent to the server",
    "keep": "never leaves this node; still used for that person's own recommendations",
}


def read_config(folder: Path) -> NodeConfig:
    return read_settings(folder, "node", NodeConfig, VERSION)


def _iter_interactions(table: Interactions) -> Iterator[Interaction]:
    users = [table.user_ids[number] for number in table.user.tolist()]
    items = [table.item_ids[number] for number in table.item.tolist()]
    times: list[float | None] = [None] * len(users)
    ratings: list[float | None] = [None] * len(users)
    if table.timestamp is not None:
        times = [float(at) for at in table.timestamp.tolist()]
    if table.rating is not None:
        ratings = table.rating.tolist()
    return zip(users, items, times, ratings, strict=True)


def _read_certificate(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TacitaError(f"cannot read {path}: {error.strerror or error}.") from None
    if b"BEGIN CERTIFICATE" not in content:
        raise TacitaError(f"{path} holds no certificate; ask the operator for the server's ca.pem.")
    return content
