"""The same run on real processes over gRPC and on virtual time: the same clusters, one figure.

    sudo python benchmarks/grpc_and_virtual.py [--out FOLDER] [--figure FILE] [--seed 0]

CASA on digits with six devices of two label groups, of which two are five times slower. First
`benchmarks/shaped_devices.py`: a server and six `raceme device` processes, each in a network
namespace with its share of a core. Then the same configuration on virtual time with the profile
`slow30x5`, and once more with the times that the first run has recorded. Final clusters are
compared by device id. Runs that FOLDER already holds are not repeated, only drawn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from raceme.records.record import (  # noqa: E402
    RunRecord,
    read_run,
)
from raceme.reporting.style import (  # noqa: E402
    FAINT,
    INK,
    MUTED,
    cluster_colour,
    new_figure,
    save_figure,
    series_colour,
    style,
)
from raceme.simulation import fleet  # noqa: E402

DEVICES, PROFILE = 6, "slow30x5"
KEYS = {
    "groups": "0.5,0.5",
    # Long tasks in which little is learned make the curve visible.
    "local-epochs": 3,
    "batch-size": 1,
    "lr": 0.005,
    "casa.alpha0": 1.9,
    "eval-every": DEVICES,
}
REAL, VIRTUAL, REPLAYED = "grpc", "virtual", "replayed"
LABELS = {
    REAL: "six devices over gRPC",
    VIRTUAL: f"virtual time, {PROFILE}",
    REPLAYED: "virtual time, the recorded times",
}


def run(*arguments: str) -> None:
    """Run a module, and echo its output."""
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True)


def run_all(out: Path, seed: int, updates: int) -> dict[str, RunRecord]:
    """Run what is missing, and read all three records."""
    keys = {**KEYS, "strategy": "casa", "seed": seed, "max-updates": updates}
    typed = [f"{key}={value}" for key, value in keys.items()]
    clients = ["--clients", str(DEVICES), "--out"]
    real = ["benchmarks.shaped_devices", "--shape", PROFILE, *clients]
    profiles = {VIRTUAL: PROFILE, REPLAYED: f"trace:{out / REAL}"}
    if not (out / REAL / "summary.json").is_file():
        run(*real, str(out / REAL), *typed)
    for name, profile in profiles.items():
        if not (out / name / "summary.json").is_file():
            keys_set = [part for assignment in typed for part in ("--set", assignment)]
            run("raceme", "run", "--devices", profile, *clients, str(out / name), *keys_set)
    return {name: read_run(out / name) for name in LABELS}


def clusters(record: RunRecord) -> set[frozenset[str]]:
    """Return the final clusters as sets of clients."""
    by_cluster: dict[int, set[str]] = {}
    for client, cluster in record.assignment().items():
        by_cluster.setdefault(cluster, set()).add(client)
    return {frozenset(members) for members in by_cluster.values()}


def slow_devices(seed: int) -> set[str]:
    """Return the devices that the profile makes slow."""
    seconds = [device.seconds_per_round for device in fleet(PROFILE, DEVICES, seed)]
    return {f"client-{i}" for i, value in enumerate(seconds) if value > min(seconds)}


def task_seconds(record: RunRecord, of: set[str]) -> float:
    """Return the median duration of these devices' tasks, from sending to reply."""
    taken = record.updates.time - record.updates.dispatched_at
    return float(np.median(taken[np.isin(record.updates.client, sorted(of))]))


def draw(records: Mapping[str, RunRecord], units: Mapping[str, float], path: Path) -> None:
    """Draw accuracy over time, and when each device worked for which cluster."""
    with style():
        figure = new_figure(10.0, 4.6)
        grid = figure.add_gridspec(2, 2, width_ratios=[1.25, 1.0])
        left = figure.add_subplot(grid[:, 0])
        starts = {name: float(r.updates.dispatched_at.min()) for name, r in records.items()}
        end = max((record.end - starts[name]) / units[name] for name, record in records.items())
        for index, (name, record) in enumerate(records.items()):
            left.plot(
                (record.evaluations.time - starts[name]) / units[name],
                record.evaluations.accuracy,
                color=series_colour((0, 5, 2)[index]),
                ls=("-", (0, (4.5, 1.6)), (0, (1.1, 1.3)))[index],
                label=LABELS[name],
            )
            for split in record.splits:
                at = (split.time - starts[name]) / units[name]
                left.axvline(at, color=MUTED, lw=0.8, ls=":")
        left.set(xlim=(0, end), ylim=(0, 1.02))
        left.set_xlabel("time since the first task, in tasks of a fast device")
        left.set_ylabel("accuracy, mean over the devices")
        left.set_title("Accuracy on the devices' own test data")
        left.grid(True)
        left.legend(loc="lower right")
        unit = units[REAL]
        real = left.secondary_xaxis(
            "top", functions=(lambda x: np.multiply(x, unit), lambda x: np.divide(x, unit))
        )
        real.set_xlabel("seconds over gRPC since the first task", color=INK)
        for row, name in enumerate((REAL, VIRTUAL)):
            axes = figure.add_subplot(grid[row, 1])
            _draw_tasks(axes, records[name], starts[name], units[name])
            axes.set_title(LABELS[name][0].upper() + LABELS[name][1:])
            axes.set_xlim(0, end)
            if row:
                axes.set_xlabel("time since the first task, in tasks of a fast device")
        numbers = sorted({int(k) for record in records.values() for k in record.updates.cluster})
        handles = [Patch(color=cluster_colour(k), label=f"cluster {k}") for k in numbers]
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles))
        save_figure(figure, path)


def _draw_tasks(axes: Axes, record: RunRecord, begin: float, unit: float) -> None:
    names = sorted(record.summary.membership.groups)
    updates = record.updates
    boxes, colours = [], []
    for client, start, stop, cluster in zip(
        updates.client, updates.dispatched_at, updates.time, updates.cluster, strict=True
    ):
        row, a, b = names.index(str(client)), (start - begin) / unit, (stop - begin) / unit
        boxes.append([(a, row - 0.4), (b, row - 0.4), (b, row + 0.4), (a, row + 0.4)])
        colours.append(cluster_colour(int(cluster)))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors=FAINT, linewidths=0.4))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/grpc-and-virtual"))
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    records = run_all(out, arguments.seed, arguments.updates)
    slow = slow_devices(arguments.seed)
    fast = {f"client-{i}" for i in range(DEVICES)} - slow
    units = {name: task_seconds(record, fast) for name, record in records.items()}
    units[REPLAYED] = units[REAL]
    print(f"slow: {', '.join(sorted(slow))}")
    for name, record in records.items():
        found = " | ".join(sorted(" ".join(sorted(members)) for members in clusters(record)))
        accuracy = record.evaluations.accuracy
        print(
            f"{LABELS[name]}: {len(record.updates.seq)} updates in {record.end:.1f} s, "
            f"{units[name]:.2f} s per task of a fast device, "
            f"{task_seconds(record, slow) / task_seconds(record, fast):.1f} times that of a slow "
            f"one, split after {[split.updates for split in record.splits]}, accuracy "
            f"{accuracy[-1]:.3f} (best {accuracy.max():.3f}); clusters {found}"
        )
    draw(records, units, arguments.figure or out / "grpc-and-virtual.png")
    if len({frozenset(clusters(record)) for record in records.values()}) > 1:
        raise SystemExit("the clusters differ")


if __name__ == "__main__":
    main()
