"""StatisticModel: a model whose training statistic is a sum over users.

It has no item rows and no private parameters. Devices encode a statistic, the server turns the sum into shared
parameters, and a device scores its own history with these. A sum can take noise once, and terms can be taken back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Keys, Ragged, ServerState
from tacita.messages import Form, Spec, Total
from tacita.models.base import Backbone
from tacita.privacy.ledger import Ledger

BlockLists = list[Ragged]
"""What users did, a list for each of them, in every block."""
Fields = tuple[Spec, ...]
FieldSums = Mapping[str, AnyArray]
"""Sums over users, by the name of their field."""
Forms = dict[str, Form]
"""What devices send, by the name of its field."""


@dataclass(frozen=True)
class RetractionCaveats:
    """What a certificate says of retractions that are not exact."""

    assumptions: tuple[str, ...]
    residual_risk: str


class StatisticModel(Backbone):
    """A model that learns from sums. Subclasses override the methods below."""

    learner = "statistic"
    reads_history = True

    @property
    def item_width(self) -> int:
        return 0

    @property
    def private_layout(self) -> dict[str, int]:
        return {}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return np.zeros((len(item_keys), 0), np.float32)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        return np.zeros((len(user_keys), 0), np.float32)

    # the exchange

    @abstractmethod
    def questions(self, server: ServerState) -> tuple[str, ...]:
        """What the server asks at the beginning of a block."""

    @abstractmethod
    def list_statistic_fields(self, server: ServerState, question: str) -> Fields:
        """What may be in an answer to a question."""

    @abstractmethod
    def encode_statistic(self, view: CohortView, question: str) -> Forms:
        """On the device: the statistic of the cohort's clients, by field."""

    @abstractmethod
    def sum_statistics_of_lists(self, server: ServerState, train: Ragged, history: Ragged) -> Total:
        """The sum of the statistics of users with these lists in a block, and these before it."""

    @abstractmethod
    def learn_from_sums(self, server: ServerState, total: Total, question: str) -> ServerState:
        """On the server: the state after the sum of all answers to a question."""

    @abstractmethod
    def score_history(self, view: CohortView) -> Floats:
        """On the device: scores (users, items) from the user's own history."""

    def sums_lists(self, n_items: int) -> bool:
        """Whether lists of items are added to whole arrays, so that many clients at once need little memory."""
        return False

    # validation

    @property
    def n_validation_candidates(self) -> int:
        """Ways of scoring among which a block's validation chooses, a round each."""
        return 1

    def with_next_trial(self, server: ServerState) -> ServerState:
        """The same statistic with the next way of scoring."""
        return server

    # the budget, where there is one (`register_private`)

    @property
    def epsilon(self) -> float | None:
        """What a user may spend in all; None: there is no budget."""
        return None

    def ledger(self) -> Ledger | None:
        """What its releases are counted as; None: there is no budget."""
        return None

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        """Which event of the ledger an answer to a question is, and the mu that it costs each user in it."""
        raise TacitaError(f"backbone '{self.name}' has no budget.")

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        """The sum over this process's users with the noise of the budget, before it leaves."""
        return total

    def promises(self, server: ServerState) -> dict[str, float]:
        """What holds of users' privacy after a block; nothing: no epsilon."""
        return {}

    # retraction

    @property
    @abstractmethod
    def retracts_exactly(self) -> bool:
        """Whether a retraction leaves what there would be without the data, up to rounding."""

    @abstractmethod
    def describe_retraction(self) -> RetractionCaveats | None:
        """What else a certificate says of its retractions; None: nothing."""

    @property
    @abstractmethod
    def retraction_quorum(self) -> int:
        """How many users a retraction waits for; 0: it is carried out at once."""

    @abstractmethod
    def list_retraction_fields(self, server: ServerState) -> Fields:
        """What may be in a retraction: changes of the statistic of every block."""

    @abstractmethod
    def encode_retraction(self, view: CohortView, old_lists: BlockLists, new_lists: BlockLists) -> Forms:
        """On the device: the change from the old to the new lists of its users, one list for every block."""

    @abstractmethod
    def apply_retraction(self, server: ServerState, change: FieldSums) -> tuple[ServerState, int]:
        """The server after a sum of retractions, and the rank of the update; 0: it was solved from the start."""

    @abstractmethod
    def retrain_from_lists(self, server: ServerState, block_lists: BlockLists) -> ServerState:
        """The state that the server would have if these lists were all that devices had sent."""
