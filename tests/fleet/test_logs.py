"""The logs of `raceme up`: all lines in files, on the terminal those that a person reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from raceme.fleet.testbed import Logs, readable

STAMP = "2026-11-23 13:54:28,605"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{STAMP} INFO online at 127.0.0.1:9092 as node 5", "online at 127.0.0.1:9092 as node 5"),
        (f"{STAMP} INFO run 12: train task 3: done in 0.12 s, sent in 0.01 s", None),
        (f"{STAMP} INFO run 12: query: done in 8.33 s, sent in 0.01 s", None),
        (f"{STAMP} WARNING cannot be reached", "WARNING: cannot be reached"),
        (f"{STAMP} ERROR no data", "ERROR: no data"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("update    1  client-0  cluster 0", "update    1  client-0  cluster 0"),
    ],
)
def test_routine_is_left_out_and_trouble_is_not(line: str, shown: str | None) -> None:
    assert readable(line) == shown


def test_files_have_every_line_once_the_folder_is_the_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    logs = Logs(out)
    logs.write("serve", "first")
    assert not out.exists()
    out.mkdir()
    (out / "run.sqlite").touch()
    logs.write("device 0", "second")
    logs.write("serve", "third")
    found = {path.name: path.read_text() for path in (out / "logs").iterdir()}
    assert found == {"serve.log": "first\nthird\n", "device-0.log": "second\n"}
