"""train_cohort: local training of many clients at once, touching only the rows they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Bools, CohortView, LocalModels, NormPenalty, ProximalTerm, StateUpdate
from tacita.kernels.norms import scale_moves, sum_move_squares
from tacita.kernels.steps import pull_rows, subtract_rows
from tacita.learn.training.ego_stepper import EgoStepper
from tacita.learn.training.fused_stepper import FusedStepper
from tacita.learn.training.local_models import Workspace, build_local_models
from tacita.learn.training.recurrent_stepper import RecurrentStepper
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import TowerStepper
from tacita.messages import DenseArrays, Form, SparseRows, Upload
from tacita.models.ego import EgoModel
from tacita.models.interest import InterestModel
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer
from tacita.round.parts import Part, overrides

_HALVINGS = 60  # of a bracket around the length that a penalty leads to


@dataclass(frozen=True)
class TrainedCohort:
    """What a cohort's training produced; only the upload leaves the devices."""

    upload: Upload
    local: LocalModels
    parts: dict[str, StateUpdate]  # part name -> what it wants to keep


def check_training(backbone: Scorer, parts: Sequence[Part], plan: TrainConfig) -> None:
    """Refuse settings of local training that cannot work together."""
    if plan.stepper == "fused" and not any(
        one.supports(backbone, plan) for one in (FusedStepper, TowerStepper, EgoStepper, RecurrentStepper)
    ):
        raise TacitaError(
            f"no fused step for backbone '{backbone.name}' with these settings (no silos; bce and no l2: sgd for "
            "models that are affine in the item row, lazy-adam for towers; bpr and lazy-adam for ego; bce, lazy-adam "
            "and batches of people for interest); "
            "use train.stepper = 'autograd'."
        )
    if plan.objective == "bpr" and plan.negatives == 0:
        raise TacitaError("train.objective = 'bpr' ranks positives above negatives; set train.negatives to 1 or more.")
    if plan.weight_decay > 0 and plan.optimiser != "lazy-adam":
        raise TacitaError(
            f"train.weight_decay with optimiser '{plan.optimiser}' would move rows that a client does not have; "
            "use train.optimiser = 'lazy-adam', or train.l2."
        )
    if plan.moments == "kept" and plan.optimiser != "lazy-adam":
        raise TacitaError(f"train.moments = 'kept' is for train.optimiser = 'lazy-adam', not '{plan.optimiser}'.")
    if plan.optimiser == "pfedme" and len(backbone.phases) > 1:
        raise TacitaError(
            f"optimiser 'pfedme' moves a whole model at once, and backbone '{backbone.name}' moves in "
            f"{len(backbone.phases)} phases; use another backbone or train.optimiser = 'sgd'."
        )
    choosing = [part.name for part in parts if overrides(part, "negatives")]
    if len(choosing) > 1:
        raise TacitaError(f"parts '{choosing[0]}' and '{choosing[1]}' both choose the negatives; use one of them.")
    labelling = [part.name for part in parts if overrides(part, "labels")]
    if len(labelling) > 1:
        raise TacitaError(f"parts '{labelling[0]}' and '{labelling[1]}' both say what samples are; use one of them.")
    for part in parts:
        if plan.objective != "squared" and overrides(part, "labels"):
            raise TacitaError(f"part '{part.name}' makes up ratings; set train.objective = 'squared'.")
        if plan.objective == "bpr" and overrides(part, "samples"):
            raise TacitaError(
                f"part '{part.name}' brings samples with soft labels, and train.objective = 'bpr' learns from pairs of "
                "a positive and a negative; use train.objective = 'bce'."
            )
        if plan.objective == "squared" and overrides(part, "likes"):
            raise TacitaError(
                f"part '{part.name}' brings items to learn as liked, and train.objective = 'squared' learns ratings; "
                "use train.objective = 'bpr' or 'bce'."
            )
        if plan.stepper == "fused" and overrides(part, "likes") and not EgoStepper.supports(backbone, plan):
            raise TacitaError(
                f"part '{part.name}' weighs samples, which no fused step for backbone '{backbone.name}' does; "
                "use train.stepper = 'auto'."
            )
        if plan.optimiser == "pfedme" and overrides(part, "pull"):
            raise TacitaError(f"part '{part.name}' pulls the model that 'pfedme' only follows; use another optimiser.")
        deals = part.reads_logits or overrides(part, "extra_samples") or overrides(part, "samples")
        if plan.objective == "squared" and deals:
            raise TacitaError(
                f"part '{part.name}' deals in probabilities, and train.objective = 'squared' fits raw scores; "
                "use train.objective = 'bce'."
            )


def _can_fuse(backbone: Scorer, plan: TrainConfig) -> bool:
    return FusedStepper.supports(backbone, plan) and plan.stepper != "autograd"


def choose_stepper(backbone: Scorer, plan: TrainConfig, local: LocalModels, alone: bool = False) -> Stepper:
    """The fastest that can; alone: nothing joins a step from outside, so that all can be taken at once."""
    if _can_fuse(backbone, plan) and local.weight is None:
        return FusedStepper(backbone, plan, local)
    if alone and plan.stepper != "autograd" and local.weight is None and TowerStepper.supports(backbone, plan):
        assert isinstance(backbone, TowerModel)
        return TowerStepper(backbone, plan, local)
    if alone and plan.stepper != "autograd" and EgoStepper.supports(backbone, plan) and CONTEXT in local.rows_needed:
        assert isinstance(backbone, EgoModel)
        return EgoStepper(backbone, plan, local)
    if alone and plan.stepper != "autograd" and local.weight is None and RecurrentStepper.supports(backbone, plan):
        assert isinstance(backbone, InterestModel)
        return RecurrentStepper(backbone, plan, local)
    # torch takes seconds to import; the fused path needs none
    if backbone.grouped:
        from tacita.learn.training.grouped_stepper import GroupedStepper

        return GroupedStepper(backbone, plan, local)
    from tacita.learn.training.autograd_stepper import AutogradStepper

    return AutogradStepper(backbone, plan, local)


def train_cohort(
    view: CohortView,
    backbone: Scorer,
    parts: Sequence[Part],
    plan: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
) -> TrainedCohort:
    """gather -> step -> diff, with the parts' extra samples and pulls in every step.

    After training `local.rows` holds the changes that were uploaded. With a workspace, all of it lives until the
    next cohort only.
    """
    check_training(backbone, parts, plan)
    if plan.decay < 1 and view.round > 0:
        backbone = _scale_rate(backbone, plan.decay**view.round)
    lists = {p.name: made for p in parts if (made := p.at_hand(view)) is not None and len(made.ids)}
    if (seen := backbone.context(view)) is not None:
        lists[CONTEXT] = seen
    askers = [p for p in parts if p.name in lists and overrides(p, "extra_samples")]
    pulls = [one for p in parts if (one := p.pull(view)) is not None]
    bounds = [far for p in parts if (far := p.bound(view)) is not None]
    steered = bool(askers or pulls or bounds)  # something joins every step
    watched = steered or any(overrides(p, hook) for p in parts for hook in ("after_training", "extras"))
    weighed = any(overrides(p, "likes") for p in parts)  # then the fused path may not be taken
    gather = watched or weighed or not _can_fuse(backbone, plan)
    local = build_local_models(view, lists, plan, draws, space, parts, gather)
    stepper = choose_stepper(backbone, plan, local, alone=not steered)
    none = StepExtras.empty(view.n_clients)
    used = _mark_used_rows(local) if lists else None
    if isinstance(stepper, FusedStepper) and not watched:
        stepper.train_whole()
    elif not steered:
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
            for bound in bounds:
                _apply_bound(bound, backbone, local, step)
    kept = {p.name: new for p in parts if (new := p.after_training(view, local))}
    small = {f"{p.name}.{k}": v for p in parts for k, v in p.extras(view, local).items()}
    if watched or not isinstance(stepper, FusedStepper):
        subtract_rows(local.row_item, local.rows, view.items)
    client = np.repeat(np.arange(view.n_clients, dtype=np.int32), np.diff(local.row_start))
    sent = None if used is None or used.all() else np.flatnonzero(used)  # rows never needed stay at home
    rows = SparseRows(client, local.row_item, local.rows)
    if sent is not None:
        rows = SparseRows(client[sent], local.row_item[sent], local.rows.take(sent, axis=0))
    moved = {f"heads/{name}": DenseArrays(local.heads[name] - v) for name, v in view.heads.items()}
    values: dict[str, Form] = {"rows": rows, **moved}
    values |= {name: v if isinstance(v, Form) else DenseArrays(np.asarray(v)) for name, v in small.items()}
    return TrainedCohort(Upload(values, np.ones(view.n_clients), view.client_keys), local, kept)


def _scale_rate(backbone: Scorer, factor: float) -> Scorer:
    """The same model with a lower learning rate."""
    rate = getattr(backbone.config, "lr", 1.0) * factor
    return type(backbone)(backbone.config.model_copy(update={"lr": rate}))


def _mark_used_rows(local: LocalModels) -> Bools:
    """Marks the rows that the round's own samples use and that the model reads."""
    used = np.zeros(len(local.row_item), bool)
    used[local.row_of + np.repeat(local.row_start[:-1], np.diff(local.ptr))] = True
    if CONTEXT in local.rows_needed:
        lists, row = local.rows_needed[CONTEXT]
        used[row + np.repeat(local.row_start[:-1], np.diff(lists.ptr[local.view.user_ptr]))] = True
    return used


def _apply_pull(pull: ProximalTerm, backbone: Scorer, local: LocalModels, step: int) -> None:
    """The implicit step x <- (x + 2 eta s target) / (1 + 2 eta s) on the rows and vectors that took step `step`."""
    rates = backbone.rates(local.view.n_items)
    active = step < local.n_steps
    k = 2 * rates["rows"] * pull.strength
    pull_rows(active, local.row_start, local.row_item, local.rows, pull.rows, k)
    rate = np.concatenate([np.full(w, rates[name], np.float32) for name, w in backbone.layout.items()])
    k_private = 2 * rate * pull.strength
    users = np.flatnonzero(pull.pulls_private & np.repeat(active, np.diff(local.view.user_ptr)))
    local.private[users] = (local.private[users] + k_private * pull.private[users]) / (1 + k_private)


def _apply_bound(bound: NormPenalty, backbone: Scorer, local: LocalModels, step: int) -> None:
    """The implicit step of the penalty on clients that took step `step`: what is longer than the bound shrinks.

    With one rate r for everything a length l becomes (l + 2 r s bound) / (1 + 2 r s). Rows and shared parameters that
    have rates of their own shrink by 1 / (1 + 2 r s (1 - bound / n)) each, n the length that this leads to.
    """
    view, rates = local.view, backbone.rates(local.view.n_items)
    square = {"rows": sum_move_squares(local.row_start, local.row_item, local.rows, view.items)}
    for name, value in view.heads.items():
        moved = (local.heads[name] - value).astype(np.float64).reshape(view.n_clients, -1)
        square[name] = (moved**2).sum(axis=1)
    length = np.sqrt(sum(square.values(), np.zeros(view.n_clients)))
    strong = {name: 2 * bound.strength * rates[name] for name in square}
    low, high = np.full(view.n_clients, bound.length), np.maximum(length, bound.length)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        then = sum((one / (1 + strong[name] * (1 - bound.length / middle)) ** 2 for name, one in square.items()), 0.0)
        low, high = np.where(then > middle**2, middle, low), np.where(then > middle**2, high, middle)
    longer = (length > bound.length) & (step < local.n_steps)
    factor = {k: np.where(longer, 1 / (1 + v * (1 - bound.length / high)), 1.0) for k, v in strong.items()}
    scale_moves(factor["rows"], local.row_start, local.row_item, local.rows, view.items)
    for name, value in view.heads.items():
        by = factor[name].reshape(-1, *[1] * value.ndim)
        local.heads[name][...] = value + by * (local.heads[name] - value)
