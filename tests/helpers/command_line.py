"""The command line called in this process, in a folder of its own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tacita.cli import console, main

SMALL_DATA = "synthetic:users=60,items=40,per_user=12"


@dataclass(frozen=True)
class CommandOutput:
    code: int
    out: str
    err: str


def call(*arguments: str) -> CommandOutput:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as error,
    ):
        main(list(arguments))
    return CommandOutput(int(error.value.code or 0), out.getvalue(), err.getvalue())


def hash_folder(folder: Path) -> dict[str, str]:
    """Everything in a folder, to see that nothing was added, changed or removed."""
    result = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        result[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return result


def assert_one_sentence(said: CommandOutput, *words: str) -> None:
    """Exactly one line on standard error that begins with the program's name and holds the words."""
    assert said.code == 2, said
    assert said.out == ""
    assert said.err.startswith("tacita: "), said.err
    assert said.err.endswith((".\n", "?\n")), said.err
    assert said.err.count("\n") == 1, said.err
    for word in words:
        assert word in said.err, said.err
    for leak in ("Traceback", "errno", "pydantic", "Error:", "object at"):
        assert leak not in said.err, said.err


def assert_refused(arguments: str | list[str], *words: str) -> None:
    """Bad input: one sentence, exit code 2, and the working folder is as it was."""
    before = hash_folder(Path.cwd())
    output = call(*(shlex.split(arguments) if isinstance(arguments, str) else arguments))
    assert_one_sentence(output, *words)
    assert hash_folder(Path.cwd()) == before


@pytest.fixture(autouse=True)
def _isolated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, no datasets, no cache, no network, a terminal of 80 columns."""

    def offline(*_: object) -> Path:
        raise AssertionError("a test must not download")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("TACITA_DATA", raising=False)
    monkeypatch.setenv("TACITA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tacita.data.datasets.download_ml100k_wheel", offline)
    monkeypatch.setattr(console, "LINE_SECONDS", 3600.0)  # a slow machine must not add lines of progress
