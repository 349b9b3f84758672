"""Names of parts and methods, and how settings become parts: a method is a list of parts with settings of its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.models import find_backbone_class
from tacita.round.part import Part, RunContext, describe_traits

Settings = dict[str, Any]
"""Nested settings of a run, as they are written."""

PartSpec = dict[str, Any]
"""A part as it is written: its `name`, and its options."""

Wrapper = Callable[[Any], Any]
"""What puts another party beside the server of a lab run."""

_PARTS: dict[str, type[Part]] = {}
_PRESETS: dict[str, list[PartSpec]] = {"fedavg": []}
_SETTINGS: dict[str, Settings] = {}
_WRAPPERS: list[tuple[set[str], Wrapper]] = []


def register(cls: type[Part]) -> type[Part]:
    _PARTS[cls.name] = cls
    return cls


def register_preset(name: str, *parts: PartSpec, settings: Settings | None = None) -> None:
    """Give a list of parts a name for `--method`; its paper's `settings` hold wherever nobody says otherwise."""
    _PRESETS[name] = list(parts)
    if settings:
        _SETTINGS[name] = settings


def resolve_config(values: Settings, where: str) -> RunConfig:
    """The settings of a run: what is said, then what its method and its model bring along, then the defaults."""
    method = values.get("method")
    defaults: Settings = {}
    if isinstance(method, str):
        defaults = dict(_SETTINGS.get(method, {}))
    if _names_other_model(values, defaults):
        del defaults["backbone"]  # options of another model do not fit
    settings = _fill_missing(values, defaults)
    model = settings.get("backbone")
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str):
        settings = _fill_missing(settings, find_backbone_class(name).brings)
    return validate_model(RunConfig, settings, where)


def find_preset_settings(method: str) -> dict[str, Any]:
    """The settings that a method brings along."""
    return dict(_SETTINGS.get(method, {}))


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
    return bool(_SETTINGS.get(method))


def _fill_missing(settings: Settings, defaults: Settings) -> Settings:
    """Nested settings with defaults for what is not set."""
    filled = {**defaults, **settings}
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            filled[name] = _fill_missing(settings[name], value)
    return filled


def list_part_names() -> list[str]:
    return sorted(_PARTS)


def list_preset_names() -> list[str]:
    return sorted(_PRESETS)


def find_part_class(name: str) -> type[Part]:
    if name not in _PARTS:
        raise unknown_name_error("part", name, _PARTS)
    return _PARTS[name]


def list_preset_parts(name: str) -> list[PartSpec]:
    if name not in _PRESETS:
        raise unknown_name_error("method", name, _PRESETS)
    return [dict(spec) for spec in _PRESETS[name]]


def make_method_label(method: str, parts: list[PartSpec] | None) -> str:
    """What a run is called: its preset, or its parts where they are others than the preset's."""
    if parts is None:
        return method
    names = [str(part.get("name")) for part in parts]
    own_names = [part["name"] for part in _PRESETS.get(method, [])]
    if names == own_names:
        return method
    return " + ".join(names) or "no parts"


def resolve_parts(method: str, changes: list[PartSpec] | None) -> list[PartSpec]:
    """The preset's parts with options changed by name, then the parts that only `changes` names."""
    specs = list_preset_parts(method)
    changes = changes or []
    changed_names = [change.get("name") for change in changes]
    for change in changes:
        name = change.get("name")
        same = [spec for spec in specs if spec["name"] == name]
        if same and changed_names.count(name) == 1:
            same[0].update(change)
        else:
            specs.append(dict(change))
    return specs


def build_parts(specs: list[PartSpec], context: RunContext) -> tuple[Part, ...]:
    """Parts from `{"name": ..., options}` tables, checked for clashes."""
    parts: list[Part] = []
    traits = tuple(describe_traits(_PARTS[name]) for name in _list_known_names(specs))
    part_specs = tuple(dict(spec) for spec in specs)
    context = replace(context, part_specs=part_specs, traits=traits)
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
    return tuple(parts)


def _list_known_names(specs: list[PartSpec]) -> list[str]:
    """The names of known parts; what is unknown is refused where it is built."""
    names = [spec.get("name") for spec in specs]
    return [name for name in names if isinstance(name, str) and name in _PARTS]


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
