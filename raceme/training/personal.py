"""Personal models of clients: layers, models or shares that never leave the device.

The kinds of work of FedPer, FedRep, FedSoft, Ditto and APFL, and the completions of the server's
model for a client's tests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import Tensor

from raceme.core import messages as names
from raceme.core.messages import ModelSpec, from_array, to_array
from raceme.flower.messages import array_record
from raceme.training.local import differentiate, optimiser_of
from raceme.training.models import Network, is_usable
from raceme.training.work import OWN_MODEL, ClientWork, WorkResult, losses_of, train_model

HEAD = "head"
"""Record of a client's state: the arrays of its own last layers."""
ALPHA = "alpha"
"""Record of a client's state, and its only number: α, the share of its own model."""


# -----------------------------------------------------------------------------
# FedPer and FedRep: the last layers stay on the client.
# -----------------------------------------------------------------------------


def train_split(work: ClientWork) -> WorkResult:
    """Train the received layers below the client's own last ones; return the received layers.

    With ``head-epochs`` the head is trained first, and then the body (FedRep); otherwise both
    together (FedPer). In the answer the head is the received one.
    """
    received, network = work.model, work.client.network
    head = head_arrays(network, work.count(names.HEAD_LAYERS))
    model = array_record(dict(received))
    model.update(work.state.array_records.get(HEAD, {}))
    masked = None
    if names.HEAD_EPOCHS in work.settings:
        epochs = {names.LOCAL_EPOCHS: work.count(names.HEAD_EPOCHS), names.LOCAL_STEPS: 0}
        first = replace(work, settings=ConfigRecord({**work.settings, **epochs, names.SCORED: 0}))
        trained = train_model(first, model, arrays={names.MASK: mask_of(network, head)}).model
        assert trained is not None, "training answers with a model"
        model = trained
        masked = {names.MASK: mask_of(network, network.slices.keys() - head)}
    answer = train_model(work, model, arrays=masked)
    assert answer.model is not None, "training answers with a model"
    # The server refuses a diverged training; its weights must not enter the client's state.
    if is_usable(network.weights):
        work.state[HEAD] = network.keep(head)
    answer.model.update({name: received[name] for name in head})
    return answer


def head_arrays(network: Network, layers: int) -> list[str]:
    """Return the names of the weights of a network's last layers.

    Raises
    ------
    ValueError
        The network has no more layers than these.
    """
    names_of = names.layers_of(network.slices)
    if layers >= len(names_of):
        raise ValueError(
            f"{names.HEAD_LAYERS} must leave layers to share: the network has {len(names_of)} "
            f"layers with weights, got {layers}."
        )
    return [name for layer in list(names_of)[-layers:] for name in names_of[layer]]


def mask_of(network: Network, trained: Collection[str]) -> ArrayRecord:
    """Return the mask that restricts training to some arrays of a network."""
    weights = network.module.named_parameters()
    return array_record(
        {
            name: to_array(np.full(tuple(values.shape), name in trained, np.uint8))
            for name, values in weights
        }
    )


def use_own_head(work: ClientWork) -> None:
    """Put the client's own last layers into its network, if it has any."""
    if HEAD in work.state:
        work.client.network.restore(work.state.array_records[HEAD])


# -----------------------------------------------------------------------------
# FedSoft and Ditto: a model of the client's own, pulled towards the server's.
# -----------------------------------------------------------------------------


def train_own(work: ClientWork) -> WorkResult:
    """Train the client's own model, which it keeps, pulled towards the received one.

    ``v ← v − η (∇F(v) + λ (v − w_received))`` with λ the ``proximal-mu`` of the message. A client's
    first model of its own is the received one.
    """
    received = work.model
    own = work.state.array_records.get(OWN_MODEL, received)
    answer = train_model(work, own, arrays={**work.arrays, names.ANCHOR: received})
    assert answer.model is not None, "training answers with a model"
    # The weights of a diverged training must not enter the client's state.
    if is_usable(work.client.network.weights):
        work.state[OWN_MODEL] = answer.model
    return answer


def train_beside(work: ClientWork) -> WorkResult:
    """Train the client's own model (Ditto) and, without a pull, the received one; return that."""
    train_own(replace(work, settings=ConfigRecord({**work.settings, names.SCORED: 0})))
    free = ConfigRecord({**work.settings, names.PROXIMAL_MU: 0.0})
    return train_model(replace(work, settings=free), work.model)


def use_own_model(work: ClientWork) -> None:
    """Put the client's own model into its network, if it has one."""
    if OWN_MODEL in work.state:
        work.receive(work.state.array_records[OWN_MODEL])


# -----------------------------------------------------------------------------
# FedSoft-Async: a mixture of several models, with shares that the client estimates.
# -----------------------------------------------------------------------------


def train_mixed(work: ClientWork) -> WorkResult:
    """Estimate and train a mixture of several models (FedSoft-Async).

    A model's share is that of the samples on which it has the lowest loss, the first of ties, and
    at least that of one sample; non-finite losses count as infinite. The answer states the shares.
    """
    models = work.models
    best = np.argmin(np.nan_to_num(losses_of(work, models), nan=np.inf, posinf=np.inf), axis=0)
    counts = np.maximum(np.bincount(best, minlength=len(models)), 1)
    shares = (counts / counts.sum()).astype(np.float64)
    forward = len(models) * len(work.client.train)
    returned = (
        mixed(models, _stated_shares(work, len(models))) if names.SHARES in work.arrays else None
    )
    answer = train_model(work, mixed(models, shares), forward=forward, returned=returned)
    return replace(answer, numbers={names.SHARES: shares})


def mixed(models: Sequence[ArrayRecord], shares: NDArray[np.float64]) -> ArrayRecord:
    """Return Σ_k share_k w_k of models, array by array; counters are those of the first."""
    spec = ModelSpec.of(models[0])
    vectors = np.stack([spec.unpack(model) for model in models])
    mean = np.tensordot(shares, vectors, axes=1).astype(np.float32)
    spec.copy_counters(vectors[0], mean)
    return spec.pack(mean)


def _stated_shares(work: ClientWork, count: int) -> NDArray[np.float64]:
    """Return the client's shares of its last upload, from the server.

    Raises
    ------
    ValueError
        They are of another number of models.
    """
    record = work.arrays[names.SHARES]
    shares = from_array(record[names.SHARES]) if names.SHARES in record else np.empty(0)
    if shares.shape != (count,):
        raise ValueError(f"{names.SHARES} must have shape ({count},), got {shares.shape}.")
    return np.asarray(shares, np.float64)


# -----------------------------------------------------------------------------
# APFL: the mean of the server's model and one of the client's own, with a share that adapts.
# -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Own:
    """v: the client's own weights, and their gradient, shape (d,) each."""

    weights: Tensor
    gradient: Tensor


def train_interpolated(work: ClientWork) -> WorkResult:
    """Train the received model w, and v so that α v + (1 − α) w fits the samples; return w.

    At each step ``w ← w − η ∇f(w)`` and ``v ← v − η α ∇f(v̄)`` with ``v̄ = α v + (1 − α) w``
    (Algorithm 1 of APFL). Where α is adaptive, ``α ← α − η ⟨v − w, ∇f(v̄)⟩`` within [0, 1], at the
    first step of a task.
    """
    network, settings = work.client.network, work.training_settings()
    alpha, adaptive = _alpha(work), bool(work.settings.get(names.ADAPTIVE, False))
    work.receive(work.model)
    own = _Own(_own_weights(work), torch.zeros_like(network.weights))
    move = optimiser_of(own, settings)

    def step_own(x: Tensor, y: Tensor) -> None:
        nonlocal alpha, adaptive
        shared = network.weights.clone()
        statistics = [values.clone() for values in network.module.buffers()]
        network.weights.mul_(1 - alpha).add_(own.weights, alpha=alpha)
        differentiate(network, x, y)
        # The arrays of batch normalisation belong to w, the model of federated averaging.
        for values, former in zip(network.module.buffers(), statistics, strict=True):
            values.copy_(former)
        if adaptive:
            slope = float((own.weights - shared) @ network.gradient)
            alpha, adaptive = min(1.0, max(0.0, alpha - settings.lr * slope)), False
        torch.mul(network.gradient, alpha, out=own.gradient)
        move()
        network.weights.copy_(shared)

    answer = train_model(work, work.model, before_step=step_own)
    if is_usable(own.weights):
        work.state[OWN_MODEL] = network.write_weights(own.weights)
        work.state[ALPHA] = ConfigRecord({ALPHA: alpha})
    return answer


def use_interpolation(work: ClientWork) -> None:
    """Mix the client's own model into the received one in its network, if it has one."""
    if OWN_MODEL in work.state:
        alpha, own = _alpha(work), _own_weights(work)
        work.client.network.weights.mul_(1 - alpha).add_(own, alpha=alpha)


def _alpha(work: ClientWork) -> float:
    """Return α: the client's own, at first the method's initial value."""
    if ALPHA in work.state:
        return float(str(work.state.config_records[ALPHA][ALPHA]))
    return work.number(names.OWN_SHARE, None)


def _own_weights(work: ClientWork) -> Tensor:
    """Return v; at first the received weights, which are in the network."""
    network, kept = work.client.network, work.state.array_records
    return network.read_weights(kept[OWN_MODEL]) if OWN_MODEL in kept else network.weights.clone()
