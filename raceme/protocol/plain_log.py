"""Log lines in which nobody else's words can do harm: one printable line for each message."""

from __future__ import annotations

import logging
from types import TracebackType

from raceme.protocol.stated import printable

_LONGEST_MESSAGE = 2000
"""Letters of a message at most; ours are shorter, and what they quote is short already."""

_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PlainFormatter(logging.Formatter):
    """Formats as `logging.Formatter` does, after the message was made printable.

    What a device, a SuperLink or an app says reaches a message in many ways, in the text of an
    exception for example; whatever way that is, it steers no terminal and forges no line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a record."""
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
