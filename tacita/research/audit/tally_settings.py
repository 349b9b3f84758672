"""Settings of tally side by side: what each costs in quality and bytes, and what attacks still find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Doubles, ServerState
from tacita.federation.rounds import begin_block, end_block, make_initial_progress, run_block
from tacita.messages import count_wire_bytes
from tacita.models.tally.model import STATE, Tally, TallyConfig, require_tally
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import unpack_dense_weights
from tacita.research.audit.audit_progress import Advance, AuditTable, OnData, OnStep, StepCounter
from tacita.research.audit.peeling_attack import guess_from_columns, peel_histories
from tacita.research.audit.reconstruction import NEARLY_READ, compute_best_overlap, rebuild_gram
from tacita.research.audit.tally_attacks import AttackTarget, count_steps, run_attacks
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, build_components
from tacita.runs.controls import average_incremental_blocks

BackboneOptions = dict[str, Any]

OFF: BackboneOptions = {"min_item": 0, "min_pair": 0, "keep": 0}
SETTINGS: list[dict[str, int]] = [
    {"min_item": 5},
    {"min_pair": 5},
    {"keep": 200},
    {"keep": 50},
    {"min_item": 5, "keep": 200},
    {"min_item": 5, "keep": 50},
    {"min_item": 5, "keep": 20},
]


def build_settings(options: BackboneOptions, brief: bool) -> dict[str, BackboneOptions]:
    """Nothing cut, each cut alone, some together, and the run's own; brief: the run's own only."""
    own = {name: options[name] for name in OFF}
    settings: dict[str, BackboneOptions] = {}
    tried: list[dict[str, int]] = []
    if not brief:
        tried = [{}, *SETTINGS]
    for cuts in tried:
        cut_options = {**OFF, **cuts}
        if cut_options != own:
            settings[_name_cuts(cuts)] = cut_options
    settings["as set"] = own
    return settings


def _name_cuts(cuts: dict[str, int]) -> str:
    words = [f"{name} {value}" for name, value in cuts.items()]
    return ", ".join(words) or "none"


def audit_tally(
    config: RunConfig,
    machine: Machine,
    brief: bool = False,
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """Who can be read under each setting, with controls, and what the setting costs."""
    federation = assemble_federation(config, machine)
    stream = federation.stream
    if on_data:
        on_data(stream)
    model = require_tally(federation.backbone)
    refuse_other_sums(model.config, stream)
    settings = build_settings(model.config.model_dump(), brief)
    users = [_count_active(block) for block in stream.blocks]
    steps_each = len(users) + count_steps(users[0])
    steps = StepCounter(steps_each * len(settings), on_done)
    steps.reach(0)
    rows = []
    for done, (name, options) in enumerate(settings.items()):
        steps.reach(done * steps_each)
        cut_federation = _with_cuts(federation, config, options)
        backbone = require_tally(cut_federation.backbone)
        findings = audit_setting(cut_federation, backbone, steps.advance)
        rows.append({"setting": name, **findings})
    steps.reach(steps.total)
    return {
        "data": stream.name,
        "settings": model.config.model_dump(mode="json"),
        "users": users,
        "bytes_up_readable": _average_upload_bytes(stream),
        "bytes_up_maskable": model.count_upload_bytes(stream.n_items),
        "rows": rows,
    }


def refuse_other_sums(config: TallyConfig, stream: BlockStream) -> None:
    """G can be rebuilt from plain sums over the whole catalogue alone."""
    is_plain = not config.ridge_popularity and not config.length_power
    is_whole = stream.blocks[0].n_items <= config.most_inputs
    if not is_plain or not is_whole:
        raise TacitaError(
            "the audit rebuilds G of plain sums: ridge_popularity and length_power must be 0, and the catalogue no "
            "larger than most_inputs."
        )


def _with_cuts(federation: Federation, config: RunConfig, options: BackboneOptions) -> Federation:
    """The federation with tally under other cuts; of tally-order, B alone."""
    tally_options = {}
    for name, value in config.backbone.items():
        if name in TallyConfig.model_fields:
            tally_options[name] = value
    backbone_config = {**tally_options, "name": "tally", **options}
    cut_config = config.model_copy(update={"backbone": backbone_config})
    backbone = build_components(cut_config)[0]
    return replace(federation, config=cut_config, backbone=backbone)


def _count_active(block: Block) -> int:
    return int((block.train.counts() > 0).sum())


def _average_upload_bytes(stream: BlockStream) -> float:
    """What a person sends on average where lists of items can be read."""
    block_counts = [block.train.counts() for block in stream.blocks]
    counts = np.concatenate(block_counts)
    active_counts = counts[counts > 0]
    return 4.0 * float(active_counts.mean())


def audit_setting(federation: Federation, backbone: Tally, advance: Advance) -> AuditTable:
    """One stream: its quality, what it sends, whom peeling reads in each block, what attacks find in the first."""
    progress = make_initial_progress(federation)
    gram_before = np.zeros((0, 0))
    overlaps: list[Doubles] = []
    attacks: dict[str, Any] = {}
    for block in federation.stream.blocks:
        begin_block(federation, progress, block.index)
        if block.index == 0:
            seed = federation.config.seed
            target = AttackTarget.from_state(backbone, progress.server, block.train, seed)
            attacks = run_attacks(target, advance)
        run_block(federation, progress, lambda report, now: None)
        end_block(federation, progress)
        gram = rebuild_server_gram(backbone, progress.server)
        added = _subtract_faded(gram, gram_before, backbone.config.decay)
        gram_before = gram
        peeled = peel_histories(added)
        weights = unpack_dense_weights(progress.server.heads)
        from_columns = guess_from_columns(weights)
        guesses = np.concatenate([peeled, from_columns])
        terms, _ = backbone.build_user_terms(block.train, block.n_items)
        histories = terms.toarray() > 0
        overlaps.append(compute_best_overlap(guesses, histories))
        advance()
    return {
        **_find_first_metric(progress.results),
        "valid": _average_validation(progress.results),
        "attacks": attacks,
        "peeled": [int((overlap == 1).sum()) for overlap in overlaps],
        "peeled_nearly": [int((overlap >= NEARLY_READ).sum()) for overlap in overlaps],
        "bytes_down": _count_broadcast_bytes(progress.server),
    }


def _subtract_faded(gram: Doubles, before: Doubles, decay: float) -> Doubles:
    """What a block added to G."""
    n_before = len(before)
    added = gram.copy()
    added[:n_before, :n_before] -= decay * before
    return added


def _find_first_metric(results: list[dict[str, Any]]) -> AuditTable:
    means = average_incremental_blocks(results)
    first_names = list(means)[:1]
    return {name: means[name] for name in first_names}


def _average_validation(results: list[dict[str, Any]]) -> float | None:
    """The mean validation score after the first block, or of the first where there is no other."""
    later_results = results[1:] or results
    scores = [result["valid"] for result in later_results]
    if None in scores:
        return None
    return float(np.mean(scores))


def _count_broadcast_bytes(server: ServerState) -> float:
    sizes = [count_wire_bytes(array) for array in server.heads.values()]
    return float(sum(sizes))


def find_largest_count(backbone: Tally, server: ServerState) -> float:
    """How many have the most popular item, faded like G; the peeling reader knows it."""
    n_items = len(server.items)
    shape = PairShape.from_inputs(n_items, server.heads["inputs"])
    item = np.arange(n_items, dtype=np.int64)
    diagonal_places = item * (item + 3) // 2
    sums = PairSums.from_arrays(server.parts[STATE])
    counts = backbone.compute_released_gram(sums, shape, diagonal_places)
    return float(counts.max())


def rebuild_server_gram(backbone: Tally, server: ServerState) -> Doubles:
    weights = unpack_dense_weights(server.heads)
    most_popular = find_largest_count(backbone, server)
    return rebuild_gram(weights, backbone.config.ridge, most_popular)
