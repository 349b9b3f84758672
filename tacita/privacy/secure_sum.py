"""A secure sum: whoever adds up learns the sum of many clients' whole numbers, and no single client's (SecAgg+).

The whole protocol is played in this process, with real keys and masks: a lab simulation for at most 50 clients, of what
nodes do not do yet. Every client masks its numbers with one mask of its own and with one for each neighbour, which the
neighbour takes off; neighbours lie on a random ring, as many on either side. The seed of its own mask and of its key
are shared out among its neighbours. Of a client that answered they give out the seed of its own mask, of one that
dropped out the seed of its key, and never both. More than half of every client's neighbours have to answer: so those
who answered hang together, and a smaller group's sum is never opened. Sums are modulo 2^64, and clients refuse to mask
what could run over.

It protects single uploads from a server that is curious and keeps to the protocol. It does not hide who takes part, nor
what the sum itself shows, and a server that lies about who dropped out, or invents clients, is not found out. Keys come
from the operating system and not from a run's seed: the sum does not depend on them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Keys, Longs

MOST_CLIENTS = 50
FEWEST_CLIENTS = 3  # a sum of two tells each of them what the other sent
BOUND = 2**47  # of one client's number: 64 of them stay below 2^53, where sums in double precision are exact, too
MOST_NUMBERS = 2**26  # of all clients together: what this process masks at once
_SEED_BYTES = 16  # bytes
_PACKAGES = {"cryptography": "cryptography", "Crypto": "pycryptodome"}

SealedMessages = dict[int, bytes]  # from or to a client, by its number


@dataclass(frozen=True)
class Keyring:
    """What a client tells everybody: the public halves of its two keys."""

    mask: bytes
    channel: bytes


def check_installed() -> None:
    missing = [name for module, name in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise TacitaError(
            f"train.aggregator = 'secure' needs {' and '.join(missing)}: run pip install 'tacita[secure]', or use "
            "train.aggregator = 'ideal', which gives the same sums without masks."
        )


def quantise_values(values: Doubles, quantum: float) -> Longs:
    """A client's numbers as whole numbers of a quantum; refused where a sum of them could run over."""
    scaled = np.rint(values / quantum)
    if not (np.abs(scaled) <= BOUND).all():  # nor where one is no number
        raise TacitaError(
            f"a client's upload holds a number beyond ±{BOUND * quantum:,.0f}, which a secure sum could not hold; "
            "nothing was sent. Lower the learning rate, or clip uploads."
        )
    return scaled.astype(np.int64)


def assign_neighbours(n: int, order: Sequence[int]) -> list[list[int]]:
    """Whom each of n clients masks with: on a ring in this order about log2 n on either side, or everybody."""
    side = math.ceil(math.log2(max(2, n)))
    if 2 * side >= n - 1:
        return [[v for v in range(n) if v != u] for u in range(n)]
    found: list[list[int]] = [[] for _ in range(n)]
    for place, u in enumerate(order):
        found[u] = sorted(order[(place + step) % n] for step in range(-side, side + 1) if step)
    return found


def share_threshold(neighbours: int) -> int:
    """How many of a client's neighbours have to answer: more than half."""
    return neighbours // 2 + 1


class SecureSumClient:
    """One device. It answers the four questions of a sum in their order, each once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._self_mask_seed, self._key_seed = secrets.token_bytes(_SEED_BYTES), secrets.token_bytes(_SEED_BYTES)
        self._key, self._channel = _derive_key(self._key_seed), _generate_key()
        self._neighbours: dict[int, Keyring] = {}
        self._received_shares: dict[int, tuple[int, bytes, bytes]] = {}
        self._revealed_for: frozenset[int] | None = None

    def keyring(self) -> Keyring:
        return Keyring(_public_bytes(self._key), _public_bytes(self._channel))

    def share_secrets(self, others: Mapping[int, Keyring]) -> SealedMessages:
        """To each neighbour, sealed: a share of the seed of the own mask, and one of the seed of the key."""
        from Crypto.Protocol.SecretSharing import Shamir

        self._neighbours = dict(others)
        least, n = share_threshold(len(others)), len(others)
        both = zip(Shamir.split(least, n, self._self_mask_seed, False), Shamir.split(least, n, self._key_seed, False))
        sealed = {}
        for v, ((at, own), (_, seed)) in zip(sorted(others), both):
            sealed[v] = _seal(
                _agree_secret(self._channel, others[v].channel, "letter"), self.number, v, bytes([at]), own, seed
            )
        return sealed

    def mask_numbers(self, letters: Mapping[int, bytes], numbers: Longs) -> Keys:
        """The numbers under all masks. Who misses a letter, or holds too large a number, sends nothing."""
        if letters.keys() != self._neighbours.keys():
            raise TacitaError("a client of a secure sum heard nothing from one of its neighbours; nothing was sent.")
        if numbers.size and max(int(numbers.max()), -int(numbers.min())) > BOUND:
            raise TacitaError(f"a secure sum holds whole numbers up to {BOUND:,} of a client; nothing was sent.")
        for v, letter in letters.items():
            told = _unseal(_agree_secret(self._channel, self._neighbours[v].channel, "letter"), v, self.number, letter)
            self._received_shares[v] = (told[0], told[1 : 1 + _SEED_BYTES], told[1 + _SEED_BYTES :])
        total = numbers.astype(np.uint64) + _expand_mask(_derive_secret(self._self_mask_seed, "own"), numbers.size)
        for v, ring in self._neighbours.items():
            pair = _expand_mask(_agree_secret(self._key, ring.mask, "pair"), numbers.size)
            total = total + pair if self.number < v else total - pair
        return total

    def reveal_shares(self, answered: frozenset[int]) -> dict[int, tuple[int, bytes]]:
        """A share of each neighbour: of its own mask if it answered, else of its key; for one set of people only."""
        there = len(answered & self._neighbours.keys())
        if self._revealed_for is not None and self._revealed_for != answered:
            raise TacitaError("a client of a secure sum is asked twice who answered: both would open an upload.")
        if there < share_threshold(len(self._neighbours)):
            raise TacitaError(_describe_too_few(there, len(self._neighbours)))
        self._revealed_for = answered
        return {v: (at, own if v in answered else seed) for v, (at, own, seed) in self._received_shares.items()}


@dataclass
class SecureSumServer:
    """Who adds up: all it sees of clients is public keys, sealed letters, masked numbers and shares."""

    graph: list[list[int]]
    keyrings: dict[int, Keyring] = field(default_factory=dict)
    masked_sum: Keys | None = None  # the sum of all masked uploads
    respondents: set[int] = field(default_factory=set)

    def add_upload(self, client: int, upload: Keys) -> None:
        self.masked_sum = upload.copy() if self.masked_sum is None else self.masked_sum + upload
        self.respondents.add(client)

    def unmask_sum(self, revealed: Mapping[int, Mapping[int, tuple[int, bytes]]]) -> Longs:
        """The sum without masks, from what clients gave out; nothing at all where too little came."""
        assert self.masked_sum is not None, "nobody sent anything"
        total = self.masked_sum
        for u in range(len(self.graph)):
            there = u in self.respondents
            touching = [v for v in self.graph[u] if v in self.respondents]
            if not there and not touching:  # nobody masked with it
                continue
            seed = self._recover_seed(u, revealed)
            if there:
                total = total - _expand_mask(_derive_secret(seed, "own"), total.size)
                continue
            key = _derive_key(seed)
            if _public_bytes(key) != self.keyrings[u].mask:
                raise TacitaError("the shares of a client's key do not fit together; the sum was not opened.")
            for v in touching:  # who took its part of the mask on without u's to cancel it
                pair = _expand_mask(_agree_secret(key, self.keyrings[v].mask, "pair"), total.size)
                total = total - pair if v < u else total + pair
        found = total.astype(np.int64)
        if found.size and max(int(found.max()), -int(found.min())) > len(self.respondents) * BOUND:
            raise TacitaError("masks are left on a secure sum, so some share was wrong; the sum was not opened.")
        return found

    def _recover_seed(self, u: int, revealed: Mapping[int, Mapping[int, tuple[int, bytes]]]) -> bytes:
        from Crypto.Protocol.SecretSharing import Shamir

        shares = [told[u] for told in revealed.values() if u in told]
        least = share_threshold(len(self.graph[u]))
        if len(shares) < least:
            raise TacitaError(_describe_too_few(len(shares), len(self.graph[u])))
        return bytes(Shamir.combine(shares[:least], False))


@dataclass(frozen=True)
class SecureSumResult:
    sum: Longs
    n_bytes: float  # that clients sent, all together


def secure_sum(
    numbers: Sequence[Longs | None], leave: Iterable[int] = (), order: Sequence[int] | None = None
) -> SecureSumResult:
    """The sum of all clients' numbers. None: drops out before it uploads; `leave`: drop out after they have."""
    n, size = len(numbers), max((one.size for one in numbers if one is not None), default=0)
    check_size(n, size)
    ring = list(order) if order is not None else secrets.SystemRandom().sample(range(n), n)
    server, clients = SecureSumServer(assign_neighbours(n, ring)), [SecureSumClient(u) for u in range(n)]
    server.keyrings = {u: client.keyring() for u, client in enumerate(clients)}
    sealed = [
        client.share_secrets({v: server.keyrings[v] for v in server.graph[u]}) for u, client in enumerate(clients)
    ]
    sent = 64.0 * n + sum(len(letter) for one in sealed for letter in one.values())
    for u, mine in enumerate(numbers):
        if mine is not None:
            server.add_upload(u, clients[u].mask_numbers({v: sealed[v][u] for v in server.graph[u]}, mine))
            sent += 8.0 * size
    answered, left = frozenset(server.respondents), frozenset(leave)
    revealed = {u: clients[u].reveal_shares(answered) for u in sorted(answered - left)}
    sent += sum((1 + _SEED_BYTES) * len(told) for told in revealed.values())
    return SecureSumResult(server.unmask_sum(revealed), sent)


def check_size(n: int, size: int = 1) -> None:
    """Refuse sums that this simulation does not play."""
    check_installed()
    if not FEWEST_CLIENTS <= n <= MOST_CLIENTS:
        raise TacitaError(
            f"train.aggregator = 'secure' adds up {FEWEST_CLIENTS} to {MOST_CLIENTS} clients in one exchange, and "
            f"{n:,} were asked; use train.participation, silos, or 'ideal', which gives the same sums without masks."
        )
    if n * size > MOST_NUMBERS:
        raise TacitaError(
            f"train.aggregator = 'secure' would mask {n:,} times {size:,} numbers, more than this simulation holds; "
            "use fewer clients or items, or 'ideal', which gives the same sums without masks."
        )


def _describe_too_few(there: int, of: int) -> str:
    return (
        f"only {there} of the {of} neighbours of a client of a secure sum answered, and {share_threshold(of)} "
        "are needed; the "
        "sum was not opened. Ask more people, or use train.aggregator = 'ideal'."
    )


# keys and masks, all from libraries


def _generate_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def _derive_key(seed: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_derive_secret(seed, "key"))


def _public_bytes(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes_raw())


def _agree_secret(key: Any, other: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return _derive_secret(key.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def _derive_secret(secret: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, f"tacita secure sum {purpose}".encode()).derive(secret)


def _expand_mask(key: bytes, size: int) -> Keys:
    """A stream of 64-bit words; every key is new in every sum, and masks one vector."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    drawn = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
    return np.frombuffer(drawn, np.dtype("<u8")).astype(np.uint64, copy=False)


def _seal(key: bytes, sender: int, to: int, *parts: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = secrets.token_bytes(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, b"".join(parts), bytes([sender, to]))


def _unseal(key: bytes, sender: int, to: int, letter: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(letter[:12], letter[12:], bytes([sender, to]))
    except InvalidTag as error:
        raise TacitaError(
            "a letter between clients of a secure sum was changed on its way; nothing was sent."
        ) from error
