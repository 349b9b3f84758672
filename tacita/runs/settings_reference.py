"""Every setting there is: of a run, of each backbone, of each part, with what it does, its kind and its default."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError, unknown_name_error
from tacita.methods import part_class, part_names, preset_names, resolve_parts
from tacita.models import backbone_class, backbone_names

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


def list_settings() -> list[Setting]:
    """Of runs, then of backbones, then of parts."""
    found = [*_walk_settings(RunConfig, "run")]
    for name in backbone_names():
        found += _walk_settings(backbone_class(name).Config, f"backbone {name}", "backbone.")
    for name in part_names():
        found += _walk_settings(part_class(name).Config, f"part {name}")
    return found


def find_settings(word: str | None) -> list[Setting]:
    """Those that a word stands for: a key, a table, the name of a backbone, part or method; None: all.

    A key may lack its table (`rounds`), and an option stand behind the name it belongs to (`tally.ridge`).
    """
    every = list_settings()
    if word is None:
        return every
    of = {f"backbone {word}", f"part {word}"}
    if word in preset_names():
        of |= {f"part {part['name']}" for part in resolve_parts(word, None)}
    whole = [one for one in every if one.owner in of or word in _list_names(one)]
    found = whole or [one for one in every if any(name.startswith(f"{word}.") for name in _list_names(one))]
    found = found or [one for one in every if one.key.rpartition(".")[2] == word]
    if not found and word in preset_names():
        return [one for one in every if one.key == "method"]  # a method without parts
    if not found:
        names = {name for one in every for name in (*_list_names(one), one.owner.rpartition(" ")[2])}
        tables = {name.rpartition(".")[0] for name in names}
        error = unknown_name_error("setting", word, {*names, *tables, *preset_names()} - {"", "run"})
        if "did you mean" in str(error):
            raise error
        raise TacitaError(f"unknown setting '{word}', and none is near; `tacita settings` lists them all.")
    return found


def _list_names(one: Setting) -> tuple[str, ...]:
    """What a setting may be called: by its key, and by whose it is."""
    kind, _, owner = one.owner.partition(" ")
    return (
        (one.key,)
        if kind == "run"
        else (f"{owner}.{one.key.removeprefix('backbone.')}",) + ((one.key,) if kind == "backbone" else ())
    )


def _walk_settings(model: type[BaseModel], of: str, prefix: str = "") -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk_settings(kind, of, f"{prefix}{name}.")
            continue
        yield Setting(of, prefix + name, _describe_kind(info), _format_default(info), info.description or "")


def _format_default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "has to be given"
    return "not set" if value is None else json.dumps(value, default=str)


def _describe_kind(info: FieldInfo) -> str:
    limits = [
        f"{words} {getattr(one, name):g}"
        for one in info.metadata
        for name, words in _LIMITS.items()
        if isinstance(getattr(one, name, None), int | float)
    ]
    return ", ".join([_describe_type(info.annotation), *limits])


def _describe_type(kind: Any) -> str:
    """A type in plain words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(json.dumps(one) for one in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(one) for one in inside)
    if origin is Annotated:
        return _describe_type(inside[0])
    if origin in (list, tuple):
        return f"list of: {_describe_type(inside[0])}"
    return "table" if origin is dict or kind is dict else _KINDS.get(kind, str(getattr(kind, "__name__", kind)))
