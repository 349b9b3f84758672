"""What a node admits: settings that it follows, questions that it answers, and who may be in a sum.

Each rule is a function of its own. A broken rule raises a `Refusal`, whose sentence counts nobody.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.node.public_counts import count_people_for_minimum
from tacita.live.node.question_reader import ReceivedQuestion, serialise_config
from tacita.live.node.request_queue import has_answered_in_other_batch
from tacita.live.node.withdrawal_batches import make_answer_marks, select_whole_batches
from tacita.live.settings import check_live_settings
from tacita.live.wire import MOST_PLAYED, RequestHead
from tacita.messages import Spec
from tacita.methods import find_part_class, resolve_parts
from tacita.privacy.accounting import Event
from tacita.round.part import implements
from tacita.round.plan import Plan
from tacita.round.question import Question
from tacita.runs.assembly import build_plan, check_settings

EPSILON_SETTINGS = frozenset({"epsilon", "tiers", "budget", "activity_epsilon"})  # of parts: what people may spend

# Settings


def admit_settings(node: Node, head: RequestHead) -> RunConfig:
    """Return the settings of a run that this node can follow and that have not changed since the run began."""
    try:
        config = validate_model(RunConfig, head.config, "the settings the server sent")
        check_live_settings(config)
        refuse_large_epsilon(node, config)
        plan = build_plan(config)
        check_settings(config, plan.backbone)
    except TacitaError as error:
        raise Refusal(str(error)) from None
    refuse_large_delta(node, plan)
    refuse_changed_settings(node, head.run, config)
    refuse_rounds_beyond_end(plan, head)
    return config


def refuse_large_epsilon(node: Node, config: RunConfig) -> None:
    """Refuse a run that plans a larger epsilon than this node allows, before anything is computed with it."""
    largest = max(list_planned_epsilons(config), default=0.0)
    if largest > node.config.max_epsilon:
        raise Refusal(
            f"this run plans an epsilon of {largest:g}, and this node allows at most {node.config.max_epsilon:g} "
            "(max_epsilon); begin one with smaller budgets."
        )


def list_planned_epsilons(config: RunConfig, names: frozenset[str] = EPSILON_SETTINGS) -> list[float]:
    """Every epsilon that the settings of a run name: of its statistic, and of its parts with their defaults."""
    epsilons = [] if config.privacy.epsilon is None else [config.privacy.epsilon]
    for settings in resolve_parts(config.method, config.parts):
        part_config = find_part_class(str(settings.get("name"))).Config
        for name in part_config.model_fields.keys() & names:
            value = settings.get(name, part_config.model_fields[name].default)
            epsilons += _collect_numbers(value)
    return epsilons


def _collect_numbers(value: object) -> list[float]:
    """The numbers of a setting that is one number, a list of them, or not set."""
    values = value if isinstance(value, list) else [value]
    return [float(number) for number in values if isinstance(number, int | float)]


def refuse_large_delta(node: Node, plan: Plan) -> None:
    """An epsilon at a large delta bounds little."""
    for ledger in plan.ledgers:
        if ledger.delta > node.config.max_delta:
            raise Refusal(
                "this run counts epsilon at a larger delta than this node allows (max_delta), which makes a budget "
                "worth little; begin one with a smaller delta."
            )


def refuse_changed_settings(node: Node, run: str, config: RunConfig) -> None:
    """A run keeps the settings it began with."""
    model = node.store.load_model(run)
    if model is None:
        return
    note, _ = model
    first_config = serialise_config(json.loads(note["config"]))
    if first_config != config.model_dump_json():
        raise Refusal("the settings of this run have changed; begin a new run.")


def refuse_rounds_beyond_end(plan: Plan, head: RequestHead) -> None:
    """A block has its own rounds, and those that requests may take."""
    last_round = plan.learner.rounds + MOST_PLAYED
    if head.round > last_round or head.best_round > last_round:
        raise unknown_question_error(head)


def unknown_question_error(head: RequestHead) -> Refusal:
    return Refusal(f"this run has no {head.kind} in round {head.round}.")


# Single users


def shows_single_users(node_run: NodeRun, question: ReceivedQuestion) -> bool:
    """Whether the question is about some users only, or about users who take part by chance."""
    participation = node_run.federation.config.train.participation
    has_respondents = question.respondents is not None
    return question.is_per_client or has_respondents or participation.kind != "all"


def refuse_single_uploads(node: Node) -> None:
    """Refuse what shows single people unless the owner of the node allowed it.

    Sums over people who take part by chance are among that: two of them may differ by one person.
    """
    if not node.config.insecure_single_user_uploads:
        raise Refusal(
            "this node sends sums over all of its people only, and the run would show them one by one; its owner can "
            "allow that (insecure_single_user_uploads)."
        )


def make_withdrawal_marks(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> dict[str, str]:
    """Marks of a question about whole batches of withdrawals; with them, these users may answer it in a sum.

    Empty if the question is about others, or if one of them has answered it in another batch.
    """
    kind = question.head.kind
    owner = question.question.owner
    if owner is None or question.is_per_client:
        return {}
    if question.respondents is None:
        return {}
    federation = node_run.federation
    is_respondent = np.isin(node_run.user_keys, question.respondents)
    users = node_run.users[is_respondent].tolist()
    queue = node.store.list_requests(federation.stream.name)
    withdrawals = select_whole_batches(queue, users, node.config.min_users)
    is_retraction = owner == federation.learner.name
    marks = make_answer_marks(withdrawals, kind, each_batch=is_retraction)
    if node.store.run_query(lambda db: has_answered_in_other_batch(db, marks)):
        return {}
    return marks


# Sums


@dataclass(frozen=True)
class Admission:
    """A question that this node answers with a sum."""

    question: Question
    round_questions: tuple[str, ...]  # what the learner asks in this round
    specs: tuple[Spec, ...]  # what may be in the answer
    withdraws_together: bool  # the sum is over whole batches of withdrawals

    @property
    def is_round_question(self) -> bool:
        return self.question.name in self.round_questions

    @property
    def ends_round(self) -> bool:
        return self.question.name in self.round_questions[-1:]


def admit_sum(node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool) -> Admission:
    """Admit a question that the run asks, of people who may be in a sum, at a moment when this node answers."""
    refuse_unknown_question(node_run, question)
    federation = node_run.federation
    admission = Admission(
        question=question.question,
        round_questions=federation.learner.questions(question.server),
        specs=federation.fields(question.server, question.question),
        withdraws_together=withdraws_together,
    )
    refuse_sparse_sums(admission.specs)
    if reveals_differences(admission):
        refuse_single_uploads(node)
    if counts_on_sampling(node_run):
        refuse_chosen_respondents(admission, question)
    refuse_small_or_early_sum(node, node_run, question)
    return admission


def refuse_unknown_question(node_run: NodeRun, question: ReceivedQuestion) -> None:
    """A question is the learner's in this round, or that of a part that has an answer."""
    head = question.head
    round_questions = node_run.federation.learner.questions(question.server)
    if question.question.name in round_questions:
        return
    owner = question.question.owner
    unlearning = node_run.federation.unlearners.get(owner or "")
    if unlearning is None or not implements(unlearning, "answer_question"):
        raise unknown_question_error(head)


def refuse_sparse_sums(specs: Sequence[Spec]) -> None:
    """Sparse sums have no form on the wire."""
    if any(spec.sparse for spec in specs):
        raise Refusal("sums of so large a catalogue are made in the lab only; no node sends them.")


def reveals_differences(admission: Admission) -> bool:
    """Whether answers can be asked so often, or in such a form, that a single person shows.

    A part may ask as often as it likes, so it shows who came or left in between. Whole batches of withdrawals do not.
    """
    is_repeatable = admission.question.owner is not None and not admission.withdraws_together
    if is_repeatable or admission.question.replay is not None:
        return True
    return any(spec.seen == "each" for spec in admission.specs)


def counts_on_sampling(node_run: NodeRun) -> bool:
    """Whether some ledger of the run counts a release as sampled."""
    events: list[Event] = []
    for ledger in node_run.federation.ledgers:
        events += ledger.events
    return any(event.law == "sampled" for event in events)


def refuse_chosen_respondents(admission: Admission, question: ReceivedQuestion) -> None:
    """A budget that counts on sampling holds only if chance decides, every time, who is in the sum."""
    if admission.question.replay is not None or question.respondents is not None:
        raise Refusal("this run counts on people being drawn anew by chance in every round; ask those who are drawn.")


def refuse_small_or_early_sum(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> None:
    """A sum needs `min_users` respondents, under a budget people enrolled, and keeps to the node's rate."""
    respondents = node_run.devices.select_respondents(
        node_run.federation, question.server, question.question, question.respondents
    )
    n_people = count_people_for_minimum(node_run, question, len(respondents.clients))
    refusal = node.find_sum_refusal(n_people, question.head.kind)
    if refusal is not None:
        raise Refusal(refusal)


def refuse_few_contributors(node: Node, node_run: NodeRun, admission: Admission, contributors: int) -> None:
    """A sum to which fewer than `min_users` contribute could be read as theirs.

    Who has nothing to say hides nobody. A sum of nothing may be sent. A run that counts epsilon relies on its noise: a
    refusal by who can pay, or has something, would tell of them.
    """
    if node_run.counts_epsilon:
        return
    is_too_few = node.is_too_few(contributors)
    is_learners_sum = admission.question.owner == node_run.federation.learner.name
    is_empty_retraction = contributors == 0 and is_learners_sum
    if admission.withdraws_together and is_too_few and not is_empty_retraction:
        raise Refusal("fewer people than this node's minimum (min_users) have something to take back.")
    if contributors > 0 and is_too_few:
        raise Refusal("fewer people than this node's minimum (min_users) have something to say.")
