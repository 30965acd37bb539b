"""Arrays of .npz files that strangers may have made: sizes are checked before memory is taken."""

from __future__ import annotations

import io
import math
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError  # noqa: N812

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from raceme.config.reading import ReadingError, check_regular
from raceme.config.room import check_room

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
