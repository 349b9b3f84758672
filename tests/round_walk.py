"""Which files one round passes through: `python tests/round_walk.py` counts call events of a profiler.

The round is one of F3CRec on MF, MovieLens-100K, second block. Values everybody uses (core/) and compiled loops
(kernels/) are left out: who follows a round does not open them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import tacita

PACKAGE = Path(tacita.__file__).parent
LEFT_OUT = ("core", "kernels")


@dataclass(frozen=True)
class Walk:
    """The calls of one round, in their order."""

    calls: tuple[tuple[str, str], ...]  # file and function

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.calls})

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set(self.calls)

    @property
    def changes_of_file(self) -> int:
        order = [file for file, _ in self.calls]
        return sum(before != after for before, after in pairwise(order))

    def describe(self) -> str:
        return f"{len(self.files)} files, {len(self.functions)} functions, {self.changes_of_file} changes of file"


def record_calls(run: Any) -> Walk:
    """Every call of the package's own functions while `run` runs; comprehensions and lambdas stay with their owner."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        file = path.relative_to(PACKAGE)
        if file.parts[0] not in LEFT_OUT:
            calls.append((str(file), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(tuple(calls))


def walk_round(data: str = "ml-100k", batch_size: int | None = None) -> Walk:
    """One round of the second block, after one round that warms up what is made once.

    Local steps count one by one. In MovieLens-100K the client with the most data takes five of them.
    """
    from tacita.federation.rounds import begin_block, end_block, make_initial_progress, run_block, run_round
    from tacita.methods import resolve_config
    from tacita.runs.assembly import Machine, assemble_federation

    values = {"data": data, "backbone": {"name": "mf"}, "method": "f3crec", "seed": 1}
    train = {"rounds": 1}
    if batch_size is not None:
        train["batch_size"] = batch_size
    settings = {"train": train, "evaluate": {"controls": False}}
    federation = assemble_federation(
        resolve_config({**values, **settings}, "the walk"), Machine(threads=1, chunk=2**20)
    )
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    run_block(federation, progress, lambda report, now: None)
    end_block(federation, progress)
    begin_block(federation, progress, 1)
    progress.server, _ = run_round(federation, progress.server, progress.devices)
    return record_calls(lambda: run_round(federation, progress.server, progress.devices))


if __name__ == "__main__":
    walk = walk_round()
    print(walk.describe())
    print(*walk.files, sep="\n")
