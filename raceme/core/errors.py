"""Errors that speak to the person who typed the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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


# -----------------------------------------------------------------------------
# Errors that speak to the person who typed the command.
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


_MANY = 60
"""So many names are no longer read where an error is."""


def unknown_name(kind: str, name: str, valid: Iterable[str], listed_by: str = "") -> UserError:
    """Build the error for a name that does not exist, with the nearest valid one.

    Parameters
    ----------
    kind : str
        What the name stands for, e.g. ``"strategy"``.
    name : str
        What the user wrote.
    valid : Iterable[str]
        All the names that exist.
    listed_by : str
        The command that lists them, to be named in their place where they are many.
    """
    names = sorted(valid)
    nearest = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    name = name if len(name) <= 80 else f"{name[:80]}…"
    if listed_by and len(names) > _MANY:
        every = f"`{listed_by}` lists all {len(names)}."
    else:
        every = f"Valid: {', '.join(names)}."
    return UserError(f"Unknown {kind} '{name}'.{hint} {every}")
