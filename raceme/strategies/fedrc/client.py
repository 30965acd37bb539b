"""FedRC's client half: responsibilities of models for samples, and weighted training."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raceme.core.messages import NUM_EXAMPLES, from_array, to_array
from raceme.flower.messages import array_record
from raceme.strategies.fedrc import LABEL_MASSES, LABEL_TABLE, MIXING, WEIGHTED_BY
from raceme.training.work import ClientWork, WorkResult, losses_of, train_model

RESPONSIBILITIES = "responsibilities"
"""Record of a client's state: γ, float32, shape (models, samples)."""


def label_masses(work: ClientWork) -> WorkResult:
    """Compute and store the responsibilities, and return their sums by label.

    Raises
    ------
    ValueError
        There are no classes, or ω or C are of another number of models.
    """
    client, models = work.client, work.models
    if not client.num_classes:
        raise ValueError("label-masses counts classes, and these data have quantities for labels.")
    losses = losses_of(work, models)
    classes = client.network.width(client.train)
    alike = np.full(len(models), 1.0 / len(models))
    mixing = _sent(work, MIXING, (len(models),), alike)
    table = _sent(work, LABEL_TABLE, (len(models), classes), np.ones((len(models), classes)))
    labels = client.train.y.cpu().numpy()
    shares = responsibilities(losses.astype(np.float64), labels, mixing, table)
    kept = to_array(shares.astype(np.float32))
    work.state[RESPONSIBILITIES] = array_record({RESPONSIBILITIES: kept})
    masses = np.stack([np.bincount(labels, weights=row, minlength=classes) for row in shares])
    return WorkResult({NUM_EXAMPLES: len(client.train)}, numbers={LABEL_MASSES: masses})


def responsibilities(
    losses: NDArray[np.float64],
    labels: NDArray[np.integer],
    mixing: NDArray[np.float64],
    table: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return γ_jk ∝ ω_k exp(−ℓ_jk) / C[k][y_j]; non-finite losses count as very large.

    Parameters
    ----------
    losses : NDArray[np.float64]
        ℓ: loss of each model on each sample. Shape (K, n).
    labels : NDArray[np.integer]
        y: class of each sample. Shape (n,).
    mixing, table : NDArray[np.float64]
        ω and C. Shapes (K,) and (K, classes).

    Returns
    -------
    NDArray[np.float64]
        Shape (K, n), columns sum to 1.
    """
    finite = np.nan_to_num(losses, nan=1e30, posinf=1e30, neginf=-1e30)
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.log(mixing)[:, None] - finite - np.log(table[:, labels])
    # A share of 0 stays 0; if all are 0 or inputs are invalid, all models are equal.
    logits = np.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    return torch.softmax(torch.from_numpy(logits), dim=0).numpy()


def train_weighted(work: ClientWork) -> WorkResult:
    """Train the received model on the samples, weighted by its responsibilities.

    Raises
    ------
    ValueError
        There are no responsibilities for these samples.
    """
    received, client = work.models[0], work.client
    index, kept = work.settings.get(WEIGHTED_BY), work.state.array_records.get(RESPONSIBILITIES)
    shares = np.empty((0, 0)) if kept is None else from_array(kept[RESPONSIBILITIES])
    fits = shares.ndim == 2 and shares.shape[1] == len(client.train)
    if not isinstance(index, int) or not fits or not 0 <= index < len(shares):
        raise ValueError(
            f"{WEIGHTED_BY} must name a model to which these samples were assigned by "
            f"'{LABEL_MASSES}', got {index!r}."
        )
    return train_model(work, received, weights=shares[index].astype(np.float32))


def _sent(
    work: ClientWork, name: str, shape: tuple[int, ...], default: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return an array sent with the models, or its default at the start.

    Raises
    ------
    ValueError
        It has another shape.
    """
    record = work.arrays.get(name)
    if record is None:
        return default
    values = from_array(record[name])
    if values.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {values.shape}.")
    return np.asarray(values, np.float64)
