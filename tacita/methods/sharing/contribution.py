"""contribution: our version of PDC-FRS, of which few details are public (sharing spec C.3).

What users agree to share leaves their device as another item, drawn under local differential privacy. The device
remembers which item stands for which, so that it can be taken back, and goes on learning from its own. The server
learns an auxiliary model from the released items. It sends every contributor some items that this model finds likely,
which devices learn as liked with half the weight, and brings the federated rows near to the auxiliary ones.

The promise: epsilon for each released item, so k times epsilon for a user who released k. It covers only what leaves
by request: what devices upload in rounds is as open as in any federation without noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import hash_rows
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Floats, Ints, Keys, Longs, Ragged, ServerState, StateUpdate
from tacita.kernels.hashing import hash_owners
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import (
    AdamTable,
    BatchSizes,
    GraphObjective,
    UnitRows,
    choose_shared_items,
    compute_infonce_with_gradients,
    draw_batch_keys,
    draw_batches,
    draw_xavier_rows,
    overwrite_known_rows,
    refine_table,
)
from tacita.methods.sharing.item_lists import deduplicate_items, mark_listed_entries, subtract_lists
from tacita.methods.sharing.item_perturbation import perturb_items
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import DeviceQuery, Privacy, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask
from tacita.round.unlearning_report import UnlearningReport

_ITEMS = "items"
_SENDER = "sender"
_PEOPLE = "people"
_NOTES_KEY = "said"
_CONTRIBUTOR_KEY = "teller"
_RELEASE_KEY = "told"


class ContributionConfig(PartConfig):
    epsilon: float = Field(8.0, ge=0, description="privacy budget of every item that is told; k items spend k times it")
    mechanism: Literal["exponential", "krr"] = Field(
        "exponential", description="a similar item by the public table, or k-ary randomised response"
    )
    auxiliary: Literal["mf", "lightgcn"] = Field("lightgcn", description="what the server learns from what it was told")
    layers: int = Field(3, ge=1, description="how often vectors pass along the graph, for lightgcn")
    lr: float = Field(0.01, gt=0, description="learning rate of the auxiliary model, by Adam afresh in every round")
    bpr_scale: float = Field(1.0, gt=0, description="factor on the difference of cosines in what it minimises")
    lam: float = Field(1e-4, ge=0, description="weight of the squared rows of a batch, over its size")
    edge_batch: int = Field(8192, ge=1, description="told items in a step")
    k_aug: int = Field(20, ge=0, description="likely items that a contributor gets in a round")
    soft_weight: float = Field(0.5, ge=0, le=1, description="what these count, where an item of one's own counts 1")
    lam1: float = Field(0.3, ge=0, description="weight of the agreement of federated and auxiliary rows; 0: without")
    tau: float = Field(0.2, gt=0, description="its temperature")
    agree_lr: float = Field(1e-3, gt=0, description="learning rate of the agreement, by Adam afresh in every round")
    item_batch: int = Field(1024, ge=1, description="items in a step of the agreement")


@register
class Contribution(Part, Privacy, Unlearning):
    name = "contribution"
    fills = frozenset({"likes"})
    scope = ()  # the auxiliary model ends; what agreed with it stays in the federated rows
    learns_from_shared = True  # devices go on learning from their own items, whatever leaves in their place
    addresses_clients = True
    Config: ClassVar[type[PartConfig]] = ContributionConfig
    config: ContributionConfig

    def check(self, n_items: int) -> None:
        if self.context.train.silos:
            raise TacitaError("part 'contribution' is for clients that are one user each; train.silos must be 0.")

    def state(self, n_users: int) -> Sequence[StateSpec]:
        """Which item was released for which, and how many were ever released; the server counts them by user."""
        no_releases = _ensure_release_column(Ragged.empty(n_users))
        return (
            StateSpec("sent", no_releases, persistent=True),
            StateSpec("releases", np.zeros(n_users, np.int64), persistent=True),
            StateSpec(_CONTRIBUTOR_KEY, persistent=True),
            StateSpec(_RELEASE_KEY, persistent=True),
        )

    # on the device

    def redact(self, view: CohortView, requests: RequestBatch) -> tuple[RequestBatch, StateUpdate]:
        """The released items in place of the users' own."""
        if requests.kind == "leave":
            nothing = Ragged.empty(len(view.user))
            return requests, {"sent": _ensure_release_column(nothing)}
        items = deduplicate_items(requests.items, view.n_items)
        if requests.kind == "share":
            return self._release_items(view, requests, items)
        return self._take_back_releases(view, requests, items)

    def _read_sent_items(self, view: CohortView) -> Ragged:
        lists = view.lists[self.name]
        sent = lists["sent"]
        return _ensure_release_column(sent)

    def _release_items(
        self, view: CohortView, requests: RequestBatch, items: Ragged
    ) -> tuple[RequestBatch, StateUpdate]:
        """Every item is released once: a second draw would cost epsilon again."""
        sent = self._read_sent_items(view)
        new = subtract_lists(items, sent, view.n_items)
        replacements = self.draw_replacements(view, new)
        columns = {_RELEASE_KEY: replacements}
        released = Ragged(new.ptr, new.ids, columns)
        state = view.parts[self.name]
        earlier = state["releases"]
        releases = earlier + new.counts()
        replaced = Ragged(new.ptr, replacements)
        redacted = _replace_items(requests, replaced)
        all_sent = sent.join_rows(released)
        return redacted, {"sent": all_sent, "releases": releases}

    def _take_back_releases(
        self, view: CohortView, requests: RequestBatch, items: Ragged
    ) -> tuple[RequestBatch, StateUpdate]:
        """A release is taken back unless it still stands for another item."""
        sent = self._read_sent_items(view)
        is_withdrawn = mark_listed_entries(sent, items, view.n_items)
        withdrawn = sent.filter_entries(is_withdrawn)
        remaining = sent.filter_entries(~is_withdrawn)
        withdrawn_releases = deduplicate_items(_read_releases(withdrawn), view.n_items)
        remaining_releases = _read_releases(remaining)
        released_only_once = subtract_lists(withdrawn_releases, remaining_releases, view.n_items)
        return _replace_items(requests, released_only_once), {"sent": remaining}

    def draw_replacements(self, view: CohortView, items: Ragged) -> Ints:
        """What is released for each item: a draw of the user's own, of which the server knows nothing."""
        drawn = self._draw_pair_numbers(view, items)
        config = self.config
        return perturb_items(config.mechanism, config.epsilon, view.items, items.ids, drawn)

    def _draw_pair_numbers(self, view: CohortView, items: Ragged) -> Keys:
        """A number for each pair of user and item."""
        draws = self.context.draws
        rows = items.rows()
        numbers = items.ids.astype(np.uint64)
        if draws.is_secret:  # a device's own: releases of some items must not give away the draws of others
            secret = draws.secret_key("contribution", view.block, view.round)
            keys = view.user_keys[rows]
            return hash_rows(secret, keys, numbers)
        user_key = draws.private("contribution", view.block, view.round)
        item_key = draws.private("contribution-item")
        users = hash_owners(user_key, view.user_keys)
        streams = users[rows] + numbers
        return hash_owners(item_key, streams)

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(likes=self._select_soft_positives)

    def _select_soft_positives(self, view: CohortView) -> Ragged | None:
        """The items that the auxiliary model finds likely and the user does not have already."""
        received = view.per_client.get(self.name)
        if received is None or not len(received.ids):
            return None
        is_owned = mark_listed_entries(received, view.exclude, view.n_items)
        items = Ragged(received.ptr, received.ids)
        likely = items.filter_entries(~is_owned)
        n_likely = len(likely.ids)
        soft_weight = self.config.soft_weight
        weight = np.full(n_likely, soft_weight, np.float32)
        columns = {"weight": weight}
        return Ragged(likely.ptr, likely.ids, columns)

    # on the server

    def build_graph(self, server: ServerState) -> SharedGraph:
        layers = 0
        if self.config.auxiliary == "lightgcn":
            layers = self.config.layers
        n_items = len(server.items)
        return SharedGraph.from_record(server.shared, n_items, layers=layers, start="learned")

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        graph = self.build_graph(server)
        if not len(graph):
            return server
        config = self.config
        draws = self.context.draws
        keys = draw_batch_keys(draws, self.name, server)
        table, people = self.load_auxiliary_rows(server, graph.users)
        objective = GraphObjective(lam1=0.0, lam=config.lam, lr=config.lr, scale=config.bpr_scale)
        sizes = BatchSizes(config.edge_batch, 1)
        batches = draw_batches(graph, sizes, keys)
        refined = refine_table(graph, table, batches, objective, people)
        assert refined.people is not None
        item_key = keys[2]
        loss, items = self.compute_alignment_gradient(server.items, graph, refined.table, refined.people, item_key)
        earlier = server.parts.get(self.name, {})
        state = dict(earlier)
        notes = np.array([refined.bpr, loss])
        state[_NOTES_KEY] = notes
        state[_ITEMS] = refined.table
        state[_SENDER] = graph.users
        state[_PEOPLE] = refined.people
        updated = server.with_items(items)
        return updated.with_part(self.name, state)

    def load_auxiliary_rows(self, server: ServerState, users: Keys) -> tuple[Floats, Floats]:
        """The auxiliary rows of all items and of some senders; new ones start as Xavier's rows do."""
        n_items, width = server.items.shape
        draws = self.context.draws
        numbers = np.arange(n_items, dtype=np.uint64)
        item_key = draws.public(f"{self.name}-items")
        user_key = draws.public(f"{self.name}-people")
        table = draw_xavier_rows(item_key, numbers, width)
        people = draw_xavier_rows(user_key, users, width)
        state = server.parts.get(self.name, {})
        if _ITEMS in state:
            n_known = len(state[_ITEMS])
            table[:n_known] = state[_ITEMS]
            known_users = state[_SENDER]
            known_rows = state[_PEOPLE]
            overwrite_known_rows(people, users, known_users, known_rows)
        return table, people

    def compute_alignment_gradient(
        self, items: Floats, graph: SharedGraph, table: Floats, people: Floats, key: np.uint64
    ) -> tuple[float, Floats]:
        """InfoNCE of the federated rows with what the auxiliary model makes of its own, which stand still."""
        config = self.config
        if not config.lam1:
            return 0.0, items
        _, auxiliary = graph.propagate_and_average(table, people)
        views = UnitRows.normalise(auxiliary).rows
        n_steps = math.ceil(len(graph.shared_items) / config.item_batch)
        adam = AdamTable(items, config.agree_lr)
        losses = []
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            for step in range(n_steps):
                step_key = key + np.uint64(step)
                places = choose_shared_items(graph, step_key, config.item_batch)
                unit = UnitRows.normalise(adam.table)
                rows = unit.rows[places]
                row_views = views[places]
                loss, row_gradient, _ = compute_infonce_with_gradients(rows, row_views, config.tau, config.lam1, cores)
                gradient = np.zeros_like(items)
                gradient[places] = row_gradient
                adam.take_step(unit.backpropagate(gradient))
                losses.append(loss)
        mean_loss = float(np.mean(losses))
        return mean_loss, adam.table

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.occasion != "round" or audience.clients is None:
            return PartBroadcast()
        likely = self._choose_likely_items(server, audience.clients)
        return PartBroadcast(per_client=likely)

    def _choose_likely_items(self, server: ServerState, clients: Keys) -> Ragged:
        """For every contributor, what the auxiliary model finds likeliest of what they did not release."""
        state = server.parts.get(self.name, {})
        n_items = len(server.items)
        most = min(self.config.k_aug, n_items)
        graph = self.build_graph(server)
        n_users = len(graph.users)
        if _ITEMS not in state or not most or not len(graph):
            return Ragged.empty(len(clients))
        position = np.searchsorted(graph.users, clients)
        place = np.minimum(position, n_users - 1)
        is_contributor = graph.users[place] == clients
        contributors = np.flatnonzero(is_contributor)
        rows = place[contributors]
        scores = self._score_contributors(server, graph, rows)
        order = np.argsort(-scores, axis=1, kind="stable")
        best = order[:, :most]
        likely = np.sort(best, axis=1)
        likely_scores = np.take_along_axis(scores, likely, axis=1)
        is_allowed = np.isfinite(likely_scores)
        column = contributors[:, None]
        receiver = np.broadcast_to(column, likely.shape)
        receivers = receiver[is_allowed]
        items = likely[is_allowed]
        return Ragged.from_pairs(receivers, items, len(clients))

    def _score_contributors(self, server: ServerState, graph: SharedGraph, place: Longs) -> Floats:
        """(contributors, items) by the auxiliary model; -inf for released items."""
        table, people = self.load_auxiliary_rows(server, graph.users)
        users, items = graph.propagate_and_average(table, people)
        with limit_blas_threads():
            unit_rows = UnitRows.normalise(users).rows
            user_rows = unit_rows[place]
            item_rows = UnitRows.normalise(items).rows
            scores = user_rows @ item_rows.T
        released = graph.lists.take(place)
        rows = released.rows()
        scores[rows, released.ids] = -np.inf
        return scores

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        """Releases are counted, by user; a withdrawal ends the auxiliary model, which starts from nothing."""
        state = server.parts.get(self.name, {})
        if requests.kind == "share":
            counted = _count_releases(state, requests)
            counted_state = {**state, **counted}
            server = server.with_part(self.name, counted_state)
            promises = self.promises(server)
            report = UnlearningReport(method=self.name, details=promises)
            return server, report
        withdrawn = requests.withdrawn_items
        if withdrawn is None or not len(withdrawn.ids):
            return server, self._report_withdrawal(())
        contributors = _read_contributors(state)
        counts = _read_release_counts(state)
        if requests.kind == "leave":
            stays = ~np.isin(contributors, requests.senders)
            contributors = contributors[stays]
            counts = counts[stays]
        purged = ("auxiliary_model",) if _ITEMS in state else ()
        remaining = {_CONTRIBUTOR_KEY: contributors, _RELEASE_KEY: counts}
        report = self._report_withdrawal(purged)
        updated = server.with_part(self.name, remaining)
        return updated, report

    def _report_withdrawal(self, purged: tuple[str, ...]) -> UnlearningReport:
        return UnlearningReport(
            method=self.name, exact=False, clients_asked=0, rounds=0, storage_client=0, purged=purged
        )

    @property
    def needs_secret_noise(self) -> bool:
        return True

    def promises(self, server: ServerState) -> dict[str, float]:
        """Epsilon of one item, and of a contributor's items together."""
        state = server.parts.get(self.name, {})
        counts = _read_release_counts(state)
        spent = self.config.epsilon * counts
        mean = 0.0
        most = 0.0
        if len(counts):
            mean = float(spent.mean())
            most = float(spent.max())
        return {
            "epsilon_per_item": self.config.epsilon,
            "epsilon_per_person_mean": mean,
            "epsilon_per_person_most": most,
            "people": float(len(counts)),
            "items": float(counts.sum()),
        }

    def metrics(self, server: ServerState) -> dict[str, float]:
        state = server.parts.get(self.name, {})
        numbers = {}
        if _NOTES_KEY in state:
            bpr, cl = state[_NOTES_KEY]
            numbers["told_bpr"] = float(bpr)
            numbers["told_cl"] = float(cl)
        promises = self.promises(server)
        for name, value in promises.items():
            if name.startswith("epsilon"):
                numbers[name] = value
        return numbers


def _ensure_release_column(sent: Ragged) -> Ragged:
    """A list without entries has no columns either."""
    if _RELEASE_KEY in sent.values:
        return sent
    n_entries = len(sent.ids)
    no_releases = np.zeros(n_entries, np.int32)
    columns = {_RELEASE_KEY: no_releases}
    return Ragged(sent.ptr, sent.ids, columns)


def _read_releases(sent: Ragged) -> Ragged:
    """The released items, in place of the users' own."""
    releases = sent.values[_RELEASE_KEY]
    return Ragged(sent.ptr, releases)


def _replace_items(requests: RequestBatch, items: Ragged) -> RequestBatch:
    return RequestBatch(requests.kind, requests.senders, items, requests.time, requests.number)


def _read_contributors(state: Arrays) -> Keys:
    nobody = np.zeros(0, np.uint64)
    return state.get(_CONTRIBUTOR_KEY, nobody)


def _read_release_counts(state: Arrays) -> Longs:
    nothing = np.zeros(0, np.int64)
    return state.get(_RELEASE_KEY, nothing)


def _count_releases(state: Arrays, requests: RequestBatch) -> Arrays:
    """How many items each user released, those of new requests too."""
    earlier_senders = _read_contributors(state)
    earlier_counts = _read_release_counts(state)
    new_counts = requests.items.counts()
    senders = np.concatenate([earlier_senders, requests.senders])
    counts = np.append(earlier_counts, new_counts)
    contributors, place = np.unique(senders, return_inverse=True)
    n_contributors = len(contributors)
    totals = np.bincount(place, weights=counts, minlength=n_contributors)
    counts = totals.astype(np.int64)
    return {_CONTRIBUTOR_KEY: contributors, _RELEASE_KEY: counts}
