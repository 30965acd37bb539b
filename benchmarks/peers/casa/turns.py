"""CASA in Raceme and, written by hand, in other frameworks: lines, processor time, results.

    python3 benchmarks/peers/casa/turns.py --cache ~/.cache/raceme-peers [--seeds 0,1,2]

40 clients of scikit-learn's digits in four label groups, 1,600 updates, one process or Ray worker
that trains. The frameworks take turns, each in an environment that is made of pinned packages (see
`environments.py`). Lines are those of code, without blank ones, comments and docstrings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent), str(ROOT / "benchmarks")]
from compare import descendants  # noqa: E402
from environments import SOURCES, CannotInstallError, python_of, source_of  # noqa: E402
from structure import count_lines  # noqa: E402

FILES = {
    "raceme": [],
    "afl_lib": ["method.py", "on_afl_lib.py"],
    "flgo": ["method.py", "flgo_data.py", "on_flgo.py"],
    "flower": ["method.py", "flower_client.py", "on_flower.py"],
}
"""Files that a user of each framework writes."""


def run(name: str, python: Path, seed: int, cache: Path, folder: Path) -> dict[str, Any]:
    """Run one framework, and return its result and the time of all its processes.

    Raises
    ------
    RuntimeError
        It has failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment["PYTHONPATH"] = str(ROOT if name == "raceme" else HERE)
    if name in SOURCES:
        environment["PEERS_SOURCE"] = str(source_of(name, cache))
    if name == "raceme":
        command = [str(python), "-m", "raceme", "run", "--strategy", "casa", "--workers", "0"]
        command += ["--max-updates", "1600", "--seed", str(seed), "--out", str(folder)]
    else:
        command = [str(python), str(HERE / f"on_{name}.py"), str(seed), str(folder / "figure.png")]
        folder.mkdir()
    began, ticks = time.perf_counter(), {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors)
        while process.poll() is None:
            # Summed per process: Ray's parents do not wait
            # for their children, so their totals miss them.
            for number in descendants(process.pid):
                with suppress(OSError):
                    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                    ticks[number] = int(fields[11]) + int(fields[12])
            time.sleep(0.5)
        seconds = time.perf_counter() - began
        out.seek(0)
        errors.seek(0)
        told, complaints = out.read(), errors.read()
    if process.returncode:
        raise RuntimeError((complaints.strip().splitlines() or ["no output"])[-1][:160])
    if name == "raceme":
        pairs = re.findall(r"^ *(accuracy|clusters|purity) +([\d.]+)", told, re.MULTILINE)
        found = {key: float(value) for key, value in pairs}
    else:
        found = json.loads(told[told.rindex("{") :].partition("}")[0] + "}")
    return found | {
        "name": name,
        "seed": seed,
        "seconds": seconds,
        "processor": sum(ticks.values()) / os.sysconf("SC_CLK_TCK"),
    }


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder for environments")
    parser.add_argument("--only", default=",".join(FILES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
    pythons = {}
    for name in options.only.split(","):
        try:
            pythons[name] = python_of(name, options.cache.resolve())
        except CannotInstallError as error:
            print(f"{name} is not installed: {error}")
    for seed in map(int, options.seeds.split(",")):
        for name, python in pythons.items():
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "out"
                try:
                    turn = run(name, python, seed, options.cache.resolve(), place)
                except RuntimeError as error:
                    print(f"{name}, seed {seed}: {error}")
                    continue
            turns[name].append(turn)
            print(turn, flush=True)
    print("\n| | lines | processor s | wall s | accuracy | clusters | purity |")
    print("|---|---|---|---|---|---|---|")
    for name, found in turns.items():
        lines = sum(count_lines((HERE / file).read_text()).code for file in FILES[name])
        medians = [
            statistics.median(turn[key] for turn in found) for key in ("processor", "seconds")
        ]
        cells = [f"{value:.1f}" for value in medians]
        for key, digits in (("accuracy", 3), ("clusters", 0), ("purity", 2)):
            cells.append(", ".join(f"{turn[key]:.{digits}f}" for turn in found))
        print(f"| {name} | {lines} | " + " | ".join(cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(turns, indent=1))


if __name__ == "__main__":
    main()
