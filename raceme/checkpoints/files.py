"""Trees of plain values and arrays in one safetensors file, written atomically.

A tree consists of dicts with text keys, lists, numbers, text, bytes, booleans, None and numpy
arrays. Arrays and bytes are tensors of the file, everything else is JSON in one more tensor.
Nothing is ever unpickled: a file made to do harm can at most be refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from raceme.config.reading import ReadingError, check_regular, parse_json
from raceme.config.room import check_room
from raceme.records.files import atomic_write

FORMAT = "raceme-checkpoint-1"

_TREE = "tree"
"""Name of the tensor with the JSON; arrays are named by their number."""
_HASH = "sha256"
_MARK = "$"
"""Begins the keys that stand for something; one that a person chose is written with another."""
_ARRAY, _BYTES = "$array", "$bytes"

_UNREADABLE = (OSError, ReadingError, SafetensorError, ValueError, TypeError, KeyError)

_Array = NDArray[np.generic]


class DamagedError(Exception):
    """A file does not hold what was written to it; the message says how that shows."""


def write_tree(path: Path, tree: Any, note: Mapping[str, str]) -> None:
    """Write a tree durably: after this it survives a loss of power; before, nothing is there.

    What occurs in the tree several times, as the same object, is written once.

    Parameters
    ----------
    path : Path
        The file; its folder is made if need be.
    tree : Any
        What to write.
    note : Mapping[str, str]
        Kept beside the tree, in the header of the file.

    Raises
    ------
    TypeError
        The tree holds something else.
    """
    packer = _Packer()
    text = json.dumps(packer.pack(tree)).encode("ascii")
    tensors = {_TREE: np.frombuffer(text, np.uint8), **packer.tensors}
    metadata = {**note, "format": FORMAT}
    metadata[_HASH] = _digest(metadata, tensors)
    with atomic_write(path) as file:
        save_file(tensors, file, metadata=metadata)
        _flush(file)
    _flush(path.parent)


def read_tree(path: Path) -> tuple[Any, dict[str, str]]:
    """Read what :func:`write_tree` wrote: the tree and the note.

    Raises
    ------
    DamagedError
        The file is not as it was written, or was written by something else.
    """
    try:
        check_regular(path)
        check_room(path.stat().st_size, f"The checkpoint {path}")
        # It has found that the sizes which the header states are those of the file.
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except _UNREADABLE as error:
        raise DamagedError(" ".join(str(error).split()) or type(error).__name__) from None
    if metadata.get("format") != FORMAT:
        raise DamagedError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.pop(_HASH, None) != _digest(metadata, tensors):
        raise DamagedError("its content is not what was written")
    del metadata["format"]
    try:
        return _unpack(parse_json(tensors[_TREE].tobytes()), tensors, {}), metadata
    # The hash keeps accidents away; who means harm can make one.
    except (ReadingError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"its tree cannot be read: {error}") from None


class _Packer:
    """Takes arrays and bytes out of a tree.

    Attributes
    ----------
    tensors : dict[str, ndarray]
        The arrays by their number.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, _Array] = {}
        self._numbers: dict[object, int] = {}

    def pack(self, value: Any) -> Any:
        """Return a tree that JSON can hold."""
        if isinstance(value, dict):
            return {_escaped(key): self.pack(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.pack(inner) for inner in value]
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._number(_identity(value), value)}
        if isinstance(value, bytes):
            return {_BYTES: self._number(id(value), np.frombuffer(value, np.uint8))}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"cannot keep a {type(value).__name__} in a checkpoint")

    def _number(self, identity: object, array: _Array) -> int:
        if identity not in self._numbers:
            self._numbers[identity] = len(self.tensors)
            # `ascontiguousarray` makes one dimension of none.
            plain = np.ascontiguousarray(array).reshape(array.shape)
            self.tensors[str(len(self.tensors))] = plain
        return self._numbers[identity]


def _identity(array: _Array) -> object:
    """Return what two arrays have in common that show the same memory in the same way."""
    address = array.__array_interface__["data"][0]
    return address, array.shape, array.strides, array.dtype.str


def _escaped(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"cannot keep a dict with the key {key!r} in a checkpoint")
    return _MARK + key if key.startswith(_MARK) else key


def _unpack(value: Any, tensors: Mapping[str, _Array], known: dict[int, bytes]) -> Any:
    """Put arrays and bytes back; the same bytes become the same object again."""
    if isinstance(value, list):
        return [_unpack(inner, tensors, known) for inner in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return tensors[str(value[_ARRAY])]
    if _BYTES in value:
        number = value[_BYTES]
        if number not in known:
            known[number] = tensors[str(number)].tobytes()
        return known[number]
    return {key.removeprefix(_MARK): _unpack(inner, tensors, known) for key, inner in value.items()}


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, _Array]) -> str:
    digest = hashlib.sha256()
    for part in _parts(metadata, tensors):
        digest.update(part)
    return digest.hexdigest()


def _parts(metadata: Mapping[str, str], tensors: Mapping[str, _Array]) -> Iterator[Any]:
    yield json.dumps(dict(metadata), sort_keys=True).encode("ascii")
    for name in sorted(tensors):
        array = tensors[name]
        yield json.dumps([name, array.dtype.str, list(array.shape)]).encode("ascii")
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
