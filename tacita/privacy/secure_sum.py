"""A secure sum: the server learns the sum of many clients' whole numbers, and no single client's (SecAgg+).

The whole protocol runs in this process, with real keys and masks. It is a lab simulation for at most 50 clients; nodes
do not do this yet.

- Every client masks its numbers with one mask of its own and with one for each neighbour, which the neighbour cancels.
  Neighbours lie on a random ring, as many on either side.
- Each client shares the seed of its own mask and the seed of its key out among its neighbours.
- Neighbours reveal the mask seed of a client that answered, or the key seed of one that dropped out, never both.
- More than half of every client's neighbours have to answer. So the graph of respondents is connected, and the sum of a
  smaller group is never opened.
- Sums are modulo 2^64, and clients refuse to mask numbers that could overflow.

It protects single uploads from a server that is curious and follows the protocol. It does not hide who takes part, nor
what the sum itself shows. It does not detect a server that lies about who dropped out, or invents clients. Keys come
from the operating system and not from a run's seed: the sum does not depend on them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Keys, Longs

MOST_CLIENTS = 50
FEWEST_CLIENTS = 3  # from a sum of two each can compute what the other sent
BOUND = 2**47  # of one client's number: 64 of them stay below 2^53, where sums in double precision are exact, too
MOST_NUMBERS = 2**26  # of all clients together: what this process masks at once
_SEED_BYTES = 16
_PACKAGES = {"cryptography": "cryptography", "Crypto": "pycryptodome"}

SealedMessages = dict[int, bytes]  # from or to a client, by its number
Share = tuple[int, bytes]  # its number, and its bytes
RevealedShares = Mapping[int, Mapping[int, Share]]  # revealing client -> neighbour -> a share of one of its seeds


@dataclass(frozen=True)
class Keyring:
    """The public halves of a client's two keys."""

    mask: bytes
    channel: bytes


class SeedShares(NamedTuple):
    """One neighbour's shares of a client's two seeds."""

    number: int  # of the share
    mask_share: bytes  # of the seed of its own mask
    key_share: bytes  # of the seed of its key


def check_installed() -> None:
    missing = []
    for module, name in _PACKAGES.items():
        if find_spec(module) is None:
            missing.append(name)
    if missing:
        names = " and ".join(missing)
        raise TacitaError(
            f"train.aggregator = 'secure' needs {names}: run pip install 'tacita[secure]', or use "
            "train.aggregator = 'ideal', which gives the same sums without masks."
        )


def quantise_values(values: Doubles, quantum: float) -> Longs:
    """A client's numbers as whole numbers of a quantum; refused where a sum of them could overflow."""
    scaled = np.rint(values / quantum)
    is_bounded = np.abs(scaled) <= BOUND  # false where one is no number
    if not is_bounded.all():
        limit = BOUND * quantum
        raise TacitaError(
            f"a client's upload holds a number beyond ±{limit:,.0f}, which a secure sum could not hold; "
            "nothing was sent. Lower the learning rate, or clip uploads."
        )
    return scaled.astype(np.int64)


def assign_neighbours(n: int, order: Sequence[int]) -> list[list[int]]:
    """The neighbours of each of n clients: on a ring in this order about log2 n on either side, or all others."""
    at_least_two = max(2, n)
    side = math.ceil(math.log2(at_least_two))
    neighbours: list[list[int]] = []
    if 2 * side >= n - 1:
        for client in range(n):
            others = list(range(n))
            others.remove(client)
            neighbours.append(others)
        return neighbours
    place = {client: number for number, client in enumerate(order)}
    for client in range(n):
        others = []
        for step in range(1, side + 1):
            before = place[client] - step
            after = place[client] + step
            others.append(order[before % n])
            others.append(order[after % n])
        neighbours.append(sorted(others))
    return neighbours


def compute_share_threshold(neighbours: int) -> int:
    """How many of a client's neighbours have to answer: more than half."""
    return neighbours // 2 + 1


class SecureSumClient:
    """One device. It answers the four questions of a sum in their order, each once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._self_mask_seed = secrets.token_bytes(_SEED_BYTES)
        self._key_seed = secrets.token_bytes(_SEED_BYTES)
        self._key = _derive_key(self._key_seed)
        self._channel = _generate_key()
        self._neighbours: dict[int, Keyring] = {}
        self._received_shares: dict[int, SeedShares] = {}
        self._revealed_for: frozenset[int] | None = None

    def make_keyring(self) -> Keyring:
        mask_key = _encode_public_key(self._key)
        channel_key = _encode_public_key(self._channel)
        return Keyring(mask_key, channel_key)

    def share_secrets(self, others: Mapping[int, Keyring]) -> SealedMessages:
        """To each neighbour, sealed: a share of the seed of the own mask, and one of the seed of the key."""
        from Crypto.Protocol.SecretSharing import Shamir

        self._neighbours = dict(others)
        n = len(others)
        least = compute_share_threshold(n)
        mask_shares = Shamir.split(least, n, self._self_mask_seed, False)
        key_shares = Shamir.split(least, n, self._key_seed, False)
        sealed = {}
        for place, neighbour in enumerate(sorted(others)):
            number, mask_share = mask_shares[place]
            _, key_share = key_shares[place]
            message = bytes([number]) + mask_share + key_share
            key = self._derive_channel_key(neighbour)
            sealed[neighbour] = _seal_message(key, self.number, neighbour, message)
        return sealed

    def mask_numbers(self, letters: Mapping[int, bytes], numbers: Longs) -> Keys:
        """The numbers under all masks. A client that misses a letter, or holds too large a number, sends nothing."""
        if letters.keys() != self._neighbours.keys():
            raise TacitaError("a client of a secure sum heard nothing from one of its neighbours; nothing was sent.")
        if _find_largest_magnitude(numbers) > BOUND:
            raise TacitaError(f"a secure sum holds whole numbers up to {BOUND:,} of a client; nothing was sent.")
        for neighbour, letter in letters.items():
            self._received_shares[neighbour] = self._open_letter(neighbour, letter)
        own_key = _derive_secret(self._self_mask_seed, "own")
        own_mask = _expand_mask(own_key, numbers.size)
        total = numbers.astype(np.uint64) + own_mask
        for neighbour, keyring in self._neighbours.items():
            pair_key = _agree_secret(self._key, keyring.mask, "pair")
            pair_mask = _expand_mask(pair_key, numbers.size)
            if self.number < neighbour:
                total = total + pair_mask
            else:
                total = total - pair_mask
        return total

    def reveal_shares(self, answered: frozenset[int]) -> dict[int, Share]:
        """A share of each neighbour: of its own mask if it answered, else of its key; for one set of users only."""
        if self._revealed_for is not None and self._revealed_for != answered:
            raise TacitaError("a client of a secure sum is asked twice who answered: both would open an upload.")
        n_neighbours = len(self._neighbours)
        n_answered = len(answered & self._neighbours.keys())
        if n_answered < compute_share_threshold(n_neighbours):
            raise TacitaError(_describe_too_few(n_answered, n_neighbours))
        self._revealed_for = answered
        revealed = {}
        for neighbour, shares in self._received_shares.items():
            if neighbour in answered:
                share = shares.mask_share
            else:
                share = shares.key_share
            revealed[neighbour] = (shares.number, share)
        return revealed

    def _derive_channel_key(self, neighbour: int) -> bytes:
        """The key of letters between this client and a neighbour."""
        other = self._neighbours[neighbour].channel
        return _agree_secret(self._channel, other, "letter")

    def _open_letter(self, neighbour: int, letter: bytes) -> SeedShares:
        key = self._derive_channel_key(neighbour)
        message = _unseal_message(key, neighbour, self.number, letter)
        number = message[0]
        shares = message[1:]
        mask_share = shares[:_SEED_BYTES]
        key_share = shares[_SEED_BYTES:]
        return SeedShares(number, mask_share, key_share)


@dataclass
class SecureSumServer:
    """The server: all it sees of clients is public keys, sealed letters, masked numbers and shares."""

    graph: list[list[int]]
    keyrings: dict[int, Keyring] = field(default_factory=dict)
    masked_sum: Keys | None = None  # the sum of all masked uploads
    respondents: set[int] = field(default_factory=set)

    def add_upload(self, client: int, upload: Keys) -> None:
        if self.masked_sum is None:
            self.masked_sum = upload.copy()
        else:
            self.masked_sum = self.masked_sum + upload
        self.respondents.add(client)

    def unmask_sum(self, revealed: RevealedShares) -> Longs:
        """The sum without masks, from the revealed shares; nothing at all where too few came."""
        assert self.masked_sum is not None, "nobody sent anything"
        total = self.masked_sum
        for client, neighbours in enumerate(self.graph):
            if client in self.respondents:
                seed = self._recover_seed(client, revealed)
                own_key = _derive_secret(seed, "own")
                total = total - _expand_mask(own_key, total.size)
                continue
            partners = [other for other in neighbours if other in self.respondents]
            if partners:
                seed = self._recover_seed(client, revealed)
                total = self._remove_pair_masks(total, client, seed, partners)
        numbers = total.astype(np.int64)
        most = len(self.respondents) * BOUND
        if _find_largest_magnitude(numbers) > most:
            raise TacitaError("masks are left on a secure sum, so some share was wrong; the sum was not opened.")
        return numbers

    def _remove_pair_masks(self, total: Keys, client: int, seed: bytes, partners: Sequence[int]) -> Keys:
        """Remove the masks that partners added for a client whose own upload does not cancel them."""
        key = _derive_key(seed)
        if _encode_public_key(key) != self.keyrings[client].mask:
            raise TacitaError("the shares of a client's key do not fit together; the sum was not opened.")
        for partner in partners:
            keyring = self.keyrings[partner]
            pair_key = _agree_secret(key, keyring.mask, "pair")
            pair_mask = _expand_mask(pair_key, total.size)
            if partner < client:
                total = total - pair_mask
            else:
                total = total + pair_mask
        return total

    def _recover_seed(self, client: int, revealed: RevealedShares) -> bytes:
        from Crypto.Protocol.SecretSharing import Shamir

        shares = []
        for shares_by_client in revealed.values():
            if client in shares_by_client:
                shares.append(shares_by_client[client])
        n_neighbours = len(self.graph[client])
        least = compute_share_threshold(n_neighbours)
        if len(shares) < least:
            raise TacitaError(_describe_too_few(len(shares), n_neighbours))
        return bytes(Shamir.combine(shares[:least], False))


@dataclass(frozen=True)
class SecureSumResult:
    sum: Longs
    n_bytes: float  # that clients sent, all together


def run_secure_sum(
    numbers: Sequence[Longs | None], leave: Iterable[int] = (), order: Sequence[int] | None = None
) -> SecureSumResult:
    """The sum of all clients' numbers. None: drops out before it uploads; `leave`: drop out after they have."""
    n = len(numbers)
    sizes = [upload.size for upload in numbers if upload is not None]
    size = max(sizes, default=0)
    check_size(n, size)
    if order is None:
        random = secrets.SystemRandom()
        order = random.sample(range(n), n)
    graph = assign_neighbours(n, order)
    server = SecureSumServer(graph)
    clients = [SecureSumClient(number) for number in range(n)]
    for client in clients:
        server.keyrings[client.number] = client.make_keyring()
    n_bytes = 64.0 * n
    sealed = []
    for neighbours, client in zip(graph, clients):
        keyrings = {other: server.keyrings[other] for other in neighbours}
        messages = client.share_secrets(keyrings)
        n_bytes += sum(len(letter) for letter in messages.values())
        sealed.append(messages)
    for number, upload in enumerate(numbers):
        if upload is not None:
            letters = {sender: sealed[sender][number] for sender in graph[number]}
            masked = clients[number].mask_numbers(letters, upload)
            server.add_upload(number, masked)
            n_bytes += 8.0 * size
    answered = frozenset(server.respondents)
    remaining = answered - frozenset(leave)
    revealed = {}
    for number in sorted(remaining):
        shares = clients[number].reveal_shares(answered)
        n_bytes += (1 + _SEED_BYTES) * len(shares)
        revealed[number] = shares
    return SecureSumResult(server.unmask_sum(revealed), n_bytes)


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


def _find_largest_magnitude(numbers: Longs) -> int:
    """The largest absolute value, 0 of none."""
    if not numbers.size:
        return 0
    highest = int(numbers.max())
    lowest = int(numbers.min())
    return max(highest, -lowest)


def _describe_too_few(n_answered: int, n_neighbours: int) -> str:
    least = compute_share_threshold(n_neighbours)
    return (
        f"only {n_answered} of the {n_neighbours} neighbours of a client of a secure sum answered, and {least} "
        "are needed; the "
        "sum was not opened. Ask more people, or use train.aggregator = 'ideal'."
    )


# Keys and masks, all from libraries


def _generate_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def _derive_key(seed: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    secret = _derive_secret(seed, "key")
    return X25519PrivateKey.from_private_bytes(secret)


def _encode_public_key(key: Any) -> bytes:
    public_key = key.public_key()
    return bytes(public_key.public_bytes_raw())


def _agree_secret(key: Any, other: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    public_key = X25519PublicKey.from_public_bytes(other)
    secret = key.exchange(public_key)
    return _derive_secret(secret, purpose)


def _derive_secret(secret: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = f"tacita secure sum {purpose}"
    derivation = HKDF(SHA256(), 32, None, info.encode())
    return derivation.derive(secret)


def _expand_mask(key: bytes, size: int) -> Keys:
    """A stream of 64-bit words; every key is new in every sum, and masks one vector."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    algorithm = ChaCha20(key, bytes(16))
    cipher = Cipher(algorithm, mode=None)
    stream = cipher.encryptor().update(bytes(8 * size))
    words = np.frombuffer(stream, np.dtype("<u8"))
    return words.astype(np.uint64, copy=False)


def _seal_message(key: bytes, sender: int, to: int, message: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = secrets.token_bytes(12)
    direction = bytes([sender, to])
    sealed = ChaCha20Poly1305(key).encrypt(nonce, message, direction)
    return nonce + sealed


def _unseal_message(key: bytes, sender: int, to: int, letter: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = letter[:12]
    sealed = letter[12:]
    direction = bytes([sender, to])
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, direction)
    except InvalidTag as error:
        raise TacitaError(
            "a letter between clients of a secure sum was changed on its way; nothing was sent."
        ) from error
