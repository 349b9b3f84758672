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
from tacita.core.types import Arrays, CohortView, Floats, Keys, Local, Longs, Ragged, Requests, ServerState
from tacita.fields import Answer, Dense, Spec, Total, Upload
from tacita.kernels.listed import listed
from tacita.learn.training.stepper import CONTEXT
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_learning import LearningConfig
from tacita.methods.sharing.mending import Effort, mend
from tacita.methods.sharing.refining import Told, Unit, batches_of, refine
from tacita.models.base import Context
from tacita.round.parts import Ask, Part, PartConfig, Play, World
from tacita.round.registry import register

_PARTIAL, _DENIED, _SAID = "partial", "denied", "said"
_NOBODY = np.zeros(0, np.uint64)
_MENDED = ("mended_sender", "mended_item", "mended_weight")


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

    def effort(self) -> Effort:
        return Effort(
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
        width = self.world.backbone.item_width
        return (Spec("vector", (width,), seen="each", most=1.0, least=-1.0, about=about),)

    def check(self, n_items: int) -> None:
        if not self.config.contrast_users:
            return
        if self.world.train.silos:
            raise TacitaError("'contrast_users' is for clients that are one user each; train.silos must be 0.")
        if list(self.world.backbone.layout.values()) != [self.world.backbone.item_width]:
            raise TacitaError(
                f"'contrast_users' compares people's vectors with item rows, and those of backbone "
                f"'{self.world.backbone.name}' are of another kind; set it to false."
            )

    # on the device

    def extras(self, view: CohortView, local: Local) -> Arrays:
        if not self.config.contrast_users:
            return {}
        shares = _shared(view).counts() > 0
        vectors = _vectors(self.world, view, local)
        return {"vector": np.where(shares[:, None], Unit.of(vectors).rows, np.float32(0))}

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "whether a person keeps some of what they have to themselves"
        return (Spec(_PARTIAL, (1,), seen="each", most=1.0, least=0.0, about=about),)

    def answer(self, view: CohortView, question: str) -> Answer:
        """Whether something stays local; asked of those who share."""
        train, away = view.train, np.zeros(len(view.train.ids), bool)
        for one in view.lists.get("sharing", {}).values():
            away |= listed(view.n_items, train.ptr, train.ids, one.ptr, one.ids)
        some = (train.where(~away).counts() > 0).astype(np.float32)[:, None]
        return Answer(Upload({_PARTIAL: Dense(some)}, np.ones(len(some)), view.client_keys))

    # on the server

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not len(server.given):
            return server
        plain = SharedGraph.of(server.given, len(server.items), layers=self.config.layers)
        if (server.round + 1) % self.config.mend_every == 0:
            server = self.mended(server, plain)
        draw, kept = self.world.draws.public, server.parts.get(self.name, {})
        keys = np.array(
            [draw(f"{self.name}-{what}", server.block, server.round) for what in ("order", "other", "items")]
        )
        batches = batches_of(plain, self.config.sizes(), keys)  # what was mended is no positive
        told = self._told(plain.users, total)
        made = refine(self.graph(server, plain), server.items, batches, self.config.aims(), told=told)
        said = np.array([made.bpr, made.cl, len(kept.get(_MENDED[0], ()))])
        return server.with_items(made.table).with_part(self.name, {**kept, _SAID: said})

    def graph(self, server: ServerState, plain: SharedGraph) -> SharedGraph:
        """What vectors pass along: the record, and what was mended of those who are still in it."""
        kept = server.parts.get(self.name, {})
        if _MENDED[0] not in kept:
            return plain
        sender, item, weight = (kept[name] for name in _MENDED)
        here = np.isin(sender, plain.users)
        more = (sender[here], item[here])
        return SharedGraph.of(server.given, len(server.items), more, self.config.layers, extra_weight=weight[here])

    def mended(self, server: ServerState, plain: SharedGraph) -> ServerState:
        """With links proposed anew for those who share a part."""
        kept = server.parts.get(self.name, {})
        open_to = np.setdiff1d(kept.get(_PARTIAL, _NOBODY), kept.get(_DENIED, _NOBODY))
        whom = np.flatnonzero(np.isin(plain.users, open_to))
        key = self.world.draws.public(f"{self.name}-mend", server.block, server.round)
        found = mend(plain, server.items, whom, self.config.effort(), key) if len(whom) else None
        left = {name: v for name, v in kept.items() if name not in _MENDED}
        if found is not None:
            left |= dict(zip(_MENDED, (plain.users[found.user], found.item, found.weight), strict=True))
        return server.with_part(self.name, left)

    def _told(self, users: Keys, total: Total) -> Told | None:
        """The vectors that came up, of people who are in the graph."""
        each = total.each.get(f"{self.name}.vector")
        if each is None or not len(users):
            return None
        assert isinstance(each.value, Dense)
        place = np.minimum(np.searchsorted(users, each.sender), len(users) - 1)
        rows = each.value.value.astype(np.float32)
        some = np.flatnonzero((users[place] == each.sender) & rows.any(1))
        some = some[np.argsort(place[some])]  # in an order that no chunk of clients changes
        return Told(place[some].astype(np.int64), Unit.of(np.ascontiguousarray(rows[some])).rows)

    def server_notes(self, server: ServerState) -> dict[str, float]:
        kept = server.parts.get(self.name, {})
        names = "shared_bpr", "shared_cl", "mended_edges"
        return {name: float(v) for name, v in zip(names, kept[_SAID], strict=True)} if _SAID in kept else {}

    def handle_many(
        self, server: ServerState, requests: Requests, ask: Ask, play: Play
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """Who shares says whether that is all. Who withdraws is mended no more, and all proposals end with it."""
        kept = dict(server.parts.get(self.name, {}))
        said: dict[str, Any] = {"method": self.name, "exact": False, "clients_asked": 0, "purged": []}
        if requests.kind != "leave":
            kept[_PARTIAL] = self._partial(server, requests.senders, ask, kept)
            said["clients_asked"] = len(requests.senders)
        if requests.kind != "share":
            before, stay = kept.get(_DENIED, _NOBODY), np.isin(requests.senders, server.given.sender)
            who = requests.senders[stay] if requests.kind != "leave" else _NOBODY  # of who is gone nothing is kept
            kept[_DENIED] = np.union1d(np.setdiff1d(before, requests.senders), who)
            said |= {"denied": len(who), "purged": ["mended_edges"] if _MENDED[0] in kept else []}
            kept = {name: v for name, v in kept.items() if name not in (*_MENDED, _SAID)}
        return server.with_part(self.name, kept), said

    def _partial(self, server: ServerState, senders: Keys, ask: Ask, kept: Arrays) -> Keys:
        """Who keeps something to themselves, after some told it anew."""
        told = ask(server, f"{self.name}/{_PARTIAL}", senders).each.get(_PARTIAL)
        others = np.setdiff1d(kept.get(_PARTIAL, np.zeros(0, np.uint64)), senders)
        if told is None:
            return others
        assert isinstance(told.value, Dense)
        return np.union1d(others, told.sender[told.value.value[:, 0] > 0])


def _shared(view: CohortView) -> Ragged:
    return view.lists.get("sharing", {}).get("shared", Ragged.empty(len(view.user)))


def _vectors(world: World, view: CohortView, local: Local) -> Floats:
    """Everybody's vector as their own model has it after training."""
    backbone, context = world.backbone, None
    if backbone.reads_context:
        lists, row = local.at_hand.get(CONTEXT, (Ragged.empty(len(view.user)), np.zeros(0, np.int32)))
        entries: Longs = row + local.row_start[lists.rows()]
        count = lists.counts().astype(np.float32)
        context = Context(lists.ptr, lists.rows(), count, local.rows[entries], dict(lists.values))
    made = backbone.represent(backbone.named(local.private), local.heads, context)
    return np.ascontiguousarray(next(iter(made.values())), np.float32)
