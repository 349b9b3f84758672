"""Two worlds that differ in one person, the second with the noised sums of the first.

So both servers see the same numbers. Whatever else differs between them reached the server beside the noise; and
before the noise, sums may differ by what one person adds, and not by what others answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.sparse import SparseSum
from tacita.core.types import AnyArray, Arrays, Doubles, Ragged, ServerState
from tacita.data.interaction_table import Interactions
from tacita.federation.devices import LocalDevices
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, begin_block, make_initial_progress, run_block, run_remaining_blocks
from tacita.messages import Total
from tacita.methods import resolve_config
from tacita.round.plan import Federation, Plan
from tacita.round.question import Question
from tacita.round.request import RequestBatch
from tacita.runs.assembly import Machine, RunTable, assemble_federation

N_ITEMS = 60
N_USERS = 30
PERSON = 7
EVALUATE = {"k": [5], "select_by": "ndcg@5", "metrics": ["ndcg"], "controls": False, "unmasked": False}

Play = Callable[[Federation, Progress], None]


@dataclass
class ForcedSums:
    """What both worlds released, question by question."""

    questions: list[str] = field(default_factory=list)
    before_noise: list[Arrays] = field(default_factory=list)
    noised: list[Arrays] = field(default_factory=list)
    changes: list[dict[str, float]] = field(default_factory=list)  # lengths of what the person changes, by field
    states: list[Arrays] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    is_second: bool = False
    place: int = 0

    def measure_lengths(self, public: Sequence[str] = ("dpps.noise",)) -> Doubles:
        """How much the person changes each sum, over all of its fields that have noise."""
        squares = []
        for change in self.changes:
            squares.append(sum(length**2 for name, length in change.items() if name not in public))
        return np.sqrt(np.array(squares))

    def noise(self, total: Total, question: Question, noised: Total) -> Total:
        """The noised sum of the first world, in both."""
        sums = {name: to_array(value) for name, value in total.sums.items()}
        if not self.is_second:
            self.questions.append(question.name)
            self.before_noise.append(sums)
            self.noised.append(noised.sums)
            return noised
        number = self.place
        self.place += 1
        assert number < len(self.questions), "the second world asks more questions"
        assert self.questions[number] == question.name
        earlier = self.before_noise[number]
        assert {name: value.shape for name, value in earlier.items()} == {name: v.shape for name, v in sums.items()}
        change = {name: float(np.linalg.norm(sums[name] - earlier[name])) for name in sums}
        self.changes.append(change)
        return replace(noised, sums=self.noised[number])

    def compare_state(self, number: int, state: Arrays) -> None:
        """Note what a server has in one world only; which clients took part, a log may know."""
        if not self.is_second:
            self.states.append(state)
            return
        earlier = self.states[number]
        for name in sorted(earlier.keys() | state.keys()):
            if name.endswith(("/clients", "/ptr")):
                continue
            if name not in earlier or name not in state or not np.array_equal(earlier[name], state[name]):
                self.differences.append(f"{number}: {name}")


def to_array(value: AnyArray | SparseSum) -> Doubles:
    return value.matrix().toarray() if isinstance(value, SparseSum) else np.array(value, np.float64)


@contextmanager
def patch_noise(sums: ForcedSums) -> Iterator[None]:
    noise_sum = Plan.noise_sum

    def force(self: Plan, server: ServerState, total: Total, question: Question) -> Total:
        return sums.noise(total, question, noise_sum(self, server, total, question))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "noise_sum", force)
        patch.setattr(LocalDevices, "sum_validation", lambda self, *_: {})  # outside of every epsilon
        yield


def make_people(person: Sequence[int] | None) -> RunTable:
    """Thirty people, of whom one has these items, or is not there."""
    rng = np.random.default_rng(1)
    users, items, times = [], [], []
    for user in range(N_USERS):
        own = rng.choice(N_ITEMS, 8, replace=False).tolist()
        first = int(rng.integers(1000))
        if user == PERSON:
            own = list(person or ())
        users += [user] * len(own)
        items += own
        times += range(first, first + len(own))
    present = sorted(set(users))
    numbers = {user: number for number, user in enumerate(present)}
    return RunTable(
        Interactions(
            name="toy",
            user=np.array([numbers[user] for user in users], np.int32),
            item=np.array(items, np.int32),
            rating=None,
            timestamp=np.array(times, np.int64),
            split=None,
            user_ids=tuple(f"u{user}" for user in present),
            item_ids=tuple(f"i{item}" for item in range(N_ITEMS)),
            titles={},
            fingerprint="toy",
            format_note="",
        )
    )


def compare_worlds(folder: Path, person: Sequence[int], play: Play | None = None, **settings: Any) -> ForcedSums:
    """The same run with and without the person."""
    catalogue = folder / "items.csv"
    catalogue.write_text("item\n" + "".join(f"i{item}\n" for item in range(N_ITEMS)), encoding="utf-8")
    values = {"data": "toy", "catalogue": str(catalogue), "evaluate": EVALUATE, **settings}
    values["privacy"] = {"reproducible_noise": True, **settings.get("privacy", {})}
    config = resolve_config(values, "a test")
    sums = ForcedSums()
    with patch_noise(sums):
        for own in (None, person):
            sums.is_second = own is not None
            federation = assemble_federation(config, Machine(threads=1), data=make_people(own))
            progress = make_initial_progress(federation)
            n_states = [0]

            def compare(_: object, progress: Progress, n_states: list[int] = n_states) -> None:
                sums.compare_state(n_states[0], flatten_state(progress.server))
                n_states[0] += 1

            if play is None:
                run_remaining_blocks(federation, progress, compare)
            else:
                play(federation, progress)
                compare(None, progress)
    assert sums.place == len(sums.questions), "the first world asks more questions"
    return sums


def flatten_state(server: ServerState) -> Arrays:
    state = {"items": server.items.copy()}
    for name, head in server.heads.items():
        state[f"heads/{name}"] = head.copy()
    for part, arrays in server.parts.items():
        for name, array in arrays.items():
            state[f"{part}/{name}"] = np.array(array)
    return state


def play_request(kind: str, users: Sequence[str]) -> Play:
    """The first block, and then a request of some people about two items each."""

    def play(federation: Federation, progress: Progress) -> None:
        begin_block(federation, progress, 0)
        run_block(federation, progress, lambda report, progress: None)
        stream = federation.stream
        numbers = np.array(sorted(stream.user_ids.index(user) for user in users))
        numbers = numbers[np.argsort(stream.user_keys[numbers])]
        lists = stream.blocks[0].train.take(numbers)
        rows = lists.rows()
        first = lists.filter_entries(np.arange(len(rows)) - lists.ptr[rows] < 2)
        items = Ragged(first.ptr, first.ids)
        if kind == "leave":
            items = Ragged.empty(len(numbers))
        handle_requests(federation, progress, RequestBatch(kind, stream.user_keys[numbers], items, number=1))

    return play
