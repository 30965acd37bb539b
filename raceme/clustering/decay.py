"""How much an update weighs: the decay functions of the methods, as pure mathematics."""

from __future__ import annotations

import math
from typing import Literal

StalenessFunction = Literal["constant", "hinge", "polynomial"]


def omega(t: int, kappa: float) -> float:
    """Return Ω(t) = (e / 2.8)^(κ t), CASA's slow decay over asynchronous rounds (section 4.2)."""
    return float((math.e / 2.8) ** (kappa * t))


def cluster_decay(size: int, omega_t: float, alpha0: float) -> float:
    """Return α_c,k = α0 · Ω(t) / log2(|C_k| + 3), CASA's eq (6).

    The logarithm is base 2: the paper adds 3 so that α < 1, which holds for base 2 only, and
    log2(103) gives the 0.3 of all its asynchronous baselines.

    Parameters
    ----------
    size : int
        Clients in the cluster, |C_k|.
    omega_t : float
        Ω(t).
    alpha0 : float
        Initial value α0.
    """
    return alpha0 * omega_t / math.log2(size + 3)


def staleness_bound(size: int, omega_t: float) -> float:
    """Return r_c,k = |C_k| · (2 − Ω(t)), CASA's eq (8): the staleness that is not penalised."""
    return size * (2.0 - omega_t)


def client_decay(alpha_c: float, staleness: int, bound: float) -> float:
    """Return α_i, CASA's eq (7): α_c up to the bound r_c, α_c / √τ beyond."""
    return alpha_c if staleness <= bound else alpha_c / math.sqrt(staleness)


def staleness_factor(function: StalenessFunction, staleness: int, a: float, b: float) -> float:
    """Return s(τ) of FedAsync (Xie et al. 2019, section 5.2).

    Parameters
    ----------
    function : {"constant", "hinge", "polynomial"}
        constant: 1. hinge: 1 up to τ = b, then 1 / (a (τ − b) + 1). polynomial: (τ + 1)^(−a).
    staleness : int
        τ, in versions of the model.
    a, b : float
        Slope or exponent, and the hinge's threshold.
    """
    if function == "constant":
        return 1.0
    if function == "hinge":
        return 1.0 if staleness <= b else 1.0 / (a * (staleness - b) + 1.0)
    return float((staleness + 1) ** -a)
