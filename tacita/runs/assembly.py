"""From a config to a run that can start: its model, parts, draws and data, refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.data.frames import Frame, read_frame
from tacita.data.sources import load
from tacita.data.splits import resolve_split, split
from tacita.federation.evaluation import selection_metric
from tacita.kernels.threads import max_threads, set_threads
from tacita.methods import Part, RunContext, build_parts, part_class, resolve_parts
from tacita.round.registry import wrap_run
from tacita.models import backbone_class
from tacita.models.base import Backbone, apply_budget, apply_form
from tacita.privacy.secure_sum import check_installed, check_size
from tacita.round.learner import build_learner
from tacita.round.plan import Federation, Plan
from tacita.runs.item_rows import with_features, with_side_rows
from tacita.runs.silos import with_silos


@dataclass(frozen=True)
class Machine:
    """How to run, as opposed to what: none of this can change a result."""

    threads: int = 0  # 0: all cores
    chunk: int = 256
    data_dir: Path | None = None


ALL_CORES = Machine()
NO_TIMES = "no times: the order of rows is taken as the order of events."


def use_threads(threads: int) -> None:
    most = max_threads()
    if threads < 0 or threads > most:
        raise TacitaError(f"--threads {threads}: this machine offers 1 to {most}, or 0 for all.")
    set_threads(threads or most)


def assemble(config: RunConfig, machine: Machine, frame: Frame | None = None) -> Federation:
    """Load, split and check everything, so that bad input is refused before anything is written.

    `given`: a table in memory, where that is what the run learns from.
    """
    backbone, parts, draws = build_components(config)
    check_settings(config, backbone)
    use_threads(machine.threads)
    if frame is not None:
        table = read_frame(frame, config.columns, config.date_format, config.decimal)
    else:
        table = load(
            config.data,
            data_dir=machine.data_dir,
            columns=config.columns or None,
            date_format=config.date_format,
            decimal=config.decimal,
        )
    config = expand_config(config.model_copy(update={"split": resolve_split(table, config.split)}), backbone, parts)
    stream = split(table, config.split)
    if backbone.reads_order and table.timestamp is None:
        stream = replace(stream, notes=(*stream.notes, NO_TIMES))
    if config.privacy.epsilon is not None and not config.privacy.blocks:
        planned_blocks = config.privacy.model_copy(update={"blocks": len(stream.blocks)})
        config = config.model_copy(update={"privacy": planned_blocks})
        backbone, parts, draws = build_components(config)
    smallest = stream.blocks[0].n_items
    check_cutoffs(config, smallest)
    backbone.check(smallest, stream.n_items)
    for part in parts:
        part.check(smallest)
    fed = Federation(backbone, parts, config, draws, machine.chunk, stream=stream)
    if config.train.aggregator == "secure":
        check_masks(fed)
    return wrap_run(with_silos(with_features(with_side_rows(fed))))


def expand_config(config: RunConfig, backbone: Backbone, parts: tuple[Part, ...]) -> RunConfig:
    """The same run with the value of every setting of its model and parts written out."""
    model = {"name": backbone.name, **backbone.config.model_dump(mode="json", exclude_none=True)}
    listed = [{"name": p.name, **p.config.model_dump(mode="json", exclude_none=True)} for p in parts]
    return config.model_copy(update={"backbone": model, "parts": listed})


def build_components(config: RunConfig, secret: str = "") -> tuple[Backbone, tuple[Part, ...], Draws]:
    """Model and parts; `secret` is what a device adds to the seed of draws that protect its people."""
    options = dict(config.backbone)
    name = options.pop("name", "mf")
    if not isinstance(name, str):
        raise TacitaError("backbone.name must be a name such as 'mf'.")
    cls = backbone_class(name)
    specs = resolve_parts(config.method, config.parts)
    if config.privacy.epsilon is not None:
        _refuse_other_budgets(specs)
    backbone = apply_budget(apply_form(cls(validate_model(cls.Config, options, f"backbone '{name}'"))), config.privacy)
    draws = Draws(config.seed, secret)
    world = RunContext(backbone, draws, config.train)
    parts = build_parts(specs, world)
    build_learner(world, parts).check()
    return backbone, parts, draws


def _refuse_other_budgets(specs: list[dict[str, Any]]) -> None:
    """Say where the budget of a part is set, for who looked for it among the settings of sums."""
    for spec in specs:
        cls = part_class(spec["name"])
        key = next((one for one in ("tiers", "budget", "epsilon") if one in cls.Config.model_fields), None)
        if cls.ledger is not Part.ledger and key is not None:
            raise TacitaError(
                f"part '{cls.name}' has budgets of its own: `{key}` of part {cls.name}; leave privacy.epsilon out."
            )


def build_plan(config: RunConfig, secret: str = "") -> Plan:
    """What everybody may know of a run, and, with a secret, draws that only a device knows."""
    backbone, parts, draws = build_components(config, secret)
    return Plan(backbone, parts, config, draws)


def check_settings(config: RunConfig, backbone: Backbone) -> None:
    """Refuse what cannot be trained on any data."""
    plan = config.train
    selection_metric(config)
    if plan.aggregator == "secure":
        check_installed()
        if plan.silos and not plan.n_joint_silos:
            raise TacitaError(
                "train.aggregator = 'secure' masks what clients send, and with train.in_silos = 'apart' silos add up "
                "what each of their people sends; use 'ideal', or in_silos = 'together'."
            )
    if config.evaluate.item_table == "personal" and (
        plan.silos or backbone.learner != "rows" or plan.participation.kind != "all"
    ):
        raise TacitaError(
            "evaluate.item_table = 'personal' is for users who are clients, train item rows and take part in every "
            f"round; use 'global' with train.silos = {plan.silos}, train.participation.kind = "
            f"'{plan.participation.kind}' and backbone '{backbone.name}'."
        )
    if config.evaluate.mask == "history" and config.evaluate.old_block_mask == "current":
        raise TacitaError(
            "evaluate.old_block_mask = 'current' with evaluate.mask = 'history' would hide an old block's own test "
            "items; use 'own'."
        )


def check_masks(fed: Federation) -> None:
    """Refuse more clients than masks are played for, where everybody takes part; else rounds say it."""
    plan = fed.config.train
    for block in fed.stream.blocks if plan.participation.kind == "all" else ():
        people = int((block.train.counts() > 0).sum())
        if people:
            check_size(min(plan.silos, people) if plan.silos else people)


def check_cutoffs(config: RunConfig, n_items: int) -> None:
    asked = {f"evaluate.k = {k}": k for k in config.evaluate.k}
    asked[f"evaluate.select_by = '{config.evaluate.select_by}'"] = selection_metric(config)[1]
    for setting, k in asked.items():
        if k < 1:
            raise TacitaError(f"{setting} makes no sense; a cut-off is a number from 1.")
        if k > n_items:
            fits = max(1, n_items // 2)
            raise TacitaError(
                f"{setting} is larger than the catalogue of {n_items} items; try --set evaluate.k=[{fits}] "
                f"--set evaluate.select_by=ndcg@{fits}."
            )
