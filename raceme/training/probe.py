"""Measuring models on samples that the server has: the torch behind `raceme.server.probe.Probe`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raceme.protocol.messages import ModelSpec, Vector
from raceme.training.local import losses
from raceme.training.network import Network
from raceme.training.samples import Samples


class ModelProbe:
    """Losses of flat models on proxy sets.

    Parameters
    ----------
    network : Network
        A network of the models' kind; its weights are overwritten at every call.
    spec : ModelSpec
        Names and shapes of a model's arrays.
    proxies : Sequence[Samples]
        The proxy sets.
    """

    def __init__(self, network: Network, spec: ModelSpec, proxies: Sequence[Samples]) -> None:
        self._network, self._spec, self._proxies = network, spec, proxies

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> NDArray[np.float32]:
        """Return the loss of each sample of a proxy set under each model.

        Parameters
        ----------
        vectors : Sequence[Vector]
            The models, each of shape (d,).
        proxy : int
            Which proxy set, from 0.

        Returns
        -------
        NDArray[np.float32]
            Shape (models, samples).

        Raises
        ------
        ValueError
            There is no such proxy set.
        """
        if not 0 <= proxy < len(self._proxies):
            raise ValueError(f"there is no proxy set {proxy}: there are {len(self._proxies)}")
        measured = []
        for vector in vectors:
            self._network.read(self._spec.pack(vector))
            measured.append(losses(self._network, self._proxies[proxy]))
        return np.stack(measured)
