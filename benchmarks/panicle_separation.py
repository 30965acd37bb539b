"""Simulate when Panicle's probes tell groups apart, without training.

    python3 benchmarks/panicle_separation.py

Clients of K groups have two halves of probes each, as docs/research/panicle-analysis.md assumes:
√r g + √(1 − r) ε, with the group's direction g, the reliability r, and noise ε in d dimensions.
Directions of two groups have the cosine c. A row is one size of fleet, dimension and reliability; a
column one cosine; a cell the share of fleets in which exactly the true groups were found (for one
group: in which none were).

A second table has sketches with noise (``panicle.sketch-epsilon``): noise of deviation σ on
each of d numbers of a direction lowers its reliability from r to r / (1 + d σ²).
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from raceme.core.clusters import unit_rows
from raceme.core.sketches import SIZE as SKETCH
from raceme.strategies.panicle.probes import HALVES, Probes, better_partition
from raceme.strategies.panicle.strategy import PanicleParameters, sketch_noise
from raceme.strategies.shared import numbered

COSINES = (0.0, 0.3, 0.5, 0.6, 0.65, 0.75)
# Groups, clients in each, dimension, reliability.
FLEETS = (
    (2, 10, SKETCH, 0.8),
    (2, 10, SKETCH, 0.4),
    (2, 10, SKETCH, 0.2),
    (2, 10, 128, 0.4),
    (2, 10, 32, 0.4),
    (2, 3, SKETCH, 0.4),
    (2, 50, SKETCH, 0.4),
    (4, 3, SKETCH, 0.4),
    (4, 10, SKETCH, 0.4),
    (10, 10, SKETCH, 0.4),
    (10, 10, 128, 0.4),
    (10, 10, 32, 0.4),
    (4, 10, SKETCH, 0.2),
)
# ε, clients in each of four groups, dimension; the reliability without noise is _PLAIN.
SKETCHES = (
    (800, 5, 64),
    (800, 15, 64),
    (400, 5, 64),
    (400, 15, 64),
    (400, 15, 256),
    (200, 5, 64),
    (200, 15, 64),
    (200, 15, 32),
    (100, 15, 32),
)
_PLAIN = 0.8


def group_directions(groups: int, cosine: float, dimension: int) -> NDArray[np.float64]:
    """Return unit directions with the same cosine for every pair. Shape (groups, dimension)."""
    cosines = np.full((groups, groups), cosine) + (1.0 - cosine) * np.eye(groups)
    directions = np.zeros((groups, dimension))
    directions[:, :groups] = np.linalg.cholesky(cosines)
    return directions


def is_found(
    groups: int, each: int, dimension: int, reliability: float, cosine: float, seed: int
) -> bool:
    """Draw a fleet; return whether Panicle would find its groups, and no others."""
    rng = np.random.default_rng([seed, groups, each, dimension])
    directions = group_directions(groups, cosine, dimension)
    truth = np.repeat(np.arange(groups), each)
    probes = Probes()
    for _ in range(HALVES):
        noise = unit_rows(rng.standard_normal((len(truth), dimension)).astype(np.float32))
        halves = np.sqrt(reliability) * directions[truth] + np.sqrt(1.0 - reliability) * noise
        for client, half in enumerate(unit_rows(halves.astype(np.float32))):
            probes.add(str(client), half)
    clear = probes.clear()
    now = np.zeros(len(clear), np.int64)
    found = better_partition(probes.distances(clear), now, PanicleParameters().level)
    labels = now if found is None else found.labels
    return bool(np.array_equal(numbered(labels), numbered(truth[[int(c) for c in clear]])))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=100, help="fleets of each kind")
    fleets = parser.parse_args().fleets
    table = Table("groups", "clients", "d", "r", *(f"c = {cosine:g}" for cosine in COSINES))
    one = [
        (1, each, *rest) for each, *rest in ((20, SKETCH, 0.4), (20, 32, 0.4), (20, SKETCH, 0.2))
    ]
    for groups, each, dimension, reliability in (*FLEETS, *one):
        cells = []
        for cosine in COSINES if groups > 1 else COSINES[:1]:
            drawn = (
                is_found(groups, each, dimension, reliability, cosine, seed)
                for seed in range(fleets)
            )
            cells.append(f"{sum(drawn) / fleets:.2f}")
        table.add_row(str(groups), str(groups * each), str(dimension), str(reliability), *cells)
    Console().print(table)
    noisy = Table("ε", "clients", "d", "σ", "r", *(f"c = {cosine:g}" for cosine in COSINES[:3]))
    for epsilon, each, dimension in SKETCHES:
        sigma = sketch_noise(epsilon)
        reliability = _PLAIN / (1.0 + dimension * sigma**2)
        cells = []
        for cosine in COSINES[:3]:
            drawn = (
                is_found(4, each, dimension, reliability, cosine, seed) for seed in range(fleets)
            )
            cells.append(f"{sum(drawn) / fleets:.2f}")
        shown = f"{sigma:.3f}", f"{reliability:.2f}"
        noisy.add_row(str(epsilon), str(4 * each), str(dimension), *shown, *cells)
    Console().print(noisy)


if __name__ == "__main__":
    main()
