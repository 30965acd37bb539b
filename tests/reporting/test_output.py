"""Output errors never end a process: closed pipes, full disks, terminals without Unicode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STEP = """
import sys
from raceme.cli import keep_output
keep_output()
{body}
sys.stdout.flush()
print("the end", file=sys.stderr)
"""
MUCH = 'for n in range(20000): print("line", n)'


def python(body: str, redirected: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines in a new process, started by a shell with some redirection."""
    command = f"{sys.executable} -c '{STEP.format(body=body)}' {redirected}"
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=60,
    )


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    ended = python(MUCH, "| head -1; exit ${PIPESTATUS[0]}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "line 0\n", "the end\n")


def test_a_full_disk_is_said_once() -> None:
    ended = python(MUCH, "> /dev/full")
    lines = ended.stderr.splitlines()
    assert lines == ["raceme: no more output is shown: No space left on device.", "the end"]
    assert ended.returncode == 0


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_letters_that_a_terminal_lacks_are_replaced(environment: dict[str, str]) -> None:
    body = 'print("t = 1 s \\u00b7 \\u2192"); print("\\u2192", file=sys.stderr)'
    ended = python(body, **environment)
    assert (ended.returncode, ended.stdout) == (0, "t = 1 s ? ?\n")
    assert ended.stderr == "\\u2192\nthe end\n"


def test_files_do_not_take_the_place_of_closed_output(tmp_path: Path) -> None:
    """Otherwise a library that prints to descriptor 1 would write into the first opened file."""
    kept = tmp_path / "kept"
    body = f'file = open("{kept}", "w"); import os; print("a"); os.write(1, b"junk"); file.close()'
    ended = python(body, ">&- <&-")
    assert (ended.returncode, ended.stderr) == (0, "the end\n")
    assert kept.read_text() == ""


WAITED_FOR = """
import os
import select

os.set_blocking(1, False)
wait = select.select


def told(*given):
    open("{gate}", "w").close()
    return wait(*given)


select.select = told
"""


def test_a_reader_that_is_slow_loses_nothing_of_a_pipe_that_does_not_wait(tmp_path: Path) -> None:
    """The reader starts when the writer waits for it, or after ten seconds."""
    gate = tmp_path / "gate"
    body = f'{WAITED_FOR.format(gate=gate)}\n{MUCH}\nprint("last")'
    begin = f"for i in $(seq 200); do [ -e {gate} ] && break; sleep 0.05; done"
    ended = python(body, f"| ({begin}; cat)")
    assert ended.stdout.splitlines()[-1] == "last"
    assert len(ended.stdout.splitlines()) == 20_001
