"""Fold-in of a person whom a run never saw: scores from a history alone, computed as on the person's own device.

A model that reads histories (tally) scores the history as it is: exactly what its own people get. A model with a
private vector trains one with the devices' trainer, for as many rounds as the run's own people had. Item rows and
shared parameters stay as they are, and nothing leaves the device. Parts that set labels do so for newcomers, too. Parts
that join training (replay, pulls) do not, because a newcomer has nothing of theirs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Broadcast, Floats, Ints, Keys, Ragged
from tacita.federation.clients import build_user_view, empty_device_state, grow_devices_for_block
from tacita.federation.scoring import DeviceScorer
from tacita.learn.training import train_cohort
from tacita.models.scorer import Scorer
from tacita.round.device_state import DeviceState
from tacita.round.part import Part
from tacita.round.plan import Plan
from tacita.round.task import prepare_cohort
from tacita.runs.loaded_run import LoadedRun, RankedItems, RecommendationQuery, check_list_length, rank_items

NEWCOMER = "somebody who arrives"  # whose key draws the first vector and the negatives: same history, same answer


def recommend_newcomer(loaded: LoadedRun, history: Ints, rounds: int, query: RecommendationQuery) -> RankedItems:
    """The best items for a person with this history, oldest first."""
    check_list_length(query.k, len(loaded.items))
    if not len(history):
        raise TacitaError("the history is empty: give at least one item that the person chose.")
    bounds = np.array([0, len(history)], np.int64)
    histories = Ragged(bounds, history)
    score = partial(score_newcomers, loaded, histories, rounds)
    newcomer = np.zeros(1, np.int32)
    return rank_items(score, newcomer, histories, query, loaded.popularity)


def score_newcomers(loaded: LoadedRun, histories: Ragged, rounds: int, users: Ints) -> Floats:
    """Scores (people, items) of people who arrive with these histories."""
    plan = loaded.plan
    server = loaded.server
    check_fold_in(plan)
    n = len(histories)
    keys = np.repeat(derive_keys([NEWCOMER]), n)
    no_items = Ragged.empty(n)
    block = Block(
        server.block,
        n,
        len(server.items),
        train=histories,
        valid=no_items,
        test=no_items,
        new_users=np.ones(n, bool),
        n_rows=len(histories.ids),
    )
    devices = empty_device_state(plan.backbone)
    grow_devices_for_block(devices, plan, keys)
    if plan.backbone.private_width:
        _train_private(loaded, devices, block, keys, rounds)
    broadcast = plan.broadcast_serving(server)
    scorer = DeviceScorer(plan, server, devices, block, keys, broadcast, "serve", no_items)
    return scorer(users)


def _train_private(loaded: LoadedRun, devices: DeviceState, block: Block, keys: Keys, rounds: int) -> None:
    """Train the private vectors of newcomers, with everything shared as it is."""
    plan = loaded.plan
    settings = plan.config.train.model_copy(update={"silos": 0})
    frozen = freeze_shared(plan.scorer)
    labelling_parts = tuple(part for part in plan.parts if "labels" in part.fills)
    users = np.arange(block.n_users)
    for number in range(1, rounds + 1):
        server = replace(loaded.server, round=number)
        view = build_user_view(devices, server, block, users, keys, Broadcast())
        task = prepare_cohort(labelling_parts, view)
        trained = train_cohort(task, frozen, (), settings, plan.draws)
        devices.put(view.user, {"private": trained.local.private})


def freeze_shared(backbone: Scorer) -> Scorer:
    """The same model, of which only private vectors learn."""
    frozen = copy.copy(backbone)

    def rates(n_items: int) -> dict[str, float]:
        frozen_rates = {}
        for name, rate in backbone.list_learning_rates(n_items).items():
            is_private = name in backbone.private_layout
            frozen_rates[name] = rate if is_private else 0.0
        return frozen_rates

    frozen.list_learning_rates = rates  # type: ignore[method-assign]
    return frozen


def _needs_server_state(part: Part) -> bool:
    """Whether devices score with more than a history and a vector: what was sent to them, or shared."""
    return bool(part.serves & {"scores", "view"}) or "data" in part.fills


def check_fold_in(plan: Plan) -> None:
    """Refuse runs in which a history alone does not make a person known."""
    for part in plan.parts:
        if _needs_server_state(part):
            raise TacitaError(
                f"nobody can be folded into a run with part '{part.name}': its devices score with what the server sent "
                "or was given, and a person who arrives has nothing of that; train again with them."
            )
    if plan.learner.name not in ("rows", "statistic"):
        sent = plan.learner.sends or plan.learner.name
        raise TacitaError(f"nobody can be folded into a run whose devices send {sent}; train again with them.")
    settings = plan.config.train
    has_implicit_labels = any("ratings" in part.fills for part in plan.parts)
    if settings.objective == "squared" and not has_implicit_labels:
        raise TacitaError(
            "nobody can be folded into a run of train.objective = 'squared': it learns ratings where there are some, "
            "and a history holds none; train again with them, or with virtual-ratings.implicit = true."
        )
    if settings.optimiser == "pfedme":
        raise TacitaError(
            "nobody can be folded into a run of optimiser 'pfedme', which moves whole models; train again with them."
        )
