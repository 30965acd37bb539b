"""Safe reading and parsing of files of unknown origin, and atomic writing.

Reading a non-regular file could block or never end. Deep nesting and numbers with a million digits
raise unusual errors in parsers; here every failure is a `ReadingError`.
"""

from __future__ import annotations

import json
import os
import resource
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raceme.core.errors import UserError, one_line, shortened

_MOST_BYTES = 64 << 20
_DEEPEST = 64
"""Maximum nesting; valid files have only a few levels."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Maximum bytes of a file name and a path on Linux and macOS."""


class ReadingError(Exception):
    """A file or text is invalid; the message is the end of a sentence."""


def read_text(path: Path, most: int = _MOST_BYTES, pipe: bool = False) -> str:
    """Read a text file.

    Parameters
    ----------
    most : int
        Maximum size in bytes.
    pipe : bool
        Whether a pipe is allowed, as of a shell's ``<(command)``.

    Raises
    ------
    ReadingError
        It is unreadable, not a regular file, too large, or not UTF-8.
    """
    try:
        check_regular(path, pipe)
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ReadingError(error.strerror or str(error)) from None
    except ValueError as error:
        raise ReadingError(str(error)) from None
    if len(content) > most:
        raise ReadingError(f"it is larger than {most >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadingError(f"it is no text in UTF-8 ({error.reason} at {error.start})") from None


def check_regular(path: Path, pipe: bool = False) -> None:
    """Raise ReadingError for a device or pipe; OSError for a missing file."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise ReadingError("it is a folder")
    if not stat.S_ISREG(mode) and not (pipe and stat.S_ISFIFO(mode)):
        raise ReadingError("it is not a regular file")


def check_folder(folder: Path, expected: str) -> None:
    """Raise UserError if a folder is missing; `expected` describes it."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; expected {expected}.")


Stamp = tuple[int, int, int]
"""Version of a file: time of change in ns, size in bytes, inode."""


def file_stamp(path: Path) -> Stamp | None:
    """Return the current version of a file; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises
    ------
    ReadingError
        It is invalid or nested too deeply.
    """
    tree: dict[str, Any] = _parsed(tomllib.loads, text)
    return tree


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises
    ------
    ReadingError
        It is invalid or nested too deeply.
    """
    return _parsed(json.loads, text)


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        tree = parse(text)
    except RecursionError:
        raise ReadingError("it is nested too deeply") from None
    # Parsers raise other errors besides their own, e.g. for numbers with too many digits.
    except ValueError as error:
        raise ReadingError(shortened(one_line(error), 200)) from None
    _check_depth(tree)
    return tree


def absolute(path: str | Path) -> Path:
    """Return an absolute path, with ``~`` expanded.

    Raises
    ------
    UserError
        It is longer than any path can be, or has characters that no path can have.
    """
    text = str(path)
    try:
        whole = Path(path).expanduser()
        parts = [os.fsencode(part) for part in whole.parts]
        if sum(map(len, parts)) + len(parts) > _LONGEST_PATH or "\0" in text:
            raise ValueError
        if any(len(part) > _LONGEST_NAME for part in parts):
            raise ValueError
        return whole.resolve()
    except (OSError, ValueError, RuntimeError):
        raise UserError(
            f"{shortened(text, 60)!r} is not a possible path: a name in it has at most "
            f"{_LONGEST_NAME} bytes, all of it {_LONGEST_PATH}."
        ) from None


def absolute_text(text: object) -> str:
    """Return an absolute path as text; an empty text stays empty.

    Raises
    ------
    UserError
        It is no possible path.
    """
    return str(absolute(str(text))) if text else ""


def _check_depth(tree: Any) -> None:
    """Raise ReadingError if a tree is nested too deeply for recursive functions."""
    level = [tree]
    for _ in range(_DEEPEST):
        inner = [list(node.values()) if isinstance(node, dict) else node for node in level]
        level = [leaf for node in inner if isinstance(node, list) for leaf in node]
        if not level:
            return
    raise ReadingError("it is nested too deeply")


# -----------------------------------------------------------------------------
# Atomic file writes.
# -----------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, which is renamed to `path` if the block succeeds.

    After an error or an interruption the temporary file is removed, and `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -----------------------------------------------------------------------------
# Checks of free memory before a large allocation.
# -----------------------------------------------------------------------------


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def check_memory(wanted: int, what: str) -> None:
    """Raise UserError if an allocation exceeds the free memory.

    Parameters
    ----------
    wanted : int
        Size in bytes.
    what : str
        Description, as the beginning of a sentence.

    Raises
    ------
    UserError
        There is not enough.
    """
    free = free_bytes()
    if wanted > free:
        raise UserError(f"{what} would take {shown(wanted)} of memory, and {shown(free)} are free.")


def free_bytes() -> int:
    """Return the memory available to this process, as reported by the system."""
    sizes = [*_machine_memory(), *_process_limits()]
    return min(sizes, default=1 << 62)


def shown(size: int) -> str:
    """Format a number of bytes: ``"1.5 GiB"``."""
    value = float(min(size, 10**30))
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} {_UNITS[-1]}"


def _machine_memory() -> list[int]:
    """Return the available memory of machine and container."""
    sizes = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                sizes.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        # macOS does not report free memory: the total is better than no bound.
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        if limit != "max":
            sizes.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass
    return sizes


def _process_limits() -> list[int]:
    """Return the memory left by limits of this process (`ulimit`, `--memory-limit`)."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return []
    size = os.sysconf("SC_PAGE_SIZE")
    sizes = []
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            sizes.append(max(0, limit - int(used) * size))
    return sizes
