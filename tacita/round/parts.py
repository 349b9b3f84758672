"""Part: what a method adds to the federated round. A run is a backbone and a list of parts; FedAvg is none.

A part overrides only the hooks it needs. Device hooks see a `CohortView` (what those clients may see) and return
what to keep; server hooks see `ServerState`, `Upload` and `Total` only. State is never kept on the part object: it
lives in `view.parts[name]` and `view.lists[name]` (one row or list per user) and in `server.parts[name]`, so it is
snapshotted, restored with the best round and saved for resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import (
    AnyArray,
    Arrays,
    CohortView,
    Doubles,
    ExtraSamples,
    Floats,
    Ints,
    Keys,
    LocalModels,
    Longs,
    NormPenalty,
    ProximalTerm,
    Ragged,
    RoundReplay,
    ServerState,
    StateUpdate,
)
from tacita.messages import CohortReply, Form, Spec, Total, Upload
from tacita.models.base import Backbone
from tacita.privacy.ledger import Ledger
from tacita.round.request import Request, RequestBatch

Purpose = Literal["valid", "test", "serve"]

SERVER = "server"

DeviceQuery = Callable[[ServerState, str, Keys | None], Total]
"""One exchange between rounds: the total of what some clients (None: everybody) answer to a part's own question."""


class RoundPlayer(Protocol):
    """Rounds that a request takes."""

    def __call__(self, server: ServerState, chosen: Keys | None, replay: RoundReplay | None = None) -> ServerState:
        """One federated round more, with some clients or with those whom it would choose by itself.

        `again`: it is an earlier round once more, with that one's draws and perhaps fewer local steps.
        """
        ...

    def require_rounds(self, rounds: int) -> None:
        """Refuse what takes more rounds than requests may still have in this block, before anything has changed."""
        ...

    def restart_block(self, server: ServerState, block: int) -> ServerState:
        """A block anew, as after the given state; block 0: from nothing. What lasts on devices stays. Lab only."""
        ...

    def validate(self, server: ServerState) -> float | None:
        """The metric that picks rounds, on the validation items; None: nobody has any."""
        ...


@dataclass(frozen=True)
class RunContext:
    """What every part may know of the run."""

    backbone: Backbone
    draws: Draws
    train: TrainConfig
    part_specs: tuple[dict[str, Any], ...] = ()  # the run's parts, with the options that were said

    def part_options(self, name: str) -> dict[str, Any] | None:
        """What was said of a part of the run; None: it has no such part."""
        found = [one for one in self.part_specs if one.get("name") == name]
        return {k: v for k, v in found[0].items() if k != "name"} if found else None


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

    reads_items: ClassVar[bool] = False
    """Its `serving` reads what people have (`train`) to score with, whatever the backbone does."""

    takes_back: ClassVar[tuple[Literal["given", "local", "people"], ...]] = ("given", "local")
    """What its `handle` takes out of the model: what people shared, what their devices learned from.

    `people`: all that the device of somebody who leaves learned from, and no single item.
    """

    weighs_presence: ClassVar[bool] = False
    """Its `weight` is 1, or 0 for who has nothing to learn from: it tells how many take part, and no more."""

    plays_again: ClassVar[bool] = False
    """What people ask for is carried out by rounds that may have been played before, with the same draws."""

    only_notes: ClassVar[bool] = False
    """Its `encode` and `server_step` write rounds down and move no item row."""

    every_release: ClassVar[bool] = False
    """`encode`, `encode_sum` and `decode` also concern answers to other parts' questions: a budget, a clip."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """Learners that it cannot work with for a reason of its own: learner -> the reason, in words."""

    lasting: ClassVar[tuple[str, ...]] = ()
    """What it keeps on devices that going back to an earlier round does not undo, such as what was spent."""

    lasting_here: ClassVar[tuple[str, ...]] = ()
    """What it keeps on the server that beginning anew does not undo, such as what must never be proposed."""

    broadcast_once: ClassVar[bool] = False
    """What `broadcast` sends stays the same during a block, so it travels in the first round only."""

    reads_logits: ClassVar[bool] = False
    """Scores users by itself, from private vectors and item rows alone, and reads the scores as logits."""

    def __init__(self, config: PartConfig, context: RunContext) -> None:
        self.config = config
        self.context = context

    def sends_whole_table(self, block: int) -> bool:
        """Every client sends its whole table in this block, not only the rows it touched."""
        return False

    def check(self, n_items: int) -> None:
        """Refuse settings that cannot work on this catalogue, before anything is trained."""

    # on the device; what a hook returns to keep is an array (`view.parts`) or a list (`view.lists`) per user

    def device_arrays(self, n_users: int) -> StateUpdate:
        """What the part keeps per user, as it is before the user's first block; a list is empty then."""
        return {}

    def begin_block(self, view: CohortView) -> StateUpdate:
        """Called for everybody who has data in the new block, with what the first broadcast carried."""
        return {}

    def before_round(self, view: CohortView) -> StateUpdate:
        """Called for everybody who could take part, before it is known who does: what chance alone costs them.

        `view` holds no model.
        """
        return {}

    def begin_round(self, view: CohortView) -> StateUpdate:
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

    def labels(self, view: CohortView, own: Ragged) -> Floats | None:
        """What a user's `own` samples, positives first, are learned as instead of their "label"; flat in their order.

        At most one part of a run says so, and under train.objective = "squared" alone.
        """
        return None

    def samples(self, view: CohortView, own: Ragged) -> Ragged | None:
        """Items per user with a "label" in [0, 1] each, which join the user's `own` samples for the round."""
        return None

    def likes(self, view: CohortView) -> Ragged | None:
        """More items per user to learn as liked, with a "weight" each: it multiplies the loss of the pair or sample.

        They are never drawn as negatives, and the model does not read them as the user's own.
        """
        return None

    def at_hand(self, view: CohortView) -> Ragged | None:
        """Items per user whose rows the part will use in `extra_samples`."""
        return None

    def extra_samples(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples | None:
        """Samples to add to the loss of this step and phase, given the local models as they stand.

        May leave numbers per client in `local.notes` for the lab's log; they never travel.
        """
        return None

    def pull(self, view: CohortView) -> ProximalTerm | None:
        return None

    def bound(self, view: CohortView) -> NormPenalty | None:
        """What it costs a client, in its own loss, to move further than a length."""
        return None

    def after_training(self, view: CohortView, local: LocalModels) -> StateUpdate:
        return {}

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        """What `extras` may send, to the part's own `party`."""
        return ()

    def extras(self, view: CohortView, local: LocalModels) -> Mapping[str, AnyArray | Form]:
        """Small named values that travel with the upload: an array with a row per client, or rows of some of them."""
        return {}

    def weight(self, view: CohortView, upload: Upload) -> Doubles | None:
        """A factor per client on its upload, which travels with it: the device sends [s, s * value]."""
        return None

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
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

    def end_block(self, view: CohortView) -> StateUpdate:
        """Called for everybody who trained in the block, with the best round's table and parameters."""
        return {}

    def answer(self, view: CohortView, question: str) -> CohortReply:
        """What devices answer when the part itself asks, in `handle`: a question `NAME/...`."""
        raise TacitaError(f"part '{self.name}' has no question '{question[:100]}'.")

    def handle_here(self, view: CohortView, request: Request) -> StateUpdate:
        """What a device keeps when its own person asks for something, before the server hears of it."""
        return {}

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        """The same where many ask at once, each by its own device; a part overrides this or `handle_here`."""
        return {}

    def declare(self, view: CohortView, epsilon: Doubles) -> StateUpdate:
        """What devices keep when their own people have said how much they are willing to spend; it stays there.

        Called before anything is charged. What is spent stays spent, whether a budget grows or shrinks.
        """
        ledger = self.ledger()
        return {} if ledger is None else {"budget": ledger.with_budget(view.parts[self.name], epsilon)["budget"]}

    def server_knows(self, view: CohortView) -> Ragged | None:
        """Items of single people that the server knows to be theirs, though they share them not.

        Which items are to be forgotten leaves a device only of these, and of what is shared.
        """
        return None

    def encode_request(self, view: CohortView, requests: RequestBatch) -> tuple[RequestBatch, StateUpdate]:
        """What leaves the devices in place of what their people ask for, and what devices remember of that.

        Called in the order of the parts, after all of them did their own part of the request as it was made.
        """
        return requests, {}

    def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
        """In the lab: what everybody with data in a new block chooses, to be asked for before its first round."""
        return {}, None

    def enrols_after(self) -> int:
        """Rounds of a block before `enrol` is asked, where that waits for a table that has learned something."""
        return 0

    def serving(self, view: CohortView) -> CohortView:
        """What a device scores with: the items it reads (`train`), its private vector and the table may differ."""
        return view

    def answers(self, view: CohortView) -> Floats | None:
        """Scores (users, items) where another model than the run's own answers; `view.own` holds what was sent."""
        return None

    def answers_some(self, view: CohortView, only: Ragged) -> Floats | None:
        """The same for some items of each user, flat in the order of `only`; None: the whole catalogue is needed."""
        return None

    def predict_anew(self, view: CohortView, purpose: Purpose, only: Ragged | None = None) -> Floats | None:
        """Scores by a model that the device makes for its person when it is asked; None: the run's own model answers.

        (users, items), or of some items of each user alone, flat in the order of `only`.
        """
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
        self, server: ServerState, request: Request, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """What the server makes of a person's request between two rounds, and what its certificate says of that.

        `ask(server, "NAME/...", clients)` asks devices a question of the part's own, `play(server, clients)` is one
        more round. None: the request does not concern the part.
        """
        return None

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """The same where several people ask at once; one after the other, unless a part can do it together."""
        said = []
        for request in requests.to_requests():
            handled = self.handle(server, request, ask, play)
            if handled is not None:
                server = handled[0]
                said.append(handled[1])
        if not said:
            return None
        return server, said[0] if len(requests.senders) == 1 else {"each": said}

    def purged(self, server: ServerState) -> tuple[Arrays, list[str]]:
        """What it keeps of earlier models without all that holds what is about to be unlearned, and what that was.

        Called before any part handles a withdrawal: a table of before would pull the rounds of unlearning back.
        """
        return server.parts.get(self.name, {}), []

    def received_fits(self, sent: Arrays, n_items: int) -> bool:
        """Whether what came as a broadcast from elsewhere is safe to compute with: item tables and shared parameters.

        A part that broadcasts something else says here what that is.
        """
        backbone = self.context.backbone
        heads = backbone.init_heads(self.context.draws)

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

    def ledger(self) -> Ledger | None:
        """What its releases are counted as; the accounts are what it keeps on devices as budget, spent and times."""
        return None

    def promises(self, server: ServerState) -> Mapping[str, float | str]:
        """What it promises of people's privacy, for the result of a block: an epsilon, and what it is about."""
        return {}

    def server_end_block(self, server: ServerState) -> Arrays:
        return server.parts.get(self.name, {})


def find_deciding_part(parts: Sequence[Part], hook: str) -> Part | None:
    """The one part that decides something only one may decide."""
    owners = [part for part in parts if overrides(part, hook)]
    if len(owners) > 1:
        raise TacitaError(
            f"parts '{owners[0].name}' and '{owners[1].name}' both decide {_DECIDES[hook]}; leave one of them out."
        )
    return owners[0] if owners else None


_DECIDES = {
    "local_data": "what is learned from",
    "answers": "which model answers",
    "predict_anew": "what a person's own model is",
}


def overrides(part: Any, hook: str) -> bool:
    """Whether the part changes a hook, so that costly preparations can be skipped where nobody asks."""
    return getattr(type(part), hook) is not getattr(Part, hook)
