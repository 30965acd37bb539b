"""Client embedding: a small vector per client with the direction of its updates.

A model is stored as a sketch of 128 numbers: each weight is added to one of them, with a fixed
random sign (the count sketch of Charikar, Chen and Farach-Colton 2002). Sketches are linear, and
preserve inner products approximately. For very large models only a part of the weights, evenly
spread, is used, so that the time for a sketch is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Model, Weights
from raceme.core.messages import Vector

SKETCH_SIZE = 128
_MOST_WEIGHTS = 1 << 17
"""Maximum number of weights per sketch, which then takes less than a tenth of a millisecond."""
_MOST_CLIENTS = 10_000
"""Maximum number of clients: 5 MB."""
_SHARE = 0.3
"""Weight of a client's latest update in its running mean."""
_TURNS = 4
_SIGNS_SEED = 0x6D6170


class Sketch:
    """Makes sketches of models of one shape.

    Parameters
    ----------
    length : int
        Numbers of a model, d.
    weights : NDArray[np.bool_], optional
        Mask of its weights, without statistics and counters. Shape (d,).
    """

    def __init__(self, length: int, weights: NDArray[np.bool_] | None = None) -> None:
        self._rows = length // SKETCH_SIZE
        self._stride = max(1, -(-length // _MOST_WEIGHTS))
        # A fixed generator, independent of the run's.
        signs = np.random.default_rng(_SIGNS_SEED).choice(np.array([-1, 1], np.float32), length)
        if weights is not None:
            signs *= weights
        self._signs = self._read(signs).copy()
        self._last = signs[self._rows * SKETCH_SIZE :].copy()

    def __call__(self, vector: Vector) -> Vector:
        """Return the sketch of a model. Shape (SKETCH_SIZE,)."""
        found: Vector = (self._read(vector) * self._signs).sum(axis=0)
        found[: len(self._last)] += vector[self._rows * SKETCH_SIZE :] * self._last
        return found

    def _read(self, vector: Vector) -> Vector:
        return vector[: self._rows * SKETCH_SIZE].reshape(-1, SKETCH_SIZE)[:: self._stride]


class ClientEmbedding:
    """Mean changes of models by each client, as sketches.

    A client's first update is used, then one after every fourth snapshot, clients in turn, which
    bounds the cost of fast devices and frequent evaluations.

    Parameters
    ----------
    sketch : Sketch
        Makes sketches of this run's models.
    """

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._versions: dict[int, tuple[int, Vector]] = {}
        self._bases: dict[int, Mapping[int, Vector] | Vector] = {}
        self._pulls: dict[str, Vector] = {}
        self._numbers: dict[str, int] = {}
        self._taken: set[str] = set()
        self._looks = 0

    def wants(self, client: str) -> bool:
        """Return whether an update of a client would be used."""
        number = self._numbers.get(client)
        is_its_turn = number is None or (number + self._looks) % _TURNS == 0
        return is_its_turn and client not in self._taken

    def send(self, task: int, models: Mapping[int, Model], weights: Weights, chooses: bool) -> None:
        """Keep the sketch of a client's base model.

        Parameters
        ----------
        task : int
            Number of the request, unique in the run.
        models : Mapping[int, Model]
            All cluster models, by cluster id.
        weights : Mapping[int, float]
            Sent clusters, with their shares in the client's base model.
        chooses : bool
            Whether the client chooses one of them.
        """
        if chooses:
            self._bases[task] = {cluster: self._of(cluster, models) for cluster in weights}
        else:
            self._bases[task] = self._mixed(models, weights)

    def take(self, task: int, client: str, cluster: int, vector: Vector) -> None:
        """Process the model of a client; `cluster` is its choice among several."""
        base = self._bases.get(task)
        if base is None or not self.wants(client):
            return
        if isinstance(base, Mapping):
            base = base.get(cluster)
        if base is None or (client not in self._pulls and len(self._pulls) >= _MOST_CLIENTS):
            return
        self._taken.add(client)
        self._numbers.setdefault(client, len(self._numbers))
        pull = self._sketch(vector) - base
        before = self._pulls.get(client, pull)
        self._pulls[client] = before + np.float32(_SHARE) * (pull - before)

    def close(self, task: int) -> None:
        """Drop the base of a task."""
        self._bases.pop(task, None)

    def relative_to_mean(
        self, models: Mapping[int, Model], placement: Callable[[str], Weights]
    ) -> tuple[list[str], NDArray[np.float32]]:
        """Return the clients and the sketches of their models relative to the mean.

        A client's model is its clusters' current model plus its mean change.

        Parameters
        ----------
        models : Mapping[int, Model]
            All cluster models, by cluster id.
        placement : Callable
            Returns the clusters that serve a client, with weights.

        Returns
        -------
        tuple[list[str], NDArray[np.float32]]
            Client ids, and sketches. Shape (n, SKETCH_SIZE).
        """
        self._taken.clear()
        self._looks += 1
        for cluster in [cluster for cluster in self._versions if cluster not in models]:
            del self._versions[cluster]
        clients = list(self._pulls)
        if not clients:
            return clients, np.empty((0, SKETCH_SIZE), np.float32)
        served = np.stack([self._mixed(models, placement(client)) for client in clients])
        pulls = np.stack(list(self._pulls.values()))
        return clients, np.asarray(served - served.mean(axis=0) + pulls, np.float32)

    def _of(self, cluster: int, models: Mapping[int, Model]) -> Vector:
        """Return the sketch of a cluster's model, cached per version."""
        version, sketch = self._versions.get(cluster, (-1, None))
        model = models[cluster]
        if sketch is None or version != model.version:
            sketch = self._sketch(model.vector)
            self._versions[cluster] = model.version, sketch
        return sketch

    def _mixed(self, models: Mapping[int, Model], weights: Weights) -> Vector:
        if len(weights) == 1:
            return self._of(next(iter(weights)), models)
        parts = [np.float32(share) * self._of(k, models) for k, share in weights.items()]
        return np.asarray(sum(parts[1:], start=parts[0]))
