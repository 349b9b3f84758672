"""What every part with a ledger is held to: without it, the epsilon that a run states would not hold."""

from __future__ import annotations

from collections.abc import Sequence

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.messages import Spec
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.round.learner import find_ledger
from tacita.round.part import Part, implements
from tacita.round.state import Role


def covers_mean(part: Part) -> bool:
    """Whether one noise of a part covers a sum that is divided afterwards, which only a public number may do."""
    trains_rows = part.context.backbone.learner == "rows"
    return shares_noise(part) and trains_rows


def shares_noise(part: Part) -> bool:
    """Whether one noise of a part hides many people, and not each client its own."""
    ledger = find_ledger(part)
    if ledger is None:
        return False
    threats = {event.threat for event in ledger.events}
    return not threats <= {"local"}


def check_release_order(parts: Sequence[Part]) -> None:
    """Refuse parts that change, repeat or bypass what another part has noised and counted."""
    for place, part in enumerate(parts):
        if find_ledger(part) is None:
            continue
        earlier = parts[:place]
        later = parts[place + 1 :]
        others = (*earlier, *later)
        _refuse_release_records(part, others)
        _refuse_later_changes(part, later)
        _refuse_uncounted_answers(part, others)
        _refuse_plain_weights(part, others)
        _refuse_exact_shares(part, others)


def _refuse_release_records(part: Part, others: Sequence[Part]) -> None:
    """Refuse parts that go by what a release was before its noise."""
    for other in others:
        if implements(other, "encode") and implements(other, "answer_question"):
            raise TacitaError(
                f"part '{other.name}' remembers what leaves a device to take it back later, and {part.name} changes "
                "what leaves; forget by training again (part 'retrain'), or leave one of them out."
            )


def _refuse_later_changes(part: Part, later_parts: Sequence[Part]) -> None:
    """Refuse parts that lengthen a release after its clip, or change a sum after its noise."""
    for later in later_parts:
        if implements(later, "encode") or implements(later, "noise_sum"):
            raise TacitaError(
                f"part '{later.name}' changes releases after {part.name} has noised them; list {part.name} after it."
            )


def _refuse_uncounted_answers(part: Part, others: Sequence[Part]) -> None:
    """Refuse parts with questions of their own where the ledger's part leaves their answers alone."""
    assert part.privacy is not None
    if "answers" in part.privacy.covers:
        return
    for other in others:
        if implements(other, "answer_question"):
            raise TacitaError(
                f"part '{other.name}' asks people besides rounds, and {part.name} noises and counts rounds alone; "
                f"let {part.name} cover 'answers', or leave one of them out."
            )


def _refuse_plain_weights(part: Part, others: Sequence[Part]) -> None:
    """Refuse weights that follow from users' data: a weight leaves the device without noise."""
    assert part.privacy is not None
    if "weights" in part.privacy.covers:
        return
    for other in others:
        if implements(other, "weigh") and not other.weighs_presence:
            raise TacitaError(
                f"part '{other.name}' weighs people by what they have, which {part.name} does not hide; use part "
                "'dpps', which does, or leave one of them out."
            )


def _refuse_exact_shares(part: Part, others: Sequence[Part]) -> None:
    """Refuse parts that ask an exact share of those who took part: with one person more, others would be in the sum."""
    for other in others:
        if other.asks_exact_share and shares_noise(part):
            raise TacitaError(
                f"part '{other.name}' asks a share of those who took part, so that one person decides who else is in "
                f"the sum, and {part.name} makes noise for what one person adds; set {other.name}.asked = 1."
            )


def check_accounts(part: Part) -> None:
    """Refuse a ledger whose accounts no device keeps, or whose unit is not what a client holds."""
    ledger = find_ledger(part)
    if ledger is None:
        return
    accounts = {spec.name for spec in part.state(0) if spec.role is Role.ACCOUNT and spec.persistent}
    if not accounts.issuperset(ACCOUNT_ARRAYS):
        raise TacitaError(
            f"part '{part.name}' has a ledger, and its state lacks the accounts; add specify_accounts "
            "(tacita/methods/personal/accounts.py) to its state."
        )


def check_mean(part: Part, train: TrainConfig) -> None:
    """Refuse to divide a noised sum by who took part or who has data: its noise would tell how many they are."""
    if not covers_mean(part):
        return
    if train.aggregation != "fixed" or train.weigh_by == "data":
        raise TacitaError(
            f"part '{part.name}' noises a sum once, and a mean must not divide it by who took part; use "
            "train.aggregation = 'fixed' of clients."
        )
    if train.denominator is None:
        raise TacitaError(
            f"{part.name} divides a noised sum, and how many people have data is no public number; set "
            "train.denominator: how many of the people you enrolled take part in a round on average "
            f"({_describe_participation(train)})."
        )


def check_participation(part: Part, train: TrainConfig) -> None:
    """Refuse to draw an exact share of all: with one person more, others would be in the sum.

    Noise that is shared is made for what one person adds. Where each client has noise of its own, who takes part is
    seen anyway.
    """
    if train.participation.kind == "fraction" and shares_noise(part):
        raise TacitaError(
            f"part '{part.name}' noises a sum for what one person adds to it, and train.participation.kind = "
            "'fraction' draws from all who have data, so that one person decides who else is in the sum; use "
            "'poisson', with which everybody decides alone, or 'all'."
        )


def _describe_participation(train: TrainConfig) -> str:
    participation = train.participation
    if participation.kind == "all":
        return "here all of them"
    return f"here {participation.rate:g} times their number"


def check_unit(part: Part, train: TrainConfig) -> None:
    """Refuse a promise to persons where silos train one model of all their people."""
    ledger = find_ledger(part)
    if ledger is None or not train.n_joint_silos:
        return
    units = {event.unit for event in ledger.events}
    if "person" in units:
        raise TacitaError(
            f"part '{part.name}' protects persons, and a silo that trains one model of all its people has nothing to "
            "clip for each of them; use train.silos = 0, or train.in_silos = 'apart'."
        )


def check_summed(part: Part, specs: Sequence[Spec]) -> None:
    """Refuse fields that the server sees each by itself beside a part that noises sums."""
    for spec in specs:
        if spec.seen == "each":
            raise TacitaError(
                f"'{spec.name}' is seen each by itself, and {part.name} noises sums; leave {part.name} out, or the "
                "part that sends it."
            )
