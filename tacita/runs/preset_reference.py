"""What a preset sets, and where each value comes from: the paper's print, tuning on validation, us, or a default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tacita.core.config import RunConfig
from tacita.methods import find_part_class
from tacita.round.preset import Preset, Settings
from tacita.round.registry import find_preset

PAPER = "paper"
OURS = "ours"
METHOD = "the method itself"
DEFAULT = "default"


@dataclass(frozen=True)
class PresetValue:
    """The value that a setting has under a preset."""

    owner: str  # "run", "backbone ego", "part sharing"
    key: str
    value: Any
    origin: str


def list_preset_values(method: str) -> list[PresetValue]:
    """Settings of runs and of the model that a preset brings along, then all options of its parts."""
    preset = find_preset(method)
    backbone = find_preset_backbone(preset)
    tuned = preset.find_tuned(backbone)
    tuned.pop("parts", None)
    values = {}
    for key, value in _flatten(preset.settings):
        origin = OURS if _is_ours(preset, key) else PAPER
        values[key] = PresetValue(_find_owner(key, backbone), key, value, origin)
    for key, value in _flatten(tuned):
        assert preset.tuned is not None
        values[key] = PresetValue(_find_owner(key, backbone), key, value, preset.tuned.origin)
    values.pop("backbone.name", None)
    return [*values.values(), *_list_part_values(preset, backbone)]


def find_preset_backbone(preset: Preset) -> str:
    """The model of a preset where a run names none."""
    default = RunConfig().backbone["name"]
    return str(preset.settings.get("backbone", {}).get("name", default))


def _is_ours(preset: Preset, key: str) -> bool:
    return any(key == own or key.startswith(f"{own}.") for own in preset.ours)


def _find_owner(key: str, backbone: str) -> str:
    return f"backbone {backbone}" if key.startswith("backbone.") else "run"


def _flatten(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _list_part_values(preset: Preset, backbone: str) -> list[PresetValue]:
    """Every option of a preset's parts."""
    tuned_options = preset.find_tuned(backbone).get("parts", {})
    values = []
    for spec in preset.parts:
        name = spec["name"]
        tuned = tuned_options.get(name, {})
        config = find_part_class(name).Config
        for key, info in config.model_fields.items():
            value = info.get_default(call_default_factory=True)
            origin = PAPER if f"{name}.{key}" in preset.printed else DEFAULT
            if key in tuned:
                assert preset.tuned is not None
                value, origin = tuned[key], preset.tuned.origin
            if key in spec:
                value, origin = spec[key], METHOD
            values.append(PresetValue(f"part {name}", key, value, origin))
    return values
