"""Results match the committed hashes: runs of all methods, keys, suites, configurations.

The hashes of runs in ``benchmarks/equivalence.json`` hold on the platform that made them (its
processor, and its versions of torch, numpy and others; see ``fingerprint``). On other platforms a
few runs are done twice and have to be equal; keys, suites and configurations are compared
everywhere. After an intended change of results the file is written again, and the commit message
lists the differences::

    python benchmarks/equivalence.py write benchmarks/equivalence.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "equivalence.py"
COMMITTED = SCRIPT.with_suffix(".json")
FEW = "steady/casa,steady/fedavg,steady/cdfl,drift/panicle,special/concurrency"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def written(path: Path, *arguments: str) -> dict[str, Any]:
    done = script("write", path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_all_results_are_those_of_the_committed_hashes(tmp_path: Path) -> None:
    few = written(tmp_path / "few.json", "--only", FEW)
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if few["fingerprint"] != committed["fingerprint"]:
        # Other processors and versions round differently: only repeatability is tested.
        assert written(tmp_path / "again.json", "--only", FEW)["runs"] == few["runs"]
        done = script("static", COMMITTED)
    else:
        written(tmp_path / "all.json")
        done = script("compare", COMMITTED, tmp_path / "all.json")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_of_one_event_is_one_line(tmp_path: Path) -> None:
    content = written(tmp_path / "before.json", "--only", "steady/fedavg")
    content["runs"]["steady/fedavg"]["events"]["Evaluated"] = "0" * 24
    (tmp_path / "after.json").write_text(json.dumps(content), encoding="utf-8")
    done = script("compare", tmp_path / "before.json", tmp_path / "after.json")
    assert done.returncode == 1
    assert done.stdout == "steady/fedavg: events.Evaluated differs\n"


def test_hashes_tell_methods_apart_by_what_they_do(tmp_path: Path) -> None:
    names = ("steady/casa", "special/worker-processes", "steady/fedavg", "steady/fedprox")
    runs = written(tmp_path / "runs.json", "--only", ",".join(names))["runs"]
    casa, in_processes, fedavg, fedprox = (runs[name] for name in names)
    assert casa == in_processes
    # FedProx has the same clients in the same rounds,
    # but keeps their models nearer to the global one.
    assert fedavg["parts"]["updates"] == fedprox["parts"]["updates"]
    for name in ("models", "essential"):
        assert fedavg[name] != fedprox[name]


def test_a_case_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    done = script("write", tmp_path / "none.json", "--only", "fedavgg")
    assert done.returncode == 1
    assert done.stderr == "no case is called fedavgg\n"
