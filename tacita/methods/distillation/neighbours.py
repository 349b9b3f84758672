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
from tacita.core.types import Arrays, Bools, CohortView, Floats, Ints, Keys, LocalModels, Longs, Ragged, ServerState
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
        """A matcher that knows nobody."""
        names = np.zeros(0, np.uint64)
        vectors = np.zeros((0, width), np.float32)
        entries = np.zeros(0, np.int32)
        return MatcherState(names, vectors, entries, entries)

    def record_uploads(self, senders: Keys, vectors: Floats, lists: SparseRows, key: np.uint64) -> MatcherState:
        """After some people sent their vector and numbers, which replace what they sent before."""
        is_old = ~np.isin(self.names, senders)
        old_names = self.names[is_old]
        names = np.concatenate([old_names, senders])
        order = np.argsort(names)
        names = names[order]
        old_vectors = self.vectors[is_old]
        both_vectors = np.concatenate([old_vectors, vectors])
        all_vectors = both_vectors[order]
        is_old_entry = is_old[self.holder]
        old_number = self.number[is_old_entry]
        number = np.concatenate([old_number, lists.item])
        unsorted_holder = self._renumber_holders(is_old, lists)
        place = np.empty(len(order), np.int32)
        n_people = len(order)
        place[order] = np.arange(n_people, dtype=np.int32)
        holder = place[unsorted_holder]
        numbers = number.astype(np.uint64)
        of_numbers = hash_owners(key, numbers)
        streams = names[holder] ^ of_numbers
        drawn_order = hash_owners(key, streams)
        shuffled = np.lexsort((drawn_order, number))
        shuffled_number = number[shuffled]
        shuffled_holder = holder[shuffled]
        return MatcherState(names, all_vectors, shuffled_number, shuffled_holder)

    def _renumber_holders(self, is_old: Bools, lists: SparseRows) -> Longs:
        """The holders of all entries when those who stay come first, and the senders behind them."""
        new_row = np.cumsum(is_old) - 1
        is_old_entry = is_old[self.holder]
        old_holders = new_row[self.holder[is_old_entry]]
        n_old = np.count_nonzero(is_old)
        senders = n_old + lists.client
        holder = np.concatenate([old_holders, senders])
        return holder.astype(np.int64)

    def find_neighbours(self, clients: Keys, most: int) -> Ragged:
        """For each client and number that it has, vectors of up to `most` others who have it.

        They are those who follow the client in the drawn order, round and round, so all others are equally likely.
        """
        client_of_person = self._map_to_clients(clients)
        client_of_holder = client_of_person[self.holder]
        entry = np.flatnonzero(client_of_holder >= 0)
        first, count = _find_equal_runs(self.number)
        start = first[entry]
        size = count[entry]
        n_others = np.minimum(size - 1, most)
        n_entries = len(n_others)
        ones = np.ones(n_entries, np.int64)
        ahead = expand_spans(ones, n_others)
        own_place = entry - start
        own_offset = np.repeat(own_place, n_others)
        offset = own_offset + ahead
        run_start = np.repeat(start, n_others)
        run_size = np.repeat(size, n_others)
        other = run_start + offset % run_size
        own = np.repeat(entry, n_others)
        rows = client_of_person[self.holder[own]]
        order = np.argsort(rows, kind="stable")
        n_clients = len(clients)
        ptr = np.zeros(n_clients + 1, np.int64)
        counts = np.bincount(rows, minlength=len(clients))
        np.cumsum(counts, out=ptr[1:])
        holder = self.holder[other[order]]
        vectors = self.vectors[holder]
        number = self.number[own[order]]
        return Ragged(ptr, number, {"vector": vectors})

    def _map_to_clients(self, clients: Keys) -> Longs:
        """(people,) the place of each person among some clients; -1: not among them."""
        n_people = len(self.names)
        client_of_person = np.full(n_people, -1, np.int64)
        if not len(self.names):
            return client_of_person
        place = np.searchsorted(self.names, clients)
        last = len(self.names) - 1
        place = np.minimum(place, last)
        is_known = self.names[place] == clients
        known_place = place[is_known]
        client_of_person[known_place] = np.flatnonzero(is_known)
        return client_of_person


def _find_equal_runs(ascending: Ints) -> tuple[Longs, Longs]:
    """For every entry, where the run of its value begins, and how long it is."""
    first = np.searchsorted(ascending, ascending)
    end = np.searchsorted(ascending, ascending, side="right")
    return first, end - first


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
        items = np.arange(n_items, dtype=np.uint64)
        order = np.argsort(hash_owners(key, items))
        return order.astype(np.int32)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        width = self.model.private_width
        vector = Spec("vector", (width,), seen="each", by="matcher", about="the user vector, for the matcher")
        items = Spec(
            "items", (n_items, 0), seen="each", by="matcher", about="items under other numbers, for the matcher"
        )
        read_lists = partial(self._decode_pseudonyms, n_items)
        per_client = {"vector": (width,)}
        return PartFields(extra=(vector, items), per_client=per_client, read_lists=read_lists)

    def _decode_pseudonyms(self, n_items: int, lists: Ragged) -> Ragged:
        """Lists with items in place of the numbers that stand for them."""
        numbers = self._draw_pseudonyms(n_items)
        item = np.argsort(numbers).astype(np.int32)
        items = item[lists.ids]
        return Ragged(lists.ptr, items, lists.values)

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        if view.round % self.config.every:
            return TrainingOutcome()
        client = view.train.rows()
        numbers = self._draw_pseudonyms(view.n_items)
        number = numbers[view.train.ids]
        order = np.lexsort((number, client))
        shape = (len(number), 0)
        no_values = np.zeros(shape, np.float32)
        senders = client[order]
        sorted_numbers = number[order]
        items = SparseRows(senders, sorted_numbers, no_values)
        vectors = local.private.copy()
        return TrainingOutcome(extras={"vector": vectors, "items": items})

    # at the matcher

    def server_block_start(self, server: ServerState) -> Arrays:
        """Nothing: there are new items, so all numbers are others."""
        matches = MatcherState.empty(self.model.private_width)
        return dict(vars(matches))

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.clients is None:
            return PartBroadcast()
        state = server.parts[self.name]
        matches = MatcherState(**state)
        most = self.model.config.most
        neighbours = matches.find_neighbours(audience.clients, most)
        return PartBroadcast(per_client=neighbours)

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        vector = total.each.get(f"{self.name}.vector")
        items = total.each.get(f"{self.name}.items")
        if vector is None or items is None:
            return server
        assert isinstance(vector.value, DenseArrays)
        assert isinstance(items.value, SparseRows)
        draws = self.context.draws
        key = draws.public("neighbours", before.block, before.round)
        state = server.parts[self.name]
        matches = MatcherState(**state)
        vectors = vector.value.value
        matches = matches.record_uploads(vector.sender, vectors, items.value, key)
        state_after = dict(vars(matches))
        return server.with_part(self.name, state_after)


MATCHER_PARTS.add(NEIGHBOURS)
