"""Options that several verbs share, each defined once, and the parsers of their texts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from tacita.core.errors import TacitaError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Threads = Annotated[int, typer.Option("--threads", help="Cores to use; 0: all. Never changes a number.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", exists=True, file_okay=False, help="Folder that holds named datasets (default: $TACITA_DATA)."
    ),
]
Columns = Annotated[
    str,
    typer.Option(
        "--columns",
        help="Which column is what: user=NAME,item=NAME; also rating, time, title, block, part.",
    ),
]
NodeColumns = Annotated[str, typer.Option("--columns", help="Which column is what: user=NAME,item=NAME,...")]
ItemColumns = Annotated[str, typer.Option("--columns", help="Which column is what: item=NAME,title=NAME.")]
DateFormat = Annotated[
    str | None, typer.Option("--date-format", help="How the file writes dates, such as %d.%m.%Y or %Y%m%d.")
]
Decimal = Annotated[str | None, typer.Option("--decimal", help="The file's decimal mark: , or . (default: seen).")]
DropMissing = Annotated[
    bool, typer.Option("--drop-missing", help="Leave out rows without a value in a column that is read.")
]
RunOut = Annotated[Path | None, typer.Option("--out", help="Run folder (default: a new one under runs/).")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; repeat for more.")
]
RunArgument = Annotated[Path | None, typer.Argument(metavar="RUN", help="Run folder.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run folder, instead of as the first argument.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="FILE.py", help="A file or module with methods of your own; repeat for more."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="TOOL",
        help="Log the run for tensorboard, mlflow or wandb as well, on this machine; repeat for more. events.jsonl in "
        "the run folder is always written.",
    ),
]
HowMany = Annotated[int, typer.Option("-k", help="How many.")]


def import_modules(names: list[str] | None) -> None:
    """Import files or modules that register parts, presets or backbones, those of installed packages first."""
    from tacita.runs.extensions import import_entry_points, import_extension

    import_entry_points()
    for name in names or ():
        import_extension(name)


def complete_method(incomplete: str) -> list[str]:
    """Names of methods that begin with what was typed."""
    from tacita.methods import list_preset_names

    return [name for name in list_preset_names() if name.startswith(incomplete)]


def complete_backbone(incomplete: str) -> list[str]:
    """Names of models that begin with what was typed."""
    from tacita.models import list_backbones

    return [name for name in list_backbones() if name.startswith(incomplete)]


def find_run(argument: Path | None, option: Path | None) -> Path | None:
    """The run folder of a command line, named as the first argument or by --run; None: there is none."""
    if argument is not None and option is not None:
        raise TacitaError(f"the run is named twice, as {argument} and by --run {option}; leave one out.")
    return argument if argument is not None else option


def choose_run(argument: Path | None, option: Path | None, example: str) -> Path:
    """The one run folder of a command line."""
    run = find_run(argument, option)
    if run is None:
        raise TacitaError(f"name one run folder, as an argument or with --run, as in `{example}`.")
    return run


def split_run_argument(run: Path | None, words: list[str | None], example: str) -> tuple[Path, str | None]:
    """A run folder, named by --run or as the first argument, and the argument after it, if there is one."""
    arguments = [word for word in words if word is not None]
    if run is not None and arguments and (Path(arguments[0]) / "config.toml").is_file():
        raise TacitaError(f"the run is named twice, as {arguments[0]} and by --run {run}; leave one out.")
    if run is None and arguments:
        run = Path(arguments.pop(0))
    if run is None or len(arguments) > 1:
        raise TacitaError(f"name one run folder, as an argument or with --run, as in `{example}`.")
    return run, arguments[0] if arguments else None


def split_list(text: str) -> list[str]:
    """The parts of a comma-separated list, without empty ones."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def parse_columns(text: str) -> dict[str, str]:
    """The value of --columns: role -> name."""
    roles: dict[str, str] = {}
    for pair in split_list(text):
        role, equals, name = (piece.strip() for piece in pair.partition("="))
        if not (equals and role and name):
            raise TacitaError(f"--columns '{pair}' is not role=name, for example user=customer,item=sku.")
        if role in roles:
            raise TacitaError(f"--columns names the {role} twice, as '{roles[role]}' and as '{name}'; choose one.")
        roles[role] = name
    return roles


def check_decimal(text: str | None) -> str | None:
    if text not in (None, ",", "."):
        raise TacitaError(f"--decimal '{text}' is no decimal mark; use , or a point.")
    return text


def merge_settings(config: Path | None, flags: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    """The config file, changed by flags, changed by --set."""
    from tacita.core.config import read_toml

    if config is not None and config.suffix != ".toml":
        raise TacitaError(f"'{config}' is not a .toml config file; data is given with --data {config}.")
    values = read_toml(config) if config is not None else {}
    for dotted, value in flags.items():
        if value is not None:
            _merge(values, dotted, value)
    for assignment in sets:
        _apply_assignment(values, assignment)
    return values


def _apply_assignment(values: dict[str, Any], assignment: str) -> None:
    """Apply the text of a --set."""
    key, equals, text = (piece.strip() for piece in assignment.partition("="))
    if not equals or not all(key.split(".")):
        raise TacitaError(f"--set '{assignment}' is not key=value, for example train.rounds=50.")
    if key.startswith("parts."):
        raise TacitaError(f"cannot set {key}: an option of a part is set by the part's name, as in dpps.clip=1.")
    value = _parse_value(key, text)
    if _names_part(key):
        _merge_part(values, key, value)
    else:
        _merge(values, key, value)


def _names_part(dotted: str) -> bool:
    """Whether a key is an option of a part, as in prediction-transfer.alpha."""
    from tacita.round.registry import list_part_names

    name, _, option = dotted.partition(".")
    return bool(option) and name in list_part_names()


def _merge_part(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set an option of a part in the part's entry of `parts`, which may be new."""
    name, _, option = dotted.partition(".")
    parts = values.setdefault("parts", [])
    if not isinstance(parts, list):
        raise TacitaError(f"cannot set {dotted}: 'parts' must be a list of tables.")
    for part in parts:
        if isinstance(part, dict) and part.get("name") == name:
            _merge(part, option, value)
            return
    new_part: dict[str, Any] = {"name": name}
    parts.append(new_part)
    _merge(new_part, option, value)


def _merge(values: dict[str, Any], dotted: str, value: Any) -> None:
    *tables, last = dotted.split(".")
    table = values
    for key in tables:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise TacitaError(f"cannot set {dotted}: '{key}' is a single value here, not a table.")
    table[last] = value


def _parse_value(key: str, text: str) -> Any:
    """A TOML value; a bare word stands for itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            raise TacitaError(
                f'--set {key}: {text} is not valid TOML; names in lists need quotes: ["a", "b"].'
            ) from None
        return text
