"""What certificates call people: names that only who has the run folder can make, and what they tell of each other.

Ids of people are few and guessable, so a plain digest of one names its person. The key lies beside the certificates,
readable by the folder's owner; who gets a certificate without it learns only which others are about the same person.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.runs.forgetting.certificate import PastCertificate

KEY = "pseudonyms.key"
_BYTES = 32


def read_key(folder: Path) -> bytes | None:
    """The key of a run folder; None: it has none yet."""
    try:
        text = (folder / KEY).read_text("ascii")
        key = bytes.fromhex(text.strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise _bad_key_error(folder) from None
    if len(key) != _BYTES:
        raise _bad_key_error(folder)
    return key


def create_key(folder: Path) -> bytes:
    """A key that nobody can guess, written where the next certificates find it."""
    key = secrets.token_bytes(_BYTES)
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as out:
        out.write(key.hex() + "\n")
    return key


def make_pseudonym(key: bytes, user: str) -> str:
    return hashlib.blake2b(user.encode(), key=key, digest_size=8).hexdigest()


def join_pseudonyms(pseudonyms: list[str]) -> str:
    """One name for several people."""
    text = " ".join(pseudonyms)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_residual_subjects(folder: Path) -> set[str]:
    """Of whom something stayed in the model by their own certificates, since it was last retrained."""
    subjects: set[str] = set()
    for path in sorted(list_certificates(folder), key=parse_certificate_number):
        certificate = _read_certificate(path)
        if certificate is None:
            continue
        if certificate.is_of_retraining:
            subjects.clear()
        elif certificate.has_residue:
            subjects.update(certificate.request.subjects)
    return subjects


def _read_certificate(path: Path) -> PastCertificate | None:
    """A certificate of this or an earlier version; None: the file is somebody's own."""
    try:
        return PastCertificate.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def list_certificates(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*-*.json") if parse_certificate_number(path)]


def parse_certificate_number(path: Path) -> int:
    """The number of a certificate; 0: it is none."""
    verb, _, number = path.stem.rpartition("-")
    is_certificate = verb in ("forget", "unshare") and number.isdigit()
    return int(number) if is_certificate else 0


def _bad_key_error(folder: Path) -> TacitaError:
    return TacitaError(
        f"{folder / KEY} does not hold the key of this folder's certificates; put it back, or remove it: new "
        "certificates then call people by other names."
    )
