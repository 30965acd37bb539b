"""What a dashboard costs a run, with one viewer: updates per second with and without, in turns.

On a machine that does other things too, processor time tells more than updates per second: that of
the run, and that of the dashboard, which has less priority.

    python benchmarks/dashboard.py --turns 6 --updates 1500

The run is FedAsync on digits, in one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from raceme.config import RunConfig
from raceme.dashboard.child import watching
from raceme.experiment import simulate


def look(address: str, received: list[int]) -> None:
    """Be a viewer: take all that comes."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=120)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    while block := answer.read1(1 << 16):
        received.append(len(block))


def one(watched: bool, updates: int) -> tuple[float, float, float]:
    """Return the updates per second of a run, and processor seconds: its own, the dashboard's.

    The run begins once the dashboard is there; what its start takes is not counted.
    """
    received: list[int] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "run"
        viewer, spent = None, 0.0
        if watched:
            beside = stack.enter_context(watching(out, "127.0.0.1", 0))
            viewer = threading.Thread(target=look, args=(beside.address, received), daemon=True)
            viewer.start()
            # The dashboard has started when it answers.
            while not received:
                time.sleep(0.01)
            spent = -processor_seconds(beside.process.pid)
        config = RunConfig(
            strategy="fedasync",
            max_updates=updates,
            workers="0",
            out=str(out),
        )
        begun = time.process_time()
        summary = simulate(config).summary
        own = time.process_time() - begun
        if watched:
            spent += processor_seconds(beside.process.pid)
    if viewer is not None:
        viewer.join(30)
    return float(summary["updates_per_second"]), own, spent


def processor_seconds(pid: int) -> float:
    """Return what a process has used of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure in turns, so that what else the machine does falls on both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--updates", type=int, default=1500)
    given = parser.parse_args()
    one(False, 200)
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for turn in range(given.turns):
        for watched in (False, True) if turn % 2 else (True, False):
            found[watched].append(one(watched, given.updates))
    for watched, name in ((False, "alone"), (True, "watched")):
        rates, own, spent = (
            statistics.median(column) for column in zip(*found[watched], strict=True)
        )
        print(
            f"{name}: {rates:.1f} updates/s, {own:.2f} s of the processor, "
            f"its dashboard {spent:.2f} s (medians of {given.turns})"
        )
    for column, what in ((0, "updates/s"), (1, "processor time of the run")):
        pairs = zip(found[True], found[False], strict=True)
        ratio = statistics.median(one[column] / other[column] for one, other in pairs)
        print(f"{what}, watched / alone, median of the pairs: {ratio:.4f}")


if __name__ == "__main__":
    main()
