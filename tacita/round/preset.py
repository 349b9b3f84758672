"""A preset: a method's parts, its paper's settings, and those that its row in the tables was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
"""Nested settings of a run, as they are written."""

PartSpec = dict[str, Any]
"""A part as it is written: its `name`, and its options."""

PRINTED = "-paper"
"""What the name of a preset ends with that has its paper's settings, where tuning chose others."""


@dataclass(frozen=True)
class TunedSettings:
    """What validation chose for a method, by the model that it was chosen for; `parts` holds options by part."""

    row: str  # PAPER/TABLE:variant, which reports them
    on: str  # the dataset of that row
    by_backbone: Mapping[str, Settings]

    @property
    def origin(self) -> str:
        table, _, _ = self.row.partition(":")
        return f"tuned on {self.on}, validation ({table})"


@dataclass(frozen=True)
class Preset:
    """What a name for `--method` stands for."""

    parts: tuple[PartSpec, ...] = ()
    settings: Settings = field(default_factory=dict)
    ours: tuple[str, ...] = ()  # keys of the settings that the paper does not say
    printed: tuple[str, ...] = ()  # PART.option whose default is what the paper says
    tuned: TunedSettings | None = None
    is_listed: bool = True

    def find_tuned(self, backbone: str) -> Settings:
        """What was tuned with a model; nothing for others, whose rates would not fit."""
        if self.tuned is None:
            return {}
        return dict(self.tuned.by_backbone.get(backbone, {}))


def fill_missing(settings: Settings, defaults: Settings) -> Settings:
    """Nested settings with defaults for what is not set."""
    filled = {**defaults, **settings}
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            filled[name] = fill_missing(settings[name], value)
    return filled


def fill_tuned(values: Settings, preset: Preset, backbone: str) -> Settings:
    """A run's settings with what was tuned for its method and model, where they do not say otherwise."""
    tuned = preset.find_tuned(backbone)
    options = tuned.pop("parts", {})
    if not tuned and not options:
        return values
    tuned["backbone"] = {"name": backbone, **tuned.get("backbone", {})}
    filled = fill_missing(values, tuned)
    if options:
        specs = [fill_missing(spec, options.get(spec["name"], {})) for spec in preset.parts]
        filled["parts"] = change_parts(specs, values.get("parts"))
    return filled


def change_parts(specs: list[PartSpec], changes: list[PartSpec] | None) -> list[PartSpec]:
    """Parts with options changed by name, then the parts that only `changes` names."""
    changed_parts = [dict(spec) for spec in specs]
    changes = changes or []
    changed_names = [change.get("name") for change in changes]
    for change in changes:
        name = change.get("name")
        same = [spec for spec in changed_parts if spec["name"] == name]
        if same and changed_names.count(name) == 1:
            same[0].update(change)
        else:
            changed_parts.append(dict(change))
    return changed_parts
