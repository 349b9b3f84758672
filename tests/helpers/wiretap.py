"""A part that records everything that server hooks are handed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Number
from typing import Any, get_type_hints

import numpy as np
import pytest

from helpers.contracts import (
    Specs,
    federate_parts,
)
from tacita.core.files import flatten_parts
from tacita.core.types import (
    AnyArray,
    Block,
    BlockStream,
    CohortView,
    LocalModels,
    Ragged,
    ServerState,
    SharedRecord,
)
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.messages import DenseArrays, PerClientField, SparseRows, Total
from tacita.methods import Part
from tacita.round import registry as methods_base
from tacita.round.broadcast import Audience
from tacita.round.capabilities import Privacy, Unlearning
from tacita.round.device_state import DeviceState
from tacita.round.part import ALL_HOOKS, CAPABILITIES
from tacita.round.state import StateSpec
from tacita.round.task import TrainingOutcome

SEEN_BY_THE_SERVER = (ServerState, Total)
HANDED_TO_THE_SERVER = (*SEEN_BY_THE_SERVER, Audience)  # and who the clients of a round are
NEVER_SEEN = (Ragged, Block, BlockStream, CohortView, LocalModels, DeviceState)


def server_hooks() -> list[str]:
    """The hooks of a part that are handed nothing but what the server has."""
    hooks = []
    for name in ALL_HOOKS:
        kinds = [kind for k, kind in get_type_hints(default_hook(name)).items() if k != "return"]
        if kinds and all(kind in HANDED_TO_THE_SERVER for kind in kinds):
            hooks.append(name)
    return hooks


def default_hook(name: str) -> Any:
    """A hook as it is where no part overrides it."""
    return next(getattr(cls, name) for cls in (Part, *CAPABILITIES) if hasattr(cls, name))


def reachable(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A value and everything that can be reached from it."""
    yield path, value
    if is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from reachable(getattr(value, entry.name), f"{path}.{entry.name}")
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from reachable(entry, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for k, entry in enumerate(value):
            yield from reachable(entry, f"{path}[{k}]")
    elif isinstance(value, np.ndarray) and value.base is not None:
        yield from reachable(value.base, f"{path}.base")


@dataclass
class Wiretap:
    """Listens at every server hook and remembers what must not be heard there."""

    hooks: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    arrays: list[tuple[str, AnyArray]] = field(default_factory=list)  # where, and a copy of it
    secrets: list[AnyArray] = field(default_factory=list)  # arrays whose memory must stay on the device
    vectors: list[AnyArray] = field(default_factory=list)  # private vectors of the users, after every round

    def hear(self, hook: str, arguments: tuple[Any, ...]) -> None:
        self.hooks.add(hook)
        for path, entry in reachable(tuple(self.without_asked_items(value) for value in arguments), hook):
            if isinstance(entry, NEVER_SEEN):
                self.complaints.append(f"{path} is a {type(entry).__name__}")
            elif isinstance(entry, np.ndarray):
                if any(np.shares_memory(entry, secret) for secret in self.secrets):
                    self.complaints.append(f"{path} shares memory with a device")
                self.arrays.append((path, entry.copy()))
            elif entry is not None and not isinstance(
                entry,
                (
                    *HANDED_TO_THE_SERVER,
                    SharedRecord,
                    PerClientField,
                    SparseRows,
                    DenseArrays,
                    dict,
                    tuple,
                    str,
                    Number,
                ),
            ):
                self.complaints.append(f"{path} is a {type(entry).__name__}")

    def without_asked_items(self, value: Any) -> Any:
        """Items that a client asks scores of are no history; in a round there are none."""
        if isinstance(value, Audience) and value.occasion == "serving":
            return replace(value, items=None)
        return value

    def leaks(self) -> list[str]:
        """Complaints, and arrays that hold a whole private vector of somebody."""
        vectors = np.array(self.vectors)
        whole = [path for path, messages in self.arrays if np.isin(vectors, messages).all(1).any()]
        return self.complaints + [f"{path} holds a private vector" for path in whole]


def spy_on(tap: Wiretap) -> type[Part]:
    """A part that changes nothing and tells the wiretap what its server side is handed."""

    def listening(hook: str) -> Any:
        def method(self: Part, *arguments: Any) -> Any:
            tap.hear(hook, arguments)
            return default_hook(hook)(self, *arguments)

        return method

    class Spy(Part, Privacy, Unlearning):
        name = "spy"
        observes_only = True
        addresses_clients = True
        works_with = ("rows", "statistic", "scores")

        def state(self, n_users: int) -> Sequence[StateSpec]:
            return [StateSpec("diary", np.zeros((n_users, 3), np.float32))]

        def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
            tap.vectors.extend(local.private.copy())
            tap.secrets.extend([local.private, view.private, view.train.ids, view.exclude.ids, view.user_keys])
            diary = np.random.default_rng(view.round).normal(size=(len(view.user), 3)).astype(np.float32)
            return TrainingOutcome(state={"diary": diary})

    for hook in server_hooks():
        setattr(Spy, hook, listening(hook))
    return Spy


def tap_server(monkeypatch: pytest.MonkeyPatch, specs: Specs, backbone: str = "mf", *extra: type[Part]) -> Wiretap:
    """Run two blocks with a spy among the given parts: what it hears has passed through all of them."""
    tap = Wiretap()
    for cls in (spy_on(tap), *extra):
        monkeypatch.setitem(methods_base._PARTS, cls.name, cls)
    fed = federate_parts([{"name": "spy"}, *specs, *({"name": cls.name} for cls in extra)], backbone)
    tap.secrets += [entry.ids for block in fed.stream.blocks for entry in (block.train, block.valid, block.test)]
    progress = make_initial_progress(fed)

    def on_round(report: Any, now: Progress) -> None:
        for clients in (now.clients, now.best_clients):
            tap.secrets += [clients.private, *flatten_parts(clients.parts, "").values()]

    run_remaining_blocks(fed, progress, on_round)
    return tap
