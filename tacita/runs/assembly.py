"""From a config to a run that can start: its model, parts, draws and data, refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tacita.core.config import RunConfig, SplitConfig, TrainConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.data.block_cuts import isolate_people_in_split, limit_source_blocks, refuse_split_across_people
from tacita.data.catalogue import FROM_DATA, find_catalogue, missing_catalogue_error, restrict_to_catalogue
from tacita.data.frames import Frame, read_frame
from tacita.data.interaction_table import Interactions
from tacita.data.shards.folder import is_shard_folder, open_shards, read_listing, refuse_shard_folder
from tacita.data.sources import find_published_user_count, load_interactions
from tacita.data.splits import resolve_split, split
from tacita.federation.evaluation import parse_selection_metric
from tacita.kernels.threads import max_threads, set_threads
from tacita.methods import Part, RunContext, build_parts, find_part_class, resolve_parts
from tacita.models import find_backbone_class
from tacita.models.base import Backbone, apply_budget, with_chosen_form
from tacita.models.statistic_model import StatisticModel
from tacita.privacy.secure_sum import check_installed, check_size
from tacita.round.capabilities import Privacy
from tacita.round.clashes import check_parts
from tacita.round.learner import build_learner, find_ledger
from tacita.round.part import implements
from tacita.round.plan import Federation, Plan
from tacita.round.registry import wrap_run
from tacita.round.release_rules import covers_mean
from tacita.runs.item_rows import with_features, with_side_rows
from tacita.runs.noise_secret import draw_secret
from tacita.runs.silos import with_silos

if TYPE_CHECKING:
    from tacita.federation.ranks.rank_team import RankTeam


@dataclass(frozen=True)
class Machine:
    """How to run, as opposed to what: none of this can change a result."""

    threads: int = 0  # 0: all cores
    chunk: int = 256
    data_dir: Path | None = None
    ranks: RankTeam | None = None  # processes that train beside this one


ALL_CORES = Machine()
LIST_CHUNKS = 16
"""Chunks of clients that are one where what they send is lists of items."""
Parts = tuple[Part, ...]
BUDGET_KEYS = ("tiers", "budget", "epsilon")  # settings of parts that hold a budget
NO_TIMES = "no times: the order of rows is taken as the order of events."


MANY_USERS = 200_000
SAMPLED = {"valid_users": 3_000, "test_users": 10_000, "controls": False}
"""What of a run on shards is measured with so many users, where its settings say nothing."""


def use_threads(threads: int) -> None:
    most = max_threads()
    if threads < 0 or threads > most:
        raise TacitaError(f"--threads {threads}: this machine offers 1 to {most}, or 0 for all.")
    set_threads(threads or most)


@dataclass(frozen=True)
class RunTable:
    """The rows that runs learn from, and the splits of them that were made already."""

    table: Interactions
    streams: dict[str, BlockStream] = field(default_factory=dict)

    def split(self, config: SplitConfig) -> BlockStream:
        key = config.model_dump_json()
        if key not in self.streams:
            self.streams[key] = split(self.table, config)
        return self.streams[key]


def load_run_table(config: RunConfig, machine: Machine, frame: Frame | None = None) -> RunTable:
    """Read the rows that a config names, once for several runs on them."""
    use_threads(machine.threads)
    return RunTable(_load_table(config, machine, frame))


def assemble_federation(
    config: RunConfig,
    machine: Machine,
    frame: Frame | None = None,
    data: RunTable | None = None,
    noise_secret: str | None = None,
) -> Federation:
    """Load, split and check everything, so that bad input is refused before anything is written.

    `frame`: a table in memory, where the run learns from one. `data`: its rows, where they were read before.
    `noise_secret`: of a run that goes on.
    """
    backbone, parts, draws = build_components(config)
    check_settings(config, backbone)
    if frame is None and is_shard_folder(config.data):
        config, stream = _open_split_data(config, parts)
        config = expand_config(config, backbone, parts)
        has_times = "time" in stream.blocks[0].train.values
    else:
        if data is None:
            data = load_run_table(config, machine, frame)
        config, data = _prepare_table(config, parts, data)
        config = expand_config(config, backbone, parts)
        stream = data.split(config.split)
        has_times = data.table.timestamp is not None
    if backbone.reads_order and not has_times:
        stream = replace(stream, notes=(*stream.notes, NO_TIMES))
    if config.privacy.epsilon is not None and not config.privacy.blocks:
        planned_blocks = config.privacy.model_copy(update={"blocks": len(stream.blocks)})
        config = config.model_copy(update={"privacy": planned_blocks})
    lab_secret = _choose_secret(config, parts, noise_secret)
    backbone, parts, draws = build_components(config, lab_secret=lab_secret)
    _check_catalogue(config, backbone, parts, stream)
    chunk = _choose_chunk(backbone, machine, stream.n_items)
    federation = Federation(backbone, parts, config, draws, chunk, stream=stream)
    if config.train.aggregator == "secure":
        check_masks(federation)
    federation = with_side_rows(federation)
    federation = with_features(federation)
    wrapped: Federation = wrap_run(with_silos(federation))
    return wrapped


def _prepare_table(config: RunConfig, parts: Parts, data: RunTable) -> tuple[RunConfig, RunTable]:
    """The rows that a run may read, and its settings with what depends on them decided."""
    data = _with_catalogue(config, parts, data)
    config, data = _with_public_blocks(config, parts, data)
    config = _with_denominator(config, parts, data.table)
    split_config = _choose_split(config, parts, data.table)
    return config.model_copy(update={"split": split_config}), data


def _open_split_data(config: RunConfig, parts: Parts) -> tuple[RunConfig, BlockStream]:
    """Data that was split when it was imported; the run takes the settings of that split."""
    folder = Path(config.data)
    if states_epsilon(config, parts):
        raise TacitaError(
            f"{folder} has a list of items made of everybody's rows, which no epsilon counts; train on the file "
            "itself, with a public list of items (--set catalogue=FILE)."
        )
    for name in ("catalogue", "columns", "date_format", "decimal", "drop_missing"):
        if getattr(config, name):
            raise TacitaError(f"{folder} was read when it was imported, so {name} comes too late; leave it out.")
    split_config = read_listing(folder).split
    changed = sorted(name for name in config.split.model_fields_set if _differs(config.split, split_config, name))
    if changed:
        raise TacitaError(
            f"{folder} was split when it was imported, so split.{changed[0]} comes too late; leave it out, or import "
            f"the data again with --set split.{changed[0]}=..."
        )
    config, note = _measure_samples(config.model_copy(update={"split": split_config}), read_listing(folder).users)
    stream = open_shards(folder)
    return config, replace(stream, notes=(*stream.notes, *note))


def _measure_samples(config: RunConfig, n_users: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Where measuring everybody would take hours, samples of people are measured, unless the settings decide."""
    unset = {name: value for name, value in SAMPLED.items() if name not in config.evaluate.model_fields_set}
    if n_users < MANY_USERS or not unset:
        return config, ()
    evaluate = config.evaluate.model_copy(update=unset)
    note = (
        f"{n_users:,} people are many, so samples are measured: evaluate.valid_users = {evaluate.valid_users}, "
        f"evaluate.test_users = {evaluate.test_users}, evaluate.controls = {str(evaluate.controls).lower()}; "
        "--set changes each, and 0 measures all."
    )
    return config.model_copy(update={"evaluate": evaluate}), (note,)


def _differs(requested: SplitConfig, actual: SplitConfig, name: str) -> bool:
    value = getattr(requested, name)
    return value not in (getattr(actual, name), SplitConfig.model_fields[name].default)


def _choose_chunk(backbone: Backbone, machine: Machine, n_items: int) -> int:
    """How many clients answer at once: more where uploads are mere lists, since each chunk goes through whole sums."""
    if isinstance(backbone, StatisticModel) and backbone.sums_lists(n_items):
        return LIST_CHUNKS * machine.chunk
    return machine.chunk


def states_epsilon(config: RunConfig, parts: Parts) -> bool:
    """Whether a run counts releases, so that nothing may leave beside them."""
    if config.privacy.epsilon is not None:
        return True
    return any(find_ledger(part) is not None for part in parts)


def _choose_secret(config: RunConfig, parts: Parts, noise_secret: str | None) -> str:
    """What the noise of a lab run follows: a secret of its own, unless settings say that it follows the seed."""
    has_noise = any(part.privacy.needs_secret_noise for part in parts if part.privacy is not None)
    protects_people = states_epsilon(config, parts) or has_noise
    if config.privacy.reproducible_noise or not protects_people:
        return ""
    return noise_secret or draw_secret()


def _choose_split(config: RunConfig, parts: Parts, table: Interactions) -> SplitConfig:
    """The split with what depends on the data decided; under a budget everybody's rows are split by themselves."""
    if not states_epsilon(config, parts):
        return resolve_split(table, config.split)
    refuse_split_across_people(config.split)
    return isolate_people_in_split(resolve_split(table, config.split))


def _with_public_blocks(config: RunConfig, parts: Parts, data: RunTable) -> tuple[RunConfig, RunTable]:
    """Under a budget a public number of blocks, also where rows of a file name theirs."""
    if not states_epsilon(config, parts):
        return config, data
    table, n_blocks = limit_source_blocks(data.table, config.split, config.privacy.blocks)
    if table is data.table:
        return config, data
    split_config = config.split.model_copy(update={"n_blocks": n_blocks})
    return config.model_copy(update={"split": split_config}), RunTable(table)


def limit_to_catalogue(config: RunConfig, data: RunTable) -> RunTable:
    """The data as a run with this config reads it: with a public list of items where there is a budget."""
    parts = build_components(config)[1]
    return _with_catalogue(config, parts, data)


def _with_catalogue(config: RunConfig, parts: Parts, data: RunTable) -> RunTable:
    """The data with a public list of items: required under a budget, unless a list made of the data is accepted."""
    has_budget = states_epsilon(config, parts)
    if config.catalogue is None and not has_budget:
        return data
    catalogue = find_catalogue(config.catalogue, config.data, data.table)
    if catalogue is not None:
        return RunTable(restrict_to_catalogue(data.table, catalogue, only_public=has_budget))
    if has_budget and config.catalogue != FROM_DATA:
        raise missing_catalogue_error(data.table)
    return data


def _with_denominator(config: RunConfig, parts: Parts, table: Interactions) -> RunConfig:
    """With a public number to divide noised sums by: how many named or synthetic data enrols, not who has rows."""
    enrolled = find_published_user_count(config.data, table)
    if config.train.denominator is not None or enrolled is None:
        return config
    drawn = config.train.participation
    expected = float(enrolled) if drawn.kind == "all" else drawn.rate * enrolled
    for part in parts:
        privacy = part.privacy
        if privacy is None or not covers_mean(part):
            continue
        weight = privacy.compute_expected_weight(expected)
        if weight is not None:
            train = config.train.model_copy(update={"denominator": weight})
            return config.model_copy(update={"train": train})
    return config


def _load_table(config: RunConfig, machine: Machine, frame: Frame | None) -> Interactions:
    """The rows that a run learns from: of a table in memory, or of its dataset; row by row under a budget."""
    row_by_row = states_epsilon(config, build_components(config)[1])
    if frame is None:
        refuse_shard_folder(config.data)
    if frame is not None:
        return read_frame(frame, config.columns, config.date_format, config.decimal, config.drop_missing, row_by_row)
    return load_interactions(
        config.data,
        data_dir=machine.data_dir,
        columns=config.columns or None,
        date_format=config.date_format,
        decimal=config.decimal,
        drop_missing=config.drop_missing,
        row_by_row=row_by_row,
    )


def _check_catalogue(config: RunConfig, backbone: Backbone, parts: Parts, stream: BlockStream) -> None:
    """Refuse settings that ask for more items than the first block has."""
    n_items = stream.blocks[0].n_items
    check_cutoffs(config, n_items)
    backbone.check(n_items, stream.n_items)
    check_parts(parts, config.train, n_items)


def expand_config(config: RunConfig, backbone: Backbone, parts: Parts) -> RunConfig:
    """The same run with the value of every setting of its model and parts written out."""
    model_table = _expand_options(backbone.name, backbone.config)
    part_tables = [_expand_options(part.name, part.config) for part in parts]
    return config.model_copy(update={"backbone": model_table, "parts": part_tables})


def _expand_options(name: str, options: BaseModel) -> dict[str, Any]:
    return {"name": name, **options.model_dump(mode="json", exclude_none=True)}


def build_components(config: RunConfig, secret: str = "", lab_secret: str = "") -> tuple[Backbone, Parts, Draws]:
    """Model and parts; a secret is what a device, or a lab run, adds to the seed of draws that protect people."""
    options = dict(config.backbone)
    name = options.pop("name", "mf")
    if not isinstance(name, str):
        raise TacitaError("backbone.name must be a name such as 'mf'.")
    cls = find_backbone_class(name)
    specs = resolve_parts(config.method, config.parts)
    if config.privacy.epsilon is not None:
        _refuse_other_budgets(specs)
    backbone_config = validate_model(cls.Config, options, f"backbone '{name}'")
    backbone = with_chosen_form(cls(backbone_config))
    backbone = apply_budget(backbone, config.privacy)
    draws = Draws(config.seed, secret, lab_secret)
    context = RunContext(backbone, draws, config.train)
    parts = build_parts(specs, context)
    build_learner(context, parts).check()
    return backbone, parts, draws


def _refuse_other_budgets(specs: list[dict[str, Any]]) -> None:
    """Refuse a budget for sums beside a part that has its own, and name the setting of the part."""
    for spec in specs:
        cls = find_part_class(spec["name"])
        budget_keys = [key for key in BUDGET_KEYS if key in cls.Config.model_fields]
        counts_releases = issubclass(cls, Privacy) and implements(cls, "ledger")
        if counts_releases and budget_keys:
            raise TacitaError(
                f"part '{cls.name}' has budgets of its own: `{budget_keys[0]}` of part {cls.name}; "
                "leave privacy.epsilon out."
            )


def build_plan(config: RunConfig, secret: str = "") -> Plan:
    """What everybody may know of a run, and, with a secret, draws that only a device knows."""
    backbone, parts, draws = build_components(config, secret)
    return Plan(backbone, parts, config, draws)


def check_settings(config: RunConfig, backbone: Backbone) -> None:
    """Refuse what cannot be trained on any data."""
    parse_selection_metric(config)
    if config.train.aggregator == "secure":
        check_installed()
        _refuse_masks_in_silos(config.train)
    if config.evaluate.item_table == "personal":
        _check_personal_tables(config.train, backbone)
    if config.evaluate.mask == "history" and config.evaluate.old_block_mask == "current":
        raise TacitaError(
            "evaluate.old_block_mask = 'current' with evaluate.mask = 'history' would hide an old block's own test "
            "items; use 'own'."
        )


def _refuse_masks_in_silos(settings: TrainConfig) -> None:
    """Masks hide what each client sends, and silos that train apart see it."""
    if settings.silos and not settings.n_joint_silos:
        raise TacitaError(
            "train.aggregator = 'secure' masks what clients send, and with train.in_silos = 'apart' silos add up "
            "what each of their people sends; use 'ideal', or in_silos = 'together'."
        )


def _check_personal_tables(settings: TrainConfig, backbone: Backbone) -> None:
    """Refuse scores from a client's own table where users have none of each round."""
    takes_part_always = settings.participation.kind == "all"
    has_own_rows = not settings.silos and backbone.learner == "rows"
    if not has_own_rows or not takes_part_always:
        raise TacitaError(
            "evaluate.item_table = 'personal' is for users who are clients, train item rows and take part in every "
            f"round; use 'global' with train.silos = {settings.silos}, train.participation.kind = "
            f"'{settings.participation.kind}' and backbone '{backbone.name}'."
        )


def check_masks(federation: Federation) -> None:
    """Refuse more clients than masks are simulated for, if all take part; otherwise each round checks it."""
    settings = federation.config.train
    if settings.participation.kind != "all":
        return
    for block in federation.stream.blocks:
        n_people = int((block.train.counts() > 0).sum())
        n_clients = min(settings.silos, n_people) if settings.silos else n_people
        if n_people:
            check_size(n_clients)


def check_cutoffs(config: RunConfig, n_items: int) -> None:
    """Refuse lists that are longer than the catalogue."""
    cutoffs = {f"evaluate.k = {k}": k for k in config.evaluate.k}
    _, selecting_k = parse_selection_metric(config)
    cutoffs[f"evaluate.select_by = '{config.evaluate.select_by}'"] = selecting_k
    for setting, k in cutoffs.items():
        if k < 1:
            raise TacitaError(f"{setting} makes no sense; a cut-off is a number from 1.")
        if k > n_items:
            fits = max(1, n_items // 2)
            raise TacitaError(
                f"{setting} is larger than the catalogue of {n_items} items; try --set evaluate.k=[{fits}] "
                f"--set evaluate.select_by=ndcg@{fits}."
            )
