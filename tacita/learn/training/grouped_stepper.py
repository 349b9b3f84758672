"""The torch stepper of models with towers: a client's samples of a step are one group, scored with its own tower.

Groups of a like number of samples are filled up to one size and go through one batched product. The size follows the
client alone, so numbers do not depend on which other clients are there. A cohort trains in shards, each on one core,
and small enough that what it computes stays near it: torch's own threads would wait for each other at every small
operation.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tacita.core.config import TrainConfig
from tacita.core.types import AnyArray, Bools, Floats, LocalModels, Longs
from tacita.kernels.adam import adam_step_rows
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.autograd_stepper import _LANES, AutogradStepper, _SampleBlock, _select_rows
from tacita.learn.training.local_slices import slice_local
from tacita.learn.training.optimisers import LazyAdam, MovingArray
from tacita.learn.training.stepper import StepExtras, Stepper
from tacita.models.scorer import Scorer

_MIN_GROUP = 16  # samples of the smallest group
_SHARD_SAMPLES = 4096  # samples that a shard scores in a step, about


class GroupedStepper(Stepper):
    def __init__(self, backbone: Scorer, train: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, train, local)
        ends = _find_shard_ends(local)
        self.shards = [_ShardStepper(backbone, train, local, clients) for clients in pairwise(ends)]

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        def run_shard(shard: _ShardStepper) -> None:
            shard.run_steps(first, last, phase, shard.select_extras(extras))

        with ThreadPoolExecutor(threads_in_use()) as pool:
            list(pool.map(run_shard, self.shards))
        if self.train.optimiser == "pfedme":
            self._join_personal_models()

    def _join_personal_models(self) -> None:
        """The personal models of all shards."""
        names = self.shards[0].local.personal if self.shards else {}
        personal = {}
        for name in names:
            arrays = [shard.local.personal[name] for shard in self.shards]
            personal[name] = np.concatenate(arrays)
        self.local.personal = personal

    def compute_row_logits(self) -> Floats:
        with ThreadPoolExecutor(threads_in_use()) as pool:
            logits = list(pool.map(_ShardStepper.compute_row_logits, self.shards))
        return np.concatenate([np.zeros(0, np.float32), *logits])


def _find_shard_ends(local: LocalModels) -> list[int]:
    """Cuts the clients, in their order, into shards of about as many samples a step."""
    work = np.minimum(np.diff(local.turn_ptr), local.batch)
    if not len(work):
        return [0]
    shard = (np.cumsum(work) - work) // _SHARD_SAMPLES
    cuts = np.flatnonzero(np.diff(shard)) + 1
    return [0, *cuts.tolist(), len(work)]


class CompiledLazyAdam(LazyAdam):
    """The same numbers, without copies: a cohort's towers are too many for them."""

    def __init__(self, train: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(train, moving, n_steps)
        self.rate = [_expand_rate(array) for array in moving]

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        mean, square = self.moments[k]
        adam_step_rows(
            used.numpy(),
            _as_vectors(grad),
            _as_vectors(self.moving[k].tensor.detach()),
            _as_vectors(mean),
            _as_vectors(square),
            self.steps[k].numpy(),
            self.rate[k],
            np.float32(self.train.weight_decay),
        )


def _as_vectors(table: Tensor) -> AnyArray:
    """A table with a vector per row, in the same memory."""
    return table.reshape(len(table), -1).numpy()


def _expand_rate(array: MovingArray) -> AnyArray:
    """The rate of every number of a row."""
    width = array.tensor[0].numel() if len(array.tensor) else 0
    rate = np.asarray(array.rate, np.float32)
    return np.broadcast_to(rate, (width,)).copy()


@dataclass(frozen=True)
class _StepSamples:
    """The samples of a step, without idle ones."""

    client: Longs
    owner: Longs
    row: Longs
    lane: Longs  # the number of the sample within its client


@dataclass(frozen=True)
class _SampleGroups:
    """Clients whose samples of a step fill groups of one size."""

    client: Longs  # (groups,)
    owner: Longs  # (groups, size), or (groups, 1) where a client is one user
    row: Longs  # (groups, size)


class _ShardStepper(AutogradStepper):
    def __init__(self, backbone: Scorer, train: TrainConfig, cohort: LocalModels, clients: tuple[int, int]) -> None:
        super().__init__(backbone, train, slice_local(cohort, *clients))
        self.first = clients[0]
        self.first_user = cohort.view.user_ptr[self.first]
        if type(self.optimiser) is LazyAdam:
            self.optimiser = CompiledLazyAdam(train, self.optimiser.moving, self.local.n_steps)

    def select_extras(self, extras: StepExtras) -> StepExtras:
        """What the parts ask of these clients, of all that they ask of the cohort."""
        last = self.first + self.local.view.n_clients
        ptr = extras.ptr[self.first : last + 1]
        span = slice(ptr[0], ptr[-1])
        return StepExtras(
            ptr=ptr - ptr[0],
            row=extras.row[span],
            owner=extras.owner[span] - self.first_user,
            label=extras.label[span],
            weight=extras.weight[span],
        )

    def _represent_users(self, users: Longs) -> dict[str, Tensor]:
        """Who reads nothing but its vector is looked up sample by sample."""
        if not self.backbone.reads_context:
            return {}
        # idle users fill the lanes, so that no shape and no odd tail follows from how many there are
        last_user = users[-1] if len(users) else 0
        idle = np.full(-len(users) % _LANES, last_user)
        rep = super()._represent_users(np.append(users, idle))
        return {name: value[: len(users)] for name, value in rep.items()}

    def _score_blocks(self, users: Longs, rep: dict[str, Tensor], blocks: list[_SampleBlock]) -> list[Tensor]:
        groups, place = self._form_groups(blocks)
        logits = [self._score_group(group, users, rep) for group in groups]
        idle_logit = torch.zeros(1)  # the last one stands for idle samples
        scores: Tensor = _select_rows(torch.cat([*logits, idle_logit]), place)
        sizes = [len(block.row) for block in blocks]
        return list(scores.split(sizes))  # type: ignore[no-untyped-call]

    def _form_groups(self, blocks: list[_SampleBlock]) -> tuple[list[_SampleGroups], Longs]:
        """Groups of every size, and where each sample, idle ones included, finds its logit."""
        samples = self._join_samples(blocks)
        counts = np.bincount(samples.client, minlength=self.local.view.n_clients)
        size = _choose_group_sizes(counts)
        groups = []
        n_places = 0
        place = np.empty(len(samples.client), np.int64)
        for width in np.unique(size[counts > 0]):
            group, is_inside, slot = self._build_group(int(width), size, samples)
            place[is_inside] = n_places + slot
            groups.append(group)
            n_places += group.row.size
        ends = np.cumsum([block.n for block in blocks])[:-1]
        places = []
        for block, block_place in zip(blocks, np.split(place, ends), strict=True):
            idle_place = np.full(len(block.row) - block.n, n_places)
            places += [block_place, idle_place]
        return groups, np.concatenate(places)

    def _join_samples(self, blocks: list[_SampleBlock]) -> _StepSamples:
        owner = np.concatenate([block.owner[: block.n] for block in blocks])
        row = np.concatenate([block.row[: block.n] for block in blocks])
        client = self.client_of_user[owner]
        counts = np.bincount(client, minlength=self.local.view.n_clients)
        order = np.argsort(client, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        lane = np.empty(len(order), np.int64)
        lane[order] = np.arange(len(order)) - first
        return _StepSamples(client, owner, row, lane)

    def _build_group(self, width: int, size: Longs, samples: _StepSamples) -> tuple[_SampleGroups, Bools, Longs]:
        """The groups of one size, which samples are in them, and where."""
        local = self.local
        clients = np.flatnonzero(size == width)
        if len(clients) == 1:
            # a product of one pair of matrices is not computed as one of many are: a second group goes with it
            clients = np.append(clients, clients[0])
        n_groups = len(clients)
        number = np.empty(len(size), np.int64)
        number[clients[::-1]] = np.arange(n_groups)[::-1]
        is_inside = size[samples.client] == width
        group_number = number[samples.client[is_inside]]
        slot = group_number * width + samples.lane[is_inside]
        rows = np.repeat(local.row_start[clients], width)
        rows[slot] = samples.row[is_inside]
        owners = local.view.user_ptr[clients][:, None]
        if not local.view.has_single_users:
            owners = np.repeat(owners, width)
            owners[slot] = samples.owner[is_inside]
        groups = _SampleGroups(clients, owners.reshape(n_groups, -1), rows.reshape(n_groups, width))
        return groups, is_inside, slot

    def _score_group(self, groups: _SampleGroups, users: Longs, rep: dict[str, Tensor]) -> Tensor:
        heads = self.heads
        all_clients = np.arange(self.local.view.n_clients)
        if not np.array_equal(groups.client, all_clients):
            heads = {name: _select_rows(head, groups.client) for name, head in self.heads.items()}
        owner = groups.owner.reshape(-1)
        if rep:
            place = np.minimum(np.searchsorted(users, owner), len(users) - 1)  # idle places may stand for anybody
            sample_rep = {name: _select_rows(value, place) for name, value in rep.items()}
        else:
            private = _select_rows(self.private, self._find_local_places("private", owner))
            sample_rep = self.backbone.split_private(private)
        grouped_rep = {name: value.reshape(*groups.owner.shape, -1) for name, value in sample_rep.items()}
        row = self._find_local_places("rows", groups.row.reshape(-1))
        rows = _select_rows(self.rows, row).reshape(*groups.row.shape, -1)
        logits: Tensor = self.backbone.compute_group_logits(grouped_rep, heads, rows)
        return logits.reshape(-1)


def _choose_group_sizes(counts: Longs) -> Longs:
    """How many places the group of each client has: a power of two, 0 for who has no sample."""
    exponent = np.ceil(np.log2(np.maximum(counts, 1)))
    size = np.maximum(_MIN_GROUP, 2 ** exponent.astype(np.int64))
    size[counts == 0] = 0
    return np.asarray(size)
