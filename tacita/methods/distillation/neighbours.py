"""neighbours: a third party, the matcher, tells users the vectors of others who have the same items (spec A.7).

Every `every` rounds a client of the round sends its user vector and its items to the matcher: the items under numbers
that stand for them, which clients make with a key of their own, so the matcher can tell that two are the same and no
more. It answers with vectors of others that it holds, without names. The server is told nothing of this; the lab plays
both, and `MatchedFederation` keeps them apart.
The matcher still sees how often each number occurs, which gives popular items away,
and vectors that say much of a person: this hides items from a curious matcher a little, and people from nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.flat_indices import expand_spans
from tacita.core.types import Arrays, CohortView, Floats, Ints, Keys, LocalModels, Longs, Ragged, ServerState
from tacita.kernels.hashing import hash_owners
from tacita.messages import DenseArrays, SparseRows, Spec, Total
from tacita.methods.distillation.matcher import MATCHER_PARTS
from tacita.models.fedpergnn import NEIGHBOURS, FedPerGNN
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.task import TrainingOutcome


class NeighboursConfig(PartConfig):
    every: int = Field(1, ge=1, description="rounds between two times that clients tell the matcher their vector")


@dataclass(frozen=True)
class MatcherState:
    """What the matcher holds: who has which number, and everybody's last vector."""

    names: Keys  # (people,) ascending
    vectors: Floats  # (people, width)
    number: Ints  # (entries,) ascending: each stands for an item
    holder: Ints  # (entries,) row of who has it; those of one number in an order drawn anew with every round

    @staticmethod
    def empty(width: int) -> MatcherState:
        nobody, nothing = np.zeros(0, np.uint64), np.zeros(0, np.int32)
        return MatcherState(nobody, np.zeros((0, width), np.float32), nothing, nothing)

    def record_uploads(self, senders: Keys, vectors: Floats, lists: SparseRows, key: np.uint64) -> MatcherState:
        """After some people sent their vector and numbers, which replace what they sent before."""
        stays = ~np.isin(self.names, senders)
        names = np.concatenate([self.names[stays], senders])
        order = np.argsort(names)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        kept, old = int(stays.sum()), stays[self.holder]
        renamed = np.cumsum(stays) - 1
        holder = place[np.concatenate([renamed[self.holder[old]], kept + lists.client]).astype(np.int64)]
        number = np.concatenate([self.number[old], lists.item])
        everybody = np.concatenate([self.vectors[stays], vectors])[order]
        drawn = hash_owners(key, names[order][holder] ^ hash_owners(key, number.astype(np.uint64)))
        mixed = np.lexsort((drawn, number))
        return MatcherState(names[order], everybody, number[mixed], holder[mixed])

    def find_neighbours(self, clients: Keys, most: int) -> Ragged:
        """For each client and number that it has, vectors of up to `most` others who have it.

        They are those who follow the client in the drawn order, round and round, so all others are equally likely.
        """
        asked = np.full(len(self.names), -1, np.int64)
        at = np.minimum(np.searchsorted(self.names, clients), max(0, len(self.names) - 1))
        known = self.names[at] == clients if len(self.names) else np.zeros(len(clients), bool)
        asked[at[known]] = np.flatnonzero(known)
        entry = np.flatnonzero(asked[self.holder] >= 0)
        first, count = _find_runs(self.number)
        start, size = first[entry], count[entry]
        n = np.minimum(size - 1, most)
        ahead = expand_spans(np.ones(len(n), np.int64), n)
        which = np.repeat(start, n) + (np.repeat(entry - start, n) + ahead) % np.repeat(size, n)
        rows, number = asked[self.holder[np.repeat(entry, n)]], self.number[np.repeat(entry, n)]
        order = np.argsort(rows, kind="stable")
        ptr = np.zeros(len(clients) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(clients)), out=ptr[1:])
        return Ragged(ptr, number[order], {"vector": self.vectors[self.holder[which[order]]]})


def _find_runs(ascending: Ints) -> tuple[Longs, Longs]:
    """For every entry, where the run of its value begins, and how long it is."""
    first = np.searchsorted(ascending, ascending)
    return first, np.searchsorted(ascending, ascending, side="right") - first


@register
class Neighbours(Part):
    """Clients tell the matcher what they have, and get vectors of others who have the same."""

    name = NEIGHBOURS
    addresses_clients = True
    serves = frozenset({"view"})  # by the vectors that it writes to clients
    Config: ClassVar[type[PartConfig]] = NeighboursConfig
    config: NeighboursConfig

    @property
    def model(self) -> FedPerGNN:
        backbone = self.context.scorer
        if not isinstance(backbone, FedPerGNN):
            raise TacitaError(
                f"part '{self.name}' brings vectors that backbone '{backbone.name}' does not read; "
                "use backbone 'fedpergnn'."
            )
        return backbone

    def check(self, n_items: int) -> None:
        if self.context.train.silos:
            raise TacitaError("train.silos: neighbours are for clients that are one user each; leave it at 0.")
        self.model.check(n_items, n_items)

    # on the device

    def _draw_pseudonyms(self, n_items: int) -> Ints:
        """The number that stands for each item, by a key that clients share and nobody else has."""
        key = self.context.draws.private("numbers-for-items")
        return np.argsort(hash_owners(key, np.arange(n_items, dtype=np.uint64))).astype(np.int32)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        width = self.model.private_width
        vector = Spec("vector", (width,), seen="each", by="matcher", about="the user vector, for the matcher")
        items = Spec(
            "items", (n_items, 0), seen="each", by="matcher", about="items under other numbers, for the matcher"
        )
        return PartFields(
            extra=(vector, items), per_client={"vector": (width,)}, read_lists=partial(self._read_numbers, n_items)
        )

    def _read_numbers(self, n_items: int, lists: Ragged) -> Ragged:
        """Lists with items in place of the numbers that stand for them."""
        item = np.argsort(self._draw_pseudonyms(n_items)).astype(np.int32)
        return Ragged(lists.ptr, item[lists.ids], lists.values)

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        if view.round % self.config.every:
            return TrainingOutcome()
        client = view.train.rows()
        number = self._draw_pseudonyms(view.n_items)[view.train.ids]
        order = np.lexsort((number, client))
        items = SparseRows(client[order], number[order], np.zeros((len(number), 0), np.float32))
        return TrainingOutcome(extras={"vector": local.private.copy(), "items": items})

    # at the matcher

    def server_block_start(self, server: ServerState) -> Arrays:
        """Nothing: there are new items, so all numbers are others."""
        return dict(vars(MatcherState.empty(self.model.private_width)))

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.clients is None:
            return PartBroadcast()
        matches = MatcherState(**server.parts[self.name])
        return PartBroadcast(per_client=matches.find_neighbours(audience.clients, self.model.config.most))

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        vector = total.each.get(f"{self.name}.vector")
        items = total.each.get(f"{self.name}.items")
        if vector is None or items is None:
            return server
        assert isinstance(vector.value, DenseArrays)
        assert isinstance(items.value, SparseRows)
        key = self.context.draws.public("neighbours", before.block, before.round)
        matches = MatcherState(**server.parts[self.name])
        matches = matches.record_uploads(vector.sender, vector.value.value, items.value, key)
        return server.with_part(self.name, dict(vars(matches)))


MATCHER_PARTS.add(NEIGHBOURS)
