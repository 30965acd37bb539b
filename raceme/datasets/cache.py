"""Arrays that took long to read, kept for the next time: decoded images, parsed text.

They are kept in ``$RACEME_CACHE``, or ``raceme`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, and not
beside the data, which may lie on a disk that cannot be written. A changed file, by its name, its
size or its time, is read anew. Removing the folder is safe at any time.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError  # noqa: N812

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from raceme.core.errors import UserError
from raceme.core.files import ReadingError, check_regular, check_room
from raceme.core.registry import explained

log = logging.getLogger("raceme")

Arrays = Mapping[str, NDArray[Any]]


def cached(
    name: str, files: Sequence[Path], settings: Sequence[object], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays that `build` makes of some files, from the cache if they are there.

    Parameters
    ----------
    name : str
        What the arrays are, for the name of their folder.
    files : Sequence[Path]
        The files that `build` reads.
    settings : Sequence[object]
        Whatever else decides the outcome.
    build : Callable
        Reads the files.

    Returns
    -------
    Mapping[str, NDArray]
        Read-only; from the cache they are mapped, so that processes share the memory.
    """
    folder = cache_folder() / f"{name}-{_digest(files, settings)}"
    found = _load(folder)
    if found is not None:
        return found
    built = build()
    try:
        _store(folder, built)
    except OSError as error:
        log.warning("%s could not be cached in %s: %s", name, folder, error)
        return built
    return _load(folder) or built


def cache_folder() -> Path:
    """Return the folder of the cache."""
    own = os.environ.get("RACEME_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "raceme"


def _digest(files: Sequence[Path], settings: Sequence[object]) -> str:
    digest = hashlib.sha256(repr(list(settings)).encode())
    for file in files:
        try:
            stat = os.stat(file)
        except OSError as error:
            raise UserError(f"Cannot read {file}: {error.strerror}.") from None
        # Not Path.resolve, which takes longer than all the rest for tens of thousands of files.
        path = os.path.abspath(file)
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _load(folder: Path) -> Arrays | None:
    """Return what a folder of the cache holds; None if there is none, or it is damaged."""
    if not folder.is_dir():
        return None
    try:
        # The view is a plain array that keeps the mapping: no special type leaves this module.
        return {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for path in folder.glob("*.npy")
        }
    except (OSError, ValueError, EOFError):
        log.warning("the cache in %s is damaged and is made again", folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _store(folder: Path, arrays: Arrays) -> None:
    """Write a folder of arrays atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, values in arrays.items():
            np.save(partial / f"{name}.npy", values, allow_pickle=False)
        # Another process may have been first; what it made is as good.
        if not folder.exists():
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -----------------------------------------------------------------------------
# Arrays of .npz files that strangers may have made: sizes are checked before memory is taken.
# -----------------------------------------------------------------------------


_MAGIC = b"\x93NUMPY"
_HEADER = 65_536
"""Bytes at the beginning of an array in which its header must end; plain ones have about 100."""
_KINDS = "biufUS"
"""Kinds of numbers and text: no objects, which would have to be unpickled, and no records."""
_COPIES = 2
"""The array as it is stored, and in the type that is needed."""


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file.

    Parameters
    ----------
    path : Path
        The file.
    names : Collection[str], optional
        Those that are wanted; all if not given. What is not there is left out.

    Raises
    ------
    ReadingError
        It is no such file, or is damaged.
    UserError
        An array is larger than the memory that is free.
    OSError
        It cannot be opened.
    """
    check_regular(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            raise ReadingError("it holds a single array and is no .npz archive")
    # numpy and zipfile raise whatever they come across first in a file that is not their own.
    try:
        with ZipFile(path) as archive:
            members = {
                info.filename.removesuffix(".npy"): info
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
            wanted = [name for name in members if names is None or name in names]
            return {name: _read(path, archive, members[name]) for name in wanted}
    except (BadZipFile, EOFError, ValueError, TypeError, NotImplementedError) as error:
        raise ReadingError(" ".join(str(error).split())[:200] or "it is damaged") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError, LookupError) as error:
        raise ReadingError(f"an array's header is malformed ({type(error).__name__})") from None
    except (RuntimeError, ZlibError) as error:
        raise ReadingError(f"it is damaged ({' '.join(str(error).split())[:200]})") from None


def _read(path: Path, archive: ZipFile, info: Any) -> NDArray[Any]:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        start = io.BytesIO(member.read(_HEADER))
    shape, dtype = _header(start)
    if dtype.kind not in _KINDS:
        raise ReadingError(f"{name} holds neither numbers nor text but {dtype}")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start.tell() + size != info.file_size:
        raise ReadingError(f"the size of {name} is not that of its header, shape {shape}")
    check_room(_COPIES * size, f"{name} in {path}")
    with archive.open(info) as member:
        array: NDArray[Any] = npy.read_array(member, allow_pickle=False)
    return array


def _header(start: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(start)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(start)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(start)
    else:
        raise ReadingError(f"an array has format {version[0]}.{version[1]}; 1.0 and 2.0 are known")
    return shape, dtype


# -----------------------------------------------------------------------------
# Importing torchvision where its compiled operators do not match the installed torch.
#
# torch's CPU wheel together with the package index's torchvision is such a pair: torchvision's
# operators are built for CUDA, are not loaded, and ``import torchvision`` fails when it declares
# their shapes for the compiler. Datasets and transforms need no operators, so that declaration
# is
# left out.
# -----------------------------------------------------------------------------


_DECLARATIONS = "torchvision._meta_registrations"

Loaded = TypeVar("Loaded")


def import_datasets() -> ModuleType:
    """Return the module ``torchvision.datasets``.

    Raises
    ------
    UserError
        It is not installed.
    """
    try:
        return without_operators(lambda: import_module("torchvision.datasets"))
    except ModuleNotFoundError as error:
        raise explained(error) from None


def without_operators(load: Callable[[], Loaded]) -> Loaded:
    """Return what imports something that may import torchvision; try again if just that fails.

    Parameters
    ----------
    load : Callable
        Does the import.

    Raises
    ------
    Exception
        Whatever the import raises for another reason.
    """
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    # The failed attempt has left half of the package behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules[_DECLARATIONS] = ModuleType(_DECLARATIONS)
    return load()
