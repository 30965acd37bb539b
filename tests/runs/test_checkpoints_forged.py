"""Checkpoints of other versions, and forged ones, are refused in one line."""

from __future__ import annotations

import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raceme import __version__
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.records.store import read_events
from raceme.runs.checkpoints import STATE, can_resume, read_tree, write_tree
from raceme.runs.experiment import resolve, simulate

KEYS = {"clients": 3, "groups": "0.5,0.5", "workers": "0", "checkpoint-every": 4, "eval-every": 6}
LIMIT = {"max-updates": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with one checkpoint."""
    out = tmp_path_factory.mktemp("finished") / "out"
    simulate(RunConfig.from_mapping({**KEYS, **LIMIT, "out": str(out)}))
    newest = max((out / "checkpoint").iterdir())
    for path in (out / "checkpoint").iterdir():
        if path != newest:
            path.unlink()
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def checkpoint_of(out: Path) -> Path:
    (path,) = (out / "checkpoint").iterdir()
    return path


def resume(out: Path, updates: int = 10) -> None:
    simulate(RunConfig.from_mapping({**KEYS, "max-updates": updates, "resume": str(out)}))


def refusal(out: Path) -> str:
    """Resume, and return the one-line refusal; check that the run is unchanged."""
    before = read_events(out)
    with pytest.raises(UserError) as told:
        resume(out)
    assert read_events(out) == before
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 1000
    return str(told.value)


def rewrite(out: Path, change: Callable[[Any, dict[str, str]], Any]) -> None:
    path = checkpoint_of(out)
    tree, note = read_tree(path)
    write_tree(path, change(tree, note) or tree, note)


def test_a_checkpoint_of_another_format_is_refused_and_says_who_wrote_it(out: Path) -> None:
    rewrite(out, lambda _, note: note.update({"raceme": "9.1", "state": str(STATE + 1)}))
    assert (
        f"its state has format {STATE + 1} and is of Raceme 9.1; Raceme {__version__} reads format "
        f"{STATE}: resume it with the version that wrote it"
    ) in refusal(out)
    rewrite(out, lambda _, note: note.pop("state") and None)
    assert "its state has no format" in refusal(out)
    config = resolve(RunConfig.from_mapping({**KEYS, **LIMIT}))
    assert not can_resume(out, config)
    rewrite(out, lambda _, note: note.update(state=str(STATE)))
    assert can_resume(out, config)


def test_a_checkpoint_of_another_version_with_the_same_format_is_used_and_reported(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("raceme").propagate = True
    caplog.set_level(logging.INFO)
    rewrite(out, lambda _, note: note.update(raceme="0.0.9"))
    resume(out)
    assert f"The checkpoint is of Raceme 0.0.9, this is {__version__}" in caplog.text


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = b'{"tree": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(struct.pack("<Q", 2**60) + b"{}"),
        lambda path: path.write_bytes(header(b"[" * 200_000)),
        lambda path: path.write_bytes(header(HUGE)),
    ],
)
def test_an_invalid_checkpoint_is_passed_over(make: Callable[[Path], Any], out: Path) -> None:
    path = checkpoint_of(out)
    path.unlink()
    make(path)
    assert "it is damaged (" in refusal(out)


def deep(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def put(*way: Any, value: Any) -> Callable[[Any, Any], Any]:
    """Return a function that replaces a value in a tree."""

    def change(tree: Any, _: Any) -> None:
        for step in way[:-1]:
            tree = tree[step]
        tree[way[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda *_: [1],
        lambda *_: {"config": {}},
        put("events", value=-1),
        put("events", value="many"),
        put("events", value=2**80),
        put("wall-time", value=float("nan")),
        put("config", value=None),
        put("config", value={"x" * 9000: "y" * 9000}),
        put("strategy", value=[]),
        put("strategy", value=deep(100)),
        put("strategy", "rng", value={"bit_generator": "MT19937"}),
        put("strategy", "clusters", value=np.zeros(3)),
        put("strategy", "clusters", value={}),
        put("strategy", "progress", "updates", value="8"),
        put("strategy", "progress", "updates", value=8.5),
        put("strategy", "state", value={"clients": 3}),
        put("strategy", "state", "clients", value={"a": 1}),
        put("strategy", "state", "start", value="x"),
        put("strategy", "state", "reference", value=np.zeros(3, np.int8)),
        put("grid", value={}),
        put("grid", "queue", value=None),
        put("grid", "clients", value={"99": {}}),
        put("grid", "pending", value=[{"message": 1}]),
        put("grid", "arrived", value=[[]]),
    ],
)
def test_a_forged_checkpoint_is_refused(change: Callable[[Any, Any], Any], out: Path) -> None:
    rewrite(out, change)
    assert refusal(out).startswith(("The checkpoint ", "There is no", "The run ", f"{out}"))
