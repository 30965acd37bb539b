"""Draw docs/images/privacy.png: accuracy against ε of central differential privacy.

    python3 benchmarks/privacy_picture.py docs/results docs/images/privacy.png

From the data of `benchmarks/privacy.toml`: mean and standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

EPSILONS = {"2": 2.0, "8": 8.0, "none": 32.0}
"""Data files, and places on the axis."""


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = {}
    for name in EPSILONS:
        tree = json.loads((arguments.data / f"privacy-eps-{name}.json").read_text("utf-8"))
        for method in tree["methods"]:
            rows = [row for row in tree["rows"] if row["method"] == method]
            own = [row["figures"]["accuracy"] for row in rows]
            found.setdefault(method, []).append(own)
    figure, axis = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    places = list(EPSILONS.values())
    for method, values in found.items():
        mean, spread = np.mean(values, axis=1), np.std(values, axis=1)
        axis.errorbar(places, mean, spread, marker="o", capsize=3, label=method)
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, ["2", "8", "no noise"])
    axis.minorticks_off()
    axis.set_xlabel("ε at δ = 0.001")
    axis.set_ylabel("accuracy")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
