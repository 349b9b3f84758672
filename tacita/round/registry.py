"""Names of parts and methods, and how settings become parts: a method is a list of parts with settings of its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.models import backbone_class
from tacita.round.part import Part, RunContext, find_traits

_PARTS: dict[str, type[Part]] = {}
_PRESETS: dict[str, list[dict[str, Any]]] = {"fedavg": []}
_SETTINGS: dict[str, dict[str, Any]] = {}
_WRAPPERS: list[tuple[set[str], Callable[[Any], Any]]] = []


def register(cls: type[Part]) -> type[Part]:
    _PARTS[cls.name] = cls
    return cls


def register_preset(name: str, *parts: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
    """Give a list of parts a name for `--method`; its paper's `settings` hold wherever nobody says otherwise."""
    _PRESETS[name] = list(parts)
    if settings:
        _SETTINGS[name] = settings


def resolve_config(values: dict[str, Any], where: str) -> RunConfig:
    """The settings of a run: what is said, then what its method and its model bring along, then the defaults."""
    method = values.get("method")
    brought = _SETTINGS.get(method, {}) if isinstance(method, str) else {}
    named = values.get("backbone")
    own = brought.get("backbone")
    if own and isinstance(named, dict) and named.get("name", own["name"]) != own["name"]:
        brought = {k: v for k, v in brought.items() if k != "backbone"}  # options of another model do not fit
    settings = _fill_missing(values, brought)
    model = settings.get("backbone")
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str):
        settings = _fill_missing(settings, backbone_class(name).brings)
    return validate_model(RunConfig, settings, where)


def preset_settings(method: str) -> dict[str, Any]:
    """The settings that a method brings along."""
    return dict(_SETTINGS.get(method, {}))


def brings_settings(method: str) -> bool:
    """Whether a method is more than its parts: a model, a split, an optimiser of its paper."""
    return bool(_SETTINGS.get(method))


def _fill_missing(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with defaults for what is not set."""
    filled = {**defaults, **settings}
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            filled[name] = _fill_missing(settings[name], value)
    return filled


def part_names() -> list[str]:
    return sorted(_PARTS)


def preset_names() -> list[str]:
    return sorted(_PRESETS)


def part_class(name: str) -> type[Part]:
    if name not in _PARTS:
        raise unknown_name_error("part", name, _PARTS)
    return _PARTS[name]


def preset_parts(name: str) -> list[dict[str, Any]]:
    if name not in _PRESETS:
        raise unknown_name_error("method", name, _PRESETS)
    return [dict(spec) for spec in _PRESETS[name]]


def method_label(method: str, parts: list[dict[str, Any]] | None) -> str:
    """What a run is called: its preset, or its parts where they are others than the preset's."""
    names = [str(part.get("name")) for part in parts or []]
    if parts is None or names == [part["name"] for part in _PRESETS.get(method, [])]:
        return method
    return " + ".join(names) or "no parts"


def resolve_parts(method: str, changes: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The preset's parts with options changed by name, then the parts that only `changes` names."""
    specs = preset_parts(method)
    for change in changes or []:
        same = [spec for spec in specs if spec["name"] == change.get("name")]
        if same and sum(c.get("name") == change.get("name") for c in changes or []) == 1:
            same[0].update(change)
        else:
            specs.append(dict(change))
    return specs


def build_parts(specs: list[dict[str, Any]], context: RunContext) -> tuple[Part, ...]:
    """Parts from `{"name": ..., options}` tables, checked for clashes."""
    parts: list[Part] = []
    traits = tuple(find_traits(_PARTS[name]) for name in _named(specs))
    context = replace(context, part_specs=tuple(dict(spec) for spec in specs), traits=traits)
    for spec in specs:
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise TacitaError("every entry of 'parts' needs a 'name'.")
        cls = part_class(name)
        if any(p.name == name for p in parts):
            raise TacitaError(f"part '{name}' is listed twice; merge its options into one entry.")
        if cls.reads_logits and context.backbone.reads_context:
            raise TacitaError(
                f"part '{name}' scores with private vectors alone, and backbone '{context.backbone.name}' reads the "
                "user's own items as well; use another backbone with it."
            )
        parts.append(cls(validate_model(cls.Config, options, f"part '{name}'"), context))
    return tuple(parts)


def _named(specs: list[dict[str, Any]]) -> list[str]:
    """The names of known parts; what is unknown is refused where it is built."""
    names = [spec.get("name") for spec in specs]
    return [name for name in names if isinstance(name, str) and name in _PARTS]


def register_wrapper(names: set[str], wrap: Callable[[Any], Any]) -> None:
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
