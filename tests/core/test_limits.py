"""Hostile files and values are refused in one line, without allocating memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raceme.core.config import RunConfig, parse_assignment, read_toml
from raceme.core.errors import UserError
from raceme.core.files import (
    ReadingError,
    absolute,
    check_memory,
    free_bytes,
    parse_json,
    parse_toml,
    read_text,
    shown,
)
from raceme.datasets.partition import parse_groups
from raceme.experiments.jobs import Job
from raceme.experiments.results import read_comparison
from raceme.experiments.suites import load_suite
from raceme.fleet.device import HealthFile
from raceme.reporting.page import check_writable
from raceme.reporting.run_page import run_page
from raceme.simulation import executor_for, fleet
from raceme.strategies import IFCA, IFCAParameters
from raceme.strategies.casa.buffers import Sketches

DEEP = "[" * 100_000 + "]" * 100_000
SHALLOW = "[" * 200 + "]" * 200
"""Nesting that a parser accepts, but that may exceed Python's recursion limit elsewhere."""
LONG = "9" * 10_000


@pytest.mark.parametrize("text", [DEEP, SHALLOW, f"[{LONG}]"])
def test_unusual_parser_errors_are_errors_of_the_text(text: str) -> None:
    with pytest.raises(ReadingError, match=r"nested too deeply|4300 digits") as told:
        parse_json(text)
    assert len(str(told.value)) < 250
    with pytest.raises(ReadingError, match=r"nested too deeply|4300 digits"):
        parse_toml(f"a = {text}")
    assert parse_assignment(f"seed={text}") == ("seed", text)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.toml", read_toml),
        ("a.toml", load_suite),
        ("a.toml", lambda path: fleet(str(path), 4, 0)),
        ("compare.json", lambda path: read_comparison(path.parent)),
        ("summary.json", lambda path: run_page(path.parent, "")),
    ],
)
def test_files_are_read_with_a_bound(
    name: str, read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SHALLOW if name.endswith("json") else f"a = {DEEP}"
    with pytest.raises(UserError, match="nested too deeply"):
        read(written(tmp_path / "deep" / name, text))
    endless = tmp_path / "endless" / name
    endless.parent.mkdir()
    endless.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"not a regular file|has no summary\.json"):
        read(endless)
    if read is not load_suite:
        endless.unlink()
        os.mkfifo(endless)
        with pytest.raises(UserError, match=r"not a regular file|has no summary\.json"):
            read(endless)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ReadingError, match="larger than 64 MiB"):
        read_text(path)
    with pytest.raises(ReadingError, match="it is a folder"):
        read_text(tmp_path)


def test_a_pipe_of_a_shell_is_accepted_for_typed_files(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"seed = 3\n")
    os.close(writer)
    assert read_toml(Path(f"/dev/fd/{reader}"), pipe=True) == {"seed": 3}
    os.close(reader)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seed": 2**63}, "seed must be a number of 64 bits"),
        ({"seed": 10**400}, "seed must be a number of 64 bits"),
        ({"seed": LONG}, r"seed must be a whole number, got '9{79}…"),
        ({"max-updates": 2**64}, "max-updates must be a number of 64 bits"),
        ({"clients": 10**12}, "clients must be at most 1e\\+06"),
        ({"image-size": 10**9, "dataset": "image-folder"}, "image-size must be at most 8192"),
        ({"out": "x" * 300}, "is not a possible path"),
        ({"data-root": "x/" * 3000}, "is not a possible path"),
        ({"out": "a\0b"}, "out must be text that a file can hold"),
        ({"model": "\udcff"}, "model must be text that a file can hold"),
        ({"x" * 5000: 1}, "Unknown key 'x{80}…'"),
    ],
)
def test_values_that_no_type_can_hold_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        RunConfig.from_mapping(keys).with_absolute_paths()
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300


def test_the_longest_paths_are_possible() -> None:
    assert absolute("/" + "é" * 127).name == "é" * 127
    with pytest.raises(UserError, match="not a possible path"):
        absolute("/" + "é" * 128)


def test_memory_is_asked_for_before_it_is_taken() -> None:
    check_memory(1, "One byte")
    with pytest.raises(UserError, match=r"All of it would take 909 TiB of memory, and .* are free"):
        check_memory(10**15, "All of it")
    assert shown(1536) == "1.5 KiB"
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        assert free_bytes() <= 64 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_sizes_of_methods_are_bounded() -> None:
    reference = np.ones(1000, np.float32)
    with pytest.raises(UserError, match=r"sketch must be below the 1,000 weights.*1,000,000,000"):
        Sketches(reference, 10**9, 0)
    strategy = IFCA(IFCAParameters(k=10**12), seed=0)
    with pytest.raises(UserError, match=r"1,000,000,000,000 models of 1,000 weights would take"):
        strategy.initialize(reference)
    with pytest.raises(UserError, match=r"up to 1024, .*got '1000000'"):
        executor_for("raceme.client_app:app", "1000000", "cpu", False)
    with pytest.raises(UserError, match=r"groups must be .* more than 1,000"):
        parse_groups(",".join(["1e-6"] * 10**6))


def test_devices_are_not_replaced_by_files(tmp_path: Path) -> None:
    """Pages and health files are written by replacing the file of that name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="not a regular file"):
        check_writable(pipe)
    with pytest.raises(UserError, match="not a regular file"):
        HealthFile(pipe)
    assert pipe.is_fifo()


def test_a_health_file_whose_folder_is_gone_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    file = HealthFile(tmp_path / "in" / "health")
    (tmp_path / "in").rmdir()
    file.answered()


def test_a_summary_that_is_none_makes_a_run_unfinished(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"out": str(tmp_path)})
    (tmp_path / "summary.json").write_text(SHALLOW)
    assert Job(None, 0, config).summary() is None  # type: ignore[arg-type]
