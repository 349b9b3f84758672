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
from tacita.kernels.hashing import normals
from tacita.messages import DenseArrays, Form, Spec, Total, Upload
from tacita.methods.personal.gates import gate_factors, measure_agreement, model_arrays
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_samples
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.task import TrainingOutcome

_MOST_G = 10.0  # of a learned g, either way
_MOST_LOSS = 10.0
_HIDDEN = 8
_HIDDEN_KEYS = np.arange(_HIDDEN, dtype=np.uint64)


class InterestWeightsConfig(PartConfig):
    kappa: float = Field(1.0, ge=0, le=20, description="how much the cosine of an interest with everybody's counts")
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
        return self.context.scorer.interest_width

    @property
    def tensors(self) -> list[str]:
        """The arrays that have a gate of their own, by their names in an upload."""
        return ["rows", *(f"heads/{name}" for name in self.context.backbone.shared())]

    # on the device

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(extra=self._extra_fields(), common=self._broadcast_specs(n_items), requires_all=True)

    def _extra_fields(self) -> tuple[Spec, ...]:
        width = self.width
        n_tensors = len(self.tensors)
        specs = [Spec("vector", (width,), most=self.config.length, about="the direction of a client's interests")]
        if self.config.weights == "learned":
            specs.append(Spec("loss", (1,), most=_MOST_LOSS, least=0.0, about="how well the model fits"))
            specs.append(Spec("out", (_HIDDEN,), most=2 * _MOST_LOSS))
            specs.append(Spec("hidden", (_HIDDEN, width), most=1e4))
        if self.config.fusion == "gate":
            specs.append(Spec("agrees", (n_tensors,), most=1.0, about="whether changes agree"))
            specs.append(Spec("gates", (n_tensors, width), most=2.0))
        return tuple(specs)

    def _broadcast_specs(self, n_items: int) -> dict[str, ArraySpec]:
        backbone = self.context.scorer
        n_tensors = len(self.tensors)
        shapes: dict[str, tuple[int, ...]] = {"centre": (self.width,)}
        if self.config.weights == "learned":
            shapes |= {"hidden": (_HIDDEN, self.width), "out": (_HIDDEN,), "loss": (1,)}
        if self.config.fusion == "gate":
            shapes |= {"gates": (n_tensors, self.width), "agreed": (n_tensors,)}
            shapes["moved.rows"] = (n_items, backbone.item_width)
            for name, shape in backbone.shared().items():
                shapes[f"moved.heads/{name}"] = shape
        return {name: ArraySpec(shape) for name, shape in shapes.items()}

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        received = view.received.get(self.name, {})
        interest = client_mean(view, self.context.scorer.interest(view))
        u = normalise_vectors(interest)
        extras: dict[str, AnyArray | Form] = {"vector": (self.config.length * u).astype(np.float32)}
        if self.config.weights == "learned":
            extras |= self._weight_gradients(view, local, u, received)
        if self.config.fusion == "gate":
            agrees = measure_agreement(view, local, received, self.tensors)
            apart = agrees - received["agreed"] if received["agreed"].any() else 0 * agrees
            extras["agrees"] = agrees
            extras["gates"] = (apart[:, :, None] * u[:, None]).astype(np.float32)
        return TrainingOutcome(extras=extras)

    def _weight_gradients(self, view: CohortView, local: LocalModels, u: Doubles, received: Arrays) -> Arrays:
        """Of what a client's g adds to everybody's mean loss, as long as that of the round before stands for it."""
        loss = np.minimum(client_loss(self.context.scorer, view, local), _MOST_LOSS)
        out, hidden = np.tanh(u @ received["hidden"].T.astype(np.float64)), received["out"].astype(np.float64)
        apart = (loss - received["loss"][0]) * (received["loss"][0] > 0)
        below = (apart[:, None] * hidden * (1 - out**2))[:, :, None] * u[:, None]
        made = {"loss": loss[:, None], "out": apart[:, None] * out, "hidden": np.clip(below, -1e4, 1e4)}
        return {name: value.astype(np.float32) for name, value in made.items()}

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        sent = upload.values[f"{self.name}.vector"]
        assert isinstance(sent, DenseArrays)
        received, u = view.received.get(self.name, {}), normalise_vectors(sent.value.astype(np.float64))
        if self.config.weights == "learned":
            g = np.tanh(u @ received["hidden"].T.astype(np.float64)) @ received["out"].astype(np.float64)
            return bounded_exp(g, _MOST_G)
        return bounded_exp(self.config.kappa * (u @ normalise_vectors(received["centre"][None])[0]), self.config.kappa)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Changes as the gates let them through."""
        if self.config.fusion == "identity":
            return upload, {}
        sent = upload.values[f"{self.name}.vector"]
        assert isinstance(sent, DenseArrays)
        factor = gate_factors(normalise_vectors(sent.value.astype(np.float64)), view.received[self.name]["gates"])
        for k, name in enumerate(self.tensors):
            upload = upload.with_value(name, upload.values[name].scale(factor[:, k]))
        return upload, {}

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        """Interests, and what was learned of them, last; where everybody went does not fit another catalogue."""
        held = server.parts.get(self.name, {})
        made: Arrays = {"centre": np.zeros(self.width, np.float32)}
        if self.config.weights == "learned":
            start = normals(self.context.draws.public("interest-weights"), _HIDDEN_KEYS, self.width)
            made |= {"hidden": start.astype(np.float32), "out": np.zeros(_HIDDEN, np.float32)}
            made["loss"] = np.zeros(1, np.float32)
        if self.config.fusion == "gate":
            made["gates"] = np.zeros((len(self.tensors), self.width), np.float32)
            made["agreed"] = np.zeros(len(self.tensors), np.float32)
        made |= {name: held[name] for name in made if name in held}
        if self.config.fusion == "gate":
            made |= {f"moved.{name}": 0 * value for name, value in model_arrays(server, self.tensors).items()}
        return made

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        return PartBroadcast(server.parts[self.name])

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if total.weight <= 0:
            return server
        told = {name: total[f"{self.name}.{name}"] / total.weight for name in self._sent_fields()}
        held = dict(server.parts[self.name])
        held["centre"] = told["vector"].astype(np.float32)
        if self.config.weights == "learned":
            held["loss"] = told["loss"].astype(np.float32)
            for name in ("out", "hidden"):
                held[name] = (held[name] - self.config.rate * told[name]).astype(np.float32)
        if self.config.fusion == "gate":
            held["agreed"] = told["agrees"].astype(np.float32)
            held["gates"] = (held["gates"] + self.config.rate * told["gates"]).astype(np.float32)
            was = model_arrays(before, self.tensors)
            held |= {f"moved.{k}": v - was[k] for k, v in model_arrays(server, self.tensors).items()}
        return server.with_part(self.name, held)

    def _sent_fields(self) -> list[str]:
        return [spec.name for spec in self._extra_fields()]


def bounded_exp(g: Doubles, most: float) -> Doubles:
    """exp(g) as it travels, at most 1: a softmax over clients whatever g is, for all g between -most and most."""
    return np.asarray(np.exp(np.clip(g, -most, most) - most))


def normalise_vectors(vectors: AnyArray) -> Doubles:
    """Rows of length 1; what has no length stays 0."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(np.where(length > 1e-8, vectors / np.maximum(length, 1e-8), 0.0), np.float64)


def client_mean(view: CohortView, of_users: Floats) -> Doubles:
    """The mean over each client's people."""
    total = np.add.reduceat(np.append(of_users.astype(np.float64), np.zeros((1, of_users.shape[1])), 0), view.user_ptr)
    people = np.diff(view.user_ptr)
    return np.asarray(np.where(people[:, None] > 0, total[:-1], 0.0) / np.maximum(people, 1)[:, None])


def client_loss(backbone: Scorer, view: CohortView, local: LocalModels) -> Doubles:
    """The mean cross-entropy of a client's samples under the model as it was received."""
    logits = score_samples(backbone, view, local.owner, local.item).astype(np.float64)
    label = np.clip(local.label, 0, 1)
    each = np.logaddexp(0, logits) - label * logits
    client = np.repeat(np.arange(view.n_clients), np.diff(local.ptr))
    sums = np.bincount(client, weights=each, minlength=view.n_clients)
    return np.asarray(sums / np.maximum(np.diff(local.ptr), 1))
