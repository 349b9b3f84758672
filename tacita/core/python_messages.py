"""Sentences for people who call from Python: the options of the command line become keywords of `tacita.train`.

Errors are written once, in the words of the command line. At the border to Python every option becomes the keyword that
does the same, so that no message names a flag that a caller cannot use.
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
    """Put errors in Python's words; the exception and its kind stay the same."""
    try:
        yield
    except TacitaError as error:
        message = replace_options_with_keywords(str(error))
        error.args = (message, *error.args[1:])
        raise


def replace_options_with_keywords(sentence: str) -> str:
    """The sentence with keywords in place of options; commands that Python lacks stay commands."""
    pieces = re.split(r"(`tacita (?!train )[^`]*`)", sentence)
    pieces[::2] = [_replace_options(text) for text in pieces[::2]]  # between the commands
    return "".join(pieces)


def _replace_options(sentence: str) -> str:
    sentence = re.sub(r"`tacita train((?: --[a-z-]+(?: [^\s`-][^\s`]*)?)+)`", _format_call, sentence)
    sentence = re.sub(r"(?:tacita train )?--set [a-z_]+\.\S+(?: --set [a-z_]+\.\S+)*", _format_settings, sentence)
    sentence = re.sub(rf"\b({_TABLES})\.([a-z_]+) = ('[\w-]+'|\d+(?:\.\d+)?\b)", _format_setting, sentence)
    sentence = re.sub(rf"--columns ({_PAIRS})", _format_columns, sentence)
    sentence = re.sub(r"--date-format (\"[^\"]*\"|'[^']*')", r"date_format=\1", sentence)
    sentence = re.sub(r"--decimal ([,.])(?= )", r'decimal="\1"', sentence)
    sentence = re.sub(r"--(method|backbone) ([a-z0-9-]+)", r'\1="\2"', sentence)
    sentence = re.sub(r"^('\S+' in .* must be) a table\b", r"\1 a dict", sentence)
    sentence = re.sub(r"\bgive train --lr", "give the rate in backbone={...}", sentence)
    sentence = re.sub(r"--resume\b", "resume=True", sentence)
    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)", _replace_flag_by_argument, sentence)


def _replace_flag_by_argument(match: re.Match[str]) -> str:
    return match[1].replace("-", "_")


def _format_call(match: re.Match[str]) -> str:
    """A command that trains, as the call that does the same."""
    keywords = []
    for flag, value in re.findall(r"--([a-z-]+)(?: ([^\s`-][^\s`]*))?", match[1]):
        name = flag.replace("-", "_")
        if flag == "no-controls":
            keywords.append('evaluate={"controls": False}')
        elif value:
            keywords.append(f'{name}="{value}"')
        else:
            keywords.append(f"{name}=True")
    listed = ", ".join(keywords)
    return f"tacita.train({listed})"


def _format_settings(match: re.Match[str]) -> str:
    """Settings of several tables, each table once."""
    pairs = re.findall(r"--set ([a-z_]+)\.([a-z_.]+)=(\S+)", match[0])
    end = ""
    if pairs:
        table, key, value = pairs[-1]
        punctuation = re.search(_END, value)
        if punctuation:
            end = punctuation[0]
        pairs[-1] = (table, key, value.removesuffix(end))
    tables: dict[str, list[str]] = {}
    for table, key, value in pairs:
        if table not in tables:
            tables[table] = ['"name": ...'] if table == "backbone" else []  # a model's options stand next to its name
        is_plain = re.fullmatch(r"[-+0-9.e]+|\[.*\]|\{.*\}", value)
        shown = value if is_plain else quote_name(value)
        tables[table].append(f'"{key}": {shown}')
    keywords = []
    for table, settings in tables.items():
        listed = ", ".join(settings)
        keywords.append(f"{table}={{{listed}}}")
    return ", ".join(keywords) + end


def _format_setting(match: re.Match[str]) -> str:
    """One setting as a file has it."""
    table, key, value = match.groups()
    needs_name = table == "backbone" and key != "name"
    name = '"name": ..., ' if needs_name else ""
    setting = f'{table}={{{name}"{key}": {value}}}'
    return setting.replace("'", '"')


def _format_columns(match: re.Match[str]) -> str:
    """Roles and names of columns, as a dict."""
    text = match[1]
    end = ""
    if re.search(r"(?<!\.)\.$", text):
        end = "."
        text = text.removesuffix(end)
    pairs = []
    for pair in text.split(","):
        role, name = pair.split("=", 1)
        shown = name if name == "..." else quote_name(name)
        pairs.append(f'"{role}": {shown}')
    listed = ", ".join(pairs)
    return f"columns={{{listed}}}{end}"


def quote_name(name: str) -> str:
    return f'"{name}"'
