"""What local training makes small, and what a test counts as a hit."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy


def criterion(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of a network's outputs: cross-entropy.

    Parameters
    ----------
    outputs : Tensor
        Scores of the classes, shape (n, classes).
    targets : Tensor
        Classes, shape (n,).
    reduction : str
        ``"mean"``, ``"sum"``, or ``"none"`` for the loss of each sample, shape (n,).
    """
    return cross_entropy(outputs, targets, reduction=reduction)


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return which samples are classified correctly, shape (n,), bool."""
    return outputs.argmax(dim=1) == targets
