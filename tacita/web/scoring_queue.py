"""Calls that wait for scores: those that wait together are scored together, on one thread.

A person's scores cost a tenth as much in a batch. So while one batch is scored, calls with the same options gather and
become the next one. Nobody's list depends on who else is in the batch. A batch holds only so many calls that others
need not wait long for it; the rest of them stand last in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from tacita.web.answers import JsonObject, ListOptions, RunAnswers
from tacita.web.limits import MOST_ROWS, MOST_TOGETHER, MOST_WAITING

T = TypeVar("T")


class Busy(Exception):
    """Too many calls wait already."""


@dataclass
class _WaitingCalls:
    """People who wait for a list with the same options."""

    users: list[str] = field(default_factory=list)
    futures: list[asyncio.Future[JsonObject | None]] = field(default_factory=list)

    def split_off(self, most: int) -> _WaitingCalls:
        """Take out all calls after the first `most`."""
        rest = _WaitingCalls(self.users[most:], self.futures[most:])
        del self.users[most:]
        del self.futures[most:]
        return rest


class ScoringQueue:
    """The one thread that scores, and the calls before it; used from one event loop."""

    def __init__(self, answers: RunAnswers) -> None:
        self._answers = answers
        self._thread = ThreadPoolExecutor(1, "scores")
        self._waiting: dict[ListOptions, _WaitingCalls] = {}
        self._n_waiting = 0
        self._is_scoring = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def compute(self, work: Callable[[RunAnswers], T]) -> T:
        """The result of some work on the scoring thread."""
        self._refuse_when_full()
        self._n_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, work, self._answers)
        finally:
            self._n_waiting -= 1

    async def recommend(self, user: str, options: ListOptions) -> JsonObject | None:
        """One person's list, scored together with others that wait; None: the run does not know the person."""
        self._refuse_when_full()
        future: asyncio.Future[JsonObject | None] = asyncio.get_running_loop().create_future()
        calls = self._waiting.setdefault(options, _WaitingCalls())
        calls.users.append(user)
        calls.futures.append(future)
        if not self._is_scoring:
            self._is_scoring = True
            task = asyncio.create_task(self._score_waiting())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._n_waiting += 1
        try:
            return await future
        finally:
            self._n_waiting -= 1

    def _refuse_when_full(self) -> None:
        if self._n_waiting >= MOST_WAITING:
            raise Busy

    async def _score_waiting(self) -> None:
        """Score until nobody waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                options, calls = self._take_batch()
                try:
                    lists: Sequence[JsonObject | None] = await loop.run_in_executor(
                        self._thread, self._answers.recommend, calls.users, options
                    )
                except Exception as error:
                    _fail_all(calls, error)
                else:
                    _answer_all(calls, lists)
        finally:
            self._is_scoring = False

    def _take_batch(self) -> tuple[ListOptions, _WaitingCalls]:
        """The calls whose options have waited longest; those that are too many wait again, behind all others."""
        options = next(iter(self._waiting))
        calls = self._waiting.pop(options)
        rest = calls.split_off(count_calls_together(options))
        if rest.users:
            self._waiting[options] = rest
        return options, calls

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def count_calls_together(options: ListOptions) -> int:
    """How many calls a batch may hold; reasons are found person by person, so gathering makes them no cheaper."""
    if options.why:
        return 1
    most_people = MOST_ROWS // max(1, options.k)
    return max(1, min(MOST_TOGETHER, most_people))


def _answer_all(calls: _WaitingCalls, lists: Sequence[JsonObject | None]) -> None:
    for future, entry in zip(calls.futures, lists, strict=True):
        if not future.done():  # the caller may have gone away
            future.set_result(entry)


def _fail_all(calls: _WaitingCalls, error: Exception) -> None:
    for future in calls.futures:
        if not future.done():
            future.set_exception(error)
