"""Measure what the client map and a dashboard with one viewer cost a run.

    python benchmarks/dashboard.py --seconds 200 --file turns.jsonl

A further call with the same file adds turns. The run is FedAsync on digits, in one process. Each
turn runs it without the map, with the map, and with the map and a dashboard that is viewed by a
separate process, in changing order. The comparison uses the processor time of the run's own process
from its first event to its last, which other load on the machine affects less than it affects
updates per second: the median of the turns' ratios, with a 95 % interval (bootstrap).

These ratios are still noisy, so two figures are measured directly: the processor time of the
functions that the map adds, and that of the dashboard's process per second of wall time. The
dashboard polls four times a second, however fast the run is, at a lower priority than the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from raceme.core.config import RunConfig
from raceme.core.events import ClientJoined, Event, RunEnded
from raceme.features.client_map.server import ClientMap
from raceme.features.client_map.sketches import ClientEmbedding
from raceme.reporting.dashboard.server import watching
from raceme.runs.experiment import simulate

LOOK = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "events") as answer:
    while block := answer.read1(1 << 16):
        print(len(block), flush=True)
"""
ARMS = ("no map", "map", "map and viewer")


class Counted:
    """Counts the processor time of the functions that the map adds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in (
            *((ClientEmbedding, name) for name in ("send", "take", "close")),
            (ClientMap, "_observe"),
        ):
            setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - begun

        return counting


def one(arm: str, updates: int, counted: Counted) -> dict[str, float]:
    """Return the processor seconds of run, map and dashboard, and the wall seconds."""
    moments: list[float] = []

    def observe(event: Event) -> None:
        if (isinstance(event, ClientJoined) and not moments) or isinstance(event, RunEnded):
            moments.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "run"
        spent, viewer = 0.0, None
        if arm == "map and viewer":
            beside = stack.enter_context(watching(out, "127.0.0.1", 0))
            viewer = subprocess.Popen(
                [sys.executable, "-c", LOOK, beside.address], stdout=subprocess.PIPE
            )
            assert viewer.stdout is not None
            # The dashboard has started once it answers.
            viewer.stdout.readline()
            spent = -processor_seconds(beside.process.pid)
        counted.seconds = 0.0
        config = RunConfig(
            strategy="fedasync",
            max_updates=updates,
            workers="0",
            out=str(out),
        ).with_values(client_map=arm != "no map")
        begun = time.monotonic()
        simulate(config, observe)
        wall = time.monotonic() - begun
        if viewer is not None:
            spent += processor_seconds(beside.process.pid)
    if viewer is not None:
        viewer.communicate(timeout=30)
    return {
        "run": moments[-1] - moments[0],
        "map": counted.seconds,
        "dashboard": spent,
        "wall": wall,
    }


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tell(turns: list[dict[str, dict[str, float]]]) -> None:
    """Print the statistics of all turns."""
    rng = np.random.default_rng(0)
    own = {arm: np.array([turn[arm]["run"] for turn in turns]) for arm in ARMS}
    print(f"{len(turns)} turns, {np.median(own['map']):.2f} s of the processor each (median)")
    for arm, base in (("map", "no map"), ("map and viewer", "map")):
        ratios = own[arm] / own[base]
        drawn = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        print(f"{arm} / {base}: {np.median(ratios):.4f} ({low:.4f} to {high:.4f})")
    for arm, part, whole, what in (
        ("map", "map", "run", "of the run's processor time"),
        ("map and viewer", "dashboard", "wall", "of one core, while somebody looks"),
    ):
        shares = np.array([turn[arm][part] / turn[arm][whole] for turn in turns])
        drawn = np.median(rng.choice(shares, (10_000, len(shares))), axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        said = f"{np.median(shares):.2%} ({low:.2%} to {high:.2%})"
        print(f"counted: the {part} takes {said} {what}")


def main() -> None:
    """Measure in turns, so that other load on the machine affects all arms alike."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--file", type=Path, required=True)
    given = parser.parse_args()
    until, counted = time.monotonic() + given.seconds, Counted()
    one("map", 50, counted)
    while True:
        order = random.sample(ARMS, len(ARMS))
        found = {arm: one(arm, given.updates, counted) for arm in order}
        with given.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        if time.monotonic() > until:
            break
    tell([json.loads(line) for line in given.file.read_text().splitlines()])


if __name__ == "__main__":
    main()
