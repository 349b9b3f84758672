"""What the server of a run can see of a person, in plain words; live nodes say it of themselves (live/node)."""

from __future__ import annotations

from tacita.learn.scores import SCORES
from tacita.round.fulfilment import shares_items
from tacita.round.plan import Plan
from tacita.runs.forgetting.routes import sends_substitutes

SUM_ALONE = "the sum of all updates"
SHARES = "what the person shares, item by item"


def describe_server_view(plan: Plan) -> str:
    """What the server sees of one person: what they shared, then what every round shows."""
    uploads = _describe_uploads(plan)
    if sends_substitutes(plan):
        return f"items drawn in place of the shared ones; {uploads}"
    if shares_items(plan):
        return f"{SHARES}; {uploads}"
    return uploads


def _describe_uploads(plan: Plan) -> str:
    if plan.learner.unlearning is not None:
        return _describe_statistic(plan)
    if plan.learner.name == SCORES:
        return "which items the person was asked about or has, and mixed scores that show most labels"
    sender = "silo's" if plan.config.train.silos else "person's"
    return _describe_row_updates(plan, sender)


def _describe_statistic(plan: Plan) -> str:
    order = " and what follows what" if plan.backbone.reads_order else ""
    protection = ", with noise" if plan.ledgers else ", which gives people away"
    return f"which items everybody has together{order}, as one sum{protection}"


def _find_threat(plan: Plan) -> str | None:
    """Whom noise is counted against: who sees models or a silo's sums, where one noise covers many; None: nobody."""
    threats = set[str]()
    for ledger in plan.part_ledgers.values():
        threats |= {event.threat for event in ledger.events}
    for threat in ("central", "silo", "local"):
        if threat in threats:
            return threat
    return None


def _describe_row_updates(plan: Plan, sender: str) -> str:
    threat = _find_threat(plan)
    if threat == "local":
        return f"each {sender} update, with noise on all of it"
    if threat == "silo":
        return "each silo's sum of clipped updates, with one noise on it"
    if threat == "central":
        return f"each {sender} clipped update; the model that others get has noise"
    if plan.config.train.aggregator in ("ideal", "secure"):
        return SUM_ALONE
    if plan.implementing("noise_sum"):
        return f"which rows each {sender} update moves, and by how much, with noise"
    return f"which rows each {sender} update moves, and by how much: it separates what they have from what was sampled"
