"""Text of unknown origin in a line."""

from __future__ import annotations

import pytest

from raceme.core.errors import UserError, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [("µ ok", "µ ok"), ("a\nb\x1b\x9b", "a b\\x1b\\x9b"), ("\u202e\ud800", "\\u202e\\ud800")],
)
def test_what_a_user_is_told_is_one_printable_line(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert str(UserError(text)) == shown
