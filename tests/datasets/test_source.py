"""Sources: a user's own function, and hostile files."""

from __future__ import annotations

import dataclasses
import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets import source as archive
from raceme.datasets.images import images, read_tree
from raceme.datasets.source import Dataset, Loaded, read_arrays

X = np.zeros((6, 2), np.float32)
Y = np.array([0, 1, 2, 0, 1, 2], np.int64)
HALVES = (np.arange(3), np.arange(3, 6))
GOOD = Dataset(X, Y, 3, users=HALVES, test_users=HALVES, groups=(0, 1))


def load(dataset: Dataset, clients: int = 2) -> Dataset:
    return Loaded("own:data", lambda config: dataset).load(RunConfig(clients=clients))


def test_arrays_that_fit_are_used_and_their_clients_counted() -> None:
    assert load(GOOD) is GOOD
    assert Loaded("own:data", lambda config: GOOD).count_clients(RunConfig()) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": X.tolist()}, "numpy arrays, got list and ndarray"),
        ({"y": Y[:5]}, "x has 6 samples and y 5"),
        ({"y": Y.astype(np.int32)}, "dtype int64 .* got int32"),
        ({"num_classes": 2}, "from 0 to 1, got 0 to 2"),
        ({"y": Y - 1}, "from 0 to 2, got -1 to 1"),
        ({"x": np.where(X == 0, np.nan, X)}, "not finite"),
        ({"groups": (0,)}, "groups has a length of 1, and there are 2 users"),
        ({"test_users": HALVES[:1]}, "test_users has a length of 1, and there are 2 users"),
        ({"users": (np.arange(3), np.arange(3, 7))}, "samples 3 to 6, of 6"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"own:data.*{said}"):
        load(dataclasses.replace(GOOD, **changes))


def test_a_partition_of_data_that_come_with_clients_is_refused() -> None:
    source = Loaded("own:data", lambda config: GOOD)
    with pytest.raises(UserError, match="partition is not read with dataset own:data"):
        source.load(RunConfig(clients=2, partition="iid"))
    others = dataclasses.replace(GOOD, users=None, test_users=None, groups=None)
    assert Loaded("own:data", lambda config: others).load(RunConfig(clients=2, partition="iid"))


def test_more_clients_than_the_data_have_are_refused() -> None:
    with pytest.raises(UserError, match="has 2 clients, and clients is 3"):
        load(GOOD, clients=3)


# Untrusted data files: errors are one line, and no memory is allocated.


INPUTS = np.random.default_rng(0).random((8, 64)).astype(np.float32)
LABELS = np.arange(8) % 4
PLAIN = "{{'descr': '<f4', 'fortran_order': False, 'shape': ({}), }}"


def stored(array: NDArray[np.generic]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def headed(text: str, version: int = 1) -> bytes:
    """Return an array file with a header and no data."""
    size = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode() + b"\n"


def npz(path: Path, **members: bytes) -> Path:
    four = {"x_train": INPUTS, "y_train": LABELS, "x_test": INPUTS, "y_test": LABELS}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {**{n: stored(a) for n, a in four.items()}, **members}.items():
            file.writestr(f"{name}.npy", content)
    return path


def load_files(path: Path) -> None:
    keys = {"dataset": "npz", "clients": 1, "data-file": str(path)}
    datasets.all_clients(RunConfig.from_mapping(keys))


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (headed(PLAIN.format("268435456, 1024,")), "size of x_train is not that of its header"),
        (headed(PLAIN.format(f"{2**63 - 1}, 2,")), "size of x_train is not that of its header"),
        (headed(PLAIN.format(f"{10**30}, 2,")), "size of x_train is not that of its header"),
        (headed(PLAIN.format("-1, 4,")), "size of x_train is not that of its header"),
        (
            headed("{'descr': '<U1000000000', 'fortran_order': False, 'shape': (8,), }"),
            "dtype|size of",
        ),
        (headed("{'descr': '|V9', 'fortran_order': False, 'shape': (8,), }"), "neither numbers"),
        (headed("{'descr': '|O', 'fortran_order': False, 'shape': (8,), }"), "neither numbers"),
        (headed("(" * 9000 + ")" * 9000), "header"),
        (headed("-" * 9000 + "1"), "header"),
        (headed("import os"), "header"),
        (headed("{'descr': ("), "header"),
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b" " * 1000, "header"),
        (b"\x93NUMPY\x03\x00" + bytes(100), r"format 3\.0"),
        (b"hello", "magic"),
        (b"", "magic"),
        (stored(INPUTS)[:-50], "size of x_train"),
        (stored(INPUTS) + b"more", "size of x_train"),
    ],
)
def test_a_false_header_is_found_before_memory_is_allocated(
    member: bytes, message: str, tmp_path: Path
) -> None:
    path = npz(tmp_path / "a.npz", x_train=member)
    # Imports of the first call are not counted.
    with pytest.raises(UserError, match=message):
        load_files(path)
    tracemalloc.start()
    with pytest.raises(UserError, match=message) as told:
        load_files(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(8, np.inf), "must hold whole numbers"),
        (np.array([0, 1, 2, 3, 0, 1, 2, 10**9]), "below 100,000; got 1000000000"),
        (np.full(8, 2**64 - 1, np.uint64), "below 100,000; got 18446744073709551615"),
    ],
)
def test_impossible_labels_are_refused(
    labels: NDArray[np.generic], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_files(npz(tmp_path / "a.npz", y_train=stored(labels)))
    with pytest.raises(UserError, match="at most 100,000; got 1000000000000"):
        load_files(npz(tmp_path / "b.npz", num_classes=stored(np.array(10**12))))


def test_an_array_larger_than_the_memory_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte of a file may unpack to more than the memory."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((64, 1 << 16), np.float32))
    assert path.stat().st_size < 1 << 17
    monkeypatch.setattr("raceme.core.files.free_bytes", lambda: 20 << 20)
    with pytest.raises(UserError, match=r"x in .*a\.npz would take 32 MiB of memory, and 20 MiB"):
        read_arrays(path)
    monkeypatch.undo()
    assert read_arrays(path, ["x"])["x"].shape == (64, 1 << 16)
    assert archive.read_arrays(path, ["y"]) == {}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "dangling", "array"])
def test_a_path_that_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "dangling": lambda: path.symlink_to("nowhere"),
        "array": lambda: path.write_bytes(stored(INPUTS)),
    }[kind]()
    with pytest.raises(UserError, match=r"not a regular|a folder|no data file|a single array"):
        load_files(path)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + data + chunk(b"IEND", b"")


BOMB = b"".join(chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20))) for _ in range(100))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "bad", [png(2**31 - 1, 2**31 - 1), png(30_000, 30_000), png(0, 0), png(8, 8, BOMB), "pipe", ""]
)
def test_an_image_that_is_a_bomb_or_no_file_is_one_line(
    bad: bytes | str, first: bool, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "5.png")
    path = tmp_path / "a" / ("0.png" if first else "9.png")
    if isinstance(bad, bytes):
        path.write_bytes(bad)
    elif bad:
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    with pytest.raises(UserError, match=r"Cannot read (the image )?/.*\.png: ") as told:
        images(read_tree(tmp_path), 8)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "y", ["Infinity", "NaN", "1e30", "1e9", "9" * 30, "9" * 5000, "[" * 70 + "1" + "]" * 70]
)
def test_labels_of_leaf_are_those_of_a_possible_model(y: str, tmp_path: Path) -> None:
    (tmp_path / "all_data").mkdir()
    text = f'{{"user_data": {{"a": {{"x": [[1], [2], [3]], "y": [1, {y}, 0]}}}}}}'
    (tmp_path / "all_data" / "a.json").write_text(text)
    keys = {"dataset": "leaf", "clients": 1, "data-root": str(tmp_path)}
    with pytest.raises(UserError, match=r"a\.json") as told:
        datasets.all_clients(RunConfig.from_mapping(keys))
    assert len(str(told.value)) < 500
