"""Errors whose text tells the user what is wrong, and what to do instead."""

from __future__ import annotations

import difflib
import logging
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

# -----------------------------------------------------------------------------
# Text of unknown origin as one printable line.
# -----------------------------------------------------------------------------


def plain(text: str) -> str:
    r"""Return a text without what a terminal or a log should not get.

    Line breaks are blanks; controls, changes of the writing direction and halves of characters are
    written as escapes, ``\x1b``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_plain_letter, text))


def _plain_letter(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape", "replace").decode("ascii")


LONGEST_LINE = 300
"""Letters of a line that is made of foreign text."""
_LONGEST_QUOTE = 60
"""Letters of one word of it."""


def printable(text: object, longest: int = LONGEST_LINE) -> str:
    r"""Return foreign text as it may stand in a log or a terminal.

    One short line: line breaks are blanks, and what no terminal should get (controls, changes of
    the writing direction, halves of characters) is written as an escape, ``\x1b``.

    Parameters
    ----------
    text : object
        A text; of anything else its Python notation, of which only the beginning is looked at.
    longest : int
        Letters at most; what is left out is marked by ``…``.
    """
    whole = text if isinstance(text, str) else _notation(text)
    # Escapes are longer than what they stand for: no more than this can be shown.
    line = plain(whole[: longest + 1]).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def quoted(text: object) -> str:
    """Return one word of foreign text, shortened; a text in quotation marks."""
    word = printable(text, _LONGEST_QUOTE)
    return f"'{word}'" if isinstance(text, str) else word


def _notation(value: object) -> str:
    try:
        return _SHORT.repr(value)
    # Whatever a value's own notation raises must not end a run.
    except Exception:
        return f"<{type(value).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_LINE


_LONGEST_MESSAGE = 2000
"""Letters of a message at most; ours are shorter, and what they quote is short already."""

_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PlainFormatter(logging.Formatter):
    """Formats as `logging.Formatter` does, after the message was made printable.

    What a device, a SuperLink or an app says reaches a message in many ways, in the text of an
    exception for example; whatever way that is, it steers no terminal and forges no line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the message without control characters, cut to a bearable length."""
        record.message = printable(record.message, _LONGEST_MESSAGE)
        return super().formatMessage(record)

    def formatException(self, ei: _Error) -> str:  # noqa: N802
        """Return a traceback, each line of it printable."""
        lines = super().formatException(ei).split("\n")
        # A line is indented, which says what belongs to what.
        return "\n".join(
            line[: len(line) - len(line.lstrip(" "))] + printable(line, _LONGEST_MESSAGE)
            for line in lines
        )


def show_log(stream: TextIO, formatter: logging.Formatter, level: int = logging.INFO) -> None:
    """Write Raceme's log lines to a stream, and to nothing else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLogger("raceme")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


# -----------------------------------------------------------------------------
# Errors whose text tells the user what is wrong, and what to do instead.
# -----------------------------------------------------------------------------


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead.

    The command line prints the message without a traceback and exits with code 2.

    Parameters
    ----------
    message : str
        Quotes what was typed, or stands in a file; made one printable line.
    snippet : str
        Lines of ours to be copied, which come after it as they are.
    """

    def __init__(self, message: str, snippet: str = "") -> None:
        super().__init__(f"{plain(message)}\n{snippet}" if snippet else plain(message))


class _OneLine(logging.Filter):
    """Reduces what Flower logs about a UserError of a ServerApp to its message.

    Flower logs the traceback, and then an exit code with a link to its explanation. The run has
    failed for Flower all the same.
    """

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self._error = error
        self._is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown, which may be changed before."""
        if record.exc_info and record.exc_info[1] is self._error:
            record.msg, record.args = str(self._error), ()
            record.exc_info = record.exc_text = None
            self._is_told = True
        return not (self._is_told and str(record.msg).startswith("Exit Code: "))


@contextmanager
def shown_by_flower() -> Iterator[None]:
    """Let Flower's runtime show a UserError that leaves a ServerApp as one line."""
    try:
        yield
    except UserError as error:
        logger = logging.getLogger("flwr")
        # Only the last one can be what ends the ServerApp.
        logger.filters = [one for one in logger.filters if not isinstance(one, _OneLine)]
        logger.addFilter(_OneLine(error))
        raise


_MANY = 8
"""So many names are no longer read where an error is."""


def unknown_name(kind: str, name: str, valid: Iterable[str], listed_by: str = "") -> UserError:
    """Build the error for a name that does not exist, with the nearest valid one.

    Parameters
    ----------
    kind : str
        What the name stands for, e.g. ``"strategy"``.
    name : str
        The name as the user typed it.
    valid : Iterable[str]
        All the names that exist.
    listed_by : str
        The command that lists them, to be named in their place where they are many.
    """
    names = sorted(valid)
    nearest = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    name = name if len(name) <= 80 else f"{name[:80]}…"
    every = f" Valid: {', '.join(names)}."
    if len(names) > _MANY and (listed_by or hint):
        every = f" `{listed_by}` lists them all." if listed_by else ""
    return UserError(f"Unknown {kind} '{name}'.{hint}{every}")
