"""Compare Raceme with other frameworks: the same federated training, each in its own environment.

    python3 benchmarks/peers/compare.py --data-root data --cache ~/.cache/raceme-peers
    python3 benchmarks/peers/compare.py --data-root data --cache ... --only raceme,flower --idle

Each way of running a framework is started alone, in `--turns` turns. Its script measures the time
from the end of the first round on, so that imports, data and the start of workers do not count. The
table also has the processor time, which other load affects less, the accuracy on MNIST's test
images as a check that the work was the same, and the peak of memory of all processes together. With
`--json FILE` turns are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from environments import HERE, SOURCES, CannotInstallError, python_of, source_of

COLUMNS = ("ms/update", "median", "processor ms", "processes", "threads", "accuracy", "MB", "load")


@dataclass(frozen=True)
class Way:
    """One way of running a framework.

    Attributes
    ----------
    label : str
        Name in the table.
    name : str
        Name of its environment.
    method : str
        ``"fedavg"``, ``"fedasync"`` or ``"idle"``.
    processes, threads : int
        Processes that train, and torch's threads in each.
    script : str
        Script, if it is not ``on_<name>.py``.
    environment : dict
        Additional environment variables.
    """

    label: str
    name: str
    method: str
    processes: int = 1
    threads: int = 1
    script: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def ways(cores: int, threaded: bool) -> list[Way]:
    """Return all ways; `threaded` adds those in which torch's threads share one client's step."""
    listed = []
    for method in ("fedavg", "fedasync"):
        listed += [
            Way("Raceme", "raceme", method),
            Way("Raceme", "raceme", method, processes=cores),
            Way("FLGo", "flgo", method),
            Way("APPFL vsim", "appfl", method),
            Way("AFL-Lib", "afl_lib", method),
        ]
    listed += [
        Way("bare torch loop", "raceme", "fedavg", script="on_torch.py"),
        Way("pfl-research", "pfl", "fedavg"),
        Way("FLGo, in parallel", "flgo", "fedavg", processes=cores),
        Way("Flower on Ray", "flower", "fedavg", processes=cores),
        Way("Plato", "plato", "fedavg", processes=cores),
    ]
    if threaded:
        one_process = {way.label: way for way in listed if way.processes == 1}
        listed += [
            replace(way, method="fedavg", threads=cores)
            for label, way in one_process.items()
            if label != "Raceme"
        ]
    return listed


def idle_ways(cores: int) -> list[Way]:
    """Return the two ways with clients that do nothing."""
    return [
        Way("Raceme", "raceme", "idle"),
        Way("Flower on Ray", "flower", "idle", processes=cores),
    ]


class Memory(threading.Thread):
    """Watches the memory of a process and its descendants; shared pages count once."""

    def __init__(self, process: int, seconds: float = 1.0) -> None:
        super().__init__(daemon=True)
        self.megabytes, self.processes = 0.0, 0
        self._root, self._seconds, self._ended = process, seconds, threading.Event()

    def run(self) -> None:
        """Sample until the process has ended."""
        while not self._ended.wait(self._seconds):
            total, count = 0, 0
            for process in descendants(self._root):
                with suppress(OSError, ValueError):
                    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                    total += int(rollup.partition("\nPss:")[2].split()[0])
                    count += 1
            self.megabytes = max(self.megabytes, total / 1024)
            self.processes = max(self.processes, count)

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def descendants(root: int) -> set[int]:
    """Return a process and all its descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children[int(parent)].append(int(entry.name))
    found, waiting = set(), [root]
    while waiting:
        process = waiting.pop()
        found.add(process)
        waiting += children[process]
    return found


def measure(way: Way, python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a way once.

    Raises
    ------
    RuntimeError
        It has failed, or taken too long.
    """
    folder = options.cache / "work" / way.name
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [str(python), str(HERE / (way.script or f"on_{way.name}.py"))]
    updates = options.idle_updates if way.method == "idle" else options.updates
    for name, value in {
        "method": way.method,
        "data-root": options.data_root,
        "folder": folder,
        "updates": updates,
        "processes": way.processes,
        "threads": way.threads,
        "result": result,
    }.items():
        command += [f"--{name}", str(value)]
    paths = [str(HERE)] + ([str(HERE.parents[1])] if way.name == "raceme" else [])
    environment = os.environ | way.environment
    environment |= {"OMP_NUM_THREADS": str(way.threads), "PYTHONPATH": os.pathsep.join(paths)}
    if way.name in SOURCES:
        environment["PEERS_SOURCE"] = str(source_of(way.name, options.cache))
    load = os.getloadavg()[0]
    with (folder / "log").open("w") as log:
        ended = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        memory = Memory(ended.pid)
        memory.start()
        try:
            status = ended.wait(options.limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {options.limit:g} s") from None
        finally:
            memory.end()
            # On a timeout or interrupt, no process that was started here may survive.
            for process in descendants(ended.pid) if ended.poll() is None else ():
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
    if not result.exists():
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"exit code {status}: {(lines or ['no output'])[-1][:160]}")
    told: dict[str, Any] = json.loads(result.read_text())
    return told | {
        "label": way.label,
        "method": way.method,
        "processes": way.processes,
        "threads": way.threads,
        "all_processes": memory.processes,
        "peak_mb": memory.megabytes,
        "load": load,
        "at": time.strftime("%H:%M"),
    }


def table(turns: list[dict[str, Any]], failures: dict[str, str]) -> str:
    """Return the results as a Markdown table, the fastest of each method first."""
    rows = defaultdict(list)
    for turn in turns:
        rows[turn["method"], turn["label"], turn["processes"], turn["threads"]].append(turn)
    lines = []
    for method in dict.fromkeys(key[0] for key in rows):
        lines += [f"| {method} | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        of_method = {key: found for key, found in rows.items() if key[0] == method}
        best = {key: min(t["ms_per_update"] for t in found) for key, found in of_method.items()}
        for key in sorted(of_method, key=lambda key: best[key]):
            found = of_method[key]
            times = [turn["ms_per_update"] for turn in found]
            used = min(turn["processor_ms_per_update"] for turn in found)
            loads = [turn["load"] for turn in found]
            scores = [turn["accuracy"] for turn in found if turn["accuracy"] is not None]
            cells = [
                f"{key[1]} {found[-1]['version'][:7]}",
                *(f"{value:.3g}" for value in (best[key], statistics.median(times), used)),
                f"{key[2]} ({max(turn['all_processes'] for turn in found)})",
                str(key[3]),
                f"{statistics.median(scores):.3f}" if scores else "–",
                f"{max(turn['peak_mb'] for turn in found):,.0f}",
                f"{min(loads):.0f}–{max(loads):.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"{name}: {reason}" for name, reason in failures.items()]
    return "\n".join(lines)


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True, help="a folder with MNIST/raw")
    parser.add_argument("--cache", type=Path, required=True, help="folder for environments")
    parser.add_argument("--only", default="", help="environments, comma-separated: raceme,flgo,...")
    parser.add_argument("--method", default="", help="fedavg or fedasync only")
    parser.add_argument("--idle", action="store_true", help="only clients that do nothing")
    parser.add_argument(
        "--threaded",
        action="store_true",
        help="also with torch's threads on all cores, which needs an otherwise idle machine",
    )
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--idle-updates", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=600.0, help="time limit of a turn in seconds"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.cache, options.data_root = options.cache.resolve(), options.data_root.resolve()
    cores = len(os.sched_getaffinity(0))
    wanted = idle_ways(cores) if options.idle else ways(cores, options.threaded)
    if options.only:
        wanted = [way for way in wanted if way.name in options.only.split(",")]
    if options.method:
        wanted = [way for way in wanted if way.method == options.method]
    failures: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for name in dict.fromkeys(way.name for way in wanted):
        try:
            pythons[name] = python_of(name, options.cache)
        except CannotInstallError as error:
            failures[name] = f"not installed: {error}"
    turns: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        turns = json.loads(options.json.read_text())
    for _ in range(options.turns):
        for way in wanted:
            what = f"{way.label}, {way.method}, {way.processes} x {way.threads}"
            if way.name not in pythons or what in failures:
                continue
            try:
                turns.append(measure(way, pythons[way.name], options))
            except RuntimeError as error:
                failures[what] = str(error)
                continue
            print(what, f"{turns[-1]['ms_per_update']:.1f} ms", flush=True)
            if options.json:
                options.json.write_text(json.dumps(turns, indent=1))
    print(table(turns, failures))


if __name__ == "__main__":
    main()
