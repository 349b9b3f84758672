"""contribution: our version of PDC-FRS, of which few details are public (sharing spec C.3).

What people agree to share leaves their device as another item, drawn under local differential privacy; the device
remembers which stands for which, so that it can be taken back, and goes on learning from its own. The server learns an
auxiliary model from what it was told, sends every contributor some items that this model finds likely, which devices
learn as liked with half the weight, and brings the federated rows near to the auxiliary ones.

The promise: epsilon for each item that was told, so k times epsilon for a person who told k. Only what is told by
request is covered: what devices upload in rounds is as open as in any federation without noise.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import hash_rows
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Floats, Keys, Longs, Ragged, ServerState, StateUpdate
from tacita.kernels.hashing import choose_distinct, hash_owners, uniforms
from tacita.kernels.membership import mark_listed
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import (
    AdamTable,
    BatchSizes,
    GraphObjective,
    UnitRows,
    compute_infonce,
    draw_batches,
    refine_table,
)
from tacita.methods.sharing.item_perturbation import perturb_items
from tacita.methods.sharing.sharing import deduplicate_items
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register
from tacita.round.request import RequestBatch

_ITEMS, _SENDER, _PEOPLE, _NOTES_KEY = "items", "sender", "people", "said"
_CONTRIBUTOR_KEY, _RELEASE_KEY = "teller", "told"


class ContributionConfig(PartConfig):
    epsilon: float = Field(8.0, ge=0, description="privacy budget of every item that is told; k items spend k times it")
    mechanism: Literal["exponential", "krr"] = Field(
        "exponential", description="a similar item by the public table, or k-ary randomised response"
    )
    load_auxiliary_rows: Literal["mf", "lightgcn"] = Field(
        "lightgcn", description="what the server learns from what it was told"
    )
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
class Contribution(Part):
    name = "contribution"
    takes_back = ()  # the auxiliary model ends; what agreed with it stays in the federated rows
    Config: ClassVar[type[PartConfig]] = ContributionConfig
    config: ContributionConfig
    lasting = ("sent", "releases")
    lasting_here = (_CONTRIBUTOR_KEY, _RELEASE_KEY)

    def check(self, n_items: int) -> None:
        if self.context.train.silos:
            raise TacitaError("part 'contribution' is for clients that are one user each; train.silos must be 0.")

    # on the device

    def device_arrays(self, n_users: int) -> StateUpdate:
        """Which item was told for which, and how many were ever told."""
        return {"sent": _ensure_release_column(Ragged.empty(n_users)), "releases": np.zeros(n_users, np.int64)}

    def encode_request(self, view: CohortView, requests: RequestBatch) -> tuple[RequestBatch, StateUpdate]:
        sent = _ensure_release_column(view.lists[self.name]["sent"])
        if requests.kind == "leave":
            return requests, {"sent": _ensure_release_column(Ragged.empty(len(view.user)))}
        asked = deduplicate_items(requests.items, view.n_items)
        if requests.kind == "share":
            new = asked.filter_entries(~mark_listed(view.n_items, asked.ptr, asked.ids, sent.ptr, sent.ids))
            told = Ragged(new.ptr, new.ids, {_RELEASE_KEY: self.draw_replacements(view, new)})
            releases = view.parts[self.name]["releases"] + new.counts()
            leaves = Ragged(new.ptr, told.values[_RELEASE_KEY])
            return _replace_items(requests, leaves), {"sent": sent.join_rows(told), "releases": releases}
        back = mark_listed(view.n_items, sent.ptr, sent.ids, asked.ptr, asked.ids)
        gone, stays = sent.filter_entries(back), sent.filter_entries(~back)
        leaves = deduplicate_items(Ragged(gone.ptr, gone.values[_RELEASE_KEY]), view.n_items)
        still = mark_listed(
            view.n_items, leaves.ptr, leaves.ids, stays.ptr, stays.values[_RELEASE_KEY]
        )  # told for another, too
        return _replace_items(requests, leaves.filter_entries(~still)), {"sent": stays}

    def draw_replacements(self, view: CohortView, items: Ragged) -> Any:
        """What is told for each item: a draw of the person's own, of which the server knows nothing."""
        draws, rows = self.context.draws, items.rows()
        if draws.secret:  # a device's own: what the server is told of some items must not give away the draws of others
            key = draws.secret_key("contribution", view.block, view.round)
            drawn = hash_rows(key, view.user_keys[rows], items.ids.astype(np.uint64))
            return perturb_items(self.config.mechanism, self.config.epsilon, view.items, items.ids, drawn)
        person = hash_owners(draws.private("contribution", view.block, view.round), view.user_keys)
        drawn = hash_owners(draws.private("contribution-item"), person[rows] + items.ids.astype(np.uint64))
        return perturb_items(self.config.mechanism, self.config.epsilon, view.items, items.ids, drawn)

    def likes(self, view: CohortView) -> Ragged | None:
        """What the auxiliary model finds likely and one does not have already."""
        sent = view.per_client.get(self.name)
        if sent is None or not len(sent.ids):
            return None
        mine = mark_listed(view.n_items, sent.ptr, sent.ids, view.exclude.ptr, view.exclude.ids)
        more = Ragged(sent.ptr, sent.ids).filter_entries(~mine)
        return Ragged(more.ptr, more.ids, {"weight": np.full(len(more.ids), self.config.soft_weight, np.float32)})

    # on the server

    def build_graph(self, server: ServerState) -> SharedGraph:
        layers = self.config.layers if self.config.load_auxiliary_rows == "lightgcn" else 0
        return SharedGraph.of(server.shared, len(server.items), layers=layers, start="learned")

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        graph = self.build_graph(server)
        if not len(graph):
            return server
        draw = self.context.draws.public
        keys = np.array(
            [draw(f"{self.name}-{what}", server.block, server.round) for what in ("order", "other", "items")]
        )
        one = self.config
        table, people = self.load_auxiliary_rows(server, graph.users)
        aims = GraphObjective(lam1=0.0, lam=one.lam, lr=one.lr, scale=one.bpr_scale)
        made = refine_table(graph, table, draw_batches(graph, BatchSizes(one.edge_batch, 1), keys), aims, people)
        assert made.people is not None
        near, items = self.align_rows(server.items, graph, made.table, made.people, keys[2])
        kept = {**server.parts.get(self.name, {}), _NOTES_KEY: np.array([made.bpr, near])}
        kept |= {_ITEMS: made.table, _SENDER: graph.users, _PEOPLE: made.people}
        return server.with_items(items).with_part(self.name, kept)

    def load_auxiliary_rows(self, server: ServerState, users: Keys) -> tuple[Floats, Floats]:
        """The auxiliary rows of all items and of some senders; what is new starts as Xavier's rows do."""
        n, dim, kept = *server.items.shape, server.parts.get(self.name, {})
        draw, bound = self.context.draws.public, math.sqrt(6 / (1 + server.items.shape[1]))

        def fresh(what: str, owners: Keys) -> Floats:
            return (bound * (2 * uniforms(draw(f"{self.name}-{what}"), owners, dim) - 1)).astype(np.float32)

        table, people = fresh("items", np.arange(n, dtype=np.uint64)), fresh("people", users)
        if _ITEMS in kept:
            table[: len(kept[_ITEMS])] = kept[_ITEMS]
            _, mine, theirs = np.intersect1d(users, kept[_SENDER], assume_unique=True, return_indices=True)
            people[mine] = kept[_PEOPLE][theirs]
        return table, people

    def align_rows(
        self, items: Floats, graph: SharedGraph, table: Floats, people: Floats, key: np.uint64
    ) -> tuple[float, Floats]:
        """InfoNCE of the federated rows with what the auxiliary model makes of its own, which stand still."""
        one = self.config
        if not one.lam1:
            return 0.0, items
        made, shared, adam = (
            UnitRows.of(graph.smooth(table, people)[1]).rows,
            graph.shared_items,
            AdamTable(items, one.agree_lr),
        )
        near = []
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            for step in range(math.ceil(len(shared) / one.item_batch)):
                some = shared[choose_distinct(key + np.uint64(step), len(shared), min(one.item_batch, len(shared)))]
                unit, slope = UnitRows.of(adam.table), np.zeros_like(items)
                loss, slope[some], _ = compute_infonce(unit.rows[some], made[some], one.tau, one.lam1, cores)
                adam.step(unit.backpropagate(slope))
                near.append(loss)
        return float(np.mean(near)), adam.table

    def own(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """For everybody who told something, what the auxiliary model finds likeliest of what they did not tell."""
        kept, k = server.parts.get(self.name, {}), min(self.config.k_aug, len(server.items))
        graph = self.build_graph(server)
        if _ITEMS not in kept or not k or not len(graph):
            return server, Ragged.empty(len(clients))
        place = np.minimum(np.searchsorted(graph.users, clients), len(graph.users) - 1)
        row = np.flatnonzero(graph.users[place] == clients)
        users, items = graph.smooth(*self.load_auxiliary_rows(server, graph.users))
        with limit_blas_threads():
            scores = UnitRows.of(users).rows[place[row]] @ UnitRows.of(items).rows.T
        told = graph.lists.take(place[row])
        scores[told.rows(), told.ids] = -np.inf
        found = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1)
        good = np.isfinite(np.take_along_axis(scores, found, axis=1))
        who = np.broadcast_to(row[:, None], found.shape)[good]
        return server, Ragged.from_pairs(who, found[good], len(clients))

    def own_fits(self, sent: Ragged, n_items: int) -> bool:
        return not sent.values

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """What is told is counted, by person; what is taken back ends the auxiliary model, which begins anew."""
        kept = server.parts.get(self.name, {})
        teller, told = kept.get(_CONTRIBUTOR_KEY, np.zeros(0, np.uint64)), kept.get(_RELEASE_KEY, np.zeros(0, np.int64))
        if requests.kind == "share":
            counted = _count_releases(teller, told, requests.senders, requests.items.counts())
            server = server.with_part(self.name, {**kept, **counted})
            return server, {"method": self.name, **self.promises(server)}
        said = {"method": self.name, "exact": False, "clients_asked": 0, "rounds": 0, "storage_client": 0}
        if requests.withdrawn_items is None or not len(requests.withdrawn_items.ids):
            return server, {**said, "purged": []}
        left = {_CONTRIBUTOR_KEY: teller, _RELEASE_KEY: told}
        if requests.kind == "leave":
            stays = ~np.isin(teller, requests.senders)
            left = {_CONTRIBUTOR_KEY: teller[stays], _RELEASE_KEY: told[stays]}
        return server.with_part(self.name, left), {**said, "purged": ["auxiliary_model"] if _ITEMS in kept else []}

    def promises(self, server: ServerState) -> dict[str, float]:
        """Epsilon of one item, and of the people who told some: of all they told together."""
        told = server.parts.get(self.name, {}).get(_RELEASE_KEY, np.zeros(0, np.int64))
        each = self.config.epsilon * told
        people = {"people": float(len(told)), "items": float(told.sum())}
        mean, most = (float(each.mean()), float(each.max())) if len(told) else (0.0, 0.0)
        return {"epsilon_per_item": self.config.epsilon, "epsilon_per_person_mean": mean,
                "epsilon_per_person_most": most, **people}  # fmt: skip

    def server_notes(self, server: ServerState) -> dict[str, float]:
        kept = server.parts.get(self.name, {})
        losses = (
            {"told_bpr": float(kept[_NOTES_KEY][0]), "told_cl": float(kept[_NOTES_KEY][1])}
            if _NOTES_KEY in kept
            else {}
        )
        return {**losses, **{k: v for k, v in self.promises(server).items() if k.startswith("epsilon")}}


def _ensure_release_column(sent: Ragged) -> Ragged:
    """A list without entries has no columns either."""
    return (
        sent
        if _RELEASE_KEY in sent.values
        else Ragged(sent.ptr, sent.ids, {_RELEASE_KEY: np.zeros(len(sent.ids), np.int32)})
    )


def _replace_items(requests: RequestBatch, items: Ragged) -> RequestBatch:
    return RequestBatch(requests.kind, requests.senders, items, requests.time, requests.number)


def _count_releases(teller: Keys, told: Longs, senders: Keys, more: Longs) -> Arrays:
    """How many items each person told, those of new requests too."""
    who, at = np.unique(np.concatenate([teller, senders]), return_inverse=True)
    return {
        _CONTRIBUTOR_KEY: who,
        _RELEASE_KEY: np.bincount(at, weights=np.append(told, more), minlength=len(who)).astype(np.int64),
    }
