"""What the server of a run can see of a person, in plain words; live nodes say it of themselves (live/node)."""

from __future__ import annotations

from tacita.learn.scores import SCORES
from tacita.methods.continual.laplace_noise import LaplaceNoise
from tacita.methods.personal.dp_fedavg import DPFedAvg
from tacita.methods.personal.dpps import DPPS
from tacita.methods.sharing.contribution import Contribution
from tacita.methods.sharing.sharing import Sharing
from tacita.round.plan import Plan

SUM_ALONE = "the sum of all updates"
SHARES = "what the person shares, item by item"


def describe_server_view(plan: Plan) -> str:
    """Of one person, by what travels: what they shared, then what every round tells."""
    named = {part.name for part in plan.parts}
    said = []
    if Contribution.name in named:
        said.append("items drawn in place of the shared ones")
    elif Sharing.name in named:
        said.append(SHARES)
    return "; ".join([*said, _describe_uploads(plan, named)])


def _describe_uploads(plan: Plan, named: set[str]) -> str:
    if plan.learner.unlearning is not None:
        order = " and what follows what" if plan.backbone.reads_order else ""
        many = f"which items everybody has together{order}, as one sum"
        return many + (", with noise" if plan.ledgers else ", which gives people away")
    if plan.learner.name == SCORES:
        return "which items the person was asked about or has, and mixed scores that show most labels"
    whose = "silo's" if plan.config.train.silos else "person's"
    threat = next((part.config.threat for part in plan.parts if isinstance(part, DPPS)), None)
    if threat == "local":
        return f"each {whose} update, with noise on all of it"
    if threat == "silo":
        return "each silo's sum of clipped updates, with one noise on it"
    if threat == "central" or DPFedAvg.name in named:
        return f"each {whose} clipped update; the model that others get has noise"
    if plan.config.train.aggregator in ("ideal", "secure"):
        return SUM_ALONE
    if LaplaceNoise.name in named:
        return f"which rows each {whose} update moves, and by how much, with noise"
    return f"which rows each {whose} update moves, and by how much: it separates what they have from what was sampled"
