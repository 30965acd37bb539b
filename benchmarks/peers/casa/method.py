"""Code shared by all frameworks' versions: the data, CASA, a figure.

40 clients in four groups of disjoint labels, of scikit-learn's digits; CASA by the formulas of its
paper (Liu et al., KDD 2024), whole models compared, without landmarks, bounds, budget or churn.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CLIENTS, UPDATES, TEST_EVERY = 40, 1600, 40
BATCH, RATE = 10, 0.2
SHARES = (0.2, 0.2, 0.3, 0.3)
ALPHA0, KAPPA, GAMMA = 2.0, 0.001, 0.15


@dataclass
class Data:
    """A client's samples."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def clients(seed: int) -> tuple[list[Data], list[int]]:
    """Divide the digits among clients; return also each client's group."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    ends = np.cumsum(np.array(SHARES) * 10).round().astype(int)
    sizes = (np.array(SHARES) * CLIENTS).astype(int)
    found, groups = [], []
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        parts: list[list[NDArray[np.intp]]] = [[] for _ in range(size)]
        for label in range(end - round(SHARES[group] * 10), end):
            own = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.cumsum(rng.dirichlet(np.ones(size))) * len(own)
            for part, chosen in zip(parts, np.split(own, cuts[:-1].astype(int)), strict=True):
                part.append(chosen)
        for part in parts:
            order = torch.from_numpy(rng.permutation(np.concatenate(part)))
            x = torch.from_numpy(images).float()[order] / 16
            y, cut = torch.from_numpy(labels)[order], max(1, len(order) // 5)
            found.append(Data(x[cut:], y[cut:], x[:cut], y[:cut]))
            groups.append(group)
    return found, groups


def network() -> nn.Sequential:
    """Make the network, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def slowness(seed: int) -> NDArray[np.float64]:
    """Return the virtual seconds of each client's training: 30 % are five times slower."""
    slow = np.random.default_rng(seed).permutation(CLIENTS) < 0.3 * CLIENTS
    return np.where(slow, 5.0, 1.0)


class CASA:
    """The clusters and the rules that form them."""

    def __init__(self, vector: Tensor) -> None:
        self.models, self.versions, self.updates = [vector.clone()], [0], 0
        self.cluster = np.zeros(CLIENTS, int)
        self.started = np.zeros(CLIENTS, int)
        self.similarity, self.known = np.eye(CLIENTS), np.eye(CLIENTS, dtype=bool)
        self.buffers: list[dict[int, Tensor]] = [{} for _ in range(CLIENTS)]

    def send(self, client: int) -> Tensor:
        """Return the model that a client trains next."""
        self.started[client] = self.versions[self.cluster[client]]
        return self.models[self.cluster[client]].clone()

    def receive(self, client: int, vector: Tensor) -> None:
        """Compare, split, buffer and mix (Algorithm 1)."""
        self.updates += 1
        for other, buffered in self.buffers[client].items():
            cosine = float(vector @ buffered / (vector.norm() * buffered.norm()))
            self.similarity[client, other] = self.similarity[other, client] = cosine
            self.known[client, other] = self.known[other, client] = True
        self.buffers[client].clear()
        self._split(int(self.cluster[client]))
        k = int(self.cluster[client])
        members = np.flatnonzero(self.cluster == k)
        bound = len(members) * (2 - self._omega())
        for other in members:
            near = abs(self.started[client] - self.started[other]) < bound
            if other != client and near:
                self.buffers[other].setdefault(client, vector)
        staleness = self.versions[k] - int(self.started[client])
        alpha = self._alpha(len(members)) / (math.sqrt(staleness) if staleness > bound else 1)
        self.models[k].lerp_(vector, alpha)
        self.versions[k] += 1

    def _omega(self) -> float:
        return (math.e / 2.8) ** (KAPPA * self.updates)

    def _alpha(self, size: int) -> float:
        return min(1.0, ALPHA0 * self._omega() / math.log2(size + 3))

    def _split(self, k: int) -> None:
        from sklearn.cluster import SpectralClustering

        members = np.flatnonzero(self.cluster == k)
        if len(members) < 3 or not self.known[np.ix_(members, members)].all():
            return
        weights = self.similarity[np.ix_(members, members)].clip(min=0)
        scale = weights.sum(axis=1) ** -0.5
        values = np.linalg.eigvalsh(np.eye(len(members)) - weights * np.outer(scale, scale))
        gaps = np.diff(values)[1:]
        if gaps.max() ** GAMMA <= self._alpha(len(members)):
            return
        parts = int(gaps.argmax()) + 2
        split = SpectralClustering(parts, affinity="precomputed", random_state=0)
        labels = split.fit_predict(weights)
        for label in range(1, parts):
            self.cluster[members[labels == label]] = len(self.models)
            self.models.append(self.models[k].clone())
            self.versions.append(self.versions[k])


def accuracy(data: list[Data], casa: CASA) -> float:
    """Return the mean accuracy of the clients, each with its cluster's model."""
    model, right = network().eval(), []
    with torch.no_grad():
        for own, k in zip(data, casa.cluster, strict=True):
            nn.utils.vector_to_parameters(casa.models[k], model.parameters())
            right.append(float((model(own.test_x).argmax(1) == own.test_y).float().mean()))
    return float(np.mean(right))


def report(curve: list[tuple[float, float]], casa: CASA, groups: list[int], picture: str) -> None:
    """Draw the figure, and print accuracy, clusters, and purity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.plot(*zip(*curve, strict=True))
    plt.xlabel("virtual time, s")
    plt.ylabel("accuracy")
    plt.savefig(picture)
    of = [np.array(groups)[casa.cluster == k] for k in np.unique(casa.cluster)]
    purity = sum(np.bincount(own).max() for own in of) / CLIENTS
    json.dump({"accuracy": curve[-1][1], "clusters": len(of), "purity": purity}, sys.stdout)
