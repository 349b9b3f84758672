"""A federation of six users, and the requests that make it play earlier rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.oracle import federate, make_backbone, make_block, make_stream, started
from tacita.core.types import BlockStream, Keys, Ragged
from tacita.federation.rounds import Progress, run_round
from tacita.methods import RunContext, build_parts
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

LISTS = [[0, 1, 2, 7], [2, 3, 8], [4, 9, 1], [0, 4, 5, 6], [1, 6, 8], [3, 5, 9, 2]]
N_ITEMS = 12


def stream_of_lists(lists: list[list[int]] = LISTS) -> BlockStream:
    return make_stream(make_block(0, N_ITEMS, lists))


def make_federation(
    *specs: dict[str, Any], backbone: str = "mf", stream: BlockStream | None = None, **train: Any
) -> Federation:
    fed = federate(stream or stream_of_lists(), make_backbone(backbone), **{"rounds": 4, "batch_size": 4} | train)
    parts = build_parts(list(specs), RunContext(fed.backbone, fed.draws, fed.config.train))
    for part in parts:
        part.check(N_ITEMS)
    return replace(fed, parts=parts)


def play_rounds(fed: Federation, rounds: int) -> Progress:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress


def keys_of(fed: Federation, *users: int) -> Keys:
    return fed.stream.user_keys[list(users)]


def leave_request(fed: Federation, *users: int) -> RequestBatch:
    return RequestBatch("leave", keys_of(fed, *users), Ragged.empty(len(users)))


def forget_request(fed: Federation, user: int, *items: int) -> RequestBatch:
    return RequestBatch("forget", keys_of(fed, user), Ragged.from_lists([list(items)]))
