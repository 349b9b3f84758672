"""Prediction transfer: FedKDRec (spec E) and PTF-FedRec (spec F) as one part with a switch for each of their steps.

On the device: what is received joins the client's own samples, and its predictions are sampled, mixed and swapped
before they are told. On the server: uploads are weighed, distilled into one model of everybody, and the agents learn
from what came of it; then some items are picked for every client of the next round. The server's model answers,
or, if asked, each client's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Keys, LocalModels, Ragged, ServerState
from tacita.learn.scores import SCORES, PredictionPart
from tacita.learn.training.central_model import CentralModel
from tacita.learn.training.central_state import TrainingSamples
from tacita.messages import PerClientField, SparseRows, Total
from tacita.methods.distillation.candidates import find_candidates, schedule_candidates, select_confident
from tacita.methods.distillation.client_model import score_client_models
from tacita.methods.distillation.measures import Loss, cross_entropy, mean_losses
from tacita.methods.distillation.networks import bundle_networks, select_network
from tacita.methods.distillation.rewards import Divergence, Diversity
from tacita.methods.distillation.round_draws import RoundDraws
from tacita.methods.distillation.selection import (
    CandidateWalk,
    SelectionOptions,
    SelectionOutcome,
    init_selection,
    reward_walks,
    take_walk,
    update_selection,
)
from tacita.methods.distillation.server_model import Teacher
from tacita.methods.distillation.uploads import (
    Disguise,
    PtfDisguise,
    Swap,
    disguise_predictions,
    disguise_ptf,
    drop_own,
)
from tacita.methods.distillation.weighting import (
    WeightingOptions,
    compute_states,
    compute_weights,
    concentration,
    expand_weights,
    init_weighting,
    update_weighting,
)
from tacita.models import backbone_class, backbone_names
from tacita.models.lightgcn import LightGCN
from tacita.models.scorer import Scorer
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import PartFields
from tacita.round.part import PartConfig
from tacita.round.registry import register
from tacita.round.serving import Purpose, Serving
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask, TrainingOutcome

WALK = "walk/"


class TransferConfig(PartConfig):
    alpha: float = Field(0.3, ge=0, le=1, description="weight of the hard label; from 0.5 on a threshold reads it")
    beta_low: float = Field(0.3, ge=0, le=1, description="least share of its predictions that a client tells")
    beta_high: float = Field(0.7, ge=0, le=1, description="largest share of them")
    swap: float = Field(0.1, ge=0, le=1, description="share of told positives whose value is swapped; 0: no swap")
    swap_select: Literal["random", "top"] = Field("random", description="which values are swapped")
    scheme: Literal["mix", "ptf"] = Field("mix", description="how predictions are told: FedKDRec's way or PTF-FedRec's")
    accumulate: bool = Field(False, description="received items stay with a client for good, as PTF-FedRec's code does")
    server: dict[str, Any] = Field(
        {}, description="the server's model; without a name the clients' own, with options changed"
    )
    server_epochs: int = Field(4, ge=1, description="passes over the uploads of a round")
    server_batch: int = Field(1024, ge=1, description="samples of one step of the server's model")
    server_loss: Literal["mean", "sum"] = Field("mean", description="over a batch; sum as PTF-FedRec's code")
    graph_above: float = Field(0.0, ge=0, lt=1, description="scores that join a user and an item in the server's graph")
    server_decay: float = Field(1e-6, ge=0, description="weight decay of the server's model")
    weighting: bool = Field(True, description="an agent weighs the uploads (false: -c)")
    weighting_without: Literal["", "size", "statistics", "loss"] = Field("", description="state it does without")
    weighting_lr: float = Field(1e-3, gt=0, description="learning rate of the agent that weighs teachers")
    agent_loss: Loss = Field("ce", description="what the agents are told of a client's upload: cross entropy, or KL")
    select: Literal["agent", "confident", "random", "top", "none"] = Field(
        "agent", description="what the server sends: an agent's picks, PTF-FedRec's rule, a schedule, nothing"
    )
    most: int = Field(30, ge=1, description="items that may be sent to a client in a round (mu)")
    scheduled: float = Field(1.0, ge=0, description="items a client gets under select = random or top, on average")
    select_lr: float = Field(1e-3, gt=0, description="learning rate of the agent that picks samples")
    select_without: Literal["", "loss", "diversity", "divergence"] = Field("", description="reward it does without")
    select_diversity: Diversity = Field(
        "softmax", description="KL of what was told from what was picked: of pooled rows, or of fitted Gaussians"
    )
    select_divergence: Divergence = Field(
        "bernoulli", description="cosine of what is told and predicted: item by item, or of both vectors"
    )
    select_adjust: bool = Field(True, description="picking pays less the later in the list (control ii: false)")
    select_shuffle: bool = Field(False, description="rewards are dealt anew among the clients (control i)")
    select_rho: float = Field(4.0, gt=0, description="how fast picking pays less down the list")
    history: Literal["last", "all"] = Field("last", description="uploads that candidates come from")
    answers: Literal["server", "client"] = Field("server", description="whose model recommends and is measured")


@register
class Transfer(PredictionPart):
    """Devices tell disguised predictions; the server distils them, and sends some of its own."""

    name = "prediction-transfer"
    fills = frozenset({"samples"})
    serves = frozenset({"scores"})
    addresses_clients = True
    Config: ClassVar[type[PartConfig]] = TransferConfig
    config: TransferConfig

    # what it is made of

    @property
    def server_backbone(self) -> Scorer:
        options = dict(self.config.server)
        if not options:
            return self.context.scorer
        if "name" not in options:
            options = {**self.context.scorer.config.model_dump(), **options}
        name = options.pop("name", self.context.backbone.name)
        if not isinstance(name, str):
            raise TacitaError("server.name of part 'prediction-transfer' must be a name such as 'neumf'.")
        if name not in backbone_names():
            raise unknown_name_error("server model", name, backbone_names())
        cls = backbone_class(name)
        if not issubclass(cls, Scorer):
            raise TacitaError(f"server model '{name}' cannot be taught; use neumf, neuncf, lightgcn or mf.")
        return cls(validate_model(cls.Config, options, f"server model '{name}'"))

    @property
    def weighting(self) -> WeightingOptions:
        return WeightingOptions(
            lr=self.config.weighting_lr, without=self.config.weighting_without, loss=self.config.agent_loss
        )

    @property
    def selection(self) -> SelectionOptions:
        c = self.config
        return SelectionOptions(
            most=c.most, lr=c.select_lr, rho=c.select_rho, adjust=c.select_adjust, shuffle=c.select_shuffle,
            without=c.select_without, diversity=c.select_diversity, divergence=c.select_divergence, loss=c.agent_loss,
        )  # fmt: skip

    @property
    def evaluates_clients(self) -> bool:
        return self.config.answers == "client"

    def check_server(self) -> None:
        c = self.config
        if c.beta_low > c.beta_high:
            raise TacitaError(f"beta_low = {c.beta_low} is above beta_high = {c.beta_high}; swap them.")
        CentralModel(
            self.server_backbone,
            Teacher.new(self.server_backbone, self.context.draws, _empty_items(self)).build_graph(),
        )

    def check(self, n_items: int) -> None:
        if self.config.most > n_items:
            raise TacitaError(
                f"prediction-transfer.most = {self.config.most} is more than the {n_items} items there are; lower it "
                f"(--set prediction-transfer.most={max(1, n_items // 2)})."
            )

    def _build_draws(self, keys: Keys, block: int, round: int, public: bool) -> RoundDraws:
        return RoundDraws(self.context.draws, keys, block, round, public)

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        if not self.config.accumulate:
            return ()
        return [StateSpec("received", _empty_scores(n_users))]

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(per_client={"score": ()})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(samples=self.add_received)

    def add_received(self, view: CohortView, own: Ragged) -> Ragged | None:
        """What was received and is not the client's own: of PTF-FedRec not its positives."""
        own_items = own if self.config.scheme == "mix" else view.train
        new = drop_own(self.received_items(view), Ragged(own_items.ptr, own_items.ids))
        if not len(new.ids):
            return None
        return Ragged(new.ptr, new.ids, {"label": np.clip(new.values["score"], 0, 1)})

    def received_items(self, view: CohortView) -> Ragged:
        now = view.per_client.get(self.name, _empty_scores(len(view.user)))
        if not self.config.accumulate:
            return now
        return view.lists[self.name]["received"].join_rows(now)

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        if not self.config.accumulate:
            return TrainingOutcome()
        new = drop_own(self.received_items(view), Ragged(view.train.ptr, view.train.ids))
        score = new.values.get("score", np.zeros(0, np.float32))
        return TrainingOutcome({"received": Ragged(new.ptr, new.ids, {"score": score})})

    def choose_predictions(self, view: CohortView, own: Ragged, received: Ragged) -> Ragged:
        c, dice = self.config, self._build_draws(view.client_keys, view.block, view.round, public=False)
        swap = Swap(c.swap, select=c.swap_select) if c.swap > 0 else None
        if c.scheme == "ptf":
            return disguise_ptf(own, received, PtfDisguise(swap=swap), dice)
        return disguise_predictions(own, received, Disguise((c.beta_low, c.beta_high), c.alpha, swap), dice)

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        return Serving(scores=partial(self.score_view, view))

    def score_view(self, view: CohortView, only: Ragged | None) -> Floats | None:
        """The scores that the server sent, or those of the clients' own models."""
        if self.config.answers == "client":
            return None if only is not None else score_client_models(self.context.scorer, view)
        scores: Floats = view.per_client[self.name].values["score"]
        if only is not None:
            return scores
        return scores.reshape(len(view.user), view.n_items).copy()

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        held = server.parts.get(self.name)
        backbone, draws = self.server_backbone, self.context.draws
        teacher = Teacher.of(held) if held else self._add_agents(Teacher.new(backbone, draws, server.items))
        return teacher.with_items(backbone, draws, server.items).arrays()

    def _add_agents(self, teacher: Teacher) -> Teacher:
        draws, dim = self.context.draws, self._dim(teacher)
        weights = init_weighting(self.weighting, draws.public("weighting-agent"))
        picks = init_selection(self.selection, dim, draws.public("actor"), draws.public("critic"))
        return replace(teacher, agents=bundle_networks(weights=weights, picks=picks))

    def _dim(self, teacher: Teacher) -> int:
        return int(self._build_central(teacher).vectors(teacher.model)[1].shape[1])

    def _build_central(self, teacher: Teacher) -> CentralModel:
        backbone = self.server_backbone
        graph = teacher.build_graph(self.config.graph_above) if isinstance(backbone, LightGCN) else None
        return CentralModel(backbone, graph, self.config.server_decay)

    def _load_teacher(self, server: ServerState, clients: Keys) -> Teacher:
        held = {k: v for k, v in server.parts[self.name].items() if not k.startswith(WALK)}
        return Teacher.of(held).with_clients(self.server_backbone, self.context.draws, clients)

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.clients is None:
            return PartBroadcast()
        if audience.occasion == "serving":
            return PartBroadcast(per_client=self._serve_scores(server, audience.clients, audience.items))
        server, lists = self.select_items(server, audience.clients)
        return PartBroadcast(per_client=lists, server=server)

    def select_items(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """What every client of the round is sent; an agent's walk is kept until the round is over."""
        config = self.config
        teacher = self._load_teacher(server, clients)
        updated = server.with_part(self.name, teacher.arrays())
        if config.select == "none" or teacher.recent.n_uploads == 0:
            return updated, _empty_scores(len(clients))
        central = self._build_central(teacher)
        users = teacher.find_rows(clients)
        last = teacher.last.take(users)
        draws = self._build_draws(clients, server.block, server.round, public=True)

        def score_users(some: Any) -> Floats:
            return central.score(teacher.model, some)

        if config.select == "confident":
            return updated, select_confident(teacher.ever.counts, last, users, score_users, config.most)
        history = teacher.recent if config.history == "last" else teacher.ever
        candidates = find_candidates(history, last, users, score_users, config.most)
        if config.select != "agent":
            return updated, schedule_candidates(candidates, config.scheduled, config.select, draws)
        people, items = central.vectors(teacher.model)
        picks = select_network(teacher.agents, "picks")
        walk = take_walk(picks, candidates, people[users], items, self.selection, draws)
        state = teacher.arrays()
        for field in fields(CandidateWalk):
            state[f"{WALK}{field.name}"] = getattr(walk, field.name)
        state[f"{WALK}clients"] = clients
        return server.with_part(self.name, state), walk.list_picks()

    def _serve_scores(self, server: ServerState, clients: Keys, items: Ragged | None) -> Ragged | None:
        """The server's logits of the whole catalogue, or of some items, for each client."""
        if self.config.answers == "client":
            return None
        teacher = self._load_teacher(server, clients)
        central = self._build_central(teacher)
        users = teacher.find_rows(clients)
        if items is not None:
            scores = central.score_pairs(teacher.model, users[items.rows()], items.ids)
            return Ragged(items.ptr, items.ids, {"score": scores})
        n_items = len(server.items)
        scores = central.score(teacher.model, users)
        ptr = np.arange(len(clients) + 1, dtype=np.int64) * n_items
        ids = np.tile(np.arange(n_items, dtype=np.int32), len(clients))
        return Ragged(ptr, ids, {"score": scores.reshape(-1)})

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Steps 5 to 9 of a round: weigh, distil, let the agents learn, remember what was told."""
        if SCORES not in total.each:
            return server
        clients, told = _sort_by_sender(total.each[SCORES])
        teacher = self._load_teacher(server, clients)
        users, before_model = teacher.find_rows(clients), teacher.model
        state, weights = self._weigh_uploads(teacher, users, told)
        teacher = teacher.with_uploads(users, told)
        central = self._build_central(teacher)
        samples = self._build_samples(users, told, weights)
        orders = [
            self.context.draws.public("server-order", server.block, server.round, epoch)
            for epoch in range(self.config.server_epochs)
        ]
        model = central.train(before_model, samples, self.config.server_batch, orders, self.config.server_loss)
        teacher = replace(teacher, model=model)
        after = central.score_pairs(model, samples.user, samples.item)
        agents, notes = self._update_agents(server, teacher, central, (told, clients, after, state))
        notes |= {
            "server_loss": float(cross_entropy(after, samples.label).mean()),
            "weight_concentration": concentration(weights),
        }
        return server.with_part(self.name, replace(teacher, agents=agents, notes=notes).arrays())

    def _weigh_uploads(self, teacher: Teacher, users: Any, told: Ragged) -> tuple[Doubles | None, Doubles]:
        """What the weighting agent saw, and a weight for each client."""
        if not self.config.weighting:
            return None, np.full(len(told), 1.0 / max(1, len(told)))
        logits = self._build_central(teacher).score_pairs(teacher.model, users[told.rows()], told.ids)
        state = compute_states(told, logits, self.weighting)
        return state, compute_weights(select_network(teacher.agents, "weights"), state)

    def _build_samples(self, users: Any, told: Ragged, weights: Doubles) -> TrainingSamples:
        weight = expand_weights(weights, told)
        return TrainingSamples(
            users[told.rows()].astype(np.int64), told.ids.astype(np.int64), told.values["score"], weight
        )

    def _update_agents(
        self,
        server: ServerState,
        teacher: Teacher,
        central: CentralModel,
        heard: tuple[Ragged, Keys, Floats, Doubles | None],
    ) -> tuple[Arrays, dict[str, float]]:
        told, clients, after, state = heard
        agents = {name: select_network(teacher.agents, name) for name in ("weights", "picks")}
        if state is not None:
            losses = mean_losses(told, after, self.config.agent_loss)
            agents["weights"] = update_weighting(agents["weights"], state, losses, self.weighting)
        kept = server.parts[self.name]
        notes = {}
        if f"{WALK}clients" in kept:
            walk = CandidateWalk(**{one.name: kept[f"{WALK}{one.name}"] for one in fields(CandidateWalk)})
            asked = kept[f"{WALK}clients"]
            outcome = SelectionOutcome(*_align_uploads(told, clients, after, asked), central.vectors(teacher.model)[1])
            dice = self._build_draws(asked, server.block, server.round, public=True)
            reward = reward_walks(walk, outcome, self.selection, dice)
            agents["picks"] = update_selection(agents["picks"], walk, reward, self.selection)
            notes["picked"] = float(walk.action.sum() / max(1, len(asked)))
        return bundle_networks(**agents), notes

    def metrics(self, server: ServerState) -> dict[str, float]:
        return Teacher.of(_drop_walk(server.parts[self.name])).notes if self.name in server.parts else {}


def _empty_scores(n: int) -> Ragged:
    """Nothing for anybody."""
    return Ragged(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), {"score": np.zeros(0, np.float32)})


def _sort_by_sender(sent: PerClientField) -> tuple[Keys, Ragged]:
    """Who told what, in an order that does not depend on where people live."""
    assert isinstance(sent.value, SparseRows)
    score = sent.value.value.astype(np.float32)
    told = Ragged.from_pairs(sent.value.client, sent.value.item, len(sent.sender), {"score": score})
    order = np.argsort(sent.sender)
    return sent.sender[order], told.take(order)


def _empty_items(part: Transfer) -> Floats:
    return np.zeros((0, part.context.backbone.item_width), np.float32)


def _drop_walk(held: Arrays) -> Arrays:
    return {k: v for k, v in held.items() if not k.startswith(WALK)}


def _align_uploads(told: Ragged, clients: Keys, logits: Floats, wanted: Keys) -> tuple[Ragged, Floats]:
    """Uploads and their logits in another order of clients; who sent nothing has an empty row."""
    order = np.argsort(wanted)
    row = order[np.searchsorted(wanted, clients[told.rows()], sorter=order)]
    columns = {"score": told.values["score"], "logit": logits}
    made = Ragged.from_pairs(row, told.ids, len(wanted), columns)
    return Ragged(made.ptr, made.ids, {"score": made.values["score"]}), made.values["logit"]
