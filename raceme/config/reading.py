"""Files that somebody else may have made: read with a bound, and parsed without surprises.

What is no regular file would be waited for, or read, for ever; what is nested without end, or holds
a number of a million digits, ends a parser in other ways than by its own error.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raceme.config.errors import UserError

_MOST_BYTES = 64 << 20
_DEEPEST = 64
"""Tables in tables, and lists in lists: no file of ours has more than a handful."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes of a file's name and of a path, on Linux and macOS."""


class ReadingError(Exception):
    """A file or a text is not what it should be; the message is the end of a sentence."""


def read_text(path: Path, most: int = _MOST_BYTES, pipe: bool = False) -> str:
    """Read a text file.

    Parameters
    ----------
    path : Path
        The file.
    most : int
        Its largest size in bytes.
    pipe : bool
        A pipe will do, too, as a shell makes of ``<(command)``.

    Raises
    ------
    ReadingError
        It cannot be read, is no regular file, is too large, or is not in UTF-8.
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
    """Raise ReadingError if a path leads to a device or a pipe; OSError if it leads nowhere."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise ReadingError("it is a folder")
    if not stat.S_ISREG(mode) and not (pipe and stat.S_ISFIFO(mode)):
        raise ReadingError("it is no regular file")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises
    ------
    ReadingError
        It is none, or is nested too deeply.
    """
    tree: dict[str, Any] = _parsed(tomllib.loads, text)
    return tree


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises
    ------
    ReadingError
        It is none, or is nested too deeply.
    """
    return _parsed(json.loads, text)


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        tree = parse(text)
    except RecursionError:
        raise ReadingError("it is nested too deeply") from None
    # Not only of the format's own kind: a whole number may have too many digits.
    except ValueError as error:
        raise ReadingError(_short(error)) from None
    _check_depth(tree)
    return tree


def absolute(path: str | Path) -> Path:
    """Return a path from the root, with what ``~`` stands for.

    Raises
    ------
    UserError
        It is longer than any path can be, or holds what no path can.
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
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise UserError(
            f"{shown!r} is not a possible path: a name in it has at most {_LONGEST_NAME} bytes, "
            f"all of it {_LONGEST_PATH}."
        ) from None


def whole_path(text: object) -> str:
    """Return a path from the root as text; of no text none.

    Raises
    ------
    UserError
        It is no possible path.
    """
    return str(absolute(str(text))) if text else ""


def _check_depth(tree: Any) -> None:
    """Raise ReadingError if a tree is none that others may walk through by recursion."""
    level = [tree]
    for _ in range(_DEEPEST):
        inner = [list(node.values()) if isinstance(node, dict) else node for node in level]
        level = [leaf for node in inner if isinstance(node, list) for leaf in node]
        if not level:
            return
    raise ReadingError("it is nested too deeply")


def _short(error: ValueError) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}…"
