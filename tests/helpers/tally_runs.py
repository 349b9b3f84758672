"""Small streams and runs of tally, with and without a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.oracle import Lists, federate, make_block, make_stream
from tacita.core.config import RunConfig, validate_model
from tacita.core.types import BlockStream, Bools, Ragged
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.models.tally.model import Tally
from tacita.round.device_state import PARTS
from tacita.round.plan import Federation
from tacita.round.request import Request
from tacita.round.unlearning_report import PartReports
from tacita.runs.assembly import Machine, assemble_federation

BUDGET_DATA = "synthetic:users=120,items=50,per_user=14,groups=4,drift=0.3,new=0.2"
SPENT_AT = f"{PARTS}statistic/spent"


def budget_config(epsilon: float | None = 4.0, blocks: int = 2, **more: Any) -> RunConfig:
    privacy = {} if epsilon is None else {"epsilon": epsilon}
    split = {"kind": "blocks", "n_blocks": blocks} if blocks > 1 else {"kind": "random"}
    values = {"data": BUDGET_DATA, "split": split, "backbone": {"name": "tally"}, "privacy": privacy, "seed": 3, **more}
    return validate_model(RunConfig, values, "the test")


def run_config(config: RunConfig, **draws: Any) -> tuple[Federation, Progress]:
    fed = assemble_federation(config, Machine())
    fed = replace(fed, draws=replace(fed.draws, **draws))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    return fed, progress


def leave_user(fed: Federation, progress: Progress, user: int) -> PartReports:
    progress.in_block = True
    request = Request("leave", int(fed.stream.user_keys[user]), np.zeros(0, np.int32))
    return handle_requests(fed, progress, request)


UNCUT: dict[str, Any] = {"min_item": 0, "min_pair": 0, "keep": 0}  # nothing is cut


def train_stream(stream: BlockStream, backbone: Tally) -> tuple[Federation, Progress]:
    fed = federate(stream, backbone)
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    return fed, progress


def stream_of_lists(n_items: int, *blocks: Lists) -> BlockStream:
    """Blocks of training lists; users without a list are empty."""
    n = max(len(block) for block in blocks)
    filled = [[*block, *[[] for _ in range(n - len(block))]] for block in blocks]
    return make_stream(*(make_block(b, n_items, lists, known=n if b else 0) for b, lists in enumerate(filled)))


def random_lists(seed: int, users: int, items: int, most: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(items)[: rng.integers(0, most + 1)].tolist() for _ in range(users)]


def to_sets(lists: Ragged, n_items: int) -> Bools:
    """Lists as rows of a (users, items) table."""
    sets = np.zeros((len(lists), n_items), bool)
    sets[lists.rows(), lists.ids] = True
    return sets
