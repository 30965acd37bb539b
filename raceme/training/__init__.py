"""Training and testing a network on one client's own samples."""

from raceme.training.local import (
    Network,
    Samples,
    Sgd,
    epochs,
    evaluate,
    step,
    torch_seed,
    train,
)

__all__ = ["Network", "Samples", "Sgd", "epochs", "evaluate", "step", "torch_seed", "train"]
