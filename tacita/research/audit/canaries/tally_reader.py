"""The best reader of a noised tally: it knows both worlds to the last row and weighs each sum by its noise.

For every release it computes the exact sums of both worlds under the server's own heads, by the model's own encoding.
The score is the log of how much likelier the noised sum is with the person, scaled to deviation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.types import BlockStream, Ragged, ServerState
from tacita.messages import Total
from tacita.models.tally.model import STATISTIC, SURVEY
from tacita.models.tally.order_sums import NEXT
from tacita.models.tally.pair_statistic import sum_forms
from tacita.models.tally.private_math import PEOPLE_SHARE, POPULARITY_SHARE, SQUARE_ROOT_2
from tacita.models.tally.private_order import PrivateOrderedTally
from tacita.models.tally.private_tally import PrivateTally
from tacita.research.audit.canaries.lab_plays import LabPlay, Release
from tacita.research.audit.canaries.transcripts import READER, Transcript

SCORE = f"{READER}the best reader of its sums"


@dataclass(frozen=True)
class TallyReader:
    """Knows the rows of both worlds."""

    without: BlockStream
    with_person: BlockStream

    def score_lab_play(self, play: LabPlay) -> None:
        """Put the score of a play into its transcript."""
        model = play.federation.backbone
        assert isinstance(model, PrivateTally)
        self.read(model, play.releases, play.transcript)

    def read(self, model: PrivateTally, releases: Sequence[Release], transcript: Transcript) -> None:
        score = 0.0
        information = 0.0
        for release in releases:
            gain, strength = self._weigh_release(model, release)
            score += gain
            information += strength
        transcript.add(SCORE, score / math.sqrt(max(information, 1e-12)))

    def _weigh_release(self, model: PrivateTally, release: Release) -> tuple[float, float]:
        """How far a sum goes towards the world with the person, and how far it would go without noise."""
        question = str(release.question)
        block = release.server.block
        exact_without = sum_block(model, release.server, self.without, block, question)
        exact_with = sum_block(model, release.server, self.with_person, block, question)
        gain = 0.0
        strength = 0.0
        for name, deviation in list_deviations(model, release.server, question).items():
            difference = exact_with[name] - exact_without[name]
            remainder = release.total[name] - exact_without[name]
            gain += float((difference * remainder).sum()) / deviation**2
            strength += float((difference**2).sum()) / deviation**2
        return gain, strength


def sum_block(model: PrivateTally, server: ServerState, stream: BlockStream, block: int, question: str) -> Total:
    """The exact sum of one block of a world."""
    lists = stream.blocks[block].train
    counted = model.select_counted_items(Ragged(lists.ptr, lists.ids))
    user_ptr = np.arange(len(lists) + 1, dtype=np.int64)
    forms = model.encode_lists(counted, user_ptr, server.heads, question)
    return sum_forms(forms, len(lists), model.list_statistic_fields(server, question))


def list_deviations(model: PrivateTally, server: ServerState, question: str) -> dict[str, float]:
    """Of the noise on each field, along a direction of length 1."""
    if question == SURVEY:
        liked = model.budget.compute_deviation(POPULARITY_SHARE)
        people = model.budget.compute_deviation(PEOPLE_SHARE)
        return {"liked": liked, "people": people}
    deviations = {"terms": SQUARE_ROOT_2 * model.compute_term_deviation(server, STATISTIC)}
    if isinstance(model, PrivateOrderedTally) and model.order_share:
        deviations[NEXT] = model.compute_order_deviation(server, STATISTIC)
    return deviations
