"""graph-mending: our version of CDCGNNFed, of which only the abstract is public (sharing spec C.2).

The server learns along the graph of what people shared as FedShare does, but passes vectors along likely links as
well, which a scorer proposes now and then for those who share a part of what they have. Whether they do is told by
their devices when they share. Who has taken something back is mended no more: no withdrawn pair can be
proposed again, and nothing has to be kept of which pairs those were.

With `contrast_users` the graph's people are to agree with the vectors that their own devices have for them. For that
every sharing device that trains uploads the direction of its person's vector, by name. It is made of what stays local,
and the items nearest to it are what they like: just what sharing a part was to avoid. Live, a node sends it only where
its owner allowed that people are seen one by one. Who shares everything trains nothing, so sends nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Floats, Keys, LocalModels, Longs, Ragged, ServerState
from tacita.kernels.membership import mark_listed
from tacita.learn.training.stepper import CONTEXT
from tacita.messages import CohortReply, DenseArrays, Spec, Total, Upload
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import DeviceVectors, UnitRows, draw_batches, refine_table
from tacita.methods.sharing.link_prediction import LinkPredictionOptions, propose_links
from tacita.methods.sharing.shared_graph_part import LearningConfig
from tacita.models.base import Context
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer, RunContext
from tacita.round.registry import register
from tacita.round.request import RequestBatch

_PARTIAL, _DENIED, _NOTES_KEY = "partial", "denied", "said"
_NOBODY = np.zeros(0, np.uint64)
_LINK_KEYS = ("mended_sender", "mended_item", "mended_weight")


class MendingConfig(LearningConfig):
    mend_every: int = Field(10, ge=1, description="rounds between two mendings")
    hide: float = Field(0.2, gt=0, lt=1, description="shared interactions that the scorer learns to find again")
    kappa: float = Field(0.5, ge=0, description="links proposed for each that a person shared")
    k_max: int = Field(20, ge=0, description="links proposed for a person at most")
    mender_lr: float = Field(0.01, gt=0, description="learning rate of the scorer")
    mender_epochs: int = Field(10, ge=1, description="passes of the scorer over what is hidden")
    contrast_users: bool = Field(
        False, description="sharing devices upload their person's vector, by name, for the graph to agree with"
    )

    def build_link_options(self) -> LinkPredictionOptions:
        return LinkPredictionOptions(
            hide=self.hide, lr=self.mender_lr, epochs=self.mender_epochs, kappa=self.kappa, most=self.k_max
        )  # fmt: skip


@register
class GraphMending(Part):
    name = "graph-mending"
    takes_back = ()  # it proposes nothing more of what is withdrawn; what rows learned from it stays
    lasting_here = (_DENIED,)
    Config: ClassVar[type[PartConfig]] = MendingConfig
    config: MendingConfig

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        if not self.config.contrast_users:
            return ()
        about = "the direction of a person's vector, which says what they like"
        width = self.context.backbone.item_width
        return (Spec("vector", (width,), seen="each", most=1.0, least=-1.0, about=about),)

    def check(self, n_items: int) -> None:
        if not self.config.contrast_users:
            return
        if self.context.train.silos:
            raise TacitaError("'contrast_users' is for clients that are one user each; train.silos must be 0.")
        if list(self.context.backbone.layout.values()) != [self.context.backbone.item_width]:
            raise TacitaError(
                f"'contrast_users' compares people's vectors with item rows, and those of backbone "
                f"'{self.context.backbone.name}' are of another kind; set it to false."
            )

    # on the device

    def extras(self, view: CohortView, local: LocalModels) -> Arrays:
        if not self.config.contrast_users:
            return {}
        shares = _read_shared(view).counts() > 0
        vectors = _compute_user_vectors(self.context, view, local)
        return {"vector": np.where(shares[:, None], UnitRows.of(vectors).rows, np.float32(0))}

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "whether a person keeps some of what they have to themselves"
        return (Spec(_PARTIAL, (1,), seen="each", most=1.0, least=0.0, about=about),)

    def answer(self, view: CohortView, question: str) -> CohortReply:
        """Whether something stays local; asked of those who share."""
        train, away = view.train, np.zeros(len(view.train.ids), bool)
        for one in view.lists.get("sharing", {}).values():
            away |= mark_listed(view.n_items, train.ptr, train.ids, one.ptr, one.ids)
        some = (train.filter_entries(~away).counts() > 0).astype(np.float32)[:, None]
        return CohortReply(Upload({_PARTIAL: DenseArrays(some)}, np.ones(len(some)), view.client_keys))

    # on the server

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not len(server.shared):
            return server
        plain = SharedGraph.of(server.shared, len(server.items), layers=self.config.layers)
        if (server.round + 1) % self.config.mend_every == 0:
            server = self.update_links(server, plain)
        draw, kept = self.context.draws.public, server.parts.get(self.name, {})
        keys = np.array(
            [draw(f"{self.name}-{what}", server.block, server.round) for what in ("order", "other", "items")]
        )
        batches = draw_batches(plain, self.config.build_batch_sizes(), keys)  # what was mended is no positive
        told = self._collect_device_vectors(plain.users, total)
        made = refine_table(
            self.build_graph(server, plain), server.items, batches, self.config.build_objective(), device_vectors=told
        )
        said = np.array([made.bpr, made.cl, len(kept.get(_LINK_KEYS[0], ()))])
        return server.with_items(made.table).with_part(self.name, {**kept, _NOTES_KEY: said})

    def build_graph(self, server: ServerState, plain: SharedGraph) -> SharedGraph:
        """What vectors pass along: the record, and what was mended of those who are still in it."""
        kept = server.parts.get(self.name, {})
        if _LINK_KEYS[0] not in kept:
            return plain
        sender, item, weight = (kept[name] for name in _LINK_KEYS)
        here = np.isin(sender, plain.users)
        more = (sender[here], item[here])
        return SharedGraph.of(server.shared, len(server.items), more, self.config.layers, extra_weight=weight[here])

    def update_links(self, server: ServerState, plain: SharedGraph) -> ServerState:
        """With links proposed anew for those who share a part."""
        kept = server.parts.get(self.name, {})
        open_to = np.setdiff1d(kept.get(_PARTIAL, _NOBODY), kept.get(_DENIED, _NOBODY))
        whom = np.flatnonzero(np.isin(plain.users, open_to))
        key = self.context.draws.public(f"{self.name}-mend", server.block, server.round)
        found = propose_links(plain, server.items, whom, self.config.build_link_options(), key) if len(whom) else None
        left = {name: v for name, v in kept.items() if name not in _LINK_KEYS}
        if found is not None:
            left |= dict(zip(_LINK_KEYS, (plain.users[found.user], found.item, found.weight), strict=True))
        return server.with_part(self.name, left)

    def _collect_device_vectors(self, users: Keys, total: Total) -> DeviceVectors | None:
        """The vectors that came up, of people who are in the graph."""
        each = total.each.get(f"{self.name}.vector")
        if each is None or not len(users):
            return None
        assert isinstance(each.value, DenseArrays)
        place = np.minimum(np.searchsorted(users, each.sender), len(users) - 1)
        rows = each.value.value.astype(np.float32)
        some = np.flatnonzero((users[place] == each.sender) & rows.any(1))
        some = some[np.argsort(place[some])]  # in an order that no chunk of clients changes
        return DeviceVectors(place[some].astype(np.int64), UnitRows.of(np.ascontiguousarray(rows[some])).rows)

    def server_notes(self, server: ServerState) -> dict[str, float]:
        kept = server.parts.get(self.name, {})
        names = "shared_bpr", "shared_cl", "mended_edges"
        return {name: float(v) for name, v in zip(names, kept[_NOTES_KEY], strict=True)} if _NOTES_KEY in kept else {}

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """Who shares says whether that is all. Who withdraws is mended no more, and all proposals end with it."""
        kept = dict(server.parts.get(self.name, {}))
        said: dict[str, Any] = {"method": self.name, "exact": False, "clients_asked": 0, "purged": []}
        if requests.kind != "leave":
            kept[_PARTIAL] = self._update_partial_sharers(server, requests.senders, ask, kept)
            said["clients_asked"] = len(requests.senders)
        if requests.kind != "share":
            before, stay = kept.get(_DENIED, _NOBODY), np.isin(requests.senders, server.shared.sender)
            who = requests.senders[stay] if requests.kind != "leave" else _NOBODY  # of who is gone nothing is kept
            kept[_DENIED] = np.union1d(np.setdiff1d(before, requests.senders), who)
            said |= {"denied": len(who), "purged": ["mended_edges"] if _LINK_KEYS[0] in kept else []}
            kept = {name: v for name, v in kept.items() if name not in (*_LINK_KEYS, _NOTES_KEY)}
        return server.with_part(self.name, kept), said

    def _update_partial_sharers(self, server: ServerState, senders: Keys, ask: DeviceQuery, kept: Arrays) -> Keys:
        """Who keeps something to themselves, after some told it anew."""
        told = ask(server, f"{self.name}/{_PARTIAL}", senders).each.get(_PARTIAL)
        others = np.setdiff1d(kept.get(_PARTIAL, np.zeros(0, np.uint64)), senders)
        if told is None:
            return others
        assert isinstance(told.value, DenseArrays)
        return np.union1d(others, told.sender[told.value.value[:, 0] > 0])


def _read_shared(view: CohortView) -> Ragged:
    return view.lists.get("sharing", {}).get("shared", Ragged.empty(len(view.user)))


def _compute_user_vectors(world: RunContext, view: CohortView, local: LocalModels) -> Floats:
    """Everybody's vector as their own model has it after training."""
    backbone, context = world.backbone, None
    if backbone.reads_context:
        lists, row = local.rows_needed.get(CONTEXT, (Ragged.empty(len(view.user)), np.zeros(0, np.int32)))
        entries: Longs = row + local.row_start[lists.rows()]
        count = lists.counts().astype(np.float32)
        context = Context(lists.ptr, lists.rows(), count, local.rows[entries], dict(lists.values))
    made = backbone.represent(backbone.named(local.private), local.heads, context)
    return np.ascontiguousarray(next(iter(made.values())), np.float32)
