"""The penalty on long updates (spec F.9, DP-FedAvg): by hand, against the slow oracle, and what it leaves as it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from helpers.oracle import cohort, federate, make_backbone, make_block, make_stream, slow_round, started
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView
from tacita.federation.rounds import run_round
from tacita.learn.training import TrainedCohort, train_cohort
from tacita.methods import RunContext, build_parts
from tacita.round.plan import Federation
from tacita.round.task import prepare_cohort

FIXED: dict[str, Any] = {"aggregation": "fixed", "denominator": 4.0, "participation": {"kind": "poisson", "rate": 1.0}}
UNEVEN = [[0, 1, 2, 3, 4, 5], [3, 4], [5, 6, 7, 0], [1, 8, 9]]


def bounded(penalty: float, clip: float, name: str = "mf", **train: Any) -> Federation:
    settings = {"batch_size": 4, "local_epochs": 2} | FIXED | train
    fed = federate(make_stream(make_block(0, 12, UNEVEN)), make_backbone(name), **settings)
    part = {"name": "dp-fedavg", "penalty": penalty, "clip": clip, "noise": 1.0}
    result = replace(fed, parts=build_parts([part], RunContext(fed.backbone, fed.draws, fed.config.train)))
    result.learner.check()
    result.parts[0].check(12)
    return result


def lengths(fed: Federation, view: CohortView) -> np.ndarray:
    return train_view(fed, view).upload.norms()


def train_view(fed: Federation, view: CohortView) -> TrainedCohort:
    return train_cohort(prepare_cohort(fed.preparing_parts, view), fed.backbone, fed.parts, fed.config.train, fed.draws)


@pytest.mark.parametrize("name", ["mf", "ncf", "pfedrec"])
def test_every_step_is_the_implicit_one_of_the_penalty(name: str) -> None:
    """Training whole copies of the table, each of which is shortened after every step, gives the same uploads."""
    strength, clip = 0.7, 0.02
    fed = bounded(strength, clip, name)
    view = cohort(fed, started(fed))

    def after_step(device: Any, users: list[int], groups: Any) -> None:
        rate = {id(p): lr for params, lr in groups for p in params}[id(device.items)]
        start = torch.from_numpy(view.items)
        with torch.no_grad():
            moved = device.items - start
            length = float(moved.norm())
            if length > clip:
                k = 2 * rate * strength
                device.items.copy_(start + moved * ((length + k * clip) / (1 + k) / length))

    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws, after_step=after_step)
    fast = train_view(fed, view)
    np.testing.assert_allclose(fast.local.private, slow.private, rtol=1e-4, atol=1e-5)
    moved = [np.linalg.norm(table - view.items) for table in slow.tables]
    np.testing.assert_allclose(fast.upload.norms(), moved, rtol=1e-3)
    assert max(moved) > clip  # it bites


def test_short_updates_are_unchanged_and_a_stronger_penalty_shortens_more() -> None:
    plain, view = bounded(0.0, 0.02), cohort(bounded(0.0, 0.02), started(bounded(0.0, 0.02)))
    free = lengths(plain, view)
    np.testing.assert_allclose(lengths(bounded(5.0, 1e6), view), free, rtol=1e-6)
    results = [lengths(bounded(strength, 0.02), view) for strength in (0.0, 0.1, 1.0, 1e6)]
    assert (results[0] == free).all()
    for weaker, stronger in pairwise(results):
        assert (stronger < weaker).all()
    np.testing.assert_allclose(results[-1], 0.02, rtol=1e-3)  # and no shorter than the clip


def test_penalty_covers_shared_parameters() -> None:
    fed = bounded(1e6, 0.02, "neuncf", optimiser="lazy-adam")
    view = cohort(fed, started(fed))
    assert (lengths(fed, view) <= 0.02 * (1 + 1e-3)).all()
    assert (lengths(bounded(0.0, 0.02, "neuncf", optimiser="lazy-adam"), view) > 0.03).any()


def test_penalty_does_not_slow_a_round() -> None:
    spent = []
    for penalty in (0.0, 1.0):
        fed = bounded(penalty, 0.02)
        progress = started(fed)
        run_round(fed, progress.server, progress.devices)
        spent.append(progress.clients.parts["dp-fedavg"]["spent"].tolist())
    assert spent[0] == spent[1]


def test_penalty_is_refused_with_pfedme() -> None:
    with pytest.raises(TacitaError, match=r"another train\.optimiser"):
        bounded(1.0, 0.02, optimiser="pfedme")
