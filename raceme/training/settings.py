"""Hyper-parameters of the local training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSettings:
    """Hyper-parameters of the local training.

    Attributes
    ----------
    lr : float
        Learning rate.
    batch_size : int
        Samples per step; the last step of an epoch takes what is left.
    local_epochs : int
        Passes over the samples.
    local_steps : int
        Exactly so many steps instead, through as many epochs as they take; 0: epochs count.
    optimizer : str
        Name of the optimiser, of those in :mod:`raceme.training.optimisers`.
    momentum : float
        Share of the former step that the optimiser ``momentum`` adds to the next.
    weight_decay : float
        Strength λ of the term λ/2 ‖w‖².
    proximal_mu : float
        Strength μ of FedProx's term μ/2 ‖w - w₀‖², with w₀ the received weights.
    elastic_strength : float
        Strength λ of EWC's term λ/2 Σ F (w - w*)², of a client that has former tasks.
    dropout : float
        Share of the inputs of linear layers that each step leaves out.

    Raises
    ------
    ValueError
        A number is out of its range.
    """

    lr: float
    batch_size: int = 10
    local_epochs: int = 1
    local_steps: int = 0
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    elastic_strength: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be greater than 0, got {self.lr}.")
        if self.batch_size < 1:
            raise ValueError(f"batch-size must be at least 1, got {self.batch_size}.")
        if self.local_epochs < 1:
            raise ValueError(f"local-epochs must be at least 1, got {self.local_epochs}.")
        if self.local_steps < 0:
            raise ValueError(f"local-steps must be at least 0, got {self.local_steps}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight-decay must be at least 0, got {self.weight_decay}.")
        if not 0 <= self.proximal_mu < float("inf"):
            raise ValueError(f"proximal-mu must be at least 0, got {self.proximal_mu}.")
        if not 0 <= self.elastic_strength < float("inf"):
            raise ValueError(f"elastic-strength must be at least 0, got {self.elastic_strength}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
