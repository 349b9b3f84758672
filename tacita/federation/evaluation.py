"""What devices measure: validation and test scores of a block, under the masks and candidates of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Bools, Broadcast, Keys, Longs, Ragged, ServerState
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.hashing import hash_owners
from tacita.metrics import Evaluation, EvaluationRules, evaluate_ranking, sample_candidates
from tacita.round.device_state import DeviceState
from tacita.round.plan import Federation
from tacita.round.serving import Purpose

UNMASKED = "unmasked "
MetricSums = dict[str, tuple[float, int]]
"""Metric -> sum over users, number of users: what several groups of devices can add up."""


def build_ranking_mask(federation: Federation, block: Block, purpose: Purpose, mask: str) -> Ragged:
    """What is not ranked for a block's users: its train part, at test its validation part, maybe all history.

    With the mask "none" all items compete.
    """
    if mask == "none":
        return Ragged.empty(block.n_users)
    known = block.train if purpose == "valid" else block.train.join_rows(block.valid)
    if mask != "history":
        return known
    return known.join_rows(federation.stream.collect_history(block.index))


def draw_ranking_candidates(federation: Federation, block: Block) -> Ragged | None:
    """What a block's wanted items are ranked against; None: the whole catalogue."""
    n = federation.config.evaluate.sampled_negatives
    if n == 0:
        return None
    touched = federation.stream.collect_history(len(federation.stream.blocks))
    if federation.stream.low_rated is not None:  # chosen all the same
        touched = touched.join_rows(federation.stream.low_rated)
    return sample_candidates(touched, n, block.n_items, federation.stream.user_keys, federation.draws, block.index)


@dataclass(frozen=True)
class TrainedState:
    """What scores come from: what the server holds, what devices hold, and what they receive."""

    server: ServerState
    clients: DeviceState
    broadcast: Broadcast | None = None  # None: what they receive to serve


@dataclass(frozen=True)
class EvaluationTask:
    """What is measured of devices' scores, in words and numbers that every process understands."""

    block: int
    purpose: Purpose
    mask: str
    masked_block: int  # whose items are masked
    masked_part: Purpose  # up to which part of that block
    metrics: tuple[str, ...] = ()  # none: those of the run
    cutoffs: tuple[int, ...] = ()
    ranks_valid: bool = False  # the validation items are wanted, whatever the purpose
    last_tester: int | None = None  # the largest hash of a user who is tested; None: all are


Measure = Callable[[EvaluationTask], Evaluation]


def plan_validation(federation: Federation, block: Block) -> EvaluationTask:
    """The selecting metric on a block's validation items."""
    metric, k = parse_selection_metric(federation.config)
    mask = federation.config.evaluate.mask
    return EvaluationTask(block.index, "valid", mask, block.index, "valid", (metric,), (k,))


def plan_test(federation: Federation, block: Block, mask: str) -> EvaluationTask:
    """The metrics of the run on a block's test items."""
    last = find_last_tester(federation, block)
    return EvaluationTask(block.index, "test", mask, block.index, "test", last_tester=last)


def find_last_tester(federation: Federation, block: Block) -> int | None:
    """The largest hash among the `evaluate.test_users` users who are tested in a block; None: all are.

    A number instead of a list, so that every rank knows its own among them.
    """
    most = federation.config.evaluate.test_users
    _, hashes = _hash_testers(federation, block)
    if not most:
        return None
    if len(hashes) <= most:  # of nobody, too: then nobody's lists are joined
        return int(hashes.max(initial=0))
    return int(np.partition(hashes, most - 1)[most - 1])


def _hash_testers(federation: Federation, block: Block) -> tuple[Longs, Keys]:
    """The users with test items, and the hashes that decide who is tested."""
    users = np.flatnonzero(block.test.counts())
    key = federation.draws.public("testers", block.index)
    return users, hash_owners(key, federation.stream.user_keys[users])


def restrict_to_testers(federation: Federation, block: Block, last_tester: int) -> Federation:
    """The same with the lists of a block's testers alone, which then are all that is joined and sorted."""
    users, hashes = _hash_testers(federation, block)
    testers = users[hashes <= np.uint64(last_tester)]
    stream = federation.stream
    blocks = []
    for other in stream.blocks:
        known = testers[testers < other.n_users]
        lists = {role: getattr(other, role).keep_rows(known) for role in ("train", "valid", "test")}
        blocks.append(replace(other, **lists))
    low_rated = stream.low_rated
    if low_rated is not None:
        low_rated = low_rated.keep_rows(testers[testers < len(low_rated)])
    return replace(federation, stream=replace(stream, blocks=tuple(blocks), low_rated=low_rated))


def run_evaluation(
    federation: Federation,
    trained: TrainedState,
    task: EvaluationTask,
    mask: Ragged | None = None,
    wanted: Ragged | None = None,
) -> Evaluation:
    """Measure the devices of a federation; `mask`: the task's, where it was made before; `wanted`: other items."""
    block = federation.stream.blocks[task.block]
    if task.last_tester is not None:
        federation = restrict_to_testers(federation, block, task.last_tester)
        block = federation.stream.blocks[task.block]
    if mask is None:
        masked = federation.stream.blocks[task.masked_block]
        mask = build_ranking_mask(federation, masked, task.masked_part, task.mask)
    if task.ranks_valid:
        wanted = block.valid
    rules = build_evaluation_rules(federation, block, task.metrics, task.cutoffs)
    return evaluate_devices(federation, trained, block, task.purpose, mask, rules, wanted)


def build_evaluation_rules(
    federation: Federation, block: Block, metrics: Sequence[str] | None = None, cutoffs: Sequence[int] | None = None
) -> EvaluationRules:
    """What the run counts on a block, or other metrics under its rules."""
    config = federation.config.evaluate
    counts_hidden = config.hidden_items == "count"
    candidates = draw_ranking_candidates(federation, block)
    return EvaluationRules(metrics or list(config.metrics), cutoffs or config.k, candidates, counts_hidden, config.ties)


def evaluate_devices(
    federation: Federation,
    trained: TrainedState,
    block: Block,
    purpose: Purpose,
    mask: Ragged,
    rules: EvaluationRules | None = None,
    wanted: Ragged | None = None,
) -> Evaluation:
    """Evaluate the devices' own scores on a block's validation or test items."""
    past = federation.stream.collect_history(block.index) if federation.backbone.reads_history else None
    broadcast = trained.broadcast or federation.broadcast_serving(trained.server)
    keys = federation.stream.user_keys
    read = block
    if wanted is None:
        wanted = select_validation_items(federation, block) if purpose == "valid" else block.test
        read = build_test_block(federation, block) if purpose == "test" else block
    scorer = DeviceScorer(federation, trained.server, trained.clients, read, keys, broadcast, purpose, past)
    return evaluate_ranking(
        scorer, wanted, mask, keys, federation.draws, rules or build_evaluation_rules(federation, block)
    )


def select_validation_items(federation: Federation, block: Block) -> Ragged:
    """The validation items of a block: everybody's, or those of `evaluate.valid_users` users."""
    most = federation.config.evaluate.valid_users
    if most == 0:
        return block.valid
    key = federation.draws.public("validators", block.index)
    return sample_user_lists(block.valid, federation.stream.user_keys, key, most)


def sample_user_lists(lists: Ragged, user_keys: Keys, key: np.uint64, most: int) -> Ragged:
    """The lists of at most so many users, drawn by their key; the others' become empty."""
    candidates = np.flatnonzero(lists.counts())
    if len(candidates) <= most:
        return lists
    hashes = hash_owners(key, user_keys[candidates])
    order = np.argsort(hashes, kind="stable")
    is_drawn = np.zeros(len(lists), bool)
    is_drawn[candidates[order[:most]]] = True
    return lists.filter_entries(is_drawn[lists.rows()])


def resolve_read_setting(federation: Federation) -> str | None:
    """What of a block a run reads when it is tested (`evaluate.read`); None: its models read nobody's items."""
    backbone = federation.backbone
    model_reads = backbone.reads_history or backbone.reads_context
    reads = model_reads or any(part.reads_items for part in federation.parts)
    return federation.config.evaluate.read if reads else None


def build_test_block(federation: Federation, block: Block) -> Block:
    """A block as a test reads it: its training part, or all that devices know by then; of test items nothing."""
    if resolve_read_setting(federation) != "known":
        return block
    known = block.train.join_rows(block.valid)
    return replace(block, train=known.sort_by_time())


def parse_selection_metric(config: RunConfig) -> tuple[str, int]:
    name, _, k = config.evaluate.select_by.partition("@")
    if name not in {"ndcg", "ndcg-k", "recall", "hr", "precision", "mrr"} or not k.isdigit() or int(k) < 1:
        raise TacitaError(
            f"evaluate.select_by = '{config.evaluate.select_by}' is not a metric at a cut-off such as 'ndcg@20'."
        )
    return name, int(k)


def rename_unmasked_means(evaluation: Evaluation) -> dict[str, float]:
    """Means of a test in which nothing was masked, under names of their own."""
    return {f"{UNMASKED}{name}": value for name, value in evaluation.compute_means().items()}


def sum_block_metrics(
    federation: Federation, server: ServerState, clients: DeviceState, broadcast: Broadcast
) -> MetricSums:
    """Test scores on the current block, as sums that several groups of devices can add up."""
    block = federation.stream.blocks[server.block]
    mask = build_ranking_mask(federation, block, "test", federation.config.evaluate.mask)
    trained = TrainedState(server, clients, broadcast)
    return evaluate_devices(federation, trained, block, "test", mask).compute_sums()


def evaluate_block(
    federation: Federation, server: ServerState, clients: DeviceState, broadcast: Broadcast | None = None
) -> tuple[dict[str, Any], Evaluation]:
    """Test scores on this block and on every earlier block, for new and returning users, under both masks."""
    trained = TrainedState(server, clients, broadcast)

    def measure(task: EvaluationTask) -> Evaluation:
        return run_evaluation(federation, trained, task)

    return summarise_block(federation, server.block, measure)


def summarise_block(federation: Federation, index: int, measure: Measure) -> tuple[dict[str, Any], Evaluation]:
    """The scores that stand in a block's result, each measured by `measure`, and those of every user."""
    block = federation.stream.blocks[index]
    config = federation.config.evaluate
    evaluation = measure(plan_test(federation, block, config.mask))
    is_new = np.zeros(federation.stream.n_users, bool)
    is_new[: block.n_users] = block.new_users
    result: dict[str, Any] = {
        **evaluation.compute_means(),
        "users": len(evaluation.users),
        "new": _summarise_user_group(evaluation, is_new),
        "returning": _summarise_user_group(evaluation, ~is_new),
    }
    other_mask = "history" if config.mask == "block" else "block"
    other = evaluation
    if block.index > 0 or config.mask == "none":  # before the first block there is no history
        other = measure(plan_test(federation, block, other_mask))
    result[f"mask_{other_mask}"] = other.compute_means()
    result["on_blocks"] = _evaluate_all_blocks(federation, block, evaluation, measure)
    if config.unmasked:
        result |= rename_unmasked_means(measure(plan_test(federation, block, "none")))
    corrects_serving = any(part.serves & {"correction", "personal_scores"} for part in federation.parts)
    if len(block.valid.ids) and corrects_serving:
        # with the corrections that only serving applies; what tuning looks at
        task = replace(plan_validation(federation, block), purpose="test", ranks_valid=True)
        result["valid_served"] = _read_selection_metric(federation, measure(task))
    return result, evaluation


def _summarise_user_group(evaluation: Evaluation, is_chosen: Bools) -> dict[str, Any]:
    """How many of some users were tested, and their mean scores."""
    n_users = int(is_chosen[evaluation.users].sum())
    return {"users": n_users, **evaluation.compute_means(is_chosen)}


def _evaluate_all_blocks(federation: Federation, block: Block, evaluation: Evaluation, measure: Measure) -> list[float]:
    """The selecting metric on every block so far; `evaluation`: that of the newest one."""
    config = federation.config.evaluate
    metric, k = parse_selection_metric(federation.config)
    scores = []
    for earlier in federation.stream.blocks[: block.index + 1]:
        is_newest = earlier.index == block.index
        if is_newest and f"{metric}@{k}" in evaluation.values:
            scores.append(_read_selection_metric(federation, evaluation))
            continue
        masked = earlier if config.old_block_mask == "own" or is_newest else block
        plan = plan_test(federation, earlier, config.mask)
        task = replace(plan, masked_block=masked.index, metrics=(metric,), cutoffs=(k,))
        scores.append(_read_selection_metric(federation, measure(task)))
    return scores


def _read_selection_metric(federation: Federation, evaluation: Evaluation) -> float:
    metric, k = parse_selection_metric(federation.config)
    return evaluation.compute_means()[f"{metric}@{k}"]
