"""Backbone: which parameters are item rows, shared or private, how they start, how they score.

Private parameters of a user are one flat vector with named slices, so stores, snapshots and files need to know
nothing else about a model. `represent` and `score` are written with operators that numpy arrays and torch tensors
share: `represent` runs once per user, `score` once per sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Keys, Longs, Ragged, ServerState
from tacita.messages import Form, Spec, Total
from tacita.privacy.ledger import Ledger


class BackboneConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TrainedConfig(BackboneConfig):
    """Settings of models that learn by local steps on item rows."""

    dim: int = Field(32, ge=1, le=4096, description="width of an item row")
    lr: float = Field(1.0, gt=0, description="base learning rate")
    item_lr_scale: Literal["items"] | float = Field(
        "items", description="item-table rate = lr * this: 'items' (number of items, F3CRec) or a number"
    )


@dataclass(frozen=True)
class Context:
    """The items that a model reads of each user, with the rows they have at the moment; numpy or torch."""

    ptr: Longs  # (users + 1,) entries of each user, oldest first
    user: Any  # (entries,)
    count: Any  # (users,) entries, as floats
    rows: Any  # (entries, width)
    values: dict[str, Any]  # columns aligned with the entries, such as "rating" and "time"

    @staticmethod
    def from_lists(lists: Ragged, items: Floats) -> Context:
        """Lists with the rows of one table."""
        count = lists.counts().astype(np.float32)
        return Context(lists.ptr, lists.rows(), count, items[lists.ids], dict(lists.values))

    def sum_per_user(self, entries: Any) -> Any:
        """The sum of each user's entries, added up in their order, so that it does not depend on the company."""
        shape = (len(self.ptr) - 1, *entries.shape[1:])
        if isinstance(entries, np.ndarray):
            out = np.zeros(shape, entries.dtype)
            np.add.at(out, self.user, entries)
            return out
        return entries.new_zeros(shape).index_add(0, self.user, entries)

    def repeat_per_entry(self, users: Any) -> Any:
        """What there is of every user, for each of its entries."""
        return users[self.user] if isinstance(users, np.ndarray) else users.index_select(0, self.user)

    def max_per_user(self, entries: Any) -> Any:
        """The largest of each user's entries, as a constant; of none, 0."""
        n = len(self.ptr) - 1
        if isinstance(entries, np.ndarray):
            out = np.where(self.count > 0, -np.inf, 0).astype(entries.dtype)
            np.maximum.at(out, self.user, entries)
            return out
        return entries.new_zeros(n).scatter_reduce(0, self.user.long(), entries.detach(), "amax", include_self=False)


class RetractableModel(Protocol):
    """A model that takes back what people told it, exactly."""

    @property
    def retracts_exactly(self) -> bool:
        """Whether what is left is what there would be without the data, up to rounding."""
        ...

    def describe_retraction(self) -> dict[str, Any]:
        """What a certificate is to say of its retractions beside that."""
        ...

    @property
    def retraction_quorum(self) -> int:
        """How many people a retraction waits for; 0: it is carried out at once."""
        ...

    def retraction_fields(self, server: ServerState) -> tuple[Spec, ...]:
        """What may be in a retraction: changes of the statistic of every block."""
        ...

    def encode_retraction(self, view: CohortView, old_lists: list[Ragged], new_lists: list[Ragged]) -> dict[str, Form]:
        """On the device: what its people take back, a list for every block, and what they say again."""
        ...

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        """The server after a sum of retractions, and the rank of the update; 0: it was solved anew."""
        ...

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        """What the server would hold had it been told these lists alone."""
        ...


class Backbone(ABC):
    """What a model tells the federation about itself. Subclasses override the methods below."""

    name: ClassVar[str]
    Config: ClassVar[type[BackboneConfig]] = BackboneConfig
    learner: ClassVar[str] = "rows"
    """What travels where no part says otherwise: `rows` (local steps on item rows) or a `statistic`."""

    reads_history: ClassVar[bool] = False
    """Its views hold what a user did in earlier blocks (`history`), to train with or to score (`score_history`)."""

    reads_order: ClassVar[bool] = False
    """Scores by what came last, too: it is served with all that a device knows, oldest first."""

    phases: ClassVar[tuple[tuple[str, ...], ...]] = (("private", "rows"),)
    """What moves in each pass of a step: every phase has its own forward pass."""

    reads_context: ClassVar[bool] = False
    """Scores with the rows of further items of the user (see `context`), not with the private vector alone."""

    grouped: ClassVar[bool] = False
    """Scores groups of samples that share their heads (see `score_groups`): heads too big to repeat for a sample."""

    has_own_loss: ClassVar[bool] = False
    """Its people add something to the loss beside their samples (see `own_loss`)."""

    heads_in_score: ClassVar[bool] = True
    """`score` reads shared parameters; else `represent` alone does, and none is copied for a sample."""

    brings: ClassVar[dict[str, Any]] = {}
    """Settings that hold with this model wherever nobody says otherwise."""

    on_graph: ClassVar[bool] = False
    """Where all users are in one place it scores on the graph of what they have (see learn/training/central_model.py)."""

    affine_kind: ClassVar[int | None] = None
    """Which fused kernel trains it (see kernels.steps); None: autograd only."""

    def __init__(self, config: BackboneConfig) -> None:
        self.config = config

    @property
    def form(self) -> str:
        """Which of several classes its settings ask for (`register_form`); empty: there is one."""
        return ""

    # what exists

    @property
    @abstractmethod
    def item_width(self) -> int:
        """Numbers in an item's row of the shared table."""

    @property
    @abstractmethod
    def layout(self) -> dict[str, int]:
        """Private parameters of one user: name -> width."""

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Shared parameters that are not item rows: name -> shape."""
        return {}

    @property
    def private_width(self) -> int:
        return sum(self.layout.values())

    def named(self, private: Any) -> dict[str, Any]:
        """The flat private vectors (users, width) as named slices."""
        out, at = {}, 0
        for name, width in self.layout.items():
            out[name] = private[:, at : at + width]
            at += width
        return out

    def check(self, first_items: int, all_items: int) -> None:  # noqa: B027  (most models carry any)
        """Refuse a catalogue, of the first block and in the end, that cannot be carried, before anything is trained."""

    # how it starts

    @abstractmethod
    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        """The initial item rows, a function of the item's key alone."""

    @property
    def code_width(self) -> int:
        """Numbers of an item's code from which its row can start, where codes are given."""
        return self.item_width

    def rows_of_codes(self, codes: Floats) -> Floats:
        """Item rows (items, item width) that start from codes (items, code width) instead of chance."""
        return codes

    @abstractmethod
    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        """The initial private vectors, a function of the user's key alone."""

    def init_heads(self, draws: Draws) -> Arrays:
        return {}

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        """Whether shared parameters that came from elsewhere are safe to compute with."""
        own = self.init_heads(Draws(0))
        return heads.keys() == own.keys() and all(
            heads[name].shape == v.shape and heads[name].dtype == v.dtype for name, v in own.items()
        )

    # how it learns

    def rates(self, n_items: int) -> dict[str, float]:
        """Learning rate per private or shared parameter name, plus 'rows' for the item table."""
        return {}

    def item_scale(self, n_items: int) -> float:
        """What the item rate is beyond the base rate."""
        return 1.0

    # where it learns from a statistic

    def questions(self, server: ServerState) -> tuple[str, ...]:
        """What is asked at the beginning of a block."""
        return ("statistic",)

    def statistic_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        raise TacitaError(f"backbone '{self.name}' learns by training, not from a statistic.")

    def tell(self, view: CohortView, question: str) -> dict[str, Form]:
        """What the cohort's clients have to tell, by field."""
        raise TacitaError(f"backbone '{self.name}' learns by training, not from a statistic.")

    def statistic_of(self, train: Ragged, history: Ragged, n_items: int) -> Total:
        """The sum over people who tell these lists, with what they told before."""
        raise TacitaError(f"backbone '{self.name}' learns by training, not from a statistic.")

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        """What the server makes of a total."""
        raise TacitaError(f"backbone '{self.name}' learns by training, not from a statistic.")

    # what a budget costs, where there is one (`register_private`)

    @property
    def epsilon(self) -> float | None:
        """What a person may spend in all; None: there is no budget."""
        return None

    def ledger(self) -> Ledger | None:
        """What its releases are counted as."""
        return None

    def loss(self, heads: Arrays, question: str) -> tuple[str, float]:
        """Which event of the ledger an answer to a question is, and the mu that it costs each person it is about."""
        raise TacitaError(f"backbone '{self.name}' has no budget.")

    def noised(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        """The sum over the people here with the noise that the budget asks for, before anybody sees it."""
        return total

    def promises(self, server: ServerState) -> dict[str, float]:
        """What of people's privacy holds after a block; nothing: no epsilon."""
        return {}

    @property
    def trials(self) -> int:
        """Ways of scoring among which a block's validation chooses, a round each."""
        return 1

    def try_next(self, server: ServerState) -> ServerState:
        """The same statistic with another way of scoring."""
        return server

    def popularity(self, server: ServerState) -> Floats:
        """How many people told the server of each item, where that is something it is told."""
        return np.zeros(len(server.items), np.float32)

    def likeness(self, server: ServerState, items: Floats, item: int) -> Floats:
        """How much every item is like one of them: the cosine of their rows in the table that devices score with."""
        size = np.sqrt((items.astype(np.float64) ** 2).sum(axis=1))
        made: Floats = ((items @ items[item]) / np.maximum(size * size[item], 1e-12)).astype(np.float32)
        return made

    # how it scores

    def context(self, view: CohortView) -> Ragged | None:
        """Per user, the items whose rows `represent` reads; a client trains and sends these rows like its samples'."""
        return None

    def represent(self, private: dict[str, Any], heads: dict[str, Any], context: Context | None) -> dict[str, Any]:
        """What `score` needs of every user: leading dimension users, heads repeated for each."""
        return private

    def own_loss(self, rep: dict[str, Any]) -> Any:
        """What each user adds to its client's loss (torch, users as `represent` made them): a mean over the batch's."""
        return None

    def interest(self, view: CohortView) -> Floats:
        """What each user of a view likes, as one vector under the model that was received: the mean of its rows."""
        lists = view.train
        total = np.zeros((len(lists), view.items.shape[1]), np.float64)
        np.add.at(total, lists.rows(), view.items[lists.ids])
        return np.asarray(total / np.maximum(lists.counts(), 1)[:, None], np.float32)

    @property
    def interest_width(self) -> int:
        return self.item_width

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        """Logits of aligned (user, head, row) triples: leading dimension samples.

        `inside` is 1 where the sample's item is in the user's context, else 0; None: the model has no context.
        """
        raise TacitaError(f"backbone '{self.name}' scores whole histories, not single pairs.")

    def heads_to_score(self, heads: dict[str, Any]) -> dict[str, Any]:
        """Those of the shared parameters that `score` reads."""
        return heads if self.heads_in_score else {}

    @property
    def retracts(self) -> RetractableModel | None:
        """The model itself, where it can take back what people told it."""
        return None

    def score_groups(self, private: dict[str, Any], heads: dict[str, Any], rows: Any) -> Any:
        """Logits (groups, samples) of private (groups, samples or 1, width), heads (groups, ...), rows (groups,
        samples, width); a leading 1 serves all groups."""
        raise TacitaError(f"backbone '{self.name}' scores single samples, not groups of them.")

    def score_history(self, view: CohortView) -> Floats | None:
        """Scores (users, items) from the user's own history alone; None: it also has private vectors and rows."""
        return None

    def reading(self, private: Floats, heads: Arrays) -> tuple[Floats, Floats] | None:
        """(a, c) with logit a . q + c for every item, where the model is affine in the item row."""
        return None

    def reading_outside(
        self, rep: dict[str, Any], heads: Arrays, items: Floats
    ) -> tuple[Floats, Floats, Floats] | None:
        """(a, c, rows) with logit a . row + c for every item outside a user's context, where there are such rows."""
        return None


_REGISTRY: dict[str, type[Backbone]] = {}
_PRIVATE: dict[str, type[Backbone]] = {}
_FORMS: dict[str, type[Backbone]] = {}


def register(cls: type[Backbone]) -> type[Backbone]:
    _REGISTRY[cls.name] = cls
    return cls


def register_private(cls: type[Backbone]) -> type[Backbone]:
    """The form that the backbone of the same name takes under a budget; it is made of a config and the budget."""
    _PRIVATE[cls.name] = cls
    return cls


def register_form(form: str) -> Callable[[type[Backbone]], type[Backbone]]:
    """The class that a backbone becomes whose settings ask for this `form`."""

    def keep(cls: type[Backbone]) -> type[Backbone]:
        _FORMS[f"{cls.name} {form}"] = cls
        return cls

    return keep


def apply_form(backbone: Backbone) -> Backbone:
    """The backbone as its own settings have it."""
    cls = _FORMS.get(f"{backbone.name} {backbone.form}", type(backbone))
    return backbone if cls is type(backbone) else cls(backbone.config)


def apply_budget(backbone: Backbone, privacy: PrivacyConfig) -> Backbone:
    """The backbone as the settings of `privacy` have it."""
    if privacy.epsilon is None:
        if privacy != PrivacyConfig():
            raise TacitaError("privacy.delta, blocks and features are for a budget; set privacy.epsilon, too.")
        return backbone
    if backbone.name not in _PRIVATE:
        able = ", ".join(f"'{name}'" for name in sorted(_PRIVATE))
        raise TacitaError(
            f"privacy.epsilon is a budget for sums of statistics whose length is bounded, and backbone "
            f"'{backbone.name}' has no such form; use backbone {able}, or leave privacy.epsilon out."
        )
    return _PRIVATE[backbone.name](backbone.config, privacy)  # type: ignore[call-arg]


def backbone_names() -> list[str]:
    return sorted(_REGISTRY)


def backbone_class(name: str) -> type[Backbone]:
    if name not in _REGISTRY:
        raise unknown_name_error("backbone", name, _REGISTRY)
    return _REGISTRY[name]


def repeat_start(value: Floats, count: int) -> Floats:
    """The same start for everybody."""
    return np.repeat(value.reshape(1, -1), count, axis=0)


def linear_bound(fan_in: int) -> float:
    """Half-width of the usual uniform start of a linear layer."""
    return 1.0 / math.sqrt(fan_in)
