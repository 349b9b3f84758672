"""A person whom a run never saw, folded into it: scores from a history alone, computed as on the person's own device.

A model that reads histories (tally) scores the history as it is: exactly what its own people get. A model with a
private vector trains one, by the trainer that devices use, for as many rounds as the run's own people had; item rows
and shared parameters stay where they are, and nothing is told to anybody. Parts that say what samples are learned as
do so here, too; parts that join training (replay, pulls) do not: somebody who arrives has nothing of theirs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Broadcast, Floats, Ints, Ragged
from tacita.federation.clients import build_user_view, empty_device_state, grow_devices
from tacita.federation.scoring import DeviceScorer
from tacita.learn.training import train_cohort
from tacita.methods.personal.fedrec import VirtualRatings
from tacita.models.scorer import Scorer
from tacita.round.part import Part
from tacita.round.task import prepare_cohort
from tacita.round.plan import Plan
from tacita.runs.loaded_run import LoadedRun, RankedItems, RecommendationQuery, check_list_length, rank_items

NEWCOMER = "somebody who arrives"  # whose key draws the first vector and the negatives: same history, same answer


def recommend_newcomer(loaded: LoadedRun, history: Ints, rounds: int, query: RecommendationQuery) -> RankedItems:
    """The best items for somebody who did this, oldest first."""
    check_list_length(query.k, len(loaded.saved.ids["items"]))
    if not len(history):
        raise TacitaError("the history is empty: give at least one item that the person chose.")
    one = Ragged(np.array([0, len(history)], np.int64), history)
    score = partial(score_newcomers, loaded, one, rounds)
    return rank_items(score, np.zeros(1, np.int32), one, query, loaded.popularity)


def score_newcomers(loaded: LoadedRun, histories: Ragged, rounds: int, users: Ints) -> Floats:
    """Scores (people, items) of people who arrive with these histories."""
    check_fold_in(loaded.plan)
    plan, server, n = loaded.plan, loaded.server, len(histories)
    keys = np.repeat(derive_keys([NEWCOMER]), n)
    none = Ragged.empty(n)
    block = Block(server.block, n, len(server.items), histories, none, none, np.ones(n, bool), len(histories.ids))
    devices = empty_device_state(plan.backbone)
    grow_devices(devices, plan, keys)
    if plan.backbone.private_width:
        settings = plan.config.train.model_copy(update={"silos": 0})
        still, down = freeze_shared(plan.scorer), Broadcast()
        labelling = tuple(part for part in plan.parts if "labels" in part.fills)
        for number in range(1, rounds + 1):
            view = build_user_view(devices, replace(server, round=number), block, np.arange(n), keys, down)
            trained = train_cohort(prepare_cohort(labelling, view), still, labelling, settings, plan.draws)
            devices.put(view.user, {"private": trained.local.private})
    scorer = DeviceScorer(plan, server, devices, block, keys, plan.broadcast_serving(server), "serve", none)
    return scorer(users)


def freeze_shared(backbone: Scorer) -> Scorer:
    """The same model, of which only private vectors learn."""
    still = copy.copy(backbone)

    def rates(n_items: int) -> dict[str, float]:
        known = backbone.rates(n_items)
        return {name: rate if name in backbone.layout else 0.0 for name, rate in known.items()}

    still.rates = rates  # type: ignore[method-assign]
    return still


def _reads_server(part: Part) -> bool:
    """Whether devices score with more than a history and a vector: what was sent to them, or shared."""
    return bool(part.serves & {"scores", "view"}) or "data" in part.fills


def check_fold_in(plan: Plan) -> None:
    """Say it where a person cannot be known by a history alone."""
    for part in plan.parts:
        if _reads_server(part):
            raise TacitaError(
                f"nobody can be folded into a run with part '{part.name}': its devices score with what the server sent "
                "or was given, and a person who arrives has nothing of that; train again with them."
            )
    if plan.learner.name not in ("rows", "statistic"):
        raise TacitaError(
            f"nobody can be folded into a run whose devices send {plan.learner.sends or plan.learner.name}; train "
            "again with them."
        )
    if plan.config.train.objective == "squared" and not any(_is_implicit(part) for part in plan.parts):
        raise TacitaError(
            "nobody can be folded into a run of train.objective = 'squared': it learns ratings where there are some, "
            "and a history holds none; train again with them, or with virtual-ratings.implicit = true."
        )
    if plan.config.train.optimiser == "pfedme":
        raise TacitaError(
            "nobody can be folded into a run of optimiser 'pfedme', which moves whole models; train again with them."
        )


def _is_implicit(part: Part) -> bool:
    """Whether it learns what a person has as 1, ratings or not."""
    return isinstance(part, VirtualRatings) and part.config.implicit
