"""Errors with problem and remedy, and printable foreign text."""

from __future__ import annotations

import difflib
import json
import logging
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

# -----------------------------------------------------------------------------
# Text of unknown origin as one printable line.
# -----------------------------------------------------------------------------


def plain(text: str) -> str:
    r"""Return a text without characters that are unsafe in terminals and logs.

    Line breaks become blanks; control characters, changes of writing direction and surrogates
    become escapes, ``\x1b``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_plain_letter, text))


def _plain_letter(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape", "replace").decode("ascii")


LONGEST_LINE = 300
"""Maximum characters of a line of foreign text."""
_LONGEST_QUOTE = 60
"""Maximum characters of a quoted word."""


def shortened(text: str, most: int = 120) -> str:
    """Return the beginning of a text, with an ellipsis if it is cut."""
    return text if len(text) <= most else f"{text[:most]}…"


def printable(text: object, longest: int = LONGEST_LINE) -> str:
    r"""Return foreign text in printable form for logs and terminals.

    One short line: line breaks become blanks; control characters, changes of writing direction and
    surrogates become escapes, ``\x1b``.

    Parameters
    ----------
    text : object
        A text. Other objects are shown by their ``repr``, of which only the beginning is read.
    longest : int
        Maximum characters; omissions are marked by ``…``.
    """
    whole = text if isinstance(text, str) else _notation(text)
    # Escapes only lengthen the text, so the rest would be cut off anyway.
    line = plain(whole[: longest + 1]).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def one_line(error: object) -> str:
    """Return the message of an exception as one line."""
    return " ".join(str(error).split())


def plural(count: float, noun: str, several: str = "") -> str:
    """Return a number with its noun: ``"1 client"``, ``"2 clients"``; `several` is not noun + s."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def quoted(text: object) -> str:
    """Return one shortened word of foreign text; texts are quoted."""
    word = printable(text, _LONGEST_QUOTE)
    return f"'{word}'" if isinstance(text, str) else word


def _notation(value: object) -> str:
    try:
        return _SHORT.repr(value)
    # An exception in a value's repr must not end a run.
    except Exception:
        return f"<{type(value).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_LINE


_LONGEST_MESSAGE = 2000
"""Maximum characters of a message; Raceme's own are shorter."""

_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PlainFormatter(logging.Formatter):
    """A `logging.Formatter` for printable messages.

    Messages contain texts of devices, SuperLinks and apps, e.g. in exceptions. Such a text must
    neither control a terminal nor forge log lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the message without control characters, truncated."""
        record.message = printable(record.message, _LONGEST_MESSAGE)
        return super().formatMessage(record)

    def formatException(self, ei: _Error) -> str:  # noqa: N802
        """Return a traceback, each line of it printable."""
        lines = super().formatException(ei).split("\n")
        # Keep the indentation of lines.
        return "\n".join(
            line[: len(line) - len(line.lstrip(" "))] + printable(line, _LONGEST_MESSAGE)
            for line in lines
        )


class JsonFormatter(PlainFormatter):
    """Formats a record as one line of JSON.

    Parameters
    ----------
    **fields : str
        Fields of every line. A record adds its own by the attribute ``fields``, a mapping.
    """

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self.fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, message and the fields."""
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage(), _LONGEST_MESSAGE),
            **self.fields,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def about(device: str, **others: object) -> dict[str, dict[str, object]]:
    """Return the argument `extra` for a log record about a device."""
    return {"fields": {"device": device, **others}}


def show_log(stream: TextIO, formatter: logging.Formatter, level: int = logging.INFO) -> None:
    """Write Raceme's log lines to a stream only."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("raceme")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


# -----------------------------------------------------------------------------
# Errors with problem and remedy, and printable foreign text.
# -----------------------------------------------------------------------------


_DIGEST = re.compile(r"\bmain-[0-9a-f]{12}:(?=\w)")


class UserError(Exception):
    """A user's error; the message has the problem and the remedy.

    The command line prints the message without a traceback and exits with code 2.

    Parameters
    ----------
    message : str
        One printable line.
    snippet : str
        Lines to copy, appended unchanged.
    """

    def __init__(self, message: str, snippet: str = "") -> None:
        # Names of objects of scripts and notebooks contain a digest, which means nothing to the
        # user.
        text = _DIGEST.sub("", plain(message))
        super().__init__(f"{text}\n{snippet}" if snippet else text)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"raceme: {self}"]


class _OneLine(logging.Filter):
    """Reduces Flower's log of a ServerApp's UserError to its message.

    Flower logs the traceback, and then an exit code with a link. For Flower the run has failed
    anyway.
    """

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self._error = error
        self._is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record, possibly changed."""
        if record.exc_info and record.exc_info[1] is self._error:
            record.msg, record.args = str(self._error), ()
            record.exc_info = record.exc_text = None
            self._is_told = True
        return not (self._is_told and str(record.msg).startswith("Exit Code: "))


@contextmanager
def shown_by_flower() -> Iterator[None]:
    """Show a ServerApp's UserError as one line in Flower's runtime."""
    try:
        yield
    except UserError as error:
        logger = logging.getLogger("flwr")
        # Only one error, the last, ends the ServerApp: its filter replaces earlier ones.
        logger.filters = [one for one in logger.filters if not isinstance(one, _OneLine)]
        logger.addFilter(_OneLine(error))
        raise


_MANY = 8
"""Number of names from which on an error names a command that lists them instead."""


def unknown_name(kind: str, name: str, valid: Iterable[str], listed_by: str = "") -> UserError:
    """Build the error for a name that does not exist, with the nearest valid one.

    Parameters
    ----------
    kind : str
        Kind of the name, e.g. ``"strategy"``.
    name : str
        The name as the user typed it.
    valid : Iterable[str]
        All the names that exist.
    listed_by : str
        The command that lists the names; the message has it instead of a long list.
    """
    names, name = sorted(valid), str(name)
    nearest = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    every = f" Valid: {', '.join(names)}."
    if len(names) > _MANY and (listed_by or hint):
        every = f" `{listed_by}` lists them all." if listed_by else ""
    return UserError(f"Unknown {kind} '{shortened(name, 80)}'.{hint}{every}")


def check_known(kind: str, name: str, valid: Collection[str], listed_by: str = "") -> None:
    """Raise the error of :func:`unknown_name` for a name that does not exist."""
    if name not in valid:
        raise unknown_name(kind, name, valid, listed_by)


@contextmanager
def os_errors_as_user_errors(problem: str, end: str = ".") -> Iterator[None]:
    """Turn an OSError into a UserError that joins `problem`, the system's reason and `end`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{problem}: {error.strerror}{end}") from None
