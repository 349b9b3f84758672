"""Sentences for people who call from Python: the options of the command line become keywords of `tacita.train`.

Errors are written once, in the words of the command line. At the border to Python every option in them is put as the
keyword that does the same, so that nobody is told of a flag that he cannot give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tacita.core.errors import TacitaError

_PAIRS = r"[a-z]+=[^\s,;]+(?:,[a-z]+=[^\s,;]+)*"
_TABLES = "backbone|evaluate|privacy|split|train"
_END = r"[.,;:?)'\"]*(?=\s|$)"


@contextmanager
def translate_errors() -> Iterator[None]:
    """What goes wrong inside is told in Python's words; the exception and its kind stay the same."""
    try:
        yield
    except TacitaError as error:
        error.args = (translate_message(str(error)), *error.args[1:])
        raise


def translate_message(sentence: str) -> str:
    """The sentence with keywords in place of options; what only the command line can do stays a command."""
    pieces = re.split(r"(`tacita (?!train )[^`]*`)", sentence)
    return "".join(piece if n % 2 else _replace_options(piece) for n, piece in enumerate(pieces))


def _replace_options(sentence: str) -> str:
    sentence = re.sub(r"`tacita train((?: --[a-z-]+(?: [^\s`-][^\s`]*)?)+)`", _format_call, sentence)
    sentence = re.sub(r"(?:tacita train )?--set [a-z_]+\.\S+(?: --set [a-z_]+\.\S+)*", _format_settings, sentence)
    sentence = re.sub(rf"\b({_TABLES})\.([a-z_]+) = ('[\w-]+'|\d+(?:\.\d+)?\b)", _format_setting, sentence)
    sentence = re.sub(rf"--columns ({_PAIRS})", lambda found: _format_columns(found[1]), sentence)
    sentence = re.sub(r"--date-format (\"[^\"]*\"|'[^']*')", r"date_format=\1", sentence)
    sentence = re.sub(r"--decimal ([,.])(?= )", r'decimal="\1"', sentence)
    sentence = re.sub(r"--(method|backbone) ([a-z0-9-]+)", r'\1="\2"', sentence)
    sentence = re.sub(r"^('\S+' in .* must be) a table\b", r"\1 a dict", sentence)
    sentence = re.sub(r"\bgive train --lr", "give the rate in backbone={...}", sentence)
    sentence = re.sub(r"--resume\b", "resume=True", sentence)
    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), sentence)


def _format_call(found: re.Match[str]) -> str:
    """A command that trains, as the call that does the same."""
    said = []
    for name, value in re.findall(r"--([a-z-]+)(?: ([^\s`-][^\s`]*))?", found[1]):
        if name == "no-controls":
            said.append('evaluate={"controls": False}')
        else:
            said.append(f'{name.replace("-", "_")}="{value}"' if value else f"{name.replace('-', '_')}=True")
    return f"tacita.train({', '.join(said)})"


def _format_settings(found: re.Match[str]) -> str:
    """Settings of several tables, each table once."""
    pairs = re.findall(r"--set ([a-z_]+)\.([a-z_.]+)=(\S+)", found[0])
    ends = re.search(_END, pairs[-1][2]) if pairs else None
    end = ends[0] if ends else ""
    named = ['"name": ...']  # a model's options stand beside its name
    tables: dict[str, list[str]] = {table: named if table == "backbone" else [] for table, _, _ in pairs}
    for n, (table, key, value) in enumerate(pairs):
        value = value.removesuffix(end) if n == len(pairs) - 1 else value
        plain = re.fullmatch(r"[-+0-9.e]+|\[.*\]|\{.*\}", value)
        tables[table].append(f'"{key}": {value}' if plain else f'"{key}": "{value}"')
    return ", ".join(f"{name}={{{', '.join(said)}}}" for name, said in tables.items()) + end


def _format_setting(found: re.Match[str]) -> str:
    """One setting as a file has it."""
    table, key, value = found.groups()
    named = '"name": ..., ' if table == "backbone" and key != "name" else ""
    return f'{table}={{{named}"{key}": {value}}}'.replace("'", '"')


def _format_columns(text: str) -> str:
    end = re.search(r"(?<!\.)\.$", text)
    pairs = [one.split("=", 1) for one in text.removesuffix("." if end else "").split(",")]
    told = ", ".join(f'"{role}": {name if name == "..." else quote_name(name)}' for role, name in pairs)
    return f"columns={{{told}}}" + ("." if end else "")


def quote_name(name: str) -> str:
    return f'"{name}"'
