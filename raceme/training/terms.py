"""What else than the loss a step follows: terms that change its gradient.

A further term is one function here and its line in ``TERMS``: it is given the network as it was
received, the hyper-parameters, and every record of named arrays that came with the model, and
returns None where it was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord
from torch import Tensor

from raceme.protocol.messages import ANCHOR, FISHER, FORMER, MASK
from raceme.training.network import Network
from raceme.training.settings import TrainingSettings

Term = Callable[[Tensor, Tensor], None]
"""Changes the gradient of a step in place, given the weights: ``term(weights, gradient)``."""

TermBuilder = Callable[[Network, TrainingSettings, Mapping[str, ArrayRecord]], Term | None]


def weight_decay(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the gradient λ w of λ/2 ‖w‖².

    A term like any other rather than torch's own, which would also shrink what a mask freezes.
    """
    if not settings.weight_decay:
        return None

    def shrink(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(weights, alpha=settings.weight_decay)

    return shrink


def proximal(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return FedProx's term (Li et al. 2020): the gradient μ (w - w₀) of μ/2 ‖w - w₀‖².

    w₀ is where training starts, or the anchor that came with the model.
    """
    if not settings.proximal_mu:
        return None
    start = network.read_weights(arrays[ANCHOR]) if ANCHOR in arrays else network.weights.clone()

    def pull(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(weights - start, alpha=settings.proximal_mu)

    return pull


def elastic(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return EWC's term (Kirkpatrick et al. 2017): the gradient of λ/2 Σ_i F_i (w_i - w*_i)².

    F and w* come with the model: how much each weight matters for former tasks, and where it was.
    The gradient is λF / (1 + η λF) (w - w*), with η the learning rate: that of the penalty's Moreau
    envelope, by which a step goes to w* and never past it, however large λF is. Where η λF is
    small, as in the paper, it is λF (w - w*).
    """
    if not settings.elastic_strength or FISHER not in arrays:
        return None
    stiffness = settings.elastic_strength * network.read_weights(arrays[FISHER])
    stiffness /= 1.0 + settings.lr * stiffness
    former = network.read_weights(arrays[FORMER])

    def hold(weights: Tensor, gradient: Tensor) -> None:
        gradient.addcmul_(stiffness, weights - former)

    return hold


def masked(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> Term | None:
    """Return the term that keeps weights at their received values where the mask is 0."""
    if MASK not in arrays:
        return None
    frozen = ~network.read_mask(arrays[MASK])

    def clear(weights: Tensor, gradient: Tensor) -> None:
        gradient.masked_fill_(frozen, 0.0)

    return clear


# The mask is last: nothing may move what it freezes.
TERMS: tuple[TermBuilder, ...] = (weight_decay, proximal, elastic, masked)


def terms_of(
    network: Network, settings: TrainingSettings, arrays: Mapping[str, ArrayRecord]
) -> list[Term]:
    """Return the terms that a piece of work asks for, in the order in which they act.

    Raises
    ------
    InvalidModelError
        A record does not fit the network.
    """
    built = (build(network, settings, arrays) for build in TERMS)
    return [term for term in built if term is not None]
