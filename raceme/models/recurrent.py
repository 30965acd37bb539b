"""Recurrent networks for text."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDING = 16
HIDDEN = 128


class Recurrent(nn.Module):
    """An embedding, one recurrent layer, and a linear layer on the last state.

    Parameters
    ----------
    tokens : int
        Size of the vocabulary.
    layer : type
        ``nn.GRU`` or ``nn.LSTM``.
    num_classes : int
        Number of outputs.
    """

    def __init__(self, tokens: int, layer: type[nn.GRU | nn.LSTM], num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, EMBEDDING)
        self.recurrent = layer(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score per class, shape (samples, classes), of token ids (samples, length)."""
        states, _ = self.recurrent(self.embedding(x.long()))
        scores: Tensor = self.output(states[:, -1])
        return scores


def gru(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (GRU) for token ids, (length,): text to a class, or to the next token."""
    return _recurrent(input_shape, num_classes, tokens, nn.GRU)


def lstm(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (LSTM) for token ids, of the same shape as the GRU."""
    return _recurrent(input_shape, num_classes, tokens, nn.LSTM)


def _recurrent(
    input_shape: tuple[int, ...], num_classes: int, tokens: int, layer: type[nn.GRU | nn.LSTM]
) -> nn.Module:
    if len(input_shape) != 1 or tokens < 1:
        raise ValueError("it takes token ids, (length,)")
    return Recurrent(tokens, layer, num_classes)
