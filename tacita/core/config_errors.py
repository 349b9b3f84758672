"""What is wrong with settings, in one sentence that names the key."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def format_config_error(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """One sentence that names the key, what is expected there, and the nearest key to an unknown one."""
    first, *others = error.errors()
    path = _format_key_path(first)
    if first["type"] == "extra_forbidden":
        last_key = str(first["loc"][-1])
        suggestion = _suggest_key(model, path, dotted="." in last_key)
        return f"unknown key '{path}' in {where}; {suggestion}"
    value = first.get("input")
    shown = f", not {value!r}" if isinstance(value, str | int | float | bool) else ""
    branches = [detail for detail in (first, *others) if _format_key_path(detail) == path]  # of a union
    expected = dict.fromkeys(_describe_expected(detail) for detail in branches)
    listed = " or ".join(expected)
    return f"'{path}' in {where} must be {listed}{shown}."


def _format_key_path(error: ErrorDetails) -> str:
    """The key that an error is about, without the branches of a union."""
    keys = [str(key) for key in error["loc"]]
    keys = [key for key in keys if "[" not in key]
    if len(keys) > 1 and keys[-1] in _BRANCHES:
        keys.pop()
    return ".".join(keys)


def _suggest_key(model: type[BaseModel], path: str, dotted: bool) -> str:
    """The nearest key or table; for a key that was written with its point, how a table is written."""
    keys = list_keys(model)
    nearest = _find_nearest_key(keys, path)
    if nearest is None:
        tops = sorted({key.partition(".")[0] for key in keys})
        listed = ", ".join(tops)
        return f"known at the top: {listed}; `tacita settings` lists every key."
    if dotted:
        is_free_table = path.split(".")[0] in keys  # such as backbone
        key = path if is_free_table else nearest
        if "." in key:
            return _describe_table(key)
    return f"did you mean '{nearest}'?"


def _find_nearest_key(keys: list[str], path: str) -> str | None:
    """The key or table whose name is nearest to a path, or else to its last part."""
    known = set(keys)
    for key in keys:
        while "." in key:
            key = key.rpartition(".")[0]
            known.add(key)
    names = sorted(known)
    last = path.rpartition(".")[2]
    near = difflib.get_close_matches(path, names, n=1) or difflib.get_close_matches(last, names, n=1)
    return near[0] if near else None


def _describe_table(key: str) -> str:
    """How a key of a table is written in Python and in TOML."""
    *tables, last = key.split(".")
    inner = f'{{"{last}": ...}}'
    for name in reversed(tables[1:]):
        inner = f'{{"{name}": {inner}}}'
    table = ".".join(tables)
    return f"in Python write {tables[0]}={inner}, in TOML [{table}] and below it {last} = ..."


def _describe_expected(error: ErrorDetails) -> str:
    """What pydantic expected, in plain words."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "literal_error":
        expected = str(context["expected"])
        if " or " not in expected:
            return expected
        listed = expected.replace(" or ", ", ")
        return f"one of {listed}"
    for word, text in _WORDS.items():
        if kind.startswith(word):
            return text.format(**context)
    message = error["msg"].removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


_BRANCHES = {"constrained-float", "constrained-int", "float", "int"}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "a list with at least {min_length} entry",
    "missing": "given",
}


def list_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += list_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
