"""What local training makes small, and what a test measures: by the task of the data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss

from raceme.datasets.source import DataShape, Target
from raceme.protocol.measure import ACCURACY, Measure


class Objective:
    """Classification: cross-entropy, and the share of the samples that are classified correctly.

    Attributes
    ----------
    measure : Measure
        What :meth:`scores` are the mean of.
    """

    measure = ACCURACY

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss of a network's outputs.

        Parameters
        ----------
        outputs : Tensor
            Shape (n, outputs).
        targets : Tensor
            Labels, shape (n,).
        reduction : str
            ``"mean"``, ``"sum"``, or ``"none"`` for the loss of each sample, shape (n,).
        """
        return cross_entropy(outputs, targets, reduction=reduction)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what a test counts of each sample, shape (n,): 1 if its class is right, else 0."""
        return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Regression(Objective):
    """Regression: Huber's loss of the standardised quantity, and the absolute error in its unit.

    Huber's loss is half the square of an error up to one standard deviation and grows linearly
    from there, so that a rare peak of many deviations does not throw the weights about as its
    square would.

    Attributes
    ----------
    target : Target
        What is predicted.
    """

    target: Target

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """The mean absolute error, in the unit of the quantity."""
        return Measure(self.target.unit)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return Huber's loss."""
        return huber_loss(outputs.squeeze(1), targets, reduction=reduction)

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error of each sample in the unit of the quantity, shape (n,)."""
        return (outputs.squeeze(1) - targets).abs() * self.target.std


def objective_of(shape: DataShape) -> Objective:
    """Return the objective of the task that data have."""
    return Objective() if shape.target is None else Regression(shape.target)
