"""LIPM's weights: clients count by how close their interests are to everybody's (spec E.4, E.8).

A client's interest is the mean over its people of what the model says of each: the interest model's state, of other
models the mean row of what a person has. It is worked out under the model as it was received, so that interests of one
round can be compared. The device sends [s, s * change] with s = exp(kappa cos(u_i, u_bar) - kappa), and u_bar is the
mean of the round before, so that a sum is all the server needs. With `train.aggregation = "weighted"` a client also
counts by its data, and kappa = 0 is FedAvg; the paper's own g, without the data, is `"mean"`.

What travels of an interest is a short vector of its direction, a field of the upload like the others: it is summed with
them, and clipped, noised or masked wherever they are. Without any of these whoever sees one upload sees it, as it sees
the change. No epsilon belongs to it by itself.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, LocalModels, ServerState
from tacita.kernels.hashing import draw_normals
from tacita.messages import DenseArrays, Form, Spec, Total, Upload
from tacita.methods.personal.gates import collect_model_arrays, compute_gate_factors, measure_agreement
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_samples
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.task import TrainingOutcome

_MOST_G = 10.0  # of a learned g, either way
_MOST_LOSS = 10.0
_MOST_GRADIENT = 1e4
_HIDDEN = 8
_HIDDEN_KEYS = np.arange(_HIDDEN, dtype=np.uint64)


class InterestWeightsConfig(PartConfig):
    kappa: float = Field(1.0, ge=0, le=20, description="how much the cosine of an interest with everybody's counts")
    centred: bool = Field(
        False,
        description="take from every interest, before the cosine, what a history of average items would give: what "
        "all interests share because of the model",
    )
    weights: Literal["cosine", "learned"] = Field(
        "cosine", description="learned: g = w . tanh(W u_i), by one step of the server a round on the clients' losses"
    )
    fusion: Literal["identity", "gate"] = Field(
        "identity", description="gate: a client's change of each array is scaled by 2 sigmoid(w . u_i); w begins at 0"
    )
    length: float = Field(0.1, gt=0, le=1, description="length of the vector that is sent: so much of a clip it takes")
    rate: float = Field(0.1, gt=0, description="learning rate of learned weights and of gates")


@register
class InterestWeights(Part):
    name = "interest"
    Config: ClassVar[type[PartConfig]] = InterestWeightsConfig
    config: InterestWeightsConfig

    @property
    def width(self) -> int:
        """The length of an interest vector."""
        return self.context.scorer.interest_width

    @property
    def gated_arrays(self) -> list[str]:
        """The arrays that have a gate of their own, by their names in an upload."""
        heads = [f"heads/{name}" for name in self.context.backbone.list_head_shapes()]
        return ["rows", *heads]

    # on the device

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        extra = self._specify_extra_fields()
        common = self._specify_broadcast(n_items)
        return PartFields(extra=extra, common=common, requires_all=True)

    def _specify_extra_fields(self) -> tuple[Spec, ...]:
        width = self.width
        n_gates = len(self.gated_arrays)
        specs = [Spec("vector", (width,), most=self.config.length, about="the direction of a client's interests")]
        if self.config.weights == "learned":
            specs.append(Spec("loss", (1,), most=_MOST_LOSS, least=0.0, about="how well the model fits"))
            specs.append(Spec("out", (_HIDDEN,), most=2 * _MOST_LOSS))
            specs.append(Spec("hidden", (_HIDDEN, width), most=_MOST_GRADIENT))
        if self.config.fusion == "gate":
            specs.append(Spec("agrees", (n_gates,), most=1.0, about="whether changes agree"))
            specs.append(Spec("gates", (n_gates, width), most=2.0))
        return tuple(specs)

    def _specify_broadcast(self, n_items: int) -> dict[str, ArraySpec]:
        backbone = self.context.scorer
        n_gates = len(self.gated_arrays)
        shapes: dict[str, tuple[int, ...]] = {"centre": (self.width,)}
        if self.config.weights == "learned":
            shapes["hidden"] = (_HIDDEN, self.width)
            shapes["out"] = (_HIDDEN,)
            shapes["loss"] = (1,)
        if self.config.fusion == "gate":
            shapes["gates"] = (n_gates, self.width)
            shapes["agreed"] = (n_gates,)
            shapes["moved.rows"] = (n_items, backbone.item_width)
            for name, shape in backbone.list_head_shapes().items():
                shapes[f"moved.heads/{name}"] = shape
        return {name: ArraySpec(shape) for name, shape in shapes.items()}

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        received = view.received.get(self.name, {})
        of_users = self.context.scorer.compute_interest(view)
        interest = average_by_client(view, of_users)
        if self.config.centred:
            interest = interest - self.context.scorer.compute_common_interest(view)
        direction = normalise_vectors(interest)
        scaled = self.config.length * direction
        vector = scaled.astype(np.float32)
        extras: dict[str, AnyArray | Form] = {"vector": vector}
        local.notes["weight_ratio"] = _compare_weights(self._weigh_directions(direction, received))
        if self.config.weights == "learned":
            extras |= self._compute_weight_gradients(view, local, direction, received)
        if self.config.fusion == "gate":
            agreement = measure_agreement(view, local, received, self.gated_arrays)
            extras["agrees"] = agreement
            mean_agreement = received["agreed"]
            extras["gates"] = _compute_gate_gradient(agreement, mean_agreement, direction)
        return TrainingOutcome(extras=extras)

    def _compute_weight_gradients(
        self, view: CohortView, local: LocalModels, direction: Doubles, received: Arrays
    ) -> Arrays:
        """Of what a client's g adds to everybody's mean loss, as long as that of the round before stands for it."""
        loss = compute_client_losses(self.context.scorer, view, local)
        loss = np.minimum(loss, _MOST_LOSS)
        hidden = _compute_hidden(direction, received)
        out_weights = received["out"].astype(np.float64)
        mean_loss = received["loss"][0]
        difference = (loss - mean_loss) * (mean_loss > 0)
        column = difference[:, None]
        activation_slope = 1 - hidden**2
        slope = column * out_weights * activation_slope
        column_slope = slope[:, :, None]
        gradient = column_slope * direction[:, None]
        return {
            "loss": loss[:, None].astype(np.float32),
            "out": (column * hidden).astype(np.float32),
            "hidden": np.clip(gradient, -_MOST_GRADIENT, _MOST_GRADIENT).astype(np.float32),
        }

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        received = view.received.get(self.name, {})
        return self._weigh_directions(self._read_direction(upload), received)

    def _weigh_directions(self, direction: Doubles, received: Arrays) -> Doubles:
        """exp(g) of each client, as it travels."""
        if self.config.weights == "learned":
            out_weights = received["out"].astype(np.float64)
            g = _compute_hidden(direction, received) @ out_weights
            return compute_bounded_exp(g, _MOST_G)
        vector = received["centre"][None]
        centre = normalise_vectors(vector)[0]
        cosine = direction @ centre
        kappa = self.config.kappa
        return compute_bounded_exp(kappa * cosine, kappa)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Scale changes by their gates."""
        if self.config.fusion == "identity":
            return upload, {}
        gates = view.received[self.name]["gates"]
        factors = compute_gate_factors(self._read_direction(upload), gates)
        for gate, name in enumerate(self.gated_arrays):
            factor = factors[:, gate]
            scaled = upload.values[name].scale(factor)
            upload = upload.with_value(name, scaled)
        return upload, {}

    def _read_direction(self, upload: Upload) -> Doubles:
        """The direction of each client's interest, as it is in the upload."""
        vector = upload.values[f"{self.name}.vector"]
        assert isinstance(vector, DenseArrays)
        return normalise_vectors(vector.value.astype(np.float64))

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        """Interests, and what was learned of them, last; where everybody went does not fit another catalogue."""
        earlier = server.parts.get(self.name, {})
        state = self._make_initial_state()
        for name in state:
            if name in earlier:
                state[name] = earlier[name]
        if self.config.fusion == "gate":
            arrays = collect_model_arrays(server, self.gated_arrays)
            for name, value in arrays.items():
                state[f"moved.{name}"] = 0 * value
        return state

    def _make_initial_state(self) -> Arrays:
        """What the server keeps from block to block, before the first one."""
        no_interest = np.zeros(self.width, np.float32)
        state: Arrays = {"centre": no_interest}
        if self.config.weights == "learned":
            key = self.context.draws.public("interest-weights")
            start = draw_normals(key, _HIDDEN_KEYS, self.width)
            state["hidden"] = start.astype(np.float32)
            state["out"] = np.zeros(_HIDDEN, np.float32)
            state["loss"] = np.zeros(1, np.float32)
        if self.config.fusion == "gate":
            n_gates = len(self.gated_arrays)
            shape = (n_gates, self.width)
            state["gates"] = np.zeros(shape, np.float32)
            state["agreed"] = np.zeros(n_gates, np.float32)
        return state

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        return PartBroadcast(server.parts[self.name])

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if total.weight <= 0:
            return server
        means = {}
        for spec in self._specify_extra_fields():
            total_value = total[f"{self.name}.{spec.name}"]
            means[spec.name] = total_value / total.weight
        state = dict(server.parts[self.name])
        state["centre"] = means["vector"].astype(np.float32)
        if self.config.weights == "learned":
            state["loss"] = means["loss"].astype(np.float32)
            for name in ("out", "hidden"):
                step = self.config.rate * means[name]
                moved = state[name] - step
                state[name] = moved.astype(np.float32)
        if self.config.fusion == "gate":
            step = self.config.rate * means["gates"]
            gates = state["gates"] + step
            state["gates"] = gates.astype(np.float32)
            state["agreed"] = means["agrees"].astype(np.float32)
            old_arrays = collect_model_arrays(before, self.gated_arrays)
            new_arrays = collect_model_arrays(server, self.gated_arrays)
            for name, new_array in new_arrays.items():
                state[f"moved.{name}"] = new_array - old_arrays[name]
        return server.with_part(self.name, state)


def _compare_weights(weights: Doubles) -> Doubles:
    """The largest weight of a cohort over the smallest, once for each client: for the log."""
    if not len(weights):
        return weights
    return np.full(len(weights), weights.max() / weights.min())


def _compute_hidden(direction: Doubles, received: Arrays) -> Doubles:
    """The hidden layer of learned weights: tanh(W u_i)."""
    weights = received["hidden"].T.astype(np.float64)
    return np.asarray(np.tanh(direction @ weights))


def _compute_gate_gradient(agreement: Floats, mean_agreement: AnyArray, direction: Doubles) -> Floats:
    """Where each gate moves: towards interests whose changes agree more than the mean of the round before."""
    difference = 0 * agreement
    if mean_agreement.any():
        difference = agreement - mean_agreement
    column = difference[:, :, None]
    gradient = column * direction[:, None]
    return np.asarray(gradient, np.float32)


def compute_bounded_exp(g: Doubles, most: float) -> Doubles:
    """exp(g) as it travels, at most 1: a softmax over clients whatever g is, for all g between -most and most."""
    bounded = np.clip(g, -most, most)
    return np.asarray(np.exp(bounded - most))


def normalise_vectors(vectors: AnyArray) -> Doubles:
    """Rows of length 1; what has no length stays 0."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    normalised = vectors / np.maximum(length, 1e-8)
    normalised = np.where(length > 1e-8, normalised, 0.0)
    return np.asarray(normalised, np.float64)


def average_by_client(view: CohortView, of_users: Floats) -> Doubles:
    """The mean over each client's users."""
    width = of_users.shape[1]
    last_row = np.zeros((1, width))
    values = of_users.astype(np.float64)
    padded = np.append(values, last_row, 0)
    sums = np.add.reduceat(padded, view.user_ptr)[:-1]
    n_users = np.diff(view.user_ptr)[:, None]
    sums = np.where(n_users > 0, sums, 0.0)
    divisor = np.maximum(n_users, 1)
    return np.asarray(sums / divisor)


def compute_client_losses(backbone: Scorer, view: CohortView, local: LocalModels) -> Doubles:
    """The mean cross-entropy of a client's samples under the model as it was received."""
    scores = score_samples(backbone, view, local.owner, local.item)
    logits = scores.astype(np.float64)
    label = np.clip(local.label, 0, 1)
    positive_losses = np.logaddexp(0, logits)
    losses = positive_losses - label * logits
    n_samples = np.diff(local.ptr)
    clients = np.arange(view.n_clients)
    client = np.repeat(clients, n_samples)
    sums = np.bincount(client, weights=losses, minlength=view.n_clients)
    divisor = np.maximum(n_samples, 1)
    return np.asarray(sums / divisor)
