"""Concepts that come and go: which data belong to which model, when data have drifted, what merges.

Jothimurugesan et al., "Federated Learning under Distributed Concept Drift" (FedDrift), AISTATS
2023. What is compared are losses, in whichever measure: the lower the better.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raceme.clustering.bipartition import linkage


def has_drifted(loss: float, before: float | None, delta: float) -> bool:
    """Return whether a client's data have drifted: its least loss has grown by more than δ.

    Parameters
    ----------
    loss : float
        Least loss of any model on its data now.
    before : float or None
        The same when the client was last asked; None if it never was: then nothing has drifted.
    delta : float
        δ.
    """
    return before is not None and loss - before > delta


def cluster_distances(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much worse two models are on each other's data than on their own.

    ``d(p, q) = max(L(p, q) − L(p, p), L(q, p) − L(q, q), 0)``.

    Parameters
    ----------
    losses : NDArray[np.float64]
        L(p, q), the loss of model p on the data of q; NaN where it is not known. Shape (k, k).

    Returns
    -------
    NDArray[np.float64]
        Shape (k, k), symmetric, 0 on the diagonal; infinite where a loss is not known.
    """
    growth = losses - np.diag(losses)[:, None]
    distances = np.maximum(np.maximum(growth, growth.T), 0.0)
    distances[np.isnan(distances)] = np.inf
    np.fill_diagonal(distances, 0.0)
    return distances


def complete_linkage(distances: NDArray[np.float64], below: float) -> list[list[int]]:
    """Merge the nearest clusters again and again, while they are nearer than a bound.

    Two clusters are as far from each other as those of their members that are farthest apart.

    Parameters
    ----------
    distances : NDArray[np.float64]
        Shape (k, k), symmetric; infinite for what must not be merged.
    below : float
        Clusters at this distance, or farther apart, stay apart.

    Returns
    -------
    list[list[int]]
        The clusters that were merged, at least two positions in each, ascending.
    """
    if len(distances) < 2 or not below > 0:
        return []
    finite = np.nan_to_num(distances, posinf=np.finfo(np.float64).max)
    labels = linkage(finite, None, below=below)
    parts = (np.flatnonzero(labels == label).tolist() for label in np.unique(labels))
    return [part for part in parts if len(part) > 1]


@dataclass
class Concepts:
    """Which of the clients' data belong to which model.

    Attributes
    ----------
    assigned : dict[str, dict[int, int]]
        Model of each client's data of each step: a[t, i].
    least : dict[str, float]
        r_i: least loss of any model on a client's data when it was last asked.
    losses : dict[str, dict[int, dict[int, float]]]
        What a client has last measured: by step of its data and model.
    isolated : dict[int, int]
        New models that nobody may join and that do not merge, and for how many steps more.
    heirs : dict[int, int]
        Models that were merged, to what they were merged into.
    used : dict[int, int]
        When data were last assigned to a model: a count.
    asked : dict[str, list[int]]
        Clients that are measuring, and the steps of the data on which they do.
    count : int
        How often data were assigned so far.
    """

    assigned: dict[str, dict[int, int]] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)
    losses: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    isolated: dict[int, int] = field(default_factory=dict)
    heirs: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    asked: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0

    # Which data belong where.

    def assign(self, client: str, step: int, model: int) -> None:
        """Let a model have a client's data of a step."""
        self.assigned.setdefault(client, {})[step] = model
        self.used[model] = self.count
        self.count += 1

    def remembered(self, client: str, now: int, memory: int = 0) -> list[int]:
        """Return the steps, before or at one, of the data that a client is to use: the latest.

        Parameters
        ----------
        client : str
            Who.
        now : int
            Step of its data.
        memory : int
            How many steps it remembers; 0: all.
        """
        steps = sorted(step for step in self.assigned.get(client, {}) if step <= now)
        return steps[-memory:]

    def by_model(self, client: str, now: int, memory: int = 0) -> dict[int, list[int]]:
        """Return the models that a client trains, and for each the steps of the data.

        The model of its latest data is first.
        """
        found: dict[int, list[int]] = {}
        for step in reversed(self.remembered(client, now, memory)):
            found.setdefault(self.assigned[client][step], []).insert(0, step)
        return found

    def pairs(self, model: int) -> int:
        """Return how many pairs of a client and a step a model has the data of."""
        return sum(mine == model for steps in self.assigned.values() for mine in steps.values())

    def unite(self, sources: Iterable[int], target: int) -> None:
        """Let a model have the data of several, which are no more."""
        gone = set(sources)
        self.used[target] = max(self.used.pop(model, 0) for model in gone)
        self.heirs.update(dict.fromkeys(gone, target))
        for steps in self.assigned.values():
            for step, model in steps.items():
                if model in gone:
                    steps[step] = target

    def heir(self, model: int) -> int:
        """Return what a model has become: itself, or what it was merged into."""
        while model in self.heirs:
            model = self.heirs[model]
        return model

    def forget(self, model: int) -> None:
        """Forget the data of a model that is given up: they belong nowhere any more."""
        self.used.pop(model, None)
        self.isolated.pop(model, None)
        for steps in self.assigned.values():
            for step in [step for step, mine in steps.items() if mine == model]:
                del steps[step]

    def age(self, models: Iterable[int]) -> None:
        """Let a step of the isolation of some models be over."""
        for model in models:
            self.isolated[model] -= 1
            if not self.isolated[model]:
                del self.isolated[model]

    # What clients measure.

    def to_score(self, client: str, now: int, memory: int = 0, newest: bool = False) -> list[int]:
        """Return on the data of which steps a client is to measure models; `now` is the last."""
        if newest or memory == 1:
            return [now]
        return [*self.remembered(client, now - 1, max(0, memory - 1)), now]

    def take(
        self, client: str, losses: Mapping[int, Mapping[int, float]], there: Container[int]
    ) -> None:
        """Take in what a client has measured; what it measured before is old.

        The loss of a model that was merged meanwhile is taken for that of what it was merged into;
        of several the least.

        Parameters
        ----------
        client : str
            Who.
        losses : Mapping
            By step and model.
        there : Container[int]
            The models that exist.
        """
        own: dict[int, dict[int, float]] = {}
        for step, by_model in losses.items():
            now = own.setdefault(step, {})
            for model, loss in by_model.items():
                heir = self.heir(model)
                if heir in there:
                    now[heir] = min(loss, now.get(heir, loss))
        self.losses[client] = own

    def best(self, client: str, step: int, own: int | None) -> tuple[int, float]:
        """Return the model of least loss on a client's data of a step, and the loss.

        A model that is isolated is nobody's but its own client's; a client that would be left
        without any may take all. Of equal ones the first.
        """
        losses = self.losses[client][step]
        open_to = [model for model in losses if model not in self.isolated or model == own]
        best = min(open_to or list(losses), key=lambda model: losses[model])
        return best, losses[best]

    def mean_losses(self, models: Sequence[int]) -> NDArray[np.float64]:
        """Return L(p, q): mean loss of model p over the data of q, shape (k, k).

        Every pair of a client and a step counts the same. NaN where nobody has measured it.
        """
        place = {model: index for index, model in enumerate(models)}
        total, count = np.zeros((2, len(models), len(models)))
        for client, by_step in self.losses.items():
            for step, by_model in by_step.items():
                owner = self.assigned.get(client, {}).get(step)
                if owner not in place:
                    continue
                for model, loss in by_model.items():
                    if model in place:
                        total[place[model], place[owner]] += loss
                        count[place[model], place[owner]] += 1
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)

    def alike(self, models: Sequence[int], below: float) -> list[list[int]]:
        """Return which models are to be merged, at least two in each list."""
        distances = cluster_distances(self.mean_losses(models))
        return [[models[index] for index in part] for part in complete_linkage(distances, below)]
