"""graph-mending: our version of CDCGNNFed, of which only the abstract is public (sharing spec C.2).

The server learns along the graph of what users shared as FedShare does, but passes vectors along likely links as
well. A scorer proposes these now and then for users who share a part of what they have; their devices say so when they
share. A user who has taken something back is mended no more. So no withdrawn pair can be proposed, and the server does
not have to keep which pairs those were.

With `contrast_users` the graph's users are to agree with the vectors that their own devices have for them. For that
every sharing device that trains uploads the direction of its user's vector, by name. It is learned from what stays
local, and the items nearest to it are what the user likes: just what sharing a part was to avoid. Live, a node sends it
only where its owner allowed that users are seen one by one. A device whose user shares everything trains and sends
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Bools, CohortView, Floats, Keys, LocalModels, Ragged, ServerState
from tacita.learn.training.stepper import CONTEXT
from tacita.messages import CohortReply, DenseArrays, Spec, Total, Upload
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import DeviceVectors, UnitRows, draw_batch_keys, draw_batches, refine_table
from tacita.methods.sharing.item_lists import mark_listed_entries
from tacita.methods.sharing.link_prediction import LinkPredictionOptions, propose_links
from tacita.methods.sharing.shared_graph_part import LearningConfig
from tacita.models.scorer import Context, Scorer
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.task import TrainingOutcome
from tacita.round.unlearning_report import UnlearningReport

_PARTIAL = "partial"
_DENIED = "denied"
_NOTES_KEY = "said"
_NOBODY = np.zeros(0, np.uint64)
_LINK_SENDER = "mended_sender"
_LINK_ITEM = "mended_item"
_LINK_WEIGHT = "mended_weight"
_LINK_KEYS = (_LINK_SENDER, _LINK_ITEM, _LINK_WEIGHT)


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
            hide=self.hide,
            lr=self.mender_lr,
            epochs=self.mender_epochs,
            kappa=self.kappa,
            most=self.k_max,
        )


@register
class GraphMending(Part, Unlearning):
    name = "graph-mending"
    scope = ()  # it proposes no withdrawn link any more; what rows learned from it stays
    Config: ClassVar[type[PartConfig]] = MendingConfig
    config: MendingConfig

    def check(self, n_items: int) -> None:
        if not self.config.contrast_users:
            return
        if self.context.train.silos:
            raise TacitaError("'contrast_users' is for clients that are one user each; train.silos must be 0.")
        backbone = self.context.backbone
        widths = list(backbone.private_layout.values())
        if widths != [backbone.item_width]:
            raise TacitaError(
                f"'contrast_users' compares people's vectors with item rows, and those of backbone "
                f"'{backbone.name}' are of another kind; set it to false."
            )

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return (StateSpec(_DENIED, persistent=True),)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        if not self.config.contrast_users:
            return PartFields()
        about = "the direction of a person's vector, which says what they like"
        width = self.context.backbone.item_width
        vector = Spec("vector", (width,), seen="each", most=1.0, least=-1.0, about=about)
        return PartFields(extra=(vector,))

    # on the device

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        """The directions of sharing users' vectors, where the graph is to agree with them."""
        if not self.config.contrast_users:
            return TrainingOutcome()
        shares = self._find_sharers(view)
        vectors = _compute_trained_user_vectors(self.context.scorer, view, local)
        directions = UnitRows.normalise(vectors).rows
        zero = np.float32(0)
        is_shared = shares[:, None]
        sent = np.where(is_shared, directions, zero)
        return TrainingOutcome(extras={"vector": sent})

    def _find_sharers(self, view: CohortView) -> Bools:
        """(users) who shares something."""
        is_sharer = np.zeros(len(view.user), bool)
        for items in self.context.select_lists(view, Role.SHARED):
            is_sharer |= items.counts() > 0
        return is_sharer

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "whether a person keeps some of what they have to themselves"
        return (Spec(_PARTIAL, (1,), seen="each", most=1.0, least=0.0, about=about),)

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        """Whether something stays local; asked of users who share."""
        train = view.train
        n_entries = len(train.ids)
        leaves = np.zeros(n_entries, bool)
        for items in self.context.select_lists(view, Role.SHARED, Role.WITHDRAWN):
            leaves |= mark_listed_entries(train, items, view.n_items)
        local_items = train.filter_entries(~leaves)
        has_items = local_items.counts() > 0
        keeps_some = has_items.astype(np.float32)
        weight = np.ones(len(keeps_some))
        values = DenseArrays(keeps_some[:, None])
        upload = Upload({_PARTIAL: values}, weight, view.client_keys)
        return CohortReply(upload)

    # on the server

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not len(server.shared):
            return server
        config = self.config
        n_items = len(server.items)
        layers = config.layers
        shared_graph = SharedGraph.from_record(server.shared, n_items, layers=layers)
        rounds = server.round + 1
        if rounds % config.mend_every == 0:
            server = self.with_updated_links(server, shared_graph)
        state = server.parts.get(self.name, {})
        draws = self.context.draws
        keys = draw_batch_keys(draws, self.name, server)
        batches = draw_batches(shared_graph, config.build_batch_sizes(), keys)  # a proposed link is no positive
        device_vectors = self._collect_device_vectors(shared_graph.users, total)
        graph = self.build_graph(server, shared_graph)
        objective = config.build_objective()
        refined = refine_table(graph, server.items, batches, objective, device_vectors=device_vectors)
        n_links = len(state.get(_LINK_SENDER, ()))
        notes = np.array([refined.bpr, refined.cl, n_links])
        server = server.with_items(refined.table)
        updated = {**state, _NOTES_KEY: notes}
        return server.with_part(self.name, updated)

    def build_graph(self, server: ServerState, shared_graph: SharedGraph) -> SharedGraph:
        """What vectors pass along: the record, and proposed links of users who are still in it."""
        state = server.parts.get(self.name, {})
        if _LINK_SENDER not in state:
            return shared_graph
        link_senders = state[_LINK_SENDER]
        still_shares = np.isin(link_senders, shared_graph.users)
        sender = state[_LINK_SENDER][still_shares]
        item = state[_LINK_ITEM][still_shares]
        weight = state[_LINK_WEIGHT][still_shares]
        n_items = len(server.items)
        layers = self.config.layers
        links = (sender, item)
        return SharedGraph.from_record(server.shared, n_items, links, layers, extra_weight=weight)

    def with_updated_links(self, server: ServerState, shared_graph: SharedGraph) -> ServerState:
        """With new proposals for users who share a part."""
        state = server.parts.get(self.name, {})
        remaining = _drop_links(state)
        partial = state.get(_PARTIAL, _NOBODY)
        denied = state.get(_DENIED, _NOBODY)
        open_users = np.setdiff1d(partial, denied)
        is_open = np.isin(shared_graph.users, open_users)
        places = np.flatnonzero(is_open)
        if not len(places):
            return server.with_part(self.name, remaining)
        draws = self.context.draws
        key = draws.public(f"{self.name}-mend", server.block, server.round)
        options = self.config.build_link_options()
        links = propose_links(shared_graph, server.items, places, options, key)
        if links is not None:
            link_users = shared_graph.users[links.user]
            remaining[_LINK_SENDER] = link_users
            remaining[_LINK_ITEM] = links.item
            remaining[_LINK_WEIGHT] = links.weight
        return server.with_part(self.name, remaining)

    def _collect_device_vectors(self, users: Keys, total: Total) -> DeviceVectors | None:
        """The uploaded vectors of users who are in the graph."""
        uploads = total.each.get(f"{self.name}.vector")
        if uploads is None or not len(users):
            return None
        assert isinstance(uploads.value, DenseArrays)
        rows = uploads.value.value.astype(np.float32)
        position = np.searchsorted(users, uploads.sender)
        last = len(users) - 1
        place = np.minimum(position, last)
        is_in_graph = users[place] == uploads.sender
        has_vector = rows.any(1)
        senders = np.flatnonzero(is_in_graph & has_vector)
        order = np.argsort(place[senders])
        senders = senders[order]  # in an order that no chunk of clients changes
        sent_rows = np.ascontiguousarray(rows[senders])
        places = place[senders].astype(np.int64)
        return DeviceVectors(places, UnitRows.normalise(sent_rows).rows)

    def metrics(self, server: ServerState) -> dict[str, float]:
        state = server.parts.get(self.name, {})
        if _NOTES_KEY not in state:
            return {}
        bpr, cl, n_links = state[_NOTES_KEY]
        return {"shared_bpr": float(bpr), "shared_cl": float(cl), "mended_edges": float(n_links)}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        """Users who share say whether that is all. A withdrawal ends all proposals, and the user is mended no more."""
        earlier = server.parts.get(self.name, {})
        state = dict(earlier)
        clients_asked = 0
        purged: tuple[str, ...] = ()
        details = {}
        if requests.kind != "leave":
            senders = requests.senders
            state[_PARTIAL] = self._update_partial_sharers(server, senders, ask)
            clients_asked = len(requests.senders)
        if requests.kind != "share":
            denied = _find_denied_senders(server, requests)
            if _LINK_SENDER in state:
                purged = ("mended_edges",)
            details["denied"] = len(denied)
            denied_before = state.get(_DENIED, _NOBODY)
            others = np.setdiff1d(denied_before, requests.senders)
            state[_DENIED] = np.union1d(others, denied)
            state = _drop_links(state)
            state.pop(_NOTES_KEY, None)
        report = UnlearningReport(
            method=self.name, exact=False, clients_asked=clients_asked, purged=purged, details=details
        )
        return server.with_part(self.name, state), report

    def _update_partial_sharers(self, server: ServerState, senders: Keys, ask: DeviceQuery) -> Keys:
        """Users who keep something to themselves, after some of them said whether they do."""
        state = server.parts.get(self.name, {})
        earlier = state.get(_PARTIAL, _NOBODY)
        others = np.setdiff1d(earlier, senders)
        total = ask(server, _PARTIAL, senders)
        answers = total.each.get(_PARTIAL)
        if answers is None:
            return others
        assert isinstance(answers.value, DenseArrays)
        values = answers.value.value[:, 0]
        keeps_some = values > 0
        return np.union1d(others, answers.sender[keeps_some])


def _find_denied_senders(server: ServerState, requests: RequestBatch) -> Keys:
    """The senders for whom no link may be proposed; of users who share nothing any more nothing is kept."""
    if requests.kind == "leave":
        return _NOBODY
    shared_by = server.shared.sender
    still_shares = np.isin(requests.senders, shared_by)
    return requests.senders[still_shares]


def _drop_links(state: Arrays) -> Arrays:
    remaining: Arrays = {}
    for name, array in state.items():
        if name not in _LINK_KEYS:
            remaining[name] = array
    return remaining


def _compute_trained_user_vectors(scorer: Scorer, view: CohortView, local: LocalModels) -> Floats:
    """Each user's vector as the user's own model has it after training."""
    context = None
    if scorer.reads_context:
        context = _build_context(view, local)
    private = scorer.split_private(local.private)
    vectors = scorer.represent_users(private, local.heads, context)
    first = next(iter(vectors.values()))
    return np.ascontiguousarray(first, np.float32)


def _build_context(view: CohortView, local: LocalModels) -> Context:
    """The items that the models read, with the rows as they are after training."""
    no_lists = Ragged.empty(len(view.user))
    no_rows = np.zeros(0, np.int32)
    lists, row = local.rows_needed.get(CONTEXT, (no_lists, no_rows))
    owner = lists.rows()
    entries = row + local.row_start[owner]
    rows = local.rows[entries]
    columns = dict(lists.values)
    counts = lists.counts().astype(np.float32)
    return Context(lists.ptr, owner, counts, rows, columns)
