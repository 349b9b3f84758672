"""What a report reads of a run folder, and what can be said about it in words.

A folder is checked once, here: a damaged one is refused with a sentence, never half shown.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import read_json
from tacita.core.types import FilterEffect
from tacita.data.filters import format_removals
from tacita.methods import method_label
from tacita.models import backbone_class, backbone_names
from tacita.report.promises import PRIVACY_KEY, find_largest_epsilon

CONTROLS = {
    "popular": ("most popular", "showing everybody the same popular items"),
    "alone": ("no federation", "every client training alone"),
    "linear": ("centralised linear", "a linear model on everybody's data in one place"),
    "random": ("random", "a random order"),
}


class Scores(dict[str, float]):
    """Metric -> value; what was not measured is NaN."""

    def __missing__(self, metric: str) -> float:
        return math.nan


Curve = dict[tuple[int, int], float]
"""(block, round) -> value"""


@dataclass(frozen=True)
class ControlResult:
    """A scorer beside the method: its name, what it does, and its numbers."""

    key: str
    blocks: list[Scores]
    mean: Scores

    @property
    def name(self) -> str:
        return control_name(self.key)

    @property
    def description(self) -> str:
        return CONTROLS.get(self.key, (self.key, self.key))[1]


def control_name(key: str) -> str:
    return CONTROLS.get(key, (key, key))[0]


@dataclass(frozen=True)
class BlockData:
    scores: Scores
    other_mask_scores: Scores  # under the other mask
    groups: dict[str, tuple[int, Scores]]  # new, returning -> users, scores
    users: int
    rounds: int
    best_round: int
    valid: float
    up: float
    down: float
    on_blocks: list[float]


@dataclass(frozen=True)
class RunData:
    """What a report needs of a run folder, checked."""

    folder: str
    method: str
    backbone: str
    seed: int
    split_seed: int
    data: str
    fingerprint: str
    users: int
    items: int
    removed: str  # what filtering took, in words
    version: str
    settings: str  # config.toml as it stands
    select_by: str
    mask: str
    read: str | None  # what of a block devices read when they are tested; None: nothing
    ranking: str
    protocol: tuple[Any, ...]  # two runs can be compared if these are equal
    recipe: str  # all settings but seeds and controls, and the data: where these are equal, only chance differs
    blocks: list[BlockData]
    mean: Scores
    continual: Scores  # la, ra, hm
    controls: list[ControlResult]
    skipped: dict[str, str]  # control -> why
    up: float
    down: float
    valid: Curve  # validation score
    notes: dict[str, Curve]  # what the method's parts noted in each round
    privacy: list[str]  # what is promised, in words; nothing: the run is from before that was kept
    epsilon: float | None  # that a person is promised, or has spent where that is more; None: there is none

    @property
    def numbers(self) -> tuple[float, ...]:
        """Everything that was measured: runs that have the same drew nothing apart."""
        each = [
            self.mean,
            self.continual,
            *(b.scores for b in self.blocks),
            *(b.other_mask_scores for b in self.blocks),
        ]
        return tuple(value if value == value else -1.0 for one in each for value in one.values())

    @property
    def exchange_unit(self) -> str:
        """What a client sends its bytes in: a round, or a block where there is one exchange in each."""
        return "block" if _exchanges_once(self.backbone) else "round"

    @property
    def main_metric(self) -> str:
        """The selecting metric, or the first one where that is not reported."""
        return self.select_by if self.select_by in self.mean else next(iter(self.mean), self.select_by)

    @property
    def score(self) -> float:
        return self.mean[self.main_metric]

    @property
    def metrics(self) -> list[str]:
        """All of them, the main one first."""
        return sorted(self.mean, key=lambda m: m != self.main_metric)

    @property
    def popular(self) -> ControlResult | None:
        return next((c for c in self.controls if c.key == "popular"), None)

    @property
    def better_controls(self) -> list[ControlResult]:
        """Controls that beat the method on the mean."""
        return [c for c in self.controls if self.score < c.mean[self.main_metric]]

    @property
    def other_mask(self) -> str:
        return "history" if self.mask == "block" else "block"

    @property
    def block_names(self) -> list[str]:
        return [str(n) for n in range(len(self.blocks))]

    @property
    def mean_label(self) -> str:
        """Which blocks the mean is over."""
        last = len(self.blocks) - 1
        if last < 2:
            return ("block 0", "block 1")[last]
        skipped = [str(n) for n, b in enumerate(self.blocks) if n and not b.users]
        return f"mean of blocks 1–{last}" + (f" without {', '.join(skipped)}" if skipped else "")


def _clean(value: Any) -> Any:
    """Names without control characters, half letters and changes of direction."""
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return "".join(c if c.isprintable() else "�" for c in value) if isinstance(value, str) else value


def _parse_number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _parse_scores(values: dict[str, Any]) -> Scores:
    return Scores({str(k): _parse_number(v) for k, v in values.items() if "@" in k or k == "auc"})


def _parse_tested(raw: dict[str, Any]) -> Scores:
    """The scores of a block; a mean over nobody is written as 0 and is no score."""
    found = _parse_scores(raw)
    return found if raw.get("users", 1) else Scores(dict.fromkeys(found, math.nan))


def _parse_mean(raw: dict[str, Any], blocks: list[dict[str, Any]]) -> Scores:
    """The mean over blocks 1.. (or the only one), where somebody was tested in any of them."""
    return _parse_tested({**raw, "users": any(b.get("users", 1) for b in blocks[1:] or blocks)})


def _exchanges_once(backbone: str) -> bool:
    """Whether a model sends once a block: the rounds after that only try ways of scoring on validation."""
    return backbone in backbone_names() and backbone_class(backbone).learner == "statistic"


def _parse_block(raw: dict[str, Any], other: str, untested: set[int], sent: int) -> BlockData:
    groups = {name: (int(raw[name]["users"]), _parse_scores(raw[name])) for name in ("new", "returning")}
    return BlockData(
        scores=_parse_tested(raw),
        other_mask_scores=_parse_tested({**raw.get(f"mask_{other}", {}), "users": raw["users"]}),
        groups=groups,
        users=int(raw["users"]),
        rounds=int(raw["rounds"]),
        best_round=int(raw["best_round"]),
        valid=_parse_number(raw.get("valid")) if raw["best_round"] else math.nan,
        up=_parse_number(raw["bytes_up"]) * sent,
        down=_parse_number(raw["bytes_down"]) * sent,
        on_blocks=[math.nan if s in untested else _parse_number(v) for s, v in enumerate(raw["on_blocks"])],
    )


def parse_removals(raw: list[dict[str, Any]]) -> list[FilterEffect]:
    """What filtering took, as result.json has it."""

    def pair(values: list[Any]) -> tuple[int, int]:
        before, after = values
        return int(before), int(after)

    return [FilterEffect(str(r["reason"]), pair(r["rows"]), pair(r["users"]), pair(r["items"])) for r in raw]


def method_name(backbone: str, method: str, parts: list[dict[str, Any]] | None) -> str:
    """What a run is called: its method or parts, or the backbone where that is all there is."""
    trains = backbone not in backbone_names() or backbone_class(backbone).learner == "rows"
    if trains or parts:
        return method_label(method, parts)
    return backbone


def find_read_mode(result: dict[str, Any]) -> str | None:
    """What its tests read of people's items; a folder from before that was kept may name what nothing read."""
    found = result.get("read", result["config"]["evaluate"].get("read", "train"))
    return found if found in ("train", "known") else None


def _make_recipe(config: dict[str, Any], data: dict[str, Any]) -> str:
    """What makes a run but for what is drawn in it and in its split, and for what else was measured beside it."""
    split = {name: value for name, value in config.get("split", {}).items() if name != "seed"}
    how = {name: value for name, value in config["evaluate"].items() if name != "controls"}
    source = data.get("source") or data["fingerprint"]  # of runs from before that was kept: of data and split together
    made = {**config, "seed": None, "split": split, "evaluate": how, "data": str(source)}
    return json.dumps(made, sort_keys=True)


def _parse_run(folder: Path, raw: dict[str, Any], settings: str, events: dict[str, Curve]) -> RunData:
    config, data, how = raw["config"], raw["data"], raw["config"]["evaluate"]
    backbone = str(config["backbone"].get("name", "mf"))
    mask = str(how["mask"])
    untested = {n for n, b in enumerate(raw["blocks"]) if not b["users"]}
    other, once = "history" if mask == "block" else "block", _exchanges_once(backbone)
    blocks = [_parse_block(b, other, untested, int(b["rounds"]) if once else 1) for b in raw["blocks"]]
    if not blocks or [len(b.on_blocks) for b in blocks] != list(range(1, len(blocks) + 1)):
        raise ValueError("the blocks are not whole")
    controls, skipped = [], {}
    for key in [*CONTROLS, *sorted(set(raw["controls"]) - set(CONTROLS))]:
        found = raw["controls"].get(key)
        if found and "skipped" in found:
            skipped[key] = str(found["skipped"])
        elif not found and raw.get("unfinished"):
            skipped[key] = "not yet: the run goes on with --resume"
        elif found:
            each = found["blocks"]
            controls.append(ControlResult(key, [_parse_tested(b) for b in each], _parse_mean(found["mean"], each)))
    if any(len(c.blocks) != len(blocks) for c in controls):
        raise ValueError("a control has other blocks than the method")
    protocol = [how.get(k) for k in ("select_by", "mask", "old_block_mask", "sampled_negatives", "item_table")]
    protocol += [how.get("hidden_items", "drop"), how.get("ties", "hash")]  # runs from before there was a choice
    protocol += [how.get("read", "train")]
    sampled = int(how.get("sampled_negatives", 0))
    return RunData(
        folder=_clean(folder.resolve().name),
        method=method_name(backbone, str(config["method"]), config.get("parts")),
        backbone=backbone,
        seed=int(config["seed"]),
        split_seed=int(config.get("split", {}).get("seed", 0)),
        data=str(data["name"]),
        fingerprint=str(data["fingerprint"]),
        users=int(data["users"]),
        items=int(data["items"]),
        removed=format_removals(steps) if (steps := parse_removals(data.get("removed") or [])) else "",
        version=str(raw.get("tacita", "")),
        settings=settings,
        select_by=str(how["select_by"]),
        mask=mask,
        read=find_read_mode(raw),
        ranking=f"against {sampled} sampled items" if sampled else "of all items",
        protocol=(str(data["fingerprint"]), *map(str, protocol)),
        recipe=_make_recipe(config, data),
        blocks=blocks,
        mean=_parse_mean(raw["mean"], raw["blocks"]),
        continual=Scores({k: _parse_number(raw["continual"][k]) for k in ("la", "ra", "hm")}),
        controls=controls,
        skipped=skipped,
        up=statistics.fmean([b.up for b in blocks]) if once else _parse_number(raw["bytes"]["up_per_client_and_round"]),
        down=statistics.fmean([b.down for b in blocks])
        if once
        else _parse_number(raw["bytes"]["down_per_client_and_round"]),
        valid=events["valid"],
        notes={name: curve for name, curve in events.items() if name != "valid"},
        privacy=[str(line) for line in raw.get(PRIVACY_KEY, ())],
        epsilon=find_largest_epsilon(raw),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise TacitaError(f"{path} is missing or unreadable; is {path.parent} a finished run folder?") from None


def _read_events(path: Path) -> dict[str, Curve]:
    """Validation scores ("valid") and what parts noted, by block and round; an unreadable line is left out."""
    out: dict[str, Curve] = {"valid": {}}
    for line in _read_text(path).splitlines():
        try:
            event = json.loads(line)
            at = int(event["block"]), int(event["round"])
            for name, value in {"valid": event["valid"], **event.get("notes", {})}.items():
                if value is not None:
                    out.setdefault(str(name), {})[at] = float(value)
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return out


def refuse_changed(path: Path, noted: str | None) -> None:
    """Settings must be those the run began with; folders of earlier versions noted no digest of them."""
    if noted and hashlib.sha256(path.read_bytes()).hexdigest() != noted:
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
    path = folder / "result.json"
    raw = read_json(path)
    settings, events = _read_text(folder / "config.toml"), _read_events(folder / "events.jsonl")
    if (folder / "ids.json").is_file():
        ids = read_json(folder / "ids.json")
        if not isinstance(ids, dict):
            raise damaged_ids_error(folder)
        refuse_changed(folder / "config.toml", ids.get("settings"))
    try:
        return _parse_run(folder, _clean(raw), settings, events)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TacitaError(f"{path} is damaged: not the result of a run ({error}); train again.") from None


def format_metric(metric: str) -> str:
    """ndcg@20 -> NDCG@20"""
    name, at, k = metric.partition("@")
    return (name.capitalize() if name in ("recall", "precision") else name.upper()) + at + k


def format_score(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"


def format_bytes(size: float) -> str:
    if not math.isfinite(size):
        return "–"
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if size >= 99.5 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def format_change(value: float, base: float) -> str:
    """The change from base to value."""
    if not (base > 0 and math.isfinite(value / base)):
        return "–"
    return f"{value / base - 1:+.0%}".replace("-", "−")


def judge_run(run: RunData) -> list[tuple[str, str]]:
    """What to think of the headline number: (good, note or bad, sentence)."""
    if not math.isfinite(run.score):
        return [
            (
                "bad",
                f"The method has no {format_metric(run.main_metric)} to show: nobody was tested, or training diverged.",
            )
        ]
    judged = [c for c in run.controls if math.isfinite(c.mean[run.main_metric])]
    if not judged:
        return [("note", "No control was run beside this method, so its numbers cannot be judged alone.")]
    where = f"{format_metric(run.main_metric)}, {run.mean_label}"
    out = []
    for control in run.better_controls:
        numbers = f"{format_score(control.mean[run.main_metric])} against {format_score(run.score)}"
        kind = "note" if control.key == "linear" else "bad"
        out.append((kind, f"Below {control.name}: {control.description} is better here ({numbers}; {where})."))
    if not out:
        best = max(judged, key=lambda c: c.mean[run.main_metric])
        other = format_score(best.mean[run.main_metric])
        numbers = f"{format_score(run.score)} against {other} of {best.name}, the best of them"
        out.append(("good", f"No control is better: {numbers} ({where})."))
    for control in judged:
        lost = [n for n, b in enumerate(control.blocks) if run.blocks[n].scores[run.main_metric] < b[run.main_metric]]
        if lost and control not in run.better_controls:
            which = f"block{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            out.append(("note", f"Not below {control.name} on the mean, but below it in {which}."))
    return out
