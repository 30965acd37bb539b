"""What a dashboard costs a run, with one viewer: updates per second with and without, in turns.

    python benchmarks/dashboard.py --turns 6 --updates 1500

The run is FedAsync on digits, in one process.
"""

from __future__ import annotations

import argparse
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


def one(watched: bool, updates: int) -> float:
    """Return the updates per second of a run, once the dashboard is there."""
    received: list[int] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "run"
        viewer = None
        if watched:
            beside = stack.enter_context(watching(out, "127.0.0.1", 0))
            viewer = threading.Thread(target=look, args=(beside.address, received), daemon=True)
            viewer.start()
            # The dashboard has started when it answers.
            while not received:
                time.sleep(0.01)
        config = RunConfig(
            strategy="fedasync",
            num_clients=40,
            max_updates=updates,
            workers="0",
            out=str(out),
        )
        summary = simulate(config).summary
    if viewer is not None:
        viewer.join(30)
    return float(summary["updates_per_second"])


def main() -> None:
    """Measure in turns, so that what else the machine does falls on both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--updates", type=int, default=1500)
    given = parser.parse_args()
    one(False, 200)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(given.turns):
        for watched in (False, True) if turn % 2 else (True, False):
            rates[watched].append(one(watched, given.updates))
    ratios = [w / a for w, a in zip(rates[True], rates[False], strict=True)]
    for watched, name in ((False, "alone"), (True, "watched")):
        found = ", ".join(f"{rate:.1f}" for rate in rates[watched])
        print(f"{name}: median {statistics.median(rates[watched]):.1f} updates/s ({found})")
    print(f"watched / alone, median of the pairs: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
