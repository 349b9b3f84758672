"""The torch stepper: any backbone, objective and solver, whole cohort at once, gradients by autograd.

Every client has its own rows, private vectors and heads, so one backward pass over the sum of the clients' mean
losses gives each client exactly its own gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacita.core.config import TrainConfig
from tacita.core.flat_indices import expand_spans
from tacita.core.types import AnyArray, Floats, LocalModels, Longs, Ragged
from tacita.learn.training.objectives import POINTWISE, compute_bpr_loss, sum_weighted_squares
from tacita.learn.training.optimisers import OPTIMISERS, MovingArray, UsedRows
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.models.scorer import Context, Scorer

_LANES = 64


@dataclass(frozen=True)
class _SampleBlock:
    """Samples that are scored together."""

    owner: Longs
    row: Longs
    inside: Floats
    label: Floats
    weight: Floats
    n: int  # what follows is idle: weightless, so that no odd tail is left, whose rounding would differ

    @staticmethod
    def pad(owner: AnyArray, row: AnyArray, inside: AnyArray, label: AnyArray, weight: AnyArray) -> _SampleBlock:
        n = len(row)
        n_idle = -n % _LANES
        return _SampleBlock(
            owner=_pad_places(owner, n_idle),
            row=_pad_places(row, n_idle),
            inside=_pad_numbers(inside, n_idle),
            label=_pad_numbers(label, n_idle),
            weight=_pad_numbers(weight, n_idle),
            n=n,
        )


def _pad_places(places: AnyArray, n_idle: int) -> Longs:
    """Idle samples stand where the last one does."""
    mode = "edge" if len(places) else "constant"
    return np.pad(places.astype(np.int64), (0, n_idle), mode=mode)  # type: ignore[call-overload, no-any-return]


def _pad_numbers(numbers: AnyArray, n_idle: int) -> Floats:
    return np.pad(numbers.astype(np.float32), (0, n_idle))


@dataclass(frozen=True)
class _StepBatch:
    """One step of every client that has it."""

    own: _SampleBlock  # pointwise: the samples; in pairs: the negatives
    positives: _SampleBlock | None  # in pairs: the positive of each
    extra: _SampleBlock
    users: Longs  # whose samples these are
    used: UsedRows
    size: Longs  # (clients,) turns in its batch
    place: dict[str, Longs]  # kind -> where the step's copy holds each row, if it has one

    @property
    def blocks_without_parts(self) -> list[_SampleBlock]:
        """Without the samples of parts."""
        if self.positives is None:
            return [self.own]
        return [self.own, self.positives]


def _select_rows(table: Tensor, which: AnyArray) -> Tensor:
    """Rows of a table, with a gradient that adds up in the order of `which`."""
    return table.index_select(0, torch.from_numpy(which))


def _find_distinct_numbers(lists: list[Longs], n: int) -> Longs:
    """The different numbers below n, ascending; much faster than np.unique where n is small."""
    is_present = np.zeros(n, bool)
    for numbers in lists:
        is_present[numbers] = True
    return np.flatnonzero(is_present)


class AutogradStepper(Stepper):
    def __init__(self, backbone: Scorer, train: TrainConfig, local: LocalModels) -> None:
        torch.set_num_threads(1)
        super().__init__(backbone, train, local)
        view = local.view
        clients = np.arange(view.n_clients)
        self.owner = local.owner
        self.client_of_user = np.repeat(clients, np.diff(view.user_ptr))
        first_row = np.repeat(local.row_start[:-1], np.diff(local.ptr))
        self.sample_row = local.row_of + first_row
        self._prepare_context()
        self.moving = self._wrap_moving_arrays()
        self._bind_tables([array.tensor for array in self.moving.values()], {})
        optimiser_class = OPTIMISERS[train.optimiser]
        self.optimiser = optimiser_class(train, list(self.moving.values()), local.n_steps)
        if train.optimiser == "pfedme":
            local.personal = {name: array.tensor.numpy() for name, array in self.moving.items()}

    def _prepare_context(self) -> None:
        """Which rows users' models read, and which samples are among them."""
        local = self.local
        self.context: Ragged | None = None
        self.context_row = np.zeros(0, np.int64)
        self.sample_inside = np.zeros(len(local.item), bool)
        if CONTEXT in local.rows_needed:
            self.context, row = local.rows_needed[CONTEXT]
            client = self.client_of_user[self.context.rows()]
            self.context_row = row + local.row_start[client]
            self.sample_inside = self.context.holds(self.owner, local.item)

    def _wrap_moving_arrays(self) -> dict[str, MovingArray]:
        """Everything that moves, by name."""
        local = self.local
        clients = np.arange(local.view.n_clients)
        rates = self.rates
        private_rates = [torch.full((width,), rates[name]) for name, width in self.backbone.private_layout.items()]
        private_rate = torch.cat(private_rates) if private_rates else 0.0
        moving = {"private": self._wrap_moving_array("private", local.private, private_rate, self.client_of_user)}
        for name, head in local.heads.items():
            full_name = f"heads.{name}"
            moving[full_name] = self._wrap_moving_array(full_name, head, rates[name], clients)
        client_of_row = np.repeat(clients, np.diff(local.row_start))
        moving["rows"] = self._wrap_moving_array("rows", local.rows, rates["rows"], client_of_row)
        return moving

    def _wrap_moving_array(self, name: str, array: AnyArray, rate: Any, client: AnyArray) -> MovingArray:
        """An array of the local models to be moved in place; pFedMe learns a personal one beside it."""
        own = torch.from_numpy(array)
        learning = own.clone() if self.train.optimiser == "pfedme" else own
        kind = name.partition(".")[0]
        return MovingArray(kind, learning, own, rate, torch.from_numpy(client), self._load_moments(name))

    def _bind_tables(self, tables: list[Tensor], place: dict[str, Longs]) -> None:
        """What is read from now on: whole tables, or a step's rows of them, and then where these are found."""
        named = dict(zip(self.moving, tables, strict=True))
        self.private = named.pop("private")
        self.rows = named.pop("rows")
        self.heads = {name.removeprefix("heads."): table for name, table in named.items()}
        self.place = place

    def _find_local_places(self, kind: str, which: AnyArray) -> AnyArray:
        if kind not in self.place:
            return which
        return self.place[kind][which]

    def _load_moments(self, name: str) -> tuple[Tensor, Tensor, Tensor] | None:
        moments = self.local.moments
        if not moments:
            return None
        mean = torch.from_numpy(moments[f"{name}.mean"])
        square = torch.from_numpy(moments[f"{name}.square"])
        if name == "rows":
            return mean, square, torch.from_numpy(moments["rows.steps"])
        steps = moments["steps"].copy()  # these are counted by the learner
        return mean, square, torch.from_numpy(steps)

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = self.backbone.phases
        if phase is not None:
            phases = (phases[phase],)
        last = min(last, int(self.local.n_steps.max(initial=0)))
        for step in range(first, last):
            batch = self._build_batch(step, extras)
            compute_loss = partial(self._compute_loss, batch)
            for kinds in phases:
                self.optimiser.take_step(step, kinds, compute_loss, batch.used)
        self.optimiser.finish_pending_steps(last)
        self._bind_tables([array.tensor for array in self.moving.values()], {})

    def compute_row_logits(self) -> Floats:
        local = self.local
        n_rows = len(local.rows)
        client = np.repeat(np.arange(local.view.n_clients), np.diff(local.row_start))
        owner = local.view.user_ptr[client]
        inside = np.zeros(n_rows, bool)
        if self.context is not None:
            inside = self.context.holds(owner, local.row_item)
        zeros = np.zeros(n_rows, np.float32)
        block = _SampleBlock.pad(owner, np.arange(n_rows), inside, zeros, zeros)
        users = _find_distinct_numbers([owner], len(local.view.user))
        with torch.no_grad():
            rep = self._represent_users(users)
            (scores,) = self._score_blocks(users, rep, [block])
        return scores.numpy()[: block.n]

    def _build_batch(self, step: int, extras: StepExtras) -> _StepBatch:
        local = self.local
        active, epoch, start, size = local.find_step_batches(step)
        turn = expand_spans(start, size)
        sample = local.order[np.repeat(epoch, size), turn]
        weight = np.repeat(1.0 / size, size)
        if local.weight is not None:
            weight = weight * local.weight[sample]
        own = self._gather_samples(sample, weight)
        extra = self._gather_part_samples(step, extras)
        used_rows = [own.row[: own.n], extra.row[: extra.n]]
        positives = None
        if local.partner is not None:
            positives = self._gather_samples(local.partner[sample], weight)
            used_rows.append(positives.row[: positives.n])
        owners = [own.owner[: own.n], extra.owner[: extra.n]]
        users = _find_distinct_numbers(owners, len(local.view.user))
        if self.context is not None:
            counts = self.context.counts()[users]
            entry = expand_spans(self.context.ptr[users], counts)
            used_rows.append(self.context_row[entry])
        rows = _find_distinct_numbers(used_rows, len(local.rows))
        used_by_kind = {"private": users, "rows": rows, "heads": active}
        used = {kind: torch.from_numpy(places) for kind, places in used_by_kind.items()}
        batch_size = np.zeros(local.view.n_clients, np.int64)
        batch_size[active] = size
        return _StepBatch(own, positives, extra, users, used, batch_size, self._map_used_rows(used_by_kind))

    def _map_used_rows(self, used_by_kind: dict[str, Longs]) -> dict[str, Longs]:
        """Where a step's copies hold the rows that it uses; idle samples read whatever comes first."""
        sizes = {"private": len(self.local.private), "rows": len(self.local.rows)}
        places = {}
        for kind, n in sizes.items():
            used = used_by_kind[kind]
            if self.optimiser.copies_rows(kind, n, len(used)):
                place = np.zeros(n, np.int64)
                place[used] = np.arange(len(used))
                places[kind] = place
        return places

    def _gather_samples(self, sample: Longs, weight: AnyArray) -> _SampleBlock:
        owner = self.owner[sample]
        row = self.sample_row[sample]
        inside = self.sample_inside[sample]
        label = self.local.label[sample]
        return _SampleBlock.pad(owner, row, inside, label, weight)

    def _gather_part_samples(self, step: int, extras: StepExtras) -> _SampleBlock:
        """The parts' samples of the clients that have this step."""
        local = self.local
        counts = np.diff(extras.ptr)
        is_active = np.repeat(step < local.n_steps, counts)
        client = np.repeat(np.arange(local.view.n_clients), counts)[is_active]
        row = extras.row[is_active] + local.row_start[client]
        owner = extras.owner[is_active]
        inside = np.zeros(len(row), bool)
        if self.context is not None and len(row):
            inside = self.context.holds(owner, local.row_item[row])
        return _SampleBlock.pad(owner, row, inside, extras.label[is_active], extras.weight[is_active])

    def _compute_loss(self, batch: _StepBatch, tables: list[Tensor]) -> Tensor:
        """The sum over clients of the means over their batches, and of the parts' weighted samples."""
        self._bind_tables(tables, batch.place)
        rep = self._represent_users(batch.users)
        scores = self._score_blocks(batch.users, rep, [*batch.blocks_without_parts, batch.extra])
        pointwise = POINTWISE.get(self.train.objective, POINTWISE["bce"])  # a part's labels are probabilities
        weight = torch.from_numpy(batch.own.weight)
        if batch.positives is None:
            label = torch.from_numpy(batch.own.label)
            own_loss = weight * pointwise(scores[0], label)
        else:
            own_loss = weight * compute_bpr_loss(scores[1], scores[0], self.train.bpr_scale)
        loss = own_loss.sum()
        if len(batch.extra.row):
            extra_label = torch.from_numpy(batch.extra.label)
            extra_weight = torch.from_numpy(batch.extra.weight)
            extra_loss = extra_weight * pointwise(scores[-1], extra_label)
            loss = loss + extra_loss.sum()
        if self.backbone.has_own_loss:
            loss = self._add_user_loss(batch.users, rep, loss)
        if self.train.l2 > 0:
            loss = loss + self._compute_penalty(batch)
        return loss

    def _add_user_loss(self, users: Longs, rep: dict[str, Tensor], loss: Tensor) -> Tensor:
        """With what users add to the loss beside their samples, as a mean over the users of each client."""
        user_loss: Tensor | None = self.backbone.compute_own_loss(rep)
        if user_loss is None:
            return loss
        client = self.client_of_user[users]
        n_users = np.bincount(client, minlength=self.local.view.n_clients)
        share = (1 / np.maximum(n_users, 1))[client]
        weight = torch.from_numpy(share.astype(np.float32))
        return loss + (weight * user_loss).sum()

    def _represent_users(self, users: Longs) -> dict[str, Tensor]:
        """Every user of a batch as the model sees it, once."""
        client = self.client_of_user[users]
        heads = {name: _select_rows(tensor, client) for name, tensor in self.heads.items()}
        private = _select_rows(self.private, self._find_local_places("private", users))
        return self.backbone.represent_users(self.backbone.split_private(private), heads, self._build_context(users))

    def _score_blocks(self, users: Longs, rep: dict[str, Tensor], blocks: list[_SampleBlock]) -> list[Tensor]:
        """The samples of all blocks, with what their users are represented by."""
        owner = np.concatenate([block.owner for block in blocks])
        row = np.concatenate([block.row for block in blocks])
        place = np.searchsorted(users, owner)
        client = self.client_of_user[owner]
        inside = None
        if self.context is not None:
            inside = torch.from_numpy(np.concatenate([block.inside for block in blocks]))
        sample_rep = {name: _select_rows(value, place) for name, value in rep.items()}
        heads_read = self.backbone.select_heads_to_score(self.heads)
        heads = {name: _select_rows(tensor, client) for name, tensor in heads_read.items()}
        rows = _select_rows(self.rows, self._find_local_places("rows", row))
        scores = self.backbone.compute_logits(sample_rep, heads, rows, inside)
        return list(scores.split([len(block.row) for block in blocks]))

    def _build_context(self, users: Longs) -> Context | None:
        """What these users' models read, from the client's own rows."""
        if self.context is None:
            return None
        count = self.context.counts()[users]
        entry = expand_spans(self.context.ptr[users], count)
        ptr = np.concatenate([[0], np.cumsum(count)])
        owner = np.repeat(np.arange(len(users)), count)
        columns = {name: torch.from_numpy(column[entry]) for name, column in self.context.values.items()}
        return Context(
            ptr,
            torch.from_numpy(owner),
            torch.from_numpy(count.astype(np.float32)),
            _select_rows(self.rows, self._find_local_places("rows", self.context_row[entry])),
            columns,
        )

    def _compute_penalty(self, batch: _StepBatch) -> Tensor:
        """l2 times the squared lengths of the rows and private vectors of a batch's own samples, over its size."""
        all_rows = np.concatenate([block.row for block in batch.blocks_without_parts])
        all_owners = np.concatenate([block.owner for block in batch.blocks_without_parts])
        row, first = np.unique(all_rows, return_index=True)
        user = np.unique(all_owners)
        rows = self._sum_squares(self.rows, "rows", row, self._compute_penalty_weights(batch, all_owners[first]))
        private = self._sum_squares(self.private, "private", user, self._compute_penalty_weights(batch, user))
        return torch.zeros(()) + rows + private

    def _compute_penalty_weights(self, batch: _StepBatch, owner: Longs) -> Floats:
        """l2 over the size of the batch that each of some users is in."""
        client = self.client_of_user[owner]
        weight = self.train.l2 / batch.size[client]
        return weight.astype(np.float32)

    def _sum_squares(self, table: Tensor, kind: str, which: Longs, weight: Floats) -> Tensor:
        place = self._find_local_places(kind, which)
        return sum_weighted_squares(table, torch.from_numpy(place), torch.from_numpy(weight))
