"""Every setting there is: of a run, of each backbone, of each part, with what it does, its kind and its default."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.methods import find_part_class, list_part_names, list_preset_names
from tacita.models import find_backbone_class, list_backbones
from tacita.round.registry import has_preset
from tacita.runs.preset_reference import list_preset_values

_KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "not set"}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True)
class Setting:
    """One setting: whose it is, its key, its kind, its default and what it does."""

    owner: str  # "run", "backbone mf", "part replay"
    key: str
    kind: str
    default: str
    about: str
    value: str = ""  # under a method that was asked for
    origin: str = ""  # where that value comes from


def list_settings() -> list[Setting]:
    """Of runs, then of backbones, then of parts."""
    settings = list(_iterate_settings(RunConfig, "run"))
    for name in list_backbones():
        settings += _iterate_settings(find_backbone_class(name).Config, f"backbone {name}", "backbone.")
    for name in list_part_names():
        settings += _iterate_settings(find_part_class(name).Config, f"part {name}")
    return settings


def find_settings(word: str | None) -> list[Setting]:
    """Those that a word stands for: a key, a table, the name of a backbone, part or method; None: all.

    A key may lack its table (`rounds`), and an option stand behind the name it belongs to (`tally.ridge`).
    """
    settings = list_settings()
    if word is None:
        return settings
    if has_preset(word):
        own_settings = _list_settings_of_preset(settings, word)
        if own_settings:
            return own_settings
    matches = _match_word(settings, word)
    if matches:
        return matches
    if has_preset(word):  # a method that sets nothing
        return [setting for setting in settings if setting.key == "method"]
    raise _unknown_word_error(settings, word)


def _list_settings_of_preset(settings: list[Setting], method: str) -> list[Setting]:
    """What a preset sets of runs and of its model, and all options of its parts, each with its value."""
    by_name = {(setting.owner, setting.key): setting for setting in settings}
    own_settings = []
    for entry in list_preset_values(method):
        setting = by_name.get((entry.owner, entry.key))
        if setting is not None:
            value = "not set" if entry.value is None else json.dumps(entry.value, default=str)
            own_settings.append(replace(setting, value=value, origin=entry.origin))
    return own_settings


def _match_word(settings: list[Setting], word: str) -> list[Setting]:
    """Settings whose owner or whole name is the word; else those of a table; else those whose key ends with it."""
    owners = _list_owners(word)
    by_name = []
    by_table = []
    by_key = []
    for setting in settings:
        names = _list_names(setting)
        if setting.owner in owners or word in names:
            by_name.append(setting)
        if any(name.startswith(f"{word}.") for name in names):
            by_table.append(setting)
        if _read_last_word(setting.key, ".") == word:
            by_key.append(setting)
    return by_name or by_table or by_key


def _list_owners(word: str) -> set[str]:
    """Whose settings a word stands for, if it is the name of a backbone or a part."""
    return {f"backbone {word}", f"part {word}"}


def _read_last_word(text: str, separator: str) -> str:
    return text.rpartition(separator)[2]


def _unknown_word_error(settings: list[Setting], word: str) -> TacitaError:
    """That no setting is called so, with the nearest name where one is near."""
    names: set[str] = set()
    for setting in settings:
        names.update(_list_names(setting))
        names.add(_read_last_word(setting.owner, " "))
    tables = {name.rpartition(".")[0] for name in names}
    candidates = {*names, *tables, *list_preset_names()}
    candidates -= {"", "run"}
    error = unknown_name_error("setting", word, candidates)
    if "did you mean" in str(error):
        return error
    return TacitaError(f"unknown setting '{word}', and none is near; `tacita settings` lists them all.")


def _list_names(setting: Setting) -> tuple[str, ...]:
    """What a setting may be called: by its key, and by its owner."""
    kind, _, owner = setting.owner.partition(" ")
    if kind == "run":
        return (setting.key,)
    option = setting.key.removeprefix("backbone.")
    owned_name = f"{owner}.{option}"
    return (owned_name, setting.key) if kind == "backbone" else (owned_name,)


def _iterate_settings(model: type[BaseModel], owner: str, prefix: str = "") -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _iterate_settings(kind, owner, f"{prefix}{name}.")
            continue
        yield Setting(
            owner=owner,
            key=prefix + name,
            kind=_describe_kind(info),
            default=_format_default(info),
            about=info.description or "",
        )


def _format_default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "has to be given"
    return "not set" if value is None else json.dumps(value, default=str)


def _describe_kind(info: FieldInfo) -> str:
    words = [_describe_type(info.annotation)]
    for constraint in info.metadata:
        for name, relation in _LIMITS.items():
            limit = getattr(constraint, name, None)
            if isinstance(limit, int | float):
                words.append(f"{relation} {limit:g}")
    return ", ".join(words)


def _describe_type(kind: Any) -> str:
    """A type in plain words."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return ", ".join(json.dumps(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(member) for member in arguments)
    if origin is Annotated:
        return _describe_type(arguments[0])
    if origin in (list, tuple):
        return f"list of: {_describe_type(arguments[0])}"
    if origin is dict or kind is dict:
        return "table"
    name = getattr(kind, "__name__", kind)
    return _KINDS.get(kind, str(name))
