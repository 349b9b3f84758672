"""What a run learns with where nobody names a model: the best form of tally that fits the data and the memory.

The rule:

1. rows with times, at most `MOST_ORDER_ITEMS` items, `LONG_HISTORY` rows or more of a user on average: tally-order;
2. else two models are tried, and validation decides: a graph filter, and tally-order, tally (no times) or tally read
   through the most popular items (larger catalogues). What does not fit into the free memory is left out, and what
   reads through popular items above `MOST_INPUT_BYTES`, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.data.frames import Frame
from tacita.federation.rounds import Progress, RoundReport, begin_block, make_initial_progress, run_block
from tacita.methods import resolve_config
from tacita.models.tally.solver import estimate_available_memory, estimate_solve_bytes
from tacita.report.formats import format_bytes
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, RunTable, assemble_federation, limit_to_catalogue, load_run_table

MOST_ORDER_ITEMS = 10_000
"""tally-order solves over all items of a catalogue."""
MOST_INPUTS = 4_000
"""Larger catalogues are read through this many popular items."""
MOST_INPUT_BYTES = 3e9
"""Memory that a trial of tally through popular items may take; a graph filter is sparse and takes less."""
ORDER_SOLVES = 4
"""Matrices of tally-order that stand beside each other in memory, compared with tally."""
LONG_HISTORY = 20
"""Rows of a user, on average, from which on tally-order needs no trial."""
CUTOFF = 10
BLOCK_SETTINGS = {"kind", "n_blocks", "base_share", "borders", "inner"}
"""Settings that say how a stream is cut into blocks."""
VALID_USERS = 3_000
"""Users whose validation items decide between models and settings."""
FILTER = "tally as a graph filter"

OnNote = Callable[[str], None]


@dataclass(frozen=True)
class DataFacts:
    """What the rule looks at."""

    n_rows: int
    n_users: int
    n_items: int
    has_times: bool
    free_memory: float  # bytes
    has_split: bool = False  # the source says which rows train and which test

    @property
    def has_long_histories(self) -> bool:
        return self.n_rows >= LONG_HISTORY * self.n_users

    def describe(self) -> str:
        times = "with times" if self.has_times else "without times"
        return f"{self.n_rows:,} rows {times}, {self.n_users:,} users, {self.n_items:,} items"


@dataclass(frozen=True)
class Candidate:
    """A model that the rule considers."""

    label: str
    backbone: dict[str, Any]


@dataclass(frozen=True)
class RoundRecord:
    """A round that was run before its run had a folder."""

    report: RoundReport
    seconds: float


@dataclass(frozen=True)
class TrainingStart:
    """A run that is assembled, and has maybe trained its first block already."""

    federation: Federation
    progress: Progress
    rounds: tuple[RoundRecord, ...]

    @property
    def score(self) -> float:
        return self.progress.best_score


@dataclass(frozen=True)
class DefaultModel:
    """The model that was chosen, and why."""

    label: str
    reason: str
    start: TrainingStart

    @property
    def config(self) -> RunConfig:
        return self.start.federation.config


def names_model(settings: dict[str, Any]) -> bool:
    """Whether settings say what to learn with, or how to train it."""
    return any(settings.get(key) for key in ("backbone", "method", "parts", "train"))


def resolve_model(
    settings: dict[str, Any], source: str, machine: Machine, frame: Frame | None, on_note: OnNote
) -> tuple[RunConfig, TrainingStart | None]:
    """The config of a run, with the model that fits best where settings name none."""
    if names_model(settings):
        return resolve_config(settings, source), None
    model = choose_model(settings, source, machine, frame, on_note)
    on_note(f"Model: {model.reason} {describe_cost(model.start.federation)}")
    on_note(
        "Choose otherwise with `--backbone tally` (or another model) or `--method fedavg` (or another method); "
        "`tacita methods` lists them."
    )
    return model.config, model.start


def describe_cost(federation: Federation) -> str:
    """What a form of tally takes: memory of the server as it solves, and what each client sends once in a block."""
    n_items = federation.stream.n_items
    backbone: Any = federation.backbone
    upload = format_bytes(backbone.count_upload_bytes(n_items))
    config = federation.config.backbone
    n_inputs = min(n_items, int(getattr(backbone.config, "most_inputs", n_items)))
    memory = estimate_solve_bytes(n_inputs)
    if config["name"] == "tally-order":
        memory *= ORDER_SOLVES
    elif n_inputs < n_items:
        memory = estimate_input_bytes(n_items)
    is_filter = config.get("solve") == "filter"
    solving = "" if is_filter else f"about {format_bytes(memory)} of memory to solve, and "
    return f"It takes {solving}{upload} from each client, once in a block."


def list_candidates(facts: DataFacts, is_private: bool = False) -> list[Candidate]:
    """The models that fit the data and the memory, the one that the rule prefers first."""
    candidates = []
    if facts.n_items <= MOST_ORDER_ITEMS:
        needed = estimate_solve_bytes(facts.n_items)
        if facts.has_times and not is_private and ORDER_SOLVES * needed <= facts.free_memory:
            candidates.append(Candidate("tally-order", {"name": "tally-order"}))
            if facts.has_long_histories:
                return candidates
        elif needed <= facts.free_memory:
            candidates.append(Candidate("tally", {"name": "tally"}))
    elif estimate_input_bytes(facts.n_items) <= min(facts.free_memory, MOST_INPUT_BYTES):
        label = f"tally through {MOST_INPUTS:,} items"
        candidates.append(Candidate(label, {"name": "tally", "most_inputs": MOST_INPUTS}))
    if not is_private:
        candidates.append(Candidate(FILTER, {"name": "tally", "solve": "filter"}))
    return candidates


def estimate_input_bytes(n_items: int) -> float:
    """Memory of tally through popular items: sums, products and weights of inputs times items."""
    n_matrices = 4
    return n_matrices * 8.0 * MOST_INPUTS * n_items


def complete_settings(settings: dict[str, Any], candidate: Candidate, facts: DataFacts) -> dict[str, Any]:
    """The settings with a model and, where they do not say otherwise, the protocol of a last item left out."""
    split_settings = settings.get("split") or {}
    if not facts.has_split and not BLOCK_SETTINGS & split_settings.keys():
        held_out = "last" if facts.has_times else "random"
        split_settings = {"kind": "leave-one-out", "held_out": held_out, **split_settings}
    evaluate = {"read": "known", "valid_users": VALID_USERS, **(settings.get("evaluate") or {})}
    if not {"k", "select_by"} & evaluate.keys():
        cutoff = min(CUTOFF, max(1, facts.n_items))
        evaluate |= {"k": [cutoff], "select_by": f"ndcg@{cutoff}"}
    return {**settings, "backbone": candidate.backbone, "split": split_settings, "evaluate": evaluate}


def choose_model(
    settings: dict[str, Any], source: str, machine: Machine, frame: Frame | None, on_note: OnNote
) -> DefaultModel:
    """Look at the data, try the models that fit, and take the one that validates best."""
    base = resolve_config({**settings, "backbone": {"name": "tally"}}, source)
    data = load_run_table(base, machine, frame)
    is_private = base.privacy.epsilon is not None
    if is_private:
        data = limit_to_catalogue(base, data)
    facts = measure_data(data, is_private)
    candidates = list_candidates(facts, is_private)
    if not candidates:
        raise TacitaError(
            f"{facts.describe()}: no model fits into {facts.free_memory / 1e9:.1f} GB of free memory; free some, or "
            "train on fewer items with --set split.k_core=5."
        )
    federations = {}
    for candidate in candidates:
        completed = complete_settings(settings, candidate, facts)
        config = resolve_config(completed, source)
        federations[candidate.label] = assemble_federation(config, machine, frame, data)
    if len(federations) == 1:
        [(label, federation)] = federations.items()
        start = TrainingStart(federation, make_initial_progress(federation), ())
        return DefaultModel(label, f"{label}, for {facts.describe()}.", start)
    labels = " and ".join(federations)
    on_note(f"No model is named: trying {labels} on {facts.describe()}.")
    starts = {label: _try_model(federation) for label, federation in federations.items()}
    return _choose_best_start(starts)


def measure_data(data: RunTable, is_private: bool = False) -> DataFacts:
    """What the rule looks at; under a budget nothing that one person's rows could change for others."""
    table = data.table
    has_times = table.timestamp is not None
    if table.timestamp is not None and not is_private:
        has_times = bool(np.ptp(table.timestamp) > 0)
    return DataFacts(
        n_rows=len(table.user),
        n_users=len(table.user_ids),
        n_items=len(table.item_ids),
        has_times=has_times,
        free_memory=estimate_available_memory(),
        has_split=table.split is not None or table.block is not None,
    )


def _try_model(federation: Federation) -> TrainingStart:
    """Train the first block of a run, validated and not yet tested."""
    began = time.monotonic()
    records: list[RoundRecord] = []

    def on_round(report: RoundReport, progress: Progress) -> None:
        seconds = round(time.monotonic() - began, 3)
        records.append(RoundRecord(report, seconds))

    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    run_block(federation, progress, on_round)
    return TrainingStart(federation, progress, tuple(records))


def _choose_best_start(starts: dict[str, TrainingStart]) -> DefaultModel:
    """The model with the best validation; where nobody validates, the one that the rule prefers."""
    label = max(starts, key=lambda name: starts[name].score)  # the first of several equals
    chosen = starts[label]
    others = [f"{name} {start.score:.4f}" for name, start in starts.items() if name != label]
    metric = chosen.federation.config.evaluate.select_by
    reason = f"{label}: its validation {metric} is {chosen.score:.4f} ({', '.join(others)})."
    if chosen.score < 0:
        reason = f"{label}: nobody has enough items to validate, so the rule decides by size."
    return DefaultModel(label, reason, chosen)
