"""Files that are not what they should be: data, checkpoints, stores."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np

from raceme.datasets import npz
from raceme.records.record import read_run
from raceme.records.store import RunStore
from raceme.runs.checkpoints import DamagedError, read_tree, write_tree

from .case import refused_in_a_line


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file that was cut, overwritten, or had bits flipped, or was lengthened."""
    data = bytearray(data)
    how = rng.randrange(6)
    if how == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if how == 1:
        return bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 8, 100])))
    if how == 2:
        place = rng.randrange(len(data))
        return bytes(data[:place] + bytes(rng.randrange(1, 30)) + data[place:])
    for _ in range(rng.choice([1, 3, 50])):
        place = rng.randrange(min(len(data), 300) if how == 3 else len(data))
        data[place] ^= 1 << rng.randrange(8)
    return bytes(data)


def _npz(rng: random.Random, folder: Path) -> None:
    """Read a damaged or forged archive of samples."""
    count = rng.choice([0, 1, 5])
    shape = rng.choice([(count, 3), (count,), (count, 0), (count, 2, 2, 2), ()])
    dtype = rng.choice(["f4", "f8", "f2", "i8", "u1", "b1", "U3", "c8", "M8[s]"])
    with np.errstate(all="ignore"):
        values = np.full(shape, rng.choice([0, 1, 5])).astype(dtype)
    labels = np.full(count, rng.choice([0, 1, -1, 2**40, np.nan, np.inf]))
    arrays = {"x_train": values, "y_train": labels, "x_test": values, "y_test": labels}
    if rng.random() < 0.3:
        arrays[rng.choice([*arrays, "num_classes"])] = np.array(rng.choice([0, -1, 2**62, 1e300]))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path = folder / "data.npz"
    data = buffer.getvalue()
    path.write_bytes(damaged(data, rng) if rng.random() < 0.6 else data)
    with refused_in_a_line():
        npz.read(path)


def _checkpoint(rng: random.Random, folder: Path) -> None:
    """Read a damaged checkpoint."""
    path = folder / "00000001.safetensors"
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": [1, "x", None, b"\0\xff"], "c": {"d": 0.5}}
    write_tree(path, tree, {"note": "n"})
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, rng))
    with refused_in_a_line(DamagedError):
        found, _ = read_tree(path)
        assert found["b"] == tree["b"], "a damaged checkpoint was taken"


def _store(rng: random.Random, folder: Path) -> None:
    """Read a run whose store was damaged."""
    with RunStore(folder):
        pass
    path = folder / "run.sqlite"
    path.write_bytes(damaged(path.read_bytes(), rng))
    for beside in folder.glob("run.sqlite-*"):
        beside.unlink()
    with refused_in_a_line():
        read_run(folder)


_PLAYS = {"npz": _npz, "checkpoint": _checkpoint, "store": _store}
SUBJECTS = tuple(_PLAYS)


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Play some files of a kind."""
    for index in range(20):
        inner = folder / str(index)
        inner.mkdir()
        _PLAYS[subject](rng, inner)
