"""Prediction transfer: FedKDRec (spec E) and PTF-FedRec (spec F) as one part with a switch for each of their steps.

On the device: what is received joins the client's own samples, and its predictions are sampled, mixed and swapped
before they leave. On the server: uploads are weighed, distilled into one model of everybody, and the agents learn
from what came of it; then some items are picked for every client of the next round. The server's model answers,
or, with `answers = "client"`, each client's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Ints, Keys, LocalModels, Ragged, ServerState
from tacita.learn.scores import SCORES, PredictionPart
from tacita.learn.training.central_model import CentralModel
from tacita.learn.training.central_state import CentralState, TrainingSamples
from tacita.messages import Total
from tacita.methods.distillation.candidates import find_unsent_candidates, select_fixed_number, select_ptf_items
from tacita.methods.distillation.client_model import score_client_models
from tacita.methods.distillation.measures import compute_cross_entropy, compute_mean_losses
from tacita.methods.distillation.networks import bundle_networks, select_network
from tacita.methods.distillation.round_draws import RoundDraws
from tacita.methods.distillation.selection import (
    CandidateWalk,
    SelectionOutcome,
    compute_walk_rewards,
    decide_on_candidates,
    init_selection_networks,
    update_selection_networks,
)
from tacita.methods.distillation.server_model import Teacher, make_empty_score_lists
from tacita.methods.distillation.transfer_config import TransferConfig
from tacita.methods.distillation.transfer_records import (
    align_uploads_with_walk,
    build_upload_samples,
    decode_walk_with_clients,
    drop_walk,
    encode_walk,
    has_walk,
    sort_by_sender,
)
from tacita.methods.distillation.uploads import (
    Disguise,
    PtfDisguise,
    disguise_predictions,
    disguise_ptf_predictions,
    drop_own_items,
    keep_first_items,
)
from tacita.methods.distillation.weighting import (
    compute_client_states,
    compute_client_weights,
    init_weighting_network,
    measure_concentration,
    update_weighting_network,
)
from tacita.models import find_backbone_class, list_backbones
from tacita.models.lightgcn import LightGCN
from tacita.models.scorer import Scorer
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import PartFields
from tacita.round.part import PartConfig
from tacita.round.registry import register
from tacita.round.serving import Purpose, Serving
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask, TrainingOutcome


@register
class PredictionTransfer(PredictionPart):
    """Devices upload disguised predictions; the server distils them, and sends some of its own."""

    name = "prediction-transfer"
    fills = frozenset({"samples"})
    serves = frozenset({"scores"})
    addresses_clients = True
    Config: ClassVar[type[PartConfig]] = TransferConfig
    config: TransferConfig

    # what it is made of

    @property
    def server_backbone(self) -> Scorer:
        """The server's model: the clients' own, with other options, or another by its name."""
        options = dict(self.config.server)
        if not options:
            return self.context.scorer
        if "name" not in options:
            own_options = self.context.scorer.config.model_dump()
            options = {**own_options, **options}
        default_name = self.context.backbone.name
        name = options.pop("name", default_name)
        if not isinstance(name, str):
            raise TacitaError("server.name of part 'prediction-transfer' must be a name such as 'neumf'.")
        if name not in list_backbones():
            raise unknown_name_error("server model", name, list_backbones())
        cls = find_backbone_class(name)
        if not issubclass(cls, Scorer):
            raise TacitaError(f"server model '{name}' cannot be taught; use neumf, neuncf, lightgcn or mf.")
        label = f"server model '{name}'"
        config = validate_model(cls.Config, options, label)
        return cls(config)

    @property
    def evaluates_clients(self) -> bool:
        return self.config.answers == "client"

    def check_server(self) -> None:
        config = self.config
        if config.beta_low > config.beta_high:
            raise TacitaError(f"beta_low = {config.beta_low} is above beta_high = {config.beta_high}; swap them.")
        backbone = self.server_backbone
        width = self.context.backbone.item_width
        shape = (0, width)
        no_items = np.zeros(shape, np.float32)
        draws = self.context.draws
        teacher = Teacher.new(backbone, draws, no_items)
        CentralModel(backbone, teacher.build_upload_graph())

    def check(self, n_items: int) -> None:
        if self.config.most > n_items:
            raise TacitaError(
                f"prediction-transfer.most = {self.config.most} is more than the {n_items} items there are; lower it "
                f"(--set prediction-transfer.most={max(1, n_items // 2)})."
            )

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        if not self.config.accumulate:
            return ()
        return [StateSpec("received", make_empty_score_lists(n_users))]

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(per_client={"score": ()})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(samples=self.select_received_samples)

    def select_received_samples(self, view: CohortView, own: Ragged) -> Ragged | None:
        """What was received and is not the client's own: of PTF-FedRec not its positives."""
        own_items = view.train
        if self.config.scheme == "mix":
            own_items = own
        known = Ragged(own_items.ptr, own_items.ids)
        received = self.collect_received(view)
        new = drop_own_items(received, known)
        if not len(new.ids):
            return None
        score = new.values["score"]
        label = np.clip(score, 0, 1)
        return Ragged(new.ptr, new.ids, {"label": label})

    def collect_received(self, view: CohortView) -> Ragged:
        """Items that the server sent to each client in this round; with `accumulate`, in all rounds."""
        no_scores = make_empty_score_lists(len(view.user))
        received = view.per_client.get(self.name, no_scores)
        if self.config.truncate:
            received = keep_first_items(received, view.train.counts())
        if not self.config.accumulate:
            return received
        earlier = view.lists[self.name]["received"]
        return earlier.join_rows(received)

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        if not self.config.accumulate:
            return TrainingOutcome()
        own_items = Ragged(view.train.ptr, view.train.ids)
        new = drop_own_items(self.collect_received(view), own_items)
        no_score = np.zeros(0, np.float32)
        score = new.values.get("score", no_score)
        received = Ragged(new.ptr, new.ids, {"score": score})
        return TrainingOutcome({"received": received})

    def choose_predictions(self, view: CohortView, own: Ragged, received: Ragged) -> Ragged:
        config = self.config
        shared_draws = self.context.draws
        draws = RoundDraws(shared_draws, view.client_keys, view.block, view.round)
        if config.scheme == "ptf":
            ptf_disguise = PtfDisguise(replace=config.repeat_negatives, swap=config.swap_options)
            return disguise_ptf_predictions(own, received, ptf_disguise, draws)
        beta = (config.beta_low, config.beta_high)
        disguise = Disguise(beta, config.alpha, config.swap_options)
        return disguise_predictions(own, received, disguise, draws)

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        return Serving(scores=partial(self.score_as_served, view))

    def score_as_served(self, view: CohortView, only: Ragged | None) -> Floats | None:
        """The scores that the server sent, or those of the clients' own models."""
        if self.config.answers == "client":
            if only is not None:
                return None
            return score_client_models(self.context.scorer, view)
        sent = view.per_client[self.name]
        scores: Floats = sent.values["score"]
        if only is not None:
            return scores
        return scores.reshape(len(view.user), view.n_items).copy()

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name)
        backbone = self.server_backbone
        draws = self.context.draws
        if state:
            teacher = Teacher.from_arrays(state)
        else:
            new_teacher = Teacher.new(backbone, draws, server.items)
            teacher = self._with_new_agents(new_teacher)
        teacher = teacher.with_items(backbone, draws, server.items)
        return teacher.to_arrays()

    def _with_new_agents(self, teacher: Teacher) -> Teacher:
        """A teacher with new agents that weigh uploads and pick items."""
        draws = self.context.draws
        central = self._build_central(teacher)
        _, item_vectors = central.compute_vectors(teacher.model)
        width = int(item_vectors.shape[1])
        weighting_key = draws.public("weighting-agent")
        weights = init_weighting_network(self.config.weighting_options, weighting_key)
        actor_key = draws.public("actor")
        critic_key = draws.public("critic")
        options = self.config.selection_options
        picks = init_selection_networks(options, width, actor_key, critic_key)
        agents = bundle_networks(weights=weights, picks=picks)
        return replace(teacher, agents=agents)

    def _build_central(self, teacher: Teacher) -> CentralModel:
        """The server's model, on the graph of the last uploads where it needs one."""
        backbone = self.server_backbone
        graph = None
        if isinstance(backbone, LightGCN):
            graph = teacher.build_upload_graph(self.config.graph_above)
        return CentralModel(backbone, graph, self.config.server_decay)

    def _load_teacher(self, server: ServerState, clients: Keys) -> Teacher:
        """The teacher of the last round, with rows for clients that are new."""
        saved = server.parts[self.name]
        state = drop_walk(saved)
        teacher = Teacher.from_arrays(state)
        draws = self.context.draws
        return teacher.with_clients(self.server_backbone, draws, clients)

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.clients is None:
            return PartBroadcast()
        if audience.occasion == "serving":
            scores = self._compute_served_scores(server, audience.clients, audience.items)
            return PartBroadcast(per_client=scores)
        server, lists = self.select_items_to_send(server, audience.clients)
        return PartBroadcast(per_client=lists, server=server)

    def select_items_to_send(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """What every client of the round is sent; an agent's walk is kept until the round is over."""
        config = self.config
        teacher = self._load_teacher(server, clients)
        arrays = teacher.to_arrays()
        updated = server.with_part(self.name, arrays)
        if config.select == "none" or teacher.recent.n_uploads == 0:
            return updated, make_empty_score_lists(len(clients))
        central = self._build_central(teacher)
        users = teacher.find_rows(clients)
        last = teacher.last.take(users)
        draws = self._make_public_draws(server, clients)

        def score_users(some: Any) -> Floats:
            return central.score_catalogue(teacher.model, some)

        if config.select == "confident":
            counts = teacher.ever.counts
            picked = select_ptf_items(counts, last, users, score_users, config.most)
            return updated, picked
        history = teacher.ever
        if config.history == "last":
            history = teacher.recent
        candidates = find_unsent_candidates(history, last, users, score_users, config.most)
        if config.select != "agent":
            scheduled = select_fixed_number(candidates, config.scheduled, config.select, draws)
            return updated, scheduled
        user_vectors, item_vectors = central.compute_vectors(teacher.model)
        agent = select_network(teacher.agents, "picks")
        options = config.selection_options
        vectors = user_vectors[users]
        walk = decide_on_candidates(agent, candidates, vectors, item_vectors, options, draws)
        saved_walk = encode_walk(walk, clients)
        state = {**teacher.to_arrays(), **saved_walk}
        updated = server.with_part(self.name, state)
        return updated, walk.list_picks()

    def _make_public_draws(self, server: ServerState, clients: Keys) -> RoundDraws:
        """The server's own draws of a round."""
        draws = self.context.draws
        return RoundDraws(draws, clients, server.block, server.round, public=True)

    def _compute_served_scores(self, server: ServerState, clients: Keys, items: Ragged | None) -> Ragged | None:
        """The server's logits of the whole catalogue, or of some items, for each client."""
        if self.config.answers == "client":
            return None
        teacher = self._load_teacher(server, clients)
        central = self._build_central(teacher)
        users = teacher.find_rows(clients)
        if items is not None:
            user = users[items.rows()]
            scores = central.score_pairs(teacher.model, user, items.ids)
            return Ragged(items.ptr, items.ids, {"score": scores})
        n_items = len(server.items)
        scores = central.score_catalogue(teacher.model, users)
        n_clients = len(clients)
        starts = np.arange(n_clients + 1, dtype=np.int64)
        ptr = starts * n_items
        catalogue = np.arange(n_items, dtype=np.int32)
        ids = np.tile(catalogue, len(clients))
        flat_scores = scores.reshape(-1)
        return Ragged(ptr, ids, {"score": flat_scores})

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Steps 5 to 9 of a round: weigh, distil, let the agents learn, remember the uploads."""
        if SCORES not in total.each:
            return server
        field = total.each[SCORES]
        clients, uploads = sort_by_sender(field)
        teacher = self._load_teacher(server, clients)
        users = teacher.find_rows(clients)
        states, weights = self._weigh_uploads(teacher, users, uploads)
        teacher = teacher.with_uploads(users, uploads)
        central = self._build_central(teacher)
        samples = build_upload_samples(users, uploads, weights)
        model = self._distil_uploads(central, teacher, samples, server)
        teacher = replace(teacher, model=model)
        logits = central.score_pairs(model, samples.user, samples.item)
        agents = {name: select_network(teacher.agents, name) for name in ("weights", "picks")}
        if states is not None:
            kind = self.config.agent_loss
            losses = compute_mean_losses(uploads, logits, kind)
            options = self.config.weighting_options
            old_agent = agents["weights"]
            agents["weights"] = update_weighting_network(old_agent, states, losses, options)
        notes = {}
        state = server.parts[self.name]
        if has_walk(state):
            walk, walkers = decode_walk_with_clients(state)
            _, item_vectors = central.compute_vectors(model)
            outcome = SelectionOutcome(*align_uploads_with_walk(uploads, clients, logits, walkers), item_vectors)
            agents["picks"] = self._update_selection(
                agents["picks"], walk, outcome, self._make_public_draws(server, walkers)
            )
            n_picked = walk.action.sum()
            n_walkers = max(1, len(walkers))
            notes["picked"] = float(n_picked / n_walkers)
        losses = compute_cross_entropy(logits, samples.label)
        notes["server_loss"] = float(losses.mean())
        notes["weight_concentration"] = measure_concentration(weights)
        bundle = bundle_networks(**agents)
        teacher = replace(teacher, agents=bundle, notes=notes)
        return server.with_part(self.name, teacher.to_arrays())

    def _weigh_uploads(self, teacher: Teacher, users: Ints, uploads: Ragged) -> tuple[Doubles | None, Doubles]:
        """What the weighting agent saw, and a weight for each client."""
        if not self.config.weighting:
            equal = 1.0 / max(1, len(uploads))
            n_clients = len(uploads)
            return None, np.full(n_clients, equal)
        central = self._build_central(teacher)
        user = users[uploads.rows()]
        logits = central.score_pairs(teacher.model, user, uploads.ids)
        options = self.config.weighting_options
        states = compute_client_states(uploads, logits, options)
        agent = select_network(teacher.agents, "weights")
        return states, compute_client_weights(agent, states, options.cap)

    def _distil_uploads(
        self, central: CentralModel, teacher: Teacher, samples: TrainingSamples, server: ServerState
    ) -> CentralState:
        """The server's model after it learned a round's uploads."""
        config = self.config
        orders = []
        for epoch in range(config.server_epochs):
            draws = self.context.draws
            order = draws.public("server-order", server.block, server.round, epoch)
            orders.append(order)
        batch = config.server_batch
        return central.train_epochs(teacher.model, samples, batch, orders, config.server_loss)

    def _update_selection(
        self, agent: Arrays, walk: CandidateWalk, outcome: SelectionOutcome, draws: RoundDraws
    ) -> Arrays:
        """The agent that picks items, after it saw what came of its picks."""
        options = self.config.selection_options
        reward = compute_walk_rewards(walk, outcome, options, draws)
        return update_selection_networks(agent, walk, reward, options)

    def metrics(self, server: ServerState) -> dict[str, float]:
        if self.name not in server.parts:
            return {}
        saved = server.parts[self.name]
        state = drop_walk(saved)
        teacher = Teacher.from_arrays(state)
        return teacher.notes
