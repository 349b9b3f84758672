"""Keys and certificates: an authority of our own, the server's certificate, and the key pair of a node.

Private files are made with mode 0600 and nothing is ever overwritten, except a server certificate by `renew`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tacita.core.errors import TacitaError

LOOPBACK = ("localhost", "127.0.0.1")
CA = "ca.pem"
CA_KEY = "ca.key"
SERVER_CERT = "server.pem"
SERVER_KEY = "server.key"
_CLOCK_MARGIN = timedelta(minutes=5)  # for clocks that disagree


@dataclass(frozen=True)
class ServerKeys:
    """The files with which a server shows who it is."""

    ca: Path
    certificate: Path
    key: Path

    @staticmethod
    def in_folder(folder: Path) -> ServerKeys:
        """Where `make_ca` and `make_server` put them."""
        return ServerKeys(folder / CA, folder / SERVER_CERT, folder / SERVER_KEY)

    def check_validity(self) -> None:
        """Refuse certificates that are not valid today."""
        check_validity(self.ca)
        check_validity(self.certificate)


@dataclass(frozen=True)
class NodeKeys:
    """The server's authority, and the key that a node is enrolled by."""

    ca: Path
    key: Path


def make_ca(folder: Path, days: int = 3650) -> None:
    """An authority that signs the server's certificate: `ca.pem`, which nodes get, and `ca.key`, which stays."""
    _check_absent(folder / CA, folder / CA_KEY)
    key = ec.generate_private_key(ec.SECP384R1())
    # The name is unique, so that two authorities are never mistaken for each other.
    name = _make_x509_name(f"tacita authority {os.urandom(4).hex()}")
    now = datetime.now(UTC)
    usage = _make_key_usage(key_cert_sign=True, crl_sign=True)
    cert = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_MARGIN)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_new_file(folder / CA_KEY, _encode_private_key(key), 0o600)
    write_new_file(folder / CA, cert.public_bytes(serialization.Encoding.PEM), 0o644)


def make_server_certificate(folder: Path, hosts: Iterable[str] = (), days: int = 397) -> None:
    """The server's key and certificate for these host names and addresses; loopback is always among them."""
    _check_absent(folder / SERVER_CERT, folder / SERVER_KEY)
    key = ec.generate_private_key(ec.SECP384R1())
    cert = _sign_certificate(folder, key.public_key(), hosts, days)
    write_new_file(folder / SERVER_KEY, _encode_private_key(key), 0o600)
    write_new_file(folder / SERVER_CERT, cert, 0o644)


def renew_server_certificate(folder: Path, hosts: Iterable[str] | None = None, days: int = 397) -> None:
    """A new server certificate for the same key; for the same hosts unless others are given."""
    key = _load_private_key(folder / SERVER_KEY)
    if hosts is None:
        hosts = read_hosts(folder / SERVER_CERT)
    cert = _sign_certificate(folder, key.public_key(), hosts, days)
    side = folder / f".{SERVER_CERT}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        side.unlink()
    write_new_file(side, cert, 0o644)
    os.replace(side, folder / SERVER_CERT)


def make_node_key(path: Path) -> Path:
    """A node's EC P-384 key pair in OpenSSH format: the private key at `path`, the public one beside it as `.pub`."""
    public_path = path.with_name(path.name + ".pub")
    _check_absent(path, public_path)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_new_file(path, private, 0o600)
    write_new_file(public_path, public + b"\n", 0o644)
    return public_path


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key, as `make_node_key` wrote it."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise TacitaError(f"cannot read the node's key {path}: {error.strerror or error}.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise _node_key_error(path) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _node_key_error(path)
    return key


def convert_to_pem(public_key: bytes) -> bytes:
    """A node's public key as PEM, the form in which Flower knows it; accepts OpenSSH and PEM."""
    text = public_key.strip()
    try:
        if text.startswith(b"-----"):
            key = serialization.load_pem_public_key(text)
        else:
            key = serialization.load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm):
        raise TacitaError("this is not a public key; give the .pub file that `tacita node init` made.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise TacitaError("this public key is not an EC P-384 key; give the .pub file that `tacita node init` made.")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@functools.lru_cache(maxsize=4096)
def compute_key_fingerprint(public_key: bytes) -> str:
    """`SHA256:...` of a node's public key, the same for its OpenSSH and its PEM form."""
    digest = hashlib.sha256(convert_to_pem(public_key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_expiry(path: Path) -> datetime:
    return _load_certificate(path).not_valid_after_utc


def read_hosts(path: Path) -> list[str]:
    """The host names and addresses a server certificate is valid for."""
    extensions = _load_certificate(path).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    host_names = names.get_values_for_type(x509.DNSName)
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*host_names, *(str(address) for address in addresses)]


def check_validity(path: Path, now: datetime | None = None) -> None:
    """Refuse a certificate that is not valid today."""
    cert = _load_certificate(path)
    now = now or datetime.now(UTC)
    if now >= cert.not_valid_after_utc:
        day = f"{cert.not_valid_after_utc:%Y-%m-%d}"
        if cert.issuer == cert.subject:
            raise TacitaError(f"the authority {path} expired on {day}; make a new server folder and enrol nodes again.")
        raise TacitaError(f"the certificate {path} expired on {day}; make a new one with `tacita server renew`.")
    if now < cert.not_valid_before_utc:
        day = f"{cert.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise TacitaError(f"the certificate {path} is not valid before {day}; check the clock of this machine.")


def check_authority(path: Path) -> None:
    """Refuse a file that is not the certificate of an authority, or not valid today."""
    remedy = f"ask the operator for the server's {CA}."
    try:
        extensions = _load_certificate(path).extensions
        is_authority = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    except TacitaError as error:
        problem = str(error).split(";")[0].rstrip(".")
        raise TacitaError(f"{problem}; {remedy}") from None
    if not is_authority:
        raise TacitaError(f"{path} is a certificate, but not an authority's; {remedy}")
    check_validity(path)


def write_new_file(path: Path, content: bytes, mode: int) -> None:
    """A file that did not exist before, with its mode from the first byte on."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(path, flags, mode)
        with open(descriptor, "wb") as out:
            os.fchmod(descriptor, mode)
            out.write(content)
            out.flush()
            os.fsync(descriptor)
    except FileExistsError:
        raise _exists_error(path) from None
    except OSError as error:
        raise TacitaError(f"cannot write {path}: {error.strerror or error}.") from None


def _sign_certificate(folder: Path, public: ec.EllipticCurvePublicKey, hosts: Iterable[str], days: int) -> bytes:
    check_validity(folder / CA)
    authority = _load_certificate(folder / CA)
    key = _load_private_key(folder / CA_KEY)
    now = datetime.now(UTC)
    all_hosts = list(dict.fromkeys([*hosts, *LOOPBACK]))
    names = [_make_general_name(host) for host in all_hosts]
    first = all_hosts[0]
    cert = (
        x509.CertificateBuilder(
            issuer_name=authority.subject, subject_name=_make_x509_name(first[:64]), public_key=public
        )
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_MARGIN)
        .not_valid_after(min(now + timedelta(days=days), authority.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return cert.public_bytes(serialization.Encoding.PEM)


def _make_general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or any(c in host for c in " /:@"):
            raise ValueError
        return x509.DNSName(host.encode("idna").decode())
    except ValueError:
        raise TacitaError(f"'{host}' is neither a host name nor an address; give it without scheme and port.") from None


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise TacitaError(f"there is no certificate {path}.") from None
    except OSError as error:
        raise TacitaError(f"cannot read the certificate {path}: {error.strerror or error}.") from None
    except ValueError:
        raise TacitaError(f"{path} is not a PEM certificate; put back the original.") from None


def _load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise TacitaError(f"there is no key {path}.") from None
    except OSError as error:
        raise TacitaError(f"cannot read the key {path}: {error.strerror or error}.") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise TacitaError(f"{path} is not a private key; put back the original.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TacitaError(f"{path} is not an EC key; put back the original.")
    return key


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _make_x509_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _make_key_usage(**on: bool) -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    names += " key_cert_sign crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**{name: on.get(name, False) for name in names.split()})


def _check_absent(*paths: Path) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise _exists_error(path)


def _node_key_error(path: Path) -> TacitaError:
    return TacitaError(f"{path} is not the private key of a node; put back the original.")


def _exists_error(path: Path) -> TacitaError:
    return TacitaError(f"{path} exists already; choose another folder or move it away.")
