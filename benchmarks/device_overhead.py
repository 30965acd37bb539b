"""Measure the cost of a device: SuperNodes and `raceme device`, on one SuperLink of Flower.

    python benchmarks/device_overhead.py [--updates 200] [--json FILE]

First, two devices answer as fast as they are given work, with a client that does nothing: seconds
per update. Then they train CASA on digits: the peak of resident memory of all processes of one
device. Everything runs on loopback, and is stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bundles import write_app  # noqa: E402
from processes import (  # noqa: E402
    Loopback,
    Process,
    free_port,
    loopback,
    resident_memory,
)

DEVICES = 2
MIB = 1024 * 1024
Start = Callable[[Loopback, str], Process]

SERVER = f"""
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    nodes = []
    while len(nodes) < {DEVICES}:
        time.sleep(0.1)
        nodes = list(grid.get_node_ids())
    waiting = {{}}

    def give_work(node):
        (key,) = grid.push_messages([Message(RecordDict(), node, "train")])
        waiting[key] = node

    for node in nodes:
        give_work(node)
    # The first answer of each device includes loading the app.
    done, wanted, start = -len(nodes), context.run_config["updates"], None
    while done < wanted:
        replies = list(grid.pull_messages(list(waiting)))
        for reply in replies:
            assert not reply.has_error(), reply.error
            done += 1
            if done == 0:
                start = time.monotonic()
            give_work(waiting.pop(reply.metadata.reply_to_message_id))
        if not replies:
            time.sleep(0.02)
    print(f"SECONDS-PER-UPDATE {{(time.monotonic() - start) / done:.4f}}", flush=True)
"""


def stock(bed: Loopback, node_config: str) -> Process:
    command = ["flower-supernode", "--insecure", "--superlink", bed.fleet_address]
    command += ["--port", str(free_port()), "--node-config", node_config]
    return bed.start("supernode", command)


def ours(bed: Loopback, node_config: str) -> Process:
    return bed.device("--insecure", "--node-config", node_config)


@contextmanager
def devices(bed: Loopback, start: Start) -> Iterator[list[Process]]:
    started = [
        start(bed, f"partition-id={index} num-partitions={DEVICES}") for index in range(DEVICES)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.end()


class Watch:
    """Samples the resident memory of a process and its descendants while it is entered."""

    def __init__(self, process_id: int) -> None:
        self.peak = 0
        self.processes = 0
        self._root = process_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.1):
            sizes = [size for size in map(_size, _family(self._root)) if size]
            if sum(sizes) > self.peak:
                self.peak, self.processes = sum(sizes), len(sizes)


def _size(process_id: int) -> int:
    try:
        return resident_memory(process_id)
    except (OSError, IndexError):
        return 0


def _family(root: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    family, size = {root}, 0
    while size != len(family):
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family


def time_updates(bed: Loopback, start: Start, app: Path, updates: int) -> float:
    """Return the seconds per update of a client that does nothing."""
    with devices(bed, start):
        run = bed.flwr("run", str(app), "here", "--stream", "--run-config", f"updates={updates}")
        seconds = run.wait_for(r"SECONDS-PER-UPDATE (\S+)", 300)
        run.wait()
        return float(seconds.group(1))


def measure_memory(bed: Loopback, start: Start, updates: int) -> tuple[float, int]:
    """Return MiB and number of the processes of one device that trains on digits."""
    settings = f"groups='0.5,0.5' max-updates={updates} out='{bed.home}/{start.__name__}'"
    with devices(bed, start) as started, Watch(started[0].handle.pid) as watch:
        run = bed.flwr("run", str(ROOT), "here", "--stream", "--run-config", settings)
        run.wait_for("Results are in", 300)
        run.wait()
    return watch.peak / MIB, watch.processes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--stock-updates", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    kinds = {"stock SuperNode": (stock, arguments.stock_updates), "raceme device": (ours, 0)}
    results = {}
    with tempfile.TemporaryDirectory() as folder, loopback(Path(folder)) as bed:
        app = write_app(Path(folder) / "app", server=SERVER, config="updates = 100")
        superlink = bed.superlink()
        for name, (start, updates) in kinds.items():
            seconds = time_updates(bed, start, app, updates or arguments.updates)
            memory, processes = measure_memory(bed, start, 8)
            results[name] = {
                "seconds_per_update": seconds,
                "resident_mib": round(memory, 1),
                "processes": processes,
            }
            print(
                f"{name:16}  {seconds:8.3f} s per update  {memory:7.0f} MiB  {processes} processes",
                flush=True,
            )
        assert superlink.handle.poll() is None
    first, second = results.values()
    ratios = {
        "times_faster": round(first["seconds_per_update"] / second["seconds_per_update"], 1),
        "memory_share": round(second["resident_mib"] / first["resident_mib"], 3),
    }
    print(f"{ratios['times_faster']} times faster, {ratios['memory_share']:.0%} of the memory")
    if arguments.json:
        machine = {
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "python": re.sub(r"\s.*", "", sys.version),
        }
        text = json.dumps({**machine, "devices": DEVICES, **results, **ratios}, indent=2)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
