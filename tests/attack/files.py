"""Malformed bytes: data, checkpoints, stores, models, TOML, messages."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.numpy import save_file

from raceme.core.config import RunConfig, read_toml, write_toml
from raceme.datasets import npz
from raceme.flower.app import App
from raceme.flower.link_state import LinkState
from raceme.flower.messages import SERVER_NODE_ID, encode, identify_process
from raceme.records.folder import read_model
from raceme.records.record import read_run
from raceme.records.store import RunStore
from raceme.runs.checkpoints import DamagedError, read_tree, write_tree

from .case import refused_in_a_line


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a damaged file: cut, overwritten, lengthened, or with flipped bits."""
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


def _model(rng: random.Random, folder: Path) -> None:
    """Read a damaged file of a model."""
    path = folder / "model.safetensors"
    save_file({"w": np.ones((3, 4), np.float32), "b": np.zeros(4)}, path, metadata={"a": "b"})
    path.write_bytes(damaged(path.read_bytes(), rng))
    with refused_in_a_line():
        read_model(path)


def _toml(rng: random.Random, folder: Path) -> None:
    """Read a damaged configuration."""
    path = folder / "config.toml"
    write_toml({"strategy": "fedasync", "clients": 4, "lr": 0.1, "fedasync.alpha": 0.6}, path)
    path.write_bytes(damaged(path.read_bytes(), rng))
    with refused_in_a_line():
        RunConfig.from_mapping(read_toml(path))


def _message(rng: random.Random, _folder: Path) -> None:
    """Take damaged bytes as a device's reply, which must become an error reply."""
    state = LinkState(App("tests/none", "1.0.0", b"a bundle"))
    node = state.register(b"key")
    state.greet(node)
    assert state.activate(node, 30.0, "0.2.0/a")
    identify_process(state.run_id, SERVER_NODE_ID)
    content = RecordDict(
        {"arrays": ArrayRecord([np.ones((2, 3), np.float32)]), "config": ConfigRecord({"a": 1})}
    )
    sent = state.push(Message(content, node, "train", ttl=600.0))
    assert sent is not None
    found = state.next_for(node, "")
    assert found is not None
    identify_process(state.run_id, node)
    reply = encode(Message(content, reply_to=found[0]))
    body = damaged(reply, rng)
    assert state.accept(node, sent, body)
    (taken,) = state.take([sent])
    assert taken.metadata.reply_to_message_id == sent
    assert taken.metadata.src_node_id in (node, SERVER_NODE_ID)


_PLAYS = {
    "npz": _npz,
    "checkpoint": _checkpoint,
    "store": _store,
    "model": _model,
    "toml": _toml,
    "message": _message,
}
SUBJECTS = tuple(_PLAYS)


def attack(subject: str, rng: random.Random, folder: Path) -> None:
    """Play some files of one kind."""
    for index in range(20):
        inner = folder / str(index)
        inner.mkdir()
        _PLAYS[subject](rng, inner)
