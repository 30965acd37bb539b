"""What a client says: typed, bounded and made printable here, before anything else sees it.

A device may be anyone's. What it states goes into logs, terminals, the store and pages, which it
must not steer (escape sequences, text that runs backwards, forged lines), fill (megabytes of text)
or upset (numbers whose sums overflow). Everything that takes words or numbers out of a reply does
it with the functions of this module; what a SuperLink tells a device goes through :func:`printable`
too.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raceme.config.plain import plain

if TYPE_CHECKING:
    from flwr.app import Message

LONGEST_LINE = 300
"""Letters of a line that is made of what somebody else says."""
_LONGEST_QUOTE = 60
"""Letters of one word of it."""
_LONGEST_NAME = 128
"""Letters of a name: of a client, of a metric."""
_LONGEST_UNIT = 32
_MOST_METRICS = 1000
_MOST_ELEMENTS = 10_000_000
"""Numbers of an array that the server keeps of each client: those of a sketch of its data."""
LARGEST = float.fromhex("0x1.fffffep+127")
"""Size of the largest number that a client may state: the largest float32. No measurement is
larger, and sums, means and squares of very many such numbers stay finite in float64."""


class StatementError(ValueError):
    """A client states what cannot be; the message says what, in one short printable line.

    Parameters
    ----------
    reason : str
        What; it may hold words of the client's own.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


def printable(text: object, longest: int = LONGEST_LINE) -> str:
    r"""Return what somebody else says as it may stand in a log or a terminal.

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
    """Return one word of what somebody else says, shortened; a text in quotation marks."""
    word = printable(text, _LONGEST_QUOTE)
    return f"'{word}'" if isinstance(text, str) else word


def error_line(reply: Message) -> str:
    """Return the first line of why a client could not do its work."""
    lines = (reply.error.reason or "")[: 10 * LONGEST_LINE].strip().splitlines()
    return (printable(lines[0]) if lines else "") or "no reason given"


def name_of(stated: object) -> str | None:
    """Return a name that a client states: 1 to 128 printable characters; None for all else."""
    if not isinstance(stated, str | int):
        return None
    name = stated if isinstance(stated, str) else printable(stated, 2 * _LONGEST_NAME)
    return name if name.isprintable() and 1 <= len(name) <= _LONGEST_NAME else None


def unit_of(stated: object) -> str | None:
    """Return the unit of an error that a client states; None if it states none.

    Raises
    ------
    StatementError
        It is no short printable text.
    """
    if stated is None:
        return None
    if not isinstance(stated, str) or len(stated) > _LONGEST_UNIT or not stated.isprintable():
        raise StatementError(f"its unit is {quoted(stated)}")
    return stated


def metrics_of(record: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers that a client states, by name; lists are left out.

    NaN and infinity are let through: a training that diverges has such losses.

    Raises
    ------
    StatementError
        They are too many or too large, or a name is no name.
    """
    if len(record) > _MOST_METRICS:
        raise StatementError(f"it states {len(record)} metrics: {_MOST_METRICS} at most")
    return {
        _metric_name(name): number_of(name, value)
        for name, value in record.items()
        if not isinstance(value, list)
    }


def number_of(name: str, stated: object) -> float:
    """Return a number that a client states under a name.

    Raises
    ------
    StatementError
        It is none, or finite and larger than `LARGEST`; or minus infinity, with which and its
        opposite no sum could be taken.
    """
    if not isinstance(stated, int | float):
        raise StatementError(f"a metric is no number: {quoted(name)}")
    # Compared before it is converted: a whole number may be too large for a float.
    if -LARGEST <= stated <= LARGEST or stated == math.inf:
        return float(stated)
    if isinstance(stated, float) and math.isnan(stated):
        return stated
    raise StatementError(f"a metric is too large: {quoted(name)}")


def array_of(
    numbers: Mapping[str, NDArray[Any]],
    name: str,
    shape: Sequence[int | None],
    low: float = -LARGEST,
    high: float = LARGEST,
    most: int = _MOST_ELEMENTS,
) -> NDArray[np.float64]:
    """Return an array of numbers that a client states under a name.

    Parameters
    ----------
    numbers : Mapping[str, NDArray]
        What it states; finite.
    name : str
        Which of them.
    shape : Sequence of int or None
        What it must look like; None for any length from 1 on.
    low, high : float
        Bounds of the numbers.
    most : int
        Elements at most.

    Raises
    ------
    StatementError
        There is none of the name, it has another shape or type, or a number is out of its bounds.
    """
    values = numbers.get(name)
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    if values is None or values.dtype.kind not in "fiu":
        raise StatementError(f"it must state '{name}', numbers of shape ({wanted})")
    fits = len(values.shape) == len(shape) and all(
        size >= 1 and wished in (None, size)
        for size, wished in zip(values.shape, shape, strict=True)
    )
    if not fits or values.size > most:
        raise StatementError(f"its '{name}' has shape {values.shape}, not ({wanted})")
    if not low <= float(values.min()) <= float(values.max()) <= high:
        raise StatementError(f"its '{name}' is not within {low:g} and {high:g}")
    return np.asarray(values, np.float64)


def _metric_name(name: str) -> str:
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise StatementError(f"a metric is called {quoted(name)}")
    return name


def _notation(value: object) -> str:
    try:
        return _SHORT.repr(value)
    # Whatever a value's own notation raises must not end a run.
    except Exception:
        return f"<{type(value).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_LINE
