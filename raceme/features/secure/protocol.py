"""The mathematics of both halves: keys, shares, masks and quantised numbers.

Keys, shares and encryption are Flower's and those of `cryptography`. Masks are the key stream of
AES-256 in counter mode. Sums are modulo 2³².
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from raceme.core.messages import Vector
from raceme.flower.secure_sums import (
    combine_shares,
    create_shares,
    dequantize,
    generate_shared_key,
    quantize,
)

Bytes = NDArray[np.uint8]
Masked = NDArray[np.uint32]

# Kinds of work, settings and names of arrays in messages.
SECURE = "secure"
STAGE, POSITION, WEIGHT = "secure-stage", "secure-position", "secure-weight"
ANSWERED, MISSING = "secure-answered", "secure-missing"
KEYS, SHARES, MASKED, UNMASK = "secure-keys", "secure-shares", "secure-masked", "secure-unmask"
"""Stages; arrays in messages have the names of the first three."""
NEXT = {KEYS: SHARES, SHARES: MASKED, MASKED: UNMASK}
"""The stage that follows each stage."""

KEY_BYTES = 33
"""Length of a public key; a member has two, one after the other."""
SHARE_BYTES = 52
"""Length of a share of a secret of 32 bytes."""
TOKEN_BYTES = 248
"""Length of the encrypted shares of two secrets."""
_LEVELS = 2**31
"""Levels of a sum of the largest cohort, which Flower quantises to signed numbers of 32 bits."""
_CURVE = ec.SECP256R1()
_SECRET_BYTES = 32


class ProtocolError(ValueError):
    """The other side does not keep to the protocol."""


def threshold(members: int) -> int:
    """Return how many members of a cohort have to answer: more than two thirds.

    So no two sets of members that answer differently can both reveal secrets: they would have a
    member in common, which answers once.
    """
    return 2 * members // 3 + 1


# -----------------------------------------------------------------------------
# Keys and shares.
# -----------------------------------------------------------------------------


def new_private_key() -> bytes:
    """Return a private key of the operating system's randomness, 32 bytes."""
    key = ec.generate_private_key(_CURVE)
    return key.private_numbers().private_value.to_bytes(_SECRET_BYTES, "big")


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one, 33 bytes."""
    point = _private(private).public_key()
    return point.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def is_public_key(public: bytes) -> bool:
    """Return whether bytes are a public key, i.e. a point of the curve."""
    try:
        ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    except ValueError:
        return False
    return True


def common_key(private: bytes, public: bytes) -> bytes:
    """Return the key that two members derive from the private key of one and the other's public.

    Raises
    ------
    ProtocolError
        It is no public key.
    """
    if not is_public_key(public):
        raise ProtocolError("a public key is invalid")
    other = ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    return generate_shared_key(_private(private), other)


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(key, "big"), _CURVE)


def shares_of(secret: bytes, members: int) -> list[bytes]:
    """Return a share of a secret for each member, a `threshold` of which reveals it."""
    return create_shares(secret, threshold(members), members)


def combined(shares: Sequence[bytes], members: int) -> bytes:
    """Return the secret of some shares.

    Raises
    ------
    ProtocolError
        They are too few, or do not fit together.
    """
    needed = threshold(members)
    if len(shares) < needed:
        raise ProtocolError(f"{len(shares)} shares of a secret, not {needed}")
    try:
        return combine_shares(list(shares[:needed]))
    except ValueError:
        raise ProtocolError("shares do not fit together") from None


# -----------------------------------------------------------------------------
# Masks.
# -----------------------------------------------------------------------------


def mask(seed: bytes, size: int) -> Masked:
    """Return the mask of a seed of 32 bytes: the key stream of AES-256 in counter mode."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), np.uint32)


def common_masks(private: bytes, own: int, others: Mapping[int, bytes], size: int) -> Masked:
    """Return the sum of the masks that a member has in common with others.

    Of two members the one of the lower position adds their mask, the other one subtracts it.

    Parameters
    ----------
    private : bytes
        The member's first private key.
    own : int
        Its position in the cohort.
    others : Mapping[int, bytes]
        First public keys of others, by position.
    size : int
        Number of weights.
    """
    total = np.zeros(size, np.uint32)
    for position, public in others.items():
        seed = base64.urlsafe_b64decode(common_key(private, public))
        if own < position:
            total += mask(seed, size)
        else:
            total -= mask(seed, size)
    return total


# -----------------------------------------------------------------------------
# Quantised numbers.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The whole numbers of weighted changes.

    Attributes
    ----------
    largest : float
        Largest change of a weight; it is cut off beyond.
    most : int
        Largest number of members of a cohort.
    """

    largest: float
    most: int

    @property
    def levels(self) -> int:
        """Largest whole number: the sum of the largest cohort stays in range."""
        return _LEVELS // self.most - 1

    @property
    def level(self) -> float:
        """Distance of two whole numbers."""
        return 2 * self.largest / self.levels

    def bound(self, weights: Collection[float]) -> float:
        """Return the largest error of a number of the weighted mean: a level of each member."""
        return len(weights) / sum(weights) * self.level


def quantized(change: Vector, weight: float, scale: Scale) -> Masked:
    """Return the weighted change of a model as whole numbers.

    Rounding is random without bias, and depends on the change only: Flower draws from numpy's
    common generator, which is as before afterwards.
    """
    # In float64: with float32, levels near the upper end are lost.
    scaled = weight * change.astype(np.float64)
    before = np.random.get_state()
    np.random.seed(crc32(change.tobytes()))
    try:
        found = quantize([scaled], scale.largest, scale.levels)[0]
    finally:
        np.random.set_state(before)
    return np.asarray(found, np.uint32)


def mean_of(total: Masked, weights: Collection[float], scale: Scale) -> Vector:
    """Return the weighted mean of quantised changes, given their sum.

    Raises
    ------
    ProtocolError
        The sum is not one of so many changes: a mask remains in it, or a member added more.
    """
    members = len(weights)
    if total.size and int(total.max()) > members * scale.levels:
        raise ProtocolError("the sum is out of range: a member has not kept to the protocol")
    summed = (
        dequantize([total.astype(np.int64)], scale.largest, scale.levels)[0]
        - (members - 1) * scale.largest
    )
    return np.asarray(summed / sum(weights), np.float32)
