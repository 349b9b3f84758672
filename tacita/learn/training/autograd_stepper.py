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
from tacita.learn.training.objectives import POINTWISE, bpr, sum_weighted_squares
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
        idle = (0, -len(row) % _LANES)
        who, place = (np.pad(x.astype(np.int64), idle, mode="edge" if len(x) else "constant") for x in (owner, row))
        among, wanted, force = (np.pad(x.astype(np.float32), idle) for x in (inside, label, weight))
        return _SampleBlock(who, place, among, wanted, force, len(row))


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


def _select_rows(table: Tensor, which: AnyArray) -> Tensor:
    """Rows of a table, with a gradient that adds up in the order of `which`."""
    return table.index_select(0, torch.from_numpy(which))


def _find_distinct(numbers: list[Longs], n: int) -> Longs:
    """The different numbers below n, ascending; much faster than np.unique where n is small."""
    seen = np.zeros(n, bool)
    for some in numbers:
        seen[some] = True
    return np.flatnonzero(seen)


class AutogradStepper(Stepper):
    def __init__(self, backbone: Scorer, plan: TrainConfig, local: LocalModels) -> None:
        torch.set_num_threads(1)
        super().__init__(backbone, plan, local)
        view = local.view
        clients = np.arange(view.n_clients)
        self.owner = local.owner
        self.client_of_user = np.repeat(clients, np.diff(view.user_ptr))
        self.sample_row = local.row_of + np.repeat(local.row_start[:-1], np.diff(local.ptr))
        self.context: Ragged | None = None
        self.context_row = np.zeros(0, np.int64)
        self.sample_inside = np.zeros(len(local.item), bool)
        if CONTEXT in local.rows_needed:
            self.context, row = local.rows_needed[CONTEXT]
            self.context_row = row + local.row_start[self.client_of_user[self.context.rows()]]
            self.sample_inside = self.context.holds(self.owner, local.item)
        rates = backbone.rates(view.n_items)
        vector = [torch.full((width,), rates[name]) for name, width in backbone.layout.items()]
        private = self._wrap_array("private", local.private, torch.cat(vector) if vector else 0.0, self.client_of_user)
        heads = {name: self._wrap_array(f"heads.{name}", v, rates[name], clients) for name, v in local.heads.items()}
        rows = self._wrap_array("rows", local.rows, rates["rows"], np.repeat(clients, np.diff(local.row_start)))
        self.moving = {"private": private, **{f"heads.{name}": one for name, one in heads.items()}, "rows": rows}
        self._bind_tables([one.tensor for one in self.moving.values()], {})
        self.optimiser = OPTIMISERS[plan.optimiser](plan, list(self.moving.values()), local.n_steps)
        if plan.optimiser == "pfedme":
            local.personal = {name: one.tensor.numpy() for name, one in self.moving.items()}

    def _wrap_array(self, name: str, array: AnyArray, rate: Any, client: AnyArray) -> MovingArray:
        """An array of the local models to be moved in place; pFedMe learns a personal one beside it."""
        own = torch.from_numpy(array)
        live = own.clone() if self.plan.optimiser == "pfedme" else own
        return MovingArray(name.partition(".")[0], live, own, rate, torch.from_numpy(client), self._load_moments(name))

    def _bind_tables(self, tables: list[Tensor], place: dict[str, Longs]) -> None:
        """What is read from now on: whole tables, or a step's rows of them, and then where these are found."""
        named = dict(zip(self.moving, tables, strict=True))
        self.private, self.rows, self.place = named.pop("private"), named.pop("rows"), place
        self.heads = {name.removeprefix("heads."): table for name, table in named.items()}

    def _local_index(self, kind: str, which: AnyArray) -> AnyArray:
        return self.place[kind][which] if kind in self.place else which

    def _load_moments(self, name: str) -> tuple[Tensor, Tensor, Tensor] | None:
        held = self.local.moments
        if not held:
            return None
        steps = held["rows.steps"] if name == "rows" else held["steps"].copy()  # these are counted by the learner
        mean, square, count = (torch.from_numpy(x) for x in (held[f"{name}.mean"], held[f"{name}.square"], steps))
        return mean, square, count

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = self.backbone.phases if phase is None else (self.backbone.phases[phase],)
        last = min(last, int(self.local.n_steps.max(initial=0)))
        for step in range(first, last):
            batch = self._build_batch(step, extras)
            for moving in phases:
                self.optimiser.take_step(step, moving, partial(self._compute_loss, batch), batch.used)
        self.optimiser.finish_pending(last)
        self._bind_tables([one.tensor for one in self.moving.values()], {})

    def row_logits(self) -> Floats:
        local = self.local
        client = np.repeat(np.arange(local.view.n_clients), np.diff(local.row_start))
        owner, row = local.view.user_ptr[client], np.arange(len(local.rows))
        inside = np.zeros(len(row), bool) if self.context is None else self.context.holds(owner, local.row_item)
        nothing = np.zeros(len(row), np.float32)
        block = _SampleBlock.pad(owner, row, inside, nothing, nothing)
        users = _find_distinct([owner], len(local.view.user))
        with torch.no_grad():
            return self._score_blocks(users, self._represent_users(users), [block])[0].numpy()[: block.n]

    def _build_batch(self, step: int, extras: StepExtras) -> _StepBatch:
        local = self.local
        active, epoch, start, size = local.find_batches(step)
        sample = local.order[np.repeat(epoch, size), expand_spans(start, size)]
        each = np.repeat(1.0 / size, size)
        if local.weight is not None:
            each = each * local.weight[sample]
        extra = self._gather_extras(step, extras)
        own, above = self._gather_samples(sample, each), None
        taken = [own.row[: own.n], extra.row[: extra.n]]
        if local.partner is not None:
            above = self._gather_samples(local.partner[sample], each)
            taken.append(above.row[: above.n])
        users = _find_distinct([own.owner[: own.n], extra.owner[: extra.n]], len(local.view.user))
        if self.context is not None:
            taken.append(self.context_row[expand_spans(self.context.ptr[users], self.context.counts()[users])])
        kinds = {"private": users, "rows": _find_distinct(taken, len(local.rows)), "heads": active}
        used = {kind: torch.from_numpy(some) for kind, some in kinds.items()}
        full = np.zeros(local.view.n_clients, np.int64)
        full[active] = size
        return _StepBatch(own, above, extra, users, used, full, self._map_places(kinds))

    def _map_places(self, kinds: dict[str, Longs]) -> dict[str, Longs]:
        """Where a step's copies hold the rows that it uses; idle samples read whatever comes first."""
        found = {}
        for kind, n in (("private", len(self.local.private)), ("rows", len(self.local.rows))):
            if self.optimiser.copies_rows(kind, n, len(kinds[kind])):
                found[kind] = np.zeros(n, np.int64)
                found[kind][kinds[kind]] = np.arange(len(kinds[kind]))
        return found

    def _gather_samples(self, sample: Longs, weight: AnyArray) -> _SampleBlock:
        label = self.local.label[sample]
        return _SampleBlock.pad(self.owner[sample], self.sample_row[sample], self.sample_inside[sample], label, weight)

    def _gather_extras(self, step: int, extras: StepExtras) -> _SampleBlock:
        """The parts' samples of the clients that have this step."""
        local = self.local
        keep = np.repeat(step < local.n_steps, np.diff(extras.ptr))
        client = np.repeat(np.arange(local.view.n_clients), np.diff(extras.ptr))[keep]
        row, owner = extras.row[keep] + local.row_start[client], extras.owner[keep]
        inside = np.zeros(len(row), bool)
        if self.context is not None and len(row):
            inside = self.context.holds(owner, local.row_item[row])
        return _SampleBlock.pad(owner, row, inside, extras.label[keep], extras.weight[keep])

    def _compute_loss(self, batch: _StepBatch, tables: list[Tensor]) -> Tensor:
        """The sum over clients of the means over their batches, and of the parts' weighted samples."""
        self._bind_tables(tables, batch.place)
        blocks = [one for one in (batch.own, batch.positives, batch.extra) if one is not None]
        rep = self._represent_users(batch.users)
        scores = self._score_blocks(batch.users, rep, blocks)
        label, weight = torch.from_numpy(batch.own.label), torch.from_numpy(batch.own.weight)
        pointwise = POINTWISE.get(self.plan.objective, POINTWISE["bce"])  # a part's labels are probabilities
        if batch.positives is None:
            loss = (weight * pointwise(scores[0], label)).sum()
        else:
            loss = (weight * bpr(scores[1], scores[0], self.plan.bpr_scale)).sum()
        if len(batch.extra.row):
            each = pointwise(scores[-1], torch.from_numpy(batch.extra.label))
            loss = loss + (torch.from_numpy(batch.extra.weight) * each).sum()
        own = self.backbone.own_loss(rep) if self.backbone.has_own_loss else None
        if own is not None:
            people = np.bincount(self.client_of_user[batch.users], minlength=self.local.view.n_clients)
            share = (1 / np.maximum(people, 1))[self.client_of_user[batch.users]]
            loss = loss + (torch.from_numpy(share.astype(np.float32)) * own).sum()
        return loss + self._compute_penalty(batch) if self.plan.l2 > 0 else loss

    def _represent_users(self, users: Longs) -> dict[str, Tensor]:
        """Every user of a batch as the model sees it, once."""
        own = {name: _select_rows(tensor, self.client_of_user[users]) for name, tensor in self.heads.items()}
        return self.backbone.represent(
            self.backbone.named(_select_rows(self.private, self._local_index("private", users))),
            own,
            self._build_context(users),
        )

    def _score_blocks(self, users: Longs, rep: dict[str, Tensor], blocks: list[_SampleBlock]) -> list[Tensor]:
        """The samples of all blocks, with what their users are represented by."""
        owner = np.concatenate([one.owner for one in blocks])
        at = np.searchsorted(users, owner)
        inside, read = None, self.backbone.heads_to_score(self.heads)
        if self.context is not None:
            inside = torch.from_numpy(np.concatenate([one.inside for one in blocks]))
        scores = self.backbone.score(
            {name: _select_rows(value, at) for name, value in rep.items()},
            {name: _select_rows(tensor, self.client_of_user[owner]) for name, tensor in read.items()},
            _select_rows(self.rows, self._local_index("rows", np.concatenate([one.row for one in blocks]))),
            inside,
        )
        return list(scores.split([len(one.row) for one in blocks]))

    def _build_context(self, users: Longs) -> Context | None:
        """What these users' models read, from the client's own rows."""
        if self.context is None:
            return None
        count = self.context.counts()[users]
        entry = expand_spans(self.context.ptr[users], count)
        ptr = np.concatenate([[0], np.cumsum(count)])
        return Context(
            ptr,
            torch.from_numpy(np.repeat(np.arange(len(users)), count)),
            torch.from_numpy(count.astype(np.float32)),
            _select_rows(self.rows, self._local_index("rows", self.context_row[entry])),
            {name: torch.from_numpy(column[entry]) for name, column in self.context.values.items()},
        )

    def _compute_penalty(self, batch: _StepBatch) -> Tensor:
        """l2 times the squared lengths of the rows and private vectors of a batch's own samples, over its size."""
        blocks = [one for one in (batch.own, batch.positives) if one is not None]
        row, first = np.unique(np.concatenate([one.row for one in blocks]), return_index=True)
        owner = np.concatenate([one.owner for one in blocks])
        user = np.unique(owner)
        total = torch.zeros(())
        for table, kind, some, whose in ((self.rows, "rows", row, owner[first]), (self.private, "private", user, user)):
            weight = self.plan.l2 / batch.size[self.client_of_user[whose]]
            total = total + sum_weighted_squares(
                table, torch.from_numpy(self._local_index(kind, some)), torch.from_numpy(weight.astype(np.float32))
            )
        return total
