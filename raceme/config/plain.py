"""Text of unknown origin as one printable line."""

from __future__ import annotations


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
