"""Draw docs/images/panicle.png: similarities of clients, by two probes of each.

    python3 benchmarks/panicle_picture.py docs/images/panicle.png

Digits, 40 clients, 30 % of them five times slower. Each square is Panicle's matrix of similarities
after two probes per client, corrected for chance, with the clients in the order of their true
groups; above it the silhouette score of the best partition, which Panicle compares with its
threshold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np

from raceme.core.config import RunConfig
from raceme.runs.experiment import simulate
from raceme.strategies.panicle import strategy as panicle
from raceme.strategies.panicle.probes import best_partition

matplotlib.use("Agg")
from matplotlib import pyplot

CASES = {
    "four label groups": {"partition": "label-groups"},
    "four rotations": {"partition": "rotation-groups"},
    "Dirichlet(0.5)": {"partition": "dirichlet"},
    "IID": {"partition": "iid"},
}
UPDATES = 140


def probed(settings: dict[str, Any], seed: int) -> panicle.Panicle:
    """Run until all clients have answered two probes, and return the strategy."""
    made: list[panicle.Panicle] = []
    plain = panicle.Panicle

    class Kept(plain):  # type: ignore[misc, valid-type]
        """Panicle whose instance remains accessible after a run."""

        def restored(self) -> None:
            super().restored()
            made[:] = [self]

    panicle.Panicle = Kept  # type: ignore[misc]
    try:
        with TemporaryDirectory() as folder:
            keys = {"strategy": "panicle", "dataset": "digits", "clients": 40, "seed": seed}
            keys |= {"max-updates": UPDATES, "eval-every": 10**6, "workers": "0", "out": folder}
            simulate(RunConfig.from_mapping({**keys, "devices": "slow30x5", **settings}))
    finally:
        panicle.Panicle = plain  # type: ignore[misc]
    return made[0]


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=50)
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(1, len(CASES), figsize=(11, 3.2), layout="constrained")
    for axis, (title, settings) in zip(axes, CASES.items(), strict=True):
        method = probed(settings, arguments.seed)
        fleet, probes = method.progress.fleet.clients, method.state.probes
        clear = [client for client in probes.clients if probes.is_clear(client)]
        order = sorted(clear, key=lambda client: (fleet[client].group or 0, client))
        distances = probes.distances(order)
        score = best_partition(distances).score
        image = axis.imshow(1.0 - distances.mean(axis=0), vmin=-0.2, vmax=1.0, cmap="viridis")
        axis.set_title(f"{title}\nsilhouette {score:.2f}", fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
        groups = np.array([fleet[client].group or 0 for client in order])
        for edge in np.flatnonzero(np.diff(groups)) + 0.5:
            axis.axhline(edge, color="white", linewidth=0.8)
            axis.axvline(edge, color="white", linewidth=0.8)
    figure.colorbar(image, ax=axes, label="agreement, free of chance", shrink=0.9)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
