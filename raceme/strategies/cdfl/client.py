"""FedSoft-Async's client half: mixtures of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme.core.messages import ModelSpec, from_array
from raceme.strategies.cdfl import SHARES
from raceme.training.work import Answer, ClientWork, losses_of, train_model


def train_mixed(work: ClientWork) -> Answer:
    """Estimate and train a mixture of several models (FedSoft-Async).

    A model's share is that of the samples on which it has the lowest loss, the first of ties, and
    at least that of one sample; non-finite losses count as infinite. The answer states the shares.
    """
    models = work.models
    best = np.argmin(np.nan_to_num(losses_of(work, models), nan=np.inf, posinf=np.inf), axis=0)
    counts = np.maximum(np.bincount(best, minlength=len(models)), 1)
    shares = (counts / counts.sum()).astype(np.float64)
    forward = len(models) * len(work.client.train)
    returned = mixed(models, _stated(work, len(models))) if SHARES in work.arrays else None
    answer = train_model(work, mixed(models, shares), forward=forward, returned=returned)
    return replace(answer, numbers={SHARES: shares})


def mixed(models: Sequence[ArrayRecord], shares: NDArray[np.float64]) -> ArrayRecord:
    """Return Σ_k share_k w_k of models, array by array; counters are those of the first."""
    spec = ModelSpec.of(models[0])
    vectors = np.stack([spec.unpack(model) for model in models])
    mean = np.tensordot(shares, vectors, axes=1).astype(np.float32)
    spec.copy_counters(vectors[0], mean)
    return spec.pack(mean)


def _stated(work: ClientWork, count: int) -> NDArray[np.float64]:
    """Return the client's shares of its last upload, from the server.

    Raises
    ------
    ValueError
        They are of another number of models.
    """
    record = work.arrays[SHARES]
    shares = from_array(record[SHARES]) if SHARES in record else np.empty(0)
    if shares.shape != (count,):
        raise ValueError(f"{SHARES} must have shape ({count},), got {shares.shape}.")
    return np.asarray(shares, np.float64)
