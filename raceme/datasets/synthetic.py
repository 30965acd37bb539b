"""Synthetic(alpha, beta): clients that differ in their model and in their inputs.

Shamir, Srebro and Zhang 2014, as generalised by Li et al. 2020 (FedProx, section 5.1) and used in
LEAF. For client k, with every N(mean, standard deviation) as in the authors' code::

    u_k ~ N(0, alpha)   W_k, b_k ~ N(u_k, 1)             the client's own linear model
    B_k ~ N(0, beta)   v_k ~ N(B_k, 1)                  the centre of its inputs
    x ~ N(v_k, S),  S_jj = j^(-1.2)   y = argmax softmax(W_k x + b_k)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.options import option
from raceme.datasets.source import Dataset, DataShape, Source, generator

FEATURES = 60
CLASSES = 10
_SMALLEST = 50


@dataclass(frozen=True)
class SyntheticOptions:
    """How unlike the clients are."""

    synthetic_alpha: float = option(1.0, "how far the clients' models differ", low=0)
    synthetic_beta: float = option(1.0, "how far the clients' inputs differ", low=0)
    synthetic_most: int = option(
        1000, "most samples of a client: 1000 in LEAF, unbounded in FedProx", low=50
    )


class Synthetic(Source):
    """Synthetic(alpha, beta) of FedProx and LEAF: 60 features, 10 classes, unequal clients."""

    default_model = "mclr"
    default_lr = 0.01
    target_accuracy = 0.6
    default_clients = 30
    has_clients = True
    options_type = SyntheticOptions

    def load(self, config: RunConfig) -> Dataset:
        """Generate every client's samples; a client's do not depend on the number of clients."""
        options = config.read(SyntheticOptions)
        clients = [
            client_samples(
                options.synthetic_alpha,
                options.synthetic_beta,
                generator(config.seed, "synthetic", client),
                options.synthetic_most,
            )
            for client in range(config.num_clients)
        ]
        bounds = np.cumsum([0, *(len(y) for _, y in clients)])
        return Dataset(
            x=np.concatenate([x for x, _ in clients]),
            y=np.concatenate([y for _, y in clients]),
            num_classes=CLASSES,
            users=tuple(np.arange(start, end) for start, end in pairwise(bounds)),
        )

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without generating anything."""
        return DataShape((FEATURES,), CLASSES)


def client_samples(
    alpha: float, beta: float, rng: np.random.Generator, most: int = 1000
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Generate one client's samples.

    Parameters
    ----------
    alpha : float
        How far the clients' models differ.
    beta : float
        How far the clients' inputs differ.
    rng : np.random.Generator
        The client's own generator.
    most : int
        Most samples.

    Returns
    -------
    tuple[NDArray[np.float32], NDArray[np.int64]]
        Inputs, shape (n, 60), and labels, shape (n,). n is 50 plus a log-normal number with a
        heavy tail (median 55), as in the authors' code, and at most `most`, as in LEAF's.
    """
    count = min(_SMALLEST + int(rng.lognormal(4.0, 2.0)), most)
    model_mean = rng.normal(0.0, alpha)
    weights = rng.normal(model_mean, 1.0, (FEATURES, CLASSES))
    bias = rng.normal(model_mean, 1.0, CLASSES)
    centre = rng.normal(rng.normal(0.0, beta), 1.0, FEATURES)
    deviation = np.arange(1, FEATURES + 1) ** -0.6  # the root of the variance j^(-1.2)
    x = rng.normal(centre, deviation, (count, FEATURES))
    # The largest score has the largest softmax.
    y = np.argmax(x @ weights + bias, axis=1)
    return x.astype(np.float32), y.astype(np.int64)


# -----------------------------------------------------------------------------
# The handwritten digits that scikit-learn bundles: 1,797 images of 8x8 pixels.
# -----------------------------------------------------------------------------


_BRIGHTEST = 16.0
_MEAN = 0.3053
_STD = 0.3760


class Digits(Source):
    """1,797 handwritten digits of 8x8 pixels, bundled with scikit-learn: no download."""

    default_model = "mlp"
    default_lr = 0.2
    target_accuracy = 0.95

    def load(self, config: RunConfig) -> Dataset:
        """Return the images, shape (1797, 1, 8, 8), from 0 to 1 before they are normalised."""
        # The file itself, as `load_digits` reads it: to import scikit-learn takes a second.
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        numbers = np.loadtxt(path, delimiter=",")
        x = (numbers[:, :-1] / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
        labels = numbers[:, -1].astype(np.int64)
        return Dataset(x, labels, num_classes=10, mean=_MEAN, std=_STD)

    def shape(self, config: RunConfig) -> DataShape:
        """Return the shape without loading."""
        return DataShape((1, 8, 8), 10)
