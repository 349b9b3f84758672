"""Names of parts and methods, and how settings become parts: a method is a list of parts with settings of its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError, unknown_extension_error
from tacita.models import find_backbone_class
from tacita.round.part import Part, PartTraits, RunContext
from tacita.round.preset import (
    PRINTED,
    PartSpec,
    Preset,
    Settings,
    TunedSettings,
    change_parts,
    fill_missing,
    fill_tuned,
)

Wrapper = Callable[[Any], Any]
"""What puts another party beside the server of a lab run."""

_PARTS: dict[str, type[Part]] = {}
_PRESETS: dict[str, Preset] = {"fedavg": Preset()}
_WRAPPERS: list[tuple[set[str], Wrapper]] = []


def register(cls: type[Part]) -> type[Part]:
    _PARTS[cls.name] = cls
    return cls


def register_preset(
    name: str,
    *parts: PartSpec,
    settings: Settings | None = None,
    ours: tuple[str, ...] = (),
    printed: tuple[str, ...] = (),
    tuned: TunedSettings | None = None,
) -> None:
    """Give a list of parts a name for `--method`. Its `settings` hold wherever nobody says otherwise.

    They are its paper's, but for the keys that are `ours`; of its parts, the defaults that are `printed` (PART.option)
    are the paper's. What was `tuned` comes before both; NAME-paper is the same preset without it.
    """
    untuned = Preset(parts, settings or {}, ours, printed, is_listed=False)
    _PRESETS[name] = replace(untuned, tuned=tuned, is_listed=True)
    if tuned is not None:
        _PRESETS.setdefault(name + PRINTED, untuned)


def resolve_config(values: Settings, where: str, with_tuned: bool = True) -> RunConfig:
    """The settings of a run: what is said, then what its method and its model bring along, then the defaults.

    Tables bring settings that were tuned for their own data, and do without a preset's.
    """
    method = values.get("method")
    defaults: Settings = {}
    if isinstance(method, str) and method in _PRESETS:
        preset = _PRESETS[method]
        defaults = dict(preset.settings)
        if with_tuned:
            values = fill_tuned(values, preset, _find_backbone_name(values, defaults))
    if _names_other_model(values, defaults):
        del defaults["backbone"]  # options of another model do not fit
    settings = fill_missing(values, defaults)
    model = settings.get("backbone")
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str):
        settings = fill_missing(settings, find_backbone_class(name).brings)
    return validate_model(RunConfig, settings, where)


def _find_backbone_name(values: Settings, defaults: Settings) -> str:
    """The model that a run will have."""
    for settings in (values, defaults):
        backbone = settings.get("backbone")
        if isinstance(backbone, dict) and "name" in backbone:
            return str(backbone["name"])
    return str(RunConfig().backbone["name"])


def has_preset(name: str) -> bool:
    """Whether there is a preset of this name, listed or with its paper's settings."""
    return name in _PRESETS


def find_preset(name: str) -> Preset:
    if name not in _PRESETS:
        raise unknown_extension_error("method", name, _PRESETS)
    return _PRESETS[name]


def find_preset_settings(method: str) -> Settings:
    """The settings that a method brings along, but for what was tuned."""
    return dict(find_preset(method).settings)


def _names_other_model(values: Settings, defaults: Settings) -> bool:
    """Whether the run's model is another one than its method brings along."""
    named = values.get("backbone")
    own = defaults.get("backbone")
    if not own or not isinstance(named, dict):
        return False
    name = named.get("name", own["name"])
    return bool(name != own["name"])


def brings_settings(method: str) -> bool:
    """Whether a method is more than its parts: a model, a split, an optimiser of its paper."""
    preset = _PRESETS.get(method, Preset())
    return bool(preset.settings)


def list_part_names() -> list[str]:
    return sorted(_PARTS)


def list_preset_names() -> list[str]:
    return sorted(name for name, preset in _PRESETS.items() if preset.is_listed)


def find_part_class(name: str) -> type[Part]:
    if name not in _PARTS:
        raise unknown_extension_error("part", name, _PARTS)
    return _PARTS[name]


def list_preset_parts(name: str) -> list[PartSpec]:
    return [dict(spec) for spec in find_preset(name).parts]


def make_method_label(method: str, parts: list[PartSpec] | None) -> str:
    """What a run is called: its preset, or its parts where they are others than the preset's."""
    if parts is None:
        return method
    names = [str(part.get("name")) for part in parts]
    own_names = [part["name"] for part in _PRESETS.get(method, Preset()).parts]
    if names == own_names:
        return method
    return " + ".join(names) or "no parts"


def resolve_parts(method: str, changes: list[PartSpec] | None) -> list[PartSpec]:
    """The preset's parts with options changed by name, then the parts that only `changes` names."""
    return change_parts(list_preset_parts(method), changes)


def build_parts(specs: list[PartSpec], context: RunContext) -> tuple[Part, ...]:
    """Parts from `{"name": ..., options}` tables, checked for clashes. Every part knows the traits of all."""
    part_specs = tuple(dict(spec) for spec in specs)
    context = replace(context, part_specs=part_specs)
    described = _make_parts(specs, context)
    traits = tuple(PartTraits(part) for part in described)
    return tuple(_make_parts(specs, replace(context, traits=traits)))


def _make_parts(specs: list[PartSpec], context: RunContext) -> list[Part]:
    parts: list[Part] = []
    for spec in specs:
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise TacitaError("every entry of 'parts' needs a 'name'.")
        cls = find_part_class(name)
        if any(part.name == name for part in parts):
            raise TacitaError(f"part '{name}' is listed twice; merge its options into one entry.")
        if cls.reads_logits and context.backbone.reads_context:
            raise TacitaError(
                f"part '{name}' scores with private vectors alone, and backbone '{context.backbone.name}' reads the "
                "user's own items as well; use another backbone with it."
            )
        config = validate_model(cls.Config, options, f"part '{name}'")
        parts.append(cls(config, context))
    return parts


def register_run_wrapper(names: set[str], wrap: Wrapper) -> None:
    """Let a lab run with a part of these names be wrapped: another party than the server plays some of it."""
    _WRAPPERS.append((names, wrap))


def wrap_run(federation: Any) -> Any:
    """A lab run with the parties that its parts need beside the server."""
    for _, wrap in _WRAPPERS:
        federation = wrap(federation)
    return federation


def is_lab_only(name: str) -> bool:
    """Whether a part needs another party than the server, which the lab alone plays."""
    return any(name in names for names, _ in _WRAPPERS)
