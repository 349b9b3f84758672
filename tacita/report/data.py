"""Reads run folders for reports.

A folder is checked once, here: a damaged one is refused with a sentence, never half shown.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import read_json
from tacita.core.types import FilterEffect
from tacita.data.filters import format_removals
from tacita.methods import make_method_label
from tacita.models import find_backbone_class, list_backbones
from tacita.report.promises import PRIVACY_KEY, find_largest_epsilon
from tacita.report.run_data import (
    CONTROLS,
    BlockData,
    ControlResult,
    Curve,
    RunData,
    Scores,
    exchanges_once,
    other_mask,
)

Json = dict[str, Any]
Curves = dict[str, Curve]

PROTOCOL_DEFAULTS = {
    "select_by": None,
    "mask": None,
    "old_block_mask": None,
    "sampled_negatives": None,
    "item_table": None,
    "hidden_items": "drop",
    "ties": "hash",
    "read": "train",
}
"""Settings of an evaluation that runs must share to be compared; the values of runs that are older than a choice."""


def _replace_unprintable(value: Any) -> Any:
    """Names without control characters, half letters and changes of direction."""
    if isinstance(value, dict):
        return {_replace_unprintable(key): _replace_unprintable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_unprintable(item) for item in value]
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "�" for letter in value)
    return value


# Numbers


def _parse_number(value: Any) -> float:
    if value is None:
        return math.nan
    return float(value)


def _parse_scores(values: Json) -> Scores:
    scores = Scores()
    for name, value in values.items():
        is_metric = "@" in name or name == "auc"
        if is_metric:
            scores[str(name)] = _parse_number(value)
    return scores


def _parse_tested(raw: Json) -> Scores:
    """The scores of a block; a mean over nobody is written as 0 and is no score."""
    scores = _parse_scores(raw)
    was_tested = raw.get("users", 1)
    if was_tested:
        return scores
    return Scores(dict.fromkeys(scores, math.nan))


def _parse_mean(raw: Json, blocks: list[Json]) -> Scores:
    """The mean over blocks 1.. (or the only one), where somebody was tested in any of them."""
    later_blocks = blocks[1:] or blocks
    was_tested = any(block.get("users", 1) for block in later_blocks)
    return _parse_tested({**raw, "users": was_tested})


# Blocks


def _parse_blocks(raw: Json, mask: str, is_once: bool) -> list[BlockData]:
    """All blocks; each must have been tested on itself and all before it."""
    untested = set()
    for number, raw_block in enumerate(raw["blocks"]):
        if not raw_block["users"]:
            untested.add(number)
    blocks = []
    for raw_block in raw["blocks"]:
        exchanges = int(raw_block["rounds"]) if is_once else 1
        blocks.append(_parse_block(raw_block, other_mask(mask), untested, exchanges))
    sizes = [len(block.on_blocks) for block in blocks]
    is_whole = sizes == list(range(1, len(blocks) + 1))
    if not blocks or not is_whole:
        raise ValueError("the blocks are not whole")
    return blocks


def _parse_block(raw: Json, second_mask: str, untested: set[int], exchanges: int) -> BlockData:
    """`exchanges`: what bytes per round are multiplied with."""
    groups = {}
    for name in ("new", "returning"):
        group = raw[name]
        n_users = int(group["users"])
        groups[name] = (n_users, _parse_scores(group))
    second_scores = raw.get(f"mask_{second_mask}", {})
    on_blocks = []
    for number, value in enumerate(raw["on_blocks"]):
        was_tested = number not in untested
        on_blocks.append(_parse_number(value) if was_tested else math.nan)
    best_round = raw["best_round"]
    valid = raw.get("valid") if best_round else None
    return BlockData(
        scores=_parse_tested(raw),
        other_mask_scores=_parse_tested({**second_scores, "users": raw["users"]}),
        groups=groups,
        users=int(raw["users"]),
        rounds=int(raw["rounds"]),
        best_round=int(best_round),
        valid=_parse_number(valid),
        up=_parse_number(raw["bytes_up"]) * exchanges,
        down=_parse_number(raw["bytes_down"]) * exchanges,
        on_blocks=on_blocks,
    )


# Controls


def _parse_controls(raw: Json, n_blocks: int) -> tuple[list[ControlResult], dict[str, str]]:
    """The controls with numbers, and why others have none."""
    all_controls = raw["controls"]
    unknown = sorted(set(all_controls) - set(CONTROLS))
    controls = []
    skipped = {}
    for key in [*CONTROLS, *unknown]:
        result = all_controls.get(key)
        if result and "skipped" in result:
            skipped[key] = str(result["skipped"])
        elif result:
            controls.append(_parse_control(key, result))
        elif raw.get("unfinished"):
            skipped[key] = "not yet: the run goes on with --resume"
    if any(len(control.blocks) != n_blocks for control in controls):
        raise ValueError("a control has other blocks than the method")
    return controls, skipped


def _parse_control(key: str, raw: Json) -> ControlResult:
    raw_blocks = raw["blocks"]
    blocks = [_parse_tested(block) for block in raw_blocks]
    return ControlResult(key, blocks, _parse_mean(raw["mean"], raw_blocks))


# Settings


def parse_removals(raw: list[Json]) -> list[FilterEffect]:
    """What filtering took, as result.json has it."""
    effects = []
    for step in raw:
        effect = FilterEffect(
            str(step["reason"]),
            _parse_before_after(step["rows"]),
            _parse_before_after(step["users"]),
            _parse_before_after(step["items"]),
        )
        effects.append(effect)
    return effects


def _parse_before_after(values: list[Any]) -> tuple[int, int]:
    before, after = values
    return int(before), int(after)


def _describe_removals(data: Json) -> str:
    effects = parse_removals(data.get("removed") or [])
    if not effects:
        return ""
    return format_removals(effects)


def name_method(backbone: str, method: str, parts: list[Json] | None) -> str:
    """What a run is called: its method or parts, or the backbone where that is all there is."""
    is_known = backbone in list_backbones()
    trains_rows = not is_known or find_backbone_class(backbone).learner == "rows"
    if trains_rows or parts:
        return make_method_label(method, parts)
    return backbone


def find_read_mode(result: Json) -> str | None:
    """What its tests read of people's items; an older folder may name what nothing read."""
    setting = result["config"]["evaluate"].get("read", "train")
    mode = result.get("read", setting)
    return mode if mode in ("train", "known") else None


def describe_read_mode(mode: str) -> str:
    """In words what a test reads of people's items."""
    if mode == "known":
        return "tested with all that people did before the test"
    return "tested with the training items alone"


def _make_recipe(config: Json, data: Json) -> str:
    """All that makes a run but its seeds, its split's seed and its controls."""
    split = _drop_key(config.get("split", {}), "seed")
    evaluation = _drop_key(config["evaluate"], "controls")
    source = data.get("source") or data["fingerprint"]  # older runs have the digest of data and split together
    recipe = {**config, "seed": None, "split": split, "evaluate": evaluation, "data": str(source)}
    return json.dumps(recipe, sort_keys=True)


def _drop_key(options: Json, key: str) -> Json:
    return {name: value for name, value in options.items() if name != key}


def _make_protocol(evaluation: Json, fingerprint: str) -> tuple[str, ...]:
    """What runs must share to be compared."""
    protocol = [fingerprint]
    for name, default in PROTOCOL_DEFAULTS.items():
        value = evaluation.get(name, default)
        protocol.append(str(value))
    return tuple(protocol)


def _describe_ranking(evaluation: Json) -> str:
    n_sampled = int(evaluation.get("sampled_negatives", 0))
    if n_sampled:
        return f"against {n_sampled} sampled items"
    return "of all items"


def _average_bytes(raw: Json, blocks: list[BlockData], is_once: bool) -> tuple[float, float]:
    """Up and down for each client, per block where a model sends once a block, else per round."""
    if is_once:
        up = statistics.fmean([block.up for block in blocks])
        down = statistics.fmean([block.down for block in blocks])
        return up, down
    totals = raw["bytes"]
    up = _parse_number(totals["up_per_client_and_round"])
    down = _parse_number(totals["down_per_client_and_round"])
    return up, down


def _parse_run(folder: Path, raw: Json, settings: str, events: Curves) -> RunData:
    config = raw["config"]
    data = raw["data"]
    evaluation = config["evaluate"]
    fingerprint = str(data["fingerprint"])
    backbone = str(config["backbone"].get("name", "mf"))
    is_once = exchanges_once(backbone)
    mask = str(evaluation["mask"])
    blocks = _parse_blocks(raw, mask, is_once)
    controls, skipped = _parse_controls(raw, len(blocks))
    up, down = _average_bytes(raw, blocks, is_once)
    continual = Scores()
    for name in ("la", "ra", "hm"):
        continual[name] = _parse_number(raw["continual"][name])
    return RunData(
        folder=_replace_unprintable(folder.resolve().name),
        method=name_method(backbone, str(config["method"]), config.get("parts")),
        backbone=backbone,
        seed=int(config["seed"]),
        split_seed=int(config.get("split", {}).get("seed", 0)),
        data=str(data["name"]),
        fingerprint=fingerprint,
        users=int(data["users"]),
        items=int(data["items"]),
        removed=_describe_removals(data),
        version=str(raw.get("tacita", "")),
        settings=settings,
        select_by=str(evaluation["select_by"]),
        mask=mask,
        read=find_read_mode(raw),
        ranking=_describe_ranking(evaluation),
        protocol=_make_protocol(evaluation, fingerprint),
        recipe=_make_recipe(config, data),
        blocks=blocks,
        mean=_parse_mean(raw["mean"], raw["blocks"]),
        continual=continual,
        controls=controls,
        skipped=skipped,
        up=up,
        down=down,
        valid=events["valid"],
        notes={name: curve for name, curve in events.items() if name != "valid"},
        privacy=[str(line) for line in raw.get(PRIVACY_KEY, ())],
        epsilon=find_largest_epsilon(raw),
    )


# Files


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise TacitaError(f"{path} is missing or unreadable; is {path.parent} a finished run folder?") from None


def _read_events(path: Path) -> Curves:
    """Validation scores ("valid") and what parts noted, by block and round, without unreadable lines."""
    curves: Curves = {"valid": {}}
    for line in _read_text(path).splitlines():
        try:
            _add_event(curves, json.loads(line))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return curves


def _add_event(curves: Curves, event: Json) -> None:
    block = int(event["block"])
    place = (block, int(event["round"]))
    values = {"valid": event["valid"], **event.get("notes", {})}
    for name, value in values.items():
        if value is not None:
            curve = curves.setdefault(str(name), {})
            curve[place] = float(value)


def refuse_changed(path: Path, noted: str | None) -> None:
    """Settings must be those the run began with; folders of earlier versions noted no digest of them."""
    if not noted:
        return
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != noted:
        raise TacitaError(f"{path} was changed or damaged after the run began; put it back, or start a new run.")


def missing_run_error(folder: Path) -> TacitaError:
    if folder.is_file():
        return TacitaError(f"{folder} is a file; name the folder of a run.")
    return TacitaError(f"no run folder {folder}; `tacita train --out {folder}` makes one.")


def damaged_ids_error(folder: Path) -> TacitaError:
    return TacitaError(f"{folder / 'ids.json'} is damaged: not the ids of a run; train again.")


def read_run(folder: Path) -> RunData:
    if not folder.is_dir():
        raise missing_run_error(folder)
    result_path = folder / "result.json"
    raw = read_json(result_path)
    settings = _read_text(folder / "config.toml")
    events = _read_events(folder / "events.jsonl")
    _refuse_changed_settings(folder)
    try:
        return _parse_run(folder, _replace_unprintable(raw), settings, events)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TacitaError(f"{result_path} is damaged: not the result of a run ({error}); train again.") from None


def _refuse_changed_settings(folder: Path) -> None:
    """Where a folder notes a digest of its settings, they must have it."""
    ids_path = folder / "ids.json"
    if not ids_path.is_file():
        return
    ids = read_json(ids_path)
    if not isinstance(ids, dict):
        raise damaged_ids_error(folder)
    refuse_changed(folder / "config.toml", ids.get("settings"))
