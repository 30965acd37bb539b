"""Accuracy at equal ε with noise of binary trees and with independent noise.

    python3 benchmarks/tree_noise.py

Digits, 100 clients in four groups of labels, 30 % of the devices five times slower, logistic
regression; each client contributes some updates. Which clients take part in which version does not
depend on the noise: a first run notes it, and the multipliers of both kinds of noise are set so
that the largest ε of any client is the given one. `predicted` is the ratio of the summed variances
of the two kinds of noise in the last version.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.feature import Feature, FeatureContext
from raceme.core.gaussian import gaussian_mu
from raceme.core.requests import Outcome, Update
from raceme.features.central_privacy.tree import cost
from raceme.runs.experiment import simulate

DELTA = 1e-3
CASES: Mapping[str, Mapping[str, object]] = {
    "fedasync": {"strategy": "fedasync"},
    "fedbuff, K = 10": {"strategy": "fedbuff", "fedbuff.k": 10},
    "fedbuff, K = 50": {"strategy": "fedbuff", "fedbuff.k": 50},
}


class Versions(Feature):
    """A feature that notes the version which each update becomes part of."""

    leaves: ClassVar[dict[str, dict[int, float]]] = {}
    count = 0

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Note an update; buffered updates count for the version that they become part of."""
        (model,) = context.clusters.models.values()
        for update, outcome in zip(updates, outcomes, strict=True):
            leaf = model.version - 1 if model.version > Versions.count else model.version
            own = Versions.leaves.setdefault(update.task.client, {})
            own[leaf] = own.get(leaf, 0.0) + outcome.weight
        Versions.count = model.version


def accuracy(keys: Mapping[str, object], updates: int, seed: int) -> float:
    """Run a configuration, and return the final accuracy."""
    with TemporaryDirectory() as folder:
        run = {"dataset": "digits", "clients": 100, "model": "mclr", "lr": 0.1, "workers": "0"}
        run |= {"devices": "slow30x5", "own-model": False, "privacy-delta": DELTA, "seed": seed}
        run |= {"max-updates": 100 * updates, "eval-every": 10**6, "privacy-updates": updates}
        outcome = simulate(RunConfig.from_mapping({**run, **keys, "out": folder}))
        return float(outcome.summary["accuracy"])


def compared(
    keys: Mapping[str, object], updates: int, seed: int, mu: float
) -> tuple[int, float, float, float]:
    """Note which clients take part in which version; return versions, multipliers, and the ratio.

    Parameters
    ----------
    mu : float
        Privacy budget of the client that spends most.

    Returns
    -------
    tuple
        Number of versions, z of independent noise and of trees, and the variance of the noise of
        trees in the last version by that of independent noise.
    """
    Versions.leaves, Versions.count = {}, 0
    noted = {**keys, "features": f"{__name__}:Versions", "privacy-central": 1e-3}
    accuracy(noted, updates, seed)
    versions = Versions.count
    height = max(1, math.ceil(math.log2(versions)))
    # Independent noise is scaled to the largest weight of each version.
    by_leaf: dict[int, float] = {}
    for own in Versions.leaves.values():
        for leaf, weight in own.items():
            by_leaf[leaf] = max(weight, by_leaf.get(leaf, 0.0))
    largest = by_leaf[0]
    parts = [
        {leaf: weight / largest for leaf, weight in own.items() if leaf < versions}
        for own in Versions.leaves.values()
    ]
    plain, tree = math.sqrt(updates) / mu, math.sqrt(max(cost(own, height) for own in parts)) / mu
    independent = plain**2 * sum(by_leaf[leaf] ** 2 for leaf in range(versions))
    return versions, plain, tree, versions.bit_count() * (tree * largest) ** 2 / independent


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, nargs="+", default=[10])
    parser.add_argument("--epsilon", type=float, default=8.0)
    options = parser.parse_args()
    mu = gaussian_mu(options.epsilon, DELTA)
    print(
        "| method | updates of a client | versions | z | z, tree | predicted | independent | tree |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for updates in options.updates:
        for name, keys in CASES.items():
            found: dict[str, list[float]] = {"independent": [], "tree": []}
            for seed in range(options.seeds):
                versions, plain, tree, predicted = compared(keys, updates, seed, mu)
                height = max(1, math.ceil(math.log2(versions)))
                found["independent"].append(
                    accuracy({**keys, "privacy-central": plain}, updates, seed)
                )
                trees = {"privacy-central": tree, "privacy-tree": 2**height}
                found["tree"].append(accuracy({**keys, **trees}, updates, seed))
            shown = [f"{100 * np.mean(v):.1f} ± {100 * np.std(v):.1f}" for v in found.values()]
            row = [name, str(updates), str(versions), f"{plain:.2f}", f"{tree:.2f}"]
            print("| " + " | ".join([*row, f"{predicted:.2f}", *shown]) + " |", flush=True)


if __name__ == "__main__":
    main()
