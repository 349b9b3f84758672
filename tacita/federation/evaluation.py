"""What devices measure: validation and test scores of a block, under the masks and candidates of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Block, Broadcast, Keys, Ragged, ServerState
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.hashing import hash_owners
from tacita.metrics import Evaluation, EvaluationRules, evaluate, sample_candidates
from tacita.round.device_state import DeviceState
from tacita.round.plan import Federation
from tacita.round.serving import Purpose

UNMASKED = "unmasked "
MetricSums = dict[str, tuple[float, int]]
"""Metric -> sum over users, number of users: what several groups of devices can add up."""


def build_mask(fed: Federation, block: Block, purpose: Purpose, mask: str) -> Ragged:
    """What is not ranked for a block's users: its train part, at test its validation part, maybe all history.

    With the mask "none" all items compete.
    """
    if mask == "none":
        return Ragged.empty(block.n_users)
    known = block.train if purpose == "valid" else block.train.join_rows(block.valid)
    return known.join_rows(fed.stream.history(block.index)) if mask == "history" else known


def draw_candidates(fed: Federation, block: Block) -> Ragged | None:
    """What a block's wanted items are ranked against; None: the whole catalogue."""
    n = fed.config.evaluate.sampled_negatives
    if n == 0:
        return None
    touched = fed.stream.history(len(fed.stream.blocks))
    if fed.stream.low_rated is not None:  # chosen all the same
        touched = touched.join_rows(fed.stream.low_rated)
    return sample_candidates(touched, n, block.n_items, fed.stream.user_keys, fed.draws, block.index)


@dataclass(frozen=True)
class TrainedState:
    """What scores come from: what the server holds, what devices hold, and what they receive."""

    server: ServerState
    clients: DeviceState
    broadcast: Broadcast | None = None  # None: what they receive to serve


def build_rules(
    fed: Federation, block: Block, metrics: Sequence[str] | None = None, cutoffs: Sequence[int] | None = None
) -> EvaluationRules:
    """What the run counts on a block, or other metrics under its rules."""
    cfg = fed.config.evaluate
    count = cfg.hidden_items == "count"
    return EvaluationRules(metrics or list(cfg.metrics), cutoffs or cfg.k, draw_candidates(fed, block), count, cfg.ties)


def evaluate_devices(
    fed: Federation,
    learned: TrainedState,
    block: Block,
    purpose: Purpose,
    mask: Ragged,
    rules: EvaluationRules | None = None,
    wanted: Ragged | None = None,
) -> Evaluation:
    """Evaluate the devices' own scores on a block's validation or test items."""
    past = fed.stream.history(block.index) if fed.backbone.reads_history else None
    down = learned.broadcast or fed.broadcast_serving(learned.server)
    keys = fed.stream.user_keys
    read = block
    if wanted is None:
        wanted = select_validators(fed, block) if purpose == "valid" else block.test
        read = build_test_block(fed, block) if purpose == "test" else block
    scorer = DeviceScorer(fed, learned.server, learned.clients, read, keys, down, purpose, past)
    return evaluate(scorer, wanted, mask, keys, fed.draws, rules or build_rules(fed, block))


def select_validators(fed: Federation, block: Block) -> Ragged:
    """The validation items of a block: everybody's, or those of `evaluate.valid_users` users."""
    most = fed.config.evaluate.valid_users
    if most == 0:
        return block.valid
    key = fed.draws.public("validators", block.index)
    return sample_lists(block.valid, fed.stream.user_keys, key, most)


def sample_lists(lists: Ragged, user_keys: Keys, key: np.uint64, most: int) -> Ragged:
    """The lists of at most so many users, drawn by their key; the others' become empty."""
    candidates = np.flatnonzero(lists.counts())
    if len(candidates) <= most:
        return lists
    order = np.argsort(hash_owners(key, user_keys[candidates]), kind="stable")
    is_drawn = np.zeros(len(lists), bool)
    is_drawn[candidates[order[:most]]] = True
    return lists.filter_entries(is_drawn[lists.rows()])


def resolve_read_setting(fed: Federation) -> str | None:
    """What of a block a run reads when it is tested (`evaluate.read`); None: its models read nobody's items."""
    backbone = fed.backbone
    model_reads = backbone.reads_history or backbone.reads_context
    reads = model_reads or any(part.reads_items for part in fed.parts)
    return fed.config.evaluate.read if reads else None


def build_test_block(fed: Federation, block: Block) -> Block:
    """A block as a test reads it: its training part, or all that devices know by then; of test items nothing."""
    if resolve_read_setting(fed) != "known":
        return block
    return replace(block, train=block.train.join_rows(block.valid).sort_by_time())


def selection_metric(config: RunConfig) -> tuple[str, int]:
    name, _, k = config.evaluate.select_by.partition("@")
    if name not in {"ndcg", "ndcg-k", "recall", "hr", "precision", "mrr"} or not k.isdigit() or int(k) < 1:
        raise TacitaError(
            f"evaluate.select_by = '{config.evaluate.select_by}' is not a metric at a cut-off such as 'ndcg@20'."
        )
    return name, int(k)


def unmasked_means(evaluation: Evaluation) -> dict[str, float]:
    """Means of a test in which nothing was masked, under names of their own."""
    return {f"{UNMASKED}{name}": value for name, value in evaluation.mean().items()}


def block_metric_sums(fed: Federation, server: ServerState, clients: DeviceState, down: Broadcast) -> MetricSums:
    """Test scores on the current block, as sums that several groups of devices can add up."""
    block = fed.stream.blocks[server.block]
    mask = build_mask(fed, block, "test", fed.config.evaluate.mask)
    return evaluate_devices(fed, TrainedState(server, clients, down), block, "test", mask).sums()


def evaluate_block(
    fed: Federation, server: ServerState, clients: DeviceState, down: Broadcast | None = None
) -> tuple[dict[str, Any], Evaluation]:
    """Test scores on this block and on every earlier block, for new and returning users, under both masks."""
    block, cfg = fed.stream.blocks[server.block], fed.config.evaluate
    new = np.zeros(fed.stream.n_users, bool)
    new[: block.n_users] = block.new_users
    learned = TrainedState(server, clients, down)

    def test(on: Block, mask: Ragged, only_chosen: bool = False, wanted: Ragged | None = None) -> Evaluation:
        rules = build_rules(fed, on, [metric], [k]) if only_chosen else None
        return evaluate_devices(fed, learned, on, "test", mask, rules, wanted)

    metric, k = selection_metric(fed.config)
    chosen = f"{metric}@{k}"
    found = test(block, build_mask(fed, block, "test", cfg.mask))
    other = "history" if cfg.mask == "block" else "block"
    masks_differ = block.index > 0 or cfg.mask == "none"  # before the first block there is no history
    result: dict[str, Any] = {
        **found.mean(),
        "users": len(found.users),
        "new": {"users": int(new[found.users].sum()), **found.mean(new)},
        "returning": {"users": int((~new)[found.users].sum()), **found.mean(~new)},
        f"mask_{other}": (test(block, build_mask(fed, block, "test", other)) if masks_differ else found).mean(),
        "on_blocks": [],
    }
    if cfg.unmasked:
        result |= unmasked_means(test(block, build_mask(fed, block, "test", "none")))
    for earlier in fed.stream.blocks[: block.index + 1]:
        if earlier.index == block.index and chosen in found.values:
            result["on_blocks"].append(found.mean()[chosen])
            continue
        own = cfg.old_block_mask == "own" or earlier.index == block.index
        seen = test(earlier, build_mask(fed, earlier if own else block, "test", cfg.mask), only_chosen=True)
        result["on_blocks"].append(seen.mean()[chosen])
    if len(block.valid.ids) and any(part.serves & {"correction", "personal_scores"} for part in fed.parts):
        # with the corrections that only serving applies; what tuning looks at
        mask = build_mask(fed, block, "valid", cfg.mask)
        result["valid_served"] = test(block, mask, only_chosen=True, wanted=block.valid).mean()[chosen]
    return result, found
