"""Processor time from the start of a command to its first update, beside that of its imports.

    python3 benchmarks/start.py --turns 5

`raceme run` on digits with each method, and ``python -c "import torch, flwr.app"``, in turns on one
thread: minimum, median and maximum over the turns, and ratios of the minima.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

TELL = "print('took', time.process_time(), flush=True)"
IMPORTS = f"import time, torch, flwr.app; {TELL}"
RUN = f"""
import os, sys, time
from raceme.core.events import UpdateApplied
def first(*_, **__):
    {TELL}
    os._exit(0)
UpdateApplied.__init__ = first
from raceme.cli import main
sys.argv = ["raceme", "run", *sys.argv[1:]]
main()
"""


def took(code: str, *arguments: str) -> float:
    """Return the processor time that a new process reports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.rpartition("took ")[2])


def main() -> None:
    """Print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default="casa,panicle", help="separated by commas")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", default="", help="write the figures to this file")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"imports": []}
    for _ in range(options.turns):
        found["imports"].append(took(IMPORTS))
        for method in options.methods.split(","):
            with tempfile.TemporaryDirectory() as folder:
                out = str(Path(folder) / "run")
                seconds = took(RUN, "--strategy", method, "--out", out)
            found.setdefault(method, []).append(seconds)
    table = Table("until the first update", "least, s", "median", "greatest", "× the imports")
    for name, times in found.items():
        figures = (min(times), statistics.median(times), max(times))
        ratio = min(times) / min(found["imports"])
        table.add_row(name, *(f"{seconds:.2f}" for seconds in figures), f"{ratio:.2f}")
    Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
