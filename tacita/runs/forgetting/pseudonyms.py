"""What certificates call people: names that only who has the run folder can make, and what they tell of each other.

Ids of people are few and guessable, so a plain digest of one names its person. The key lies beside the certificates,
readable by the folder's owner; who gets a certificate without it learns only which others are about the same person.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from tacita.core.errors import TacitaError

KEY = "pseudonyms.key"
_BYTES = 32


def read_key(folder: Path) -> bytes | None:
    """The key of a run folder; None: it has none yet."""
    try:
        found = bytes.fromhex((folder / KEY).read_text("ascii").strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise _bad_key_error(folder) from None
    if len(found) != _BYTES:
        raise _bad_key_error(folder)
    return found


def create_key(folder: Path) -> bytes:
    """A key that nobody can guess, written where the next certificates find it."""
    made = secrets.token_bytes(_BYTES)
    with open(os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
        out.write(made.hex() + "\n")
    return made


def pseudonym(key: bytes, user: str) -> str:
    return hashlib.blake2b(user.encode(), key=key, digest_size=8).hexdigest()


def joint_pseudonym(pseudonyms: list[str]) -> str:
    """One name for several people."""
    return hashlib.sha256(" ".join(pseudonyms).encode()).hexdigest()[:16]


def find_residual_subjects(folder: Path) -> set[str]:
    """Of whom something stayed in the model by their own certificates, since it was last trained again."""
    found: set[str] = set()
    for path in sorted(list_certificates(folder), key=certificate_number):
        try:
            told = json.loads(path.read_text("utf-8"))
            subjects, method, verdict = told["request"]["subjects"], told["method"], str(told["verdict"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # somebody's own file, or none of ours
        if method["name"] == "retrain":
            found.clear()
        elif method.get("leaves") or verdict.startswith("fail"):
            found |= set(subjects)
    return found


def list_certificates(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*-*.json") if certificate_number(path)]


def certificate_number(path: Path) -> int:
    """The number of a certificate; 0: it is none."""
    verb, _, number = path.stem.rpartition("-")
    return int(number) if verb in ("forget", "unshare") and number.isdigit() else 0


def _bad_key_error(folder: Path) -> TacitaError:
    return TacitaError(
        f"{folder / KEY} does not hold the key of this folder's certificates; put it back, or remove it: new "
        "certificates then call people by other names."
    )
