"""train_cohort: local training of many clients at once, touching only the rows they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacita.backbones.base import Backbone
from tacita.config import TrainConfig
from tacita.errors import TacitaError
from tacita.kernels.steps import pull_rows, subtract_rows
from tacita.methods.base import Part, overrides
from tacita.rng import Draws
from tacita.trainer.draw import Workspace, lay_out
from tacita.trainer.fused import FusedStepper
from tacita.trainer.stepper import StepExtras, Stepper
from tacita.types import Arrays, Bools, CohortView, Local, Pull, Upload


@dataclass(frozen=True)
class Trained:
    """What a cohort's training produced; only the upload leaves the devices."""

    upload: Upload
    local: Local
    parts: dict[str, Arrays]  # part name -> new device arrays


def choose_stepper(backbone: Backbone, plan: TrainConfig, local: Local) -> Stepper:
    fits = FusedStepper.supports(backbone, plan)
    if plan.stepper == "fused" and not fits:
        raise TacitaError(
            f"no fused step for backbone '{backbone.name}' with these settings; use train.stepper = 'autograd'."
        )
    if fits and plan.stepper != "autograd":
        return FusedStepper(backbone, plan, local)
    from tacita.trainer.autograd import (
        AutogradStepper,
    )  # torch takes seconds to import; the fused path needs none

    return AutogradStepper(backbone, plan, local)


def train_cohort(
    view: CohortView,
    backbone: Backbone,
    parts: Sequence[Part],
    plan: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
) -> Trained:
    """gather -> step -> diff, with the parts' extra samples and pulls in every step.

    After training `local.rows` holds the changes that were uploaded. With a workspace, all of it lives until the
    next cohort only.
    """
    lists = {p.name: made for p in parts if (made := p.at_hand(view)) is not None and len(made.ids)}
    local = lay_out(view, lists, plan, draws, space)
    stepper = choose_stepper(backbone, plan, local)
    askers = [p for p in parts if p.name in lists and overrides(p, "extra_samples")]
    pulls = [one for p in parts if (one := p.pull(view)) is not None]
    none = StepExtras.none(view.n_clients)
    used = _rows_of_samples(local) if lists else None
    if not askers and not pulls:
        stepper.run(0, int(local.n_steps.max(initial=0)), None, none)
    else:
        for step in range(int(local.n_steps.max(initial=0))):
            for phase in range(len(backbone.phases)):
                given = {p.name: e for p in askers if (e := p.extra_samples(view, local, step, phase)) is not None}
                extras = StepExtras.collect(local, given) if given else none
                stepper.run(step, step + 1, phase, extras)
                if used is not None:
                    used[extras.row + np.repeat(local.row_start[:-1], np.diff(extras.ptr))] = True
            for pull in pulls:
                _apply_pull(pull, backbone, local, step)
    kept = {p.name: new for p in parts if (new := p.after_training(view, local))}
    small = {f"{p.name}.{k}": v for p in parts for k, v in p.extras(view, local).items()}
    subtract_rows(local.row_item, local.rows, view.items)
    client = np.repeat(np.arange(view.n_clients, dtype=np.int32), np.diff(local.row_start))
    sent = None if used is None or used.all() else np.flatnonzero(used)  # rows never needed stay at home
    upload = Upload(
        client=client if sent is None else client[sent],
        item=local.row_item if sent is None else local.row_item[sent],
        value=local.rows if sent is None else local.rows.take(sent, axis=0),
        heads={name: local.heads[name] - view.heads[name] for name in view.heads},
        weight=np.ones(view.n_clients),
        extras=small,
    )
    return Trained(upload, local, kept)


def _rows_of_samples(local: Local) -> Bools:
    """Marks the rows that the round's own samples use."""
    used = np.zeros(len(local.row_item), bool)
    used[local.row_of + np.repeat(local.row_start[:-1], np.diff(local.ptr))] = True
    return used


def _apply_pull(pull: Pull, backbone: Backbone, local: Local, step: int) -> None:
    """The implicit step x <- (x + 2 eta s target) / (1 + 2 eta s) on the rows and vectors that took step `step`."""
    rates = backbone.rates(local.view.n_items)
    active = step < local.n_steps
    k = 2 * rates["rows"] * pull.strength
    pull_rows(active, local.row_start, local.row_item, local.rows, pull.rows, k)
    rate = np.concatenate([np.full(w, rates[name], np.float32) for name, w in backbone.layout.items()])
    k_private = 2 * rate * pull.strength
    users = np.flatnonzero(pull.pulls_private & np.repeat(active, np.diff(local.view.user_ptr)))
    local.private[users] = (local.private[users] + k_private * pull.private[users]) / (1 + k_private)
