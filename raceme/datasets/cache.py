"""Arrays that took long to read, kept for the next time: decoded images, parsed text.

They are kept in ``$RACEME_CACHE``, or ``raceme`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, and not
beside the data, which may lie on a disk that cannot be written. A changed file, by its name, its
size or its time, is read anew. Removing the folder is safe at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raceme.config.errors import UserError

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
