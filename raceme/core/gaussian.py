"""Clipping, Gaussian noise from a cipher, and the privacy that these give.

numpy's generators can be predicted from their output; Mersenne Twister's state, for example, from
624 numbers. Noise for privacy therefore comes from a cipher: with a secret key it is as
unpredictable as the key; with a key derived from a seed it is reproducible, for simulations.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from raceme.core.messages import Vector

_BLOCK = 1 << 16


def gaussian_noise(key: bytes, count: int) -> NDArray[np.float64]:
    """Return standard normal numbers from the key stream of AES-256 in counter mode.

    Each is half the sum of four normal numbers by Box and Muller's method. The sum hides the gaps
    between the floating-point numbers that a single one can take (Holohan and Braghin, 2021).

    Parameters
    ----------
    key : bytes
        32 bytes; the same key gives the same numbers.
    count : int
        Number of results.
    """
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    found = np.empty(count)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        drawn = np.frombuffer(stream.update(bytes(32 * size)), "<u8").reshape(2, 2, size)
        # Fractions of 53 bits, the first above 0.
        first, second = (drawn >> 11) * 2.0**-53
        radius = np.sqrt(-2.0 * np.log(first + 2.0**-53))
        angle = 2.0 * np.pi * second
        found[start : start + size] = (radius * (np.cos(angle) + np.sin(angle))).sum(0) / 2.0
    return found


def seeded_key(*parts: object) -> bytes:
    """Return a key derived from some parts, for reproducible noise in simulations.

    The noise hides nothing from a reader who knows the parts.
    """
    return hashlib.sha256(repr(parts).encode()).digest()


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε at which Gaussian noise is (ε, δ)-differentially private.

    It is exact (Balle and Wang, ICML 2018, theorem 8): δ = Φ(μ/2 − ε/μ) − exp(ε) Φ(−μ/2 − ε/μ).

    Parameters
    ----------
    mu : float
        Sensitivity in standard deviations of the noise, above 0; for k results together, √k times
        the value of one.
    delta : float
        δ, between 0 and 1.
    """
    # A device's installation has no scipy.
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    def excess(epsilon: float) -> float:
        low = math.exp(min(0.0, epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))))
        return float(ndtr(mu / 2 - epsilon / mu)) - low - delta

    high = mu * mu / 2 + mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1.0
    return float(brentq(excess, 0.0, high)) if excess(0.0) > 0 else 0.0


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ whose :func:`gaussian_epsilon` is within an ε above 0."""
    from scipy.optimize import brentq

    high = 1.0
    while gaussian_epsilon(high, delta) < epsilon:
        high *= 2.0
    return float(brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-9, high))


def clipped(change: Vector, length: float) -> Vector:
    """Return a change, scaled to a length if it is longer, on the server and on devices alike."""
    own = float(np.linalg.norm(change.astype(np.float64)))
    return change if own <= length else np.asarray(change * (length / own))
