"""Recurrent networks for text and for windows of readings."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDING = 16
HIDDEN = 128


class Recurrent(nn.Module):
    """One recurrent layer, and a linear layer on its last state; token ids are embedded first.

    Parameters
    ----------
    input_shape : tuple[int, ...]
        Shape of one input: (length,) of token ids, or a window of two axes of which the longer one
        is time.
    tokens : int
        Size of the vocabulary; 0 for a window of quantities.
    layer : type
        ``nn.GRU`` or ``nn.LSTM``.
    num_classes : int
        Number of outputs.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        tokens: int,
        layer: type[nn.GRU | nn.LSTM],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, EMBEDDING) if tokens else None
        self.turns = not tokens and input_shape[0] <= input_shape[1]
        size = EMBEDDING if tokens else min(input_shape)
        self.recurrent = layer(size, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (samples, classes), of token ids or of windows."""
        if self.embedding is not None:
            steps = self.embedding(x.long())
        else:
            steps = x.transpose(1, 2) if self.turns else x
        states, _ = self.recurrent(steps)
        scores: Tensor = self.output(states[:, -1])
        return scores


def gru(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (GRU) for token ids, (length,), and for windows of readings."""
    return _recurrent(input_shape, num_classes, tokens, nn.GRU)


def lstm(input_shape: tuple[int, ...], num_classes: int, tokens: int) -> nn.Module:
    """Recurrent network (LSTM) for what the GRU takes, of the same shape."""
    return _recurrent(input_shape, num_classes, tokens, nn.LSTM)


def _recurrent(
    input_shape: tuple[int, ...], num_classes: int, tokens: int, layer: type[nn.GRU | nn.LSTM]
) -> nn.Module:
    if len(input_shape) != (1 if tokens else 2):
        raise ValueError("it takes token ids, (length,), or windows, (channels, time)")
    return Recurrent(input_shape, tokens, layer, num_classes)
