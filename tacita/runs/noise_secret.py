"""The secret that the noise of a lab run follows: it is nowhere in the run folder.

While a run trains, its secret lies in the user's state folder (TACITA_STATE, else `tacita` in the XDG state folder), so
that a run that was killed goes on with the same numbers. It is found by the folder in which the run began and belongs
to the settings and data of that run alone: a copy elsewhere has none. It is deleted when the run is trained. With
`privacy.reproducible_noise` noise follows the seed instead, and whoever has config.toml can take it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.files import read_json, write_json

SECRET_BYTES = 32


def state_dir() -> Path:
    """Where secrets are kept: TACITA_STATE, or `tacita` in the user's state folder."""
    if os.environ.get("TACITA_STATE"):
        return Path(os.environ["TACITA_STATE"])
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "tacita"
    return Path.home() / ".local" / "state" / "tacita"


def draw_secret() -> str:
    """A secret of its own for every run, whatever its seed."""
    return secrets.token_hex(SECRET_BYTES)


def with_reproducible_noise(config: RunConfig) -> RunConfig:
    """The same run with noise from its seed: for tables, tuning and audits, which nobody's protection depends on."""
    privacy = config.privacy.model_copy(update={"reproducible_noise": True})
    return config.model_copy(update={"privacy": privacy})


def store_secret(folder: Path, secret: str) -> None:
    """Keep the secret of a run that begins, for as long as it trains."""
    place = _find_secret_path(folder)
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.parent.chmod(0o700)
        _remove_orphans(place.parent)
    except OSError as error:
        raise TacitaError(
            f"the secret of the run's noise cannot be kept in {place.parent} ({error.strerror}); set TACITA_STATE to a "
            "folder of yours, or say --reproducible-noise."
        ) from None
    write_json(place, {"folder": str(folder.resolve()), "run": _identify_run(folder), "secret": secret})


def read_secret(folder: Path) -> str | None:
    """The secret of a run that was killed; None: this folder has none here."""
    place = _find_secret_path(folder)
    if not place.is_file():
        return None
    stored = read_json(place)
    if not isinstance(stored, dict) or stored.get("run") != _identify_run(folder):
        return None
    secret = stored.get("secret")
    return secret if isinstance(secret, str) and secret else None


def hold_ranks(folder: Path, n_ranks: int) -> int:
    """On how many ranks a run with a secret began; the first call says so."""
    place = _find_secret_path(folder)
    stored = read_json(place)
    if "ranks" not in stored:
        write_json(place, {**stored, "ranks": n_ranks})
        return n_ranks
    return int(stored["ranks"])


def delete_secret(folder: Path) -> None:
    """Nobody needs the secret of a run that is trained, or that failed."""
    with contextlib.suppress(OSError):
        _find_secret_path(folder).unlink(missing_ok=True)


def missing_secret_error(folder: Path) -> TacitaError:
    return TacitaError(
        f"{folder} drew its noise from a secret that is not on this machine, or not for a copy of the folder, so it "
        "cannot go on; start a new run (--reproducible-noise makes runs that go on anywhere)."
    )


def _find_secret_path(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return state_dir() / "noise" / f"{name[:32]}.json"


def _identify_run(folder: Path) -> str:
    """A digest of a run's settings, people and items: another run in the same place has another."""
    return hashlib.sha256((folder / "ids.json").read_bytes()).hexdigest()


def _remove_orphans(place: Path) -> None:
    """Remove secrets of runs that are gone or trained."""
    for path in place.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(json.loads(path.read_bytes())["folder"])
            if not folder.is_dir() or (folder / "result.json").is_file():
                path.unlink(missing_ok=True)
