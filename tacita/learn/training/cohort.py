"""train_cohort: local training of many clients at once, touching only the rows they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.types import Bools, CohortView, LocalModels, NormPenalty, ProximalTerm, Ragged, StateUpdate
from tacita.kernels.steps import subtract_table_rows
from tacita.learn.training.ego_stepper import EgoStepper
from tacita.learn.training.implicit_steps import apply_penalty, apply_pull
from tacita.learn.training.local_models import Workspace, build_local_models
from tacita.learn.training.pergnn_stepper import PerGNNStepper
from tacita.learn.training.recurrent_stepper import RecurrentStepper, draw_item_folds, refuse_plain_steps
from tacita.learn.training.silo_stepper import SiloStepper
from tacita.learn.training.stepper import CONTEXT, FusedStepper, StepExtras, Stepper
from tacita.learn.training.tower_stepper import TowerStepper
from tacita.messages import DenseArrays, Form, SparseRows, Upload
from tacita.models.ego import EgoModel
from tacita.models.fedpergnn import FedPerGNN
from tacita.models.interest import InterestModel
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer
from tacita.round.part import Part
from tacita.round.task import CohortTask, StepSampler, TrainingOutcome


@dataclass(frozen=True)
class TrainedCohort:
    """What a cohort's training produced; only the upload leaves the devices."""

    upload: Upload
    local: LocalModels
    part_state: dict[str, StateUpdate] = field(default_factory=dict)  # part name -> what it wants to keep


def can_fuse(backbone: Scorer, train: TrainConfig) -> bool:
    return FusedStepper.supports(backbone, train) and train.stepper != "autograd"


def choose_stepper(backbone: Scorer, train: TrainConfig, local: LocalModels, alone: bool = False) -> Stepper:
    """The fastest that can; alone: nothing joins a step from outside, so that all can be taken at once."""
    is_plain = local.weight is None
    if can_fuse(backbone, train) and is_plain:
        return FusedStepper(backbone, train, local)
    if alone and train.stepper != "autograd":
        compiled = _choose_compiled(backbone, train, local, is_plain)
        if compiled is not None:
            return compiled
    refuse_plain_steps(backbone)
    # torch takes seconds to import; the compiled steppers need none
    if backbone.grouped:
        from tacita.learn.training.grouped_stepper import GroupedStepper

        return GroupedStepper(backbone, train, local)
    from tacita.learn.training.autograd_stepper import AutogradStepper

    return AutogradStepper(backbone, train, local)


def _choose_compiled(backbone: Scorer, train: TrainConfig, local: LocalModels, is_plain: bool) -> Stepper | None:
    """A compiled stepper that takes all steps at once; None: there is none for this model."""
    has_context = CONTEXT in local.rows_needed
    if isinstance(backbone, EgoModel) and EgoStepper.supports(backbone, train) and has_context:
        return EgoStepper(backbone, train, local)
    if not is_plain:
        return None
    if isinstance(backbone, FedPerGNN) and PerGNNStepper.supports(backbone, train) and has_context:
        return PerGNNStepper(backbone, train, local)
    if isinstance(backbone, InterestModel) and RecurrentStepper.supports(backbone, train):
        return RecurrentStepper(backbone, train, local)
    if isinstance(backbone, TowerModel):
        return _choose_tower_stepper(backbone, train, local)
    return None


def _choose_tower_stepper(backbone: TowerModel, train: TrainConfig, local: LocalModels) -> Stepper | None:
    for stepper in (TowerStepper, SiloStepper):
        if stepper.supports(backbone, train):
            return stepper(backbone, train, local)
    return None


@dataclass(frozen=True)
class _JointSteps:
    """What joins every step of a cohort from outside its own samples."""

    view: CohortView
    samplers: dict[str, StepSampler]  # part name -> what draws its samples of a step
    pulls: list[ProximalTerm]
    penalties: list[NormPenalty]

    @staticmethod
    def collect(task: CohortTask, lists: dict[str, Ragged]) -> _JointSteps:
        joint = _JointSteps(task.view, {}, [], [])
        for name, part_task in task.tasks.items():
            if name in lists and part_task.step_samples is not None:
                joint.samplers[name] = part_task.step_samples
            if part_task.pull is not None:
                joint.pulls.append(part_task.pull)
            if part_task.penalty is not None:
                joint.penalties.append(part_task.penalty)
        return joint

    @property
    def is_empty(self) -> bool:
        return not (self.samplers or self.pulls or self.penalties)


def train_cohort(
    task: CohortTask,
    backbone: Scorer,
    parts: Sequence[Part],
    train: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
) -> TrainedCohort:
    """gather -> step -> diff, with the parts' samples and pulls in every step.

    `parts`: those that look at the trained models. After training `local.rows` holds the changes that were uploaded.
    With a workspace, all of it lives until the next cohort only.
    """
    view = task.view
    training = _train_local_models(task, backbone, train, draws, space, is_watched=bool(parts))
    local = training.stepper.local
    outcomes = {part.name: part.after_training(view, local) for part in parts}
    if training.is_watched or not isinstance(training.stepper, FusedStepper):
        subtract_table_rows(local.row_item, local.rows, view.items)
    values = _collect_moves(local, training.used) | _collect_extras(outcomes)
    upload = Upload(values, np.ones(view.n_clients), view.client_keys)
    part_state = {name: outcome.state for name, outcome in outcomes.items() if outcome.state}
    return TrainedCohort(upload, local, part_state)


def train_without_upload(task: CohortTask, backbone: Scorer, train: TrainConfig, draws: Draws) -> LocalModels:
    """The local models of a cohort after their steps, for devices that use them and send nothing."""
    return _train_local_models(task, backbone, train, draws, None, is_watched=True).stepper.local


@dataclass(frozen=True)
class _LocalTraining:
    """A cohort's local models after their steps."""

    stepper: Stepper
    used: Bools | None  # rows that were used or read; None: all of them
    is_watched: bool  # rows were gathered, and are as they were trained


def _train_local_models(
    task: CohortTask, backbone: Scorer, train: TrainConfig, draws: Draws, space: Workspace | None, is_watched: bool
) -> _LocalTraining:
    """gather -> step."""
    view = task.view
    if train.decay < 1 and view.round > 0:
        factor = train.decay**view.round
        backbone = _with_scaled_rate(backbone, factor)
    lists = _collect_rows_needed(task, backbone)
    joint = _JointSteps.collect(task, lists)
    is_watched = is_watched or not joint.is_empty
    weighs_samples = any(part_task.likes is not None for part_task in task.tasks.values())
    gathers = is_watched or weighs_samples or not can_fuse(backbone, train)
    local = build_local_models(view, lists, train, draws, space, task.tasks, gathers)
    if isinstance(backbone, InterestModel):
        local = draw_item_folds(backbone, local, draws)
    stepper = choose_stepper(backbone, train, local, alone=joint.is_empty)
    used = _mark_used_rows(local) if lists else None
    _run_steps(joint, stepper, backbone, used, is_watched)
    return _LocalTraining(stepper, used, is_watched)


def _collect_rows_needed(task: CohortTask, backbone: Scorer) -> dict[str, Ragged]:
    """Items whose rows are needed beside those of the samples: by parts, and by the model itself."""
    lists = {}
    for name, part_task in task.tasks.items():
        part_lists = part_task.rows_needed
        if part_lists is not None and len(part_lists.ids):
            lists[name] = part_lists
    reads_rows = backbone.reads_context or backbone.reads_history
    context = backbone.list_context_items(task.view) if reads_rows else None
    if context is not None:
        lists[CONTEXT] = context
    return lists


def _collect_extras(outcomes: dict[str, TrainingOutcome]) -> dict[str, Form]:
    """Small values that parts send along, by their full name."""
    extras: dict[str, Form] = {}
    for name, outcome in outcomes.items():
        for key, value in outcome.extras.items():
            form = value if isinstance(value, Form) else DenseArrays(np.asarray(value))
            extras[f"{name}.{key}"] = form
    return extras


def _run_steps(joint: _JointSteps, stepper: Stepper, backbone: Scorer, used: Bools | None, is_watched: bool) -> None:
    """All steps at once where nothing joins them, else one by one."""
    local = stepper.local
    if isinstance(stepper, FusedStepper) and not is_watched:
        stepper.train_and_diff_at_once()
    elif joint.is_empty:
        n_steps = int(local.n_steps.max(initial=0))
        no_extras = StepExtras.empty(local.view.n_clients)
        stepper.run_steps(0, n_steps, None, no_extras)
    else:
        _run_joint_steps(joint, stepper, backbone, used)


def _run_joint_steps(joint: _JointSteps, stepper: Stepper, backbone: Scorer, used: Bools | None) -> None:
    """Step by step, with what joins each of them."""
    local = stepper.local
    for step in range(int(local.n_steps.max(initial=0))):
        for phase in range(len(backbone.phases)):
            samples = {name: draw(joint.view, local, step, phase) for name, draw in joint.samplers.items()}
            extras = StepExtras.collect(local, samples)
            stepper.run_steps(step, step + 1, phase, extras)
            if used is not None:
                first_row = np.repeat(local.row_start[:-1], np.diff(extras.ptr))
                used[first_row + extras.row] = True
        for pull in joint.pulls:
            apply_pull(pull, backbone, local, step)
        for penalty in joint.penalties:
            apply_penalty(penalty, backbone, local, step)


def _collect_moves(local: LocalModels, used: Bools | None) -> dict[str, Form]:
    """How item rows and shared parameters moved; rows that were never needed stay at home."""
    view = local.view
    clients = np.arange(view.n_clients, dtype=np.int32)
    client = np.repeat(clients, np.diff(local.row_start))
    rows = SparseRows(client, local.row_item, local.rows)
    if used is not None and not used.all():
        sent = np.flatnonzero(used)
        sent_rows = local.rows.take(sent, axis=0)
        rows = SparseRows(client[sent], local.row_item[sent], sent_rows)
    values: dict[str, Form] = {"rows": rows}
    for name, head in view.heads.items():
        moved = local.heads[name] - head
        values[f"heads/{name}"] = DenseArrays(moved)
    return values


def _with_scaled_rate(backbone: Scorer, factor: float) -> Scorer:
    """The same model with a lower learning rate."""
    rate = getattr(backbone.config, "lr", 1.0) * factor
    config = backbone.config.model_copy(update={"lr": rate})
    return type(backbone)(config)


def _mark_used_rows(local: LocalModels) -> Bools:
    """Marks the rows that the round's own samples use and that the model reads."""
    used = np.zeros(len(local.row_item), bool)
    first_row = local.row_start[:-1]
    row_of_sample = local.row_of + np.repeat(first_row, np.diff(local.ptr))
    used[row_of_sample] = True
    if CONTEXT in local.rows_needed:
        lists, row = local.rows_needed[CONTEXT]
        n_entries = np.diff(lists.ptr[local.view.user_ptr])
        row_of_entry = row + np.repeat(first_row, n_entries)
        used[row_of_entry] = True
    return used
