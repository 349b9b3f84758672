"""Part: what a method adds to the federated round. A run is a backbone and a list of parts; FedAvg is none.

A part overrides only the hooks it needs. Device hooks see a `CohortView` (what those clients may see) and return
what to keep; server hooks see `ServerState`, `Upload` and `Total` only. State is never kept on the part object: it
lives in `view.parts[name]` and `view.lists[name]` (one row or list per user) and in `server.parts[name]`, so it is
snapshotted, restored with the best round and saved for resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from tacita.core.config import RunConfig, TrainConfig, validated
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError, unknown_name
from tacita.core.types import (
    AnyArray,
    Arrays,
    CohortView,
    Doubles,
    Extra,
    Floats,
    Held,
    Ints,
    Keys,
    Local,
    Longs,
    Pull,
    Ragged,
    Request,
    ServerState,
)
from tacita.fields import Answer, Form, Spec, Total, Upload
from tacita.models import backbone_class
from tacita.models.base import Backbone

Purpose = Literal["valid", "test", "serve"]

SERVER = "server"

Ask = Callable[[ServerState, str, Keys | None], Total]
"""One exchange between rounds: the total of what some clients (None: everybody) answer to a part's own question."""

Play = Callable[[ServerState, Keys | None], ServerState]
"""One federated round more, with some clients or with those whom it would choose by itself."""


@dataclass(frozen=True)
class World:
    """What every part may know of the run."""

    backbone: Backbone
    draws: Draws
    train: TrainConfig


class PartConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Part:
    """One composable piece of a method. The defaults do nothing."""

    name: ClassVar[str]
    Config: ClassVar[type[PartConfig]] = PartConfig
    learner: ClassVar[str | None] = None
    """The learner that the part brings along; at most one part of a run does."""

    works_with: ClassVar[tuple[str, ...]] = ("rows",)
    """The learners whose rounds it can change."""

    party: ClassVar[str] = SERVER
    """Who plays its server side. What another party than the server holds and is sent no other party's hooks see."""

    most_weight: ClassVar[float] = 1.0
    """The largest factor that `weight` may give a client."""

    every_release: ClassVar[bool] = False
    """`encode`, `encode_sum` and `decode` also concern answers to other parts' questions: a budget, a clip."""

    lasting: ClassVar[tuple[str, ...]] = ()
    """What it keeps on devices that going back to an earlier round does not undo, such as what was spent."""

    broadcast_once: ClassVar[bool] = False
    """What `broadcast` sends stays the same during a block, so it travels in the first round only."""

    reads_logits: ClassVar[bool] = False
    """Scores users by itself, from private vectors and item rows alone, and reads the scores as logits."""

    def __init__(self, config: PartConfig, world: World) -> None:
        self.config = config
        self.world = world

    def sends_whole_table(self, block: int) -> bool:
        """Every client sends its whole table in this block, not only the rows it touched."""
        return False

    def check(self, n_items: int) -> None:
        """Refuse settings that cannot work on this catalogue, before anything is trained."""

    # on the device; what a hook returns to keep is an array (`view.parts`) or a list (`view.lists`) per user

    def device_arrays(self, n_users: int) -> Held:
        """What the part keeps per user, as it is before the user's first block; a list is empty then."""
        return {}

    def begin_block(self, view: CohortView) -> Held:
        """Called for everybody who has data in the new block, with what the first broadcast carried."""
        return {}

    def begin_round(self, view: CohortView) -> Held:
        """What to keep before local training; `view` holds the model as it was broadcast."""
        return {}

    def local_data(self, view: CohortView) -> CohortView:
        """What a round learns from: `train`, `exclude` (never drawn as negatives) and `history` may differ."""
        return view

    def negatives(self, view: CohortView, counts: Longs) -> Ints | None:
        """counts[u] items for every user, flat in user order, to learn as not liked; None: drawn uniformly.

        At most one part of a run chooses them. Where they are redrawn in every epoch, all epochs are asked for at once.
        """
        return None

    def samples(self, view: CohortView, own: Ragged) -> Ragged | None:
        """Items per user with a "label" in [0, 1] each, which join the user's `own` samples for the round."""
        return None

    def at_hand(self, view: CohortView) -> Ragged | None:
        """Items per user whose rows the part will use in `extra_samples`."""
        return None

    def extra_samples(self, view: CohortView, local: Local, step: int, phase: int) -> Extra | None:
        """Samples to add to the loss of this step and phase, given the local models as they stand.

        May leave numbers per client in `local.notes` for the lab's log; they never travel.
        """
        return None

    def pull(self, view: CohortView) -> Pull | None:
        return None

    def after_training(self, view: CohortView, local: Local) -> Held:
        return {}

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        """What `extras` may send, to the part's own `party`."""
        return ()

    def extras(self, view: CohortView, local: Local) -> Mapping[str, AnyArray | Form]:
        """Small named values that travel with the upload: an array with a row per client, or rows of some of them."""
        return {}

    def weight(self, view: CohortView, upload: Upload) -> Doubles | None:
        """A factor per client on its upload, which travels with it: the device sends [s, s * value]."""
        return None

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """What happens to an upload before it leaves the device, and what the device remembers of that.

        Called in the order of the parts, for every learner; a client of weight 0 sends nothing.
        """
        return upload, {}

    def field_sent(self, field: Spec) -> Spec:
        """A field as it leaves the device after `encode`: noise, for one, makes its bounds wider."""
        return field

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        """The lab's shortcut for noise: what encoding every upload would have done to the sum, in distribution."""
        return total

    def end_block(self, view: CohortView) -> Held:
        """Called for everybody who trained in the block, with the best round's table and parameters."""
        return {}

    def answer(self, view: CohortView, question: str) -> Answer:
        """What devices answer when the part itself asks, in `handle`: a question `NAME/...`."""
        raise TacitaError(f"part '{self.name}' has no question '{question[:100]}'.")

    def handle_here(self, view: CohortView, request: Request) -> Held:
        """What a device keeps when its own person asks for something, before the server hears of it."""
        return {}

    def answers(self, view: CohortView) -> Floats | None:
        """Scores (users, items) where another model than the run's own answers; `view.own` holds what was sent."""
        return None

    def answers_some(self, view: CohortView, only: Ragged) -> Floats | None:
        """The same for some items of each user, flat in the order of `only`; None: the whole catalogue is needed."""
        return None

    def predict(self, view: CohortView, scores: Floats, purpose: Purpose) -> Floats:
        """Correct the (users, items) scores a device is about to rank."""
        return scores

    # on the server

    def server_begin_block(self, server: ServerState) -> Arrays:
        return server.parts.get(self.name, {})

    def broadcast(self, server: ServerState) -> Arrays:
        """What travels down to everybody besides the item table and the shared parameters."""
        return {}

    def own(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """What each client of the round alone gets, one list each, once a round; may change what the server keeps."""
        return server, Ragged.empty(len(clients))

    def own_to_serve(self, server: ServerState, clients: Keys, only: Ragged | None = None) -> Ragged | None:
        """What each of some clients alone gets to be validated, tested or served with.

        `only`: the items of each that are going to be asked for; given where the part overrides `answers_some`.
        """
        return None

    def opened(self, sent: Ragged, n_items: int) -> Ragged:
        """Lists of their own as devices read them, such as with items in place of numbers that stand for them."""
        return sent

    def own_fits(self, sent: Ragged, n_items: int) -> bool:
        """Whether a list of one's own that came from elsewhere is safe to compute with; its items are in order."""
        return all(column.dtype == np.float32 and column.ndim == 1 for column in sent.values.values())

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        """What may be in an answer to a question of its own."""
        return ()

    def handle(
        self, server: ServerState, request: Request, ask: Ask, play: Play
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """What the server makes of a person's request between two rounds, and what its certificate says of that.

        `ask(server, "NAME/...", clients)` asks devices a question of the part's own, `play(server, clients)` is one
        more round. None: the request does not concern the part.
        """
        return None

    def received_fits(self, sent: Arrays, n_items: int) -> bool:
        """Whether what came as a broadcast from elsewhere is safe to compute with: item tables and shared parameters.

        A part that broadcasts something else says here what that is.
        """
        backbone = self.world.backbone
        heads = backbone.init_heads(self.world.draws)

        def fits(name: str, array: AnyArray) -> bool:
            last = name.rpartition(".")[2]
            if last == "table":
                whole = array.ndim == 2 and array.shape[1] == backbone.item_width
                return whole and len(array) <= n_items and array.dtype == np.float32
            return last in heads and heads[last].shape == array.shape and array.dtype == np.float32

        return all(fits(name, array) for name, array in sent.items())

    def decode(self, server: ServerState, total: Total) -> Total:
        return total

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Change the aggregated state; `before` is what the round started from."""
        return server

    def server_notes(self, server: ServerState) -> dict[str, float]:
        """Numbers for the log after a round."""
        return {}

    def server_end_block(self, server: ServerState) -> Arrays:
        return server.parts.get(self.name, {})


_PARTS: dict[str, type[Part]] = {}
_PRESETS: dict[str, list[dict[str, Any]]] = {"fedavg": []}
_SETTINGS: dict[str, dict[str, Any]] = {}


def register(cls: type[Part]) -> type[Part]:
    _PARTS[cls.name] = cls
    return cls


def preset(name: str, *parts: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
    """Give a list of parts a name for `--method`; its paper's `settings` hold wherever nobody says otherwise."""
    _PRESETS[name] = list(parts)
    if settings:
        _SETTINGS[name] = settings


def configured(values: dict[str, Any], where: str) -> RunConfig:
    """The settings of a run: what is said, then what its method and its model bring along, then the defaults."""
    method = values.get("method")
    brought = _SETTINGS.get(method, {}) if isinstance(method, str) else {}
    named, own = values.get("backbone"), brought.get("backbone")
    if own and isinstance(named, dict) and named.get("name", own["name"]) != own["name"]:
        brought = {k: v for k, v in brought.items() if k != "backbone"}  # options of another model do not fit
    said = _beneath(values, brought)
    model = said.get("backbone")
    name = model.get("name") if isinstance(model, dict) else None
    return validated(RunConfig, _beneath(said, backbone_class(name).brings) if isinstance(name, str) else said, where)


def _beneath(said: dict[str, Any], brought: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with what is not said filled in."""
    out = {**brought, **said}
    for name, value in brought.items():
        if isinstance(value, dict) and isinstance(said.get(name), dict):
            out[name] = _beneath(said[name], value)
    return out


def part_names() -> list[str]:
    return sorted(_PARTS)


def preset_names() -> list[str]:
    return sorted(_PRESETS)


def part_class(name: str) -> type[Part]:
    if name not in _PARTS:
        raise unknown_name("part", name, _PARTS)
    return _PARTS[name]


def preset_parts(name: str) -> list[dict[str, Any]]:
    if name not in _PRESETS:
        raise unknown_name("method", name, _PRESETS)
    return [dict(one) for one in _PRESETS[name]]


def label_of(method: str, parts: list[dict[str, Any]] | None) -> str:
    """What a run is called: its preset, or its parts where they are others than the preset's."""
    names = [str(part.get("name")) for part in parts or []]
    if parts is None or names == [part["name"] for part in _PRESETS.get(method, [])]:
        return method
    return " + ".join(names) or "no parts"


def effective_parts(method: str, changes: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The preset's parts with options changed by name, then the parts that only `changes` names."""
    specs = preset_parts(method)
    for change in changes or []:
        same = [spec for spec in specs if spec["name"] == change.get("name")]
        if same and sum(c.get("name") == change.get("name") for c in changes or []) == 1:
            same[0].update(change)
        else:
            specs.append(dict(change))
    return specs


def build_parts(specs: list[dict[str, Any]], world: World) -> tuple[Part, ...]:
    """Parts from `{"name": ..., options}` tables, checked for clashes."""
    parts: list[Part] = []
    for spec in specs:
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise TacitaError("every entry of 'parts' needs a 'name'.")
        cls = part_class(name)
        if any(p.name == name for p in parts):
            raise TacitaError(f"part '{name}' is listed twice; merge its options into one entry.")
        if cls.reads_logits and world.backbone.reads_context:
            raise TacitaError(
                f"part '{name}' scores with private vectors alone, and backbone '{world.backbone.name}' reads the "
                "user's own items as well; use another backbone with it."
            )
        parts.append(cls(validated(cls.Config, options, f"part '{name}'"), world))
    return tuple(parts)


def owner_of(parts: Sequence[Part], hook: str) -> Part | None:
    """The one part that decides something only one may decide."""
    owners = [part for part in parts if overrides(part, hook)]
    if len(owners) > 1:
        raise TacitaError(
            f"parts '{owners[0].name}' and '{owners[1].name}' both decide {_DECIDES[hook]}; leave one of them out."
        )
    return owners[0] if owners else None


_DECIDES = {"local_data": "what is learned from", "answers": "which model answers"}


def overrides(part: Part, hook: str) -> bool:
    """Whether the part changes a hook, so that costly preparations can be skipped where nobody asks."""
    return getattr(type(part), hook) is not getattr(Part, hook)
