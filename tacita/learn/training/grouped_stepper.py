"""The torch stepper of models with towers: a client's samples of a step are one group, scored with its own tower.

Groups of a like number of samples are filled up to one size and go through one batched product. The size follows the
client alone, so numbers do not depend on the company. A cohort trains in crews, each on one core, and small enough
that what it computes stays near it: torch's own threads would wait for each other at every small operation.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacita.core.config import TrainConfig
from tacita.core.types import AnyArray, CohortView, Floats, Ints, LocalModels, Longs, Ragged
from tacita.kernels.adam import adam_rows
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.autograd_stepper import _LANES, AutogradStepper, _SampleBlock, _select_rows
from tacita.learn.training.optimisers import LazyAdam, MovingArray
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.models.scorer import Scorer

_MIN_GROUP = 16  # samples of the smallest group
_SHARD_SAMPLES = 4096  # samples that a crew scores in a step, about


class GroupedStepper(Stepper):
    def __init__(self, backbone: Scorer, plan: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, plan, local)
        ends = _find_shard_ends(local)
        self.shards = [_ShardStepper(backbone, plan, local, (a, b)) for a, b in pairwise(ends)]

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        with ThreadPoolExecutor(threads_in_use()) as pool:
            list(pool.map(lambda crew: crew.run(first, last, phase, crew.select_extras(extras)), self.shards))
        if self.plan.optimiser == "pfedme":
            names = self.shards[0].local.personal if self.shards else {}
            made = {name: np.concatenate([crew.local.personal[name] for crew in self.shards]) for name in names}
            self.local.personal = made

    def row_logits(self) -> Floats:
        with ThreadPoolExecutor(threads_in_use()) as pool:
            return np.concatenate([np.zeros(0, np.float32), *pool.map(lambda crew: crew.row_logits(), self.shards)])


def _find_shard_ends(local: LocalModels) -> list[int]:
    """Cuts the clients, in their order, into crews of about as many samples a step."""
    work = np.minimum(np.diff(local.turn_ptr), local.batch)
    crew = (np.cumsum(work) - work) // _SHARD_SAMPLES
    return [0, *(np.flatnonzero(np.diff(crew)) + 1).tolist(), len(work)] if len(work) else [0]


def slice_local(local: LocalModels, first: int, last: int) -> LocalModels:
    """Clients first..last-1 of a cohort's local models: the same memory."""
    view = local.view
    a, b = view.user_ptr[first], view.user_ptr[last]
    s, t = local.ptr[first], local.ptr[last]
    rows = slice(local.row_start[first], local.row_start[last])
    return replace(
        local,
        view=_slice_view(view, first, last),
        ptr=local.ptr[first : last + 1] - s,
        item=local.item[s:t],
        label=local.label[s:t],
        user_ptr=local.user_ptr[a : b + 1] - s,
        turn_ptr=local.turn_ptr[first : last + 1] - local.turn_ptr[first],
        order=local.order[:, local.turn_ptr[first] : local.turn_ptr[last]] - s,
        partner=None if local.partner is None else local.partner[s:t] - s,
        weight=None if local.weight is None else local.weight[s:t],
        row_of=local.row_of[s:t],
        row_start=local.row_start[first : last + 1] - rows.start,
        row_item=local.row_item[rows],
        rows=local.rows[rows],
        private=local.private[a:b],
        heads={name: v[first:last] for name, v in local.heads.items()},
        rows_needed=_slice_context(local, a, b),
        batch_ptr=None if local.batch_ptr is None else local.batch_ptr[first : last + 1] - local.batch_ptr[first],
        batch_start=_slice_batch_starts(local, first, last),
        batches_per_group=None if local.batches_per_group is None else local.batches_per_group[first:last],
        personal={},
        moments={
            name: v[rows if name.startswith("rows.") else slice(first, last)] for name, v in local.moments.items()
        },
    )


def _slice_context(local: LocalModels, first: int, last: int) -> dict[str, tuple[Ragged, Ints]]:
    """What the model reads of users first..last-1; parts ask with the whole cohort's lists."""
    if CONTEXT not in local.rows_needed:
        return {}
    lists, row = local.rows_needed[CONTEXT]
    return {CONTEXT: (lists.take(np.arange(first, last)), row[lists.ptr[first] : lists.ptr[last]])}


def _slice_batch_starts(local: LocalModels, first: int, last: int) -> Longs | None:
    """Where batches of whole people begin, counted from the first of these clients' turns."""
    if local.batch_ptr is None or local.batch_start is None:
        return None
    some = local.batch_start[:, local.batch_ptr[first] : local.batch_ptr[last] + 1]
    return np.asarray(some - local.turn_ptr[first])


def _slice_view(view: CohortView, first: int, last: int) -> CohortView:
    a, b = view.user_ptr[first], view.user_ptr[last]
    nothing = Ragged.empty(int(b - a))  # samples are drawn already
    return replace(
        view,
        user_ptr=view.user_ptr[first : last + 1] - a,
        user=view.user[a:b],
        user_keys=view.user_keys[a:b],
        client_keys=view.client_keys[first:last],
        train=nothing,
        exclude=nothing,
        private=view.private[a:b],
        parts={},
    )


class CompiledLazyAdam(LazyAdam):
    """The same numbers, without copies: a cohort's towers are too many for them."""

    def __init__(self, plan: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.rate = [_expand_rate(one) for one in moving]

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        tensor, (mean, square) = self.moving[k].tensor.detach(), self.moments[k]
        slope, table, first, second = (x.reshape(len(x), -1).numpy() for x in (grad, tensor, mean, square))
        decay = np.float32(self.plan.weight_decay)
        adam_rows(used.numpy(), slope, table, first, second, self.steps[k].numpy(), self.rate[k], decay)


def _expand_rate(one: MovingArray) -> AnyArray:
    """The rate of every number of a row."""
    width = one.tensor[0].numel() if len(one.tensor) else 0
    return np.broadcast_to(np.asarray(one.rate, np.float32), (width,)).copy()


@dataclass(frozen=True)
class _SampleGroups:
    """Clients whose samples of a step fill groups of one size."""

    client: Longs  # (groups,)
    owner: Longs  # (groups, size), or (groups, 1) where a client is one user
    row: Longs  # (groups, size)


class _ShardStepper(AutogradStepper):
    def __init__(self, backbone: Scorer, plan: TrainConfig, cohort: LocalModels, clients: tuple[int, int]) -> None:
        super().__init__(backbone, plan, slice_local(cohort, *clients))
        self.first = clients[0]
        self.first_user = cohort.view.user_ptr[self.first]
        if type(self.optimiser) is LazyAdam:
            self.optimiser = CompiledLazyAdam(plan, self.optimiser.moving, self.local.n_steps)

    def select_extras(self, extras: StepExtras) -> StepExtras:
        """What the parts ask of these clients, of all that they ask of the cohort."""
        ptr = extras.ptr[self.first : self.first + self.local.view.n_clients + 1]
        some = slice(ptr[0], ptr[-1])
        owner = extras.owner[some] - self.first_user
        return StepExtras(ptr - ptr[0], extras.row[some], owner, extras.label[some], extras.weight[some])

    def _represent_users(self, users: Longs) -> dict[str, Tensor]:
        """Who reads nothing but its vector is looked up sample by sample."""
        if not self.backbone.reads_context:
            return {}
        # idle users keep the others company, so that no shape and no odd tail follows from how many there are
        idle = np.full(-len(users) % _LANES, users[-1] if len(users) else 0)
        made = super()._represent_users(np.append(users, idle))
        return {name: value[: len(users)] for name, value in made.items()}

    def _score_blocks(self, users: Longs, rep: dict[str, Tensor], blocks: list[_SampleBlock]) -> list[Tensor]:
        groups, place = self._form_groups(blocks)
        logits = [self._score_group(one, users, rep) for one in groups]
        found: Any = _select_rows(torch.cat([*logits, torch.zeros(1)]), place)  # the last one stands for idle samples
        return list(found.split([len(one.row) for one in blocks]))

    def _form_groups(self, blocks: list[_SampleBlock]) -> tuple[list[_SampleGroups], Longs]:
        """Groups of every size, and where each sample, idle ones included, finds its logit."""
        owner = np.concatenate([one.owner[: one.n] for one in blocks])
        row = np.concatenate([one.row[: one.n] for one in blocks])
        client = self.client_of_user[owner]
        counts = np.bincount(client, minlength=self.local.view.n_clients)
        order = np.argsort(client, kind="stable")
        lane = np.empty(len(order), np.int64)
        lane[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = np.maximum(_MIN_GROUP, 2 ** np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64))
        size[counts == 0] = 0
        groups, at, place = [], 0, np.empty(len(order), np.int64)
        for width in np.unique(size[counts > 0]):
            one, inside, slot = self._build_group(int(width), size, (client, owner, row, lane))
            place[inside] = at + slot
            groups.append(one)
            at += one.row.size
        ends = np.cumsum([one.n for one in blocks])[:-1]
        found = zip(np.split(place, ends), blocks, strict=True)
        return groups, np.concatenate([np.append(p, np.full(len(b.row) - b.n, at)) for p, b in found])

    def _build_group(
        self, width: int, size: Longs, samples: tuple[Longs, ...]
    ) -> tuple[_SampleGroups, AnyArray, Longs]:
        """The groups of one size, which samples are in them, and where."""
        local = self.local
        mine = np.flatnonzero(size == width)
        # a product of one pair of matrices is not computed as one of many are: a second group keeps it company
        mine = np.append(mine, mine[0]) if len(mine) == 1 else mine
        number = np.empty(len(size), np.int64)
        number[mine[::-1]] = np.arange(len(mine))[::-1]
        client, owner, row, lane = samples
        inside = size[client] == width
        slot = number[client[inside]] * width + lane[inside]
        rows = np.repeat(local.row_start[mine], width)
        rows[slot] = row[inside]
        owners = local.view.user_ptr[mine][:, None]
        if not local.view.has_single_users:
            owners = np.repeat(owners, width)
            owners[slot] = owner[inside]
        return _SampleGroups(mine, owners.reshape(len(mine), -1), rows.reshape(len(mine), width)), inside, slot

    def _score_group(self, groups: _SampleGroups, users: Longs, rep: dict[str, Tensor]) -> Tensor:
        everybody = np.array_equal(groups.client, np.arange(self.local.view.n_clients))
        heads = {k: v if everybody else _select_rows(v, groups.client) for k, v in self.heads.items()}
        owner = groups.owner.reshape(-1)
        if rep:
            at = np.minimum(np.searchsorted(users, owner), len(users) - 1)  # idle places may stand for anybody
            mine = {k: _select_rows(v, at) for k, v in rep.items()}
        else:
            mine = self.backbone.named(_select_rows(self.private, self._local_index("private", owner)))
        named = {k: v.reshape(*groups.owner.shape, -1) for k, v in mine.items()}
        rows = _select_rows(self.rows, self._local_index("rows", groups.row.reshape(-1))).reshape(*groups.row.shape, -1)
        found: Tensor = self.backbone.score_groups(named, heads, rows).reshape(-1)
        return found
