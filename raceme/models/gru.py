"""A recurrent network for text."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDING = 16
HIDDEN = 128


class Gru(nn.Module):
    """An embedding, one layer of gated recurrent units, and a linear layer on the last state.

    Parameters
    ----------
    tokens : int
        Size of the vocabulary.
    num_classes : int
        Number of outputs.
    """

    def __init__(self, tokens: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, EMBEDDING)
        self.recurrent = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score per class, shape (samples, classes), of token ids (samples, length)."""
        states, _ = self.recurrent(self.embedding(x.long()))
        scores: Tensor = self.output(states[:, -1])
        return scores


def build(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (GRU) for token ids, (length,): text to a class, or to the next token."""
    if len(input_shape) != 1 or tokens < 1:
        raise ValueError("it takes token ids, (length,)")
    return Gru(tokens, num_classes)
